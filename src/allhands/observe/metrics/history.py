"""Reading a run back from its file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

from allhands.errors import DataError
from allhands.io.names import METRICS_FILE, PLAN_FILE
from allhands.io.paths import meant
from allhands.observe.metrics.events import (
    Event,
    Logged,
    RunEnded,
    RunStarted,
    Sampled,
    SavedReport,
    SharesChanged,
    StepReport,
    StepSkipped,
    TrainReport,
    ValidReport,
    Warned,
    decode_event,
    is_damaged,
)


@dataclass
class RunHistory:
    """A run as its file tells it, in order of steps, without what a restart made obsolete.

    ``restarts`` has the step and the elapsed seconds at which each start went on that was not the
    run's first, ``starts`` every start of it, ``warned`` what was warned of in any of them and is
    not over. ``unreadable`` has the places (from 1) of lines of the file that are damaged; not of a
    last one that a kill tore or that is being written. ``lost_peaks`` has the highest memory of
    each rank in reports that a restart made obsolete.
    """

    name: str
    started: RunStarted | None = None
    train: list[TrainReport] = field(default_factory=list)
    valid: list[ValidReport] = field(default_factory=list)
    saved: list[SavedReport] = field(default_factory=list)
    skipped: list[StepSkipped] = field(default_factory=list)
    shares: list[SharesChanged] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    restarts: list[tuple[int, float]] = field(default_factory=list)
    ended: RunEnded | None = None
    starts: list[RunStarted] = field(default_factory=list)
    warned: list[Warned] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list[int])
    lost_peaks: list[int] = field(default_factory=list[int], compare=False)

    @property
    def last(self) -> TrainReport | None:
        """The last report of training, if there is one."""
        return self.train[-1] if self.train else None

    @property
    def comparable(self) -> list[ValidReport]:
        """The validations on the same examples as the last one. A run may go on with others, whose
        losses say nothing about the earlier ones.
        """
        since, before = 0, None
        for start in self.starts:
            if other_examples(before, start.validated):
                since = start.step
            since, before = min(since, start.step), start.validated or before
        return [one for one in self.valid if one.step >= since]

    @property
    def peaks(self) -> list[int]:
        """The highest memory that each rank has reported, in bytes, over all starts, of however
        many ranks.
        """
        return _highest([self.lost_peaks, *(one.peak_memory_bytes for one in self.train)])

    @property
    def trained_s(self) -> float | None:
        """Seconds of all starts, without what a restart made obsolete; ``None``: nothing tells."""
        if self.ended is not None:
            return self.ended.total_time_s
        seconds = [one.elapsed_s for one in (*self.train[-1:], *self.valid[-1:])]
        return max([*seconds, *(elapsed for _, elapsed in self.restarts[-1:])], default=None)


def read_metrics(path: Path | str) -> RunHistory:
    """Read the history of a run.

    Damaged and unknown lines are skipped: a kill leaves one, and a later version may add kinds. A
    restarted run appends to its file: what lies behind the step that it goes on from is dropped,
    because it is trained again, and its times go on from the last entry kept. So, times aside, the
    history is that of a run without restarts.

    Args:
        path: a run directory (the adapter path, holding ``metrics.jsonl``) or the file itself.

    Raises:
        DataError: there is no such file or directory, it cannot be read, or it holds no metrics.
    """
    file = Path(path)
    file = file / METRICS_FILE if file.is_dir() else file
    hint = f"give the adapter path of a run, the directory with its {METRICS_FILE}"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if (file.parent / PLAN_FILE).is_file():
            hint = f"it is planned, and nothing trained yet: train it with --adapter-path {file.parent}"
        raise DataError(
            f"no metrics: {error.strerror or error}",
            code="metrics-missing",
            where=str(file),
            hint=meant(path, hint, read_metrics),
        ) from error
    decoded = [(line, decode_event(line)) for line in text.split("\n")]
    events = [event for _, event in decoded if event is not None]
    if not events:
        raise DataError(
            "this file holds no training metrics",
            code="metrics-invalid",
            where=str(file),
            hint=hint,
        )
    history = _replay(events, name=file.resolve().parent.name)
    if file.name == METRICS_FILE:
        # A copy of a run is called by its own directory: by the name that the file remembers, both
        # would be the same.
        history.name = file.resolve().parent.name or history.name
    # What follows the last end of a line is empty, or a line that a kill tore or that is still
    # being written.
    told = enumerate(decoded[:-1], 1)
    history.unreadable = [
        place for place, (line, event) in told if event is None and is_damaged(line)
    ]
    return history


def _highest(rows: Iterable[Sequence[int]]) -> list[int]:
    """The highest of each place; rows may be of different lengths."""
    return [max(of_rank) for of_rank in zip_longest(*rows, fillvalue=0)]


def typical(values: Iterable[float]) -> float:
    """Return the median of those that are finite numbers; NaN of none. So warm-up and pauses do not
    count.
    """
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _replay(events: Iterable[Event], name: str) -> RunHistory:
    history, kept = RunHistory(name), dict[_Key, StepReport]()
    before_s = 0.0
    for event in events:
        if isinstance(event, RunStarted):
            kept, before_s = _go_on(history, event, kept)
            history.name, history.started, history.ended = event.name or name, event, None
        elif isinstance(event, RunEnded):
            history.ended = replace(event, total_time_s=event.total_time_s + before_s)
        elif isinstance(event, ValidReport):
            # One that is repeated after a restart tells nothing new, and is not "best" again.
            kept.setdefault(_key(event), _later(event, before_s))
        elif isinstance(event, Warned):
            history.warned = [
                one for one in history.warned if not event.about or one.about != event.about
            ]
            history.warned += [] if event.over else [event]
        elif not isinstance(event, Logged):
            # Twice only where the line of the start between them is lost: what was trained later is
            # in the weights.
            kept[_key(event)] = _later(event, before_s)
    for entry in sorted(kept.values(), key=lambda entry: entry.step):
        getattr(history, _LISTS[type(entry)]).append(entry)
    return history


_Kept: TypeAlias = "dict[_Key, StepReport]"


def other_examples(before: str | None, now: str | None) -> bool:
    """Return True if two starts validate on different examples; see ``RunStarted.validated``."""
    return None not in (before, now) and before != now


def _is_restart(event: RunStarted) -> bool:
    """Return False if a person has started a finished run again: its curves do not go on."""
    return event.attempt > 1 or event.step < event.total_steps


def _go_on(history: RunHistory, event: RunStarted, kept: _Kept) -> tuple[_Kept, float]:
    """Take a start into the history; return the entries that it keeps, and the seconds before it."""
    goes_on = event.step > 0 or event.attempt > 1
    if not goes_on:
        history.lost_peaks, history.restarts, history.starts, history.warned = [], [], [event], []
        return {}, event.elapsed_s
    reported = (one.peak_memory_bytes for one in kept.values() if isinstance(one, TrainReport))
    history.lost_peaks = _highest([history.lost_peaks, *reported])
    kept = {key: entry for key, entry in kept.items() if entry.step <= event.step and event.step}
    known = [start.validated for start in history.starts if start.validated]
    if known and other_examples(known[-1], event.validated):
        # The step is validated again, on the new examples.
        kept.pop((ValidReport, event.step, None), None)
    # The checkpoint knows better than the last report before it; the clock never goes back.
    times = (
        entry.elapsed_s for entry in kept.values() if isinstance(entry, TrainReport | ValidReport)
    )
    before_s = max([event.elapsed_s, *times])
    if _is_restart(event):
        history.restarts.append((event.step, before_s))
    history.starts.append(event)
    # What is still wrong will be told again.
    history.warned = [one for one in history.warned if not one.about]
    return kept, before_s


_LISTS: dict[type[StepReport], str] = {
    TrainReport: "train",
    ValidReport: "valid",
    SavedReport: "saved",
    StepSkipped: "skipped",
    SharesChanged: "shares",
    Sampled: "sampled",
}
_Key: TypeAlias = tuple[type[StepReport], int, str | None]


def _key(event: StepReport) -> _Key:
    """The identity of an entry: a step may have several files and texts, and one of each other
    kind.
    """
    return type(event), event.step, getattr(event, "path", None) or getattr(event, "prompt", None)


def _later(event: StepReport, seconds: float) -> StepReport:
    if isinstance(event, TrainReport | ValidReport):
        return replace(event, elapsed_s=event.elapsed_s + seconds)
    return event
