"""The supervisor: it starts the ranks of a job, restarts them after faults, and reports their end.

One start is an :class:`~allhands.cluster.attempt.Attempt`. :mod:`~allhands.cluster.policy` decides
what to do after its end, and :mod:`~allhands.cluster.membership` finds the members of the next
attempt. This module carries this out, from one attempt to the next.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from allhands.cluster.attempt import Attempt
from allhands.cluster.connection import UnfitHosts
from allhands.cluster.logs import archive_logs, clear_logs
from allhands.cluster.membership import LocalMembers, Members, Roster
from allhands.cluster.newcomers import Newcomers, TryOut
from allhands.cluster.outcome import Fault, Outcome
from allhands.cluster.policy import GiveUp, Past, Restart, RestartLimits, RunDone, judge
from allhands.cluster.ranks import LaunchSpec
from allhands.cluster.reaper import Reaper
from allhands.distributed.blame import TRUSTED_VARIABLE
from allhands.errors import DistributedError
from allhands.io.files import make_directory
from allhands.io.staging import Scratch
from allhands.observe.journal import Journal, SupervisorEvent
from allhands.observe.monitor import Identity, ProcessSampler, monitor_file
from allhands.runtime.command import Echoes
from allhands.runtime.threads import in_background

__all__ = ["LaunchSpec", "SuperviseOptions", "SupervisorEvent", "SupervisorSeams", "supervise"]

Events = Callable[[SupervisorEvent], None]
_TICK_S = 0.05
_ASK_AGAIN_S = 2.0  # while the job waits for computers
_LONGEST_ROOT = 60  # letters of a path, because the address of a Unix socket has at most 104 bytes
_FIRST_WAIT_S = 30.0  # at the first start, when a wrong name is more likely than a late computer
# Slurm's warning before the time limit (--signal=USR1) is a request to end.
_STOPS: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}


@dataclass(frozen=True)
class SuperviseOptions:
    """Options for keeping a job running.

    Attributes:
        max_restarts: highest number of restarts after faults; regrouping does not count.
        min_ranks: lowest number of ranks with which the job may go on; ``None``: all.
        run_id: id of the run, the same for all attempts (``ALLHANDS_RUN_ID``); ``None``: a new one.
        wait_s: seconds to wait for computers that are needed.
        try_out: begins the trial of newcomers, before the running ranks are stopped; ``None``: no
            trial.
        resize: returns a spec with adapted values that depend on the number of ranks, such as
            ``cores_per_rank``.
    """

    max_restarts: int = 0
    min_ranks: int | None = None
    run_id: str | None = None
    wait_s: float = 600.0
    try_out: TryOut | None = None
    resize: Callable[[LaunchSpec], LaunchSpec] | None = None


@dataclass(frozen=True)
class SupervisorSeams:
    """Parts that tests replace."""

    make_attempt: Callable[[LaunchSpec, Path, deque[int], Events, Reaper, float], Attempt] = Attempt
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def supervise(
    spec: LaunchSpec,
    events: Events,
    *,
    options: SuperviseOptions | None = None,
    members: Members | None = None,
    journal: Journal | None = None,
    seams: SupervisorSeams | None = None,
) -> int:
    """Run the job to its end and return the exit code to use: that of the last failed rank, or 0.

    A rank killed by a signal counts as 128 + signal. The first SIGINT, SIGTERM or SIGUSR1 to this
    process is passed on. Then the ranks save and end, and the code is 130 or 143. The ranks are
    killed at the second signal, or if they have not ended after ``stop_grace_s``. If another
    program has taken the ports of a ring, the ranks are started again with other ports.

    Call this in the main thread: in another thread signals are not caught.

    Args:
        spec: what to start; its ranks, places and weights are those of an attempt with all members.
        events: called in this thread with all events for the user.
        options: options for restarts; the default is no restarts.
        members: finds the members of each attempt; the default is this computer with all ranks.
        journal: also gets all events.
        seams: parts that tests replace.

    Raises:
        DistributedError: the ranks could not be started.
    """
    spec = replace(spec, log_dir=spec.log_dir.resolve())
    make_directory(spec.log_dir, private=True)
    with workroom() as room:
        return _Job(
            spec=spec,
            events=events,
            options=options or SuperviseOptions(),
            members=members or LocalMembers(spec.num_processes),
            journal=journal,
            seams=seams or SupervisorSeams(),
            room=room,
        ).run()


@dataclass(frozen=True)
class Workroom:
    """What a process needs to start ranks; made by :func:`workroom`.

    Attributes:
        signals: the received signals that ask this process to end.
        private: a directory that only this user can read; it is removed at the end.
        reaper: ends the processes and removes ``private`` if this process is killed.
    """

    signals: deque[int]
    private: Path
    reaper: Reaper


@contextlib.contextmanager
def workroom() -> Generator[Workroom, None, None]:
    """Yield a :class:`Workroom`, and catch signals within the block.

    If this process is killed, the reaper ends all processes that were registered with it. Call this
    in the main thread: in another thread signals are not caught.
    """
    usual = tempfile.gettempdir()
    root = usual if len(usual) <= _LONGEST_ROOT else "/tmp"
    with _caught_signals() as signals, Scratch(root) as private, Reaper() as reaper:
        reaper.directory(private)
        yield Workroom(signals, private, reaper)


class _Stopped(Exception):
    """The user or a scheduler ended the job while no rank was running."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = _STOPS[number]


class _NotTogether(Exception):
    """Needed computers did not answer in time, or cannot take part."""

    def __init__(self, problem: str, hint: str | None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


@dataclass
class _Job:
    """All attempts of one job."""

    spec: LaunchSpec
    events: Events
    options: SuperviseOptions
    members: Members
    journal: Journal | None
    seams: SupervisorSeams
    room: Workroom
    history: list[Past] = field(default_factory=list[Past])
    all_ranks: int | None = None
    running: bool = False
    regrouping: bool = False

    def __post_init__(self) -> None:
        self.newcomers = Newcomers(self.members, self.options.try_out, self._tell, self.seams.now)
        run_id = self.options.run_id or secrets.token_hex(8)
        # The time on this computer; other computers may have other time zones.
        began = datetime.now().isoformat()
        self.spec = replace(
            self.spec, env={**self.spec.env, "ALLHANDS_RUN_ID": run_id, "ALLHANDS_RUN_BEGAN": began}
        )

    @property
    def number(self) -> int:
        """The number of the attempt that comes next or, during an attempt, of that attempt."""
        return len(self.history) + 1

    def run(self) -> int:
        """Run attempt after attempt until the job ends."""
        clear_logs(self.spec.log_dir)
        with ProcessSampler(
            Identity("orchestrator", run=self.spec.env["ALLHANDS_RUN_ID"])
        ) as sampler:
            sampler.write_to(monitor_file(self.spec.log_dir, "orchestrator"))
            return self._run()

    def _run(self) -> int:
        restart: Restart | None = None
        try:
            while True:
                roster = self._gather()
                if restart:
                    self._tell_restart(restart, roster)
                self.history.append(self._attempt(roster, restart.slack if restart else 1.0))
                verdict = judge(
                    self.history, RestartLimits(self.options.max_restarts, self._least(roster))
                )
                if not isinstance(verdict, Restart):
                    return self._finish(verdict)
                restart = verdict
                self._prepare(restart)
        except _Stopped as stop:
            text = f"stopped before the {'next' if self.history else 'first'} start"
            self._tell(SupervisorEvent("cancelling", text))
            return self._finish(RunDone(stop.code))
        except _NotTogether as why:
            return self._give_up(why.problem, self._last_code(), why.hint)

    # --- before an attempt ------------------------------------------------------------------------

    def _gather(self) -> Roster:
        """Wait until there are enough ranks for the next attempt, and return them.

        Raises:
            _NotTogether: it takes too long or, at the first start, there can never be enough.
            _Stopped: a signal came.
        """
        told: set[str] = set()
        patience = self.options.wait_s if self.history else min(self.options.wait_s, _FIRST_WAIT_S)
        deadline = self.seams.now() + (patience if self.options.max_restarts else 0.0)
        while True:
            roster = self._ask()
            problem = self._problem(roster)
            if problem is None:
                self._tell_absent(roster)
                return roster
            if self.seams.now() >= deadline or self._hopeless(roster):
                raise _NotTogether(problem, _hint(roster))
            if problem not in told:
                self._tell(SupervisorEvent("waiting", f"waiting: {problem}"))
                told.add(problem)
            self._pause(_ASK_AGAIN_S)

    def _ask(self) -> Roster:
        """Ask the members in another thread, so that a signal is noticed even while computers do
        not answer.
        """
        future = in_background(self.members.roster)
        while not future.done():
            self._heed_signals()
            wait([future], _TICK_S)
        return future.result()

    def _problem(self, roster: Roster) -> str | None:
        """Return why these ranks should not start; ``None`` if they should."""
        least = self._least(roster)
        if len(roster.seats) >= least:
            return roster.obstacle
        missing = [_absence(name, roster) for name in roster.absent]
        missing += [f"{name} is left out" for name in roster.left_out]
        return f"{len(roster.seats)} of at least {least} ranks are there" + "".join(
            f", {text}" for text in missing
        )

    def _hopeless(self, roster: Roster) -> bool:
        """Return whether this is the first start and waiting cannot bring enough ranks.

        For example, a name is wrong or a key is missing. After the first start the same error may
        only mean that a name server does not answer for a while.
        """
        return (
            not self.history
            and roster.possible is not None
            and roster.possible < self._least(roster)
        )

    def _tell_absent(self, roster: Roster) -> None:
        """Report missing computers, only at the first start: later a fault has reported them."""
        for name in () if self.history else roster.absent:
            text = f"starting without a computer that may come later: {_absence(name, roster)}"
            self._tell(SupervisorEvent("waiting", text, host=name))

    def _least(self, roster: Roster) -> int:
        """Return the lowest number of ranks for an attempt.

        By default it is the number of all ranks at the first start, or of those that the hostfile
        has now, if that is lower.
        """
        self.all_ranks = self.all_ranks or len(roster.every)
        return self.options.min_ranks or max(1, min(self.all_ranks, len(roster.every)))

    def _fit(self, roster: Roster) -> LaunchSpec:
        env = {**self.spec.env, "ALLHANDS_ATTEMPT": str(self.number)}
        # Ranks that have trained together define which versions are right, not later computers.
        proven = [past.seats for past in self.history if past.outcome.started and past.apart]
        env |= {TRUSTED_VARIABLE: ",".join(dict.fromkeys(proven[-1]))} if proven else {}
        weights = _weights(self.spec.weights, roster)
        spec = replace(
            self.spec,
            num_processes=len(roster.seats),
            places=roster.places,
            weights=weights,
            env=env,
        )
        return self.options.resize(spec) if self.options.resize else spec

    # --- the attempt ------------------------------------------------------------------------------

    def _attempt(self, roster: Roster, slack: float) -> Past:
        spec, began = self._fit(roster), self.seams.now()
        run_dir = self.room.private / str(self.number)
        self.running = True
        try:
            attempt = self.seams.make_attempt(
                spec, run_dir, self.room.signals, self._tell, self.room.reaper, slack
            )
            outcome = attempt.run(partial(self._look_for_more, spec, roster, attempt))
        except DistributedError as error:
            fault = _unstarted(error, roster)
            if not self.history and not self._enough_without(fault, roster):
                raise
            # An earlier attempt could start, or the others can go on without some computers.
            outcome = Outcome(fault)
        finally:
            self.running = self.regrouping = False
            self.newcomers.stop()
        if outcome.started:
            self.newcomers.proven.update(roster.seats)
        return Past(outcome, roster.seats, roster.apart, roster.edition, self.seams.now() - began)

    def _enough_without(self, fault: Fault, roster: Roster) -> bool:
        return bool(fault.misfits) and len(roster.seats) - len(fault.misfits) >= self._least(roster)

    def _look_for_more(self, spec: LaunchSpec, roster: Roster, attempt: Attempt) -> None:
        """Ask the ranks to regroup if more computers can take part and are known to fit."""
        if not self.regrouping and (reason := self.members.changed(roster.places)):
            if not self.newcomers.all_fit(spec, roster, attempt.attested):
                return
            self.regrouping = True
            self._tell(
                SupervisorEvent("regrouping", f"{reason}: the ranks regroup at the next checkpoint")
            )
            attempt.request_regroup()

    # --- after it ---------------------------------------------------------------------------------

    def _prepare(self, restart: Restart) -> None:
        """Keep the logs, report the fault, leave seats out, and wait before the next start.

        Raises:
            _Stopped: a signal came.
        """
        fault = self.history[-1].outcome.fault
        kept = archive_logs(self.spec.log_dir, len(self.history))
        if not restart.fault and fault is None and self.history[-1].outcome.ports_taken:
            self._tell(SupervisorEvent("retrying", f"{restart.reason}; starting again"))
        if restart.fault and fault:
            log_path = kept.get(fault.log_path, fault.log_path) if fault.log_path else None
            self._tell(_report("fault", replace(fault, log_path=log_path)))
        if restart.exclude:
            self.members.leave_out(restart.exclude)
        for number, seat in enumerate(sorted(restart.exclude)):
            self._tell(_left_out(seat, None if restart.fault else fault, first=number == 0))
        if restart.pause_s >= 1:
            text = f"the next start is in {restart.pause_s:g} s"
            self._tell(SupervisorEvent("waiting", text, pause_s=restart.pause_s))
        self._pause(restart.pause_s)

    def _tell_restart(self, restart: Restart, roster: Roster) -> None:
        start = (
            "from the last checkpoint, if there is one"
            if roster.step is None
            else f"from step {roster.step}"
        )
        count = f"{len(roster.seats)} rank{'s' * (len(roster.seats) != 1)}"
        note = f"; {roster.note}" if roster.note else ""
        self._tell(
            SupervisorEvent(
                "restarting",
                f"starting again with {count} {start} ({restart.reason}){note}",
                step=roster.step,
                pause_s=restart.pause_s,
                num_ranks=len(roster.seats),
            )
        )

    def _pause(self, seconds: float) -> None:
        end = self.seams.now() + seconds
        self._heed_signals()
        while (left := end - self.seams.now()) > 0:
            self.seams.sleep(min(left, _TICK_S))
            self._heed_signals()

    def _heed_signals(self) -> None:
        if self.room.signals:
            raise _Stopped(self.room.signals[0])

    def _last_code(self) -> int:
        return (self.history[-1].outcome.code if self.history else 0) or DistributedError.exit_code

    # --- the end ----------------------------------------------------------------------------------

    def _finish(self, verdict: RunDone | GiveUp) -> int:
        if isinstance(verdict, GiveUp):
            if fault := self.history[-1].outcome.fault:
                self._tell(_report("failed", fault))
            return self._give_up(verdict.reason, verdict.code)
        text = f"stopped (exit code {verdict.code})" if verdict.code else "all ranks have finished"
        self._tell(SupervisorEvent("finished", text, exit_code=verdict.code))
        return verdict.code

    def _give_up(self, reason: str | None, code: int, hint: str | None = None) -> int:
        if reason:
            text = f"not started{' again' if self.history else ''}: {reason}"
            explanation = f"{text}\n  what to do: {hint}" if hint else None
            self._tell(SupervisorEvent("given up", text, exit_code=code, explanation=explanation))
        return code

    def _tell(self, event: SupervisorEvent) -> None:
        if self.journal:
            ahead = self.running or not self.history or event.kind == "restarting"
            self.journal.write(event, self.number if ahead else len(self.history))
        self.events(event)


def _report(kind: Literal["fault", "failed"], fault: Fault) -> SupervisorEvent:
    names = (
        "exit_code",
        "log_path",
        "log_tail",
        "error",
        "code",
        "explanation",
        "step",
        "phase",
        "detected_s",
    )
    more: dict[str, Any] = {name: getattr(fault, name) for name in names}
    rank = fault.rank if fault.rank >= 0 else None
    return SupervisorEvent(kind, fault.message, rank=rank, host=fault.host or None, **more)


def _absence(name: str, roster: Roster) -> str:
    """Return a text that says that a computer does not answer, and why if that is known."""
    trouble = roster.troubles.get(name)
    return f"{name} does not answer" + (
        f" ({trouble.reason})" if trouble and trouble.reason else ""
    )


def _hint(roster: Roster) -> str | None:
    """Return what the user can do about one missing computer; first comes one that needs help."""
    troubles = [trouble for name in roster.absent if (trouble := roster.troubles.get(name))]
    return min(troubles, key=lambda trouble: not trouble.lasting).hint if troubles else None


def _unstarted(error: DistributedError, roster: Roster) -> Fault:
    """Return the fault of an attempt that could not start.

    Its rank is the first one on the computer that the error names, or -1.
    """
    hosts = [name for name in getattr(error, "hosts", ()) if name in roster.seats]
    if isinstance(error, UnfitHosts):
        misfits = tuple(rank for rank, seat in enumerate(roster.seats) if seat in hosts)
        return Fault(
            "misfit",
            -1,
            "",
            error.message,
            error.exit_code,
            explanation=str(error),
            misfits=misfits,
        )
    rank = roster.seats.index(hosts[0]) if hosts else -1
    return Fault(
        "not started",
        rank,
        "".join(hosts[:1]),
        error.message,
        error.exit_code,
        explanation=str(error),
    )


def _left_out(seat: str, fault: Fault | None, *, first: bool) -> SupervisorEvent:
    """Return the event that a seat is left out.

    Args:
        fault: says why the seat does not fit; ``None``: it has failed again and again.
        first: whether it is the first of several seats; the others do not repeat the explanation.
    """
    if fault is None:
        return SupervisorEvent(
            "left out", f"{seat} is left out from now on: it has failed again and again", host=seat
        )
    text = f"{seat} is left out: {fault.message}"
    told = f": {fault.explanation}" if first else ", too"
    explanation = f"{seat} is left out{told}"
    return SupervisorEvent("left out", text, host=seat, error=fault.error, explanation=explanation)


def _weights(weights: Sequence[float] | None, roster: Roster) -> tuple[float, ...] | None:
    """Return the weights of the ranks that take part.

    Each rank keeps its weight; a rank that had none gets the mean.
    """
    if weights is None:
        return None
    by_place = dict(zip(_numbered(roster.every), weights, strict=False))
    mean = sum(weights) / len(weights)
    return tuple(by_place.get(place, mean) for place in _numbered(roster.seats))


def _numbered(seats: Sequence[str]) -> list[tuple[str, int]]:
    """Return each seat with the number of equal seats before it."""
    return [(seat, seats[:rank].count(seat)) for rank, seat in enumerate(seats)]


@contextlib.contextmanager
def _caught_signals() -> Generator[deque[int], None, None]:
    """Within the block, put the signals that ask a job to end into a queue, and do nothing else."""
    received: deque[int] = deque()
    echoes = Echoes()

    def hear(number: int, _frame: object) -> None:
        if not echoes.has(number):
            received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, hear) for number in _STOPS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
