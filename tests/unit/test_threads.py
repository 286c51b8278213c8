"""Work side by side: in order, by no more threads than wanted, and all of it before an error is
told.
"""

from __future__ import annotations

import threading
import time

import pytest

from allhands.runtime.threads import side_by_side


@pytest.mark.parametrize(("threads", "most"), [(1, 1), (3, 3), (None, 9), (50, 9)])
def test_results_are_in_order_and_threads_as_many_as_wanted(threads: int | None, most: int) -> None:
    at_work, highest, lock = 0, 0, threading.Lock()

    def work(number: int) -> int:
        nonlocal at_work, highest
        with lock:
            at_work += 1
            highest = max(highest, at_work)
        time.sleep(0.05)
        with lock:
            at_work -= 1
        return number**2

    assert side_by_side(work, range(9), threads) == [number**2 for number in range(9)]
    assert highest <= most
    assert (highest > 1) == (most > 1)


def test_the_first_error_is_raised_when_all_has_been_worked_on() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number < 2:
            time.sleep(0.1 * number)
            raise ValueError(number)
        done.append(number)

    with pytest.raises(ValueError, match="0"):
        side_by_side(work, range(4))
    assert sorted(done) == [2, 3]
    assert side_by_side(work, []) == []
