"""Training loop: decides when to step, report, validate, save and stop. The step itself is in
:mod:`allhands.train.step`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import mlx.core as mx

from allhands.checkpoints.copies import NUMBERS, Copies
from allhands.checkpoints.saving import SaveKind, not_saved
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.data.loader import MicroBatch
from allhands.data.order import GlobalOrder
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import votes
from allhands.distributed.reduce import barrier
from allhands.errors import AllhandsError, Interrupted, NumericsError, Regroup, StorageError
from allhands.io.trees import numbers
from allhands.model.load import MODEL
from allhands.observe.metrics import (
    RunEnded,
    Sampled,
    SavedReport,
    Sink,
    StepSkipped,
    TrainReport,
    ValidReport,
    Warned,
)
from allhands.parallel.shares import Balance
from allhands.run.balancing import rebalanced
from allhands.run.state import LoopState, ReportWindow
from allhands.runtime.accelerator import Accelerator, peak_memory_bytes
from allhands.runtime.faults import inject_fault
from allhands.runtime.memory import MLX_PEAK, limit_cache, peak_rss_bytes
from allhands.train.callbacks import Callback
from allhands.train.evaluation import Evaluator
from allhands.train.result import StepResult
from allhands.train.step import TrainStep

EndReason = Literal["finished", "stopped early", "interrupted", "failed"]
# Highest number of skipped updates in a row: more are not caused by a few samples.
MAX_SKIPPED_IN_ROW = 10
_PEAKS = 4  # numbers about memory that each rank sends for a report
_ROUND_S = 10.0  # time for which a stop waits for the end of a round


@dataclass
class TrainLoop:
    """The loop and everything that it drives; assembled by ``run/session.py``.

    Attributes:
        state: progress of the run.
        load: returns this rank's micro-batches of a batch, by the batch's number.
        save: starts to write a checkpoint on the ranks that keep files; raises nothing.
        saved: returns the outcomes of saves since the last call; waits for all of them on request.
        beat: sends a heartbeat to the supervisor (phase, steps done).
        stop_requested: returns the signal that asked this rank to stop, or 0.
        regroup_requested: returns True if the run should end at a checkpoint, to go on with other
            ranks.
        learning_rate: returns the rate of the last update.
        total: number of batches to train on.
        sample: lets the model write sample texts, given the steps and batches done.
        tokens_per_byte: tokens per byte of the validation texts; ``None`` without packing, or if
            the validation set has other records.
        balance: the ranks' shares of each batch.
        copies: copies of the checkpoints on other computers; this rank may keep one of them.
    """

    state: LoopState
    config: TrainConfig
    order: GlobalOrder
    load: Callable[[int], list[MicroBatch]]
    step: TrainStep
    evaluator: Evaluator | None
    communicator: Communicator
    accelerator: Accelerator
    sink: Sink
    callbacks: Sequence[Callback]
    save: Callable[[LoopState, SaveKind], None]
    saved: Callable[[bool], list[SavedReport | Warned | AllhandsError]]
    beat: Callable[[str, int], None]
    stop_requested: Callable[[], int]
    regroup_requested: Callable[[], bool]
    learning_rate: Callable[[], float]
    total: int
    sample: Callable[[int, int], list[Sampled]]
    tokens_per_byte: float | None
    balance: Balance
    copies: Copies
    # Micro-batches of an update before its turn, by the number of its first batch.
    _loaded: dict[int, list[MicroBatch]] = field(default_factory=dict[int, list[MicroBatch]])

    def run(self) -> RunEnded:
        """Train until the end, early stopping, or a request to stop; rank 0 reports.

        Raises:
            Interrupted: a rank was asked to stop; there is a checkpoint, unless no update was made.
            Regroup: the supervisor asked to regroup; there is a checkpoint.
            NumericsError: loss or gradient is not finite, or too many updates were skipped; the
                weights before it are saved.
            StorageError: the last weights could not be written.
        """
        self.state.began = time.perf_counter()
        try:
            ended = self._train()
            self._tell_saved(wait=True)
            self._meet()
            self.beat("end", ended.step)
            return ended
        except (Interrupted, NumericsError) as error:
            # Every rank raises this error, so all of them can save together.
            told = (
                self._keep_stopped()
                if isinstance(error, Interrupted)
                else self._keep_suspect(error)
            )
            if isinstance(told, Interrupted):
                self._tell_end("interrupted")
            else:
                self._tell_end("failed", str(told))
            raise told from None
        except Regroup:
            self.beat("end", self.state.step)
            raise
        except KeyboardInterrupt:  # in a user's own process, at once
            self._tell_end("interrupted")
            raise
        except AllhandsError as error:
            self._tell_end("failed", str(error))
            raise

    def _train(self) -> RunEnded:
        if ended := self._resumed_at_end():
            return ended
        state, strategy = self.state, self.step.strategy
        settled, stops = state.iteration, False
        while state.iteration < self.total:
            begun = time.perf_counter()
            result = self._update()
            asked = self._asked_to_stop(result)
            early = asked and not stops and not self._waits_for_round(time.perf_counter() - begun)
            stops = asked or stops
            if early or self._round_ends(settled, stops=stops):
                strategy.close_round()
            if strategy.in_round:  # due work waits for the end of the round
                self._tell_saved(wait=False)
                continue
            before, settled = settled, state.iteration
            state.validation_due = self._due(before, self.config.steps_per_eval)
            if stops:
                raise Interrupted("stopped", code="stopped")
            if self._settle(before):
                return self._ended("stopped early")
        return self._ended("finished")

    def _resumed_at_end(self) -> RunEnded | None:
        """Do a validation that was due when the run ended; return the end if no steps are left."""
        if validated := self.state.validation_due:
            self._validate()
            self._sample()
        if not self._out_of_patience() and self.state.iteration < self.total:
            return None
        self._save("last" if validated else "same")  # missing files of this directory are written
        return self._ended("stopped early" if self._out_of_patience() else "finished")

    def _settle(self, before: int) -> bool:
        """Validate, sample and save if due since ``before`` batches; return whether to stop early."""
        state, config, done = self.state, self.config, self.state.iteration == self.total
        samples = self._due(before, config.sample_every or config.steps_per_eval)
        stale = state.validation_due and self._validate()
        goes_on = not (done or stale)
        if samples:
            self._sample()
        if stale or self._due(before, config.save_every):
            self._save("last")
            if goes_on and config.keep_last and self._any_rank(self.regroup_requested()):
                self._regroup()
        if goes_on:
            self._tell_saved(wait=False)
        return stale and not done

    def _due(self, before: int, every: int) -> bool:
        """Return True if the end, or a multiple of ``every`` batches, was reached since batch
        ``before``.
        """
        return self.state.iteration == self.total or _crossed(before, self.state.iteration, every)

    def _asked_to_stop(self, result: StepResult) -> bool:
        return bool(result.stop_votes or (self.communicator.size == 1 and self.stop_requested()))

    def _round_ends(self, settled: int, *, stops: bool) -> bool:
        """Return True if the training ends here, or if a round ends and a stop or other work waits
        for that.
        """
        ends = self.step.strategy.steps_left == 0 and (stops or self._is_due(settled))
        return ends or self.state.iteration == self.total

    def _is_due(self, settled: int) -> bool:
        """Return True if work is due that needs equal weights on all ranks."""
        config, sees = self.config, self.evaluator is not None or bool(self.config.sample_prompts)
        looks = (
            (config.steps_per_eval, config.sample_every or config.steps_per_eval) if sees else ()
        )
        return any(
            _crossed(settled, self.state.iteration, every) for every in (*looks, config.save_every)
        )

    def _waits_for_round(self, step_s: float) -> bool:
        """Return True if a stop should wait for the end of the round; equal on all ranks.

        It waits only if the end is a few seconds away. A run that is resumed from the end of a
        round equals a run without the stop. If a round is closed early, no training is lost either,
        but the run differs.
        """
        strategy = self.step.strategy
        soon_s = min(_ROUND_S, self.config.stop_grace_s / 4)
        return strategy.in_round and not self._any_rank(strategy.steps_left * step_s > soon_s)

    def _regroup(self) -> None:
        """End the run here if the checkpoint is written; otherwise train on to the next checkpoint.

        The training also goes on, once, if a copy of the checkpoint could not be written. Later
        failures of a copy do not prevent regrouping.

        Raises:
            Regroup: the checkpoint is written.
        """
        failed, before = False, self.copies.trouble
        try:
            self._tell_saved(wait=True)
        except StorageError as error:
            failed = True
            self.sink.emit(Warned(self.state.step, not_saved(error)))
        if not self._any_rank(failed or bool(self.copies.trouble and not before)):
            raise Regroup(
                f"stopped after step {self.state.step} to go on with other ranks", code="regrouping"
            )

    # --- early ends -------------------------------------------------------------------------------

    def _place(self) -> str:
        """Close a round that has begun, and return the step reached, in words.

        All ranks call this together.
        """
        self.step.strategy.close_round()
        steps = self.state.steps_in_all(self.total, self.config.grad_accumulation_steps)
        return f"step {self.state.step} of {steps}"

    def _keep_stopped(self) -> AllhandsError:
        """Save a stopped run; return the error to raise, which names the step."""
        place = self._place()
        if self.state.iteration == 0:
            return Interrupted(
                "stopped before the first update; nothing was trained", code="stopped-before-start"
            )
        try:
            path = self._save_now("last")
        except StorageError as failure:
            message = f"{failure.message}; the run was stopped after {place}, which is not saved"
            hint = f"{failure.hint}; to go on from the last checkpoint, if there is one: the same command with --resume"
            return StorageError(message, code=failure.code, where=failure.where, hint=hint)
        hint = "to go on exactly from there: the same command with --resume"
        if not self.config.keep_last:
            hint = f"to begin a new run from these weights (--keep-last 0): --resume-adapter-file {path}"
        return Interrupted(
            f"stopped after {place}; the weights are saved in {path}", code="stopped", hint=hint
        )

    def _keep_suspect(self, error: NumericsError) -> NumericsError:
        """Save the last weights before a number was not finite; return the error to raise, which
        names the step.
        """
        place = self._place()
        if self.state.iteration == 0:
            return NumericsError(
                f"{error.message} before any training",
                code=error.code,
                hint="the model's own weights or their precision are at fault: fetch the model again, "
                "or make a float32 copy (allhands model get MODEL --dtype float32 --out DIR)",
            )
        try:
            path = self._save_now("suspect")
            used = "adapters.safetensors" if pretraining(self.config) is None else MODEL
            kept = f"the last weights are kept in {path}"
            if (Path(path).parent / used).exists():
                kept += f", {used} is as it was before"
        except StorageError as failure:
            kept = f"the last weights could not be kept ({failure.where}: {failure.message})"
        return NumericsError(
            f"after {place}: {error.message}",
            code=error.code,
            hint="look at the examples named, if any are; lower --learning-rate, or add --max-grad-norm 1 or "
            f"--warmup-steps; --non-finite skip leaves such updates out; {kept}",
        )

    # --- a step -----------------------------------------------------------------------------------

    def _update(self) -> StepResult:
        """Take one optimizer update over ``grad_accumulation_steps`` batches (fewer at the end),
        and report it.

        Raises:
            NumericsError: too many updates in a row were left out.
        """
        state, begun, before = self.state, time.perf_counter(), self.state.iteration
        self.beat("load", state.step)
        # For models that draw random numbers; our code does not use this state.
        mx.random.seed(self.config.seed + before)
        inject_fault("step", state.step, self.communicator.rank)
        end = self._end(before)
        micro_batches = self._loaded.pop(before, None)
        if micro_batches is None:
            micro_batches = self._load(before)
        loaded = time.perf_counter()
        reports = _crossed(before, end, self.config.steps_per_report) or end == self.total
        pace = self.balance.own if self.balance.moves else ()
        tells = reports and end < self.total and not self._pauses(end)
        # Each step sends the same number of values: a ring adds up parts of a message, so the
        # message's length changes the last bits of sums.
        peaks = self._extra() if tells else [0.0] * (_PEAKS + NUMBERS)
        upcoming = partial(self._load_ahead, end)
        result = self.step(
            micro_batches, stop=self.stop_requested, upcoming=upcoming, extra=[*pace, *peaks]
        )
        limit_cache(self.config.clear_cache_threshold)
        state.step, state.iteration = state.step + 1, end
        state.trained_tokens += result.num_targets
        state.window.add(result, end - before, time.perf_counter() - begun, loaded - begun)
        ranks = self.communicator.size
        if pace and (
            changed := rebalanced(
                self.balance, result, ranks, state, self.config.grad_accumulation_steps
            )
        ):
            self.sink.emit(changed)
        self._note_skipped(result)
        if reports:
            self._report(result.of_each(ranks, slice(len(pace), None)) if tells else ())
        return result

    def _end(self, begin: int) -> int:
        """Return the number of batches done after the update that begins at batch ``begin``."""
        return min(begin + self.config.grad_accumulation_steps, self.total)

    def _load(self, begin: int) -> list[MicroBatch]:
        return [batch for i in range(begin, self._end(begin)) for batch in self.load(i)]

    def _load_ahead(self, begin: int) -> list[MicroBatch]:
        """Load the micro-batches of the update that begins at batch ``begin``.

        Returns them if the update follows without other work in between; else [].
        """
        if begin < self.total:
            mx.random.seed(self.config.seed + begin)
            # An error occurs again when these batches are loaded in their turn.
            with suppress(AllhandsError, OSError):
                self._loaded[begin] = self._load(begin)
        return [] if self._pauses(begin) else self._loaded.get(begin, [])

    def _pauses(self, end: int) -> bool:
        """Return True if a validation or samples follow the update that ends at batch ``end``."""
        config, before = self.config, max(end - self.config.grad_accumulation_steps, 0)
        evaluates = self.evaluator is not None and _crossed(before, end, config.steps_per_eval)
        return evaluates or _crossed(before, end, config.sample_every or config.steps_per_eval)

    def _note_skipped(self, result: StepResult) -> None:
        """Report a skipped update, and count those in a row.

        Raises:
            NumericsError: too many updates in a row were skipped.
        """
        state = self.state
        if not result.skipped:
            state.skipped_in_row = 0
            return
        state.skipped_in_row += 1
        self.sink.emit(
            StepSkipped(state.step, result.skipped, tuple(number + 1 for number in result.culprits))
        )
        if state.skipped_in_row >= MAX_SKIPPED_IN_ROW:
            raise NumericsError(
                f"{result.skipped}, {state.skipped_in_row} updates in a row",
                code="too-many-skipped-updates",
            )

    # --- reports ----------------------------------------------------------------------------------

    def _report(self, gathered: Sequence[float]) -> None:
        """Report the steps since the last report.

        Args:
            gathered: values of :meth:`_extra` of all ranks, if the step has exchanged them; if
                empty, they are exchanged now.
        """
        state, step = self.state, self.state.step
        window, state.window = state.window, ReportWindow()
        if not gathered:
            self.beat("reduce", step)
            gathered = numbers(
                self.communicator.all_gather(mx.array(self._extra(), dtype=mx.float32))
            )
        by_rank = [
            gathered[at : at + _PEAKS + NUMBERS] for at in range(0, len(gathered), _PEAKS + NUMBERS)
        ]
        self._warn(self.copies.hear([one for row in by_rank for one in row[_PEAKS:]], step))
        peaks = [tuple(int(row[kind] * 2**20) for row in by_rank) for kind in range(_PEAKS)]
        report = TrainReport(
            step=step,
            loss=window.loss_sum / max(window.num_targets, 1),
            learning_rate=self.learning_rate(),
            grad_norm=window.grad_norm,
            tokens_per_s=window.num_tokens / window.time_s,
            trained_tokens_per_s=window.num_targets / window.time_s,
            trained_tokens=state.trained_tokens,
            step_time_s=window.time_s / window.steps,
            data_wait_s=window.wait_s / window.steps,
            comm_s=window.comm_s / window.steps,
            compute_s=window.compute_s / window.steps,
            elapsed_s=time.perf_counter() - state.began,
            peak_memory_bytes=peaks[0],
            epoch=state.iteration / self.order.batches_per_epoch,
            peak_rss_bytes=peaks[1],
            peak_mlx_bytes=peaks[2],
            needed_bytes=peaks[3] if any(peaks[3]) else (),
            shapes=len(self.step.shapes),
            metrics=window.metrics(self.step.options.objective),
            iteration=state.iteration,
            iterations_per_s=window.iterations / window.time_s,
            shares=self.balance.shares(state.iteration - 1),
            sent_bytes=window.sent_bytes / window.steps,
        )
        self.sink.emit(report)
        for callback in self._callbacks_here:
            callback.on_train_report(report)

    def _extra(self) -> list[float]:
        """Return this rank's peak memory, peak resident memory, peak of MLX's arrays, estimated
        need, and the state of its copy.

        Memory is in MiB, because float32, the type that every back-end can exchange, is exact to
        2**24 only.
        """
        mine = [
            peak_memory_bytes(self.accelerator),
            peak_rss_bytes(),
            MLX_PEAK.whole(),
            self.step.needed_bytes,
        ]
        return [*(peak / 2**20 for peak in mine), *self.copies.told]

    @property
    def _callbacks_here(self) -> Sequence[Callback]:
        return self.callbacks if self.communicator.rank == 0 else ()

    def _warn(self, warnings: Sequence[Warned]) -> None:
        for warned in warnings:
            self.sink.emit(warned)

    def _validate(self) -> bool:
        """Validate, save the weights if they are the best so far, and return whether to stop early.

        Without an evaluator nothing is done.
        """
        state, config = self.state, self.config
        if self.evaluator is None:
            state.validation_due = False
            return False
        begun = time.perf_counter()
        loss, num_tokens, metrics = self.evaluator(state.step)
        better = loss < state.best_loss - config.early_stopping_min_delta
        if better:
            state.best_loss, state.best_step, state.stale_validations = loss, state.step, 0
        else:
            state.stale_validations += 1
        state.validation_due = False
        now = time.perf_counter()
        ratio = self.tokens_per_byte
        bits = None if ratio is None else loss / math.log(2) * ratio
        took = now - state.began, now - begun
        report = ValidReport(
            state.step, loss, num_tokens, *took, better, bits, metrics, state.iteration
        )
        self.sink.emit(report)
        for callback in self._callbacks_here:
            callback.on_valid_report(report)
        if better and config.keep_best and state.iteration > 0:
            self._save("best")
        return self._out_of_patience()

    def _sample(self) -> None:
        for sample in self.sample(self.state.step, self.state.iteration):
            self.sink.emit(sample)

    def _out_of_patience(self) -> bool:
        patience = self.config.early_stopping_patience
        return patience is not None and self.state.stale_validations >= patience

    # --- saving -----------------------------------------------------------------------------------

    def _save(self, kind: SaveKind) -> None:
        """Begin to save; the training goes on meanwhile."""
        self.beat("save", self.state.step)
        self.save(self.state, kind)

    def _save_now(self, kind: SaveKind) -> str:
        """Save and return the place, while the other ranks wait.

        If another rank ended first, a launcher could end rank 0 while it still writes.
        """
        self._save(kind)
        reports = self._tell_saved(wait=True)
        self._meet()
        return reports[-1].path if reports else "rank 0's adapter path"

    def _tell_saved(self, *, wait: bool) -> list[SavedReport]:
        """Report the checkpoints that were written since the last call; return their reports.

        A failed checkpoint does no harm if a later one succeeds. So the failure is an error only
        with ``wait``, when no later checkpoint will come, and only for rank 0's own checkpoint, not
        for a copy.

        Raises:
            StorageError: the last checkpoint could not be written.
        """
        if wait:
            self.beat("save", self.state.step)
        outcomes = self.saved(wait)
        self._warn([outcome for outcome in outcomes if isinstance(outcome, Warned)])
        reports = [outcome for outcome in outcomes if isinstance(outcome, SavedReport)]
        for report in reports:
            self.sink.emit(report)
            for callback in self._callbacks_here:
                callback.on_save(report.step, Path(report.path))
        if self.copies.keeps:
            self._warn(self.copies.note(outcomes, self.state.step))
            return reports
        failures = [outcome for outcome in outcomes if isinstance(outcome, AllhandsError)]
        final = (
            failures.pop()
            if wait and isinstance(next(reversed(outcomes), None), AllhandsError)
            else None
        )
        self._warn([Warned(self.state.step, not_saved(failure)) for failure in failures])
        if final is not None:
            again = "then the same command with --resume goes on from the last checkpoint, if there is one"
            final.hint = f"{final.hint}; {again}"
            raise final
        return reports

    def _meet(self) -> None:
        """Wait until all ranks have written everything, and report failed copies."""
        self.beat("reduce", self.state.step)
        barrier(self.communicator)
        self._warn(self.copies.settle(self.state.step))

    def _any_rank(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on any rank; all ranks call this together."""
        self.beat("reduce", self.state.step)
        return votes(self.communicator, flag) > 0

    def _tell_end(self, reason: EndReason, error: str | None = None) -> None:
        """Tell the sinks that the run is over.

        The heartbeat's phase "end" has a long deadline, since sinks may draw curves.
        """
        self.beat("end", self.state.step)
        self.sink.emit(replace(self._ended(reason), error=error))

    def _ended(self, reason: EndReason) -> RunEnded:
        state, took_s = self.state, time.perf_counter() - self.state.began
        best = state.best_loss if math.isfinite(state.best_loss) else None
        return RunEnded(
            state.step, reason, took_s, state.best_step, best, iteration=state.iteration
        )


def _crossed(before: int, after: int, every: int) -> bool:
    """Return True if a multiple of ``every`` is in ``before < n <= after``."""
    return after // every > before // every
