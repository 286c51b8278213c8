"""What a check says: which computers, how bad, what, and the command that helps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from allhands.cluster.doctor.facts import Cluster, HostReport

Severity = Literal["stop", "warn", "note"]
ORDER: dict[Severity, int] = {"stop": 0, "warn": 1, "note": 2}
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Finding:
    """One thing that is not well.

    Attributes:
        check: the name of the check, such as ``ports``.
        hosts: the computers that it is about; the one to repair comes first.
        severity: ``stop``: training would not start or not be right; ``warn``: it would be slow or may end early;
            ``note``: worth knowing.
        message: what is wrong, without the hosts' names at its beginning.
        remedy: a command for this computer's shell; words in capitals are for the person to fill in.
    """

    check: str
    hosts: tuple[str, ...]
    severity: Severity
    message: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """One question.

    Attributes:
        name: what findings bear.
        title: for people, when all is well.
        look: finds what is wrong.
        applies: whether the question was asked at all; if not, it is not told to be well.
        clean: whether all is well where nothing was found, which may be told elsewhere.
    """

    name: str
    title: str
    look: Callable[[Cluster], list[Finding]]
    applies: Callable[[Cluster], bool] = lambda cluster: any(cluster.answered())
    clean: Callable[[Cluster], bool] = lambda cluster: True


def on(host: HostReport, command: str) -> str:
    """The command line that runs a shell's ``command`` on ``host``, from this computer."""
    if host.ssh is None:
        return command
    terminal = "-t " if command.startswith("sudo ") else ""
    return f"ssh {terminal}{shlex.quote(host.ssh)} {shlex.quote(command)}"


def new_hostfile(cluster: Cluster, changes: Mapping[str, Mapping[str, Any]]) -> str:
    """The command that writes a hostfile of these computers with ``changes`` to some, by their names."""
    entries: list[dict[str, Any]] = []
    for host in cluster.hosts:
        entry: dict[str, Any] = {"ssh": host.ssh or "localhost", "ips": list(host.addresses), "slots": host.slots}
        entry |= {"python": host.python} | ({"cwd": host.cwd} if host.cwd_given else {})
        entries.append({**entry, **changes.get(host.name, {})})
    return f"echo {shlex.quote(json.dumps(entries))} > better-hosts.json"


def on_mac(host: HostReport) -> bool:
    """Whether it runs macOS, as far as it is known."""
    return host.facts is not None and host.facts.system.system == "Darwin"


def listed(names: Iterable[str], most: int = 4) -> str:
    """``a, b and 3 more``."""
    names = list(names)
    shown = names if len(names) <= most else names[: most - 1]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def usual(values: Sequence[T]) -> T:
    """The value that most have; of equally frequent ones the first."""
    return max(dict.fromkeys(values), key=values.count)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, otherwise as they came."""
    return sorted(findings, key=lambda finding: ORDER[finding.severity])
