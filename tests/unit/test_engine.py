"""What a rank computes by a schedule, of stages and messages that are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from allhands.parallel.engine import Engine
from allhands.parallel.schedules import make_schedule


class Frozen:
    """A first stage that counts its passes."""

    stage = SimpleNamespace(blocks=SimpleNamespace(is_last=False))

    def __init__(self) -> None:
        self.passes = 0

    def forward(self, received: mx.array | None, arguments: tuple[mx.array, ...]) -> list[mx.array]:
        assert received is None
        self.passes += 1
        return [2 * arguments[0]]


class Sent:
    """Messages that are kept."""

    def __init__(self) -> None:
        self.arrays: list[list[float]] = []

    def send(self, array: mx.array, peer: int) -> None:
        self.arrays.append(np.asarray(array).tolist())

    def finish(self) -> None:
        pass


def engine_of(first_trained: int) -> Any:
    def arguments(batch: Any) -> tuple[mx.array, ...]:
        return (mx.array(batch.inputs),)

    return Engine({0: Frozen()}, Sent(), arguments, cpu_native=False, first_trained=first_trained)  # type: ignore[dict-item,arg-type]


@pytest.mark.parametrize("begun", [True, False])
def test_a_pass_that_has_begun_is_not_computed_again(begun: bool) -> None:
    engine, (first, second, other) = (
        engine_of(1),
        [SimpleNamespace(inputs=np.full(3, each)) for each in range(3)],
    )
    schedule = make_schedule("1f1b", 2, 2, first_trained=1)
    for batches in ([first, second], [second, first]):
        engine.begin(batches[0] if begun else other)
        engine.run(schedule, 0, batches, lambda batch: None)
    assert engine.messages.arrays == [[0.0] * 3, [2.0] * 3, [2.0] * 3, [0.0] * 3]
    assert engine.compute[0].passes == (4 if begun else 6)


def test_only_a_first_stage_that_trains_nothing_runs_ahead() -> None:
    assert engine_of(1).runs_ahead
    assert not engine_of(0).runs_ahead
    assert not Engine({1: Frozen()}, Sent(), tuple, cpu_native=False, first_trained=2).runs_ahead  # type: ignore[dict-item,arg-type]
