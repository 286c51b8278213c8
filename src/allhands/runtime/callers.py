"""Conversations over TCP in which both ends prove that they know a key.

Anybody may connect to such a port: the listener serves many callers at once, and each has a
deadline for its proof. The listener sends a new random number, and the caller sends one, too. Every
further line has an HMAC over both numbers, the sender's role, and the words; the caller sends the
first. So a recorded line is worthless at another time, in the other direction, and to another
listener, and a stranger learns only a random number. A line with a wrong HMAC is not parsed.

The key proves who has sent a line. It hides nothing: lines are not encrypted.

The text of this module is also sent to computers without allhands. So it uses only the standard
library of Python 3.9, and only ASCII.
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

MEETING_KEY = "ALLHANDS_MEETING_KEY"  # a secret that a person gives to all ranks of a job
RING_KEY = "ALLHANDS_RING_KEY"  # a secret that the supervisor makes for the ranks of one start
LISTENER, CALLER = b"listener", b"caller"  # the roles
_NUMBER_BYTES = 32
_NUMBER = re.compile(rb"[0-9a-f]{64}")
_LETTERS = b"0123456789abcdef"
_NUMBER_LINE = 2 * _NUMBER_BYTES + 1
_MAC = 64  # letters
_TALK_S = 10.0
_MOST_UNPROVED = (
    128  # callers without proof; a stranger's connections must not use up our file descriptors
)
_AT_ONCE = 64  # new connections taken before connected callers are heard again
_BACKLOG = 1024
_CHUNK = 1 << 16
_FULL_S = 0.05  # pause before another try if the system has no room for a connection
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def key_for(purpose: str, environ: Mapping[str, str]) -> bytes:
    """Return the key for one purpose, made of the secrets in the environment, if there are any."""
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
    """The key of a conversation, and the numbers that its two ends have sent.

    Attributes:
        key: the key that both ends must know.
        listener: the number of the listener.
        caller: the number of the caller.
    """

    key: bytes
    listener: bytes
    caller: bytes

    def sealed(self, role: bytes, words: bytes) -> bytes:
        """Return the line with which the end of this ``role`` sends ``words``, which have no line
        end.
        """
        return self._mac(role, words) + b" " + words + b"\n"

    def opened(self, role: bytes, line: bytes) -> bytes | None:
        """Return the words of a line; ``None`` if the end of this ``role`` has not sent them in
        this conversation.
        """
        words = line[_MAC + 1 :].removesuffix(b"\n")
        return (
            words if hmac.compare_digest(line[: _MAC + 1], self._mac(role, words) + b" ") else None
        )

    def _mac(self, role: bytes, words: bytes) -> bytes:
        message = b"\n".join((role, self.listener, self.caller, words))
        return hmac.new(self.key, message, "sha256").hexdigest().encode()


# --- the listener ---------------------------------------------------------------------------------


def listen_at(family: int, address: tuple[Any, ...], options: Sequence[int]) -> socket.socket:
    """Return a socket that listens at ``address`` alone.

    Args:
        options: options of sockets that are set, such as ``SO_REUSEADDR``.

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
    """A connection that another program has made to this listener.

    Attributes:
        there: the caller's address.
        here: our address, as the caller knows it.
        until: the deadline for the caller's proof (``time.monotonic``).
        ours: the number that we have sent.
        theirs: the caller's number; empty until it has come.
        proved: True if the caller has proved the key. Our user sets it; the caller may then stay
            without a deadline.
        asked: True if the caller may send one more line after its proof. Our user sets it.
        said: bytes of the caller's next line so far.
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
        """Return the handshake with which its lines are checked against ``key``."""
        return Handshake(key, self.ours, self.theirs)

    def say(self, line: bytes, deadline: float) -> None:
        """Send a line before ``deadline`` (``time.monotonic``).

        Raises:
            OSError: the caller has left, or does not take the line in time.
        """
        self.connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self.connection.sendall(line)
        finally:
            self.connection.setblocking(False)


class Callers:
    """Listening sockets and their callers; a context manager that closes all of them.

    Args:
        servers: listening sockets, see :func:`listen_at`.
        most_bytes: largest line that a caller may send.
        talk_s: seconds that a caller has for its proof, even if it sends byte by byte.
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
        """Return all connected callers, in the order of connection."""
        return list(self._callers.values())

    def wait(self, timeout_s: float) -> list[tuple[Caller, bytes | None]]:
        """Wait up to ``timeout_s`` for lines of callers, and return them.

        A caller may send one line, its proof. ``None`` in place of a line: a caller that had proved
        the key has left, or has sent more than it may, and was dropped. Callers without proof are
        dropped silently if they send too much, are too late, or are too many.
        """
        found: list[tuple[Caller, bytes | None]] = []
        ready = [
            cast(socket.socket, key.fileobj)
            for key, _ in self._selector.select(max(0.0, timeout_s))
        ]
        # Lines and ends before new connections: a caller that comes again has left before.
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
        """Stop listening; connected callers stay."""
        for server in self._servers:
            self._selector.unregister(server)
            server.close()
        self._servers = ()

    def drop(self, caller: Caller) -> None:
        """Close the connection of ``caller``."""
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
                continue  # this caller has left already
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
        """Return ``(line,)`` if the caller has sent a whole line, ``(None,)`` if it had proved the
        key and was dropped, else ``None``.
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
        """Take the caller's number if it is whole; return True if it is. Drop a caller with a wrong
        number.
        """
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
        """Drop callers without proof that are late or too many.

        If there are too many, the address with most of them loses callers, first those without a
        number.
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
        """Drop callers without proof, because there is no file descriptor left."""
        unproved = [caller for caller in self._callers.values() if not caller.proved]
        for caller in [one for one in unproved if not one.theirs] or unproved:
            self.drop(caller)
        time.sleep(_FULL_S)


# --- the caller -----------------------------------------------------------------------------------


class Unproved(Exception):
    """The other end does not know the key."""


class Call:
    """A connection to a listener; a context manager that closes it.

    Args:
        address: the listener's host and port.
        timeout_s: seconds to connect.

    Raises:
        OSError: nobody answers there.
    """

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self._connection = socket.create_connection(address, timeout=max(0.001, timeout_s))
        self._rest = b""

    @property
    def own_address(self) -> str:
        """Our own address in this connection."""
        return str(self._connection.getsockname()[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def begin(self, key: bytes, deadline: float) -> Handshake:
        """Exchange numbers.

        Raises:
            Unproved: the other end sends no number.
            OSError: it has left, or sends nothing before ``deadline`` (``time.monotonic``).
        """
        # Our number goes first. Another program may wait for input, and its answer shows then that
        # it is no listener of ours.
        own = new_number()
        self.say(own + b"\n", deadline)
        line = self.line(_NUMBER_LINE, deadline)
        if not _NUMBER.fullmatch(line) or line == own:  # the latter is an echo
            raise Unproved
        return Handshake(key, line, own)

    def say(self, line: bytes, deadline: float) -> None:
        """Send a line before ``deadline`` (``time.monotonic``).

        Raises:
            OSError: the other end has left, or does not take the line in time.
        """
        self._connection.settimeout(max(0.001, deadline - time.monotonic()))
        self._connection.sendall(line)

    def line(self, most_bytes: int, deadline: float) -> bytes:
        """Return the next line without its end; empty if the other end has left, or if the line has
        ``most_bytes`` or more.

        Raises:
            OSError: the whole line has not come before ``deadline``.
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
