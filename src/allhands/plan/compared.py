"""A plan beside the run that followed: figures, options that differ, and explanations."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from allhands.distributed.capabilities import can
from allhands.io.formatting import format_bytes, format_count, format_duration
from allhands.observe.metrics import RunHistory, RunStarted, TrainReport, typical
from allhands.observe.monitor.samples import Sample
from allhands.plan.kept import KeptLine, KeptMemory, KeptPlan
from allhands.plan.strategies import SHARD

# From which difference on a figure is not as planned, as a part of what was planned.
OFF = {"seconds": 0.15, "bytes": 0.10}
_PART = 0.05  # of a step, or of the whole time: less explains nothing
_TOKENS = 0.10  # of a step's tokens
# What changes how long all of it takes, but not a step.
_LENGTH = ("iters", "epochs")
_OF_VALIDATIONS = ("steps_per_eval", "val_batches")
_OF_LENGTH = (*_LENGTH, *_OF_VALIDATIONS, "steps")
_RESOLVED = ("model", "data", "tokenizer")  # names of directories, which may be written in several ways


@dataclass(frozen=True)
class Figure:
    """One figure, planned and measured; ``None`` where it is not known.

    Attributes:
        key: ``start``, ``step``, ``steps``, ``validations``, ``memory``; ``expected`` is the memory as the run itself
            expected it.
        of: what it is of, in words.
        marked: whether plan and run differ in options that it depends on.
        why: what may explain that it is off, in words; empty if it is not.
    """

    key: Literal["start", "step", "steps", "validations", "memory", "expected"]
    of: str
    planned: float | None
    measured: float | None
    marked: bool = False
    why: tuple[str, ...] = ()

    @property
    def unit(self) -> Literal["seconds", "bytes"]:
        """Of both."""
        return "bytes" if self.key in ("memory", "expected") else "seconds"

    @property
    def ratio(self) -> float | None:
        """Measured by planned."""
        return self.measured / self.planned if self.planned and self.measured is not None else None

    @property
    def off(self) -> bool:
        """Whether it is not as planned."""
        return self.ratio is not None and abs(self.ratio - 1.0) > OFF[self.unit]

    def shown(self, value: float | None) -> str:
        """The value as a person reads it; empty if there is none."""
        if value is None:
            return ""
        return format_bytes(value) if self.unit == "bytes" else _seconds(value)

    @property
    def told(self) -> str:
        """One sentence: how it compares."""
        planned, measured, ratio = self.shown(self.planned), self.shown(self.measured), self.ratio
        name = f"{self.of[0].upper()}{self.of[1:]}"
        if ratio is None:
            return f"{name}: {measured or 'not measured'}, {planned or 'nothing'} planned"
        said = "expected" if self.key == "expected" else "planned"
        return f"{name}: {measured}, {ratio:.2f} times the {planned} {said}"


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
    """A run beside its plan.

    Attributes:
        notes: what cannot be compared, in words.
    """

    made: float
    machines: int
    figures: tuple[Figure, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, in seconds and bytes."""
        return {
            "made": self.made,
            "machines": self.machines,
            "figures": [{**asdict(one), "unit": one.unit, "ratio": one.ratio, "off": one.off} for one in self.figures],
            "differences": [asdict(one) for one in self.differences],
            "notes": list(self.notes),
        }


def compare(
    plan: KeptPlan, history: RunHistory, config: Mapping[str, Any], samples: Sequence[Sample] = ()
) -> Comparison:
    """Put the run beside the plan; nothing is interpolated.

    Args:
        history: of a run that says how it began.
        config: the run's options, by name; empty if not known.
        samples: of its processes; none: the time to the start is not known.
    """
    return _Compared(plan, history, config, samples).found()


class _Compared:
    """A plan and a run, with the reports of its latest number of ranks."""

    def __init__(
        self, plan: KeptPlan, history: RunHistory, config: Mapping[str, Any], samples: Sequence[Sample]
    ) -> None:
        assert history.started is not None, "without a start there is no time to find a plan by"
        self.plan, self.history, self.config, self.samples = plan, history, config, samples
        self.started, self.ranks = history.started, history.started.num_ranks
        self.reports = _counted(history)
        self.differences = tuple(_differences(plan, history, config))

    def found(self) -> Comparison:
        """Compare times, unless the plan doubts them, and memory."""
        plan, ranks, notes = self.plan, _ranks(self.ranks), list[str]()
        if not self.config:
            notes.append("The options of the run are not known: what differs from the plan cannot be said.")
        lines = {line.machines: line for line in plan.machines}
        line = lines.get(self.ranks)
        if line is None:
            known = ", ".join(map(str, lines))
            notes.append(f"The plan has no line for {ranks}, only for {known}: times are not compared.")
        if len({start.num_ranks for start in self.history.starts}) > 1:
            notes.append(f"The number of ranks changed: compared is what {ranks} did last, not the whole time.")
        figures: list[Figure] = []
        if plan.doubt:
            notes.append(f"The plan was not to be relied on ({plan.doubt}): times are not compared.")
        elif line is not None:
            figures += self._times(line)
        memory, same = self._memory()
        if memory is not None:
            figures.append(self._peak(memory, marked=self._differs(*_OF_LENGTH, *same)))
        elif plan.memory:
            notes.append(f"The plan has no memory for {ranks} divided as the run was.")
        else:
            notes.append("The plan has no memory: the model is not built of equal blocks.")
        figures += self._expected()
        return Comparison(plan.time, self.ranks, tuple(figures), self.differences, tuple(notes))

    def _differs(self, *but: str) -> bool:
        """Tell if plan and run differ in an option, ``but`` for some."""
        return any(one.option not in but for one in self.differences)

    # --- times ----------------------------------------------------------------------------------------

    def _times(self, line: KeptLine) -> Iterator[Figure]:
        plan, history, marked = self.plan, self.history, self._differs(*_OF_LENGTH)
        planned = plan.start_s if line.start_s is None else line.start_s
        if planned:
            figure = Figure("start", "time to the start", planned, self._start_s(), marked)
            yield figure
        reports = _met_nothing_new(history, self.reports)
        step_s = typical(report.step_time_s for report in reports)
        one = Figure("step", "a step", line.prediction.step_s, step_s if math.isfinite(step_s) else None, marked)
        yield _explained(one, _why_step(plan, line, reports))
        ran, rest_s, name = self.started.total_steps, line.training_s - planned, "all steps"
        if ran != plan.steps:
            rest_s, name = rest_s * ran / plan.steps, f"all {ran:,} steps ({plan.steps:,} were planned: their share)"
        finished = history.ended is not None and history.ended.reason == "finished"
        same_ranks = len({start.num_ranks for start in history.starts}) <= 1
        whole = history.ended.total_time_s if finished and same_ranks and history.ended is not None else None
        marked |= any(one.option in _OF_VALIDATIONS for one in self.differences)
        validations_s = line.validation_s * ran / plan.steps
        figure = Figure("steps", name, rest_s, whole, marked)
        longer = figure.ratio is not None and figure.ratio > 1.0
        yield _explained(figure, _why_whole(history, validations_s) if longer else ())
        if validations_s > _PART * rest_s:
            spent = None if whole is None else sum(each.duration_s for each in history.valid)
            yield Figure("validations", "of that all validations", validations_s, spent, marked)

    def _start_s(self) -> float | None:
        """Return the seconds from the first process to the first step, if that has been seen."""
        first = self.history.starts[0].time if self.history.starts else None
        began = [one.began for one in self.samples if one.attempt == 1 and one.began is not None]
        return first - min(began) if first is not None and began and min(began) <= first else None

    # --- memory ---------------------------------------------------------------------------------------

    def _memory(self) -> tuple[KeptMemory | None, tuple[str, ...]]:
        """Return the plan's way of dividing the work as the run did, and the options of which the plan has others."""
        ways = [
            way for way in self.plan.memory if way.built and way.ranks == self.ranks and "--quantize" not in way.flags
        ]
        option: tuple[str, ...] = ()
        if self.ranks > 1:
            ways, option = self._divided_or_not(ways), ("strategy",)
        if not ways:
            return None, ()
        # Of the flags that save memory those that the run had, and the plan had not.
        options, flags = self.plan.options, dict[str, str]()
        if self.config.get("grad_checkpoint") and not options.get("grad_checkpoint"):
            flags["grad_checkpoint"] = "--grad-checkpoint"
        most = self.config.get("micro_batch_tokens")
        if most is not None and most != options.get("micro_batch_tokens"):
            flags["micro_batch_tokens"] = f"--micro-batch-tokens {most}"
        for names in (tuple(flags), *((name,) for name in flags)):
            wanted = " ".join([*filter(None, [ways[0].flags]), *(flags[name] for name in names)])
            found = next((way for way in ways if way.flags == wanted), ways[0])
            if found is not ways[0]:
                return found, (*option, *names)
        return ways[0], option

    def _divided_or_not(self, ways: Sequence[KeptMemory]) -> list[KeptMemory]:
        """Return the ways that divide the optimizer's state as the run did, the plain one first."""
        options, config = self.plan.options, self.config
        choice = config.get("strategy", options.get("strategy"))
        # As auto decides, for trainings that are large enough.
        overlaps = can(self.started.backend, "overlap") and bool(config.get("master_weights"))
        divided = choice == "zero1" or (choice == "auto" and overlaps)
        found = [way for way in ways if (SHARD in way.flags or way.name == "optimizer divided") == divided]
        name = "optimizer divided" if divided else "data parallel"
        if options.get("sync_every", 1) > 1:
            name = "local steps"
        elif options.get("sync_delay", 0):
            name = "data parallel, a step late"
        return found if found and found[0].name == name else []

    def _peak(self, memory: KeptMemory, *, marked: bool) -> Figure:
        peaks = [max(one.needed_bytes or one.peak_memory_bytes) for one in self.reports if one.peak_memory_bytes]
        # On an NVIDIA GPU a rank takes more where it is free; what it needs was seen in a step with nothing ahead.
        needed = any(report.needed_bytes for report in self.reports)
        name = f"memory {'that a rank needs' if needed else 'of a rank at its peak'} ({memory.name})"
        figure = Figure("memory", name, memory.rank_bytes, max(peaks, default=0) or None, marked)
        return _explained(figure, _why_memory(self.plan, figure, self.reports))

    def _expected(self) -> Iterator[Figure]:
        """Yield the memory that the ranks expected of themselves before their first step, where they could."""
        told = [one.estimated_bytes or one.mlx_estimated_bytes or 0 for one in self.samples if one.role == "rank"]
        expected = max(told, default=0)
        peaks = [max(one.needed_bytes or one.peak_rss_bytes) for one in self.reports if one.peak_rss_bytes]
        if expected and peaks:
            figure = Figure("expected", "memory of a rank, as the run itself expected it", expected, max(peaks))
            yield _explained(figure, filter(None, [_rose(expected, self.reports)]))


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _counted(history: RunHistory) -> list[TrainReport]:
    """Return the reports of the latest number of ranks, without the first, in which the start is."""
    starts = history.starts
    other = [place for place, start in enumerate(starts) if start.num_ranks != starts[-1].num_ranks]
    since = starts[other[-1] + 1].step if other else 0
    found = [report for report in history.train if report.step > since]
    return found[1:] or found


def _met_nothing_new(history: RunHistory, reports: Sequence[TrainReport]) -> Sequence[TrainReport]:
    """Return the reports without batches of shapes that were new, which take longer, if there are several."""
    old = {report.step for before, report in pairwise(history.train) if before.shapes == report.shapes}
    found = [report for report in reports if report.step in old]
    return found if len(found) > 1 else reports


# --- explanations -------------------------------------------------------------------------------------


def _explained(figure: Figure, why: Iterable[str]) -> Figure:
    """Add what may explain a figure, if it is off."""
    return replace(figure, why=tuple(why)) if figure.off else figure


def _why_step(plan: KeptPlan, line: KeptLine, reports: Sequence[TrainReport]) -> list[str]:
    """Explain a step that took longer or shorter than planned."""
    step_s, waited_s, exchange_s = (
        typical(getattr(report, name) for report in reports) for name in ("step_time_s", "data_wait_s", "comm_s")
    )
    tokens, planned_s = _tokens_of(reports), line.prediction.exposed_s
    causes = {
        "the plan is from what the makers of computers say: good within a factor of 1.5, not better": bool(plan.device),
        f"a step had {tokens:,.0f} tokens, and {plan.step.tokens:,.0f} were planned": tokens > 0
        and abs(tokens / plan.step.tokens - 1.0) > _TOKENS,
        f"{waited_s / max(step_s, 1e-9):.0%} of a step was waiting for data": waited_s > _PART * step_s,
    }
    found = [cause for cause, holds in causes.items() if holds]
    if line.machines > 1 and abs(exchange_s - planned_s) > _PART * step_s:
        slower = "a slower link, or a slower rank that was waited for"
        cause = slower if exchange_s > planned_s else "a faster link"
        times = f"{_seconds(exchange_s)} of a step, and {_seconds(planned_s)} were planned"
        found.append(f"the exchange took {times}: {cause}")
    return found


def _tokens_of(reports: Sequence[TrainReport]) -> float:
    """Return the tokens of a step."""
    return typical(report.tokens_per_s * report.step_time_s for report in reports)


def _why_whole(history: RunHistory, validations_s: float) -> Iterator[str]:
    total = history.ended.total_time_s if history.ended else 0.0
    validated, saved = sum(one.duration_s for one in history.valid), sum(one.pause_s for one in history.saved)
    if validated - validations_s > _PART * total > 0:
        planned = f"and {_seconds(validations_s)} were planned" if validations_s else "which the plan has not"
        yield f"validations took {_seconds(validated)}, {planned}"
    if saved > _PART * total > 0:
        yield f"pauses for saving took {_seconds(saved)}, which no plan has"
    if history.restarts:
        yield f"it was started again {len(history.restarts)} time{'s' * (len(history.restarts) > 1)}"


def _why_memory(plan: KeptPlan, figure: Figure, reports: Sequence[TrainReport]) -> Iterator[str]:
    tokens = _tokens_of(reports) / plan.step.tokens
    if figure.ratio is not None and figure.ratio < 1.0:
        if plan.device:
            yield "of computers that are only described rows of the full length are counted"
        elif tokens < 1.0 - _TOKENS:
            yield "shorter rows than it was planned with"
    elif rose := _rose(figure.planned or 0.0, reports):
        yield rose
    elif tokens > 1.0 + _TOKENS:
        yield "longer rows than those of the steps that it was planned with"


def _rose(planned: float, reports: Sequence[TrainReport]) -> str:
    """Tell between which steps a peak rose that was as planned at first; empty if it never was."""
    peaks = [(one.step, max(one.needed_bytes or one.peak_memory_bytes)) for one in reports if one.peak_memory_bytes]
    above = next((place for place, (_, peak) in enumerate(peaks) if peak > (1.0 + OFF["bytes"]) * planned), 0)
    if not above:
        return ""
    (before, peak), (step, _) = peaks[above - 1 : above + 1]
    happened = "something that no plan has, as a validation, a save, or a batch of another shape"
    return f"until step {before} it was {format_bytes(peak)}; between that and step {step} came {happened}"


# --- options ------------------------------------------------------------------------------------------


def _differences(plan: KeptPlan, history: RunHistory, config: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the options in which they differ; the numbers of ranks are no option of these."""
    started = history.started
    assert started is not None
    # The options have the directory that the model was found in.
    trained: dict[str, Any] = {**config, "model": started.model}
    # Where the plan leaves a choice, the run's options have what was chosen; full training has no adapters.
    chosen = {name for name in ("num_layers",) if plan.options.get(name) is None}
    if plan.options.get("fine_tune_type") == "full" or trained.get("lora_parameters") is None:
        chosen.add("lora_parameters")
    for name, planned in plan.options.items():
        if name in trained and name not in chosen and not _same(name, planned, trained[name]):
            yield Difference(name, _flag(name, planned), _flag(name, trained[name]))
    yield from _circumstances(plan, history, started)
    long = all(plan.options.get(name) == config.get(name) for name in _LENGTH)
    if long and started.total_steps != plan.steps:
        yield Difference("steps", f"{plan.steps} steps", f"{started.total_steps} steps")


def _circumstances(plan: KeptPlan, history: RunHistory, started: RunStarted) -> Iterator[Difference]:
    """Yield what is no option, and yet another training."""
    measured = plan.measured
    if measured is not None and measured.exchanged != started.trainable_params:
        counts = (measured.exchanged, started.trainable_params)
        yield Difference("trained parameters", *(f"{format_count(one)} trained parameters" for one in counts))
    cores, had = measured.cores_per_rank if measured else None, started.cores_per_rank
    if cores and had and cores != had:
        yield Difference("cores_per_rank", *(f"{one} core{'s' * (one > 1)} a rank" for one in (cores, had)))
    last = history.train[-1] if history.train else None
    if last is not None and last.peak_rss_bytes and last.peak_mlx_bytes and last.peak_rss_bytes != last.peak_mlx_bytes:
        trained = "cpu" if last.peak_memory_bytes == last.peak_rss_bytes else "gpu"
        if trained != plan.processor:
            words = {"cpu": "a CPU", "gpu": "a GPU"}
            yield Difference("processor", words.get(plan.processor, plan.processor), words[trained])


def _same(name: str, planned: Any, trained: Any) -> bool:
    if planned == trained or (not planned and not trained):
        return True
    if name in _RESOLVED and isinstance(planned, str) and isinstance(trained, str):
        return Path(os.path.expanduser(planned)).resolve() == Path(os.path.expanduser(trained)).resolve()
    return False


def _flag(name: str, value: Any) -> str:
    """The option as it is written on a command line."""
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
