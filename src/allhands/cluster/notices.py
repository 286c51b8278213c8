"""Messages about a job under the supervisor, on standard error."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from itertools import dropwhile

from allhands.cluster.hosts import is_here
from allhands.cluster.job import TrainingJob
from allhands.errors import ConfigError, DataError, ModelError
from allhands.io.terminal import is_screen, say, tell
from allhands.observe.journal import SupervisorEvent

_PLAIN = ("retrying", "cancelling", "waiting", "restarting", "left out", "regrouping", "given up")
_OF_FILES = ("DataError:", "ModelError:")
_OF_KILLED = 3  # number of last lines of a killed rank, which cannot report the reason itself
_INPUT = tuple(error.exit_code for error in (ConfigError, DataError, ModelError))
# A line of a traceback, and lines that every healthy rank writes into its log.
_FRAME = re.compile(r'  File ".*", line \d+ in .*')
_OWN_LINES = re.compile(
    r"step \d+(/\d+)?  (loss|validation loss|saved) .*|(finished|interrupted|stopped early) at step \d+  .*"
    r"|attempt \d+: .*|note: .*|\s*"
    r"|(run|model|method|parameters|ranks|batch size|steps|resumed) {2,}\S.*"
)


class Notices:
    """Messages about the supervisor's events; the supervisor calls ``show`` with each event.

    Args:
        way_on: returns words on how to go on after a fault or a stop; ``None``: there is no
            checkpoint.
    """

    def __init__(self, job: TrainingJob, way_on: Callable[[], str | None]) -> None:
        self._job, self._way_on, self._tagged = job, way_on, job.tagged
        self._launched = self._cancelled = self._wrong_input = False
        self._stop_began = float("inf")
        self._killed: str | None = None

    def show(self, event: SupervisorEvent) -> None:
        """Print a message about the event, or keep it for a later event."""
        if event.kind == "launched":
            self._launched = True
            if self._job.hostfile:
                say(event.message)
        elif event.kind in ("stopping", "cancelling"):
            self._stop_began = time.monotonic()
            self._cancelled = event.kind == "cancelling"
        elif event.kind == "killing":
            self._killed = self._why_killed()
        if event.kind in (*_PLAIN, "fault", "failed"):
            self._leave_the_line()
            self._show(event)
        elif event.kind == "finished" and event.exit_code:
            self._show_stop()

    def _show(self, event: SupervisorEvent) -> None:
        if event.kind == "given up" and self._wrong_input:
            return  # the error has said what to do
        if event.kind in _PLAIN:
            never = event.kind == "given up" and not self._launched
            say(f"{'error: ' if never else ''}{event.explanation or event.message}")
            self._show_sync(event.host, event.error)
            return
        self._show_cause(event)
        host = self._elsewhere(event)
        self._wrong_input = host is None and _of_input(event)
        if event.rank is not None and event.log_path is not None and not self._wrong_input:
            place = f", on {host}" if host else ""
            tell(f"  log of rank {event.rank}{place}: {event.log_path}")

    def _elsewhere(self, event: SupervisorEvent) -> str | None:
        """Return the name of the event's computer, if it is another computer."""
        return event.host if self._job.hostfile and event.host and not is_here(event.host) else None

    def _show_cause(self, event: SupervisorEvent) -> None:
        """Print the cause of a "fault", after which the job goes on, or of "failed", which ends it."""
        title = "error: " if event.kind == "failed" else ""
        if event.explanation:
            # Only an error that the rank itself has recorded lacks the place.
            host = self._elsewhere(event) if event.error else None
            code = f"[{event.code}] " if self._job.verbose and event.code else ""
            say(
                f"{title}{code}{f'on {host} (rank {event.rank}): ' if host else ''}{event.explanation}"
            )
            self._show_sync(host, event.error)
            return
        killed = event.exit_code == 128 + signal.SIGKILL
        self._show_tail(event, event.log_tail[-_OF_KILLED:] if killed else event.log_tail)
        say(f"{title}{event.message}")
        if event.kind != "failed":
            return
        if killed:
            certain = "(out of memory)" in event.message
            hint = f"{'' if certain else 'if memory was short, '}{self._job.memory_hint}"
            tell(f"  what to do: {hint}")
        if way := self._way_on():
            tell(f"  {way}")

    def _show_tail(self, event: SupervisorEvent, tail: tuple[str, ...]) -> None:
        # The output of rank 0, or of all ranks, is on the screen already.
        if event.rank and not self._tagged and (lines := telling(tail)):
            print(f"last lines of rank {event.rank}:", *lines, sep="\n  ", file=sys.stderr)

    def _show_sync(self, host: str | None, error: str | None) -> None:
        """Print the command that brings a missing file to a computer."""
        if host and self._job.sync and (error or "").startswith(_OF_FILES):
            tell(f"  if {host} has no copy, or an old one: {self._job.sync}")

    def _why_killed(self) -> str:
        late = time.monotonic() - self._stop_began >= self._job.stop_grace_s
        why = (
            f"not ended within {self._job.stop_grace_s:g} s (--stop-grace-s)"
            if late
            else "ended at once"
        )
        return f"{why}; what was not saved is lost"

    def _show_stop(self) -> None:
        """Print the last line after a stop, unless a rank has printed it."""
        way = self._way_on()
        if self._killed:
            self._leave_the_line()
            say(self._killed)
            if way is None and self._job.resumes:
                way = "there is no checkpoint to go on from"
        elif way and not (self._cancelled or self._job.resumes):
            self._leave_the_line()
            say("stopped")
        elif not self._cancelled:
            return
        if way:
            tell(f"  {way}")

    def _leave_the_line(self) -> None:
        """Begin a new line after an unfinished progress display."""
        if is_screen(sys.stderr) and not self._tagged:
            print(file=sys.stderr)


def _of_input(event: SupervisorEvent) -> bool:
    """True for an error in the given input, found before the first step."""
    found_early = event.kind == "failed" and event.explanation is not None and not event.step
    return found_early and event.exit_code in _INPUT


def telling(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines of a rank's log from the first informative one on; none, if all are
    progress.

    The outer part of a cut-off stack is not informative; the log has the whole stack.
    """
    return tuple(
        dropwhile(lambda line: _OWN_LINES.fullmatch(line) or _FRAME.fullmatch(line), lines)
    )
