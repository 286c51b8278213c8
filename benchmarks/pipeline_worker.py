"""A rank of ``benchmarks/pipeline.py``: allhands, which notes what its stages take. First argument: a file for that."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx

from allhands.parallel.engine import Engine

_RUN = Engine.run


def main() -> None:
    """Run allhands with the arguments after the first."""
    out = Path(sys.argv.pop(1))
    steps: list[dict[str, float]] = []

    def run(engine: Engine, schedule: Any, rank: int, micro_batches: Any, note: Any) -> Any:
        if len(steps) == 1:  # not what loading and compiling have held
            mx.reset_peak_memory()
        before, began = engine.messages.waited_s, time.perf_counter()
        found = _RUN(engine, schedule, rank, micro_batches, note)
        seconds, waited = time.perf_counter() - began, engine.messages.waited_s - before
        steps.append({"seconds": seconds, "waited": waited, "micro_batches": len(micro_batches)})
        facts: dict[str, Any] = {"peak_bytes": mx.get_peak_memory(), "alive": schedule.most_alive[rank], "steps": steps}
        facts["blocks"] = [(each.stage.blocks.first, each.stage.blocks.stop) for each in engine.compute.values()]
        facts["tokens"] = max(batch.inputs.size for batch in micro_batches)
        out.write_text(json.dumps(facts))
        return found

    Engine.run = run  # type: ignore[method-assign]
    runpy.run_module("allhands", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
