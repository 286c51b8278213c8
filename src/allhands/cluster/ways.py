"""The ways between ranks that meet: where rank 0 listens, what may be in the way to it, and from
each to the next.

Before a back-end waits in vain, the ranks that have met connect as it is going to. Each rank
listens at its port while all try: so a connection that fails is no matter of time, and what is in
the way is mostly a firewall. The kernel takes the calls; nobody is let in, and nothing is said.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack

from allhands.cluster.patience import Patience
from allhands.cluster.place import LOOPBACK, Backend, MeetingPoint
from allhands.runtime.callers import listen_at
from allhands.runtime.ports import cannot_listen, fate_of, kind_of

_EVERYWHERE = ""
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain")
_SUSPECT_S = 5.0  # without an answer, until something may be in the way
_CALL_S = 5.0  # in which the first packet of a call is sent again and again
_REFUSED_S = 2.0  # for a rank that listens to refuse all the time
_PAUSE_S = 0.1


def listening_address(point: MeetingPoint, patience: Patience) -> str:
    """Return the address that the launcher named; all of this computer's, and why, where it is none
    that can be had.
    """
    host = point.host
    if point.is_local:
        return LOOPBACK
    try:
        address = patience.resolve(host)
    except OSError as error:
        reason = f"the name {host} has no address here ({error.strerror or error})"
    else:
        try:
            with socket.socket() as probe:
                probe.bind((address, 0))
        except OSError as error:
            named = host if host == address else f"{host} is {address}, which"
            reason = f"{named} is no address of this computer ({error.strerror})"
            if error.errno != errno.EADDRNOTAVAIL:
                reason = f"rank 0 cannot listen at {address} ({error.strerror})"
        else:
            if not is_loopback(address) or host in _LOOPBACK_NAMES or host == address:
                return address
            reason = f"{host} is {address} here, which no other computer can reach"
    patience.tell(f"rank 0 listens on all addresses of this computer: {reason}")
    return _EVERYWHERE


def is_loopback(address: str) -> bool:
    """Return whether no other computer can reach this one by the address."""
    return address.startswith("127.")


class Suspicion:
    """Suspicion that something blocks the way to rank 0, with the remedy; said once, when it has
    lasted for long.
    """

    def __init__(self, point: MeetingPoint) -> None:
        self._point = point
        self._since: float | None = None
        self._told = False

    def note(self, reason: str, began: float, blocked: bool) -> str | None:
        """Take in why a visit that began then has failed; the words for a person, if it is time for
        them.
        """
        self._since = (self._since or began) if blocked else None
        if self._told or self._since is None or time.monotonic() - self._since < _SUSPECT_S:
            return None
        self._told = True
        text = f"rank 0 at {self._point.host} cannot be reached: {reason}; or that computer is not up yet"
        return f"{text}. If it is up, {self.way_out}"

    @property
    def way_out(self) -> str:
        """Return the remedy."""
        host, ports = self._point.host, self._point.ports
        opened = f"open TCP ports {min(ports)} to {max(ports)} of {host} for this computer"
        return (
            f"{opened}; `allhands cluster check --hosts localhost,{host}` finds what is in the way"
        )


def open_door(door: ExitStack, peer: str) -> str:
    """Listen at this address and port of ours, until ``door`` is closed; what is wrong if that
    cannot be, or nothing.
    """
    address, port = _address(peer)
    try:
        # The port may be kept for this rank by another socket.
        door.enter_context(
            listen_at(socket.AF_INET, (address, port), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))
        )
    except OSError as error:
        return f"it cannot listen at {peer}: {cannot_listen(error, address, port).message}"
    return ""


def targets(backend: Backend, rank: int, size: int) -> list[int]:
    """Return the ranks that this one is going to call: the next one in the ring, with NCCL the
    first one, too.
    """
    called = [(rank + 1) % size, *([0] if backend == "nccl" else [])]
    return [other for other in dict.fromkeys(called) if other != rank]


def blocked_way(backend: Backend, rank: int, peers: Sequence[str]) -> str:
    """Describe what blocks a rank's calls to others that all listen at ``peers``; empty if nothing
    does.
    """
    for other in targets(backend, rank, len(peers)):
        if fate := _call(_address(peers[other])):
            return (
                f"rank {other} listens at {peers[other]}, but connections from rank {rank} {fate}"
            )
    return ""


def _call(address: tuple[str, int]) -> str:
    """Return the fate of connections there, if they fail."""
    began = time.monotonic()
    while True:
        try:
            with socket.create_connection(address, timeout=_CALL_S):
                return ""
        except OSError as error:
            if kind_of(error) == "dropped" or time.monotonic() - began > _REFUSED_S:
                return fate_of(error)
        time.sleep(_PAUSE_S)


def _address(peer: str) -> tuple[str, int]:
    address, _, port = peer.rpartition(":")
    return address, int(port)
