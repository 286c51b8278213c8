"""Clusters broken on purpose, seen by ``allhands cluster check``: addresses, firewalls, routes and
links.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from broken import Broken, broken_cluster

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def computers(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path
) -> Iterator[Broken]:
    with broken_cluster(tmp_path_factory.mktemp("broken"), tiny_model, tiny_data) as found:
        yield found


@pytest.fixture
def sick(computers: Broken) -> Iterator[Broken]:
    yield computers
    computers.afresh()


def better(sick: Broken) -> list[str]:
    """The options that name the hostfile which a remedy has written."""
    return ["--hostfile", str(sick.work / "better-hosts.json")]


# --- addresses ------------------------------------------------------------------------------------


def test_an_address_of_nobody(sick: Broken) -> None:
    nobody = sick.cluster.network.replace("0/24", "99")
    sick.entries["node2"]["ips"] = [nobody]
    remedy, message = sick.finds(("stop", "address", ("node2",)))
    assert nobody in message
    assert f"it has {sick.cluster.nodes['node2'].address}" in message
    sick.type(remedy)
    sick.is_well(named=better(sick))


def test_an_address_of_another(sick: Broken) -> None:
    sick.entries["node2"]["ips"] = sick.entries["node0"]["ips"]
    remedy, _ = sick.finds(("stop", "address", ("node2",)))
    sick.type(remedy)
    sick.is_well(named=better(sick))


# --- firewalls ------------------------------------------------------------------------------------


def test_a_firewall_that_drops_what_comes_in(sick: Broken) -> None:
    sick.firewall("node1", "INPUT -p tcp ! --dport 22 -m conntrack --ctstate NEW -j DROP")
    remedy, message = sick.finds(("stop", "ports", ("node1", "node0", "node2")))
    assert "time out" in message
    assert remedy.startswith("ssh -t node1 'sudo iptables -I INPUT")
    sick.type(remedy)
    sick.is_well()


def test_a_firewall_that_rejects_one_computer(sick: Broken) -> None:
    source = sick.cluster.nodes["node0"].address
    sick.firewall(
        "node1",
        f"INPUT -p tcp -s {source} ! --dport 22 -m conntrack --ctstate NEW -j REJECT --reject-with tcp-reset",
    )
    remedy, message = sick.finds(("stop", "ports", ("node1", "node0")))
    assert "from node0 to it" in message
    assert "refused" in message
    sick.type(remedy)
    sick.is_well()


def test_a_firewall_that_rejects_with_a_packet_of_its_own(sick: Broken) -> None:
    sick.firewall("node2", "INPUT -p tcp ! --dport 22 -m conntrack --ctstate NEW -j REJECT")
    remedy, _ = sick.finds(("stop", "ports", ("node2", "node0", "node1")))
    sick.type(remedy)
    sick.is_well()


def test_a_firewall_that_keeps_answers_out(sick: Broken) -> None:
    source = sick.cluster.nodes["node2"].address
    sick.firewall("node0", f"INPUT -p tcp -s {source} ! --dport 22 -j DROP")
    remedy, _ = sick.finds(("stop", "ports", ("node0", "node2")))
    sick.type(remedy)
    sick.is_well()


def test_a_firewall_that_drops_what_goes_out(sick: Broken) -> None:
    target = sick.cluster.nodes["node0"].address
    sick.firewall("node1", f"OUTPUT -p tcp -d {target} ! --sport 22 -j DROP")
    remedy, _ = sick.finds(("stop", "ports", ("node1", "node0")))
    assert remedy.startswith("ssh -t node1 'sudo iptables -I OUTPUT")
    sick.type(remedy)
    sick.is_well()


def test_a_firewall_that_rejects_what_goes_out(sick: Broken) -> None:
    sick.firewall("node1", "OUTPUT -p tcp ! --sport 22 -m conntrack --ctstate NEW -j REJECT")
    remedy, _ = sick.finds(("stop", "ports", ("node1", "node0", "node2")))
    assert remedy.startswith("ssh -t node1 'sudo iptables -I OUTPUT")
    sick.type(remedy)
    sick.is_well()


def test_something_in_between_that_drops(sick: Broken) -> None:
    # Where iptables is not looked at: as far as the computers can tell it is on the way.
    source = sick.cluster.nodes["node0"].address
    sick.firewall("node1", f"-t raw -A PREROUTING -p tcp -s {source} --syn ! --dport 22 -j DROP")
    _, message = sick.finds(("stop", "ports", ("node1", "node0")))
    assert "time out" in message


# --- routes ---------------------------------------------------------------------------------------


def test_a_route_into_nothing(sick: Broken) -> None:
    own, _ = sick.join("node0", "node1", "eth1")
    gateway = own.rpartition(".")[0] + ".99"
    target = sick.cluster.nodes["node1"].address
    sick.on("node0", f"ip route add {target}/32 via {gateway} dev eth1")
    remedy, message = sick.finds(("stop", "ports", ("node0", "node1")))
    assert all(word in message for word in (gateway, "eth1", "eth0"))
    sick.undo.callback(sick.on, "node0", f"ip route delete {target}/32")
    sick.type(remedy)
    sick.is_well()


def test_a_route_that_is_forbidden(sick: Broken) -> None:
    target = sick.cluster.nodes["node1"].address
    sick.on("node0", f"ip route add unreachable {target}/32")
    sick.undo.callback(sick.on, "node0", f"ip route delete {target}/32")
    remedy, _ = sick.finds(("stop", "ports", ("node0", "node1")))
    assert "No route to host" in sick.type(remedy, succeeds=False)


def test_a_route_over_another_cable(sick: Broken) -> None:
    sick.join("node0", "node1", "eth1")
    target = sick.cluster.nodes["node1"].address
    sick.on("node0", f"ip route add {target}/32 dev eth1")
    remedy, message = sick.finds(("warn", "route", ("node0", "node1")))
    assert all(word in message for word in (target, "eth1", "eth0"))
    sick.type(remedy)
    sick.undo.callback(sick.on, "node0", f"ip route delete {target}/32")
    sick.is_well()


def test_addresses_of_the_wireless_network(sick: Broken) -> None:
    for name, ip in zip(("node0", "node1"), sick.join("node0", "node1", "wlan0"), strict=True):
        sick.entries[name]["ips"] = [ip]
    del sick.entries["node2"]
    remedy, message = sick.finds(("warn", "route", ("node0", "node1")))
    assert "they talk over wlan0 (Wi-Fi), though eth0 (Ethernet) joins them" in message
    sick.type(remedy)
    sick.is_well(named=better(sick))


def test_a_computer_in_another_network(sick: Broken) -> None:
    # Two know each other by a cable that the third has no way to.
    for name, ip in zip(("node0", "node1"), sick.join("node0", "node1", "eth1"), strict=True):
        sick.entries[name]["ips"] = [ip]
    remedy, message = sick.finds(("stop", "ports", ("node2", "node0", "node1")))
    assert message == "it cannot connect to any other computer: there is no route"
    assert f"{sick.cluster.nodes['node2'].address}/24" in sick.type(remedy, succeeds=False)


def set_mtu(sick: Broken, *names: str, mtu: int) -> None:
    for name in names:
        sick.on(name, f"ip link set eth0 mtu {mtu}")


def test_packets_of_another_size(sick: Broken) -> None:
    set_mtu(sick, "node1", mtu=1400)
    sick.undo.callback(set_mtu, sick, "node0", "node1", "node2", mtu=1500)
    told = sick.finds(("warn", "mtu", ("node0", "node1")), ("warn", "mtu", ("node2", "node1")))
    for remedy, message in zip(told[::2], told[1::2], strict=True):
        assert "eth0 has MTU 1500, eth0 of node1 has 1400" in message
        sick.type(remedy)
    sick.is_well()


def test_large_packets_that_get_lost(sick: Broken) -> None:
    # Packets as the wire has them: the kernel would put several into one where it need not cut
    # them.
    sick.on("node1", "ip link set eth0 gso_max_segs 1")
    sick.undo.callback(sick.on, "node1", "ip link set eth0 gso_max_segs 65535")
    source = sick.cluster.nodes["node1"].address
    sick.firewall("node0", f"INPUT -p tcp -s {source} -m length --length 1401:65535 -j DROP")
    remedy, message = sick.finds(("stop", "packets", ("node1", "node0")))
    assert "node0" in message
    assert "MTU" in message
    sick.undo.callback(set_mtu, sick, "node1", mtu=1500)
    sick.type(remedy)
    sick.finds(("warn", "mtu", ("node0", "node1")), ("warn", "mtu", ("node2", "node1")))


# --- links ----------------------------------------------------------------------------------------


def test_a_slow_link(sick: Broken) -> None:
    sick.cluster.slow("node2", "40mbit")
    sick.undo.callback(sick.cluster.heal, "node2")
    answer = sick.check(*sick.trees)
    assert answer.code == 0
    assert answer.told == [("warn", "network", ("node2", "node0", "node1"))], answer.findings
    assert "every link of node2 is slow" in answer.findings[0]["message"]
    speeds = {
        frozenset(link["hosts"]): link["bus_bytes_per_s"]
        for link in answer.content["network"]["links"]
    }
    # 40 Mbit/s are 5 MB/s, less what goes for headers; what the bucket holds passes at once.
    for other in ("node0", "node1"):
        assert 3e6 < speeds[frozenset(("node2", other))] < 6e6
    assert speeds[frozenset(("node0", "node1"))] > 20e6
    assert "node2" in answer.content["network"]["slowest"]
