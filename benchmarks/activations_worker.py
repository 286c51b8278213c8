"""One of two ranks of ``activations_gpu.py``, started by ``allhands launch``: messages, alone and
beside computation.

    allhands launch -n 2 --backend ring -- python benchmarks/activations_worker.py \\
        '{"gather": false, "sizes_mb": [4], "repeat": 10, "width": 8192, "least_s": 0.02, "out":
        "PATH"}'

Messages are those of a pipeline (:class:`allhands.parallel.engine.Messages`), on a stream of their
own; or, with ``gather``, all-gathers of both ranks' arrays. Rank 0 writes what both have measured
to ``out``, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharded_rank import take_gpu

from allhands.cluster.environment import recognise_here
from allhands.cluster.join import join_group, take_device
from allhands.cluster.worker import install
from allhands.runtime.jit_cache import launch_directly

_CONNECT_S = 60.0
_AS_LONG = 4.0  # a computation is so many times as long as a message beside it
_WARM_UP = 2


def main() -> None:
    """Join the group, measure what the first argument describes, tell, and end."""
    asked = json.loads(sys.argv[1])
    take_gpu(os.environ)
    launch_directly(os.environ, untouched=True, often=True)  # as a pipeline does
    launch = recognise_here()
    take_device(launch)
    with install(launch, os.environ) as worker:
        worker.mark_ready()
        communicator = join_group(launch, _CONNECT_S)
        worker.mark_started()
        found = measure(asked, communicator, lambda: worker.beat("compute", 0))
        if launch.rank == 0:
            out = Path(asked["out"])
            draft = out.with_suffix(".draft")
            draft.write_text(json.dumps(found), encoding="utf-8")
            draft.replace(out)
    sys.stderr.flush()
    # As training does: MLX's back-ends may hang in an ordinary end.
    os._exit(0)


class Exchange:
    """Messages between the two ranks: by a pipeline's own means, or by all-gathers."""

    def __init__(self, communicator: Any, *, gather: bool) -> None:
        from allhands.parallel.engine import Messages

        self._group, self._gather = communicator, gather
        self._messages = Messages(communicator, lambda phase: None)

    def begin(self, array: Any, *, both: bool) -> Any:
        """Hand out ``array``, for the other rank to have: rank 0's, or those of ``both``; give what
        is to come.
        """
        import mlx.core as mx

        rank, peer = self._group.rank, 1 - self._group.rank
        if self._gather:
            whole = self._group.all_gather(array)
            mx.async_eval(whole)
            return whole
        coming = None
        for sender in (0, 1) if both else (0,):  # in this order on both ranks
            if sender == rank:
                self._messages.send(array, peer)
            else:
                coming = self._messages.expected(array.shape, array.dtype, peer)
                mx.async_eval(coming)
        return coming

    def end(self, coming: Any) -> Any:
        """Wait until it is here and what was sent is there; what has come, or ``None``."""
        import mlx.core as mx

        if self._gather:
            mx.eval(coming)
            half = coming.shape[0] // 2
            return coming[half * (1 - self._group.rank) :][:half]
        if coming is not None:
            self._messages.here(coming)
        self._messages.finish()
        return coming


def measure(asked: dict[str, Any], communicator: Any, beat: Callable[[], object]) -> dict[str, Any]:
    """Seconds of each size in each direction; both ranks return the same."""
    import mlx.core as mx

    from allhands.distributed.backend import moved_to

    communicator = moved_to(communicator, communicator.stream or mx.new_stream(mx.cpu))
    exchange = Exchange(communicator, gather=asked["gather"])
    product = Product(asked["width"])
    found: list[dict[str, Any]] = []
    for megabytes in asked["sizes_mb"]:
        array = filled(round(megabytes * 1e6 / 2), communicator.rank)
        mx.eval(array)
        for both in (False, True):
            beat()
            check(exchange, array, communicator.rank, both=both)
            times = timed(exchange, array, product, communicator, asked, both=both)
            found.append({"mb": megabytes, "both": both, **times})
    return {"backend": communicator.backend, "messages": found}


def filled(size: int, rank: int) -> Any:
    """(size,) bfloat16 that differs from place to place and from rank to rank."""
    import mlx.core as mx

    return (mx.arange(size) % 127 + 1 + 128 * rank).astype(mx.bfloat16)


def check(exchange: Exchange, array: Any, rank: int, *, both: bool) -> None:
    """See that what comes is what the other rank has sent.

    Raises:
        RuntimeError: it is something else.
    """
    import mlx.core as mx

    came = exchange.end(exchange.begin(array, both=both))
    if (both or rank == 1) and not (
        came is not None and mx.array_equal(came, filled(array.size, 1 - rank)).item()
    ):
        raise RuntimeError(f"rank {rank} has not received what the other one has sent")


class Product:
    """Computations on this rank's device: products of square matrices, one after the other."""

    def __init__(self, width: int) -> None:
        import mlx.core as mx

        keys = mx.random.split(mx.random.key(3), 2)
        dtype = mx.bfloat16 if mx.default_device().type == mx.DeviceType.gpu else mx.float32
        # Numbers that stay as large as they are.
        self._first = mx.random.normal((width, width), key=keys[0]).astype(dtype)
        self._factor = mx.random.normal((width, width), scale=width**-0.5, key=keys[1]).astype(
            dtype
        )
        mx.eval(self._first, self._factor)

    def begin(self, count: int) -> Any:
        """Hand out so many products."""
        import mlx.core as mx

        result = self._first
        for _ in range(count):
            result = result @ self._factor
        mx.async_eval(result)
        return result


def timed(
    exchange: Exchange,
    array: Any,
    product: Product,
    communicator: Any,
    asked: dict[str, Any],
    *,
    both: bool,
) -> dict[str, float]:
    """Medians in seconds, of the rank that takes longer: a message ``alone`` and ``beside`` a
    computation, and that computation ``without`` and ``with`` the message.
    """
    import mlx.core as mx

    from allhands.distributed.reduce import barrier

    def message(count: int) -> tuple[float, float]:
        barrier(communicator)
        began = time.perf_counter()
        coming = exchange.begin(array, both=both)
        result = product.begin(count) if count else None
        exchange.end(coming)
        came = time.perf_counter() - began
        if result is not None:
            mx.eval(result)
        return came, time.perf_counter() - began

    def computation(count: int) -> float:
        barrier(communicator)
        began = time.perf_counter()
        mx.eval(product.begin(count))
        return time.perf_counter() - began

    def of_both(values: list[float]) -> float:
        medians = mx.array([statistics.median(values[_WARM_UP:])])
        return max(communicator.all_gather(medians).tolist())

    rounds = range(_WARM_UP + asked["repeat"])
    alone = of_both([message(0)[0] for _ in rounds])
    each = of_both([computation(4) / 4 for _ in rounds])
    count = math.ceil(max(asked["least_s"], _AS_LONG * alone) / each)
    without, beside, with_it = list[float](), list[float](), list[float]()
    for _ in rounds:  # in turn, since a GPU that gets warm becomes slower
        without.append(computation(count))
        came, computed = message(count)
        beside.append(came)
        with_it.append(computed)
    return {
        "alone_s": alone,
        "beside_s": of_both(beside),
        "without_s": of_both(without),
        "with_s": of_both(with_it),
        "products": count,
    }


if __name__ == "__main__":
    main()
