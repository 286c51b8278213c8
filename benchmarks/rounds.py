"""Times of training steps, by rounds of a few.

A step may hand out work of the next one before it ends, which makes the times of single steps mean
little. What is timed is a round, at whose beginning and end nothing is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

ROUND = 10
WARM_UP = (1, 2)  # the first step by itself, and two more
T = TypeVar("T")


def rounds_of(steps: int) -> int:
    """How many rounds ``steps`` steps are; one at least."""
    return max(1, steps // ROUND)


def sizes_of(steps: int) -> list[int]:
    """Steps of each round, of those that warm up too."""
    return [*WARM_UP, *[ROUND] * rounds_of(steps)]


def in_rounds(
    step: Callable[[bool], T], steps: int, *, before: Callable[[int], object] = lambda number: None
) -> tuple[list[float], list[T]]:
    """Call ``step`` again and again: once, twice, then in :func:`rounds_of` ``steps`` rounds of
    :data:`ROUND`.

    Args:
        step: is told whether another follows in the same round.
        before: called with the number of a round, before it is timed.

    Returns:
        Seconds of a step, on the average of each round, those of :data:`WARM_UP` first; and what
        the steps gave.
    """
    times: list[float] = []
    results: list[T] = []
    for number, size in enumerate(sizes_of(steps)):
        before(number)
        began = time.perf_counter()
        results += [step(place + 1 < size) for place in range(size)]
        times.append((time.perf_counter() - began) / size)
    return times, results
