"""Groups of ranks along the axes of a mesh, as communicators on the stream that the process exchanges on."""

from __future__ import annotations

from allhands.distributed.backend import Communicator, MlxGroup, SingleProcess
from allhands.distributed.capabilities import can
from allhands.distributed.mesh import Axis, Mesh
from allhands.errors import ConfigError


def along(communicator: Communicator, mesh: Mesh, axis: Axis) -> Communicator:
    """The communicator of this rank's group along ``axis``; called by all ranks together, in the same order.

    Args:
        communicator: of all ranks of ``mesh``: it is returned itself where they are one group. Or of one process, which
            tries by itself what a rank would do.

    Raises:
        ConfigError: the back-end cannot make groups of some ranks.
    """
    members = mesh.members(axis)
    if len(members) == mesh.size or communicator.size == 1:
        return communicator
    if len(members) == 1:
        return SingleProcess()
    if isinstance(communicator, MlxGroup) and can(communicator.backend, "split"):
        return communicator.split(members)
    raise ConfigError(
        f"the {communicator.backend} back-end has no groups of some ranks, as stages need along {axis}",
        where=f"--backend {communicator.backend}",
        hint="use --backend mpi, or nccl on NVIDIA GPUs, or put all ranks on one axis",
    )
