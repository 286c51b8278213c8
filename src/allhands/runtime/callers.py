"""Ports that anybody may call: many callers at once, each with a deadline, believed once it has
proved a key.

Who is called sends a new random number first, and gets one. Everything else is a line with an HMAC
over both numbers, the role of who says it, and the words; who has called says the first. So what
was recorded is worthless at any other time, in the other direction, and to any other end; a
stranger learns a random number at most. Nothing is parsed whose HMAC is wrong.

The key proves who has spoken. It hides nothing: the words are in clear.

The text of this module is also sent to computers that lack allhands: the standard library of Python
3.9 and nothing else, in ASCII.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import re
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from typing import Self

MEETING_KEY = "ALLHANDS_MEETING_KEY"  # a secret of the person's, for all ranks of a job
RING_KEY = "ALLHANDS_RING_KEY"  # a secret of one start, which its supervisor has made for its ranks
LISTENER, CALLER = b"listener", b"caller"  # the roles
_NUMBER_BYTES = 32
_NUMBER = re.compile(rb"[0-9a-f]{64}")
_LETTERS = b"0123456789abcdef"
_NUMBER_LINE = 2 * _NUMBER_BYTES + 1
_MAC = 64  # letters
_TALK_S = 10.0
_MOST_UNPROVED = (
    128  # callers that have not; a stranger's thousand connections must not use up our descriptors
)
_AT_ONCE = 64  # calls taken before those who are there are heard again
_BACKLOG = 1024
_CHUNK = 1 << 16
_FULL_S = 0.05  # before another try where the system has no room for a connection
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def key_for(purpose: str, environ: Mapping[str, str]) -> bytes:
    """Return the key for one purpose, of the secrets that the environment holds; they may be none."""
    parts = [purpose, *(environ.get(name, "") for name in (MEETING_KEY, RING_KEY))]
    encoded = [
        part.encode("utf-8", "surrogateescape") for part in parts
    ]  # an environment may hold any bytes
    return hashlib.sha256(b"".join(b"%d:%s" % (len(part), part) for part in encoded)).digest()


def new_number() -> bytes:
    """Return a number that nobody can foresee, in hexadecimal letters."""
    return secrets.token_hex(_NUMBER_BYTES).encode()


@dataclass(frozen=True)
class Handshake:
    """The key and the numbers that two ends share once each has sent its number.

    Attributes:
        key: both know it.
        listener: the number of the end that was called.
        caller: the number of the end that has called.
    """

    key: bytes
    listener: bytes
    caller: bytes

    def sealed(self, role: bytes, words: bytes) -> bytes:
        """``words``, without a line's end, as the line that the end of this ``role`` sends."""
        return self._mac(role, words) + b" " + words + b"\n"

    def opened(self, role: bytes, line: bytes) -> bytes | None:
        """Return the words of a line; ``None`` if the other end of that ``role`` has not said them
        in this conversation.
        """
        words = line[_MAC + 1 :].removesuffix(b"\n")
        return (
            words if hmac.compare_digest(line[: _MAC + 1], self._mac(role, words) + b" ") else None
        )

    def _mac(self, role: bytes, words: bytes) -> bytes:
        message = b"\n".join((role, self.listener, self.caller, words))
        return hmac.new(self.key, message, "sha256").hexdigest().encode()


# --- who is called --------------------------------------------------------------------------------


def listen_at(family: int, address: tuple[Any, ...], options: Sequence[int]) -> socket.socket:
    """Return a socket that listens there and nowhere else; ``options`` of sockets are set.

    Raises:
        OSError: the port is taken, or the address is none of this computer.
        OverflowError: there is no such port.
    """
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind(address)
        server.listen(_BACKLOG)
    except (OSError, OverflowError):
        server.close()
        raise
    return server


@dataclass(eq=False)
class Caller:
    """A connection that somebody has made to us.

    Attributes:
        there: the other end's address.
        here: our address, as the caller knows it.
        until: when it must have proved itself.
        ours: the number that it has been sent.
        theirs: its own number, once that has come.
        proved: whether it has; to be set: then it may stay as long as it likes.
        asked: whether it may say a further line, although it is believed; to be set.
    """

    connection: socket.socket
    there: str
    here: str
    until: float
    ours: bytes = field(default_factory=new_number)
    theirs: bytes = b""
    proved: bool = False
    asked: bool = False
    said: bytearray = field(default_factory=bytearray)

    def conversation(self, key: bytes) -> Handshake:
        """Return our conversation with it, if it knows ``key``."""
        return Handshake(key, self.ours, self.theirs)

    def say(self, line: bytes, deadline: float) -> None:
        """Send a line, but not beyond ``deadline``.

        Raises:
            OSError: it has left, or takes nothing.
        """
        self.connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self.connection.sendall(line)
        finally:
            self.connection.setblocking(False)


class Callers:
    """Listening sockets and everybody who has called them; a context manager that closes all of
    them.

    Args:
        servers: that listen, see :func:`listen_at`.
        most_bytes: of a line that a caller may say.
        talk_s: for a caller to prove itself, however it spreads its bytes.
    """

    def __init__(
        self, servers: Sequence[socket.socket], most_bytes: int, talk_s: float = _TALK_S
    ) -> None:
        self._servers = servers
        self._talk_s = talk_s
        self._most_bytes = most_bytes + _NUMBER_LINE
        self._callers: dict[socket.socket, Caller] = {}
        self._selector = selectors.DefaultSelector()
        for server in servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in self.all():
            self.drop(caller)
        for server in self._servers:
            server.close()
        self._selector.close()

    def all(self) -> list[Caller]:
        """Return everybody who is connected, in the order of connection."""
        return list(self._callers.values())

    def wait(self, timeout_s: float) -> list[tuple[Caller, bytes | None]]:
        """Return the lines that callers have sent since the last call: each may send one, as its
        proof.

        ``None``: one that was believed has left, or says more than it may. It has been dropped, as
        strangers are that say too much, too little in time, or come in masses.
        """
        found: list[tuple[Caller, bytes | None]] = []
        ready = [
            cast(socket.socket, key.fileobj)
            for key, _ in self._selector.select(max(0.0, timeout_s))
        ]
        # Ends before arrivals: who comes again has left before.
        for connection in ready:
            caller = self._callers.get(connection)
            if caller is not None and (heard := self._hear(caller)):
                found.append((caller, heard[0]))
        for server in self._servers:
            if server in ready:
                self._let_in(server)
        self._turn_out()
        return found

    def let_in_no_more(self) -> None:
        """Listen no longer; who is connected stays."""
        for server in self._servers:
            self._selector.unregister(server)
            server.close()
        self._servers = ()

    def drop(self, caller: Caller) -> None:
        """Hang up."""
        if self._callers.pop(caller.connection, None) is not None:
            self._selector.unregister(caller.connection)
            caller.connection.close()

    def _let_in(self, server: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._make_room()
                    return
                continue  # this one has left already
            connection.setblocking(False)
            until = time.monotonic() + self._talk_s
            try:
                caller = Caller(
                    connection, str(address[0]), str(connection.getsockname()[0]), until
                )
                connection.send(caller.ours + b"\n")  # nothing has been sent before: there is room
            except OSError:
                connection.close()
                continue
            self._callers[connection] = caller
            self._selector.register(connection, selectors.EVENT_READ)

    def _dropped(self, caller: Caller) -> tuple[None] | None:
        self.drop(caller)
        return (None,) if caller.proved else None

    def _hear(self, caller: Caller) -> tuple[bytes | None] | None:
        """The caller's line, once it is whole; no line where it was believed and is none of us any
        more.
        """
        try:
            heard = caller.connection.recv(self._most_bytes)
        except BlockingIOError:
            return None
        except OSError:
            heard = b""
        caller.said += heard
        if (caller.proved and not caller.asked) or not heard or len(caller.said) > self._most_bytes:
            return self._dropped(caller)
        if not caller.theirs and not self._take_number(caller):
            return None
        if b"\n" not in caller.said:
            return None
        line, _, more = bytes(caller.said).partition(b"\n")
        if more:
            return self._dropped(caller)
        caller.said.clear()
        return (line,)

    def _take_number(self, caller: Caller) -> bool:
        """Note the caller's number, once it is whole; whether it has been."""
        number, end = (
            bytes(caller.said[: _NUMBER_LINE - 1]),
            bytes(caller.said[_NUMBER_LINE - 1 : _NUMBER_LINE]),
        )
        if number.strip(_LETTERS) or end not in (b"", b"\n") or number == caller.ours:
            self.drop(caller)
            return False
        if not end:
            return False
        del caller.said[:_NUMBER_LINE]
        caller.theirs = number
        return True

    def _turn_out(self) -> None:
        """Drop who is late, and of too many those without a number first, of the address that has
        most of them.
        """
        now = time.monotonic()
        unproved = [caller for caller in self._callers.values() if not caller.proved]
        for caller in [one for one in unproved if one.until < now]:
            unproved.remove(caller)
            self.drop(caller)
        while len(unproved) > _MOST_UNPROVED:
            (address, _), *_ = Counter(caller.there for caller in unproved).most_common(1)
            there = [caller for caller in unproved if caller.there == address]
            victim = next((caller for caller in there if not caller.theirs), there[0])
            unproved.remove(victim)
            self.drop(victim)

    def _make_room(self) -> None:
        """The process, or the system, has no descriptor left: strangers give theirs back."""
        unproved = [caller for caller in self._callers.values() if not caller.proved]
        for caller in [one for one in unproved if not one.theirs] or unproved:
            self.drop(caller)
        time.sleep(_FULL_S)


# --- who calls ------------------------------------------------------------------------------------


class Unproved(Exception):
    """The other end does not know the key."""


class Call:
    """Our end of a connection that we have made; a context manager that hangs up.

    Args:
        address: of the other end.
        timeout_s: to connect.

    Raises:
        OSError: nobody answers there.
    """

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self._connection = socket.create_connection(address, timeout=max(0.001, timeout_s))
        self._rest = b""

    @property
    def own_address(self) -> str:
        """Return our address on the way to the other end."""
        return str(self._connection.getsockname()[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def begin(self, key: bytes, deadline: float) -> Handshake:
        """Exchange numbers.

        Raises:
            Unproved: it sends no number.
            OSError: it has left, or says nothing before ``deadline`` (``time.monotonic``).
        """
        # Not only once the other end's has come: another program may wait to be spoken to, and
        # shows then what it is.
        own = new_number()
        self.say(own + b"\n", deadline)
        line = self.line(_NUMBER_LINE, deadline)
        if not _NUMBER.fullmatch(line) or line == own:  # which is an echo
            raise Unproved
        return Handshake(key, line, own)

    def say(self, line: bytes, deadline: float) -> None:
        """Send a line.

        Raises:
            OSError: the other end has left, or takes nothing.
        """
        self._connection.settimeout(max(0.001, deadline - time.monotonic()))
        self._connection.sendall(line)

    def line(self, most_bytes: int, deadline: float) -> bytes:
        """Return the next line without its end; empty if there is none any more, or it is too long.

        Raises:
            OSError: it is not there before ``deadline``, however slowly its bytes come.
        """
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer")
            if len(self._rest) >= most_bytes:
                return b""
            self._connection.settimeout(left)
            heard = self._connection.recv(min(most_bytes, _CHUNK))
            if not heard:
                return b""
            self._rest += heard
        line, _, self._rest = self._rest.partition(b"\n")
        return line if len(line) < most_bytes else b""
