"""Charts and bars that only a report has: learning rate, speed, memory of the ranks, phases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from allhands.observe.charts import Chart, Grid, Line, Unit, chart, groups_of, line_of, line_width, without_heights
from allhands.observe.metrics import RunHistory, TrainReport
from allhands.observe.monitor import Sample

_NONE = "–"


# Key, title, name of the axis, unit, and field of a report.
_KINDS: tuple[tuple[str, str, str, Unit, str], ...] = (
    ("learning-rate", "Learning rate", "learning rate", "small", "learning_rate"),
    ("gradient-norm", "Gradient norm", "norm of the gradient", "small", "grad_norm"),
    ("throughput", "Throughput", "tokens a second, all ranks", "rate", "tokens_per_s"),
    ("step-time", "Time of a step", "seconds", "seconds", "step_time_s"),
    ("sent", "Sent by a rank in a step", "sent", "size", "sent_bytes"),
)


def step_charts(labels: Sequence[str], runs: Sequence[RunHistory]) -> Iterator[Chart]:
    """Learning rate, gradient norm, throughput, time of a step and memory of the ranks, over steps."""
    marks = [(float(step), colour) for colour, run in enumerate(runs) for step, _ in run.restarts]
    for key, title, y_label, unit, name in _KINDS:
        columns = [[(one.step, getattr(one, name)) for one in run.train] for run in runs]
        if key == "sent" and not any(value for column in columns for _, value in column):
            continue
        lines = [
            line_of(label, colour, column, width=line_width(colour, len(runs)))
            for colour, (label, column) in enumerate(zip(labels, columns, strict=True))
        ]
        if made := chart(key, title, ("step", y_label), unit, lines, marks=marks, whole=True):
            yield without_heights(made, 5.0) if key == "gradient-norm" else made
    for place, (label, run) in enumerate(zip(labels, runs, strict=True)):
        if made := _rank_memory(f"rank-memory-{place}" if len(runs) > 1 else "rank-memory", label, run):
            yield made


def _rank_memory(key: str, label: str, run: RunHistory) -> Chart | None:
    """The peak of each rank, as rank 0 reported it."""
    count = max((len(one.peak_memory_bytes) for one in run.train), default=0)
    lines: list[Line] = []
    for rank in range(count):
        points = [(one.step, one.peak_memory_bytes[rank]) for one in run.train if rank < len(one.peak_memory_bytes)]
        lines.append(line_of(f"rank {rank}", rank, points, kind="rank", width=line_width(rank, count)))
    return chart(key, f"Peak memory of each rank of {label}", ("step", "memory"), "bytes", lines, whole=True)


Rows = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]


@dataclass(frozen=True)
class Bars:
    """What time went into, one bar a row: parts by name with their seconds."""

    title: str
    described: str
    rows: Rows

    @property
    def parts(self) -> list[str]:
        """The names of all parts, in the order in which they come."""
        return list(dict.fromkeys(name for _, parts in self.rows for name, _ in parts))

    @property
    def table(self) -> Grid:
        """The seconds of each part, and its share."""
        rows: list[tuple[str, ...]] = []
        for label, parts in self.rows:
            whole = sum(seconds for _, seconds in parts) or 1.0
            known = dict(parts)
            cells = [
                f"{known[name]:.3g} s ({known[name] / whole:.0%})" if name in known else _NONE for name in self.parts
            ]
            rows.append((label, *cells))
        return Grid(self.title, ("", *self.parts), tuple(rows))


def step_parts(labels: Sequence[str], runs: Sequence[RunHistory]) -> Bars | None:
    """What a step of rank 0 goes into, the mean over all reports of each run that says so."""
    rows = [
        (label, tuple(zip(PARTS, map(float, np.mean([parts_of(one) for one in known], axis=0)), strict=True)))
        for label, run in zip(labels, runs, strict=True)
        if (known := timed(run))
    ]
    # In the order of this chart: computing first.
    rows = [(label, (*parts[1:3], parts[0], *parts[3:])) for label, parts in rows]
    described = "What a step of rank 0 goes into: computing forward and backward, the exchange of gradients with the "
    described += "wait for slower ranks (reduce), the wait for data, the update and all else. Means over all reports."
    return Bars("Where the time of a step goes", described, tuple(rows)) if rows else None


# In the order of a step.
PARTS = ("data wait", "compute", "reduce", "update and rest")


def parts_of(report: TrainReport) -> tuple[float, ...]:
    """Seconds of :data:`PARTS`."""
    named = (report.data_wait_s, report.compute_s, report.comm_s)
    return (*named, max(0.0, report.step_time_s - sum(named)))


def timed(run: RunHistory) -> list[TrainReport]:
    """The reports that tell the parts of a step."""
    return [one for one in run.train if one.compute_s > 0 and math.isfinite(one.step_time_s)]


def phase_bars(label: str, samples: Sequence[Sample], whole: bool, names: Callable[[str], str]) -> Bars | None:
    """What each rank of a run did, from its start to its end; ``names`` tells what a phase is called.

    Args:
        whole: whether there are samples of all its starts.
    """
    rows: list[tuple[str, tuple[tuple[str, float], ...]]] = []
    several = len({one.host for one in samples}) > 1
    for group in groups_of(samples):
        spent = defaultdict[str, float](float)
        for sample in group:
            for phase, seconds in sample.phases.items():
                spent[names(phase)] += seconds
        if group[0].role == "rank" and sum(spent.values()):
            host = f" on {group[-1].host}" if several else ""
            rows.append((f"{group[0].name}{host}", tuple(spent.items())))
    described = "What the training thread of each rank did, from its start to its end, "
    described += "all starts together." if whole else "in the latest starts: samples of earlier ones are not kept."
    return Bars(f"Phases of each rank of {label}", described, tuple(rows)) if rows else None
