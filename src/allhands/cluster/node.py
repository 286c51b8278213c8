"""Train on one of several computers where a platform starts one process on each, and there is no ssh.

The processes of all computers meet; each then starts and watches its own share of the ranks. It does not see the
other computers: when a rank fails, the ranks that wait for it fail or are ended, every process reports that, and the
platform starts the job again.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from allhands.cluster.attempt import Attempt
from allhands.cluster.environment import gathered
from allhands.cluster.meeting import meet
from allhands.cluster.outcome import Fault
from allhands.cluster.patience import Patience
from allhands.cluster.place import MeetingPoint
from allhands.cluster.processes import Share
from allhands.cluster.ranks import LaunchSpec
from allhands.cluster.reaper import Reaper
from allhands.cluster.supervisor import caught_signals
from allhands.io.files import make_directory
from allhands.io.staging import Scratch
from allhands.observe.journal import SupervisorEvent

_TICK_S = 0.05
_TOLD_EVENTS = ("stopping", "cancelling", "killing")


@dataclass(frozen=True)
class NodeJob:
    """One computer's share of a job.

    Attributes:
        spec: the whole job: ``num_processes`` counts the ranks of all computers.
        node: this computer's number.
        count: number of ranks on each computer.
        meeting: where the processes of all computers meet.
        patience: how long the meeting may take.
        tell: receives lines for a person.
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
    """The exit code, and the reason of a failure in words."""

    code: int
    reason: str | None = None


def run_node(job: NodeJob) -> NodeEnd:
    """Start this computer's ranks, watch them to the end, and leave no process behind.

    Signals act as under the supervisor: the first one lets the ranks save and end, the second one ends them at once.
    Call it in the main thread.

    Raises:
        DistributedError: the computers did not meet, or the ranks could not be started.
        StorageError: the directory for logs cannot be made.
    """
    make_directory(job.spec.log_dir, private=True)
    for rank in job.own:  # error files of an earlier start
        (job.spec.log_dir / f"error-rank-{rank}.json").unlink(missing_ok=True)
    with caught_signals() as signals, Scratch() as private, Reaper() as reaper:
        reaper.directory(private)
        return _run(job, signals, reaper, private)


def _run(job: NodeJob, signals: deque[int], reaper: Reaper, private: Path) -> NodeEnd:
    def told(event: SupervisorEvent) -> None:
        if event.kind in _TOLD_EVENTS:
            job.tell(event.message)

    with gathered(job.count, job.spec.backend, partial(_meet, job, signals)) as peers:
        if peers is None:
            job.tell("stopped before the first step")
            return NodeEnd(130 if signals[0] == signal.SIGINT else 143)
        share = Share(job.own.start, job.count, peers, socket.gethostname())
        outcome = Attempt(job.spec, private / "ranks", signals, told, reaper, share=share).run()
    return NodeEnd(outcome.code, None if outcome.fault is None else _reason(outcome.fault))


def _meet(job: NodeJob, signals: deque[int], ports: Sequence[int]) -> tuple[str, ...] | None:
    """Return the addresses of all ranks of the job; ``None`` if a signal came first.

    The meeting runs in threads, so that a signal need not wait for it.
    """
    found, failed = dict[int, tuple[str, ...]](), list[Exception]()

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
        if signals:
            return None
        time.sleep(_TICK_S)
    return found[job.own.start]


def _reason(fault: Fault) -> str:
    if fault.explanation:
        return f"rank {fault.rank}: {fault.explanation}"
    return fault.message + "".join(f"\n  {line}" for line in fault.log_tail[-3:])
