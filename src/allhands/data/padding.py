"""Estimate of a run's padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from allhands.data.arrays import Ints
from allhands.data.order import GlobalOrder, micro_batches

# The first batches of an epoch are a random sample of it.
_SAMPLED_BATCHES = 500


@dataclass(frozen=True)
class Padding:
    """Batches and padding of an epoch on one process.

    Attributes:
        batches_per_epoch: batches of ``batch_size`` examples (with packing: rows), the smaller last
            one included.
        share: share of the computed places that hold padding, 0 to 1; estimated on at most 500
            batches.
        random_share: the same share if batches were random and each were padded to its longest
            example.
        rows: rows of an epoch with packing; None without.
    """

    batches_per_epoch: int
    share: float
    random_share: float
    rows: int | None


def estimate_padding(work: Ints, tokens: int, options: Any) -> Padding:
    """Estimate the batches and padding of an epoch on one process.

    Args:
        work: (num_examples,) inputs that must be computed for each example.
        tokens: number of tokens of all examples.
        options: has batch_size, packing, max_seq_length, seed and sizing of a run.
    """
    size = options.batch_size
    if options.packing:
        rows = max(0, -(-(tokens - 1) // options.max_seq_length))
        return Padding(-(-rows // size), 0.0, 0.0, rows)
    order = GlobalOrder(work, size, options.seed)
    total = order.batches_per_epoch
    sizing = options.sizing.fitted(work)
    padded = sizing.padded(work)
    batches = [order.batch(i) for i in range(min(total, _SAMPLED_BATCHES))]
    parts = [
        p
        for b in batches
        for p in micro_batches(b, padded[b], sizing.max_tokens, sizing.overhead_tokens)
    ]
    shuffled = np.random.default_rng(options.seed).permutation(len(work))
    random = [shuffled[i * size : (i + 1) * size] for i in range(len(batches))]
    return Padding(total, _padding(work, padded, parts), _padding(work, work, random), None)


def _padding(work: Ints, padded: Ints, parts: list[Ints]) -> float:
    """Share of the places of ``parts`` that hold no example."""
    places = sum(int(padded[part].max()) * len(part) for part in parts)
    return 1 - sum(int(work[part].sum()) for part in parts) / places if places else 0.0
