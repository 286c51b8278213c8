"""What is left of a running step, from the beats of the steps before it."""

from __future__ import annotations

import pytest

from allhands.cluster.pace import Pace, too_short
from allhands.cluster.place import LaunchPlace, Platform


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _paced(*seconds: float, validated_s: float = 0.0) -> tuple[Pace, Clock]:
    clock = Clock()
    pace = Pace(clock)
    pace.beat("start", 0)
    for step, time in enumerate(seconds):
        pace.beat("load", step)
        clock.now += 0.25 * time
        pace.beat("compute", step)
        clock.now += 0.75 * time
        pace.beat("validate", step + 1)
        clock.now += validated_s
    return pace, clock


@pytest.mark.parametrize("validated_s", [0.0, 1000.0])
def test_the_rest_of_a_step_follows_from_the_last_ones(validated_s: float) -> None:
    """The first, which compiles, counts only until there is another; time between steps never."""
    pace, clock = _paced(90.0, 40.0, 44.0, 42.0, validated_s=validated_s)
    assert (pace.step_s, pace.longest_s) == (42.0, 44.0)
    pace.beat("load", 4)
    clock.now += 12.0
    pace.beat("reduce", 4)
    assert pace.left_s() == 30.0
    assert "30 s" in pace.told()
    clock.now += 100.0
    assert pace.left_s() == 0.0


def test_nothing_is_estimated_of_the_first_step() -> None:
    pace, _ = _paced()
    pace.beat("load", 0)
    assert (pace.step_s, pace.left_s(), pace.longest_s) == (None, None, 0.0)
    assert "not known" in pace.told()


@pytest.mark.parametrize("phase", ["validate", "save", "end"])
def test_outside_a_step_no_step_is_waited_for(phase: str) -> None:
    pace, _ = _paced(40.0, 40.0)
    pace.beat(phase, 2)
    assert pace.left_s() == 0.0
    assert "after this step" not in pace.told()


def _launch(grace_s: float | None) -> LaunchPlace:
    return LaunchPlace("single", 0, 1, 0, 1, "none", "", platform=Platform("kubernetes", grace_s))


@pytest.mark.parametrize(("grace_s", "warned"), [(30.0, True), (60.0, False), (None, False)])
def test_a_step_longer_than_the_platform_waits_is_told_of(
    grace_s: float | None, warned: bool
) -> None:
    pace, _ = _paced(90.0, 40.0, 40.0)
    told = too_short(pace, _launch(grace_s))
    assert (told is not None) == warned
    assert not warned or "terminationGracePeriodSeconds" in str(told)
