"""How ranks that know only where rank 0 is learn the addresses of all, before MLX forms its group.

MLX's ring wants every rank's address and a free port in advance, waits half a minute for a late rank, takes the
first comer for its neighbour and lets no deadline interrupt it. So rank 0 first calls the roll here: the others
say who they are, from which address they came and on which port they will listen, and all get the whole list.

Messages are lines of JSON with an HMAC of what the ranks of a job have in common, so strangers (port scanners,
health checks, another job) are told nothing and stop nothing. It keeps mistakes out, not an attacker who knows the
job's variables; ``ALLHANDS_MEETING_KEY`` on every rank adds a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, cast

from allhands.cluster.place import LOOPBACK, MeetingPoint
from allhands.errors import DistributedError
from allhands.formatting import format_duration

_VERSION = 1
_SECRET = "ALLHANDS_MEETING_KEY"
_MOST_BYTES = 4096  # of what a guest may say
_MOST_LIST_BYTES = 1 << 22
_MOST_STRANGERS = 64
_STRANGER_S = 10.0
_REACH_S = 5.0
_FAREWELL_S = 5.0
_TICK_S = 0.2


def _silent(text: str) -> None:
    """For who wants to hear nothing."""


@dataclass(frozen=True)
class Patience:
    """How long the others, and the name server, may take.

    Attributes:
        total_s: seconds until it is given up.
        tell: is given a line about what is waited for, now and then.
        tell_every_s: how often.
        first_pause_s: before the second try; pauses double.
        longest_pause_s: up to this.
        resolve: the IPv4 address of a name; OSError: not known (yet).
    """

    total_s: float = 900.0
    tell: Callable[[str], None] = _silent
    tell_every_s: float = 15.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    resolve: Callable[[str], str] = socket.gethostbyname


def meet(point: MeetingPoint, rank: int, size: int, port: int, patience: Patience) -> tuple[str, ...]:
    """Return ``"ip:port"`` of every rank, the same list on all of them.

    The address is this computer's on the way to rank 0; ``port`` is where this rank will listen.

    Raises:
        DistributedError: not everybody came in time, a rank came twice, or one was started for another size.
    """
    secret = os.environ.get(_SECRET, "")
    key = hashlib.sha256(f"allhands meeting\n{point.job}\n{secret}".encode()).digest()
    hello = _Hello(_VERSION, rank, size, "", port, secrets.token_hex(16))
    waiting = _Waiting(patience)
    return _RollCall(point, hello, key, waiting).run() if rank == 0 else _Guest(point, hello, key, waiting).run()


@dataclass(frozen=True)
class _Hello:
    """What a rank says of itself: ``address`` is its own on the way to rank 0, ``nonce`` stands for the process."""

    version: int
    rank: int
    size: int
    address: str
    port: int
    nonce: str


class _Waiting:
    """A deadline, and a line about it now and then."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._begin = self._told = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._begin + self.patience.total_s - time.monotonic()

    def tell(self, what: str) -> None:
        now = time.monotonic()
        if now - self._told >= self.patience.tell_every_s:
            self._told = now
            self.patience.tell(f"{what} ({format_duration(now - self._begin)})")


# --- messages ----------------------------------------------------------------------------------------


def _sealed(key: bytes, body: Mapping[str, object]) -> bytes:
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"body": text, "mac": hmac.new(key, text.encode(), "sha256").hexdigest()}).encode() + b"\n"


def _opened(key: bytes, line: bytes) -> dict[str, Any] | None:
    """What a line says; ``None`` if it is not from this job."""
    with suppress(ValueError, TypeError, KeyError):
        message = json.loads(line)
        text, mac = message["body"], message["mac"]
        if hmac.compare_digest(hmac.new(key, text.encode(), "sha256").hexdigest().encode(), mac.encode()):
            body = json.loads(text)
            return cast(dict[str, Any], body) if isinstance(body, dict) else None
    return None


# --- rank 0 ------------------------------------------------------------------------------------------


@dataclass
class _Visitor:
    """A connection: a stranger's until it has said hello."""

    connection: socket.socket
    since: float = field(default_factory=time.monotonic)
    said: bytes = b""
    hello: _Hello | None = None

    @property
    def here(self) -> str:
        """Our address, as this visitor sees it."""
        return str(self.connection.getsockname()[0])

    @property
    def there(self) -> str:
        return str(self.connection.getpeername()[0])


class _Bad(Exception):
    """The ranks do not belong together: everybody is told, and gives up."""


class _RollCall:
    """Rank 0's part: listen, write down who comes, and when all are there tell them who is where."""

    def __init__(self, point: MeetingPoint, hello: _Hello, key: bytes, waiting: _Waiting) -> None:
        self._point = point
        self._me = hello
        self._key = key
        self._waiting = waiting
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._present: dict[int, _Visitor] = {}

    def run(self) -> tuple[str, ...]:
        """Raises DistributedError."""
        with selectors.DefaultSelector() as self._selector, self._listener() as self._server:
            self._selector.register(self._server, selectors.EVENT_READ)
            try:
                return self._wait()
            except _Bad as problem:
                self._say_all({"kind": "error", "message": str(problem)})
                raise DistributedError(str(problem), where="rank 0", hint=_HINT) from None
            finally:
                for visitor in self._visitors.values():
                    visitor.connection.close()

    def _listener(self) -> socket.socket:
        """On the first port that is free; what is in the way may be another rank 0 of this very job."""
        refused = ""
        for port in self._point.ports:
            server = socket.socket()
            # Not SO_REUSEPORT: another job of the same user would share the port and take half of the guests.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((LOOPBACK if self._point.is_local else "", port))
                server.listen(128)
            except OSError as error:
                server.close()
                refused = f"{port}: {error.strerror}"
                _Guest(self._point, self._me, self._key, self._waiting).ask_double(port)
                continue
            server.setblocking(False)
            return server
        ports = f"{self._point.ports[0]} to {self._point.ports[-1]}"
        raise DistributedError(
            f"rank 0 can listen on none of the ports {ports} ({refused})",
            hint="end what uses them (ss -ltnp), or choose others with MASTER_PORT",
        )

    def _wait(self) -> tuple[str, ...]:
        while len(self._present) < self._me.size - 1:
            if self._waiting.left_s <= 0:
                raise _Bad(f"{self._missing()} did not come within {format_duration(self._waiting.patience.total_s)}")
            self._waiting.tell(f"waiting for {self._missing()}")
            events = self._selector.select(_TICK_S)
            ready = [cast(socket.socket, key.fileobj) for key, _ in events]
            # Ends before arrivals: a rank that comes again has left before.
            for connection in ready:
                if connection is not self._server and connection in self._visitors:
                    self._hear(self._visitors[connection])
            if self._server in ready:
                self._let_in()
            self._turn_out_strangers()
        peers = self._peers()
        self._say_all({"kind": "list", "peers": peers})
        self._farewell()
        return peers

    def _let_in(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._visitors[connection] = _Visitor(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _turn_out_strangers(self) -> None:
        strangers = [visitor for visitor in self._visitors.values() if visitor.hello is None]
        too_many = len(strangers) - _MOST_STRANGERS
        for index, visitor in enumerate(strangers):
            if index < too_many or time.monotonic() - visitor.since > _STRANGER_S:
                self._drop(visitor)

    def _drop(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.connection]
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.hello is not None and self._present.get(visitor.hello.rank) is visitor:
            del self._present[visitor.hello.rank]

    def _hear(self, visitor: _Visitor) -> None:
        try:
            heard = visitor.connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        visitor.said += heard
        if not heard or visitor.hello is not None or len(visitor.said) > _MOST_BYTES:
            self._drop(visitor)
        elif b"\n" in visitor.said:
            body = _opened(self._key, visitor.said.partition(b"\n")[0])
            if body is None:
                self._drop(visitor)
            else:
                self._greet(visitor, body)

    def _greet(self, visitor: _Visitor, body: dict[str, Any]) -> None:
        """Write down who has come.

        Raises:
            _Bad: one who does not fit.
        """
        said: dict[str, Any] = {name: body.get(name) for name in _Hello.__dataclass_fields__}
        hello = visitor.hello = _Hello(**said)
        if hello.version != _VERSION:
            raise _Bad(
                f"the rank at {visitor.there} has another version of allhands "
                f"(its meeting is of version {hello.version}, rank 0's of {_VERSION})"
            )
        if hello.size != self._me.size:
            raise _Bad(
                f"rank {hello.rank} at {visitor.there} was started for {hello.size} ranks, rank 0 for {self._me.size}"
            )
        before = self._present.get(hello.rank)
        if hello.rank == 0 or (before is not None and before.hello and before.hello.nonce != hello.nonce):
            place = visitor.here if before is None else before.there
            raise _Bad(f"there are two ranks {hello.rank}: at {place} and at {visitor.there}")
        if before is not None:
            self._drop(before)
        self._present[hello.rank] = visitor
        self._say(visitor, {"kind": "welcome"})

    def _missing(self) -> str:
        absent = [rank for rank in range(1, self._me.size) if rank not in self._present]
        shown = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        return f"rank{'s' * (len(absent) > 1)} {shown} of {self._me.size}"

    def _peers(self) -> tuple[str, ...]:
        """Where everybody is. Ranks beside rank 0 may have come over the loopback: other computers need its address."""
        others = [
            (visitor, hello) for rank in range(1, self._me.size) if (hello := (visitor := self._present[rank]).hello)
        ]
        seen = [visitor.here for visitor, hello in others if not _is_loopback(hello.address)]
        own = seen[-1] if seen else LOOPBACK
        addresses = [own if _is_loopback(hello.address) else hello.address for _, hello in others]
        ports = [self._me.port, *(hello.port for _, hello in others)]
        return tuple(f"{address}:{port}" for address, port in zip((own, *addresses), ports, strict=True))

    def _say_all(self, body: Mapping[str, object]) -> None:
        for visitor in list(self._visitors.values()):
            if visitor.hello is not None:
                self._say(visitor, body)

    def _say(self, visitor: _Visitor, body: Mapping[str, object]) -> None:
        assert visitor.hello is not None
        with suppress(OSError):  # one who has left is missed soon enough
            visitor.connection.settimeout(_REACH_S)
            visitor.connection.sendall(_sealed(self._key, {**body, "nonce": visitor.hello.nonce}))
            visitor.connection.setblocking(False)

    def _farewell(self) -> None:
        """Let the others hang up first: then the port is free at once, and not kept for a minute."""
        for visitor in [one for one in self._visitors.values() if one.hello is None]:
            self._drop(visitor)
        deadline = time.monotonic() + _FAREWELL_S
        while self._visitors and time.monotonic() < deadline:
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is not self._server:
                    self._drop(self._visitors[cast(socket.socket, key.fileobj)])


# --- the other ranks ---------------------------------------------------------------------------------

_HINT = "look at the output of the ranks that are named; every rank must be of the same start of the same job"


class _NotYet(Exception):
    """Rank 0 cannot be reached, for now; it says why."""


class _Guest:
    """The part of every other rank: find rank 0, say hello, wait for the list."""

    def __init__(self, point: MeetingPoint, hello: _Hello, key: bytes, waiting: _Waiting) -> None:
        self._point = point
        self._me = hello
        self._key = key
        self._waiting = waiting

    def run(self) -> tuple[str, ...]:
        """Raises DistributedError."""
        patience, reason = self._waiting.patience, ""
        pause = patience.first_pause_s
        while self._waiting.left_s > 0:
            try:
                return self._visit()
            except _NotYet as why:
                reason = str(why)
            self._waiting.tell(f"waiting for rank 0 at {self._point.host}: {reason}")
            time.sleep(max(0.0, min(pause, self._waiting.left_s)))
            pause = min(2 * pause, patience.longest_pause_s)
        port = self._point.ports[0]
        raise DistributedError(
            f"no meeting with rank 0 at {self._point.host} within {format_duration(patience.total_s)}: {reason}",
            where=f"rank {self._me.rank}",
            hint=f"see whether rank 0 runs, and from here: nc -vz {self._point.host} {port}",
        )

    def ask_double(self, port: int) -> None:
        """See whether whoever listens on this port of our own computer is rank 0 of the same job.

        Raises:
            DistributedError: it is; it ends, too.
        """
        with suppress(_NotYet):
            self._knock(LOOPBACK, port)

    def _visit(self) -> tuple[str, ...]:
        """Try each port once.

        Raises:
            _NotYet: rank 0 is at none of them.
            DistributedError: rank 0 has said that it will not come to anything.
        """
        host, reasons = self._point.host, list[str]()
        try:
            address = self._waiting.patience.resolve(host)
        except OSError as error:
            raise _NotYet(f"the name {host} has no address yet ({error.strerror or error})") from None
        for port in self._point.ports:
            try:
                return self._knock(address, port)
            except _NotYet as why:
                reasons.append(str(why))
        raise _NotYet(_most_telling(reasons))

    def _knock(self, address: str, port: int) -> tuple[str, ...]:
        try:
            connection = socket.create_connection((address, port), timeout=_REACH_S)
        except OSError as error:
            raise _NotYet(f"{address}:{port}: {error.strerror or 'no answer'}") from None
        with connection, connection.makefile("rb") as lines:
            with suppress(OSError):
                hello = replace(self._me, address=connection.getsockname()[0])
                connection.sendall(_sealed(self._key, vars(hello)))
            if self._heard(lines) is None:
                raise _NotYet(f"{address}:{port}: who listens there is not rank 0 of this job")
            connection.settimeout(max(0.0, self._waiting.left_s) + _REACH_S)
            body = self._heard(lines)
        if body is None:
            late = self._waiting.left_s <= 0
            raise _NotYet("it waits for other ranks" if late else "it has ended before all had come")
        return tuple(body["peers"])

    def _heard(self, lines: BinaryIO) -> dict[str, Any] | None:
        """What rank 0 says to this process, and not to one before it; ``None``: nothing.

        Raises:
            DistributedError: it says that the ranks do not belong together.
        """
        body: dict[str, Any] | None = None
        with suppress(OSError):
            body = _opened(self._key, lines.readline(_MOST_LIST_BYTES))
        if body is None or body.get("nonce") != self._me.nonce:
            return None
        if body.get("kind") == "error":
            raise DistributedError(str(body["message"]), where=f"rank {self._me.rank}", hint=_HINT)
        return body


def _most_telling(reasons: list[str]) -> str:
    """Of several ports: where somebody was is more than where nobody is."""
    return next((reason for reason in reasons if "refused" not in reason), reasons[0] if reasons else "no port to try")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
