"""One rank of a measurement: ``python -P -m allhands.cluster.bench_rank '{"mark": "...", "sizes":
[4096]}'``.

It runs under our supervisor or, like training, under any launcher that is recognised. Rank 0
reports the result to our supervisor. Under another launcher it writes the result to standard
output, as one line: the mark, then JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from allhands.cluster.environment import recognise_here
from allhands.cluster.join import join_group
from allhands.cluster.worker import install
from allhands.io.files import private_opener
from allhands.runtime.blas import preload_blas

_CONNECT_S = 60.0


def main(arguments: list[str]) -> None:
    """Join the group, measure, report the result, and end."""
    request: dict[str, Any] = json.loads(arguments[0])
    launch = recognise_here()
    is_supervised = launch.launcher == "allhands"
    if launch.rank == 0 and is_supervised:
        _write_to_log(Path(os.environ["ALLHANDS_LOG_DIR"], "rank-0.log"))
    elif launch.rank:
        os.dup2(2, 1)
    with install(launch, os.environ) as worker:
        worker.mark_ready()
        preload_blas()
        communicator = join_group(launch, request.get("connect_s", _CONNECT_S))
        worker.mark_started()
        from allhands.distributed.bench import BenchPlan, time_all_sum, time_products
        from allhands.runtime.accelerator import detect

        detect()  # so that MLX has the same settings as in training
        plan = BenchPlan(
            request["sizes"], request.get("seconds", 0.2), request.get("budget_s", 60.0)
        )
        timings = time_all_sum(communicator, plan)
        speeds = time_products(communicator) if request.get("products") else []
        if launch.rank == 0:
            found = {
                "backend": communicator.backend,
                "num_ranks": communicator.size,
                "timings": timings,
                "speeds": speeds,
            }
            if is_supervised:
                worker.attest(found)
            else:
                os.write(1, f"{request['mark']}{json.dumps(found)}\n".encode())
    sys.stderr.flush()
    # As in training: MLX's back-ends may hang when Python exits in the normal way, so skip that. An
    # mpirun that is not ours needs the normal exit.
    if launch.backend != "mpi" or is_supervised:
        os._exit(0)


def _write_to_log(path: Path) -> None:
    """Send standard output and standard error to a file: the screen belongs to the caller."""
    with open(path, "ab", opener=private_opener) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    main(sys.argv[1:])
