"""The choice of each computer's address for the others, from the interfaces that each one reports."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from allhands.cluster.doctor.facts import HostFacts, Interface
from allhands.cluster.doctor.paths import networks

# The best first: a cable between two computers, a cable to a switch, the air.
_ORDER = ("infiniband", "thunderbolt", "ethernet", "bridge", "wifi")
# A network of link-local addresses is better than Wi-Fi only.
_LINK_LOCAL = _ORDER.index("wifi") - 0.5
_NAMES = {"infiniband": "InfiniBand", "thunderbolt": "Thunderbolt", "wifi": "Wi-Fi"}

Network = ipaddress.IPv4Network


@dataclass(frozen=True)
class NetworkChoice:
    """An address, its interface, and the kind of the interface."""

    ip: str
    interface: str
    kind: str


@dataclass(frozen=True)
class Chosen:
    """The addresses by the computers' names.

    Attributes:
        choices: empty if no network has all of them.
        why: the reason, in a sentence.
        warning: a possible fault of the choice.
    """

    choices: Mapping[str, NetworkChoice]
    why: str
    warning: str | None = None


def choose(facts: Mapping[str, HostFacts]) -> Chosen:
    """Choose the network that has all of the computers and whose slowest part is the fastest."""
    found = {name: _networks(one) for name, one in facts.items()}
    shared = set.intersection(*map(set[Network], found.values())) if found else set[Network]()
    if not shared:
        listed = "; ".join(f"{name}: {', '.join(map(str, own)) or 'none'}" for name, own in found.items())
        return Chosen({}, f"no network has all of the computers ({listed})")
    kinds = {network: sorted({own[network].kind for own in found.values()}, key=_ORDER.index) for network in shared}
    ranked = sorted(shared, key=lambda network: (_rank(network, kinds[network][-1]), -network.prefixlen, network))
    best = ranked[0]
    over, *others = (" and ".join(_NAMES.get(kind, kind) for kind in kinds[network]) for network in ranked)
    why = f"{best} has all of them, over {over}"
    if others:
        words = (f"{network} ({kinds})" for network, kinds in zip(ranked[1:], others, strict=True))
        why += f"; rather than {', '.join(words)}"
    choices = {name: own[best] for name, own in found.items()}
    return Chosen(choices, why, _warning(choices, best))


def _rank(network: Network, worst: str) -> float:
    rank = _ORDER.index(worst)
    return max(rank, _LINK_LOCAL) if network.is_link_local else rank


def _warning(choices: Mapping[str, NetworkChoice], network: Network) -> str | None:
    if network.is_link_local:
        return "these addresses were made up by the computers and may change: give the interfaces fixed ones"
    if wireless := [name for name, choice in choices.items() if choice.kind == "wifi"]:
        return f"{', '.join(wireless)}: over Wi-Fi, which is many times slower than a cable"
    return None


def _networks(facts: HostFacts) -> dict[Network, NetworkChoice]:
    """Return the IPv4 networks of a computer, each with the best of its interfaces there."""
    found = [(network, NetworkChoice(ip, one.name, _kind(one, facts))) for one, ip, network in networks(facts)]
    usable = [(network, choice) for network, choice in found if choice.kind in _ORDER]
    return dict(sorted(usable, key=lambda pair: _ORDER.index(pair[1].kind), reverse=True))


def _kind(interface: Interface, facts: HostFacts) -> str:
    """Return the kind of an interface; a bridge is as good as its members: macOS has one over Thunderbolt ports."""
    if interface.kind != "bridge":
        return interface.kind
    kinds = {member.kind for name in interface.members if (member := facts.interface(name)) is not None}
    if kinds == {"thunderbolt"}:
        return "thunderbolt"
    # A bridge of containers leads to no other computer.
    return "bridge" if kinds & set(_ORDER) else "virtual"
