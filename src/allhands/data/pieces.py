"""Pieces of rows: the token positions that a rank of a context group computes.

With N ranks a row is cut into 2 N pieces of one length, the last ones padded. Rank r has the pieces
r and 2 N - 1 - r. A place attends to all places before it, so later pieces cost more; with one
early and one late piece, every rank has the same cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from allhands.data.arrays import Array
from allhands.data.loader import MicroBatch, pad_targets


@dataclass(frozen=True)
class Pieces:
    """The two pieces of each row on rank ``rank`` of a context group of ``size`` ranks."""

    rank: int
    size: int

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers of this rank's pieces in a row."""
        return self.rank, 2 * self.size - 1 - self.rank

    def length(self, width: int) -> int:
        """Return the length of a piece of rows of this width."""
        return -(-width // (2 * self.size))

    def width(self, width: int) -> int:
        """Return the width of the rows once they are filled up to whole pieces."""
        return 2 * self.size * self.length(width)

    def filled_up(self, values: Array, fill: int = 0) -> Array:
        """Fill rows up to whole pieces with ``fill``: (B, T, ...) -> (B, width(T), ...)."""
        width = values.shape[1]
        missing = self.width(width) - width
        return np.pad(
            values, [(0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)], constant_values=fill
        )

    def of(self, values: Array) -> Array:
        """Return this rank's pieces of each row: (B, T, ...) -> (2 B, length(T), ...).

        The first pieces of all rows come before the second pieces.
        """
        length = self.length(values.shape[1])
        whole = self.filled_up(values)
        return np.concatenate(
            [whole[:, number * length : (number + 1) * length] for number in self.numbers]
        )

    def of_batch(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's pieces of ``batch`` as rows of their own.

        ``num_tokens`` is divided over the ranks, so its sum over the group is that of the batch.
        The document numbers are still those of the whole rows, padded to (B, width(T)), because a
        place also attends to places on other ranks.
        """
        rows, width = batch.inputs.shape
        length = self.length(width)
        row, place = np.divmod(batch.positions, width)
        number, place = np.divmod(place, length)
        first, second = self.numbers
        own = ((number == first) | (number == second)) & (batch.targets >= 0)
        positions = ((number == second) * rows + row) * length + place
        found = replace(
            batch,
            inputs=self.of(batch.inputs),
            positions=positions[own].astype(np.int32),
            targets=batch.targets[own],
            num_tokens=self._share(batch.num_tokens),
            examples=np.tile(batch.examples, 2),
            documents=None if batch.documents is None else self.filled_up(batch.documents, -1),
        )
        if not len(found.targets):  # a loss needs at least one place; target -1 counts nothing
            found = replace(
                found, positions=np.zeros(1, np.int32), targets=np.full(1, -1, np.int32)
            )
        return pad_targets(found) if (batch.targets < 0).any() else found

    def _share(self, count: int) -> int:
        return count * (self.rank + 1) // self.size - count * self.rank // self.size
