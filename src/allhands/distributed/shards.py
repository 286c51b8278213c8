"""Arrays of which each rank keeps an equal part: what belongs to an optimizer (ZeRO-1, arXiv
1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from allhands.distributed.backend import Communicator

# Numbers of a part are a multiple, so that kernels' vectors and rows fit.
_ALIGNED = 64
# What is smaller is everybody's: a call for it takes longer than what it saves.
_LEAST = 1 << 16


class Shards:
    """The parts of some arrays, in the order of the ranks; small arrays stay whole, on every rank.

    Where the ranks do not divide an array, zeros follow it.

    Attributes:
        divided: whether each array is.
    """

    def __init__(
        self,
        communicator: Communicator,
        shapes: Sequence[tuple[int, ...]],
        tables: Mapping[int, int] | None = None,
    ) -> None:
        """Divide arrays of ``shapes``, whose last dimension is 64 if they have two.

        ``tables``: the numbers of a row, by an array's index, where parts have whole rows.
        """
        self._rank, self._size = communicator.rank, communicator.size
        self._tables = dict(tables or {})
        self._shapes = [tuple(shape) for shape in shapes]
        self.divided = [math.prod(shape) >= _LEAST for shape in self._shapes]

    @property
    def first(self) -> bool:
        """True if this is the first rank: to count what all have once."""
        return self._rank == 0

    @property
    def num_own(self) -> int:
        """Numbers of all arrays that this rank has a part in, without the zeros after them."""
        sizes = [math.prod(shape) for shape in self._shapes]
        return sum(
            min(stop, size) - min(start, size)
            for size, (start, stop) in zip(sizes, self._ranges, strict=True)
        )

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        return [self.range(index) for index in range(len(self._shapes))]

    def split(self, order: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the indices of arrays that are divided, and the others."""
        divided, whole = list[int](), list[int]()
        for index in order:
            (divided if self.divided[index] else whole).append(index)
        return divided, whole

    def _each(self, index: int) -> int:
        """Numbers of a part."""
        unit = math.lcm(_ALIGNED, self._tables.get(index, 1))
        return -(-math.prod(self._shapes[index]) // (self._size * unit)) * unit

    def range(self, index: int) -> tuple[int, int]:
        """Return the numbers of an array, and of the zeros after it, that this rank has: from the
        first up to the second.
        """
        if not self.divided[index]:
            return 0, math.prod(self._shapes[index])
        each = self._each(index)
        return self._rank * each, (self._rank + 1) * each

    def zeros(self, index: int, dtype: mx.Dtype) -> mx.array:
        """This rank's part of an array of zeros."""
        return self.shaped(index, mx.zeros((self._each(index),), dtype=dtype))

    def own_rows(self, index: int, ids: mx.array, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Return the (N, D) ``rows`` of a table that belong to this rank's part, with the ids
        there, from 0.

        Others are zeros, spread over the part: where one row has many, each is added after the
        other.
        """
        count = self._each(index) // rows.shape[1]
        there = ids - self._rank * count
        mine = (there >= 0) & (there < count)
        return mx.where(mine, there, ids % count), mx.where(
            mine[:, None], rows, mx.zeros((), dtype=rows.dtype)
        )

    def padded(self, index: int, whole: mx.array) -> mx.array:
        """Return an array as one row of which each rank has an equal part."""
        row = whole.reshape(-1)
        missing = self._size * self._each(index) - row.size
        return mx.concatenate([row, mx.zeros((missing,), dtype=row.dtype)]) if missing else row

    def part(self, index: int, whole: mx.array) -> mx.array:
        """This rank's part of an array, of as many dimensions; all of it if it is not divided."""
        if not self.divided[index]:
            return whole
        each = self._each(index)
        return self.shaped(
            index, self.padded(index, whole)[self._rank * each : (self._rank + 1) * each]
        )

    def shaped(self, index: int, part: mx.array) -> mx.array:
        """Return a part's numbers in its shape."""
        return part.reshape(-1, *self._shapes[index][1:])

    def whole(self, index: int, communicator: Communicator, part: mx.array) -> mx.array:
        """Return an array of all ranks' parts, lazily; called by every rank."""
        if not self.divided[index]:
            return part
        shape = self._shapes[index]
        return communicator.all_gather(part.reshape(-1))[: math.prod(shape)].reshape(shape)
