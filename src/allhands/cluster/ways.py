"""The connections between ranks that meet: where rank 0 listens, what may block connections to it,
and whether each rank can reach the ranks that its back-end will call.

The ranks that have met try the same connections as their back-end will make, so that the back-end
does not wait in vain. All ranks listen at their ports while all try. So if a connection fails, the
reason is not that a rank is late, but usually a firewall. The kernel accepts these connections; no
rank reads or writes anything on them.
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
_SUSPECT_S = 5.0  # without an answer, after which a firewall is suspected
_CALL_S = 5.0  # for one try, in which the system sends the first packet again and again
_REFUSED_S = 2.0  # in which refused connections are tried again
_PAUSE_S = 0.1


def listening_address(point: MeetingPoint, patience: Patience) -> str:
    """Return the address at which rank 0 listens: the one that the launcher named.

    If that cannot be used, return the empty address, which means all addresses of this computer,
    and show a line that says why.
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
    """Return whether this is a loopback address, which other computers cannot reach."""
    return address.startswith("127.")


class Suspicion:
    """The suspicion that something blocks connections to rank 0.

    It is reported once, with what to do, when it has lasted for some seconds.
    """

    def __init__(self, point: MeetingPoint) -> None:
        self._point = point
        self._since: float | None = None
        self._told = False

    def note(self, reason: str, began: float, blocked: bool) -> str | None:
        """Record that a visit to rank 0 has failed; return the text for the user if it is time.

        Args:
            reason: why it has failed.
            began: when the visit began.
            blocked: whether something may block the connection.
        """
        self._since = (self._since or began) if blocked else None
        if self._told or self._since is None or time.monotonic() - self._since < _SUSPECT_S:
            return None
        self._told = True
        text = f"rank 0 at {self._point.host} cannot be reached: {reason}; or that computer is not up yet"
        return f"{text}. If it is up, {self.way_out}"

    @property
    def way_out(self) -> str:
        """What the user can do."""
        host, ports = self._point.host, self._point.ports
        opened = f"open TCP ports {min(ports)} to {max(ports)} of {host} for this computer"
        return (
            f"{opened}; `allhands cluster check --hosts localhost,{host}` finds what is in the way"
        )


def open_door(door: ExitStack, peer: str) -> str:
    """Listen at this rank's own address and port until ``door`` is closed.

    Return what is wrong if that is not possible, otherwise an empty text.
    """
    address, port = _address(peer)
    try:
        # Another socket may reserve the port for this rank.
        door.enter_context(
            listen_at(socket.AF_INET, (address, port), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))
        )
    except OSError as error:
        return f"it cannot listen at {peer}: {cannot_listen(error, address, port).message}"
    return ""


def targets(backend: Backend, rank: int, size: int) -> list[int]:
    """Return the ranks to which this one will connect: the next one in the ring, and with NCCL also
    rank 0.
    """
    called = [(rank + 1) % size, *([0] if backend == "nccl" else [])]
    return [other for other in dict.fromkeys(called) if other != rank]


def blocked_way(backend: Backend, rank: int, peers: Sequence[str]) -> str:
    """Return which of a rank's connections fail, and how; empty if none does.

    All ranks must listen at ``peers`` meanwhile.
    """
    for other in targets(backend, rank, len(peers)):
        if fate := _call(_address(peers[other])):
            return (
                f"rank {other} listens at {peers[other]}, but connections from rank {rank} {fate}"
            )
    return ""


def _call(address: tuple[str, int]) -> str:
    """Try to connect; return in words how it fails, or an empty text."""
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
