"""Recognition of the launcher: rank, world size, back-end and paths, from its variables and files.

:func:`recognise` depends only on these, so every launcher is one row of a table of tests. MLX
itself supports few launchers. For the others :func:`rendezvous` finds the other ranks and yields
the variables that MLX needs.
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
from allhands.cluster.place import Given, LaunchPlace, Platform
from allhands.cluster.platforms import kubernetes, sagemaker, slurm, vertex
from allhands.cluster.processes import peer_variables, reserve_ports
from allhands.errors import DistributedError

_Peers = TypeVar("_Peers")
# Explicit launchers come first. The one that is closer to this process knows more about it.
_RECOGNISERS: tuple[Callable[[Given], LaunchPlace | None], ...] = (
    own,
    mlx_launch,
    open_mpi,
    other_mpi,
    torchrun,
    slurm.launch,
    vertex.launch,
    sagemaker.launch,
    kubernetes.mpi_job_launcher,
    kubernetes.indexed_job,
)
# Variables that show that a launcher is present, each with the launchers that set it. Some set it
# only as a by-product.
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
    """Return the id of the process that has started all ranks of an MPI job on this computer."""
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
        has_cuda: MLX computes with CUDA. Then NCCL is used if the launcher names no back-end.
        has_mpi: Open MPI is installed; this matters for a launcher that offers PMIx.
        root: the directory that stands for ``/``; tests use another one.
        launcher_process: see :func:`launcher_process`.

    Raises:
        DistributedError: variables are not integers, contradict each other, are set only in part,
            or describe a group that MLX cannot form.
    """
    variables = {name: value for name, value in environ.items() if value.strip() != ""}
    given = Given(variables, has_cuda, has_mpi, launcher_process, root)
    for recogniser in _RECOGNISERS:
        if found := recogniser(given):
            break
    else:
        half_set(given)
        found = LaunchPlace()
    if found.size == 1:  # a group of one needs nothing to form it
        found = replace(found, backend="none", hosts=(), exports={}, meeting=None)
    platform = _platform_of(given)
    # If a platform has started a single process, the variable that says so is not ignored.
    alone = found.launcher == "single"
    sayers = {found.launcher, platform.name if alone and found.reason else ""}
    ignored = tuple(
        name
        for name, words in _MARKS.items()
        if name in variables and not sayers & set(words.split())
    )
    # Slurm's notes are for a process that Slurm has not started as a task.
    notes = found.notes + (platform.notes if alone or platform.name != "slurm" else ())
    return replace(found, platform=platform, ignored=ignored, notes=notes)


def _platform_of(given: Given) -> Platform:
    """Return the platform that manages this machine; one without a name if none is known.

    ``ALLHANDS_GRACE_S`` replaces its time between SIGTERM and SIGKILL.

    Raises:
        DistributedError: a variable or file of the platform is not understood.
    """
    found = (
        sagemaker.platform(given)
        or vertex.platform(given)
        or slurm.platform(given)
        or kubernetes.platform(given)
        or Platform()
    )
    if "ALLHANDS_GRACE_S" in given.env:
        try:
            grace_s = float(given.env["ALLHANDS_GRACE_S"])
        except ValueError:
            grace_s = -1.0
        if not 0 <= grace_s < float("inf"):
            raise DistributedError(
                f"{given.shown('ALLHANDS_GRACE_S')} is no time",
                code="variable-invalid",
                hint="give seconds",
            )
        why = (
            *(fact for fact in found.why if "SIGKILL" not in fact),
            f"{grace_s:g} s to SIGKILL: ALLHANDS_GRACE_S",
        )
        found = replace(found, grace_s=grace_s, why=why)
    if restarts := given.number("TORCHELASTIC_RESTART_COUNT", 0):
        fact = f"torchrun has restarted the ranks {restarts} time{'s' * (restarts != 1)}: TORCHELASTIC_RESTART_COUNT"
        found = replace(found, restarts=found.restarts + restarts, why=(*found.why, fact))
    return found


def recognise_here() -> LaunchPlace:
    """Call :func:`recognise` for this process, with its variables, its MLX and its MPI.

    Raises:
        DistributedError: as in :func:`recognise`.
    """
    # Looking for Open MPI starts a program, so do it only where it matters.
    asks_mpi = "PMIX_RANK" in os.environ and "SLURM_STEP_ID" in os.environ
    return recognise(os.environ, has_cuda=has_cuda(), has_mpi=usable_mpi() if asks_mpi else True)


@cache
def launch_here() -> LaunchPlace:
    """Return the result of :func:`recognise_here` at the first call.

    Later the variables say less, because joining the group sets some.

    Raises:
        DistributedError: as in :func:`recognise`.
    """
    return recognise_here()


def has_cuda() -> bool:
    """True if the installed MLX computes with CUDA; MLX is not imported."""
    from importlib.util import find_spec

    return sys.platform == "linux" and find_spec("mlx_cuda") is not None


@contextmanager
def rendezvous(
    launch: LaunchPlace, directory: Path, patience: Patience | None = None
) -> Generator[dict[str, str], None, None]:
    """Find the other ranks; yield the variables that ``mx.distributed.init`` needs.

    Call ``mx.distributed.init`` inside the block. The hostfile of a ring is written to
    ``directory``. Where the system allows it, no other program can take this rank's port until the
    block is left.

    Raises:
        DistributedError: the ranks did not meet in time, or do not belong together.
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
    """Reserve ports for ranks of this computer, call ``come(ports)`` to meet the others, and yield
    what it returns.

    On Linux the ranks of a ring can listen on these ports while this process still reserves them,
    so no other program takes them until the block is left.

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
