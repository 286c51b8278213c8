"""Facts that only macOS has, parsed from the output of its programs."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, cast

from allhands.cluster.probes.tools import output_of

_SOCKETFILTER = "/usr/libexec/ApplicationFirewall/socketfilterfw"
# MLX asks Metal, in a process of its own; where MLX is missing the process fails.
_WORKING_SET = """
import mlx.core as mx
print(int(mx.device_info()["max_recommended_working_set_size"]))
"""
_CONNECTED = "receptacle_connected"


def mac_interfaces() -> list[dict[str, Any]]:
    """Return every interface with its addresses and kind."""
    ports = parse_hardware_ports(output_of(["networksetup", "-listallhardwareports"]) or "")
    return parse_ifconfig(output_of(["ifconfig", "-a"]) or "", ports)


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Parse ``networksetup -listallhardwareports`` to names of ports by device: ``{"en0":
    "Wi-Fi"}``.
    """
    pairs = re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", text)
    return {device: port for port, device in pairs}


def parse_ifconfig(text: str, ports: dict[str, str]) -> list[dict[str, Any]]:
    """Parse ``ifconfig -a``."""
    found: list[dict[str, Any]] = []
    for block in re.split(r"\n(?=\S)", text):
        head = re.match(r"(\S+): flags=\w+<([^>]*)>.*?\bmtu (\d+)", block)
        if not head:
            continue
        name, flags, mtu = head.groups()
        status = re.search(r"^\s*status: (\S+)", block, re.MULTILINE)
        found.append(
            {
                "name": name,
                "up": "UP" in flags.split(",") and (status is None or status.group(1) == "active"),
                "mtu": int(mtu),
                "addresses": parse_inet(block),
                "kind": mac_kind(name, ports.get(name, "")),
                "speed_mbps": media_speed(block),
                "members": re.findall(r"^\s*member: (\S+)", block, re.MULTILINE),
            }
        )
    return found


def parse_inet(block: str) -> list[dict[str, Any]]:
    """Parse the addresses of one interface."""
    four = re.findall(r"^\s*inet (\S+) (?:--> \S+ )?netmask 0x([0-9a-f]{8})", block, re.MULTILINE)
    six = re.findall(r"^\s*inet6 ([0-9a-fA-F:]+)\S* prefixlen (\d+)", block, re.MULTILINE)
    found: list[dict[str, Any]] = [
        {"ip": ip, "prefix": bin(int(mask, 16)).count("1")} for ip, mask in four
    ]
    return found + [{"ip": ip, "prefix": int(prefix)} for ip, prefix in six]


def media_speed(block: str) -> int | None:
    """Parse the Mbit/s of an Ethernet port."""
    found = re.search(r"media: .*?(\d+)(G?)base", block, re.IGNORECASE)
    return int(found.group(1)) * (1000 if found.group(2) else 1) if found else None


def mac_kind(name: str, port: str) -> str:
    """Return the kind: wifi, ethernet, thunderbolt, bridge, loopback, tunnel or virtual."""
    words = port.lower()
    if name.startswith("lo"):
        return "loopback"
    if "wi-fi" in words or "airport" in words:
        return "wifi"
    if name.startswith("bridge"):
        return "bridge"
    if re.match(r"thunderbolt( \d+)?$", words):
        return "thunderbolt"
    if re.match(r"(utun|ipsec|gif|stf|ppp)", name):
        return "tunnel"
    if re.match(r"(awdl|llw|anpi|ap\d|vmnet|vmenet|feth)", name):
        return "virtual"
    return "ethernet"


def mac_facts() -> dict[str, Any]:
    """Return sleep, display, firewall, Thunderbolt ports and the limit of GPU memory."""
    assertions = output_of(["pmset", "-g", "assertions"]) or ""
    return {
        "sleep_minutes": parse_sleep(output_of(["pmset", "-g"]) or ""),
        "kept_awake": kept_awake(assertions),
        "displays_on": parse_displays(output_of(["system_profiler", "SPDisplaysDataType"], 12.0)),
        "working_set": _number(output_of([sys.executable, "-c", _WORKING_SET], 12.0)),
        "wired_limit_mb": _number(output_of(["sysctl", "-n", "iogpu.wired_limit_mb"])),
        "firewall": parse_firewall(output_of([_SOCKETFILTER, "--getglobalstate"]) or ""),
        "blocks_all": parse_block_all(output_of([_SOCKETFILTER, "--getblockall"]) or ""),
        "thunderbolt": parse_thunderbolt(
            output_of(["system_profiler", "SPThunderboltDataType", "-json"], 12.0) or ""
        ),
    }


def _number(text: str | None) -> int | None:
    digits = (text or "").strip()
    return int(digits) if digits.isdigit() else None


def parse_sleep(text: str) -> int | None:
    """Parse ``pmset -g`` to the minutes until the computer sleeps; 0 is never."""
    found = re.search(r"^\s*sleep\s+(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def kept_awake(text: str) -> bool:
    """Parse ``pmset -g assertions``: tell if a program such as caffeinate keeps the computer awake."""
    counts = re.findall(
        r"^\s*(PreventUserIdleSystemSleep|PreventSystemSleep)\s+(\d+)", text, re.MULTILINE
    )
    return any(count != "0" for _, count in counts) or "(caffeinate)" in text


def parse_displays(text: str | None) -> int | None:
    """Parse ``system_profiler SPDisplaysDataType`` to the number of displays that are on; ``None``:
    not known.
    """
    if text is None:
        return None
    return max(
        0,
        len(re.findall(r"^\s*Resolution:", text, re.MULTILINE))
        - len(re.findall(r"Display Asleep: Yes", text)),
    )


def parse_firewall(text: str) -> bool | None:
    """Parse ``socketfilterfw --getglobalstate``: tell if macOS's firewall is on."""
    found = re.search(r"State = (\d)", text)
    if found:
        return found.group(1) != "0"
    return None if not text else "enabled" in text.lower()


def parse_block_all(text: str) -> bool:
    """Parse ``socketfilterfw --getblockall``: tell if it blocks all incoming connections."""
    return "enabled" in text.lower()


def parse_thunderbolt(text: str) -> list[dict[str, Any]]:
    """Parse ``system_profiler SPThunderboltDataType -json`` to the ports."""
    try:
        buses = cast("list[dict[str, Any]]", json.loads(text)["SPThunderboltDataType"] or [])
    except (ValueError, KeyError, TypeError):
        return []
    found: list[dict[str, Any]] = []
    for bus in buses:
        items = cast("list[dict[str, str]]", bus.get("_items") or [])
        peers = [item["domain_uuid_key"] for item in items if "domain_uuid_key" in item]
        for key, port in bus.items():
            if re.fullmatch(r"receptacle_\d+_tag", key) and isinstance(port, dict):
                found.append(thunderbolt_port(bus, cast("dict[str, Any]", port), peers))
    return found


def thunderbolt_port(bus: dict[str, Any], port: dict[str, Any], peers: list[str]) -> dict[str, Any]:
    """Return one receptacle; ``domain`` is the id of this computer's end, ``peers`` are the ids of
    the computers plugged in.
    """
    return {
        "receptacle": str(port.get("receptacle_id_key", "?")),
        "connected": port.get("receptacle_status_key") == _CONNECTED,
        "speed": str(port.get("current_speed_key", "")),
        "domain": str(bus.get("domain_uuid_key", "")),
        "peers": peers,
    }
