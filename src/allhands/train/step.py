"""One optimizer update. The only place where sums are divided by token counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from allhands.accelerator import device_memory
from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator, MlxGroup, on_stream
from allhands.distributed.reduce import (
    BUCKET_BYTES,
    Begun,
    Lookups,
    begin_sum,
    begin_sums,
    begin_wholes,
    sum_over_ranks,
)
from allhands.distributed.shards import Shards
from allhands.errors import NumericsError
from allhands.model.dropout import DropoutKeys
from allhands.model.fused import kernels
from allhands.train.batch_memory import arrays_of_batches
from allhands.train.gradient import batch_values, make_gradient, make_joined_gradient
from allhands.train.lookups import TravellingLookups, with_lookups
from allhands.train.native_update import NativeUpdate, native_update
from allhands.train.optim import clip
from allhands.train.poison import find_culprits
from allhands.train.result import SQUARES, StepResult, filled, not_finite, num_targets_of, own_numbers
from allhands.train.runahead import RunAhead
from allhands.train.update import GraphUpdate, initialise
from allhands.trees import flatten, number, numbers, unflatten

# Of steps that overlap the second, which no longer compiles, and then one of so many does nothing ahead, to see what
# remains of the exchange.
_LOOK_EVERY = 64


@dataclass(frozen=True)
class _Ahead:
    """A pass that was handed out before its step began.

    Attributes:
        batch: of which it is.
        weights: with which.
        loss: lazy, as is the next.
        grads: tree of sums.
        begun: their exchange, if that has been begun, too.
    """

    batch: MicroBatch
    weights: list[mx.array]
    loss: mx.array
    grads: Any
    begun: Begun | None


class TrainStep:
    """Forward, backward, sum over micro-batches and ranks, one division, clip, update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        communicator: Communicator,
        *,
        eager: bool,
        compiled: bool = True,
        max_grad_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        after_backward: Callable[[Any], Any] | None = None,
        dropout: DropoutKeys | None = None,
        non_finite: Literal["stop", "skip"] = "stop",
        packed: bool = False,
        beat: Callable[[str], None] = lambda phase: None,
        rehearse: Callable[[Literal["reduce", "update"]], object] = lambda point: None,
        overlap: bool | None = None,
        shard: bool = False,
    ) -> None:
        """Prepare to train ``model``.

        Args:
            after_backward: is given the tree of mean gradients, unclipped; may return what takes their place.
            dropout: of ``model``, as :func:`install_dropout` gave it.
            non_finite: whether a loss or gradient that is not finite is an error or leaves the update out.
            packed: whether windows are rows of packed documents, for messages.
            beat: is told "compute" (or "first", if a shape is compiled) before each micro-batch, "reduce" before
                waiting for other ranks and "update" before the optimizer's.
            rehearse: is asked before the exchange and the update whether to fail on purpose; "nan" spoils the gradient.
            overlap: whether gradients travel while others are computed; default: with NCCL. With the other back-ends
                the host sends and receives, and a GPU that waits for it may be taken for dead.
            shard: whether each rank keeps a part of the optimizer's state and updates it; see :attr:`shards`, and call
                :meth:`gather` before the optimizer's state is read. Not where ``after_backward`` wants whole gradients.
        """
        self.eager = eager
        self._model = model
        self._optimizer = optimizer
        self._traced = compiled and not eager
        self._dropout = dropout
        # Of the weights: by itself the optimizer would do it of the first gradients.
        initialise(optimizer, model)
        wanted = communicator.backend == "nccl" if overlap is None else overlap
        self._overlap = wanted and communicator.size > 1 and not eager
        self._graph = None
        if not eager:
            over = communicator if shard and after_backward is None else None
            self._graph = GraphUpdate(
                model, optimizer, max_grad_norm, compiled=compiled, divided_over=over, travelling=self._overlap
            )
        self._native = native_update(model, optimizer) if eager else None
        passes: Any = {"compiled": compiled, "dropout": dropout}
        leaves = None if self._graph is None else self._graph.leaves
        self._cuts = set[int]() if leaves is None else leaves.before_attention
        if self._graph is None or leaves is None:
            self._gradient = make_gradient(model, eager=eager, **passes)
        else:
            self._gradient = make_joined_gradient(model, self._graph, **passes)
        self._travelling: TravellingLookups | None = None
        if self._graph is not None and self._overlap:
            self._travelling = TravellingLookups.of(model, self._graph, communicator.size, **passes)
        self._lookups: Lookups | None = None
        # (B, T, N) of every micro-batch so far: a compiled step is traced once for each.
        self.shapes: set[tuple[int, int, int]] = set()
        self._max_grad_norm = max_grad_norm
        self._bucket_bytes = bucket_bytes
        self._after_backward = after_backward
        self._non_finite = non_finite
        self._window_name = "packed row" if packed else "training example"
        self._beat = beat
        self._rehearse = rehearse
        self._prepared: _Ahead | None = None
        self._ahead = RunAhead(device_memory(), exchanging=self._overlap) if kernels.available() else None
        self._arrays = arrays_of_batches()
        # All that ranks exchange goes over one stream, so that it is in one order on all of them.
        own = communicator.stream if isinstance(communicator, MlxGroup) else None
        self._stream: Any = (own or mx.new_stream(mx.default_device())) if self._overlap else None
        self._communicator = on_stream(communicator, self._stream)
        self._begun: Begun | None = None
        self._looks = 0
        self._exposed = 0.0

    @property
    def shards(self) -> Shards | None:
        """What this rank keeps and updates, if not everything."""
        return None if self._graph is None else self._graph.shards

    @property
    def graph(self) -> GraphUpdate | None:
        """What updates in the graph, if something does."""
        return self._graph

    def close(self) -> None:
        """Give MLX its own limit of memory back."""
        if self._ahead is not None:
            self._ahead.close()

    @property
    def needed_bytes(self) -> int:
        """What the largest step so far held with nothing ahead; 0 where nothing ever is."""
        return 0 if self._ahead is None else self._ahead.need

    @property
    def spare_bytes(self) -> int:
        """What else a GPU's own memory can hold meanwhile; 0 where that is not known."""
        return 0 if self._ahead is None else self._ahead.spare()

    def gather(self, *, keep: bool) -> None:
        """Let the optimizer's state be read where ``keep`` is; called by all ranks together. See :attr:`shards`."""
        if self._graph is not None:
            self._graph.gather(self._communicator, keep=keep)

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        stop: Callable[[], object] = lambda: False,
        upcoming: Callable[[], Sequence[MicroBatch]] = tuple,
        tell: Sequence[float] = (),
    ) -> StepResult:
        """Update the model by one global batch, of which ``micro_batches`` is this rank's share (may be empty).

        Args:
            stop: whether this rank has been asked to stop, asked once it has computed; all ranks learn of it in
                :attr:`StepResult.stop_votes`.
            upcoming: gives the micro-batches of the step after this one, if there is one; asked while a device works.
            tell: numbers of this rank for all others, as many on each rank, where gradients travel beside the passes:
                what is exchanged between two steps would wait there until the next one's passes are over. See
                :attr:`StepResult.told`.

        Raises:
            NumericsError: loss or gradient is not finite, on every rank alike; the model is unchanged.
        """
        started = time.perf_counter()
        if self._ahead is not None:
            self._ahead.before(max((batch.inputs.size for batch in micro_batches), default=0))
        loss, grads = self._accumulate(micro_batches)
        begun, self._begun = self._begun, None
        if self._rehearse("reduce") == "nan":
            grads = [(name, mx.full(grad.shape, math.nan, dtype=grad.dtype)) for name, grad in grads]
            # Where the gradient is on its way already, the loss does it.
            loss = loss if begun is None else mx.array(math.nan)
        computed = time.perf_counter()
        mine = own_numbers(loss, micro_batches, bool(stop()))
        if self._overlap:
            begun = begun or self._begin([grad for _, grad in grads])
            sums = _named(grads, begun.arrays)
            if self._graph is not None and self._graph.shards is not None:
                mine.append(self._graph.squares(begun.arrays))
            mine += self._told_by_rank(tell)
            totals = begin_sum(self._communicator, mine, stream=self._stream)
        else:
            sums, totals = self._reduce(grads, mine)
        del grads
        reduced = time.perf_counter()
        timed = StepResult(0.0, 0, 0, 0.0, 0, computed - started, reduced - computed)
        if self._native is not None:
            result = self._update_natively(self._native, sums, totals, timed)
        elif self._graph is None:
            result = self._update_by_hand(sums, totals, timed)
        else:
            waiting = None if begun is None else partial(self._wait, begun.computed)
            del begun
            result = self._update_in_graph(sums, totals, timed, upcoming, waiting)
        if self._ahead is not None:
            self._ahead.after()
        if self._overlap and tell:
            result = replace(result, told=tuple(numbers(totals)[-self._communicator.size * len(tell) :]))
        if problem := not_finite(result):
            # Every rank has the same sums and comes here. What is thrown away makes room for the search.
            del sums
            return self._refuse(result, problem, micro_batches)
        return result

    def _update_by_hand(self, sums: list[tuple[str, mx.array]], totals: mx.array, timed: StepResult) -> StepResult:
        """Look at the numbers, then update the model if all are finite. Empties ``sums``."""
        num_targets = number(num_targets_of(totals))
        # The one division: by the trained tokens of all micro-batches and all ranks.
        mean = unflatten([(name, g / max(num_targets, 1.0)) for name, g in sums])
        sums.clear()  # what nobody holds, MLX computes in place
        if self._after_backward is not None and (given := self._after_backward(mean)) is not None:
            mean = given
        clipped, norm = clip(mean, self._max_grad_norm)
        del mean
        result = filled(timed, totals, norm)
        if not not_finite(result):
            self._beat("update")
            self._rehearse("update")
            self._optimizer.update(self._model, clipped)
            del clipped
            mx.eval(self._model.trainable_parameters(), self._optimizer.state)
        return result

    def _update_natively(
        self, update: NativeUpdate, sums: list[tuple[str, mx.array]], totals: mx.array, timed: StepResult
    ) -> StepResult:
        """As :meth:`_update_by_hand`; the one division is a factor of the update."""
        num_targets = max(number(num_targets_of(totals)), 1.0)
        if self._after_backward is not None:
            given = self._after_backward(unflatten([(name, g / num_targets) for name, g in sums]))
            if given is not None:
                sums, num_targets = flatten(given), 1.0
        norm = update.norm(sums) / num_targets
        result = filled(timed, totals, mx.array(norm))
        if not not_finite(result):
            self._beat("update")
            self._rehearse("update")
            clipped = 1.0 if self._max_grad_norm is None else min(self._max_grad_norm / (norm + 1e-6), 1.0)
            update(sums, clipped / num_targets)
        return result

    def _update_in_graph(
        self,
        sums: list[tuple[str, mx.array]],
        totals: mx.array,
        timed: StepResult,
        upcoming: Callable[[], Sequence[MicroBatch]],
        waiting: Callable[[mx.array, StepResult, float], StepResult] | None,
    ) -> StepResult:
        """Update the model if all numbers are finite, then look at them.

        On one rank, and where the exchange goes on beside the passes (``waiting``), this is the first wait of a step.
        """
        assert self._graph is not None
        counted = num_targets_of(totals)
        if self._after_backward is not None:
            # Besides, and only as far as somebody looks at it.
            divisor = mx.maximum(counted, 1.0)
            named = [(name, (g / divisor).astype(g.dtype)) for name, g in self._graph.named(sums)]
            if (given := self._after_backward(unflatten(named))) is not None:
                sums, counted = self._graph.joined(given), mx.array(1.0)
        if self._communicator.size > 1 and waiting is None:
            self._beat("update")
        self._rehearse("update")
        begun = time.perf_counter()
        if self._graph.shards is None:
            norm = self._graph(sums, totals[0], counted)
        else:
            norm = self._graph(sums, totals[0], counted, squares=totals[SQUARES], exchange=self._wholes)
        if waiting is not None:
            mx.async_eval(norm, totals, self._graph.arrays())
        # What is handed out ahead keeps the host until the exchange is over, and nobody sees how long that took.
        if waiting is None or self._looks % _LOOK_EVERY != 1:
            self._prepare(upcoming())
        if waiting is not None:
            self._looks += 1
            timed = waiting(totals, timed, begun)
        mx.eval(norm, totals, self._graph.arrays())
        # On one rank this includes the passes themselves.
        waited = time.perf_counter() - begun if self._communicator.size == 1 else 0.0
        return filled(replace(timed, compute_s=timed.compute_s + waited), totals, norm)

    def _wait(self, computed: list[mx.array], totals: mx.array, timed: StepResult, begun: float) -> StepResult:
        """Wait for this rank's passes, then for the last sum: what remains of the exchange when they are done.

        Where the next pass was handed out in between, it is taken for the part of the time that it was when last seen.
        """
        mx.eval(computed)
        passed = time.perf_counter()
        self._beat("reduce")
        mx.eval(totals)
        reduced = time.perf_counter()
        self._beat("update")
        # What was called the exchange so far was handing it out.
        whole = timed.compute_s + timed.comm_s + reduced - begun
        if self._prepared is None:
            self._exposed = (reduced - passed) / whole
        return replace(timed, compute_s=(1.0 - self._exposed) * whole, comm_s=self._exposed * whole)

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Hand out the next step's first pass, of weights that are still being computed.

        Putting it together takes the host a while, in which a device would have nothing to do.
        """
        if self._graph is None or self._graph.leaves is None or not micro_batches:
            return
        batch = micro_batches[0]
        # Only what all ranks know may decide on an exchange: others may have compiled other shapes.
        early = self._overlap and len(micro_batches) == 1 and batch.sole
        if not early and batch.shape not in self.shapes:
            return
        if self._ahead is not None:
            self._ahead.before(max(each.inputs.size for each in micro_batches))
        if batch.shape not in self.shapes:
            self._tell_of(batch)
        weights = self._graph.weights()
        loss, grads = self._pass(batch, sole=early)
        begun = None
        if early:
            # Contiguous, because a transposed gradient makes the optimizer's pass several times slower.
            grads = tree_map(mx.contiguous, grads)
            begun = self._begin([grad for _, grad in flatten(grads)])
        self._prepared = _Ahead(batch, weights, loss, grads, begun)
        mx.async_eval(loss, grads)

    def _told_by_rank(self, mine: Sequence[float]) -> list[float]:
        """Places for every rank's numbers, of which this one fills its own: their sum over the ranks has all."""
        rank, size = self._communicator.rank, self._communicator.size
        return [*[0.0] * (rank * len(mine)), *mine, *[0.0] * ((size - rank - 1) * len(mine))]

    def _begin(self, grads: list[mx.array]) -> Begun:
        """Let gradients travel as they are computed."""
        size, stream = self._bucket_bytes, self._stream
        lookups, self._lookups = self._lookups, None
        begun = begin_sums(
            self._communicator,
            grads,
            bucket_bytes=size,
            stream=stream,
            shards=self.shards,
            lookups=lookups,
            cuts=self._cuts,
        )
        return with_lookups(begun, self.shards)

    def _wholes(self, parts: list[mx.array]) -> list[mx.array]:
        """All weights of what each rank has updated."""
        assert self.shards is not None
        size, stream = self._bucket_bytes, self._stream
        return begin_wholes(self._communicator, parts, self.shards, bucket_bytes=size, stream=stream)

    def _tell_of(self, batch: MicroBatch) -> None:
        self._beat("first" if self._traced and batch.shape not in self.shapes else "compute")
        self.shapes.add(batch.shape)

    def _gradient_of(self, batch: MicroBatch) -> tuple[mx.array, Any]:
        prepared, self._prepared = self._prepared, None
        graph = self._graph
        # Not if somebody has set weights since.
        if prepared is None or graph is None or prepared.batch is not batch or prepared.weights is not graph.weights():
            return self._pass(batch, sole=self._overlap and batch.sole)
        self._begun = prepared.begun
        return prepared.loss, prepared.grads

    def _pass(self, batch: MicroBatch, *, sole: bool) -> tuple[mx.array, Any]:
        """Loss and gradients; what look-ups contribute is apart where they travel by themselves."""
        arguments = self._arguments(batch)
        if not sole or self._travelling is None or not self._travelling.fits(batch):
            return self._gradient(*arguments)
        loss, grads, self._lookups = self._travelling(batch, arguments)
        return loss, grads

    def _accumulate(self, micro_batches: Sequence[MicroBatch]) -> tuple[mx.array, list[tuple[str, mx.array]]]:
        """Sums of loss and gradients over this rank's micro-batches; zeros when it has none."""
        total, grads = mx.zeros(()), None
        # What follows the last one's backward pass is handed out together with it, where no host has to wait between.
        lazy_end = self._graph is not None and (self._communicator.size == 1 or self._overlap)
        for number_of, batch in enumerate(micro_batches, 1):
            self._tell_of(batch)
            loss, new = self._gradient_of(batch)
            # Contiguous, because a transposed gradient makes the optimizer's pass several times slower.
            new = tree_map(mx.contiguous, new) if grads is None else tree_map(mx.add, grads, new)
            before, total, grads = total, total + loss, new
            if lazy_end and number_of == len(micro_batches):
                continue
            if self._ahead is None:
                mx.eval(total, grads)
            else:
                # The device works on this one while the host hands out the next; no further, see BatchMemory.
                mx.async_eval(total, grads)
                mx.eval(before)
        if grads is None:
            joined = None if self._graph is None or self._graph.leaves is None else self._graph.weights()
            grads = tree_map(mx.zeros_like, self._model.trainable_parameters() if joined is None else joined)
        return total, flatten(grads)

    def _arguments(self, batch: MicroBatch) -> tuple[mx.array, ...]:
        """What the gradient's function is called with."""
        values = batch_values(batch)
        if self._dropout is not None:
            values = (self._dropout.values(batch.examples, batch.inputs.shape[1], batch.iteration), *values)
        return self._arrays(values)

    def _reduce(
        self, grads: list[tuple[str, mx.array]], scalars: list[float | mx.array]
    ) -> tuple[list[tuple[str, mx.array]], mx.array]:
        """Both summed over all ranks; the scalars as one array."""
        arrays = [grad for _, grad in grads]
        sums, totals = sum_over_ranks(self._communicator, arrays, scalars, bucket_bytes=self._bucket_bytes)
        if (shards := self.shards) is not None:
            # This rank's own parts of all that it has, so that no second exchange is needed for the norm.
            squares = sum((mx.square(each.astype(mx.float32)).sum() for each in sums), mx.zeros(()))
            totals = mx.concatenate([totals, squares.reshape(1)])
            sums = [mx.contiguous(shards.part(i, whole)) for i, whole in enumerate(sums)]
        if self._graph is None or self._communicator.size > 1:
            self._beat("reduce")
            mx.eval(sums, totals)
        return _named(grads, sums), totals

    def _refuse(self, result: StepResult, problem: str, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Find out why, and either leave the update out or raise."""
        self._prepared = None
        # Not compiled: examples alone have shapes of their own, each to be computed once.
        gradient = make_gradient(self._model, eager=self.eager, compiled=False, dropout=self._dropout)
        blame = find_culprits(
            lambda batch: gradient(*self._arguments(batch)),
            self._model.trainable_parameters(),
            micro_batches,
            self._communicator,
            self._beat,
        )
        reason = f"{problem}; {blame.otherwise}" if blame.otherwise else problem
        if self._non_finite == "stop":
            raise NumericsError(reason + blame.named(self._window_name), hint=_HINT)
        return replace(result, loss_sum=0.0, num_targets=0, skipped=reason, culprits=blame.examples)


def _named(named: list[tuple[str, mx.array]], arrays: Sequence[mx.array]) -> list[tuple[str, mx.array]]:
    """``arrays`` with the names of ``named``."""
    return [(name, array) for (name, _), array in zip(named, arrays, strict=True)]


_HINT = (
    "the update was not applied: look at the examples named, lower --learning-rate, add --max-grad-norm 1 or "
    "--warmup-steps, or leave such updates out: --non-finite skip"
)
