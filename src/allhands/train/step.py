"""One optimizer update: accumulate, reduce, norm, update, after_update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator, SingleProcess, sent_bytes
from allhands.distributed.codecs import Codec
from allhands.distributed.reduce import BUCKET_BYTES
from allhands.distributed.shards import Shards
from allhands.errors import NumericsError
from allhands.model.dropout import DropoutKeys
from allhands.objectives.base import Objective
from allhands.objectives.causal_lm import CAUSAL_LM
from allhands.parallel.base import Exchanging, Strategy, make_strategy
from allhands.parallel.experts import Experts
from allhands.parallel.gradient import Computing
from allhands.parallel.matrices import Matrices
from allhands.parallel.passes import Passes
from allhands.parallel.piping import Piping
from allhands.parallel.rounds import Rounds
from allhands.parallel.sharding import Sharding
from allhands.parallel.sums import Gradients, Times
from allhands.train.poison import find_culprits
from allhands.train.result import StepResult, not_finite, own_numbers, result_of
from allhands.train.updater import Rules, Updated, Updater, make_updater


@dataclass(frozen=True)
class StepOptions:
    """The options of a step.

    Attributes:
        cpu_native: True if operations compute at once (Linux CPUs).
        compiled: True if passes and updates are compiled where they are graphs.
        rules: rules for the mean gradient.
        strategy: the strategy's name.
        rounds: rounds of local steps, for a strategy that has them.
        piping: this rank's part of the model, for a strategy that divides the blocks.
        sharding: this rank's part of the model, for a strategy that divides all arrays.
        matrices: this rank's part of the model, for a strategy that divides matrices.
        experts: this rank's part of the model, for a strategy that divides experts alone.
        same_rows: the ranks that compute the same rows together.
        pieces: number of ranks that divide the token positions of each row.
        bucket_bytes: approximate bytes of arrays that are exchanged together.
        codec: form of packed gradients in the exchange; ``None``: not packed.
        overlap: exchange gradients while others are computed; default: with NCCL.
        dropout: the model's dropout keys, as :func:`install_dropout` returned them.
        non_finite: reaction to a loss or gradient that is not finite: an error, or no update.
        queues_ahead: queue the next step's first pass while the device updates weights. A CPU gains
            nothing by it: the host would compute the pass before this step ends.
        packed: True if windows are rows of packed documents, for messages.
        objective: the training objective.
        heartbeat: called with "compute" (or "first", if a shape is compiled) before each
            micro-batch, with "reduce" before waiting for other ranks, and with "update" before the
            optimizer's update or, on a GPU, before waiting for it.
    """

    cpu_native: bool
    compiled: bool = True
    rules: Rules = field(default_factory=Rules)
    strategy: str = "data"
    rounds: Rounds = field(default_factory=Rounds)
    piping: Piping | None = None
    sharding: Sharding | None = None
    matrices: Matrices | None = None
    experts: Experts | None = None
    same_rows: Communicator = field(default_factory=SingleProcess)
    pieces: int = 1
    bucket_bytes: int = BUCKET_BYTES
    codec: Codec | None = None
    overlap: bool | None = None
    dropout: DropoutKeys | None = None
    non_finite: Literal["stop", "skip"] = "stop"
    queues_ahead: bool = True
    packed: bool = False
    objective: Objective = CAUSAL_LM
    heartbeat: Callable[[str], None] = lambda phase: None


def make_step(
    model: nn.Module, optimizer: optim.Optimizer, communicator: Communicator, options: StepOptions
) -> TrainStep:
    """Return the step that trains ``model`` by ``optimizer`` on these ranks."""
    native, heartbeat = options.cpu_native, options.heartbeat
    rounds, inject = options.rounds, options.rules.inject_fault
    parts: Any = {
        "piping": options.piping,
        "sharding": options.sharding,
        "matrices": options.matrices,
        "experts": options.experts,
        "same_rows": options.same_rows,
        "pieces": options.pieces,
    }
    how = options.bucket_bytes, native, heartbeat, options.codec, rounds, inject
    exchanging = Exchanging(communicator, *how, **parts)
    # With overlap, gradients and the arrays that ranks exchange within a pass would be on two
    # streams, in a different order on each rank.
    overlap = False if options.pieces > 1 else options.overlap
    strategy = make_strategy(options.strategy, exchanging, overlap=overlap)
    rules = replace(options.rules, heartbeat=heartbeat)
    trained = model if options.sharding is None else options.sharding.parts
    updater = make_updater(
        trained, optimizer, strategy, rules, cpu_native=native, compiled=options.compiled
    )
    # The number of tokens for a rank's experts is known only after the router.
    chooses = options.experts is not None or bool(options.matrices and options.matrices.experts)
    computing = Computing(native, options.compiled and not chooses, options.dropout, heartbeat)
    passes = Passes(
        model,
        options.objective,
        computing,
        updater.flat,
        waits=strategy.passes_wait,
        spares=strategy.spares_memory,
    )
    strategy.prepare(passes, updater.expected)
    return TrainStep(passes, strategy, updater, options)


class TrainStep:
    """Accumulate this rank's sums, add them up over ranks, divide once, update."""

    def __init__(
        self, passes: Passes, strategy: Strategy, updater: Updater, options: StepOptions
    ) -> None:
        self.passes = passes
        self.strategy = strategy
        self.updater = updater
        self.options = options
        self._num_updates = 0
        self._free_since = 0.0

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        stop: Callable[[], object] = lambda: False,
        upcoming: Callable[[], Sequence[MicroBatch]] = tuple,
        extra: Sequence[float] = (),
    ) -> StepResult:
        """Update the model by one global batch, of which ``micro_batches`` is this rank's share
        (may be empty).

        Args:
            stop: tells whether this rank was asked to stop; called after its passes. All ranks
                learn the answer from :attr:`StepResult.stop_votes`.
            upcoming: returns the micro-batches of the next step, if there is one; called while a
                device computes.
            extra: numbers of this rank for all others, the same number on each rank; see
                :meth:`Strategy.reduce`.

        Raises:
            NumericsError: loss or gradient is not finite, on every rank alike; the model is
                unchanged.
        """
        strategy, ahead, sent = (
            self.strategy,
            self.passes.run_ahead,
            sent_bytes(self.strategy.communicator),
        )
        started = time.perf_counter()
        if ahead is not None:
            ahead.before(max((batch.inputs.size for batch in micro_batches), default=0))
        shapes = len(self.passes.shapes)
        mine = self._faulted(strategy.gradients(self.passes, micro_batches))
        computed = time.perf_counter()
        num_tokens, passes_s = mine.counts["tokens"], self.passes_s(mine, started, computed, shapes)
        strategy.begin_next(self.passes, upcoming)
        ready = time.perf_counter()
        reduced = strategy.reduce(
            mine, own_numbers(mine.each_sum, mine.counts, bool(stop())), extra
        )
        times = Times(ready - started - mine.waited_s, time.perf_counter() - ready + mine.waited_s)
        del mine
        handing_out = time.perf_counter()
        updated = Updated(mx.zeros(())) if reduced.idle else self.updater(reduced)
        update_s = time.perf_counter() - handing_out
        if updated.lazy is not None:
            arrays = [updated.norm, reduced.totals, updated.lazy]
            if strategy.overlaps:
                mx.async_eval(arrays)
            self.passes.meanwhile = updated.pieces.begin
            if self.options.queues_ahead:
                strategy.start_next(self.passes, upcoming)
            updated.pieces.finish()
            times = strategy.wait(reduced, arrays, times, handing_out)
            self._free_since = time.perf_counter()
        if ahead is not None:
            ahead.after()
        further = len(self.options.objective.further)
        norm = updated.norm if reduced.norm is None else reduced.norm
        result = result_of(reduced.totals, norm, times, further, num_gathered=reduced.num_gathered)
        pace = self.pace(num_tokens, passes_s, update_s)
        result = replace(result, sent_bytes=sent_bytes(strategy.communicator) - sent, pace=pace)
        if problem := not_finite(result):
            # Every rank has the same sums and comes here. The search needs the memory of these
            # arrays.
            del reduced, updated
            return self._refuse(result, problem, micro_batches)
        self._num_updates += 1
        coming_together = time.perf_counter()
        if not reduced.idle:
            strategy.last_norm = result.grad_norm
        strategy.after_update(self._num_updates)
        waited = result.comm_s + time.perf_counter() - coming_together
        return replace(result, comm_s=waited, sent_bytes=sent_bytes(strategy.communicator) - sent)

    def passes_s(self, mine: Gradients, started: float, computed: float, shapes: int) -> float:
        """Return the seconds of this rank's passes; 0 if the passes are only queued, or if a new
        shape was compiled.

        A pass that was queued ahead has begun as soon as the device was free.
        """
        options = self.options
        compiling = options.compiled and not options.cpu_native and len(self.passes.shapes) > shapes
        if not self.strategy.sees_passes or compiling:
            return 0.0
        return computed - (self._free_since if mine.ahead else started)

    def pace(self, num_tokens: int, passes_s: float, update_s: float) -> tuple[float, float, float]:
        """Return :attr:`StepResult.pace` of a step."""
        return (
            (float(num_tokens), passes_s, update_s) if num_tokens and passes_s else (0.0, 0.0, 0.0)
        )

    def _faulted(self, mine: Gradients) -> Gradients:
        """Return ``mine``, with NaN in it if such a fault is planned for this step."""
        if self.options.rules.inject_fault("reduce") != "nan":
            return mine
        grads = [
            (name, mx.full(grad.shape, math.nan, dtype=grad.dtype)) for name, grad in mine.grads
        ]
        # If the gradient is being sent already, the fault is in the loss.
        sums = mine.sums if mine.pending is None else mx.full(mine.sums.shape, math.nan)
        return replace(mine, sums=sums, grads=grads)

    def _refuse(
        self, result: StepResult, problem: str, micro_batches: Sequence[MicroBatch]
    ) -> StepResult:
        """Find the cause of a number that is not finite, and return a skipped result.

        Raises:
            NumericsError: if such an update is to stop the run.
        """
        self.strategy.forget()
        alone = self.strategy.one_by_one(self.passes)
        blame = find_culprits(
            alone.gradient,
            self.updater.weights(),
            micro_batches,
            self.strategy.communicator,
            self.options.heartbeat,
            alone.together,
            share=alone.share,
        )
        reason = f"{problem}; {blame.otherwise}" if blame.otherwise else problem
        if self.options.non_finite == "stop":
            what = "packed row" if self.options.packed else "training example"
            look = "look at the examples named, " if blame.examples else ""
            raise NumericsError(
                reason + blame.named(what),
                code="update-not-finite",
                hint=f"the update was not applied: {look}{_REMEDIES}",
            )
        return replace(
            result, loss_sum=0.0, num_targets=0, further=(), skipped=reason, culprits=blame.examples
        )

    @property
    def shapes(self) -> set[tuple[int, int, int]]:
        """(B, T, N) of every micro-batch so far."""
        return self.passes.shapes

    @property
    def shards(self) -> Shards | None:
        """The parts that this rank keeps and updates; ``None``: all."""
        return self.strategy.shards

    @property
    def needed_bytes(self) -> int:
        """The bytes that the largest step so far needs without work queued ahead; 0 if nothing is
        ever queued ahead.
        """
        return 0 if self.passes.run_ahead is None else self.passes.run_ahead.need

    @property
    def spare_bytes(self) -> int:
        """The free bytes of a GPU's own memory during a step; 0 if unknown."""
        return 0 if self.passes.run_ahead is None else self.passes.run_ahead.spare()

    def close(self) -> None:
        """Restore MLX's own memory limit."""
        if self.passes.run_ahead is not None:
            self.passes.run_ahead.close()


_REMEDIES = "lower --learning-rate, add --max-grad-norm 1 or --warmup-steps, or leave such updates out: --non-finite skip"
