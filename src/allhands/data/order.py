"""The global order of samples: a pure function of (seed, epoch, batch), for any number of ranks.

Examples of similar length are put into the same batch, because padding is wasted work: the epoch is
shuffled, sorted by length within pools of ``POOL_BATCHES`` batches, cut into batches, and the
batches are shuffled again. Every example is used exactly once an epoch; the last batch may be
smaller.

Both shuffles are computed place by place (:class:`Shuffle`), so nothing is kept of an epoch: any
batch of any epoch costs the same, and memory does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from allhands.data.arrays import Array, Hashes, Ints

POOL_BATCHES = 64
# Six rounds are the fewest that simple tests cannot tell from random at every size (in theory, four
# are enough).
_ROUNDS = 6


class Shuffle:
    """A pseudo-random permutation of ``range(size)``, computed on demand in O(1) memory.

    A Feistel network over the smallest even number of bits that holds ``size``, applied until the
    value is below ``size`` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The
    round function is the finaliser of SplitMix64 (Steele et al., 2014). Only integers are used, so
    the result is the same on every machine.
    """

    def __init__(self, size: int, *key: int) -> None:
        """``key``: non-negative integers that name the permutation."""
        self._size = size
        self._half_bits = np.uint64(max(1, -(-max(size - 1, 1).bit_length() // 2)))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._round_keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def at(self, places: Array) -> Ints:
        """Return the members of ``range(size)`` at ``places``, (n,), each below ``size``."""
        values = self._permute(places.astype(np.uint64))
        # Values outside follow their cycle. About a quarter of the domain or more is inside, so
        # few steps are needed.
        while len(outside := np.flatnonzero(values >= self._size)):
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64)

    def _permute(self, values: Hashes) -> Hashes:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (mix(right + key) & self._half_mask)
        return (left << self._half_bits) | right


def mix(values: Hashes) -> Hashes:
    """Hash each of ``values``, one to one: the finaliser of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class GlobalOrder:
    """The examples of each batch of a run.

    Attributes:
        lengths: (num_examples,) tokens of each example.
        batch_size: examples a global batch.
        seed: the run's seed.
    """

    lengths: Array
    batch_size: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one pass over the data, the smaller last one included."""
        return -(-len(self.lengths) // self.batch_size)

    def epoch(self, iteration: int) -> int:
        """Return the pass (from 0) that batch number ``iteration`` (from 0) belongs to."""
        return iteration // self.batches_per_epoch

    def batch(self, iteration: int) -> Ints:
        """Example numbers of batch ``iteration`` (from 0): (<= batch_size,)."""
        epoch, index = divmod(iteration, self.batches_per_epoch)
        place = int(Shuffle(self.batches_per_epoch, self.seed, epoch, 1).at(np.array([index]))[0])
        pool, within = divmod(place, POOL_BATCHES)
        start = within * self.batch_size
        return self._pool(epoch, pool)[start : start + self.batch_size]

    def longest(self, most_pools: int = 16) -> list[Ints]:
        """Return the batches of the longest examples in each of the first pools of an epoch.

        If a pool's last batch is incomplete, the batch before it is returned too.
        """
        found: list[Ints] = []
        for pool in range(min(most_pools, -(-self.batches_per_epoch // POOL_BATCHES))):
            members = self._pool(0, pool)
            last = (len(members) - 1) // self.batch_size * self.batch_size
            starts = {last, max(0, last - self.batch_size)}
            found += [members[start : start + self.batch_size] for start in sorted(starts)]
        return found

    @lru_cache(maxsize=8)  # noqa: B019 - an order lives as long as its run; eight small pools are kept at most
    def _pool(self, epoch: int, pool: int) -> Ints:
        """Return the examples of ``POOL_BATCHES`` batches of an epoch, in order of length."""
        size = POOL_BATCHES * self.batch_size
        places = np.arange(pool * size, min((pool + 1) * size, len(self.lengths)))
        members = Shuffle(len(self.lengths), self.seed, epoch, 0).at(places)
        # A stable sort keeps the shuffled order among equals, so the result is one function of the
        # seed.
        return members[np.argsort(self.lengths[members], kind="stable")]


def divide(
    examples: Ints,
    lengths: Array,
    weights: tuple[float, ...],
    *,
    before: Sequence[float] = (),
    some: Collection[int] = (),
) -> list[Ints]:
    """Cut a global batch into one share a rank, by tokens, in proportion to the ranks' speeds.

    The longest example goes first, each to the rank that would be finished with it earliest
    (Graham's LPT rule). A rank may get nothing. The union of the shares is the batch, whatever the
    weights.

    Args:
        examples: example numbers of the batch.
        lengths: (num_examples,) tokens of every example of the data set.
        weights: relative speed of each rank, all positive.
        before: tokens that each rank has already from earlier batches of the same update; default:
            none.
        some: ranks that must get an example, if possible: a rank without one takes the shortest
            from a rank that has several.
    """
    longest_first = examples[np.lexsort((examples, -lengths[examples]))]
    load = np.asarray(before, dtype=np.float64) if len(before) else np.zeros(len(weights))
    load = load.copy()
    speed = np.asarray(weights, dtype=np.float64)
    shares: list[list[int]] = [[] for _ in weights]
    for example in longest_first:
        rank = int(np.argmin((load + lengths[example]) / speed))
        load[rank] += lengths[example]
        shares[rank].append(int(example))
    for rank in sorted(some):
        # The longest examples come first, so a share ends with its shortest.
        givers = [other for other in range(len(shares)) if len(shares[other]) > 1]
        if not shares[rank] and givers:
            giver = min(givers, key=lambda other: int(lengths[shares[other][-1]]))
            shares[rank].append(shares[giver].pop())
    return [np.asarray(share, dtype=np.int64) for share in shares]


def micro_batches(examples: Ints, sizes: Ints, max_tokens: int, overhead_tokens: int) -> list[Ints]:
    """Split a rank's share into micro-batches of similar lengths at the least cost.

    Cost of a split = padded tokens + ``overhead_tokens`` for each micro-batch. Dynamic programming
    over the examples in order of length finds the minimum. No micro-batch exceeds ``max_tokens``
    padded tokens unless a single example does.

    Args:
        examples: example numbers of the share.
        sizes: the padded length of each of ``examples``.
    """
    if len(examples) == 0:
        return []
    by_size = np.lexsort((examples, sizes))
    order, sizes = examples[by_size], sizes[by_size]
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
    parts: list[Ints] = []
    end = count
    while end > 0:
        parts.append(order[cut[end] : end])
        end = int(cut[end])
    return parts[::-1]
