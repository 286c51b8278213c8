"""What is said of runs of known truth, among them those whose scatter or few validations hide it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from allhands.observe.course import Course, Judgement
from allhands.observe.curves import Curve
from allhands.observe.judging import judge

SEEDS = range(100)


def run(
    height: Callable[[float], float],
    validated: Sequence[tuple[float, float]],
    seed: int = 0,
    *,
    steps: int = 120,
    noise: float = 0.0,
) -> list[Judgement]:
    """The judgements of a run with a report each three steps; ``noise``: relative, of a report."""
    random = np.random.default_rng(seed)
    places = np.arange(3.0, steps + 1, 3)
    factors = np.exp(noise * random.standard_normal(len(places)) - noise**2 / 2)
    losses = [height(step) * factor for step, factor in zip(places, factors, strict=True)]
    return judge(Curve.of(list(zip(places, losses, strict=True))), Curve.of(validated), Course())


def kinds(found: list[Judgement]) -> list[tuple[str, str]]:
    return [(one.kind, one.level) for one in found]


def by_heart(step: float) -> float:
    return 0.05 + 4 * math.exp(-step / 6)


@pytest.mark.parametrize(
    "later",
    [
        [(100.0, 2.4), (120.0, 2.9)],  # two validations, far above the best
        [(120.0, 3.0)],  # a single one
        [(70.0, 2.8), (90.0, 2.6), (120.0, 2.7)],  # to a height around which they scatter
    ],
)
def test_what_is_learnt_by_heart_while_validation_rises_is_overfitting(
    later: list[tuple[float, float]],
) -> None:
    for seed in SEEDS:
        found = run(by_heart, [(0, 4.0), (30, 2.5), (60, 2.0), *later], seed, noise=0.1)
        assert kinds(found) == [("overfitting", "warning")], seed


def test_a_training_loss_of_almost_nothing_that_rises_a_little_is_no_divergence() -> None:
    def height(step: float) -> float:
        return by_heart(step) * (1 + step / 1000)

    rising = [(0, 4.0), (20, 2.0), (40, 2.3), (60, 2.6), (80, 2.8), (100, 3.0), (120, 3.1)]
    assert kinds(run(height, rising)) == [("overfitting", "warning")]


def test_both_losses_far_above_the_best_of_three_validations_diverge() -> None:
    def height(step: float) -> float:
        return 2.0 + 2 * math.exp(-step / 10) if step < 60 else 2.0 + (step - 60) / 40

    found = run(height, [(0, 4.0), (60, 2.0), (120, 3.5)], noise=0.02)
    assert ("diverging", "bad") in kinds(found)
    assert "fitting" not in {one.kind for one in found}


def test_a_rise_since_before_the_first_step_is_told_once() -> None:
    """As of a learning rate that is too high: no weights are better, and this is no overfitting."""
    for validated in (
        [(0, 4.25), (20, 13.5), (40, 10.0), (60, 9.0)],
        [(0, 4.25), (20, 7.5), (40, 8.1), (60, 8.3)],
    ):
        found = run(lambda step: 9 + 30 * math.exp(-step / 10), validated, steps=60, noise=0.02)
        assert kinds(found) == [("worse", "bad")]


@pytest.mark.parametrize(
    "validated",
    [
        [(10 * k, 1 + 3 * math.exp(-k / 10)) for k in range(13)],
        [(40 * k, 1 + 3 * math.exp(-k * 0.4)) for k in range(4)],
        [(0, 4.0), (60, 1 + 3 * math.exp(-0.6)), (120, 1 + 3 * math.exp(-1.2))],
    ],
)
def test_validation_that_falls_on_is_told_though_training_scatters(
    validated: list[tuple[float, float]],
) -> None:
    missed = sum(
        kinds(run(lambda n: 1 + 3 * math.exp(-n / 100), validated, seed, noise=0.3))
        != [("underfitting", "warning")]
        for seed in SEEDS
    )
    assert missed <= 2


def test_a_loss_of_almost_nothing_that_halves_needs_no_more_steps() -> None:
    def height(step: float) -> float:
        return 1e-4 + 4 * math.exp(-step / 13)

    found = run(height, [(20 * k, height(20 * k)) for k in range(7)])
    assert kinds(found) == [("fitting", "good")]


def test_the_wandering_of_a_validation_loss_is_hardly_ever_told_as_a_rise() -> None:
    told = 0
    for seed in range(300):
        random = np.random.default_rng(1000 + seed)
        level = [(12 * k, 2.0 * (1 + 0.01 * random.standard_normal())) for k in range(1, 11)]
        found = run(lambda n: 2 + 2 * math.exp(-n / 6), [(0, 4.0), *level], seed, noise=0.05)
        told += "overfitting" in {one.kind for one in found}
    assert told <= 9


def test_single_reports_of_small_batches_are_no_excursion() -> None:
    """A preference loss begins at ln 2, and that of a pair may be several times as high."""
    told, losses = 0, [(20.0 * k, 0.45 + 0.243 * math.exp(-k)) for k in range(7)]
    for seed in SEEDS:
        found = run(lambda n: 0.4 + 0.29 * math.exp(-n / 20), losses, seed, noise=0.5)
        told += "excursion" in {one.kind for one in found}
    assert told <= 2
    jumped = run(lambda n: 2.0 if 30 < n < 40 else 0.5, losses, noise=0.1)
    assert ("excursion", "warning") in kinds(jumped)


def test_a_training_loss_that_only_a_line_lowers_is_not_said_to_fall() -> None:
    """Its ends are what is told."""
    losses = [*[3.50] * 4, *np.linspace(4.1, 3.2, 32), *[3.55] * 4]
    train = Curve.of([(3.0 * k, loss) for k, loss in enumerate([4.6, 4.5, *losses])])
    valid = Curve.of([(0, 4.6), (6, 3.90), (40, 3.95), (80, 3.98), (123, 4.02)])
    assert "overfitting" not in {one.kind for one in judge(train, valid)}


@pytest.mark.parametrize("shift", [-10.0, -4.0, 0.0])
def test_losses_of_a_persons_own_loop_may_be_negative_or_zero(shift: float) -> None:
    """They are judged by the same changes, relative to their size."""
    train = Curve.of([(10.0 * k, shift) for k in range(1, 21)])
    flat = Curve.of([(40.0 * k, shift) for k in range(6)])
    assert kinds(judge(train, flat)) == [("underfitting", "warning")]
    rises = Curve.of([(40.0 * k, shift + k) for k in range(6)])
    assert ("worse", "bad") in kinds(judge(train, rises))
    falls = Curve.of([(40.0 * k, shift - k) for k in range(6)])
    assert {one.level for one in judge(train, falls)}.isdisjoint({"bad"})


def test_a_run_that_went_on_from_a_trained_one_does_not_underfit_at_its_level() -> None:
    train = Curve.of([(500.0 + 10 * k, 1 + 0.02 * (-1) ** k) for k in range(1, 21)])
    level = Curve.of([(500, 1.5), (570, 1.502), (640, 1.498), (700, 1.501)])
    (found,) = judge(train, level, Course(began=500))
    assert (found.kind, found.level) == ("settled", "note")
    assert kinds(judge(train, level)) == [("underfitting", "warning")]


def test_a_few_skipped_steps_do_not_silence_the_judgement_of_the_curves() -> None:
    train, valid = (
        Curve.of([(step, 1 + 3 * math.exp(-step / 20)) for step in range(first, 201, every)])
        for first, every in ((5, 5), (0, 40))
    )
    found = judge(train, valid, Course(skipped=2, steps=200))
    assert kinds(found) == [("skipped", "note"), ("fitting", "good")]


def test_more_reports_are_no_remedy_where_none_has_a_finite_loss() -> None:
    nothing = Curve.of([(float(step), math.nan) for step in range(1, 9)])
    found = judge(nothing, Curve.of([(0, 3.0)]))
    assert [one.kind for one in found] == ["numbers", "short", "validation"]
    assert "--steps-per-report" not in " ".join(one.text for one in found)
