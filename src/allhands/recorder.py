"""For a person's own loop: numbers of each step, in the file that ``allhands plot`` reads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from allhands.errors import ConfigError, Interrupted
from allhands.metrics.events import Logged, RunEnded, RunStarted, TrainReport, ValidReport
from allhands.metrics.sinks import METRICS_FILE, JsonlSink

if TYPE_CHECKING:
    import mlx.core as mx

    from allhands.world import World

    Number = float | mx.array

_NAN = math.nan
# Of what the loop says these have a meaning for `allhands plot` and its table.
_KNOWN = ("loss", "learning_rate", "grad_norm", "tokens_per_s", "epoch")


class Metrics:
    """Numbers of a training loop as lines of ``metrics.jsonl``, written by rank 0.

    ``loss`` and ``valid_loss`` are what ``allhands plot DIRECTORY`` draws; ``learning_rate``, ``grad_norm``,
    ``tokens_per_s`` and ``epoch`` have their places, too; any other name is kept beside them. A context manager: what
    ends the block is in the file.

    Example:
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
        """Open the file on rank 0; what is in it stays.

        Args:
            directory: of the run.
            first_step: steps done before, such as ``Checkpointer.restore()`` returns: what the file has of later
                steps counts no more.
            show: also gets each line as text, such as ``print``; on rank 0.
            world: default: :func:`allhands.init`.

        Raises:
            StorageError: the file cannot be written.
        """
        if world is None:
            from allhands.world import init

            world = init()
        self._world, self._show, self._step = world, show, first_step
        self._best, self._ended = math.inf, False
        self._begin = self._last = time.monotonic()
        self._sink: JsonlSink | None = None
        if world.is_main:
            path = Path(directory).expanduser()
            self._sink = JsonlSink(path / METRICS_FILE)
            self._sink.emit(_started(path.resolve().name, world, first_step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | Interrupted)
        self._end("finished" if kind is None else "interrupted" if stopped else "failed")

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
            step: steps done.
            values: numbers or MLX arrays of one element, by name.
            reduce: over ranks: then every rank must call it, with the same names; ``None``: those of rank 0 count.
            weight: of this rank in the mean, such as its number of tokens; of weight 0, its values do not matter.

        Returns:
            The numbers, on all ranks the same where they were reduced.

        Raises:
            ConfigError: a value is not a number.
        """
        if reduce not in (None, "mean", "sum"):
            raise ConfigError(f"reduce={reduce!r}", where="Metrics.log", hint="use 'mean', 'sum' or None")
        numbers = self._reduced(values, reduce, weight)
        if self._sink is not None:
            self._write(self._sink, step, numbers)
            if self._show is not None:
                self._show(f"step {step}: " + ", ".join(f"{name} {number:.6g}" for name, number in numbers.items()))
        self._step = step
        return numbers

    def close(self) -> None:
        """Note that the run has finished; may be repeated."""
        self._end("finished")

    def _reduced(self, values: Mapping[str, Number], reduce: str | None, weight: Number) -> dict[str, float]:
        if reduce is None or self._world.is_alone:
            return {name: _number(value, name) for name, value in values.items()} if self._world.is_main else {}
        import mlx.core as mx

        together = mx.array([_number(value, name) for name, value in values.items()], dtype=mx.float32)
        result = self._world.mean(together, weight) if reduce == "mean" else self._world.all_sum(together)
        return dict(zip(values, cast("list[float]", result.tolist()), strict=True))

    def _write(self, sink: JsonlSink, step: int, numbers: dict[str, float]) -> None:
        now = time.monotonic()
        elapsed, since = now - self._begin, now - self._last
        self._last = now
        more = {name: number for name, number in numbers.items() if name not in (*_KNOWN, "valid_loss")}
        if "loss" in numbers:
            known = {name: numbers[name] for name in _KNOWN if name in numbers}
            sink.emit(_train(step, known, elapsed, since / max(step - self._step, 1)), more)
        elif len(numbers) > ("valid_loss" in numbers):
            sink.emit(Logged(step, elapsed), {name: n for name, n in numbers.items() if name != "valid_loss"})
        if "valid_loss" in numbers:
            loss = numbers["valid_loss"]
            sink.emit(ValidReport(step, loss, 0, elapsed, 0.0, loss < self._best))
            self._best = min(self._best, loss)

    def _end(self, reason: Literal["finished", "interrupted", "failed"]) -> None:
        if self._sink is not None and not self._ended:
            self._sink.emit(RunEnded(self._step, reason, time.monotonic() - self._begin))
            self._sink.close()
        self._ended = True


def _started(name: str, world: World, first_step: int) -> RunStarted:
    """The line by which a reader tells a restart; what only a run of ``allhands train`` has is empty."""
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


def _train(step: int, known: Mapping[str, float], elapsed_s: float, step_time_s: float) -> TrainReport:
    given: dict[str, Any] = {
        **{"learning_rate": _NAN, "grad_norm": _NAN, "tokens_per_s": _NAN, "epoch": _NAN},
        **known,
    }
    return TrainReport(
        step=step,
        trained_tokens_per_s=_NAN,
        trained_tokens=0,
        step_time_s=step_time_s,
        data_wait_s=0.0,
        comm_s=0.0,
        elapsed_s=elapsed_s,
        peak_memory_bytes=(),
        **given,
    )


def _number(value: Number, name: str) -> float:
    try:
        return float(value if isinstance(value, int | float) else cast("Any", value).item())
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"{name} is not one number", where="Metrics.log", hint="give numbers or arrays of one element"
        ) from None
