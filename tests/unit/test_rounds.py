"""Times of training steps by rounds, at whose end nothing is begun ahead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import rounds


def test_steps_are_timed_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(rounds, "ROUND", 5)
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: now[0])
    told: list[bool] = []
    begun: list[int] = []

    def step(more: bool) -> int:
        told.append(more)
        now[0] += 10.0 if len(told) == 1 else 1.0 if more else 2.0
        return len(told)

    def before(number: int) -> None:
        begun.append(number)
        now[0] += 100.0  # which does not count

    times, results = rounds.in_rounds(step, 12, before=before)
    assert times == pytest.approx([10.0, 1.5, 1.2, 1.2])
    assert results == list(range(1, 14))
    assert told == [False, True, False, *[True] * 4, False, *[True] * 4, False]
    assert begun == [0, 1, 2, 3]


def test_there_is_a_round_at_least() -> None:
    assert [rounds.rounds_of(steps) for steps in (1, 10, 19, 20, 40)] == [1, 1, 1, 2, 4]
