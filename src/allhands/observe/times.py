"""Times, speed-up and losses of runs as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from allhands.io.formatting import format_bytes, format_duration, format_memory, format_rate
from allhands.observe.metrics import RunHistory, RunStarted, typical

_LONGEST_NAME = 30
_NONE = "-"


def names_of(runs: Sequence[RunHistory]) -> list[str]:
    """Short names of the runs, with the number of ranks, and a number of their own where they would be equal."""
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


def times_table(runs: Sequence[RunHistory]) -> Table:
    """One row a run, in 80 columns: no ranges, and the cores only where they differ.

    See :func:`times_markdown` for what is compared.
    """
    highest = [_known(max(run.peaks, default=np.nan), format_bytes) for run in runs]
    measures = dict(_measures(runs)) | {"peak memory": highest}
    if len(set(measures["cores per rank"])) == 1:
        del measures["cores per rank"]
    table = Table(title="Training times", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.caption = "speed-up: tokens/s relative to the first run;\nvalid loss: the lowest; "
    table.caption += "peak memory: of the rank that needs most"
    # Room for "1 rank)" and the like, so that only words of a long name are broken.
    table.add_column("run", overflow="fold", vertical="top", min_width=8)
    shown = {measure: heading for measure, heading in _HEADINGS.items() if measure in measures}
    for measure, heading in shown.items():
        wraps = measure == "steps"  # "10000 of 20000"
        table.add_column(heading, justify="right", no_wrap=not wraps, min_width=6 if wraps else None, vertical="top")
    for place, label in enumerate(names_of(runs)):
        table.add_row(Text(label), *(measures[measure][place] for measure in shown))
    return table


def times_of(runs: Sequence[RunHistory]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The names of the runs, and each measure of :func:`times_markdown` with its figure of each run."""
    return names_of(runs), _measures(runs)


def times_markdown(runs: Sequence[RunHistory]) -> str:
    """The same figures as :func:`times_table` as a Markdown table, one row a run.

    Seconds per step and tokens per second are medians over the reports, which leaves out warm-up and pauses.
    The speed-up is the ratio of tokens per second to the first run: it stays right when batch sizes differ.
    """
    measures = _measures(runs)
    rows = [["run", *(measure for measure, _ in measures)], ["---", *["---:"] * len(measures)]]
    for place, label in enumerate(names_of(runs)):
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
