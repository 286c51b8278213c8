"""The training loop: when to step, report, validate, save and stop. What a step does is in ``step.py``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np

from allhands.accelerator import Accelerator, peak_memory_bytes
from allhands.config import TrainConfig
from allhands.data.loader import MicroBatch
from allhands.data.order import GlobalOrder
from allhands.distributed.backend import Communicator
from allhands.distributed.reduce import barrier
from allhands.errors import AllhandsError, Interrupted, NumericsError
from allhands.evaluate import Evaluator
from allhands.metrics import RunEnded, SavedReport, Sink, TrainReport, ValidReport
from allhands.train.callbacks import Callback
from allhands.train.step import StepResult, TrainStep
from allhands.trees import numbers

EndReason = Literal["finished", "stopped early", "interrupted", "failed"]
# "last" and "best" become the adapter to use; "suspect" weights, after which a loss was NaN, only a numbered file.
SaveKind = Literal["last", "best", "suspect"]


@dataclass(frozen=True)
class LoopParts:
    """Everything the loop drives; assembled by ``train/recipes.py``.

    Attributes:
        load: this rank's micro-batches of a batch, by its number; usually made ahead.
        save: writes the trained weights and returns the path of what it wrote.
        stop_requested: the signal that asked this rank to stop, or 0.
        learning_rate: of the last update.
        total: batches to train on.
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
    save: Callable[[int, SaveKind], Path]
    stop_requested: Callable[[], int]
    learning_rate: Callable[[], float]
    total: int


@dataclass
class _Window:
    """Sums since the last report."""

    loss_sum: float = 0.0
    num_targets: int = 0
    num_tokens: int = 0
    steps: int = 0
    time_s: float = 0.0
    wait_s: float = 0.0
    comm_s: float = 0.0
    grad_norm: float = 0.0

    def add(self, result: StepResult, time_s: float, wait_s: float) -> None:
        self.loss_sum += result.loss_sum
        self.num_targets += result.num_targets
        self.num_tokens += result.num_tokens
        self.steps += 1
        self.time_s += time_s
        self.wait_s += wait_s
        self.comm_s += result.comm_s
        self.grad_norm = result.grad_norm


@dataclass
class LoopState:
    """Where a run stands. ``iteration`` counts batches done."""

    iteration: int = 0
    trained_tokens: int = 0
    best_loss: float = math.inf
    best_iteration: int | None = None
    stale_validations: int = 0
    window: _Window = field(default_factory=_Window)


def train_loop(parts: LoopParts, state: LoopState) -> RunEnded:
    """Train until the end, early stopping, or a request to stop; rank 0 reports and saves.

    Raises:
        Interrupted: a rank was asked to stop; what was trained is saved.
        NumericsError: loss or gradient is not finite; what was trained before is saved.
        StorageError: weights could not be written.
    """
    started = time.perf_counter()
    try:
        return _train(parts, state, started)
    except (Interrupted, NumericsError) as error:
        # Raised on every rank alike, so that saving together is possible.
        told = _keep_and_tell(parts, state, error)
        parts.sink.emit(_ended(state, started, "interrupted" if isinstance(error, Interrupted) else "failed"))
        raise told from None
    except AllhandsError:
        parts.sink.emit(_ended(state, started, "failed"))
        raise


def _train(parts: LoopParts, state: LoopState, started: float) -> RunEnded:
    config = parts.config
    _validate(parts, state, started)
    while state.iteration < parts.total:
        before = state.iteration
        result = _update(parts, state)
        done = state.iteration == parts.total
        if _crossed(before, state.iteration, config.steps_per_report) or done or result.stop_votes:
            _report(parts, state, started)
        if result.stop_votes:
            raise Interrupted("stopped")
        stale = False
        if _crossed(before, state.iteration, config.steps_per_eval) or done:
            stale = _validate(parts, state, started)
        if _crossed(before, state.iteration, config.save_every) or done or stale:
            _save(parts, state, "last")
        if stale and not done:
            return _ended(state, started, "stopped early")
    return _ended(state, started, "finished")


def _keep_and_tell(parts: LoopParts, state: LoopState, error: Interrupted | NumericsError) -> AllhandsError:
    """Save what was trained; the error to raise, which says where it is. Called on all ranks together."""
    place = f"batch {state.iteration} of {parts.total}"
    if isinstance(error, Interrupted):
        if state.iteration == 0:
            return Interrupted("stopped before the first update; nothing was trained")
        path = _save(parts, state, "last") or "rank 0's adapter path"
        return Interrupted(
            f"stopped after {place}; the weights are saved in {path}",
            hint=f"to go on from them: --resume-adapter-file {path}",
        )
    if state.iteration == 0:
        return NumericsError(
            f"{error.message} before any training",
            hint="the model's own weights or their precision are at fault: fetch the model again, "
            "or make a float32 copy (allhands model get MODEL --dtype float32 --out DIR)",
        )
    path = _save(parts, state, "suspect") or "rank 0's adapter path"
    return NumericsError(
        f"{error.message} after {place}",
        hint="lower --learning-rate, or add --max-grad-norm 1 or --warmup-steps; "
        f"the last weights are kept in {path}, adapters.safetensors is as it was before",
    )


def _crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of ``every`` was reached; with accumulation an update takes several batches."""
    return after // every > before // every


def _update(parts: LoopParts, state: LoopState) -> StepResult:
    """One optimizer update over ``grad_accumulation_steps`` batches (fewer at the end)."""
    begun = time.perf_counter()
    end = min(state.iteration + parts.config.grad_accumulation_steps, parts.total)
    micro_batches = [batch for i in range(state.iteration, end) for batch in parts.load(i)]
    loaded = time.perf_counter()
    # Dropout is a function of (seed, batch, rank) too, so that nothing of it need be saved.
    entropy = [parts.config.seed, state.iteration, parts.communicator.rank]
    mx.random.seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
    result = parts.step(micro_batches, stop=bool(parts.stop_requested()))
    _limit_cache(parts.config.clear_cache_threshold)
    state.iteration = end
    state.trained_tokens += result.num_targets
    state.window.add(result, time.perf_counter() - begun, loaded - begun)
    return result


def _limit_cache(threshold: int) -> None:
    if threshold and mx.get_cache_memory() > threshold:
        mx.clear_cache()


def _report(parts: LoopParts, state: LoopState, started: float) -> None:
    window, state.window = state.window, _Window()
    report = TrainReport(
        step=state.iteration,
        loss=window.loss_sum / max(window.num_targets, 1),
        learning_rate=parts.learning_rate(),
        grad_norm=window.grad_norm,
        tokens_per_s=window.num_tokens / window.time_s,
        trained_tokens_per_s=window.num_targets / window.time_s,
        trained_tokens=state.trained_tokens,
        step_time_s=window.time_s / window.steps,
        data_wait_s=window.wait_s / window.steps,
        comm_s=window.comm_s / window.steps,
        elapsed_s=time.perf_counter() - started,
        peak_memory_bytes=_peak_per_rank(parts),
        epoch=state.iteration / parts.order.batches_per_epoch,
    )
    parts.sink.emit(report)
    for callback in _on_main(parts):
        callback.on_train_report(report)


def _peak_per_rank(parts: LoopParts) -> tuple[int, ...]:
    # In MiB, because float32 (which every back-end can gather) is exact only to 2**24.
    mine = mx.array([peak_memory_bytes(parts.accelerator) / 2**20], dtype=mx.float32)
    return tuple(int(value * 2**20) for value in numbers(parts.communicator.all_gather(mine)))


def _on_main(parts: LoopParts) -> Sequence[Callback]:
    return parts.callbacks if parts.communicator.rank == 0 else ()


def _validate(parts: LoopParts, state: LoopState, started: float) -> bool:
    """Validate, keep the best adapter, and tell whether patience is at its end."""
    if parts.evaluator is None:
        return False
    begun = time.perf_counter()
    loss, num_tokens = parts.evaluator()
    better = loss < state.best_loss - parts.config.early_stopping_min_delta
    if better:
        state.best_loss, state.best_iteration, state.stale_validations = loss, state.iteration, 0
    else:
        state.stale_validations += 1
    now = time.perf_counter()
    report = ValidReport(state.iteration, loss, num_tokens, now - started, now - begun, better)
    parts.sink.emit(report)
    for callback in _on_main(parts):
        callback.on_valid_report(report)
    if better and parts.config.keep_best and state.iteration > 0:
        _save(parts, state, "best")
    patience = parts.config.early_stopping_patience
    return patience is not None and state.stale_validations >= patience


def _save(parts: LoopParts, state: LoopState, kind: SaveKind) -> Path | None:
    """Save on rank 0 and return the path there, while the others wait.

    A rank that went on and ended would make a launcher end rank 0 while it still writes.
    """
    path = None
    if parts.communicator.rank == 0:
        path = parts.save(state.iteration, kind)
        parts.sink.emit(SavedReport(state.iteration, str(path)))
        for callback in parts.callbacks:
            callback.on_save(state.iteration, path)
    barrier(parts.communicator)
    return path


def _ended(state: LoopState, started: float, reason: EndReason) -> RunEnded:
    best = state.best_loss if math.isfinite(state.best_loss) else None
    return RunEnded(state.iteration, reason, time.perf_counter() - started, state.best_iteration, best)
