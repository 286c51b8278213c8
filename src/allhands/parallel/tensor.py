"""Tensor parallelism: ranks of a group have parts of each block's matrices, and compute the same
rows.

Ranks along the axis ``tensor`` of the mesh are one copy of the model
(:mod:`allhands.parallel.matrices`). Ranks along ``data`` compute other rows with the same parts,
and add up gradients. A sum over all ranks counts each copy once, because the numbers of a group's
other ranks are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import gather_json
from allhands.distributed.packed import Left
from allhands.distributed.reduce import sum_over_ranks
from allhands.errors import NumericsError
from allhands.io.formatting import counted
from allhands.io.trees import numbers as values_of
from allhands.kernels.fused.flat_params import FlatParams
from allhands.parallel.base import Exchanging, Expected, OneByOne, Strategy
from allhands.parallel.matrices import Matrices
from allhands.parallel.named import by_name, with_changed
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Passes
from allhands.parallel.sums import Gradients, Named, Reduced

# Adapters begin with zeros, so some gradients are zero in the first step.
_CHECKED_STEPS = 2
_MOST_APART = 1e-3
# Part of the largest gradient: smaller differences are rounding.
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
        self._whole = WholeArrays(exchanging.matrices, exchanging)
        self._leaves: FlatParams | None = None
        self.left: list[Left] = []
        self.regions = self._matrices.regions

    def prepare(self, passes: Passes, expected: Expected) -> None:
        self._leaves = None if passes.flat is None else passes.flat.leaves

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        mine = passes.accumulate(micro_batches, passes.run, lazy_end=False)
        # Sums within passes come before those of gradients on all ranks.
        mx.eval(mine.sums, [grad for _, grad in mine.grads])
        return self._whole.counted(mine)

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        exchanging, data = self._exchanging, self._matrices.data
        exchanging.heartbeat("reduce")
        arrays = with_changed(
            self._leaves, mine.grads, self._whole.summed(by_name(self._leaves, mine.grads))
        )
        if data.size > 1:
            arrays, _ = sum_over_ranks(data, arrays, bucket_bytes=exchanging.bucket_bytes)
            mx.eval(arrays)
        grads = [(name, array) for (name, _), array in zip(mine.grads, arrays, strict=True)]
        own = [array for name, array in by_name(self._leaves, grads) if self._whole.counts(name)]
        squares = mx.zeros(()) if data.rank else sum_of_squares(own)
        return exchanging.reduced(grads, numbers, squares, extra)

    def one_by_one(self, passes: Passes) -> OneByOne:
        return OneByOne(passes.one_by_one(), self._exchanging.same_rows)


class WholeArrays:
    """The whole arrays on ranks with parts of matrices: their gradients, and their part of sums.

    If nothing is divided, this does nothing.
    """

    def __init__(self, matrices: Matrices | None, exchanging: Exchanging) -> None:
        self._matrices = matrices
        self._exchanging = exchanging
        self._unchecked = _CHECKED_STEPS

    def counted(self, mine: Gradients) -> Gradients:
        """Return the sums of a step, with zeros for the numbers of all ranks of a group but the
        first.
        """
        if self._matrices is None or self._matrices.tensor.rank == 0:
            return mine
        return replace(mine, sums=mx.zeros_like(mine.sums), counts=dict.fromkeys(mine.counts, 0))

    def counts(self, name: str) -> bool:
        """True if this rank counts the array in the norm of its group."""
        matrices = self._matrices
        return matrices is None or matrices.tensor.rank == 0 or not matrices.is_whole(name)

    def summed(self, named: Sequence[Named]) -> dict[str, mx.array]:
        """Return by name the sums of the gradients of which each rank of the group has a part.

        Called on all ranks together, of a group with the same arrays.

        Raises:
            NumericsError: gradients differ that must be equal on all ranks of a group.
        """
        matrices = self._matrices
        if matrices is None:
            return {}
        partial = [(name, array) for name, array in named if name in matrices.partial]
        sums, _ = sum_over_ranks(
            matrices.tensor,
            [array for _, array in partial],
            bucket_bytes=self._exchanging.bucket_bytes,
        )
        mx.eval(sums)
        changed = {name: total for (name, _), total in zip(partial, sums, strict=True)}
        if self._unchecked:
            self._unchecked -= 1
            self._check(
                [
                    (name, changed.get(name, array))
                    for name, array in named
                    if matrices.is_whole(name)
                ]
            )
        return changed

    def _check(self, whole: Sequence[Named]) -> None:
        """Compare the gradients of whole arrays, which must be equal on all ranks of the group.

        Raises:
            NumericsError: they differ; raised on all ranks of all groups.
        """
        assert self._matrices is not None
        group, world = self._matrices.tensor, self._exchanging.communicator
        # Other groups may have other arrays.
        wrong = self._unlike(whole, group)
        if not values_of(world.all_sum(mx.array([float(len(wrong))])))[0]:
            return
        names = list(dict.fromkeys(name for each in gather_json(world, wrong) for name in each))
        more = f" and of {counted(len(names) - 1, 'other array')}" if len(names) > 1 else ""
        raise NumericsError(
            f"the gradient of {names[0]}{more} differs between ranks that have the whole array",
            code="gradients-differ-between-ranks",
            where=f"--tp {group.size}",
            hint="this is a defect of allhands: nothing was updated; leave --tp out, and report it",
        )

    def _unlike(self, whole: Sequence[Named], group: Communicator) -> list[str]:
        """Return the names of arrays that differ between ranks of a group by more than rounding."""
        arrays = [array.astype(mx.float32) for _, array in whole]
        if not arrays:
            return []
        sums, _ = sum_over_ranks(group, arrays, bucket_bytes=self._exchanging.bucket_bytes)
        mx.eval(sums)
        means = [each / group.size for each in sums]
        most = values_of(mx.stack([mx.abs(mean).max() for mean in means]))
        apart = [mx.abs(mean - array).max() for mean, array in zip(means, arrays, strict=True)]
        nothing = _NOTHING * max(most)
        return [
            name
            for (name, _), distance, largest in zip(
                whole, values_of(mx.stack(apart)), most, strict=True
            )
            if distance > max(_MOST_APART * largest, nothing)
        ]
