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
    "one machine": ("stay on one machine", (0, 2)),
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
    places = {**_QUESTIONS, **{name: place for name, (_, place) in _OUTCOMES.items()}}
    for start, end, word in _ARROWS:
        _arrow(axes, places[start], places[end], word, taken=(start, end) in steps)
    for start, end in steps - {(a, b) for a, b, _ in _ARROWS}:
        _arrow(axes, places[start], places[end], asked[start].answer, taken=True)
    for text, place in _QUESTIONS.items():
        found = asked.get(text)
        _box(
            axes,
            place,
            f"{_wrapped(text)}\n{_wrapped(f'{found.answer}: {found.why}')}" if found else _wrapped(text),
            found,
        )
    for name, (text, place) in _OUTCOMES.items():
        _box(axes, place, text, advice if name == advice.outcome else None, round_=True)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 30))


def _box(axes: Axes, place: tuple[int, int], text: str, taken: object, *, round_: bool = False) -> None:
    look: dict[str, Any] = {
        "boxstyle": "round,pad=0.6" if round_ else "square,pad=0.5",
        "facecolor": "#E8F2FA" if taken else "white",
        "edgecolor": _TAKEN if taken else _FADED,
        "linewidth": 2.2 if taken else 1.0,
    }
    colour = "black" if taken else GREY
    axes.text(*place, text, ha="center", va="center", fontsize=9.5, color=colour, bbox=look, zorder=3)


def _arrow(axes: Axes, start: tuple[int, int], end: tuple[int, int], word: str, *, taken: bool) -> None:
    colour = _TAKEN if taken else _FADED
    # Boxes are wider than high.
    shrink = 105 if start[1] == end[1] else 34
    look = {"arrowstyle": "-|>", "color": colour, "lw": 2.2 if taken else 1.0, "shrinkA": 30, "shrinkB": shrink}
    axes.annotate("", xy=end, xytext=start, arrowprops=look, zorder=2 if taken else 1)
    if word:
        x, y = start[0] + 0.5 * (end[0] - start[0]), start[1] + 0.5 * (end[1] - start[1])
        axes.text(x + 0.03, y - 0.04, word, fontsize=9.5, color=colour if taken else GREY, zorder=4)
