"""Figures, bars and the picture of lengths, against numpy and plain counting."""

from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from allhands.data.histograms import draw_lengths
from allhands.data.lengths import LengthSummary, bars, percent
from allhands.errors import ConfigError, StorageError

some_lengths = st.lists(st.integers(0, 100_000), min_size=1, max_size=60)
limits = st.none() | st.integers(1, 120_000)


def chats(count: int = 5000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(5, 0.8, count).astype(np.int64)


# --- figures -----------------------------------------------------------------------------------------


def test_the_figures_are_numpys() -> None:
    lengths = chats()
    found = LengthSummary.of(lengths, 512)
    assert (found.count, found.min, found.max, found.total) == (5000, lengths.min(), lengths.max(), lengths.sum())
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


# --- bars --------------------------------------------------------------------------------------------

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


def test_bars_of_a_wide_range_double_and_those_of_a_narrow_one_are_even() -> None:
    wide = [(low, high) for low, high, *_ in parsed(bars([3, 100, 1000], None))]
    assert wide == [(3, 4), *((2**power + 1, 2 ** (power + 1)) for power in range(2, 10))]
    narrow = [(low, high) for low, high, *_ in parsed(bars([101, 260, 595], None))]
    assert narrow == [(50 * step + 1, 50 * step + 50) for step in range(2, 12)]


@pytest.mark.parametrize(
    ("lengths", "limit", "ends"),
    [
        ([3, 100, 1000], 512, [4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ([3, 100, 1000], 500, [4, 8, 16, 32, 64, 128, 256, 500, 1024]),
        ([3, 100, 1000], 300, [4, 8, 16, 32, 64, 128, 300, 512, 1024]),
        ([3, 100, 1000], 384, [4, 8, 16, 32, 64, 128, 256, 384, 512, 1024]),
        ([2, 13], 1, [2, 4, 6, 8, 10, 12, 14]),
        ([3, 100, 1000], 1010, [4, 8, 16, 32, 64, 128, 256, 512, 1010]),
        ([3, 100, 1000], 2000, [4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ([3, 100, 1000], 2, [4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ([95, 205], 141, [100, 120, 141, 160, 180, 200, 220]),
        ([95, 205], 130, [100, 120, 130, 140, 160, 180, 200, 220]),
        ([0, 15], None, [0, 2, 4, 6, 8, 10, 12, 14, 16]),
        ([7, 7], None, [7]),
        ([0, 0], 3, [0]),
    ],
)
def test_a_range_ends_at_the_limit(lengths: list[int], limit: int | None, ends: list[int]) -> None:
    assert [high for _, high, *_ in parsed(bars(lengths, limit))] == ends


def test_the_length_of_a_bar_is_its_share_of_the_fullest() -> None:
    lengths = [10] * 1000 + [20] * 500 + [30] * 250 + [40]
    for ascii in (False, True):
        drawn = {high: bar for _, high, bar, count in parsed(bars(lengths, None, 80, ascii)) if count}
        full = len(drawn[10])
        eighths = {end: 8 * bar.count("█") + " ▏▎▍▌▋▊▉".find(bar.replace("█", "") or " ") for end, bar in drawn.items()}
        size = {end: 8 * len(bar) for end, bar in drawn.items()} if ascii else eighths
        assert full > 50
        assert abs(size[20] - 4 * full) <= (4 if ascii else 1)
        assert abs(size[30] - 2 * full) <= (4 if ascii else 1)
        assert drawn[40] == ("#" if ascii else "▏")


def test_bars_of_nothing_and_of_huge_numbers() -> None:
    assert bars([]) == bars(np.array([]), 5) == []
    assert sum(count for *_, count in parsed(bars([1, 10**12]))) == 2
    assert min(map(len, bars([5], None, width=3))) >= 30  # what cannot be narrower is wider than asked


# --- the picture -------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, for a look at their bars, lines and texts."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *arguments: object, **options: object) -> None:
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def drawn_bars(figure: Figure, panel: int) -> list[tuple[float, float, float, str]]:
    """Ends, height and colour of the bars."""
    return [
        (bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height(), matplotlib.colors.to_hex(bar.get_facecolor()))
        for bar in figure.axes[panel].patches
    ]


def marks(figure: Figure, panel: int) -> dict[str, float]:
    """Where the upright lines stand."""
    return {str(line.get_label()): float(np.asarray(line.get_xdata())[0]) for line in figure.axes[panel].lines}


@pytest.mark.parametrize("limit", [512, None, 10_000, 3])
def test_each_panel_shows_the_shares_of_its_set(tmp_path: Path, drawn: list[Figure], limit: int | None) -> None:
    sets = {"train": chats(), "valid": chats(300, 1), "test": chats(7, 2)}
    out = tmp_path / "new" / "lengths.png"
    assert draw_lengths(sets, limit, "tokens", out) == out
    assert png_size(out) == (1000, 730)
    (figure,) = drawn
    for panel, (name, lengths) in enumerate(sets.items()):
        axes = figure.axes[panel]
        assert axes.get_xscale() == "log"
        shown = drawn_bars(figure, panel)
        assert sum(height for _, _, height, _ in shown) == pytest.approx(100)
        for low, high, height, colour in shown:
            assert height == pytest.approx(100 * np.mean((lengths > low) & (lengths < high)))
            beyond = limit is not None and low > limit
            assert colour == ("#d55e00" if beyond else "#0072b2")
            assert limit is None or not low < limit < limit + 1 < high  # no bar is half within and half beyond
        assert marks(figure, panel) == {"median": np.median(lengths)} | ({"limit": limit + 0.5} if limit else {})
        assert axes.texts[0].get_text().strip() == f"median {np.median(lengths):g}"
        total = lengths.sum()
        count = f"{total / 1e6:.3g} M" if total >= 1e6 else f"{total:,}"
        assert axes.get_title(loc="left") == f"{name}: {lengths.size:,} examples, {count} tokens"
        over = int((lengths > (limit or 10**9)).sum())
        share = "none" if not over else f"{over:,} ({percent(over, lengths.size)})"
        assert axes.get_title(loc="right") == ("" if limit is None else f"{share} over the limit")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-1] == ("median" if limit is None else f"limit: {limit:,} tokens")


def test_a_narrow_range_is_drawn_evenly(tmp_path: Path, drawn: list[Figure]) -> None:
    lengths = np.random.default_rng(0).normal(500, 60, 3000).astype(np.int64)
    draw_lengths({"train": lengths}, 560, "characters", tmp_path / "a")
    (figure,) = drawn
    axes = figure.axes[0]
    assert axes.get_xscale() == "linear"
    assert axes.get_xlabel() == "length (characters)"
    shown = drawn_bars(figure, 0)
    assert sum(height for low, _, height, _ in shown if low > 560) == pytest.approx(100 * np.mean(lengths > 560))
    widths = [high - low for low, high, *_ in shown]
    assert max(widths) <= 1.7 * np.median(widths)
    assert axes.get_xlim()[0] < lengths.min()
    assert axes.get_xlim()[1] > lengths.max()


@pytest.mark.parametrize("limit", [None, 2, 100])
@pytest.mark.parametrize("lengths", [[7, 7, 7], [0], [0, 0, 300], [1, 2]])
def test_few_lengths(tmp_path: Path, drawn: list[Figure], lengths: list[int], limit: int | None) -> None:
    draw_lengths({"train": np.array(lengths), "valid": np.array([])}, limit, "tokens", tmp_path / "a.png")
    (figure,) = drawn
    assert sum(height for _, _, height, _ in drawn_bars(figure, 0)) == pytest.approx(100)
    assert sum(h for low, _, h, _ in drawn_bars(figure, 0) if limit is not None and low > limit) == pytest.approx(
        100 * np.mean([limit is not None and length > limit for length in lengths])
    )
    assert figure.axes[1].get_title(loc="left") == "valid: no examples"
    assert drawn_bars(figure, 1) == []
    ticks = [tick for tick in figure.axes[0].get_yticks() if tick <= figure.axes[0].get_ylim()[1]]
    assert len(ticks) >= 2
    assert max(ticks) <= 100


@pytest.mark.parametrize("sets", [{}, {"train": np.array([], dtype=np.int64)}])
@pytest.mark.parametrize("limit", [None, 512])
def test_a_picture_of_nothing(
    tmp_path: Path, drawn: list[Figure], sets: dict[str, np.ndarray], limit: int | None
) -> None:
    assert png_size(draw_lengths(sets, limit, "tokens", tmp_path / "a.png")) == (1000, 350)
    assert drawn[0].axes[0].get_title(loc="left").endswith("no examples")


def test_nothing_lies_on_anything_else_and_nothing_is_cut_off(tmp_path: Path, drawn: list[Figure]) -> None:
    sets = {"x" * 90: chats(), "valid": chats(50), "test": np.array([100_000_000])}
    draw_lengths(sets, 1024, "characters", tmp_path / "a.png")
    (figure,) = drawn
    legend, title = figure.legends[0].get_window_extent(), figure.texts[0].get_window_extent()
    width, height = figure.canvas.get_width_height()
    assert legend.x0 >= 0
    assert legend.x1 <= width
    assert title.y1 <= height
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert box is not None
        assert legend.y1 <= box.y0
        assert box.y1 <= title.y0
        assert box.x1 <= width
        left, right = axes._left_title.get_window_extent(), axes._right_title.get_window_extent()  # type: ignore[attr-defined]
        assert left.x1 < right.x0
        label = axes.texts[0].get_window_extent()
        assert axes.bbox.x0 <= label.x0
        assert label.x1 <= axes.bbox.x1


def test_settings_of_the_caller_neither_count_nor_change(tmp_path: Path) -> None:
    plain = draw_lengths({"a": chats(99)}, 512, "tokens", tmp_path / "plain.png").read_bytes()
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "savefig.dpi": 50}):
        before = dict(matplotlib.rcParams)
        other = draw_lengths({"a": chats(99)}, 512, "tokens", tmp_path / "other.png").read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert other == plain


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_other_formats(tmp_path: Path, suffix: str, start: bytes) -> None:
    assert draw_lengths({"a": chats(9)}, 512, "tokens", tmp_path / f"a.{suffix}").read_bytes().startswith(start)


def test_places_and_formats_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        draw_lengths({"a": chats(9)}, 512, "tokens", tmp_path / "file" / "a.png")
    (tmp_path / "directory.png").mkdir()
    with pytest.raises(ConfigError, match=r"directory\.png: this is a directory"):
        draw_lengths({"a": chats(9)}, 512, "tokens", tmp_path / "directory.png")
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        draw_lengths({"a": chats(9)}, 512, "tokens", tmp_path / "a.bmp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory.png", "file"]


@pytest.mark.parametrize(
    ("module", "heavy"), [("data.lengths", "matplotlib"), ("data.histograms", "matplotlib.pyplot")]
)
def test_nothing_heavy_is_imported(module: str, heavy: str) -> None:
    code = f"import sys, allhands.{module}; print([name for name in ({heavy!r}, 'mlx') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
