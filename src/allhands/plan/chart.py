"""The chart of questions as a picture, with the path that was taken, above it the times that it is about.

It is narrow and its letters are large, so that it can be read on a telephone.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from allhands.io.formatting import format_duration
from allhands.io.pictures import GREY, picture
from allhands.observe.charts import time_unit
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

# In inches: the picture, its margin, the middles and widths of its two columns, a line of text, and gaps.
_WIDTH, _MARGIN = 6.2, 0.15
_LEFT, _LEFT_WIDE = 2.2, 3.2
_RIGHT, _RIGHT_WIDE = 5.15, 1.8
_LINE, _PAD, _GAP = 0.19, 0.11, 0.34
_FONT, _DPI = 10.5, 150
_MOST_BARS = 8
_BAR = 0.34


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
    """A question, or an outcome beside or below the question that leads to it. ``x`` and ``y`` are its middle."""

    x: float
    y: float
    wide: float
    lines: Sequence[str]
    taken: bool
    is_outcome: bool

    @property
    def high(self) -> float:
        return _high(self.lines)


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
    out = out if out.suffix or not out.name else out.with_suffix(".png")
    advice, title = outlook.advice, outlook.advice.title
    heading = textwrap.wrap(f"Is distributing worth it? {title[0].upper()}{title[1:]}", 50)
    told = [line for text in told_of(outlook) for line in textwrap.wrap(text, 76) or [""]]
    bars = bars_of(outlook)
    top = _MARGIN + 0.26 * len(heading)
    below = top + _LINE * len(told) + _PAD
    panel = 0.0 if len(bars) < 2 else _BAR * len(bars) + 0.75
    boxes, high = _placed(advice, below + panel + _PAD)
    with picture(out, (_WIDTH, high), dpi=_DPI) as figure:
        figure.set_layout_engine("none")
        axes: Axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set(xlim=(0.0, _WIDTH), ylim=(high, 0.0))
        axes.text(_MARGIN, _MARGIN, "\n".join(heading), fontsize=13, fontweight="bold", va="top")
        axes.text(_MARGIN, top, "\n".join(told), fontsize=_FONT - 0.5, va="top", color=GREY)
        if panel:
            left = 1.9 / _WIDTH
            place = (left, 1.0 - (below + panel - 0.55) / high, 0.94 - left, (panel - 0.65) / high)
            _draw_bars(figure.add_axes(place), bars)
        for box in boxes.values():
            _draw_box(axes, box)
        arrows = arrows_of(advice)
        doubled = {(arrow.start, arrow.end) for arrow in arrows if arrow.beside}
        for arrow in arrows:
            # Of two between the same boxes one is to the left, one to the right.
            side = 1 if arrow.beside else -1 if (arrow.start, arrow.end) in doubled else 0
            end = boxes.get((arrow.end, "")) or boxes[arrow.end, arrow.start]
            _draw_arrow(axes, boxes[arrow.start, ""], end, arrow, side)
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


def _draw_bars(axes: Axes, bars: Sequence[tuple[str, float, bool]]) -> None:
    most = max(seconds for _, seconds, _ in bars)
    unit, size = time_unit(most)
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
        look: dict[str, Any] = {"va": "center", "fontsize": _FONT - 1, "fontweight": "bold" if taken else "normal"}
        axes.text(seconds / size, place, f" {format_duration(seconds)}", **look)


# --- questions ----------------------------------------------------------------------------------------


def _high(lines: Sequence[str]) -> float:
    return len(lines) * _LINE + 2 * _PAD


def _asked(advice: Advice, text: str) -> tuple[list[str], bool]:
    """The lines of a question's box, with the answer where it was asked, and whether it was."""
    lines = textwrap.wrap(text, 40)
    answers = [one for one in advice.path if one.text == text]
    for one in answers:
        lines += textwrap.wrap(f"{one.answer}: {one.why}", 40)
    return lines, bool(answers)


def _ended(advice: Advice, name: Outcome, question: str, wide: int) -> tuple[list[str], bool]:
    """The lines of an outcome's box: where the path ends, the advice itself; and whether it ends there."""
    ends = bool(advice.path) and (advice.outcome, advice.path[-1].text) == (name, question)
    return (textwrap.wrap(advice.title, wide - 3) if ends else textwrap.wrap(_OUTCOMES[name], wide)), ends


def _placed(advice: Advice, y: float) -> tuple[dict[tuple[str, str], _Box], float]:
    """Where each box is: questions as ``(question, "")``, outcomes with the question that leads to them; the end."""
    boxes: dict[tuple[str, str], _Box] = {}
    for question in _QUESTIONS:
        asked = _asked(advice, question)
        ends = {end for start, end, _ in _ARROWS if start == question} - {"faster link"}
        beside = {name: _ended(advice, name, question, 21) for name in _OUTCOMES if name in ends}
        height = sum(_high(lines) + _PAD for lines, _ in beside.values()) - _PAD
        row = max(_high(asked[0]), height)
        boxes[question, ""] = _Box(_LEFT, y + row / 2, _LEFT_WIDE, *asked, is_outcome=False)
        below = y + (row - height) / 2
        for name, (lines, taken) in beside.items():
            middle = below + _high(lines) / 2
            boxes[name, question] = _Box(_RIGHT, middle, _RIGHT_WIDE, lines, taken, is_outcome=True)
            below += _high(lines) + _PAD
        y += row + _GAP
    last = _ended(advice, "faster link", chart.LARGER, 40)
    boxes["faster link", chart.LARGER] = _Box(_LEFT, y + _high(last[0]) / 2, _LEFT_WIDE, *last, is_outcome=True)
    return boxes, y + _high(last[0]) + _MARGIN


def _draw_box(axes: Axes, box: _Box) -> None:
    look: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.12" if box.is_outcome else "square,pad=0",
        "facecolor": _FILLED if box.taken else "white",
        "edgecolor": _TAKEN if box.taken else _FADED,
        "linewidth": 2.2 if box.taken else 1.0,
    }
    corner = (box.x - box.wide / 2, box.y - box.high / 2)
    axes.add_patch(FancyBboxPatch(corner, box.wide, box.high, zorder=3, **look))
    weight = "bold" if box.taken and box.is_outcome else "normal"
    words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": _FONT, "weight": weight}
    axes.text(box.x, box.y, "\n".join(box.lines), color="black" if box.taken else GREY, zorder=4, **words)


def _draw_arrow(axes: Axes, start: _Box, end: _Box, arrow: Arrow, side: int) -> None:
    """From the edge of one box to that of the other."""
    if end.x > start.x:  # to the right, at the height of an outcome
        y = min(max(end.y, start.y - start.high / 2 + 0.08), start.y + start.high / 2 - 0.08)
        points = [(start.x + start.wide / 2, y), (end.x - end.wide / 2, end.y)]
        word = points[0][0] / 2 + points[1][0] / 2 - 0.03, (y + end.y) / 2 - 0.03, "center", "bottom"
    elif end.y - start.y > start.high / 2 + end.high / 2 + 3 * _GAP:  # past others, along the margin
        out = _MARGIN + (0.12 if arrow.start == chart.FITS else 0.3)
        left = start.x - start.wide / 2
        points = [(left, start.y), (out, start.y), (out, end.y), (left, end.y)]
        word = out + 0.05, start.y + start.high / 2 + 0.05, "left", "top"
    else:
        x = start.x + 0.5 * side
        points = [(x, start.y + start.high / 2), (x, end.y - end.high / 2)]
        word = x + 0.08, (points[0][1] + points[1][1]) / 2, "left", "center"
    look: dict[str, Any] = {"color": _TAKEN if arrow.taken else _FADED, "lw": 2.2 if arrow.taken else 1.0}
    order = 6 if arrow.taken else 5
    axes.plot(*zip(*points[:-1], strict=True), zorder=order, solid_capstyle="butt", **look)
    head = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, **look}
    axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=head, zorder=order)
    x, y, across, up = word
    colour = _TAKEN if arrow.taken else GREY
    axes.text(x, y, arrow.word, fontsize=_FONT - 0.5, color=colour, ha=across, va=up, zorder=7)
