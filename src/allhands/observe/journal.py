"""``events.jsonl``: what the supervisor saw and did, one JSON object a line, for plots and for people afterwards."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

EVENTS_FILE = "events.jsonl"
# Output of ranks stays in their logs: it may hold what a person does not want here.
_LEFT_OUT = frozenset({"log_tail", "explanation"})
_log = logging.getLogger(__name__)


_OfAnAttempt = Literal["launched", "started", "stopping", "cancelling", "killing", "regrouping"]
_OfTheJob = Literal["retrying", "fault", "left out", "waiting", "restarting", "failed", "given up", "finished"]
EventKind = _OfAnAttempt | _OfTheJob


@dataclass(frozen=True)
class SupervisorEvent:
    """Something that a person wants to know, in words, with the facts beside them.

    ``failed`` carries the rank that is the cause, its exit code, the last lines of its log, and the message
    of its error file if it wrote one; ``explanation`` is the message with place and remedy of an error that was
    foreseen. ``fault`` has the same facts, but the job goes on. ``killing`` says that ranks did not heed a stop.
    """

    kind: EventKind
    message: str
    rank: int | None = None
    exit_code: int | None = None
    log_path: Path | None = None
    log_tail: tuple[str, ...] = ()
    error: str | None = None
    explanation: str | None = None
    host: str | None = None
    step: int | None = None
    phase: str | None = None
    detected_s: float | None = None
    pause_s: float | None = None
    num_ranks: int | None = None


class Journal:
    """Appends events to ``path`` (mode 0600), each with one write, so that readers and kills see whole lines.

    It never ends a run: what cannot be written is lost, with one warning.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._warned = False
        self._torn = False
        self._fd = -1
        try:
            self._open()
        except OSError as error:
            self._warn(error)

    def write(self, event: SupervisorEvent, attempt: int) -> None:
        """Append the event; ``attempt`` counts from 1, ``time`` is Unix time in seconds."""
        entries = ((entry.name, getattr(event, entry.name)) for entry in fields(event))
        facts = {name: _plain(value) for name, value in entries if name not in _LEFT_OUT and value is not None}
        record = {"time": round(time.time(), 3), "kind": event.kind, "attempt": attempt, **facts}
        try:
            self._append(json.dumps(record))
        except OSError as error:
            self._torn = True
            self._warn(error)

    def close(self) -> None:
        """Close the file; may be called again. What is written later is lost."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # another person's file
            os.fchmod(self._fd, 0o600)
        size = os.fstat(self._fd).st_size
        # A kill may have cut the last line off: the next one must not be glued to it.
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _append(self, line: str) -> None:
        data = f"{chr(10) if self._torn else ''}{line}\n".encode()
        if os.write(self._fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s: no events can be written (%s); the run goes on", self._path, error.strerror or error)


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """Return the events in the file, or in that of the run directory ``path``, in their order.

    Torn and foreign lines are skipped; without a file, or one that can be read, there are none.
    """
    file = Path(path)
    file = file / EVENTS_FILE if file.is_dir() else file
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    records = [_record(line) for line in lines]
    return [record for record in records if record is not None]


def _record(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    record = cast("dict[str, Any]", content)
    known = isinstance(record.get("kind"), str) and isinstance(record.get("time"), int | float)
    return record if known else None


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else str(value)
