"""Decision after an attempt has ended: finish, give up with a reason, or start again with some
ranks after a pause.

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
# For a program that reports no steps only the time is known: after the first time failures are not
# "the same", and after the second one the program has made progress.
_BRIEF_S = 60.0
_LONG_S = 600.0
_PORT_RESTARTS = 3
_BLAMED_TIMES = 3
# Failures that no restart can correct, by the exit code of a command that could not begin, and by
# the exit code of an error that a rank has recorded.
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
# The ones that each rank checks on its own computer; a check of rank 0 alone concerns no other rank
# fault either.
_LACKING = (DataError.exit_code, ModelError.exit_code)
# Signals that come from outside a program; it causes the others itself.
_FROM_OUTSIDE = {
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
}


@dataclass(frozen=True)
class Past:
    """An attempt that is over.

    Attributes:
        seats: for each rank the place of its faults: its computer, or its slot on a single
            computer.
        apart: True if the seats are computers.
        edition: number of changes to the hostfile; a change clears earlier faults.
        ran_s: its duration in seconds.
    """

    outcome: Outcome
    seats: tuple[str, ...] = ()
    apart: bool = False
    edition: int = 0
    ran_s: float = 0.0

    @property
    def culprit(self) -> str | None:
        """The seat of the rank that caused the end, if there is one."""
        fault = self.outcome.fault
        return self.seats[fault.rank] if fault and 0 <= fault.rank < len(self.seats) else None


@dataclass(frozen=True)
class RestartLimits:
    """Limits from the options: restarts after faults, and the fewest ranks to go on with (``None``:
    all).
    """

    max_restarts: int = 0
    min_ranks: int | None = None


@dataclass(frozen=True)
class RunDone:
    """The job is over, by its own end or at the user's request."""

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
        reason: reason of the restart, or of the pause.
        exclude: seats to leave out from now on.
        slack: factor on the deadlines for progress.
        fault: True if a fault is the cause, which counts against the budget; a computer that does
            not fit is no fault.
    """

    pause_s: float
    reason: str
    exclude: frozenset[str] = field(default_factory=frozenset[str])
    slack: float = 1.0
    fault: bool = True


def judge(history: Sequence[Past], limits: RestartLimits) -> RunDone | GiveUp | Restart:
    """Decide what follows the last attempt of ``history``, which has all attempts of the job in
    order.
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
    """Return the seats that do not fit, if the others are enough: with them the next start would
    fail in the same way.

    An error before the first step, such as a missing model, belongs to a computer if no other
    computer has it.
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
    """Return the cause, if no restart can change it."""
    return (fault.explanation and _LASTING.get(fault.exit_code)) or _COMMAND.get(fault.exit_code)


def _pause(fruitless: int) -> float:
    """Return the seconds before another start, after so many attempts without progress."""
    return min(2.0 ** min(fruitless - 1, 10), LONGEST_PAUSE_S) if fruitless else 0.0


def _slack(faults: Sequence[Fault | None]) -> float:
    # The first hang at a place counts as a hang; a second one there may have been a step that takes
    # long.
    return min(4.0 ** sum(one is not None and one.kind == "hang" for one in faults), MOST_SLACK)


def _around(history: Sequence[Past], limits: RestartLimits, code: int) -> GiveUp | Restart:
    """Go on without the unreachable computer, if allowed; because of it ranks have never connected."""
    last = history[-1]
    seat = last.culprit
    if last.apart and seat is not None and _enough_without([seat], last, limits):
        return Restart(0.0, f"without {seat}", frozenset({seat}), fault=False)
    return GiveUp("what is in the way would be there after a restart", code)


def _counts(past: Past) -> bool:
    """Return whether it ended by a fault that allows another try: not by a computer that did not
    fit.
    """
    fault = past.outcome.fault
    return not (fault is None or past.outcome.ports_taken or _is_own(past, fault))


def _is_own(past: Past, fault: Fault) -> bool:
    """Return whether the fault belongs to a computer that does not fit, or lacks a needed file."""
    lacks = fault.exit_code in _LACKING or (
        fault.exit_code == ConfigError.exit_code and 0 not in fault.misfits
    )
    return fault.kind == "misfit" or (past.apart and bool(fault.misfits) and lacks)


def _stalled(history: Sequence[Past]) -> Iterator[tuple[Past, bool]]:
    """Return the latest faults, newest first, back to the last attempt that got further than all
    earlier ones.

    Each comes with whether its attempt did. That attempt is included, because the next one may fail
    at the same place.
    """
    for past, gained in reversed(list(zip(history, _gains(history), strict=True))):
        if past.outcome.fault is not None and not _counts(past):
            continue
        if past.outcome.fault is None:
            return  # a checkpoint was reached, at which the ranks regrouped
        yield past, gained
        if gained:
            return


def _gains(history: Sequence[Past]) -> list[bool]:
    """Return whether each attempt got further than those before it."""
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
    """Return the seat to leave out from now on, if there is one, or why the job cannot go on
    without it.
    """
    last = stalled[0][0]
    seat = last.culprit
    if seat is None:
        return frozenset(), None
    blamed = [past for past, _ in takewhile(lambda one: _same_seat(one[0], last), stalled)]
    # The cause of an exactly repeated failure may be a computer or GPU, or the job. A start without
    # the computer shows it.
    repeated = _patience(fault) == 2 and _repeated(stalled, fault) == len(blamed) == 2
    if len(blamed) < _BLAMED_TIMES and not repeated:
        return frozenset(), None
    if _enough_without([seat], last, limits):
        return frozenset({seat}), None
    if repeated or not last.apart:
        return frozenset(), None  # the other rules, and the budget, decide
    least = "all" if limits.min_ranks is None else limits.min_ranks
    return frozenset(), (
        f"{len(blamed)} faults in a row, without getting further, were due to {seat}, and {least} ranks are needed "
        "(--min-ranks): repair it, or take it out of the hostfile"
    )


def _same_seat(past: Past, last: Past) -> bool:
    return (past.culprit, past.edition) == (last.culprit, last.edition)


def _repetition(stalled: Sequence[tuple[Past, bool]], fault: Fault) -> str | None:
    """Return why another restart would fail in the same way, if it would."""
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
    """Return how often in a row this has happened."""
    wanted = _essence(fault)
    faults = (past.outcome.fault for past, _ in stalled)
    return len(list(takewhile(lambda one: one is not None and _essence(one) == wanted, faults)))


def _essence(fault: Fault) -> tuple[str, int | None, int | None, str | None]:
    """Return the facts of a fault that stay the same when it is repeated, without those that vary
    by chance.
    """
    kind, code, step, error = fault.signature
    if kind == "hang":
        return kind, None, step, None
    if kind == "memory" or code in _FROM_OUTSIDE:
        return "killed", None, step, None
    return kind, code, step, None if error is None else re.sub(r"\b0x[0-9a-fA-F]+", "0x", error)


def _patience(fault: Fault) -> int | None:
    """Return how many times in a row the same fault may happen before it counts as lasting;
    ``None``: no limit.
    """
    if fault.kind in ("lost host", "blocked") or fault.exit_code == PeerLostError.exit_code:
        return None  # a computer, or the network, that may come back
    outside = fault.kind in ("hang", "memory", "not started") or fault.exit_code in _FROM_OUTSIDE
    unconnected = fault.kind == "error" and fault.exit_code == DistributedError.exit_code
    unplaced = fault.kind == "killed" and fault.step is None
    return 3 if outside or unconnected or unplaced else 2


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
