"""Findings of the doctor, and the helpers with which checks write them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from allhands.cluster.doctor.facts import Cluster, HostFacts, HostReport

Severity = Literal["stop", "warn", "note"]
ORDER: tuple[Severity, ...] = ("stop", "warn", "note")
# Hosts (the one to repair comes first), severity, message and remedy of a finding.
Found = tuple[str | tuple[str, ...], Severity, str, str]
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        check: the name of the check, such as ``ports``.
        hosts: the computers with the fault; the one to repair comes first.
        severity: ``stop``: training would not start or not be right; ``warn``: it would be slow or
            may end early; ``note``: worth knowing.
        message: the fault, without the hosts' names at its beginning.
        remedy: a command for this computer's shell; the person replaces words in capitals.
    """

    check: str
    hosts: tuple[str, ...]
    severity: Severity
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """One question about a cluster.

    Attributes:
        name: the name that its findings bear.
        title: the name for people, shown when the check passes.
        look: finds the faults.
        applies: tells if the check was made; a check that was not made is not reported as passed.
        clean: tells if a check without findings passed; another check may report the fault.
    """

    name: str
    title: str
    look: Callable[[Cluster], Iterable[Found]]
    applies: Callable[[Cluster], bool] = lambda cluster: any(cluster.answered())
    clean: Callable[[Cluster], bool] = lambda cluster: True

    def findings(self, cluster: Cluster) -> list[Finding]:
        """Return the faults that this check finds."""
        return [
            Finding(
                self.name, (hosts,) if isinstance(hosts, str) else hosts, severity, message, remedy
            )
            for hosts, severity, message, remedy in self.look(cluster)
        ]


def on(host: HostReport, command: str) -> str:
    """Return the command line that runs a shell's ``command`` on ``host``, from this computer."""
    if host.ssh is None:
        return command
    terminal = "-t " if command.startswith("sudo ") else ""
    return f"ssh {terminal}{shlex.quote(host.ssh)} {shlex.quote(command)}"


def pip_install(host: HostReport, facts: HostFacts, *packages: str) -> str:
    """Return the command line that installs packages for the host's Python."""
    return on(
        host,
        shlex.join([facts.python.python_path or host.python, "-m", "pip", "install", *packages]),
    )


def new_hostfile(cluster: Cluster, changes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the command that writes a hostfile of these computers with ``changes`` by host name."""
    entries: list[dict[str, Any]] = []
    for host in cluster.hosts:
        entry: dict[str, Any] = {
            "ssh": host.ssh or "localhost",
            "ips": list(host.addresses),
            "slots": host.slots,
        }
        entry |= {"python": host.python} | ({"cwd": host.cwd} if host.cwd_given else {})
        entries.append({**entry, **changes.get(host.name, {})})
    return f"echo {shlex.quote(json.dumps(entries))} > better-hosts.json"


def on_mac(host: HostReport) -> bool:
    """Tell if the host is known to run macOS."""
    return host.facts is not None and host.facts.system.system == "Darwin"


def listed(names: Iterable[str], most: int = 4) -> str:
    """Join names: ``a, b and 3 more``."""
    names = list(names)
    shown = names if len(names) <= most else names[: most - 1]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def usual(values: Sequence[T]) -> T:
    """Return the most frequent value; of equally frequent ones the first."""
    return max(dict.fromkeys(values), key=values.count)
