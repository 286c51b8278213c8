"""Network paths between computers, computed from their interfaces."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from allhands.cluster.doctor.facts import HostFacts, Interface

# The best first: a cable between two computers, a cable to a switch, the air.
KINDS = ("infiniband", "thunderbolt", "ethernet", "bridge", "wifi")
CABLES = KINDS[:3]
# A network of link-local addresses ranks after all kinds but Wi-Fi.
_LINK_LOCAL = KINDS.index("wifi") - 0.5
_NAMES = {
    "wifi": "Wi-Fi",
    "ethernet": "Ethernet",
    "thunderbolt": "Thunderbolt",
    "infiniband": "InfiniBand",
}

Network = ipaddress.IPv4Network


@dataclass(frozen=True)
class NetworkChoice:
    """An address, its interface, and the kind of the interface."""

    ip: str
    interface: str
    kind: str


@dataclass(frozen=True)
class NetworkChoices:
    """The addresses by the computers' names.

    Attributes:
        choices: empty if no network has all of them.
        why: the reason, in a sentence.
        warning: a possible fault of the choice.
    """

    choices: Mapping[str, NetworkChoice]
    why: str
    warning: str | None = None


def kind_name(kind: str) -> str:
    """Return the name of a kind of interface for people."""
    return _NAMES.get(kind, kind)


def rank_of(*kinds: str) -> int:
    """Return the rank of the worst of some kinds of interfaces; the best is 0."""
    return max(KINDS.index(kind) if kind in KINDS else len(KINDS) for kind in kinds)


def networks(facts: HostFacts) -> Iterator[tuple[Interface, str, Network]]:
    """Yield the IPv4 addresses that other computers could use, with their networks."""
    for interface in facts.interfaces:
        if not interface.up or interface.kind in ("loopback", "virtual"):
            continue
        for address in interface.addresses:
            if ":" not in address.ip and address.prefix < 32:
                yield interface, address.ip, Network(f"{address.ip}/{address.prefix}", strict=False)


def used(facts: HostFacts, ip: str) -> Interface | None:
    """Return the interface by which ``ip`` is reached."""
    if (route := facts.route_to(ip)) is None:
        return None
    return facts.interface(route.interface) or (
        facts.interface_of(route.source) if route.source else None
    )


def choose(facts: Mapping[str, HostFacts]) -> NetworkChoices:
    """Choose the network that all computers share and whose slowest interface is the fastest."""
    found = {name: _choices(one) for name, one in facts.items()}
    networks_of = list(map(set[Network], found.values())) or [set[Network]()]
    shared = networks_of[0].intersection(*networks_of[1:])
    if not shared:
        listed = "; ".join(
            f"{name}: {', '.join(map(str, own)) or 'none'}" for name, own in found.items()
        )
        return NetworkChoices({}, f"no network has all of the computers ({listed})")
    best, *others = sorted(
        shared, key=lambda network: (_rank(network, found), -network.prefixlen, network)
    )
    why = f"{best} has all of them, over {_kinds(best, found)}"
    if others:
        why += f"; rather than {', '.join(f'{network} ({_kinds(network, found)})' for network in others)}"
    choices = {name: own[best] for name, own in found.items()}
    wireless = [name for name, choice in choices.items() if choice.kind == "wifi"]
    warning = (
        f"{', '.join(wireless)}: over Wi-Fi, which is many times slower than a cable"
        if wireless
        else None
    )
    if best.is_link_local:
        warning = "these are link-local addresses, which may change: give the interfaces fixed ones"
    return NetworkChoices(choices, why, warning)


def _kinds(network: Network, found: Mapping[str, Mapping[Network, NetworkChoice]]) -> str:
    kinds = sorted({own[network].kind for own in found.values()}, key=KINDS.index)
    return " and ".join(map(kind_name, kinds))


def _rank(network: Network, found: Mapping[str, Mapping[Network, NetworkChoice]]) -> float:
    rank = rank_of(*(own[network].kind for own in found.values()))
    return max(rank, _LINK_LOCAL) if network.is_link_local else rank


def _choices(facts: HostFacts) -> dict[Network, NetworkChoice]:
    """Return the IPv4 networks of a computer, each with the best of its interfaces there."""
    found = [
        (network, NetworkChoice(ip, one.name, _kind(one, facts)))
        for one, ip, network in networks(facts)
    ]
    return dict(
        sorted(
            (pair for pair in found if pair[1].kind in KINDS),
            key=lambda pair: -rank_of(pair[1].kind),
        )
    )


def _kind(interface: Interface, facts: HostFacts) -> str:
    """Return the kind of an interface; a bridge is as good as its members: macOS has one over
    Thunderbolt ports.
    """
    if interface.kind != "bridge":
        return interface.kind
    kinds = {
        member.kind for name in interface.members if (member := facts.interface(name)) is not None
    }
    if kinds == {"thunderbolt"}:
        return "thunderbolt"
    # A bridge of containers leads to no other computer.
    return "bridge" if kinds & set(KINDS) else "virtual"
