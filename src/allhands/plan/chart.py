"""The chart of questions as a picture, with the path that was taken, above it the times that it is about.

It is narrow and its letters are large, so that it can be read on a telephone.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from allhands.io.files import make_directory
from allhands.io.formatting import format_duration
from allhands.io.pictures import GREY, STYLE, picture_suffix, write_picture
from allhands.plan import advice as chart
from allhands.plan.advice import Advice, Outcome
from allhands.plan.computers import names
from allhands.plan.outlook import Outlook

_TAKEN, _FADED, _FILLED = "#0072B2", "#9A9A9A", "#E8F2FA"
_QUESTIONS = (
    *(chart.AGAIN, chart.LONG, chart.FITS, chart.SMALLER, chart.DIVIDED, chart.STAGES),
    *(chart.MORE, chart.PAYS, chart.FAST, chart.LARGER),
)
_OUTCOMES: dict[Outcome, str] = {
    "one machine": "stay on one machine",
    "data parallel": "plain data parallel",
    "accumulate": "larger batches, or accumulate",
    "faster link": "one machine until the link is faster",
    "smaller": "one machine, with flags that save memory",
    "divide the optimizer": "data parallel, each with a part",
    "pipeline": "a pipeline, each with some blocks",
    "framework": "a framework that divides the model itself",
}
_ARROWS: tuple[tuple[str, str, str], ...] = (
    (chart.AGAIN, chart.LONG, "yes"),
    (chart.AGAIN, "one machine", "no"),
    (chart.LONG, chart.FITS, "yes"),
    (chart.LONG, "one machine", "no"),
    (chart.FITS, chart.MORE, "yes"),
    (chart.FITS, chart.SMALLER, "no"),
    (chart.SMALLER, "smaller", "yes"),
    (chart.SMALLER, chart.DIVIDED, "no"),
    (chart.DIVIDED, "divide the optimizer", "yes"),
    (chart.DIVIDED, chart.STAGES, "no"),
    (chart.STAGES, "pipeline", "yes"),
    (chart.STAGES, "framework", "no"),
    (chart.MORE, chart.PAYS, "yes"),
    (chart.MORE, "one machine", "no"),
    (chart.PAYS, "data parallel", "yes"),
    (chart.PAYS, chart.FAST, "no"),
    (chart.FAST, "one machine", "yes"),
    (chart.FAST, chart.LARGER, "no"),
    (chart.LARGER, "accumulate", "yes"),
    (chart.LARGER, "faster link", "no"),
)

# In inches: the picture, its two columns, and what lies between.
_WIDTH, _MARGIN = 6.2, 0.15
_LEFT, _LEFT_WIDE = 2.2, 3.2
_RIGHT, _RIGHT_WIDE = 5.15, 1.8
_LINE, _PAD, _GAP = 0.19, 0.11, 0.34
_FONT, _DPI = 10.5, 150
_MOST_BARS = 8
_BAR = 0.34
# Units of an axis of times, and from how many seconds on each is taken.
_UNITS = (("days", 86_400.0, 172_800.0), ("hours", 3600.0, 7200.0), ("minutes", 60.0, 120.0), ("seconds", 1.0, 0.0))


@dataclass(frozen=True)
class Arrow:
    """From a question to what follows on an answer; ``beside`` another one between the same two."""

    start: str
    end: str
    word: str
    taken: bool
    beside: bool = False


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    wide: float
    high: float


def arrows_of(advice: Advice) -> list[Arrow]:
    """The arrows of the chart: each answer's usual one, and those of exceptions that were taken."""
    stations = [question.text for question in advice.path] + [advice.outcome]
    taken = {
        (start, end, question.answer)
        for question, (start, end) in zip(advice.path, itertools.pairwise(stations), strict=True)
    }
    usual = [Arrow(*each, taken=each in taken) for each in _ARROWS]
    pairs = {(start, end) for start, end, _ in _ARROWS}
    others = [each for each in taken if each not in _ARROWS]
    return usual + [Arrow(*each, taken=True, beside=each[:2] in pairs) for each in sorted(others)]


def draw_chart(outlook: Outlook, out: Path) -> Path:
    """Write the picture; its path.

    Raises:
        ConfigError: the suffix of ``out`` is that of no picture.
        StorageError: it cannot be written.
    """
    suffix = picture_suffix(out)
    out = out if out.suffix else out.with_suffix(suffix)
    advice, title = outlook.advice, outlook.advice.title
    heading = _lines(f"Is distributing worth it? {title[0].upper()}{title[1:]}", 50)
    told = [line for text in told_of(outlook) for line in _lines(text, 76)]
    bars = bars_of(outlook)
    top = _MARGIN + 0.26 * len(heading) + _LINE * len(told) + _PAD
    panel = 0.0 if len(bars) < 2 else _BAR * len(bars) + 0.75
    boxes, high = _placed(advice, top + panel + _PAD)
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(_WIDTH, high), dpi=_DPI)
        FigureCanvasAgg(figure)
        axes: Axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0.0, _WIDTH)
        axes.set_ylim(high, 0.0)
        axes.text(_MARGIN, _MARGIN, "\n".join(heading), fontsize=13, fontweight="bold", va="top")
        y = _MARGIN + 0.26 * len(heading)
        axes.text(_MARGIN, y, "\n".join(told), fontsize=_FONT - 0.5, va="top", color=GREY)
        if panel:
            _draw_bars(figure, bars, top, panel, high)
        _draw(axes, advice, boxes)
        make_directory(out.parent)
        write_picture(figure, out, suffix)
    return out


def told_of(outlook: Outlook) -> list[str]:
    """What the picture is about: the training, the computers, and the link between them."""
    job = outlook.job
    if job.together:
        computers = f"{outlook.lines[-1].machines} processes of {job.computers[0].name}"
    else:
        computers = names(job.computers)
        if job.imagined:
            computers += f"; up to {outlook.lines[-1].machines} of it are imagined"
    link = "none: one computer"
    if job.link is not None:
        link = f"{getattr(job.link, 'name', '')}, {getattr(job.link, 'source', '')}"
    told = [*([f"Training: {job.about}"] if job.about else []), f"Computers: {computers}", f"Link: {link}"]
    if outlook.advised > 1 and len({each.name for each in job.computers}) > 1:
        told.append(f"Advised: {outlook.line(outlook.advised).computers}")
    return [*told, *([f"Not to be relied on: {job.doubt}"] if job.doubt else [])]


# --- times --------------------------------------------------------------------------------------------


def bars_of(outlook: Outlook) -> list[tuple[str, float, bool]]:
    """Name, seconds of the whole training, and whether it is what is advised."""
    job = outlook.job
    one, several = ("process", "processes") if job.together else ("machine", "machines")
    several_advised = outlook.advised > 1
    decided = not job.doubt and outlook.advice.outcome != "framework"
    found: list[tuple[str, float, bool]] = []
    if job.whole_s is not None:
        found.append((f"1 {one}, all cores", outlook.alone_s, decided and not several_advised))
    chosen = [line.machines for line in outlook.lines]
    if len(chosen) > _MOST_BARS:
        powers = [number for number in chosen if number & (number - 1) == 0 or number == outlook.advised]
        chosen = powers[-_MOST_BARS + 1 :]
        chosen = sorted({1, *chosen, outlook.advised})
    for number in chosen:
        alone = number == 1
        if alone and job.whole_s is not None:
            name, taken = f"1 {one}, a share", False
        else:
            name, taken = f"{number} {one if alone else several}", decided and number == outlook.advised
        line = outlook.line(number)
        large = line.fits is False and not taken
        found.append((f"{name}\n(does not fit)" if large else name, line.training_s, taken))
    return found


def _draw_bars(figure: Figure, bars: Sequence[tuple[str, float, bool]], top: float, panel: float, high: float) -> None:
    most = max(seconds for _, seconds, _ in bars)
    unit, size, _ = next(each for each in _UNITS if most >= each[2])
    left = 1.9 / _WIDTH
    axes: Axes = figure.add_axes((left, 1.0 - (top + panel - 0.55) / high, 0.94 - left, (panel - 0.65) / high))
    places = range(len(bars))
    colours = [_TAKEN if taken else "#BDBDBD" for _, _, taken in bars]
    axes.barh(places, [seconds / size for _, seconds, _ in bars], color=colours, height=0.7)
    axes.set_yticks(places, [name for name, _, _ in bars], fontsize=_FONT - 1)
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.25 * most / size)
    axes.tick_params(axis="x", labelsize=_FONT - 1)
    axes.tick_params(axis="y", length=0, colors="black")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"time of the whole training in {unit}", fontsize=_FONT - 0.5)
    for place, (_, seconds, taken) in enumerate(bars):
        weight = "bold" if taken else "normal"
        told = format_duration(seconds)
        axes.text(seconds / size, place, f" {told}", va="center", fontsize=_FONT - 1, fontweight=weight)


# --- questions ----------------------------------------------------------------------------------------


def _lines(text: str, wide: int) -> list[str]:
    return textwrap.wrap(text, wide) or [""]


def _texts(advice: Advice) -> dict[str, list[str]]:
    """The lines of each question's box."""
    asked = {question.text: question for question in advice.path}
    found: dict[str, list[str]] = {}
    for text in _QUESTIONS:
        lines = _lines(text, 40)
        if text in asked:
            lines += _lines(f"{asked[text].answer}: {asked[text].why}", 40)
        found[text] = lines
    return found


def _exits(question: str) -> list[Outcome]:
    """The outcomes beside a question; below it is the one after the last."""
    ends = [end for start, end, _ in _ARROWS if start == question]
    return [name for name in _OUTCOMES if name in ends and name != "faster link"]


def _outcome(advice: Advice, name: Outcome, question: str) -> list[str]:
    """The lines of an outcome's box beside or below a question: where the path ends, the advice itself."""
    wide = 40 if name == "faster link" else 21
    return _lines(advice.title, wide - 3) if _ends(advice, name, question) else _lines(_OUTCOMES[name], wide)


def _ends(advice: Advice, name: str, question: str) -> bool:
    """Whether the path ends in this outcome, coming from that question."""
    return bool(advice.path) and name == advice.outcome and question == advice.path[-1].text


def _high(lines: int) -> float:
    return lines * _LINE + 2 * _PAD


def _placed(advice: Advice, y: float) -> tuple[dict[tuple[str, str], _Box], float]:
    """Where each box is: questions as ``(question, "")``, outcomes with the question that leads to them; the end."""
    boxes: dict[tuple[str, str], _Box] = {}
    texts = _texts(advice)
    for text in _QUESTIONS:
        rights = _exits(text)
        heights = [_high(len(_outcome(advice, name, text))) for name in rights]
        mine = _high(len(texts[text]))
        row = max(mine, sum(heights) + _PAD * (len(heights) - 1))
        boxes[text, ""] = _Box(_LEFT, y + row / 2, _LEFT_WIDE, mine)
        below = y + (row - sum(heights) - _PAD * (len(heights) - 1)) / 2
        for name, high in zip(rights, heights, strict=True):
            boxes[name, text] = _Box(_RIGHT, below + high / 2, _RIGHT_WIDE, high)
            below += high + _PAD
        y += row + _GAP
    last = _high(len(_outcome(advice, "faster link", chart.LARGER)))
    boxes["faster link", chart.LARGER] = _Box(_LEFT, y + last / 2, _LEFT_WIDE, last)
    return boxes, y + last + _MARGIN


def _draw(axes: Axes, advice: Advice, boxes: dict[tuple[str, str], _Box]) -> None:
    asked = {question.text for question in advice.path}
    texts = _texts(advice)
    for (name, start), box in boxes.items():
        taken = _ends(advice, name, start) if start else name in asked
        lines = _outcome(advice, cast("Outcome", name), start) if start else texts[name]
        _draw_box(axes, box, lines, taken=taken, rounded=bool(start), bold=not start)
    arrows = arrows_of(advice)
    doubled = {(arrow.start, arrow.end) for arrow in arrows if arrow.beside}
    for arrow in arrows:
        side = 1 if arrow.beside else -1 if (arrow.start, arrow.end) in doubled else 0
        start, end = boxes[arrow.start, ""], boxes.get((arrow.end, "")) or boxes[arrow.end, arrow.start]
        _draw_arrow(axes, start, end, arrow, side)


def _draw_box(axes: Axes, box: _Box, lines: Sequence[str], *, taken: bool, rounded: bool, bold: bool) -> None:
    look: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.12" if rounded else "square,pad=0",
        "facecolor": _FILLED if taken else "white",
        "edgecolor": _TAKEN if taken else _FADED,
        "linewidth": 2.2 if taken else 1.0,
    }
    corner = (box.x - box.wide / 2, box.y - box.high / 2)
    axes.add_patch(FancyBboxPatch(corner, box.wide, box.high, zorder=3, **look))
    weight = "bold" if taken and not bold else "normal"
    colour = "black" if taken else GREY
    axes.text(
        box.x, box.y, "\n".join(lines), ha="center", va="center", fontsize=_FONT, color=colour, zorder=4, weight=weight
    )


def _draw_arrow(axes: Axes, start: _Box, end: _Box, arrow: Arrow, side: int) -> None:
    """From the edge of one box to that of the other.

    Of two between the same boxes one is to the left (``side`` -1), one to the right (1).
    """
    colour = _TAKEN if arrow.taken else _FADED
    wide = 2.2 if arrow.taken else 1.0
    order = 6 if arrow.taken else 5
    points: list[tuple[float, float]]
    if end.x > start.x:  # to the right, at the height of an outcome
        y = min(max(end.y, start.y - start.high / 2 + 0.08), start.y + start.high / 2 - 0.08)
        points = [(start.x + start.wide / 2, y), (end.x - end.wide / 2, end.y)]
        place, aligned = ((points[0][0] + points[1][0]) / 2 - 0.03, (y + end.y) / 2 - 0.03), ("center", "bottom")
    elif end.y - start.y > start.high / 2 + end.high / 2 + 3 * _GAP:  # past others, along the margin
        out = _MARGIN + (0.12 if arrow.start == chart.FITS else 0.3)
        left = start.x - start.wide / 2
        points = [(left, start.y), (out, start.y), (out, end.y), (left, end.y)]
        place, aligned = (out + 0.05, start.y + start.high / 2 + 0.05), ("left", "top")
    else:
        x = start.x + 0.5 * side
        points = [(x, start.y + start.high / 2), (x, end.y - end.high / 2)]
        place, aligned = (x + 0.08, (points[0][1] + points[1][1]) / 2), ("left", "center")
    if len(points) > 2:
        axes.plot(*zip(*points[:-1], strict=True), color=colour, lw=wide, zorder=order, solid_capstyle="butt")
    look = {"arrowstyle": "-|>", "color": colour, "lw": wide, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=look, zorder=order)
    text = GREY if not arrow.taken else _TAKEN
    axes.text(*place, arrow.word, fontsize=_FONT - 0.5, color=text, ha=aligned[0], va=aligned[1], zorder=7)
