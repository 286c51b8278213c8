"""Recognition of the launcher: rank, world size, back-end and paths, from its variables and files.

:func:`recognise` depends on nothing else, so every launcher is one row of a test table. MLX
understands few of them: :func:`rendezvous` finds the other ranks where that is needed, and returns
the variables that MLX still lacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil

from allhands.cluster.launchers import half_set, mlx_launch, open_mpi, other_mpi, own, torchrun
from allhands.cluster.meeting import meet
from allhands.cluster.mpi import usable_mpi
from allhands.cluster.patience import Patience
from allhands.cluster.place import Given, LaunchPlace
from allhands.cluster.platforms import (
    indexed_job,
    mpi_job_launcher,
    platform_of,
    sagemaker,
    tf_config,
    vertex,
)
from allhands.cluster.processes import peer_variables, reserve_ports
from allhands.cluster.slurm import slurm

_Peers = TypeVar("_Peers")
# Explicit launchers first: the one that is closer to this process says more about it.
_RECOGNISERS: tuple[Callable[[Given], LaunchPlace | None], ...] = (
    own,
    mlx_launch,
    open_mpi,
    other_mpi,
    torchrun,
    slurm,
    vertex,
    tf_config,
    sagemaker,
    mpi_job_launcher,
    indexed_job,
)
# A variable that shows each launcher's presence, and the launchers that set it, some as a
# by-product.
_MARKS = {
    "ALLHANDS_RANK": "allhands",
    "MLX_RANK": "mlx.launch allhands",
    "OMPI_COMM_WORLD_RANK": "openmpi",
    "PMIX_RANK": "openmpi slurm",
    "MV2_COMM_WORLD_RANK": "mpich",
    "PMI_RANK": "mpich slurm",
    "RANK": "torchrun",
    "WORLD_SIZE": "torchrun kubernetes",
    "PET_NNODES": "torchrun",
    "SLURM_PROCID": "slurm",
    "CLUSTER_SPEC": "vertex",
    "TF_CONFIG": "tf_config vertex",
    "SM_HOSTS": "sagemaker",
    "JOB_COMPLETION_INDEX": "kubernetes",
}
_LAUNCHER_PROGRAMS = (
    "hydra_pmi_proxy",
    "pmi_proxy",
    "mpispawn",
    "mpiexec",
    "mpirun",
    "mpiexec.hydra",
)


def launcher_process() -> int:
    """Number of the process that has started all of an MPI job's ranks on this computer."""
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):
            if parent.name() in _LAUNCHER_PROGRAMS:
                return parent.pid
    return os.getppid()


def recognise(
    environ: Mapping[str, str],
    *,
    has_cuda: bool = False,
    has_mpi: bool = True,
    root: Path = Path("/"),
    launcher_process: Callable[[], int] = launcher_process,
) -> LaunchPlace:
    """Return how this process was launched; explicit variables win over guesses.

    Order: ``ALLHANDS_*``, ``MLX_*``, Open MPI, PMI, torchrun, Slurm (inside a step),
    ``CLUSTER_SPEC`` and ``TF_CONFIG``, SageMaker, an Indexed Job, single process. The platform
    (paths, grace time, failure file) is found for ranks of any launcher.

    Args:
        environ: the variables.
        has_cuda: MLX computes with CUDA: NCCL is then used where the launcher leaves the choice.
        has_mpi: Open MPI is here, for a launcher that offers PMIx.
        root: the directory that platforms call ``/``.
        launcher_process: see :func:`launcher_process`.

    Raises:
        DistributedError: variables are not integers, contradict each other, are set by half, or
            describe a group that MLX cannot form.
    """
    variables = {name: value for name, value in environ.items() if value.strip() != ""}
    given = Given(variables, has_cuda, has_mpi, launcher_process, root)
    found = next(
        (launch for recogniser in _RECOGNISERS if (launch := recogniser(given)) is not None), None
    )
    if found is None:
        half_set(given)
        found = LaunchPlace()
    if found.size == 1:  # a group of one needs nothing to form it
        found = replace(found, backend="none", hosts=(), exports={}, meeting=None)
    platform = platform_of(given)
    # A platform that has started one process alone has said so by the same variable.
    sayers = (
        {found.launcher, platform.name}
        if found.launcher == "single" and found.reason
        else {found.launcher}
    )
    ignored = tuple(
        name
        for name, words in _MARKS.items()
        if name in variables and not sayers & set(words.split())
    )
    # Slurm's advice is for a process that it has not started as a task.
    notes = found.notes + (
        platform.notes if found.launcher == "single" or platform.name != "slurm" else ()
    )
    return replace(found, platform=platform, ignored=ignored, notes=notes)


def recognise_here() -> LaunchPlace:
    """:func:`recognise` for this process: its variables, its MLX, its MPI.

    Raises:
        DistributedError: as there.
    """
    # Looking for an MPI starts a program: only where it matters.
    asks_mpi = "PMIX_RANK" in os.environ and "SLURM_STEP_ID" in os.environ
    return recognise(os.environ, has_cuda=has_cuda(), has_mpi=usable_mpi() if asks_mpi else True)


@cache
def launch_here() -> LaunchPlace:
    """:func:`recognise_here` at the first call: joining the group adds variables that tell less.

    Raises:
        DistributedError: as there.
    """
    return recognise_here()


def has_cuda() -> bool:
    """True if the installed MLX computes with CUDA; found without importing it."""
    from importlib.util import find_spec

    return sys.platform == "linux" and find_spec("mlx_cuda") is not None


@contextmanager
def rendezvous(
    launch: LaunchPlace, directory: Path, patience: Patience | None = None
) -> Generator[dict[str, str], None, None]:
    """Find the other ranks; yield the variables for ``mx.distributed.init``, which is to be called
    in the block.

    A ring's hostfile is written to ``directory``. Where the system allows it, this rank's port is
    kept from other programs until the block is left.

    Raises:
        DistributedError: the ranks did not come together in time, or do not belong together.
    """
    if (point := launch.meeting) is None:
        yield dict(launch.exports)
        return

    def come(ports: Sequence[int]) -> tuple[str, ...]:
        return meet(
            point, launch.rank, launch.size, ports[0], patience or Patience(), launch.backend
        )

    with gathered(1, launch.backend, come) as peers:
        hostfile = directory / f"ring-hosts-{launch.rank}.json"
        variables = peer_variables(launch.backend, launch.size, peers, hostfile)
        yield {**launch.exports, "MLX_RANK": str(launch.rank), **variables}


@contextmanager
def gathered(
    count: int, backend: str, come: Callable[[Sequence[int]], _Peers]
) -> Generator[_Peers, None, None]:
    """Reserve ports for ranks of this computer, meet the others by ``come(ports)``, and yield what
    that returns.

    Linux lets a ring's ranks listen on ports that this process keeps from other programs until the
    block is left.

    Raises:
        DistributedError: there are no free ports.
    """
    held, ports = reserve_ports(count, shareable=True, address="")
    with ExitStack() as sockets:
        for one in held:
            sockets.enter_context(one)
        peers = come(ports)
        if backend != "ring" or sys.platform != "linux":
            sockets.close()
        yield peers
