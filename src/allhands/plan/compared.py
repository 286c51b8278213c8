"""What was planned for a run beside what was then measured, what differs between the two, and what may explain it."""

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
from allhands.observe.metrics import RunHistory, TrainReport, typical
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
    started = history.started
    assert started is not None, "without a start there is no time to find a plan by"
    ranks, reports, notes = started.num_ranks, _counted(history), list[str]()
    differences = tuple(_differences(plan, history, config))
    if not config:
        notes.append("The options of the run are not known: what differs from the plan cannot be said.")
    lines = {line.machines: line for line in plan.machines}
    line = lines.get(ranks)
    if line is None:
        known = ", ".join(map(str, lines))
        notes.append(f"The plan has no line for {_ranks(ranks)}, only for {known}: times are not compared.")
    if len({start.num_ranks for start in history.starts}) > 1:
        notes.append(f"The number of ranks changed: compared is what {_ranks(ranks)} did last, not the whole time.")
    figures: list[Figure] = []
    if plan.doubt:
        notes.append(f"The plan was not to be relied on ({plan.doubt}): times are not compared.")
    elif line is not None:
        figures += _times(plan, line, history, reports, samples, differences, config)
    memory, same = _memory(plan, started.backend, ranks, config)
    if memory is None and plan.memory:
        notes.append(f"The plan has no memory for {_ranks(ranks)} divided as the run was.")
    elif not plan.memory:
        notes.append("The plan has no memory: the model is not built of equal blocks.")
    if memory is not None:
        marked = any(one.option not in (*_OF_LENGTH, *same) for one in differences)
        figures.append(_peak(plan, memory, reports, marked=marked))
    figures += _expected(reports, samples)
    return Comparison(plan.time, ranks, tuple(figures), differences, tuple(notes))


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _counted(history: RunHistory) -> list[TrainReport]:
    """The reports of the latest number of ranks, without the first, in which the start is."""
    starts = history.starts
    other = [place for place, start in enumerate(starts) if start.num_ranks != starts[-1].num_ranks]
    since = starts[other[-1] + 1].step if other else 0
    found = [report for report in history.train if report.step > since]
    return found[1:] or found


def _met_nothing_new(history: RunHistory, reports: Sequence[TrainReport]) -> Sequence[TrainReport]:
    """Those without batches of shapes that were met for the first time, which take longer, if there are several."""
    old = {report.step for before, report in pairwise(history.train) if before.shapes == report.shapes}
    found = [report for report in reports if report.step in old]
    return found if len(found) > 1 else reports


# --- times --------------------------------------------------------------------------------------------


def _times(
    plan: KeptPlan,
    line: KeptLine,
    history: RunHistory,
    reports: Sequence[TrainReport],
    samples: Sequence[Sample],
    differences: Sequence[Difference],
    config: Mapping[str, Any],
) -> Iterator[Figure]:
    marked = any(one.option not in _OF_LENGTH for one in differences)
    begins = _start_s(history, samples)
    planned = plan.start_s if line.start_s is None else line.start_s
    if planned:
        figure = Figure("start", "time to the start", planned, begins, marked)
        yield _explained(figure, _why_start(figure, line.machines if line.start_s is None else 1))
    reports = _met_nothing_new(history, reports)
    step = _known(typical(report.step_time_s for report in reports))
    one = Figure("step", "a step", line.prediction.step_s, step, marked)
    yield _explained(one, _why_step(plan, line, reports))
    rest_s = line.training_s - planned
    whole, name = None, "all steps"
    if history.ended is not None and history.ended.reason == "finished" and _one_number(history):
        whole = history.ended.total_time_s
    ran = plan.steps if history.started is None else history.started.total_steps
    if ran != plan.steps:
        rest_s, name = rest_s * ran / plan.steps, f"all {ran:,} steps ({plan.steps:,} were planned: their share)"
    marked |= any(one.option in _OF_VALIDATIONS for one in differences)
    validations_s = line.validation_s * ran / plan.steps
    figure = Figure("steps", name, rest_s, whole, marked)
    longer = figure.ratio is not None and figure.ratio > 1.0
    why = [*(_why_whole(history, validations_s) if longer else []), *(["a step was not as planned"] if one.off else [])]
    yield _explained(figure, why)
    if validations_s > _PART * rest_s:
        spent = None if whole is None else sum(each.duration_s for each in history.valid)
        each = Figure("validations", "of that all validations", validations_s, spent, marked)
        # Where the run had none, that it was trained with other options says it all.
        yield _explained(each, ["a forward pass was reckoned by its products and sums, and not measured"] * bool(spent))


def _one_number(history: RunHistory) -> bool:
    return len({start.num_ranks for start in history.starts}) <= 1


def _explained(figure: Figure, why: Iterable[str]) -> Figure:
    """With what may explain it, if it is off."""
    return replace(figure, why=tuple(why)) if figure.off else figure


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _start_s(history: RunHistory, samples: Sequence[Sample]) -> float | None:
    """From the first process to the first step, if that has been seen."""
    first = history.starts[0].time if history.starts else None
    began = [one.began for one in samples if one.attempt == 1 and one.began is not None]
    if first is None or not began or min(began) > first:
        return None
    return first - min(began)


def _why_step(plan: KeptPlan, line: KeptLine, reports: Sequence[TrainReport]) -> list[str]:
    """What may explain that a step took longer or shorter than planned."""
    step, found = typical(report.step_time_s for report in reports), list[str]()
    if plan.device:
        found.append("the plan is from what the makers of computers say: good within a factor of 1.5, not better")
    tokens = _tokens_of(reports)
    if tokens and abs(tokens / plan.step.tokens - 1.0) > _TOKENS:
        found.append(f"a step had {tokens:,.0f} tokens, and {plan.step.tokens:,.0f} were planned")
    waited = typical(report.data_wait_s for report in reports)
    if waited > _PART * step:
        found.append(f"{waited / step:.0%} of a step was waiting for data")
    exchange, planned = typical(report.comm_s for report in reports), line.prediction.exposed_s
    if line.machines > 1 and abs(exchange - planned) > _PART * step:
        cause = "a slower link, or a slower rank that was waited for" if exchange > planned else "a faster link"
        found.append(f"the exchange took {_seconds(exchange)} of a step, and {_seconds(planned)} were planned: {cause}")
    if not found and step > line.prediction.step_s:
        found.append(
            "the plan counts the quickest of few steps; or the computer did something else besides, or had become hot"
        )
    return found or ["the computer did something else while it was planned"]


def _tokens_of(reports: Sequence[TrainReport]) -> float:
    """Tokens of a step."""
    return typical(report.tokens_per_s * report.step_time_s for report in reports)


def _why_start(figure: Figure, ranks: int) -> Iterator[str]:
    if figure.ratio is not None and figure.ratio < 1.0:
        yield "the model and the data were in the computer's memory already"
        return
    if ranks > 1:
        yield f"one process was planned with; {ranks} start more slowly, and have to find each other"
    yield "the model or the data had to be read anew"


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


# --- memory -------------------------------------------------------------------------------------------


def _memory(
    plan: KeptPlan, backend: str, ranks: int, config: Mapping[str, Any]
) -> tuple[KeptMemory | None, tuple[str, ...]]:
    """How the run divided its work, as the plan has it, and the options that the plan has shown another way of."""
    ways = [way for way in plan.memory if way.ranks == ranks and "--quantize" not in way.flags]
    # Of the flags that save memory those that the run had, and the plan had not.
    flags: dict[str, str] = {}
    if config.get("grad_checkpoint") and not plan.options.get("grad_checkpoint"):
        flags["grad_checkpoint"] = "--grad-checkpoint"
    most = config.get("micro_batch_tokens")
    if most is not None and most != plan.options.get("micro_batch_tokens"):
        flags["micro_batch_tokens"] = f"--micro-batch-tokens {most}"
    option = [] if ranks == 1 else ["strategy"]
    ways = ways if ranks == 1 else _divided_or_not(plan, ways, backend, config)
    if not ways:
        return None, ()
    for names in (tuple(flags), *((name,) for name in flags)):
        wanted = " ".join([*filter(None, [ways[0].flags]), *(flags[name] for name in names)])
        found = next((way for way in ways if way.flags == wanted), ways[0])
        if found is not ways[0]:
            return found, (*option, *names)
    return ways[0], tuple(option)


def _divided_or_not(
    plan: KeptPlan, ways: Sequence[KeptMemory], backend: str, config: Mapping[str, Any]
) -> list[KeptMemory]:
    """Of the ways of several ranks those that divide the optimizer's state as the run did, the plain one first."""
    choice = config.get("strategy", plan.options.get("strategy"))
    # As auto decides, for trainings that are large enough.
    divided = choice == "zero1" or (choice == "auto" and can(backend, "overlap") and bool(config.get("master_weights")))
    found = [way for way in ways if (SHARD in way.flags or way.name == "optimizer divided") == divided]
    name = "optimizer divided" if divided else "data parallel"
    if plan.options.get("sync_every", 1) > 1:
        name = "local steps"
    elif plan.options.get("sync_delay", 0):
        name = "data parallel, a step late"
    return found if found and found[0].name == name else []


def _peak(plan: KeptPlan, memory: KeptMemory, reports: Sequence[TrainReport], *, marked: bool) -> Figure:
    peaks = [max(report.needed_bytes or report.peak_memory_bytes) for report in reports if report.peak_memory_bytes]
    # On an NVIDIA GPU a rank takes more where it is free; what it needs was seen in a step with nothing ahead.
    needed = any(report.needed_bytes for report in reports)
    name = f"memory that a rank needs ({memory.name})" if needed else f"memory of a rank at its peak ({memory.name})"
    figure = Figure("memory", name, memory.rank_bytes, max(peaks, default=0) or None, marked)
    return _explained(figure, _why_memory(plan, figure, reports))


def _expected(reports: Sequence[TrainReport], samples: Sequence[Sample]) -> Iterator[Figure]:
    """What the ranks expected of themselves before their first step, where they could."""
    told = [one.estimated_bytes or one.mlx_estimated_bytes or 0 for one in samples if one.role == "rank"]
    expected = max(told, default=0)
    peaks = [max(report.needed_bytes or report.peak_rss_bytes) for report in reports if report.peak_rss_bytes]
    if expected and peaks:
        figure = Figure("expected", "memory of a rank, as the run itself expected it", expected, max(peaks))
        yield _explained(figure, filter(None, [_rose(expected, reports)]))


def _why_memory(plan: KeptPlan, figure: Figure, reports: Sequence[TrainReport]) -> Iterator[str]:
    more = figure.ratio is not None and figure.ratio > 1.0
    if plan.device:
        yield "of computers that are only described rows of the full length are counted"
    tokens = _tokens_of(reports) / plan.step.tokens
    if more and (rose := _rose(figure.planned or 0.0, reports)):
        yield rose
    elif more and tokens > 1.0 + _TOKENS:
        yield "longer rows than those of the steps that it was planned with"
    elif more:
        yield "longer rows and batches of more shapes than those of the steps that it was planned with; validations"
    elif tokens < 1.0 - _TOKENS:
        yield "shorter rows than it was planned with"
    elif not plan.device:
        yield "the plan leaves room for what may come together, and did not"


def _rose(planned: float, reports: Sequence[TrainReport]) -> str:
    """That the peak was as planned at first, and when it was no more; empty if it never was."""
    peaks = [(one.step, max(one.needed_bytes or one.peak_memory_bytes)) for one in reports if one.peak_memory_bytes]
    above = next((place for place, (_, peak) in enumerate(peaks) if peak > (1.0 + OFF["bytes"]) * planned), 0)
    if not above:
        return ""
    (before, peak), (step, _) = peaks[above - 1 : above + 1]
    happened = "something that no plan has, as a validation, a save, or a batch of another shape"
    return f"until step {before} it was {format_bytes(peak)}; between that and step {step} came {happened}"


# --- options ------------------------------------------------------------------------------------------


def _differences(plan: KeptPlan, history: RunHistory, config: Mapping[str, Any]) -> Iterator[Difference]:
    """Options in which they differ; the numbers of ranks are no option of these."""
    started = history.started
    full = plan.options.get("fine_tune_type") == "full"
    for name, planned in plan.options.items():
        trained = config.get(name) if config else None
        if name == "model" and started is not None:  # the options have the directory that it was found in
            trained = started.model
        if name not in config and trained is None:
            continue
        # Where the plan leaves a choice, the run's options have what was chosen; full training has no adapters.
        if (name == "num_layers" and planned is None) or (name == "lora_parameters" and (full or trained is None)):
            continue
        if not _same(name, planned, trained):
            yield Difference(name, _flag(name, planned), _flag(name, trained))
    yield from _circumstances(plan, history)
    long = all(plan.options.get(name) == config.get(name) for name in _LENGTH)
    if started is not None and long and started.total_steps != plan.steps:
        yield Difference("steps", f"{plan.steps} steps", f"{started.total_steps} steps")


def _circumstances(plan: KeptPlan, history: RunHistory) -> Iterator[Difference]:
    """What is no option, and yet another training."""
    started, measured = history.started, plan.measured
    if started is None:
        return
    if measured is not None and measured.exchanged != started.trainable_params:
        counts = (measured.exchanged, started.trainable_params)
        yield Difference("trained parameters", *(f"{format_count(one)} trained parameters" for one in counts))
    cores = (measured.cores_per_rank if measured else None, started.cores_per_rank)
    if cores[0] and cores[1] and cores[0] != cores[1]:
        yield Difference("cores_per_rank", *(f"{one} core{'s' * ((one or 0) > 1)} a rank" for one in cores))
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
