"""The addresses by which the computers of a job reach each other, and the network interfaces."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import psutil

from allhands.cluster import ssh
from allhands.cluster.connection import HostError
from allhands.cluster.hosts import Host
from allhands.cluster.probes.network import source_for
from allhands.cluster.ranks import Place
from allhands.errors import ConfigError, DistributedError


def addresses(places: Sequence[Place]) -> list[str]:
    """Return for each computer the IPv4 address by which the others reach it."""
    found = [None if place.host.ssh is None else remote_address(place.host) for place in places]
    others = [address for address in found if address]
    return [
        address or _own_address(place.host, others)
        for place, address in zip(places, found, strict=True)
    ]


def require_distinct(hosts: Sequence[Host]) -> None:
    """Check that no computer is named twice, by two different names.

    A name that cannot be looked up now is skipped; the start reports it.

    Raises:
        ConfigError: two names have the same address.
    """
    known: dict[str, str] = {}
    for host in hosts if len(hosts) > 1 else ():
        try:
            address = None if host.ssh is None else remote_address(host)
        except (ConfigError, DistributedError):
            continue
        if address and (other := known.setdefault(address, host.name)) != host.name:
            raise ConfigError(
                f"{other} and {host.name} are one computer ({address})",
                code="host-given-twice",
                where="--hostfile, --hosts",
                hint=f"name it once, with two slots if it should have two ranks: {other}:2",
            )


def remote_address(host: Host) -> str:
    """Return the IPv4 address by which the others reach a computer.

    It comes from "ips" in the hostfile, or else from the name that ssh connects to.

    Raises:
        AllhandsError: the computer has no such address, or its name leads to a loopback address.
    """
    assert host.ssh is not None
    if address := _first_ipv4(host):
        return address
    name = ssh.real_name(host.ssh)
    try:
        address = str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise HostError(
            [host.name],
            f"host {host.name}: {name} has no IPv4 address: {error.strerror}",
            code="host-address-unknown",
            hint='give its address as "ips" in the hostfile',
        ) from None
    if address.startswith("127."):
        raise ConfigError(
            f"host {host.name}: {name} is {address}, which the other computers cannot reach",
            code="host-address-unusable",
            hint='give its address as "ips" in the hostfile',
        )
    return address


def _own_address(host: Host, others: Sequence[str]) -> str:
    """Return the address that this computer uses to reach the first of ``others``.

    If there are no others, it is the loopback address, because nobody else must reach it.
    """
    if address := _first_ipv4(host):
        return address
    if not others:
        return "127.0.0.1"
    if (own := source_for(others[0])) is None:
        raise DistributedError(f"there is no way from here to {others[0]}", code="host-unreachable")
    return own


def interface_to(address: str) -> str | None:
    """Return the name of the interface by which this computer reaches ``address``.

    ``None`` if there is no route, or no interface with the address that the route uses.
    """
    own = source_for(address)
    cards = psutil.net_if_addrs().items() if own else ()
    return next(
        (name for name, entries in cards if any(entry.address == own for entry in entries)), None
    )


def _first_ipv4(host: Host) -> str | None:
    ipv4 = [ip for ip in host.ips if ":" not in ip]
    if host.ips and not ipv4:
        raise ConfigError(
            f"host {host.name} has only IPv6 addresses",
            code="host-address-unusable",
            hint='MLX\'s ring needs an IPv4 address in "ips" of the hostfile',
        )
    return ipv4[0] if ipv4 else None
