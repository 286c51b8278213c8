"""``allhands cluster sync`` to computers that share nothing but a network: slow, cut, firewalled, full or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import Cluster, namespaces

from allhands.cluster.hosts import read_hostfile
from allhands.cluster.sync import SyncOptions, SyncState, make_plan, run, synchronise
from allhands.cluster.sync.blocks import BLOCK_BYTES

BLOCKS = 12
SMALL = {"data/train.jsonl": b"{}\n" * 1000, "data/deep/er/more.jsonl": b"x", "data/empty": b""}
COMMAND = "import typer; from allhands.cli.cluster_sync import sync; a = typer.Typer(); a.command()(sync); a()"


class Site:
    """Three computers, and the files here that are to be there."""

    def __init__(self, cluster: Cluster, shown: Path) -> None:
        self.cluster = cluster
        self.shown = shown  # every computer sees its own files here; this one has the source
        self.content = os.urandom((BLOCKS - 1) * BLOCK_BYTES + 99)
        self.files = {"model/weights": self.content, **SMALL}
        for name, content in self.files.items():
            (shown / name).parent.mkdir(parents=True, exist_ok=True)
            (shown / name).write_bytes(content)
        self.total = sum(map(len, self.files.values()))
        self.hostfile = cluster.hostfile(cluster.directory / "hosts.json")

    def there(self, name: str) -> Path:
        return self.cluster.directory / f"files-{name}-0"

    def got(self, name: str) -> dict[str, bytes]:
        top = self.there(name)
        return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}

    def bring(self, when: Callable[[SyncState], None] = lambda state: None, **options: Any) -> SyncState:
        words = [str(self.shown / "model"), str(self.shown / "data")]
        return synchronise(make_plan(words), read_hostfile(self.hostfile), SyncOptions(**options), when)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    shown = tmp_path / "own"
    with namespaces(3, tmp_path, [shown]) as cluster:
        found = Site(cluster, shown)
        yield found
        for name in cluster.names:
            cluster.heal(name)
            cluster.wait_for_none(name, 5.0)


def once(number: int, what: Callable[[], None]) -> Callable[[SyncState], None]:
    """Do it when that host has some of what it needs, and not all."""
    done: list[bool] = []

    def when(state: SyncState) -> None:
        host = state.hosts[number]
        if not done and 2 * BLOCK_BYTES < host.received < host.needed - 3 * BLOCK_BYTES:
            done.append(True)
            what()

    return when


def test_a_chain_sends_each_block_once_over_each_link(site: Site) -> None:
    state = site.bring()
    assert state.errors == []
    assert [host.parent for host in state.hosts] == ["this computer", "node0", "node1"]
    assert (state.sent, [host.sent for host in state.hosts]) == (site.total, [site.total, site.total, 0])
    assert all(site.got(name) == site.files for name in site.cluster.names)
    for name in site.cluster.names:
        site.cluster.wait_for_none(name, 2.0)
    again = site.bring()
    assert (again.sent, [host.received for host in again.hosts]) == (0, [0, 0, 0])


def test_killed_on_the_way_it_goes_on_without_sending_a_block_twice(site: Site) -> None:
    for name in site.cluster.names:
        site.cluster.slow(name, "100mbit")
    argv = [sys.executable, "-c", COMMAND, "--hostfile", str(site.hostfile), str(site.shown / "model"), "--json"]
    log = site.cluster.directory / "log"
    with log.open("w") as output:
        job = subprocess.Popen(argv, stdout=output, stderr=output)
    deadline = time.monotonic() + 60
    while _blocks(site, "node2") < 2:
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(site.cluster.processes(name) for name in site.cluster.names)
    job.send_signal(signal.SIGKILL)
    job.wait()
    for name in site.cluster.names:
        site.cluster.wait_for_none(name, 3.0)
    kept = [_blocks(site, name) for name in site.cluster.names]
    assert 0 < kept[2] < BLOCKS
    # One block is damaged while nobody looks.
    partial = next(site.there("node1").rglob(".allhands-*.part"))
    with partial.open("r+b") as stream:
        stream.seek(10)
        stream.write(b"damage")
    kept[1] -= 1
    for name in site.cluster.names:
        site.cluster.heal(name)
    state = site.bring()
    assert state.errors == []
    last = len(site.content) - (BLOCKS - 1) * BLOCK_BYTES
    small = sum(map(len, SMALL.values()))
    lacking = [(BLOCKS - 1 - number) * BLOCK_BYTES + last + small for number in kept]
    assert [host.received for host in state.hosts] == lacking
    assert all(site.got(name) == site.files for name in site.cluster.names)


def _blocks(site: Site, name: str) -> int:
    """How many blocks of the large file have come whole."""
    partial = next(site.there(name).rglob(".allhands-*.part"), None)
    if partial is None:
        return 0
    there = partial.read_bytes()
    places = range(0, (BLOCKS - 1) * BLOCK_BYTES, BLOCK_BYTES)
    return sum(there[place : place + BLOCK_BYTES] == site.content[place : place + BLOCK_BYTES] for place in places)


@pytest.mark.long
def test_a_cable_that_is_pulled_costs_that_host_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_LOST_S", 5.0)
    for name in site.cluster.names:
        site.cluster.slow(name, "100mbit")
    state = site.bring(once(2, lambda: site.cluster.cut("node1")))
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert "host node1 has been lost" in str(state.errors[0])
    assert state.exit_code == 7
    assert state.hosts[2].parent == "node0"
    assert state.hosts[2].received <= site.total + 3 * BLOCK_BYTES
    assert site.got("node2") == site.files
    # What runs on the lost host ends by itself, though nobody can tell it.
    site.cluster.heal("node1")
    site.cluster.wait_for_none("node1", 40.0)
    again = site.bring()
    assert again.errors == []
    assert 0 < again.hosts[1].received <= site.total - BLOCK_BYTES
    assert site.got("node1") == site.files


@pytest.mark.long
def test_a_disk_that_fills_up_is_told_and_gone_on_with(site: Site) -> None:
    for name in site.cluster.names:
        site.cluster.slow(name, "100mbit")
    room = site.total + 4 * BLOCK_BYTES
    site.cluster.run("node1", ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(site.shown)])
    hog = str(site.shown / "hog")
    fill = ["sh", "-c", f"cat /dev/zero > '{hog}' || true"]
    state = site.bring(once(1, lambda: site.cluster.run("node1", fill) and None))
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert state.exit_code == 5
    assert "node1:" in str(state.errors[0])
    assert "free some space" in str(state.errors[0])
    assert site.got("node2") == site.files
    # Still full: nothing is begun.
    refused = site.bring()
    assert (refused.exit_code, refused.hosts[1].received) == (5, 0)
    assert "GB are needed" in str(refused.errors[0])
    site.cluster.run("node1", ["rm", hog])
    again = site.bring()
    assert again.errors == []
    assert 0 < again.hosts[1].received <= site.total - BLOCK_BYTES
    there = site.cluster.run("node1", ["sha256sum", str(site.shown / "model/weights")])
    here = subprocess.run(["sha256sum", str(site.shown / "model/weights")], capture_output=True, text=True, check=True)
    assert there.stdout == here.stdout


@pytest.mark.parametrize("rule", ["DROP", "REJECT"])
def test_a_firewall_between_the_hosts_is_no_trouble(site: Site, rule: str) -> None:
    closed = ["iptables", "-A", "INPUT", "-p", "tcp", "!", "--dport", "22", "--syn", "-j", rule]
    site.cluster.run("node0", closed)
    state = site.bring()
    assert state.errors == []
    assert [host.parent for host in state.hosts] == ["this computer", "this computer", "node1"]
    assert all(site.got(name) == site.files for name in site.cluster.names)


def test_a_shell_that_talks_and_a_host_without_a_key(site: Site) -> None:
    login = site.cluster.nodes["node0"].login
    login.write_text('echo "Welcome to node0"; echo "{}"\n' + login.read_text())
    site.cluster.nodes["node1"].login.write_text("exit 1\n")
    state = site.bring()
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert "host node1 cannot take part" in str(state.errors[0])
    assert (site.got("node0"), site.got("node1"), site.got("node2")) == (site.files, {}, site.files)


def test_the_command_in_json(site: Site) -> None:
    argv = [
        sys.executable,
        "-c",
        COMMAND,
        "--hostfile",
        str(site.hostfile),
        "--data",
        str(site.shown / "data"),
        "--json",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    record = json.loads(done.stdout)
    assert (record["files"], record["bytes"], record["exit_code"]) == (3, 3001, 0)
    assert [host["bytes_received"] for host in record["hosts"]] == [3001] * 3
    assert all(site.got(name) == SMALL for name in site.cluster.names)
