"""Macs on Thunderbolt cables: MLX's own configurator gives the ports addresses and finds the RDMA
devices.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.hosts import hostfile_backend, read_hostfile
from allhands.cluster.setup.plan import Step
from allhands.errors import ConfigError

_TOOL = "mlx.distributed_config"
_TIMEOUT_S = 900.0
_RDMA = "rdma_"


@dataclass(frozen=True)
class Wiring:
    """The result of the configurator.

    Attributes:
        backend: the back-end for MLX.
        envs: environment variables.
        hosts: addresses and RDMA devices by ssh's words, in the order in which the devices count.
    """

    backend: str | None
    envs: tuple[str, ...]
    hosts: Mapping[str, tuple[tuple[str, ...], tuple[Any, ...]]]


def joined(facts: Sequence[HostFacts]) -> bool:
    """Tell if these are Macs, each with a Thunderbolt cable to another one of them."""
    macs = [one.mac for one in facts if one.mac is not None]
    if len(macs) < max(2, len(facts)):
        return False
    return all(any(mac.plugged_into(other) for other in macs if other is not mac) for mac in macs)


def backend_of(facts: Sequence[HostFacts]) -> str:
    """Return JACCL where every Mac has RDMA over Thunderbolt, else the ring."""
    able = all(any(device.startswith(_RDMA) for device in one.rdma.devices) for one in facts)
    return "jaccl" if able else "ring"


def configure_step(targets: Sequence[str], backend: str, output: Path) -> Step:
    """Return the step that sets up the ports of ``targets``, which are ssh's names, and writes
    ``output``.

    If sudo needs a password, the configurator prints commands to run on each Mac, and waits.
    """
    beside = Path(sys.executable).with_name(_TOOL)  # not resolved: a venv's python is a link
    tool = str(beside) if beside.exists() else shutil.which(_TOOL) or _TOOL
    words = ("--hosts", ",".join(targets), "--over", "thunderbolt", "--backend", backend)
    argv = (tool, *words, "--auto-setup", "--output-hostfile", str(output))
    why = "give the Thunderbolt ports addresses (takes bridge0 down; uses sudo)"
    return Step("", why, argv, terminal=True, timeout_s=_TIMEOUT_S)


def read_wiring(path: Path) -> Wiring:
    """Read the configurator's output.

    Raises:
        ConfigError: it is not understood.
    """
    hosts = read_hostfile(path)
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    entries = cast(
        "list[dict[str, Any]]", content["hosts"] if isinstance(content, dict) else content
    )
    if len(hosts) != len(entries):
        raise ConfigError("a host is in it twice", code="host-given-twice", where=str(path))
    envs = tuple(f"{name}={value}" for name, value in (hosts[0].envs.items()))
    found = {
        entry["ssh"]: (host.ips, host.rdma) for entry, host in zip(entries, hosts, strict=True)
    }
    return Wiring(hostfile_backend(path), envs, found)
