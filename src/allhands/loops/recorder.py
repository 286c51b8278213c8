"""Metrics for a training loop of your own, in the file that ``allhands plot`` reads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from allhands.errors import ConfigError, Interrupted
from allhands.io.names import METRICS_FILE
from allhands.io.paths import local_path
from allhands.loops.supervised import whole_step
from allhands.observe.metrics.events import (
    UNKNOWN,
    Logged,
    RunEnded,
    RunStarted,
    TrainReport,
    ValidReport,
)
from allhands.observe.metrics.sinks import JsonlSink

if TYPE_CHECKING:
    import mlx.core as mx

    from allhands.loops.world import World

    Number = float | mx.array

_WHERE = "Metrics.log"
# `allhands plot` and its table know the meaning of these names.
_KNOWN = ("loss", *UNKNOWN)


class Metrics:
    """Numbers of a training loop as lines of ``metrics.jsonl``, written by rank 0.

    ``allhands plot DIRECTORY`` draws ``loss`` and ``valid_loss``. The names ``learning_rate``,
    ``grad_norm``, ``tokens_per_s`` and ``epoch`` also have fixed fields; any other name is kept
    beside them. As a context manager it records how the block ended.

    Examples:
        >>> with allhands.Metrics("run", show=print) as metrics:
        ...     metrics.log(step, {"loss": loss, "accuracy": accuracy}, reduce="mean", weight=num_tokens)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        first_step: int = 0,
        show: Callable[[str], object] | None = None,
        world: World | None = None,
    ) -> None:
        """Open the file on rank 0; its earlier lines stay.

        Args:
            directory: directory of the run.
            first_step: number of steps done before, as ``Checkpointer.restore()`` returns it. Lines
                of an earlier start with a higher step no longer count.
            show: function such as ``print`` that also gets each line as text, on rank 0.
            world: default: :func:`allhands.init`.

        Raises:
            ConfigError: ``first_step`` is not a whole number from 0, or ``directory`` is no path.
            StorageError: the file cannot be written.
        """
        first_step = whole_step(first_step, "Metrics")
        if world is None:
            from allhands.loops.world import init

            world = init()
        self._world, self._show, self._step = world, show, first_step
        self._best, self._ended = math.inf, False
        self._begin = self._last = time.monotonic()
        self._sink: JsonlSink | None = None
        if world.is_main:
            path = Path(local_path(directory, _WHERE))
            self._sink = JsonlSink(path / METRICS_FILE)
            self._sink.emit(_started(path.resolve().name, world, first_step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | Interrupted)
        if kind is None or stopped:
            self._end("interrupted" if stopped else "finished")
        else:
            self._end("failed", f"{kind.__name__}: {error}")

    def log(
        self,
        step: int,
        values: Mapping[str, Number],
        *,
        reduce: Literal["mean", "sum"] | None = None,
        weight: Number = 1.0,
    ) -> dict[str, float]:
        """Write the numbers of ``step``.

        Args:
            step: number of completed steps; not less than in the call before.
            values: numbers or MLX arrays of one element, by name.
            reduce: ``"mean"`` or ``"sum"`` over ranks; then every rank must call this method, with
                the same names. ``None``: rank 0's numbers.
            weight: weight of this rank in the mean, such as its number of tokens; the values of a
                rank with weight 0 do not matter.

        Returns:
            The numbers. If they were reduced, they are the same on all ranks; otherwise ranks other
            than 0 get none.

        Raises:
            ConfigError: a value is no number, ``step`` is no step or is lower than the last one,
                ``reduce`` is unknown, or the file is closed.
        """
        step = self._checked(step, values)
        if reduce not in (None, "mean", "sum"):
            raise ConfigError(
                f"reduce={reduce!r}",
                code="value-unknown",
                where=_WHERE,
                hint="use 'mean', 'sum' or None",
            )
        numbers = self._reduced(values, reduce, weight)
        if self._sink is not None:
            self._write(self._sink, step, numbers)
            if self._show is not None:
                self._show(
                    f"step {step}: "
                    + ", ".join(f"{name} {number:.6g}" for name, number in numbers.items())
                )
        self._step = step
        return numbers

    def close(self) -> None:
        """Note that the run has finished, and close the file; further calls do nothing."""
        self._end("finished")

    def _checked(self, step: int, values: object) -> int:
        step = whole_step(step, _WHERE)
        if not isinstance(values, Mapping):
            hint = 'give numbers by name: {"loss": 1.5}'
            raise ConfigError(
                f"{values!r} are no values", code="argument-invalid", where=_WHERE, hint=hint
            )
        if self._ended:
            raise ConfigError(
                "the metrics are closed",
                code="argument-invalid",
                where=_WHERE,
                hint="log within the `with` block, before close()",
            )
        if step < self._step:
            raise ConfigError(
                f"step {step} comes after step {self._step}",
                code="argument-invalid",
                where=_WHERE,
                hint=f"count steps over all epochs; to go back to step {step}: Metrics(..., first_step={step})",
            )
        return step

    def _reduced(
        self, values: Mapping[str, Number], reduce: str | None, weight: Number
    ) -> dict[str, float]:
        if reduce is None or self._world.is_alone:
            return (
                {name: _number(value, name) for name, value in values.items()}
                if self._world.is_main
                else {}
            )
        import mlx.core as mx

        together = mx.array(
            [_number(value, name) for name, value in values.items()], dtype=mx.float32
        )
        result = (
            self._world.mean(together, weight)
            if reduce == "mean"
            else self._world.all_sum(together)
        )
        return dict(zip(values, cast("list[float]", result.tolist()), strict=True))

    def _write(self, sink: JsonlSink, step: int, numbers: dict[str, float]) -> None:
        now = time.monotonic()
        elapsed, since = now - self._begin, now - self._last
        self._last = now
        more = {
            name: number for name, number in numbers.items() if name not in (*_KNOWN, "valid_loss")
        }
        if "loss" in numbers:
            known = {name: _typed(name, numbers[name]) for name in _KNOWN if name in numbers}
            report = _train(step, known, elapsed, since / max(step - self._step, 1))
            sink.emit(report, more, without=UNKNOWN.keys() - known.keys())
        elif len(numbers) > ("valid_loss" in numbers):
            sink.emit(
                Logged(step, elapsed),
                {name: n for name, n in numbers.items() if name != "valid_loss"},
            )
        if "valid_loss" in numbers:
            loss = numbers["valid_loss"]
            sink.emit(ValidReport(step, loss, 0, elapsed, 0.0, loss < self._best))
            self._best = min(self._best, loss)

    def _end(
        self, reason: Literal["finished", "interrupted", "failed"], error: str | None = None
    ) -> None:
        if self._sink is not None and not self._ended:
            took_s = time.monotonic() - self._begin
            self._sink.emit(RunEnded(self._step, reason, took_s, error=error))
            self._sink.close()
        self._ended = True


def _started(name: str, world: World, first_step: int) -> RunStarted:
    """Return the line that marks a start; fields that only ``allhands train`` knows are empty."""
    unknown: dict[str, Any] = dict.fromkeys(
        ("batch_size", "total_steps", "trainable_params", "total_params", "num_train_examples"), 0
    )
    return RunStarted(
        name=name,
        model="",
        method="",
        num_ranks=world.size,
        backend=world.backend,
        cores_per_rank=None,
        versions={},
        time=time.time(),
        step=first_step,
        **unknown,
    )


def _typed(name: str, number: float) -> Any:
    """Return ``number`` in the type of the field ``name`` of a training report."""
    usual = UNKNOWN.get(name, math.nan)
    if isinstance(usual, float) or not math.isfinite(number):
        return number if isinstance(usual, float) else usual
    return (int(number),) if isinstance(usual, tuple) else int(number)


def _train(
    step: int, known: Mapping[str, Any], elapsed_s: float, step_time_s: float
) -> TrainReport:
    given: dict[str, Any] = {**UNKNOWN, **known}
    return TrainReport(step=step, step_time_s=step_time_s, elapsed_s=elapsed_s, **given)


def _number(value: Number, name: str) -> float:
    try:
        return float(value if isinstance(value, int | float) else cast("Any", value).item())
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"{name} is not one number",
            code="argument-invalid",
            where=_WHERE,
            hint="give numbers or arrays of one element",
        ) from None
