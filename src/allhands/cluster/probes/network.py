"""Facts about the network of Linux, and routes on Linux and macOS."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import re
import socket
import struct
import sys
from typing import Any

from allhands.cluster.probes.tools import finished, output_of, text_of

_NET = "/sys/class/net"
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
KINDS_BY_NAME = (
    (r"lo\d*$", "loopback"),
    (r"(docker|br-|veth|virbr|cni|flannel|cali|podman|lxc|vnet|vmnet)", "virtual"),
    (r"(tun|tap|wg|utun|tailscale|zt|ipsec|gre|sit)\d*", "tunnel"),
    (r"(wl|wifi|ath\d)", "wifi"),
    (r"thunderbolt", "thunderbolt"),
    (r"ib\d", "infiniband"),
)
ARPHRD_INFINIBAND = "32"


def linux_interfaces() -> list[dict[str, Any]]:
    """Return every interface with its addresses, from ``ip`` or else from the kernel's files."""
    text = output_of(["ip", "-j", "-d", "addr"])
    entries = parse_ip_addr(text) if text else kernels_interfaces()
    for entry in entries:
        entry["kind"] = linux_kind(entry["name"], entry.pop("info_kind", ""))
        speed = (text_of(f"{_NET}/{entry['name']}/speed") or "").strip()
        entry["speed_mbps"] = int(speed) if speed.isdigit() and int(speed) > 0 else None
        entry["members"] = bridge_members(entry["name"])
    return entries


def parse_ip_addr(text: str) -> list[dict[str, Any]]:
    """Parse the JSON of ``ip -j -d addr``."""
    found: list[dict[str, Any]] = []
    for link in json.loads(text):
        if not link.get("ifname"):
            continue
        addresses = [
            {"ip": entry["local"], "prefix": entry["prefixlen"]}
            for entry in link.get("addr_info", [])
            if "local" in entry and "prefixlen" in entry
        ]
        found.append(
            {
                "name": link["ifname"],
                "up": "UP" in link.get("flags", []) and link.get("operstate") != "DOWN",
                "mtu": link.get("mtu"),
                "addresses": addresses,
                "info_kind": link.get("linkinfo", {}).get("info_kind", ""),
            }
        )
    return found


def kernels_interfaces() -> list[dict[str, Any]]:
    """Return the kernel's interfaces, with one IPv4 address each, where there is no ``ip``."""
    found: list[dict[str, Any]] = []
    for _, name in socket.if_nameindex():
        mtu = (text_of(f"{_NET}/{name}/mtu") or "").strip()
        state = (text_of(f"{_NET}/{name}/operstate") or "").strip()
        address, mask = asked_address(name, SIOCGIFADDR), asked_address(name, SIOCGIFNETMASK)
        prefix = ipaddress.ip_network(f"0.0.0.0/{mask}").prefixlen if mask else 32
        addresses = [{"ip": address, "prefix": prefix}] if address else []
        mtu_value = int(mtu) if mtu.isdigit() else None
        found.append(
            {"name": name, "up": state != "down", "mtu": mtu_value, "addresses": addresses}
        )
    return found


def asked_address(name: str, question: int) -> str | None:
    """Ask the kernel for an interface's IPv4 address or mask."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), question, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def linux_kind(name: str, info_kind: str) -> str:
    """Return the kind: wifi, ethernet, thunderbolt, infiniband, bridge, loopback, tunnel or
    virtual.
    """
    place = f"{_NET}/{name}"
    if os.path.isdir(place + "/wireless") or os.path.exists(place + "/phy80211"):
        return "wifi"
    if "thunderbolt" in os.path.realpath(place + "/device/driver"):
        return "thunderbolt"
    if (text_of(place + "/type") or "").strip() == ARPHRD_INFINIBAND:
        return "infiniband"
    for pattern, kind in KINDS_BY_NAME:
        if re.match(pattern, name):
            return kind
    if info_kind == "bridge" or os.path.isdir(place + "/bridge"):
        return "bridge"
    if info_kind in ("tun", "wireguard", "gre", "ipip", "sit", "vxlan"):
        return "tunnel"
    # In a container, its end of a veth pair serves as its cable.
    return "virtual" if info_kind in ("dummy", "ifb", "macvtap") else "ethernet"


def bridge_members(name: str) -> list[str]:
    """Return the interfaces that a bridge joins."""
    try:
        return sorted(os.listdir(f"{_NET}/{name}/brif"))
    except OSError:
        return []


def route_fact(ip: str) -> dict[str, Any]:
    """Return the route to ``ip``."""
    fact: dict[str, Any] = {
        "ip": ip,
        "interface": None,
        "gateway": None,
        "source": source_for(ip),
        "error": None,
    }
    if sys.platform == "darwin":
        done = finished(["route", "-n", "get", ip], 5.0)
        fact.update(parse_mac_route(done[1]) if done else {})
    else:
        done = finished(["ip", "-j", "route", "get", ip], 5.0)
        fact.update(parse_ip_route(done[1]) if done else {})
    if done is not None and fact["interface"] is None:
        fact["error"] = (done[2].strip().splitlines() or ["no route"])[-1][:200]
    return fact


def source_for(ip: str) -> str | None:
    """Return the address from which this computer would connect to ``ip``; nothing is sent."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((ip, 9))
            return str(asking.getsockname()[0])
    except OSError:
        return None


def parse_ip_route(text: str) -> dict[str, Any]:
    """Parse ``ip -j route get``."""
    try:
        route = json.loads(text)[0]
    except (ValueError, IndexError, KeyError):
        return {}
    return {"interface": route.get("dev"), "gateway": route.get("gateway")}


def parse_mac_route(text: str) -> dict[str, Any]:
    """Parse ``route -n get``."""
    values = dict(re.findall(r"^\s*(interface|gateway):\s*(\S+)", text, re.MULTILINE))
    return {"interface": values.get("interface"), "gateway": values.get("gateway")}


def linux_firewalls() -> list[dict[str, Any]]:
    """Return the firewalls that may block other computers; ``ways`` are ``in``, ``out`` or both."""
    found: list[dict[str, Any]] = []
    if ufw_enabled():
        found.append({"name": "ufw", "ways": ["in"]})
    if (output_of(["firewall-cmd", "--state"]) or "").strip() == "running":
        found.append({"name": "firewalld", "ways": ["in"]})
    for name, listing in (("iptables", ["iptables", "-S"]), ("nft", ["nft", "list", "ruleset"])):
        ways = shut_ways(output_of(listing) or "")
        if ways:
            found.append({"name": name, "ways": ways})
    return found


def ufw_enabled() -> bool:
    """Tell if ufw is enabled; every account may read that."""
    text = text_of("/etc/ufw/ufw.conf") or ""
    return bool(re.search(r"^ENABLED=yes", text, re.MULTILINE | re.IGNORECASE))


def shut_ways(text: str) -> list[str]:
    """Parse ``iptables -S`` or ``nft list ruleset`` to the blocked directions: ``in``, ``out``."""
    found: list[str] = []
    chains = re.split(r"^\s*chain ", text, flags=re.MULTILINE)[1:]
    for way, name, hook in (("in", "INPUT", "hook input"), ("out", "OUTPUT", "hook output")):
        rules = rf"^-P {name} (DROP|REJECT)|^-A {name}\b.* -j (DROP|REJECT)"
        shut = any(hook in chain and re.search(r"\b(drop|reject)\b", chain) for chain in chains)
        if shut or re.search(rules, text, re.MULTILINE):
            found.append(way)
    return found
