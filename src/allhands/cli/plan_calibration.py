"""A short training on this computer, from which ``allhands plan`` takes its figures."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allhands.cli.plan_noise import busy, contradiction, watched
from allhands.cluster.guard import die_with_parent
from allhands.config.schema import COMPILE_FROM_BATCHES, TrainConfig
from allhands.errors import AllhandsError, ConfigError, DataError
from allhands.kernels.known import can_be_compiled
from allhands.model.load import read_config
from allhands.model.sources import resolve
from allhands.observe.metrics import RunStarted, TrainReport
from allhands.observe.metrics.events import decode_event
from allhands.observe.monitor import read_samples
from allhands.plan.job import SmallPasses
from allhands.run.stage_costs import small_enough

_STEPS = 6  # of which the first does not count: it compiles, and fills caches
_STEPS_OF_GPU = 24  # where rows are packed, and nearly all steps are alike
_STEPS_OF_LENGTHS = 96  # where they are not: most of the first 30 meet a length for the first time
_ALIKE = 0.02  # sizes of steps that differ by less tell nothing of how the time depends on them
_FOLDER, _ABANDONED_S = "allhands-plan-", 86400.0
# What belongs to the whole training, or to several computers.
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
    # The division of a model, of which one process has all.
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
        exchanged: numbers that are trained.
        total: parameters of the model.
        examples: of the training data.
        start_s: from the command to the first step.
        peak_bytes: of the process (CPU), or what it needs of MLX's arrays (GPU), with the whole
            batch.
        cores_per_rank: that it had, where they were counted.
        expected_bytes: what the process itself expected to need before its first step, where it
            knows that.
        seconds: that all of it took.
        first_s: by which a training's first steps take longer than others, all together: on a GPU.
        largest: padded tokens that are computed at once at most in the whole training, and into how
            many such parts a batch is cut; ``None``: the training did not tell.
        longest: tokens of the longest row; ``lengths``: number of lengths that rows have.
        whole_s: of a step by one process that has all cores, where the others had fewer.
        doubt: why these times are no measure, in words; empty if they are.
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


def calibrate(
    config: TrainConfig,
    timeout_s: float,
    say: Callable[[str], object] = lambda text: None,
    *,
    on_gpu: bool,
    with_all_cores: bool = False,
) -> Calibration:
    """Train a few steps with the whole batch and with half of it, each in a process of its own.

    On a CPU all of it is measured once more where other programs computed besides, or times
    contradict each other.

    Args:
        with_all_cores: whether the whole batch is trained by a process with all cores, too.

    Raises:
        AllhandsError: it could not be trained; what the training said.
    """
    found = _measured(config, timeout_s, on_gpu=on_gpu, with_all_cores=with_all_cores)
    if not found.doubt:
        return found
    say(f"{found.doubt}: measuring again ...")
    return _measured(config, timeout_s, on_gpu=on_gpu, with_all_cores=with_all_cores)


def _measured(
    config: TrainConfig, timeout_s: float, *, on_gpu: bool, with_all_cores: bool
) -> Calibration:
    began = time.perf_counter()
    # Half of the batch first: the first process of new data makes their tokens, which takes memory
    # and time to start.
    sizes = sorted({max(1, config.batch_size // 2), config.batch_size})
    runs = [_run(config, size, timeout_s, on_gpu=on_gpu) for size in sizes][::-1]
    points = tuple(_point_of_gpu(run) if on_gpu else _point(run) for run in runs)
    first, whole_s, others = runs[0], None, max(run.others for run in runs)
    if with_all_cores:
        # Whatever each of several ranks has.
        whole = _run(
            config.model_copy(update={"cores_per_rank": None}), config.batch_size, timeout_s
        )
        whole_s, others = _point(whole)[1], max(others, whole.others)
    return Calibration(
        points=points,
        exchanged=first.started.trainable_params,
        total=first.started.total_params,
        examples=first.started.num_train_examples,
        start_s=first.start_s,
        peak_bytes=max(
            (report.needed_bytes or report.peak_memory_bytes)[0] for report in first.reports
        ),
        expected_bytes=first.expected_bytes,
        seconds=time.perf_counter() - began,
        cores_per_rank=first.started.cores_per_rank,
        largest=first.started.largest,
        longest=first.started.longest,
        lengths=first.started.lengths,
        first_s=_more_than(first.reports, *points[0]) if on_gpu else 0.0,
        # Nobody has to give a process all cores.
        whole_s=None if whole_s is None else min(whole_s, points[0][1]),
        doubt="" if on_gpu else busy(others) or contradiction(points, whole_s),
    )


def steps_of(config: TrainConfig, *, on_gpu: bool) -> int:
    """Return the number of steps of each of the two runs."""
    if not on_gpu:
        return _STEPS
    return _STEPS_OF_GPU if config.packing else _STEPS_OF_LENGTHS


def time_to_start(config: TrainConfig, timeout_s: float) -> float:
    """Seconds from the command to the first step with all of ``config.num_ranks`` processes of this
    computer.

    Raises:
        AllhandsError: it could not be trained; what the training said.
    """
    changed = {
        "num_ranks": config.num_ranks,
        "backend": config.backend,
        "iters": 2,
        "save_every": 2,
    }
    return _run(config, config.batch_size, timeout_s, changed).start_s


def small_passes(
    config: TrainConfig, measured: Calibration, stages: int, timeout_s: float, *, on_gpu: bool
) -> SmallPasses | None:
    """Train a few steps with micro-batches as a pipeline of so many stages has them, if they are
    not like that anyway.

    Raises:
        AllhandsError: it could not be trained; what the training said.
    """
    if measured.longest is None or measured.largest is None:
        return None
    tokens, usual = measured.largest
    if config.micro_batch_tokens is not None:
        return SmallPasses(
            tokens, config.micro_batch_tokens, 0, usual, usual, measured.points[0][1]
        )
    limit = small_enough(measured.longest, config.batch_size, stages)
    if limit >= tokens:
        return SmallPasses(tokens, limit, measured.longest, usual, usual, measured.points[0][1])
    run = _run(config, config.batch_size, timeout_s, {"micro_batch_tokens": limit}, on_gpu=on_gpu)
    tokens, batches = run.started.largest or (limit, config.batch_size)
    _, seconds = _point_of_gpu(run) if on_gpu else _point(run)
    return SmallPasses(tokens, limit, measured.longest, batches, usual, seconds)


@dataclass(frozen=True)
class _ShortRun:
    started: RunStarted
    reports: tuple[TrainReport, ...]
    start_s: float
    expected_bytes: int | None
    others: float = 0.0  # cores that other programs took


def _point(run: _ShortRun) -> tuple[float, float]:
    """Tokens and seconds of a step: of all that count together, since batches differ in length."""
    counted = run.reports[1:] or run.reports
    tokens = statistics.mean(report.tokens_per_s * report.step_time_s for report in counted)
    # The quickest, because a computer that does something else for a moment is slower, never
    # quicker.
    each = min(1.0 / report.tokens_per_s for report in counted)
    return tokens, tokens * each


def _point_of_gpu(run: _ShortRun) -> tuple[float, float]:
    """The same where the passes of the next step are handed out in each.

    The last step has none, and its own were computed in the one before: it does not count. Nor do,
    if there are others, those of a shape that was met for the first time, as most of a long
    training are not, and those before them: such passes are not handed out ahead. What those took
    longer is :attr:`Calibration.first_s`. Of the others a step takes as long as the next one's pass
    does, whose tokens count.
    """
    counted = list(zip(run.reports, run.reports[1:-1], run.reports[2:], strict=False))
    old = [
        (each, after)
        for before, each, after in counted
        if before.shapes == each.shapes == after.shapes
    ]
    # A device gets quicker until its clock and its caches are where they stay.
    chosen = old[len(old) // 3 :] if len(old) > 1 else [(each, after) for _, each, after in counted]
    # Of all: a rare length, which is most often a long one, is met for the first time more often
    # than others.
    tokens = statistics.mean(report.tokens_per_s * report.step_time_s for report in run.reports)
    if not chosen:
        return tokens, statistics.mean(report.step_time_s for report in run.reports)
    return tokens, _seconds_at(
        tokens,
        [after.tokens_per_s * after.step_time_s for _, after in chosen],
        [each.step_time_s for each, _ in chosen],
    )


def _seconds_at(tokens: float, sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the seconds of a step with so many tokens, by a line through steps of other ``sizes``;
    no part is negative.
    """
    if statistics.pstdev(sizes) < _ALIKE * statistics.mean(sizes):
        return statistics.mean(seconds)
    slope, base = statistics.linear_regression(sizes, seconds)
    if slope <= 0.0:
        return statistics.mean(seconds)
    return base + slope * tokens if base >= 0.0 else tokens * sum(seconds) / sum(sizes)


def _more_than(reports: Sequence[TrainReport], tokens: float, seconds: float) -> float:
    """Seconds that all steps took longer than steps of so many tokens and seconds would have."""
    took = sum(report.step_time_s for report in reports)
    computed = sum(report.tokens_per_s * report.step_time_s for report in reports)
    return max(0.0, took - computed * seconds / tokens)


def _run(
    config: TrainConfig,
    batch_size: int,
    timeout_s: float,
    changed: Mapping[str, Any] | None = None,
    *,
    on_gpu: bool = False,
) -> _ShortRun:
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        place = Path(folder)
        values = {**settings(config, batch_size, place / "run", on_gpu=on_gpu), **(changed or {})}
        (place / "plan.yaml").write_text(json.dumps(values), encoding="utf-8")
        began = time.time()
        try:
            with watched() as watch:
                done = subprocess.run(
                    [sys.executable, "-m", "allhands", config.VERB, "-c", str(place / "plan.yaml")],
                    capture_output=True,
                    text=True,
                    timeout=timeout_s,
                    check=False,
                    preexec_fn=die_with_parent,
                )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{steps_of(config, on_gpu=on_gpu)} steps took longer than {timeout_s:g} s",
                code="training-timeout",
                where="--timeout-s",
                hint="give more --timeout-s or a smaller --batch-size; --device 'M2 Pro' estimates without a training",
            ) from None
        if done.returncode:
            raise _failure(done.stderr, done.returncode)
        expected = _expected(place / "run")
        events = [
            decode_event(line)
            for line in (place / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    started = next(event for event in events if isinstance(event, RunStarted))
    reports = tuple(event for event in events if isinstance(event, TrainReport))
    return _ShortRun(started, reports, max(0.0, started.time - began), expected, watch.others)


def _remove_abandoned() -> None:
    """Remove the files of plans that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):  # others' are not ours to remove
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _expected(run: Path) -> int | None:
    try:
        return max((sample.estimated_bytes or 0 for sample in read_samples(run)), default=0) or None
    except DataError:  # nobody watched it
        return None


def settings(
    config: TrainConfig, batch_size: int, directory: Path, *, on_gpu: bool = False
) -> Mapping[str, Any]:
    """Return the options of a short run: what is computed in a step is that of ``config``."""
    steps = steps_of(config, on_gpu=on_gpu)
    long = (config.iters or (0 if config.epochs else 1000)) >= COMPILE_FROM_BATCHES
    compiled = on_gpu and long and config.compile == "auto" and _can_be_compiled(config.model)
    values = {
        name: value
        for name, value in config.model_dump(mode="json").items()
        if name not in _DROPPED
    }
    changed = {
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


def _can_be_compiled(model: str) -> bool:
    try:
        return can_be_compiled(read_config(resolve(model)).get("model_type"))
    except AllhandsError:  # a model that is made anew is named otherwise
        return True


def _failure(told: str, code: int) -> AllhandsError:
    """The training's own error, as this command's."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    found = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    hint = next((line.removeprefix(_HINT) for line in lines if line.startswith(_HINT)), None)
    kinds = {kind.exit_code: kind for kind in _kinds(AllhandsError)}
    message = found[-1] if found else (lines[-1] if lines else f"it ended with {code}")
    made = kinds.get(code, AllhandsError)
    return made(message, code="training-failed", where="a training of a few steps", hint=hint)


def _kinds(of: type[AllhandsError]) -> list[type[AllhandsError]]:
    return [of, *(kind for each in of.__subclasses__() for kind in _kinds(each))]


_ERROR, _HINT = "allhands: error: ", "what to do: "
