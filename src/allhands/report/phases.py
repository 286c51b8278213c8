"""What a step goes into over the course of a run: charts of rank 0's reports, and of each rank's samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from allhands.io.pictures import phase_colour
from allhands.observe.charts import Chart, Line, chart, finite, groups_of
from allhands.observe.metrics import RunHistory, TrainReport
from allhands.observe.monitor import Sample

# In the order of a step: as the monitor calls it, and as the page does.
_PARTS = (("load", "data wait"), ("compute", "compute"), ("reduce", "reduce"), ("update", "update and rest"))
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
    known = [one for one in run.train if one.compute_s > 0 and math.isfinite(one.step_time_s)]
    if not known:
        return None
    x = tuple(float(one.step) for one in known)
    columns = list(zip(*map(_parts_of, known), strict=True))
    lines = _lines(x, columns, [one.step_time_s for one in known])
    marks = [(float(step), colour) for step, _ in run.restarts]
    title = f"Phases of a step: rank 0 of {label}, as reported"
    made = chart(key, title, ("step", "seconds"), "seconds", lines, marks=marks, whole=True)
    highest = max((one.step_time_s for one in known), default=0.0)
    return replace(made, top=_HEADROOM * highest) if made and highest > 0 else made


def _parts_of(report: TrainReport) -> tuple[float, ...]:
    named = (report.data_wait_s, report.compute_s, report.comm_s)
    return (*named, max(0.0, report.step_time_s - sum(named)))


def _of_rank(group: Sequence[Sample]) -> list[Line]:
    """The lines of one rank; none if no step of it was seen from its beginning to its end."""
    points = _merged(list(_stretches(group)))
    if not points:
        return []
    x = tuple(float(step) for step, _, _ in points)
    columns = [tuple(spent[name] / steps for _, steps, spent in points) for name, _ in _PARTS]
    return _lines(x, columns, [sum(column) for column in zip(*columns, strict=True)])


def _lines(x: tuple[float, ...], columns: Sequence[Sequence[float]], whole: Sequence[float]) -> list[Line]:
    """A line of each phase, and one of the whole step."""
    lines = [
        Line(name, phase_colour(name), x, finite(column), kind="phase")
        for (_, name), column in zip(_PARTS, columns, strict=True)
    ]
    return [*lines, Line("whole step", 0, x, finite(whole), dashed=True, kind="ink")]


def _stretches(group: Sequence[Sample]) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Between samples at which steps had been done: the last of them, how many, and the seconds of each phase.

    The first step after a start counts as a phase of its own, and is left out.
    """
    spent: dict[str, float] = dict.fromkeys((name for name, _ in _PARTS), 0.0)
    before: Sample | None = None
    for sample in group:
        if before is not None and (sample.pid != before.pid or sample.phases.get("first")):
            before = None
        for name in spent:
            spent[name] += sample.phases.get(name, 0.0)
        if sample.step is None or (before is not None and sample.step == before.step):
            continue
        if before is not None and before.step is not None and sample.step > before.step:
            yield sample.step, sample.step - before.step, dict(spent)
        before, spent = sample, dict.fromkeys(spent, 0.0)


def _merged(stretches: list[tuple[int, int, dict[str, float]]]) -> list[tuple[int, int, dict[str, float]]]:
    """At most so many points: each of several stretches that follow each other."""
    each = math.ceil(len(stretches) / _MOST_POINTS) or 1
    merged: list[tuple[int, int, dict[str, float]]] = []
    for begin in range(0, len(stretches), each):
        some = stretches[begin : begin + each]
        spent = {name: sum(one[name] for _, _, one in some) for name in some[0][2]}
        merged.append((some[-1][0], sum(steps for _, steps, _ in some), spent))
    return merged
