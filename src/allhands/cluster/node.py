"""The ranks of one computer of several, where a platform has started one process on each, and there is no ssh.

The processes of all computers find each other at a meeting; each then starts its own share of the ranks and watches
it. What goes on elsewhere is not seen from here: when a rank fails, the ranks that wait for it fail too or are ended,
every process reports that, and it is for the platform to start the job again.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from allhands.cluster.attempt import describe_exit
from allhands.cluster.meeting import meet
from allhands.cluster.patience import Patience
from allhands.cluster.place import MeetingPoint
from allhands.cluster.processes import Share, reserve_ports, start_share
from allhands.cluster.ranks import LaunchSpec, Marks, RankExit, RankProcesses
from allhands.cluster.reaper import Reaper
from allhands.cluster.watch import Limits, ProgressWatch
from allhands.errors import DistributedError, PeerLostError
from allhands.io.files import make_directory
from allhands.io.staging import Scratch

_TICK_S = 0.05
_COLLECT_S = 2.0  # after the first failure, for the rank that is the cause to say so
_TERM_GRACE_S = 0.5
_CANCEL_S = 3.0  # for a stop before the ranks have started, when there is nothing to save
# For what ranks elsewhere may be doing, unseen, while all of these wait: preparing data, compiling, saving.
_ELSEWHERE_S = 900.0
_STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143}


@dataclass(frozen=True)
class NodeJob:
    """What one computer contributes.

    Attributes:
        spec: of the whole job: ``num_processes`` counts the ranks of all computers.
        node: this computer's number.
        count: ranks on it, as on every other.
        meeting: where the processes of all computers meet.
        patience: how long that may take.
        tell: is given lines for a person.
    """

    spec: LaunchSpec
    node: int
    count: int
    meeting: MeetingPoint
    patience: Patience
    tell: Callable[[str], None]

    @property
    def own(self) -> range:
        """The ranks of this computer."""
        return range(self.node * self.count, (self.node + 1) * self.count)


@dataclass(frozen=True)
class NodeEnd:
    """How it ended: the exit code to use, and the reason of a failure in words."""

    code: int
    reason: str | None = None


def run_node(job: NodeJob) -> NodeEnd:
    """Start this computer's ranks, watch them to the end, and leave nothing running.

    The first SIGTERM, SIGINT or SIGUSR1 to this process is passed on, and the ranks save and end within
    ``stop_grace_s``; the second one ends them at once. Call it in the main thread.

    Raises:
        DistributedError: the computers did not come together, or the ranks could not be started.
        StorageError: the directory for logs cannot be made.
    """
    make_directory(job.spec.log_dir, private=True)
    for rank in job.own:  # of an earlier start: not to be taken for this one's
        (job.spec.log_dir / f"error-rank-{rank}.json").unlink(missing_ok=True)
    with (
        _caught_signals() as signals,
        Scratch() as private,
        Reaper() as reaper,
    ):
        reaper.directory(private)
        return _Node(job, signals, reaper, private).run()


@contextmanager
def _caught_signals() -> Generator[deque[int], None, None]:
    received: deque[int] = deque()
    before = {number: signal.signal(number, lambda caught, _: received.append(caught)) for number in _STOPS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Cancelled(Exception):
    """A stop before there were ranks."""


@dataclass
class _Node:
    """One start of this computer's ranks."""

    job: NodeJob
    signals: deque[int]
    reaper: Reaper
    private: Path
    stop: int = 0
    stop_began: float = 0.0
    told: set[int] = field(default_factory=set[int])
    began: float = 0.0
    ranks: RankProcesses = field(init=False)

    def run(self) -> NodeEnd:
        """From the meeting to the end."""
        spec, ring = self.job.spec, self.job.spec.backend == "ring"
        held, ports = reserve_ports(self.job.count, shareable=True, address="")
        try:
            peers = self._meet(ports)
            if not ring or sys.platform != "linux":
                for one in held:
                    one.close()
            share = Share(self.job.own.start, self.job.count, peers, socket.gethostname())
            self.began = time.monotonic()
            self.ranks = start_share(spec, self.private, share, self.reaper)
            try:
                return self._watch()
            finally:
                self.ranks.kill()
        except _Cancelled:
            return NodeEnd(_STOPS[signal.Signals(self.signals[0])])
        finally:
            for one in held:
                one.close()

    def _meet(self, ports: list[int]) -> tuple[str, ...]:
        """The addresses of all ranks of the job; in threads, so that a signal need not wait for the meeting."""
        job, found, failed = self.job, dict[int, tuple[str, ...]](), list[Exception]()

        def come(rank: int, port: int) -> None:
            try:
                found[rank] = meet(job.meeting, rank, job.spec.num_processes, port, job.patience, job.spec.backend)
            except Exception as error:
                failed.append(error)

        for rank, port in zip(job.own, ports, strict=True):
            threading.Thread(target=come, args=(rank, port), name=f"meet-{rank}", daemon=True).start()
        while len(found) < job.count:
            if failed:
                raise failed[0]
            if self.signals:
                job.tell("stopped before the first step")
                raise _Cancelled
            time.sleep(_TICK_S)
        return found[job.own.start]

    # --- watching ---------------------------------------------------------------------------------

    def _watch(self) -> NodeEnd:
        watch = ProgressWatch(Limits.of(self.job.spec, 1.0))
        while living := self._living():
            now = time.monotonic()
            marks = {rank: self.ranks.marks(rank) for rank in self.job.own}
            if not self._pass_on(now, living, marks):
                self.job.tell("ranks that had not ended in time were ended; what was not saved is lost")
                return NodeEnd(_STOPS[signal.Signals(self.stop)])
            failed = [end for end in self.ranks.exits() if end.code and not self._excused(end.code)]
            if failed and now > failed[0].time + _COLLECT_S:
                break
            stall = self._not_started(now, marks, living) or self._stalled(now, watch, marks, living)
            if stall and not self.stop and not failed:
                self._end_the_rest()
                return NodeEnd(DistributedError.exit_code, stall)
            time.sleep(_TICK_S)
        self._end_the_rest()
        return self._judge()

    def _living(self) -> list[int]:
        ended = {end.rank for end in self.ranks.exits()}
        return [rank for rank in self.job.own if rank not in ended]

    def _pass_on(self, now: float, living: list[int], marks: Mapping[int, Marks]) -> bool:
        """Forward the first stop to every rank once; false when time is up, or the second has come."""
        while self.signals:
            number = self.signals.popleft()
            if self.stop:
                return False
            self.stop, self.stop_began = number, now
            self.job.tell("the ranks are told to save and to end")
        if not self.stop:
            return True
        self.told |= {rank for rank in set(living) - self.told if self.ranks.signal(rank, signal.SIGTERM)}
        started = all(mark.started for mark in marks.values())
        return now < self.stop_began + (self.job.spec.stop_grace_s if started else _CANCEL_S)

    def _excused(self, code: int) -> bool:
        """Whether a rank may end so: having saved because somebody asked one rank of the job, here or elsewhere."""
        asked = {PeerLostError.exit_code, -signal.SIGTERM} if self.stop else set[int]()
        return code in {130, 143} | asked

    def _not_started(self, now: float, marks: Mapping[int, Marks], living: list[int]) -> str | None:
        worked = max([self.began, *(mark.busy_time for mark in marks.values() if mark.busy_time)])
        for rank in living:
            mark, deadline = marks[rank], self.job.spec.start_deadline_s
            # One that is ready waits for the others, who may be preparing something elsewhere.
            limit = max(deadline, _ELSEWHERE_S) if mark.ready else deadline
            if not mark.started and now - worked > limit:
                what = "waited for ranks on other computers" if mark.ready else "did not finish starting"
                return f"rank {rank} {what} for {now - worked:.0f} s{self._last_lines(rank)}"
        return None

    def _stalled(self, now: float, watch: ProgressWatch, marks: Mapping[int, Marks], living: list[int]) -> str | None:
        stall = watch.check(now, marks, living)
        if stall is None:
            return None
        patience = self.job.spec.hang_timeout_s or _ELSEWHERE_S
        if stall.phase == "reduce" and stall.seconds <= patience:
            return None
        what = " (it waits for ranks on other computers)" if stall.phase == "reduce" else ""
        text = f"rank {stall.rank} made no progress for {stall.seconds:.0f} s at step {stall.step}, {stall.phase}"
        return f"{text}{what}{self._last_lines(stall.rank)}"

    # --- the end ----------------------------------------------------------------------------------

    def _end_the_rest(self) -> None:
        """SIGTERM, a moment, and what follows is SIGKILL."""
        if not self._living():
            return
        self.ranks.tell("failed")
        for rank in self._living():
            self.ranks.signal(rank, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE_S
        while self._living() and time.monotonic() < deadline:
            time.sleep(_TICK_S)

    def _judge(self) -> NodeEnd:
        ends = self.ranks.exits()
        failed = [end for end in ends if end.code and not self._excused(end.code)]
        if not failed:
            stopped = max((end.code for end in ends if end.code in (130, 143)), default=0)
            return NodeEnd(_STOPS[signal.Signals(self.stop)] if self.stop else stopped)
        cause = min(failed, key=lambda end: (end.code == PeerLostError.exit_code, end.time, end.rank))
        return NodeEnd(cause.code if cause.code > 0 else 128 - cause.code, self._why(cause))

    def _why(self, end: RankExit) -> str:
        error = self.ranks.error(end.rank)
        if error and error.get("text"):
            return f"rank {end.rank}: {error['text']}"
        memory = " (out of memory)" if end.code == -signal.SIGKILL and self.ranks.out_of_memory(end.rank) else ""
        return f"rank {end.rank} {describe_exit(end.code)}{memory}{self._last_lines(end.rank)}"

    def _last_lines(self, rank: int) -> str:
        return "".join(f"\n  {line}" for line in self.ranks.log_tail(rank)[-3:])
