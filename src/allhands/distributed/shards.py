"""Division of arrays into equal parts, one for each rank, for a divided optimizer (ZeRO-1, arXiv
1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from allhands.distributed.backend import Communicator

# The size of a part is a multiple of this number, so that kernels' vectors and rows fit.
_ALIGNED = 64
# Smaller arrays are not divided: a call for one takes longer than the division saves.
_LEAST = 1 << 16


class Shards:
    """The parts of arrays, in the order of the ranks; small arrays stay whole, on every rank.

    An array that the number of ranks does not divide is filled up with zeros.

    Attributes:
        divided: for each array, whether it is divided.
    """

    def __init__(
        self,
        communicator: Communicator,
        shapes: Sequence[tuple[int, ...]],
        tables: Mapping[int, int] | None = None,
    ) -> None:
        """Divide arrays of ``shapes``.

        Args:
            shapes: shapes of the arrays; the last dimension of a matrix is 64, except in tables.
            tables: size of a row, by an array's index, for arrays whose parts must have whole rows.
        """
        self._rank, self._size = communicator.rank, communicator.size
        self._tables = dict(tables or {})
        self._shapes = [tuple(shape) for shape in shapes]
        self.divided = [math.prod(shape) >= _LEAST for shape in self._shapes]

    @property
    def first(self) -> bool:
        """True if this is the first rank, which counts the arrays that all ranks have."""
        return self._rank == 0

    @property
    def num_own(self) -> int:
        """Count of the numbers in this rank's parts of all arrays, without the added zeros."""
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
        """Return the size of a part of an array."""
        unit = math.lcm(_ALIGNED, self._tables.get(index, 1))
        return -(-math.prod(self._shapes[index]) // (self._size * unit)) * unit

    def range(self, index: int) -> tuple[int, int]:
        """Return start and stop of this rank's part in the flat array with the added zeros."""
        if not self.divided[index]:
            return 0, math.prod(self._shapes[index])
        each = self._each(index)
        return self._rank * each, (self._rank + 1) * each

    def zeros(self, index: int, dtype: mx.Dtype) -> mx.array:
        """Return zeros in the shape of this rank's part of an array."""
        return self.shaped(index, mx.zeros((self._each(index),), dtype=dtype))

    def own_rows(self, index: int, ids: mx.array, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Return N ids within this rank's part of a table, from 0, and (N, D) rows for them.

        Rows of other parts become zeros, with ids spread over this part: many additions to one row
        would be done one after the other.
        """
        count = self._each(index) // rows.shape[1]
        there = ids - self._rank * count
        mine = (there >= 0) & (there < count)
        return mx.where(mine, there, ids % count), mx.where(
            mine[:, None], rows, mx.zeros((), dtype=rows.dtype)
        )

    def padded(self, index: int, whole: mx.array) -> mx.array:
        """Return a flat array, filled up with zeros so that each rank has an equal part."""
        row = whole.reshape(-1)
        missing = self._size * self._each(index) - row.size
        return mx.concatenate([row, mx.zeros((missing,), dtype=row.dtype)]) if missing else row

    def part(self, index: int, whole: mx.array) -> mx.array:
        """Return this rank's part of an array, with as many dimensions; the whole array if it is
        not divided.
        """
        if not self.divided[index]:
            return whole
        each = self._each(index)
        return self.shaped(
            index, self.padded(index, whole)[self._rank * each : (self._rank + 1) * each]
        )

    def shaped(self, index: int, part: mx.array) -> mx.array:
        """Return the numbers of a part in the part's shape."""
        return part.reshape(-1, *self._shapes[index][1:])

    def whole(self, index: int, communicator: Communicator, part: mx.array) -> mx.array:
        """Return the lazy whole array from all ranks' parts; all ranks call this together."""
        if not self.divided[index]:
            return part
        shape = self._shapes[index]
        return communicator.all_gather(part.reshape(-1))[: math.prod(shape)].reshape(shape)
