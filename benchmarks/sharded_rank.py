"""A rank of allhands on a GPU of its own, with any back-end, started by ``allhands launch``.

    allhands launch -n 2 --backend mpi -- python benchmarks/sharded_rank.py train --model ...

``allhands launch`` gives ranks a GPU each where they exchange over NCCL; over a ring or Open MPI
all of them would compute on the first one.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import MutableMapping

_PLACES = "ALLHANDS_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"


def take_gpu(environ: MutableMapping[str, str]) -> None:
    """Show this process the GPU of its place on this computer alone, if it may see several."""
    place = next((int(environ[name]) for name in _PLACES if name in environ), 0)
    visible = [each for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if len(visible) == 1:
        return
    environ["CUDA_VISIBLE_DEVICES"] = visible[place] if place < len(visible) else str(place)


if __name__ == "__main__":
    take_gpu(os.environ)
    runpy.run_module("allhands", run_name="__main__", alter_sys=True)
