"""Which address of each computer the others shall use: pure, from the interfaces that each one tells of."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from allhands.cluster.doctor.facts import HostFacts, Interface

# The best first: a cable between two computers, a cable to a switch, the air.
_ORDER = ("infiniband", "thunderbolt", "ethernet", "bridge", "wifi")
# A network of addresses that computers made up for themselves is used only where there is nothing else but Wi-Fi.
_MADE_UP = _ORDER.index("wifi") - 0.5
_NAMES = {"infiniband": "InfiniBand", "thunderbolt": "Thunderbolt", "wifi": "Wi-Fi"}

Network = ipaddress.IPv4Network


@dataclass(frozen=True)
class NetworkChoice:
    """An address, the interface that has it, and what kind of a cable that is."""

    ip: str
    interface: str
    kind: str


@dataclass(frozen=True)
class Chosen:
    """The addresses by the computers' names, and why these.

    Attributes:
        choices: empty if no network has all of them.
        why: in a sentence.
        warning: what may be wrong with them.
    """

    choices: Mapping[str, NetworkChoice]
    why: str
    warning: str | None = None


def choose(facts: Mapping[str, HostFacts]) -> Chosen:
    """Choose the network that has all of the computers and whose slowest part is the fastest."""
    found = {name: dict(_networks(one)) for name, one in facts.items()}
    shared = set.intersection(*(set(networks) for networks in found.values())) if found else set[Network]()
    if not shared:
        tell = "; ".join(f"{name}: {', '.join(map(str, networks)) or 'none'}" for name, networks in found.items())
        return Chosen({}, f"no network has all of the computers ({tell})")
    ranked = sorted(shared, key=lambda network: (_worst(found, network), -network.prefixlen, network))
    best = ranked[0]
    choices = {name: networks[best] for name, networks in found.items()}
    return Chosen(choices, _why(found, ranked), _warning(choices, best))


def _networks(facts: HostFacts) -> Iterator[tuple[Network, NetworkChoice]]:
    """The IPv4 networks of a computer, each with the best of its interfaces there; that comes last."""
    for interface in sorted(facts.interfaces, key=lambda one: _rank(_kind(one, facts)), reverse=True):
        kind = _kind(interface, facts)
        if kind not in _ORDER or not interface.up:
            continue
        for address in interface.addresses:
            if ":" not in address.ip and address.prefix < 32:
                network = Network(f"{address.ip}/{address.prefix}", strict=False)
                yield network, NetworkChoice(address.ip, interface.name, kind)


def _kind(interface: Interface, facts: HostFacts) -> str:
    """What a bridge joins counts: macOS has one over its Thunderbolt ports."""
    if interface.kind != "bridge":
        return interface.kind
    members = [facts.interface(name) for name in interface.members]
    kinds = {member.kind for member in members if member is not None}
    if kinds == {"thunderbolt"}:
        return "thunderbolt"
    # A bridge of containers leads to no other computer.
    return "bridge" if kinds & set(_ORDER) else "virtual"


def _rank(kind: str) -> float:
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _worst(found: Mapping[str, Mapping[Network, NetworkChoice]], network: Network) -> float:
    worst = max(_rank(networks[network].kind) for networks in found.values())
    return max(worst, _MADE_UP) if network.is_link_local else worst


def _why(found: Mapping[str, Mapping[Network, NetworkChoice]], ranked: list[Network]) -> str:
    best = ranked[0]
    text = f"{best} has all of them, over {_kinds(found, best)}"
    others = [f"{network} ({_kinds(found, network)})" for network in ranked[1:]]
    return f"{text}; rather than {', '.join(others)}" if others else text


def _kinds(found: Mapping[str, Mapping[Network, NetworkChoice]], network: Network) -> str:
    kinds = {networks[network].kind for networks in found.values()}
    return " and ".join(_NAMES.get(kind, kind) for kind in sorted(kinds, key=_rank))


def _warning(choices: Mapping[str, NetworkChoice], network: Network) -> str | None:
    if network.is_link_local:
        return "these addresses were made up by the computers and may change: give the interfaces fixed ones"
    if wireless := [name for name, choice in choices.items() if choice.kind == "wifi"]:
        return f"{', '.join(wireless)}: over Wi-Fi, which is many times slower than a cable"
    return None
