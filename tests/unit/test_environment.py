"""Every launcher is a row: the variables it sets, and the place in the group that follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allhands.cluster.environment import Launch, expand_nodelist, recognise, rendezvous
from allhands.errors import DistributedError


def _own(rank: int = 1, size: int = 2, **more: str) -> dict[str, str]:
    return {"ALLHANDS_RANK": str(rank), "ALLHANDS_WORLD_SIZE": str(size), "ALLHANDS_BACKEND": "ring", **more}


def _ompi(rank: int = 3, size: int = 4, local_rank: int = 1, local_size: int = 2) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def _torchrun(rank: int = 1, size: int = 2, local_rank: int = 1, local_size: int = 2) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    address = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    return {name: str(number) for name, number in numbers.items()} | address


def _slurm(rank: int = 4, **changes: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_NTASKS": "9",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "12345",
        "SLURM_STEP_NODELIST": "n[08-09],m1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        **changes,
    }


_NCCL = {"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": "12345"}

# variables, (launcher, rank, size, local rank, local size, back-end)
_ROWS = {
    "nothing": ({}, ("single", 0, 1, 0, 1, "none")),
    "own": (_own(), ("allhands", 1, 2, 1, 2, "ring")),
    "own, two hosts": (
        _own(3, 4, ALLHANDS_LOCAL_RANK="1", ALLHANDS_LOCAL_SIZE="2"),
        ("allhands", 3, 4, 1, 2, "ring"),
    ),
    "own, one process": (_own(0, 1), ("allhands", 0, 1, 0, 1, "none")),
    "own before Open MPI": (_own() | _ompi(), ("allhands", 1, 2, 1, 2, "ring")),
    "mlx.launch nccl": (_NCCL, ("mlx.launch", 1, 2, 1, 2, "nccl")),
    "mlx.launch nccl, far": (_NCCL | {"NCCL_HOST_IP": "10.0.0.1"}, ("mlx.launch", 1, 2, 0, 1, "nccl")),
    "left-over NCCL_HOST_IP": ({"NCCL_HOST_IP": "10.0.0.1"}, ("single", 0, 1, 0, 1, "none")),
    "Open MPI": (_ompi(), ("openmpi", 3, 4, 1, 2, "mpi")),
    "mpirun -np 1": (_ompi(0, 1, 0, 1), ("openmpi", 0, 1, 0, 1, "none")),
    "MPICH, one process": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("mpich", 0, 1, 0, 1, "none")),
    "MLX before Open MPI": (_NCCL | _ompi(), ("mlx.launch", 1, 2, 1, 2, "nccl")),
    "torchrun": (_torchrun(), ("torchrun", 1, 2, 1, 2, "ring")),
    "Open MPI before torchrun": (_ompi() | _torchrun(), ("openmpi", 3, 4, 1, 2, "mpi")),
    "RANK alone": ({"RANK": "3"}, ("single", 0, 1, 0, 1, "none")),
    "srun": (_slurm(), ("slurm", 4, 5, 0, 1, "ring")),
    "srun, second on its node": (_slurm(3, SLURM_LOCALID="1"), ("slurm", 3, 5, 1, 2, "ring")),
    "srun --mpi=pmix": (_slurm(PMIX_RANK="4"), ("slurm", 4, 5, 0, 1, "mpi")),
    "srun --mpi=pmi2": (_slurm(PMI_RANK="4", PMI_SIZE="5"), ("slurm", 4, 5, 0, 1, "ring")),
    "sbatch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ("single", 0, 1, 0, 1, "none")),
    "empty values": ({"MLX_RANK": "", "RANK": "", "WORLD_SIZE": ""}, ("single", 0, 1, 0, 1, "none")),
}


@pytest.mark.parametrize(("environ", "expected"), _ROWS.values(), ids=_ROWS.keys())
def test_recognise(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    found = recognise(environ)
    place = (found.launcher, found.rank, found.size, found.local_rank, found.local_size, found.backend)
    assert place == expected
    assert found.reason


# variables, a piece of the message
_WRONG = {
    "rank beyond the world": (_own(2, 2), "rank 2 of a world of 2"),
    "negative rank": (_own(-1, 2), "rank -1"),
    "not a number": (_own() | {"ALLHANDS_RANK": "one"}, "ALLHANDS_RANK is 'one', not an integer"),
    "half of our own": ({"ALLHANDS_RANK": "0"}, "ALLHANDS_WORLD_SIZE is not set"),
    "no back-end": ({"ALLHANDS_RANK": "0", "ALLHANDS_WORLD_SIZE": "2"}, "ALLHANDS_BACKEND is 'none'"),
    "unknown back-end": (_own(ALLHANDS_BACKEND="gloo"), "ALLHANDS_BACKEND is 'gloo'"),
    "own against MLX": (_own(MLX_RANK="0"), "ALLHANDS_RANK=1 but MLX_RANK=0"),
    "more here than in all": (_own(ALLHANDS_LOCAL_SIZE="3"), "3 processes here, 2 in all"),
    "MLX_RANK alone": ({"MLX_RANK": "0"}, "none of MLX_HOSTFILE, MLX_IBV_DEVICES, NCCL_HOST_IP"),
    "ring and nccl": (_NCCL | {"MLX_HOSTFILE": "h.json"}, "MLX_HOSTFILE and NCCL_HOST_IP"),
    "no such hostfile": ({"MLX_RANK": "0", "MLX_HOSTFILE": "absent.json"}, "MLX_HOSTFILE cannot be read"),
    "hostfile without rank": ({"MLX_HOSTFILE": __file__}, "MLX_RANK is not set"),
    "half of Open MPI's": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
    "MPICH": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MLX needs Open MPI"),
    "PMIx without a size": ({"PMIX_RANK": "0"}, "the size of the world is not"),
    "torchrun on two hosts": (_torchrun(1, 4), "several hosts"),
    "torchrun without a port": (_torchrun() | {"MASTER_PORT": ""}, "MASTER_PORT is not set"),
    "Slurm and PMIx": (_slurm(PMIX_RANK="2"), "SLURM_PROCID=4 but PMIX_RANK=2"),
    "Slurm, cyclic": (_slurm(1, SLURM_LOCALID="0"), "not in blocks"),
    "Slurm, other sum": (_slurm(SLURM_STEP_TASKS_PER_NODE="2(x3)"), "5 tasks"),
    "Slurm, rank too large": (_slurm(5), "rank 5 of a world of 5"),
    "Slurm, odd nodes": (_slurm(SLURM_STEP_NODELIST="n[a-b]"), "not a list of nodes"),
}


@pytest.mark.parametrize(("environ", "piece"), _WRONG.values(), ids=_WRONG.keys())
def test_contradictions_are_refused(environ: dict[str, str], piece: str) -> None:
    with pytest.raises(DistributedError) as caught:
        recognise(environ)
    assert piece in caught.value.message
    assert caught.value.hint


def test_the_ring_size_and_local_rank_come_from_the_hostfile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.1:5001"]]))
    found = recognise({"MLX_RANK": "2", "MLX_HOSTFILE": str(hostfile)})
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 3, 1, 2)
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


def test_torchrun_on_one_host_becomes_a_ring(tmp_path: Path) -> None:
    launches = [recognise(_torchrun(rank, 2, rank, 2)) for rank in range(2)]
    assert launches[0].hosts == launches[1].hosts == ("127.0.0.1:29501", "127.0.0.1:29502")
    variables = rendezvous(launches[1], tmp_path)
    assert variables["MLX_RANK"] == "1"
    assert json.loads(Path(variables["MLX_HOSTFILE"]).read_text()) == [
        ["127.0.0.1:29501"],
        ["127.0.0.1:29502"],
    ]


def test_ports_stay_below_65536() -> None:
    found = recognise(_torchrun() | {"MASTER_PORT": "65535"})
    assert found.hosts == ("127.0.0.1:65534", "127.0.0.1:65533")


def test_torchrun_with_cuda_becomes_nccl(tmp_path: Path) -> None:
    found = recognise(_torchrun(3, 4, 1, 2), has_cuda=True)
    assert found.backend == "nccl"
    assert rendezvous(found, tmp_path) == {
        "MLX_RANK": "3",
        "MLX_WORLD_SIZE": "4",
        "NCCL_HOST_IP": "head",
        "NCCL_PORT": "29501",
        "CUDA_VISIBLE_DEVICES": "1",
    }


@pytest.mark.parametrize(("visible", "expected"), [("5,7", "7"), ("6", None)])
def test_a_rank_takes_its_gpu_of_the_visible_ones(visible: str, expected: str | None) -> None:
    found = recognise(_torchrun() | {"CUDA_VISIBLE_DEVICES": visible}, has_cuda=True)
    assert found.exports.get("CUDA_VISIBLE_DEVICES") == expected


def test_slurm_hosts_are_resolved_to_addresses(tmp_path: Path) -> None:
    found = recognise(_slurm())
    variables = rendezvous(found, tmp_path, {"n08": "10.0.0.8", "n09": "10.0.0.9", "m1": "10.0.1.1"}.__getitem__)
    (addresses,) = zip(*json.loads(Path(variables["MLX_HOSTFILE"]).read_text()), strict=True)
    hosts, ports = zip(*(address.split(":") for address in addresses), strict=True)
    assert hosts == ("10.0.0.8", "10.0.0.8", "10.0.0.9", "10.0.0.9", "10.0.1.1")
    assert len(set(ports)) == 5


def test_an_unknown_host_is_named(tmp_path: Path) -> None:
    def unknown(name: str) -> str:
        raise OSError("Name or service not known")

    with pytest.raises(DistributedError, match="'n08' has no address"):
        rendezvous(recognise(_slurm()), tmp_path, unknown)


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
        Launch("single", 0, 1, 1, 1, "none", "by hand")
