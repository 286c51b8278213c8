"""``allhands monitor`` of a run on two computers that share nothing but a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Cluster, namespaces
from tiny import run_allhands

from allhands.errors import DataError
from allhands.observe.monitor import Board, Sample, read_samples

pytestmark = pytest.mark.long

ITERS = 60


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path) -> Path:
    """The directory in which a person works; the other computer has another one at the same path."""
    directory = tmp_path_factory.mktemp("monitor") / "work"
    for name, source in (("model", tiny_model), ("data", tiny_data)):
        shutil.copytree(source, directory / name)
    return directory


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[Cluster]:
    directory = work.parent / "cluster"
    directory.mkdir()
    with namespaces(2, directory, [work]) as made:
        for name in ("model", "data"):
            shutil.copytree(work / name, directory / "files-node1-0" / name)
        yield made


@pytest.fixture(scope="module")
def out(work: Path, cluster: Cluster) -> Path:
    """What a run of one rank here and one on the other computer has left here."""
    hosts = [
        {"ssh": "localhost", "ips": [cluster.address], "slots": 1},
        *json.loads(cluster.hostfile(work / "one.json", names=["node1"]).read_text()),
    ]
    (work / "hosts.json").write_text(json.dumps(hosts))
    words = [
        "--model",
        "model",
        "--data",
        "data",
        "--batch-size",
        "4",
        "--iters",
        str(ITERS),
        "--adapter-path",
        "out",
    ]
    env = {"ALLHANDS_MONITOR_EVERY_S": "0.1"}
    done = run_allhands(
        "train", "--train", *words, "--hostfile", "hosts.json", cwd=work, env=env, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return work / "out"


def names(samples: list[Sample]) -> list[str]:
    return [row.last.name for row in Board(samples).rows()]


def test_the_first_computer_knows_the_processes_of_all(out: Path) -> None:
    samples = read_samples(out)
    agents = sorted([f"agent on {samples[0].host}", "agent on node1"])
    assert names(samples) == ["orchestrator", *agents, "rank 0", "rank 1"]
    last = {sample.name: sample for sample in samples}
    assert last["rank 1"].host == "node1"
    assert last["rank 1"].step == last["rank 0"].step == ITERS
    assert last["rank 1"].ended
    assert last["agent on node1"].ended
    # The gradients of every step go over the cable, and not over the loopback.
    assert sum(sent for nic, (sent, _) in last["rank 1"].net.items() if nic != "lo") > 10_000
    assert (out / "memory.png").stat().st_size > 10_000


def test_another_computer_is_asked_over_ssh(out: Path, work: Path, cluster: Cluster) -> None:
    elsewhere = work.parent / "elsewhere"
    elsewhere.mkdir()
    asked = ["--hostfile", str(work / "one.json")]
    there = run_allhands("monitor", out, *asked, "--once", "--json", cwd=elsewhere)
    assert there.returncode == 0, there.stderr
    lines = [json.loads(line) for line in there.stdout.splitlines()]
    assert {(line["role"], line.get("rank")) for line in lines} >= {("agent", None), ("rank", 1)}
    # Followed until the end, which has been; what both computers have told is there once.
    both = run_allhands("monitor", "out", *asked, "--json", cwd=work)
    assert both.returncode == 0, both.stderr
    found = [
        (line["host"], line["pid"], line["time"])
        for line in map(json.loads, both.stdout.splitlines())
    ]
    assert len(found) == len(set(found)) == len(read_samples(out))
    table = run_allhands("monitor", "out", "--hosts", "node1", cwd=work)
    assert table.returncode == 0, table.stderr
    assert "agent on node1" in table.stdout


def test_a_computer_that_cannot_be_asked_is_named(out: Path, work: Path, cluster: Cluster) -> None:
    done = run_allhands("monitor", "nothing", "--hosts", "node1", cwd=work)
    assert done.returncode == DataError.exit_code
    assert "no process of a run has left samples" in done.stderr
    cluster.cut("node1")
    try:
        done = run_allhands("monitor", "nothing", "--hosts", "node1", cwd=work)
    finally:
        cluster.heal("node1")
    assert done.returncode == DataError.exit_code
    assert "node1: ssh" in done.stderr
    assert done.stderr.count("error:") == 1
