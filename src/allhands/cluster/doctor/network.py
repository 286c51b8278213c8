"""Checks of the network: addresses, ports, routes, packet sizes, and what the measured all-reduce says."""

from __future__ import annotations

import ipaddress
import shlex
from collections import defaultdict
from collections.abc import Sequence

from allhands.cluster.doctor.facts import Cluster, HostFacts, HostReport, Interface, LinkSpeed, Network, Reach
from allhands.cluster.doctor.findings import Check, Finding, Severity, listed, new_hostfile, on, on_mac
from allhands.cluster.doctor.paths import CABLES, kind_name, networks, ordered_pairs, pairs_between, used
from allhands.io.formatting import format_bytes

SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s: no cable of this century
SLOW_SHARE = 1 / 3  # of what the other links carry
MODEST_BYTES_PER_S = 300e6  # above which a link that is slower than others is worth a note only
NOMINAL_SHARE = 0.25  # of what the interface says of itself
SLOW_MS = 5.0  # there and back; on a cable it is a tenth of one
_MEANING = {
    "refused": "connections are refused (a firewall that rejects)",
    "timeout": "connections time out (a firewall that drops, or a wrong route)",
    "unreachable": "there is no route",
    "forbidden": "its own firewall forbids it",
    "stranger": "something else answers at that address",
    "failed": "connections fail",
}


def check_address(cluster: Cluster) -> list[Finding]:
    """The addresses in the hostfile are those of the computers themselves."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        for ip, reason in host.bind_errors.items():
            own = [address for _, address, _ in networks(facts)]
            if ip in own:
                message = f"it cannot listen at its address {ip}: {reason}"
                findings.append(Finding("address", (host.name,), "stop", message, on(host, "ulimit -n; ss -s")))
                continue
            message = f"{ip} is not an address of it ({reason}); it has {listed(own) or 'none'}"
            show = on(host, "ifconfig | grep 'inet '" if on_mac(host) else "ip -br -4 addr")
            best = _common_address(cluster, facts)
            remedy = new_hostfile(cluster, {host.name: {"ips": [best]}}) if best else show
            findings.append(Finding("address", (host.name,), "stop", message, remedy))
    return findings


def _common_address(cluster: Cluster, facts: HostFacts) -> str | None:
    """Its address in a network in which another computer has its own; else the first it has."""
    others = [ipaddress.ip_address(ip) for host in cluster.hosts if host.facts is not facts for ip in host.addresses]
    own = list(networks(facts))
    near = [ip for _, ip, network in own if any(other in network for other in others)]
    return next(iter([*near, *(ip for _, ip, _ in own)]), None)


# --- ports --------------------------------------------------------------------------------------------


def check_ports(cluster: Cluster) -> list[Finding]:
    """Every computer can connect to every other one, by the very addresses that ranks will use."""
    failed = [reach for reach in cluster.reached if _fails(reach)]
    failed = [reach for reach in failed if not _is_echo(cluster, reach, failed)]
    mute = _mute(cluster, failed)
    findings = [_mute_finding(cluster, name, [r for r in failed if r.source == name]) for name in mute]
    groups: dict[tuple[str, str, str], list[Reach]] = defaultdict(list)
    for reach in (reach for reach in failed if reach.source not in mute):
        if (lost := _no_way(cluster, reach)) is not None:
            findings.append(lost)
        else:
            groups[reach.target, reach.ip, reach.outcome].append(reach)
    return findings + [_port_finding(cluster, reached) for reached in groups.values()]


def _fails(reach: Reach) -> bool:
    return reach.outcome not in ("ok", "stalls")


def _is_echo(cluster: Cluster, reach: Reach, failed: Sequence[Reach]) -> bool:
    """Whether it fails only because answers do not come back, for a reason that is told of the way back."""
    back = [other for other in failed if (other.source, other.target) == (reach.target, reach.source)]
    if reach.outcome != "timeout" or not back:
        return False
    if any(other.outcome in ("forbidden", "unreachable") for other in back):
        return True
    # Neither reaches the other: a firewall on one side that keeps connections out keeps answers out, too.
    return bool(_walls(cluster.host(reach.source))) and not _walls(cluster.host(reach.target))


def _walls(host: HostReport) -> set[str]:
    """The firewalls that are known to shut something out."""
    return {wall.name for wall in host.facts.firewalls} if host.facts else set()


def _mute(cluster: Cluster, failed: Sequence[Reach]) -> list[str]:
    """Computers that reach nobody while others reach those: what is wrong is with them."""
    found: list[str] = []
    for name in dict.fromkeys(reach.source for reach in failed):
        targets = {reach.target for reach in cluster.reached if reach.source == name}
        others = [r for r in cluster.reached if r.source != name and r.target in targets and r.outcome == "ok"]
        every = all(r.outcome != "ok" for r in cluster.reached if r.source == name)
        forbidden = any(r.outcome == "forbidden" for r in failed if r.source == name)
        if every and (forbidden or (len(targets) > 1 and {r.target for r in others} == targets)):
            found.append(name)
    return found


def _mute_finding(cluster: Cluster, name: str, failed: Sequence[Reach]) -> Finding:
    host = cluster.host(name)
    first = failed[0]
    message = f"it cannot connect to any other computer: {_MEANING[first.outcome]}"
    if first.outcome == "unreachable":
        remedy = _show_route(host, first.ip)
    else:
        remedy = _open(host, [cluster.host(reach.target) for reach in failed], outgoing=True)
    return Finding("ports", (name, *(reach.target for reach in failed)), "stop", message, remedy)


def _no_way(cluster: Cluster, reach: Reach) -> Finding | None:
    """That the source sends into the wrong direction, or has no direction at all."""
    source = cluster.host(reach.source)
    detour = _detour(source, reach.ip) if reach.outcome in ("timeout", "unreachable", "failed") else None
    if detour is None and reach.outcome != "unreachable":
        return None
    message = f"from it to {reach.target} at {reach.ip}: {_MEANING[reach.outcome]}"
    why, remedy = detour or ("", _show_route(source, reach.ip))
    return Finding("ports", (source.name, reach.target), "stop", f"{message}; {why}" if why else message, remedy)


def _port_finding(cluster: Cluster, reached: Sequence[Reach]) -> Finding:
    first = reached[0]
    sources, target = [cluster.host(reach.source) for reach in reached], cluster.host(first.target)
    names = tuple(dict.fromkeys(host.name for host in sources))
    message = f"from {listed(names)} to it at {first.ip}: {_MEANING[first.outcome]}"
    stranger = first.outcome == "stranger"
    remedy = on(sources[0], f"ping -c 3 {first.ip}") if stranger else _open(target, sources)
    return Finding("ports", (target.name, *names), "stop", message, remedy)


def _show_route(host: HostReport, ip: str) -> str:
    return on(host, f"route -n get {ip}; ifconfig" if on_mac(host) else f"ip route get {ip}; ip -br addr")


def _open(host: HostReport, others: Sequence[HostReport], outgoing: bool = False) -> str:
    """The command that opens the host's firewall for the other computers, and for nobody else."""
    if on_mac(host):
        tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
        python = shlex.quote(host.facts.python.python_path if host.facts else host.python)
        return on(host, f"sudo {tool} --add {python} && sudo {tool} --unblockapp {python}")
    active = _walls(host)
    networks_of = _networks_of(host, others)
    if "ufw" in active:
        way = "out to" if outgoing else "from"
        return on(host, " && ".join(f"sudo ufw allow {way} {network}" for network in networks_of))
    if "firewalld" in active:
        zone = "sudo firewall-cmd --permanent --zone=trusted"
        return on(host, " && ".join(f"{zone} --add-source={n}" for n in networks_of) + " && sudo firewall-cmd --reload")
    if "nft" in active and "iptables" not in active:
        return on(host, "sudo nft list ruleset")
    ways = {way for wall in host.facts.firewalls for way in wall.ways} if host.facts else set[str]()
    chains = {"in": "INPUT -s", "out": "OUTPUT -d"}
    wanted = sorted(ways) or ["out" if outgoing else "in"]
    rules = [f"sudo iptables -I {chains[way]} {','.join(networks_of)} -j ACCEPT" for way in wanted]
    return on(host, " && ".join(rules))


def _networks_of(host: HostReport, others: Sequence[HostReport]) -> list[str]:
    """The host's networks that the others are in, or their addresses."""
    own = [network for _, _, network in networks(host.facts)] if host.facts else []
    found: list[str] = []
    for ip in (ip for other in others for ip in other.addresses[:1]):
        address = ipaddress.ip_address(ip)
        found.append(str(next((network for network in own if address in network), ip)))
    return list(dict.fromkeys(found))


def check_packets(cluster: Cluster) -> list[Finding]:
    """Large packets pass where small ones do."""
    findings: list[Finding] = []
    for reach in cluster.reached:
        if reach.outcome == "stalls":
            source, target = cluster.host(reach.source), cluster.host(reach.target)
            interface = target.facts.interface_of(reach.ip) if target.facts else None
            message = f"small packets pass from it to {source.name}, large ones get lost: packet sizes (MTU) differ"
            remedy = _set_mtu(target, interface.name if interface else "INTERFACE", 1400)
            findings.append(Finding("packets", (target.name, source.name), "stop", message, remedy))
    return findings


def _set_mtu(host: HostReport, interface: str, mtu: int) -> str:
    name = shlex.quote(interface)
    return on(host, f"sudo ifconfig {name} mtu {mtu}" if on_mac(host) else f"sudo ip link set {name} mtu {mtu}")


def check_mtu(cluster: Cluster) -> list[Finding]:
    """Both ends of a link have the same packet size."""
    findings: list[Finding] = []
    seen: set[tuple[str, str]] = set()
    for first, facts, second, others in ordered_pairs(cluster):
        for ip in second.addresses:
            near, far = used(facts, ip), others.interface_of(ip)
            if near is None or far is None or near.mtu is None or far.mtu is None or near.mtu <= far.mtu:
                continue
            if (first.name, near.name) in seen:
                continue
            seen.add((first.name, near.name))
            message = f"{near.name} has MTU {near.mtu}, {far.name} of {second.name} has {far.mtu}"
            remedy = _set_mtu(first, near.name, far.mtu)
            findings.append(Finding("mtu", (first.name, second.name), "warn", message, remedy))
    return findings


# --- routes -------------------------------------------------------------------------------------------


def check_route(cluster: Cluster) -> list[Finding]:
    """Packets take the best way there is: the cable, and the interface whose network the address is in."""
    findings: list[Finding] = []
    told: set[frozenset[str]] = set()
    for first, facts, second, others in ordered_pairs(cluster):
        # Where nothing gets through it is told with the ports.
        ips = [r.ip for r in cluster.reached if (r.source, r.target) == (first.name, second.name) and not _fails(r)]
        detours = [detour for ip in ips if (detour := _detour(first, ip))]
        findings += [Finding("route", (first.name, second.name), "warn", *detour) for detour in detours]
        if second.addresses and frozenset((first.name, second.name)) not in told:
            slower = _slower_way(cluster, (first, facts), (second, others))
            if slower is not None:
                told.add(frozenset((first.name, second.name)))
                findings.append(slower)
    return findings


def _detour(host: HostReport, ip: str) -> tuple[str, str] | None:
    """That the route leaves by another interface than the one whose network the address is in; what to do."""
    if host.facts is None or (route := host.facts.route_to(ip)) is None or route.interface is None:
        return None
    address = ipaddress.ip_address(ip)
    direct = [interface for interface, _, network in networks(host.facts) if address in network]
    if not direct or any(interface.name == route.interface for interface in direct):
        return None
    name = shlex.quote(direct[0].name)
    by = f" by {route.gateway}" if route.gateway else ""
    message = f"the route to {ip} leaves{by} on {route.interface}, though {direct[0].name} is in its network"
    command = (
        f"sudo route -n add -host {ip} -interface {name}"
        if on_mac(host)
        else f"sudo ip route replace {ip}/32 dev {name}"
    )
    return message, on(host, command)


def _slower_way(
    cluster: Cluster, one: tuple[HostReport, HostFacts], other: tuple[HostReport, HostFacts]
) -> Finding | None:
    """That the two talk over Wi-Fi, or a slower cable, while a better one joins them."""
    (first, facts), (second, others) = one, other
    ip = second.addresses[0]
    if ip in second.bind_errors:  # it is nobody's, or another computer's, which is told with the addresses
        return None
    way = used(facts, ip)
    end = others.interface_of(ip) or way
    if way is None or end is None:
        return None
    pairs = pairs_between(facts, others)
    taken = next((pair for pair in pairs if pair.ips[1] == ip and pair.interfaces[0].name == way.name), None)
    better = next(
        (pair for pair in pairs if pair.interfaces[0].kind in CABLES and pair.interfaces[1].kind in CABLES), None
    )
    wireless = any(interface.kind == "wifi" for interface in (way, end))
    names = (first.name, second.name)
    if better is not None and ip not in better.ips and (taken is None or better.rank[0] > taken.rank[0]):
        message = f"they talk over {kind_name(way)}, though {kind_name(better.interfaces[0])} joins them"
        severity: Severity = "warn" if wireless or taken is not None else "note"
        return Finding("route", names, severity, message, _with_ips(cluster, names, better.ips))
    if wireless:
        message = f"they talk over Wi-Fi ({way.name} to {end.name}): every step waits for it; join them by a cable"
        return Finding("route", names, "warn", message, _show_route(first, ip))
    return None


def _with_ips(cluster: Cluster, names: tuple[str, str], ips: tuple[str, str]) -> str:
    """A hostfile in which the two have other addresses."""
    return new_hostfile(cluster, {name: {"ips": [ip]} for name, ip in zip(names, ips, strict=True)})


# --- the measurement ----------------------------------------------------------------------------------


def check_network(cluster: Cluster) -> list[Finding]:
    """A real group forms, and no link holds the others up."""
    network = cluster.network
    assert network is not None
    findings: list[Finding] = [
        Finding("network", failure.hosts, "stop", f"a group of MLX failed: {failure.message}", failure.hint or "")
        for failure in network.failures
    ]
    slow = _slow_links(cluster, network)
    names = _common(network, [link for link, _ in slow])
    for link, why in slow[:1] if names else slow:
        severity: Severity = "warn" if link.bus_bytes_per_s < MODEST_BYTES_PER_S else "note"
        whose = f"every link of {names[0]}" if names else "their link"
        message = f"{whose} is slow: {format_bytes(link.bus_bytes_per_s)}/s, {why}"
        findings.append(
            Finding("network", names or link.hosts, severity, message, _look_at(cluster, names or link.hosts))
        )
    return findings


def _common(network: Network, slow: Sequence[LinkSpeed]) -> tuple[str, ...]:
    """The computer all of whose links are slow, and no others, before those at their other ends; empty: none."""
    for name in dict.fromkeys(name for link in slow for name in link.hosts):
        own = [link for link in network.links if name in link.hosts]
        if len(own) > 1 and own == list(slow):
            return (name, *(other for link in own for other in link.hosts if other != name))
    return ()


def _slow_links(cluster: Cluster, network: Network) -> list[tuple[LinkSpeed, str]]:
    found: list[tuple[LinkSpeed, str]] = []
    for link in network.links:
        others = sorted(one.bus_bytes_per_s for one in network.links if one.hosts != link.hosts)
        nominal = _nominal(cluster, link.hosts)
        if others and link.bus_bytes_per_s < SLOW_SHARE * others[len(others) // 2]:
            found.append((link, f"others {format_bytes(others[len(others) // 2])}/s"))
        elif nominal and link.bus_bytes_per_s < NOMINAL_SHARE * nominal:
            found.append((link, f"though its interfaces say {format_bytes(nominal)}/s"))
        elif link.bus_bytes_per_s < SLOW_BYTES_PER_S:
            found.append((link, "less than the oldest cable"))
    return found


def _nominal(cluster: Cluster, names: Sequence[str]) -> float | None:
    """Bytes a second that both interfaces of a link claim; ``None`` if one claims nothing."""
    speeds: list[int] = []
    for name in names:
        host = cluster.host(name)
        interface: Interface | None = None
        if host.facts is not None and host.addresses:
            interface = host.facts.interface_of(host.addresses[0])
        if interface is None or interface.speed_mbps is None or interface.kind not in CABLES:
            return None
        speeds.append(interface.speed_mbps)
    return min(speeds) * 1e6 / 8 if speeds else None


def _look_at(cluster: Cluster, names: Sequence[str]) -> str:
    host = cluster.host(names[0])
    interface = host.facts.interface_of(host.addresses[0]) if host.facts and host.addresses else None
    name = shlex.quote(interface.name) if interface else "INTERFACE"
    return on(host, f"ifconfig {name}" if on_mac(host) else f"ethtool {name}; tc -s qdisc show dev {name}")


def check_latency(cluster: Cluster) -> list[Finding]:
    """Packets are there and back in no time."""
    best: dict[tuple[str, ...], float] = {}
    for reach in cluster.reached:
        names = tuple(sorted((reach.source, reach.target)))
        if reach.ms is not None:
            best[names] = min(reach.ms, best.get(names, reach.ms))
    return [
        Finding(
            "latency",
            names,
            "warn",
            f"a packet takes {ms:.1f} ms between them and back: every exchange waits for it",
            _ping(cluster, names),
        )
        for names, ms in best.items()
        if ms > SLOW_MS
    ]


def _ping(cluster: Cluster, names: Sequence[str]) -> str:
    target = cluster.host(names[-1])
    return on(cluster.host(names[0]), f"ping -c 10 {target.addresses[0] if target.addresses else target.name}")


def _several(cluster: Cluster) -> bool:
    return len(list(cluster.answered())) > 1


CHECKS = (
    Check("address", "addresses", check_address, lambda cluster: any(host.addresses for host in cluster.hosts)),
    Check("ports", "ports", check_ports, lambda cluster: bool(cluster.reached)),
    Check("packets", "large packets", check_packets, lambda cluster: bool(cluster.reached)),
    Check("latency", "latency", check_latency, lambda cluster: bool(cluster.reached)),
    Check("route", "routes", check_route, _several),
    Check("mtu", "packet sizes (MTU)", check_mtu, _several),
    Check("network", "a real MLX group", check_network, lambda cluster: cluster.network is not None),
)
