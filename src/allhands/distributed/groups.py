"""Groups of ranks along the axes of a mesh, as communicators.

Groups are MLX's own if the back-end has them, on the stream in use. Otherwise the whole world
exchanges for all groups at once. That is correct if all groups call the same collectives with the
same shapes in the same order.
"""

from __future__ import annotations

import mlx.core as mx

from allhands.distributed.backend import Communicator, MlxGroup, SingleProcess
from allhands.distributed.capabilities import can, require_groups
from allhands.distributed.mesh import Axis, Mesh


class GroupWithinWorld:
    """One of several equal groups that the whole world exchanges for.

    Every rank of the world calls each collective, at the same time and with the same shape. A sum
    is one sum over the world with a slot for each group: with N ranks in groups of g, a rank sends
    2 (N - 1) / g times the array, not 2 (g - 1) / g. An all-gather is one over the world, and the
    group's part is kept: N - 1 times the array, not g - 1.
    """

    def __init__(self, world: Communicator, groups: tuple[tuple[int, ...], ...]) -> None:
        self.world = world
        self._slots = len(groups)
        self._slot, self.members = next(item for item in enumerate(groups) if world.rank in item[1])
        self.rank = self.members.index(world.rank)
        self.size = len(self.members)
        self.backend = world.backend

    def all_sum(self, array: mx.array) -> mx.array:
        before = mx.zeros((self._slot, *array.shape), dtype=array.dtype)
        after = mx.zeros((self._slots - self._slot - 1, *array.shape), dtype=array.dtype)
        return self.world.all_sum(mx.concatenate([before, array[None], after]))[self._slot]

    def all_gather(self, array: mx.array) -> mx.array:
        everyone = self.world.all_gather(array[None])[mx.array(self.members)]
        return everyone.reshape(-1, *array.shape[1:])


def along(
    communicator: Communicator, mesh: Mesh, *axes: Axis, alike: bool | None = None
) -> Communicator:
    """Return the communicator of this rank's group along ``axes``.

    All ranks call this together, in the same order.

    Args:
        communicator: communicator of all ranks of ``mesh``; it is returned itself if all ranks are
            one group. A process on trial gives the communicator of one process.
        alike: True if all groups along these axes exchange the same shapes at the same time; see
            :func:`~allhands.distributed.capabilities.require_groups`.

    Raises:
        ConfigError: the back-end has no groups, and the world cannot exchange for them.
    """
    members = mesh.members(*axes)
    if len(members) == mesh.size or communicator.size == 1:
        return communicator
    if len(members) == 1:
        return SingleProcess()
    require_groups(communicator.backend, mesh, *axes, alike=alike)
    if isinstance(communicator, MlxGroup) and can(communicator.backend, "split"):
        return communicator.split(members)
    return GroupWithinWorld(communicator, mesh.groups(*axes))
