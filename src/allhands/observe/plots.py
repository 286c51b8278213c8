"""Pictures of runs: ``loss.png`` and ``memory.png``. They draw the charts of reports, by Matplotlib without pyplot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from allhands.errors import DataError
from allhands.io.formatting import format_bytes
from allhands.io.pictures import DASHED, DIRECTORS, GREY, MARKERS, OTHER, PHASES, RANKS, RUNS, picture
from allhands.observe.charts import Chart, groups_of, line_width, loss_charts, time_unit
from allhands.observe.metrics import RunHistory
from allhands.observe.monitor.board import Board, key_of
from allhands.observe.monitor.samples import Sample
from allhands.observe.times import names_of

Floats = NDArray[np.float64]

_MARKS = 8  # on a curve
_HATCHES = ("", "///", "...", "xx", "---", "ooo", "\\\\\\")  # of ranks, besides their colours
_DOTTED = (0, (1, 3))
_RESTART: dict[str, Any] = {"ls": ":", "lw": 1.0, "alpha": 0.8, "zorder": 1}
_SKIPPED: dict[str, Any] = {"ls": "", "marker": "x", "ms": 6, "mew": 1.5}
_FEWEST = 3  # samples of a process that make a line
_MOST_POINTS = 600
_MOST_STRIPS = 12


# --- losses ------------------------------------------------------------------------------------------


def plot_losses(runs: Sequence[RunHistory], out: Path, *, title: str | None = None, private: bool = False) -> Path:
    """Draw training and validation loss of ``runs`` over steps (left) and over elapsed time (right).

    A run has one colour; training is solid (thin: as reported, thick: smoothed), validation dashed with
    markers and a star at its lowest point. Earlier runs are drawn wider below later ones, so that
    identical curves stay visible. A dotted line marks each restart, a cross on the axis each skipped step. The
    picture has 1200 x 600 pixels.

    Args:
        runs: at least one with a finite loss.
        out: the file; see :func:`~allhands.io.pictures.picture`.
        title: over both panels.
        private: whether the picture, and directories that are made for it, are for their owner alone.

    Returns:
        ``out``.

    Raises:
        DataError: no run has a loss to draw.
        ConfigError: the suffix names another format.
        StorageError: ``out`` cannot be written.
    """
    out, labels = Path(out), names_of(runs)
    charts = {one.key: one for one in loss_charts(labels, runs)}
    if not charts.keys() >= {"loss-steps", "loss-time"}:
        hint = "wait for the first report of the run, then plot again"
        raise DataError("no run has a loss to draw yet", where=", ".join(run.name for run in runs), hint=hint)
    with picture(out, (12, 6), private=private) as figure:
        figure.suptitle(title or "Training and validation loss", wrap=True)
        by_step, by_time = figure.subplots(1, 2, sharey=True)
        for axes, key in ((by_step, "loss-steps"), (by_time, "loss-time")):
            _draw_losses(axes, charts[key])
        by_step.locator_params(integer=True, axis="x")
        by_time.tick_params(labelleft=True)
        by_time.set_ylabel("")
        by_time.legend(handles=_styles(charts["loss-steps"]), frameon=True, facecolor="white", edgecolor="none")
        figure.legend(handles=_names(labels, charts["loss-steps"]), loc="outside lower center", ncols=2)
    return out


def _draw_losses(axes: Axes, chart: Chart) -> None:
    several = len({line.colour for line in chart.lines}) > 1
    widths = {line.colour: line.width for line in chart.lines if not line.faint}
    for line in chart.lines:
        look: dict[str, Any] = {"color": RUNS[line.colour % len(RUNS)], "lw": line.width}
        if line.faint:
            look |= {"lw": 0.8, "alpha": 0.4}
        elif several or line.points:
            every = 1 if line.dashed else max(1, len(line.x) // _MARKS)
            look |= {"marker": MARKERS[line.colour % len(MARKERS)], "ms": 4 + 1.5 * line.width, "markevery": every}
        if line.dashed:
            look |= {"ls": DASHED, "lw": 0.7 * line.width, "mfc": "white", "mew": 1.5}
        axes.plot(line.x, np.array(line.y, dtype=np.float64), **look)
    for x, y, colour in chart.stars:
        look = {"marker": "*", "ms": 8 + 4 * widths[colour], "mec": "white", "mew": 0.7, "zorder": 5}
        axes.plot(x, y, color=RUNS[colour % len(RUNS)], **look)
    for x, colour in dict.fromkeys(chart.marks):
        axes.axvline(x, color=RUNS[colour % len(RUNS)], **_RESTART)
    for x, colour in chart.crosses:
        place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 4}
        axes.plot(x, 0, color=RUNS[colour % len(RUNS)], **place, **_SKIPPED)
    axes.margins(x=0.03, y=0.08)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.top is not None:
        axes.set_ylim(0.0, chart.top)


def _names(labels: Sequence[str], chart: Chart) -> list[Line2D]:
    """The runs by colour and marker."""
    best = {colour: f": best validation {y:.3f}" for _, y, colour in chart.stars}
    drawn = sorted({line.colour for line in chart.lines})
    marks = MARKERS if len(drawn) > 1 else ("",)
    return [
        _legend(
            f"{labels[at]}{best.get(at, '')}", color=RUNS[at % len(RUNS)], lw=3, marker=marks[at % len(marks)], ms=9
        )
        for at in drawn
    ]


def _styles(chart: Chart) -> list[Line2D]:
    """What the styles of lines mean."""
    smoothed = any(line.faint for line in chart.lines)
    looks: dict[str, dict[str, Any]] = {"training, smoothed" if smoothed else "training": {"lw": 2}}
    if smoothed:
        looks = {"training, as reported": {"lw": 0.8, "alpha": 0.6}, **looks}
    if chart.stars:
        looks["validation"] = {"ls": DASHED, "marker": "o", "mfc": "white"}
        looks["best validation"] = {"ls": "", "marker": "*", "ms": 12}
    looks |= {"restart": _RESTART} if chart.marks else {}
    looks |= {"skipped step": _SKIPPED} if chart.crosses else {}
    return [_legend(label, color=GREY, **look) for label, look in looks.items()]


def _legend(label: str, **look: Any) -> Line2D:
    return Line2D([], [], label=label, **look)


# --- memory ------------------------------------------------------------------------------------------


def plot_memory(samples: Sequence[Sample], out: Path, *, title: str | None = None, private: bool = False) -> Path:
    """Draw the processes of a run over its time: memory above, what each rank did below. 1200 pixels wide.

    Args:
        samples: of one run, in the order of their times, from :func:`~allhands.observe.monitor.read_samples`.
        out: the file; see :func:`~allhands.io.pictures.picture`.
        title: over all panels.
        private: whether the picture, and directories that are made for it, are for their owner alone.

    Returns:
        ``out``.

    Raises:
        DataError: the run was too short: no process has three samples.
        ConfigError: the suffix names another format.
        StorageError: ``out`` cannot be written.
    """
    if not can_be_drawn(samples):
        raise DataError("too few samples of memory for a picture", hint="lower ALLHANDS_MONITOR_EVERY_S")
    groups = groups_of(samples)
    ranks = [group for group in groups if group[0].role == "rank"]
    strips = ranks[:_MOST_STRIPS]
    began, ended = samples[0].time, max(sample.time for sample in samples)
    unit, unit_s = time_unit(ended - began)
    heights = [3.0, 2.2, 0.45 * max(len(strips), 1)]
    with picture(out, (12, sum(heights) + 1.9), private=private) as figure:
        if title:
            figure.suptitle(title)
        memory, mlx, phases = figure.subplots(3, 1, sharex=True, height_ratios=heights)
        times = np.linspace(began, ended, _MOST_POINTS)
        _draw_processes(memory, groups, times, (times - began) / unit_s)
        board = Board(samples)
        told = f"{format_bytes(board.peak_together_bytes)} together at most"
        if board.peak_ranks_bytes and len(ranks) < len(groups):
            told += f", the ranks {format_bytes(board.peak_ranks_bytes)}"
        memory.set_title(f"memory of all processes, pages that are shared counted once: {told}", loc="left")
        _draw_mlx(mlx, ranks, times, (times - began) / unit_s)
        mlx.set_title("MLX's memory, rank by rank", loc="left")
        for axes in (memory, mlx):
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda held, _: format_bytes(held))
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=axes is memory)
            for start in _restarts(ranks):
                axes.axvline((start - began) / unit_s, color=GREY, **_RESTART)
        _draw_phases(phases, strips, began, unit_s)
        more = f" (the first {len(strips)} of {len(ranks)} ranks)" if len(strips) < len(ranks) else ""
        phases.set_title(f"what each rank did, as shares of the time{more}", loc="left")
        phases.set_xlabel(f"time since the start ({unit})")
        phases.set_xlim(0, (ended - began) / unit_s)
        named = dict(zip(*reversed(phases.get_legend_handles_labels()), strict=True))
        figure.legend(handles=[*named.values()], loc="outside lower center", ncols=max(len(named), 1))
    return out


def can_be_drawn(samples: Sequence[Sample]) -> bool:
    """Whether some process has samples enough for a line."""
    return max(Counter(key_of(sample) for sample in samples).values(), default=0) >= _FEWEST


def _starts(group: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each start of a rank, or of another process."""
    found: dict[int, list[Sample]] = {}
    for sample in group:
        found.setdefault(sample.pid, []).append(sample)
    return list(found.values())


def _held(group: Sequence[Sample], attribute: str, times: Floats) -> Floats:
    """Bytes that a rank with all its starts, or another process, holds at each time; 0 while there is none."""
    total = np.zeros_like(times)
    for some in _starts(group):
        known = [getattr(one, attribute) or 0 for one in some]
        total += np.interp(times, [one.time for one in some], known, left=0.0, right=0.0)
    return total


def _colour(group: Sequence[Sample]) -> str:
    return RANKS[(group[0].rank or 0) % len(RANKS)]


def _area(colour: str, hatch: str, width: float) -> dict[str, Any]:
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "lw": width}


def _draw_processes(axes: Axes, groups: Sequence[Sequence[Sample]], times: Floats, x: Floats) -> None:
    """All processes on top of each other. The ranks are at the bottom, to be compared with their estimate."""
    below, directors = np.zeros_like(x), cycle(DIRECTORS)
    for place, group in enumerate(groups):
        look = _area(_colour(group), _HATCHES[(group[0].rank or 0) % len(_HATCHES)], 0.4)
        if group[0].role != "rank":
            look = _area(next(directors), "", 0.4)
        above = below + _held(group, "pss_bytes", times)
        axes.fill_between(x, below, above, label=group[0].name if place < _MOST_STRIPS else None, **look)
        below = above
    if estimated := sum(group[-1].estimated_bytes or 0 for group in groups):
        axes.axhline(estimated, color=GREY, ls=DASHED, label="ranks, as estimated")


def _draw_mlx(axes: Axes, ranks: Sequence[Sequence[Sample]], times: Floats, x: Floats) -> None:
    every = max(1, len(x) // _MARKS)
    for place, group in enumerate(ranks):
        # Earlier ones wider, so that ranks with equal needs stay visible.
        width, colour = line_width(place, len(ranks)) - 0.5, _colour(group)
        look: dict[str, Any] = {"marker": MARKERS[place % len(MARKERS)], "mfc": "white", "lw": width, "color": colour}
        active, cache = (_held(group, f"mlx_{kind}_bytes", times) for kind in ("active", "cache"))
        label = group[0].name if place < _MOST_STRIPS else None
        axes.plot(x, active, markevery=(place * every // len(ranks), every), label=label, **look)
        axes.plot(x, active + cache, lw=0.5 * width, ls=DASHED, color=colour)
        if peak := max(one.mlx_peak_bytes or 0 for one in group):
            axes.axhline(peak, color=colour, lw=0.8, ls=":")
    looks: dict[str, Any] = {"active": "-", "active and cache": DASHED, "highest active": ":"}
    for estimate in {group[-1].mlx_estimated_bytes or 0 for group in ranks} - {0}:
        axes.axhline(estimate, color=GREY, ls=_DOTTED)
        looks["estimated need"] = _DOTTED
    for label, look in looks.items():
        axes.plot([], [], color=GREY, ls=look, label=label)


def _draw_phases(axes: Axes, strips: Sequence[Sequence[Sample]], began: float, unit_s: float) -> None:
    seen = {phase for group in strips for one in group for phase in one.phases}
    looks = PHASES | {name: (name, OTHER, "") for name in sorted(seen - PHASES.keys())}
    for row, some in ((row, some) for row, group in enumerate(strips) for some in _starts(group)):
        whole = np.array([sum(one.phases.values()) for one in some])
        ends = np.array([some[0].time - whole[0], *(one.time for one in some)])
        below = np.full(len(ends), row + 0.4)
        for phase, (label, colour, hatch) in looks.items():
            shares = np.array([one.phases.get(phase, 0.0) for one in some]) / np.where(whole, whole, 1.0)
            above = below - 0.8 * np.array([shares[0], *shares])
            if shares.any():
                look = _area(colour, hatch, 0)
                axes.fill_between((ends - began) / unit_s, below, above, step="pre", label=label, **look)
            below = above
    axes.set_yticks(range(len(strips)), [group[0].name for group in strips])
    for label, group in zip(axes.get_yticklabels(), strips, strict=True):
        label.set_color(_colour(group))
    axes.set_ylim(max(len(strips), 1) - 0.4, -0.6)
    axes.grid(visible=False)


def _restarts(ranks: Sequence[Sequence[Sample]]) -> list[float]:
    """When the latest attempts began, after the first."""
    samples = sorted((sample for group in ranks for sample in group), key=lambda one: (one.attempt, -one.time))
    return list({sample.attempt: sample.time for sample in samples}.values())[1:]
