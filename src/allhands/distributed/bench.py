"""Time all-reduces: all ranks of a group time them together, and check their sums.

Of every round the slowest rank counts, because a training step waits for it. Every decision (how
often, whether to go on to larger arrays) is taken from numbers that all ranks have, so that all of
them take it alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from allhands.distributed.backend import Communicator
from allhands.distributed.handout import gather_rows
from allhands.distributed.reduce import barrier
from allhands.errors import DistributedError

_WARM_UP = 2
_FEWEST, _MOST = 5, 200
_PERIOD = 1021  # of the test pattern: prime, so that no two parts of an array are alike; its sums are exact
_ITEM_BYTES = 4
_CPU_ROWS, _GPU_ROWS = 512, 4096  # of the matrices whose products tell how fast a rank computes


@dataclass(frozen=True)
class BenchPlan:
    """The sizes to time.

    Attributes:
        sizes: bytes of the float32 arrays, in ascending order.
        seconds: of timed rounds for each size.
        budget_s: for everything; a size that would not fit into what is left is left out with all
            larger ones.
    """

    sizes: Sequence[int]
    seconds: float = 0.2
    budget_s: float = 60.0


def time_all_sum(communicator: Communicator, plan: BenchPlan) -> list[dict[str, Any]]:
    """Time ``all_sum`` for each size of the plan, smallest first; every rank returns the same.

    Returns:
        For each size ``num_bytes``, ``rounds``, and over the rounds, each taken as long as on its
        slowest rank, the ``median_s`` and the quartiles ``low_s`` and ``high_s``.

    Raises:
        DistributedError: a sum is wrong.
    """
    began = time.perf_counter()
    results: list[dict[str, Any]] = []
    for size in plan.sizes:
        used = _slowest(communicator, [time.perf_counter() - began])[0]
        if results and used + _expected_s(results, size) > plan.budget_s:
            break
        pattern = _pattern(size)
        _check_sum(communicator, pattern)
        times = _rounds(communicator, pattern, plan.seconds)
        low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
        results.append(
            {
                "num_bytes": pattern.nbytes,
                "rounds": len(times),
                "median_s": float(median),
                "low_s": float(low),
                "high_s": float(high),
            }
        )
    barrier(communicator)  # nobody leaves while another may still be in the last round
    return results


def time_products(
    communicator: Communicator, seconds: float = 0.5, widths: tuple[int, int] | None = None
) -> list[float]:
    """Products and sums a second of each rank, while all of them multiply matrices; every rank
    returns the same.

    By time that goes by, so that a computer that is busy, hot or held back counts as it is. On a
    GPU in half precision.

    Args:
        widths: of a matrix (inner, outer) that rows are multiplied by; default: a square one.
    """
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    size, dtype = (_GPU_ROWS, mx.bfloat16) if on_gpu else (_CPU_ROWS, mx.float32)
    inner, outer = widths or (size, size)
    rows, factor = mx.ones((size, inner), dtype=dtype), mx.ones((inner, outer), dtype=dtype) / inner
    mx.eval(rows, factor, rows @ factor)
    barrier(communicator)
    began, done = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < seconds:
        mx.eval(rows @ factor)
        done += 1
    own = 2.0 * size * inner * outer * done / taken
    return gather_rows(communicator, np.array([own], dtype=np.float32))[:, 0].tolist()


def _expected_s(results: Sequence[dict[str, Any]], size: int) -> float:
    """The least that the next size takes if it is as fast a byte as the last one: warm-up and the
    fewest rounds.
    """
    last = results[-1]
    return (1 + _WARM_UP + _FEWEST) * last["median_s"] * size / last["num_bytes"]


def _rounds(
    communicator: Communicator, pattern: np.ndarray[Any, Any], seconds: float
) -> list[float]:
    """Time rounds until ``seconds`` are full: as many as the warm-up says, no fewer than 5 and no
    more than 200.
    """
    warm = [_round(communicator, pattern) for _ in range(_WARM_UP)]
    once = max(_slowest(communicator, warm)[-1], 1e-9)
    count = min(max(math.ceil(seconds / once), _FEWEST), _MOST)
    return _slowest(communicator, [_round(communicator, pattern) for _ in range(count)])


def _round(communicator: Communicator, pattern: np.ndarray[Any, Any]) -> float:
    """Seconds of one ``all_sum`` that all ranks begin together."""
    # A new array each time, which only the sum holds: as with gradients, its memory may become the
    # result's.
    held = [mx.array(pattern)]
    mx.eval(held)
    barrier(communicator)
    began = time.perf_counter()
    mx.eval(communicator.all_sum(held.pop()))
    return time.perf_counter() - began


def _pattern(num_bytes: int) -> np.ndarray[Any, Any]:
    size = max(1, num_bytes // _ITEM_BYTES)
    return (np.arange(size) % _PERIOD).astype(np.float32)


def _check_sum(communicator: Communicator, pattern: np.ndarray[Any, Any]) -> None:
    """Every rank adds its number to the pattern, so that each has another part in the sum.

    Raises:
        DistributedError: on every rank alike, if a number is wrong on any.
    """
    size = communicator.size
    total = communicator.all_sum(mx.array(pattern + np.float32(communicator.rank)))
    mx.eval(total)
    right = pattern * np.float32(size) + np.float32(size * (size - 1) // 2)
    wrong = int((np.array(total) != right).sum())
    everyone = gather_rows(communicator, np.array([wrong], dtype=np.float32))[:, 0]
    if everyone.any():
        ranks = ", ".join(str(rank) for rank in np.flatnonzero(everyone))
        raise DistributedError(
            f"the {communicator.backend} back-end has summed {pattern.nbytes} bytes wrongly on rank {ranks}",
            code="collective-wrong",
            hint="use another --backend, and report it to MLX with the versions that `allhands version` shows",
        )


def _slowest(communicator: Communicator, seconds: Sequence[float]) -> list[float]:
    """The longest of each time over the ranks."""
    return gather_rows(communicator, np.array(seconds, dtype=np.float32)).max(axis=0).tolist()
