"""Facts about a rank for the supervisor, on any computer: the interface to those who start
processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from allhands.cluster.hosts import HERE, Host
from allhands.runtime.blas import allowed_cores

# What a rank is doing. Those in "reduce" wait for others and are not to blame; "start" is before
# the first step, "first" the first step after a start and every step that has to compile.
Phase = Literal["start", "first", "load", "compute", "reduce", "update", "validate", "save", "end"]


# Set where ranks shall tell what they have agreed on, and where one shall only find out whether it
# would fit: to the moment whose date the data have, or 1.
ATTEST_VARIABLE = "ALLHANDS_ATTEST"
TRIAL_VARIABLE = "ALLHANDS_TRIAL"


@dataclass(frozen=True)
class Place:
    """A computer and the number of its ranks."""

    name: str
    num_ranks: int
    host: Host = HERE


@dataclass(frozen=True)
class LaunchSpec:
    """Specification of a start: ``num_processes`` copies of ``command``, on this computer or on
    those of ``places``.

    Output of rank 0 goes to the supervisor's own, that of rank N to ``log_dir/rank-N.log``. ``env``
    is added to the supervisor's environment. A rank that has not marked itself started after
    ``start_deadline_s`` fails the job; after the first Ctrl-C ranks have ``stop_grace_s`` to save
    and end; and when one rank has ended without an error the others have ``finish_grace_s`` to
    follow.

    Attributes:
        places: in the order of their ranks; empty: all on this computer.
        hang_timeout_s: seconds without a heartbeat that count as a hang; ``None`` adapts to the
            measured steps.
        weights: relative speed of every rank, if they differ.
        rdma: for JACCL, each computer's devices for the connections to the others, in their order.
        tag_output: all ranks write to their logs, and from there to the screen, each line with its
            rank before it.
        log_dir_there: ``log_dir`` on other computers; ``None``: the same; empty: they keep no logs.
        examine: the command that finds faults of the computers of ``places``.
        keep_logs: if false, other computers remove ``log_dir`` when their ranks have ended without
            an error.
    """

    command: Sequence[str]
    num_processes: int
    backend: Literal["ring", "mpi", "nccl", "jaccl"]
    log_dir: Path
    cores_per_rank: int | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    start_deadline_s: float = 600.0
    stop_grace_s: float = 60.0
    finish_grace_s: float = 60.0
    hang_timeout_s: float | None = None
    places: tuple[Place, ...] = ()
    weights: tuple[float, ...] | None = None
    tag_output: bool = False
    log_dir_there: str | None = None
    keep_logs: bool = True
    rdma: Sequence[Sequence[Any]] | None = None
    examine: str | None = None


def fair_share(num_ranks: int) -> int | None:
    """Return the default number of cores of each local rank: an equal share; ``None`` if ranks have
    no own cores.
    """
    return max(1, allowed_cores() // num_ranks) if hasattr(os, "sched_getaffinity") else None


@dataclass(frozen=True)
class RankExit:
    """The end of one rank: exit code, or minus the signal's number, and when (``time.monotonic``)."""

    rank: int
    code: int
    time: float


@dataclass(frozen=True)
class Beat:
    """The latest heartbeat of a rank's training thread.

    Attributes:
        step: number of completed optimizer updates.
        phase: its present activity.
        count: number of heartbeats so far.
        time: time at which the supervisor's side first saw this count (``time.monotonic`` of its
            computer).
        waited_s: seconds that it had already waited for its data at that time.
    """

    step: int
    phase: str
    count: int
    time: float
    waited_s: float = 0.0


@dataclass(frozen=True)
class Marks:
    """Marks that a rank has set: it waits for others, has started, or was busy with preparations at
    that time.

    ``listening``: other ranks can connect to it.
    """

    ready: bool = False
    started: bool = False
    busy_time: float | None = None
    beat: Beat | None = None
    listening: bool = False


class RankProcesses(Protocol):
    """The processes of one attempt, here or elsewhere."""

    def exits(self) -> list[RankExit]:
        """Return the ranks that have ended, in the order of their ends."""
        ...

    def marks(self, rank: int) -> Marks:
        """Return what the rank has said of itself so far."""
        ...

    def signal(self, rank: int, number: int) -> bool:
        """Send a signal to the rank's command; false if it is not running yet, or any more."""
        ...

    def tell(self, word: str) -> None:
        """Send every rank ``word``: a file of that name appears in its ``ALLHANDS_RUN_DIR``."""
        ...

    def host(self, rank: int) -> str:
        """Return the name of the rank's computer."""
        ...

    def lost_hosts(self) -> list[str]:
        """Return the computers that do not answer any more; their ranks count as ended by loss
        (code -9).
        """
        return []

    def places(self) -> str:
        """Return the computers in words: ranks, address, and interface; empty for this one alone."""
        return ""

    def attested(self) -> Mapping[str, Any] | None:
        """Return the agreement of the ranks, as rank 0 tells it; ``None``: there is none yet, or
        nobody asks.
        """
        return None

    def stopped(self, rank: int) -> bool:
        """True if the rank's command is stopped, as by SIGSTOP."""
        return False

    def error(self, rank: int) -> dict[str, Any] | None:
        """Return the content of the error file that the rank wrote, if it did."""
        ...

    def log_path(self, rank: int) -> Path:
        """Return the file with the rank's output, on its own computer."""
        ...

    def log_tail(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of that file."""
        ...

    def out_of_memory(self, rank: int) -> bool:
        """Return whether the kernel of the rank's computer killed a process for lack of memory when
        the rank ended.
        """
        ...

    def kill(self) -> None:
        """End every process that is left, at once, and wait for it. May be called again."""
        ...
