"""Facts about the end of one attempt of a job: :mod:`allhands.cluster.policy` judges them, and
people read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Ranks end with this code after a checkpoint when they were told "regroup": sysexits' EX_TEMPFAIL.
REGROUP_CODE = 75
# What ranks of a ring are told when all of them can be called.
ALL_LISTEN = "listening"

# "error": an exception; "misfit": differs from the others in what must be equal; "killed": a
# signal; "memory": killed by the kernel for want of memory; "hang": no progress; "lost host": its
# computer does not answer; "blocked": another rank cannot connect to it, though it listens; "not
# started": not in time; "ended early": left its peers.
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
    """Why an attempt failed: the rank that is the cause, not those that suffered it.

    Attributes:
        exit_code: for the supervisor to end with, if it does: the rank's, or 128 + signal.
        step: optimizer updates that the rank had done; ``None`` before the first beat.
        phase: what it was doing then.
        error: type and message of the exception that the rank wrote down.
        code: of that exception, if it is one of allhands.
        explanation: the message with place and remedy of an error that was foreseen.
        misfits: the ranks without which the others could go on, where that is known; of a "misfit"
            or an error before the first step.
        detected_s: from the rank's last sign of life, or its end, to the decision.
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
        """Return the facts that are the same when a fault is repeated: kind, exit code, step and
        error.
        """
        return self.kind, self.exit_code, self.step, self.error


@dataclass(frozen=True)
class NewcomerRefusal:
    """Why a computer does not fit, in one sentence and with the remedy; ``error``: an exception's
    type and message.
    """

    message: str
    explanation: str
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt.

    Attributes:
        fault: what went wrong, if something did.
        stopped: the signal by which a person, or a scheduler, ended it; 0 if none did.
        regroup: it ended at a checkpoint because it was told to.
        started: whether all ranks had begun to train.
        step: the most optimizer updates that any rank had done; ``None`` before the first beat.
        ports_taken: the ring found its ports taken by another program: start again with others,
            nothing else is wrong.
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
