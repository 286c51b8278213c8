"""Every launcher that starts all ranks is a row: the variables it sets, and the place in the group
that follows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from allhands.cluster.environment import LaunchPlace, recognise, recognise_here, rendezvous
from allhands.cluster.meeting import Patience
from allhands.cluster.platforms.slurm import expand_nodelist
from allhands.errors import DistributedError

PROXY = 4711


def found_in(
    environ: dict[str, str], *, has_cuda: bool = False, has_mpi: bool = True
) -> LaunchPlace:
    nowhere = Path("/nonexistent")
    return recognise(
        environ, has_cuda=has_cuda, has_mpi=has_mpi, root=nowhere, launcher_process=lambda: PROXY
    )


def _own(rank: int = 1, size: int = 2, **more: str) -> dict[str, str]:
    return {
        "ALLHANDS_RANK": str(rank),
        "ALLHANDS_WORLD_SIZE": str(size),
        "ALLHANDS_BACKEND": "ring",
        **more,
    }


def _ompi(rank: int = 3, size: int = 4, local_rank: int = 1, local_size: int = 2) -> dict[str, str]:
    """As mpirun of Open MPI 5.0.11 sets them."""
    numbers = {
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "NODE_RANK": local_rank,
    }
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()} | {
        "OMPI_ARGV": "",
        "OMPI_COMMAND": "allhands",
        "OMPI_UNIVERSE_SIZE": str(size),
        "OMPI_MCA_num_procs": str(size),
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-node1-28728@1",
        "PMIX_SERVER_URI4": "prterun-node1-28728@0.0;tcp4://127.0.0.1:33335",
    }


# Open MPI's prterun --personality prte: a rank, and nothing else that would help.
_PRTE = {
    "PMIX_RANK": "0",
    "PMIX_NAMESPACE": "prterun-vm-28737@1",
    "PRTE_LAUNCHED": "1",
    "PMIX_HOSTNAME": "vm",
}


def _hydra(
    rank: int = 1, size: int = 2, local_rank: int = 1, local_size: int = 2, **more: str
) -> dict[str, str]:
    """As mpiexec of MPICH 4 and of Intel MPI 2021 set them."""
    local = {"MPI_LOCALRANKID": str(local_rank), "MPI_LOCALNRANKS": str(local_size)}
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "PMI_FD": "9",
        "HYDI_CONTROL_FD": "7",
        **local,
        **more,
    }


def _mvapich(
    rank: int = 1, size: int = 2, local_rank: int = 1, local_size: int = 2
) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"MV2_COMM_WORLD_{name}": str(number) for name, number in numbers.items()} | {
        "PMI_RANK": str(rank)
    }


def _torchrun(
    rank: int = 1, size: int = 2, local_rank: int = 1, local_size: int = 2, **more: str
) -> dict[str, str]:
    """As torchrun sets them in its workers."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(size // local_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **more,
    }


def _pytorch_job(rank: int, world: int, a_node: str = "1") -> dict[str, str]:
    """As Kubeflow's training operator sets them in a pod of a PyTorchJob."""
    master = {"MASTER_ADDR": "mnist-master-0", "MASTER_PORT": "23456"}
    return {
        **{
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "PYTHONUNBUFFERED": "1",
            "PET_NPROC_PER_NODE": a_node,
        },
        **{"PET_NODE_RANK": str(rank), "PET_NNODES": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
        **master,
        **{f"PET_{name}": value for name, value in master.items()},
    }


def _trainer(node: int = 1, nodes: str = "2", a_node: str = "1") -> dict[str, str]:
    """As Kubeflow Trainer v2 sets torchrun's flags in a pod of its torch runtime."""
    return {
        **{"PET_NNODES": nodes, "PET_NPROC_PER_NODE": a_node, "PET_NODE_RANK": str(node)},
        **{"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"},
        **{"JOB_COMPLETION_INDEX": str(node), "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
    }


def _slurm(rank: int = 4, **changes: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_NTASKS": "9",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "train.sh",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_LAUNCH_NODE_IPADDR": "172.18.140.10",
        "SLURM_STEP_NODELIST": "n[08-09],m1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        **changes,
    }


# A shell that salloc has started in an allocation of eight tasks.
_SALLOC = _slurm(
    *(0,),
    SLURM_STEP_ID="4294967290",
    SLURM_JOB_NAME="interactive",
    SLURM_NTASKS="8",
    SLURM_STEP_NUM_TASKS="1",
)
_SRUN_BASH = _slurm(
    0, SLURM_JOB_NAME="bash", SLURM_PTY_PORT="34889", SLURM_STEP_NUM_TASKS="1", SLURM_NTASKS="1"
)
_NCCL = {"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "12345"}
_ALONE = ("single", 0, 1, 0, 1, "none")

# variables, (launcher, rank, size, local rank, local size, back-end)
_ROWS = {
    "nothing": ({}, _ALONE),
    "own": (_own(), ("allhands", 1, 2, 1, 2, "ring")),
    "own, two hosts": (
        _own(3, 4, ALLHANDS_LOCAL_RANK="1", ALLHANDS_LOCAL_SIZE="2"),
        ("allhands", 3, 4, 1, 2, "ring"),
    ),
    "own, one process": (_own(0, 1), ("allhands", 0, 1, 0, 1, "none")),
    "mlx.launch nccl": (_NCCL, ("mlx.launch", 1, 2, 1, 2, "nccl")),
    "mlx.launch nccl, far": (
        _NCCL | {"NCCL_HOST_IP": "10.0.0.1"},
        ("mlx.launch", 1, 2, 0, 1, "nccl"),
    ),
    "left-over NCCL_HOST_IP": ({"NCCL_HOST_IP": "10.0.0.1"}, _ALONE),
    "Open MPI": (_ompi(), ("openmpi", 3, 4, 1, 2, "mpi")),
    "mpirun -np 1": (_ompi(0, 1, 0, 1), ("openmpi", 0, 1, 0, 1, "none")),
    "MPICH": (_hydra(), ("mpich", 1, 2, 1, 2, "ring")),
    "MPICH, one process": (_hydra(0, 1, 0, 1), ("mpich", 0, 1, 0, 1, "none")),
    "Intel MPI, two hosts": (
        _hydra(3, 4, 1, 2, MASTER_ADDR="node1", I_MPI_HYDRA_UUID="5b740000-466c"),
        ("mpich", 3, 4, 1, 2, "ring"),
    ),
    "Cray's names": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        ("mpich", 1, 2, 1, 2, "ring"),
    ),
    "MVAPICH": (_mvapich(), ("mpich", 1, 2, 1, 2, "ring")),
    "torchrun": (_torchrun(), ("torchrun", 1, 2, 1, 2, "ring")),
    "torchrun, two hosts": (_torchrun(3, 4, 1, 2), ("torchrun", 3, 4, 1, 2, "ring")),
    "by hand, here": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        ("torchrun", 1, 2, 1, 2, "ring"),
    ),
    "by hand, LOCAL_RANK only": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"},
        ("torchrun", 1, 2, 1, 2, "ring"),
    ),
    "PyTorchJob": (_pytorch_job(1, 2), ("torchrun", 1, 2, 0, 1, "ring")),
    "PyTorchJob, auto": (_pytorch_job(1, 2, "auto"), ("torchrun", 1, 2, 0, 1, "ring")),
    "PyTorchJob, 4 a pod": (_pytorch_job(1, 8, "4"), ("torchrun", 1, 2, 0, 1, "ring")),
    "Trainer v2": (_trainer(), ("torchrun", 1, 2, 0, 1, "ring")),
    "Trainer v2, fixed range": (_trainer(1, "2:2"), ("torchrun", 1, 2, 0, 1, "ring")),
    "Trainer v2, one node": (_trainer(0, "1"), _ALONE),
    "Trainer v2 with torchrun": (_trainer() | _torchrun(3, 4), ("torchrun", 3, 4, 1, 2, "ring")),
    "RANK alone": ({"RANK": "3"}, _ALONE),
    "srun": (_slurm(), ("slurm", 4, 5, 0, 1, "ring")),
    "srun, second on its node": (_slurm(3, SLURM_LOCALID="1"), ("slurm", 3, 5, 1, 2, "ring")),
    "srun --mpi=pmix": (_slurm(PMIX_RANK="4"), ("slurm", 4, 5, 0, 1, "mpi")),
    "srun --mpi=pmi2": (_slurm(PMI_RANK="4", PMI_SIZE="5"), ("slurm", 4, 5, 0, 1, "ring")),
    "srun -n 1": (_slurm(0, SLURM_STEP_NUM_TASKS="1"), ("slurm", 0, 1, 0, 1, "none")),
    "srun, tasks of one node not told": (
        {
            k: v
            for k, v in _slurm(SLURM_STEP_NODELIST="n8", SLURM_LOCALID="4").items()
            if "TASKS_PER" not in k
        },
        ("slurm", 4, 5, 4, 5, "ring"),
    ),
    "srun, tasks of each node as asked for": (
        {
            **{
                k: v
                for k, v in _slurm(3, SLURM_STEP_NUM_TASKS="6", SLURM_LOCALID="1").items()
                if "TASKS_PER" not in k
            },
            "SLURM_NTASKS_PER_NODE": "2",
        },
        ("slurm", 3, 6, 1, 2, "ring"),
    ),
    "srun by a job called bash": (_slurm(SLURM_JOB_NAME="bash"), ("slurm", 4, 5, 0, 1, "ring")),
    "srun with torch's names": (
        _slurm(3, SLURM_LOCALID="1")
        | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "MASTER_ADDR": "n08"},
        ("slurm", 3, 5, 1, 2, "ring"),
    ),
    "sbatch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, _ALONE),
    "sbatch script for torch": (
        {"SLURM_JOB_ID": "7", "MASTER_ADDR": "n1", "WORLD_SIZE": "8"},
        _ALONE,
    ),
    "salloc": (_SALLOC, _ALONE),
    "srun --pty bash": (_SRUN_BASH, _ALONE),
    "empty values": ({"MLX_RANK": "", "RANK": " ", "WORLD_SIZE": ""}, _ALONE),
}


@pytest.mark.parametrize(("environ", "expected"), _ROWS.values(), ids=_ROWS.keys())
def test_recognise(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    found = found_in(environ)
    place = (
        found.launcher,
        found.rank,
        found.size,
        found.local_rank,
        found.local_size,
        found.backend,
    )
    assert place == expected
    assert found.reason or found.launcher == "single"


# Each comes before the next one.
_ORDER = {
    "allhands": _own(),
    "mlx.launch": _NCCL,
    "openmpi": _ompi(),
    "mpich": _hydra(),
    "torchrun": _torchrun(),
    "slurm": _slurm(),
    "vertex": {
        "CLUSTER_SPEC": json.dumps(
            {
                "cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]},
                "task": {"type": "workerpool1", "index": 0},
            }
        )
    },
    "sagemaker": {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
    "kubernetes": {
        **{"JOB_COMPLETION_INDEX": "1", "ALLHANDS_NUM_NODES": "2", "HOSTNAME": "job-1"},
        "ALLHANDS_PEERS_SERVICE": "peers",
    },
}


# srun sets PMI's variables, and our own launcher MLX's, as a by-product.
_PAIRS = [
    (a, b)
    for i, a in enumerate(_ORDER)
    for b in list(_ORDER)[i + 1 :]
    if (a, b) != ("mpich", "slurm")
]


@pytest.mark.parametrize(("first", "second"), _PAIRS)
def test_the_more_explicit_launcher_wins(first: str, second: str) -> None:
    found = found_in(_ORDER[second] | _ORDER[first])
    assert found.launcher == first
    assert found.size == found_in(_ORDER[first]).size
    if (first, second) != ("allhands", "mlx.launch"):
        assert set(found.ignored) & set(_ORDER[second])


def test_what_is_ignored_is_named() -> None:
    found = found_in(_ompi() | _torchrun() | _slurm())
    assert found.launcher == "openmpi"
    assert set(found.ignored) == {"RANK", "WORLD_SIZE", "SLURM_PROCID"}
    assert found_in({"RANK": "3"}).ignored == ("RANK",)
    assert found_in(_own(MLX_RANK="1")).ignored == ()


# variables, a piece of the message
_WRONG = {
    "rank beyond the world": (_own(2, 2), "rank 2 of a world of 2"),
    "negative rank": (_own(-1, 2), "rank -1"),
    "not a number": (_own() | {"ALLHANDS_RANK": "one"}, "ALLHANDS_RANK is 'one', not an integer"),
    "half of our own": ({"ALLHANDS_RANK": "0"}, "ALLHANDS_WORLD_SIZE is not set"),
    "other half of our own": ({"ALLHANDS_WORLD_SIZE": "2"}, "ALLHANDS_RANK is not set"),
    "no back-end": (
        {"ALLHANDS_RANK": "0", "ALLHANDS_WORLD_SIZE": "2"},
        "ALLHANDS_BACKEND is 'none'",
    ),
    "unknown back-end": (_own(ALLHANDS_BACKEND="gloo"), "ALLHANDS_BACKEND is 'gloo'"),
    "own against MLX": (_own(MLX_RANK="0"), "ALLHANDS_RANK=1 but MLX_RANK=0"),
    "more here than in all": (_own(ALLHANDS_LOCAL_SIZE="3"), "3 processes here, 2 in all"),
    "MLX_RANK alone": ({"MLX_RANK": "0"}, "none of MLX_HOSTFILE, MLX_IBV_DEVICES, NCCL_HOST_IP"),
    "ring and nccl": (_NCCL | {"MLX_HOSTFILE": "h.json"}, "MLX_HOSTFILE and NCCL_HOST_IP"),
    "no such hostfile": (
        {"MLX_RANK": "0", "MLX_HOSTFILE": "absent.json"},
        "MLX_HOSTFILE cannot be read",
    ),
    "hostfile without rank": ({"MLX_HOSTFILE": __file__}, "MLX_RANK is not set"),
    "half of Open MPI's": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
    "other half of Open MPI's": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
    "MPICH, local place unknown": (
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        "MPI_LOCALRANKID is not set",
    ),
    "MPICH, no address": (_hydra(0, 4, 0, 2), "MLX needs Open MPI"),
    "half of PMI's": ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
    "PMIx without a size": (_PRTE, "PMIX_RANK is set, but nothing says how many"),
    "torchrun without a port": (_torchrun() | {"MASTER_PORT": ""}, "MASTER_PORT is not set"),
    "torchrun, odd port": (_torchrun(MASTER_PORT="70000"), "MASTER_PORT is 70000"),
    "torchrun without an address": (_torchrun(1, 4, MASTER_ADDR=""), "MASTER_ADDR is not set"),
    "torchrun, half a local place": (
        _torchrun(1, 4, LOCAL_WORLD_SIZE=""),
        "LOCAL_WORLD_SIZE is not set",
    ),
    "half of torchrun's": ({"RANK": "1", "MASTER_ADDR": "head"}, "WORLD_SIZE is not"),
    "other half of torchrun's": ({"WORLD_SIZE": "2", "MASTER_ADDR": "head"}, "RANK is not"),
    "PyTorchJob, not a multiple": (_pytorch_job(1, 7, "4"), "WORLD_SIZE=7, PET_NPROC_PER_NODE=4"),
    "elastic": (_trainer(1, "1:4"), "PET_NNODES is 1:4"),
    "half of PET": ({"PET_NNODES": "2", "PET_MASTER_ADDR": "head"}, "PET_NODE_RANK is not set"),
    "PET without an address": (
        {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
        "PET_MASTER_ADDR is not set",
    ),
    "PET, rank too large": (_trainer(2, "2"), "rank 2 of a world of 2"),
    "Slurm and PMIx": (_slurm(PMIX_RANK="2"), "SLURM_PROCID=4 but PMIX_RANK=2"),
    "Slurm, cyclic": (_slurm(1, SLURM_LOCALID="0"), "not in blocks"),
    "Slurm, other sum": (_slurm(SLURM_STEP_TASKS_PER_NODE="2(x3)"), "5 tasks"),
    "Slurm, rank too large": (_slurm(5), "rank 5 of a world of 5"),
    "Slurm, tasks of nodes unknown": (
        {name: value for name, value in _slurm().items() if name != "SLURM_STEP_TASKS_PER_NODE"},
        "neither SLURM_TASKS_PER_NODE nor SLURM_STEP_TASKS_PER_NODE is set",
    ),
    "Slurm, odd nodes": (_slurm(SLURM_STEP_NODELIST="n[a-b]"), "not a list of nodes"),
}


@pytest.mark.parametrize(("environ", "piece"), _WRONG.values(), ids=_WRONG.keys())
def test_contradictions_are_refused(environ: dict[str, str], piece: str) -> None:
    with pytest.raises(DistributedError) as caught:
        found_in(environ)
    assert piece in caught.value.message
    assert caught.value.hint


def test_the_ring_size_and_local_rank_come_from_the_hostfile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.1:5001"]]))
    found = recognise({"MLX_RANK": "2", "MLX_HOSTFILE": str(hostfile)})
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 3, 1, 2)
    assert found.hosts == ("10.0.0.1:5000", "10.0.0.2:5000", "10.0.0.1:5001")
    assert found.meeting is None
    with pytest.raises(DistributedError, match="lists 3 ranks"):
        recognise({"MLX_RANK": "3", "MLX_HOSTFILE": str(hostfile)})


def test_the_jaccl_size_comes_from_the_device_file(tmp_path: Path) -> None:
    devices = tmp_path / "devices.json"
    devices.write_text(json.dumps([[None, "rdma_en5"], ["rdma_en5", None]]))
    found = recognise({"MLX_RANK": "1", "MLX_IBV_DEVICES": str(devices)})
    assert (found.backend, found.rank, found.size) == ("jaccl", 1, 2)


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_malformed_hostfile_is_named(tmp_path: Path, content: str) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(content)
    with pytest.raises(DistributedError) as caught:
        recognise({"MLX_RANK": "0", "MLX_HOSTFILE": str(hostfile)})
    assert caught.value.where == str(hostfile)


# variables, where the ranks meet, on which port first
_MEETINGS = {
    "torchrun listens on its own port": (_torchrun(), "127.0.0.1", 29501),
    "torchrun, several hosts": (_torchrun(3, 4), "head", 29501),
    "an operator has set the port aside": (_pytorch_job(1, 2), "mnist-master-0", 23456),
    "Trainer v2": (_trainer(), "job-node-0-0.job", 29400),
    "MPICH": (_hydra(), "127.0.0.1", 20000 + PROXY * 7 % 10000),
    "MPICH, several hosts": (
        _hydra(3, 4, 1, 2, MASTER_ADDR="node1", MASTER_PORT="5000"),
        "node1",
        5000,
    ),
    "Slurm": (_slurm(), "n08", 20000 + 7 * 12345 % 10000),
    "Slurm, second step": (_slurm(SLURM_STEP_ID="1"), "n08", 20000 + (7 * 12345 + 61) % 10000),
    "Slurm, one node": (
        _slurm(SLURM_STEP_NODELIST="n1", SLURM_STEP_TASKS_PER_NODE="5", SLURM_LOCALID="4"),
        *("127.0.0.1", 20000 + 7 * 12345 % 10000),
    ),
}


@pytest.mark.parametrize(("environ", "host", "port"), _MEETINGS.values(), ids=_MEETINGS.keys())
def test_where_ranks_meet(environ: dict[str, str], host: str, port: int) -> None:
    point = found_in(environ).meeting
    assert point is not None
    assert (point.host, point.ports[0]) == (host, port)
    assert 32323 not in point.ports


def test_ranks_of_a_job_meet_at_one_place_and_those_of_the_next_attempt_at_another() -> None:
    assert found_in(_torchrun(0, 4, 0)).meeting == found_in(_torchrun(3, 4, 1)).meeting
    assert (
        found_in(_torchrun(0, 4, 0)).meeting == found_in(_torchrun(3, 8, 1)).meeting
    )  # to be told that they differ
    assert (
        found_in(_torchrun()).meeting != found_in(_torchrun(TORCHELASTIC_RESTART_COUNT="1")).meeting
    )
    assert found_in(_slurm()).meeting != found_in(_slurm(SLURM_RESTART_COUNT="1")).meeting
    assert found_in(_hydra(0)).meeting == found_in(_hydra(1)).meeting
    assert found_in(_ompi()).meeting is None


def test_ports_stay_below_65536() -> None:
    point = found_in(_torchrun(MASTER_PORT="65535")).meeting
    assert point is not None
    assert point.ports == (65534, 65533, 65532, 65531)


def test_a_pod_that_stands_for_several_ranks() -> None:
    found = found_in(_pytorch_job(1, 8, "4"))
    assert (found.ranks_per_node, found.node, found.num_nodes) == (4, 1, 2)
    assert found_in(_trainer(0, "1", "4")).ranks_per_node == 4
    auto = found_in(_trainer(1, "2", "auto"))
    assert (auto.ranks_per_node, len(auto.notes)) == (1, 1)
    assert found_in(_trainer() | {"ALLHANDS_RANKS_PER_NODE": "3"}).ranks_per_node == 3
    with pytest.raises(DistributedError, match="ALLHANDS_RANKS_PER_NODE is 0"):
        found_in(_trainer() | {"ALLHANDS_RANKS_PER_NODE": "0"})


def test_with_cuda_it_is_nccl(tmp_path: Path) -> None:
    found = found_in(_torchrun(0, 2, 0, 2), has_cuda=True)
    assert (found.backend, dict(found.exports)) == ("nccl", {"CUDA_VISIBLE_DEVICES": "0"})
    assert found_in(_slurm(PMIX_RANK="4"), has_cuda=True).backend == "nccl"
    assert found_in(_slurm(PMIX_RANK="4"), has_mpi=False).backend == "ring"
    assert found_in(_ompi(), has_cuda=True).backend == "mpi"


@pytest.mark.parametrize(("visible", "expected"), [("5,7", "7"), ("6", None)])
def test_a_rank_takes_its_gpu_of_the_visible_ones(visible: str, expected: str | None) -> None:
    found = found_in(_torchrun(CUDA_VISIBLE_DEVICES=visible), has_cuda=True)
    assert found.exports.get("CUDA_VISIBLE_DEVICES") == expected


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(DistributedError, match="3 processes here for 2 GPUs"):
        found_in(_torchrun(2, 3, 2, 3, CUDA_VISIBLE_DEVICES="0,1"), has_cuda=True)


def test_slurm_knows_its_nodes() -> None:
    found = found_in(_slurm(3, SLURM_LOCALID="1"))
    assert found.hosts == ("n08", "n08", "n09", "n09", "m1")
    assert (found.node, found.num_nodes) == (1, 3)


def test_one_who_has_not_called_srun_is_told() -> None:
    assert "srun" in found_in(_SALLOC).notes[0]
    assert found_in(_SRUN_BASH).notes == found_in(_slurm()).notes == ()


def test_nothing_is_to_be_found_where_there_is_one_process(tmp_path: Path) -> None:
    with rendezvous(found_in({}), tmp_path) as variables:
        assert variables == {}
    with rendezvous(found_in(_ompi()), tmp_path, Patience(0.0)) as variables:
        assert variables == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", ["n1"]),
        ("n[1,08-10],gpu1", ["n1", "n08", "n09", "n10", "gpu1"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ],
)
def test_expand_nodelist(nodelist: str, names: list[str]) -> None:
    assert expand_nodelist(nodelist) == names


def test_a_launch_cannot_be_made_impossible() -> None:
    with pytest.raises(DistributedError):
        LaunchPlace("single", 0, 1, 1, 1, "none", "by hand")


def test_this_process_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ALLHANDS_RANK", "MLX_", "OMPI_", "PMI", "SLURM_", "SM_")):
            monkeypatch.delenv(name)
    for name, value in _own().items():
        monkeypatch.setenv(name, value)
    assert recognise_here() == recognise(_own())
