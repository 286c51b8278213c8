"""A rank's way into its group, from whatever launcher, under a deadline."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from allhands.cluster.environment import Launch, rendezvous
from allhands.cluster.mpi import prepare_mpi_environment
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError

if TYPE_CHECKING:
    from allhands.cluster.worker import WorkerContext
    from allhands.config import TrainConfig
    from allhands.distributed.backend import Communicator
    from allhands.train.preparing import Surroundings

# Ends quietly when its standard input closes: the group has formed, or the rank is gone.
_TIMER = f"""
import os, select, sys
if not select.select([0], [], [], float(sys.argv[2]))[0]:
    sys.stderr.write(sys.argv[3])
    sys.stderr.flush()
    os.kill(int(sys.argv[1]), {int(signal.SIGKILL)})
"""


def mesh_of(launch: Launch, weights: Sequence[float] | None = None) -> Mesh:
    """This rank's place among the others, which are equally fast unless ``weights`` says otherwise.

    Raises:
        ConfigError: not one weight for each rank.
    """
    check_weights(weights, launch.size)
    chosen = (1.0,) * launch.size if weights is None else tuple(weights)
    return Mesh(launch.rank, launch.size, launch.local_rank, launch.local_size, chosen)


def surroundings_of(worker: WorkerContext, launch: Launch, config: TrainConfig) -> Surroundings:
    """What a training run is given as one rank of ``launch``, in contact with the supervisor, if there is one.

    Raises:
        ConfigError: not one weight for each rank.
    """
    from allhands.train.preparing import Surroundings

    def join() -> Communicator:
        worker.mark_ready()
        return join_group(launch, config.start_timeout_s)

    # A supervisor that has left ranks out knows the weights of the others.
    weights = os.environ.get("ALLHANDS_RANK_WEIGHTS")
    return Surroundings(
        mesh=mesh_of(launch, json.loads(weights) if weights else config.rank_weights),
        connect=join,
        started=worker.mark_started,
        busy=worker.mark_busy,
        beat=worker.beat,
        waits=lambda step, seconds: worker.beat("load", step, seconds),
        stop_requested=worker.stop_requested,
        regroup_requested=worker.regroup_requested,
        run_id=worker.run_id or secrets.token_hex(8),
        attempt=worker.attempt,
    )


def check_weights(weights: Sequence[float] | None, size: int) -> None:
    """Refuse weights that are not one for each of ``size`` ranks.

    Raises:
        ConfigError: they are not.
    """
    if weights is not None and len(weights) != size:
        raise ConfigError(
            f"{len(weights)} weights for {size} rank{'s' * (size != 1)}",
            where="--rank-weights",
            hint="give one for each rank, for example '[2, 1]' where rank 0 is twice as fast as rank 1",
        )


def join_group(launch: Launch, timeout_s: float) -> Communicator:
    """Connect this rank to its group, or end this process with a message after ``timeout_s``.

    Raises:
        DistributedError: no connection, or a group of another size than the launcher promised.
    """
    prepare_mpi_environment(os.environ)
    # Only now: MLX looks for its MPI library when it is first asked for a group.
    from allhands.distributed.backend import connect

    with tempfile.TemporaryDirectory(prefix="allhands-") as scratch, connect_deadline(launch, timeout_s):
        os.environ.update(rendezvous(launch, Path(scratch)))
        return connect(launch.backend, launch.size, launch.rank)


@contextmanager
def connect_deadline(launch: Launch, seconds: float) -> Generator[None, None, None]:
    """End this process with a message unless the block is left within ``seconds``.

    MLX's ring waits for its peers holding Python's lock: no thread and no signal handler of this process
    would run. So another process keeps the time. Under our own supervisor that is the supervisor.
    """
    if launch.size == 1 or "ALLHANDS_SUPERVISOR_PID" in os.environ:
        yield
        return
    message = (
        f"allhands: error: rank {launch.rank}: the {launch.backend} group of {launch.size} did not come together "
        f"within {seconds:.0f} s\n"
        "  what to do: look at the other ranks' output; raise --start-timeout-s if they are slow\n"
    )
    command = [sys.executable, "-I", "-S", "-c", _TIMER, str(os.getpid()), str(seconds), message]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as timer:
        try:
            yield
        finally:
            assert timer.stdin is not None
            timer.stdin.close()
