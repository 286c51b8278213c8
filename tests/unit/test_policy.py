"""The judgement on attempts, as tables: what happened, and what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allhands.cluster.outcome import Fault, Outcome
from allhands.cluster.policy import GiveUp, Past, Restart, RestartLimits, RunDone, judge

_HOSTS = ("a", "b", "c")
_KILLED = Fault("killed", 1, "b", "rank 1 was killed by SIGKILL", 137, step=7)
_ERROR = Fault("error", 1, "b", "rank 1 exited with code 1", 1, step=7, error="ValueError: no")
_HANG = Fault("hang", 1, "b", "rank 1 made no progress", 7, step=7)
_TEN = RestartLimits(max_restarts=10)
_REGROUPED = Past(Outcome(regroup=True, started=True, step=9), _HOSTS)


def past(fault: Fault | None, reached: int | None = None, **facts: object) -> Past:
    """An attempt on this computer that ended with the fault, by default where that happened."""
    step = reached if reached is not None or fault is None else fault.step
    values = {"seats": ("slot 0", "slot 1", "slot 2"), "apart": False} | facts
    return Past(Outcome(fault, started=True, step=step), **values)  # type: ignore[arg-type]


def on_hosts(fault: Fault, **facts: object) -> Past:
    """The same on three computers with a rank each."""
    return past(fault, seats=_HOSTS, apart=True, **facts)


def at(fault: Fault, *steps: int | None, rank: int = 1) -> list[Past]:
    """Attempts that met the fault at these steps."""
    return [past(replace(fault, step=step, rank=rank)) for step in steps]


# --- the end, and what is never tried again -------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(started=True, step=10), 0),
        (Outcome(stopped=2), 130),
        (Outcome(stopped=15, regroup=True), 143),
    ],
)
def test_a_job_that_has_ended_is_done(outcome: Outcome, code: int) -> None:
    assert judge([Past(outcome)], _TEN) == RunDone(code)


def test_no_restart_unless_allowed_and_not_after_a_persons_stop() -> None:
    assert judge([past(_KILLED)], RestartLimits()) == GiveUp(None, 137)
    assert judge([Past(Outcome(_KILLED, stopped=2))], _TEN) == GiveUp(None, 137)


@pytest.mark.parametrize(
    ("code", "explanation", "words"),
    [
        (2, "a wrong flag", "the settings would be the same"),
        (3, "no samples", "the data would be the same"),
        (4, "no model", "the model"),
        (5, "disk full", "the storage"),
        (6, "NaN", "the numbers"),
        (9, "torn", "the checkpoint"),
        (2, None, "the command line (exit code 2)"),
        (126, None, "cannot be executed"),
        (127, None, "not found"),
    ],
)
def test_what_no_restart_can_cure(code: int, explanation: str | None, words: str) -> None:
    verdict = judge([past(replace(_ERROR, exit_code=code, explanation=explanation))], _TEN)
    assert isinstance(verdict, GiveUp)
    assert verdict.code == code
    assert words in (verdict.reason or "")


@pytest.mark.parametrize("code", [1, 3, 4, 5, 6, 7, 8, 9, 75, 255])
def test_a_persons_own_exit_codes_mean_nothing_to_us(code: int) -> None:
    assert isinstance(judge([past(replace(_ERROR, exit_code=code))], _TEN), Restart)


# --- pauses and the budget ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "pause_s"),
    [
        ([7], 0),  # it had got to step 7
        ([None], 1),
        ([None, 1], 0),
        ([0], 1),
        ([7, 6], 1),
        ([7, 6, 5], 2),
        ([7, 6, 5, 4], 4),
        ([7, 6, 5, 8], 0),
        ([7, 6, 8, 7], 1),
        ([9, *range(6)], 32),
        ([9, *range(8)], 60),
        ([2000, *range(1500)], 60),
    ],
)
def test_the_pause_grows_while_nothing_is_gained(steps: list[int | None], pause_s: float) -> None:
    history = [past(replace(_KILLED, step=step, rank=n % 3)) for n, step in enumerate(steps)]
    verdict = judge(history, RestartLimits(max_restarts=10_000))
    assert isinstance(verdict, Restart)
    assert (verdict.pause_s, verdict.fault, verdict.slack) == (pause_s, True, 1.0)


def test_the_budget_counts_faults_only() -> None:
    ports = Past(Outcome(_ERROR, ports_taken=True))
    history = [*at(_KILLED, 1, 2), _REGROUPED, ports, *at(_KILLED, 20)]
    assert isinstance(judge(history, RestartLimits(3)), Restart)
    verdict = judge([*history, *at(_KILLED, 30)], RestartLimits(3))
    assert isinstance(verdict, GiveUp)
    assert "3 times, which is what --max-restarts allows" in (verdict.reason or "")
    assert verdict.code == 137


def test_regrouping_is_no_fault() -> None:
    assert judge([_REGROUPED], RestartLimits()) == Restart(
        0.0, "to go on with other ranks", fault=False
    )


def test_taken_ports_are_tried_three_times_more() -> None:
    ports = Past(Outcome(_ERROR, ports_taken=True))
    for times in (1, 2, 3):
        verdict = judge([ports] * times, RestartLimits())
        assert isinstance(verdict, Restart)
        assert (verdict.pause_s, verdict.fault) == (0.0, False)
    assert isinstance(judge([ports] * 3 + at(_KILLED, 7) + [ports], _TEN), Restart)
    assert judge([ports] * 4, RestartLimits()) == GiveUp(
        "other programs have taken its ports 4 times in a row", 1
    )
    unknown = Past(Outcome(ports_taken=True))
    assert judge([unknown] * 4, RestartLimits()) == GiveUp(
        "other programs have taken its ports 4 times in a row", 7
    )


# --- in the way -----------------------------------------------------------------------------------


_CUT_OFF = replace(_ERROR, kind="blocked", exit_code=7, rank=2, error=None, step=None)


def test_who_has_never_been_connected_to_is_not_started_again() -> None:
    history = [Past(Outcome(_CUT_OFF), ("a", "b", "c"), apart=True)]
    assert judge(history, _TEN) == GiveUp("what is in the way would be there after a restart", 7)
    without = judge(history, RestartLimits(10, min_ranks=2))
    assert isinstance(without, Restart)
    assert without.exclude == {"c"}
    assert isinstance(judge(history, RestartLimits(10, min_ranks=3)), GiveUp)
    # Where the ranks have met before, the network may come back.
    before = Past(Outcome(_KILLED, started=True, step=5), ("a", "b", "c"), apart=True)
    assert isinstance(judge([before, *history], _TEN), Restart)


# --- the same again -------------------------------------------------------------------------------


def _gives_up(history: list[Past], limits: RestartLimits = _TEN) -> str | None:
    """Why it gives up; ``None`` if it does not. It must not have done so before the last attempt."""
    for length in range(1, len(history)):
        assert isinstance(judge(history[:length], limits), Restart), length
    verdict = judge(history, limits)
    return verdict.reason if isinstance(verdict, GiveUp) else None


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (at(_ERROR, 7, 7), "failed at step 7 in the same way, twice in a row: ValueError: no"),
        (at(_ERROR, None, None), "failed before the first step in the same way, twice"),
        (at(replace(_ERROR, error=None), 7, 7), "twice in a row: rank 1 exited with code 1"),
        (at(_ERROR, 5, 7, 7), "at step 7"),
        (at(replace(_KILLED, exit_code=139), 7, 7), "twice in a row: rank 1 was killed"),
        (at(replace(_ERROR, kind="ended early", exit_code=7, error=None), 7, 7), "twice in a row"),
        (
            at(_KILLED, 7, 7, 7),
            "killed at step 7, 3 times in a row: something ends it, or memory is too short",
        ),
        (at(replace(_KILLED, kind="memory"), 7, 7, 7), "memory is probably too short"),
        (
            [*at(_KILLED, 7), *at(replace(_KILLED, kind="memory"), 7, 7)],
            "memory is probably too short",
        ),
        (at(replace(_KILLED, exit_code=143), 7, 7, 7), "in the same way, 3 times in a row"),
        (
            at(_HANG, 7, 7, 7),
            "it has hung at step 7, 3 times in a row, the last time with longer deadlines",
        ),
        (at(replace(_HANG, kind="not started", step=None), *[None] * 3), "before the first step"),
        (at(replace(_ERROR, exit_code=7), 7, 7, 7), "3 times in a row"),
        (at(replace(_KILLED, exit_code=139), None, None, None), "before the first step"),
    ],
)
def test_what_happens_again_and_again_is_given_up(history: list[Past], words: str) -> None:
    assert words in (_gives_up(history) or "")


@pytest.mark.parametrize(
    "history",
    [
        at(_ERROR, 7, 8),
        at(_ERROR, 7, 6, 7, 6, 7),
        [*at(_ERROR, 7), *at(replace(_ERROR, error="KeyError: 1"), 7)],
        [*at(_ERROR, 7), _REGROUPED, *at(_ERROR, 7)],
        at(_KILLED, 7, 7, 8),
        [*at(_KILLED, 7), *at(_HANG, 7), *at(_KILLED, 7), *at(_HANG, 7)],
        at(replace(_ERROR, kind="lost host", exit_code=7), *[7] * 9),
        at(replace(_ERROR, exit_code=8), *[7] * 9),
        # Of a program that reports no steps it is not known that it was at the same place.
        [past(replace(_ERROR, step=None), ran_s=61.0)] * 9,
    ],
)
def test_what_is_not_the_same_is_tried_again(history: list[Past]) -> None:
    assert _gives_up(history) is None


def test_an_address_in_the_text_does_not_make_it_another_error() -> None:
    texts = ("OSError: <object at 0x7f10aa>", "OSError: <object at 0x7fffbb>")
    assert _gives_up([past(replace(_ERROR, error=text)) for text in texts]) is not None


def test_a_program_without_steps_counts_by_its_time() -> None:
    kills = [past(replace(_KILLED, step=None), ran_s=700.0)] * 6
    verdict = judge(kills, _TEN)
    assert isinstance(verdict, Restart)
    assert verdict.pause_s == 0.0
    brief = judge([past(replace(_KILLED, step=None), ran_s=30.0)] * 2, _TEN)
    assert isinstance(brief, Restart)
    assert brief.pause_s == 2.0


@pytest.mark.parametrize(
    ("steps", "slack"),
    [([7], 1.0), ([7, 7], 4.0), ([7, 6, 5], 8.0), ([7, 6, 5, 4], 8.0), ([7, 7, 8], 1.0)],
)
def test_after_a_hang_that_comes_again_the_deadlines_are_longer(
    steps: list[int], slack: float
) -> None:
    verdict = judge(
        [past(replace(_HANG, step=step, rank=n % 3)) for n, step in enumerate(steps)], _TEN
    )
    assert isinstance(verdict, Restart)
    assert verdict.slack == slack


# --- who is left out ------------------------------------------------------------------------------


def test_a_slot_with_three_faults_in_a_row_is_left_out() -> None:
    history = at(_KILLED, 7, 6, 5)
    verdict = judge(history, RestartLimits(10, min_ranks=2))
    assert isinstance(verdict, Restart)
    assert (verdict.exclude, verdict.pause_s) == ({"slot 1"}, 0.0)
    assert judge(history[:2], RestartLimits(10, min_ranks=2)) == Restart(
        1.0, "restart 2 of at most 10"
    )
    # Where all are needed the usual rules and the budget decide.
    needed = judge(history, RestartLimits(10, min_ranks=3))
    assert isinstance(needed, Restart)
    assert needed.exclude == frozenset()


def test_faults_of_others_and_progress_clear_a_slot() -> None:
    limits = RestartLimits(10, min_ranks=1)
    for history in (
        [*at(_KILLED, 7, 6), *at(_KILLED, 5, rank=0), *at(_KILLED, 4, 3)],
        at(_KILLED, 7, 6, 8, 7),
        [*at(_KILLED, 7, 6), _REGROUPED, *at(_KILLED, 5)],
    ):
        verdict = judge(history, limits)
        assert isinstance(verdict, Restart)
        assert verdict.exclude == frozenset()


def test_what_happens_again_without_the_slot_is_given_up() -> None:
    limits = RestartLimits(10, min_ranks=1)
    history = at(_KILLED, 7, 7, 7)
    verdict = judge(history, limits)
    assert isinstance(verdict, Restart)
    assert verdict.exclude == {"slot 1"}
    after = past(replace(_KILLED, rank=1), seats=("slot 0", "slot 2"))
    verdict = judge([*history, after], limits)
    assert isinstance(verdict, GiveUp)
    assert "4 times in a row" in (verdict.reason or "")


def test_a_computer_is_left_out_or_named() -> None:
    history = [on_hosts(replace(_KILLED, step=step)) for step in (7, 6, 5)]
    verdict = judge(history, RestartLimits(10, min_ranks=2))
    assert isinstance(verdict, Restart)
    assert verdict.exclude == {"b"}
    for limits, words in (
        (RestartLimits(10), "all ranks are needed"),
        (RestartLimits(10, min_ranks=3), "3 ranks are needed"),
    ):
        verdict = judge(history, limits)
        assert isinstance(verdict, GiveUp)
        assert "3 faults in a row, without getting further, were due to b" in (verdict.reason or "")
        assert words in (verdict.reason or "")


def test_all_ranks_of_a_computer_go_with_it() -> None:
    history = [
        past(replace(_KILLED, step=step), seats=("a", "b", "b"), apart=True) for step in (7, 6, 5)
    ]
    assert isinstance(judge(history, RestartLimits(10, min_ranks=2)), GiveUp)
    verdict = judge(history, RestartLimits(10, min_ranks=1))
    assert isinstance(verdict, Restart)
    assert verdict.exclude == {"b"}


def test_the_same_error_twice_on_one_computer_is_tried_without_it_and_then_given_up() -> None:
    limits = RestartLimits(10, min_ranks=2)
    history = [on_hosts(_ERROR)] * 2
    verdict = judge(history, limits)
    assert isinstance(verdict, Restart)
    assert verdict.exclude == {"b"}
    elsewhere = past(replace(_ERROR, rank=1, host="c"), seats=("a", "c"), apart=True)
    verdict = judge([*history, elsewhere], limits)
    assert isinstance(verdict, GiveUp)
    assert "ValueError: no" in (verdict.reason or "")
    assert "twice in a row" in (_gives_up(history) or ""), "all ranks are needed"


def test_a_changed_hostfile_forgives() -> None:
    limits = RestartLimits(10, min_ranks=2)
    history = [on_hosts(replace(_KILLED, step=step)) for step in (7, 6, 5)]
    history.append(on_hosts(replace(_KILLED, step=4), edition=1))
    verdict = judge(history, limits)
    assert isinstance(verdict, Restart)
    assert verdict.exclude == frozenset()


def test_a_fault_of_no_rank_is_nobodys() -> None:
    fault = Fault("not started", -1, "", "ssh has failed", 7)
    history = [past(fault)] * 2
    verdict = judge(history, RestartLimits(10, min_ranks=1))
    assert isinstance(verdict, Restart)
    assert verdict.exclude == frozenset()


# --- who does not fit -----------------------------------------------------------------------------

_MISFIT = Fault(
    "misfit", -1, "", "b does not match a and c", 7, explanation="b does not fit", misfits=(1,)
)
_LACKS = Fault(
    "error", 1, "b", "rank 1 exited with code 4", 4, explanation="no model", misfits=(1,)
)


def unstarted(fault: Fault, seats: tuple[str, ...] = _HOSTS) -> Past:
    """An attempt that did not come to its first step."""
    return Past(Outcome(fault), seats, apart=True)


@pytest.mark.parametrize("fault", [_MISFIT, _LACKS])
def test_who_does_not_fit_is_left_out_at_once_where_the_others_are_enough(fault: Fault) -> None:
    for limits in (RestartLimits(10, min_ranks=2), RestartLimits(0, min_ranks=1)):
        verdict = judge([unstarted(fault)], limits)
        assert isinstance(verdict, Restart)
        assert (verdict.exclude, verdict.pause_s, verdict.fault) == ({"b"}, 0.0, False)
    # Where all are needed nothing is tried again.
    for limits in (_TEN, RestartLimits(10, min_ranks=3), RestartLimits()):
        verdict = judge([unstarted(fault)], limits)
        assert isinstance(verdict, GiveUp)
        assert verdict.code == fault.exit_code
    assert judge(
        [Past(Outcome(fault, stopped=2), _HOSTS, apart=True)], RestartLimits(10, min_ranks=1)
    ) == GiveUp(None, fault.exit_code)


def test_a_misfit_uses_up_no_restart_and_hides_no_repetition() -> None:
    without = ("a", "c")
    killed = [past(replace(_KILLED, step=step), seats=without, apart=True) for step in (7, 8, 9)]
    assert isinstance(judge([unstarted(_MISFIT), *killed], RestartLimits(3, min_ranks=2)), Restart)
    assert isinstance(
        judge([unstarted(_MISFIT), *killed, killed[-1]], RestartLimits(3, min_ranks=2)), GiveUp
    )
    # The same twice, with a misfit in between, is the same twice in a row.
    verdict = judge(
        [*at(_ERROR, None), unstarted(_MISFIT), *at(_ERROR, None)], RestartLimits(10, min_ranks=2)
    )
    assert isinstance(verdict, Restart)
    assert (verdict.exclude, verdict.reason) == ({"slot 1"}, "restart 2 of at most 10")


def test_where_nobody_can_be_blamed_nobody_is_left_out() -> None:
    assert judge(
        [unstarted(replace(_MISFIT, misfits=()))], RestartLimits(10, min_ranks=1)
    ) == GiveUp(None, 7)


def test_what_all_computers_lack_is_no_single_ones() -> None:
    limits = RestartLimits(10, min_ranks=1)
    everybody = judge([unstarted(replace(_LACKS, misfits=(0, 1, 2)))], limits)
    assert isinstance(everybody, GiveUp)
    assert "the model would be the same" in (everybody.reason or "")
    # One after the other: the second is not left out any more.
    again = judge(
        [unstarted(_LACKS), unstarted(replace(_LACKS, rank=0, misfits=(0,)), ("a", "c"))], limits
    )
    assert isinstance(again, GiveUp)
    assert "the model would be the same" in (again.reason or "")
    # Nor is what rank 0 alone looks at, such as the settings of the checkpoint.
    settings = replace(_LACKS, rank=0, exit_code=2, misfits=(0,))
    assert isinstance(judge([unstarted(settings)], limits), GiveUp)
    assert isinstance(judge([unstarted(replace(settings, rank=1, misfits=(1,)))], limits), Restart)
    # Nor is a slot of the only computer.
    local = Past(Outcome(_LACKS), ("slot 0", "slot 1", "slot 2"))
    assert isinstance(judge([local], limits), GiveUp)
