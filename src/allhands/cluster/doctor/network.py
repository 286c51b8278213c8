"""Checks of the network: addresses, ports, routes, packet sizes, and the measured all-reduce."""

from __future__ import annotations

import ipaddress
import itertools
import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence

from allhands.cluster.doctor.facts import (
    Cluster,
    HostFacts,
    HostReport,
    Interface,
    LinkSpeed,
    Network,
    Reach,
)
from allhands.cluster.doctor.findings import (
    Check,
    Found,
    Severity,
    listed,
    new_hostfile,
    on,
    on_mac,
)
from allhands.cluster.doctor.paths import CABLES, choose, kind_name, networks, rank_of, used
from allhands.io.formatting import format_bytes

SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s: no cable of this century
SLOW_SHARE = 1 / 3  # of the speed of the other links
MODEST_BYTES_PER_S = 300e6  # above which a link that is slower than others is worth a note only
NOMINAL_SHARE = 0.25  # of the speed that the interface claims
SLOW_MS = 5.0  # there and back; on a cable it is a tenth of a millisecond
_MEANING = {
    "refused": "connections are refused (a firewall that rejects)",
    "timeout": "connections time out (a firewall that drops, or a wrong route)",
    "unreachable": "there is no route",
    "forbidden": "its own firewall forbids it",
    "stranger": "another program answers at that address",
    "failed": "connections fail",
}


def check_address(cluster: Cluster) -> Iterator[Found]:
    """Check that each computer has the addresses of its hostfile entry."""
    for host, facts in cluster.answered():
        own = {ip: network for _, ip, network in networks(facts)}
        for ip, reason in host.bind_errors.items():
            if ip in own:
                yield (
                    host.name,
                    "stop",
                    f"it cannot listen at its address {ip}: {reason}",
                    on(host, "ulimit -n; ss -s"),
                )
                continue
            # Prefer an address in the network of another computer; else take the first one.
            others = [
                ipaddress.ip_address(ip)
                for one in cluster.hosts
                if one is not host
                for ip in one.addresses
            ]
            near = [ip for ip, network in own.items() if any(other in network for other in others)]
            remedy = on(host, "ifconfig | grep 'inet '" if on_mac(host) else "ip -br -4 addr")
            if own:
                remedy = new_hostfile(cluster, {host.name: {"ips": [*near, *own][:1]}})
            message = f"{ip} is not its address ({reason}); it has {listed(own) or 'none'}"
            yield host.name, "stop", message, remedy


# --- ports ----------------------------------------------------------------------------------------


def check_ports(cluster: Cluster) -> Iterator[Found]:
    """Check that every computer can connect to every other one, by the addresses that ranks will
    use.
    """
    failed = [reach for reach in cluster.reached if _fails(reach)]
    mute: dict[str, list[Reach]] = defaultdict(list)
    groups: dict[tuple[str, str, str], list[Reach]] = defaultdict(list)
    for reach in failed:
        if _is_echo(cluster, reach, failed):
            continue
        if _is_mute(cluster, reach.source):
            mute[reach.source].append(reach)
        elif (lost := _misled(cluster, reach)) is not None:
            yield lost
        else:
            groups[reach.target, reach.ip, reach.outcome].append(reach)
    for name, reached in mute.items():
        yield _mute_finding(cluster, name, reached)
    for (target, ip, outcome), reached in groups.items():
        names = tuple(dict.fromkeys(reach.source for reach in reached))
        sources = [cluster.host(name) for name in names]
        stranger = outcome == "stranger"
        remedy = (
            on(sources[0], f"ping -c 3 {ip}") if stranger else _open(cluster.host(target), sources)
        )
        yield (
            (target, *names),
            "stop",
            f"from {listed(names)} to it at {ip}: {_MEANING[outcome]}",
            remedy,
        )


def _misled(cluster: Cluster, reach: Reach) -> Found | None:
    """Return a finding if the source sends packets in the wrong direction, or has no route."""
    source, ip = cluster.host(reach.source), reach.ip
    detour = _detour(source, ip) if reach.outcome in ("timeout", "unreachable", "failed") else None
    message = f"from it to {reach.target} at {ip}: {_MEANING[reach.outcome]}"
    if detour is not None:
        return (source.name, reach.target), "stop", f"{message}; {detour[0]}", detour[1]
    if reach.outcome == "unreachable":
        return (source.name, reach.target), "stop", message, _show_route(source, ip)
    return None


def _fails(reach: Reach) -> bool:
    return reach.outcome not in ("ok", "stalls")


def _is_echo(cluster: Cluster, reach: Reach, failed: Sequence[Reach]) -> bool:
    """Tell if a connection fails only because answers are blocked: the way back reports that."""
    back = [
        other for other in failed if (other.source, other.target) == (reach.target, reach.source)
    ]
    if reach.outcome != "timeout" or not back:
        return False
    if any(other.outcome in ("forbidden", "unreachable") for other in back):
        return True
    # Neither reaches the other: a firewall that keeps connections out keeps answers out, too.
    source, target = cluster.host(reach.source).facts, cluster.host(reach.target).facts
    return bool(source and source.firewalls) and not (target and target.firewalls)


def _is_mute(cluster: Cluster, name: str) -> bool:
    """Tell if a computer reaches none of its targets, but others do: the fault is its own."""
    outcomes = {reach.outcome for reach in cluster.reached if reach.source == name}
    targets = {reach.target for reach in cluster.reached if reach.source == name}
    reached = {
        reach.target for reach in cluster.reached if reach.source != name and reach.outcome == "ok"
    }
    return "ok" not in outcomes and (
        "forbidden" in outcomes or (len(targets) > 1 and targets <= reached)
    )


def _mute_finding(cluster: Cluster, name: str, failed: Sequence[Reach]) -> Found:
    host, first = cluster.host(name), failed[0]
    targets = tuple(reach.target for reach in failed)
    if first.outcome == "unreachable":
        remedy = _show_route(host, first.ip)
    else:
        remedy = _open(host, [cluster.host(target) for target in targets], way="out")
    return (
        (name, *targets),
        "stop",
        f"it cannot connect to any other computer: {_MEANING[first.outcome]}",
        remedy,
    )


def _show_route(host: HostReport, ip: str) -> str:
    return on(
        host, f"route -n get {ip}; ifconfig" if on_mac(host) else f"ip route get {ip}; ip -br addr"
    )


def _open(host: HostReport, others: Sequence[HostReport], way: str = "in") -> str:
    """Return the command that opens the host's firewall for the other computers, and for nobody
    else.
    """
    if on_mac(host):
        tool = "sudo /usr/libexec/ApplicationFirewall/socketfilterfw"
        python = shlex.quote(host.facts.python.python_path if host.facts else host.python)
        return on(host, f"{tool} --add {python} && {tool} --unblockapp {python}")
    return on(host, " && ".join(_rules(host, _networks_of(host, others), way)))


def _rules(host: HostReport, peers: Sequence[str], way: str) -> list[str]:
    """Return the commands that open the host's firewalls for other computers."""
    walls = {wall.name: wall.ways for wall in host.facts.firewalls} if host.facts else {}
    if "ufw" in walls:
        return [f"sudo ufw allow {'out to' if way == 'out' else 'from'} {peer}" for peer in peers]
    if "firewalld" in walls:
        added = [
            f"sudo firewall-cmd --permanent --zone=trusted --add-source={peer}" for peer in peers
        ]
        return [*added, "sudo firewall-cmd --reload"]
    if list(walls) == ["nft"]:
        return ["sudo nft list ruleset"]
    chains = {"in": "INPUT -s", "out": "OUTPUT -d"}
    ways = sorted(set[str]().union(*walls.values())) or [way]
    return [f"sudo iptables -I {chains[one]} {','.join(peers)} -j ACCEPT" for one in ways]


def _networks_of(host: HostReport, others: Sequence[HostReport]) -> list[str]:
    """Return the host's networks that the others are in, or their addresses."""
    own = [network for _, _, network in networks(host.facts)] if host.facts else []
    ips = [ip for other in others for ip in other.addresses[:1]]
    found = [
        next((network for network in own if ipaddress.ip_address(ip) in network), ip) for ip in ips
    ]
    return list(dict.fromkeys(map(str, found)))


def check_packets(cluster: Cluster) -> Iterator[Found]:
    """Check that large packets pass where small ones do."""
    for reach in cluster.reached:
        if reach.outcome == "stalls":
            target = cluster.host(reach.target)
            interface = target.facts.interface_of(reach.ip) if target.facts else None
            message = f"small packets reach {reach.source}, large ones get lost: packet sizes (MTU) differ"
            remedy = _set_mtu(target, interface.name if interface else "INTERFACE", 1400)
            yield (target.name, reach.source), "stop", message, remedy


def _set_mtu(host: HostReport, interface: str, mtu: int) -> str:
    name = shlex.quote(interface)
    return on(
        host,
        f"sudo ifconfig {name} mtu {mtu}" if on_mac(host) else f"sudo ip link set {name} mtu {mtu}",
    )


def check_mtu(cluster: Cluster) -> Iterator[Found]:
    """Check that both ends of a link have the same packet size."""
    seen: set[tuple[str, str]] = set()
    for (first, facts), (second, others) in itertools.permutations(cluster.answered(), 2):
        for ip in second.addresses:
            near, far = used(facts, ip), others.interface_of(ip)
            if near is None or far is None or (first.name, near.name) in seen:
                continue
            if near.mtu is not None and far.mtu is not None and near.mtu > far.mtu:
                seen.add((first.name, near.name))
                message = (
                    f"{near.name} has MTU {near.mtu}, {far.name} of {second.name} has {far.mtu}"
                )
                yield (
                    (first.name, second.name),
                    "warn",
                    message,
                    _set_mtu(first, near.name, far.mtu),
                )


# --- routes ---------------------------------------------------------------------------------------


def check_route(cluster: Cluster) -> Iterator[Found]:
    """Check that packets take the best way: by cable, and by the interface in the same network."""
    reported: set[frozenset[str]] = set()
    for (first, facts), (second, others) in itertools.permutations(cluster.answered(), 2):
        names = (first.name, second.name)
        # The check of ports reports ways on which nothing passes.
        ips = [
            reach.ip
            for reach in cluster.reached
            if (reach.source, reach.target) == names and not _fails(reach)
        ]
        for ip in ips:
            if detour := _detour(first, ip):
                yield names, "warn", *detour
        # The check of addresses reports an address that the computer does not have.
        known = second.addresses and second.addresses[0] not in second.bind_errors
        if (
            known
            and frozenset(names) not in reported
            and (slow := _slow_way(cluster, first, facts, second, others))
        ):
            reported.add(frozenset(names))
            yield names, *slow


def _detour(host: HostReport, ip: str) -> tuple[str, str] | None:
    """Return message and remedy if the route leaves by another interface than the one in the
    address's network.
    """
    if host.facts is None or (route := host.facts.route_to(ip)) is None or route.interface is None:
        return None
    address = ipaddress.ip_address(ip)
    direct = [
        interface.name for interface, _, network in networks(host.facts) if address in network
    ]
    if not direct or route.interface in direct:
        return None
    name = shlex.quote(direct[0])
    by = f" by {route.gateway}" if route.gateway else ""
    message = f"the route to {ip} uses {route.interface}{by}, though {direct[0]} is in its network"
    mac, linux = (
        f"sudo route -n add -host {ip} -interface {name}",
        f"sudo ip route replace {ip}/32 dev {name}",
    )
    return message, on(host, mac if on_mac(host) else linux)


def _slow_way(
    cluster: Cluster, first: HostReport, facts: HostFacts, second: HostReport, others: HostFacts
) -> tuple[Severity, str, str] | None:
    """Return a fault if the two talk over Wi-Fi, or not over the best cable that joins them."""
    ip = second.addresses[0]
    if (way := used(facts, ip)) is None:
        return None
    end = others.interface_of(ip) or way
    wireless = "wifi" in (way.kind, end.kind)
    best = choose({first.name: facts, second.name: others}).choices
    better = [choice.kind for choice in best.values() if choice.kind in CABLES]
    if len(better) == 2 and rank_of(way.kind, end.kind) > rank_of(*better):
        near = any(ipaddress.ip_address(ip) in network for _, _, network in networks(facts))
        over = f"{best[first.name].interface} ({kind_name(better[0])})"
        message = f"they talk over {way.name} ({kind_name(way.kind)}), though {over} joins them"
        hostfile = new_hostfile(
            cluster, {name: {"ips": [choice.ip]} for name, choice in best.items()}
        )
        return "warn" if wireless or near else "note", message, hostfile
    if wireless:
        message = f"they talk over Wi-Fi ({way.name} to {end.name}): every step waits for it; join them by a cable"
        return "warn", message, _show_route(first, ip)
    return None


# --- the measurement ------------------------------------------------------------------------------


def check_network(cluster: Cluster) -> Iterator[Found]:
    """Check that a real group of MLX forms, and that no link is slow."""
    network = cluster.network
    assert network is not None
    for failure in network.failures:
        yield failure.hosts, "stop", f"a group of MLX failed: {failure.message}", failure.hint or ""
    slow = _slow_links(cluster, network)
    names = _common(network, [link for link, _ in slow])
    for link, why in slow[:1] if names else slow:
        severity: Severity = "warn" if link.bus_bytes_per_s < MODEST_BYTES_PER_S else "note"
        whose = f"every link of {names[0]}" if names else "their link"
        hosts = names or link.hosts
        message = f"{whose} is slow: {format_bytes(link.bus_bytes_per_s)}/s, {why}"
        host, interface = cluster.host(hosts[0]), _first_interface(cluster, hosts[0])
        name = shlex.quote(interface.name) if interface else "INTERFACE"
        show = (
            f"ifconfig {name}" if on_mac(host) else f"ethtool {name}; tc -s qdisc show dev {name}"
        )
        yield hosts, severity, message, on(host, show)


def _common(network: Network, slow: Sequence[LinkSpeed]) -> tuple[str, ...]:
    """Return the computer whose links are exactly the slow ones, followed by their other ends;
    empty if there is none.
    """
    for name in dict.fromkeys(name for link in slow for name in link.hosts):
        own = [link for link in network.links if name in link.hosts]
        if len(own) > 1 and own == list(slow):
            return (name, *(other for link in own for other in link.hosts if other != name))
    return ()


def _slow_links(cluster: Cluster, network: Network) -> list[tuple[LinkSpeed, str]]:
    found: list[tuple[LinkSpeed, str]] = []
    for link in network.links:
        speed = link.bus_bytes_per_s
        others = sorted(one.bus_bytes_per_s for one in network.links if one.hosts != link.hosts)
        usual = others[len(others) // 2] if others else 0.0
        nominal = _nominal(cluster, link.hosts)
        if speed < SLOW_SHARE * usual:
            found.append((link, f"others have {format_bytes(usual)}/s"))
        elif speed < NOMINAL_SHARE * nominal:
            found.append((link, f"though its interfaces report {format_bytes(nominal)}/s"))
        elif speed < SLOW_BYTES_PER_S:
            found.append((link, "less than 100 Mbit/s"))
    return found


def _nominal(cluster: Cluster, names: Sequence[str]) -> float:
    """Return the bytes per second that both interfaces of a link claim; 0 if one claims nothing."""
    interfaces = [_first_interface(cluster, name) for name in names]
    speeds = [
        one.speed_mbps or 0 if one is not None and one.kind in CABLES else 0 for one in interfaces
    ]
    return min(speeds) * 1e6 / 8


def _first_interface(cluster: Cluster, name: str) -> Interface | None:
    host = cluster.host(name)
    return host.facts.interface_of(host.addresses[0]) if host.facts and host.addresses else None


def check_latency(cluster: Cluster) -> Iterator[Found]:
    """Check that the round trip of a packet is short."""
    best: dict[tuple[str, ...], float] = {}
    for reach in cluster.reached:
        names = tuple(sorted((reach.source, reach.target)))
        best[names] = min(best.get(names, math.inf), math.inf if reach.ms is None else reach.ms)
    for names, ms in best.items():
        if SLOW_MS < ms < math.inf:
            source, target = map(cluster.host, names)
            message = f"the round trip between them takes {ms:.1f} ms: every exchange waits for it"
            yield (
                names,
                "warn",
                message,
                on(source, f"ping -c 10 {[*target.addresses, target.name][0]}"),
            )


def _connected(cluster: Cluster) -> bool:
    return bool(cluster.reached)


def _several(cluster: Cluster) -> bool:
    return len(list(cluster.answered())) > 1


CHECKS = (
    Check(
        "address",
        "addresses",
        check_address,
        lambda cluster: any(host.addresses for host in cluster.hosts),
    ),
    Check("ports", "ports", check_ports, _connected),
    Check("packets", "large packets", check_packets, _connected),
    Check("latency", "latency", check_latency, _connected),
    Check("route", "routes", check_route, _several),
    Check("mtu", "packet sizes (MTU)", check_mtu, _several),
    Check("network", "an MLX group", check_network, lambda cluster: cluster.network is not None),
)
