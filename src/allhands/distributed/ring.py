"""The order in which ranks join MLX's ring, where a call that comes too early costs a second and more.

The last rank calls the first, which then calls the second, and so on; who is not listening yet is called again after
one second, then after two more, for half a minute in all. So the word goes round before: every rank tells the next
one, at the address that MLX is going to call, that it and all before it are there; the last rank begins, with the
first, and goes when it has heard. Only neighbours talk to each other, as in the ring itself: others may have no cable
between them. So every way that MLX will take has been tried, and who cannot be called though it listens is known. They
know each other by the hostfile, and by the secrets of :mod:`allhands.callers` where there are some.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from allhands.callers import CALLER, LISTENER, Call, Callers, Unproved, key_for, listen_at
from allhands.errors import DistributedError

_HINT = "check that every host of the hostfile answers at its address and that the ports are free"
# What another rank takes from its word to being called: a few milliseconds.
_HEAD_START_S = 0.02
_PAUSES_S = (0.005, 0.1)  # between two calls: the first, and the longest of those that double
_TALK_S = 2.0  # for somebody who has called to prove itself
_CALL_S = 5.0  # in which the first packet of a call is sent again and again; for a neighbour to answer, in all
_BRIEF_CALL_S = 2.0  # while nobody may be there
_REFUSED_S = 2.0  # for a neighbour that is known to listen to be refused all the time
_MOST_BYTES = 256  # of what one says
_AGREED = b"agreed"
_PARTING_S = 1.0
_TICK_S = 0.2


class BlockedError(DistributedError):
    """Rank ``peer`` listens, and this one cannot connect to it: something between their computers is in the way."""

    def __init__(self, peer: int, host: str, rank: int, problem: str) -> None:
        message = f"rank {peer} listens at {host}, but connections from rank {rank} {problem}"
        hint = "run `allhands cluster check` with the same --hostfile or --hosts: it finds what is in the way"
        super().__init__(message, where=f"rank {rank}", hint=hint)
        self.peer = peer
        self.problem = f"{host} {problem}"


class Watch(Protocol):
    """Somebody who sees all ranks, as a supervisor does."""

    def listening(self) -> None:
        """Be told that this rank can be called."""
        ...

    def all_listen(self) -> bool:
        """Whether all ranks can be called."""
        ...


class Unwatched:
    """Nobody sees all ranks: who cannot be called may only be late."""

    def listening(self) -> None:
        """Nobody is told."""

    def all_listen(self) -> bool:
        """Not known."""
        return False


def take_turns(hostfile: Path, rank: int, timeout_s: float, watch: Watch | None = None) -> None:
    """Return when this rank may join the ring of ``hostfile``.

    At once if the file cannot be read or this rank's address cannot be had: then it is MLX that fails, and says why.

    Raises:
        BlockedError: a neighbour that listens, as ``watch`` says, cannot be connected to.
        DistributedError: a neighbour was not there within ``timeout_s``.
    """
    hosts, proof = _hosts(hostfile), _Proof(watch or Unwatched())
    if not 0 <= rank < len(hosts):
        return
    key = key_for(f"ring of {hashlib.sha256(json.dumps(hosts).encode()).hexdigest()}", os.environ)
    deadline = time.monotonic() + timeout_s
    before, after, last = (rank - 1) % len(hosts), (rank + 1) % len(hosts), rank + 1 == len(hosts)

    def call() -> None:
        if problem := _tell(hosts[after], key, b"%d is there" % rank, deadline, proof):
            blocked = BlockedError(after, hosts[after], rank, problem)
            raise blocked if proof.given else _missing(after, hosts[after], timeout_s, problem)

    try:
        listener = _listen(hosts[rank])
    except (OSError, ValueError):
        return
    # The last one calls while it listens: whoever else comes there is seen off meanwhile.
    beside = _Beside(call if last and rank > 0 else lambda: None)
    with Callers([listener], _MOST_BYTES, _TALK_S) as callers:
        proof.watch.listening()
        heard = len(hosts) == 1 or _hear(callers, key, b"%d is there" % before, deadline, beside)
    if not heard:
        beside.join(_TICK_S)
    if beside.error is not None:
        raise beside.error
    if not heard:
        raise _missing(before, hosts[before], timeout_s, f"said nothing to rank {rank} at {hosts[rank]}")
    if last:
        time.sleep(_HEAD_START_S)
    else:
        call()


class _Beside(threading.Thread):
    """Something that is done by another thread from now on, and the error with which it ended, if it did."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="call-first-rank", daemon=True)
        self.error: DistributedError | None = None
        self._work = work
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except DistributedError as error:
            self.error = error


@dataclass
class _Proof:
    """Whether a neighbour cannot be called though it listens: then it is not only late.

    Attributes:
        given: whether that is so.
        since: since when it has been known here that all listen.
    """

    watch: Watch
    given: bool = False
    since: float | None = None

    def look(self, began: float, error: OSError) -> None:
        """Take in how a call that began then has failed."""
        now = time.monotonic()
        if self.since is None:
            self.since = now if self.watch.all_listen() else None
        elif began >= self.since:
            self.given = now - self.since >= (_CALL_S if isinstance(error, TimeoutError) else _REFUSED_S)


def _hosts(hostfile: Path) -> list[str]:
    """The first address of every rank."""
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        return [str(addresses[0]) for addresses in json.loads(hostfile.read_text(encoding="utf-8"))]
    return []


def _missing(rank: int, host: str, timeout_s: float, problem: str) -> DistributedError:
    where = f"rank {rank} at {host}"
    return DistributedError(f"not there within {timeout_s:.0f} s: {problem}", where=where, hint=_HINT)


def _hear(callers: Callers, key: bytes, word: bytes, deadline: float, beside: _Beside) -> bool:
    """Whether ``word`` came in time, and before what is done ``beside`` has failed; others are left standing."""
    while (left := deadline - time.monotonic()) > 0 and beside.error is None:
        for caller, line in callers.wait(min(left, _TICK_S)):
            conversation = caller.conversation(key)
            if line is None or conversation.opened(CALLER, line) != word:
                callers.drop(caller)
                continue
            with suppress(OSError):
                caller.say(conversation.sealed(LISTENER, _AGREED), deadline)
                caller.proved = True
                # The caller closes first: then it is not this port that has to rest.
                parting = min(deadline, time.monotonic() + _PARTING_S)
                while caller in callers.all() and time.monotonic() < parting:
                    callers.wait(_TICK_S)
                return True
    return False


def _tell(host: str, key: bytes, word: bytes, deadline: float, proof: _Proof) -> str | None:
    """Say ``word`` to who listens at ``host``; what is wrong with that, if it is not to be done in time, or at all."""
    pause, problem = _PAUSES_S[0], "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        began = time.monotonic()
        try:
            most = _BRIEF_CALL_S if proof.since is None else _CALL_S
            call = Call(_address(host), min(left, most))
        except ValueError as error:
            return str(error)
        except OSError as error:
            problem = _words(error)
            proof.look(began, error)
            if proof.given:
                return problem
        else:
            problem = _say(call, key, word, deadline)
            if problem is None:
                return None
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])
    return problem


def _say(call: Call, key: bytes, word: bytes, deadline: float) -> str | None:
    """Say ``word``; what is wrong, if that is not agreed to."""
    try:
        with call:
            conversation = call.begin(key, min(deadline, time.monotonic() + _CALL_S))
            call.say(conversation.sealed(CALLER, word), deadline)
            # As long as it takes: who has agreed listens no more.
            agreed = conversation.opened(LISTENER, call.line(_MOST_BYTES, deadline)) == _AGREED
    except Unproved:
        agreed = False
    except OSError as error:
        return str(error)
    return None if agreed else "somebody else listens there"


def _words(error: OSError) -> str:
    """What becomes of connections that fail like this."""
    if isinstance(error, TimeoutError):
        return "get no answer (timed out): a firewall drops them, or that address leads elsewhere"
    if error.errno == errno.ECONNREFUSED:
        return f"are refused ({error.strerror})"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN):
        return f"do not get there ({error.strerror}): a firewall rejects them, or there is no way to that address"
    return f"fail ({error.strerror or error})"


def _listen(host: str) -> socket.socket:
    (family, _, _, _, address), *_ = socket.getaddrinfo(*_address(host), type=socket.SOCK_STREAM)
    # As MLX does: a launcher may keep the port for this rank.
    return listen_at(family, (str(address[0]), int(address[1])), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))


def _address(host: str) -> tuple[str, int]:
    name, _, port = host.rpartition(":")
    return name.strip("[]"), int(port)
