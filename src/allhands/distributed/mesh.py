"""The mesh of ranks: who this process is among the others, along two axes. Plain numbers, no device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from allhands.errors import ConfigError

Axis = Literal["data", "pipe"]
_WHERE = "mesh"


@dataclass(frozen=True)
class Mesh:
    """The processes of a run, ordered along two axes, and this one's place.

    ``data`` divides the rows of a batch among copies of the model, ``pipe`` the model's layers among stages. The ranks
    of one pipeline have neighbouring numbers, hence are mostly on one computer: the slowest link belongs to ``data``.

    Attributes:
        rank: number of this process, 0 to ``size - 1``.
        size: number of processes.
        local_rank: number of this process on its host.
        local_size: processes on this host.
        weights: relative speed of each data rank, by which its share of a batch is cut; empty: all are alike.
        pipe: ranks of a pipeline; the others are on ``data``.

    Raises:
        ConfigError: sizes that are not those of a mesh of ``size`` ranks, or weights that are not one a data rank.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    weights: tuple[float, ...] = ()
    pipe: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (("", self.rank, self.size), ("local ", self.local_rank, self.local_size)):
            if not 0 <= rank < size:
                raise ConfigError(f"{name}rank {rank} of {size}: ranks count from 0", where=_WHERE)
        if self.pipe < 1 or self.size % self.pipe:
            hint = "choose a number of stages that divides the number of ranks"
            raise ConfigError(f"{self.size} ranks make up no pipelines of {self.pipe}", where=_WHERE, hint=hint)
        check_weights(self.weights or None, self.data_size)
        object.__setattr__(self, "weights", tuple(self.weights) or (1.0,) * self.data_size)

    @property
    def is_main(self) -> bool:
        """True if this rank writes files and talks to the person."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of the share of each batch that this rank computes, together with the others of its pipeline."""
        return self.rank // self.pipe

    @property
    def data_size(self) -> int:
        """Number of shares of a batch, which is the number of pipelines."""
        return self.size // self.pipe

    def stage_of(self, rank: int) -> int:
        """The place of ``rank`` in its pipeline, from 0."""
        return rank % self.pipe

    @property
    def stage(self) -> int:
        """The place of this rank in its pipeline, from 0."""
        return self.stage_of(self.rank)

    def groups(self, axis: Axis) -> list[list[int]]:
        """All groups along an axis, each with its ranks in order; every rank is in one of them."""
        if axis == "pipe":
            return [list(range(first, first + self.pipe)) for first in range(0, self.size, self.pipe)]
        return [list(range(first, self.size, self.pipe)) for first in range(self.pipe)]

    def members(self, axis: Axis) -> list[int]:
        """The ranks of this one's group along an axis, in order."""
        return next(group for group in self.groups(axis) if self.rank in group)


def check_weights(weights: Sequence[float] | None, size: int) -> None:
    """Refuse weights that are not a positive one for each of ``size`` data ranks; ``None``: all are alike.

    Raises:
        ConfigError: they are not.
    """
    if weights is not None and (len(weights) != size or not all(0 < weight < math.inf for weight in weights)):
        wrong = "weights that are not all above 0" if len(weights) == size else f"{len(weights)} weights"
        raise ConfigError(
            f"{wrong} for {size} rank{'s' * (size != 1)}",
            where="--rank-weights",
            hint="give one for each rank, for example '[2, 1]' where rank 0 is twice as fast as rank 1",
        )
