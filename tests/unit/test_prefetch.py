"""Batches made ahead: order, errors, jumps, and that the thread does work and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data.prefetch import Prefetcher

# Never waited for when all is well.
LONG_S = 30.0


class Recorder:
    """``load`` that notes what it is asked for, and where; numbers in ``bad`` raise."""

    def __init__(self, bad: Sequence[int] = ()) -> None:
        self.bad = bad
        self.loaded: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, i: int) -> str:
        self.loaded.append(i)
        self.threads.add(threading.get_ident())
        if i in self.bad:
            raise ValueError(f"number {i}")
        return f"batch {i}"


def data_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("allhands-data")
    ]


@settings(max_examples=80, deadline=None, database=None)
@given(st.lists(st.integers(0, 12), max_size=12), st.integers(0, 8), st.integers(0, 4))
def test_any_number_may_be_asked_at_any_time(asked: list[int], end: int, ahead: int) -> None:
    load = Recorder()
    with Prefetcher(load, end, ahead) as batches:
        assert [batches.get(i) for i in asked] == [f"batch {i}" for i in asked]
    # What was asked, and numbers that follow it: never at or beyond the end.
    allowed = set(asked) | {j for i in asked for j in range(i, i + ahead + 1) if j < end}
    assert set(load.loaded) <= allowed
    assert data_threads() == []


def test_in_order_each_is_loaded_once_in_one_other_thread() -> None:
    load = Recorder()
    with Prefetcher(load, 20) as batches:
        assert [batches.get(i) for i in range(20)] == [f"batch {i}" for i in range(20)]
    assert load.loaded == list(range(20))
    assert len(load.threads) == 1
    assert threading.get_ident() not in load.threads


def test_the_next_ones_are_made_while_this_one_is_used() -> None:
    begun, finished = [threading.Event() for _ in range(5)], [threading.Event() for _ in range(5)]
    may_go_on = threading.Event()

    def load(i: int) -> int:
        begun[i].set()
        if i == 1:
            assert may_go_on.wait(LONG_S)
        finished[i].set()
        return i

    with Prefetcher(load, 5, ahead=2) as batches:
        assert batches.get(0) == 0
        # The step has batch 0, and 1 is in the making: the two overlap.
        assert begun[1].wait(LONG_S)
        assert not finished[1].is_set()
        may_go_on.set()
        # Two ahead without being asked, and not a third.
        assert finished[2].wait(LONG_S)
        assert not begun[3].is_set()
        assert batches.get(1) == 1
        assert finished[3].wait(LONG_S)
        assert not begun[4].is_set()


def test_errors_come_at_their_own_number() -> None:
    load = Recorder(bad=(2, 5))
    with Prefetcher(load, 8) as batches:
        assert [batches.get(0), batches.get(1)] == ["batch 0", "batch 1"]
        with pytest.raises(ValueError, match="number 2"):
            batches.get(2)
        assert [batches.get(3), batches.get(4)] == ["batch 3", "batch 4"]
        # Skipped: nobody asked for 5.
        assert batches.get(6) == "batch 6"
        with pytest.raises(ValueError, match="number 5"):
            batches.get(5)
    assert data_threads() == []


def test_a_jump_leaves_the_old_ones() -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    load = Recorder()

    def slow(i: int) -> str:
        if i == 1:
            begun.set()
            assert may_go_on.wait(LONG_S)
        return load(i)

    with Prefetcher(slow, 1000, ahead=3) as batches:
        batches.get(0)
        assert begun.wait(LONG_S)
        # 1 is in the making and will be finished; 2 and 3 are given up.
        threading.Timer(0.01, may_go_on.set).start()
        assert batches.get(500) == "batch 500"
        assert batches.get(501) == "batch 501"
    assert load.loaded[:4] == [0, 1, 500, 501]
    assert not {2, 3} & set(load.loaded)


def test_nothing_is_left_after_an_error_in_the_step() -> None:
    started = threading.Event()
    load = Recorder()

    def slow(i: int) -> str:
        if i == 1:
            started.set()
        return load(i)

    batches = Prefetcher(slow, 1000, ahead=100)

    def failing_step() -> None:
        with batches:
            batches.get(0)
            assert started.wait(LONG_S)
            raise KeyError

    with pytest.raises(KeyError):
        failing_step()
    assert data_threads() == []
    count = len(load.loaded)
    with pytest.raises(RuntimeError):
        batches.get(900)
    assert len(load.loaded) == count


def test_who_waits_is_told_how_long_the_work_has_been_going_on() -> None:
    told: list[float] = []
    gate, begun = threading.Event(), threading.Event()

    def load(i: int) -> int:
        if i == 2:
            begun.set()
            assert gate.wait(LONG_S)
        return i

    def waits(seconds: float) -> None:
        told.append(seconds)
        if begun.is_set():
            gate.set()

    with Prefetcher(load, end=5, ahead=2, waits=waits) as prefetcher:
        prefetcher.get(0)
        assert begun.wait(LONG_S)
        prefetcher.get(1)  # ready: nobody waits
        before = len(told)
        since = time.monotonic()
        time.sleep(0.05)
        assert prefetcher.get(2) == 2
        assert len(told) == before + 1
        assert told[-1] >= 0.05
        assert told[-1] <= time.monotonic() - since + LONG_S / 10
        assert prefetcher.get(4) == 4
