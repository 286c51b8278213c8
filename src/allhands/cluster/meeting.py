"""How ranks that know only where rank 0 is learn the addresses of all, before MLX forms its group.

MLX's ring wants every rank's address and a free port in advance, waits half a minute for a late rank, takes the
first comer for its neighbour and lets no deadline interrupt it. So rank 0 first calls the roll here: the others
say who they are, from which address they came and on which port they will listen, and all get the whole list.

Rank 0 and every caller prove to each other, by :mod:`allhands.callers`, that they know what the ranks of a job have in
common, so strangers (port scanners, health checks, another job) are told nothing and stop nothing. That keeps mistakes
out, not an attacker who knows the job's variables; ``ALLHANDS_MEETING_KEY`` on every rank adds a secret.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from allhands.callers import (
    CALLER,
    LISTENER,
    MEETING_KEY,
    Call,
    Caller,
    Callers,
    Conversation,
    Unproved,
    key_for,
    listen_at,
)
from allhands.cluster.place import LOOPBACK, MeetingPoint
from allhands.errors import DistributedError
from allhands.formatting import format_duration
from allhands.strict_json import is_integer, read_object

_VERSION = 2
_MOST_BYTES = 4096  # of what a guest may say
_MOST_LIST_BYTES = 1 << 22
_MOST_STRANGERS = 1000  # addresses of others that are remembered
_MOST_RANKS = 1 << 20
_MOST_LETTERS = 500  # of rank 0's reason, as a guest shows it
_REACH_S = 5.0
_FAREWELL_S = 5.0
_TICK_S = 0.2
_EVERYWHERE = ""
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


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
    if ":" in point.host:
        raise DistributedError(
            f"rank 0 is named by the IPv6 address {point.host}, and MLX's groups take IPv4 addresses only",
            hint="name rank 0's computer by its name or its IPv4 address (MASTER_ADDR)",
        )
    key = key_for(f"meeting of {point.job}", os.environ)
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

    @classmethod
    def read(cls, words: bytes) -> _Hello | None:
        """What a caller has said of itself; ``None`` if that is not what a rank says."""
        said = read_object(words, most_depth=1)
        if said is None or not is_integer(said.get("version"), 1, 1 << 30):
            return None
        if said["version"] != _VERSION:
            return cls(said["version"], -1, -1, "", 0, "")  # its other words may mean something else
        sound = (
            is_integer(said.get("size"), 1, _MOST_RANKS)
            and is_integer(said.get("rank"), 0, said["size"] - 1)
            and is_integer(said.get("port"), 1, 65535)
            and _is_address(said.get("address"))
            and isinstance(said.get("nonce"), str)
        )
        return cls(**{name: said[name] for name in cls.__dataclass_fields__}) if sound else None


def _is_address(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(ipaddress.IPv4Address(text))
    except ValueError:
        return False


def _are_peers(found: object, size: int) -> bool:
    """Whether these are the addresses of ``size`` ranks, each with its port."""
    if not isinstance(found, list) or len(found) != size:
        return False
    for one in found:
        address, _, port = one.rpartition(":") if isinstance(one, str) else ("", "", "")
        if not _is_address(address) or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
            return False
    return True


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


# --- rank 0 ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Visitor:
    """A rank that has proved itself."""

    caller: Caller
    hello: _Hello
    conversation: Conversation

    def say(self, body: Mapping[str, object], deadline: float) -> None:
        with suppress(OSError):  # one who has left is missed soon enough
            self.caller.say(self.conversation.sealed(LISTENER, json.dumps(body).encode()), deadline)


class _Bad(Exception):
    """The ranks do not belong together: everybody is told, and gives up."""


class _RollCall:
    """Rank 0's part: listen, write down who comes, and when all are there tell them who is where."""

    def __init__(self, point: MeetingPoint, hello: _Hello, key: bytes, waiting: _Waiting) -> None:
        self._point = point
        self._me = hello
        self._key = key
        self._waiting = waiting
        self._present: dict[int, _Visitor] = {}
        self._unfit: list[_Visitor] = []
        self._strangers = Counter[str]()  # by address, those who have spoken as a rank does

    def run(self) -> tuple[str, ...]:
        """Raises DistributedError."""
        with Callers([self._listener()], _MOST_BYTES) as self._callers:
            try:
                return self._wait()
            except _Bad as problem:
                self._say_all({"kind": "error", "message": str(problem)})
                raise DistributedError(str(problem), where="rank 0", hint=_HINT) from None

    def _listener(self) -> socket.socket:
        """On the first port that is free; what is in the way may be another rank 0 of this very job."""
        refused, address = "", self._own_address()
        for port in self._point.ports:
            try:
                # Not SO_REUSEPORT: another job of the same user would share the port and take half of the guests.
                return listen_at(socket.AF_INET, (address, port), (socket.SO_REUSEADDR,))
            except OSError as error:
                refused = f"{port}: {error.strerror}"
                double = _Guest(self._point, self._me, self._key, self._waiting)
                double.ask_double(address or LOOPBACK, port)
        ports = f"{self._point.ports[0]} to {self._point.ports[-1]}"
        raise DistributedError(
            f"rank 0 can listen on none of the ports {ports} ({refused})",
            hint="end what uses them (ss -ltnp), or choose others with MASTER_PORT",
        )

    def _own_address(self) -> str:
        """The address that the launcher named; all of this computer's, and why, where it is none that can be had."""
        host = self._point.host
        if self._point.is_local:
            return LOOPBACK
        try:
            address = self._waiting.patience.resolve(host)
        except OSError as error:
            reason = f"the name {host} has no address here ({error.strerror or error})"
        else:
            try:
                with socket.socket() as probe:
                    probe.bind((address, 0))
            except OSError as error:
                named = host if host == address else f"{host} is {address}, which"
                reason = f"{named} is no address of this computer ({error.strerror})"
            else:
                if not _is_loopback(address) or host in _LOOPBACK_NAMES or host == address:
                    return address
                reason = f"{host} is {address} here, which no other computer can reach"
        self._waiting.patience.tell(f"rank 0 listens on all addresses of this computer: {reason}")
        return _EVERYWHERE

    def _wait(self) -> tuple[str, ...]:
        while len(self._present) < self._me.size - 1:
            if self._waiting.left_s <= 0:
                limit = format_duration(self._waiting.patience.total_s)
                raise _Bad(f"{self._missing()} did not come within {limit}{self._who_else()}")
            self._waiting.tell(f"waiting for {self._missing()}")
            for caller, line in self._callers.wait(_TICK_S):
                self._hear(caller, line)
        peers = self._peers()
        self._say_all({"kind": "list", "peers": peers})
        self._farewell()
        return peers

    def _hear(self, caller: Caller, line: bytes | None) -> None:
        """Greet a rank, see another one off, or drop a stranger.

        Raises:
            _Bad: a rank of this job does not fit.
        """
        if line is None:
            self._present = {rank: one for rank, one in self._present.items() if one.caller is not caller}
            return
        conversation = caller.conversation(self._key)
        words = conversation.opened(CALLER, line)
        hello = None if words is None else _Hello.read(words)
        if hello is None:
            if len(self._strangers) < _MOST_STRANGERS:
                self._strangers[caller.there] += 1
            self._callers.drop(caller)
        else:
            self._greet(_Visitor(caller, hello, conversation))

    def _greet(self, visitor: _Visitor) -> None:
        """Write down who has come.

        Raises:
            _Bad: one who does not fit.
        """
        caller, hello = visitor.caller, visitor.hello
        self._unfit = [visitor]
        if hello.version != _VERSION:
            raise _Bad(
                f"the rank at {caller.there} has another version of allhands "
                f"(its meeting is of version {hello.version}, rank 0's of {_VERSION})"
            )
        if hello.size != self._me.size:
            raise _Bad(
                f"rank {hello.rank} at {caller.there} was started for {hello.size} ranks, rank 0 for {self._me.size}"
            )
        before = self._present.get(hello.rank)
        if hello.rank == 0 or (before is not None and before.hello.nonce != hello.nonce):
            place = caller.here if before is None else before.caller.there
            raise _Bad(f"there are two ranks {hello.rank}: at {place} and at {caller.there}")
        self._unfit = []
        if before is not None:
            self._callers.drop(before.caller)
        self._present[hello.rank] = visitor
        caller.proved = True
        visitor.say({"kind": "welcome"}, time.monotonic() + _REACH_S)

    def _missing(self) -> str:
        absent = [rank for rank in range(1, self._me.size) if rank not in self._present]
        shown = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        return f"rank{'s' * (len(absent) > 1)} {shown} of {self._me.size}"

    def _who_else(self) -> str:
        """Ranks of another start, or without the key, or strangers."""
        if not self._strangers:
            return ""
        shown = ", ".join(address for address, _ in self._strangers.most_common(3))
        return f"; who called from {shown} did not prove to be of this job: compare {MEETING_KEY} and the port there"

    def _peers(self) -> tuple[str, ...]:
        """Where everybody is. Ranks beside rank 0 may have come over the loopback: other computers need its address."""
        others = [self._present[rank] for rank in range(1, self._me.size)]
        seen = [visitor.caller.here for visitor in others if not _is_loopback(visitor.hello.address)]
        own = seen[-1] if seen else LOOPBACK
        addresses = [own if _is_loopback(visitor.hello.address) else visitor.hello.address for visitor in others]
        ports = [self._me.port, *(visitor.hello.port for visitor in others)]
        return tuple(f"{address}:{port}" for address, port in zip((own, *addresses), ports, strict=True))

    def _say_all(self, body: Mapping[str, object]) -> None:
        deadline = time.monotonic() + _REACH_S
        for visitor in [*self._present.values(), *self._unfit]:
            visitor.say(body, deadline)

    def _farewell(self) -> None:
        """Let the others hang up first: then the port is free at once, and not kept for a minute."""
        staying = [visitor.caller for visitor in self._present.values()]
        for caller in self._callers.all():
            if not caller.proved:
                self._callers.drop(caller)
        deadline = time.monotonic() + _FAREWELL_S
        while staying and time.monotonic() < deadline:
            gone = [caller for caller, line in self._callers.wait(_TICK_S) if line is None]
            staying = [caller for caller in staying if caller not in gone]


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

    def ask_double(self, address: str, port: int) -> None:
        """See whether whoever listens on this port of our own computer is rank 0 of the same job.

        Raises:
            DistributedError: it is; it ends, too.
        """
        with suppress(_NotYet):
            self._knock(address, port)

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
        deadline = time.monotonic() + _REACH_S
        try:
            call = Call((address, port), _REACH_S)
        except OSError as error:
            raise _NotYet(f"{address}:{port}: {error.strerror or 'no answer'}") from None
        with call:
            try:
                conversation = call.begin(self._key, deadline)
                hello = json.dumps(asdict(replace(self._me, address=call.own_address))).encode()
                call.say(conversation.sealed(CALLER, hello), deadline)
                self._heard(conversation, call.line(_MOST_BYTES, deadline), "welcome")
            except (OSError, Unproved):
                raise _NotYet(f"{address}:{port}: who listens there is not rank 0 of this job") from None
            try:
                until = time.monotonic() + max(0.0, self._waiting.left_s) + _REACH_S
                body = self._heard(conversation, call.line(_MOST_LIST_BYTES, until), "list")
            except (OSError, Unproved):
                late = self._waiting.left_s <= 0
                reason = "it waits for other ranks" if late else "it has ended before all had come"
                raise _NotYet(reason) from None
        return tuple(body["peers"])

    def _heard(self, conversation: Conversation, line: bytes, kind: str) -> dict[str, Any]:
        """What rank 0 says to this very call.

        Raises:
            Unproved: that is nothing, or not what it should be.
            DistributedError: it says that the ranks do not belong together.
        """
        words = conversation.opened(LISTENER, line)
        body = None if words is None else read_object(words, most_depth=2)
        if body is None:
            raise Unproved
        if body.get("kind") == "error" and isinstance(body.get("message"), str):
            message = "".join(letter for letter in body["message"][:_MOST_LETTERS] if letter.isprintable())
            raise DistributedError(message, where=f"rank {self._me.rank}", hint=_HINT)
        if body.get("kind") != kind or (kind == "list" and not _are_peers(body.get("peers"), self._me.size)):
            raise Unproved
        return body


def _most_telling(reasons: list[str]) -> str:
    """Of several ports: where somebody was is more than where nobody is."""
    return next((reason for reason in reasons if "refused" not in reason), reasons[0] if reasons else "no port to try")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
