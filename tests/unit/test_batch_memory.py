"""Arrays of the same memory again and again hold what was given, for as long as they must."""

from __future__ import annotations

from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import numpy as np
import pytest

from allhands.parallel import batch_memory
from allhands.parallel.batch_memory import BatchMemory


def values(number: int, rows: int = 2) -> list[np.ndarray[Any, Any]]:
    return [
        np.arange(rows * 40, dtype=np.int32).reshape(rows, 40) * number,
        np.arange(rows * 7, dtype=np.int64)[::-1] + number,
        np.full((rows, 40, 2), 2**32 - 1 - number, dtype=np.uint32),
        np.zeros((0,), dtype=np.int32),
    ]


def place(array: mx.array) -> int:
    return np.asarray(array).ctypes.data


def assert_holds(arrays: tuple[mx.array, ...], expected: list[np.ndarray[Any, Any]]) -> None:
    for array, each in zip(arrays, expected, strict=True):
        found = np.array(array)
        assert (found.shape, found.dtype) == (each.shape, each.dtype)
        assert np.array_equal(found, each)


def test_the_last_calls_hold_and_their_places_come_again() -> None:
    memory, given = BatchMemory(), list[tuple[mx.array, ...]]()
    for number in range(10):
        given.append(memory(values(number)))
        for back in range(min(number + 1, batch_memory._PLACES)):
            assert_holds(given[number - back], values(number - back))
    places = [place(arrays[0]) for arrays in given]
    assert len(set(places)) == batch_memory._PLACES
    assert places == [places[number % batch_memory._PLACES] for number in range(10)]


def test_what_is_computed_later_sees_its_own_values() -> None:
    memory, sums = BatchMemory(), list[mx.array]()
    for number in range(12):
        sums.append(memory(values(number))[0].sum())
        if number:
            mx.eval(sums[number - 1])  # as a step waits for the one before
    assert [each.item() for each in sums] == [int(values(number)[0].sum()) for number in range(12)]


def test_a_busy_device_reads_what_was_written_for_it() -> None:
    """A step's work is still waiting on the device when the next one's values are written."""
    generator = np.random.default_rng(3)
    size, rounds = (4096, 300) if mx.default_device() == mx.gpu else (128, 60)
    table = mx.random.normal((50_000, 8))
    busy = mx.eye(size)
    memory, expected, found = BatchMemory(), list[list[int]](), list[list[mx.array]]()
    for number in range(rounds):
        ids = generator.integers(0, 50_000, (3, 16_384), dtype=np.int32)
        expected.append([int(row.astype(np.int64).sum()) for row in ids])
        arrays = memory(list(ids))
        for _ in range(4):
            busy = busy @ busy
        # Behind what keeps the device busy, at the front and, as the gradient of an embedding, at
        # the back of a pass.
        late = [array + (busy[0, 0] * 0).astype(mx.int32) for array in arrays]
        found.append([each.astype(mx.int64).sum() for each in late])
        again = table[arrays[0]].sum() * 0
        found[-1].append((arrays[0] + again.astype(mx.int32)).astype(mx.int64).sum())
        mx.async_eval(found[-1], busy)
        if number:
            mx.eval(found[-2])
    for sums, those in zip(found, expected, strict=True):
        assert [each.item() for each in sums] == [*those, those[0]]


def test_shapes_have_places_of_their_own_and_old_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_memory, "_SHAPES", 2)
    memory = BatchMemory()
    one, two = memory(values(1, rows=1)), memory(values(2, rows=2))
    memory(values(3, rows=1))
    memory(values(4, rows=3))  # in place of two rows, which were not asked for again
    assert len(memory._places) == 2
    assert_holds(one, values(1, rows=1))
    assert_holds(two, values(2, rows=2))
    assert place(memory(values(5, rows=1))[0]) not in (place(one[0]), place(two[0]))
