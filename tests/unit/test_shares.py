"""Shares of a batch by measured speeds: what moves them, what does not, and what they are worth."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.config.schema import build_config
from allhands.data.loader import Loader
from allhands.data.order import GlobalOrder, divide
from allhands.data.tokens import TokenSet
from allhands.parallel.shares import (
    Balance,
    Moved,
    RowSeconds,
    Speed,
    StepSample,
    better_weights,
    even_weights,
    fluid_seconds,
    speed_of,
)
from allhands.runtime.sizing import Sizing

Speeds = Callable[[int], Sequence[float]]


@dataclass
class Simulation:
    """Ranks of given speeds that divide batches among them, as a training does, without one.

    Attributes:
        efficiency: of each step against the sum of all speeds.
        moves: what was changed, by the step after which it was.
    """

    speeds: Speeds
    rows: int = 16
    lengths: tuple[int, int] = (256, 257)
    update_s: float = 0.0  # of a rank that computes 1000 tokens a second
    noise: float = 0.0  # of each rank's steps
    common: float = 0.0  # of all ranks' steps alike
    accumulation: int = 1
    seed: int = 0
    efficiency: list[float] = field(default_factory=list)
    moves: list[tuple[int, Moved]] = field(default_factory=list)
    tokens: list[list[float]] = field(default_factory=list)

    def run(self, steps: int) -> Simulation:
        draw = random.Random(self.seed)
        work = np.random.default_rng(self.seed).integers(*self.lengths, size=20_000)
        order, every = GlobalOrder(work, self.rows, 0), self.accumulation
        size = len(self.speeds(0))
        balance = Balance((1.0,) * size, accumulation=every, rows=RowSeconds(order, work, every))
        told = [0.0] * (3 * size)
        for step in range(steps):
            tokens = [0.0] * size
            for batch in range(step * every, (step + 1) * every):
                cut = balance.cut(batch)
                assert cut.begin == step * every
                shares = divide(order.batch(batch), work, cut.weights, before=tokens, some=cut.some)
                tokens = [
                    old + float(work[share].sum())
                    for old, share in zip(tokens, shares, strict=True)
                ]
            alike, speeds = max(0.2, 1 + draw.gauss(0, self.common)), self.speeds(step)
            seconds = [
                alike * max(0.2, 1 + draw.gauss(0, self.noise)) * each / speed
                for each, speed in zip(tokens, speeds, strict=True)
            ]
            updates = [self.update_s * 1000 / speed for speed in speeds]
            self.tokens.append(tokens)
            whole = max(one + other for one, other in zip(seconds, updates, strict=True))
            self.efficiency.append(sum(tokens) / whole / sum(speeds))
            if moved := balance.hear(told, (step + 1) * every):
                self.moves.append((step, moved))
            told = [x for row in zip(tokens, seconds, updates, strict=True) for x in row]
        return self


def test_shares_follow_the_speeds_soon() -> None:
    found = Simulation(lambda step: (3405, 1174)).run(100)
    assert found.efficiency[0] < 0.55
    assert min(found.efficiency[15:]) > 0.97
    assert [moved.weights for _, moved in found.moves] == [
        pytest.approx((0.7436, 0.2564), abs=1e-3)
    ]
    (_, moved) = found.moves[0]
    assert moved.speeds == pytest.approx((3405, 1174))
    assert moved.rows == (True, True)


@pytest.mark.parametrize("slower", [(3405, 587), (1702, 1174)], ids=["slow", "fast"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_rank_that_slows_down_and_recovers_is_followed(
    slower: tuple[int, int], noise: float
) -> None:
    found = Simulation(
        lambda step: slower if 60 <= step < 160 else (3405, 1174), rows=64, noise=noise
    ).run(260)
    least = 0.94 - 2.5 * noise
    for begin, end in ((30, 60), (90, 160), (190, 260)):
        assert float(np.mean(found.efficiency[begin:end])) > least
    assert len(found.moves) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_noise_of_equal_ranks_moves_nothing(size: int, noise: float) -> None:
    rows = [
        Simulation(lambda step: (1000,) * size, 64, noise=noise, seed=seed).run(600)
        for seed in range(3)
    ]
    assert sum(len(each.moves) for each in rows) <= 1


def test_even_strong_noise_moves_shares_rarely() -> None:
    found = Simulation(lambda step: (1000, 1000), 64, noise=0.2).run(1000)
    assert len(found.moves) <= 10


def test_what_slows_all_ranks_moves_nothing() -> None:
    """Short rows, a busy host."""
    assert not Simulation(lambda step: (1000, 1000), 64, noise=0.02, common=0.3).run(500).moves
    found = Simulation(lambda step: (3000, 1000), 64, noise=0.02, common=0.3).run(200)
    assert found.moves[0][0] < 20


def test_one_disturbed_step_moves_nothing() -> None:
    found = Simulation(
        lambda step: (1000, 100) if step in (20, 21, 50) else (1000, 1000), noise=0.01
    ).run(100)
    assert not found.moves


@pytest.mark.parametrize("seconds", [0.02, 0.1])
def test_moments_in_which_a_computer_is_busy_move_nothing(seconds: float) -> None:
    """Other programs have half of one's core for 0.7 seconds, again and again; a change that stays
    is followed.
    """
    speed, busy = 16 * 256 / 2 / seconds, round(0.7 / (2 * seconds))

    def speeds(step: int) -> Sequence[float]:
        return (speed, speed / 2) if step % (9 * busy) < busy or step >= 1000 else (speed, speed)

    found = Simulation(speeds, noise=0.03).run(1300)
    assert [step >= 1000 for step, _ in found.moves] == [True] * len(found.moves)
    assert 1 <= len(found.moves) <= 2
    assert found.moves[0][0] < 1000 + 2.5 / seconds
    assert float(np.mean(found.efficiency[-200:])) > 0.9


def test_few_rows_are_divided_only_where_it_is_worth_it() -> None:
    """Two rows for ranks of 1.2 to 1: one each is best, whatever the proportion is."""
    assert not Simulation(lambda step: (1200, 1000), 2).run(100).moves
    # With accumulation rows of several batches are divided as one.
    found = Simulation(lambda step: (3000, 1000), 2, accumulation=8).run(60)
    assert float(np.mean(found.efficiency[30:])) > 0.97


def test_a_rank_too_slow_for_a_row_gets_none_and_is_tried_again() -> None:
    found = Simulation(lambda step: (1000, 30) if step < 600 else (1000, 800), noise=0.01).run(2500)
    assert found.moves[0][1].rows == (True, False)
    after = found.moves[0][1].begin
    slow = [tokens[1] for tokens in found.tokens[after:600]]
    assert slow.count(0.0) >= 0.98 * len(slow)
    # It is looked at again, which costs next to nothing, and what it could do is not lost for ever.
    assert float(np.mean(found.efficiency[after:600])) > 0.95
    assert found.moves[-1][1].rows == (True, True)
    assert float(np.mean(found.efficiency[-100:])) > 0.95


def test_three_ranks_of_three_speeds() -> None:
    found = Simulation(lambda step: (3000, 1000, 500), 96, (30, 400), noise=0.03).run(150)
    assert float(np.mean(found.efficiency[40:])) > 0.92
    assert found.moves[-1][1].weights == pytest.approx((0.667, 0.222, 0.111), abs=0.02)


def test_all_ranks_come_to_the_same_shares_and_go_on_with_them() -> None:
    """Each hears the same numbers; a restart has what was agreed on, also what is still to come."""
    work = np.full(1000, 100)
    order = GlobalOrder(work, 8, 0)
    balances = [Balance((1.0, 1.0), rows=RowSeconds(order, work)) for _ in range(2)]
    for end in range(1, 10):
        moved = [balance.hear((400.0, 0.1, 0.0, 400.0, 0.3, 0.0), end) for balance in balances]
        assert moved[0] == moved[1]
        if moved[0] is not None:
            break
    else:
        pytest.fail("no change")
    saved = json.loads(json.dumps(balances[0].to_json(end)))
    again = Balance((1.0, 1.0), begin=end, rows=RowSeconds(order, work))
    assert again.restore(saved)
    for batch in range(end, end + 10):
        assert again.cut(batch).weights == balances[0].cut(batch).weights
    assert again.weights(end) == (1.0, 1.0)
    assert again.weights(end + 9) == moved[0].weights
    # Of another number of ranks, or without such a file, they are measured anew.
    assert not Balance((1.0, 1.0, 1.0)).restore(saved)
    assert not Balance((1.0, 1.0)).restore(None)
    assert not Balance((2.0, 1.0), moves=False).restore(saved), (
        "given shares are not the checkpoint's"
    )


@pytest.mark.parametrize(("accumulation", "begin"), [(1, 0), (4, 0), (4, 3)])
def test_a_change_holds_from_a_step_that_nobody_has_loaded(accumulation: int, begin: int) -> None:
    balance = Balance((1.0, 1.0), begin=begin, accumulation=accumulation)
    end = begin
    while not (
        moved := balance.hear((400.0, 0.1, 0.0, 400.0, 0.3, 0.0), end := end + accumulation)
    ):
        assert end < 100
    assert (moved.begin - begin) % accumulation == 0
    # The next update's batches may be handed out, and two more loaded.
    assert moved.begin >= end + accumulation + 2
    assert balance.weights(moved.begin - 1) == (1.0, 1.0)
    assert balance.weights(moved.begin) == moved.weights


@pytest.mark.parametrize(
    "numbers",
    [
        (),
        (1.0, 2.0, 0.0),
        (0.0,) * 6,
        (float("nan"), 1.0, 0.0, 4.0, 1.0, 0.0),
        (4.0, float("inf"), 0.0) * 2,
    ],
)
def test_numbers_that_tell_nothing_change_nothing(numbers: tuple[float, ...]) -> None:
    balance = Balance((1.0, 1.0))
    assert all(balance.hear(numbers, end) is None for end in range(1, 30))
    assert balance.weights(40) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [("auto", None), ("equal", None), (None, None), ("[2, 0.5]", [2.0, 0.5]), ((2, 1), [2.0, 1.0])],
)
def test_words_and_numbers_that_shares_are_given_by(
    given: Any, numbers: list[float] | None
) -> None:
    assert build_config({"rank_weights": given}).given_weights == numbers


def test_a_slow_ranks_update_takes_longer_too() -> None:
    """So it gets less than its part of the speed; one whose update takes longer than a step
    elsewhere gets nothing.
    """
    found = Simulation(lambda step: (3000, 1000), rows=64, update_s=2.0).run(60)
    best = (64 * 256 + 2000 + 2000) / 4000
    assert 64 * 256 / (float(np.mean(found.efficiency[30:])) * 4000) == pytest.approx(
        best, rel=0.02
    )
    assert found.moves[-1][1].weights[1] == pytest.approx(
        (1000 * best - 2000) / (64 * 256), abs=0.01
    )
    speeds = [Speed(0.9, update=10.0), Speed(0.1, update=10.0)]
    assert even_weights(speeds, 100.0)[1] < 0.05
    assert even_weights(speeds, 50.0)[1] == pytest.approx(0.0, abs=2e-4)
    assert even_weights([*speeds, Speed(0.9, update=10.0)], 50.0)[::2] == pytest.approx(
        (0.5, 0.5), abs=1e-3
    )


def test_given_shares_stay() -> None:
    balance = Balance((2.0, 1.0), moves=False)
    assert all(balance.hear((1.0, 1.0, 0.0, 1.0, 5.0, 0.0), end) is None for end in range(1, 60))
    assert balance.shares(3) == pytest.approx((0.6667, 0.3333))
    assert Balance((1.0,)).shares(0) == ()


def test_a_change_must_be_worth_more_than_its_noise() -> None:
    def better(errors: float) -> Any:
        speeds = [speed_of([StepSample(1.0, 1.0, part=part)] * 9, errors) for part in (0.55, 0.45)]
        return better_weights((1.0, 1.0), speeds, 0.02, 1.0, fluid_seconds(1.0))

    assert better(0.0) == (0.55, 0.45)
    assert better(0.3) is None


def test_a_median_is_not_moved_by_an_outlier() -> None:
    assert speed_of([StepSample(1.0, 1.0, part=part) for part in (1.0, 1.0, 9.0)], 0.0).part == 1.0
    assert StepSample(300.0, 2.0).speed == 150.0


# --- shares of rows -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, database=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    speeds=st.lists(st.sampled_from([1.0, 2.0, 3.5, 20.0]), min_size=2, max_size=3),
)
def test_the_cut_is_close_to_the_best_for_the_slowest_rank(
    lengths: list[int], speeds: list[float]
) -> None:
    work = np.asarray(lengths)
    shares = divide(np.arange(len(lengths)), work, tuple(speeds))
    seconds = max(work[share].sum() / speed for share, speed in zip(shares, speeds, strict=True))
    best = min(
        max(
            sum(lengths[i] for i in range(len(lengths)) if places[i] == rank) / speed
            for rank, speed in enumerate(speeds)
        )
        for places in itertools.product(range(len(speeds)), repeat=len(lengths))
    )
    if len(set(lengths)) == 1:  # packed rows
        assert seconds == pytest.approx(best)
    assert seconds <= 1.5 * best + 1e-9


def test_a_rank_on_trial_gets_the_shortest_row_of_another() -> None:
    work = np.array([9, 5, 7, 3])
    shares = divide(np.arange(4), work, (1.0, 1e-4), some=(1,))
    assert [share.tolist() for share in shares] == [[0, 2, 1], [3]]
    assert divide(np.array([2]), work, (1.0, 1e-4), some=(1,))[1].tolist() == [], (
        "nobody gives its only row away"
    )


@pytest.mark.parametrize("accumulation", [1, 3])
def test_batches_of_one_update_make_up_for_each_other(accumulation: int) -> None:
    """And any batch can be asked for at any time: what was loaded before does not matter."""
    tokens = TokenSet.of_examples(
        [(np.arange(1, 12), np.ones(11, dtype=np.bool_)) for _ in range(60)]
    )
    order, weights = GlobalOrder(tokens.work, 2, 0), (3.0, 1.0)
    balance = Balance(weights, accumulation=accumulation, moves=False)
    loaders = [
        Loader(tokens, order, Sizing(1000), rank, weights, cut_of=balance.cut) for rank in range(2)
    ]
    rows = [
        [sum(len(part.examples) for part in loader.load(batch)) for batch in range(12)]
        for loader in loaders
    ]
    assert [sum(each) for each in zip(*rows, strict=True)] == [2] * 12
    per_update = [sum(rows[1][at : at + accumulation]) for at in range(0, 12, accumulation)]
    assert per_update == (
        [0] * 12 if accumulation == 1 else [1 if accumulation == 3 else 0] * (12 // accumulation)
    )
    fresh = Loader(tokens, order, Sizing(1000), 1, weights, cut_of=balance.cut)
    for batch in (7, 2, 11, 8):
        assert [p.examples.tolist() for p in fresh.load(batch)] == [
            p.examples.tolist() for p in loaders[1].load(batch)
        ]
