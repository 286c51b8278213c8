"""The doctor on real computers, as far as one can have them here: namespaces with sshd, and what is
well with them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from computers import told
from namespaces import Cluster as Computers
from namespaces import namespaces

from allhands.cluster.doctor.run import ClusterCheckOptions, diagnose, well
from allhands.cluster.hosts import Host, read_hostfile

WELL = {
    *(
        "ssh",
        "answers",
        "python",
        "shell",
        "allhands",
        "versions",
        "clock",
        "same-computer",
        "names",
        "directory",
    ),
    *("model", "data", "address", "ports", "packets", "route", "mtu", "limits", "facts"),
}


@pytest.fixture(scope="module")
def computers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Computers]:
    with namespaces(2, tmp_path_factory.mktemp("computers")) as found:
        yield found


def examined(
    computers: Computers, tmp_path: Path, **options: object
) -> tuple[tuple[Host, ...], ClusterCheckOptions]:
    hosts = read_hostfile(computers.hostfile(tmp_path / "hosts.json"))
    return hosts, ClusterCheckOptions(**{"bench": False, **options})  # type: ignore[arg-type]


def test_two_healthy_computers(
    computers: Computers, tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    began = time.monotonic()
    cluster, findings = diagnose(
        *examined(computers, tmp_path, model=str(tiny_model), data=str(tiny_data))
    )
    assert time.monotonic() - began < 30
    assert [finding for finding in findings if finding.severity == "stop"] == []
    assert {check.name for check in well(cluster)} >= WELL, told(cluster)
    assert {(r.source, r.target, r.ip, r.own) for r in cluster.reached} == {
        ("node0", "node1", computers.nodes["node1"].address, computers.nodes["node0"].address),
        ("node1", "node0", computers.nodes["node0"].address, computers.nodes["node1"].address),
    }
    for host in cluster.hosts:
        assert host.facts is not None
        own = host.facts.interface("eth0")
        assert own is not None
        assert [address.ip for address in own.addresses if ":" not in address.ip] == list(
            host.addresses
        )
        assert own.kind == "ethernet"
        model = host.tree("model")
        assert model is not None
        assert all(file.sha256 for file in model.files)
        for name in ("node0", "node1"):
            route = host.facts.route_to(computers.nodes[name].address)
            assert (route is None) == (name == host.name)
            assert route is None or route.interface == "eth0"
    for name in computers.names:
        computers.wait_for_none(name, 5)


def test_this_computer_takes_part_by_its_address_on_the_way_to_the_others(
    computers: Computers, tmp_path: Path
) -> None:
    hosts, options = examined(computers, tmp_path)
    cluster, findings = diagnose([Host("localhost"), hosts[0]], options)
    assert cluster.hosts[0].addresses == (computers.address,)
    assert {(r.source, r.target, r.outcome) for r in cluster.reached} == {
        ("localhost", "node0", "ok"),
        ("node0", "localhost", "ok"),
    }
    assert [finding for finding in findings if finding.severity == "stop"] == []


def test_names_without_addresses_are_those_of_ssh(computers: Computers) -> None:
    cluster, findings = diagnose(
        [Host("node0", "node0"), Host("node1", "node1")], ClusterCheckOptions(bench=False)
    )
    assert [host.addresses for host in cluster.hosts] == [
        (node.address,) for node in computers.nodes.values()
    ]
    assert [finding for finding in findings if finding.severity == "stop"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "first"),
    [
        ("INPUT -p tcp ! --dport 22 -m conntrack --ctstate NEW -j DROP", "sudo iptables -I INPUT"),
        pytest.param(
            "INPUT -p tcp ! --dport 22 -j REJECT --reject-with tcp-reset",
            "sudo iptables -I INPUT",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "OUTPUT -p tcp ! --sport 22 -j DROP", "sudo iptables -I OUTPUT", marks=pytest.mark.long
        ),
    ],
)
def test_a_firewall_and_its_remedy(
    computers: Computers, tmp_path: Path, rule: str, first: str
) -> None:
    inside = ["ip", "netns", "exec", computers.nodes["node1"].namespace]
    hosts, options = examined(computers, tmp_path)
    done = subprocess.run(
        [*inside, "iptables", "-A", *rule.split()], check=False, capture_output=True
    )
    if done.returncode != 0:
        pytest.skip("no iptables here")
    try:
        _, findings = diagnose(hosts, options)
        (finding,) = [finding for finding in findings if finding.severity == "stop"]
        assert (finding.check, finding.hosts) == ("ports", ("node1", "node0"))
        prefix, command = "ssh -t node1 '", finding.remedy.removesuffix("'")
        assert command.startswith(prefix + first)
        # The remedy is taken at its word.
        remedy = command.removeprefix(prefix).replace("sudo ", "")
        subprocess.run([*inside, *remedy.split()], check=True, capture_output=True)
        assert [f for f in diagnose(hosts, options)[1] if f.severity == "stop"] == []
    finally:
        subprocess.run([*inside, "iptables", "-F"], check=True)


@pytest.mark.long
def test_the_network_is_measured(computers: Computers, tmp_path: Path, tiny_model: Path) -> None:
    hosts, options = examined(computers, tmp_path, bench=True, model=str(tiny_model))
    cluster, _ = diagnose(hosts, options)
    network = cluster.network
    assert network is not None
    assert network.failures == ()
    assert network.whole is not None
    assert network.whole.bus_bytes_per_s > 1e6
    assert network.whole.latency_s > 0
    # The model is not on this computer of the list, but where it is told from: its figures are
    # there all the same.
    assert set(network.seconds) == {"LoRA", "full"}
