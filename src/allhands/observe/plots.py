"""Pictures of runs: ``loss.png`` and ``memory.png``, drawn by Matplotlib without pyplot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from allhands.errors import DataError
from allhands.io.formatting import format_bytes, format_mark
from allhands.io.paths import output_file
from allhands.io.pictures import (
    DASHED,
    DIRECTORS,
    GREY,
    MARKERS,
    OTHER,
    PHASES,
    PICTURES,
    RANKS,
    RUNS,
    picture,
)
from allhands.observe.charts import (
    Chart,
    Floats,
    Line,
    groups_of,
    line_width,
    loss_charts,
    time_unit,
)
from allhands.observe.metrics import RunHistory
from allhands.observe.monitor.board import Board, key_of
from allhands.observe.monitor.samples import Sample
from allhands.observe.times import names_of

_MARKS = 8  # on a curve
_LEGEND_WIDTH = 0.36  # of line styles, as a part of a panel of losses
_HATCHES = ("", "///", "...", "xx", "---", "ooo", "\\\\\\")  # of ranks, besides their colours
_DOTTED = (0, (1, 3))
Look = dict[str, Any]  # how something is drawn, in matplotlib's words
_RESTART: Look = {"ls": ":", "lw": 1.0, "alpha": 0.8, "zorder": 1}
_SKIPPED: Look = {"ls": "", "marker": "x", "ms": 6, "mew": 1.5}
_FEWEST = 3  # samples of a process that make a line
_MOST_POINTS = 600
_MOST_RANKS = 12  # with a name or a row of their own

Group = Sequence[Sample]  # of one process, with all its starts


# --- losses ---------------------------------------------------------------------------------------


def plot_losses(
    runs: Sequence[RunHistory], out: Path, *, title: str | None = None, private: bool = False
) -> Path:
    """Draw training and validation loss of ``runs`` over steps (left) and over elapsed time
    (right).

    A run has one colour; training is solid (thin: as reported, thick: smoothed), validation dashed
    with markers and a star at its lowest point. Earlier runs are drawn wider below later ones, so
    that identical curves stay visible. A dotted line marks each restart, a cross on the axis each
    skipped step. The picture has 1200 x 600 pixels.

    Args:
        runs: at least one with a finite loss.
        out: the file; see :func:`~allhands.io.pictures.picture`.
        title: over both panels.
        private: whether the picture, and directories that are made for it, are for their owner
            alone.

    Returns:
        ``out``.

    Raises:
        DataError: no run has a loss to draw.
        ConfigError: the suffix names another format.
        StorageError: ``out`` cannot be written.
    """
    out, labels = output_file(Path(out), PICTURES), names_of(runs)
    charts = {one.key: one for one in loss_charts(labels, runs)}
    if not charts.keys() >= {"loss-steps", "loss-time"}:
        raise DataError(
            "no run has a loss to draw yet",
            code="samples-missing",
            where=", ".join(run.name for run in runs),
            hint="wait for the first report of the run, then plot again",
        )
    by_step = charts["loss-steps"]
    with picture(out, (12, 6), private=private) as figure:
        figure.suptitle(title or "Training and validation loss", wrap=True)
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_losses(left, by_step)
        _draw_losses(right, charts["loss-time"])
        left.locator_params(integer=True, axis="x")
        right.tick_params(labelleft=True)
        right.set_ylabel("")
        styles = _styles(by_step)
        right.legend(
            handles=styles,
            loc=_free_place(right, charts["loss-time"], 0.05 * len(styles) + 0.04),
            frameon=True,
            facecolor="white",
            edgecolor="none",
        )
        figure.legend(handles=_names(labels, by_step), loc="outside lower center", ncols=2)
    return out


def _free_place(axes: Axes, chart: Chart, height: float) -> str:
    """Return the place for a legend of this height, as a part of the panel's, with the fewest
    curves behind it.

    matplotlib's own ``best`` takes long among many points, and warns of that.
    """
    drawn = [line.known for line in chart.lines]
    dense = [
        np.column_stack([x := np.linspace(xs[0], xs[-1], 200), np.interp(x, xs, ys)])
        for xs, ys in (np.array(points, dtype=np.float64).T for points in drawn if points)
    ]
    axes.autoscale_view()
    x, y = axes.transLimits.transform(np.concatenate(dense)).T
    right, middle = x > 1 - _LEGEND_WIDTH, abs(y - 0.5) < height / 2
    behind = {
        "upper right": right & (y > 1 - height),
        "center right": right & middle,
        "upper center": (abs(x - 0.5) < _LEGEND_WIDTH / 2) & (y > 1 - height),
        "lower left": (x < _LEGEND_WIDTH) & (y < height),
        "upper left": (x < _LEGEND_WIDTH) & (y > 1 - height),
    }
    return min(behind, key=lambda place: int(behind[place].sum()))


def _draw_losses(axes: Axes, chart: Chart) -> None:
    several = len({line.colour for line in chart.lines}) > 1
    for line in chart.lines:
        look = _look_of(line, marked=several or line.points)
        axes.plot(
            line.x, np.array(line.y, dtype=np.float64), color=_run_colour(line.colour), **look
        )
    widths = {line.colour: line.width for line in chart.lines if not line.faint}
    star: Look = {"marker": "*", "mec": "white", "mew": 0.7, "zorder": 5}
    for x, y, run in chart.stars:
        axes.plot(x, y, color=_run_colour(run), ms=8 + 4 * widths[run], **star)
    for x, run in dict.fromkeys(chart.marks):
        axes.axvline(x, color=_run_colour(run), **_RESTART)
    on_axis: Look = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 4}
    for x, run in chart.crosses:
        axes.plot(x, 0, color=_run_colour(run), **on_axis, **_SKIPPED)
    axes.margins(x=0.03, y=0.08)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.top is not None:
        axes.set_ylim(0.0, chart.top)


def _look_of(line: Line, *, marked: bool) -> Look:
    look: Look = {"lw": line.width}
    if line.faint:
        look |= {"lw": 0.8, "alpha": 0.4}
    elif marked:
        every = 1 if line.dashed else max(1, len(line.x) // _MARKS)
        look |= {
            "marker": MARKERS[line.colour % len(MARKERS)],
            "ms": 4 + 1.5 * line.width,
            "markevery": every,
        }
    if line.dashed:
        look |= {"ls": DASHED, "lw": 0.7 * line.width, "mfc": "white", "mew": 1.5}
    return look


def _run_colour(run: int) -> str:
    return RUNS[run % len(RUNS)]


def _names(labels: Sequence[str], chart: Chart) -> list[Line2D]:
    """The legend of runs: colour and marker."""
    best = {run: f": best validation {y:.3f}" for _, y, run in chart.stars}
    drawn = sorted({line.colour for line in chart.lines})
    handles: list[Line2D] = []
    for run in drawn:
        marker = MARKERS[run % len(MARKERS)] if len(drawn) > 1 else ""
        handles.append(
            _legend(
                f"{labels[run]}{best.get(run, '')}",
                color=_run_colour(run),
                lw=3,
                marker=marker,
                ms=9,
            )
        )
    return handles


def _styles(chart: Chart) -> list[Line2D]:
    """The legend of line styles."""
    looks: dict[str, Look] = {}
    if any(line.faint for line in chart.lines):
        looks = {
            "training, as reported": {"lw": 0.8, "alpha": 0.6},
            "training, smoothed": {"lw": 2},
        }
    else:
        looks = {"training": {"lw": 2}}
    if chart.stars:
        looks["validation"] = {"ls": DASHED, "marker": "o", "mfc": "white"}
        looks["best validation"] = {"ls": "", "marker": "*", "ms": 12}
    if chart.marks:
        looks["restart"] = _RESTART
    if chart.crosses:
        looks["skipped step"] = _SKIPPED
    return [_legend(label, color=GREY, **look) for label, look in looks.items()]


def _legend(label: str, **look: Any) -> Line2D:
    return Line2D([], [], label=label, **look)


# --- memory ---------------------------------------------------------------------------------------


def plot_memory(
    samples: Sequence[Sample], out: Path, *, title: str | None = None, private: bool = False
) -> Path:
    """Draw the processes of a run over its time: memory above, phases of each rank below. 1200
    pixels wide.

    Args:
        samples: of one run, in the order of their times, from
            :func:`~allhands.observe.monitor.read_samples`.
        out: the file; see :func:`~allhands.io.pictures.picture`.
        title: over all panels.
        private: whether the picture, and directories that are made for it, are for their owner
            alone.

    Returns:
        ``out``.

    Raises:
        DataError: the run was too short: no process has three samples.
        ConfigError: the suffix names another format.
        StorageError: ``out`` cannot be written.
    """
    out = output_file(Path(out), PICTURES)
    if not can_be_drawn(samples):
        raise DataError(
            "too few samples of memory for a picture",
            code="samples-missing",
            hint="lower ALLHANDS_MONITOR_EVERY_S",
        )
    began, ended = samples[0].time, max(sample.time for sample in samples)
    unit, unit_s = time_unit(ended - began)
    groups = groups_of([replace(sample, time=(sample.time - began) / unit_s) for sample in samples])
    ranks = [group for group in groups if group[0].role == "rank"]
    times = np.linspace(0, (ended - began) / unit_s, _MOST_POINTS)
    heights = [3.0, 2.2, 0.45 * max(min(len(ranks), _MOST_RANKS), 1)]
    with picture(out, (12, sum(heights) + 1.9), private=private) as figure:
        if title:
            figure.suptitle(title)
        memory, mlx, phases = figure.subplots(3, 1, sharex=True, height_ratios=heights)
        _draw_processes(memory, groups, times)
        memory.set_title(_most_together(samples), loc="left")
        _draw_mlx(mlx, ranks, times)
        mlx.set_title("MLX's memory of each rank", loc="left")
        for axes in (memory, mlx):
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda held, _: format_mark(held))
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=axes is memory)
            for restart in _restarts(ranks):
                axes.axvline(restart, color=GREY, **_RESTART)
        _draw_phases(phases, ranks[:_MOST_RANKS], unit_s)
        more = (
            f" (the first {_MOST_RANKS} of {len(ranks)} ranks)" if len(ranks) > _MOST_RANKS else ""
        )
        phases.set_title(f"phases of each rank, as shares of the time{more}", loc="left")
        phases.set_xlabel(f"time since the start ({unit})")
        phases.set_xlim(times[0], times[-1])
        handles, names = phases.get_legend_handles_labels()
        named = dict(zip(names, handles, strict=True))
        figure.legend(
            handles=[*named.values()], loc="outside lower center", ncols=max(len(named), 1)
        )
    return out


def can_be_drawn(samples: Sequence[Sample]) -> bool:
    """Return whether some process has samples enough for a line."""
    return max(Counter(key_of(sample) for sample in samples).values(), default=0) >= _FEWEST


def _most_together(samples: Sequence[Sample]) -> str:
    """The title above the memory of all processes."""
    board = Board(samples)
    ranks = f", the ranks {format_bytes(board.peak_ranks_bytes)}"
    only_ranks = all(sample.role == "rank" for sample in samples)
    most = f"{format_bytes(board.peak_together_bytes)}{'' if only_ranks else ranks}"
    return f"memory of all processes, shared pages counted once; highest sum: {most}"


def _starts(group: Group) -> list[list[Sample]]:
    """The samples of each start of a process."""
    found: dict[int, list[Sample]] = {}
    for sample in group:
        found.setdefault(sample.pid, []).append(sample)
    return list(found.values())


def _held(group: Group, attribute: str, times: Floats) -> Floats:
    """Bytes that a process holds at each time; 0 while it does not run."""
    total = np.zeros_like(times)
    for some in _starts(group):
        known = [getattr(one, attribute) or 0 for one in some]
        total += np.interp(times, [one.time for one in some], known, left=0.0, right=0.0)
    return total


def _rank_colour(group: Group) -> str:
    return RANKS[(group[0].rank or 0) % len(RANKS)]


def _draw_processes(axes: Axes, groups: Sequence[Group], times: Floats) -> None:
    """Stack the memory of all processes, the ranks at the bottom, beside their estimate."""
    directors = cycle(DIRECTORS)
    colours = [
        _rank_colour(group) if group[0].role == "rank" else next(directors) for group in groups
    ]
    held = [_held(group, "pss_bytes", times) for group in groups]
    areas = axes.stackplot(times, *held, colors=colours, edgecolor="white", lw=0.4)
    for group, area in zip(groups[:_MOST_RANKS], areas, strict=False):
        area.set_label(group[0].name)
    for group, area in zip(groups, areas, strict=True):
        if group[0].role == "rank":
            area.set_hatch(_HATCHES[(group[0].rank or 0) % len(_HATCHES)])
    if estimated := sum(group[-1].estimated_bytes or 0 for group in groups):
        axes.axhline(estimated, color=GREY, ls=DASHED, label="ranks, as estimated")


def _draw_mlx(axes: Axes, ranks: Sequence[Group], times: Floats) -> None:
    every = max(1, len(times) // _MARKS)
    for place, group in enumerate(ranks):
        colour, width = _rank_colour(group), line_width(place, len(ranks)) - 0.5
        active = _held(group, "mlx_active_bytes", times)
        cache = _held(group, "mlx_cache_bytes", times)
        marker: Look = {
            "marker": MARKERS[place % len(MARKERS)],
            "mfc": "white",
            "markevery": (place * every // len(ranks), every),
        }
        name = group[0].name if place < _MOST_RANKS else None
        axes.plot(times, active, color=colour, lw=width, label=name, **marker)
        axes.plot(times, active + cache, color=colour, lw=0.5 * width, ls=DASHED)
        if peak := max(one.mlx_peak_bytes or 0 for one in group):
            axes.axhline(peak, color=colour, lw=0.8, ls=":")
    looks: Look = {"active": "-", "active and cache": DASHED, "highest active": ":"}
    if estimates := {group[-1].mlx_estimated_bytes or 0 for group in ranks} - {0}:
        looks["estimated need"] = _DOTTED
    for estimate in estimates:
        axes.axhline(estimate, color=GREY, ls=_DOTTED)
    for label, style in looks.items():
        axes.plot([], [], color=GREY, ls=style, label=label)


def _draw_phases(axes: Axes, ranks: Sequence[Group], unit_s: float) -> None:
    """Draw a strip for each rank: the shares of the phases between one sample and the next."""
    seen = {phase for group in ranks for sample in group for phase in sample.phases}
    looks = PHASES | {name: (name, OTHER, "") for name in sorted(seen - PHASES.keys())}
    for row, group in enumerate(ranks):
        for some in _starts(group):
            _draw_strip(axes, some, row, looks, unit_s)
    axes.set_yticks(range(len(ranks)), [group[0].name for group in ranks])
    for label, group in zip(axes.get_yticklabels(), ranks, strict=True):
        label.set_color(_rank_colour(group))
    axes.set_ylim(max(len(ranks), 1) - 0.4, -0.6)
    axes.grid(visible=False)


def _draw_strip(
    axes: Axes, some: Group, row: int, looks: Mapping[str, tuple[str, str, str]], unit_s: float
) -> None:
    """Draw one start of a rank."""
    whole = np.array([sum(one.phases.values()) for one in some])
    ends = [some[0].time - whole[0] / unit_s, *(one.time for one in some)]
    below = np.full(len(ends), row + 0.4)
    for phase, (label, colour, hatch) in looks.items():
        spent = np.array([one.phases.get(phase, 0.0) for one in some])
        shares = spent / np.where(whole, whole, 1.0)
        above = below - 0.8 * np.array([shares[0], *shares])
        if shares.any():
            look: Look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "lw": 0}
            axes.fill_between(ends, below, above, step="pre", label=label, **look)
        below = above


def _restarts(ranks: Sequence[Group]) -> list[float]:
    """The begin of each attempt after the first."""
    began: dict[int, float] = {}
    for group in ranks:
        for sample in group:
            began[sample.attempt] = min(sample.time, began.get(sample.attempt, sample.time))
    return [began[attempt] for attempt in sorted(began)[1:]]
