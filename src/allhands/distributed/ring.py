"""Test of the connections that MLX is going to make, and the order in which ranks join its ring.

In MLX's ring the last rank calls the first, which then calls the second, and so on. A rank that
does not listen yet is called again after one second, then after two more, for half a minute in all.
So a call that comes too early costs a second and more.

To avoid that, a word goes round before. Every rank tells the next rank, at the address that MLX is
going to call, that it and all ranks before it are there. The last rank begins by calling the first,
and joins when the word has come back. Only neighbours call each other, as in the ring itself,
because other ranks may have no cable between them. So every connection of MLX has been tried, and a
rank that listens but cannot be reached is known. Ranks recognise each other by the hostfile, and by
the secrets of :mod:`allhands.runtime.callers` if there are any.

With NCCL and JACCL every rank first calls rank 0: that connection is tried likewise, see
:func:`reach_first`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from allhands.errors import DistributedError
from allhands.runtime.callers import (
    CALLER,
    LISTENER,
    Call,
    Caller,
    Callers,
    Handshake,
    Unproved,
    key_for,
    listen_at,
)
from allhands.runtime.ports import PortSettings, cannot_listen, fate_of, is_blocked, kind_of

_log = logging.getLogger(__name__)

_CHECK = "`allhands cluster check` with the same --hostfile or --hosts finds what is in the way"
_HINT = f"see whether it runs, and whether a firewall is between the computers: {_CHECK}"
_BLOCKED_HINT = f"open the ports of that computer for this one: {_CHECK}"
_SETTINGS = PortSettings(
    "other ports", 'the address that the other computers reach it by, as "ips" in the hostfile'
)
# Time that a rank gets to listen in MLX after its word; it needs a few milliseconds.
_HEAD_START_S = 0.02
_PAUSES_S = (0.005, 0.1)  # first and longest pause between two calls; pauses double
_TALK_S = 2.0  # for a caller to prove its identity
_CALL_S = 5.0  # for a call to be answered; time of silence after which a listening rank is blocked
_BRIEF_CALL_S = 2.0  # for a call to be answered while the other rank may not be there
_REFUSED_S = 2.0  # time of refused calls after which a listening rank counts as blocked
_MOST_BYTES = 256  # of a message
_AGREED = b"agreed"
_PARTING_S = 1.0
_TICK_S = 0.2
_ASLEEP_US = 1000  # longest sleep of a thread of MLX's ring; Linux rounds it up to its own tick
_BULK_BYTES = (
    65536  # bytes for which a thread is woken while a large array comes: about 45 Ethernet frames
)


class BlockedError(DistributedError):
    """Raised if rank ``peer`` listens but this rank cannot connect to it.

    Something between their computers, such as a firewall, is in the way.
    """

    def __init__(self, peer: int, host: str, rank: int, problem: str) -> None:
        message = f"rank {peer} listens at {host}, but connections from rank {rank} {problem}"
        super().__init__(
            message, code="connection-blocked", where=f"rank {rank}", hint=f"run {_CHECK}"
        )
        self.peer = peer
        self.problem = f"{host} {problem}"


class PortTakenError(DistributedError):
    """Raised if another program listens at this rank's port; other ports may be free."""


class Watch(Protocol):
    """Knowledge about all ranks, such as a supervisor's."""

    def listening(self) -> None:
        """Report that this rank can be called."""
        ...

    def all_listen(self) -> bool:
        """Return True if all ranks can be called."""
        ...


class Unwatched:
    """A :class:`Watch` without knowledge: a rank that cannot be called may only be late."""

    def listening(self) -> None:
        """Report nothing."""

    def all_listen(self) -> bool:
        """Return False: it is not known."""
        return False


def take_turns(hostfile: Path, rank: int, timeout_s: float, watch: Watch | None = None) -> None:
    """Wait until this rank may join the ring of ``hostfile``.

    If the file cannot be read, this returns at once, and MLX fails with a reason.

    Raises:
        BlockedError: a neighbour listens, by ``watch``, but cannot be connected to.
        PortTakenError: another program listens at this rank's port.
        DistributedError: a neighbour was not there within ``timeout_s``, or this rank cannot listen
            at its address.
    """
    hosts, proof = _hosts(hostfile), _Proof(watch or Unwatched(), rank)
    if not 0 <= rank < len(hosts):
        return
    key = key_for(f"ring of {hashlib.sha256(json.dumps(hosts).encode()).hexdigest()}", os.environ)
    deadline = time.monotonic() + timeout_s
    before, after, last = (rank - 1) % len(hosts), (rank + 1) % len(hosts), rank + 1 == len(hosts)

    def call() -> None:
        if problem := _tell(hosts[after], key, b"%d is there" % rank, deadline, proof):
            raise _unreached(after, hosts[after], problem, proof, timeout_s)

    try:
        listener = _listen(hosts[rank], "the ring")
    except ValueError:
        return
    # The last rank calls in a thread while it listens, so that strangers are turned away meanwhile.
    beside = _Beside(call if last and rank > 0 else lambda: None)
    with Callers([listener], _MOST_BYTES, _TALK_S) as callers:
        proof.watch.listening()
        heard = len(hosts) == 1 or _hear(callers, key, b"%d is there" % before, deadline, beside)
    if not heard:
        beside.join(_TICK_S)
    if beside.error is not None:
        raise beside.error
    if not heard:
        where = f"rank {before} at {hosts[before]}"
        raise _missing(where, timeout_s, f"said nothing to rank {rank} at {hosts[rank]}")
    if last:
        time.sleep(_HEAD_START_S)
    else:
        call()


def reach_first(
    host: str, rank: int, size: int, timeout_s: float, watch: Watch | None = None
) -> None:
    """Wait until all ``size`` ranks have reached rank 0 at ``host``; the port is then free again.

    Args:
        host: rank 0's address and port.

    Raises:
        BlockedError: rank 0 listens, by ``watch``, but cannot be connected to.
        PortTakenError: another program listens there.
        DistributedError: a rank was not there within ``timeout_s``, or rank 0 cannot listen at the
            address.
    """
    proof = _Proof(watch or Unwatched(), rank)
    key = key_for(f"{size} ranks at {host}", os.environ)
    deadline = time.monotonic() + timeout_s
    if rank > 0:
        proof.watch.listening()  # other ranks do not call this one
        if problem := _tell(host, key, b"%d is there" % rank, deadline, proof):
            raise _unreached(0, host, problem, proof, timeout_s)
        return
    with Callers([_listen(host, "the group")], _MOST_BYTES, _TALK_S) as callers:
        proof.watch.listening()
        came = _wait_for_all(callers, key, size, deadline)
        if len(came) == size - 1:
            callers.let_in_no_more()  # a rank that is answered calls MLX at this port at once
            _agree(callers, list(came.values()), deadline)
            return
    absent = [other for other in range(1, size) if other not in came]
    where = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:8]))}{' ...' * (len(absent) > 8)}"
    raise _missing(where, timeout_s, f"said nothing to rank 0 at {host}")


def _wait_for_all(
    callers: Callers, key: bytes, size: int, deadline: float
) -> dict[int, tuple[Caller, Handshake]]:
    """Return the ranks that have called rank 0; wait for all of them, until ``deadline``."""
    words = {b"%d is there" % other: other for other in range(1, size)}
    came: dict[int, tuple[Caller, Handshake]] = {}
    while len(came) < size - 1 and (left := deadline - time.monotonic()) > 0:
        for caller, line in callers.wait(min(left, _TICK_S)):
            came = {other: one for other, one in came.items() if one[0] is not caller}
            conversation = caller.conversation(key)
            other = None if line is None else words.get(conversation.opened(CALLER, line) or b"")
            if other is None:
                callers.drop(caller)
            else:
                came[other], caller.proved = (caller, conversation), True
    return came


def wait_asleep(hostfile: Path) -> list[int]:
    """Let the threads of this process's ring sleep until bytes arrive or can be sent.

    MLX's calls return at once, and each thread repeats them all the time. On a computer with few
    cores this takes a core from the computation. For MLX, a call that ends without bytes after a
    moment is the same.

    Returns:
        The descriptors of the ring's sockets.
    """
    ports, found = {_address(host)[1] for host in _hosts(hostfile)}, list[int]()
    moment = struct.pack("ll", 0, _ASLEEP_US)
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            # An error means that it is not a connected socket, so not one of the ring's.
            with suppress(OSError), _socket_of(int(name)) as link:
                internet = link.family in (socket.AF_INET, socket.AF_INET6)
                if not internet or not ports & {link.getsockname()[1], link.getpeername()[1]}:
                    continue
                for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    link.setsockopt(socket.SOL_SOCKET, direction, moment)
                os.set_blocking(link.fileno(), True)
                found.append(int(name))
    return found


def receive_in_bulk(descriptors: Sequence[int], bulk: bool) -> None:
    """Wake sleeping threads once for many frames (``bulk``), or for each frame, which is faster.

    With a wake for each frame at 100 Mbit/s, a core spends a twentieth of its time on waking a
    thread that has little to do. Fewer bytes are noticed when the sleep of :func:`wait_asleep`
    ends.
    """
    for descriptor in descriptors:
        with suppress(OSError), _socket_of(descriptor) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _BULK_BYTES if bulk else 1)


def _socket_of(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


class _Beside(threading.Thread):
    """A thread that does ``work`` from now on; ``error`` is the error with which it ended."""

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
    """Evidence that a neighbour is not only late: it listens, but cannot be called.

    Attributes:
        given: True if the evidence suffices.
        since: time since when all ranks are known to listen; ``None``: not known.
        blocked: whether something seemed to be in the way of the last call.
    """

    watch: Watch
    rank: int
    given: bool = False
    since: float | None = None
    blocked: bool = False
    _blocked_since: float | None = None
    _told: bool = False

    def look(self, began: float, error: OSError, host: str) -> None:
        """Judge a failed call of ``host`` that began at ``began``."""
        now = time.monotonic()
        self.blocked = is_blocked(kind_of(error))
        self._blocked_since = (self._blocked_since or began) if self.blocked else None
        if (
            self._blocked_since is not None
            and now - self._blocked_since >= _CALL_S
            and not self._told
        ):
            self._told = True
            way = f"connections from rank {self.rank} to {host} {fate_of(error)}"
            _log.warning("%s; or that computer is not up yet. %s", way, _CHECK)
        if self.since is None:
            self.since = now if self.watch.all_listen() else None
        elif began >= self.since:
            self.given = now - self.since >= (
                _CALL_S if isinstance(error, TimeoutError) else _REFUSED_S
            )


def _hosts(hostfile: Path) -> list[str]:
    """Return the first address of every rank; [] if the hostfile cannot be read."""
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        return [str(addresses[0]) for addresses in json.loads(hostfile.read_text(encoding="utf-8"))]
    return []


def _unreached(
    peer: int, host: str, problem: str, proof: _Proof, timeout_s: float
) -> DistributedError:
    if proof.given:
        return BlockedError(peer, host, proof.rank, problem)
    return _missing(
        f"rank {peer} at {host}", timeout_s, problem, _BLOCKED_HINT if proof.blocked else _HINT
    )


def _missing(where: str, timeout_s: float, problem: str, hint: str = _HINT) -> DistributedError:
    return DistributedError(
        f"not there within {timeout_s:.0f} s: {problem}", code="rank-absent", where=where, hint=hint
    )


def _agree(callers: Callers, came: Sequence[tuple[Caller, Handshake]], deadline: float) -> None:
    """Answer all ranks that have called."""
    for caller, conversation in came:
        with suppress(OSError):
            caller.say(conversation.sealed(LISTENER, _AGREED), deadline)
    _part(callers, [caller for caller, _ in came], deadline)


def _part(callers: Callers, staying: Sequence[Caller], deadline: float) -> None:
    """Let answered callers close their connections first, so that this port is free at once."""
    parting = min(deadline, time.monotonic() + _PARTING_S)
    while any(caller in callers.all() for caller in staying) and time.monotonic() < parting:
        callers.wait(_TICK_S)


def _hear(callers: Callers, key: bytes, word: bytes, deadline: float, beside: _Beside) -> bool:
    """Return True if ``word`` came in time, and before the work ``beside`` has failed.

    Other callers are dropped.
    """
    while (left := deadline - time.monotonic()) > 0 and beside.error is None:
        for caller, line in callers.wait(min(left, _TICK_S)):
            conversation = caller.conversation(key)
            if line is None or conversation.opened(CALLER, line) != word:
                callers.drop(caller)
                continue
            with suppress(OSError):
                caller.say(conversation.sealed(LISTENER, _AGREED), deadline)
                caller.proved = True
                _part(callers, [caller], deadline)
                return True
    return False


def _tell(host: str, key: bytes, word: bytes, deadline: float, proof: _Proof) -> str | None:
    """Say ``word`` to the rank that listens at ``host``, with repeated calls until ``deadline``.

    Returns the problem, or ``None`` if the word was accepted.
    """
    pause, problem = _PAUSES_S[0], "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        began = time.monotonic()
        try:
            most = _BRIEF_CALL_S if proof.since is None else _CALL_S
            call = Call(_address(host), min(left, most))
        except ValueError as error:
            return str(error)
        except OSError as error:
            problem = fate_of(error)
            proof.look(began, error, host)
            if proof.given:
                return problem
        else:
            proof.blocked = False
            problem = _say(call, key, word, deadline)
            if problem is None:
                return None
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])
    return problem


def _say(call: Call, key: bytes, word: bytes, deadline: float) -> str | None:
    """Say ``word`` in a call; return the problem, or ``None`` if the word was accepted."""
    try:
        with call:
            conversation = call.begin(key, min(deadline, time.monotonic() + _CALL_S))
            call.say(conversation.sealed(CALLER, word), deadline)
            # Waits until the deadline: a rank that has agreed does not listen any more.
            agreed = conversation.opened(LISTENER, call.line(_MOST_BYTES, deadline)) == _AGREED
    except Unproved:
        agreed = False
    except OSError as error:
        return str(error)
    return None if agreed else "another program listens there"


def _listen(host: str, whose: str) -> socket.socket:
    """Listen at the address of this rank; ``whose`` ("the ring") is for messages.

    Raises:
        ValueError: ``host`` is not an address.
        PortTakenError: another program listens there.
        DistributedError: listening fails for another reason.
    """
    name, port = _address(host)
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        # As MLX does: a launcher may keep the port for this rank.
        return listen_at(
            family, (str(address[0]), port), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)
        )
    except (OSError, OverflowError, UnicodeError) as error:
        trouble = cannot_listen(error, name, port, _SETTINGS)
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        told = f"cannot bind {host}, where this rank of {whose} is to listen: {trouble.message}"
        if taken:
            raise PortTakenError(told, code="port-in-use", hint=trouble.hint) from None
        raise DistributedError(told, code="port-unavailable", hint=trouble.hint) from None


def _address(host: str) -> tuple[str, int]:
    name, _, port = host.rpartition(":")
    return name.strip("[]"), int(port)
