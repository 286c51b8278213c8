"""The training loop: when to step, report, validate, save and stop. What a step does is in ``step.py``."""

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
from allhands.checkpoints.saving import CopyError, SaveKind
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.data.loader import MicroBatch
from allhands.data.order import GlobalOrder
from allhands.distributed.backend import Communicator
from allhands.distributed.reduce import barrier
from allhands.errors import AllhandsError, Interrupted, NumericsError, Regroup, StorageError
from allhands.io.trees import number, numbers
from allhands.model.load import MODEL
from allhands.observe.metrics import RunEnded, Sampled, SavedReport, Sink, StepSkipped, TrainReport, ValidReport, Warned
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
# Updates in a row that may be left out: more are no accident of a few samples.
MAX_SKIPPED_IN_ROW = 10
_PEAKS = 4  # of a rank, in a report
_ROUND_S = 10.0  # for which a stop waits for the end of a round


@dataclass(frozen=True)
class LoopParts:
    """Everything the loop drives; assembled by ``run/session.py``.

    Attributes:
        load: this rank's micro-batches of a batch, by its number; usually made ahead.
        save: starts to write a checkpoint on the ranks that keep files; raises nothing.
        saved: what was written since it was asked last, or could not be; waits for all of it if told to.
        beat: tells the supervisor (phase, steps done).
        stop_requested: the signal that asked this rank to stop, or 0.
        regroup_requested: whether the run should end at a checkpoint, to go on with other ranks.
        learning_rate: of the last update.
        total: batches to train on.
        sample: lets the model write after so many steps and batches, on rank 0; the others go on.
        tokens_per_byte: of the validation texts, if they are that and nothing else.
        balance: the ranks' shares of each batch.
        loaded: micro-batches of an update before its turn, by the number of its first batch.
        copies: what is known of the checkpoint's copies on other computers, one of which may be this rank's to keep.
    """

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
    sample: Callable[[int, int], list[Sampled]] = lambda step, iteration: []
    tokens_per_byte: float | None = None
    balance: Balance = field(default_factory=lambda: Balance((1.0,)))
    loaded: dict[int, list[MicroBatch]] = field(default_factory=dict[int, list[MicroBatch]])
    copies: Copies = field(default_factory=Copies)

    @property
    def callbacks_here(self) -> Sequence[Callback]:
        return self.callbacks if self.communicator.rank == 0 else ()

    def total_steps(self, state: LoopState) -> int:
        """Updates of the whole training."""
        return state.steps_in_all(self.total, self.config.grad_accumulation_steps)


def train_loop(parts: LoopParts, state: LoopState) -> RunEnded:
    """Train until the end, early stopping, or a request to stop; rank 0 reports.

    Raises:
        Interrupted: a rank was asked to stop; there is a checkpoint.
        Regroup: the supervisor asked for it; there is a checkpoint.
        NumericsError: loss or gradient is not finite; what was trained before is saved.
        StorageError: the last weights could not be written.
    """
    started = state.began = time.perf_counter()
    try:
        ended = _train(parts, state, started)
        _tell_saved(parts, state, wait=True)
        _meet(parts, state)
        return ended
    except (Interrupted, NumericsError) as error:
        # Raised on every rank alike, so that saving together is possible.
        told = _keep_and_tell(parts, state, error)
        parts.sink.emit(_ended(state, started, "interrupted" if isinstance(told, Interrupted) else "failed"))
        raise told from None
    except Regroup:
        raise
    except KeyboardInterrupt:  # of a person's own process, at once
        parts.sink.emit(_ended(state, started, "interrupted"))
        raise
    except AllhandsError:
        parts.sink.emit(_ended(state, started, "failed"))
        raise


def _train(parts: LoopParts, state: LoopState, started: float) -> RunEnded:
    config = parts.config
    if validated := state.validation_due:
        _validate(parts, state, started)
        _sample(parts, state)
    if _out_of_patience(parts, state) or state.iteration >= parts.total:
        # Resumed after its end: what is missing in this directory is written.
        _save(parts, state, "last" if validated else "same")
        return _ended(state, started, "stopped early" if _out_of_patience(parts, state) else "finished")
    settled, stops = state.iteration, False
    while state.iteration < parts.total:
        before, begun = state.iteration, time.perf_counter()
        result = _update(parts, state)
        _note_skipped(parts, state, result)
        done = state.iteration == parts.total
        if _reports(parts, before, state.iteration):
            _report(parts, state, started, result.gathered)
        asked = bool(result.stop_votes or (parts.communicator.size == 1 and parts.stop_requested()))
        early = asked and not stops and not _waits_for_round(parts, state, time.perf_counter() - begun)
        stops = asked or stops
        ends = parts.step.strategy.steps_left == 0 and (stops or _is_due(parts, settled, state.iteration))
        if done or early or ends:
            parts.step.strategy.close_round()
        if parts.step.strategy.in_round:  # what is due now is due at its end
            _tell_saved(parts, state, wait=False)
            continue
        before, settled = settled, state.iteration
        state.validation_due = done or _crossed(before, state.iteration, config.steps_per_eval)
        if stops:
            raise Interrupted("stopped")
        sampled = state.validation_due
        if config.sample_every is not None:
            sampled = done or _crossed(before, state.iteration, config.sample_every)
        stale = state.validation_due and _validate(parts, state, started)
        if sampled:
            _sample(parts, state)
        if _crossed(before, state.iteration, config.save_every) or done or stale:
            _save(parts, state, "last")
            if not (done or stale) and config.keep_last and _any_rank(parts, state, parts.regroup_requested()):
                _regroup(parts, state)
        if stale and not done:
            return _ended(state, started, "stopped early")
        if not done:
            _tell_saved(parts, state, wait=False)
    return _ended(state, started, "finished")


def _is_due(parts: LoopParts, settled: int, now: int) -> bool:
    """Whether something is that needs the same weights on all ranks."""
    config, sees = parts.config, parts.evaluator is not None or bool(parts.config.sample_prompts)
    looks = (config.steps_per_eval, config.sample_every or config.steps_per_eval) if sees else ()
    return any(_crossed(settled, now, every) for every in (*looks, config.save_every))


def _waits_for_round(parts: LoopParts, state: LoopState, step_s: float) -> bool:
    """Whether a stop waits for the end of the round: on all ranks alike, only if that is soon.

    A run that goes on from there is the one that was not stopped. After a round that was closed before its end, which
    loses nothing either, it is another.
    """
    strategy = parts.step.strategy
    soon_s = min(_ROUND_S, parts.config.stop_grace_s / 4)
    return strategy.in_round and not _any_rank(parts, state, strategy.steps_left * step_s > soon_s)


def _regroup(parts: LoopParts, state: LoopState) -> None:
    """End here if the checkpoint is written; if it could not be, the training goes on to the next.

    So it does if a copy of it could not, once: one that cannot be kept for long keeps nobody from regrouping.

    Raises:
        Regroup: it is.
    """
    failed, before = False, parts.copies.trouble
    try:
        _tell_saved(parts, state, wait=True)
    except StorageError as error:
        failed = True
        parts.sink.emit(Warned(state.step, _not_saved(error)))
    failed = failed or bool(parts.copies.trouble and not before)
    if not _any_rank(parts, state, failed):
        raise Regroup(f"stopped after step {state.step} to go on with other ranks")


def _keep_and_tell(parts: LoopParts, state: LoopState, error: Interrupted | NumericsError) -> AllhandsError:
    """Save what was trained; the error to raise, which says where it is. Called on all ranks together."""
    place = f"step {state.step} of {parts.total_steps(state)}"
    parts.step.strategy.close_round()
    if isinstance(error, Interrupted):
        if state.iteration == 0:
            return Interrupted("stopped before the first update; nothing was trained")
        try:
            path = _save_now(parts, state, "last")
        except StorageError as failure:
            return StorageError(
                f"{failure.message}; the run was stopped after {place}, which is not saved",
                where=failure.where,
                hint=f"{failure.hint}; to go on from the last checkpoint, if there is one: the same command with "
                "--resume",
            )
        hint = "to go on exactly from there: the same command with --resume"
        if not parts.config.keep_last:
            hint = f"to begin a new run from these weights (--keep-last 0): --resume-adapter-file {path}"
        return Interrupted(f"stopped after {place}; the weights are saved in {path}", hint=hint)
    if state.iteration == 0:
        return NumericsError(
            f"{error.message} before any training",
            hint="the model's own weights or their precision are at fault: fetch the model again, "
            "or make a float32 copy (allhands model get MODEL --dtype float32 --out DIR)",
        )
    try:
        path = _save_now(parts, state, "suspect")
        used = "adapters.safetensors" if pretraining(parts.config) is None else MODEL
        kept = f"the last weights are kept in {path}"
        if (Path(path).parent / used).exists():
            kept += f", {used} is as it was before"
    except StorageError as failure:
        kept = f"the last weights could not be kept ({failure.where}: {failure.message})"
    return NumericsError(
        f"after {place}: {error.message}",
        hint="look at the examples named, if any are; lower --learning-rate, or add --max-grad-norm 1 or "
        f"--warmup-steps; --non-finite skip leaves such updates out; {kept}",
    )


def _crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of ``every`` was reached; with accumulation an update takes several batches."""
    return after // every > before // every


def _reports(parts: LoopParts, before: int, after: int) -> bool:
    """Whether there is a report after an update from one number of batches to the other."""
    return _crossed(before, after, parts.config.steps_per_report) or after == parts.total


def _update(parts: LoopParts, state: LoopState) -> StepResult:
    """One optimizer update over ``grad_accumulation_steps`` batches (fewer at the end)."""
    begun, before = time.perf_counter(), state.iteration
    parts.beat("load", state.step)
    # Nothing of ours draws from it; for models that do.
    mx.random.seed(parts.config.seed + state.iteration)
    inject_fault("step", state.step, parts.communicator.rank)
    end = _end(parts, state.iteration)
    micro_batches = parts.loaded.pop(state.iteration, None)
    if micro_batches is None:
        micro_batches = _load(parts, state.iteration)
    loaded = time.perf_counter()
    reports = _reports(parts, state.iteration, end)
    pace = parts.balance.own if parts.balance.moves else ()
    tells = reports and end < parts.total and not _pauses(parts, end)
    # As many numbers in each step: a ring adds up in parts of what it is given, so their length decides about last bits.
    peaks = _extra(parts) if tells else [0.0] * (_PEAKS + NUMBERS)
    result = parts.step(
        micro_batches,
        stop=parts.stop_requested,
        upcoming=partial(_load_ahead, parts, end),
        extra=[*pace, *peaks],
    )
    limit_cache(parts.config.clear_cache_threshold)
    state.step, state.iteration = state.step + 1, end
    state.trained_tokens += result.num_targets
    state.window.add(result, end - before, time.perf_counter() - begun, loaded - begun)
    if pace:
        accumulation = parts.config.grad_accumulation_steps
        changed = rebalanced(parts.balance, result, parts.communicator.size, state, accumulation)
        if changed is not None:
            parts.sink.emit(changed)
    told = result.of_each(parts.communicator.size, slice(len(pace), None)) if tells else ()
    return replace(result, gathered=told)


def _end(parts: LoopParts, begin: int) -> int:
    """The number of batches after an update that begins at ``begin``."""
    return min(begin + parts.config.grad_accumulation_steps, parts.total)


def _load(parts: LoopParts, begin: int) -> list[MicroBatch]:
    return [batch for i in range(begin, _end(parts, begin)) for batch in parts.load(i)]


def _load_ahead(parts: LoopParts, begin: int) -> list[MicroBatch]:
    """Load the micro-batches of the update that begins at ``begin``; give them if it follows at once."""
    if begin < parts.total:
        mx.random.seed(parts.config.seed + begin)
        # What fails does so again when its turn comes, after the update that is being made.
        with suppress(AllhandsError, OSError):
            parts.loaded[begin] = _load(parts, begin)
    return [] if _pauses(parts, begin) else parts.loaded.get(begin, [])


def _pauses(parts: LoopParts, end: int) -> bool:
    """Whether something else is computed after the update that ends at ``end``, before the next."""
    before = max(end - parts.config.grad_accumulation_steps, 0)
    evaluates = parts.evaluator is not None and _crossed(before, end, parts.config.steps_per_eval)
    return evaluates or _crossed(before, end, parts.config.sample_every or parts.config.steps_per_eval)


def _note_skipped(parts: LoopParts, state: LoopState, result: StepResult) -> None:
    """Tell of an update that was left out, and stop if that has become the rule.

    Raises:
        NumericsError: too many in a row.
    """
    if not result.skipped:
        state.skipped_in_row = 0
        return
    state.skipped_in_row += 1
    parts.sink.emit(StepSkipped(state.step, result.skipped, tuple(number + 1 for number in result.culprits)))
    if state.skipped_in_row >= MAX_SKIPPED_IN_ROW:
        raise NumericsError(f"{result.skipped}, {state.skipped_in_row} updates in a row")


def _report(parts: LoopParts, state: LoopState, started: float, gathered: Sequence[float]) -> None:
    """A report; ``gathered`` has what the ranks tell each other for it, if the step has exchanged that."""
    window, state.window = state.window, ReportWindow()
    if not gathered:
        parts.beat("reduce", state.step)
        gathered = numbers(parts.communicator.all_gather(mx.array(_extra(parts), dtype=mx.float32)))
    by_rank = [gathered[at : at + _PEAKS + NUMBERS] for at in range(0, len(gathered), _PEAKS + NUMBERS)]
    for warned in parts.copies.hear([one for row in by_rank for one in row[_PEAKS:]], state.step):
        parts.sink.emit(warned)
    peaks = [tuple(int(row[kind] * 2**20) for row in by_rank) for kind in range(_PEAKS)]
    report = TrainReport(
        step=state.step,
        loss=window.loss_sum / max(window.num_targets, 1),
        learning_rate=parts.learning_rate(),
        grad_norm=window.grad_norm,
        tokens_per_s=window.num_tokens / window.time_s,
        trained_tokens_per_s=window.num_targets / window.time_s,
        trained_tokens=state.trained_tokens,
        step_time_s=window.time_s / window.steps,
        data_wait_s=window.wait_s / window.steps,
        comm_s=window.comm_s / window.steps,
        compute_s=window.compute_s / window.steps,
        elapsed_s=time.perf_counter() - started,
        peak_memory_bytes=peaks[0],
        epoch=state.iteration / parts.order.batches_per_epoch,
        peak_rss_bytes=peaks[1],
        peak_mlx_bytes=peaks[2],
        needed_bytes=peaks[3] if any(peaks[3]) else (),
        shapes=len(parts.step.shapes),
        metrics=window.metrics(parts.step.options.objective),
        iteration=state.iteration,
        iterations_per_s=window.iterations / window.time_s,
        shares=parts.balance.shares(state.iteration - 1),
        sent_bytes=window.sent_bytes / window.steps,
    )
    parts.sink.emit(report)
    for callback in parts.callbacks_here:
        callback.on_train_report(report)


def _extra(parts: LoopParts) -> list[float]:
    """What counts as this rank's peak, its resident memory's, that of MLX's arrays, what it needs; and of its copy.

    Memory in MiB, because float32 (which every back-end can exchange) is exact to 2**24 only.
    """
    mine = [peak_memory_bytes(parts.accelerator), peak_rss_bytes(), MLX_PEAK.whole(), parts.step.needed_bytes]
    assert len(mine) == _PEAKS
    return [*(peak / 2**20 for peak in mine), *parts.copies.told]


def _validate(parts: LoopParts, state: LoopState, started: float) -> bool:
    """Validate, keep the best adapter, and tell whether patience is at its end."""
    if parts.evaluator is None:
        state.validation_due = False
        return False
    begun = time.perf_counter()
    loss, num_tokens, metrics = parts.evaluator(state.step)
    better = loss < state.best_loss - parts.config.early_stopping_min_delta
    if better:
        state.best_loss, state.best_step, state.stale_validations = loss, state.step, 0
    else:
        state.stale_validations += 1
    state.validation_due = False
    now = time.perf_counter()
    ratio = parts.tokens_per_byte
    bits = None if ratio is None else loss / math.log(2) * ratio
    took = now - started, now - begun
    report = ValidReport(state.step, loss, num_tokens, *took, better, bits, metrics, state.iteration)
    parts.sink.emit(report)
    for callback in parts.callbacks_here:
        callback.on_valid_report(report)
    if better and parts.config.keep_best and state.iteration > 0:
        _save(parts, state, "best")
    return _out_of_patience(parts, state)


def _sample(parts: LoopParts, state: LoopState) -> None:
    for sample in parts.sample(state.step, state.iteration):
        parts.sink.emit(sample)


def _out_of_patience(parts: LoopParts, state: LoopState) -> bool:
    patience = parts.config.early_stopping_patience
    return patience is not None and state.stale_validations >= patience


def _save(parts: LoopParts, state: LoopState, kind: SaveKind) -> None:
    """Begin to save; the training goes on meanwhile."""
    parts.beat("save", state.step)
    parts.save(state, kind)


def _save_now(parts: LoopParts, state: LoopState, kind: SaveKind) -> str:
    """Save and say where, while the others wait.

    A rank that went on and ended would make a launcher end rank 0 while it still writes.
    """
    _save(parts, state, kind)
    reports = _tell_saved(parts, state, wait=True)
    _meet(parts, state)
    return reports[-1].path if reports else "rank 0's adapter path"


def _tell_saved(parts: LoopParts, state: LoopState, *, wait: bool) -> list[SavedReport]:
    """Report what has been written since the last time.

    A checkpoint that could not be written costs nothing yet, and the next one may succeed: only when there will be
    no next one it is an error, and not even then if it is a copy of rank 0's.

    Raises:
        StorageError: it was waited for, and it could not be written.
    """
    if wait:
        parts.beat("save", state.step)
    outcomes = parts.saved(wait)
    for outcome in outcomes:
        if isinstance(outcome, Warned):
            parts.sink.emit(outcome)
    reports = [outcome for outcome in outcomes if isinstance(outcome, SavedReport)]
    for report in reports:
        parts.sink.emit(report)
        for callback in parts.callbacks_here:
            callback.on_save(report.step, Path(report.path))
    if parts.copies.keeps:
        for warned in parts.copies.note(outcomes, state.step):
            parts.sink.emit(warned)
        return reports
    failures = [outcome for outcome in outcomes if isinstance(outcome, AllhandsError)]
    final = failures.pop() if wait and failures and outcomes[-1] is failures[-1] else None
    for failure in failures:
        parts.sink.emit(Warned(state.step, _not_saved(failure)))
    if final is not None:
        final.hint = (
            f"{final.hint}; then the same command with --resume goes on from the last checkpoint, if there is one"
        )
        raise final
    return reports


def _meet(parts: LoopParts, state: LoopState) -> None:
    """Wait for all ranks, which have written everything, and tell of copies that could not be."""
    parts.beat("reduce", state.step)
    barrier(parts.communicator)
    for warned in parts.copies.settle(state.step):
        parts.sink.emit(warned)


def _not_saved(failure: AllhandsError) -> str:
    what = (
        "the checkpoint is there, but not its adapter"
        if isinstance(failure, CopyError)
        else "no checkpoint was written"
    )
    return f"{what} ({failure.where}: {failure.message}); training goes on"


def _any_rank(parts: LoopParts, state: LoopState, flag: bool) -> bool:
    """Whether ``flag`` is true on any rank; asked on all of them together."""
    parts.beat("reduce", state.step)
    return number(parts.communicator.all_sum(mx.array([float(flag)]))) > 0


def _ended(state: LoopState, started: float, reason: EndReason) -> RunEnded:
    best = state.best_loss if math.isfinite(state.best_loss) else None
    return RunEnded(state.step, reason, time.perf_counter() - started, state.best_step, best, iteration=state.iteration)
