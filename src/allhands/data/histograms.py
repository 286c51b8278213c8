"""A picture of how long the examples are, one panel a split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from allhands.data.lengths import LengthSummary, Unit, percent
from allhands.io.formatting import format_count
from allhands.io.pictures import DASHED, GREY, RUNS, picture

_WHOLE, _BEYOND = RUNS[:2]
_BLACK = "#222222"
_WIDE = 20  # longest over shortest, from which on the axis is logarithmic
_BINS = 40
_LONGEST_NAME = 30


def draw_lengths(sets: Mapping[str, NDArray[Any]], limit: int | None, unit: Unit, path: Path) -> Path:
    """Draw the distribution of lengths of each set in a panel of its own, on one axis of lengths.

    The bars are shares of the examples of the set, orange where they are over the limit; the median is named. The
    axis is logarithmic where the longest is 20 times the shortest. The picture is 1000 pixels wide.

    Args:
        sets: lengths of shape ``(count,)`` by name, drawn in this order; any of them may be empty.
        limit: the greatest length that is used whole, in ``unit``.
        unit: what the lengths count.
        path: the file; see :func:`~allhands.io.pictures.picture`.

    Returns:
        ``path``.

    Raises:
        ConfigError: the suffix names another format.
        StorageError: ``path`` cannot be written.
    """
    sets = sets or {"": np.zeros(0, dtype=np.int64)}
    edges, wide = _edges(np.concatenate([*sets.values()]), limit)
    with picture(path, (10, 1.6 + 1.9 * len(sets))) as figure:
        figure.suptitle(f"Length of the examples in {unit}", color=_BLACK)
        panels: list[Axes] = figure.subplots(len(sets), 1, sharex=True, squeeze=False)[:, 0].tolist()
        for axes, (name, lengths) in zip(panels, sets.items(), strict=True):
            summary = LengthSummary.of(lengths, limit, unit)
            _draw_set(axes, summary, np.maximum(lengths, edges[0]), edges, wide)
            name = f"{name[: _LONGEST_NAME - 1]}…" if len(name) > _LONGEST_NAME else name
            axes.set_title(f"{name}: {_size(summary)}".removeprefix(": "), loc="left", fontsize=12, color=_BLACK)
        bottom = panels[-1]
        if wide:
            bottom.set_xscale("log")
            bottom.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if edges[-1] < 3000 * edges[0] else (1,)))
            bottom.xaxis.set_minor_locator(NullLocator())
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 or not wide else "")
        bottom.set_xlabel(f"length ({unit}{', logarithmic' if wide else ''})")
        handles: list[Patch | Line2D] = [Line2D([], [], color=_BLACK, label="median")]
        if limit is not None:
            within, beyond = Patch(color=_WHOLE, label="within the limit"), Patch(color=_BEYOND, label="over the limit")
            mark = Line2D([], [], color=_BEYOND, ls=DASHED, label=f"limit: {limit:,} {unit}")
            handles = [within, beyond, *handles, mark]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return path


def _edges(lengths: NDArray[Any], limit: int | None) -> tuple[NDArray[np.float64], bool]:
    """Edges between whole numbers, of ranges about equally wide as drawn, one behind the limit; and if logarithmic."""
    known = np.append(lengths, [limit] if limit is not None else [])
    low, high = (int(known.min()), int(known.max())) if known.size else (0, 1)
    wide = high >= _WIDE * max(1, low)
    low = max(1, low) if wide else low
    starts = np.unique(np.round((np.geomspace if wide else np.linspace)(low, high + 1, _BINS + 1)))
    if limit is not None and low <= limit:
        inner = starts[1:-1]
        near = inner[np.argsort(np.abs(inner - (limit + 1)))[:1]]  # moved, so that no range becomes a sliver
        starts = np.union1d(np.setdiff1d(starts, near), [limit + 1])
    return starts - 0.5, wide


def _size(summary: LengthSummary) -> str:
    if not summary.count:
        return "no examples"
    total = f"{summary.total:,}" if summary.total < 1_000_000 else format_count(summary.total)
    return f"{summary.count:,} example{'s' * (summary.count != 1)}, {total} {summary.unit}"


def _draw_set(
    axes: Axes, summary: LengthSummary, lengths: NDArray[Any], edges: NDArray[np.float64], wide: bool
) -> None:
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("examples")
    limit = summary.limit
    if limit is not None:
        axes.axvline(limit + 0.5, color=_BEYOND, ls=DASHED, label="limit")
        over = summary.over_limit
        told = f"{over:,} ({percent(over, summary.count)})" if over else "none"
        axes.set_title(f"{told} over the limit", loc="right", fontsize=11, color=_BEYOND if over else GREY)
    if not summary.count:
        axes.set_yticks([])
        return
    shares = 100 / summary.count * np.histogram(lengths, edges)[0]
    colours = [_BEYOND if limit is not None and edge > limit else _WHOLE for edge in edges[:-1]]
    axes.bar(edges[:-1], shares, np.diff(edges), align="edge", color=colours, edgecolor="white", lw=0.5)
    axes.set_ylim(0, 1.3 * shares.max())  # room for the name of the median
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}%" if value <= 100 else "")
    axes.locator_params(axis="y", nbins=5, min_n_ticks=3)
    median = max(summary.median, float(edges[0]) + 0.5)
    axes.axvline(median, color=_BLACK, label="median")
    words = f" median {summary.median:,.1f} ".replace(".0 ", " ")
    middle = np.sqrt(edges[0] * edges[-1]) if wide else (edges[0] + edges[-1]) / 2
    look: dict[str, Any] = {"ha": "right" if median > middle else "left", "va": "top", "color": _BLACK}
    axes.text(median, 0.97, words, transform=axes.get_xaxis_transform(), **look)
