"""Rules by which a share of a batch is cut into micro-batches and padded on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Number of lengths that compiled steps may have. 48 lengths keep padding under 3 % on real chats,
# and make some hundred compiled shapes.
NUM_RUNGS = 48
# Number of distinct lengths from which the rungs are chosen.
_CANDIDATES = 512


@dataclass(frozen=True)
class Sizing:
    """The limits by which a share is cut and padded on this device.

    Attributes:
        max_tokens: most padded tokens of a micro-batch.
        overhead_tokens: fixed cost of one more micro-batch, in tokens.
        few_shapes: True if lengths and numbers of trained places are rounded up, because each new
            shape costs time.
        num_rungs: number of lengths in the ladder that :meth:`fitted` makes.
        ladder: allowed padded lengths, ascending; a length above the last is not padded, and no
            length is if the ladder is empty.
        alike: True if a micro-batch has rows of one length alone, because padding would change
            results. Then there is no ladder.
    """

    max_tokens: int
    overhead_tokens: int = 32
    few_shapes: bool = False
    num_rungs: int = NUM_RUNGS
    ladder: tuple[int, ...] = ()
    alike: bool = False

    def fitted(self, work: NDArray[Any]) -> Sizing:
        """Return these limits with the best ladder for windows of the lengths ``work``; unchanged
        without :attr:`few_shapes`, or with :attr:`alike`.
        """
        if self.alike or not self.few_shapes:
            return self
        return replace(self, ladder=best_ladder(work, self.num_rungs))

    def padded(self, lengths: NDArray[Any]) -> NDArray[np.int64]:
        """Return the padded length for each of ``lengths``."""
        rungs = np.asarray(self.ladder, dtype=np.int64)
        place = np.searchsorted(rungs, lengths)
        return np.where(place < len(rungs), np.append(rungs, 0)[place], lengths).astype(np.int64)


def best_ladder(lengths: NDArray[Any], num_rungs: int) -> tuple[int, ...]:
    """Return up to ``num_rungs`` lengths, ascending; rounding ``lengths`` up to these adds the
    least padding.

    The solution is exact by dynamic programming over the distinct lengths. These are first rounded
    up to a grain, so that no more than 512 remain.
    """
    if len(lengths) == 0:
        return ()
    grain = -(-int(lengths.max()) // _CANDIDATES)
    values, counts = np.unique(
        -(-np.asarray(lengths, dtype=np.int64) // grain) * grain, return_counts=True
    )
    until = np.concatenate([[0], np.cumsum(counts)])
    cost = np.concatenate([[0.0], np.full(len(values), np.inf)])
    cuts: list[NDArray[np.int64]] = []
    for _ in range(min(num_rungs, len(values))):
        # The last rung for the first `end` values is the largest of them; lower rungs serve the
        # first `start` values.
        table = cost[None, :] + values[:, None] * (until[1:, None] - until[None, :])
        table[np.arange(len(values))[:, None] < np.arange(len(values) + 1)[None, :]] = np.inf
        cuts.append(table.argmin(axis=1))
        cost = np.concatenate([[np.inf], table.min(axis=1)])
    rungs: list[int] = []
    end = len(values)
    for cut in reversed(cuts):
        rungs.append(int(values[end - 1]))
        end = int(cut[end - 1])
    return tuple(rungs[::-1])
