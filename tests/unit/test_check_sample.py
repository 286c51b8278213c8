"""Which examples ``allhands data check --show`` chooses."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import chat

from allhands.run.checking import ShownSample


@settings(max_examples=40, deadline=None, database=None)
@given(st.integers(1, 6), st.integers(0, 400))
def test_shown_examples_are_spread_over_the_set(number: int, rows: int) -> None:
    sample = ShownSample(number, ())
    items = [chat("q", "a", line) for line in range(1, rows + 1)]
    assert list(sample.watch(items)) == items
    lines = [record.line for record in sample.chosen()]
    assert len(lines) == min(number, rows)
    assert lines == sorted(set(lines))
    assert lines[:1] == ([1] if rows else [])
    if 1 < number <= rows:
        gaps = [b - a for a, b in pairwise([*lines, rows + 1])]
        assert max(gaps) <= 2 * rows / (number - 1) + 1


def test_asked_lines_come_first() -> None:
    sample = ShownSample(1, [5, 3])
    list(sample.watch(chat("q", "a", line) for line in range(1, 9)))
    assert [record.line for record in sample.chosen()] == [3, 5, 1]
