"""Where the memory and the time of a run went: proportional memory stacked, MLX's, and the phases of each rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
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
from numpy.typing import NDArray

from allhands.errors import DataError
from allhands.io.files import make_directory
from allhands.io.formatting import format_bytes
from allhands.io.pictures import (
    DASHED,
    DIRECTORS,
    GREY,
    MARKERS,
    OTHER,
    PHASES,
    RANKS,
    STYLE,
    picture_suffix,
    write_picture,
)
from allhands.observe.monitor.board import Board, key_of
from allhands.observe.monitor.samples import Sample

Floats = NDArray[np.float64]

# Of ranks, besides their colours.
_PATTERNS = ("", "///", "...", "xx", "---", "ooo", "\\\\\\")
_MARKS = 8  # on a line
_MOST_POINTS = 600
_MOST_STRIPS = 12
_FEWEST = 3  # samples of a process that make a line
_WIDTH = 12.0
_DPI = 100


@dataclass(frozen=True)
class _Track:
    """One process over the time of the run; a rank with all its starts."""

    name: str
    colour: str
    samples: list[Sample]
    pattern: str = ""
    marker: str = ""

    def over(self, grid: Floats, attribute: str) -> Floats:
        """An attribute in bytes on the grid of times: 0 while there is no such process."""
        total = np.zeros_like(grid)
        for pid in dict.fromkeys(sample.pid for sample in self.samples):
            known = [one for one in self.samples if one.pid == pid and getattr(one, attribute) is not None]
            if known:
                times = np.array([one.time for one in known])
                values = np.array([getattr(one, attribute) for one in known], dtype=np.float64)
                total += np.interp(grid, times, values, left=0.0, right=0.0)
        return total


def plot_memory(samples: Sequence[Sample], out: Path, *, title: str | None = None, private: bool = False) -> Path:
    """Draw the processes of a run over its time: memory above, what each rank did below. 1200 pixels wide.

    Args:
        samples: of one run, in the order of their times, from :func:`~allhands.observe.monitor.read_samples`.
        out: the file; ``.png``, ``.svg`` or ``.pdf``; PNG without a suffix. Replaced whole or not at all.
        title: over all panels.
        private: whether the picture, and directories that are made for it, are for their owner alone.

    Returns:
        ``out``.

    Raises:
        DataError: the run was too short: no process has three samples.
        ConfigError: the suffix names another format.
        StorageError: ``out`` cannot be written.
    """
    suffix = picture_suffix(out)
    tracks = _tracks(samples)
    if not can_be_drawn(samples):
        raise DataError("too few samples of memory for a picture", hint="lower ALLHANDS_MONITOR_EVERY_S")
    with matplotlib.style.context(["default", STYLE]):
        board = Board(samples)
        figure = _draw(tracks, board.peak_together_bytes, board.peak_ranks_bytes)
        if title:
            figure.suptitle(title)
        make_directory(out.parent, private=private)
        write_picture(figure, out, suffix, private=private, dpi=_DPI)
    return out


def can_be_drawn(samples: Sequence[Sample]) -> bool:
    """Whether some process has samples enough for a line."""
    return max(Counter(key_of(sample) for sample in samples).values(), default=0) >= _FEWEST


def _tracks(samples: Sequence[Sample]) -> list[_Track]:
    by_key: dict[Any, list[Sample]] = {}
    for sample in samples:
        by_key.setdefault(key_of(sample), []).append(sample)
    # The ranks come first, at the bottom, so that what was estimated of them can be compared with their height.
    order = {"rank": 0, "agent": 1, "orchestrator": 2}
    groups = sorted(by_key.values(), key=lambda one: (order[one[0].role], one[0].rank or 0, one[0].host))
    directors = 0
    tracks: list[_Track] = []
    for group in groups:
        if group[0].role == "rank":
            rank = group[0].rank or 0
            colour = RANKS[rank % len(RANKS)]
            look = _PATTERNS[rank % len(_PATTERNS)], MARKERS[rank % len(MARKERS)]
        else:
            colour, directors = DIRECTORS[directors % len(DIRECTORS)], directors + 1
            look = "", ""
        tracks.append(_Track(group[0].name, colour, group, *look))
    return tracks


def _draw(tracks: Sequence[_Track], together: int, of_ranks: int = 0) -> Figure:
    ranks = [track for track in tracks if track.samples[0].role == "rank"]
    strips = ranks[:_MOST_STRIPS]
    heights = [3.0, 2.2, 0.45 * max(len(strips), 1)]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 1.9), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.set_layout_engine(ConstrainedLayoutEngine(h_pad=0.08))
    memory, mlx, phases = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    began = min(track.samples[0].time for track in tracks)
    ended = max(track.samples[-1].time for track in tracks)
    unit, scale = _time_unit(ended - began)
    grid = np.linspace(began, ended, _MOST_POINTS)
    _draw_memory(memory, tracks, grid, (grid - began) / scale)
    told = f"{format_bytes(together)} together at most"
    if of_ranks and len(ranks) < len(tracks):
        told += f", the ranks {format_bytes(of_ranks)}"
    memory.set_title(f"memory of all processes, pages that are shared counted once: {told}", loc="left")
    _draw_mlx(mlx, ranks, grid, (grid - began) / scale)
    _draw_phases(phases, strips, lambda times: (times - began) / scale)
    more = f" (the first {len(strips)} of {len(ranks)} ranks)" if len(strips) < len(ranks) else ""
    phases.set_title(f"what each rank did, as shares of the time{more}", loc="left")
    phases.set_xlabel(f"time since the start ({unit})")
    phases.set_xlim(0, (ended - began) / scale)
    for time in _restarts(ranks):
        for axes in (memory, mlx):
            axes.axvline((time - began) / scale, color=GREY, ls=":", lw=1)
    return figure


def _draw_memory(axes: Axes, tracks: Sequence[_Track], grid: Floats, x: Floats) -> None:
    shares = [track.over(grid, "pss_bytes") for track in tracks]
    scale, unit = _byte_unit(max(float(np.max(np.sum(shares, axis=0))), 1.0))
    colours = [track.colour for track in tracks]
    areas = axes.stackplot(x, *(share / scale for share in shares), colors=colours, edgecolor="white", linewidth=0.4)
    for area, track in zip(areas, tracks, strict=True):
        area.set_hatch(track.pattern)
    axes.set_ylabel(unit)
    handles: list[Any] = [_patch(track.name, track.colour, track.pattern) for track in reversed(tracks)]
    if estimates := [one.estimated_bytes for track in tracks for one in track.samples[-1:] if one.estimated_bytes]:
        axes.axhline(sum(estimates) / scale, color=GREY, ls=DASHED)
        handles.append(Line2D([], [], color=GREY, ls=DASHED, label="ranks, as estimated"))
    # Only now: a limit that is set keeps lines out that come after it.
    axes.set_ylim(bottom=0)
    axes.legend(handles=handles[:14], loc="center left", bbox_to_anchor=(1.0, 0.5))


def _patch(label: str, colour: str, pattern: str) -> Patch:
    return Patch(facecolor=colour, hatch=pattern, edgecolor="white", linewidth=0, label=label)


def _draw_mlx(axes: Axes, ranks: Sequence[_Track], grid: Floats, x: Floats) -> None:
    used = [(track, track.over(grid, "mlx_active_bytes"), track.over(grid, "mlx_cache_bytes")) for track in ranks]
    scale, unit = _byte_unit(max([float(np.max(active + cache)) for _, active, cache in used] + [1.0]))
    for place, (track, active, cache) in enumerate(used):
        # Earlier ones wider, so that ranks with equal needs stay visible.
        width = 1.5 + min(2.0, 4 / len(used)) * (len(used) - 1 - place)
        every = max(1, len(x) // _MARKS)
        marks: dict[str, Any] = {"marker": track.marker, "markevery": (place * every // len(used), every)}
        axes.plot(x, active / scale, color=track.colour, lw=width, mfc="white", ms=7, **marks)
        axes.plot(x, (active + cache) / scale, color=track.colour, lw=0.5 * width, ls=DASHED)
        if peak := max((sample.mlx_peak_bytes or 0 for sample in track.samples), default=0):
            axes.axhline(peak / scale, color=track.colour, lw=0.8, ls=":")
    estimates = [track.samples[-1].mlx_estimated_bytes for track in ranks if track.samples]
    for estimate in {one for one in estimates if one}:
        axes.axhline(estimate / scale, color=GREY, ls=(0, (1, 3)))
    axes.set_title("MLX's memory, rank by rank", loc="left")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    looks: dict[str, Any] = {"active": "-", "active and cache": DASHED, "highest active": ":"}
    if any(estimates):
        looks["estimated need"] = (0, (1, 3))
    handles = [Line2D([], [], color=GREY, ls=look, label=label) for label, look in looks.items()]
    handles += [
        Line2D([], [], color=track.colour, marker=track.marker, mfc="white", label=track.name) for track in ranks[:8]
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_phases(axes: Axes, strips: Sequence[_Track], place: Any) -> None:
    seen: set[str] = set()
    for row, track in enumerate(reversed(strips)):
        ends = np.array([sample.time for sample in track.samples])
        spent = [{**sample.phases} for sample in track.samples]
        starts = np.array([end - sum(one.values()) for end, one in zip(ends, spent, strict=True)])
        same = [False, *(one.pid == next_.pid for one, next_ in itertools.pairwise(track.samples))]
        starts = np.where(same, np.roll(ends, 1), starts)
        below = np.full(len(ends), row - 0.4)
        whole = np.array([sum(one.values()) or 1.0 for one in spent])
        for phase in (*PHASES, *sorted({name for one in spent for name in one} - PHASES.keys())):
            heights = np.array([one.get(phase, 0.0) for one in spent]) / whole * 0.8
            if heights.any():
                seen.add(phase)
                _, colour, pattern = PHASES.get(phase, (phase, OTHER, ""))
                look: dict[str, Any] = {"facecolor": colour, "hatch": pattern, "edgecolor": "white", "lw": 0}
                axes.bar(place(starts), heights, place(ends) - place(starts), below, align="edge", **look)
            below = below + heights
    axes.set_yticks(range(len(strips)), [track.name for track in reversed(strips)])
    for label, track in zip(axes.get_yticklabels(), reversed(strips), strict=True):
        label.set_color(track.colour)
    axes.set_ylim(-0.6, len(strips) - 0.4)
    axes.grid(False)
    handles = [_patch(*look) for name, look in PHASES.items() if name in seen]
    handles += [_patch(name, OTHER, "") for name in sorted(seen - PHASES.keys())]
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(handles=handles, loc="outside lower center", ncols=max(len(handles), 1), handlelength=2.0)


def _restarts(ranks: Sequence[_Track]) -> list[float]:
    """When the latest attempts began, after the first."""
    first: dict[int, float] = {}
    for sample in (sample for track in ranks for sample in track.samples):
        first[sample.attempt] = min(sample.time, first.get(sample.attempt, sample.time))
    return [time for attempt, time in first.items() if attempt > min(first)]


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _byte_unit(most: float) -> tuple[float, str]:
    return (1e9, "GB") if most >= 999.5e6 else (1e6, "MB")
