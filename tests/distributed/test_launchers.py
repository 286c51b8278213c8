"""``allhands train`` as a rank of every starter that can be had here: it computes what one process
does.

The starters are real where they exist (Open MPI, MPICH, mlx.launch); what platforms set in their
containers is set by hand, on computers with the names that the platform would have given them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from namespaces import Cluster, namespaces
from ring_ranks import allhands_command
from runs import read_run
from tiny import run_allhands, write_chat_data, write_model

from allhands.cluster.mpi import find_mpi
from allhands.cluster.processes import reserve_ports
from allhands.runtime.blas import cache_dir

ITERS = 3
MPICH = "mpich==5.0.2"  # MLX cannot use it: only its mpiexec is of interest
_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
# Whoever runs the tests may be in a job of such a launcher.
_STRANGE = (
    "SLURM_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "MLX_",
    "SM_",
    "AIP_",
    "PET_",
    "TORCHELASTIC_",
    "KUBERNETES_",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``model`` and ``data``, in which commands are typed."""
    root = tmp_path_factory.mktemp("launchers")
    write_model(root / "model", layers=8)
    write_chat_data(root / "data", train=12, valid=3, test=3, longest=30)
    return root


def train(place: Path, out: str) -> list[str]:
    """The options of ``allhands`` for the training that is to be the same everywhere."""
    paths = f"--model {place / 'model'} --data {place / 'data'} --adapter-path {place / out}"
    text = (
        f"train --train {paths} --iters {ITERS} --batch-size 4 --steps-per-report 1 --val-batches 1"
    )
    return text.split()


@pytest.fixture(scope="module")
def expected(place: Path) -> list[float]:
    """The losses of one process."""
    done = run_allhands(*train(place, "one"))
    assert done.returncode == 0, done.stderr
    losses = read_run(place / "one").losses
    assert len(losses) == ITERS
    return losses


def environment(**more: str) -> dict[str, str]:
    """This process's, with this Python's programs first, as after ``source .venv/bin/activate``."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith(_STRANGE)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return usual | {"PATH": path, "OPENBLAS_NUM_THREADS": "1"} | root | more


def start(
    command: Sequence[str], place: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env=environment(**(env or {})),
        start_new_session=True,
    )


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = 60.0) -> list[str]:
    """Wait for all, which must succeed; what each has printed."""
    try:
        texts = ["\n".join(process.communicate(timeout=timeout)) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.communicate()
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text
        assert "Traceback" not in text
    return texts


def assert_computed(place: Path, out: str, expected: Sequence[float], texts: Sequence[str]) -> None:
    """The losses of one process, told by rank 0 alone."""
    np.testing.assert_allclose(read_run(place / out).losses, expected, rtol=2e-5)
    assert sum(text.count(f"step {ITERS}/{ITERS} ") for text in texts) == 1, texts


# --- MPIs -----------------------------------------------------------------------------------------


@pytest.mark.slow
@_needs_mpi
def test_mpirun_with_a_hostfile_as_it_stands(place: Path, expected: list[float]) -> None:
    """Without ``--train``: that it is to train is what it was started for."""
    (place / "hostfile").write_text("localhost slots=2\n")
    options = "--data data --batch-size 4 --num-layers 8 --iters 3 --model model --adapter-path as-it-stands"
    line = f"mpirun --hostfile hostfile -np 2 --mca btl_tcp_if_include lo allhands train {options}"
    texts = finish([start([*line.split(), "--steps-per-report", "1", "--val-batches", "1"], place)])
    assert_computed(place, "as-it-stands", expected, texts)


@_needs_mpi
def test_mpirun_tells_each_rank_its_place(place: Path) -> None:
    line = "mpirun -np 2 --map-by :OVERSUBSCRIBE --output tag allhands env --json"
    (text,) = finish([start(line.split(), place)])
    assert (
        text.count('"launcher": "openmpi"')
        == text.count('"backend": "mpi"')
        == text.count('"size": 2')
        == 2
    )
    assert [text.count(f'"rank": {rank}') for rank in (0, 1)] == [1, 1]


@pytest.fixture(scope="session")
def mpiexec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MPICH's, of its wheel on PyPI, which is unpacked where it is in nobody's way and kept."""
    kept = cache_dir() / "tests" / MPICH
    if not kept.is_dir():
        fresh = tmp_path_factory.mktemp("mpich") / "unpacked"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--target",
        ]
        done = subprocess.run([*pip, fresh, MPICH], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"{MPICH} cannot be installed: {done.stderr[-200:]}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another test process was faster
            shutil.move(fresh, kept)
    return kept / "bin" / "mpiexec"


@pytest.mark.long
def test_mpich_on_one_computer_trains_over_the_ring(
    place: Path, expected: list[float], mpiexec: Path
) -> None:
    texts = finish([start([str(mpiexec), "-n", "2", "allhands", *train(place, "mpich")], place)])
    assert_computed(place, "mpich", expected, texts)


# --- mlx.launch -----------------------------------------------------------------------------------


def free_port() -> str:
    held, ports = reserve_ports(1, shareable=False)
    held[0].close()
    return str(ports[0])


MLX_LAUNCH: dict[str, list[str]] = {
    "--hostfile": ["--backend", "ring", "--hostfile", "hosts.json"],
    "--backend mpi": ["--backend", "mpi", "-n", "2", "--mpi-arg", "--map-by :OVERSUBSCRIBE"],
}


# With ``-n`` it is in tests/parity/test_data_parallel.py.
@pytest.mark.long
@pytest.mark.parametrize("how", ["--hostfile", pytest.param("--backend mpi", marks=_needs_mpi)])
def test_mlx_launch(place: Path, expected: list[float], how: str) -> None:
    (place / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    out = f"mlx{how.strip('-').replace(' ', '-')}"
    ports = [] if "mpi" in how else ["--starting-port", free_port()]
    program = shutil.which("allhands", path=environment()["PATH"])
    assert program
    texts = finish(
        [start(["mlx.launch", *MLX_LAUNCH[how], *ports, "--", program, *train(place, out)], place)]
    )
    assert_computed(place, out, expected, texts)


# --- variables of torch ---------------------------------------------------------------------------


@pytest.mark.slow
def test_variables_of_torchrun_on_one_computer(place: Path, expected: list[float]) -> None:
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    common |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    texts = finish(
        [start(allhands_command(*train(place, "torchrun")), place, common | rank) for rank in ranks]
    )
    assert_computed(place, "torchrun", expected, texts)


# --- one process a computer: clouds and Kubernetes ------------------------------------------------

OPT_ML = Path("/opt/ml")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three computers, with the names that platforms give to theirs, and an ``/opt/ml`` each."""
    was_there = OPT_ML.exists()
    try:
        with namespaces(3, tmp_path_factory.mktemp("cloud"), [OPT_ML]) as cluster:
            yield cluster
    finally:
        if not was_there and OPT_ML.exists():
            OPT_ML.rmdir()


def on_each(
    cluster: Cluster, place: Path, out: str, variables: Sequence[Mapping[str, str]]
) -> list[subprocess.Popen[str]]:
    """One process a computer, each with variables of its own, and none of a launcher's."""
    command = allhands_command(*train(place, out))
    return [
        start(cluster.command(name, command), place, dict(own))
        for name, own in zip(cluster.names, variables, strict=True)
    ]


@pytest.mark.long
def test_indexed_job_whose_names_come_late(
    cluster: Cluster, place: Path, expected: list[float]
) -> None:
    """Pods start before the headless service knows them."""
    common = {
        "ALLHANDS_NUM_NODES": "3",
        "ALLHANDS_PEERS_SERVICE": "peers",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }
    pods = [common | {"JOB_COMPLETION_INDEX": str(i), "HOSTNAME": f"pirate-{i}"} for i in range(3)]
    processes = on_each(cluster, place, "indexed-job", pods)
    time.sleep(6.0)
    assert [process.poll() for process in processes] == [None] * 3
    assert not (place / "indexed-job" / "metrics.jsonl").exists()
    for i, name in enumerate(cluster.names):
        cluster.call(name, f"pirate-{i}.peers")
    assert_computed(place, "indexed-job", expected, finish(processes))


@pytest.mark.long
def test_vertex_custom_job(cluster: Cluster, place: Path, expected: list[float]) -> None:
    names = [
        "cmle-training-workerpool0-ab-0",
        "cmle-training-workerpool1-ab-0",
        "cmle-training-workerpool1-ab-1",
    ]
    for node, name in zip(cluster.names, names, strict=True):
        cluster.call(node, name)
    pools = {
        "workerpool0": [f"{names[0]}:2222"],
        "workerpool1": [f"{name}:2222" for name in names[1:]],
    }
    tasks = [("workerpool0", 0), ("workerpool1", 0), ("workerpool1", 1)]
    variables = [
        {
            "CLUSTER_SPEC": json.dumps(
                {
                    "cluster": pools,
                    "environment": "cloud",
                    "task": {"type": kind, "index": index},
                    "job": "{}",
                }
            ),
            "CLOUD_ML_JOB_ID": "4567",
        }
        for kind, index in tasks
    ]
    assert_computed(place, "vertex", expected, finish(on_each(cluster, place, "vertex", variables)))


@pytest.mark.long
def test_sagemaker_training_job(cluster: Cluster, place: Path, expected: list[float]) -> None:
    """A bare container: only the file that the platform itself writes. The first host is not the
    first computer.
    """
    hosts = ["algo-3", "algo-1", "algo-2"]
    resources = OPT_ML / "input/config/resourceconfig.json"
    for node, host in zip(cluster.names, hosts, strict=True):
        cluster.call(node, host)
        content = {"current_host": host, "hosts": hosts, "network_interface_name": "eth0"}
        script = (
            f"mkdir -p {resources.parent} && echo {shlex.quote(json.dumps(content))} > {resources}"
        )
        cluster.run(node, ["sh", "-ec", script])
    try:
        variables = [{"TRAINING_JOB_NAME": "pirate-1"}] * 3
        texts = finish(on_each(cluster, place, "sagemaker", variables))
    finally:
        for node in cluster.names:
            cluster.run(node, ["rm", "-r", str(OPT_ML / "input")])
    assert_computed(place, "sagemaker", expected, texts)
    assert [f"step {ITERS}/{ITERS} " in text for text in texts] == [False, True, False]


@pytest.mark.long
def test_kubeflow_trainer_without_torchrun(
    cluster: Cluster, place: Path, expected: list[float]
) -> None:
    """Its variables are torchrun's flags."""
    common = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "job-node-0-0.job"}
    common |= {"PET_MASTER_PORT": "29400", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    cluster.call("node0", common["PET_MASTER_ADDR"])
    variables = [
        common | {"PET_NODE_RANK": str(i), "JOB_COMPLETION_INDEX": str(i)} for i in range(3)
    ]
    assert_computed(
        place, "trainer", expected, finish(on_each(cluster, place, "trainer", variables))
    )


@pytest.mark.long
def test_variables_of_torch_on_several_computers(
    cluster: Cluster, place: Path, expected: list[float]
) -> None:
    """As PyTorchJob sets them, where the first pod knows itself by its name like the others."""
    cluster.call("node0", "job-master-0")
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    texts = finish(on_each(cluster, place, "torch", [common | {"RANK": str(i)} for i in range(3)]))
    assert_computed(place, "torch", expected, texts)


@pytest.mark.long
def test_mpich_on_several_computers_needs_an_address(
    cluster: Cluster, place: Path, expected: list[float], mpiexec: Path
) -> None:
    # Its launcher option is one word, of which the program must be a file.
    ssh = cluster.directory / "ssh-to-them"
    ssh.write_text(f'#!/bin/sh\nexec {cluster.ssh_command} "$@"\n')
    ssh.chmod(0o755)
    hosts = [
        "-launcher",
        "ssh",
        "-launcher-exec",
        str(ssh),
        "-hosts",
        "node0,node1",
        "-n",
        "2",
        "-ppn",
        "1",
    ]
    command = cluster.command("node0", [str(mpiexec), *hosts])
    refused = start([*command, *allhands_command(*train(place, "mpich-hosts"))], place)
    text = "\n".join(refused.communicate(timeout=60))
    assert refused.returncode == 7, text
    assert "add -genv MASTER_ADDR NAME of rank 0's computer" in text
    command += ["-genv", "MASTER_ADDR", "node0", *allhands_command(*train(place, "mpich-hosts"))]
    assert_computed(place, "mpich-hosts", expected, finish([start(command, place)]))
