"""Tensor parallelism: ranks of a group have parts of each block's matrices, and compute the same rows.

Ranks along the axis ``tensor`` of the mesh are one copy of the model (:mod:`allhands.parallel.matrices`). Those along
``data`` compute other rows with the same parts, and add up gradients. What is added up over all ranks is each copy's
once: the numbers of the group's other ranks are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator
from allhands.distributed.packed import Left
from allhands.distributed.reduce import sum_over_ranks
from allhands.errors import NumericsError
from allhands.io.trees import numbers as values_of
from allhands.kernels.fused.flat_params import FlatParams
from allhands.parallel.base import Exchanging, Expected, Strategy
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Passes
from allhands.parallel.sums import Gradients, Named, Reduced

# Adapters begin with zeros, through which no gradient goes back in the first step.
_CHECKED_STEPS = 2
_MOST_APART = 1e-3
# Of the largest gradient: what is below is rounding.
_NOTHING = 1e-6


def tensor(exchanging: Exchanging, overlap: bool) -> TensorParallel:
    """Make the strategy of ``--tp``."""
    return TensorParallel(exchanging)


class TensorParallel(Strategy):
    """:class:`~allhands.parallel.base.Strategy` of ranks that have divided the matrices of blocks."""

    name = "tensor"
    passes_wait = True

    def __init__(self, exchanging: Exchanging) -> None:
        assert exchanging.matrices is not None
        self.communicator = exchanging.communicator
        self._exchanging = exchanging
        self._matrices = exchanging.matrices
        self._leaves: FlatParams | None = None
        self._unchecked = _CHECKED_STEPS
        self.left: list[Left] = []
        self.regions = self._matrices.regions

    def prepare(self, passes: Passes, expected: Expected) -> None:
        self._leaves = None if passes.flat is None else passes.flat.leaves

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        mine = passes.accumulate(micro_batches, passes.run, lazy_end=False)
        # Sums within passes come before those of gradients on all ranks.
        mx.eval(mine.sums, [grad for _, grad in mine.grads])
        if self._matrices.tensor.rank == 0:
            return mine
        return replace(mine, sums=mx.zeros_like(mine.sums), counts=dict.fromkeys(mine.counts, 0))

    def reduce(self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()) -> Reduced:
        exchanging, matrices = self._exchanging, self._matrices
        exchanging.heartbeat("reduce")
        named = self._named(mine.grads)
        named = self._with_all_parts(named)
        if self._unchecked:
            self._unchecked -= 1
            self._check([(name, array) for name, array in named if matrices.is_whole(name)])
        arrays = self._as_before(mine.grads, named)
        if matrices.data.size > 1:
            arrays, _ = sum_over_ranks(matrices.data, arrays, bucket_bytes=exchanging.bucket_bytes)
            mx.eval(arrays)
        grads = [(name, array) for (name, _), array in zip(mine.grads, arrays, strict=True)]
        return exchanging.reduced(grads, numbers, self._squares(self._named(grads)), extra)

    def one_by_one(self, passes: Passes) -> tuple[Callable[[MicroBatch], tuple[mx.array, Any]], Communicator]:
        return passes.one_by_one(), self._matrices.tensor

    def _named(self, grads: Sequence[Named]) -> list[Named]:
        """Gradients by the names of the trained arrays."""
        if self._leaves is None:
            return list(grads)
        return [
            (place.name, part)
            for chunk, (_, array) in zip(self._leaves.chunks, grads, strict=True)
            for place, part in zip(chunk.places, chunk.parts(array), strict=True)
        ]

    def _as_before(self, grads: Sequence[Named], named: Iterable[Named]) -> list[mx.array]:
        """The reverse of :meth:`_named`; what has not changed is as it was."""
        found = dict(named)
        if self._leaves is None:
            return [found[name] for name, _ in grads]
        partial = self._matrices.partial
        return [
            chunk.joined([found[place.name] for place in chunk.places])
            if any(place.name in partial for place in chunk.places)
            else array
            for chunk, (_, array) in zip(self._leaves.chunks, grads, strict=True)
        ]

    def _with_all_parts(self, named: list[Named]) -> list[Named]:
        """``named`` with the sums of those gradients of which each rank of the group has a part."""
        matrices = self._matrices
        partial = [array for name, array in named if name in matrices.partial]
        sums, _ = sum_over_ranks(matrices.tensor, partial, bucket_bytes=self._exchanging.bucket_bytes)
        mx.eval(sums)
        rest = iter(sums)
        return [(name, next(rest) if name in matrices.partial else array) for name, array in named]

    def _squares(self, named: Sequence[Named]) -> mx.array:
        """() this rank's part of the sum of squares: whole arrays are the first rank's, all of them one copy's."""
        matrices = self._matrices
        if matrices.data.rank:
            return mx.zeros(())
        own = [array for name, array in named if matrices.tensor.rank == 0 or not matrices.is_whole(name)]
        return sum_of_squares(own)

    def _check(self, whole: Sequence[Named]) -> None:
        """Compare the gradients of whole arrays over the ranks of the group, on all of which they have to be the same.

        Raises:
            NumericsError: they are not, on all ranks of all groups.
        """
        group, world = self._matrices.tensor, self._exchanging.communicator
        arrays = [array.astype(mx.float32) for _, array in whole]
        sums, _ = sum_over_ranks(group, arrays, bucket_bytes=self._exchanging.bucket_bytes)
        mx.eval(sums)
        means = [each / group.size for each in sums]
        most = values_of(mx.stack([mx.abs(mean).max() for mean in means])) if means else []
        apart = [mx.abs(mean - array).max() for mean, array in zip(means, arrays, strict=True)]
        nothing = _NOTHING * max(most, default=0.0)
        wrong = np.array(
            [
                distance > max(_MOST_APART * largest, nothing)
                for distance, largest in zip(values_of(mx.stack(apart)) if apart else [], most, strict=True)
            ],
            dtype=np.float32,
        )
        if not wrong.size:
            return
        found = values_of(world.all_sum(mx.array(wrong)))
        names = [name for (name, _), count in zip(whole, found, strict=True) if count]
        if names:
            more = f" and of {len(names) - 1} other arrays" if len(names) > 1 else ""
            raise NumericsError(
                f"the gradient of {names[0]}{more} differs between ranks that have the whole array",
                where=f"--tp {group.size}",
                hint="this is a defect of allhands: nothing was updated; leave --tp out, and report it",
            )
