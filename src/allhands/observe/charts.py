"""Charts of runs as data: curves, their descriptions, and their tables of numbers.

Pictures and the pages of reports draw the same charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from allhands.io.formatting import format_bytes, format_rate, format_seconds, format_size
from allhands.observe.metrics import RunHistory, TrainReport, ValidReport
from allhands.observe.monitor import Sample
from allhands.observe.monitor.board import key_of

Floats = NDArray[np.float64]
Kind = Literal["run", "rank", "director", "phase", "ink"]
Unit = Literal["loss", "rate", "bytes", "size", "small", "seconds"]
Place = Callable[[float, float], float]

_MOST_POINTS = 1500  # of a line on a page
_MOST_ROWS = 80  # of a table
_MOST_DESCRIBED = 8  # lines
_SMOOTH_FROM = 20  # points
NONE = "–"
_SHOWN: dict[Unit, Callable[[float], str]] = {
    "bytes": format_bytes,
    "size": format_size,
    "rate": format_rate,
    "small": "{:.3g}".format,
    "seconds": format_seconds,
    "loss": "{:.4f}".format,
}


@dataclass(frozen=True)
class Line:
    """One curve, ``width`` pixels wide.

    Attributes:
        colour: a number from 0 among the lines of the same ``kind``: a run, a rank, a process that
            directs the ranks, a phase, or the plain ink of a total.
        x: finite numbers.
        y: heights; ``None`` is a gap, where the number was not finite.
        faint: the raw form of the smoothed line before it, which has no name in legends.
    """

    label: str
    colour: int
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    dashed: bool = False
    points: bool = False
    faint: bool = False
    width: float = 2.0
    kind: Kind = "run"

    @property
    def known(self) -> list[tuple[float, float]]:
        """The points, without gaps."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None]


@dataclass(frozen=True)
class Grid:
    """A table: ``head`` names the columns, the first of which names the rows."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """Curves over the same axis.

    Attributes:
        marks: places of restarts on the horizontal axis, with the colour of the run.
        stars: the best validations: place, height, colour.
        crosses: places of skipped steps, with the colour of the run.
        whole: True if places on the horizontal axis are whole numbers.
        top: upper end of a vertical axis from 0; ``None``: it follows from the lines.
        wide: True if the chart has a row of the page for itself.
        note: text before the description.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    unit: Unit
    lines: tuple[Line, ...]
    marks: tuple[tuple[float, int], ...] = ()
    stars: tuple[tuple[float, float, int], ...] = ()
    crosses: tuple[tuple[float, int], ...] = ()
    whole: bool = False
    top: float | None = None
    wide: bool = False
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the chart for the page's script; long lines have fewer points."""
        return {
            "title": self.title,
            "x": self.x_label,
            "y": self.y_label,
            "unit": self.unit,
            "whole": self.whole,
            "top": self.top,
            "lines": [vars(_thinned(line)) for line in self.lines],
            "marks": [mark for mark in self.marks if math.isfinite(mark[0])],
            "stars": [star for star in self.stars if math.isfinite(star[0])],
        }

    @cached_property
    def described(self) -> str:
        """Ends and range of each line, in words."""
        named = [line for line in self.lines if not line.faint]
        texts = [self._description(line) for line in named[:_MOST_DESCRIBED]]
        if len(named) > _MOST_DESCRIBED:
            texts.append(f"and {len(named) - _MOST_DESCRIBED} more lines, in the table")
        return f"{self.note}{'; '.join(texts)}."

    def _description(self, line: Line) -> str:
        (first_x, first), (last_x, last) = line.known[0], line.known[-1]
        axis, _, unit = self.x_label.removesuffix(")").partition(" (")
        begin = f"{self._height(first)} at {axis} {self._place(first_x)}"
        if len(line.known) == 1:
            return f"{line.label}: {begin} {unit}".rstrip()
        heights = [y for _, y in line.known]
        end = f"{self._height(last)} at {self._place(last_x)} {unit}".rstrip()
        between = f"between {self._height(min(heights))} and {self._height(max(heights))}"
        return f"{line.label}: from {begin} to {end}, {between}"

    @cached_property
    def table(self) -> Grid:
        """Heights at every place of the horizontal axis; of many places a selection."""
        followers = (*self.lines[1:], None)
        lines = [
            line
            for line, after in zip(self.lines, followers, strict=True)
            if not (after and after.faint)
        ]
        columns = [dict(zip(line.x, line.y, strict=True)) for line in lines]
        places = sorted({x for line in lines for x in line.x})
        caption = self.title
        if len(places) > _MOST_ROWS:
            rare = sorted({x for line in lines if line.points for x in line.x})
            some = sorted({*_spread(rare), *_spread(places)})
            caption += f": {len(some)} of {len(places)} rows; metrics.jsonl has all"
            places = some
        rows = [(self._place(x), *self._cells(x, columns)) for x in places]
        head = (self.x_label, *(line.label for line in lines))
        return Grid(caption, head, tuple(row for row in rows if set(row[1:]) != {NONE}))

    def _cells(self, x: float, columns: Iterable[Mapping[float, float | None]]) -> Iterator[str]:
        for column in columns:
            yield self._height(column[x]) if x in column else NONE

    def _place(self, x: float) -> str:
        return f"{x:,.0f}" if self.whole else f"{x:.4g}"

    def _height(self, y: float | None) -> str:
        if y is None:
            return (
                NONE if self.unit == "bytes" else "NaN"
            )  # a process that was not there, or a number that is none
        return _SHOWN[self.unit](y)


def _spread(places: Sequence[float]) -> list[float]:
    count = len(places)
    return [
        places[int(at)] for at in np.linspace(0, count - 1, min(count, _MOST_ROWS // 2)).round()
    ]


def _thinned(line: Line) -> Line:
    """The line with the lowest and the highest point of each stretch, if it has very many."""
    count = len(line.x)
    if count <= _MOST_POINTS:
        return line
    heights = np.array(line.y, dtype=np.float64)
    keep = {0, count - 1, *np.flatnonzero(np.isnan(heights)).tolist()}
    for stretch in np.array_split(np.arange(count), _MOST_POINTS // 2):
        if not np.isnan(heights[stretch]).all():
            keep |= {int(stretch[find(heights[stretch])]) for find in (np.nanargmin, np.nanargmax)}
    places = sorted(keep)
    return replace(line, x=tuple(line.x[at] for at in places), y=tuple(line.y[at] for at in places))


def line_of(label: str, colour: int, pairs: Iterable[tuple[float, float]], **look: Any) -> Line:
    """Return a line through (place, height) pairs; a non-finite height makes a gap, a non-finite
    place is left out.
    """
    kept = [
        (float(x), float(y) if math.isfinite(y) else None) for x, y in pairs if math.isfinite(x)
    ]
    line = Line(label, colour, tuple(x for x, _ in kept), tuple(y for _, y in kept), **look)
    return replace(line, points=True) if len(line.known) == 1 else line


def drawable(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that have a point."""
    return tuple(line for line in lines if line.known)


# --- of reports -----------------------------------------------------------------------------------


def loss_charts(labels: Sequence[str], runs: Sequence[RunHistory]) -> Iterator[Chart]:
    """Training and validation loss over steps, over tokens and over time."""
    times = [
        one.elapsed_s
        for run in runs
        for one in (*run.train, *run.valid)
        if math.isfinite(one.elapsed_s)
    ]
    unit, unit_s = time_unit(max(times, default=0.0))
    axes = {"steps": "step", "tokens": "trained tokens", "time": f"training time ({unit})"}
    if not all(run.train[-1].trained_tokens > 0 for run in runs if run.train):
        del axes["tokens"]  # a program of one's own need not count them
    for key, x_label in axes.items():
        lines: list[Line] = []
        marks: list[tuple[float, int]] = []
        stars: list[tuple[float, float, int]] = []
        crosses: list[tuple[float, int]] = []
        for colour, (label, run) in enumerate(zip(labels, runs, strict=True)):
            place = _placing(key, unit_s, run)
            lines += _loss_lines(label, colour, run, place, line_width(colour, len(runs)))
            marks += [(place(step, seconds), colour) for step, seconds in run.restarts]
            elapsed_s = _between("elapsed_s", [*run.train, *run.valid])
            crosses += [(place(one.step, elapsed_s(one.step)), colour) for one in run.skipped]
            if known := [one for one in run.comparable if math.isfinite(one.loss)]:
                best = min(known, key=lambda one: one.loss)
                stars.append((place(best.step, best.elapsed_s), best.loss, colour))
        title, y_label = f"Loss over {key}", "loss per token (lower is better)"
        chart = Chart(
            f"loss-{key}", title, x_label, y_label, "loss", drawable(lines), whole=key != "time"
        )
        if chart.lines:
            chart = replace(chart, marks=tuple(marks), stars=tuple(stars), crosses=tuple(crosses))
            yield without_heights(chart, 2.5)


def _between(name: str, reports: Sequence[TrainReport | ValidReport]) -> Callable[[float], float]:
    """The function from a step to a number of the reports, straight from one to the next, from 0 at
    step 0 on.
    """
    table = np.array(
        sorted([(0, 0), *((one.step, getattr(one, name)) for one in reports)]), dtype=np.float64
    )
    return lambda x: float(np.interp(x, table[:, 0], table[:, 1]))


def _placing(axis: str, unit_s: float, run: RunHistory) -> Place:
    """The function from a step and the seconds until then to the place on an axis: "steps",
    "tokens" or "time".
    """
    if axis == "steps":
        return lambda step, elapsed_s: step
    if axis == "time":
        return lambda step, elapsed_s: elapsed_s / unit_s
    tokens = _between("trained_tokens", run.train)
    return lambda step, elapsed_s: tokens(step)


def _loss_lines(
    label: str, colour: int, run: RunHistory, place: Place, width: float
) -> Iterator[Line]:
    def points(reports: Sequence[TrainReport | ValidReport]) -> list[tuple[float, float]]:
        return [(place(one.step, one.elapsed_s), one.loss) for one in reports]

    plain = line_of(f"{label}: training", colour, points(run.train), width=width)
    if len(plain.y) >= _SMOOTH_FROM and None not in plain.y:
        smoothed = tuple(map(float, smooth(np.array(plain.y, dtype=np.float64))))
        yield replace(plain, label=f"{plain.label}, smoothed", y=smoothed)
        plain = replace(plain, faint=True, width=1.0)
    yield plain
    comparable = points(run.comparable)
    earlier = points(run.valid)[: len(run.valid) - len(comparable)]
    for name, each in (("validation on earlier examples", earlier), ("validation", comparable)):
        yield line_of(f"{label}: {name}", colour, each, dashed=True, points=True, width=width)


def line_width(place: int, count: int) -> float:
    """Return the width of a line: earlier runs are wider and below later ones, so that equal curves
    stay visible.
    """
    return round(2 + min(2.2, 4 / count) * (count - 1 - place), 2)


def without_heights(chart: Chart, far: float) -> Chart:
    """Return the chart with its axis cut off above the runs that went well, if one was thrown off;
    the table keeps all.

    The axis keeps at least one run as a whole, and twice the beginning of each other run that comes
    near it.

    Args:
        far: times the cut at which the highest loss is far off; below it, or with one run, the
            chart stays as it is.
    """
    runs: dict[int, list[list[float]]] = {}
    for line in chart.lines:
        runs.setdefault(line.colour, []).append([y for _, y in line.known])
    highest = [max(map(max, lines)) for lines in runs.values()]
    lowest = [min(map(min, lines)) for lines in runs.values()]
    base = min(highest, default=0.0)
    if len(runs) < 2 or min(lowest) < 0 or base <= 0:
        return chart
    starts = [max(2 * min(line[0] for line in lines), base) for lines in runs.values()]
    near = zip(highest, starts, lowest, strict=True)
    top = max(min(high, start) for high, start, low in near if low <= 4 * base)
    if not 0 < far * top < max(highest):
        return chart
    top *= 1.08
    note = f"The axis is cut off at {_SHOWN[chart.unit](top)}; the table has what is above. "
    # Without what is in brackets, because the axis of a chart on a phone is short.
    label = f"{chart.y_label.partition(' (')[0]}; cut off at {top:.3g}"
    return replace(chart, top=top, y_label=label, note=note)


def smooth(values: Floats) -> Floats:
    """Return a centred moving mean over about a tenth of the points; the same shape as ``values``.

    At the start, where losses fall fast, the window shrinks on both sides, so that the curve starts
    where the values do; at the end only its right side is cut off, so that the last value does not
    bend the curve.
    """
    count = len(values)
    index = np.arange(count)
    half = np.minimum(count // _SMOOTH_FROM, index)
    first, behind = index - half, np.minimum(index + half + 1, count)
    total = np.concatenate(([0.0], np.cumsum(values)))
    return (total[behind] - total[first]) / (behind - first)


def time_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit for times up to ``longest_s``, and its seconds."""
    if longest_s < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest_s < 3 * 3600 else ("hours", 3600.0)


# --- of samples -----------------------------------------------------------------------------------


def process_memory(key: str, label: str, samples: Sequence[Sample]) -> Chart:
    """Return the proportional memory of each process of a run over its time, and MLX's of each
    rank.
    """
    began = samples[0].time if samples else 0.0
    unit, unit_s = time_unit(samples[-1].time - began if samples else 0.0)

    def line(name: str, colour: int, group: Sequence[Sample], attribute: str, **look: Any) -> Line:
        return line_of(name, colour, _over_time(group, attribute, began, unit_s), **look)

    lines: list[Line] = []
    directors = 0
    for group in groups_of(samples):
        name = group[0].name
        if group[0].role == "rank":
            colour = group[0].rank or 0
            lines.append(line(name, colour, group, "pss_bytes", kind="rank"))
            lines.append(
                line(
                    f"{name}: MLX's arrays",
                    colour,
                    group,
                    "mlx_active_bytes",
                    dashed=True,
                    kind="rank",
                )
            )
        else:
            lines.append(
                line(f"{name} (directs the ranks)", directors, group, "pss_bytes", kind="director")
            )
            directors += 1
    title = f"Memory of the processes of {label}"
    return Chart(key, title, f"time since the start ({unit})", "memory", "bytes", drawable(lines))


def _over_time(
    group: Sequence[Sample], attribute: str, began: float, unit_s: float
) -> Iterator[tuple[float, float]]:
    """Time and bytes of a process, with a gap where it was started again."""
    before: Sample | None = None
    for sample in group:
        held = getattr(sample, attribute)
        if held is None:
            continue
        if before is not None and before.pid != sample.pid:
            yield ((before.time + sample.time) / 2 - began) / unit_s, math.nan
        yield (sample.time - began) / unit_s, held
        before = sample


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each process of a run, the ranks first."""
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key_of(sample), []).append(sample)
    order = {"rank": 0, "orchestrator": 1, "agent": 2}
    return sorted(
        groups.values(), key=lambda group: (order[group[0].role], group[0].rank or 0, group[0].host)
    )
