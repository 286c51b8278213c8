"""What becomes of the hostfile where ``allhands cluster init`` cannot make every computer ready."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Cluster, namespaces
from tiny import run_allhands

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with namespaces(2, tmp_path_factory.mktemp("init")) as made:
        yield made


@pytest.fixture(autouse=True)
def healed(cluster: Cluster) -> Iterator[None]:
    yield
    for name in cluster.names:
        cluster.heal(name)


def init(place: Path, hosts: str, *more: str) -> subprocess.CompletedProcess[str]:
    return run_allhands("cluster", "init", "--hosts", hosts, *more, cwd=place, timeout=120)


def names(place: Path) -> list[str]:
    content = json.loads((place / "hosts.json").read_text())
    return [host["ssh"] for host in content["hosts"]]


def test_all_well_then_one_away_then_none(cluster: Cluster, tmp_path: Path) -> None:
    done = init(tmp_path, "node0,node1", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    whole = (tmp_path / "hosts.json").read_bytes()
    # An earlier file keeps a computer that is away, and says so.
    cluster.cut("node1")
    done = init(tmp_path, "node0,node1", "--yes")
    assert done.returncode == 7, done.stdout + done.stderr
    assert (tmp_path / "hosts.json").read_bytes() == whole
    assert "node1 stays in it, as before, and cannot be used now" in done.stdout
    # A new one does not have it.
    other = tmp_path / "other"
    other.mkdir()
    done = init(other, "node0,node1", "--yes")
    assert done.returncode == 7, done.stdout + done.stderr
    assert names(other) == ["node0"]
    assert "written without node1" in done.stdout
    # Nobody: nothing is written, and nothing that is there is touched.
    done = init(tmp_path, "node1", "--yes")
    assert done.returncode == 7, done.stdout + done.stderr
    assert (tmp_path / "hosts.json").read_bytes() == whole
    assert "hosts.json is not written" in done.stderr
    third = tmp_path / "third"
    third.mkdir()
    assert init(third, "node1", "--yes").returncode == 7
    assert list(third.iterdir()) == []


def test_nobody_to_ask(cluster: Cluster, tmp_path: Path) -> None:
    known = cluster.directory / "known_hosts"
    before = known.read_text()
    known.write_text(
        "".join(
            line for line in before.splitlines(True) if cluster.nodes["node1"].address not in line
        )
    )
    try:
        done = init(tmp_path, "node0,node1")
    finally:
        known.write_text(before)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nothing has been changed" in done.stderr
    assert list(tmp_path.iterdir()) == []
