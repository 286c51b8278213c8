"""``events.jsonl``: the supervisor's observations and actions, one JSON object per line, for plots
and for people.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allhands.errors import StorageError
from allhands.io.names import LOGS
from allhands.observe.lines import LineFile

EVENTS_FILE = "events.jsonl"
# Output of ranks stays in their logs: it may hold what a person does not want here.
_LEFT_OUT = frozenset({"log_tail", "explanation"})
_log = logging.getLogger(__name__)


_OfAnAttempt = Literal["launched", "started", "stopping", "cancelling", "killing", "regrouping"]
_OfTheJob = Literal[
    "retrying", "fault", "left out", "waiting", "restarting", "failed", "given up", "finished"
]
EventKind = _OfAnAttempt | _OfTheJob


@dataclass(frozen=True)
class SupervisorEvent:
    """An event for a person: a message with its facts.

    ``failed`` has the rank that is the cause, its exit code, the last lines of its log, and the
    message and the code of its error file if it wrote one. ``explanation`` is the message of an expected error,
    with place and remedy. ``fault`` has the same facts, but the job goes on. ``killing`` says that
    ranks did not react to a stop.
    """

    kind: EventKind
    message: str
    rank: int | None = None
    exit_code: int | None = None
    log_path: Path | None = None
    log_tail: tuple[str, ...] = ()
    error: str | None = None
    code: str | None = None
    explanation: str | None = None
    host: str | None = None
    step: int | None = None
    phase: str | None = None
    detected_s: float | None = None
    pause_s: float | None = None
    num_ranks: int | None = None


class Journal:
    """Appends events to ``path`` (mode 0600). It never ends a run: what cannot be written is lost,
    with one warning.
    """

    def __init__(self, path: Path | str) -> None:
        self._lines: LineFile | None = None
        try:
            self._lines = LineFile(Path(path), "events")
            self._lines.make_private()
        except (OSError, StorageError) as error:
            _log.warning("%s: no events can be written (%s); the run goes on", path, error)

    def write(self, event: SupervisorEvent, attempt: int) -> None:
        """Append the event; ``attempt`` counts from 1, ``time`` is Unix time in seconds."""
        facts = {
            name: value
            for name, value in vars(event).items()
            if name not in _LEFT_OUT and value is not None
        }
        if self._lines is not None:
            record = {
                "time": round(time.time(), 3),
                "kind": event.kind,
                "attempt": attempt,
                **facts,
            }
            self._lines.try_append(json.dumps(record, default=str))

    def close(self) -> None:
        """Close the file; may be called again. What is written later is lost."""
        if self._lines is not None:
            self._lines.close()


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """Return the events of a file, or of a run's directory or its logs, in their order.

    Torn and foreign lines are skipped; without a file that can be read there are no events.
    """
    file = Path(path)
    places = (file / EVENTS_FILE, file / LOGS / EVENTS_FILE) if file.is_dir() else (file,)
    for place in places:
        with suppress(OSError):
            lines = place.read_text(encoding="utf-8", errors="replace").split("\n")
            if events := [record for line in lines if (record := _record(line)) is not None]:
                return events
    return []


def _record(line: str) -> dict[str, Any] | None:
    try:
        record: Any = json.loads(line)
        known = isinstance(record["kind"], str) and isinstance(record["time"], int | float)
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return record if known else None
