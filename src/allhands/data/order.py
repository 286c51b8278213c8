"""The global order of samples: a pure function of (seed, epoch, step), whatever the number of ranks.

Examples of similar length are put into the same batch, because padding is wasted work: the epoch is
shuffled, sorted by length within pools of ``POOL_BATCHES`` batches, cut into batches, and the batches are
shuffled again. Every example is used exactly once an epoch; the last batch may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

POOL_BATCHES = 32


@dataclass(frozen=True, eq=False)
class GlobalOrder:
    """Which examples make up each batch of a run.

    Attributes:
        lengths: (num_examples,) tokens of each example.
        batch_size: examples a global batch.
        seed: of the run.
    """

    lengths: NDArray[np.int64]
    batch_size: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one pass over the data, the smaller last one included."""
        return -(-len(self.lengths) // self.batch_size)

    def epoch(self, iteration: int) -> int:
        """The pass (from 0) that batch number ``iteration`` (from 0) belongs to."""
        return iteration // self.batches_per_epoch

    def batch(self, iteration: int) -> NDArray[np.int64]:
        """Example numbers of batch ``iteration`` (from 0): (<= batch_size,)."""
        epoch, index = divmod(iteration, self.batches_per_epoch)
        return self._epoch_batches(epoch)[index]

    @lru_cache(maxsize=2)  # noqa: B019 - an order lives as long as its run; two epochs are kept at most
    def _epoch_batches(self, epoch: int) -> list[NDArray[np.int64]]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        shuffled = random.permutation(len(self.lengths))
        pool = POOL_BATCHES * self.batch_size
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(shuffled), pool):
            members = shuffled[start : start + pool]
            # A stable sort keeps the shuffled order among equals, so the result is one function of the seed.
            members = members[np.argsort(self.lengths[members], kind="stable")]
            batches += [members[i : i + self.batch_size] for i in range(0, len(members), self.batch_size)]
        return [batches[i] for i in random.permutation(len(batches))]


def divide(
    examples: NDArray[np.int64], lengths: NDArray[np.int64], weights: tuple[float, ...]
) -> list[NDArray[np.int64]]:
    """Cut a global batch into one share a rank, by tokens, in proportion to the ranks' speeds.

    The longest example goes first, each to the rank that would be finished with it earliest (Graham's
    LPT rule). A rank may get nothing. The union of the shares is the batch, whatever the weights.

    Args:
        examples: example numbers of the batch.
        lengths: (num_examples,) tokens of every example of the data set.
        weights: relative speed of each rank, all positive.
    """
    longest_first = examples[np.lexsort((examples, -lengths[examples]))]
    load = np.zeros(len(weights))
    speed = np.asarray(weights, dtype=np.float64)
    shares: list[list[int]] = [[] for _ in weights]
    for example in longest_first:
        rank = int(np.argmin((load + lengths[example]) / speed))
        load[rank] += lengths[example]
        shares[rank].append(int(example))
    return [np.asarray(share, dtype=np.int64) for share in shares]


def micro_batches(
    examples: NDArray[np.int64], lengths: NDArray[np.int64], max_tokens: int, overhead_tokens: int
) -> list[NDArray[np.int64]]:
    """Split a rank's share into micro-batches of similar lengths at the least cost.

    Cost of a split = padded tokens + ``overhead_tokens`` for each micro-batch; found exactly by dynamic
    programming over the examples in order of length. No micro-batch exceeds ``max_tokens`` padded
    tokens unless a single example does.
    """
    if len(examples) == 0:
        return []
    order = examples[np.lexsort((examples, lengths[examples]))]
    sizes = lengths[order]
    count = len(order)
    best = np.full(count + 1, np.inf)
    best[0], cut = 0.0, np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        for start in range(end - 1, -1, -1):
            padded = int(sizes[end - 1]) * (end - start)
            if padded > max_tokens and end - start > 1:
                break
            cost = best[start] + padded + overhead_tokens
            if cost < best[end]:
                best[end], cut[end] = cost, start
    parts: list[NDArray[np.int64]] = []
    end = count
    while end > 0:
        parts.append(order[cut[end] : end])
        end = int(cut[end])
    return parts[::-1]
