"""Capabilities of MLX's back-ends besides sums and gathers; they are checked when a run is
configured.

Every back-end has ``all_sum``, ``all_max`` and ``all_gather``, which need no entry. An operation
that a back-end lacks is made of these, or refused by name.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise

from allhands.distributed.mesh import Axis, Mesh
from allhands.errors import ConfigError
from allhands.runtime.versions import version_of

# sum_scatter: each rank gets its part of a sum, for half the bytes of the whole sum.
# split: groups of some of the ranks.
# send_recv: from any rank to any other; send_recv_neighbours: to those beside it in the ring only.
# overlap: the device sends on a stream of its own, beside its computations; with other back-ends
#     the host sends, and a GPU that waits for the host may be taken for dead.
CAPABILITIES: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "ring": frozenset({"send_recv_neighbours"}),
    "mpi": frozenset({"send_recv", "split"}),
    "nccl": frozenset({"sum_scatter", "split", "overlap"}),
    "jaccl": frozenset({"sum_scatter", "send_recv"}),
}
# First release of MLX with an operation, if this project also runs with earlier releases.
_SINCE = {("jaccl", "sum_scatter"): (0, 32, 2)}


def can(backend: str, operation: str) -> bool:
    """Return whether a back-end of this MLX has an operation of :data:`CAPABILITIES`; an unknown
    back-end has none.
    """
    if backend == "jaccl" and _in_ring():
        operation = {"send_recv_neighbours": "send_recv", "send_recv": ""}.get(operation, operation)
    since = _SINCE.get((backend, operation))
    there = since is None or _release(version_of("mlx") or "") >= (*since, 0)
    return there and operation in CAPABILITIES.get(backend, ())


def _in_ring() -> bool:
    """Return whether JACCL's ranks have cables to their neighbours only.

    MLX looks only whether the variable exists, not at its value.
    """
    return "MLX_JACCL_RING" in os.environ or "JACCL_RING" in os.environ


def _release(version: str) -> tuple[int, ...]:
    """Return a version as numbers that can be compared; pre-releases come before the release."""
    found = re.match(r"(\d+)\.(\d+)\.?(\d*)(.*)", version)
    if found is None:
        return ()
    major, minor, patch, more = found.groups()
    before = re.match(r"\.?(dev|a|b|rc)", more) is not None
    return int(major), int(minor), int(patch or 0), -int(before)


def require_groups(backend: str, mesh: Mesh, *axes: Axis, alike: bool | None = None) -> None:
    """Refuse a mesh whose groups along ``axes`` the back-end can neither make nor imitate.

    Args:
        alike: whether all these groups exchange arrays of the same shapes at the same time; the
            whole world can then exchange for them. ``None``: True, except for groups of different
            stages of a pipeline.

    Raises:
        ConfigError: the back-end cannot.
    """
    if len(mesh.members(*axes)) in (1, mesh.size) or can(backend, "split"):
        return
    if alike is None:
        alike = mesh.pipe == 1 or "pipe" in axes
    if not alike:
        raise ConfigError(
            f"the {backend} back-end has no groups of some of the {mesh.size} ranks, and this division needs groups of "
            f"{len(mesh.members(*axes))}",
            code="backend-lacks-groups",
            where=f"--backend {backend}",
            hint="use --backend mpi, or nccl on NVIDIA GPUs, or divide the model in one way, over all ranks",
        )


def require_neighbours(backend: str, mesh: Mesh, axis: Axis) -> None:
    """Refuse a mesh if ranks that follow each other on ``axis`` cannot send to each other.

    Raises:
        ConfigError: the back-end cannot send between them.
    """
    for group in mesh.groups(axis):
        for rank, after in pairwise(group):
            require_way(backend, rank, after, mesh.size)


def require_way(backend: str, rank: int, peer: int, size: int) -> None:
    """Require that the back-end can send from ``rank`` to ``peer``, of ``size`` ranks.

    Raises:
        ConfigError: the back-end cannot, or there are no such ranks.
    """
    if rank == peer or not (0 <= rank < size and 0 <= peer < size):
        raise ConfigError(
            f"rank {rank} cannot send to rank {peer} of {size}",
            code="backend-lacks-route",
            where=f"--backend {backend}",
        )
    beside = (rank - peer) % size in (1, size - 1)
    if can(backend, "send_recv") or (beside and can(backend, "send_recv_neighbours")):
        return
    reach = "its neighbours only" if can(backend, "send_recv_neighbours") else "no single rank"
    raise ConfigError(
        f"rank {rank} cannot send to rank {peer}: over the {backend} back-end a rank sends to {reach}",
        code="backend-lacks-route",
        where=f"--backend {backend}",
        hint="use --backend mpi, where every rank sends to every other",
    )
