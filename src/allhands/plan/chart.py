"""The chart of questions as a picture, with the path that was taken."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from allhands.files import make_directory, write_whole
from allhands.pictures import GREY, STYLE, picture_suffix
from allhands.plan import advice as chart
from allhands.plan.advice import Advice, Outcome

_TAKEN, _FADED = "#0072B2", "#9A9A9A"
# Where each stands, in columns and rows from the top left.
_QUESTIONS = {
    chart.AGAIN: (1, 0),
    chart.LONG: (1, 1),
    chart.FITS: (1, 2),
    chart.MORE: (1, 3),
    chart.FAST: (1, 4),
    chart.LARGER: (1, 5),
    chart.SMALLER: (2, 2),
    chart.DIVIDED: (2, 3),
}
_OUTCOMES: dict[Outcome, tuple[str, tuple[int, int]]] = {
    "one machine": ("stay on one machine", (0, 1)),
    "data parallel": ("plain data parallel", (0, 4)),
    "accumulate": ("larger batches,\nor accumulate", (0, 5)),
    "faster link": ("one machine until\nthe link is faster", (1, 6)),
    "smaller": ("one machine, with flags\nthat save memory", (3, 2)),
    "divide the optimizer": ("data parallel, with the\noptimizer divided", (3, 3)),
    "framework": ("a framework that divides\nthe model itself", (2, 4)),
}
_ARROWS: tuple[tuple[str, str, str], ...] = (
    (chart.AGAIN, chart.LONG, "yes"),
    (chart.AGAIN, "one machine", "no"),
    (chart.LONG, chart.FITS, "yes"),
    (chart.LONG, "one machine", "no"),
    (chart.FITS, chart.MORE, "yes"),
    (chart.FITS, chart.SMALLER, "no"),
    (chart.MORE, chart.FAST, "yes"),
    (chart.MORE, "one machine", "no"),
    (chart.FAST, "data parallel", "yes"),
    (chart.FAST, chart.LARGER, "no"),
    (chart.LARGER, "accumulate", "yes"),
    (chart.LARGER, "faster link", "no"),
    (chart.SMALLER, "smaller", "yes"),
    (chart.SMALLER, chart.DIVIDED, "no"),
    (chart.DIVIDED, "divide the optimizer", "yes"),
    (chart.DIVIDED, "framework", "no"),
)


def draw_chart(advice: Advice, out: Path) -> Path:
    """Write the picture; its path.

    Raises:
        ConfigError: the suffix of ``out`` is that of no picture.
        StorageError: it cannot be written.
    """
    suffix = picture_suffix(out)
    out = out if out.suffix else out.with_suffix(suffix)
    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(11, 9.5), dpi=110)
        FigureCanvasAgg(figure)
        axes: Axes = figure.add_axes((0.01, 0.01, 0.98, 0.93))
        axes.set_axis_off()
        axes.set_xlim(-0.5, 3.5)
        axes.set_ylim(6.5, -0.5)
        figure.suptitle(f"Is distributing worth it? {advice.title[0].upper()}{advice.title[1:]}", fontsize=14)
        _draw(axes, advice)
        make_directory(out.parent)
        write_whole(out, lambda draft: figure.savefig(draft, format=suffix.removeprefix(".")))
    return out


def _draw(axes: Axes, advice: Advice) -> None:
    asked = {question.text: question for question in advice.path}
    stations = [question.text for question in advice.path] + [advice.outcome]
    steps = set(itertools.pairwise(stations))
    places: dict[str, tuple[int, int]] = {**_QUESTIONS, **{name: place for name, (_, place) in _OUTCOMES.items()}}
    boxes: dict[str, Text] = {}
    for text, place in _QUESTIONS.items():
        found = asked.get(text)
        told = f"{_wrapped(text)}\n{_wrapped(f'{found.answer}: {found.why}')}" if found else _wrapped(text)
        boxes[text] = _box(axes, place, told, found)
    for name, (text, place) in _OUTCOMES.items():
        boxes[name] = _box(axes, place, text, advice if name == advice.outcome else None, round_=True)
    others = [(start, end, asked[start].answer) for start, end in steps - {(a, b) for a, b, _ in _ARROWS}]
    for start, end, word in (*_ARROWS, *others):
        taken = (start, end) in steps
        told = asked[start].answer if taken else word
        _arrow(axes, (boxes[start], places[start]), (boxes[end], places[end]), told, taken=taken)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 30))


def _box(axes: Axes, place: tuple[int, int], text: str, taken: object, *, round_: bool = False) -> Text:
    look: dict[str, Any] = {
        "boxstyle": "round,pad=0.6" if round_ else "square,pad=0.5",
        "facecolor": "#E8F2FA" if taken else "white",
        "edgecolor": _TAKEN if taken else _FADED,
        "linewidth": 2.2 if taken else 1.0,
    }
    colour = "black" if taken else GREY
    return axes.text(*place, text, ha="center", va="center", fontsize=9.5, color=colour, bbox=look, zorder=3)


_Station = tuple[Text, tuple[int, int]]


def _arrow(axes: Axes, start: _Station, end: _Station, word: str, *, taken: bool) -> None:
    """From the edge of one box to that of the other; drawn after them, when their sizes are known."""
    colour = _TAKEN if taken else _FADED
    (x, y), (to_x, to_y) = start[1], end[1]
    look = {"arrowstyle": "-|>", "color": colour, "lw": 2.2 if taken else 1.0, "shrinkA": 2, "shrinkB": 3}
    look |= {"patchA": start[0].get_bbox_patch(), "patchB": end[0].get_bbox_patch()}
    axes.annotate("", xy=(to_x, to_y), xytext=(x, y), arrowprops=look, zorder=5 if taken else 4)
    # Beside the line: above one that lies, to the right of others.
    aside = (0.0, -0.09) if y == to_y else (0.05, 0.02)
    place = (x + 0.5 * (to_x - x) + aside[0], y + 0.5 * (to_y - y) + aside[1])
    side = "center" if y == to_y else "left"
    axes.text(*place, word, fontsize=9.5, color=colour if taken else GREY, zorder=6, ha=side, va="center")
