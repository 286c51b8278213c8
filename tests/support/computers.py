"""Computers that are well, made of facts alone, and the ways in which a test makes them ill."""

from __future__ import annotations

import itertools
from typing import Any

from allhands.cluster.doctor.facts import Cluster, File, HostFacts, HostReport, Login, Reach, Tree
from allhands.cluster.doctor.findings import Finding
from allhands.cluster.doctor.run import findings_of

GB = 10**9
VERSIONS = {"allhands": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}
MODEL = (
    File(name="config.json", size=700, sha256="c"),
    File(name="model.safetensors", size=8 * GB, sha256="m"),
)
DATA = (File(name="train.jsonl", size=5000, sha256="t"),)


def interface(name: str = "eth0", ip: str | None = "10.0.0.1", **more: Any) -> dict[str, Any]:
    """An interface with one address in a network of 254."""
    addresses = [{"ip": ip, "prefix": 24}] if ip else []
    return {"name": name, "kind": "ethernet", "mtu": 1500, "addresses": addresses, **more}


def facts(number: int = 1, **changes: Any) -> HostFacts:
    """What a healthy Linux computer tells: ``10.0.0.NUMBER`` on eth0, two cores, 32 GB."""
    content: dict[str, Any] = {
        "cwd": "/home/me/work",
        "system": {
            "hostname": f"node{number}",
            "user": "me",
            "system": "Linux",
            "machine": "x86_64",
            "machine_id": f"m{number}",
            "boot_id": f"b{number}",
            "network_id": "net:[1]",
        },
        "python": {
            "python_version": "3.11.7",
            "python_path": "/env/bin/python",
            "versions": VERSIONS,
        },
        "processor": {"model": "a processor", "count": 2, "usable": 2},
        "memory": {"total": 32 * GB, "free": 24 * GB},
        "limits": {"files": 65536, "locked": None},
        "disks": [disk(role) for role in ("work", "adapter", "temporary")],
        "mpi": {"path": "/env/bin/mpirun", "version": "5.0.8"},
        "interfaces": [
            interface("lo", "127.0.0.1", kind="loopback"),
            interface(ip=f"10.0.0.{number}"),
        ],
        "routes": [
            {"ip": f"10.0.0.{i}", "interface": "eth0", "source": f"10.0.0.{number}"}
            for i in range(1, 5)
        ],
    }
    return HostFacts.model_validate({**content, **changes})


def mac_facts(number: int = 1, **changes: Any) -> HostFacts:
    """What a healthy Mac tells: a Thunderbolt cable on en2 beside the Wi-Fi, kept awake, its
    display off.
    """
    content: dict[str, Any] = {
        "system": {
            "system": "Darwin",
            "machine": "arm64",
            "boot_id": f"b{number}",
            "machine_id": "",
        },
        "gpus": [{"kind": "metal", "name": "Apple M4 Max", "memory": 64 * GB, "free": 48 * GB}],
        "memory": {"total": 64 * GB, "free": 48 * GB},
        "mac": {"sleep_minutes": 0, "displays_on": 0, "firewall": False},
        "interfaces": [
            interface("en0", f"192.168.1.{number}", kind="wifi"),
            interface("en2", f"10.0.0.{number}", kind="thunderbolt"),
        ],
        "routes": [{"ip": f"10.0.0.{i}", "interface": "en2"} for i in range(1, 5)]
        + [{"ip": f"192.168.1.{i}", "interface": "en0"} for i in range(1, 5)],
        "rdma": {"devices": ["rdma_en2"], "status": "enabled"},
    }
    return facts(number, **{**content, **changes})


def disk(role: str, free: int = 500 * GB, error: str | None = None) -> dict[str, Any]:
    """Where files of a role go."""
    return {
        "role": role,
        "path": ".",
        "place": f"/{role}",
        "total": 10**12,
        "free": free,
        "device": 1,
        "error": error,
    }


def tree(
    role: str = "model",
    files: tuple[File, ...] = MODEL,
    path: str | None = "/models/m",
    **more: Any,
) -> Tree:
    """A copy of the model, or of the data."""
    return Tree.model_validate({"role": role, "source": "m", "path": path, "files": files, **more})


def host(number: int = 1, told: HostFacts | None = None, **changes: Any) -> HostReport:
    """``node1`` on, reached over ssh, with an address of the hostfile."""
    content: dict[str, Any] = {
        "name": f"node{number}",
        "ssh": f"node{number}",
        "addresses": (f"10.0.0.{number}",),
        "given": True,
        "python": "/env/bin/python",
        "cwd": "/home/me/work",
        "clock_offset_s": 0.01,
        "round_trip_s": 0.002,
        "facts": told or facts(number),
    }
    return HostReport.model_validate({**content, **changes})


def cluster(*hosts: HostReport, **changes: Any) -> Cluster:
    """The computers, ``node1`` to ``node3`` if none are given, all of which reach one another."""
    hosts = hosts or (host(1), host(2), host(3))
    content: dict[str, Any] = {
        "hosts": hosts,
        "reached": tuple(reach(a.name, b.name, b.addresses[0]) for a, b in _pairs(hosts)),
        "logins": tuple(Login(source=a.name, target=b.name, name=b.name) for a, b in _pairs(hosts)),
    }
    return Cluster.model_validate({**content, **changes})


def _pairs(hosts: tuple[HostReport, ...]) -> list[tuple[HostReport, HostReport]]:
    asked = [host for host in hosts if host.facts is not None and host.addresses]
    return list(itertools.permutations(asked, 2))


def reach(source: str, target: str, ip: str, outcome: str = "ok", ms: float | None = 0.2) -> Reach:
    """What came of connecting."""
    return Reach.model_validate(
        {"source": source, "target": target, "ip": ip, "outcome": outcome, "ms": ms}
    )


def with_outcomes(found: Cluster, outcomes: dict[tuple[str, str], str]) -> Cluster:
    """The same computers, of which some, by the names of both ends, do not reach others."""
    reached = [
        reach(one.source, one.target, one.ip, outcome, None)
        if (outcome := outcomes.get((one.source, one.target)))
        else one
        for one in found.reached
    ]
    return found.model_copy(update={"reached": tuple(reached)})


def told(found: Cluster) -> list[tuple[str, str, tuple[str, ...]]]:
    """Severity, check and hosts of every finding."""
    return [(finding.severity, finding.check, finding.hosts) for finding in findings_of(found)]


def only(found: Cluster) -> Finding:
    """The one finding that there is."""
    findings = findings_of(found)
    assert len(findings) == 1, [
        (finding.check, finding.hosts, finding.message) for finding in findings
    ]
    return findings[0]
