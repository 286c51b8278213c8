"""The supervisor: starts the ranks of a job on this computer and answers for their end.

MLX notices a dead peer late or never, and a stopped one not at all, so someone outside the ranks has to:
the first rank that fails is the cause and gives the exit code, the others are ended, and no process is left
behind, whatever ends the supervisor itself.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from allhands.cluster import processes
from allhands.cluster.processes import LaunchSpec, RankExit
from allhands.errors import DistributedError, PeerLostError

__all__ = ["LaunchSpec", "SupervisorEvent", "supervise"]

_TICK_S = 0.05
_COLLECT_S = 0.3  # after the first failure, for ranks that end as its consequence to say so in their logs
_CAUSE_S = 2.0  # the same while every failure known is the loss of a peer, so that the cause is still to come
_TERM_GRACE_S = 0.5  # between SIGTERM and SIGKILL, for ranks that can do nothing useful any more
_START_GRACE_S = 3.0  # for a stop before all ranks have started, when there is nothing to save
_LOG_LINES = 20
_PORT_MARKS = ("Couldn't bind", "Couldn't connect", "bind() failed")


@dataclass(frozen=True)
class SupervisorEvent:
    """Something that a person wants to know, in words, with the facts beside them.

    ``failed`` carries the rank that is the cause, its exit code, the last lines of its log, and the message
    of its error file if it wrote one; ``explanation`` is the message with place and remedy of an error that was
    foreseen. ``killing`` says that ranks did not heed a stop.
    """

    kind: Literal["launched", "started", "retrying", "stopping", "cancelling", "killing", "failed"]
    message: str
    rank: int | None = None
    exit_code: int | None = None
    log_path: Path | None = None
    log_tail: tuple[str, ...] = ()
    error: str | None = None
    explanation: str | None = None


def supervise(spec: LaunchSpec, events: Callable[[SupervisorEvent], None]) -> int:
    """Run the job to its end and return the exit code to use: the first failing rank's, or 0.

    A rank killed by a signal counts as 128 + signal. SIGINT and SIGTERM to this process are passed on once,
    the ranks save and end, and the code is 130 or 143; the second one, or ``stop_grace_s``, kills the ranks.
    A ring that found its ports taken is started once more with others. Call it in the main thread:
    elsewhere signals are not caught.

    Raises:
        DistributedError: the ranks could not be started, or did not finish starting in time.
    """
    spec = replace(spec, log_dir=spec.log_dir.resolve())
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    with (
        _caught_signals() as signals,
        tempfile.TemporaryDirectory(prefix="allhands-", dir=_temporary_root(), ignore_cleanup_errors=True) as private,
    ):
        attempt = _Attempt(spec, Path(private, "1"), signals, events)
        failure = attempt.run()
        if failure and attempt.ports_were_taken(failure):
            events(SupervisorEvent("retrying", "a port was taken by another program; starting again"))
            attempt = _Attempt(spec, Path(private, "2"), signals, events)
            failure = attempt.run()
    if failure:
        events(failure)
        return failure.exit_code or 1
    return attempt.stopped_code()


class _Attempt:
    """One start of all ranks, watched until the last one has ended."""

    def __init__(
        self,
        spec: LaunchSpec,
        run_dir: Path,
        signals: deque[int],
        events: Callable[[SupervisorEvent], None],
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._signals = signals
        self._events = events
        self._stop_signal = 0
        self._stop_deadline = float("inf")
        self._told: set[int] = set()
        self._all_started = False
        self._ended_at = float("inf")  # later exits are our doing
        run_dir.mkdir()
        for stale in (*spec.log_dir.glob("rank-*.log"), *spec.log_dir.glob("error-rank-*.json")):
            stale.unlink()
        self._began = time.monotonic()
        self._ranks = processes.start(spec, run_dir)

    def run(self) -> SupervisorEvent | None:
        """Wait for the end, leave nothing running, and return the failure, if there was one."""
        try:
            text = f"{self._spec.num_processes} processes, {self._spec.backend}"
            self._events(SupervisorEvent("launched", text))
            early = self._wait()
            if self._living():
                self._end_the_rest(early)
        finally:
            self._ranks.kill()
        return self._failure() or self._early_end(early)

    def stopped_code(self) -> int:
        """The exit code of a run without a failure: 0, or 128 + the signal that ended it early."""
        finished = all(end.code == 0 for end in self._ranks.exits())
        return 0 if finished or not self._stop_signal else 128 + self._stop_signal

    def ports_were_taken(self, failure: SupervisorEvent) -> bool:
        """Whether the failure is worth another start with other ports."""
        texts = [failure.error or "", *failure.log_tail]
        ours = self._spec.backend != "mpi" and not self._all_started and not self._stop_signal
        return ours and any(mark in text for mark in _PORT_MARKS for text in texts)

    def _wait(self) -> RankExit | None:
        """Return when the ranks have ended or must be ended; the rank that left its peers early, if so."""
        while self._living():
            if not self._pass_on_signals():
                return None
            now, ends = time.monotonic(), self._ranks.exits()
            failed = [end for end in ends if self._is_failure(end)]
            lost_only = all(end.code == PeerLostError.exit_code for end in failed)
            if failed and now > failed[0].time + (_CAUSE_S if lost_only else _COLLECT_S):
                return None
            finished = [end for end in ends if end.code == 0]
            if finished and not self._stop_signal and now > finished[0].time + self._spec.finish_grace_s:
                return finished[0]
            self._check_started(now)
            time.sleep(_TICK_S)
        return None

    def _living(self) -> list[int]:
        ended = {end.rank for end in self._ranks.exits()}
        return [rank for rank in range(self._spec.num_processes) if rank not in ended]

    def _pass_on_signals(self) -> bool:
        """Forward the first stop signal to every rank once; false when the ranks must be killed now."""
        while self._signals:
            number = self._signals.popleft()
            if self._stop_signal:
                return False
            self._stop_signal = number
            grace = self._spec.stop_grace_s if self._all_started else _START_GRACE_S
            self._stop_deadline = time.monotonic() + grace
            if self._all_started:
                self._events(SupervisorEvent("stopping", "all processes are told to stop after this step"))
            else:
                self._events(SupervisorEvent("cancelling", "stopping before the first step"))
        if self._stop_signal:
            untold = set(self._living()) - self._told
            # While ranks start there is nothing to save, and Python answers SIGINT with a traceback.
            number = self._stop_signal if self._all_started else signal.SIGTERM
            # A rank that is not running yet is told as soon as it is.
            self._told |= {rank for rank in untold if self._ranks.signal(rank, number)}
        return time.monotonic() < self._stop_deadline

    def _is_failure(self, end: RankExit) -> bool:
        """Whether this end, not brought about by us, is a failure; being told to stop excuses some codes."""
        if end.code == 0 or end.time > self._ended_at:
            return False
        asked = {-signal.SIGINT, -signal.SIGTERM, 130, 143, PeerLostError.exit_code}
        return not (self._stop_signal and end.code in asked)

    def _check_started(self, now: float) -> None:
        if self._all_started:
            return
        finished = {end.rank for end in self._ranks.exits() if end.code == 0}
        unmarked = set(range(self._spec.num_processes)) - finished
        unmarked = {r for r in unmarked if not (self._run_dir / f"rank-{r}.started").exists()}
        if not unmarked:
            self._all_started = True
            self._events(SupervisorEvent("started", "all processes have started"))
            return
        missing = [rank for rank in self._living() if rank in unmarked]
        if missing and now > self._last_busy(now) + self._spec.start_deadline_s and not self._stop_signal:
            self._raise_not_started(missing)

    def _last_busy(self, now: float) -> float:
        """When a rank last said that it was at work (tokenising, say); when the job began, if none has."""
        ages = [time.time() - mark.stat().st_mtime for mark in self._run_dir.glob("rank-*.busy")]
        return max([self._began, *(now - age for age in ages)])

    def _raise_not_started(self, missing: list[int]) -> NoReturn:
        """Name the ranks that have not even come to the point where they wait for the others, if there are any."""
        waiting = [rank for rank in missing if (self._run_dir / f"rank-{rank}.ready").exists()]
        late = [rank for rank in missing if rank not in waiting] or missing
        log = self._ranks.log_path(late[0])
        last = "".join(f" (its last line: {line})" for line in _tail(log)[-1:])
        raise DistributedError(
            f"rank {', '.join(map(str, late))} did not finish starting within {self._spec.start_deadline_s:g} s",
            hint=f"read {log}{last}; give it more time with --start-timeout-s if it is only slow",
        )

    def _end_the_rest(self, early: RankExit | None) -> None:
        """SIGTERM, a moment, SIGKILL; after an unheeded stop or a second Ctrl-C SIGKILL alone."""
        self._ended_at = time.monotonic()
        living = self._living()
        failed = early or any(self._is_failure(end) for end in self._ranks.exits())
        if failed:
            (self._run_dir / "failed").touch()  # so that ranks do not take the signal for a person's wish
            for rank in living:
                self._ranks.signal(rank, signal.SIGTERM)
            deadline = self._ended_at + _TERM_GRACE_S
            while self._living() and time.monotonic() < deadline:
                time.sleep(_TICK_S)
        left = self._living()
        if left and not failed:
            text = f"rank {', '.join(map(str, left))} ended at once; what was not saved is lost"
            self._events(SupervisorEvent("killing", text))

    def _failure(self) -> SupervisorEvent | None:
        """The first rank that failed, but one that lost a peer only if no other did.

        Where several failed alike, the lowest of them speaks: they mean the same.
        """
        failed = [end for end in self._ranks.exits() if self._is_failure(end)]
        if not failed:
            return None
        first = min(failed, key=lambda end: (end.code == PeerLostError.exit_code, end.time))
        cause = min((end for end in failed if end.code == first.code), key=lambda end: end.rank)
        code = cause.code if cause.code > 0 else 128 - cause.code
        return self._report(cause.rank, code, describe_exit(cause.code))

    def _early_end(self, early: RankExit | None) -> SupervisorEvent | None:
        if early is None:
            return None
        what = f"had finished {self._spec.finish_grace_s:g} s before the others, which were still at work"
        return self._report(early.rank, DistributedError.exit_code, what)

    def _report(self, rank: int, code: int, what: str) -> SupervisorEvent:
        error, explanation = _error_of(self._spec.log_dir / f"error-rank-{rank}.json")
        log = self._ranks.log_path(rank)
        text = f"rank {rank} {what}" + (f": {error}" if error else "")
        return SupervisorEvent("failed", text, rank, code, log, _tail(log), error, explanation)


def describe_exit(code: int) -> str:
    """Say how a process ended, given its exit code or minus its signal: -11 is "was killed by SIGSEGV"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (possibly out of memory)" if -code == signal.SIGKILL else "")


def _temporary_root() -> str:
    """Where temporary directories go, unless its path is long: a Unix socket's address holds 104 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 60 else "/tmp"


@contextlib.contextmanager
def _caught_signals() -> Generator[deque[int], None, None]:
    """Collect SIGINT and SIGTERM in a queue instead of acting on them."""
    received: deque[int] = deque()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda caught, _: received.append(caught)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _tail(log: Path) -> tuple[str, ...]:
    """The last lines of a log that may be large, or absent."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - 65536))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(text.splitlines()[-_LOG_LINES:])


def _error_of(path: Path) -> tuple[str | None, str | None]:
    """Type and message of the error that a rank wrote down, and its whole text if it was foreseen."""
    try:
        content: dict[str, str | None] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, None
    return f"{content['type']}: {content['message']}", content["text"]
