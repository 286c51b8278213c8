"""State of a run, going on or ended, for reports, dashboard and monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allhands.io.formatting import format_duration
from allhands.observe.metrics import METRICS_FILE, RunEnded, RunHistory
from allhands.observe.monitor import Board, gone_here

Status = Literal[
    "finished", "stopped early", "interrupted", "failed", "going on", "crashed or killed"
]

_FRESH_S = 60.0  # age of the last line, up to which a run without samples goes on
_STOPS = (130, 143)  # exit codes of a job that a person or a scheduler ended


@dataclass(frozen=True)
class Verdict:
    """State of a run, with a reason in words."""

    status: Status
    reason: str = ""


def verdict_of(
    path: Path, history: RunHistory, journal: Sequence[Mapping[str, Any]], board: Board, now: float
) -> Verdict:
    """Find the state of a run from its metrics, the supervisor's last event, its processes, and the
    age of its files.

    Args:
        path: the run's directory, or its ``metrics.jsonl``.
        journal: the supervisor's events, in their order.
        board: fed with the samples of its processes.
        now: Unix time in seconds.
    """
    written = _written(path)
    known = bool(board.rows())
    lives = known and not board.over(now, gone_here(board))
    # Until a resumed run has written a line, its file still has the previous end.
    if (ended := history.ended) is not None and not (lives and written < board.began):
        return _ended(ended, journal)
    if ended is None and (last := _last_word(history, journal, board)) is not None:
        return last
    if lives or (not known and now - written < _FRESH_S):
        return Verdict("going on", "it goes on: this report has the state so far")
    silent = f"; last written {format_duration(max(now - written, 0.0))} ago" if written else ""
    return Verdict(
        "crashed or killed",
        f"its file has no end: it crashed, was killed, or lost its computer{silent}",
    )


def _ended(ended: RunEnded, journal: Sequence[Mapping[str, Any]]) -> Verdict:
    """Return the state that the run itself wrote, with the cause of a failure."""
    if ended.reason != "failed":
        return Verdict(ended.reason)
    error = (ended.error or "").replace("\n  what to do:", ". What to do:")
    return Verdict(ended.reason, error or _cause(journal))


def _written(path: Path) -> float:
    """Return the Unix time at which the metrics were last written; 0: never."""
    try:
        return (path / METRICS_FILE if path.is_dir() else path).stat().st_mtime
    except OSError:
        return 0.0


def _last_word(
    history: RunHistory, journal: Sequence[Mapping[str, Any]], board: Board
) -> Verdict | None:
    """Return the state by the supervisor's last event; ``None`` if the run goes on, or a later
    start had no supervisor.
    """
    if not journal:
        return None
    last = journal[-1]
    began = max([board.began, *(start.time for start in history.starts)])
    if float(last.get("time", began)) < began:
        return None
    kind, code = last.get("kind"), last.get("exit_code") or 0
    if kind in ("failed", "given up") or (kind == "finished" and code not in (0, *_STOPS)):
        return Verdict("failed", _cause(journal) or told(last))
    if kind != "finished":
        return None
    if code == 0:
        return Verdict("finished")
    unsaved = (
        "; its metrics have no end: training after the last checkpoint is lost"
        if history.train
        else ""
    )
    return Verdict("interrupted", f"{told(last)}{unsaved}")


def _cause(journal: Sequence[Mapping[str, Any]]) -> str:
    """Return the last failure that the supervisor saw, and why it gave up, in words."""
    kinds = ("failed", "fault"), ("given up",)
    failure, end = (
        next((one for one in reversed(journal) if one.get("kind") in each), None) for each in kinds
    )
    if failure is None or end is None:
        return told(failure or end or {})
    error = str(failure.get("error") or failure.get("message", ""))
    return told(end) if error in told(end) else f"{told(failure)}; {told(end)}"


def told(event: Mapping[str, Any]) -> str:
    """Return an event of the supervisor in words."""
    where, text = words_of(event)
    return f"{text} ({where})" if where else text


def words_of(event: Mapping[str, Any]) -> tuple[str, str]:
    """Return the place of an event of the supervisor, and its words."""
    where = ", ".join(
        f"{name} {event[name]}" for name in ("rank", "host", "step") if event.get(name) is not None
    )
    text, error = str(event.get("message", "")), str(event.get("error") or "")
    return where, f"{text}: {error}" if error and error not in text else text
