"""A stranger on a third computer, while ranks on two others look for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from namespaces import Cluster, namespaces
from ring_ranks import allhands_command
from runs import read_run

from allhands.cluster.hosts import read_hostfile
from allhands.cluster.ranks import LaunchSpec, Place
from allhands.cluster.remote import start_remote

SLEEP = "import time; time.sleep(60)"
STRANGER = Path(__file__).parents[1] / "support" / "strangers.py"
PORT = 29517
KEY = "our secret"
_STRANGE = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "MLX_", "ALLHANDS_MEETING", "TORCHELASTIC_")
Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with namespaces(3, tmp_path_factory.mktemp("strangers")) as made:
        yield made


@pytest.fixture
def started(cluster: Cluster) -> Iterator[list[Process]]:
    """What a test has started; nothing of it is left on any computer."""
    processes: list[Process] = []
    yield processes
    for one in processes:
        one.kill()
        one.communicate()
    for name in cluster.names:
        for left in cluster.processes(name):
            left.kill()


def start(
    cluster: Cluster, name: str, argv: Sequence[str | Path], started: list[Process], **more: str
) -> Process:
    usual = {name: value for name, value in os.environ.items() if not name.startswith(_STRANGE)}
    process = subprocess.Popen(
        cluster.command(name, [str(word) for word in argv]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=usual | more,
    )
    started.append(process)
    return process


def start_rank(
    cluster: Cluster,
    rank: int,
    out: Path,
    started: list[Process],
    model: Path,
    data: Path,
    **more: str,
) -> Process:
    """A rank as torchrun starts it, on a computer of its own, that trains."""
    paths = ["--model", model, "--data", data, "--adapter-path", out]
    options = [
        "--iters",
        "2",
        "--batch-size",
        "4",
        "--steps-per-report",
        "1",
        "--val-batches",
        "0",
        "--num-layers",
        "2",
    ]
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_PORT": PORT,
    }
    env = {name: str(value) for name, value in numbers.items()}
    env |= {"MASTER_ADDR": "node0", "ALLHANDS_MEETING_KEY": KEY, "OPENBLAS_NUM_THREADS": "1"}
    env |= {"ALLHANDS_PEERS_TIMEOUT_S": "120"}
    argv = allhands_command("train", "--train", *paths, *options)
    return start(cluster, f"node{rank}", argv, started, **(env | more))


def stranger(cluster: Cluster, started: list[Process], way: str, *words: str) -> Process:
    """Of node2, with node0's address."""
    argv = [sys.executable, STRANGER, way, cluster.nodes["node0"].address, str(PORT), *words]
    return start(cluster, "node2", argv, started)


def finish(ranks: Sequence[Process]) -> None:
    for rank in ranks:
        text = rank.communicate(timeout=90)[0]
        assert rank.returncode == 0, text
        assert "Traceback" not in text


def listening(cluster: Cluster, name: str) -> list[str]:
    """Where that computer listens at the port of the meeting."""
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        lines = cluster.run(name, ["ss", "-ltnH"]).stdout.splitlines()
        if found := [line.split()[3] for line in lines if line.split()[3].endswith(f":{PORT}")]:
            return found
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on {name}")


@pytest.mark.slow
def test_a_stranger_on_a_third_computer_ends_nothing(
    cluster: Cluster, tmp_path: Path, started: list[Process], tiny_model: Path, tiny_data: Path
) -> None:
    """And rank 0 listens at the address by which the launcher has named it, only."""
    rank_0 = start_rank(cluster, 0, tmp_path / "plain", started, tiny_model, tiny_data)
    assert listening(cluster, "node0") == [
        f"{cluster.nodes['node0'].address}:{PORT}"
    ]  # for as long as rank 1 is away
    finish([rank_0, start_rank(cluster, 1, tmp_path / "plain", started, tiny_model, tiny_data)])
    rank_0 = start_rank(cluster, 0, tmp_path / "pestered", started, tiny_model, tiny_data)
    pest = stranger(cluster, started, "pester", "3000")
    assert pest.stdout is not None
    assert (
        int(pest.stdout.readline()) <= 65
    )  # nothing but a random number; it stays, with 300 idle callers and more
    assert rank_0.poll() is None
    finish([rank_0, start_rank(cluster, 1, tmp_path / "pestered", started, tiny_model, tiny_data)])
    losses = read_run(tmp_path / "plain").losses
    assert len(losses) == 2
    assert read_run(tmp_path / "pestered").losses == losses


@pytest.mark.slow
def test_a_recorded_hello_is_no_key_at_the_next_start(
    cluster: Cluster, tmp_path: Path, started: list[Process], tiny_model: Path, tiny_data: Path
) -> None:
    """Node2 passes on, and keeps, what rank 1 and rank 0 say; at the next start it comes first and
    says it again.
    """
    node2 = cluster.nodes["node2"].address
    recorder = stranger(cluster, started, "record", node2)
    time.sleep(0.5)
    ranks = [start_rank(cluster, 0, tmp_path / "first", started, tiny_model, tiny_data)]
    ranks.append(
        start_rank(
            cluster, 1, tmp_path / "first", started, tiny_model, tiny_data, MASTER_ADDR=node2
        )
    )
    finish(ranks)
    recorded = recorder.communicate("")[0]
    assert b"rank" in bytes.fromhex(json.loads(recorded)["there"])
    rank_0 = start_rank(cluster, 0, tmp_path / "again", started, tiny_model, tiny_data)
    listening(cluster, "node0")
    heard = json.loads(stranger(cluster, started, "replay").communicate(recorded, timeout=60)[0])
    assert max(heard) <= 65
    assert rank_0.poll() is None
    finish([rank_0, start_rank(cluster, 1, tmp_path / "again", started, tiny_model, tiny_data)])
    assert read_run(tmp_path / "again").losses == read_run(tmp_path / "first").losses


def test_secrets_of_a_start_are_new_and_no_one_elses(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ranks are in their environment, which is their user's; not on a command line, nor in
    a log.
    """
    monkeypatch.setenv("ALLHANDS_MEETING_KEY", "the person's own")
    hosts = read_hostfile(cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"]))
    places, found = tuple(Place(host.name, 1, host) for host in hosts), list[str]()
    for number in range(2):
        logs = tmp_path / f"logs-{number}"
        spec = LaunchSpec(
            [sys.executable, "-c", SLEEP], 2, "ring", logs, places=places, cores_per_rank=1
        )
        ranks = start_remote(spec, tmp_path / "run")
        try:
            deadline, there = time.monotonic() + 30.0, list[psutil.Process]()
            while len(there) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.1)
                everything = [
                    process for name in ("node0", "node1") for process in cluster.processes(name)
                ]
                there = [process for process in everything if words_of(process).endswith(SLEEP)]
            said = "".join(path.read_text() for path in logs.rglob("*") if path.is_file())
            said += "".join(
                words_of(process)
                for process in (*everything, *psutil.Process().children(recursive=True))
            )
            environments = [process.environ() for process in there]
        finally:
            ranks.kill()
        assert {environ["ALLHANDS_MEETING_KEY"] for environ in environments} == {"the person's own"}
        (key,) = {environ["ALLHANDS_RING_KEY"] for environ in environments}
        assert len(key) == 64
        assert SLEEP in said
        assert key not in said
        assert "the person's own" not in said
        found.append(key)
    assert found[0] != found[1]


def words_of(process: psutil.Process) -> str:
    """Its command line; nothing if it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
