"""Where the time of training steps goes on a GPU, by PyTorch's profiler, which sees the kernels of
MLX too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

# The beginning and the end of a kernel, in microseconds, and its name.
Event = tuple[float, float, str]


def begin() -> Any:
    """A profiler that is at work from now on."""
    import torch

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.__enter__()
    return profiler


def end(profiler: Any) -> list[Event]:
    """What ran on the GPU since :func:`begin`."""
    from torch.autograd import DeviceType

    profiler.__exit__(None, None, None)
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]


def described(events: Sequence[Event], steps: int) -> list[str]:
    """Lines for a person: what ``steps`` steps wait for, what they exchange, and the kernels by
    their time.
    """
    computing = [event for event in events if not _exchanges(event[2])]
    idle, without = gaps(computing)
    lines = [f"idle {idle / steps / 1e3:.1f} ms a step; the longest waits:"]
    bounds = [0, 5, 30, 100, 1e9]
    for low, high in pairwise(bounds):
        among = [wait for wait, _, _ in without if low <= wait < high]
        lines.append(
            f"from {low:g} us: {len(among) / steps:.0f}, {sum(among) / steps / 1e3:.2f} ms"
        )
    for length, before, after in without[: 3 * steps : steps]:
        lines.append(f"{length / 1e3:8.2f} ms between {before[:60]} and {after[:60]}")
    calls = [event for event in events if _exchanges(event[2])]
    if calls:
        whole = sum(until - start for start, until, _ in calls)
        together = sum(overlap(calls, computing))
        lines.append(
            f"exchange {whole / steps / 1e3:.1f} ms a step in {len(calls) / steps:.0f} calls, "
            f"{together / steps / 1e3:.1f} ms of it beside kernels that compute"
        )
    rows: dict[str, list[float]] = {}
    for start, until, name in events:
        row = rows.setdefault(name[:100], [0, 0.0])
        row[0] += 1
        row[1] += until - start
    total, launches = sum(row[1] for row in rows.values()), sum(row[0] for row in rows.values())
    lines.append(f"kernels {total / steps / 1e3:.1f} ms a step, {launches / steps:.0f} launches")
    for name, (count, spent) in sorted(rows.items(), key=lambda item: -item[1][1])[:40]:
        lines.append(f"{spent / steps / 1e3:8.2f} ms {count / steps:6.0f} x  {name}")
    return lines


def exchanges(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Beginning and end of each call of the exchange, in their order."""
    return sorted((start, until) for start, until, name in events if _exchanges(name))


def waits(ranks: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """For each rank, how long its calls were on its GPU, and of that while another rank's had not
    begun; microseconds.

    Args:
        ranks: the same calls on every rank, by each one's own clock. A call ends everywhere at
            once, which tells how the clocks differ.
    """
    late = [
        statistics.median(other[1] - one[1] for one, other in zip(ranks[0], calls, strict=True))
        for calls in ranks
    ]
    began = [
        max(call[0] - by for call, by in zip(calls, late, strict=True))
        for calls in zip(*ranks, strict=True)
    ]
    return [
        (
            sum(end - start for start, end in calls),
            sum(
                max(0.0, min(last + by, end) - start)
                for (start, end), last in zip(calls, began, strict=True)
            ),
        )
        for calls, by in zip(ranks, late, strict=True)
    ]


def described_waits(ranks: Sequence[Sequence[tuple[float, float]]], steps: int) -> str:
    """A line for a person."""
    told = [
        f"{of / steps / 1e3:.1f} ms of {whole / steps / 1e3:.1f} on rank {n}"
        for n, (whole, of) in enumerate(waits(ranks))
    ]
    return f"calls of the exchange wait for another rank's to begin: {', '.join(told)}"


def _exchanges(name: str) -> bool:
    return name.startswith("nccl")


def gaps(events: Iterable[Event]) -> tuple[float, list[tuple[float, str, str]]]:
    """In which no kernel ran: together, and the longest first, with the kernels before and after;
    microseconds.
    """
    waits, end, last = [], 0.0, ""
    for start, until, name in sorted(events):
        if last and start > end:
            waits.append((start - end, last, name))
        if until > end:
            end, last = until, name
    return sum(wait[0] for wait in waits), sorted(waits, reverse=True)


def overlap(some: Iterable[Event], others: Iterable[Event]) -> list[float]:
    """For how long any of ``others`` runs beside each of ``some``, in the order of their
    beginnings; microseconds.
    """
    busy: list[list[float]] = []
    for start, until, _ in sorted(others):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], until)
        else:
            busy.append([start, until])
    found, first = [], 0
    for start, until, _ in sorted(some):
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        beside, at = 0.0, first
        while at < len(busy) and busy[at][0] < until:
            beside += min(until, busy[at][1]) - max(start, busy[at][0])
            at += 1
        found.append(beside)
    return found
