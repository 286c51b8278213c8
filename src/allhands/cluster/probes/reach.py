"""Connections between computers over TCP, by the addresses that ranks will use."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import threading
import time
from typing import Any

from allhands.cluster.probes.tools import finished, program_environment
from allhands.runtime.callers import (
    CALLER,
    LISTENER,
    Call,
    Caller,
    Callers,
    Unproved,
    listen_at,
)

# Lines of many full-size packets, so that a path on which only small ones pass is found.
_PIECES, _PIECE_BYTES = 16, 1 << 14
LONG_MS = 2.0  # there and back; a longer time is measured again
_ROUNDS = 5
_MOST_LINE = 200
_TICK_S = 0.1
_PROVE_S = 10.0
_SEND_S = 30.0
_LARGE_TIMES = 3  # times the timeout of an answer, for all large lines together
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
    """Listeners on free ports of given addresses; until closed, they answer callers that know the
    secret.

    A caller that does not prove this in time is disconnected.
    """

    def __init__(self, secret: str) -> None:
        self._key = secret.encode()
        self._closed = False
        self._servers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def open(self, addresses: list[str]) -> dict[str, Any]:
        """Return the port of each address, and the errors of addresses that cannot be listened on."""
        ports: dict[str, int] = {}
        errors: dict[str, str] = {}
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                server = listen_at(family, (address, 0), ())
            except OSError as error:
                errors[address] = str(error.strerror)
                continue
            ports[address] = server.getsockname()[1]
            self._servers.append(server)
        self._thread.start()
        return {"ports": ports, "errors": errors}

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._thread.join()

    def _serve(self) -> None:
        with Callers(self._servers, _MOST_LINE, _PROVE_S) as callers:
            while not self._closed:
                for caller, line in callers.wait(_TICK_S):
                    if line is None or caller.conversation(self._key).opened(CALLER, line) is None:
                        callers.drop(caller)
                    else:
                        caller.proved = True
                        threading.Thread(target=self._answer, args=(caller,), daemon=True).start()

    def _answer(self, caller: Caller) -> None:
        proof = caller.conversation(self._key).sealed(LISTENER, b"")
        large = (b"0" * _PIECE_BYTES + b"\n") * _PIECES
        with contextlib.suppress(OSError):  # it has left
            caller.say(proof + large, time.monotonic() + _SEND_S)


def reach_fact(target: dict[str, Any], secret: str, timeout_s: float) -> dict[str, Any]:
    """Connect to a target (``ip`` and ``port``).

    Returns:
        ``outcome``: ok, refused, timeout, unreachable, forbidden, stranger, stalls or failed;
        ``stalls`` means that small packets pass and large ones do not. ``ms``: the round trip of a
        packet.
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
        with Call((target["ip"], target["port"]), timeout_s) as call:
            fact["ms"] = round(1000 * (time.monotonic() - began), 3)
            fact["source"] = call.own_address
            stage, deadline = "answer", time.monotonic() + timeout_s
            conversation = call.begin(secret.encode(), deadline)
            call.say(conversation.sealed(CALLER, b""), deadline)
            if conversation.opened(LISTENER, call.line(_MOST_LINE, deadline)) is None:
                raise Unproved
            stage, deadline = "large", time.monotonic() + _LARGE_TIMES * timeout_s
            for _ in range(_PIECES):
                soon = min(deadline, time.monotonic() + timeout_s)
                if not call.line(_PIECE_BYTES + 1, soon):
                    raise OSError(errno.ECONNRESET, "closed by the other side")
        if fact["ms"] > LONG_MS:
            fact["ms"] = min(fact["ms"], least_connect_ms(target, timeout_s))
    except Unproved:
        fact["outcome"] = "stranger"
    except OSError as error:
        fact.update(outcome=outcome_of(error, stage), detail=error.strerror or str(error))
    return fact


def least_connect_ms(target: dict[str, Any], timeout_s: float) -> float:
    """Return the shortest time of a few connections, in ms, which leaves out delays of a busy
    computer.

    Raises:
        OSError: one fails.
    """
    times: list[float] = []
    for _ in range(_ROUNDS):
        began = time.monotonic()
        socket.create_connection((target["ip"], target["port"]), timeout_s).close()
        times.append(time.monotonic() - began)
    return round(1000 * min(times), 3)


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
