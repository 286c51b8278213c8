"""Numbers as people read them: times, counts, bytes and rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime


def format_duration(seconds: float) -> str:
    """``4.1 s``, ``45 s``, ``3m20s``, ``1h05m``, ``2d03h``; ``?`` where there is no finite number."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if whole < 3600:
        return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole} s"
    return f"{hours}h{minutes % 60:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def format_count(number: float) -> str:
    """``95,000``, ``1.47 M``, ``494 M``, ``7.62 B``."""
    if number < 1e6:
        return f"{number:,.0f}"
    return f"{number / 1e6:.3g} M" if number < 999.5e6 else f"{number / 1e9:.3g} B"


def format_bytes(number: float) -> str:
    """``612 MB`` or ``1.92 GB``, in powers of ten."""
    return f"{number / 1e6:.0f} MB" if number < 999.5e6 else f"{number / 1e9:.3g} GB"


def format_mark(number: float) -> str:
    """A round number of bytes at an axis, with up to four digits: ``2.5 MB``, ``1.25 GB``."""
    return f"{number / 1e6:.4g} MB" if number < 999.5e6 else f"{number / 1e9:.4g} GB"


def format_size(number: float) -> str:
    """Size of a file, which may be small: ``17 B``, ``182.0 kB``, ``5.2 MB``, then as
    :func:`format_bytes`.
    """
    if number < 1000:
        return f"{number:.0f} B"
    if number < 9.95e6:
        return f"{number / 1e3:.1f} kB" if number < 999_950 else f"{number / 1e6:.1f} MB"
    return format_bytes(number)


def format_seconds(seconds: float) -> str:
    """A measured time with three digits: ``12.6 s``, ``0.215 s``, ``7.18 ms``."""
    small = 0.0 < abs(seconds) < 0.01
    return f"{1e3 * seconds:.3g} ms" if small else f"{seconds:.3g} s"


def format_memory(per_rank: Sequence[int]) -> str:
    """Memory of the ranks in bytes, as one figure or a range; ``?`` if none is known."""
    ends = (min(per_rank), max(per_rank)) if per_rank else ()
    return " to ".join(dict.fromkeys(map(format_bytes, ends))) or "?"


def format_rate(per_s: float) -> str:
    """``4.2``, ``213``, ``12,345``."""
    return f"{per_s:,.{1 if per_s < 9.95 else 0}f}"


def format_moment(time: float) -> str:
    """``2026-11-22 13:05:00`` in UTC, from Unix time in seconds; a dash if that is no date."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "–"


def format_minute(time: float) -> str:
    """``2026-11-22 13:05`` in local time, from Unix time in seconds; ``?`` if that is no date."""
    try:
        return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "?"


def counted(number: float, noun: str, plural: str = "") -> str:
    """``1 row``, ``2,000 rows``, ``0.5 rows``: at most one decimal."""
    digits = f"{number:,.1f}".removesuffix(".0")
    return f"{digits} {noun if digits == '1' else plural or noun + 's'}"


def format_shares(shares: Sequence[float]) -> str:
    """Parts of a whole: ``74.4 : 25.6 %``; if there are more than eight, the least and the most."""
    if len(shares) > 8:
        return f"{100 * min(shares):.3g} to {100 * max(shares):.3g} %"
    return f"{' : '.join(f'{100 * share:.3g}' for share in shares)} %"
