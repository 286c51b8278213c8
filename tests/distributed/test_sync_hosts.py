"""``allhands cluster sync`` to computers that share nothing but a network: slow, cut, firewalled,
full or killed.
"""

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
from namespaces import Cluster, namespaces, needs_rsync

from allhands.cluster.hosts import Host, read_hostfile
from allhands.cluster.probes.files import STAGING
from allhands.cluster.sync.plan import make_plan
from allhands.cluster.sync.run import synchronise
from allhands.cluster.sync.state import SyncOptions, SyncState

pytestmark = needs_rsync

MB = 1 << 20
BIG = 40 * MB
SMALL = {"data/train.jsonl": b"{}\n" * 1000, "data/de ep/er's/more.jsonl": b"x", "data/empty": b""}
COMMAND = "import sys; from allhands.cli.main import main; main(['cluster', 'sync', *sys.argv[1:]])"


class Site:
    """Three computers, and the files here that are to be there."""

    def __init__(self, cluster: Cluster, shown: Path) -> None:
        self.cluster = cluster
        self.shown = shown  # every computer sees its own files here; this one has the source
        self.content = os.urandom(BIG + 99)
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
        return {
            str(path.relative_to(top)): path.read_bytes()
            for path in top.rglob("*")
            if path.is_file()
        }

    def bring(
        self, when: Callable[[SyncState], None] = lambda state: None, **options: Any
    ) -> SyncState:
        words = [str(self.shown / "model"), str(self.shown / "data")]
        return synchronise(
            make_plan(words), read_hostfile(self.hostfile), SyncOptions(**options), when
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    shown = tmp_path / "own"
    with namespaces(3, tmp_path, [shown]) as cluster:
        found = Site(cluster, shown)
        yield found
        for name in cluster.names:
            cluster.heal(name)
            cluster.wait_for_none(name, 5.0)


def once(number: int, what: Callable[[], object]) -> Callable[[SyncState], None]:
    """Do it when that host has some of what it needs, and not all."""
    done: list[bool] = []

    def when(state: SyncState) -> None:
        host = state.hosts[number]
        if not done and 8 * MB < host.received < host.needed - 12 * MB:
            done.append(True)
            what()

    return when


@pytest.mark.slow
def test_in_a_chain_everything_is_sent_once_over_each_cable(site: Site) -> None:
    state = site.bring(topology="chain")
    assert state.errors == []
    assert [host.parent for host in state.hosts] == ["this computer", "node0", "node1"]
    assert (state.sent, [host.sent for host in state.hosts]) == (
        site.total,
        [site.total, site.total, 0],
    )
    assert all(site.got(name) == site.files for name in site.cluster.names)
    for name in site.cluster.names:
        site.cluster.wait_for_none(name, 2.0)
    again = site.bring()
    assert (again.sent, [host.received for host in again.hosts]) == (0, [0, 0, 0])


@pytest.mark.slow
def test_in_a_tree_those_who_have_it_help(site: Site) -> None:
    state = site.bring()
    assert state.errors == []
    assert state.sent < 3 * site.total
    assert state.sent + sum(host.sent for host in state.hosts) == 3 * site.total
    assert all(site.got(name) == site.files for name in site.cluster.names)


@pytest.mark.slow
def test_killed_on_the_way_it_goes_on_where_it_was(site: Site) -> None:
    for name in site.cluster.names:
        site.cluster.slow(name, "100mbit")
    argv = [
        sys.executable,
        "-c",
        COMMAND,
        "--hostfile",
        str(site.hostfile),
        str(site.shown / "model"),
        "--star",
    ]
    log = site.cluster.directory / "log"
    with log.open("w") as output:
        job = subprocess.Popen(argv, stdout=output, stderr=output)
    deadline = time.monotonic() + 60
    while min(_come(site, name) for name in site.cluster.names) < 4 * MB:
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    job.wait()
    for name in site.cluster.names:
        site.cluster.wait_for_none(name, 5.0)
        assert "model/weights" not in site.got(name)
    kept = {name: _come(site, name) for name in site.cluster.names}
    # A part is damaged while nobody looks.
    partial = max(
        (site.there("node1") / "model" / STAGING).iterdir(), key=lambda path: path.stat().st_size
    )
    with partial.open("r+b") as stream:
        stream.seek(10)
        stream.write(b"damage")
    for name in site.cluster.names:
        site.cluster.heal(name)
    state = site.bring()
    assert state.errors == []
    for host in state.hosts:
        assert site.total - kept[host.name] <= host.received < site.total - kept[host.name] + MB
        assert site.got(host.name) == site.files


def _come(site: Site, name: str) -> int:
    """Bytes of the large file that have come."""
    staging = site.there(name) / "model" / STAGING
    return (
        max((path.stat().st_size for path in staging.glob("*")), default=0)
        if staging.is_dir()
        else 0
    )


@pytest.mark.long
def test_a_cable_that_is_pulled_costs_that_host_only(site: Site) -> None:
    for name in site.cluster.names:
        site.cluster.slow(name, "100mbit")
    state = site.bring(once(1, lambda: site.cluster.cut("node1")), topology="chain")
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert "host node1 has been lost" in str(state.errors[0])
    assert state.exit_code == 7
    assert state.hosts[2].parent == "node0"
    assert state.hosts[2].received == site.total
    assert site.got("node2") == site.files
    # What runs on the lost host ends by itself, though nobody can tell it.
    site.cluster.heal("node1")
    site.cluster.wait_for_none("node1", 150.0)
    again = site.bring()
    assert again.errors == []
    assert 0 < again.hosts[1].received < site.total - 4 * MB
    assert site.got("node1") == site.files


@pytest.mark.long
def test_a_disk_that_fills_up_is_told_and_gone_on_with(site: Site) -> None:
    for name in site.cluster.names:
        site.cluster.slow(name, "100mbit")
    room = 2 * site.total  # for what has come, and rsync's copy of it
    site.cluster.run(
        "node1", ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(site.shown)]
    )
    hog = str(site.shown / "hog")
    fill = ["sh", "-c", f"cat /dev/zero > '{hog}' || true"]
    state = site.bring(once(1, lambda: site.cluster.run("node1", fill)), topology="chain")
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
    assert 0 < again.hosts[1].received < site.total - 4 * MB
    there = site.cluster.run("node1", ["sha256sum", str(site.shown / "model/weights")])
    here = subprocess.run(
        ["sha256sum", str(site.shown / "model/weights")], capture_output=True, text=True, check=True
    )
    assert there.stdout == here.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["DROP", "REJECT"])
def test_a_firewall_between_the_hosts_is_no_trouble(site: Site, rule: str) -> None:
    closed = [
        "iptables",
        "-A",
        "INPUT",
        "-p",
        "tcp",
        "!",
        "-s",
        site.cluster.address,
        "--syn",
        "-j",
        rule,
    ]
    site.cluster.run("node1", closed)
    state = site.bring(topology="chain")
    assert state.errors == []
    assert [host.parent for host in state.hosts] == ["this computer", "this computer", "node1"]
    assert any(note.startswith("node0 cannot send to node1") for note in state.notes)
    assert all(site.got(name) == site.files for name in site.cluster.names)


def test_hosts_find_each_other_by_address_where_a_name_is_known_here_alone(site: Site) -> None:
    common = (site.cluster.directory / "ssh_config").read_text()
    alias = f"Host two\n  HostName {site.cluster.nodes['node1'].address}\n"
    (site.shown / "config").write_text(alias + common)
    for name in site.cluster.names:
        (site.there(name) / "config").write_text(common)  # of that computer
    hosts = [Host(name, name, python=sys.executable) for name in ("node0", "two")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLHANDS_SSH", f"ssh -F {site.shown / 'config'}")
        state = synchronise(
            make_plan([str(site.shown / "model")]), hosts, SyncOptions(topology="chain")
        )
    assert (state.errors, state.notes) == ([], [])
    assert state.hosts[1].parent == "node0"
    assert site.got("node1")["model/weights"] == site.content


def test_a_shell_that_talks_and_a_host_without_a_key(site: Site) -> None:
    login = site.cluster.nodes["node0"].login
    login.write_text('echo "Welcome to node0"; echo "{}"\n' + login.read_text())
    site.cluster.nodes["node1"].login.write_text("exit 1\n")
    state = site.bring()
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert "host node1 cannot take part" in str(state.errors[0])
    assert (site.got("node0"), site.got("node1"), site.got("node2")) == (site.files, {}, site.files)


@pytest.mark.slow
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
