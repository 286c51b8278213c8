"""What is said of curves whose truth is known: the rules for overfitting and underfitting."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import call_allhands
from written_runs import write_run

from allhands.cluster.training import tell_troubles
from allhands.observe.course import Course, Judgement
from allhands.observe.curves import Curve, trend
from allhands.observe.judging import judge
from allhands.report import make_page, read_facts
from allhands.report.dashboard.runs import summary_of


def curve(
    height: Callable[[float], float], *, steps: int, every: int, first: int, noise: float = 0.0
) -> Curve:
    random = np.random.default_rng(0)
    places = range(first, steps + 1, every)
    return Curve.of(
        [(step, height(step) * (1 + noise * random.standard_normal())) for step in places]
    )


def judged(
    train: Callable[[float], float],
    valid: Callable[[float], float] | None,
    *,
    steps: int = 300,
    noise: float = 0.01,
    every: int = 20,
) -> list[Judgement]:
    measured = (
        curve(valid, steps=steps, every=every, first=0, noise=noise / 4) if valid else Curve.of([])
    )
    return judge(curve(train, steps=steps, every=5, first=5, noise=noise), measured)


def learning(low: float, pace: float) -> Callable[[float], float]:
    """From 4 to ``low``; after ``pace`` steps a third of the way is left."""
    return lambda step: low + (4 - low) * float(np.exp(-step / pace))


def valley(bottom: int, rise: float) -> Callable[[float], float]:
    """Falls to 2 at ``bottom``, then rises by ``rise`` a hundred steps."""
    return lambda step: (
        2 + (step < bottom) * 2 * (1 - step / bottom) + max(0.0, step - bottom) * rise / 100
    )


def test_validation_that_rises_while_training_falls_is_overfitting() -> None:
    (found,) = judged(lambda step: 4 - 3 * step / 300, valley(100, 0.5))
    assert (found.kind, found.level) == ("overfitting", "warning")
    # At step 300 the truth is 2 + 200 * 0.005 = 3, half as much again; ten validations after the
    # best.
    assert "lowest at step 100 (2.0" in found.text
    assert "10 validations since" in found.text
    assert "(+5" in found.text or "(+49%" in found.text
    # Training at step 100 is 3, at the end 1.
    assert re.search(r"\(-6[4-7]%\)", found.text)


def test_validation_that_goes_up_and_down_after_its_best_is_not_overfitting() -> None:
    train = Curve.of([(step, 4 - 3 * step / 100) for step in range(5, 105, 5)])
    scattered = [(0, 4.0), (20, 2.0), (40, 2.3), (60, 2.05), (80, 2.25), (100, 2.06)]
    assert "overfitting" not in {one.kind for one in judge(train, Curve.of(scattered))}
    steady = [(0, 4.0), (20, 2.0), (40, 2.1), (60, 2.2), (80, 2.28), (100, 2.4)]
    assert [one.kind for one in judge(train, Curve.of(steady))] == ["overfitting"]


def test_a_rise_that_flattens_is_overfitting() -> None:
    # A model of 135 million parameters learned random answers of 40 examples by heart.
    steps = np.arange(1, 25)
    train = Curve.of([*zip(steps, 5.6 - 0.035 * steps, strict=True)])
    risen = [(0, 4.281), (6, 2.812), (12, 3.071), (18, 3.143), (24, 3.174)]
    found = {one.kind: one.level for one in judge(train, Curve.of(risen))}
    assert found["overfitting"] == "warning"
    # Up and down above the best one, with the same end: its scatter explains it.
    scattered = [(0, 4.281), (6, 3.140), (12, 3.200), (18, 3.143), (24, 3.174)]
    assert "overfitting" not in {one.kind for one in judge(train, Curve.of(scattered))}


def test_validation_that_rises_while_training_stands_still_may_be_overfitting() -> None:
    (found,) = judged(lambda step: 4 - 2 * min(step, 100) / 100, valley(100, 0.5), noise=0.0)
    assert (found.kind, found.level) == ("overfitting", "note")
    assert found.text.startswith(
        "Perhaps overfitting: validation loss was lowest at step 100 (2.000)"
    )
    assert "no clear fall: it went from 2.000 to 2.000" in found.text


@pytest.mark.parametrize("bottom", [260, 280])
def test_one_or_two_validations_that_rise_little_are_a_first_sign_only(bottom: int) -> None:
    found = [
        one
        for one in judged(lambda step: 4 - 3 * step / 300, valley(bottom, 1))
        if one.kind == "overfitting"
    ]
    assert [one.level for one in found] in (["note"], [])
    exact = judged(lambda step: 4 - 3 * step / 300, valley(bottom, 1), noise=0.0)
    assert [(one.kind, one.level) for one in exact] == [("overfitting", "note")]
    assert f"the {(300 - bottom) // 20} validation" in exact[0].text


def test_a_rise_within_a_hundredth_is_none() -> None:
    found = judged(lambda step: 4 - 3 * step / 300, valley(100, 0.005), noise=0.0)
    assert "overfitting" not in {one.kind for one in found}


def test_noise_around_a_level_is_rarely_taken_for_more() -> None:
    settled, wrong = learning(2, 40), 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        train = Curve.of(
            [(step, settled(step) + 0.02 * random.standard_normal()) for step in range(5, 305, 5)]
        )
        valid = Curve.of(
            [(step, settled(step) + 0.02 * random.standard_normal()) for step in range(0, 301, 20)]
        )
        wrong += any(one.level in ("warning", "bad") for one in judge(train, valid))
    assert wrong <= 2


def test_both_curves_still_falling_at_the_end_is_underfitting() -> None:
    (found,) = judged(learning(1, 300), learning(1.1, 300))
    assert (found.kind, found.level) == ("underfitting", "warning")
    assert "Both still fall" in found.text
    # From step 202 to 300 the truth falls from 1 + 3 exp(-0.673) = 2.53 to 1 + 3 exp(-1) = 2.10: 17
    # %.
    assert re.search(r"\(-1[5-8]%\)", found.text)


def test_still_falling_without_validation_is_told_with_the_doubt() -> None:
    found = judged(learning(1, 300), None)
    assert {one.kind for one in found} == {"underfitting", "validation"}
    assert {one.level for one in found} == {"note"}


@pytest.mark.parametrize(
    ("seen", "advised"), [(0.0, True), (0.4, True), (0.5, False), (1.0, False)]
)
@pytest.mark.parametrize("valid", [learning(1.5, 150), learning(2.0, 10)])
def test_losses_of_examples_that_are_trained_on_are_no_evidence(
    valid: Callable[[float], float], seen: float, advised: bool
) -> None:
    """Neither that more steps would help, nor that the model does not overfit."""
    train = curve(learning(1.5, 150), steps=300, every=5, first=5)
    found = judge(train, curve(valid, steps=300, every=20, first=0), Course(seen=seen))
    assert (found[0].level in ("warning", "good")) == advised
    assert ("validation" in {one.kind for one in found}) == (not advised)


def test_a_loss_hardly_below_its_start_is_underfitting() -> None:
    (found,) = judged(lambda step: 4 - 0.04 * step / 300, lambda step: 4.0)
    assert (found.kind, found.level) == ("underfitting", "warning")
    assert "hardly below its start" in found.text


def test_a_quick_fall_before_the_first_report_counts() -> None:
    level = curve(lambda step: 3.0, steps=300, every=50, first=50, noise=0.001)
    valid = Curve.of([(step, 4.0 if step == 0 else 3.0) for step in range(0, 301, 50)])
    assert [one.kind for one in judge(level, valid)] == ["fitting"]
    quick = Curve.of([(step, 3.0 if step > 5 else 4.0) for step in range(5, 305, 5)])
    assert [one.kind for one in judge(quick, Curve.of([]))] == ["validation"]


def test_a_training_loss_that_rises_diverges() -> None:
    (found,) = judged(lambda step: 4 + step / 100, None, noise=0.0)[:1]
    assert (found.kind, found.level) == ("diverging", "bad")
    both = judged(
        lambda step: 4 - step / 50 if step < 100 else 2 + (step - 100) / 100, valley(100, 1)
    )
    assert (both[0].kind, both[0].level) == ("diverging", "bad")


def test_what_has_settled_is_well() -> None:
    (found,) = judged(learning(2, 30), learning(2.1, 30), noise=0.003)
    assert (found.kind, found.level) == ("fitting", "good")


def test_numbers_that_are_none_are_said_first() -> None:
    train = Curve.of(
        [(step, 4 - step / 50 if step < 80 else float("nan")) for step in range(5, 105, 5)]
    )
    found = judge(train, Curve.of([(0, 4.0), (50, float("inf"))]))
    assert [one.level for one in found[:2]] == ["bad", "bad"]
    assert (
        "training loss is not a finite number in 5 of 20 reports, first at step 80" in found[0].text
    )
    assert (
        "validation loss is not a finite number in 1 of 2 reports, first at step 50"
        in found[1].text
    )
    assert [one.kind for one in judge(Curve.of([(1, float("nan"))]), Curve.of([]))] == [
        "numbers",
        "short",
        "validation",
    ]


@pytest.mark.parametrize(
    ("count", "words"), [(0, "no training report"), (1, "1 training report "), (3, "3 training")]
)
def test_of_a_few_reports_nothing_is_judged(count: int, words: str) -> None:
    found, unvalidated = judge(
        Curve.of([(step, 4.0 - step) for step in range(count)]), Curve.of([(0, 4.0)])
    )
    assert (found.kind, unvalidated.kind) == ("short", "validation")
    assert words in found.text


@pytest.mark.parametrize(("train", "valid"), [([10.0], []), ([8.0, 10.8], [10.7]), ([9.0], [5.1])])
def test_of_a_few_reports_it_is_said_if_the_run_is_worse_than_what_it_began_with(
    train: list[float], valid: list[float]
) -> None:
    steps = [10.0 * (place + 1) for place in range(2)]
    curves = (
        Curve.of(list(zip(steps, train, strict=False))),
        Curve.of([(0, 4.77), *zip(steps, valid, strict=False)]),
    )
    first = judge(*curves)[0]
    assert (first.kind, first.level) == ("worse", "bad")
    assert "validation loss was 4.770 before the first step" in first.text
    assert f"{(valid or train)[-1]:.3f}" in first.text
    better = judge(curves[0], Curve.of([(0, 12.0)]))
    assert [one.kind for one in better] == ["short", "validation"]
    # From what a resumed run goes on, nobody knows how it was before.
    assert [one.kind for one in judge(curves[0], Curve.of([(5, 4.77)]))] == ["short"]


@pytest.mark.parametrize(("last", "said"), [(0.454, True), (0.24, False), (0.2, False)])
def test_of_a_few_reports_it_is_said_that_the_last_weights_are_not_the_best(
    last: float, said: bool
) -> None:
    train = Curve.of([(10, 0.64), (20, 0.2), (24, 0.18)])
    found = judge(train, Curve.of([(0, 3.34), (8, 0.287), (16, 0.236), (24, last)]))
    assert [one.kind for one in found] == (["overfitting", "short"] if said else ["short"])


def test_a_run_that_has_only_begun_is_told_nothing_to_do() -> None:
    none = Curve.of([])
    assert [one.text for one in judge(none, none, Course(is_over=False))] == [
        "Nothing is reported yet."
    ]
    assert {one.kind for one in judge(none, none, Course(is_over=True))} == {"short", "validation"}
    assert "skipped" in {
        one.kind for one in judge(none, none, Course(is_over=False, skipped=5, steps=5))
    }


def test_the_line_is_that_of_least_squares() -> None:
    random = np.random.default_rng(1)
    x, y = np.arange(20.0), random.standard_normal(20)
    found = trend(Curve(x, y))
    slope, begin = np.polyfit(x, y, 1)
    assert found is not None
    np.testing.assert_allclose([found.first, found.last], [begin, begin + 19 * slope])
    assert not found.sure
    sure = trend(Curve(x, y / 100 + x))
    assert sure is not None
    assert sure.sure
    assert trend(Curve(x[:1], y[:1])) is None


def at_each_step(
    height: Callable[[float], float], seed: int, *, steps: int = 60, spread: float = 0.6
) -> tuple[Curve, np.random.Generator]:
    """As reported at every step with batches of two: the loss of each example is its own."""
    random = np.random.default_rng(seed)
    return Curve.of(
        [(n, height(n) + spread * random.standard_normal()) for n in range(1, steps + 1)]
    ), random


def grave(found: list[Judgement]) -> set[str]:
    return {one.kind for one in found if one.level in ("warning", "bad")}


def test_the_first_report_may_be_a_low_one_of_many_that_scatter() -> None:
    # A run whose validation fell at each of its validations.
    noisy = [
        4.05,
        4.9,
        3.4,
        5.5,
        4.2,
        4.8,
        3.0,
        5.1,
        4.4,
        3.9,
        4.6,
        4.3,
        5.2,
        3.6,
        4.7,
        4.1,
        4.5,
        4.0,
        4.2,
        4.4,
    ]
    falling = [(0, 5.717), (3, 5.70), (6, 5.67), (9, 5.64), (12, 5.61), (16, 5.58), (20, 5.545)]
    for losses in (noisy, [4.05, *noisy[1:18], 4.24, 4.24]):
        train = Curve.of(list(enumerate(losses, start=1)))
        (found,) = judge(train, Curve.of(falling))
        assert (found.kind, found.level) == ("fitting", "good")
        (found, missing) = judge(train, Curve.of([]))
        assert [found.kind, missing.kind] == ["scatter", "validation"]
        assert re.search(r" by 1\d?%", found.text)
        assert "--steps-per-report" in found.text


@pytest.mark.parametrize("steps", [12, 20, 60, 300])
def test_a_noisy_run_that_learns_is_never_said_to_diverge_nor_to_learn_nothing(steps: int) -> None:
    said: list[str] = []
    for seed in range(300):
        train, random = at_each_step(lambda n: 4.4 - 0.15 * n / steps, seed, steps=steps)
        valid = Curve.of(
            [
                (steps * k / 6, 5.717 - 0.029 * k + 0.002 * random.standard_normal())
                for k in range(7)
            ]
        )
        said += [
            one.text
            for one in judge(train, valid)
            if one.level == "bad" or " below its start" in one.text
        ]
    assert said == []


@pytest.mark.parametrize("steps", [12, 20, 60, 300])
def test_noise_alone_is_hardly_ever_called_diverging(steps: int) -> None:
    count = sum(
        "diverging" in grave(judge(at_each_step(lambda n: 4.2, seed, steps=steps)[0], Curve.of([])))
        for seed in range(1000)
    )
    assert count <= 5


@pytest.mark.parametrize(
    "height",
    [
        lambda n: 4.4 + 6 * n / 60,  # steadily
        lambda n: 4.4 if n < 20 else 9.0,  # at once, and stays there
        lambda n: 4.4 - n / 20 if n < 30 else 2.9 + (n - 30) / 5,  # after it had learnt
        lambda n: 4.4 - n / 30 if n < 56 else 12.0,  # in the last reports
        lambda n: 4.4 - n / 30 if n < 60 else 30.0,  # in the very last one
    ],
)
def test_what_truly_diverges_is_always_named(height: Callable[[float], float]) -> None:
    for seed in range(300):
        train, random = at_each_step(height, seed, spread=0.4)
        # Validated before it happened, and never since.
        early = Curve.of(
            [(n, 4.4 - n / 100 + 0.002 * random.standard_normal()) for n in (0, 5, 10, 15)]
        )
        late = Curve.of(
            [(n, height(n) + 0.01 * random.standard_normal()) for n in range(0, 61, 10)]
        )
        assert grave(judge(train, Curve.of([]))) == {"diverging"}, seed
        assert {one.kind for one in judge(train, late) if one.level == "bad"} in (
            {"diverging"},
            {"worse"},
        ), seed
        if height(59) > 9:
            assert grave(judge(train, early)) <= {"diverging"}
    (found, _) = judge(Curve.of([(1, 4.0), (2, 5.0), (3, 8.0), (4, 20.0)]), Curve.of([]))
    assert (found.kind, found.level) == ("diverging", "bad")


def test_what_shoots_up_after_the_last_validation_diverges_although_validation_fell() -> None:
    train = Curve.of([(n, 4.4 - n / 30 + 0.1 * (-1) ** n if n < 55 else 9.0) for n in range(1, 61)])
    falling = Curve.of([(n, 4.5 - n / 50) for n in (0, 10, 20, 30, 40)])
    assert grave(judge(train, falling)) == {"diverging"}


@pytest.mark.parametrize(("steps", "spread"), [(20, 0.1), (60, 0.2), (300, 0.4)])
def test_what_truly_learns_nothing_is_always_named(steps: int, spread: float) -> None:
    missed = 0
    for seed in range(300):
        train, random = at_each_step(lambda n: 4.2, seed, steps=steps, spread=spread)
        level = Curve.of(
            [(steps * k / 6, 4.2 + 0.005 * random.standard_normal()) for k in range(7)]
        )
        for valid in (Curve.of([]), level):
            missed += " below its start" not in judge(train, valid)[0].text
    assert missed <= 12  # of 600
    # Validation, which scatters less, shows it where training scatters too much.
    for seed in range(300):
        train, random = at_each_step(lambda n: 4.2, seed, spread=0.4)
        level = Curve.of([(10 * k, 4.2 + 0.005 * random.standard_normal()) for k in range(7)])
        missed += " below its start" not in judge(train, level)[0].text
    assert missed <= 18


# --- runs that were made --------------------------------------------------------------------------

RUNS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "support" / "curves.json").read_text()
)
# What a careful teacher would say first of each, and how gravely.
SAID_FIRST = {
    "rate of 0.05": ("worse", "bad"),
    "rate of 0.004": ("worse", "bad"),
    "rate of 50": ("guessing", "bad"),
    "good": ("fitting", "good"),
    "slow": ("fitting", "good"),
    "short": ("short", "note"),
    "rate of 1e-9": ("underfitting", "warning"),
    "16 examples, rate of 1e-3": ("worse", "bad"),
    "16 examples": ("overfitting", "warning"),
    "new, good": ("fitting", "good"),
    "new, few steps": ("fitting", "good"),
    "new, rate of 30": ("worse", "bad"),
    "new, rate of 0.3": ("fitting", "good"),
    "new, rate of 1e-9": ("guessing", "bad"),
}
HARMED = [name for name, (_, level) in SAID_FIRST.items() if level == "bad"]


def run_until(name: str, step: float, *, over: bool) -> list[Judgement]:
    run = RUNS[name]
    train, valid, norms = (
        Curve.of([pair for pair in run[key] if pair[0] <= step])
        for key in ("train", "valid", "norms")
    )
    return judge(train, valid, Course(norms, run["skipped"], int(step), run["vocabulary"], over))


@pytest.mark.parametrize("name", RUNS)
def test_what_is_said_first_of_a_run(name: str) -> None:
    found = run_until(name, 1e9, over=True)
    assert (found[0].kind, found[0].level) == SAID_FIRST[name], found
    # No loss is below zero, and none falls by more than all of it.
    assert not re.search(r" -\d|\(-1\d\d", " ".join(one.text for one in found))
    if found[0].level == "bad":
        assert "good" not in {one.level for one in found}
        assert "more steps would help" not in " ".join(one.text for one in found)


OF_AN_END = re.compile(
    r"at the end|underfitting|more steps|train for longer|--steps-per-eval|--steps-per-report to see|in all",
    re.IGNORECASE,
)
# Each makes a judgement of its own: losses of training and of validation, every 5 and every 20
# steps.
COURSES: dict[str, tuple[Callable[[float], float], Callable[[float], float] | None, int]] = {
    "both fall": (learning(1, 300), learning(1.1, 300), 20),
    "falls, not validated": (learning(1, 300), None, 20),
    "falls, validated at first": (learning(1, 300), learning(1.1, 300), 400),
    "falls, validated rarely": (learning(1, 300), learning(1.1, 300), 250),
    "learns nothing": (lambda step: 4 - 0.01 * step / 300, lambda step: 4.0, 20),
    "has settled": (learning(2, 30), learning(2.1, 30), 20),
    "overfits": (lambda step: 4 - 3 * step / 300, valley(100, 0.5), 20),
    "may overfit": (lambda step: 4 - 3 * step / 300, valley(260, 4), 20),
    "gets worse": (lambda step: 4 + step / 100, lambda step: 4 + step / 100, 20),
}


@pytest.mark.parametrize("name", COURSES)
def test_nothing_is_said_of_an_end_of_a_run_that_goes_on(name: str) -> None:
    train, valid, every = COURSES[name]
    for noise in (0.0, 0.01, 0.5):
        for steps in (5, 50, 150, 300):
            validated = curve(valid, steps=steps, every=every, first=0) if valid else Curve.of([])
            found = judge(
                curve(train, steps=steps, every=5, first=5, noise=noise),
                validated,
                Course(is_over=False),
            )
            assert found
            assert not [one for one in found if OF_AN_END.search(one.text)], (steps, found)


@pytest.mark.parametrize("ended", [True, False])
def test_a_killed_run_is_judged_as_one_that_has_ended(tmp_path: Path, ended: bool) -> None:
    run = write_run(
        tmp_path / "run", steps=300, train=learning(1, 300), valid=learning(1.1, 300), ended=None
    )
    now = (run / "metrics.jsonl").stat().st_mtime + (1e6 if ended else 1)
    (part,) = make_page([read_facts(run, now=now)]).runs
    assert ({one.kind for one in part.judgements}) == ({"underfitting"} if ended else {"fitting"})


@pytest.mark.parametrize("name", RUNS)
def test_while_a_run_goes_on_nothing_is_said_that_its_end_belies(name: str) -> None:
    for step, _ in RUNS[name]["train"]:
        found = run_until(name, step, over=False)
        levels = {one.level for one in found}
        if name in HARMED and name != "16 examples, rate of 1e-3":  # which was well at first
            assert "good" not in levels, (step, found)
        elif name not in HARMED:
            assert "bad" not in levels, (step, found)
        # Nobody knows yet how it ends.
        assert not [one for one in found if OF_AN_END.search(one.text)], (step, found)
        validated = [at for at, _ in RUNS[name]["valid"] if at <= step]
        if validated == [0]:
            assert not levels & {"good"}, (step, found)


def test_a_validation_outside_of_a_stretch_is_not_quoted_as_of_it() -> None:
    """Falling at the end, and validated before the first step and after the last only."""
    train = Curve.of([(step, 4.0 - step / 50) for step in range(5, 105, 5)])
    (found,) = judge(train, Curve.of([(0, 4.0), (100, 2.1)]))
    assert (found.kind, found.level) == ("underfitting", "note")
    assert "4.000" not in found.text
    (found,) = judge(train, Curve.of([(0, 4.0), (70, 2.6), (85, 2.3), (100, 2.0)]))
    assert (found.kind, found.level) == ("underfitting", "warning")


@pytest.mark.parametrize(
    ("skipped", "level"), [(0, None), (1, "note"), (5, "warning"), (40, "bad")]
)
def test_steps_that_changed_nothing(skipped: int, level: str | None) -> None:
    train = Curve.of([(step, 3.0) for step in range(5, 105, 5)])
    found = judge(train, Curve.of([(0, 4.0), (100, 3.0)]), Course(skipped=skipped, steps=100))
    assert {one.level for one in found if one.kind == "skipped"} == ({level} if level else set())


@pytest.mark.parametrize(
    ("last", "falls", "said"), [(200.0, False, True), (200.0, True, False), (3.0, False, False)]
)
def test_gradient_norms_that_explode(last: float, falls: bool, said: bool) -> None:
    train = Curve.of([(step, 4.0 - 0.02 * step * falls) for step in range(5, 105, 5)])
    norms = Curve.of([(step, 1.0 if step < 60 else last) for step in range(5, 105, 5)])
    valid = Curve.of([(0, 4.0), (50, 4.0 - falls), (100, 4.0 - 2 * falls)])
    assert ("gradients" in {one.kind for one in judge(train, valid, Course(norms))}) == said


def test_an_excursion_is_told_though_the_run_came_back() -> None:
    train = Curve.of([(step, 12.0 if 20 <= step <= 40 else 3.0) for step in range(5, 205, 5)])
    valid = Curve.of([(0, 4.0), (30, 12.0), (100, 3.1), (200, 3.0)])
    assert ("excursion", "warning") in {(one.kind, one.level) for one in judge(train, valid)}
    calm = Curve.of([(0, 4.0), (30, 4.2), (100, 3.1), (200, 3.0)])
    assert "excursion" not in {
        one.kind for one in judge(Curve.of([(step, 3.0) for step in range(5, 205, 5)]), calm)
    }


@pytest.mark.parametrize(
    ("last", "level"), [(3.9, None), (4.03, None), (4.1, "warning"), (4.3, "bad"), (9.0, "bad")]
)
def test_how_much_worse_than_before_training(last: float, level: str | None) -> None:
    train = Curve.of([(step, 3.9 + 0.01 * (-1) ** step) for step in range(5, 105)])
    found = judge(train, Curve.of([(0, 4.0), (50, 4.0), (100, last)]))
    assert {one.level for one in found if one.kind == "worse"} == ({level} if level else set())
    # Where a run goes on from another nobody knows what was before.
    assert "worse" not in {one.kind for one in judge(train, Curve.of([(50, 4.0), (100, last)]))}


def test_learning_by_heart_is_not_called_a_learning_rate_that_is_too_high() -> None:
    train = Curve.of([(step, 4.0 * 0.97**step) for step in range(1, 101)])
    valid = Curve.of([(0, 4.0), (20, 3.0), (40, 3.6), (60, 4.2), (80, 4.8), (100, 5.4)])
    found = {one.kind: one for one in judge(train, valid)}
    assert found.keys() >= {"worse", "overfitting"}
    assert "warm-up" not in found["worse"].text


@pytest.mark.parametrize(
    ("rate", "usual"), [(50.0, True), (0.02, True), (5e-3, False), (1e-4, False), (None, False)]
)
def test_a_learning_rate_far_off_is_told_what_is_usual(rate: float | None, usual: bool) -> None:
    train = Curve.of([(step, 4.0 + step / 20) for step in range(5, 105, 5)])
    for valid in (Curve.of([(0, 4.0), (50, 6.5), (100, 9.0)]), Curve.of([])):
        (found, *_) = judge(train, valid, Course(rate=rate))
        assert found.level == "bad"
        assert "Lower the learning rate" in found.text
        assert ("1e-5 to 1e-3" in found.text, "to a tenth" in found.text) == (usual, not usual)


@pytest.mark.parametrize(
    ("rate", "said", "usual"),
    [
        (1e-9, "Raise", True),
        (1e-5, "Raise", False),
        (5e-4, "Raise", False),
        (None, "Raise", False),
        (5.0, "Lower", True),
    ],
)
def test_nothing_learnt_at_a_rate_far_off(rate: float | None, said: str, usual: bool) -> None:
    (found,) = judge(
        curve(lambda step: 4.0, steps=300, every=5, first=5, noise=0.001),
        curve(lambda step: 4.0, steps=300, every=20, first=0),
        Course(rate=rate),
    )
    assert found.kind == "underfitting"
    assert (f"{said} the learning rate" in found.text, "1e-5 to 1e-3" in found.text) == (
        True,
        usual,
    )


def test_harm_is_told_wherever_a_run_is_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses fall from the first report on, but never to what the model was before."""
    ruined = write_run(
        tmp_path / "ruined",
        train=lambda step: 9.0 - step / 50,
        valid=lambda step: 9.0 - step / 50 if step else 4.5,
    )
    tell_troubles(ruined)
    [line] = capsys.readouterr().err.splitlines()
    assert "validation loss was 4.500 before the first step" in line
    after = call_allhands("plan", "--after", ruined)
    assert after.stdout.startswith("bad: Worse than before training")
    found = json.loads(call_allhands("plan", "--after", ruined, "--json").stdout)
    assert [one["kind"] for one in found["judgements"]] == ["worse"]
    good = write_run(tmp_path / "good")
    assert [summary_of("run", run).harm != "" for run in (ruined, good)] == [True, False]  # type: ignore[union-attr]
    page = make_page([read_facts(ruined)])
    assert next(one.kind for one in page.runs[0].judgements) == "worse"
    assert not {one.kind for one in page.runs[0].judgements} & {"underfitting", "fitting"}
