"""One attempt of a job: start all ranks once, watch them until the last one has ended, and find the
cause of a failure.

MLX notices a dead peer late or never, and does not notice a stopped one. So a process outside the
ranks watches them. The first rank that fails or stops making progress is the cause. The others are
ended, and no process is left behind.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from allhands.cluster import processes
from allhands.cluster.outcome import ALL_LISTEN, REGROUP_CODE, Fault, FaultKind, Outcome
from allhands.cluster.ranks import LaunchSpec, Marks, RankExit, RankProcesses
from allhands.cluster.reaper import Reaper
from allhands.cluster.remote import start_remote
from allhands.cluster.watch import Limits, ProgressWatch, Stall
from allhands.errors import DistributedError, PeerLostError
from allhands.observe.journal import SupervisorEvent

_TICK_S = 0.05
_POLL_S = 0.5
_COLLECT_S = 0.3  # after the first failure, so that ranks that end because of it can write this into their logs
_CAUSE_S = 2.0  # the same if all known failures are lost peers, so that the cause is still unknown
_TERM_GRACE_S = 0.5  # between SIGTERM and SIGKILL, for ranks without useful work
_START_GRACE_S = 3.0  # for a stop before all ranks have started, when there is nothing to save
_LOOK_S = 0.5  # between two checks whether a process is stopped
_STOPPED_S = 4.0  # until a stopped process counts; a shorter stop may be a user's debugger
_TRACE_S = 0.2  # for a hanging rank to write its stack
_ELSEWHERE_S = 900.0  # for ranks on other computers, unseen, to prepare data, compile or save
# Messages of ranks whose port another program uses. Messages of ranks that cannot connect, or whose
# address belongs to another computer, do not match.
_PORT_TAKEN = re.compile(
    r"PortTakenError: |Couldn't bind socket \(error: (48|98)\)|bind\(\) failed(: Address already in use|(?!:))"
)
# Exit codes of ranks that were told to stop: after they have saved (the first set), or before.
_SAVED_CODES = frozenset({128 + signal.SIGINT, 128 + signal.SIGTERM})
_STOPPED_CODES = _SAVED_CODES | {-signal.SIGINT, -signal.SIGTERM}
# Further accepted codes after a stop: a checkpoint for regrouping is a good checkpoint, too.
_ASKED_CODES = _STOPPED_CODES | {PeerLostError.exit_code, REGROUP_CODE}


class Attempt:
    """One start of all ranks, watched until the last one has ended.

    The first SIGINT or SIGTERM is passed on, and the second one ends the ranks at once. SIGUSR1, a
    scheduler's warning, counts as a SIGTERM, but the user's first signal after it still counts as
    the first.

    Args:
        run_dir: does not exist yet; the directory above it is private to this user.
        signals: the signals that this process has received.
        events: called with events for the user.
        reaper: all processes are registered with it; ``None``: a new one.
        slack: factor by which the deadlines for progress are longer, except those for a start.
        share: only these ranks are started and watched, and ranks that wait for others have more
            time; ``None``: all ranks.
    """

    _ranks: RankProcesses

    def __init__(
        self,
        spec: LaunchSpec,
        run_dir: Path,
        signals: deque[int],
        events: Callable[[SupervisorEvent], None],
        reaper: Reaper | None = None,
        slack: float = 1.0,
        share: processes.Share | None = None,
    ) -> None:
        self._spec = spec
        self._share = share
        self._own = (
            range(share.first, share.first + share.count) if share else range(spec.num_processes)
        )
        self._run_dir = run_dir
        self._signals = signals
        self._events = events
        self._reaper = reaper
        elsewhere_s = _ELSEWHERE_S if share and spec.hang_timeout_s is None else 0.0
        self._watch = ProgressWatch(Limits.of(spec, slack, elsewhere_s))
        self._stopped_since: dict[int, float] = {}
        self._next_look = 0.0
        self._stop_signal = 0
        self._insisted = False  # the user has asked to stop, not only a scheduler's early warning
        self._stop_began = self._began = time.monotonic()
        self._told: set[int] = set()
        self._regroup = False
        self._all_started = False
        self._all_listen = False
        self._ended_at = float("inf")  # later exits are caused by us

    def run(self, poll: Callable[[], None] = lambda: None) -> Outcome:
        """Start the ranks, wait for the end, leave no process behind, and return the outcome.

        ``poll`` is called about twice a second and should be quick: the ranks are not watched
        meanwhile.

        Raises:
            DistributedError: the ranks could not be started.
        """
        self._run_dir.mkdir()
        with nullcontext(self._reaper) if self._reaper else Reaper() as reaper:
            self._began = time.monotonic()
            if self._spec.places:
                self._ranks = start_remote(self._spec, self._run_dir)
            else:
                self._ranks = processes.start(self._spec, self._run_dir, reaper, self._share)
            try:
                number = self._spec.num_processes
                text = f"{number} process{'es' * (number != 1)}, {self._spec.backend}"
                text += f": {places}" if (places := self._ranks.places()) else ""
                self._events(SupervisorEvent("launched", text))
                fault = self._wait(poll)
                if self._living():
                    self._end_the_rest(fault is not None)
            finally:
                self._ranks.kill()
            return self._outcome(self._failure() or fault)

    def request_regroup(self) -> None:
        """Ask all ranks to end at their next checkpoint; may be called again."""
        if not self._regroup:
            self._regroup = True
            self._ranks.tell("regroup")

    def attested(self) -> Mapping[str, Any] | None:
        """Return the agreement of the ranks; ``None``: there is none yet, or it was not asked for."""
        return self._ranks.attested()

    # --- waiting ----------------------------------------------------------------------------------

    def _wait(self, poll: Callable[[], None]) -> Fault | None:
        """Wait until the ranks have ended or must be ended.

        Return a fault only if no rank's exit shows it, for example a rank that hangs.
        """
        polled = self._began
        while self._living():
            now = time.monotonic()
            self._watch.pauses.look(now)
            marks = {rank: self._ranks.marks(rank) for rank in self._own}
            if (
                not self._share
                and not self._all_listen
                and all(mark.listening for mark in marks.values())
            ):
                self._all_listen = True
                self._ranks.tell(ALL_LISTEN)
            if not self._pass_on_signals(now, marks) or self._failed_for_long(now):
                return None
            if fault := self._check_started(now, marks) or self._check_progress(now, marks):
                return fault
            if now > polled + _POLL_S:
                poll()
                polled = now
            time.sleep(_TICK_S)
        return None

    def _age(self, now: float, since: float) -> float:
        return self._watch.pauses.age(now, since)

    def _living(self) -> list[int]:
        ended = {end.rank for end in self._ranks.exits()}
        return [rank for rank in self._own if rank not in ended]

    def _pass_on_signals(self, now: float, marks: Mapping[int, Marks]) -> bool:
        """Forward the first stop signal to every rank once; return false when the ranks must be
        killed now.
        """
        while self._signals:
            number = self._signals.popleft()
            if self._insisted and number != signal.SIGUSR1:
                return False
            self._insisted = self._insisted or number != signal.SIGUSR1
            if not self._stop_signal:
                self._begin_stop(now, signal.SIGTERM if number == signal.SIGUSR1 else number)
        if not self._stop_signal:
            return True
        untold = set(self._living()) - self._told
        # While ranks start, there is nothing to save, and Python would print a traceback at SIGINT.
        number = self._stop_signal if self._all_started else signal.SIGTERM
        # A rank that does not run yet gets the signal when it does.
        self._told |= {rank for rank in untold if self._ranks.signal(rank, number)}
        grace = self._grace_s if self._all_started else _START_GRACE_S
        return self._age(now, self._stop_began) < grace and not self._stands_still(now, marks)

    @property
    def _grace_s(self) -> float:
        """Seconds that ranks have after a stop: to finish their step, and to save.

        The time for the step is that of the longest recent step.
        """
        return self._spec.stop_grace_s + self._watch.longest_step_s

    def _stands_still(self, now: float, marks: Mapping[int, Marks]) -> bool:
        """True if a rank is stopped (SIGSTOP) after a request to end: without that rank nothing can
        be saved.
        """
        if not self._all_started:
            return False
        stall = self._frozen(now, marks, self._living())
        if stall is not None:
            text = f"rank {stall.rank} stands still (the process is stopped), so that nothing more can be saved"
            self._events(SupervisorEvent("cancelling", text))
        return stall is not None

    def _begin_stop(self, now: float, number: int) -> None:
        self._stop_signal, self._stop_began = number, now
        # A rank that need not report its start may already be working.
        self._all_started = self._all_started or self._spec.start_deadline_s == float("inf")
        event = SupervisorEvent("cancelling", "stopping before all processes have started")
        if self._all_started:
            event = SupervisorEvent("stopping", "all processes are told to stop after this step")
        self._events(event)

    def _failed_for_long(self, now: float) -> bool:
        """True if a rank has failed, and the other ranks have had time to report the consequences."""
        ends = self._ranks.exits()
        failed = [end for end in ends if self._is_failure(end)]
        if failed:
            lost_only = all(end.code == PeerLostError.exit_code for end in failed)
            # If one computer lacks a file, others may lack it, too.
            first = not self._all_started and bool(self._spec.places)
            return self._age(now, failed[0].time) > (_CAUSE_S if lost_only or first else _COLLECT_S)
        stopped = [end for end in ends if self._is_unasked_stop(end)]
        # The user may have stopped all ranks, and one of them may be saving.
        saving = self._all_started and all(end.code in _SAVED_CODES for end in stopped)
        grace = self._grace_s if saving else _CAUSE_S
        return any(self._age(now, end.time) > grace for end in stopped)

    def _is_failure(self, end: RankExit) -> bool:
        """True if this end is a failure and not caused by us; after a stop some codes are accepted."""
        if end.code == 0 or end.time > self._ended_at or self._is_unasked_stop(end):
            return False
        if self._regroup and end.code == REGROUP_CODE:
            return False
        return not (self._stop_signal and end.code in _ASKED_CODES)

    def _is_unasked_stop(self, end: RankExit) -> bool:
        return end.code in _STOPPED_CODES and not self._stop_signal and end.time <= self._ended_at

    def _check_started(self, now: float, marks: Mapping[int, Marks]) -> Fault | None:
        if self._all_started:
            return None
        if self._have_started(marks):
            self._all_started = True
            self._events(SupervisorEvent("started", "all processes have started"))
            return None
        missing = [rank for rank in self._living() if not marks[rank].started]
        # Ranks may wait for a rank that is at work, for example one that tokenises.
        waited = self._age(now, max(mark.busy_time or self._began for mark in marks.values()))
        limit = self._spec.start_deadline_s
        if self._share and all(marks[rank].ready for rank in missing):
            limit = max(limit, _ELSEWHERE_S)
        late = missing and waited > limit and not self._stop_signal
        return self._not_started(missing, waited) if late else None

    def _have_started(self, marks: Mapping[int, Marks]) -> bool:
        finished = {end.rank for end in self._ranks.exits() if end.code == 0}
        return all(mark.started or rank in finished for rank, mark in marks.items())

    def _check_progress(self, now: float, marks: Mapping[int, Marks]) -> Fault | None:
        living, ends = self._living(), self._ranks.exits()
        stall = self._watch.check(now, marks, living)
        if self._stop_signal or any(self._is_failure(end) for end in ends):
            return None  # a stop and a failure have deadlines of their own
        left = [end for end in ends if end.code in (0, REGROUP_CODE)]
        if left and (
            self._age(now, left[0].time) > self._spec.finish_grace_s or (stall and stall.mutual)
        ):
            return self._early_end(left[0], self._age(now, left[0].time))
        stall = stall or self._frozen(now, marks, living)
        return self._hang(stall, living) if stall else None

    def _frozen(self, now: float, marks: Mapping[int, Marks], living: list[int]) -> Stall | None:
        """Return a rank that has been stopped (SIGSTOP) for some time, in any phase."""
        # Other computers are asked only when something is wrong.
        if now < self._next_look or self._spec.places:
            return None
        self._next_look = now + _LOOK_S
        stopped = [rank for rank in living if self._ranks.stopped(rank)]
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        for rank, since in self._stopped_since.items():
            if self._age(now, since) > _STOPPED_S:
                beat = marks[rank].beat
                return Stall(
                    rank,
                    self._age(now, since),
                    beat.phase if beat else "start",
                    beat.step if beat else 0,
                )
        return None

    # --- the end ----------------------------------------------------------------------------------

    def _end_the_rest(self, fault: bool) -> None:
        """After a failure, send SIGTERM and wait briefly; the caller then kills what is left.

        If ranks did not obey a stop in time, or after a second Ctrl-C, they get no SIGTERM.
        """
        self._ended_at = time.monotonic()
        living = self._living()
        failed = fault or any(
            self._is_failure(end) or self._is_unasked_stop(end) for end in self._ranks.exits()
        )
        if failed:
            self._ranks.tell("failed")  # so that ranks do not take the signal for a user's request
            for rank in living:
                self._ranks.signal(rank, signal.SIGTERM)
            deadline = self._ended_at + _TERM_GRACE_S
            while self._living() and time.monotonic() < deadline:
                time.sleep(_TICK_S)
        left = self._living()
        if left and not failed:
            text = f"rank {', '.join(map(str, left))} ended at once; what was not saved is lost"
            self._events(SupervisorEvent("killing", text))

    def _outcome(self, fault: Fault | None) -> Outcome:
        beats = [self._ranks.marks(rank).beat for rank in self._own]
        step = max((beat.step for beat in beats if beat), default=None)
        codes = {end.code for end in self._ranks.exits()}
        # If a rank has ended at a checkpoint, the others may only see that it is gone.
        apart = (
            self._regroup
            and REGROUP_CODE in codes
            and codes <= {0, REGROUP_CODE, PeerLostError.exit_code}
        )
        if apart and not self._stop_signal:
            return Outcome(regroup=True, started=self._all_started, step=step)
        if self._ports_were_taken(fault):
            return Outcome(ports_taken=True)
        stopped = self._stop_signal or (0 if fault else _stop_by(codes))
        return Outcome(fault, 0 if codes == {0} else stopped, started=self._all_started, step=step)

    def _ports_were_taken(self, fault: Fault | None) -> bool:
        """True if another start with other ports may avoid the failure."""
        theirs = (
            self._spec.backend == "mpi" or self._share or self._all_started or self._stop_signal
        )
        if fault is None or theirs:
            return False
        return any(_PORT_TAKEN.search(text) for text in (fault.error or "", *fault.log_tail))

    # --- faults -----------------------------------------------------------------------------------

    def _failure(self) -> Fault | None:
        """Return the fault of the first rank that failed; a rank that lost its peer counts only if
        no other rank failed.

        If several ranks failed in the same way, the lowest one is named.
        """
        ends = self._ranks.exits()
        failed = [end for end in ends if self._is_failure(end)]
        stopped = [end for end in ends if self._is_unasked_stop(end)]
        if len(stopped) < len(ends):
            failed += stopped  # some ranks were stopped, but not all, so the others had to fail
        if not failed:
            return None
        code = min(failed, key=lambda end: (end.code == PeerLostError.exit_code, end.time)).code
        alike = sorted((end for end in failed if end.code == code), key=lambda end: end.rank)
        fault = self._of_end(alike[0])
        foreseen = fault.kind == "error" and not self._all_started and fault.explanation
        return self._misfit(fault, alike) if foreseen else fault

    def _misfit(self, fault: Fault, alike: list[RankExit]) -> Fault:
        """Return the fault with the ranks that do not fit into the group.

        They are the ranks that all ranks have named, or those that failed in the same way.
        """
        if (found := self._said(fault.rank).get("misfits")) is None:
            return replace(fault, misfits=tuple(end.rank for end in alike))
        # All ranks have reported the same, so it is no single rank's fault.
        message = (fault.error or "").partition(": ")[2]
        misfits = tuple(int(rank) for rank in found)
        return replace(
            fault, kind="misfit", rank=-1, host="", message=message, error=None, misfits=misfits
        )

    def _of_end(self, end: RankExit) -> Fault:
        since = min(self._ended_at, time.monotonic()) - end.time
        lost, host, peer = self._ranks.lost_hosts(), self._ranks.host(end.rank), None
        if end.code == DistributedError.exit_code:
            peer = self._said(end.rank).get("peer")
        if lost and (host in lost or end.code == PeerLostError.exit_code or peer is not None):
            return self._lost_host(host if host in lost else lost[0], since)
        if isinstance(peer, int):
            return self._blocked(end, peer, since)
        if end.code > 0:
            return self._fault("error", end.rank, end.code, describe_exit(end.code), since)
        memory = end.code == -signal.SIGKILL and self._ranks.out_of_memory(end.rank)
        what = "was killed by SIGKILL (out of memory)" if memory else describe_exit(end.code)
        return self._fault("memory" if memory else "killed", end.rank, 128 - end.code, what, since)

    def _said(self, rank: int) -> Mapping[str, Any]:
        """Return the content of a rank's error file; empty if it wrote none."""
        return self._ranks.error(rank) or {}

    def _lost_host(self, host: str, since: float) -> Fault:
        ranks = [rank for rank in self._own if self._ranks.host(rank) == host]
        fault = self._fault("lost host", ranks[0], DistributedError.exit_code, "", since)
        text = f"{host} (rank {', '.join(map(str, ranks))}) does not answer any more"
        return replace(fault, message=text, error=None, explanation=None)

    def _blocked(self, end: RankExit, peer: int, since: float) -> Fault:
        """Return the fault of rank ``peer``, which listens but cannot be reached, usually because
        of its firewall.
        """
        fault = self._fault("blocked", end.rank, end.code, "", since)
        content = self._said(end.rank)
        names = [f"rank {rank}{self._place(rank)}" for rank in (peer, end.rank)]
        text = f"{names[0]} listens, but connections from {names[1]} to {content.get('problem')}"
        hint = (
            f"{self._spec.examine}   # finds what is in the way"
            if self._spec.examine
            else content.get("hint")
        )
        told = str(DistributedError(text, code="connection-blocked", hint=hint))
        # The logs of both ranks say nothing more.
        fault = replace(fault, log_path=None, log_tail=(), error=None)
        return replace(
            fault, rank=peer, host=self._ranks.host(peer), message=text, explanation=told
        )

    def _place(self, rank: int) -> str:
        return f" on {self._ranks.host(rank)}" if self._spec.places else ""

    def _early_end(self, early: RankExit, since: float) -> Fault:
        what = f"had finished {since:.1f} s before the others, which were still at work"
        return self._fault("ended early", early.rank, DistributedError.exit_code, what, since)

    def _not_started(self, missing: list[int], since: float) -> Fault:
        """Return the fault of ranks that have not started in time.

        If some are not ready, these are named. If all are ready, they wait for other computers.
        """
        unready = [rank for rank in missing if not self._ranks.marks(rank).ready]
        late = unready or missing
        what = f"did not finish starting within {self._spec.start_deadline_s:g} s"
        if self._share and not unready:
            what = f"waited for ranks on other computers for {since:.0f} s"
        text = f"rank {', '.join(map(str, late))} {what}"
        fault = self._fault("not started", late[0], DistributedError.exit_code, "", since)
        last = "".join(f" (its last line: {line})" for line in fault.log_tail[-1:])
        where = f" on {fault.host}" if self._spec.places else ""
        hint = f"read {fault.log_path}{where}{last}; give it more time with --start-timeout-s if it is only slow"
        return replace(
            fault,
            message=text,
            explanation=str(DistributedError(text, code="rank-not-started", hint=hint)),
        )

    def _hang(self, stall: Stall, living: list[int]) -> Fault:
        stopped = [rank for rank in living if self._ranks.stopped(rank)]
        rank = stopped[0] if stopped and stall.rank not in stopped else stall.rank
        if rank not in stopped:
            self._ranks.signal(rank, signal.SIGUSR2)  # it writes its stack into its log
            time.sleep(_TRACE_S)
        what = f"on {self._ranks.host(rank)} made no progress for {stall.seconds:.1f} s"
        if rank in stopped:
            what += " (the process is stopped)"
        elif self._share and stall.phase == "reduce":
            what += " (it waits for ranks on other computers)"
        elif stall.mutual:
            what += " (all ranks wait for each other: is the network cut?)"
        elif self._spec.hang_timeout_s is None:
            what += " (if it was only slow: --hang-timeout-s allows more)"
        return self._fault("hang", rank, DistributedError.exit_code, what, stall.seconds)

    def _fault(self, kind: FaultKind, rank: int, code: int, what: str, since: float) -> Fault:
        content, beat = self._said(rank), self._ranks.marks(rank).beat
        error = f"{content['type']}: {content['message']}" if content else None
        host = self._ranks.host(rank)
        place = self._place(rank) if kind != "hang" else ""
        when = f" at step {beat.step}, {beat.phase}" if beat else ""
        return Fault(
            kind,
            rank,
            host,
            message=f"rank {rank}{place} {what}{when}" + (f": {error}" if error else ""),
            exit_code=code,
            step=beat.step if beat else None,
            phase=beat.phase if beat else None,
            error=error,
            code=content.get("code"),
            explanation=content.get("text"),
            log_path=self._ranks.log_path(rank),
            log_tail=self._ranks.log_tail(rank),
            detected_s=since,
        )


def _stop_by(codes: set[int]) -> int:
    """Return the signal that ended a rank with one of these exit codes, or 0."""
    signals = (signal.SIGTERM, signal.SIGINT)
    return next((number for number in signals if codes & {128 + number, -number}), 0)


def describe_exit(code: int) -> str:
    """Return in words how a process has ended.

    Args:
        code: its exit code, or minus the number of the signal that killed it: -11 gives "was killed
            by SIGSEGV".
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # Linux counts the processes that it kills when memory is short, so there the reason is known.
    unknown = -code == signal.SIGKILL and sys.platform != "linux"
    return f"was killed by {name}" + (" (possibly out of memory)" if unknown else "")
