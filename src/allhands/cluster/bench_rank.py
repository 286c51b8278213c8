"""One rank of a measurement: ``python -P -m allhands.cluster.bench_rank '{"mark": "...", "sizes": [4096]}'``.

Works under our supervisor and, like training, under any launcher that is recognised. Rank 0 writes the result, with
what ``about`` holds, to standard output, as one line of JSON after the mark.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from allhands.cluster.environment import Launch, recognise_here
from allhands.cluster.join import join_group
from allhands.cluster.worker import install
from allhands.io.files import private_opener
from allhands.runtime.blas import preload_blas

_CONNECT_S = 60.0


def main(arguments: list[str]) -> None:
    """Join the group, measure, tell, and end."""
    request: dict[str, Any] = json.loads(arguments[0])
    launch = recognise_here()
    output = _take_output(launch, os.environ.get("ALLHANDS_LOG_DIR"))
    with install(launch, os.environ) as worker:
        worker.mark_ready()
        preload_blas()
        communicator = join_group(launch, request.get("connect_s", _CONNECT_S))
        worker.mark_started()
        from allhands.distributed.bench import BenchPlan, time_all_sum, time_products
        from allhands.runtime.accelerator import detect

        detect()  # MLX's settings as training has them
        plan = BenchPlan(request["sizes"], request.get("seconds", 0.2), request.get("budget_s", 60.0))
        timings = time_all_sum(communicator, plan)
        speeds = time_products(communicator) if request.get("products") else []
        if launch.rank == 0:
            found = {
                "backend": communicator.backend,
                "num_ranks": communicator.size,
                "timings": timings,
                "speeds": speeds,
            }
            result = {**request.get("about", {}), **found}
            _write(output, f"{request['mark']}{json.dumps(result)}\n".encode())
    sys.stderr.flush()
    # As training does: MLX's back-ends may hang in an ordinary end; a foreign mpirun needs one.
    if launch.backend != "mpi" or launch.launcher == "allhands":
        os._exit(0)


def _take_output(launch: Launch, log_dir: str | None) -> int:
    """Keep standard output for the result: under our supervisor what else rank 0 says goes to its log."""
    output = os.dup(1)
    if launch.rank or log_dir is None:
        os.dup2(2, 1)
        return output
    with open(Path(log_dir, "rank-0.log"), "ab", opener=private_opener) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return output


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(sys.argv[1:])
