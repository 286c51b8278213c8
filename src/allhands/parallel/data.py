"""Plain data parallelism, and the sharded optimizer state on top of it (ZeRO-1, arXiv 1910.02054).

Every rank has all weights and computes its share of the global batch; gradients are summed over
ranks. In :class:`DataParallel` the exchange follows the passes. In :class:`OverlappedData`
gradients are exchanged while others are computed. Both queue the next step's first pass before the
last step's update is computed, and in both each rank may keep and update a part of the optimizer's
state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import MlxGroup, moved_to
from allhands.distributed.packed import Left, Packing
from allhands.distributed.reduce import (
    Lookups,
    PendingReduce,
    count_parts,
    packed_sum_over_ranks,
    start_all_gather,
    start_all_reduce,
    start_sum,
    sum_over_ranks,
    whole_count,
)
from allhands.distributed.shards import Shards
from allhands.io.trees import flatten
from allhands.io.trees import numbers as values_of
from allhands.kernels.fused.flat_params import FlatParams
from allhands.parallel.base import Exchanging, Expected, OneByOne, Strategy
from allhands.parallel.lookups import TravellingLookups, with_lookups
from allhands.parallel.norms import squares_of, sum_of_squares
from allhands.parallel.passes import Computed, Passes
from allhands.parallel.sums import Gradients, Named, Reduced, Times, places_of_all

# The second step with overlap, which no longer compiles, and then one step of this number queue
# nothing ahead, to measure the rest of the exchange.
_LOOK_EVERY = 64


@dataclass(frozen=True)
class Ahead:
    """A pass that was queued before its step began.

    Attributes:
        batch: its batch.
        weights: the flat weights of the pass.
        computed: its sums and gradients, lazy.
        pending: the exchange of its gradients, if it was started as well.
    """

    batch: MicroBatch
    weights: list[mx.array]
    computed: Computed
    pending: PendingReduce | None


def plain(exchanging: Exchanging, overlap: bool) -> Strategy:
    """Make the strategy of ``--strategy data``."""
    return OverlappedData(exchanging) if overlap else DataParallel(exchanging)


def divided_optimizer(exchanging: Exchanging, overlap: bool) -> Strategy:
    """Make the strategy of ``--strategy zero1``."""
    return (
        OverlappedData(exchanging, divides=True)
        if overlap
        else DataParallel(exchanging, divides=True)
    )


class DataParallel(Strategy):
    """:class:`~allhands.parallel.base.Strategy`: passes first, then one exchange of everything."""

    name = "data"

    def __init__(self, exchanging: Exchanging, *, divides: bool = False) -> None:
        """``divides``: whether each rank keeps and updates a part of the optimizer's state, if
        possible.
        """
        self._exchanging = exchanging
        self.communicator = exchanging.communicator
        self._divides = divides
        if divides:
            self.name = "zero1"
        self.ahead: Ahead | None = None
        self._stream: Any = (
            None  # of the exchange; None: everything is computed before and after it
        )
        codec = exchanging.codec if exchanging.size > 1 else None
        self._packing = None if codec is None else Packing(exchanging.communicator, codec)
        self.left: list[Left] = []
        self._left_next: list[Left] = []  # set after the update that uses these gradients

    def prepare(self, passes: Passes, expected: Expected) -> None:
        # On a GPU with its own memory another method than waiting for each pass limits memory.
        self.sees_passes = (
            self._exchanging.size > 1 and passes.run_ahead is None and not self.overlaps
        )
        if self._packing is not None:
            self.left = self._packing.nothing_left(passes.trained())

    def place(self, leaves: FlatParams | None) -> Shards | None:
        communicator = self._exchanging.communicator
        if leaves is not None and self._divides and communicator.size > 1:
            shards = Shards(communicator, [chunk.shape for chunk in leaves.chunks], leaves.tables)
            self.shards = shards if any(shards.divided) else None
        return self.shards

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        ahead, self.ahead = self.ahead, None
        computed, pending, used = list[Computed](), None, False
        # Not if other code has set weights since.
        fits = ahead is not None and bool(micro_batches) and ahead.batch is micro_batches[0]
        if (
            ahead is not None
            and fits
            and passes.flat is not None
            and ahead.weights is passes.flat.weights()
        ):
            computed, pending, used = [ahead.computed], ahead.pending, True
        del ahead

        def run(batch: MicroBatch) -> Computed:
            return computed.pop() if computed else self._run(passes, batch)

        lazy_end = not self._exchanging.cpu_native and (self._exchanging.size == 1 or self.overlaps)
        mine = passes.accumulate(micro_batches, run, lazy_end=lazy_end)
        return replace(mine, pending=pending, ahead=used)

    def _run(self, passes: Passes, batch: MicroBatch) -> Computed:
        return passes.run(batch)

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        exchanging, squares = self._exchanging, None
        arrays = [grad for _, grad in mine.grads]
        size = exchanging.bucket_bytes
        every = [*numbers, *places_of_all(extra, exchanging.communicator)]
        if self._packing is None:
            sums, totals = sum_over_ranks(exchanging.communicator, arrays, every, bucket_bytes=size)
        else:
            exchanging.heartbeat("reduce")
            found = packed_sum_over_ranks(
                self._packing, arrays, self.left, every, bucket_bytes=size
            )
            sums, totals, self._left_next = found
        if (shards := self.shards) is not None:
            # This rank's own parts of all that it has, so that no second exchange is needed for the
            # norm.
            squares = sum(map(squares_of, sums), mx.zeros(()))
            sums = [mx.contiguous(shards.part(i, whole)) for i, whole in enumerate(sums)]
        if exchanging.cpu_native or exchanging.size > 1:
            exchanging.heartbeat("reduce")
            mx.eval(sums, totals, [] if squares is None else squares)
        if not exchanging.cpu_native and exchanging.size > 1:
            exchanging.heartbeat("update")
        return Reduced(
            _named(mine.grads, sums), totals, squares, num_gathered=exchanging.size * len(extra)
        )

    def reduce_numbers(
        self,
        mine: Gradients,
        numbers: Sequence[float | mx.array],
        squares: mx.array,
        extra: Sequence[float],
    ) -> tuple[mx.array, int, float, int]:
        """Sum ``numbers`` over ranks without the gradients.

        Returns:
            The sums with the extra numbers, all ranks' trained tokens, the sum of ``squares``, and
            how many of the first are extra numbers.
        """
        every = [*numbers, *count_parts(mine.num_targets), squares]
        reduced = DataParallel.reduce(self, replace(mine, grads=[]), every, extra)
        at, values = len(numbers), values_of(reduced.totals)
        units, rest, squares_of_all = values[at : at + 3]
        totals = mx.concatenate([reduced.totals[:at], reduced.totals[at + 3 :]])
        return totals, whole_count(units, rest), squares_of_all, reduced.num_gathered

    def whole(self, parts: list[mx.array]) -> list[mx.array]:
        if self.shards is None:
            return parts
        exchanging = self._exchanging
        size = exchanging.bucket_bytes
        return start_all_gather(
            exchanging.communicator, parts, self.shards, bucket_bytes=size, stream=self._stream
        )

    def after_update(self, step: int) -> None:
        # Not before the update: if it is left out, its rounding errors must not be sent later.
        self.left = self._left_next

    def start_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """Queue the next pass early, because the host needs time to build it, and the device would
        idle.
        """
        micro_batches = upcoming()
        if passes.flat is None or not micro_batches:
            return
        batch, early = micro_batches[0], self._starts_early(micro_batches)
        if not early and batch.shape not in passes.shapes:
            return
        if passes.run_ahead is not None:
            passes.run_ahead.before(max(each.inputs.size for each in micro_batches))
        if batch.shape not in passes.shapes:
            passes.note(batch)
        weights = passes.flat.weights()
        computed, pending = self._hand_out(passes, batch, early=early)
        self.ahead = Ahead(batch, weights, computed, pending)
        mx.async_eval(computed.sums, computed.grads)

    def _starts_early(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """True if the exchange of the next step's gradients starts with its first pass; equal on
        all ranks.
        """
        return False

    def _hand_out(
        self, passes: Passes, batch: MicroBatch, *, early: bool
    ) -> tuple[Computed, PendingReduce | None]:
        """The next step's first pass, with its exchange if that starts ``early``."""
        return passes.run(batch), None

    def wait(self, reduced: Reduced, arrays: Any, handed_out: Times, started: float) -> Times:
        mx.eval(arrays)
        if self._exchanging.size > 1:
            return handed_out
        # On one rank this includes the passes themselves.
        return Times(handed_out.compute_s + time.perf_counter() - started, handed_out.comm_s)

    def one_by_one(self, passes: Passes) -> OneByOne:
        return OneByOne(passes.one_by_one(), self._exchanging.same_rows)

    def forget(self) -> None:
        self.ahead = None


class OverlappedData(DataParallel):
    """:class:`DataParallel` with the exchange during the passes: for NCCL, which sends from the
    GPU.

    With the other back-ends the host sends and receives, and a GPU that waits for it may be taken
    for dead.
    """

    overlaps = True
    passes_wait = True

    def __init__(self, exchanging: Exchanging, *, divides: bool = False) -> None:
        communicator = exchanging.communicator
        # All exchanges go over one stream, so that their order is the same on all ranks.
        own = communicator.stream if isinstance(communicator, MlxGroup) else None
        stream: Any = own or mx.new_stream(mx.default_device())
        super().__init__(
            replace(exchanging, communicator=moved_to(communicator, stream)), divides=divides
        )
        self._stream = stream
        self._apart: TravellingLookups | None = None
        self._cuts = set[int]()
        self._exposed = _Exposed()

    def prepare(self, passes: Passes, expected: Expected) -> None:
        super().prepare(passes, expected)
        leaves = None if passes.flat is None else passes.flat.leaves
        self._cuts = set() if leaves is None else leaves.before_attention
        size, codec = self._exchanging.size, self._exchanging.codec
        self._apart = TravellingLookups.of(
            passes.model, passes.flat, size, passes.objective, passes.computing, codec
        )

    def _run(self, passes: Passes, batch: MicroBatch) -> Computed:
        return passes.run(batch, self._apart if batch.sole else None)

    def _starts_early(self, micro_batches: Sequence[MicroBatch]) -> bool:
        # Only facts that all ranks know may decide on an exchange: other ranks may have compiled
        # other shapes.
        return len(micro_batches) == 1 and micro_batches[0].sole

    def _hand_out(
        self, passes: Passes, batch: MicroBatch, *, early: bool
    ) -> tuple[Computed, PendingReduce | None]:
        if not early:
            return super()._hand_out(passes, batch, early=early)
        computed = self._run(passes, batch)
        # Contiguous, because a transposed gradient makes the optimizer's pass several times slower.
        computed = replace(computed, grads=tree_map(mx.contiguous, computed.grads))
        arrays = [grad for _, grad in flatten(computed.grads)]
        return computed, self._start(arrays, computed.lookups, self._left_next)

    def _start(
        self, arrays: list[mx.array], lookups: Lookups | None, left: list[Left]
    ) -> PendingReduce:
        """Exchange gradients while they are computed."""
        exchanging = self._exchanging
        pending = start_all_reduce(
            exchanging.communicator,
            arrays,
            bucket_bytes=exchanging.bucket_bytes,
            stream=self._stream,
            shards=self.shards,
            lookups=lookups,
            cuts=self._cuts,
            packed=None if self._packing is None else (self._packing, left),
        )
        return with_lookups(pending, self.shards)

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        communicator, shards = self._exchanging.communicator, self.shards
        pending = mine.pending or self._start(
            [grad for _, grad in mine.grads], mine.lookups, self.left
        )
        self._left_next = pending.left
        every = list(numbers)
        if shards is not None:
            # Arrays that all ranks have count only on the first rank.
            parts = zip(pending.arrays, shards.divided, strict=True)
            every.append(
                sum_of_squares([part for part, divided in parts if divided or shards.first])
            )
        every += places_of_all(extra, communicator)
        totals = start_sum(communicator, every, stream=self._stream)
        squares = None if shards is None else totals[len(numbers)]
        gathered = communicator.size * len(extra)
        return Reduced(
            _named(mine.grads, pending.arrays),
            totals,
            squares,
            tuple(pending.computed),
            num_gathered=gathered,
        )

    def start_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        # Work that is queued ahead keeps the host until the exchange is over, so its time cannot be
        # measured.
        if not self._exposed.looks_now():
            super().start_next(passes, upcoming)

    def wait(self, reduced: Reduced, arrays: Any, handed_out: Times, started: float) -> Times:
        """Wait for this rank's passes, then for the last sum, which is the rest of the exchange
        after them.

        If the next pass was queued in between, the exchange counts with its share of the time at the
        last measurement.
        """
        mx.eval(list(reduced.computed))
        passed = time.perf_counter()
        self._exchanging.heartbeat("reduce")
        mx.eval(reduced.totals)
        reduced_at = time.perf_counter()
        self._exchanging.heartbeat("update")
        # Until now the time of the exchange was that of queueing it.
        whole_s = handed_out.whole_s + reduced_at - started
        seen = (reduced_at - passed) / whole_s if self.ahead is None else None
        comm_s = self._exposed.share(seen) * whole_s
        mx.eval(arrays)
        return Times(whole_s - comm_s, comm_s)


class _Exposed:
    """The exchange's part of a step's time after the passes, measured in steps that queue nothing
    ahead.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._share = 0.0

    def looks_now(self) -> bool:
        """True if this step is measured."""
        return self._steps % _LOOK_EVERY == 1

    def share(self, seen: float | None) -> float:
        """Count the step, and return the exchange's share of it; ``seen`` is ``None`` if it was not
        measured.
        """
        self._steps += 1
        if seen is not None:
            self._share = seen
        return self._share


def _named(named: list[Named], arrays: Sequence[mx.array]) -> list[Named]:
    """``arrays`` with the names of ``named``."""
    return [(name, array) for (name, _), array in zip(named, arrays, strict=True)]
