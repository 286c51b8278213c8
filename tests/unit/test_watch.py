"""Deadlines on progress, as tables: what ranks said and when, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from allhands.cluster.ranks import Beat, Marks
from allhands.cluster.watch import Limits, Pauses, ProgressWatch, Stall

TICK = 0.1


class _Ranks:
    """Ranks that say what a script has them say, looked at every tenth of a second."""

    def __init__(self, size: int, limits: Limits | None = None) -> None:
        self.watch = ProgressWatch(limits or Limits())
        self.marks = {rank: Marks(started=True) for rank in range(size)}
        self.living = set(range(size))
        self.now = 1000.0

    def says(self, rank: int, phase: str, step: int, waited_s: float = 0.0) -> None:
        last = self.marks[rank].beat
        beat = Beat(step, phase, last.count + 1 if last else 1, self.now, waited_s)
        self.marks[rank] = Marks(started=True, beat=beat)

    def passes(self, seconds: float) -> Stall | None:
        """Let time go by, until something is wrong."""
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            if stall := self.watch.check(self.now, self.marks, self.living):
                return stall
        return None

    def steps(self, durations: Sequence[float]) -> None:
        """All ranks do steps of these lengths, the longest of which compile, and their exchange
        takes no time.
        """
        for step, seconds in enumerate(durations):
            for rank in self.marks:
                self.says(rank, "first" if seconds > 20.0 else "compute", step)
            assert self.passes(seconds) is None
            for rank in self.marks:
                self.says(rank, "reduce", step)
            assert self.passes(TICK) is None


def _silence(ranks: _Ranks, most: float = 2000.0) -> float:
    """After how many seconds something is wrong."""
    began = ranks.now
    assert ranks.passes(most) is not None
    return ranks.now - began


@pytest.mark.parametrize(
    ("durations", "limit"),
    [
        ([0.1] * 5, 4.0),  # the least
        ([2.0] * 5, 4.2),
        ([4.0] * 5, 8.2),  # twice the step: 4 s of work and a tenth for the exchange
        ([4.0, 7.5, 4.0], 15.2),  # the longest of the latest
        ([4.0, 7.5, *[4.0] * 50], 9.12),  # long ago: a little more than it took
        ([1.0, 30.0, *[1.0] * 60], 36.0),  # it had to compile
    ],
)
def test_the_deadline_follows_the_steps(durations: list[float], limit: float) -> None:
    ranks = _Ranks(2)
    ranks.steps(durations)
    for rank in range(2):
        ranks.says(rank, "compute", len(durations))
    assert _silence(ranks) == pytest.approx(limit, abs=0.25)


@pytest.mark.parametrize(
    ("phase", "limits", "limit"),
    [
        ("load", Limits(), 4.0),
        ("compute", Limits(), 4.0),
        ("update", Limits(), 4.0),
        ("validate", Limits(), 10.0),
        ("save", Limits(), 600.0),
        ("first", Limits(start_s=40.0), 40.0),
        ("start", Limits(start_s=40.0), 40.0),
        ("end", Limits(finish_s=20.0), 20.0),
        ("compute", Limits(hang_timeout_s=2.0), 2.0),
        ("validate", Limits(hang_timeout_s=2.0), 10.0),
        ("validate", Limits(hang_timeout_s=30.0), 30.0),
        ("first", Limits(start_s=40.0, hang_timeout_s=2.0), 40.0),
        ("compute", Limits(slack=2.0), 8.0),
        ("compute", Limits(hang_timeout_s=2.0, slack=4.0), 8.0),
    ],
)
def test_each_phase_has_its_deadline(phase: str, limits: Limits, limit: float) -> None:
    ranks = _Ranks(2, limits)
    ranks.steps([0.5, 0.5])
    ranks.says(0, "reduce", 2)
    ranks.says(1, phase, 2)
    began = ranks.now
    stall = ranks.passes(limit + 2.0)
    assert stall is not None
    assert (stall.rank, stall.phase, stall.step, stall.mutual) == (1, phase, 2, False)
    assert stall.seconds == pytest.approx(limit, abs=0.25)
    assert ranks.now - began == pytest.approx(stall.seconds)


def test_before_anything_is_measured_a_step_has_the_time_of_a_start() -> None:
    ranks = _Ranks(1, Limits(start_s=50.0))
    ranks.says(0, "compute", 0)
    assert _silence(ranks) == pytest.approx(50.0, abs=0.25)


@pytest.mark.parametrize(("each", "limit"), [(0.2, 30.0), (40.0, 80.0)])
def test_a_validation_before_the_first_step_may_be_slow(each: float, limit: float) -> None:
    """Its parts alone do not tell how busy the computer is."""
    ranks = _Ranks(1)
    for _ in range(3):
        ranks.says(0, "validate", 0)
        assert ranks.passes(each) is None
    ranks.says(0, "validate", 0)
    assert _silence(ranks) == pytest.approx(limit, abs=0.25)


def test_the_first_step_stands_in_for_steps_not_yet_seen() -> None:
    """Twice, although it had to compile: how much steps differ is not known yet."""
    ranks = _Ranks(1)
    ranks.says(0, "first", 0)
    assert ranks.passes(20.0) is None
    ranks.says(0, "compute", 1)
    assert _silence(ranks) == pytest.approx(40.0, abs=0.25)


def test_later_a_long_first_step_is_no_measure() -> None:
    ranks = _Ranks(1)
    ranks.says(0, "first", 0)
    assert ranks.passes(20.0) is None
    for step in range(1, 5):
        ranks.says(0, "compute", step)
        assert ranks.passes(6.0) is None
    ranks.says(0, "compute", 5)
    assert _silence(ranks) == pytest.approx(24.0, abs=0.25)


def test_a_long_validation_or_save_does_not_slacken_the_steps() -> None:
    """Nor does waiting for the rank that does it."""
    ranks = _Ranks(2)
    ranks.steps([0.5] * 3)
    for phase in ("validate", "save"):
        for _ in range(3):
            ranks.says(0, phase, 3)
            ranks.says(1, "reduce", 3)
            assert ranks.passes(9.0) is None
    for rank in range(2):
        ranks.says(rank, "compute", 4)
    assert _silence(ranks) == pytest.approx(4.0, abs=0.25)
    # But the next validation may take its time.
    ranks.says(0, "validate", 4)
    ranks.says(1, "reduce", 4)
    assert _silence(ranks) == pytest.approx(18.0, abs=0.25)


@pytest.mark.parametrize(
    ("said", "culprit"),
    [
        ([("reduce", 7), ("compute", 7)], 1),
        ([("reduce", 7), ("update", 6), ("load", 7)], 1),  # the one that is least far
        ([("compute", 7), ("reduce", 7), ("compute", 7)], 0),
        ([("reduce", 7), ("reduce", 6)], 1),
        ([("reduce", 7), ("reduce", 7)], 0),
        ([("reduce", 7), ("reduce", 6), ("reduce", 6)], 1),
        ([("save", 7), ("compute", 7)], 1),  # saving has more time
    ],
)
def test_who_is_to_blame(said: list[tuple[str, int]], culprit: int) -> None:
    ranks = _Ranks(len(said))
    ranks.steps([0.5] * 6)
    for rank, (phase, step) in enumerate(said):
        ranks.says(rank, phase, step)
    stall = ranks.passes(20.0)
    assert stall is not None
    assert stall.rank == culprit
    assert stall.mutual == all(phase == "reduce" for phase, _ in said)
    assert stall.seconds == pytest.approx(4.0, abs=0.25)


def test_a_slow_exchange_is_measured_from_when_all_have_come_to_it() -> None:
    ranks = _Ranks(2)
    ranks.steps([0.5] * 3)
    ranks.says(0, "reduce", 3)
    ranks.says(1, "compute", 3)
    assert ranks.passes(3.5) is None
    ranks.says(1, "reduce", 3)
    assert ranks.passes(4.0) is None  # what the exchange took
    for rank in range(2):
        ranks.says(rank, "reduce", 4)
    # The step of rank 1, its work and the exchange, was the longest.
    assert _silence(ranks) == pytest.approx(15.0, abs=0.4)


def test_those_that_have_ended_are_not_waited_for() -> None:
    ranks = _Ranks(2)
    ranks.steps([0.5] * 3)
    ranks.says(0, "reduce", 3)
    ranks.says(1, "save", 3)
    assert ranks.passes(20.0) is None
    ranks.living = {0}
    stall = ranks.passes(TICK)
    assert stall is not None
    assert (stall.rank, stall.phase) == (0, "reduce")


def test_a_rank_alone_waits_for_nobody() -> None:
    ranks = _Ranks(1)
    ranks.steps([0.5] * 3)
    stall = ranks.passes(20.0)
    assert stall is not None
    assert (stall.rank, stall.phase, stall.mutual) == (0, "reduce", False)


def test_ranks_that_say_nothing_are_not_judged() -> None:
    ranks = _Ranks(2)
    assert ranks.passes(1000.0) is None
    ranks.says(0, "reduce", 0)
    assert ranks.passes(1000.0) is None


def test_a_rank_that_prepares_is_not_judged_before_it_has_started() -> None:
    ranks = _Ranks(1, Limits(start_s=10.0))
    ranks.marks[0] = Marks(started=False, beat=Beat(0, "start", 1, ranks.now))
    assert ranks.passes(30.0) is None
    ranks.marks[0] = Marks(started=True, busy_time=ranks.now, beat=Beat(0, "start", 1, 1000.0))
    assert _silence(ranks) == pytest.approx(10.0, abs=0.25)


def test_beats_within_a_phase_count() -> None:
    ranks = _Ranks(1)
    ranks.steps([0.5] * 3)
    for _ in range(10):
        ranks.says(0, "compute", 3)
        assert ranks.passes(3.5) is None


def test_time_in_which_nobody_looked_does_not_count() -> None:
    ranks = _Ranks(2)
    ranks.steps([0.5] * 3)
    for rank in range(2):
        ranks.says(rank, "compute", 3)
    assert ranks.passes(2.0) is None
    ranks.now += 3600.0
    # 2 s had passed before the pause; what is left are 2 s.
    assert _silence(ranks) == pytest.approx(2.0, abs=0.25)


def test_a_pause_is_no_measure_of_a_step() -> None:
    ranks = _Ranks(1)
    ranks.steps([0.5] * 3)
    ranks.says(0, "compute", 3)
    assert ranks.passes(0.5) is None
    ranks.now += 3600.0
    assert ranks.passes(0.5) is None
    ranks.says(0, "compute", 4)
    assert _silence(ranks) == pytest.approx(4.0, abs=0.25)


def test_pauses() -> None:
    pauses = Pauses()
    for now in (10.0, 10.5, 11.0, 20.0, 20.5, 25.0):
        pauses.look(now)
    assert pauses.age(25.0, 10.0) == pytest.approx(15.0 - 9.0 - 4.5)
    assert pauses.age(25.0, 11.01) == pytest.approx(0.5)  # after the look, before the pause
    assert pauses.age(25.0, 15.0) == pytest.approx(0.5)  # within the first one
    assert pauses.age(20.5, 10.0) == pytest.approx(1.5)  # before the second one
    assert pauses.age(25.0, 20.0) == pytest.approx(0.5)
    assert pauses.age(25.0, 25.0) == 0.0


def test_data_that_have_been_on_their_way_for_long_are_waited_for_the_less() -> None:
    ranks = _Ranks(2)
    ranks.steps([1.0] * 5)
    ranks.says(0, "reduce", 5)
    ranks.says(1, "load", 5)
    ranks.passes(TICK)
    ranks.says(1, "load", 5, waited_s=2.0)  # two batches were ready when the next one hung
    assert _silence(ranks) == pytest.approx(2.0, abs=2 * TICK)


def test_a_long_way_of_data_is_no_longer_a_step() -> None:
    """What is measured is what the training waited, not what was done beside it."""
    ranks = _Ranks(1)
    for step in range(5):
        ranks.says(0, "load", step, waited_s=3.0)
        assert ranks.passes(0.5) is None
        ranks.says(0, "compute", step)
        assert ranks.passes(1.0) is None
    ranks.says(0, "compute", 5)
    assert _silence(ranks) == pytest.approx(4.0, abs=2 * TICK)


@pytest.mark.parametrize(("exchanges", "limit"), [(0, 30.0), (1, 4.0)])
def test_the_first_exchange_may_have_to_connect(exchanges: int, limit: float) -> None:
    ranks = _Ranks(2)
    for step in range(exchanges + 1):
        for rank in range(2):
            ranks.says(rank, "first" if step == 0 else "compute", step)
        assert ranks.passes(1.0) is None
        for rank in range(2):
            ranks.says(rank, "reduce", step)
        if step < exchanges:
            assert ranks.passes(TICK) is None
    assert _silence(ranks) == pytest.approx(limit, abs=0.25)
