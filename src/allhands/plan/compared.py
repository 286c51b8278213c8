"""Comparison of a plan with the run that followed: figures, and options that differ."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from allhands.distributed.capabilities import can
from allhands.io.formatting import counted, format_bytes, format_count, format_duration
from allhands.observe.metrics import RunHistory, TrainReport, typical
from allhands.observe.monitor.samples import Sample
from allhands.plan.dividing import strategy_name
from allhands.plan.kept import KeptLine, KeptMemory, KeptPlan
from allhands.plan.strategies import CHECKPOINT, QUANTISE

Key = Literal["start", "step", "tokens", "exchange", "steps", "validations", "memory", "expected"]

# Difference from which on a figure is not as planned, relative to the planned value.
_OFF = {"seconds": 0.15, "bytes": 0.10}
# Figures that explain others, and are not judged.
_EXPLAIN = ("tokens", "exchange")
_PART = 0.05  # part of the time of all steps: shorter validations are not shown
# Options that change the whole time, but not the time of a step.
_LENGTH = ("iters", "epochs")
_OF_VALIDATIONS = ("steps_per_eval", "val_batches")
_OF_LENGTH = (*_LENGTH, *_OF_VALIDATIONS, "steps")
_RESOLVED = (
    "model",
    "data",
    "tokenizer",
)  # names of directories, which may be written in several ways


@dataclass(frozen=True)
class Figure:
    """One figure, planned and measured; ``None`` if a value is not known.

    Attributes:
        key: name of the figure; ``expected`` is the memory that the run itself expected.
        of: description in words.
        marked: True if plan and run differ in options that change the figure.
    """

    key: Key
    of: str
    planned: float | None
    measured: float | None
    marked: bool = False

    @property
    def unit(self) -> Literal["seconds", "bytes", "tokens"]:
        """Return the unit of the planned and the measured value."""
        if self.key == "tokens":
            return "tokens"
        return "bytes" if self.key in ("memory", "expected") else "seconds"

    @property
    def ratio(self) -> float | None:
        """Measured value divided by the planned one; ``None`` if one is not known."""
        return self.measured / self.planned if self.planned and self.measured is not None else None

    @property
    def judged(self) -> bool:
        """Return whether the figure is judged; figures that are not judged explain others."""
        return self.ratio is not None and self.key not in _EXPLAIN

    @property
    def off(self) -> bool:
        """Return whether the figure is not as planned."""
        return self.judged and self.ratio is not None and abs(self.ratio - 1.0) > _OFF[self.unit]

    @property
    def times(self) -> str:
        """Return the ratio in digits that show on which side of the limit it is."""
        if self.ratio is None:
            return ""
        text = f"{self.ratio:.2f}"
        hides = self.off and abs(float(text) - 1.0) < _OFF[self.unit] + 1e-9
        return f"{self.ratio:.3f}" if hides else text

    def shown(self, value: float | None) -> str:
        """Return the value as a person reads it; empty if there is none."""
        if value is None:
            return ""
        if self.unit == "tokens":
            return f"{value:,.0f}"
        return format_bytes(value) if self.unit == "bytes" else _seconds(value)

    @property
    def told(self) -> str:
        """Return the comparison of a figure with a ratio, as a sentence."""
        said = "expected" if self.key == "expected" else "planned"
        planned = f"{self.times} times the {self.shown(self.planned)} {said}"
        return f"{self.of[0].upper()}{self.of[1:]}: {self.shown(self.measured)}, {planned}"


@dataclass(frozen=True)
class Difference:
    """An option in which the run differs from its plan."""

    option: str
    planned: str
    trained: str

    @property
    def told(self) -> str:
        return f"planned with {self.planned}, trained with {self.trained}"


@dataclass(frozen=True)
class Comparison:
    """Result of the comparison of a run with its plan.

    Attributes:
        made: time of the plan, Unix time in seconds.
        machines: number of ranks of the run.
        notes: figures that cannot be compared and why, in words.
    """

    made: float
    machines: int
    figures: tuple[Figure, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain values, in seconds and bytes."""
        figures = [
            {**asdict(one), "unit": one.unit, "ratio": one.ratio, "off": one.off}
            for one in self.figures
        ]
        return {**asdict(self), "figures": figures}


def compare(
    plan: KeptPlan, history: RunHistory, config: Mapping[str, Any], samples: Sequence[Sample] = ()
) -> Comparison:
    """Compare a run with its plan; no figure is interpolated.

    Args:
        history: metrics of the run, with its start.
        config: the run's options, by name; empty if not known.
        samples: samples of the run's processes; none: the time to the start is not known.
    """
    return _Compared(plan, history, config, samples).found()


class _Compared:
    """A plan and a run, with the reports of its latest number of ranks."""

    def __init__(
        self,
        plan: KeptPlan,
        history: RunHistory,
        config: Mapping[str, Any],
        samples: Sequence[Sample],
    ) -> None:
        assert history.started is not None, (
            "the run has no recorded start, so its plan cannot be found"
        )
        self.plan, self.history, self.config, self.samples = plan, history, config, samples
        self.started, self.ranks = history.started, history.started.num_ranks
        self.same_ranks = len({start.num_ranks for start in history.starts}) <= 1
        self.reports = _counted(history)
        self.differences = tuple(self._differences())

    def found(self) -> Comparison:
        """Compare times, unless the plan doubts them, and memory."""
        plan, ranks, notes = self.plan, f"{self.ranks} rank{'s' * (self.ranks > 1)}", list[str]()
        lines = {line.machines: line for line in plan.machines}
        line = lines.get(self.ranks)
        if not self.config:
            notes.append(
                "The options of the run are not known, so they cannot be compared with the plan's."
            )
        if line is None:
            known = ", ".join(map(str, lines))
            notes.append(
                f"The plan has no line for {ranks}, only for {known}: times are not compared."
            )
        if not self.same_ranks:
            notes.append(
                f"The number of ranks changed: only the last part, with {ranks}, is compared, not the whole time."
            )
        figures: list[Figure] = []
        if plan.doubt:
            notes.append(f"The plan was not reliable ({plan.doubt}): times are not compared.")
        elif line is not None:
            figures += self._times(line)
        memory = list(self._memory())
        if not memory:
            notes.append(f"The plan has no memory for {ranks} divided as the run was.")
        return Comparison(
            plan.time,
            self.ranks,
            (*figures, *memory, *self._expected()),
            self.differences,
            tuple(notes),
        )

    def _differs(self, *but: str) -> bool:
        """Return whether plan and run differ in an option, except the options ``but``."""
        return any(one.option not in but for one in self.differences)

    # --- times ------------------------------------------------------------------------------------

    def _times(self, line: KeptLine) -> Iterator[Figure]:
        plan, marked = self.plan, self._differs(*_OF_LENGTH)
        start_s = plan.start_s if line.start_s is None else line.start_s
        if start_s:
            yield Figure("start", "time to the start", start_s, self._start_s(), marked)
        reports = _met_nothing_new(self.history, self.reports)
        way = self._timed_way()
        step_s = line.prediction.step_s if way is None else way.step_s
        yield Figure(
            "step",
            "a step" if way is None else f"a step ({way.name})",
            step_s,
            _typical(each.step_time_s for each in reports),
            marked,
        )
        tokens = _typical(each.tokens_per_s * each.step_time_s for each in reports)
        yield Figure("tokens", "tokens of a step", plan.step.tokens, tokens, marked)
        if line.machines > 1 and way is None:
            exchange_s = _typical(each.comm_s for each in reports)
            yield Figure(
                "exchange",
                "of a step waiting for the exchange",
                line.prediction.exposed_s,
                exchange_s,
                marked,
            )
        if way is None:
            yield from self._whole(line.training_s - start_s, line.validation_s)
        else:  # validations take longer by the same factor as steps
            more = way.step_s / line.prediction.step_s
            yield from self._whole(way.training_s - start_s, line.validation_s * more)

    def _timed_way(self) -> KeptMemory | None:
        """Return the planned way in which the run divided the model, if the plan has its time."""
        ways = self._ways() if self.ranks > 1 and self._strategy() != "data" else []
        return ways[0] if ways and ways[0].step_s and ways[0].training_s else None

    def _whole(self, steps_s: float, validation_s: float) -> Iterator[Figure]:
        """Yield the time of all steps, and of all validations unless that is very short."""
        history, planned, ran = self.history, self.plan.steps, self.started.total_steps
        marked = self._differs(*_LENGTH, "steps")
        name = (
            "all steps"
            if ran == planned
            else f"all {counted(ran, 'step')} ({planned:,} were planned: their share)"
        )
        ended = history.ended
        whole = ended is not None and ended.reason == "finished" and self.same_ranks
        took_s = None
        if ended is not None and whole:  # texts that the model wrote were not planned
            took_s = ended.total_time_s - sum(one.duration_s for one in history.sampled)
        yield Figure("steps", name, steps_s * ran / planned, took_s, marked)
        if validation_s > _PART * steps_s:
            spent = sum(each.duration_s for each in history.valid) if whole else None
            yield Figure(
                "validations",
                "of that all validations",
                validation_s * ran / planned,
                spent,
                marked,
            )

    def _start_s(self) -> float | None:
        """Return the seconds from the start of the first process to the first step; ``None`` if not
        known.
        """
        first = self.history.starts[0].time if self.history.starts else None
        began = [one.began for one in self.samples if one.attempt == 1 and one.began is not None]
        return first - min(began) if first is not None and began and min(began) <= first else None

    # --- memory -----------------------------------------------------------------------------------

    def _memory(self) -> Iterator[Figure]:
        """Yield the peak memory, compared with the planned way that divides the work as the run
        did, if the plan has this way.
        """
        ways, same = self._ways(), [*_OF_LENGTH]
        if self.ranks > 1:
            same += ["strategy", "tp", "cp", "ep", "pp", "dp_shard", "reshard"]
        if not ways:
            return
        way, saving = self._saving(ways)
        # On an NVIDIA GPU a rank takes more memory than it needs if memory is free. Its need was
        # measured in a step without work queued ahead.
        needed = any(report.needed_bytes for report in self.reports)
        name = f"memory {'that a rank needs' if needed else 'of a rank at its peak'} ({way.name})"
        peaks = [
            max(one.needed_bytes or one.peak_memory_bytes)
            for one in self.reports
            if one.peak_memory_bytes
        ]
        yield Figure(
            "memory",
            name,
            way.rank_bytes,
            max(peaks, default=0) or None,
            self._differs(*same, *saving),
        )

    def _ways(self) -> list[KeptMemory]:
        """Return the planned ways for as many ranks that divide the work as the run did."""
        ways = [
            way for way in self.plan.memory if way.ranks == self.ranks and QUANTISE not in way.flags
        ]
        return [way for way in ways if self.ranks == 1 or way.strategy == self._strategy()]

    def _strategy(self) -> str:
        """Return the way in which the run divided the work, by its name in the plan."""

        def given(name: str, usual: Any) -> Any:
            return self.config.get(name, self.plan.options.get(name, usual))

        usual = {"strategy": "auto", "tp": 1, "ep": 1, "cp": 1}
        if name := strategy_name(lambda option: given(option, usual.get(option))):
            return name
        choice = str(given("strategy", "auto"))
        if choice != "auto":
            return choice
        # This is the choice of ``auto`` for a training that is large enough.
        divided = can(self.started.backend, "overlap") and bool(self.config.get("master_weights"))
        return "zero1" if divided else "data"

    def _saving(self, ways: Sequence[KeptMemory]) -> tuple[KeptMemory, Sequence[str]]:
        """Return the planned way with the run's options that save memory, and the names of these
        options.

        It is the way with all of these options, else with one of them, else the plain way.
        """
        options, config = self.plan.options, self.config
        flags = {"micro_batch_tokens": f"--micro-batch-tokens {config.get('micro_batch_tokens')}"}
        flags["grad_checkpoint"] = CHECKPOINT
        had = [name for name in flags if config.get(name) not in (None, False, options.get(name))]
        plain = ways[0]
        for names in (had, *([name] for name in had)):
            words = {
                *plain.flags.split(),
                *(word for name in names for word in flags[name].split()),
            }
            way = next((each for each in ways if {*each.flags.split()} == words), plain)
            if way is not plain:
                return way, names
        return plain, ()

    def _expected(self) -> Iterator[Figure]:
        """Yield the memory that the ranks expected before their first step, if they did."""
        told = [
            one.estimated_bytes or one.mlx_estimated_bytes or 0
            for one in self.samples
            if one.role == "rank"
        ]
        peaks = [
            max(one.needed_bytes or one.peak_rss_bytes)
            for one in self.reports
            if one.peak_rss_bytes
        ]
        if any(told) and peaks:
            yield Figure(
                "expected", "memory of a rank, as the run itself expected it", max(told), max(peaks)
            )

    # --- options ----------------------------------------------------------------------------------

    def _differences(self) -> Iterator[Difference]:
        """Yield the options in which plan and run differ, except the number of ranks."""
        plan, started = self.plan, self.started
        yield from self._other_options()
        if (measured := plan.measured) is not None:
            parameters = (measured.exchanged, started.trainable_params)
            yield from _other(
                "trained parameters",
                *parameters,
                lambda one: f"{format_count(one)} trained parameters",
            )
            cores = (measured.cores_per_rank, started.cores_per_rank)
            yield from _other(
                "cores_per_rank", *cores, lambda one: f"{one} core{'s' * (one > 1)} a rank"
            )
        yield from _other(
            "processor", plan.processor, _processor(self.history), lambda one: f"a {one.upper()}"
        )
        if all(plan.options.get(name) == self.config.get(name) for name in _LENGTH):
            yield from _other(
                "steps", plan.steps, started.total_steps, lambda one: f"{counted(one, 'step')}"
            )

    def _other_options(self) -> Iterator[Difference]:
        options = self.plan.options
        # ``config`` has the directory in which the model was found.
        trained: dict[str, Any] = {**self.config, "model": self.started.model}
        # If the plan leaves a choice open, the run's options have the result; full training has no
        # adapters.
        chosen = {name for name in ("num_layers",) if options.get(name) is None}
        if options.get("fine_tune_type") == "full" or trained.get("lora_parameters") is None:
            chosen.add("lora_parameters")
        for name, planned in options.items():
            if name in trained and name not in chosen and not _same(name, planned, trained[name]):
                yield Difference(name, _flag(name, planned), _flag(name, trained[name]))


def _other(
    option: str, planned: Any, trained: Any, words: Callable[[Any], str]
) -> Iterator[Difference]:
    """Yield the difference of two values, if both are known and differ."""
    if planned is not None and trained is not None and planned != trained:
        yield Difference(option, words(planned), words(trained))


def _counted(history: RunHistory) -> list[TrainReport]:
    """Return the reports since the last change of the number of ranks, without the first report,
    which includes the start.
    """
    starts = history.starts
    other = [place for place, start in enumerate(starts) if start.num_ranks != starts[-1].num_ranks]
    since = starts[other[-1] + 1].step if other else 0
    found = [report for report in history.train if report.step > since]
    return found[1:] or found


def _met_nothing_new(history: RunHistory, reports: Sequence[TrainReport]) -> Sequence[TrainReport]:
    """Return the reports without new shapes, whose steps take longer; all if only one remains."""
    old = {
        report.step for before, report in pairwise(history.train) if before.shapes == report.shapes
    }
    found = [report for report in reports if report.step in old]
    return found if len(found) > 1 else reports


def _typical(values: Iterator[float]) -> float | None:
    found = typical(values)
    return found if math.isfinite(found) else None


def _processor(history: RunHistory) -> str | None:
    """Return whose memory the run's reports count, ``cpu`` or ``gpu``; ``None`` if unknown."""
    last = history.last
    if (
        last is None
        or not last.peak_rss_bytes
        or not last.peak_mlx_bytes
        or last.peak_rss_bytes == last.peak_mlx_bytes
    ):
        return None
    return "cpu" if last.peak_memory_bytes == last.peak_rss_bytes else "gpu"


def _same(name: str, planned: Any, trained: Any) -> bool:
    if planned == trained or (not planned and not trained):
        return True
    if name in _RESOLVED and isinstance(planned, str) and isinstance(trained, str):
        return (
            Path(os.path.expanduser(planned)).resolve()
            == Path(os.path.expanduser(trained)).resolve()
        )
    return False


def _flag(name: str, value: Any) -> str:
    """Return the option as it is written on a command line."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    if value is None:
        return f"no {flag}"
    return f"{flag} {value if isinstance(value, str | int | float) else json.dumps(value)}"


def _seconds(seconds: float) -> str:
    if seconds >= 9.95:
        return format_duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"
