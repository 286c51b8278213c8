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
from allhands.observe.metrics import RunHistory, TrainReport, ValidReport
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
    x, y = zip(*kept, strict=True) if kept else ((), ())
    return replace(line, x=x, y=y, points=line.points or len(y) - y.count(None) == 1)


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
    heights = np.array(line.y, dtype=np.float64)
    keep = {0, count - 1, *np.flatnonzero(np.isnan(heights)).tolist()}
    for stretch in np.array_split(np.arange(count), _MOST_POINTS // 2):
        if not np.isnan(heights[stretch]).all():
            keep |= {int(stretch[find(heights[stretch])]) for find in (np.nanargmin, np.nanargmax)}
    places = sorted(keep)
    return replace(line, x=tuple(line.x[at] for at in places), y=tuple(line.y[at] for at in places))


def _table(title: str, axis: str, unit: Unit, lines: Sequence[Line], *, whole: bool) -> Grid:
    """Every place on the axis with the heights there; of many places some, those of points first."""
    raw: list[Line] = []  # a line, or what it is the smoothed form of, under its name
    for line in lines:
        if line.faint:
            raw[-1] = replace(line, label=raw[-1].label.replace(", smoothed", ""))
        else:
            raw.append(line)
    heights = [dict(zip(line.x, line.y, strict=True)) for line in raw]
    places = sorted({x for line in raw for x in line.x})
    caption = title
    if len(places) > _MOST_ROWS:
        rare = sorted({x for line in raw if line.points for x in line.x})
        count = len(places)
        places = sorted({some[int(at)] for some in (rare, places) if some for at in _spread(len(some))})
        caption += f": {len(places)} of {count} rows; metrics.jsonl has all"
    rows = [(_place(x, whole=whole), *(shown(y[x], unit) if x in y else _NONE for y in heights)) for x in places]
    head = (axis, *(line.label for line in raw))
    return Grid(caption, head, tuple(row for row in rows if set(row[1:]) != {_NONE}))


def _spread(count: int) -> Floats:
    return np.linspace(0, count - 1, min(count, _MOST_ROWS // 2)).round()


def line_of(label: str, colour: int, pairs: Iterable[tuple[float, float]], **look: Any) -> Line:
    """A line through (place, height): a height that is no finite number becomes a gap."""
    x, y = zip(*pairs, strict=True) if (pairs := list(pairs)) else ((), ())
    heights = tuple(float(value) if math.isfinite(value) else None for value in y)
    return Line(label, colour, tuple(map(float, x)), heights, **look)


# --- of reports --------------------------------------------------------------------------------------


def loss_charts(labels: Sequence[str], runs: Sequence[RunHistory]) -> Iterator[Chart]:
    """Training and validation loss over steps, over tokens and over time."""
    seconds = [one.elapsed_s for run in runs for one in (*run.train, *run.valid) if math.isfinite(one.elapsed_s)]
    unit, unit_s = time_unit(max(seconds, default=0.0))
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
            known = sorted((float(one.step), one.elapsed_s) for one in (*run.train, *run.valid)) or [(0.0, 0.0)]
            steps, times = zip(*known, strict=True)
            crosses += [(place(it.step, float(np.interp(it.step, steps, times))), colour) for it in run.skipped]
            if losses := [one for one in run.valid if math.isfinite(one.loss)]:
                best = min(losses, key=lambda one: one.loss)
                stars.append((place(best.step, best.elapsed_s), best.loss, colour))
        names, whole = (x_label, "loss per token (lower is better)"), key != "time"
        if made := chart(
            f"loss-{key}", f"Loss over {key}", names, "loss", lines, marks=marks, stars=stars, whole=whole
        ):
            yield without_heights(replace(made, crosses=_there(crosses)), 2.5)


def _placing(axis: str, unit_s: float, run: RunHistory) -> Callable[[float, float], float]:
    """The place on the axis of "steps", "tokens" (trained ones) or "time" of a step, given the seconds until then."""
    if axis == "steps":
        return lambda step, seconds: step
    if axis == "time":
        return lambda step, seconds: seconds / unit_s
    steps = [0.0, *(float(one.step) for one in run.train)]
    tokens = [0.0, *(float(one.trained_tokens) for one in run.train)]
    return lambda step, seconds: float(np.interp(step, steps, tokens))


def _loss_lines(
    label: str, colour: int, run: RunHistory, place: Callable[[float, float], float], width: float
) -> Iterator[Line]:
    def points(reports: Sequence[TrainReport | ValidReport]) -> list[tuple[float, float]]:
        return [(place(one.step, one.elapsed_s), one.loss) for one in reports]

    plain = line_of(f"{label}: training", colour, points(run.train), width=width)
    if len(plain.y) >= _SMOOTH_FROM and None not in plain.y:
        smoothed = tuple(map(float, smooth(np.array(plain.y, dtype=np.float64))))
        yield replace(plain, label=f"{label}: training, smoothed", y=smoothed)
        plain = replace(plain, faint=True, width=1.0)
    yield plain
    yield line_of(f"{label}: validation", colour, points(run.valid), dashed=True, points=True, width=width)


def line_width(place: int, count: int) -> float:
    """The earlier of several runs wider, below the later ones, so that equal curves stay visible."""
    return round(2 + min(2.2, 4 / count) * (count - 1 - place), 2)


def without_heights(drawn: Chart, far: float) -> Chart:
    """Without the heights of a run that was thrown off, beside which the others would lie flat; the table has them.

    At least one run is below the top as a whole, and of each of the others that comes near twice what it began with.

    Args:
        far: times the top the highest must be; else, or of one run only, the chart stays as it is.
    """
    runs: dict[int, list[list[float]]] = {}
    for line in drawn.lines:
        if heights := [y for y in line.y if y is not None]:
            runs.setdefault(line.colour, []).append(heights)
    highest = [max(map(max, lines)) for lines in runs.values()]
    lowest = [min(map(min, lines)) for lines in runs.values()]
    base = min(highest, default=0.0)
    if len(runs) < 2 or min(lowest) < 0 or base <= 0:
        return drawn
    starts = [max(2 * min(line[0] for line in lines), base) for lines in runs.values()]
    near = zip(highest, starts, lowest, strict=True)
    top = max(min(high, start) for high, start, low in near if low <= 4 * base)
    if not 0 < far * top < max(highest):
        return drawn
    top *= 1.08
    told = f"The axis is cut off at {shown(top, drawn.unit)}; what is above stands in the table. {drawn.described}"
    return replace(drawn, top=top, y_label=f"{drawn.y_label}; cut off at {top:.3g}", described=told)


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

    def line(name: str, colour: int, group: Sequence[Sample], held: str, **look: Any) -> Line:
        known = [(one.pid, (one.time - began) / unit_s, getattr(one, held)) for one in group]
        return line_of(name, colour, _lived([it for it in known if it[2] is not None]), **look)

    lines: list[Line] = []
    groups = groups_of(samples)
    ranks = [group for group in groups if group[0].role == "rank"]
    for group in ranks:
        name, colour = group[0].name, group[0].rank or 0
        lines.append(line(name, colour, group, "pss_bytes", kind="rank"))
        lines.append(line(f"{name}: MLX's arrays", colour, group, "mlx_active_bytes", dashed=True, kind="rank"))
    for place, group in enumerate(groups[len(ranks) :]):
        lines.append(line(f"{group[0].name} (directs the ranks)", place, group, "pss_bytes", kind="director"))
    axes = (f"time since the start ({unit})", "memory")
    return chart(key, f"Memory of the processes of {label}", axes, "bytes", lines)


def _lived(points: Sequence[tuple[int, float, int]]) -> Iterator[tuple[float, float]]:
    """(place, height) of (process, place, height), with a gap from one process to the next of the same rank."""
    before = points[0] if points else (0, 0.0, 0)
    for pid, now, held in points:
        if pid != before[0]:
            yield (before[1] + now) / 2, math.nan
        yield now, held
        before = pid, now, held


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each process of a run, the ranks first."""
    groups: dict[Any, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key_of(sample), []).append(sample)
    order = {"rank": 0, "orchestrator": 1, "agent": 2}
    return sorted(groups.values(), key=lambda group: (order[group[0].role], group[0].rank or 0, group[0].host))
