"""The doctor's checks of addresses, ports, routes, packet sizes and the measured network."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from computers import cluster, facts, host, interface, mac_facts, only, reach, told, with_outcomes

from allhands.cluster.doctor.facts import Cluster, HostFacts, Network
from allhands.cluster.doctor.findings import Finding
from allhands.cluster.doctor.run import findings_of

EVERY = [(a, b) for a in ("node1", "node2", "node3") for b in ("node1", "node2", "node3") if a != b]


def new_ips(finding: Finding) -> dict[str, list[str]]:
    """The addresses in the hostfile that the remedy writes."""
    words = shlex.split(finding.remedy)
    assert (words[0], words[2:]) == ("echo", [">", "better-hosts.json"])
    return {entry["ssh"]: entry["ips"] for entry in json.loads(words[1])}


def walled(*names: str, ways: tuple[str, ...] = ("in",)) -> HostFacts:
    return facts(2, firewalls=[{"name": name, "ways": ways} for name in names])


# --- addresses ------------------------------------------------------------------------------------


def test_an_address_of_the_hostfile_that_is_not_the_computers_own() -> None:
    ill = host(
        2, addresses=("10.9.9.9",), bind_errors={"10.9.9.9": "Cannot assign requested address"}
    )
    finding = only(cluster(host(1), ill, host(3)))
    assert (finding.check, finding.severity, finding.hosts) == ("address", "stop", ("node2",))
    assert "10.9.9.9" in finding.message
    assert new_ips(finding) == {"node1": ["10.0.0.1"], "node2": ["10.0.0.2"], "node3": ["10.0.0.3"]}


def test_an_own_address_at_which_it_cannot_listen_is_not_said_to_be_anothers() -> None:
    finding = only(
        cluster(
            host(1), host(2, bind_errors={"10.0.0.2": "the system has no room for it"}), host(3)
        )
    )
    assert (finding.check, finding.severity, finding.hosts) == ("address", "stop", ("node2",))
    assert "no room" in finding.message
    assert "it has" not in finding.message


# --- ports ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("refused", "refused"),
        ("timeout", "time out"),
        ("stranger", "answers"),
        ("failed", "fail"),
    ],
)
def test_a_computer_that_others_cannot_connect_to(outcome: str, words: str) -> None:
    ill = with_outcomes(cluster(), {("node1", "node2"): outcome, ("node3", "node2"): outcome})
    finding = only(ill)
    assert (finding.check, finding.severity, finding.hosts) == (
        "ports",
        "stop",
        ("node2", "node1", "node3"),
    )
    assert finding.message.startswith("from node1, node3 to it at 10.0.0.2: ")
    assert words in finding.message


def test_each_direction_is_a_matter_of_its_own() -> None:
    ill = with_outcomes(cluster(), {("node1", "node2"): "timeout"})
    assert only(ill).hosts == ("node2", "node1")


@pytest.mark.parametrize(
    ("told_facts", "command"),
    [
        (facts(2), "sudo iptables -I INPUT -s 10.0.0.0/24 -j ACCEPT"),
        (walled("iptables"), "sudo iptables -I INPUT -s 10.0.0.0/24 -j ACCEPT"),
        (walled("iptables", ways=("out",)), "sudo iptables -I OUTPUT -d 10.0.0.0/24 -j ACCEPT"),
        (
            walled("iptables", ways=("in", "out")),
            "sudo iptables -I INPUT -s 10.0.0.0/24 -j ACCEPT && sudo iptables -I OUTPUT -d 10.0.0.0/24 -j ACCEPT",
        ),
        (walled("ufw", "iptables"), "sudo ufw allow from 10.0.0.0/24"),
        (
            walled("firewalld", "nft"),
            "sudo firewall-cmd --permanent --zone=trusted --add-source=10.0.0.0/24 && sudo firewall-cmd --reload",
        ),
        (walled("nft"), "sudo nft list ruleset"),
        (
            mac_facts(2),
            "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add /env/bin/python"
            " && sudo /usr/libexec/ApplicationFirewall/socketfilterfw --unblockapp /env/bin/python",
        ),
    ],
)
def test_the_firewall_that_is_there_is_opened(told_facts: HostFacts, command: str) -> None:
    ill = with_outcomes(cluster(host(1), host(2, told_facts)), {("node1", "node2"): "timeout"})
    found = [finding for finding in findings_of(ill) if finding.check == "ports"]
    assert [shlex.split(finding.remedy) for finding in found] == [["ssh", "-t", "node2", command]]


def test_a_firewall_that_also_drops_answers_is_told_once_and_at_its_place() -> None:
    both = {("node1", "node2"): "timeout", ("node2", "node1"): "timeout"}
    ill = with_outcomes(cluster(host(1), host(2, walled("iptables"))), both)
    assert only(ill).hosts == ("node2", "node1")
    # Nothing is known of firewalls: both directions are told.
    assert len(told(with_outcomes(cluster(host(1), host(2)), both))) == 2


@pytest.mark.parametrize(
    ("outcome", "command"),
    [
        ("forbidden", "sudo iptables -I OUTPUT -d 10.0.0.0/24 -j ACCEPT"),
        ("timeout", "sudo iptables -I OUTPUT -d 10.0.0.0/24 -j ACCEPT"),
        ("unreachable", "ip route get 10.0.0.1; ip -br addr"),
    ],
)
def test_a_computer_that_reaches_nobody_is_to_blame_itself(outcome: str, command: str) -> None:
    ill = with_outcomes(cluster(), {("node2", "node1"): outcome, ("node2", "node3"): outcome})
    finding = only(ill)
    assert (finding.check, finding.severity, finding.hosts) == (
        "ports",
        "stop",
        ("node2", "node1", "node3"),
    )
    assert finding.message.startswith("it cannot connect to any other computer")
    assert shlex.split(finding.remedy)[-1] == command


def test_answers_that_cannot_come_back_are_no_fault_of_the_other_side() -> None:
    outcomes = {("node2", "node1"): "unreachable", ("node1", "node2"): "timeout"}
    finding = only(with_outcomes(cluster(), outcomes))
    assert finding.hosts == ("node2", "node1")
    assert finding.message == "from it to node1 at 10.0.0.1: there is no route"


def test_a_route_into_nowhere() -> None:
    routes = [
        {"ip": "10.0.0.1", "interface": "eth0"},
        {"ip": "10.0.0.3", "interface": "tun0", "gateway": "10.8.0.1"},
    ]
    wrong = facts(2, routes=routes)
    ill = with_outcomes(cluster(host(1), host(2, wrong), host(3)), {("node2", "node3"): "timeout"})
    finding = only(ill)
    assert (finding.check, finding.severity, finding.hosts) == ("ports", "stop", ("node2", "node3"))
    assert all(word in finding.message for word in ("10.8.0.1", "tun0", "eth0"))
    assert shlex.split(finding.remedy) == [
        "ssh",
        "-t",
        "node2",
        "sudo ip route replace 10.0.0.3/32 dev eth0",
    ]


def test_nobody_reaches_anybody() -> None:
    found = told(with_outcomes(cluster(), dict.fromkeys(EVERY, "timeout")))
    assert [(severity, check) for severity, check, _ in found] == [("stop", "ports")] * 3
    assert {hosts[0] for *_, hosts in found} == {"node1", "node2", "node3"}


# --- packets --------------------------------------------------------------------------------------


def test_large_packets_that_get_lost() -> None:
    finding = only(with_outcomes(cluster(), {("node1", "node2"): "stalls"}))
    assert (finding.check, finding.severity, finding.hosts) == (
        "packets",
        "stop",
        ("node2", "node1"),
    )
    assert shlex.split(finding.remedy)[-1] == "sudo ip link set eth0 mtu 1400"


@pytest.mark.parametrize(
    ("told_facts", "command"),
    [
        (facts(1, interfaces=[interface(mtu=9000)]), "sudo ip link set eth0 mtu 1500"),
        (
            mac_facts(1, interfaces=[interface("en2", kind="thunderbolt", mtu=9000)]),
            "sudo ifconfig en2 mtu 1500",
        ),
    ],
)
def test_packet_sizes_differ(told_facts: HostFacts, command: str) -> None:
    found = [
        f for f in findings_of(cluster(host(1, told_facts), host(2), host(3))) if f.check == "mtu"
    ]
    assert [(f.severity, f.hosts[0]) for f in found] == [("warn", "node1")]
    assert "9000" in found[0].message
    assert shlex.split(found[0].remedy)[-1] == command


@pytest.mark.parametrize(
    ("ms", "expected"), [(0.1, []), (4.9, []), (40.0, [("warn", "latency", ("node1", "node2"))])]
)
def test_latency_is_that_of_the_faster_try(ms: float, expected: list[Any]) -> None:
    ways = (
        reach("node1", "node2", "10.0.0.2", ms=80.0),
        reach("node2", "node1", "10.0.0.1", ms=ms),
    )
    assert told(cluster(host(1), host(2), reached=ways)) == expected


# --- routes ---------------------------------------------------------------------------------------


def over(number: int, network: str, *interfaces: dict[str, Any], by: str) -> HostFacts:
    """A computer with these interfaces, whose routes into ``network`` leave by ``by``."""
    routes = [{"ip": f"{network}.{i}", "interface": by} for i in range(1, 5)]
    return facts(number, interfaces=list(interfaces), routes=routes)


def pair(*kinds: tuple[str, str, str], used: int = 0) -> Cluster:
    """Two computers with interfaces of (name, kind, network), talking over the one of number
    ``used``.
    """
    name, _, network = kinds[used]
    hosts = [
        host(
            i,
            over(
                i,
                network,
                *(interface(n, f"{net}.{i}", kind=kind) for n, kind, net in kinds),
                by=name,
            ),
            addresses=(f"{network}.{i}",),
        )
        for i in (1, 2)
    ]
    return cluster(*hosts)


WIFI, CABLE, BOLT = (
    ("wlan0", "wifi", "192.168.1"),
    ("eth0", "ethernet", "10.0.0"),
    ("en5", "thunderbolt", "10.5.0"),
)


def test_wifi_where_a_cable_is() -> None:
    finding = only(pair(WIFI, CABLE))
    assert (finding.check, finding.severity, finding.hosts) == ("route", "warn", ("node1", "node2"))
    assert finding.message == "they talk over wlan0 (Wi-Fi), though eth0 (Ethernet) joins them"
    assert new_ips(finding) == {"node1": ["10.0.0.1"], "node2": ["10.0.0.2"]}


def test_the_best_of_two_cables_is_named() -> None:
    finding = only(pair(WIFI, CABLE, BOLT))
    assert "en5 (Thunderbolt)" in finding.message
    assert new_ips(finding) == {"node1": ["10.5.0.1"], "node2": ["10.5.0.2"]}
    assert only(pair(CABLE, BOLT)).severity == "warn"


def test_only_wifi() -> None:
    finding = only(pair(WIFI))
    assert (finding.check, finding.severity) == ("route", "warn")
    assert "join them by a cable" in finding.message


@pytest.mark.parametrize("kinds", [(CABLE,), (CABLE, WIFI), (BOLT, CABLE, WIFI)])
def test_the_best_way_is_well(kinds: tuple[tuple[str, str, str], ...]) -> None:
    assert told(pair(*kinds)) == []


def test_interfaces_that_are_down_and_docker_are_no_ways() -> None:
    down = [
        [interface(*WIFI[:1], f"192.168.1.{i}", kind="wifi"), interface("eth0", f"10.0.0.{i}", up=False),
         interface("docker0", f"172.17.0.{i}", kind="virtual")]
        for i in (1, 2)
    ]  # fmt: skip
    hosts = [
        host(i, over(i, "192.168.1", *down[i - 1], by="wlan0"), addresses=(f"192.168.1.{i}",))
        for i in (1, 2)
    ]
    assert "join them by a cable" in only(cluster(*hosts)).message


def test_a_detour_through_which_packets_still_pass() -> None:
    routes = [{"ip": f"10.0.0.{i}", "interface": "eth0"} for i in (1, 2)]
    routes.append({"ip": "10.0.0.3", "interface": "tun0", "gateway": "10.8.0.1"})
    finding = only(cluster(host(1), host(2, facts(2, routes=routes)), host(3)))
    assert (finding.check, finding.severity, finding.hosts) == ("route", "warn", ("node2", "node3"))


# --- the measurement ------------------------------------------------------------------------------


def link(a: int, b: int, speed: float, latency_s: float = 1e-4) -> dict[str, Any]:
    return {"hosts": (f"node{a}", f"node{b}"), "latency_s": latency_s, "bus_bytes_per_s": speed}


def measured(*links: dict[str, Any], **more: Any) -> Cluster:
    return cluster(network=Network.model_validate({"backend": "ring", "links": links, **more}))


def test_links_alike_are_well() -> None:
    assert told(measured(link(1, 2, 1.1e9), link(1, 3, 1.0e9), link(2, 3, 0.9e9))) == []


def test_the_slow_link_is_named() -> None:
    finding = only(measured(link(1, 2, 1.1e9), link(1, 3, 12e6), link(2, 3, 1e9)))
    assert (finding.check, finding.severity, finding.hosts) == (
        "network",
        "warn",
        ("node1", "node3"),
    )
    assert "12 MB/s" in finding.message
    assert shlex.split(finding.remedy)[-1].startswith("ethtool eth0")


def test_a_computer_all_of_whose_links_are_slow_is_told_once() -> None:
    finding = only(measured(link(1, 2, 1.1e9), link(1, 3, 12e6), link(2, 3, 12e6)))
    assert (finding.severity, finding.hosts) == ("warn", ("node3", "node1", "node2"))
    assert finding.message.startswith("every link of node3 is slow: 12 MB/s, others ")
    assert shlex.split(finding.remedy)[:2] == ["ssh", "node3"]


def test_of_fast_links_a_slower_one_is_a_note() -> None:
    assert told(measured(link(1, 2, 9e9), link(1, 3, 1e9), link(2, 3, 8e9))) == [
        ("note", "network", ("node1", "node3"))
    ]


@pytest.mark.parametrize(("speed", "expected"), [(120e6, False), (20e6, True)])
def test_a_link_that_stays_behind_its_own_interfaces(speed: float, expected: bool) -> None:
    hosts = [
        host(i, facts(i, interfaces=[interface(ip=f"10.0.0.{i}", speed_mbps=1000)])) for i in (1, 2)
    ]
    network = Network.model_validate({"links": [link(1, 2, speed)]})
    found = told(cluster(*hosts, network=network))
    assert found == ([("warn", "network", ("node1", "node2"))] if expected else [])


def test_a_group_that_fails_stops_training() -> None:
    failure = {"hosts": ("node2",), "message": "rank 1 was killed", "hint": "dmesg"}
    finding = only(measured(failures=[failure]))
    assert (finding.check, finding.severity, finding.hosts, finding.remedy) == (
        "network",
        "stop",
        ("node2",),
        "dmesg",
    )
    assert "rank 1 was killed" in finding.message
