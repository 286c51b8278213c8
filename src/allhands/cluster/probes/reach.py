"""Connections between computers over TCP, by the addresses that ranks will use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from allhands.cluster.probes.tools import finished, program_environment

# Enough for many full-size packets, so that a path on which only small ones pass is found.
LARGE_BYTES = 1 << 18
LONG_MS = 2.0  # there and back; a longer time is measured again
_ROUNDS = 5
_MOST_LINE = 200
_MOST_STRANGERS = 32  # callers that have not proved that they know the secret
_CALLS = 1024  # in the queue of a listener
_PROVE_S = 10.0
_SEND_S = 30.0
_LARGE_TIMES = 3  # the time of an answer, for all that is large
_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)
_HUNG_UP = (errno.ECONNRESET, errno.EPIPE)
_UNREACHABLE = (
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
    errno.EADDRNOTAVAIL,
)
_FORBIDDEN = (errno.EPERM, errno.EACCES)


class Listeners:
    """Listeners on free ports of given addresses, which answer callers that know the secret until
    closed.

    A caller that does not prove it in time is disconnected; with too many of them, the oldest.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._strangers: list[socket.socket] = []  # oldest first
        self._lock = threading.Lock()

    def open(self, addresses: list[str]) -> dict[str, Any]:
        """Return the port of each address, and the errors of addresses that cannot be listened on."""
        ports: dict[str, int] = {}
        errors: dict[str, str] = {}
        for address in addresses:
            listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            try:
                listening.bind((address, 0))
                listening.listen(_CALLS)
            except OSError as error:
                errors[address] = str(error.strerror)
                listening.close()
                continue
            ports[address] = listening.getsockname()[1]
            self._sockets.append(listening)
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        return {"ports": ports, "errors": errors}

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
            one.close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listening.accept()
            except OSError:
                time.sleep(
                    0.02
                )  # the caller has left again, or there is no room for it: others may come
                continue
            with self._lock:
                self._strangers.append(connection)
                for oldest in self._strangers[:-_MOST_STRANGERS]:
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        knows = False
        with connection:
            with contextlib.suppress(OSError):
                knows = shake_hands(
                    connection, self._secret, time.monotonic() + _PROVE_S, calls=False
                )
            with self._lock:
                self._strangers.remove(connection)
            with contextlib.suppress(OSError):
                if knows:
                    connection.settimeout(_SEND_S)  # for all of it
                    connection.sendall(bytes(LARGE_BYTES))
                    connection.recv(1)  # until the other side has it all


def shake_hands(connection: socket.socket, secret: str, deadline: float, calls: bool) -> bool:
    """Tell if the other end knows the secret, and prove to it that this end does.

    Each end sends a fresh number and signs both, so a recorded handshake is worth nothing. The end
    that ``calls`` proves itself first: the other one sends nothing but its number to a stranger.

    Raises:
        OSError: the other end hangs up, or is not done before ``deadline`` (``time.monotonic``).
    """
    own = secrets.token_hex(32)
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall((own + "\n").encode())
    theirs = line_of(connection, deadline)
    if theirs == own or not re.fullmatch("[0-9a-f]{64}", theirs):
        return False
    numbers = (own + " " + theirs) if calls else (theirs + " " + own)
    asks, answers = (
        hmac.new(secret.encode(), (role + " " + numbers).encode(), hashlib.sha256).hexdigest()
        for role in ("ask", "answer")
    )
    if calls:
        connection.sendall((asks + "\n").encode())
        return hmac.compare_digest(line_of(connection, deadline), answers)
    knows = hmac.compare_digest(line_of(connection, deadline), asks)
    if knows:
        connection.sendall((answers + "\n").encode())
    return knows


def line_of(connection: socket.socket, deadline: float) -> str:
    """Read the first line, in ASCII and without its end; a shorter one if the other side closes.

    Raises:
        OSError: the line is not complete at ``deadline`` (``time.monotonic``), however slowly it
            comes.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < _MOST_LINE:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OSError(errno.ETIMEDOUT, "no answer")
        connection.settimeout(left)
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line.decode("ascii", "replace").strip().replace("\ufffd", "?")


def all_at_once(
    function: Callable[[dict[str, Any]], Any], items: list[dict[str, Any]]
) -> list[Any]:
    """Call a function for all items at the same time."""
    with ThreadPoolExecutor(max(1, min(32, len(items)))) as pool:
        return list(pool.map(function, items))


def reach_fact(target: dict[str, Any], secret: str, timeout_s: float) -> dict[str, Any]:
    """Connect to a target (``ip`` and ``port``).

    Returns:
        ``outcome``: ok, refused, timeout, unreachable, forbidden, stranger, stalls or failed, where
            ``stalls`` means
        that small packets pass and large ones do not; ``ms``: the round trip of a packet.
    """
    fact: dict[str, Any] = {
        "ip": target["ip"],
        "port": target["port"],
        "outcome": "ok",
        "detail": "",
    }
    stage = "connect"
    began = time.monotonic()
    try:
        with socket.create_connection((target["ip"], target["port"]), timeout_s) as connection:
            fact["ms"] = round(1000 * (time.monotonic() - began), 3)
            fact["source"] = connection.getsockname()[0]
            stage = "answer"
            if not shake_hands(connection, secret, time.monotonic() + timeout_s, calls=True):
                return {**fact, "outcome": "stranger"}
            stage = "large"
            connection.settimeout(timeout_s)
            receive_exactly(connection, LARGE_BYTES, time.monotonic() + _LARGE_TIMES * timeout_s)
        if fact["ms"] > LONG_MS:
            fact["ms"] = min(fact["ms"], least_connect_ms(target, timeout_s))
    except OSError as error:
        fact.update(outcome=outcome_of(error, stage), detail=error.strerror or str(error))
    return fact


def least_connect_ms(target: dict[str, Any], timeout_s: float) -> float:
    """Return the shortest time of a few connections, in ms: the time varies on a busy computer, not
    on a cable.

    Raises:
        OSError: one fails.
    """
    times: list[float] = []
    for _ in range(_ROUNDS):
        began = time.monotonic()
        socket.create_connection((target["ip"], target["port"]), timeout_s).close()
        times.append(time.monotonic() - began)
    return round(1000 * min(times), 3)


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> None:
    """Read ``size`` bytes.

    Raises:
        OSError: they do not come, or not all before ``deadline`` (``time.monotonic``).
    """
    while size:
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, "too slow")
        data = connection.recv(min(size, 1 << 16))
        if not data:
            raise OSError(errno.ECONNRESET, "closed by the other side")
        size -= len(data)


def outcome_of(error: OSError, stage: str) -> str:
    """Return the outcome that an error means, by its stage."""
    if error.errno is None or error.errno == errno.ETIMEDOUT:
        return {"connect": "timeout", "answer": "stranger", "large": "stalls"}[stage]
    if error.errno in _REFUSED and stage == "connect":
        return "refused"
    if error.errno in _HUNG_UP and stage == "answer":
        return "stranger"
    if error.errno in _UNREACHABLE:
        return "unreachable"
    return "forbidden" if error.errno in _FORBIDDEN else "failed"


def login_fact(login: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run ``argv``, an ssh to another computer; the ``code`` is ``None`` if there is no answer in
    time.
    """
    if shutil.which(login["argv"][0], path=program_environment()["PATH"]) is None:
        return {"code": 127, "said": "there is no ssh program"}
    done = finished(login["argv"], timeout_s)
    return (
        {"code": None, "said": ""} if done is None else {"code": done[0], "said": done[2][-2000:]}
    )
