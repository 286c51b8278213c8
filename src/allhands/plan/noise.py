"""Checks of measured times: the work of other programs, and contradictions between times."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import psutil

from allhands.runtime.blas import allowed_cores, available_cores

# Other programs may take this part of the cores, and half a core in any case; if they take more,
# times are not reliable.
_BUSY, _HALF = 0.15, 0.5
_LONGER = 1.05  # a time that should not be longer than another may be longer by this part


class LoadWatch:
    """Result of :func:`watched`: ``others``, the mean number of cores that other programs used."""

    def __init__(self) -> None:
        self.others = 0.0


@contextmanager
def watched() -> Generator[LoadWatch]:
    """Measure the use of this process's cores by other programs during the block.

    The result is there after the block.
    """
    found = LoadWatch()
    began, busy, own = time.monotonic(), cores_busy_s(), own_busy_s()
    yield found
    passed = time.monotonic() - began
    if passed > 0.0:
        found.others = max(0.0, (cores_busy_s() - busy) - (own_busy_s() - own)) / passed


def cores_busy_s() -> float:
    """Return the seconds that the cores have computed, for all programs."""
    each = psutil.cpu_times(percpu=True)
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(each))
    chosen = [each[core] for core in mine if core < len(each)]
    # The time of users includes that of guests.
    return sum(
        one.user + one.system + getattr(one, "nice", 0.0) + getattr(one, "steal", 0.0)
        for one in chosen
    )


def own_busy_s() -> float:
    """Return the seconds that this process and its ended children have computed."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def busy(others: float) -> str:
    """Return a message if this computer was too busy to be measured; else an empty text."""
    cores = allowed_cores()
    # In a container, programs outside it may use the other cores.
    short = others + min(available_cores(), cores) > cores
    if not short or others <= max(_HALF, _BUSY * cores):
        return ""
    return f"this computer is busy: other programs took {others:.1f} of its {cores} cores while it was measured"


def contradiction(points: Sequence[tuple[float, float]], whole_s: float | None) -> str:
    """Describe a contradiction between measured steps; empty if there is none.

    Args:
        points: tokens and seconds of a step with the whole batch and with half of it.
        whole_s: seconds of a step with all cores, if the others had fewer.
    """
    (_, seconds), *rest = points
    if rest and rest[0][0] < points[0][0] and rest[0][1] > _LONGER * seconds:
        half, all_of_it = 1e3 * rest[0][1], 1e3 * seconds
        return f"half of the batch took {half:,.0f} ms, and all of it {all_of_it:,.0f}: something else computed besides"
    if whole_s is not None and whole_s > _LONGER * seconds:
        fewer, more = 1e3 * seconds, 1e3 * whole_s
        return (
            f"a step took {more:,.0f} ms with all cores, and {fewer:,.0f} with fewer: something else computed besides, "
            "or the steps are too short to be measured"
        )
    return ""
