"""A picture of how long the examples are, one panel a split.

Like the loss curves, it is made without pyplot and drawn by Agg: matplotlib's global state is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from allhands.data.lengths import LengthSummary, Unit, percent
from allhands.io.files import make_directory
from allhands.io.formatting import format_count
from allhands.io.pictures import DASHED, GREY, STYLE, picture_suffix, write_picture

Lengths = NDArray[np.int64]

# Blue and vermilion of Okabe & Ito (2008), "Color universal design", as in the loss curves.
_WHOLE, _BEYOND = "#0072B2", "#D55E00"
_BLACK = "#222222"
_STYLE = STYLE | {"axes.grid.axis": "y"}
_WIDE = 20  # longest over shortest, from which on the axis is logarithmic
_BINS = 40
_LONGEST_NAME = 30


@dataclass(frozen=True)
class _Scale:
    """What the panels have in common. ``edges`` lie between whole numbers, one of them behind the limit."""

    edges: NDArray[np.float64]
    wide: bool
    limit: int | None
    unit: Unit


def draw_lengths(
    sets: Mapping[str, NDArray[Any]], limit: int | None, unit: Unit, path: Path, title: str | None = None
) -> Path:
    """Draw the distribution of lengths of each set in a panel of its own, on one axis of lengths.

    The bars are shares of the examples of the set, orange where they are over the limit; the median is named. The
    axis is logarithmic where the longest is 20 times the shortest. The picture is 1000 pixels wide.

    Args:
        sets: lengths of shape ``(count,)`` by name, drawn in this order; any of them may be empty.
        limit: the greatest length that is used whole, in ``unit``.
        unit: what the lengths count.
        path: the file; ``.png``, ``.svg`` or ``.pdf``; PNG without a suffix. Replaced whole or not at all.
        title: over the panels.

    Returns:
        ``path``.

    Raises:
        ConfigError: the suffix names another format.
        StorageError: ``path`` cannot be written.
    """
    path = Path(path)
    suffix = picture_suffix(path)
    values = {name: np.asarray(lengths, dtype=np.int64).reshape(-1) for name, lengths in sets.items()} or {
        "": np.zeros(0, dtype=np.int64)
    }
    with matplotlib.style.context(["default", _STYLE]):  # restores the caller's settings
        figure = Figure(
            figsize=(10, 1.6 + 1.9 * len(values)), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
        )
        FigureCanvasAgg(figure)
        _draw(figure, values, _scale(values, limit, unit), title or f"Length of the examples in {unit}")
        make_directory(path.parent)
        write_picture(figure, path, suffix)
    return path


def _scale(sets: Mapping[str, Lengths], limit: int | None, unit: Unit) -> _Scale:
    """Ranges for all sets together, of about equal width as drawn, and with the limit inside the axis."""
    known = np.concatenate([*sets.values(), np.array([limit] if limit is not None else [], dtype=np.int64)])
    low, high = (int(known.min()), int(known.max())) if known.size else (0, 1)
    wide = high >= _WIDE * max(1, low)
    low = max(1, low) if wide else low
    edges = (np.geomspace if wide else np.linspace)(low, high + 1, _BINS + 1)
    starts = np.unique(np.round(edges)).astype(np.int64)  # of the ranges; all but the last of those of single numbers
    if limit is not None and low <= limit:
        inner = starts[1:-1]
        near = inner[np.argsort(np.abs(inner - (limit + 1)))[:1]]  # moved, so that no range becomes a sliver
        starts = np.union1d(np.setdiff1d(starts, near), [limit + 1])
    return _Scale(starts.astype(np.float64) - 0.5, wide, limit, unit)


def _draw(figure: Figure, sets: Mapping[str, Lengths], scale: _Scale, title: str) -> None:
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_BLACK, wrap=True)
    panels: list[Axes] = figure.subplots(len(sets), 1, sharex=True, squeeze=False)[:, 0].tolist()
    bottom = panels[-1]
    if scale.wide:
        bottom.set_xscale("log")
    bottom.set_xlim(*_ends(scale))
    for axes, (name, lengths) in zip(panels, sets.items(), strict=True):
        _draw_set(axes, name, lengths, scale)
    # Shared by all panels, hence set on one.
    bottom.xaxis.set_major_locator(
        LogLocator(subs=_label_steps(scale)) if scale.wide else MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10])
    )
    bottom.xaxis.set_minor_locator(NullLocator())
    bottom.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 or not scale.wide else "")
    )
    bottom.set_xlabel(f"length ({scale.unit}{', logarithmic' if scale.wide else ''})")
    _draw_legend(figure, scale)


def _label_steps(scale: _Scale) -> tuple[int, ...]:
    """Which multiples of a power of ten are labelled, so that the labels of a wide range keep apart."""
    low, high = _ends(scale)
    decades = math.log10(high / max(low, 0.5))
    return (1, 2, 5) if decades < 3.5 else (1, 3) if decades < 5 else (1,)


def _ends(scale: _Scale) -> tuple[float, float]:
    """The ends of the axis, with a little room on both sides."""
    low, high = float(scale.edges[0]), float(scale.edges[-1])
    if scale.wide:
        room = (high / low) ** 0.02
        return low / room, high * room
    room = max(0.02 * (high - low), 1.0)
    return low - room, high + room


def _draw_set(axes: Axes, name: str, lengths: Lengths, scale: _Scale) -> None:
    summary = LengthSummary.of(lengths, scale.limit, scale.unit)
    name = f"{name[: _LONGEST_NAME - 1]}…" if len(name) > _LONGEST_NAME else name
    axes.set_ylabel("examples")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    if scale.limit is not None:
        axes.axvline(scale.limit + 0.5, color=_BEYOND, ls=DASHED, lw=1.6, label="limit")
    if not summary.count:
        axes.set_title(f"{name}: no examples" if name else "no examples", loc="left", fontsize=12, color=_BLACK)
        axes.set_yticks([])
        return
    noun = "example" if summary.count == 1 else "examples"
    total = f"{summary.total:,}" if summary.total < 1_000_000 else format_count(summary.total)
    header = f"{name}: {summary.count:,} {noun}, {total} {scale.unit}"
    axes.set_title(header, loc="left", fontsize=12, color=_BLACK)
    if scale.limit is not None:
        share = (
            f"{summary.over_limit:,} ({percent(summary.over_limit, summary.count)})" if summary.over_limit else "none"
        )
        colour = _BEYOND if summary.over_limit else GREY
        axes.set_title(f"{share} over the limit", loc="right", fontsize=11, color=colour)
    _draw_bars(axes, lengths, scale)
    _draw_median(axes, summary, scale)


def _draw_bars(axes: Axes, lengths: Lengths, scale: _Scale) -> None:
    """Shares of the examples in per cent. On a logarithmic axis a length of 0 is drawn as 1."""
    edges = scale.edges
    shares = 100 / lengths.size * np.histogram(np.maximum(lengths, edges[0] + 0.5), edges)[0]
    beyond = edges[:-1] >= (np.inf if scale.limit is None else scale.limit + 0.5)
    axes.bar(
        edges[:-1],
        shares,
        width=np.diff(edges),
        align="edge",
        color=np.where(beyond, _BEYOND, _WHOLE).tolist(),
        edgecolor="white",
        linewidth=0.5,
    )
    ticks = MaxNLocator(nbins=4, min_n_ticks=2).tick_values(0, shares.max())
    axes.set_yticks([tick for tick in ticks if tick <= 100])
    axes.set_ylim(0, shares.max() * 1.3)  # room for the name of the median


def _draw_median(axes: Axes, summary: LengthSummary, scale: _Scale) -> None:
    """A line, with its value on the side that has more room."""
    median = max(summary.median, float(scale.edges[0]) + 0.5)
    axes.axvline(median, color=_BLACK, lw=1.6, label="median")
    at = axes.transAxes.inverted().transform(axes.transData.transform((median, 0.0)))[0]
    axes.annotate(
        f"median {summary.median:,.1f}".removesuffix(".0"),
        xy=(median, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(6 if at < 0.5 else -6, -3),
        textcoords="offset points",
        ha="left" if at < 0.5 else "right",
        va="top",
        color=_BLACK,
        bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
    )


def _draw_legend(figure: Figure, scale: _Scale) -> None:
    handles: list[Patch | Line2D] = [Line2D([], [], color=_BLACK, lw=1.6, label="median")]
    if scale.limit is not None:
        limit = Line2D([], [], color=_BEYOND, ls=DASHED, lw=1.6, label=f"limit: {scale.limit:,} {scale.unit}")
        within, beyond = Patch(color=_WHOLE, label="within the limit"), Patch(color=_BEYOND, label="over the limit")
        handles = [within, beyond, *handles, limit]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
