"""Connections between computers over TCP, by the addresses that ranks will use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from allhands.cluster.probes.tools import finished, program_environment
from allhands.runtime.ports import cannot_listen

# Enough for many full-size packets, so that a path on which only small ones pass is found.
LARGE_BYTES = 1 << 18
LONG_MS = 2.0  # there and back; a longer time is measured again
_ROUNDS = 5
_MOST_LINE = 200
_CALLS = 1024  # in the queue of a listener
_PROVE_S = 10.0
_SEND_S = 30.0
_LARGE_TIMES = 3  # the time of an answer, for all that is large
_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)
_HUNG_UP = (errno.ECONNRESET, errno.EPIPE)
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_FORBIDDEN = (errno.EPERM, errno.EACCES)


def reach_word(secret: str, role: str) -> str:
    """Return the word by which one end, ``asks`` or ``answers``, proves that it knows the secret of this check."""
    return hmac.new(secret.encode(), role.encode(), hashlib.sha256).hexdigest()


class Listeners:
    """Listeners on free ports of given addresses, which answer callers that know the secret until closed."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._closed = False
        self._sockets: list[socket.socket] = []

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
                foreign = error.errno == errno.EADDRNOTAVAIL  # the doctor explains this error itself
                errors[address] = str(error.strerror) if foreign else cannot_listen(error, address, 0).message
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
                time.sleep(0.02)  # the caller has left again, or there is no room for it: others may come
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            asked = line_of(connection, time.monotonic() + _PROVE_S)
            if hmac.compare_digest(asked, reach_word(self._secret, "asks")):
                connection.settimeout(_SEND_S)  # for all of it
                connection.sendall((reach_word(self._secret, "answers") + "\n").encode())
                connection.sendall(bytes(LARGE_BYTES))
                connection.recv(1)  # until the other side has it all


def line_of(connection: socket.socket, deadline: float) -> str:
    """Read the first line, in ASCII and without its end; a shorter one if the other side closes.

    Raises:
        OSError: the line is not complete at ``deadline`` (``time.monotonic``), however slowly it comes.
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


def all_at_once(function: Callable[[dict[str, Any]], Any], items: list[dict[str, Any]]) -> list[Any]:
    """Call a function for all items at the same time."""
    with ThreadPoolExecutor(max(1, min(32, len(items)))) as pool:
        return list(pool.map(function, items))


def reach_fact(target: dict[str, Any], secret: str, timeout_s: float) -> dict[str, Any]:
    """Connect to a target (``ip`` and ``port``).

    Returns:
        ``outcome``: ok, refused, timeout, unreachable, forbidden, stranger, stalls or failed, where ``stalls`` means
        that small packets pass and large ones do not; ``ms``: the round trip of a packet.
    """
    fact: dict[str, Any] = {"ip": target["ip"], "port": target["port"], "outcome": "ok", "detail": ""}
    stage = "connect"
    began = time.monotonic()
    try:
        with socket.create_connection((target["ip"], target["port"]), timeout_s) as connection:
            fact["ms"] = round(1000 * (time.monotonic() - began), 3)
            fact["source"] = connection.getsockname()[0]
            stage = "answer"
            began = time.monotonic()
            connection.sendall((reach_word(secret, "asks") + "\n").encode())
            if line_of(connection, began + timeout_s) != reach_word(secret, "answers"):
                return {**fact, "outcome": "stranger"}
            fact["ms"] = min(fact["ms"], round(1000 * (time.monotonic() - began), 3))
            stage = "large"
            connection.settimeout(timeout_s)
            receive_exactly(connection, LARGE_BYTES, time.monotonic() + _LARGE_TIMES * timeout_s)
        if fact["ms"] > LONG_MS:
            fact["ms"] = min(fact["ms"], least_connect_ms(target, timeout_s))
    except OSError as error:
        fact.update(outcome=outcome_of(error, stage), detail=error.strerror or str(error))
    return fact


def least_connect_ms(target: dict[str, Any], timeout_s: float) -> float:
    """Return the shortest time of a few connections, in ms: the time varies on a busy computer, not on a cable.

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
    """Run ``argv``, an ssh to another computer; the ``code`` is ``None`` if there is no answer in time."""
    if shutil.which(login["argv"][0], path=program_environment()["PATH"]) is None:
        return {"code": 127, "said": "there is no ssh program"}
    done = finished(login["argv"], timeout_s)
    return {"code": None, "said": ""} if done is None else {"code": done[0], "said": done[2][-2000:]}
