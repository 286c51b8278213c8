"""What the computers of a sync say to each other: frames over pipes, TCP or TLS.

This module is sent to every host and runs there without allhands: standard library only, Python 3.9 or newer.

A frame is a length, a kind and a payload. Between two hosts the one that lacks blocks connects and says which; from
then on it only reads and the other one only writes, so no connection is ever used in both directions at once.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

JSON, BLOCK, BEAT = 1, 2, 3  # kinds of frames
MOST_CONTROL = 256 << 20  # bytes of a frame from the coordinator: a manifest of some hundred terabytes
MOST_PEER = 64 << 20  # of a frame from another host
CONNECT_S = 4.0
SILENCE_S = 8.0  # without a byte from a peer that sends a sign of life every second; for all of its proof
_HEAD = struct.Struct(">IB")
_PLACE = struct.Struct(">II")
_PIECE = 256 << 10
_PROOF_BYTES = 32
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which Python does not name


class Broken(Exception):
    """The other side has ended, is silent, or talks nonsense."""


class Channel:
    """Frames over anything that reads and writes bytes; any thread may send, one may receive.

    Args:
        read_into: fills a part of a buffer and returns how much; 0 at the end.
        write: takes a part of a buffer and returns how much.
        longest: bytes of a frame that is still listened to.
        close: ends the connection.

    Attributes:
        heard: ``time.monotonic`` of the last byte from the other side.
    """

    def __init__(
        self,
        read_into: Callable[[memoryview], int],
        write: Callable[[memoryview], int],
        longest: int,
        close: Callable[[], None],
    ) -> None:
        self._read_into, self._write = read_into, write
        self._longest = longest
        self._lock = threading.Lock()
        self.close = close
        self.heard = time.monotonic()

    def send(self, kind: int, *parts: bytes) -> None:
        """Send one frame.

        Raises:
            Broken: the other side is gone, or takes nothing any more.
        """
        with self._lock:
            try:
                for part in (_HEAD.pack(sum(map(len, parts)), kind), *parts):
                    view = memoryview(part)
                    while view:
                        view = view[self._write(view[:_PIECE]) :]
            except OSError as error:
                raise Broken(str(error)) from None

    def say(self, kind: str, **fields: Any) -> None:
        """Send a JSON frame.

        Raises:
            Broken: as :meth:`send`.
        """
        self.send(JSON, json.dumps({"kind": kind, **fields}).encode())

    def send_block(self, file: int, block: int, content: bytes) -> None:
        """Send a block.

        Raises:
            Broken: as :meth:`send`.
        """
        self.send(BLOCK, _PLACE.pack(file, block), content)

    def receive(self, longest: int | None = None) -> tuple[int, bytearray]:
        """Return the next frame, which may be no longer than ``longest``.

        Raises:
            Broken: there is none.
        """
        length, kind = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > (self._longest if longest is None else longest) or kind not in (JSON, BLOCK, BEAT):
            raise Broken("this is not a frame")
        return kind, self._exactly(length)

    def skip_to(self, mark: bytes) -> None:
        """Drop what comes before ``mark``, such as the words of a login shell.

        Raises:
            Broken: it does not come within a megabyte.
        """
        seen = bytearray()
        while not seen.endswith(mark):
            seen += self._exactly(1)
            if len(seen) > 1 << 20:
                raise Broken("the shell there prints too much")

    def _exactly(self, length: int) -> bytearray:
        content = bytearray(length)
        view = memoryview(content)
        while view:
            try:
                count = self._read_into(view)
            except OSError as error:
                raise Broken(str(error)) from None
            if not count:
                raise Broken("the connection has been closed")
            self.heard = time.monotonic()
            view = view[count:]
        return content


def of_json(content: bytes | bytearray) -> dict[str, Any]:
    """The content of a JSON frame.

    Raises:
        Broken: it is none.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise Broken("this is not JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise Broken("this frame has no kind")
    return found


def of_block(content: bytearray) -> tuple[int, int, memoryview]:
    """File, block and content of a block's frame.

    Raises:
        Broken: it is none.
    """
    if len(content) < _PLACE.size:
        raise Broken("this is not a block")
    file, block = _PLACE.unpack_from(content)
    return file, block, memoryview(content)[_PLACE.size :]


def over_pipes(reader: int, writer: int) -> Channel:
    """A channel over two descriptors."""

    def close() -> None:
        os.close(writer)

    return Channel(lambda view: os.readv(reader, [view]), lambda view: os.write(writer, view), MOST_CONTROL, close)


def _over_socket(connection: socket.socket) -> Channel:
    return Channel(connection.recv_into, connection.send, MOST_PEER, connection.close)


def _in_a_hurry(connection: socket.socket) -> Channel:
    """A stranger's, who has so much time for all that it says, however slowly it says it."""
    deadline = time.monotonic() + SILENCE_S

    def read_into(view: memoryview) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OSError(errno.ETIMEDOUT, "it is too slow")
        connection.settimeout(left)
        return connection.recv_into(view)

    return Channel(read_into, connection.send, _PROOF_BYTES, connection.close)


class Security:
    """How two hosts of one run know each other, and whether others can read what they send.

    ``tls``: both show the run's own certificate, which came to them over ssh. ``tcp``: both prove that they know the
    run's secret, and what follows is in clear. In both cases every block is checked against its hash.

    Args:
        transport: ``"tls"`` or ``"tcp"``.
        secret: of the run, for ``tcp``.
        certificate: with its key, as PEM, for ``tls``.
    """

    def __init__(self, transport: str, secret: str, certificate: str) -> None:
        self._secret = secret.encode()
        self._contexts: tuple[ssl.SSLContext, ...] = ()
        if transport == "tls":
            self._contexts = _contexts(certificate)

    def accept(self, connection: socket.socket) -> Channel:
        """Return the channel to whoever has connected.

        Raises:
            Broken: it is not a host of this run.
        """
        connection.settimeout(SILENCE_S)
        try:
            if self._contexts:
                connection.getpeername()  # of one that has left already a socket would stay
                return _over_socket(self._contexts[0].wrap_socket(connection, server_side=True))
            return self._prove(connection, called=True)
        except (OSError, ValueError, Broken) as error:
            connection.close()
            raise Broken(str(error)) from None

    def connect(self, addresses: Sequence[tuple[str, int]]) -> Channel:
        """Return a channel to the first of ``addresses`` at which a host of this run answers.

        Raises:
            Broken: none does.
        """
        reasons: list[str] = []
        for address in addresses:
            try:
                return self._connect((address[0], address[1]))
            except (OSError, ValueError, Broken) as error:
                reasons.append(f"{address[0]}: {error}")
        raise Broken("; ".join(reasons) or "it has no address")

    def _connect(self, address: tuple[str, int]) -> Channel:
        connection = socket.create_connection(address, CONNECT_S)
        try:
            if self._contexts:
                wrapped = self._contexts[1].wrap_socket(connection)
                wrapped.settimeout(SILENCE_S)
                return _over_socket(wrapped)
            connection.settimeout(SILENCE_S)
            return self._prove(connection, called=False)
        except BaseException:
            connection.close()
            raise

    def _prove(self, connection: socket.socket, *, called: bool) -> Channel:
        """Both sides send a number that nobody can foresee, and sign both with their role: who has called first."""
        channel, mine = _in_a_hurry(connection), secrets.token_bytes(_PROOF_BYTES)
        own, other = (b"parent", b"child") if called else (b"child", b"parent")
        channel.send(JSON, mine)
        theirs = _proof(channel)
        proof = self._signed(own, mine, theirs)
        if not called:
            channel.send(JSON, proof)
        if theirs == mine or not hmac.compare_digest(_proof(channel), self._signed(other, theirs, mine)):
            raise Broken("it does not know this run's secret")
        if called:
            channel.send(JSON, proof)
        connection.settimeout(SILENCE_S)
        return _over_socket(connection)

    def _signed(self, role: bytes, own: bytes, other: bytes) -> bytes:
        return hmac.new(self._secret, role + b":" + own + other, hashlib.sha256).digest()


def _proof(channel: Channel) -> bytes:
    """A stranger's frame: nothing large is made room for."""
    _, content = channel.receive(_PROOF_BYTES)
    if len(content) != _PROOF_BYTES:
        raise Broken("this is not a proof")
    return bytes(content)


def _contexts(certificate: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For who is connected to and for who connects; both show the certificate and accept no other."""
    own = tempfile.mkdtemp(prefix="allhands-sync-")  # the library reads keys from files only
    try:
        path = os.path.join(own, "key.pem")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(certificate)
        server, client = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        for context in (server, client):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_verify_locations(cadata=certificate)
            context.load_cert_chain(path)
            # The certificate is of this run; a clock that is wrong must not stop it.
            context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return server, client
