"""One rank of ``gpu_many.py`` on MLX, started by ``allhands launch``: the step of ``allhands
train``.

    allhands launch -n 2 -- python benchmarks/gpu_many_mlx.py '{"work": {...}, "rows": 8, "steps":
    15, "out": "PATH"}'

Rank 0 writes what all ranks have measured to ``out``, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from allhands.cluster.environment import recognise_here
from allhands.cluster.join import join_group, take_device
from allhands.cluster.worker import install
from allhands.runtime.jit_cache import launch_directly

_CONNECT_S = 120.0


def main() -> None:
    """Join the group, measure what the first argument describes, tell, and end."""
    asked = json.loads(sys.argv[1])
    launch_directly(os.environ, untouched=True)
    launch = recognise_here()
    take_device(launch)
    with install(launch, os.environ) as worker:
        worker.mark_ready()
        communicator = join_group(launch, _CONNECT_S)
        worker.mark_started()
        found = measure(asked, communicator, worker)
        if launch.rank == 0:
            Path(asked["out"]).write_text(
                json.dumps({**found, "backend": communicator.backend}), encoding="utf-8"
            )
    sys.stderr.flush()
    # As training does: MLX's back-ends may hang in an ordinary end.
    os._exit(0)


def measure(asked: dict[str, Any], communicator: Any, worker: Any) -> dict[str, Any]:
    """Steps as the loop of ``allhands train`` makes them; every rank returns the same."""
    import allhands  # noqa: F401 - before MLX, for its BLAS

    # isort: split
    import gpu_profile
    import mlx.core as mx
    from gpu_many import batch_of
    from gpu_mlx import build, micro_batch, our_step
    from mlx.utils import tree_flatten
    from rounds import WARM_UP, in_rounds, sizes_of

    from allhands.data.prefetch import Prefetcher
    from allhands.distributed import reduce
    from allhands.distributed.backend import SingleProcess
    from allhands.run.strategy_choice import worth_dividing

    for name, value in asked["set"].items():
        setattr(reduce, f"_{name.upper()}", int(value))
    sizes = sizes_of(asked["steps"])
    total = sum(sizes)
    model = build(asked["work"])
    trained = sum(value.size for _, value in tree_flatten(model.trainable_parameters()))
    # The batches stay those of the rank.
    exchanging = SingleProcess() if asked.get("apart") else communicator
    auto = "zero1" if worth_dividing(exchanging, trained, False) else "data"
    step = our_step(
        model,
        asked["work"]["length"] + 1,
        compiled=True,
        communicator=exchanging,
        bucket_bytes=asked["bucket_bytes"],
        strategy=auto if asked["strategy"] == "auto" else asked["strategy"],
        heartbeat=lambda phase: worker.beat(phase, 0),
    )
    values = batch_of(asked["work"], asked["rows"], communicator.rank)
    one = micro_batch(values)
    sole = replace(one, sole=True, most=one.inputs.size)
    mine: list[list[float]] = []
    done = 0
    counted: list[float] = []
    profiler: Any = None
    ahead: dict[int, list[Any]] = {}
    with Prefetcher(lambda number: [sole], end=total) as batches:

        def load_ahead(number: int) -> list[Any]:
            if number < total:
                ahead[number] = batches.get(number)
            return ahead.get(number, [])

        def run(more: bool) -> list[float]:
            nonlocal done
            began = time.perf_counter()
            batch = ahead.pop(done, None) or batches.get(done)
            loaded = time.perf_counter()
            done += 1
            result = step(batch, upcoming=partial(load_ahead, done) if more else tuple)
            return [
                result.compute_s,
                result.comm_s,
                loaded - began,
                result.loss_sum / result.num_targets,
            ]

        def before(number: int) -> None:
            nonlocal profiler
            if number == 1:
                mx.reset_peak_memory()
            # On all ranks, so that none waits for one that it makes slower.
            if number == len(WARM_UP) and asked["profile"]:
                profiler = gpu_profile.begin()
            reduce.barrier(communicator)
            if number == len(WARM_UP):
                counted.append(time.time())

        times, steps = in_rounds(run, asked["steps"], before=before)
        counted.append(time.time())
    profile = (
        []
        if profiler is None
        else _profile(gpu_profile.end(profiler), sum(sizes[len(WARM_UP) :]), communicator)
    )
    losses = [told[-1] for told in steps]
    at = 0
    for seconds, size in zip(times, sizes, strict=True):
        parts = zip(*(told[:-1] for told in steps[at : at + size]), strict=True)
        mine.append([seconds, *(sum(part) / size for part in parts)])
        at += size
    everyone = communicator.all_gather(mx.array(mine)[None]).tolist()
    peaks = communicator.all_gather(mx.array([mx.get_peak_memory() / 1e6])).tolist()
    reduce.barrier(communicator)  # nobody leaves while another may still be in the exchange
    names = ("times", "compute_s", "comm_s", "data_wait_s")
    found = {
        name: [[step[i] for step in rank] for rank in everyone] for i, name in enumerate(names)
    }
    told = {"losses": losses, "trained": trained, "counted": counted, "profile": profile}
    return {**found, **told, "peak_bytes": [1e6 * peak for peak in peaks]}


def _profile(
    events: Sequence[tuple[float, float, str]], steps: int, communicator: Any
) -> list[str]:
    """Lines about what this rank's GPU did, and for how long ranks waited for each other; called by
    all of them.
    """
    import gpu_profile
    import mlx.core as mx

    calls = gpu_profile.exchanges(events)
    counts = communicator.all_gather(mx.array([len(calls)])).tolist()
    lines = gpu_profile.described(events, steps)
    # A profiler may lose some.
    if min(counts) == max(counts) > 0:
        first = calls[0][0]
        # From this rank's first one, so that float32 has them to a tenth of a microsecond.
        mine = mx.array([(start - first, end - first) for start, end in calls])
        lines.insert(
            0, gpu_profile.described_waits(communicator.all_gather(mine[None]).tolist(), steps)
        )
    return lines


if __name__ == "__main__":
    main()
