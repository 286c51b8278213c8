"""Lengths of examples: figures and bars that help to choose a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from allhands.data.arrays import Array

Unit = Literal["tokens", "characters"]

_WIDE = 20  # longest over shortest, from which on ranges grow by a factor
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class LengthSummary:
    """Figures of a set of lengths, all in ``unit``.

    Attributes:
        count: number of examples.
        min, mean, median, max: of the lengths; all figures are 0 without examples.
        p90, p99: the smallest length that at least 90 (99) of 100 examples do not exceed; it is the
            length of an example.
        total: sum of the lengths.
        limit: the greatest length that is used whole, or None.
        over_limit: number of examples that are longer than the limit.
        lost_tokens: sum of the lengths beyond the limit; in ``unit``, like the rest.
        unit: what is counted.
    """

    count: int
    min: int
    mean: float
    median: float
    p90: int
    p99: int
    max: int
    total: int
    limit: int | None
    over_limit: int
    lost_tokens: int
    unit: Unit

    @classmethod
    def of(
        cls, lengths: Array | Sequence[int], limit: int | None = None, unit: Unit = "tokens"
    ) -> LengthSummary:
        """Return the figures of ``lengths``, whole numbers of shape ``(count,)`` in ``unit``."""
        values = np.asarray(lengths, dtype=np.int64).reshape(-1)
        if not values.size:
            return cls(0, 0, 0.0, 0.0, 0, 0, 0, 0, limit, 0, 0, unit)
        p90, p99 = np.percentile(values, (90, 99), method="inverted_cdf").tolist()
        beyond = values[values > limit] - limit if limit is not None else values[:0]
        return cls(
            count=values.size,
            min=int(values.min()),
            mean=float(values.mean()),
            median=float(np.median(values)),
            p90=int(p90),
            p99=int(p99),
            max=int(values.max()),
            total=int(values.sum()),
            limit=limit,
            over_limit=beyond.size,
            lost_tokens=int(beyond.sum()),
            unit=unit,
        )

    def sentence(self) -> str:
        """Return the figures that matter most, in one sentence without a full stop."""
        if not self.count:
            return "no examples"
        text = f"1 example of {self.max:,} {self.unit}"
        if self.count > 1:
            median = f"{self.median:,.1f}".removesuffix(".0")
            text = f"{self.count:,} examples: median {median} {self.unit}, 90% up to {self.p90:,}, longest {self.max:,}"
        if self.limit is None:
            return text
        if not self.over_limit:
            return f"{text}; none is over the limit of {self.limit:,}"
        verb, loses = ("is", "loses") if self.over_limit == 1 else ("are", "lose")
        over, lost = percent(self.over_limit, self.count), percent(self.lost_tokens, self.total)
        return (
            f"{text}; {self.over_limit:,} ({over}) {verb} over the limit of {self.limit:,} "
            f"and {loses} {self.lost_tokens:,} {self.unit} ({lost} of all)"
        )


def percent(part: int, whole: int) -> str:
    """Return the share as ``4.2%``; ``<0.1%`` or ``>99.9%`` where rounding would give 0% or 100%
    for a share that is neither.
    """
    share = 100 * part / whole if whole else 0.0
    if share in (0, 100):
        return f"{share:.0f}%"
    return "<0.1%" if share < 0.1 else ">99.9%" if share > 99.9 else f"{share:.1f}%"


def bars(
    lengths: Array | Sequence[int], limit: int | None = None, width: int = 72, ascii: bool = False
) -> list[str]:
    """Return a histogram for the terminal: a line for each range of lengths, and a rule where the
    limit is.

    A range ends at the limit, so that the lines below the rule count exactly the lengths over it.

    Args:
        lengths: whole numbers, of shape ``(count,)``.
        limit: the greatest length that is used whole.
        width: the most columns that a line takes; at least 40 are used.
        ascii: use ``#`` and ``-`` only.

    Returns:
        The lines; none without lengths.
    """
    values = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if not values.size:
        return []
    edges = _edges(int(values.min()), int(values.max()), limit)
    counts: list[int] = np.histogram(values, edges)[0].tolist()
    names = [
        f"{low:,}-{high - 1:,}" if high > low + 1 else f"{low:,}" for low, high in pairwise(edges)
    ]
    left, right, width = max(map(len, names)), len(f"{max(counts):,}"), max(width, 40)
    room = width - left - right - 12
    lines = [
        f"{name:>{left}}  {_bar(count / max(counts) * room, ascii):<{room}}  {count:>{right},}  "
        f"{percent(count, values.size):>6}"
        for name, count in zip(names, counts, strict=True)
    ]
    if limit is not None:
        lines.insert(
            sum(low <= limit for low in edges[:-1]),
            f" limit {limit:,} ".center(width, "-" if ascii else "─"),
        )
    return lines


def _edges(shortest: int, longest: int, limit: int | None) -> list[int]:
    """Return the first length of each range, and the length after the last range.

    About ten ranges end at round numbers. They are of equal width, or grow by a power of 2 where
    the longest length is at least 20 times the shortest. One range ends at the limit.
    """
    if longest >= _WIDE * max(1, shortest):
        octaves = math.log2(longest / max(1, shortest))
        ends = [0, *(1 << power for power in range(0, 64, math.ceil(octaves / 10)))]
    else:
        least = max(1, math.ceil((longest - shortest) / 10))
        power = 10 ** (len(str(least)) - 1)
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)
        ends = list(range((shortest - 1) // step * step, longest + step, step))
    ends = sorted({*ends} if limit is None else {*ends, limit})
    first = max((end for end in ends if end < shortest), default=-1)
    last = next(end for end in ends if end >= longest)
    return [end + 1 for end in (first, *(end for end in ends if first < end < last), last)]


def _bar(columns: float, ascii: bool) -> str:
    """Return a bar of ``columns`` columns, to an eighth; it is empty only for 0 columns."""
    if not columns:
        return ""
    if ascii:
        return "#" * max(1, round(columns))
    whole, eighth = divmod(max(1, round(8 * columns)), 8)
    return "█" * whole + _EIGHTHS[eighth].strip()
