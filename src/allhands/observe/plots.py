"""Pictures and tables of finished or running training: loss curves, times, speed-up.

Nothing here touches matplotlib's global state: figures are made without pyplot and drawn by Agg.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text

from allhands.errors import DataError
from allhands.io.files import make_directory
from allhands.io.formatting import format_bytes, format_duration, format_memory, format_rate
from allhands.io.pictures import DASHED, GREY, MARKERS, RUNS, STYLE, picture_suffix, write_picture
from allhands.observe.metrics import RunHistory, RunStarted, TrainReport, ValidReport, typical

Floats = NDArray[np.float64]

_LONGEST_NAME = 30
_NONE = "-"
_MARKS = 8  # on a curve
_SMOOTH_FROM = 20  # points; with fewer, every point can be seen
_RESTART_ROOM = 0.1  # share of a panel's width that the word "restart" needs
_SIDE_BY_SIDE = 3  # runs; with more, the columns of the table would be too narrow
_RESTART_LOOK: dict[str, Any] = {"ls": ":", "lw": 1.0, "alpha": 0.8, "zorder": 1}
_SKIPPED_LOOK: dict[str, Any] = {"ls": "", "marker": "x", "ms": 6, "mew": 1.5}


@dataclass(frozen=True)
class _Curve:
    """What is drawn of one run: finite points only. The first run is drawn first and widest.

    ``restarts`` and ``skipped`` are steps and elapsed seconds, without a height of their own.
    """

    label: str
    colour: str
    marker: str
    width: float
    train: tuple[Floats, Floats, Floats]  # step, elapsed seconds, loss
    valid: tuple[Floats, Floats, Floats]
    restarts: tuple[Floats, Floats]
    skipped: tuple[Floats, Floats]
    marked: bool = False  # whether there are others from which the colour alone would tell it

    @property
    def best(self) -> int:
        """The index of the lowest validation loss."""
        return int(np.argmin(self.valid[2]))


def plot_losses(runs: Sequence[RunHistory], out: Path, *, title: str | None = None, private: bool = False) -> Path:
    """Draw training and validation loss of ``runs`` over steps (left) and over elapsed time (right).

    A run has one colour; training is solid (thin: as reported, thick: smoothed), validation dashed with
    markers and a star at its lowest point. Earlier runs are drawn wider below later ones, so that
    identical curves stay visible. A dotted line marks each restart, a cross on the axis each skipped step. The
    picture has 1200 x 600 pixels.

    Args:
        runs: at least one with a finite loss.
        out: the file; ``.png``, ``.svg`` or ``.pdf``; PNG without a suffix. Replaced whole or not at all.
        title: over both panels.
        private: whether the picture, and directories that are made for it, are for their owner alone.

    Returns:
        ``out``.

    Raises:
        DataError: no run has a loss to draw.
        ConfigError: the suffix names another format.
        StorageError: ``out`` cannot be written.
    """
    out = Path(out)
    suffix = picture_suffix(out)
    curves = _curves(runs)
    if not curves:
        hint = "wait for the first report of the run, then plot again"
        raise DataError("no run has a loss to draw yet", where=", ".join(run.name for run in runs), hint=hint)
    with matplotlib.style.context(["default", STYLE]):  # restores the caller's settings
        figure = Figure(figsize=(12, 6), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        FigureCanvasAgg(figure)
        _draw(figure, curves, title or "Training and validation loss")
        make_directory(out.parent, private=private)
        write_picture(figure, out, suffix, private=private)
    return out


def _draw(figure: Figure, curves: Sequence[_Curve], title: str) -> None:
    figure.suptitle(title, fontsize=15, fontweight="bold", color="#222222", wrap=True)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    times = np.concatenate([times for curve in curves for times in (curve.train[1], curve.valid[1])])
    unit, unit_s = time_unit(float(times.max()))
    panels = (by_step, 0, 1.0), (by_time, 1, unit_s)
    for axes, column, scale in panels:
        for curve in curves:
            _draw_curve(axes, curve, column, scale)
            _draw_marks(axes, curve, column, scale)
        axes.margins(x=0.03, y=0.08)
        axes.locator_params(integer=column == 0, nbins=8, axis="x")
        if len(curves) == 1 and curves[0].valid[2].size:
            _annotate_best(axes, curves[0], column, scale)
    by_step.set(title="over steps", xlabel="step (one optimizer update)")
    top = axis_top([[curve.train[2].tolist(), curve.valid[2].tolist()] for curve in curves])
    by_step.set_ylabel(f"loss per token (lower is better){cut_off(top)}")
    if top is not None:
        by_step.set_ylim(0.0, top)  # of both panels
    by_time.set(title="over time", xlabel=f"training time ({unit})")
    by_time.tick_params(labelleft=True)
    for axes, column, scale in panels:
        _name_restarts(axes, np.concatenate([curve.restarts[column] for curve in curves]) / scale)
    _draw_legends(figure, by_time, curves)


def _draw_curve(axes: Axes, curve: _Curve, column: int, scale: float) -> None:
    look: dict[str, Any] = {"color": curve.colour, "marker": "." if curve.train[2].size == 1 else None}
    x, loss = curve.train[column] / scale, curve.train[2]
    axes.plot(x, loss, lw=0.8, alpha=0.4, **look)
    marks: dict[str, Any] = {}
    if curve.marked and loss.size > 1:
        marks = {"marker": curve.marker, "markevery": max(1, loss.size // _MARKS)}
    axes.plot(x, smooth(loss), lw=curve.width, ms=5 + curve.width, solid_capstyle="round", **{**look, **marks})
    x, loss = curve.valid[column] / scale, curve.valid[2]
    if not loss.size:
        return
    look |= {"marker": curve.marker, "ms": 4 + 1.5 * curve.width}
    axes.plot(x, loss, lw=0.7 * curve.width, ls=DASHED, mfc="white", mew=1.5, **look)
    look |= {"marker": "*", "ms": 8 + 4 * curve.width, "mec": "white", "mew": 0.7, "zorder": 5}
    axes.plot(x[curve.best], loss[curve.best], **look)


def _draw_marks(axes: Axes, curve: _Curve, column: int, scale: float) -> None:
    """Restarts over the whole height, below all curves; skipped steps on the axis."""
    for x in np.unique(curve.restarts[column] / scale):
        axes.axvline(float(x), color=curve.colour, **_RESTART_LOOK)
    look = _SKIPPED_LOOK | {"color": curve.colour, "clip_on": False, "zorder": 4}
    if curve.skipped[column].size:
        axes.plot(curve.skipped[column] / scale, np.zeros(curve.skipped[column].size), **look, **_on_axis(axes))


def _on_axis(axes: Axes) -> dict[str, Any]:
    """Heights count from the bottom of the panel, as shares of it."""
    return {"transform": axes.get_xaxis_transform()}


def _name_restarts(axes: Axes, places: Floats) -> None:
    """The word over the first line, and over each further one that leaves room for it; the panel's title above."""
    if not places.size:
        return
    axes.set_title(axes.get_title(), pad=18)
    low, high = axes.get_xlim()
    room, last = _RESTART_ROOM * (high - low), -np.inf
    for x, count in zip(*np.unique(places, return_counts=True), strict=True):
        if x - last >= room:
            words = "restart" if count == 1 else f"{count} restarts"
            axes.text(float(x), 1.01, words, ha="center", va="bottom", fontsize=8, color=GREY, **_on_axis(axes))
            last = x


def _annotate_best(axes: Axes, curve: _Curve, column: int, scale: float) -> None:
    """Name the best validation point, on its side towards the middle of the panel."""
    best = curve.best
    x = curve.valid[column] / scale
    left = x[best] < np.mean(axes.get_xlim())
    low = curve.valid[2][best] < np.mean(axes.get_ylim())
    axes.annotate(
        f"best validation {curve.valid[2][best]:.3f}",
        xy=(float(x[best]), float(curve.valid[2][best])),
        xytext=(20 if left else -20, 60 if low else -60),
        textcoords="offset points",
        ha="left" if left else "right",
        color="#222222",
        bbox={"boxstyle": "round,pad=0.3", "fc": "white", "ec": curve.colour},
        arrowprops={"arrowstyle": "->", "color": GREY, "shrinkB": 8},
        zorder=6,
    )


def _draw_legends(figure: Figure, axes: Axes, curves: Sequence[_Curve]) -> None:
    """The runs by colour below the panels; what the line styles mean where ``axes`` has room."""
    runs = [
        Line2D([], [], color=curve.colour, lw=3, marker=curve.marker if curve.marked else "", ms=9, label=curve.label)
        for curve in curves
    ]
    figure.legend(handles=runs, loc="outside lower center", ncols=min(len(runs), 2))
    styles = [Line2D([], [], color=GREY, lw=2, label="training")]
    if any(curve.train[2].size >= _SMOOTH_FROM for curve in curves):
        styles.insert(0, Line2D([], [], color=GREY, lw=0.8, alpha=0.6, label="training, as reported"))
        styles[1].set_label("training, smoothed")
    if any(curve.valid[2].size for curve in curves):
        styles.append(Line2D([], [], color=GREY, ls=DASHED, marker="o", mfc="white", label="validation"))
        styles.append(Line2D([], [], color=GREY, ls="", marker="*", ms=12, label="best validation"))
    if any(curve.restarts[0].size for curve in curves):
        styles.append(Line2D([], [], color=GREY, label="restart", **_RESTART_LOOK))
    if any(curve.skipped[0].size for curve in curves):
        styles.append(Line2D([], [], color=GREY, label="skipped step", **_SKIPPED_LOOK))
    axes.legend(handles=styles, loc="best", frameon=True, facecolor="white", edgecolor="none", handlelength=2.8)


def axis_top(runs: Sequence[Sequence[Sequence[float]]], far: float = 2.5) -> float | None:
    """Where to cut a vertical axis from 0 off, so that a run that was thrown off leaves the others their height.

    At least one run is below it as a whole, and of each of the others that comes near twice what it began with.

    Args:
        runs: the finite heights of the lines of each.
        far: times the top the highest must be; ``None`` is returned if it is not, or there is one run only.
    """
    known = [lines for run in runs if (lines := [line for line in run if len(line)])]
    if len(known) < 2 or min(min(line) for lines in known for line in lines) < 0:
        return None
    highest = [max(map(max, lines)) for lines in known]
    base = min(highest)
    near = [place for place, lines in enumerate(known) if min(map(min, lines)) <= 4 * base]
    starts = [min(line[0] for line in lines) for lines in known]
    top = max(min(highest[place], max(2 * starts[place], base)) for place in near) if base > 0 else 0.0
    return 1.08 * top if 0 < far * top < max(highest) else None


def cut_off(top: float | None) -> str:
    """What the name of such an axis has to say."""
    return "" if top is None else f"; cut off at {top:.3g}"


def smooth(values: Floats) -> Floats:
    """A centred moving mean over about a tenth of the points; the same shape as ``values``.

    At the start, where losses fall fast, the window shrinks on both sides, so that the curve starts where the
    values do; at the end only its right side is cut off, so that the last value does not bend the curve.
    """
    count = len(values)
    index = np.arange(count)
    half = np.minimum(count // _SMOOTH_FROM, index)
    first, behind = index - half, np.minimum(index + half + 1, count)
    total = np.concatenate(([0.0], np.cumsum(values)))
    return (total[behind] - total[first]) / (behind - first)


def _curves(runs: Sequence[RunHistory]) -> list[_Curve]:
    drawn = [
        (label, run, train, valid)
        for label, run in zip(_labels(runs), runs, strict=True)
        if (train := _finite(run.train))[2].size + (valid := _finite(run.valid))[2].size
    ]
    return [
        _Curve(
            label=label + (f": best validation {valid[2].min():.3f}" if valid[2].size else ""),
            colour=RUNS[place % len(RUNS)],
            marker=MARKERS[place % len(MARKERS)],
            width=1.8 + min(2.2, 4 / len(drawn)) * (len(drawn) - 1 - place),
            train=train,
            valid=valid,
            restarts=_columns(run.restarts),
            skipped=_skipped(run, train if train[2].size else valid),
            marked=len(drawn) > 1,
        )
        for place, (label, run, train, valid) in enumerate(drawn)
    ]


def _finite(reports: Sequence[TrainReport] | Sequence[ValidReport]) -> tuple[Floats, Floats, Floats]:
    """Steps, elapsed seconds and losses, less those that are not finite: they cannot be drawn."""
    rows = [(report.step, report.elapsed_s, report.loss) for report in reports]
    table = np.asarray(rows, dtype=np.float64).reshape(-1, 3)
    table = table[np.isfinite(table).all(axis=1)]
    return table[:, 0], table[:, 1], table[:, 2]


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _skipped(run: RunHistory, known: tuple[Floats, Floats, Floats]) -> tuple[Floats, Floats]:
    """Skipped steps, with times between those of the points around them."""
    steps = np.asarray([skipped.step for skipped in run.skipped], dtype=np.float64)
    return steps, np.interp(steps, known[0], known[1])


def _labels(runs: Sequence[RunHistory]) -> list[str]:
    """Names short enough for a legend, with the number of ranks, and a number where they would be equal."""
    labels: list[str] = []
    for run in runs:
        name = " ".join(run.name.split())
        label = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        if run.started:
            label += f" ({_ranks(run)} rank{'s' * (_ranks(run) != '1')})"
        labels.append(label)
    count, seen = Counter(labels), Counter[str]()
    for place, label in enumerate(labels):
        seen[label] += 1
        labels[place] = f"{label} #{seen[label]}" if count[label] > 1 else label
    return labels


def _ranks(run: RunHistory) -> str:
    """How many there were; of a run that went on with others each number once, since all have a part in its figures."""
    return of_starts(run, lambda start: start.num_ranks) or _NONE


def _cores(run: RunHistory) -> str:
    return of_starts(run, lambda start: start.cores_per_rank) or _NONE


def of_starts(run: RunHistory, tell: Callable[[RunStarted], object]) -> str:
    """What its starts had, each value once, in their order; empty if nothing is known."""
    starts = run.starts or ([run.started] if run.started else [])
    return ", ".join(dict.fromkeys(str(value) for start in starts if (value := tell(start)) not in (None, 0, "")))


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit in which times up to ``longest_s`` are told, and its seconds."""
    if longest_s < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if longest_s < 3 * 3600 else ("hours", 3600.0)


def times_table(runs: Sequence[RunHistory]) -> Table:
    """The runs side by side, one column a run; of more than three, one row a run, so that 80 columns are enough.

    See :func:`times_markdown` for what is compared.
    """
    caption = "speed-up: tokens/s relative to the first run"
    if len(runs) > _SIDE_BY_SIDE:
        return _rows(runs, caption)
    table = Table(title="Training times", caption=caption)
    table.add_column("", no_wrap=True)
    for label in _labels(runs):
        table.add_column(Text(label), justify="right", overflow="fold")
    for measure, cells in _measures(runs):
        table.add_row(measure, *cells)
    return table


# Headings of columns that are no wider than their figures. The number of ranks stands in the name of the run.
_HEADINGS = {
    "cores per rank": "cores",
    "steps": "steps",
    "training time": "time",
    "seconds per step": "s per\nstep",
    "tokens/s": "tokens\n/s",
    "speed-up": "speed\n-up",
    "final training loss": "train\nloss",
    "best validation loss": "valid\nloss",
    "peak memory": "peak\nmemory",
    "restarts": "re-\nstarts",
}


def _rows(runs: Sequence[RunHistory], caption: str) -> Table:
    """One row a run, in 80 columns: no ranges, and the cores only where they differ."""
    highest = [_known(max(run.peaks, default=np.nan), format_bytes) for run in runs]
    measures = dict(_measures(runs)) | {"peak memory": highest}
    if len(set(measures["cores per rank"])) == 1:
        del measures["cores per rank"]
    table = Table(title="Training times", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.caption = f"{caption};\nvalid loss: the lowest; peak memory: of the rank that needs most"
    # Room for "1 rank)" and the like, so that only words of a long name are broken.
    table.add_column("run", overflow="fold", vertical="top", min_width=8)
    shown = {measure: heading for measure, heading in _HEADINGS.items() if measure in measures}
    for measure, heading in shown.items():
        wraps = measure == "steps"  # "10000 of 20000"
        table.add_column(heading, justify="right", no_wrap=not wraps, min_width=6 if wraps else None, vertical="top")
    for place, label in enumerate(_labels(runs)):
        table.add_row(Text(label), *(measures[measure][place] for measure in shown))
    return table


def times_of(runs: Sequence[RunHistory]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The names of the runs, and each measure of :func:`times_markdown` with its figure of each run."""
    return _labels(runs), _measures(runs)


def times_markdown(runs: Sequence[RunHistory]) -> str:
    """The same figures as :func:`times_table` as a Markdown table, one row a run.

    Seconds per step and tokens per second are medians over the reports, which leaves out warm-up and pauses.
    The speed-up is the ratio of tokens per second to the first run: it stays right when batch sizes differ.
    """
    measures = _measures(runs)
    rows = [["run", *(measure for measure, _ in measures)], ["---", *["---:"] * len(measures)]]
    for place, label in enumerate(_labels(runs)):
        rows.append([label.replace("|", "\\|"), *(cells[place] for _, cells in measures)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _measures(runs: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    speeds = [typical(report.tokens_per_s for report in run.train) for run in runs]
    step_s = [typical(report.step_time_s for report in run.train) for run in runs]
    first = (speeds[:1] or [0.0])[0] or np.nan
    restarts = [len(run.restarts) for run in runs]
    measures = [
        ("ranks", [_ranks(run) for run in runs]),
        ("cores per rank", [_cores(run) for run in runs]),
        ("steps", [_steps(run) for run in runs]),
        ("training time", [_known(_total_s(run), format_duration) for run in runs]),
        ("seconds per step", [_known(seconds, "{:.3g}".format) for seconds in step_s]),
        ("tokens/s", [_known(speed, format_rate) for speed in speeds]),
        ("speed-up", [_known(speed / first, "{:.2f}x".format) for speed in speeds]),
        ("final training loss", [_known(_last_loss(run), "{:.3f}".format) for run in runs]),
        ("best validation loss", [_known(_best_loss(run), "{:.3f}".format) for run in runs]),
        ("peak memory per rank", [_peak_memory(run) for run in runs]),
    ]
    return [*measures, *([("restarts", [str(count) for count in restarts])] if any(restarts) else [])]


def _known(value: float, show: Callable[[float], str]) -> str:
    return show(value) if np.isfinite(value) else _NONE


def _steps(run: RunHistory) -> str:
    """``600``, or ``400 of 600`` where the run is not complete."""
    done = max([report.step for report in run.train] + ([run.ended.step] if run.ended else []), default=0)
    total = run.started.total_steps if run.started else done
    return str(done) if done >= total else f"{done} of {total}"


def _total_s(run: RunHistory) -> float:
    """The time of all starts, up to the last report where it has not ended."""
    return np.nan if run.trained_s is None else run.trained_s


def _last_loss(run: RunHistory) -> float:
    return run.train[-1].loss if run.train else np.nan


def _best_loss(run: RunHistory) -> float:
    return min((report.loss for report in run.valid if np.isfinite(report.loss)), default=np.nan)


def _peak_memory(run: RunHistory) -> str:
    return format_memory(run.peaks) if run.peaks else _NONE
