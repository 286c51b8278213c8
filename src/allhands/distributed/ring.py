"""The order in which ranks join MLX's ring, where a call that comes too early costs a second and more.

The last rank calls the first, which then calls the second, and so on; who is not listening yet is called again after
one second, then after two more, for half a minute in all. So the word goes round before: every rank tells the next
one, at the address that MLX is going to call, that it and all before it are there. The last rank goes when it has
heard. Only neighbours talk to each other, as in the ring itself: others may have no cable between them.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from contextlib import suppress
from pathlib import Path

from allhands.errors import DistributedError

_HINT = "check that every host of the hostfile answers at its address and that the ports are free"
# What another rank takes from its word to being called: a few milliseconds.
_HEAD_START_S = 0.02
_PAUSES_S = (0.005, 0.1)  # between two calls: the first, and the longest of those that double
_TALK_S = 2.0  # for a line of somebody who has called, whoever it is
_CALL_S = 5.0
_AGREED = b"agreed\n"


def take_turns(hostfile: Path, rank: int, timeout_s: float) -> None:
    """Return when this rank may join the ring of ``hostfile``.

    At once if the file cannot be read or this rank's address cannot be had: then it is MLX that fails, and says why.

    Raises:
        DistributedError: a neighbour was not there within ``timeout_s``.
    """
    hosts = _hosts(hostfile)
    if not 0 <= rank < len(hosts):
        return
    word = b"allhands ring " + hashlib.sha256(json.dumps(hosts).encode()).hexdigest().encode()
    deadline = time.monotonic() + timeout_s
    try:
        listener = _listen(hosts[rank])
    except (OSError, ValueError):
        return
    with listener:
        heard = rank == 0 or _hear(listener, word + b" %d\n" % (rank - 1), deadline)
    if not heard:
        raise _missing(rank - 1, hosts[rank - 1], timeout_s, f"said nothing to rank {rank} at {hosts[rank]}")
    if rank + 1 == len(hosts):
        time.sleep(_HEAD_START_S)
    elif problem := _tell(hosts[rank + 1], word + b" %d\n" % rank, deadline):
        raise _missing(rank + 1, hosts[rank + 1], timeout_s, problem)


def _hosts(hostfile: Path) -> list[str]:
    """The first address of every rank."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        return [str(addresses[0]) for addresses in json.loads(hostfile.read_text(encoding="utf-8"))]
    return []


def _missing(rank: int, host: str, timeout_s: float, problem: str) -> DistributedError:
    where = f"rank {rank} at {host}"
    return DistributedError(f"not there within {timeout_s:.0f} s: {problem}", where=where, hint=_HINT)


def _hear(listener: socket.socket, word: bytes, deadline: float) -> bool:
    """Whether ``word`` came in time."""
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        # Whoever talks nonsense or nothing at all is left standing.
        with suppress(OSError):
            caller, _ = listener.accept()
            with caller:
                caller.settimeout(_TALK_S)
                if _line(caller, len(word)) == word:
                    caller.sendall(_AGREED)
                    # The caller closes first: then it is not this port that has to rest.
                    with suppress(OSError):
                        caller.recv(1)
                    return True
    return False


def _tell(host: str, word: bytes, deadline: float) -> str | None:
    """Say ``word`` to who listens at ``host``; what is wrong with that, if it was not to be done in time."""
    pause, problem = _PAUSES_S[0], "no time was left"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(_address(host), timeout=min(left, _CALL_S)) as call:
                # As long as it takes: who has agreed listens no more.
                call.settimeout(left)
                call.sendall(word)
                if _line(call, len(_AGREED)) == _AGREED:
                    return None
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
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As MLX does: a launcher may keep the port for this rank.
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _address(host: str) -> tuple[str, int]:
    name, _, port = host.rpartition(":")
    return name.strip("[]"), int(port)


def _line(talk: socket.socket, most: int) -> bytes:
    """Up to ``most`` bytes, to the end of a line or of what is said."""
    said = b""
    while len(said) < most and not said.endswith(b"\n") and (more := talk.recv(most - len(said))):
        said += more
    return said
