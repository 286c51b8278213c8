"""Mesh of ranks: this process's place among the others along named axes, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, get_args

from allhands.errors import ConfigError
from allhands.io.formatting import counted

Axis = Literal["data", "pipe", "shard", "tensor", "expert", "context"]
# The first axis is for the slowest link. Ranks that differ only on the last axis have neighbouring
# numbers, so they are usually on one computer. Stages hand on activations, which are little beside
# the parameters that ranks along "shard" fetch.
AXES: tuple[Axis, ...] = get_args(Axis)


class Coordinates(NamedTuple):
    """A rank's place on each axis, from 0."""

    data: int
    pipe: int
    shard: int
    tensor: int
    expert: int
    context: int


@dataclass(frozen=True)
class Mesh:
    """The processes of a run, ordered along named axes, and this one's place.

    Each axis divides something among its ranks:

    - ``data``: the rows of a batch, among copies of the model;
    - ``pipe``: the layers;
    - ``shard``: the rows *and* the stored parameters (fully sharded);
    - ``tensor``: the matrices;
    - ``expert``: the rows *and* the experts;
    - ``context``: the token positions of a row.

    Ranks along ``expert`` and ``context`` may divide the stored parameters, too. Rank numbers
    increase along the last axis first, like the indices of a C array. Without sizes all ranks are
    on ``data``.

    Attributes:
        rank: number of this process, 0 to ``size - 1``.
        size: number of processes, the product of the axes.
        local_rank: number of this process on its host.
        local_size: processes on this host.
        weights: relative speed of each data rank, which gives its share of a batch; empty: all are
            equal.
        data: size of the axis ``data``; ``None``: ``size`` divided by the other axes' sizes.
        pipe, shard, tensor, expert, context: sizes of the other axes.
        storing: the axes along which ranks have different parts of the stored parameters.

    Raises:
        ConfigError: the axes' sizes do not make ``size`` ranks, or the number of weights is not
            that of data ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    weights: tuple[float, ...] = ()
    data: int | None = None
    pipe: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    storing: tuple[Axis, ...] = ("shard",)

    def __post_init__(self) -> None:
        self._check_places()
        object.__setattr__(self, "data", self._checked_data())
        check_weights(self.weights or None, self.data_size)
        object.__setattr__(self, "weights", tuple(self.weights) or (1.0,) * self.data_size)

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which writes files and prints messages."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of this rank's share of each batch; ranks with the same share differ only on other
        axes.

        Rows are divided over ``data``, ``shard`` and ``expert``. A fully sharded rank computes rows
        of its own with parameters that it gathers. A rank with some of the experts sends tokens of
        its rows to the other ranks. Ranks along ``pipe``, ``tensor`` and ``context`` work together
        on the same rows.
        """
        place = self.coordinates()
        return (place.data * self.shard + place.shard) * self.expert + place.expert

    @property
    def data_size(self) -> int:
        """Number of shares of a batch: the product of the sizes of ``data``, ``shard`` and
        ``expert``.
        """
        return self.size_of("data") * self.shard * self.expert

    @property
    def parts(self) -> int:
        """Number of parts into which each stored array is divided; 1: ranks have whole arrays."""
        return math.prod(map(self.size_of, self.storing))

    @property
    def copies(self) -> int:
        """Number of ranks with the same parts of weights, which add up their gradients."""
        return self.size_of("data") * (1 if "context" in self.storing else self.context)

    def part_of(self, rank: int) -> int:
        """Return the number of the part of every stored array that ``rank`` has."""
        return self._group(self.coordinates(rank), self.storing).index(rank)

    def size_of(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return self._sizes()[AXES.index(axis)]

    def coordinates(self, rank: int | None = None) -> Coordinates:
        """Return the place of ``rank``; default: of this rank."""
        left = self.rank if rank is None else rank
        if not 0 <= left < self.size:
            raise ConfigError(
                f"there is no rank {left} among {self.size}", code="rank-out-of-range", where=_WHERE
            )
        found: list[int] = []
        for size in reversed(self._sizes()):
            left, place = divmod(left, size)
            found.append(place)
        return Coordinates(*reversed(found))

    def rank_at(self, place: Coordinates) -> int:
        """Return the rank whose coordinates these are."""
        rank = 0
        for size, at in zip(self._sizes(), place, strict=True):
            rank = rank * size + at
        return rank

    def members(self, *axes: Axis) -> tuple[int, ...]:
        """Return this rank's group along ``axes``, ascending: the ranks with the same other
        coordinates.
        """
        return self._group(self.coordinates(), axes)

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all groups along ``axes``, each with its members; every rank is in one of them."""
        others = [
            range(1 if axis in axes else size)
            for axis, size in zip(AXES, self._sizes(), strict=True)
        ]
        return tuple(self._group(Coordinates(*place), axes) for place in product(*others))

    def neighbours(self, axis: Axis) -> tuple[int | None, int | None]:
        """Return the ranks before and after this one on an axis, such as the stages of a pipeline;
        ``None`` at its ends.
        """
        members = self.members(axis)
        at = members.index(self.rank)
        return members[at - 1] if at else None, members[at + 1] if at + 1 < len(members) else None

    def _group(self, place: Coordinates, axes: Sequence[Axis]) -> tuple[int, ...]:
        if not axes or set(axes) - set(AXES):
            raise ConfigError(
                f"{', '.join(axes) or 'nothing'} is no axis",
                code="value-unknown",
                where=_WHERE,
                hint=f"name {_NAMES}",
            )
        ways = [
            range(size) if axis in axes else (at,)
            for axis, size, at in zip(AXES, self._sizes(), place, strict=True)
        ]
        return tuple(self.rank_at(Coordinates(*chosen)) for chosen in product(*ways))

    def _sizes(self) -> tuple[int, ...]:
        assert self.data is not None
        return self.data, self.pipe, self.shard, self.tensor, self.expert, self.context

    def _check_places(self) -> None:
        for name, rank, size in (
            ("", self.rank, self.size),
            ("local ", self.local_rank, self.local_size),
        ):
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{name}rank {rank} of {size}: ranks count from 0",
                    code="rank-out-of-range",
                    where=_WHERE,
                )

    def _checked_data(self) -> int:
        """Return the size of the data axis (ConfigError if the axes do not make ``size`` ranks)."""
        given = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        told = (
            " x ".join(f"{axis} {size}" for axis, size in given.items() if size != 1) or "no axis"
        )
        for axis, size in given.items():
            if size < 1:
                hint = "an axis has 1 rank or more"
                raise ConfigError(
                    f"{size} ranks along {axis}",
                    code="mesh-mismatch",
                    where=f"{_WHERE}: {axis}",
                    hint=hint,
                )
        others = math.prod(given.values())
        if (self.data is not None and others != self.size) or self.size % others:
            ranks = f"{self.size} rank{'s' * (self.size != 1)}"
            hint = f"choose sizes whose product is {self.size}, or start {counted(others, 'rank')}"
            raise ConfigError(
                f"{told} is {others}, which does not make up {ranks}",
                code="mesh-mismatch",
                where=_WHERE,
                hint=hint,
            )
        return self.data or self.size // others


def check_weights(weights: Sequence[float] | None, size: int) -> None:
    """Require one positive weight for each of ``size`` data ranks; ``None`` is allowed.

    Raises:
        ConfigError: the weights are not so.
    """
    if weights is not None and (
        len(weights) != size or not all(0 < weight < math.inf for weight in weights)
    ):
        wrong = (
            "weights that are not all above 0"
            if len(weights) == size
            else f"{counted(len(weights), 'weight')}"
        )
        raise ConfigError(
            f"{wrong} for {size} rank{'s' * (size != 1)}",
            code="rank-weights-mismatch",
            where="--rank-weights",
            hint="give one for each rank, for example '[2, 1]' where rank 0 is twice as fast as rank 1",
        )


_WHERE = "mesh"
_NAMES = ", ".join(AXES[:-1]) + f" or {AXES[-1]}"
