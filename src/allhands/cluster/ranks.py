"""What the supervisor knows about ranks, and its interface to the modules that start them, here or
on other computers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from allhands.cluster.hosts import HERE, Backend, Host
from allhands.errors import ConfigError
from allhands.runtime.blas import allowed_cores

# What a rank is doing. A rank in "reduce" waits for others, so it is not the cause of a hang.
# "start" is before the first step. "first" is the first step after a start, and every step that has
# to compile.
Phase = Literal["start", "first", "load", "compute", "reduce", "update", "validate", "save", "end"]


# If the first variable is set, rank 0 reports what the ranks have agreed on. If the second one is
# set, a rank only finds out whether it would fit. Its value is the moment of the run whose date is
# used in the data, or 1.
ATTEST_VARIABLE = "ALLHANDS_ATTEST"
TRIAL_VARIABLE = "ALLHANDS_TRIAL"
RANKS_A_CORE = 8  # most ranks for each core, for trying many ranks on a small computer


@dataclass(frozen=True)
class Place:
    """A computer and the number of ranks on it."""

    name: str
    num_ranks: int
    host: Host = HERE


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """Settings of the ranks of a job.

    Attributes:
        cores_per_rank: cores of each rank; ``None``: ranks have no cores of their own or, on
            several computers, the agent divides the cores of its computer.
        env: variables that are added to the supervisor's environment.
        start_deadline_s: the job fails if a rank has not reported its start after this time.
        stop_grace_s: time that ranks have after the first Ctrl-C to save and end.
        finish_grace_s: time that the other ranks have to end after one has ended without an error.
        hang_timeout_s: seconds without a heartbeat that count as a hang; ``None``: a limit that
            follows from the measured steps.
        weights: relative speed of every rank, if they differ.
        keep_logs: if false, other computers remove their logs when their ranks have ended without
            an error.
    """

    cores_per_rank: int | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    start_deadline_s: float = 600.0
    stop_grace_s: float = 60.0
    finish_grace_s: float = 60.0
    hang_timeout_s: float | None = None
    weights: tuple[float, ...] | None = None
    keep_logs: bool = True


@dataclass(frozen=True)
class LaunchSpec(RankSettings):
    """What to start: ``num_processes`` ranks that run ``command``, on this computer or on those of
    ``places``.

    The output of rank 0 goes to the supervisor's own output, that of rank N to
    ``log_dir/rank-N.log``.

    Attributes:
        places: the computers in the order of their ranks; empty: all ranks run on this computer.
        tag_output: all ranks write to their logs, and each line is also shown on the screen, with
            its rank before it.
        log_dir_there: ``log_dir`` on other computers; ``None``: the same; empty: they keep no logs.
        rdma: for JACCL, for each computer its devices to all computers, in their order.
        examine: the command that finds faults of the computers of ``places``.
    """

    command: Sequence[str]
    num_processes: int
    backend: Backend
    log_dir: Path
    places: tuple[Place, ...] = ()
    tag_output: bool = False
    log_dir_there: str | None = None
    rdma: Sequence[Sequence[Any]] | None = None
    examine: str | None = None


def require_cores(num_ranks: int) -> None:
    """Refuse more processes than this computer can run in reasonable time.

    Raises:
        ConfigError: there are more than :data:`RANKS_A_CORE` processes for each core.
    """
    cores = allowed_cores()
    if num_ranks > RANKS_A_CORE * cores:
        raise ConfigError(
            f"{num_ranks} processes on {cores} core{'s' * (cores > 1)}: they would only wait for each other",
            code="cores-too-few",
            where="-n",
            hint=f"-n {cores} gives each a core of its own; {RANKS_A_CORE * cores} at most are started here",
        )


def fair_share(num_ranks: int) -> int | None:
    """Return the default number of cores of each local rank, which is an equal share.

    ``None`` if the system cannot give a process its own cores.
    """
    return max(1, allowed_cores() // num_ranks) if hasattr(os, "sched_getaffinity") else None


@dataclass(frozen=True)
class RankExit:
    """The end of one rank: its exit code or minus the number of its signal, and the time
    (``time.monotonic``).
    """

    rank: int
    code: int
    time: float


@dataclass(frozen=True)
class Beat:
    """The latest heartbeat of a rank's training thread.

    Attributes:
        step: number of completed optimizer updates.
        phase: what the rank is doing, one of :data:`Phase`.
        count: number of heartbeats so far.
        time: when the supervisor or its agent first saw this count (``time.monotonic`` there).
        waited_s: seconds for which the rank had already waited for its data at that time.
    """

    step: int
    phase: str
    count: int
    time: float
    waited_s: float = 0.0


@dataclass(frozen=True)
class Marks:
    """The marks that a rank has set so far.

    Attributes:
        ready: it is ready to join the group, and waits for others.
        started: it has started.
        busy_time: when it last reported that it is busy with preparations; ``None``: never.
        beat: its latest heartbeat.
        listening: other ranks can connect to it.
    """

    ready: bool = False
    started: bool = False
    busy_time: float | None = None
    beat: Beat | None = None
    listening: bool = False


class RankProcesses(Protocol):
    """The processes of one attempt, on this computer or on others."""

    def exits(self) -> list[RankExit]:
        """Return the ends of the ranks that have ended, in the order of their times."""
        ...

    def marks(self, rank: int) -> Marks:
        """Return the marks that the rank has set so far."""
        ...

    def signal(self, rank: int, number: int) -> bool:
        """Send a signal to the rank's command; return false if it is not running."""
        ...

    def tell(self, word: str) -> None:
        """Tell every rank ``word``, by a file of this name in its ``ALLHANDS_RUN_DIR``."""
        ...

    def host(self, rank: int) -> str:
        """Return the name of the rank's computer."""
        ...

    def lost_hosts(self) -> list[str]:
        """Return the computers that no longer answer; their ranks count as ended with code -9."""
        return []

    def places(self) -> str:
        """Return the computers in words, with ranks, address and interface; empty if all ranks run
        on this one.
        """
        return ""

    def attested(self) -> Mapping[str, Any] | None:
        """Return what the ranks have agreed on, as rank 0 reports it.

        ``None`` if there is no report yet, or the ranks were not asked for one.
        """
        return None

    def stopped(self, rank: int) -> bool:
        """Return whether the rank's command is stopped, as after SIGSTOP."""
        return False

    def error(self, rank: int) -> dict[str, Any] | None:
        """Return the content of the error file that the rank has written, or ``None``."""
        ...

    def log_path(self, rank: int) -> Path:
        """Return the path of the file with the rank's output, on the rank's computer."""
        ...

    def log_tail(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of that file."""
        ...

    def out_of_memory(self, rank: int) -> bool:
        """Return whether the kernel of the rank's computer killed a process because memory was
        short, at the time when the rank ended.
        """
        ...

    def kill(self) -> None:
        """End every process that is left, at once, and wait until it is gone.

        May be called again.
        """
        ...
