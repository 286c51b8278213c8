"""Whether other computers can connect to this one and this one to them, by the very addresses and over TCP."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from allhands.cluster.probes.tools import finished, program_environment
from allhands.runtime.ports import cannot_listen

# Enough for many full-size packets, so that a path on which only small ones pass is found.
LARGE_BYTES = 1 << 18
LONG_MS = 2.0  # there and back; what takes longer is asked again
_ROUNDS = 5
_MOST_LINE = 200
_MOST_STRANGERS = 32  # callers that have not proved that they know the secret
_CALLS = 1024  # that wait to be taken
_PROVE_S = 10.0
_SEND_S = 30.0
_LARGE_TIMES = 3  # the time of an answer, for all that is large
_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)
_HUNG_UP = (errno.ECONNRESET, errno.EPIPE)
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_FORBIDDEN = (errno.EPERM, errno.EACCES)


class Listeners:
    """Listens on free ports of given addresses until closed, and answers who knows the secret.

    Whoever does not prove in time that it does is hung up on; of too many at once, the first who came.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._strangers: list[socket.socket] = []  # the first who came first
        self._lock = threading.Lock()

    def open(self, addresses: list[str]) -> dict[str, Any]:
        """The port of each address, and why some could not be taken."""
        ports: dict[str, int] = {}
        errors: dict[str, str] = {}
        for address in addresses:
            listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            try:
                listening.bind((address, 0))
                listening.listen(_CALLS)
            except OSError as error:
                nobodys = error.errno == errno.EADDRNOTAVAIL  # who asks knows the words
                errors[address] = str(error.strerror) if nobodys else cannot_listen(error, address, 0).message
                listening.close()
                continue
            ports[address] = listening.getsockname()[1]
            self._sockets.append(listening)
            threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        return {"ports": ports, "errors": errors}

    def close(self) -> None:
        """Listen no more."""
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
                time.sleep(0.02)  # one has left again, or there is no room for it: others may come
                continue
            with self._lock:
                self._strangers.append(connection)
                for late in self._strangers[:-_MOST_STRANGERS]:
                    with contextlib.suppress(OSError):
                        late.shutdown(socket.SHUT_RDWR)  # its thread closes it
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        words = ReachWords(self._secret, time.monotonic() + _PROVE_S)
        knows = False
        with connection:
            with contextlib.suppress(OSError, ValueError):
                knows = words.is_asked(connection)
            with self._lock:
                self._strangers.remove(connection)
            with contextlib.suppress(OSError):
                if knows:
                    connection.settimeout(_SEND_S)  # for all of it
                    connection.sendall((words.answer() + "\n").encode())
                    connection.sendall(bytes(LARGE_BYTES))
                    connection.recv(1)  # until the other side has it all


class ReachWords:
    """What both ends of one connection say: a fresh number each, and that they know the secret, over both numbers.

    Who is connected to says its number first, and proves itself last. What somebody has recorded is worth nothing in
    another connection.
    """

    def __init__(self, secret: str, deadline: float) -> None:
        self._secret = secret
        self._deadline = deadline
        self._numbers = ""

    def is_asked(self, connection: socket.socket) -> bool:
        """Whether who has connected proves that it knows the secret. Raises OSError, ValueError."""
        own = secrets.token_hex(32)
        connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        connection.sendall((own + "\n").encode())
        theirs = checked_number(line_of(connection, self._deadline))
        if theirs == own:
            return False
        self._numbers = own + " " + theirs
        return hmac.compare_digest(line_of(connection, self._deadline), self._signed("ask"))

    def ask(self, connection: socket.socket) -> bool:
        """Whether who is connected to says a number; it is asked then. Raises OSError."""
        own = secrets.token_hex(32)
        connection.sendall((own + "\n").encode())
        try:
            theirs = checked_number(line_of(connection, self._deadline))
        except ValueError:
            return False
        if theirs == own:
            return False
        self._numbers = theirs + " " + own
        connection.sendall((self._signed("ask") + "\n").encode())
        return True

    def is_answered(self, connection: socket.socket) -> bool:
        """Whether it proves that it knows the secret, too. Raises OSError."""
        return hmac.compare_digest(line_of(connection, self._deadline), self.answer())

    def answer(self) -> str:
        """What the right listener answers."""
        return self._signed("answer")

    def _signed(self, role: str) -> str:
        return hmac.new(self._secret.encode(), (role + " " + self._numbers).encode(), hashlib.sha256).hexdigest()


def checked_number(line: str) -> str:
    """The line, which must be a number of 64 letters.

    Raises:
        ValueError: it is none.
    """
    if len(line) != 64 or line.strip("0123456789abcdef"):
        raise ValueError("this is no number")
    return line


def line_of(connection: socket.socket, deadline: float) -> str:
    """The first line, without its end, in ASCII; what has come so far if the other side closes.

    Raises:
        OSError: it is not whole before ``deadline`` (``time.monotonic``), however slowly it comes.
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


def reach_facts(targets: list[dict[str, Any]], secret: str, timeout_s: float) -> list[dict[str, Any]]:
    """What comes of connecting to each target (``ip`` and ``port``), all at the same time."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(32, len(targets))) as pool:
        return list(pool.map(lambda target: reach_fact(target, secret, timeout_s), targets))


def reach_fact(target: dict[str, Any], secret: str, timeout_s: float) -> dict[str, Any]:
    """The ``outcome``: ok, refused, timeout, unreachable, forbidden, stranger, stalls or failed.

    ``stalls`` means that small packets pass and large ones do not; ``ms`` is the time of a packet there and back.
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
            words = ReachWords(secret, began + timeout_s)
            if not words.ask(connection):
                return {**fact, "outcome": "stranger"}
            began = time.monotonic()
            if not words.is_answered(connection):
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
    """The shortest time of a few connections, in ms: that of a computer that is busy varies, that of a cable does not.

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
    """What an error means, by the stage in which it came."""
    if error.errno is None or error.errno == errno.ETIMEDOUT:
        return {"connect": "timeout", "answer": "stranger", "large": "stalls"}[stage]
    if error.errno in _REFUSED and stage == "connect":
        return "refused"
    if error.errno in _HUNG_UP and stage == "answer":
        return "stranger"
    if error.errno in _UNREACHABLE:
        return "unreachable"
    return "forbidden" if error.errno in _FORBIDDEN else "failed"


def login_facts(logins: list[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """What comes of running each ``argv``, an ssh to another computer, all at the same time."""
    if not logins:
        return []
    with ThreadPoolExecutor(min(16, len(logins))) as pool:
        return list(pool.map(lambda login: login_fact(login, timeout_s), logins))


def login_fact(login: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Exit code and last words of one; a code of ``None`` means no answer in time."""
    if shutil.which(login["argv"][0], path=program_environment()["PATH"]) is None:
        return {"target": login["target"], "code": 127, "said": "there is no ssh program"}
    done = finished(login["argv"], timeout_s)
    if done is None:
        return {"target": login["target"], "code": None, "said": ""}
    return {"target": login["target"], "code": done[0], "said": done[2][-2000:]}
