"""Figures and bars of lengths, against numpy and plain counting."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data.lengths import LengthSummary, bars

some_lengths = st.lists(st.integers(0, 100_000), min_size=1, max_size=60)
limits = st.none() | st.integers(1, 120_000)


def chats(count: int = 5000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(5, 0.8, count).astype(np.int64)


# --- figures --------------------------------------------------------------------------------------


def test_the_figures_are_numpys() -> None:
    lengths = chats()
    found = LengthSummary.of(lengths, 512)
    assert (found.count, found.min, found.max, found.total) == (
        5000,
        lengths.min(),
        lengths.max(),
        lengths.sum(),
    )
    assert (found.mean, found.median) == (np.mean(lengths), np.median(lengths))
    assert (found.p90, found.p99) == tuple(np.sort(lengths)[[4499, 4949]])
    assert found.p90 == pytest.approx(np.percentile(lengths, 90), rel=0.01)
    assert found.p99 == pytest.approx(np.percentile(lengths, 99), rel=0.02)
    assert found.over_limit == (lengths > 512).sum() > 100
    assert found.lost_tokens == lengths.sum() - np.minimum(lengths, 512).sum()
    assert (found.limit, found.unit) == (512, "tokens")


@given(some_lengths, limits)
@settings(max_examples=100, deadline=None)
def test_the_figures_of_any_lengths(lengths: list[int], limit: int | None) -> None:
    found = LengthSummary.of(lengths, limit)
    ordered = sorted(lengths)
    for share, value in ((90, found.p90), (99, found.p99)):
        assert value == ordered[math.ceil(share * len(lengths) / 100) - 1]
        assert sum(length <= value for length in lengths) * 100 >= share * len(lengths)
    cut = [min(length, limit) if limit is not None else length for length in lengths]
    assert found.over_limit == sum(a != b for a, b in zip(cut, lengths, strict=True))
    assert found.lost_tokens == sum(lengths) - sum(cut)
    assert found == LengthSummary.of(np.array(lengths[::-1], dtype=np.int32), limit)


def test_large_sums_do_not_overflow() -> None:
    assert LengthSummary.of(np.full(1000, 2**31 - 1, dtype=np.int32)).total == 1000 * (2**31 - 1)


def test_figures_in_words() -> None:
    lengths = [100] * 900 + [2000] * 99 + [5000]
    text = "1,000 examples: median 100 tokens, 90% up to 100, longest 5,000"
    assert LengthSummary.of(lengths).sentence() == text
    over = "1 (0.1%) is over the limit of 2,048 and loses 2,952 tokens (1.0% of all)"
    assert LengthSummary.of(lengths, 2048).sentence() == f"{text}; {over}"
    over = "100 (10.0%) are over the limit of 1,000 and lose 103,000 tokens (35.2% of all)"
    assert LengthSummary.of(lengths, 1000).sentence() == f"{text}; {over}"
    assert LengthSummary.of(lengths, 5000).sentence() == f"{text}; none is over the limit of 5,000"
    assert LengthSummary.of([7], None, "characters").sentence() == "1 example of 7 characters"
    for nothing in (LengthSummary.of([], 5), LengthSummary.of(np.array([]))):
        assert nothing.sentence() == "no examples"


# --- bars -----------------------------------------------------------------------------------------

LINE = re.compile(
    r" *(?P<low>[\d,]+)(-(?P<high>[\d,]+))?  (?P<bar>[#█▏▎▍▌▋▊▉]*) +(?P<count>[\d,]+) +(?P<share>[<>\d.]+%)"
)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def parsed(lines: list[str]) -> list[tuple[int, int, str, int]]:
    """First and last length of each range, its bar and its count; rules are left out."""
    found = [LINE.fullmatch(line) for line in lines if " limit " not in line]
    assert all(found), lines
    return [
        (number(one["low"]), number(one["high"] or one["low"]), one["bar"], number(one["count"]))
        for one in found
        if one is not None
    ]


@given(some_lengths, limits, st.booleans())
@settings(max_examples=80, deadline=None)
def test_bars_count_every_length_once(lengths: list[int], limit: int | None, ascii: bool) -> None:
    lines = bars(lengths, limit, 60, ascii)
    rows = parsed(lines)
    assert 1 <= len(rows) <= 13
    for low, high, bar, count in rows:
        assert count == sum(low <= length <= high for length in lengths)
        assert bool(bar) == bool(count)
    assert sum(count for *_, count in rows) == len(lengths)
    assert all(high + 1 == low for (_, high, *_), (low, *_) in pairwise(rows))
    rules = [place for place, line in enumerate(lines) if " limit " in line]
    assert len(rules) == (limit is not None)
    if limit is not None:
        beyond = sum(count for *_, count in parsed(lines[rules[0] + 1 :]))
        assert beyond == LengthSummary.of(lengths, limit).over_limit
        assert f" limit {limit:,} " in lines[rules[0]]
    assert all(len(line) == 60 for line in lines)
    assert "".join(lines).isascii() == ascii


@pytest.mark.parametrize(
    ("lengths", "limit", "ends"),
    [
        ([3, 100, 1000], None, [4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ([3, 100, 1000], 512, [4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ([3, 100, 1000], 300, [4, 8, 16, 32, 64, 128, 256, 300, 512, 1024]),
        ([3, 100, 1000], 1010, [4, 8, 16, 32, 64, 128, 256, 512, 1010]),
        ([3, 100, 1000], 2000, [4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ([3, 100, 1000], 2, [4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ([101, 260, 595], None, [150, 200, 250, 300, 350, 400, 450, 500, 550, 600]),
        ([95, 205], 141, [100, 120, 140, 141, 160, 180, 200, 220]),
        ([7, 7], None, [7]),
        ([0, 0], 3, [0]),
    ],
)
def test_ranges_are_even_or_double_and_one_ends_at_the_limit(
    lengths: list[int], limit: int | None, ends: list[int]
) -> None:
    assert [high for _, high, *_ in parsed(bars(lengths, limit))] == ends


def test_the_length_of_a_bar_is_its_share_of_the_fullest() -> None:
    lengths = [10] * 1000 + [20] * 500 + [30] * 250 + [40]
    for ascii in (False, True):
        ten, twenty, thirty, forty = (
            bar for *_, bar, count in parsed(bars(lengths, None, 80, ascii)) if count
        )
        eighths = [
            8 * bar.count("█") + " ▏▎▍▌▋▊▉".find(bar.replace("█", "") or " ")
            for bar in (twenty, thirty)
        ]
        size = [8 * len(bar) for bar in (twenty, thirty)] if ascii else eighths
        assert len(ten) > 50
        assert abs(size[0] - 4 * len(ten)) <= (4 if ascii else 1)
        assert abs(size[1] - 2 * len(ten)) <= (4 if ascii else 1)
        assert forty == ("#" if ascii else "▏")


def test_bars_of_nothing_and_of_huge_numbers() -> None:
    assert bars([]) == bars(np.array([]), 5) == []
    assert sum(count for *_, count in parsed(bars([1, 10**12]))) == 2
    assert (
        min(map(len, bars([5], None, width=3))) >= 30
    )  # what cannot be narrower is wider than asked


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, allhands.data.lengths; print([name for name in ('matplotlib', 'mlx') if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
