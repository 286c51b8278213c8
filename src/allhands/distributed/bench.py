"""Measurement of all-reduces and matrix products by all ranks of a group together.

The time of the slowest rank counts in each round, because a training step waits for it. Every
decision (number of rounds, whether to try larger arrays) depends on numbers that all ranks have, so
all ranks decide alike.
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
_PERIOD = (
    1021  # period of the test pattern: prime, so that parts of an array differ; sums are exact
)
_ITEM_BYTES = 4
_CPU_ROWS, _GPU_ROWS = 512, 4096  # rows of the matrices whose products measure a rank's speed


@dataclass(frozen=True)
class BenchPlan:
    """The sizes to time.

    Attributes:
        sizes: bytes of the float32 arrays, in ascending order.
        seconds: duration of the timed rounds for each size.
        budget_s: duration of everything; sizes that would not fit into it are left out.
    """

    sizes: Sequence[int]
    seconds: float = 0.2
    budget_s: float = 60.0


def time_all_sum(communicator: Communicator, plan: BenchPlan) -> list[dict[str, Any]]:
    """Time ``all_sum`` for each size of the plan, smallest first; every rank returns the same.

    Returns:
        For each size ``num_bytes``, the number of ``rounds``, and of the rounds' times on the
        slowest rank the median ``median_s`` and the quartiles ``low_s`` and ``high_s``.

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
    barrier(communicator)  # no rank leaves while another is still in the last round
    return results


def time_products(
    communicator: Communicator, seconds: float = 0.5, widths: tuple[int, int] | None = None
) -> list[float]:
    """Return the floating-point operations per second of each rank, while all multiply matrices.

    Every rank returns the same. Wall-clock time is used, so that a computer that is busy, hot or
    throttled has the speed that it will have in training. A GPU multiplies in half precision.

    Args:
        seconds: duration of the measurement.
        widths: (inner, outer) widths of the matrix that rows are multiplied by; default: square.
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
    """Return the least time for the next size, at the last size's speed."""
    last = results[-1]
    return (1 + _WARM_UP + _FEWEST) * last["median_s"] * size / last["num_bytes"]


def _rounds(
    communicator: Communicator, pattern: np.ndarray[Any, Any], seconds: float
) -> list[float]:
    """Return the times of 5 to 200 rounds; the warm-up tells how many fill ``seconds``."""
    warm = [_round(communicator, pattern) for _ in range(_WARM_UP)]
    once = max(_slowest(communicator, warm)[-1], 1e-9)
    count = min(max(math.ceil(seconds / once), _FEWEST), _MOST)
    return _slowest(communicator, [_round(communicator, pattern) for _ in range(count)])


def _round(communicator: Communicator, pattern: np.ndarray[Any, Any]) -> float:
    """Return the seconds of one ``all_sum`` that all ranks begin together."""
    # A new array each time that only the sum holds: as with gradients, the result may reuse its
    # memory.
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
    """Check a sum of the pattern; every rank adds its number, so that parts differ.

    Raises:
        DistributedError: a number is wrong on some rank; raised on all ranks.
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
    """Return the maximum of each time over the ranks."""
    return gather_rows(communicator, np.array(seconds, dtype=np.float32)).max(axis=0).tolist()
