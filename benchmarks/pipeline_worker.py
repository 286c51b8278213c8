"""A rank of ``pipeline.py`` and ``pipeline_gpu.py``: allhands, which notes what its stages take.

The first argument is a file for that. With :data:`LIMIT` in the environment the GPU seems to have
so many bytes.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = "ALLHANDS_BENCHMARK_LIMIT_BYTES"


def main() -> None:
    """Run allhands with the arguments after the first."""
    import allhands  # noqa: F401 - before MLX, for its BLAS

    # isort: split
    import mlx.core as mx

    from allhands.parallel.engine import Engine

    if limit := int(os.environ.get(LIMIT, "0")):
        told: Any = mx.device_info
        mx.device_info = lambda *device: {
            **told(*device),
            "memory_size": limit,
            "total_memory": limit,
        }
        mx.set_memory_limit(limit)
    out, whole = Path(sys.argv.pop(1)), Engine.run
    steps: list[dict[str, float]] = []

    def run(engine: Engine, schedule: Any, rank: int, micro_batches: Any, note: Any) -> Any:
        if len(steps) == 1:  # not what loading and compiling have held
            mx.reset_peak_memory()
        before, began = engine.messages.waited_s, time.perf_counter()
        found = whole(engine, schedule, rank, micro_batches, note)
        seconds, waited = time.perf_counter() - began, engine.messages.waited_s - before
        steps.append({"seconds": seconds, "waited": waited, "micro_batches": len(micro_batches)})
        facts: dict[str, Any] = {
            "peak_bytes": mx.get_peak_memory(),
            "alive": schedule.most_alive[rank],
            "steps": steps,
        }
        facts["blocks"] = [
            (each.stage.blocks.first, each.stage.blocks.stop) for each in engine.compute.values()
        ]
        facts["tokens"] = max(batch.inputs.size for batch in micro_batches)
        out.write_text(json.dumps(facts))
        return found

    Engine.run = run  # type: ignore[method-assign]
    runpy.run_module("allhands", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
