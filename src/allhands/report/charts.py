"""Charts and bars that only a report has: learning rate, speed, memory of the ranks, phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from allhands.observe.charts import Chart, Grid, Line, Unit, chart, finite, groups_of, line_width, without_heights
from allhands.observe.metrics import RunHistory, TrainReport
from allhands.observe.monitor import Sample

_NONE = "–"


def step_charts(labels: Sequence[str], runs: Sequence[RunHistory]) -> Iterator[Chart]:
    """Learning rate, gradient norm, throughput, time of a step and memory of the ranks, over steps."""
    kinds: list[tuple[str, str, str, Unit, Callable[[TrainReport], float]]] = [
        ("learning-rate", "Learning rate", "learning rate", "small", lambda one: one.learning_rate),
        ("gradient-norm", "Gradient norm", "norm of the gradient", "small", lambda one: one.grad_norm),
        ("throughput", "Throughput", "tokens a second, all ranks", "rate", lambda one: one.tokens_per_s),
        ("step-time", "Time of a step", "seconds", "seconds", lambda one: one.step_time_s),
    ]
    if any(one.sent_bytes for run in runs for one in run.train):
        kinds.append(("sent", "Sent by a rank in a step", "sent", "size", lambda one: one.sent_bytes))
    for key, title, y_label, unit, value in kinds:
        lines = [
            Line(
                label,
                colour,
                tuple(float(one.step) for one in run.train),
                finite([*map(value, run.train)]),
                width=line_width(colour, len(runs)),
            )
            for colour, (label, run) in enumerate(zip(labels, runs, strict=True))
        ]
        marks = [(float(step), colour) for colour, run in enumerate(runs) for step, _ in run.restarts]
        if made := chart(key, title, ("step", y_label), unit, lines, marks=marks, whole=True):
            yield without_heights(made, 5.0) if key == "gradient-norm" else made
    for place, (label, run) in enumerate(zip(labels, runs, strict=True)):
        if made := _rank_memory(f"rank-memory-{place}" if len(runs) > 1 else "rank-memory", label, run):
            yield made


def _rank_memory(key: str, label: str, run: RunHistory) -> Chart | None:
    """The peak of each rank, as rank 0 reported it."""
    lines: list[Line] = []
    for rank in range(max((len(one.peak_memory_bytes) for one in run.train), default=0)):
        known = [one for one in run.train if rank < len(one.peak_memory_bytes)]
        x = tuple(float(one.step) for one in known)
        y = tuple(float(one.peak_memory_bytes[rank]) for one in known)
        lines.append(
            Line(f"rank {rank}", rank, x, y, kind="rank", width=line_width(rank, len(run.train[-1].peak_memory_bytes)))
        )
    return chart(key, f"Peak memory of each rank of {label}", ("step", "memory"), "bytes", lines, whole=True)


@dataclass(frozen=True)
class Bars:
    """What time went into, one bar a row: parts by name with their seconds."""

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
            whole = sum(seconds for _, seconds in parts) or 1.0
            known = dict(parts)
            cells = [
                f"{known[name]:.3g} s ({known[name] / whole:.0%})" if name in known else _NONE for name in self.parts
            ]
            rows.append((label, *cells))
        return Grid(self.title, ("", *self.parts), tuple(rows))


def step_parts(labels: Sequence[str], runs: Sequence[RunHistory]) -> Bars | None:
    """What a step of rank 0 goes into, the mean over all reports of each run that says so."""
    rows: list[tuple[str, tuple[tuple[str, float], ...]]] = []
    for label, run in zip(labels, runs, strict=True):
        known = [one for one in run.train if one.compute_s > 0 and math.isfinite(one.step_time_s)]
        if known:
            parts = {
                "compute": float(np.mean([one.compute_s for one in known])),
                "reduce": float(np.mean([one.comm_s for one in known])),
                "data wait": float(np.mean([one.data_wait_s for one in known])),
            }
            whole = float(np.mean([one.step_time_s for one in known]))
            parts["update and rest"] = max(0.0, whole - sum(parts.values()))
            rows.append((label, tuple(parts.items())))
    if not rows:
        return None
    described = (
        "What a step of rank 0 goes into: computing forward and backward, the exchange of gradients with the wait "
    )
    described += "for slower ranks (reduce), the wait for data, the update and all else. Means over all reports."
    return Bars("Where the time of a step goes", described, tuple(rows))


def phase_bars(label: str, samples: Sequence[Sample], whole: bool, names: Callable[[str], str]) -> Bars | None:
    """What each rank of a run did, from its start to its end; ``names`` tells what a phase is called.

    Args:
        whole: whether there are samples of all its starts.
    """
    rows: list[tuple[str, tuple[tuple[str, float], ...]]] = []
    for group in groups_of(samples):
        spent: dict[str, float] = {}
        for sample in group:
            for phase, seconds in sample.phases.items():
                spent[names(phase)] = spent.get(names(phase), 0.0) + seconds
        if group[0].role == "rank" and sum(spent.values()):
            host = f" on {group[-1].host}" if len({one.host for one in samples}) > 1 else ""
            rows.append((f"{group[0].name}{host}", tuple(spent.items())))
    if not rows:
        return None
    described = "What the training thread of each rank did, from its start to its end, "
    described += "all starts together." if whole else "in the latest starts: samples of earlier ones are not kept."
    return Bars(f"Phases of each rank of {label}", described, tuple(rows))
