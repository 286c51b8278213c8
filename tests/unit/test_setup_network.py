"""Which addresses set-up chooses: from interfaces as computers tell of them."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.doctor.paths import choose

CABLE, WIFI = ("en0", "ethernet", "192.168.1.{n}/24"), ("en1", "wifi", "192.168.2.{n}/24")
THUNDERBOLT = ("en5", "thunderbolt", "10.10.0.{n}/30")


def computer(number: int, *interfaces: tuple[Any, ...]) -> HostFacts:
    """Facts of computer ``number``; each interface is (name, kind, address/prefix, what else
    differs).
    """
    found: list[dict[str, Any]] = []
    for name, kind, address, *more in interfaces:
        ip, _, prefix = address.format(n=number).partition("/")
        entry = {"name": name, "kind": kind, "addresses": [{"ip": ip, "prefix": int(prefix)}]}
        found.append(entry | (more[0] if more else {}))
    return HostFacts.model_validate({"interfaces": found})


def pair(*interfaces: tuple[Any, ...]) -> dict[str, HostFacts]:
    return {"a": computer(1, *interfaces), "b": computer(2, *interfaces)}


@pytest.mark.parametrize(
    ("facts", "ips", "interface"),
    [
        (pair(CABLE, WIFI), ["192.168.1.1", "192.168.1.2"], "en0"),
        (pair(WIFI, CABLE, THUNDERBOLT), ["10.10.0.1", "10.10.0.2"], "en5"),
        (pair(WIFI), ["192.168.2.1", "192.168.2.2"], "en1"),
        # The cable of one is of no use if the other is on Wi-Fi only.
        (
            {"a": computer(1, CABLE, WIFI), "b": computer(2, WIFI)},
            ["192.168.2.1", "192.168.2.2"],
            "en1",
        ),
        # One network over both: the cable's address in it.
        (
            pair(("en1", "wifi", "10.0.0.{n}/24"), ("en0", "ethernet", "10.0.0.10{n}/24")),
            ["10.0.0.101", "10.0.0.102"],
            "en0",
        ),
        # What is down, or leads nowhere, does not count.
        (pair(WIFI, (*CABLE, {"up": False})), ["192.168.2.1", "192.168.2.2"], "en1"),
        (
            pair(WIFI, ("docker0", "virtual", "172.17.0.{n}/16")),
            ["192.168.2.1", "192.168.2.2"],
            "en1",
        ),
        (
            pair(CABLE, ("tailscale0", "tunnel", "100.64.0.{n}/10")),
            ["192.168.1.1", "192.168.1.2"],
            "en0",
        ),
        # Addresses that computers made up: rather than Wi-Fi, but not rather than a network of a
        # person's own.
        (
            pair(WIFI, ("en5", "thunderbolt", "169.254.7.{n}/16")),
            ["169.254.7.1", "169.254.7.2"],
            "en5",
        ),
        (
            pair(CABLE, ("en5", "thunderbolt", "169.254.7.{n}/16")),
            ["192.168.1.1", "192.168.1.2"],
            "en0",
        ),
    ],
)
def test_the_network_whose_slowest_part_is_the_fastest(
    facts: dict[str, HostFacts], ips: list[str], interface: str
) -> None:
    chosen = choose(facts)
    assert [choice.ip for choice in chosen.choices.values()] == ips
    assert chosen.choices["b"].interface == interface


def test_macos_bridges_its_thunderbolt_ports() -> None:
    bridge = ("bridge0", "bridge", "10.9.0.{n}/24", {"members": ["en5"]})
    port = {"name": "en5", "kind": "thunderbolt"}
    facts = pair(CABLE, bridge)
    whole = {
        name: HostFacts.model_validate(
            {"interfaces": [*(i.model_dump() for i in one.interfaces), port]}
        )
        for name, one in facts.items()
    }
    assert choose(whole).choices["a"].kind == "thunderbolt"
    # A bridge of nothing else than containers leads to no other computer.
    assert choose(facts).choices["a"].interface == "en0"


def test_what_is_said_about_the_choice() -> None:
    chosen = choose(pair(WIFI, CABLE))
    assert (
        chosen.why
        == "192.168.1.0/24 has all of them, over Ethernet; rather than 192.168.2.0/24 (Wi-Fi)"
    )
    assert chosen.warning is None
    assert "a, b: over Wi-Fi" in (choose(pair(WIFI)).warning or "")
    assert choose(pair(("en5", "thunderbolt", "169.254.7.{n}/16"))).warning
    assert choose(pair(("en5", "thunderbolt", "10.7.0.{n}/24"))).warning is None


def test_no_network_has_all() -> None:
    chosen = choose({"a": computer(1, CABLE), "b": computer(2, WIFI)})
    assert chosen.choices == {}
    assert "a: 192.168.1.0/24; b: 192.168.2.0/24" in chosen.why
    # Computers of the same network number behind masks of different length are not in one network.
    other = computer(2, ("en0", "ethernet", "192.168.1.{n}/25"))
    assert choose({"a": computer(1, CABLE), "b": other}).choices == {}
