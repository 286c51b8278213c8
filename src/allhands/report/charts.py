"""Charts and bars of a report: learning rate, speed, memory of the ranks, and the parts of a step's
time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from allhands.io.formatting import format_seconds
from allhands.io.pictures import PHASES, phase_colour
from allhands.observe.charts import (
    NONE,
    Chart,
    Floats,
    Grid,
    Line,
    Unit,
    drawable,
    groups_of,
    line_of,
    line_width,
    without_heights,
)
from allhands.observe.metrics import RunHistory, TrainReport
from allhands.observe.monitor import Sample

# --- over steps -----------------------------------------------------------------------------------

# Key, title, name of the axis, unit, and field of a report.
_KINDS: tuple[tuple[str, str, str, Unit, str], ...] = (
    ("learning-rate", "Learning rate", "learning rate", "small", "learning_rate"),
    ("gradient-norm", "Gradient norm", "norm of the gradient", "small", "grad_norm"),
    ("throughput", "Throughput", "tokens a second, all ranks", "rate", "tokens_per_s"),
    ("step-time", "Time of a step", "seconds", "seconds", "step_time_s"),
    ("sent", "Sent by a rank in a step", "sent", "size", "sent_bytes"),
)


def step_charts(labels: Sequence[str], runs: Sequence[RunHistory]) -> Iterator[Chart]:
    """Learning rate, gradient norm, throughput, time of a step and bytes sent, over steps."""
    marks = tuple(
        (float(step), colour) for colour, run in enumerate(runs) for step, _ in run.restarts
    )
    for key, title, y_label, unit, name in _KINDS:
        columns = [[(one.step, getattr(one, name)) for one in run.train] for run in runs]
        if key == "sent" and not any(value for column in columns for _, value in column):
            continue
        lines = [
            line_of(label, colour, column, width=line_width(colour, len(runs)))
            for colour, (label, column) in enumerate(zip(labels, columns, strict=True))
        ]
        chart = Chart(key, title, "step", y_label, unit, drawable(lines), marks=marks, whole=True)
        yield without_heights(chart, 5.0) if key == "gradient-norm" else chart


def rank_memory(key: str, label: str, run: RunHistory) -> Chart:
    """Return the peak memory of each rank over steps, as rank 0 reported it."""
    count = max((len(one.peak_memory_bytes) for one in run.train), default=0)
    lines: list[Line] = []
    for rank in range(count):
        points = [
            (one.step, one.peak_memory_bytes[rank])
            for one in run.train
            if rank < len(one.peak_memory_bytes)
        ]
        lines.append(
            line_of(f"rank {rank}", rank, points, kind="rank", width=line_width(rank, count))
        )
    return Chart(
        key,
        f"Peak memory of each rank of {label}",
        "step",
        "memory",
        "bytes",
        drawable(lines),
        whole=True,
    )


# --- bars -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bars:
    """Time by phase, one bar a row: names of the parts with their seconds."""

    title: str
    described: str
    rows: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]

    @property
    def parts(self) -> list[str]:
        """The names of all parts, in the order in which they come."""
        return list(dict.fromkeys(name for _, parts in self.rows for name, _ in parts))

    @property
    def table(self) -> Grid:
        """The seconds of each part, and its share."""
        rows: list[tuple[str, ...]] = []
        for label, parts in self.rows:
            total = sum(seconds for _, seconds in parts) or 1.0
            cells = {
                name: f"{format_seconds(seconds)} ({seconds / total:.0%})"
                for name, seconds in parts
            }
            rows.append((label, *(cells.get(name, NONE) for name in self.parts)))
        return Grid(self.title, ("", *self.parts), tuple(rows))


# The parts of a step in their order, and the monitor's names for them.
_PARTS = ("data wait", "compute", "reduce", "update and rest")
_PHASES = ("load", "compute", "reduce", "update")


def _parts_of(report: TrainReport) -> tuple[float, ...]:
    """Seconds of each part of a step."""
    named = (report.data_wait_s, report.compute_s, report.comm_s)
    return (*named, max(0.0, report.step_time_s - sum(named)))


def _timed(run: RunHistory) -> list[TrainReport]:
    """The reports that tell the parts of a step."""
    return [one for one in run.train if one.compute_s > 0 and math.isfinite(one.step_time_s)]


def step_bars(labels: Sequence[str], runs: Sequence[RunHistory]) -> Bars:
    """Return the mean parts of a step of rank 0 of each run."""
    rows: list[tuple[str, tuple[tuple[str, float], ...]]] = []
    for label, run in zip(labels, runs, strict=True):
        if reports := _timed(run):
            means = np.mean([_parts_of(one) for one in reports], axis=0).tolist()
            wait, compute, *rest = zip(_PARTS, means, strict=True)
            rows.append((label, (compute, wait, *rest)))
    described = "Mean seconds of a step of rank 0: computing forward and backward, the wait for data, the exchange of "
    described += "gradients with the wait for slower ranks (reduce), the update and all else."
    return Bars("Where the time of a step goes", described, tuple(rows))


def phase_bars(label: str, samples: Sequence[Sample], complete: bool) -> Bars:
    """Return the phases of each rank of a run, from its start to its end.

    Args:
        complete: whether there are samples of all starts of the run.
    """
    rows: list[tuple[str, tuple[tuple[str, float], ...]]] = []
    several = len({one.host for one in samples}) > 1
    for group in groups_of(samples):
        spent = defaultdict[str, float](float)
        for sample in group:
            for phase, seconds in sample.phases.items():
                spent[PHASES[phase][0] if phase in PHASES else phase] += seconds
        if group[0].role == "rank" and sum(spent.values()):
            host = f" on {group[-1].host}" if several else ""
            rows.append((f"{group[0].name}{host}", tuple(spent.items())))
    described = "Phases of the training thread of each rank, from its start to its end, "
    described += (
        "all starts together."
        if complete
        else "in the latest starts: samples of earlier ones are not kept."
    )
    return Bars(f"Phases of each rank of {label}", described, tuple(rows))


# --- phases over steps ----------------------------------------------------------------------------

PHASES_TOLD = (
    "Seconds of a step: the wait for data, computing forward and backward, the exchange of gradients with the wait for "
    "slower ranks (reduce), the update and all else; dashed: the whole step. Charts of ranks have the same scale."
)
_MOST_RANKS = 8
_MOST_POINTS = 60  # of the samples: each is a mean over many of them
_HEADROOM = 1.08


def phase_charts(
    key: str, label: str, run: RunHistory, samples: Sequence[Sample], colour: int = 0
) -> Iterator[Chart]:
    """Yield the parts of a step over a run: of rank 0 as it reported them, and of each of several
    ranks, as sampled.

    Args:
        colour: number of the run's colour on the page.
    """
    ranks = [
        (group[0].name, _rank_lines(group))
        for group in groups_of(samples)
        if group[0].role == "rank"
    ]
    ranks = [(name, lines) for name, lines in ranks if lines]
    reports = _timed(run)
    lines = _part_lines([(one.step, _parts_of(one), one.step_time_s) for one in reports])
    marks = tuple((float(step), colour) for step, _ in run.restarts)
    if lines:
        chart = _phase_chart(
            key, f"rank 0 of {label}, as reported", lines, max(one.step_time_s for one in reports)
        )
        yield replace(chart, marks=marks, wide=len(ranks) > 1)
    if len(ranks) > 1:
        yield from _rank_charts(key, label, ranks)


def _rank_charts(
    key: str, label: str, ranks: Sequence[tuple[str, tuple[Line, ...]]]
) -> Iterator[Chart]:
    """The first ranks' charts, all with one scale."""
    more = f" (the first {_MOST_RANKS} of {len(ranks)} ranks)" if len(ranks) > _MOST_RANKS else ""
    ranks = ranks[:_MOST_RANKS]
    highest = max(y for _, lines in ranks for line in lines for _, y in line.known)
    for place, (name, lines) in enumerate(ranks):
        yield _phase_chart(f"{key}-rank-{place}", f"{name} of {label}{more}", lines, highest)


def _phase_chart(key: str, of: str, lines: tuple[Line, ...], highest: float) -> Chart:
    top = _HEADROOM * highest if highest > 0 else None
    return Chart(
        key, f"Phases of a step: {of}", "step", "seconds", "seconds", lines, whole=True, top=top
    )


def _part_lines(points: Sequence[tuple[int, Sequence[float], float]]) -> tuple[Line, ...]:
    """A line of each part, and one of the whole step, through (step, seconds of the parts, seconds
    of the step).
    """
    lines = [
        line_of(
            name,
            phase_colour(name),
            [(step, parts[place]) for step, parts, _ in points],
            kind="phase",
        )
        for place, name in enumerate(_PARTS)
    ]
    whole = line_of(
        "whole step", 0, [(step, total) for step, _, total in points], dashed=True, kind="ink"
    )
    return drawable([*lines, whole])


def _rank_lines(group: Sequence[Sample]) -> tuple[Line, ...]:
    """The lines of one rank; none if no step of it was seen from its beginning to its end."""
    stretches = list(_stretches(group))
    points: list[tuple[int, list[float], float]] = []
    together = math.ceil(len(stretches) / _MOST_POINTS) or 1
    for begin in range(0, len(stretches), together):
        last, steps, spent = zip(*stretches[begin : begin + together], strict=True)
        parts = np.sum(spent, axis=0) / sum(steps)
        points.append((last[-1], parts.tolist(), float(parts.sum())))
    return _part_lines(points)


def _stretches(group: Sequence[Sample]) -> Iterator[tuple[int, int, Floats]]:
    """Yield, for each interval between samples in which steps were done: the last step, the number
    of steps, and the seconds of each phase.

    The first step after a start is a phase of its own, and is left out.
    """
    spent = np.zeros(len(_PHASES))
    pid = step = None  # of the sample that the next one is compared with
    for sample in group:
        if sample.pid != pid or sample.phases.get("first"):
            step = None
        spent = spent + [sample.phases.get(name, 0.0) for name in _PHASES]
        if sample.step is None or sample.step == step:
            continue
        if step is not None and sample.step > step:
            yield sample.step, sample.step - step, spent
        pid, step, spent = sample.pid, sample.step, np.zeros(len(_PHASES))
