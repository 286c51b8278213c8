"""The decision after an attempt has ended: finish, give up with a reason, or start again after a
pause, perhaps with fewer ranks.

The decision is a pure function of facts. :mod:`allhands.cluster.supervisor` carries it out.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from allhands.cluster.outcome import Fault, Outcome
from allhands.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DistributedError,
    ModelError,
    NumericsError,
    PeerLostError,
    StorageError,
)

LONGEST_PAUSE_S = 60.0
MOST_SLACK = 8.0
# For a program that reports no steps, only its running time is known. If it has run longer than
# _BRIEF_S, its failure does not count as a repeated one. If it has run for _LONG_S, it has made
# progress.
_BRIEF_S = 60.0
_LONG_S = 600.0
_PORT_RESTARTS = 3
_BLAMED_TIMES = 3
# Failures that no restart can correct: first by the exit code of a command that could not start,
# then by the exit code of an error that a rank has recorded.
_COMMAND = {
    2: "the command line (exit code 2)",
    126: "the command (it cannot be executed)",
    127: "the command (it is not found)",
}
_LASTING = {
    ConfigError.exit_code: "the settings",
    DataError.exit_code: "the data",
    ModelError.exit_code: "the model",
    StorageError.exit_code: "the storage",
    NumericsError.exit_code: "the numbers",
    CheckpointError.exit_code: "the checkpoint",
}
# Those of them that a rank finds on its own computer, so that one computer alone may have them.
_LACKING = (DataError.exit_code, ModelError.exit_code)
# Exit codes of signals that come from outside a program. The program itself causes the others.
_FROM_OUTSIDE = {
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
}


@dataclass(frozen=True)
class Past:
    """An attempt that is over.

    Attributes:
        seats: for each rank its seat, to which its faults are attributed: the rank's computer or,
            if there is only one computer, the rank's slot.
        apart: True if the seats are computers.
        edition: how often the hostfile has been changed. Faults from before a change no longer
            count against a seat.
        ran_s: duration of the attempt in seconds.
    """

    outcome: Outcome
    seats: tuple[str, ...] = ()
    apart: bool = False
    edition: int = 0
    ran_s: float = 0.0

    @property
    def culprit(self) -> str | None:
        """The seat of the rank that has caused the fault, or ``None``."""
        fault = self.outcome.fault
        return self.seats[fault.rank] if fault and 0 <= fault.rank < len(self.seats) else None


@dataclass(frozen=True)
class RestartLimits:
    """Limits from the options.

    Attributes:
        max_restarts: highest number of restarts after faults.
        min_ranks: lowest number of ranks with which the job may go on; ``None``: all ranks.
    """

    max_restarts: int = 0
    min_ranks: int | None = None


@dataclass(frozen=True)
class RunDone:
    """The job is over: it has finished, or the user has stopped it."""

    code: int


@dataclass(frozen=True)
class GiveUp:
    """The job has failed; ``reason`` says why it is not restarted, if restarts were allowed."""

    reason: str | None
    code: int


@dataclass(frozen=True)
class Restart:
    """Start again after ``pause_s`` seconds.

    Attributes:
        reason: why the job is started again, in words.
        exclude: seats to leave out from now on.
        slack: factor by which the deadlines for progress are longer.
        fault: True if a fault is the cause; then the restart counts for ``max_restarts``. That a
            computer does not fit is not a fault in this sense.
    """

    pause_s: float
    reason: str
    exclude: frozenset[str] = field(default_factory=frozenset[str])
    slack: float = 1.0
    fault: bool = True


def judge(history: Sequence[Past], limits: RestartLimits) -> RunDone | GiveUp | Restart:
    """Decide what to do after the last attempt of ``history``.

    Args:
        history: all attempts of the job, in order.
    """
    outcome = history[-1].outcome
    if outcome.ports_taken:
        return _other_ports(history)
    fault = outcome.fault
    if fault is None and outcome.regroup and not outcome.stopped:
        return Restart(0.0, "to go on with other ranks", fault=False)
    if fault is None:
        return RunDone(outcome.code)
    if unfit := _unfit(history, fault, limits):
        return Restart(0.0, f"without {', '.join(sorted(unfit))}", unfit, fault=False)
    if limits.max_restarts == 0 or outcome.stopped or fault.kind == "misfit":
        return GiveUp(None, outcome.code)
    return _after_fault(history, fault, limits)


def _unfit(history: Sequence[Past], fault: Fault, limits: RestartLimits) -> frozenset[str]:
    """Return the seats that do not fit, if the others are enough to go on.

    With these seats the next start would fail in the same way. An error before the first step, such
    as a missing model, also counts, unless other computers have it too.
    """
    last = history[-1]
    unfit = frozenset(last.seats[rank] for rank in fault.misfits if rank < len(last.seats))
    before = history[-2].outcome.fault if len(history) > 1 else None
    everywhere = (
        fault.kind != "misfit"
        and before is not None
        and _essence(before)[:2] == _essence(fault)[:2]
    )
    alone = _is_own(last, fault) and not everywhere and not last.outcome.stopped
    return unfit if alone and _enough_without(unfit, last, limits) else frozenset()


def _enough_without(seats: Collection[str | None], last: Past, limits: RestartLimits) -> bool:
    return (
        limits.min_ranks is not None
        and sum(seat not in seats for seat in last.seats) >= limits.min_ranks
    )


def _other_ports(history: Sequence[Past]) -> GiveUp | Restart:
    in_a_row = len(list(takewhile(lambda past: past.outcome.ports_taken, reversed(history))))
    if in_a_row <= _PORT_RESTARTS:
        return Restart(0.0, "a port was taken by another program", fault=False)
    code = history[-1].outcome.code or DistributedError.exit_code
    return GiveUp(f"other programs have taken its ports {in_a_row} times in a row", code)


def _after_fault(history: Sequence[Past], fault: Fault, limits: RestartLimits) -> GiveUp | Restart:
    code = history[-1].outcome.code
    if fault.kind == "blocked" and not any(past.outcome.started for past in history):
        return _around(history, limits, code)
    if same := _lasting(fault):
        return GiveUp(f"{same} would be the same after a restart", code)
    stalled = list(_stalled(history))
    exclude, unless = _leave_out(stalled, fault, limits)
    if reason := unless or (None if exclude else _repetition(stalled, fault)):
        return GiveUp(reason, code)
    restarts = sum(_counts(past) for past in history[:-1])
    if restarts >= limits.max_restarts:
        return GiveUp(
            f"it has been started again {_times(restarts)}, which is what --max-restarts allows",
            code,
        )
    fruitless = [past.outcome.fault for past, gained in stalled if not gained]
    # Without the failing seats no pause is needed.
    pause = 0.0 if exclude else _pause(len(fruitless))
    return Restart(
        pause,
        f"restart {restarts + 1} of at most {limits.max_restarts}",
        exclude,
        _slack(fruitless),
    )


def _lasting(fault: Fault) -> str | None:
    """Return what causes the fault if no restart can change it, or ``None``."""
    return (fault.explanation and _LASTING.get(fault.exit_code)) or _COMMAND.get(fault.exit_code)


def _pause(fruitless: int) -> float:
    """Return the seconds to wait before the next start; ``fruitless`` attempts made no progress."""
    return min(2.0 ** min(fruitless - 1, 10), LONGEST_PAUSE_S) if fruitless else 0.0


def _slack(faults: Sequence[Fault | None]) -> float:
    # After each hang without progress the deadlines grow: perhaps it was only a long step.
    return min(4.0 ** sum(one is not None and one.kind == "hang" for one in faults), MOST_SLACK)


def _around(history: Sequence[Past], limits: RestartLimits, code: int) -> GiveUp | Restart:
    """Go on without a computer that others cannot connect to, if enough ranks are left.

    It is called only if the ranks have never connected.
    """
    last = history[-1]
    seat = last.culprit
    if last.apart and seat is not None and _enough_without([seat], last, limits):
        return Restart(0.0, f"without {seat}", frozenset({seat}), fault=False)
    return GiveUp("what is in the way would be there after a restart", code)


def _counts(past: Past) -> bool:
    """Return whether the attempt has ended with a fault that counts for ``max_restarts``.

    A port that was taken does not count, nor does a computer that did not fit.
    """
    fault = past.outcome.fault
    return not (fault is None or past.outcome.ports_taken or _is_own(past, fault))


def _is_own(past: Past, fault: Fault) -> bool:
    """Return whether the fault is that some computer does not fit, or lacks a file that it needs.

    An error in the settings counts only if rank 0 does not have it: otherwise all have it.
    """
    lacks = fault.exit_code in _LACKING or (
        fault.exit_code == ConfigError.exit_code and 0 not in fault.misfits
    )
    return fault.kind == "misfit" or (past.apart and bool(fault.misfits) and lacks)


def _stalled(history: Sequence[Past]) -> Iterator[tuple[Past, bool]]:
    """Return the latest attempts with faults, newest first, each with whether it made progress.

    An attempt has made progress if it got further than all earlier ones. The newest such attempt is
    the last one returned: it is included because later attempts may have failed at the same place.
    """
    for past, gained in reversed(list(zip(history, _gains(history), strict=True))):
        if past.outcome.fault is not None and not _counts(past):
            continue
        if past.outcome.fault is None:
            return  # the ranks have regrouped at a checkpoint, which is progress
        yield past, gained
        if gained:
            return


def _gains(history: Sequence[Past]) -> list[bool]:
    """Return for each attempt whether it got further than all attempts before it."""
    reached = [0]
    for past in history:
        reached.append(max(reached[-1], past.outcome.step or 0))
    further = [after > before for before, after in pairwise(reached)]
    unknown = [
        past.outcome.step is None and past.outcome.started and past.ran_s >= _LONG_S
        for past in history
    ]
    return [one or other for one, other in zip(further, unknown, strict=True)]


def _leave_out(
    stalled: Sequence[tuple[Past, bool]], fault: Fault, limits: RestartLimits
) -> tuple[frozenset[str], str | None]:
    """Return the seat to leave out from now on, if there is one.

    The second value says why the job cannot go on without that seat, or is ``None``.
    """
    last = stalled[0][0]
    seat = last.culprit
    if seat is None:
        return frozenset(), None
    blamed = [past for past, _ in takewhile(lambda one: _same_seat(one[0], last), stalled)]
    # If exactly the same failure occurs twice on a seat, the cause may be its computer or GPU, or
    # the job itself. A start without the seat shows which.
    repeated = _patience(fault) == 2 and _repeated(stalled, fault) == len(blamed) == 2
    if len(blamed) < _BLAMED_TIMES and not repeated:
        return frozenset(), None
    if _enough_without([seat], last, limits):
        return frozenset({seat}), None
    if repeated or not last.apart:
        return frozenset(), None  # the other rules and ``max_restarts`` decide
    least = "all" if limits.min_ranks is None else limits.min_ranks
    return frozenset(), (
        f"{len(blamed)} faults in a row, without getting further, were due to {seat}, and {least} ranks are needed "
        "(--min-ranks): repair it, or take it out of the hostfile"
    )


def _same_seat(past: Past, last: Past) -> bool:
    return (past.culprit, past.edition) == (last.culprit, last.edition)


def _repetition(stalled: Sequence[tuple[Past, bool]], fault: Fault) -> str | None:
    """Return why another restart would fail in the same way, or ``None`` if it might not."""
    patience, times, last = _patience(fault), _repeated(stalled, fault), stalled[0][0]
    unknown = fault.step is None and last.outcome.started and last.ran_s > _BRIEF_S
    if patience is None or times < patience or unknown:
        return None
    where = "before the first step" if fault.step is None else f"at step {fault.step}"
    if fault.kind == "hang":
        return f"it has hung {where}, {_times(times)} in a row, the last time with longer deadlines"
    if fault.kind == "memory" or fault.exit_code == 128 + signal.SIGKILL:
        cause = (
            "memory is probably too short"
            if fault.kind == "memory"
            else "something ends it, or memory is too short"
        )
        return f"a process was killed {where}, {_times(times)} in a row: {cause}"
    return f"it has failed {where} in the same way, {_times(times)} in a row: {fault.error or fault.message}"


def _repeated(stalled: Sequence[tuple[Past, bool]], fault: Fault) -> int:
    """Return how many of the latest attempts in a row had the same fault as this one."""
    wanted = _essence(fault)
    faults = (past.outcome.fault for past, _ in stalled)
    return len(list(takewhile(lambda one: one is not None and _essence(one) == wanted, faults)))


def _essence(fault: Fault) -> tuple[str, int | None, int | None, str | None]:
    """Return the facts that are the same when a fault occurs again, without those that vary by
    chance.
    """
    kind, code, step, error = fault.signature
    if kind == "hang":
        return kind, None, step, None
    if kind == "memory" or code in _FROM_OUTSIDE:
        return "killed", None, step, None
    return kind, code, step, None if error is None else re.sub(r"\b0x[0-9a-fA-F]+", "0x", error)


def _patience(fault: Fault) -> int | None:
    """Return how many times in a row the same fault must occur to count as lasting.

    ``None``: it never counts as lasting.
    """
    if fault.kind in ("lost host", "blocked") or fault.exit_code == PeerLostError.exit_code:
        return None  # the computer or the network may come back
    outside = fault.kind in ("hang", "memory", "not started") or fault.exit_code in _FROM_OUTSIDE
    unconnected = fault.kind == "error" and fault.exit_code == DistributedError.exit_code
    unplaced = fault.kind == "killed" and fault.step is None
    return 3 if outside or unconnected or unplaced else 2


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
