"""What a step goes into over the course of a run: charts of rank 0's reports, and of each rank's samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from allhands.io.pictures import phase_colour
from allhands.observe.charts import Chart, Floats, Line, chart, groups_of, line_of
from allhands.observe.metrics import RunHistory
from allhands.observe.monitor import Sample
from allhands.report.charts import PARTS, parts_of, timed

_PHASES = ("load", "compute", "reduce", "update")  # of the monitor, in the order of PARTS
_MOST_RANKS = 8
_MOST_POINTS = 60  # of the samples, so that each has many of them and is no chance
_HEADROOM = 1.08
PHASES_TOLD = (
    "Seconds of a step: the wait for data, computing forward and backward, the exchange of gradients with the wait for "
    "slower ranks (reduce), the update and all else; dashed: all of it. Ranks side by side have the same height."
)


def phase_charts(key: str, label: str, run: RunHistory, samples: Sequence[Sample], colour: int = 0) -> Iterator[Chart]:
    """Of one run the phases of rank 0 as it reported them; where there are several ranks, those of each, as sampled.

    Args:
        colour: of the run among those of the page.
    """
    ranks = [(group[0].name, _of_rank(group)) for group in groups_of(samples) if group[0].role == "rank"]
    known = [(name, lines) for name, lines in ranks if lines]
    if made := _of_reports(key, label, run, colour):
        yield replace(made, wide=len(known) > 1)
    if len(known) < 2:
        return
    shown = [y for _, lines in known[:_MOST_RANKS] for line in lines for y in line.y if y is not None]
    top = max(shown, default=0.0)
    more = f" (the first {_MOST_RANKS} of {len(known)} ranks)" if len(known) > _MOST_RANKS else ""
    for place, (name, lines) in enumerate(known[:_MOST_RANKS]):
        title = f"Phases of a step: {name} of {label}{more}"
        if made := chart(f"{key}-rank-{place}", title, ("step", "seconds"), "seconds", lines, whole=True):
            yield replace(made, top=_HEADROOM * top)


def _of_reports(key: str, label: str, run: RunHistory, colour: int) -> Chart | None:
    known = timed(run)
    lines = _lines([(one.step, parts_of(one), one.step_time_s) for one in known])
    marks = [(float(step), colour) for step, _ in run.restarts]
    title = f"Phases of a step: rank 0 of {label}, as reported"
    made = chart(key, title, ("step", "seconds"), "seconds", lines, marks=marks, whole=True)
    highest = max((one.step_time_s for one in known), default=0.0)
    return replace(made, top=_HEADROOM * highest) if made and highest > 0 else made


def _of_rank(group: Sequence[Sample]) -> list[Line]:
    """The lines of one rank; none if no step of it was seen from its beginning to its end."""
    points = _merged(list(_stretches(group)))
    return _lines([(step, tuple(spent / steps), float(sum(spent)) / steps) for step, steps, spent in points])


def _lines(points: Sequence[tuple[int, Sequence[float], float]]) -> list[Line]:
    """A line of each phase, and one of the whole step."""
    lines = [
        line_of(name, phase_colour(name), [(step, parts[place]) for step, parts, _ in points], kind="phase")
        for place, name in enumerate(PARTS)
    ]
    whole = [(step, seconds) for step, _, seconds in points]
    return [*lines, line_of("whole step", 0, whole, dashed=True, kind="ink")] if points else []


def _stretches(group: Sequence[Sample]) -> Iterator[tuple[int, int, Floats]]:
    """Between samples at which steps had been done: the last of them, how many, and the seconds of each phase.

    The first step after a start counts as a phase of its own, and is left out.
    """
    spent = np.zeros(len(_PHASES))
    before: Sample | None = None
    for sample in group:
        if before is not None and (sample.pid != before.pid or sample.phases.get("first")):
            before = None
        spent = spent + [sample.phases.get(name, 0.0) for name in _PHASES]
        if sample.step is None or (before is not None and sample.step == before.step):
            continue
        if before is not None and sample.step > (before.step or 0):
            yield sample.step, sample.step - (before.step or 0), spent
        before, spent = sample, np.zeros(len(_PHASES))


def _merged(stretches: list[tuple[int, int, Floats]]) -> Iterator[tuple[int, int, Floats]]:
    """At most so many points: each of several stretches that follow each other."""
    each = math.ceil(len(stretches) / _MOST_POINTS) or 1
    for begin in range(0, len(stretches), each):
        last, steps, spent = zip(*stretches[begin : begin + each], strict=True)
        yield last[-1], sum(steps), np.sum(spent, axis=0)
