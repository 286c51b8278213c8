"""``allhands train --hostfile`` where a firewall is between the computers: told at once, and only
where it is so.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty import Bench, Trial, files_left
from hosts import Hosts, hosts_of

from allhands.observe.metrics import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

NEW = "-p tcp ! --dport 22 -m conntrack --ctstate NEW"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("ports"))


@pytest.fixture(scope="module")
def hosts(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if shutil.which("iptables", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("no iptables here: scripts/install_test_tools.sh")
    with hosts_of(3, bench, tmp_path_factory.mktemp("cluster")) as hosts:
        yield hosts


@pytest.fixture
def trial(bench: Bench, hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with bench.trial(request.node.name[:30].replace("[", "-")) as trial:
        yield trial
    for name, node in hosts.cluster.nodes.items():
        hosts.on(name, "iptables -F")
        hosts.cluster.wait_for_none(name, 5.0)
        assert files_left(node.temporary) == []


def address(hosts: Hosts, name: str) -> str:
    return hosts.cluster.nodes[name].address


# Each time the way from node0 to node1, or back, is the one that is blocked.
RULES: dict[str, Callable[[Hosts], tuple[str, str]]] = {
    "dropped on arrival": lambda hosts: (
        "node1",
        f"INPUT {NEW} -s {address(hosts, 'node0')} -j DROP",
    ),
    "reset": lambda hosts: ("node1", f"INPUT {NEW} -j REJECT --reject-with tcp-reset"),
    "the way back": lambda hosts: ("node0", f"INPUT {NEW} -s {address(hosts, 'node1')} -j DROP"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_blocked_port_is_told_at_once_and_once(
    hosts: Hosts, trial: Trial, tmp_path: Path, rule: str
) -> None:
    name, words = RULES[rule](hosts)
    hosts.on(name, f"iptables -A {words}")
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"])
    began = time.monotonic()
    job = hosts.start(trial, hostfile)
    assert job.finish() == 7, (job.out, job.err)
    # Of which most is what ranks take to start, on a busy computer.
    assert time.monotonic() - began < 40
    assert len(trial.events("launched")) == 1
    (failed,) = trial.events("failed")
    source, target = ("node1", "node0") if rule == "the way back" else ("node0", "node1")
    assert failed["host"] == target
    assert f"on {target} listens" in job.err
    assert f"connections from rank {source[-1]} on {source} to {address(hosts, target)}:" in job.err
    assert f"allhands cluster check --hostfile {hostfile} " in job.err
    assert ("timed out" in job.err) == ("dropped" in rule or rule == "the way back")
    assert "port was taken" not in job.err


def test_the_last_computer_cannot_reach_the_first(
    hosts: Hosts, trial: Trial, tmp_path: Path
) -> None:
    hosts.on("node0", f"iptables -A INPUT {NEW} -s {address(hosts, 'node2')} -j DROP")
    job = hosts.start(trial, hosts.cluster.hostfile(tmp_path / "hosts.json"))
    assert job.finish() == 7, (job.out, job.err)
    assert "rank 0 on node0 listens, but connections from rank 2 on node2" in job.err
    assert len(trial.events("launched")) == 1


def test_without_the_computer_that_is_cut_off_if_that_is_allowed(
    hosts: Hosts, trial: Trial, tmp_path: Path
) -> None:
    hosts.on("node2", f"iptables -A INPUT {NEW} -j DROP")
    job = hosts.start(trial, hosts.cluster.hostfile(tmp_path / "hosts.json"), "--min-ranks", "2")
    assert job.finish() == 0, (job.out, job.err)
    assert "node2 is left out" in job.err
    assert "rank 2 on node2 listens, but connections from rank 1 on node1" in job.err
    assert [event["num_ranks"] for event in trial.events("restarting")] == [2]


def test_a_rank_that_is_only_late_is_waited_for(hosts: Hosts, trial: Trial, tmp_path: Path) -> None:
    """Also where nobody is told that nobody listens yet, as Macs in stealth mode do."""
    late = "node1"
    hosts.on(late, "iptables -A OUTPUT -p tcp --tcp-flags RST RST -j DROP")
    hosts.on(late, "iptables -A OUTPUT -p icmp -j DROP")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('ALLHANDS_RANK') is not None: time.sleep(20)\n"
    )
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"])
    entries = json.loads(hostfile.read_text())
    for entry in entries:
        entry["envs"] = [f"PYTHONPATH={modules}"] if entry["ssh"] == late else []
    hostfile.write_text(json.dumps(entries))
    began = time.monotonic()
    job = hosts.start(trial, hostfile)
    assert job.finish() == 0, (job.out, job.err)
    assert time.monotonic() - began > 20
    assert len(trial.events("launched")) == 1
    assert read_metrics(hosts.out("node0", trial)).ended is not None
