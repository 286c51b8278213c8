"""Facts about the end of one attempt of a job, for :mod:`allhands.cluster.policy`, which decides
what to do next, and for messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Ranks that were told "regroup" save a checkpoint and end with this code (EX_TEMPFAIL of sysexits).
REGROUP_CODE = 75
# The word that ranks of a ring are told when all of them listen, so that each can be called.
ALL_LISTEN = "listening"

# "error": the rank has raised an exception; "misfit": it differs from the others in something that
# must be equal; "killed": by a signal; "memory": killed by the kernel because memory was short;
# "hang": it makes no progress; "lost host": its computer does not answer; "blocked": another rank
# cannot connect to it, although it listens; "not started": it has not started in time; "ended
# early": it has ended while the others were still working.
FaultKind = Literal[
    "error",
    "misfit",
    "killed",
    "memory",
    "hang",
    "lost host",
    "blocked",
    "not started",
    "ended early",
]


@dataclass(frozen=True)
class Fault:
    """Why an attempt failed: the rank that is the cause, not ranks that failed because of it.

    Attributes:
        rank: the rank that is the cause; -1 if it is no single rank.
        exit_code: the exit code of the rank, or 128 + signal. The supervisor ends with it if it
            does not start again.
        step: optimizer updates that the rank had done; ``None`` before the first beat.
        phase: what the rank was doing then.
        error: type and message of the exception that the rank has written into its error file.
        code: code of that exception, if it is one of allhands.
        explanation: message of an error that allhands knows, with its place and what to do.
        misfits: the ranks without which the others could go on, if that is known; only for a
            "misfit" or an error before the first step.
        detected_s: seconds from the rank's last sign of life, or its end, to the decision.
    """

    kind: FaultKind
    rank: int
    host: str
    message: str
    exit_code: int
    step: int | None = None
    phase: str | None = None
    error: str | None = None
    explanation: str | None = None
    log_path: Path | None = None
    log_tail: tuple[str, ...] = ()
    misfits: tuple[int, ...] = ()
    detected_s: float = 0.0
    code: str | None = None

    @property
    def signature(self) -> tuple[str, int, int | None, str | None]:
        """Return the facts that are the same when a fault occurs again: kind, exit code, step and
        error.
        """
        return self.kind, self.exit_code, self.step, self.error


@dataclass(frozen=True)
class NewcomerRefusal:
    """Why a newcomer does not fit.

    Attributes:
        message: the reason in one sentence.
        explanation: the reason, and what to do.
        error: type and message of the exception, if there was one.
    """

    message: str
    explanation: str
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt.

    Attributes:
        fault: what went wrong; ``None`` if nothing did.
        stopped: the signal with which the user or a scheduler has ended the attempt; 0 if none.
        regroup: whether it has ended at a checkpoint because the ranks were told to regroup.
        started: whether all ranks had started.
        step: highest number of optimizer updates that a rank had done; ``None`` before the first
            beat.
        ports_taken: whether another program has taken the ports of the ring. Then nothing else is
            wrong, and the ranks should start again with other ports.
    """

    fault: Fault | None = None
    stopped: int = 0
    regroup: bool = False
    started: bool = False
    step: int | None = None
    ports_taken: bool = False

    @property
    def code(self) -> int:
        """The exit code: the fault's, 128 + signal, or 0."""
        if self.fault is not None:
            return self.fault.exit_code or 1
        return 128 + self.stopped if self.stopped else 0
