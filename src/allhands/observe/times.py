"""Times, speed-up and losses of runs as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from allhands.io.formatting import format_bytes, format_duration, format_memory, format_rate
from allhands.observe.metrics import RunHistory, RunStarted, typical

# Characters of a name that fit into a table of 80 columns. Names often differ at their end.
_LONGEST_NAME = 24
_NONE = "-"
# Of a run that went on with others each number once, since all have a part in its figures.
_RANKS = attrgetter("num_ranks")


def names_of(runs: Sequence[RunHistory]) -> list[str]:
    """Short names of the runs, with the number of ranks, and a number of their own where they would
    be equal.
    """
    labels: list[str] = []
    for run in runs:
        name = " ".join(run.name.split())
        label = _shortened(name)
        if ranks := of_starts(run, _RANKS):
            label += f" ({ranks} rank{'s' * (ranks != '1')})"
        labels.append(label)
    count, seen = Counter(labels), Counter[str]()
    for place, label in enumerate(labels):
        seen[label] += 1
        labels[place] = f"{label} #{seen[label]}" if count[label] > 1 else label
    return labels


def _shortened(name: str) -> str:
    """A name without the middle of a long one."""
    if len(name) <= _LONGEST_NAME:
        return name
    half = _LONGEST_NAME // 2
    return f"{name[: half - 1]}…{name[-half:]}"


def of_starts(run: RunHistory, tell: Callable[[RunStarted], object]) -> str:
    """Return the values of a run's starts, each once, in their order; empty if nothing is known."""
    starts = run.starts or ([run.started] if run.started else [])
    return ", ".join(
        dict.fromkeys(str(value) for start in starts if (value := tell(start)) not in (None, 0, ""))
    )


# Headings of columns that are no wider than their figures. The number of ranks stands in the name
# of the run.
_HEADINGS = {
    "cores per rank": "cores",
    "steps": "steps",
    "training time": "time",
    "seconds per step": "s per\nstep",
    "tokens/s": "tokens\nper s",
    "speed-up": "speed-up",
    "final training loss": "train\nloss",
    "best validation loss": "valid\nloss",
    "peak memory": "peak\nmemory",
    "restarts": "restarts",
}


def times_table(runs: Sequence[RunHistory]) -> Table:
    """One row a run, in 80 columns: no ranges, and the cores only where they differ.

    See :func:`times_markdown` for what is compared.
    """
    labels, known = times_of(runs)
    measures = dict(known) | {
        "peak memory": [_known(max(run.peaks, default=np.nan), format_bytes) for run in runs]
    }
    if len(set(measures["cores per rank"])) == 1:
        del measures["cores per rank"]
    table = Table(title="Training times", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.caption = "speed-up: tokens/s relative to the first run;\nvalid loss: the lowest; "
    table.caption += "peak memory: of the rank that needs most"
    # Room for "1 rank)" and the like, so that only words of a long name are broken.
    table.add_column("run", overflow="fold", vertical="top", min_width=8)
    shown = [measure for measure in _HEADINGS if measure in measures]
    for measure in shown:
        wraps = measure == "steps"  # "10000 of 20000"
        look: dict[str, Any] = {"justify": "right", "vertical": "top"}
        table.add_column(
            _HEADINGS[measure], no_wrap=not wraps, min_width=6 if wraps else None, **look
        )
    for place, label in enumerate(labels):
        table.add_row(Text(label), *(measures[measure][place] for measure in shown))
    return table


def times_markdown(runs: Sequence[RunHistory]) -> str:
    """Return the same figures as :func:`times_table` as a Markdown table, one row a run.

    Seconds per step and tokens per second are medians over the reports, which leaves out warm-up
    and pauses. The speed-up is the ratio of tokens per second to the first run: it stays right when
    batch sizes differ.
    """
    labels, measures = times_of(runs)
    rows = [["run", *(measure for measure, _ in measures)], ["---", *["---:"] * len(measures)]]
    for label, *cells in zip(labels, *(cells for _, cells in measures), strict=True):
        rows.append([label.replace("|", "\\|"), *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def times_of(runs: Sequence[RunHistory]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the names of the runs, and each measure of :func:`times_markdown` with its figure of
    each run.
    """
    speeds = [typical(report.tokens_per_s for report in run.train) for run in runs]
    first = (speeds[:1] or [0.0])[0] or np.nan
    rows = [_figures(run, speed, speed / first) for run, speed in zip(runs, speeds, strict=True)]
    measures = [(name, [row[name] for row in rows]) for name in (rows[0] if rows else ())]
    return names_of(runs), [
        each for each in measures if each[0] != "restarts" or set(each[1]) != {"0"}
    ]


def largest_gap(runs: Sequence[RunHistory]) -> float:
    """Return the largest difference between the training losses of two runs at one step."""
    one, other = ({report.step: report.loss for report in run.train} for run in runs)
    return max(abs(one[step] - other[step]) for step in one.keys() & other.keys())


def _figures(run: RunHistory, speed: float, speed_up: float) -> dict[str, str]:
    losses = [report.loss for report in run.comparable if np.isfinite(report.loss)]
    done = max(
        [report.step for report in run.train] + ([run.ended.step] if run.ended else []), default=0
    )
    total = run.started.total_steps if run.started else done
    return {
        "ranks": of_starts(run, _RANKS) or _NONE,
        "cores per rank": of_starts(run, lambda start: start.cores_per_rank) or _NONE,
        "steps": str(done) if done >= total else f"{done} of {total}",
        "training time": _known(
            np.nan if run.trained_s is None else run.trained_s, format_duration
        ),
        "seconds per step": _known(
            typical(report.step_time_s for report in run.train), "{:.3g}".format
        ),
        "tokens/s": _known(speed, format_rate),
        "speed-up": _known(speed_up, "{:.2f}x".format),
        "final training loss": _known(run.train[-1].loss if run.train else np.nan, "{:.3f}".format),
        "best validation loss": _known(min(losses, default=np.nan), "{:.3f}".format),
        "peak memory per rank": format_memory(run.peaks) if run.peaks else _NONE,
        "restarts": str(len(run.restarts)),
    }


def _known(value: float, show: Callable[[float], str]) -> str:
    return show(value) if np.isfinite(value) else _NONE
