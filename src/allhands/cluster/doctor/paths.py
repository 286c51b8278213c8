"""Ways between two computers, computed from their interfaces."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from allhands.cluster.doctor.facts import Cluster, HostFacts, HostReport, Interface

# A better kind carries more; only the order matters.
RANKS = {"thunderbolt": 5, "infiniband": 5, "ethernet": 3, "bridge": 3, "virtual": 2, "wifi": 1, "tunnel": 1}
CABLES = ("ethernet", "thunderbolt", "infiniband")
NAMES = {"wifi": "Wi-Fi", "ethernet": "Ethernet", "thunderbolt": "Thunderbolt", "infiniband": "InfiniBand"}


@dataclass(frozen=True)
class HostPair:
    """Two addresses in one network, one on each of two computers, with the interfaces that have them."""

    ips: tuple[str, str]
    interfaces: tuple[Interface, Interface]

    @property
    def rank(self) -> tuple[int, int]:
        """The order of pairs: the worse of the two kinds, then the lower speed."""
        kinds = min(RANKS.get(one.kind, 0) for one in self.interfaces)
        return kinds, min(one.speed_mbps or 0 for one in self.interfaces)


def kind_name(interface: Interface) -> str:
    """Return name and kind: ``eth0 (Ethernet)``."""
    return f"{interface.name} ({NAMES.get(interface.kind, interface.kind)})"


def networks(facts: HostFacts) -> Iterator[tuple[Interface, str, ipaddress.IPv4Network]]:
    """Yield the IPv4 addresses that other computers could use, with their networks."""
    for interface in facts.interfaces:
        if not interface.up or interface.kind in ("loopback", "virtual"):
            continue
        for address in interface.addresses:
            if ":" not in address.ip and address.prefix < 32:
                yield interface, address.ip, ipaddress.IPv4Network(f"{address.ip}/{address.prefix}", strict=False)


def pairs_between(first: HostFacts, second: HostFacts) -> list[HostPair]:
    """Return the addresses by which the two are in one network, the best first."""
    found = [
        HostPair((ip, other_ip), (interface, other))
        for interface, ip, network in networks(first)
        for other, other_ip, other_network in networks(second)
        if network == other_network and ip != other_ip
    ]
    return sorted(found, key=lambda pair: pair.rank, reverse=True)


def used(facts: HostFacts, ip: str) -> Interface | None:
    """Return the interface by which ``ip`` is reached."""
    route = facts.route_to(ip)
    if route is None:
        return None
    return facts.interface(route.interface) or (facts.interface_of(route.source) if route.source else None)


def ordered_pairs(cluster: Cluster) -> Iterator[tuple[HostReport, HostFacts, HostReport, HostFacts]]:
    """Yield every computer that answered with every other one, in both orders."""
    for (first, facts), (second, others) in itertools.permutations(cluster.answered(), 2):
        yield first, facts, second, others
