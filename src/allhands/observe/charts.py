"""The curves of runs as charts: what is drawn, what is said of it, and the table behind it.

Pictures and the pages of reports draw the same charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from allhands.io.formatting import format_bytes, format_rate, format_size
from allhands.observe.metrics import RunHistory
from allhands.observe.monitor import Sample
from allhands.observe.monitor.board import key_of

Floats = NDArray[np.float64]
T = TypeVar("T", tuple[float, int], tuple[float, float, int])
Kind = Literal["run", "rank", "director", "phase", "ink"]
Unit = Literal["loss", "rate", "bytes", "size", "small", "seconds"]

_MOST_POINTS = 1500  # of a line
_MOST_ROWS = 80  # of a table
_SMOOTH_FROM = 20
_NONE = "–"
_SHOWN: dict[Unit, Callable[[float], str]] = {
    "bytes": format_bytes,
    "size": format_size,
    "rate": format_rate,
    "small": "{:.3g}".format,
    "seconds": "{:.3g} s".format,
    "loss": "{:.4f}".format,
}


@dataclass(frozen=True)
class Line:
    """One curve, ``width`` pixels wide. ``faint`` ones go with the line before, unnamed.

    ``colour`` counts from 0 among those of its ``kind``: a run, a rank, who directs the ranks, a phase, or the plain
    ink of a whole.

    A height of ``None`` is a gap: it was there, and is no finite number.
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
        described: what is to be seen, in words with numbers.
        marks: places on the horizontal axis of restarts, with the colour of the run.
        stars: the best validations: place, height, colour.
        crosses: places of skipped steps, with the colour of the run.
        table: the numbers behind it.
        top: of the vertical axis, which then begins at 0; ``None``: as the lines need it.
        wide: whether it has a row of its own.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    unit: Unit
    lines: tuple[Line, ...]
    described: str
    table: Grid
    marks: tuple[tuple[float, int], ...] = ()
    stars: tuple[tuple[float, float, int], ...] = ()
    crosses: tuple[tuple[float, int], ...] = ()
    whole: bool = False
    top: float | None = None
    wide: bool = False

    def to_json(self) -> dict[str, Any]:
        """What the page's script draws."""
        axes = {"x": self.x_label, "y": self.y_label, "unit": self.unit, "whole": self.whole, "top": self.top}
        lines = [vars(line) for line in self.lines]
        return {"title": self.title, **axes, "lines": lines, "marks": self.marks, "stars": self.stars}


def shown(value: float | None, unit: Unit) -> str:
    """A height as a person reads it."""
    if value is None and unit == "bytes":
        return _NONE  # nothing was there
    if value is None or math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return _SHOWN[unit](value)


def chart(
    key: str,
    title: str,
    axes: tuple[str, str],
    unit: Unit,
    lines: Sequence[Line],
    *,
    marks: Sequence[tuple[float, int]] = (),
    stars: Sequence[tuple[float, float, int]] = (),
    whole: bool = False,
) -> Chart | None:
    """A chart with its description and its table; ``None`` if no line has a finite height."""
    lines = [line for line in map(_placed, lines) if any(height is not None for height in line.y)]
    if not lines:
        return None
    named = [line for line in lines if not line.faint]
    described = "; ".join(_told(line, axes[0], unit, whole=whole) for line in named[:8])
    if len(named) > 8:
        described += f"; and {len(named) - 8} more lines, in the table"
    table = _table(title, axes[0], unit, lines, whole=whole)
    drawn = tuple(map(_thinned, lines))
    return Chart(key, title, *axes, unit, drawn, f"{described}.", table, _there(marks), _there(stars), whole=whole)


def _there(places: Sequence[T]) -> tuple[T, ...]:
    return tuple(place for place in places if math.isfinite(place[0]))


def _placed(line: Line) -> Line:
    """Without points whose place is no finite number; a single point is drawn as one."""
    kept = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x)]
    single = sum(y is not None for _, y in kept) == 1
    return replace(line, x=tuple(x for x, _ in kept), y=tuple(y for _, y in kept), points=line.points or single)


def _place(x: float, *, whole: bool) -> str:
    return f"{x:,.0f}" if whole else f"{x:.4g}"


def _told(line: Line, axis: str, unit: Unit, *, whole: bool) -> str:
    known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
    (first_x, first), (last_x, last) = known[0], known[-1]
    name = axis.split(" (")[0]
    if len(known) == 1:
        return f"{line.label}: {shown(first, unit)} at {name} {_place(first_x, whole=whole)}"
    low, high = min(y for _, y in known), max(y for _, y in known)
    ends = f"from {shown(first, unit)} at {name} {_place(first_x, whole=whole)} to {shown(last, unit)} at "
    return f"{line.label}: {ends}{_place(last_x, whole=whole)}, between {shown(low, unit)} and {shown(high, unit)}"


def _thinned(line: Line) -> Line:
    """With few enough points to draw quickly: of each stretch the lowest and the highest."""
    count = len(line.x)
    if count <= _MOST_POINTS:
        return line
    heights = np.array([np.nan if y is None else y for y in line.y])
    keep: set[int] = {0, count - 1, *(int(place) for place in np.flatnonzero(np.isnan(heights)))}
    for stretch in np.array_split(np.arange(count), _MOST_POINTS // 2):
        if not np.isnan(heights[stretch]).all():
            keep |= {int(stretch[np.nanargmin(heights[stretch])]), int(stretch[np.nanargmax(heights[stretch])])}
    places = sorted(keep)
    x, y = tuple(line.x[place] for place in places), tuple(line.y[place] for place in places)
    return replace(line, x=x, y=y)


def _table(title: str, axis: str, unit: Unit, lines: Sequence[Line], *, whole: bool) -> Grid:
    """Every place on the axis with the heights there; of many places some, those of points first."""
    raw = [_raw(place, lines) for place, line in enumerate(lines) if not line.faint]
    heights = [dict(zip(line.x, line.y, strict=True)) for line in raw]
    places = sorted({x for line in raw for x in line.x})
    caption = title
    if len(places) > _MOST_ROWS:
        rare = sorted({x for line in raw if line.points for x in line.x})
        chosen = {*_spread(rare, _MOST_ROWS // 2), *_spread(places, _MOST_ROWS // 2)}
        caption += f": {len(chosen)} of {len(places)} rows; metrics.jsonl has all"
        places = sorted(chosen)
    rows = tuple(
        (_place(x, whole=whole), *(shown(known[x], unit) if x in known else _NONE for known in heights)) for x in places
    )
    rows = tuple(row for row in rows if set(row[1:]) != {_NONE})
    return Grid(caption, (axis, *(line.label for line in raw)), rows)


def _raw(place: int, lines: Sequence[Line]) -> Line:
    """A line, or what it is the smoothed form of; under its name."""
    line, following = lines[place], lines[place + 1 : place + 2]
    if following and following[0].faint:
        it = following[0]
        return replace(it, label=line.label.replace(", smoothed", ""), faint=False)
    return line


def _spread(values: Sequence[float], count: int) -> list[float]:
    if len(values) <= count:
        return list(values)
    return [values[round(place)] for place in np.linspace(0, len(values) - 1, count)]


def finite(values: Iterable[float]) -> tuple[float | None, ...]:
    """Heights of a line: what is no finite number becomes a gap."""
    return tuple(value if math.isfinite(value) else None for value in values)


# --- of reports --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    """What curves of a run are drawn over: ``key`` is "steps", "tokens" (trained ones) or "time"."""

    key: str
    label: str
    unit_s: float

    def place(self, run: RunHistory) -> Callable[[float, float], float]:
        """The place of a step, given the seconds until then."""
        if self.key == "steps":
            return lambda step, seconds: step
        if self.key == "time":
            return lambda step, seconds: seconds / self.unit_s
        steps = [0.0, *(float(one.step) for one in run.train)]
        tokens = [0.0, *(float(one.trained_tokens) for one in run.train)]
        return lambda step, seconds: float(np.interp(step, steps, tokens))


def loss_charts(labels: Sequence[str], runs: Sequence[RunHistory]) -> Iterator[Chart]:
    """Training and validation loss over steps, over tokens and over time."""
    seconds = [one.elapsed_s for run in runs for one in (*run.train, *run.valid) if math.isfinite(one.elapsed_s)]
    unit, unit_s = time_unit(max(seconds, default=0.0))
    axes = {"steps": "step", "tokens": "trained tokens", "time": f"training time ({unit})"}
    if not all(run.train[-1].trained_tokens > 0 for run in runs if run.train):
        del axes["tokens"]  # a program of one's own need not count them
    for axis in (_Axis(key, label, unit_s) for key, label in axes.items()):
        lines: list[Line] = []
        marks: list[tuple[float, int]] = []
        stars: list[tuple[float, float, int]] = []
        crosses: list[tuple[float, int]] = []
        for colour, (label, run) in enumerate(zip(labels, runs, strict=True)):
            place = axis.place(run)
            lines += _loss_lines(label, colour, run, axis, line_width(colour, len(runs)))
            marks += [(place(step, seconds), colour) for step, seconds in run.restarts]
            known = sorted((float(one.step), one.elapsed_s) for one in (*run.train, *run.valid)) or [(0.0, 0.0)]
            steps, times = zip(*known, strict=True)
            crosses += [(place(it.step, float(np.interp(it.step, steps, times))), colour) for it in run.skipped]
            if losses := [one for one in run.valid if math.isfinite(one.loss)]:
                best = min(losses, key=lambda one: one.loss)
                stars.append((place(best.step, best.elapsed_s), best.loss, colour))
        names, whole = (axis.label, "loss per token (lower is better)"), axis.key != "time"
        title = f"Loss over {axis.key}"
        if made := chart(f"loss-{axis.key}", title, names, "loss", lines, marks=marks, stars=stars, whole=whole):
            yield without_heights(replace(made, crosses=_there(crosses)), 2.5)


def without_heights(drawn: Chart, far: float) -> Chart:
    """Without the heights of a run that was thrown off, beside which the others would lie flat; the table has them."""
    runs: dict[int, list[list[float]]] = {}
    for line in drawn.lines:
        runs.setdefault(line.colour, []).append([y for y in line.y if y is not None])
    top = axis_top(list(runs.values()), far)
    if top is None:
        return drawn
    told = f"The axis is cut off at {shown(top, drawn.unit)}; what is above stands in the table. {drawn.described}"
    return replace(drawn, top=top, y_label=f"{drawn.y_label}{cut_off(top)}", described=told)


def line_width(place: int, count: int) -> float:
    """The earlier of several runs wider, below the later ones, so that equal curves stay visible."""
    return round(2 + min(2.2, 4 / count) * (count - 1 - place), 2)


def _loss_lines(label: str, colour: int, run: RunHistory, axis: _Axis, width: float) -> Iterator[Line]:
    place = axis.place(run)
    x = tuple(place(one.step, one.elapsed_s) for one in run.train)
    if axis.key == "tokens":
        x = tuple(float(one.trained_tokens) for one in run.train)
    losses = [one.loss for one in run.train]
    y = finite(losses)
    if len(y) >= _SMOOTH_FROM and None not in y:
        smoothed = tuple(map(float, smooth(np.array(losses))))
        yield Line(f"{label}: training, smoothed", colour, x, smoothed, width=width)
        yield Line(f"{label}: training", colour, x, y, faint=True, width=1.0)
    else:
        yield Line(f"{label}: training", colour, x, y, width=width)
    x = tuple(place(one.step, one.elapsed_s) for one in run.valid)
    y = finite([one.loss for one in run.valid])
    yield Line(f"{label}: validation", colour, x, y, dashed=True, points=True, width=width)


def axis_top(runs: Sequence[Sequence[Sequence[float]]], far: float = 2.5) -> float | None:
    """Where to cut a vertical axis from 0 off, so that a run that was thrown off leaves the others their height.

    At least one run is below it as a whole, and of each of the others that comes near twice what it began with.

    Args:
        runs: the finite heights of the lines of each.
        far: times the top the highest must be; ``None`` is returned if it is not, or there is one run only.
    """
    known = [lines for run in runs if (lines := [line for line in run if len(line)])]
    if len(known) < 2 or min(min(line) for lines in known for line in lines) < 0:
        return None
    highest = [max(map(max, lines)) for lines in known]
    base = min(highest)
    near = [place for place, lines in enumerate(known) if min(map(min, lines)) <= 4 * base]
    starts = [min(line[0] for line in lines) for lines in known]
    top = max(min(highest[place], max(2 * starts[place], base)) for place in near) if base > 0 else 0.0
    return 1.08 * top if 0 < far * top < max(highest) else None


def cut_off(top: float | None) -> str:
    """What the name of such an axis has to say."""
    return "" if top is None else f"; cut off at {top:.3g}"


def smooth(values: Floats) -> Floats:
    """A centred moving mean over about a tenth of the points; the same shape as ``values``.

    At the start, where losses fall fast, the window shrinks on both sides, so that the curve starts where the
    values do; at the end only its right side is cut off, so that the last value does not bend the curve.
    """
    count = len(values)
    index = np.arange(count)
    half = np.minimum(count // _SMOOTH_FROM, index)
    first, behind = index - half, np.minimum(index + half + 1, count)
    total = np.concatenate(([0.0], np.cumsum(values)))
    return (total[behind] - total[first]) / (behind - first)


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit in which times up to ``longest_s`` are told, and its seconds."""
    if longest_s < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest_s < 3 * 3600 else ("hours", 3600.0)


# --- of samples --------------------------------------------------------------------------------------


def process_memory(key: str, label: str, samples: Sequence[Sample]) -> Chart | None:
    """The proportional memory of each process of a run over its time, and MLX's of each rank."""
    if not samples:
        return None
    began = samples[0].time
    unit, unit_s = time_unit(samples[-1].time - began)
    lines: list[Line] = []
    directors = 0
    for group in groups_of(samples):
        x, y = _lived([(one.pid, (one.time - began) / unit_s, one.pss_bytes) for one in group])
        if group[0].role != "rank":
            lines.append(Line(f"{group[0].name} (directs the ranks)", directors, x, y, kind="director"))
            directors += 1
            continue
        colour = group[0].rank or 0
        lines.append(Line(group[0].name, colour, x, y, kind="rank"))
        known = [(one.pid, (one.time - began) / unit_s, one.mlx_active_bytes) for one in group]
        x, y = _lived([(pid, x, held) for pid, x, held in known if held is not None])
        lines.append(Line(f"{group[0].name}: MLX's arrays", colour, x, y, dashed=True, kind="rank"))
    axes = (f"time since the start ({unit})", "memory")
    return chart(key, f"Memory of the processes of {label}", axes, "bytes", lines)


def _lived(points: Sequence[tuple[int, float, int]]) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Places and heights of (process, place, height), with a gap from one process to the next of the same rank."""
    x: list[float] = []
    y: list[float | None] = []
    for place, (pid, now, held) in enumerate(points):
        before = points[place - 1]
        if place and before[0] != pid:
            x.append((before[1] + now) / 2)
            y.append(None)
        x.append(now)
        y.append(float(held))
    return tuple(x), tuple(y)


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each process of a run, the ranks first."""
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key_of(sample), []).append(sample)
    order = {"rank": 0, "orchestrator": 1, "agent": 2}
    return sorted(groups.values(), key=lambda group: (order[group[0].role], group[0].rank or 0, group[0].host))
