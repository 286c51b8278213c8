"""The chart of questions as a picture, with the path that was taken."""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Arrow:
    """From a question to what follows on an answer; ``beside`` another one between the same two."""

    start: str
    end: str
    word: str
    taken: bool
    beside: bool = False


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
    places: dict[str, tuple[int, int]] = {**_QUESTIONS, **{name: place for name, (_, place) in _OUTCOMES.items()}}
    boxes: dict[str, Text] = {}
    for text, place in _QUESTIONS.items():
        found = asked.get(text)
        told = f"{_wrapped(text)}\n{_wrapped(f'{found.answer}: {found.why}')}" if found else _wrapped(text)
        boxes[text] = _box(axes, place, told, found)
    for name, (text, place) in _OUTCOMES.items():
        boxes[name] = _box(axes, place, text, advice if name == advice.outcome else None, round_=True)
    arrows = arrows_of(advice)
    doubled = {(arrow.start, arrow.end) for arrow in arrows if arrow.beside}
    for arrow in arrows:
        side = 1 if arrow.beside else -1 if (arrow.start, arrow.end) in doubled else 0
        _draw_arrow(axes, (boxes[arrow.start], places[arrow.start]), (boxes[arrow.end], places[arrow.end]), arrow, side)


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


def _draw_arrow(axes: Axes, start: _Station, end: _Station, arrow: Arrow, side: int) -> None:
    """From the edge of one box to that of the other; drawn after them, when their sizes are known.

    Of two between the same boxes one lies above or to the left (``side`` -1), one below or to the right (1).
    """
    taken, word = arrow.taken, arrow.word.replace(", ", ",\n")
    colour = _TAKEN if taken else _FADED
    (x, y), (to_x, to_y) = start[1], end[1]
    lies = y == to_y
    # Half a box is 0.12 of a row high at least, and 0.3 of a column wide.
    x, to_x = (each + (0 if lies else 0.12 * side) for each in (x, to_x))
    y, to_y = (each + (0.06 * side if lies else 0) for each in (y, to_y))
    look = {"arrowstyle": "-|>", "color": colour, "lw": 2.2 if taken else 1.0, "shrinkA": 2, "shrinkB": 3}
    look |= {"patchA": start[0].get_bbox_patch(), "patchB": end[0].get_bbox_patch()}
    axes.annotate("", xy=(to_x, to_y), xytext=(x, y), arrowprops=look, zorder=5 if taken else 4)
    # Beside the line: above one that lies, or below where another lies above it; to the right of others.
    aside = ((-0.08, 0.17) if side == 1 else (0.0, -0.09)) if lies else (0.05, 0.02)
    if "\n" in word and not lies and x != to_x:
        aside = (0.05, 0.12)  # clear of a line that slants
    place = (x + 0.5 * (to_x - x) + aside[0], y + 0.5 * (to_y - y) + aside[1])
    at = "center" if lies else "left"
    axes.text(*place, word, fontsize=9.5, color=colour if taken else GREY, zorder=6, ha=at, va="center")
