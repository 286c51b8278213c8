"""Picture of the chart of questions with the path of an advice, and of the times above it.

The picture is narrow and its letters are large, so that it can be read on a phone.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from allhands.io.formatting import format_duration
from allhands.io.paths import output_file
from allhands.io.pictures import GREY, PICTURES, picture
from allhands.observe.charts import time_unit
from allhands.plan import advice as chart
from allhands.plan.advice import Advice, Outcome
from allhands.plan.computers import names
from allhands.plan.outlook import Outlook

_TAKEN, _FADED, _FILLED = "#0072B2", "#9A9A9A", "#E8F2FA"
_OUTCOMES: dict[Outcome, str] = {
    "one machine": "stay on one machine",
    "data parallel": "plain data parallel",
    "accumulate": "larger batches, or accumulate",
    "faster link": "one machine until the link is faster",
    "smaller": "one machine, with flags that save memory",
    "divide the optimizer": "data parallel, each with a part",
    "pipeline": "a pipeline, each with some blocks",
    "fully sharded": "fully sharded, each with a part of every array",
    "tensor parallel": "matrices divided, each with a part",
    "expert parallel": "experts divided, each with some",
    "context parallel": "rows divided, each with a part",
    "framework": "more computers, or more memory",
}
# The next question or outcome after yes and after no, for the questions from top to bottom.
_FOLLOWS: dict[str, tuple[str, str]] = {
    chart.AGAIN: (chart.LONG, "one machine"),
    chart.LONG: (chart.FITS, "one machine"),
    chart.FITS: (chart.MORE, chart.SMALLER),
    chart.SMALLER: ("smaller", chart.DIVIDED),
    chart.DIVIDED: ("divide the optimizer", chart.STAGES),
    chart.STAGES: ("pipeline", "framework"),
    chart.MORE: (chart.PAYS, "one machine"),
    chart.PAYS: ("data parallel", chart.FAST),
    chart.FAST: ("one machine", chart.LARGER),
    chart.LARGER: ("accumulate", "faster link"),
}
_ARROWS = [
    (question, end, answer)
    for question, ends in _FOLLOWS.items()
    for end, answer in zip(ends, ("yes", "no"), strict=True)
]

# In inches: width and margin of the picture, middles of its columns and of the space between them,
# height of a line of text, and gaps.
_WIDTH, _MARGIN = 6.2, 0.15
_LEFT, _RIGHT, _BETWEEN = 2.2, 5.15, 4.03
_LINE, _PAD, _GAP = 0.19, 0.11, 0.34
_FONT, _DPI = 10.5, 150
_MOST_BARS = 8
_BAR = 0.34


@dataclass(frozen=True)
class Arrow:
    """An arrow from a question to the next question or outcome.

    Attributes:
        start: the question.
        end: the next question, or the outcome.
        word: the answer.
        taken: True if the path has this arrow.
        beside: True if the usual arrow between the same two is drawn, too.
    """

    start: str
    end: str
    word: str
    taken: bool
    beside: bool = False


def arrows_of(advice: Advice) -> list[Arrow]:
    """Return the chart's arrows: the usual arrow of each answer, and unusual ones of the path."""
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
    """Write the picture, and return its path; without a suffix it gets ``.png``.

    Raises:
        ConfigError: the suffix of ``out`` is no picture's.
        StorageError: the picture cannot be written.
    """
    out = output_file(out, PICTURES)
    title = outlook.advice.title
    heading = textwrap.wrap(f"Is distributing worth it? {title[0].upper()}{title[1:]}", 50)
    told = [line for text in told_of(outlook) for line in textwrap.wrap(text, 76) or [""]]
    bars = bars_of(outlook)
    top = _MARGIN + 0.26 * len(heading)
    below = top + _LINE * len(told) + _PAD
    panel = 0.0 if len(bars) < 2 else _BAR * len(bars) + 0.75
    nodes, high = _placed(outlook.advice, below + panel + _PAD)
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
        _draw_path(axes, outlook.advice, nodes)
    return out


def told_of(outlook: Outlook) -> list[str]:
    """Return the lines about the training, the computers, and the link between them."""
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
    told = [
        *([f"Training: {job.about}"] if job.about else []),
        f"Computers: {computers}",
        f"Link: {link}",
    ]
    if outlook.advised > 1 and job.mixed:
        told.append(f"Advised: {outlook.line(outlook.advised).computers}")
    return [*told, *([f"Not reliable: {job.doubt}"] if job.doubt else [])]


# --- times ----------------------------------------------------------------------------------------


def bars_of(outlook: Outlook) -> list[tuple[str, float, bool]]:
    """Return each bar: its name, the seconds of the whole training, and whether it is advised."""
    job = outlook.job
    one, several = ("process", "processes") if job.together else ("machine", "machines")
    several_advised = outlook.advised > 1
    decided = not job.doubt and outlook.advice.outcome != "framework"
    found: list[tuple[str, float, bool]] = []
    if job.whole_s is not None:
        found.append((f"1 {one}, all cores", outlook.alone_s, decided and not several_advised))
    for number in _with_bars(outlook):
        alone = number == 1
        if alone and job.whole_s is not None:
            name, taken = f"1 {one}, a share", False
        else:
            name = f"{number} {one if alone else several}"
            taken = decided and number == outlook.advised
        line = outlook.line(number)
        large = line.fits is False and not taken
        found.append((f"{name}\n(does not fit)" if large else name, line.training_s, taken))
    return found


def _with_bars(outlook: Outlook) -> list[int]:
    """Return the numbers of computers that have a bar: all lines; if there are many, powers of two
    and the advised number.
    """
    numbers = [line.machines for line in outlook.lines]
    if len(numbers) <= _MOST_BARS:
        return numbers
    powers = [
        number for number in numbers if number & (number - 1) == 0 or number == outlook.advised
    ]
    return sorted({1, *powers[-_MOST_BARS + 1 :], outlook.advised})


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
        look: dict[str, Any] = {
            "va": "center",
            "fontsize": _FONT - 1,
            "fontweight": "bold" if taken else "normal",
        }
        axes.text(seconds / size, place, f" {format_duration(seconds)}", **look)


# --- questions ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Node:
    """A question or an outcome in the picture; ``x`` and ``y`` are its middle, in inches."""

    x: float
    y: float
    lines: Sequence[str]
    taken: bool

    @property
    def high(self) -> float:
        return _high(self.lines)


def _high(lines: Sequence[str]) -> float:
    return len(lines) * _LINE + 2 * _PAD


def _asked(advice: Advice, text: str) -> tuple[list[str], bool]:
    """Return the lines of a question, with its answer if it was asked, and whether it was asked."""
    answers = [f"{one.answer}: {one.why}" for one in advice.path if one.text == text]
    return [line for each in (text, *answers) for line in textwrap.wrap(each, 40)], bool(answers)


def _ended(advice: Advice, name: Outcome, question: str, wide: int) -> tuple[list[str], bool]:
    """Return the lines of an outcome, and whether the path ends there; the lines are then the
    advice.
    """
    ends = bool(advice.path) and (advice.outcome, advice.path[-1].text) == (name, question)
    return textwrap.wrap(advice.title if ends else _OUTCOMES[name], wide - 3 * ends), ends


def _placed(advice: Advice, y: float) -> tuple[dict[tuple[str, str], _Node], float]:
    """Place the nodes below ``y``; return them and the height of the picture.

    The key of a question is ``(question, "")``, and that of an outcome has the question that leads
    to it.
    """
    nodes: dict[tuple[str, str], _Node] = {}
    for question in _FOLLOWS:
        asked = _asked(advice, question)
        ends = {arrow.end for arrow in arrows_of(advice) if arrow.start == question} - {
            "faster link"
        }
        beside = {name: _ended(advice, name, question, 21) for name in _OUTCOMES if name in ends}
        height = sum(_high(lines) + _PAD for lines, _ in beside.values()) - _PAD
        row = max(_high(asked[0]), height)
        nodes[question, ""] = _Node(_LEFT, y + row / 2, *asked)
        below = y + (row - height) / 2
        for name, ended in beside.items():
            nodes[name, question] = _Node(_RIGHT, below + _high(ended[0]) / 2, *ended)
            below += _high(ended[0]) + _PAD
        y += row + _GAP
    last = _ended(advice, "faster link", chart.LARGER, 40)
    nodes["faster link", chart.LARGER] = _Node(_LEFT, y + _high(last[0]) / 2, *last)
    return nodes, y + _high(last[0]) + _MARGIN


def _draw_node(axes: Axes, node: _Node, *, is_outcome: bool) -> Any:
    """Draw a node, and return its box."""
    look = (
        {"fc": _FILLED, "ec": _TAKEN, "lw": 2.2}
        if node.taken
        else {"fc": "white", "ec": _FADED, "lw": 1.0}
    )
    style = "round,pad=0.5,rounding_size=0.8" if is_outcome else "square,pad=0.5"
    words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": _FONT, "zorder": 4}
    words |= {
        "color": "black" if node.taken else GREY,
        "weight": "bold" if node.taken and is_outcome else "normal",
    }
    text = axes.text(
        node.x, node.y, "\n".join(node.lines), bbox={"boxstyle": style, **look}, **words
    )
    return text.get_bbox_patch()


def _draw_path(axes: Axes, advice: Advice, nodes: Mapping[tuple[str, str], _Node]) -> None:
    """Draw the nodes, and arrows between their edges."""
    boxes = {
        node: _draw_node(axes, node, is_outcome=bool(question))
        for (_, question), node in nodes.items()
    }
    arrows = arrows_of(advice)
    doubled = {(arrow.start, arrow.end) for arrow in arrows if arrow.beside}
    for arrow in arrows:
        start = nodes[arrow.start, ""]
        end = nodes.get((arrow.end, "")) or nodes[arrow.end, arrow.start]
        colour, width = (_TAKEN, 2.2) if arrow.taken else (_FADED, 1.0)
        look = {
            "arrowstyle": "-|>",
            "color": colour,
            "lw": width,
            "patchA": boxes[start],
            "patchB": boxes[end],
        }
        # Two arrows between the same nodes: one is to the left, the other to the right.
        side = 0.5 if arrow.beside else -0.5 if (arrow.start, arrow.end) in doubled else 0.0
        word = (
            start.x + side + 0.08,
            (start.y + start.high / 2 + end.y - end.high / 2) / 2,
            "left",
            "center",
        )
        if end.x > start.x:
            word = _BETWEEN, (start.y + end.y) / 2 - 0.04, "center", "bottom"
        elif (
            end.y - start.y > start.high / 2 + end.high / 2 + 3 * _GAP
        ):  # past other nodes, along the margin
            out = _MARGIN + (0.0 if arrow.start == chart.FITS else 0.2)
            look["connectionstyle"] = f"bar,fraction={(start.x - out) / (end.y - start.y)}"
            word = out + 0.05, start.y + start.high / 2 + 0.05, "left", "top"
        axes.annotate(
            "",
            (end.x + side, end.y),
            (start.x + side, start.y),
            arrowprops=look,
            zorder=5 + arrow.taken,
        )
        x, y, across, up = word
        tone = _TAKEN if arrow.taken else GREY
        axes.text(x, y, arrow.word, fontsize=_FONT - 0.5, color=tone, ha=across, va=up, zorder=7)
