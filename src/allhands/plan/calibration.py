"""A short training on this computer that gives ``allhands plan`` its figures."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allhands.config.schema import TrainConfig
from allhands.errors import AllhandsError, ConfigError, DataError
from allhands.kernels.known import is_compiled
from allhands.model.load import read_config
from allhands.model.sources import resolve
from allhands.observe.metrics import RunStarted, TrainReport
from allhands.observe.metrics.events import decode_event
from allhands.observe.monitor import read_samples
from allhands.plan.job import SmallPasses
from allhands.plan.noise import busy, contradiction, watched
from allhands.run.stage_costs import small_enough

_STEPS = 6  # the first step does not count, because it compiles and fills caches
_STEPS_OF_GPU = 24  # with packed rows: nearly all steps are alike
_STEPS_OF_LENGTHS = 96  # without packing: most of the first 30 steps meet a new length
_ALIKE = 0.02  # relative spread of sizes; below it, times do not show how they depend on the size
_FOLDER, _ABANDONED_S = "allhands-plan-", 86400.0
# Options that a short run leaves out: they are about the whole training or several computers.
_DROPPED = (
    "epochs",
    "hosts",
    "hostfile",
    "num_ranks",
    "rank_weights",
    "min_ranks",
    "report_to",
    "project_name",
    "test",
    "early_stopping_patience",
    "resume",
    "profile",
    "config",
    "max_restarts",
    "backend",
    "warmup_steps",
    "resume_adapter_file",
    "sample_every",
    # Options that divide a model: here one process has the whole model.
    "strategy",
    "tp",
    "cp",
    "ep",
    "dp_shard",
    "reshard",
    "pp",
    "pp_schedule",
    "pp_split",
)


@dataclass(frozen=True)
class Calibration:
    """Results of the short runs.

    Attributes:
        points: tokens and seconds of a step, for two sizes of batch.
        exchanged: number of trained parameters.
        total: number of all parameters.
        examples: number of training examples.
        start_s: seconds from the command to the first step.
        peak_bytes: peak memory with the whole batch: of the process (CPU), or the need of MLX's
            arrays (GPU).
        expected_bytes: memory that the process expected to need before its first step, if it knows.
        seconds: duration of the whole calibration.
        cores_per_rank: cores of the process, if they were counted.
        largest: most padded tokens that are computed at once in the whole training, and the number
            of such parts in a batch; ``None``: the training did not report it.
        longest: tokens of the longest row; ``None``: not reported.
        lengths: number of different row lengths; ``None``: not reported.
        first_s: additional seconds of a training's first steps, all together, on a GPU.
        whole_s: seconds of a step by one process with all cores, if the other runs had fewer.
        doubt: why these times cannot be trusted; empty if they can.
    """

    points: tuple[tuple[float, float], ...]
    exchanged: int
    total: int
    examples: int
    start_s: float
    peak_bytes: int
    expected_bytes: int | None
    seconds: float
    cores_per_rank: int | None = None
    largest: tuple[int, int] | None = None
    longest: int | None = None
    lengths: int | None = None
    first_s: float = 0.0
    whole_s: float | None = None
    doubt: str = ""


@dataclass(frozen=True)
class Calibrator:
    """Short trainings on this computer, each in a process of its own.

    Attributes:
        timeout_s: most seconds of each training.
        on_gpu: True if a GPU trains.
        in_child: called in each process before its program starts; ``None``: nothing is called.
    """

    timeout_s: float
    on_gpu: bool
    in_child: Callable[[], None] | None = None

    def calibrate(
        self,
        config: TrainConfig,
        say: Callable[[str], object] = lambda text: None,
        *,
        with_all_cores: bool = False,
    ) -> Calibration:
        """Train a few steps with the whole batch and with half of it.

        On a CPU the measurement is repeated if other programs computed at the same time, or if
        times contradict each other.

        Args:
            with_all_cores: also train the whole batch in a process with all cores.

        Raises:
            AllhandsError: the error of the training.
        """
        found = self._measured(config, with_all_cores=with_all_cores)
        if not found.doubt:
            return found
        say(f"{found.doubt}: measuring again ...")
        return self._measured(config, with_all_cores=with_all_cores)

    def _measured(self, config: TrainConfig, *, with_all_cores: bool) -> Calibration:
        began = time.perf_counter()
        # Half of the batch comes first: the first process tokenises new data, which takes memory
        # and time that must not count for the whole batch.
        sizes = sorted({max(1, config.batch_size // 2), config.batch_size})
        rows = self._rows_of(config, sizes[0])
        runs = [self._run(config, size, rows=rows) for size in sizes][::-1]
        points = tuple(map(self._point, runs))
        first, whole_s, others = runs[0], None, max(run.others for run in runs)
        started = first.started
        if with_all_cores:
            # The runs above had only the cores that each of several ranks has.
            free = config.model_copy(update={"cores_per_rank": None})
            whole = self._run(free, config.batch_size)
            # More cores cannot make a step longer.
            whole_s, others = self._point(whole)[1], max(others, whole.others)
        return Calibration(
            points=points,
            exchanged=started.trainable_params,
            total=started.total_params,
            examples=started.num_train_examples,
            start_s=first.start_s,
            peak_bytes=max(
                (report.needed_bytes or report.peak_memory_bytes)[0] for report in first.reports
            ),
            expected_bytes=first.expected_bytes,
            seconds=time.perf_counter() - began,
            cores_per_rank=started.cores_per_rank,
            largest=started.largest,
            longest=started.longest,
            lengths=started.lengths,
            first_s=_more_than(first.reports, *points[0]) if self.on_gpu else 0.0,
            whole_s=None if whole_s is None else min(whole_s, points[0][1]),
            doubt="" if self.on_gpu else busy(others) or contradiction(points, whole_s),
        )

    def _rows_of(self, config: TrainConfig, batch_size: int) -> int | None:
        """Return the number of rows if the form of a step depends on it, else ``None``.

        With ``--epochs`` the number of steps follows from it, and a GPU compiles many steps.
        """
        if not self.on_gpu or config.compile != "auto" or config.iters or not config.epochs:
            return None
        run = self._run(config, batch_size, {"iters": 2, "save_every": 2})
        return run.started.num_train_examples

    def time_to_start(self, config: TrainConfig) -> float:
        """Return the seconds from the command to the first step with all ``config.num_ranks``
        processes of this computer.

        Raises:
            AllhandsError: the error of the training.
        """
        changed = {
            "num_ranks": config.num_ranks,
            "backend": config.backend,
            "iters": 2,
            "save_every": 2,
        }
        # Two steps are not compiled, also on a GPU.
        return replace(self, on_gpu=False)._run(config, config.batch_size, changed).start_s

    def small_passes(
        self, config: TrainConfig, measured: Calibration, stages: int
    ) -> SmallPasses | None:
        """Train a few steps with the micro-batches of a pipeline of ``stages`` stages.

        Nothing is trained if the usual micro-batches are as small, or if a person has set their
        size.

        Returns:
            The measured step; ``None`` if the calibration did not report its sizes.

        Raises:
            AllhandsError: the error of the training.
        """
        if measured.longest is None or measured.largest is None:
            return None
        (tokens, usual), longest, seconds = (
            measured.largest,
            measured.longest,
            measured.points[0][1],
        )
        if config.micro_batch_tokens is not None:
            return SmallPasses(tokens, config.micro_batch_tokens, 0, usual, usual, seconds)
        limit = small_enough(longest, config.batch_size, stages)
        if limit >= tokens:
            return SmallPasses(tokens, limit, longest, usual, usual, seconds)
        changed = {"micro_batch_tokens": limit}
        run = self._run(config, config.batch_size, changed, rows=measured.examples)
        tokens, batches = run.started.largest or (limit, config.batch_size)
        return SmallPasses(tokens, limit, longest, batches, usual, self._point(run)[1])

    def _point(self, run: _ShortRun) -> tuple[float, float]:
        return _point_of_gpu(run) if self.on_gpu else _point(run)

    def _run(
        self,
        config: TrainConfig,
        batch_size: int,
        changed: Mapping[str, Any] | None = None,
        *,
        rows: int | None = None,
    ) -> _ShortRun:
        _remove_abandoned()
        with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
            run, options = Path(folder) / "run", Path(folder) / "plan.yaml"
            usual = settings(config, batch_size, run, on_gpu=self.on_gpu, rows=rows)
            values = {**usual, **(changed or {})}
            options.write_text(json.dumps(values), encoding="utf-8")
            began = time.time()
            try:
                with watched() as watch:
                    done = subprocess.run(
                        [sys.executable, "-m", "allhands", config.VERB, "-c", str(options)],
                        capture_output=True,
                        text=True,
                        timeout=self.timeout_s,
                        check=False,
                        preexec_fn=self.in_child,
                    )
            except subprocess.TimeoutExpired:
                steps = steps_of(config, on_gpu=self.on_gpu)
                raise ConfigError(
                    f"{steps} steps took longer than {self.timeout_s:g} s",
                    code="training-timeout",
                    where="--timeout-s",
                    hint="give more --timeout-s or a smaller --batch-size; --device 'M2 Pro' estimates without a training",
                ) from None
            if done.returncode:
                raise _failure(done.stderr, done.returncode)
            expected = _expected(run)
            lines = (run / "metrics.jsonl").read_text().splitlines()
        events = [decode_event(line) for line in lines]
        started = next(event for event in events if isinstance(event, RunStarted))
        reports = tuple(event for event in events if isinstance(event, TrainReport))
        return _ShortRun(started, reports, max(0.0, started.time - began), expected, watch.others)


def steps_of(config: TrainConfig, *, on_gpu: bool) -> int:
    """Return the number of steps of each of the two runs."""
    if not on_gpu:
        return _STEPS
    return _STEPS_OF_GPU if config.packing else _STEPS_OF_LENGTHS


@dataclass(frozen=True)
class _ShortRun:
    started: RunStarted
    reports: tuple[TrainReport, ...]
    start_s: float
    expected_bytes: int | None
    others: float = 0.0  # cores that other programs took


def _point(run: _ShortRun) -> tuple[float, float]:
    """Return the mean tokens of a step, and its seconds by the fastest counted step.

    The first step is not counted if there are others.
    """
    counted = run.reports[1:] or run.reports
    tokens = statistics.mean(report.tokens_per_s * report.step_time_s for report in counted)
    # The fastest step counts: other work for a moment makes a computer slower, never faster.
    each = min(1.0 / report.tokens_per_s for report in counted)
    return tokens, tokens * each


def _point_of_gpu(run: _ShortRun) -> tuple[float, float]:
    """Return mean tokens and seconds of a step on a GPU, where each step queues the next step's
    passes.

    The last step queues no passes, and its own were computed in the step before, so it does not
    count. A step with a new shape, and the step before it, do not count either if there are others:
    passes of new shapes are not queued ahead, and a long training has few such steps. Their
    additional time is :attr:`Calibration.first_s`. Any other step takes as long as the next step's
    pass, so the tokens of the next step count.
    """
    counted = list(zip(run.reports, run.reports[1:-1], run.reports[2:], strict=False))
    old = [
        (each, after)
        for before, each, after in counted
        if before.shapes == each.shapes == after.shapes
    ]
    # A device gets faster until its clock and its caches are stable.
    chosen = old[len(old) // 3 :] if len(old) > 1 else [(each, after) for _, each, after in counted]
    # Tokens are the mean of all steps. New lengths are mostly long ones, so steps without new
    # shapes have fewer tokens than others.
    tokens = statistics.mean(report.tokens_per_s * report.step_time_s for report in run.reports)
    if not chosen:
        return tokens, statistics.mean(report.step_time_s for report in run.reports)
    return tokens, _seconds_at(
        tokens,
        [after.tokens_per_s * after.step_time_s for _, after in chosen],
        [each.step_time_s for each, _ in chosen],
    )


def _seconds_at(tokens: float, sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the seconds of a step with ``tokens`` tokens, from a line through the measured points;
    neither its slope nor its base is negative.
    """
    if statistics.pstdev(sizes) < _ALIKE * statistics.mean(sizes):
        return statistics.mean(seconds)
    slope, base = statistics.linear_regression(sizes, seconds)
    if slope <= 0.0:
        return statistics.mean(seconds)
    return base + slope * tokens if base >= 0.0 else tokens * sum(seconds) / sum(sizes)


def _more_than(reports: Sequence[TrainReport], tokens: float, seconds: float) -> float:
    """Return the seconds that all steps together took longer than steps with ``tokens`` in
    ``seconds``.
    """
    took = sum(report.step_time_s for report in reports)
    computed = sum(report.tokens_per_s * report.step_time_s for report in reports)
    return max(0.0, took - computed * seconds / tokens)


def _remove_abandoned() -> None:
    """Remove the files of plans that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):  # files of other users cannot be removed
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _expected(run: Path) -> int | None:
    try:
        return max((sample.estimated_bytes or 0 for sample in read_samples(run)), default=0) or None
    except DataError:  # there are no samples
        return None


def settings(
    config: TrainConfig,
    batch_size: int,
    directory: Path,
    *,
    on_gpu: bool = False,
    rows: int | None = None,
) -> Mapping[str, Any]:
    """Return the options of a short run, with the same computation of a step as ``config``.

    Args:
        rows: number of rows of the training data; ``None`` if it is not known.
    """
    steps = steps_of(config, on_gpu=on_gpu)
    batches = config.batches(math.ceil((rows or 0) / config.batch_size))
    compiled = on_gpu and is_compiled(config.compile, batches, _type_of(config.model))
    values = {
        name: value
        for name, value in config.model_dump(mode="json").items()
        if name not in _DROPPED
    }
    changed: dict[str, Any] = {
        "train": True,
        "batch_size": batch_size,
        "grad_accumulation_steps": 1,
        "iters": steps,
        "adapter_path": str(directory),
        "steps_per_report": 1,
        "val_batches": 0,
        "save_every": steps,
        "keep_last": 0,
        "keep_best": False,
        "sample_prompts": [],
        "lr_schedule": None,
        "compile": "on" if compiled else config.compile,
    }
    return {name: value for name, value in {**values, **changed}.items() if value is not None}


def _type_of(model: str) -> str | None:
    with suppress(AllhandsError):  # a new model is named by other options
        return read_config(resolve(model)).get("model_type")
    return None


def _failure(told: str, code: int) -> AllhandsError:
    """Return the error of a short run as an error of this command.

    ``told``: its standard error; ``code``: its exit code.
    """
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    found = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    hint = next((line.removeprefix(_HINT) for line in lines if line.startswith(_HINT)), None)
    message = [f"it ended with {code}", *lines[-1:], *found][-1]
    made = _kinds(AllhandsError).get(code, AllhandsError)
    return made(message, code="training-failed", where="a training of a few steps", hint=hint)


def _kinds(of: type[AllhandsError]) -> dict[int, type[AllhandsError]]:
    kinds = {of.exit_code: of}
    for each in of.__subclasses__():
        kinds |= _kinds(each)
    return kinds


_ERROR, _HINT = "allhands: error: ", "what to do: "
