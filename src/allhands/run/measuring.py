"""Time the forms of operations against each other on this device, and compare what they compute."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping

import mlx.core as mx

from allhands.io.trees import number
from allhands.kernels.selection import FormTimes, Kind, SizedOperation, reference
from allhands.run.operations import Form, operation

_BUDGET_S = 1.0  # for the rounds of a problem, as far as the least number allows
_LEAST_ROUNDS, _FEW_ROUNDS, _MOST_ROUNDS = 3, 5, 15
_SAMPLE_S = 2e-3  # what is shorter is timed several times in a row
_MOST_REPEATS = 32


def measure(problem: SizedOperation, kind: Kind) -> FormTimes:
    """Median times of all forms, in alternation, and their differences from the reference."""
    found = operation(problem, kind)
    results = {name: _evaluated(form) for name, form in found.items()}  # builds what is built at the first use
    expected = results[reference(problem.name, kind)]
    difference = {name: _difference(expected, actual) for name, actual in results.items()}
    del results, expected
    times = _times(found)
    mx.clear_cache()
    median = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    return FormTimes(problem, kind, median, {name: 1e3 * min(each) for name, each in times.items()}, difference)


def _times(found: Mapping[str, Form]) -> dict[str, list[float]]:
    """Seconds of each form in each round."""
    first = {name: _seconds(form, 1) for name, form in found.items()}
    repeats = {name: min(_MOST_REPEATS, max(1, math.ceil(_SAMPLE_S / s))) for name, s in first.items()}
    round_s = sum(first[name] * repeats[name] for name in found)
    least = _LEAST_ROUNDS if round_s > _BUDGET_S else _FEW_ROUNDS
    rounds = max(least, min(_MOST_ROUNDS, int(_BUDGET_S / round_s)))
    times: dict[str, list[float]] = {name: [] for name in found}
    for index in range(rounds):
        # In turns, and not always the same one first: what slows the device down meets all.
        order = list(found)[:: 1 if index % 2 == 0 else -1]
        for name in order:
            times[name].append(_seconds(found[name], repeats[name]))
    return times


def _seconds(form: Form, repeats: int) -> float:
    """Seconds of one, on the average of several in a row."""
    mx.synchronize()
    start = time.perf_counter()
    mx.eval([form() for _ in range(repeats)])
    mx.synchronize()
    return (time.perf_counter() - start) / repeats


def _evaluated(form: Form) -> list[mx.array]:
    arrays = form()
    mx.eval(arrays)
    return arrays


def _difference(expected: list[mx.array], actual: list[mx.array]) -> float:
    """The largest difference, as a share of the largest value of each array; infinite if one is not a number."""
    worst = 0.0
    for one, other in zip(expected, actual, strict=True):
        one, other = one.astype(mx.float32), other.astype(mx.float32)
        share = number(mx.abs(one - other).max() / mx.maximum(mx.abs(one).max(), 1e-30))
        worst = max(worst, share) if math.isfinite(share) else math.inf
    return worst
