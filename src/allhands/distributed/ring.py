"""The order in which ranks join MLX's ring, where a call that comes too early costs a second and more.

The last rank calls the first, which then calls the second, and so on; who is not listening yet is called again after
one second, then after two more, for half a minute in all. So the word goes round before: every rank tells the next
one, at the address that MLX is going to call, that it and all before it are there. The last rank goes when it has
heard. Only neighbours talk to each other, as in the ring itself: others may have no cable between them. They know each
other by the hostfile, and by the secrets of :mod:`allhands.callers` where there are some.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from allhands.callers import CALLER, LISTENER, Call, Callers, Unproved, key_for, listen_at
from allhands.errors import DistributedError

_HINT = "check that every host of the hostfile answers at its address and that the ports are free"
# What another rank takes from its word to being called: a few milliseconds.
_HEAD_START_S = 0.02
_PAUSES_S = (0.005, 0.1)  # between two calls: the first, and the longest of those that double
_TALK_S = 2.0  # for somebody who has called to prove itself
_CALL_S = 5.0  # for a neighbour to answer, in all
_MOST_BYTES = 256  # of what one says
_AGREED = b"agreed"
_PARTING_S = 1.0
_TICK_S = 0.2


def take_turns(hostfile: Path, rank: int, timeout_s: float) -> None:
    """Return when this rank may join the ring of ``hostfile``.

    At once if the file cannot be read or this rank's address cannot be had: then it is MLX that fails, and says why.

    Raises:
        DistributedError: a neighbour was not there within ``timeout_s``.
    """
    hosts = _hosts(hostfile)
    if not 0 <= rank < len(hosts):
        return
    key = key_for(f"ring of {hashlib.sha256(json.dumps(hosts).encode()).hexdigest()}", os.environ)
    deadline = time.monotonic() + timeout_s
    try:
        listener = _listen(hosts[rank])
    except (OSError, ValueError):
        return
    with Callers([listener], _MOST_BYTES, _TALK_S) as callers:
        heard = rank == 0 or _hear(callers, key, b"%d is there" % (rank - 1), deadline)
    if not heard:
        raise _missing(rank - 1, hosts[rank - 1], timeout_s, f"said nothing to rank {rank} at {hosts[rank]}")
    if rank + 1 == len(hosts):
        time.sleep(_HEAD_START_S)
    elif problem := _tell(hosts[rank + 1], key, b"%d is there" % rank, deadline):
        raise _missing(rank + 1, hosts[rank + 1], timeout_s, problem)


def _hosts(hostfile: Path) -> list[str]:
    """The first address of every rank."""
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        return [str(addresses[0]) for addresses in json.loads(hostfile.read_text(encoding="utf-8"))]
    return []


def _missing(rank: int, host: str, timeout_s: float, problem: str) -> DistributedError:
    where = f"rank {rank} at {host}"
    return DistributedError(f"not there within {timeout_s:.0f} s: {problem}", where=where, hint=_HINT)


def _hear(callers: Callers, key: bytes, word: bytes, deadline: float) -> bool:
    """Whether ``word`` came in time; whoever talks nonsense or nothing at all is left standing."""
    while (left := deadline - time.monotonic()) > 0:
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


def _tell(host: str, key: bytes, word: bytes, deadline: float) -> str | None:
    """Say ``word`` to who listens at ``host``; what is wrong with that, if it was not to be done in time."""
    pause, problem = _PAUSES_S[0], "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with Call(_address(host), min(left, _CALL_S)) as call:
                conversation = call.begin(key, min(deadline, time.monotonic() + _CALL_S))
                call.say(conversation.sealed(CALLER, word), deadline)
                # As long as it takes: who has agreed listens no more.
                if conversation.opened(LISTENER, call.line(_MOST_BYTES, deadline)) == _AGREED:
                    return None
                problem = "somebody else listens there"
        except Unproved:
            problem = "somebody else listens there"
        except ValueError as error:
            return str(error)
        except OSError as error:
            problem = str(error)
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])
    return problem


def _listen(host: str) -> socket.socket:
    (family, _, _, _, address), *_ = socket.getaddrinfo(*_address(host), type=socket.SOCK_STREAM)
    # As MLX does: a launcher may keep the port for this rank.
    return listen_at(family, (str(address[0]), int(address[1])), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))


def _address(host: str) -> tuple[str, int]:
    name, _, port = host.rpartition(":")
    return name.strip("[]"), int(port)
