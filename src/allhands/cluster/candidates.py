"""The table of back-ends: which are possible on these computers, the best first.

Nothing is measured here.
"""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from allhands.cluster import ssh
from allhands.cluster.hosts import Backend, Host
from allhands.cluster.mpi import find_mpi
from allhands.errors import ConfigError
from allhands.runtime.gpus import nvidia_gpus
from allhands.runtime.threads import side_by_side

_ASK_S = 10.0

# The Python of each host runs this program. It may use only the standard library.
_QUESTION = """
import json, platform, subprocess
try:
    listed = subprocess.run(["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, timeout=6).stdout
except Exception:
    listed = b""
gpus = sum(line.startswith(b"GPU ") for line in listed.splitlines())
print("@" + json.dumps({"system": platform.system(), "gpus": gpus}))
"""


@dataclass(frozen=True)
class HostTraits:
    """The traits of one computer that decide which back-ends are possible; ``None``: not known.

    Attributes:
        system: the name that ``platform.system()`` returns.
        gpus: number of NVIDIA GPUs for its ranks.
        mpi: the version of its Open MPI; empty if it has none; looked up only for this computer.
        rdma: the hostfile names RDMA devices that lead to the other computers.
        here: true for the computer on which this process runs.
    """

    name: str
    num_ranks: int
    system: str | None = None
    gpus: int | None = None
    mpi: str | None = None
    rdma: bool = False
    here: bool = True


@dataclass(frozen=True)
class Facts:
    """The computers of a job, in order.

    Attributes:
        by_agents: an agent on each computer starts its ranks, as for every hostfile.
    """

    hosts: tuple[HostTraits, ...]
    by_agents: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all computers."""
        return sum(host.num_ranks for host in self.hosts)


@dataclass(frozen=True)
class Candidate:
    """A back-end, and the reason why it is possible or not."""

    backend: Backend
    possible: bool
    reason: str


@dataclass(frozen=True)
class Choice:
    """The back-end to use.

    Attributes:
        reason: why this one.
        candidates: all back-ends, in the order of the table.
        measured: seconds for the exchanges of one step, by back-end; empty if nothing measured
            decided.
        age_s: age of the measurement; ``None`` if there is none.
    """

    backend: Backend
    reason: str
    candidates: tuple[Candidate, ...]
    measured: Mapping[str, float] = field(default_factory=dict[str, float])
    age_s: float | None = None


# --- the table ------------------------------------------------------------------------------------


def candidates(facts: Facts) -> list[Candidate]:
    """Return every back-end of MLX, the best first."""
    return [
        _nccl(facts),
        _jaccl(facts),
        _mpi(facts),
        Candidate("ring", True, "TCP: needs nothing but a network"),
    ]


def table_choice(facts: Facts) -> Choice:
    """Return the first back-end of the table that is possible."""
    found = candidates(facts)
    best = next(candidate for candidate in found if candidate.possible)
    return Choice(best.backend, best.reason, tuple(found))


def _nccl(facts: Facts) -> Candidate:
    for host in facts.hosts:
        if host.gpus is None:
            return Candidate("nccl", False, f"not known how many NVIDIA GPUs {host.name} has")
        if host.gpus < host.num_ranks or host.system not in (None, "Linux"):
            ranks = f"{host.num_ranks} rank{'s' * (host.num_ranks != 1)}"
            return Candidate(
                "nccl", False, f"{host.name}: {host.gpus or 'no'} NVIDIA GPU for {ranks}"
            )
    return Candidate("nccl", True, "every rank has an NVIDIA GPU")


def _jaccl(facts: Facts) -> Candidate:
    if len(facts.hosts) < 2:
        return Candidate("jaccl", False, "RDMA over Thunderbolt joins several Macs")
    if lacking := [host.name for host in facts.hosts if not host.rdma]:
        return Candidate(
            "jaccl", False, f"the hostfile names no RDMA devices of {', '.join(lacking)}"
        )
    if other := [host.name for host in facts.hosts if host.system != "Darwin"]:
        return Candidate("jaccl", False, f"{', '.join(other)}: not known to be a Mac")
    if any(host.num_ranks > 1 for host in facts.hosts):
        return Candidate("jaccl", False, "it takes one rank a Mac")
    return Candidate("jaccl", True, "RDMA over Thunderbolt")


def _mpi(facts: Facts) -> Candidate:
    first, *others = facts.hosts
    if others or facts.by_agents or not first.here:
        reason = "the supervisor starts it on this computer alone, without a hostfile; for several use mpirun itself"
        return Candidate("mpi", False, reason)
    if not first.mpi:
        return Candidate(
            "mpi", False, f"no Open MPI 5 found on {first.name}: pip install 'allhands[mpi]'"
        )
    if int(first.mpi.partition(".")[0]) < 5:
        return Candidate("mpi", False, f"Open MPI {first.mpi} is too old: 5.0 or newer is needed")
    if first.system != "Linux":
        # Possible on other systems, but nobody has shown that it is faster.
        return Candidate(
            "mpi", False, "it is chosen automatically on Linux only: give --backend mpi"
        )
    return Candidate("mpi", True, f"Open MPI {first.mpi}, shared memory on one computer")


# --- facts ----------------------------------------------------------------------------------------


def facts_here(num_ranks: int) -> Facts:
    """Return the facts of this computer alone."""
    return facts_of([Host(socket.gethostname())], num_ranks)


def facts_of(hosts: Sequence[Host], num_ranks: int | None = None, *, ask: bool = False) -> Facts:
    """Return the facts of the computers of a hostfile, as far as they are known here.

    Args:
        num_ranks: number of all ranks, in the order of the hosts; ``None``: all slots.
        ask: also ask the other computers over ssh, all at the same time, for at most ten seconds.
    """
    left = sum(host.slots for host in hosts) if num_ranks is None else num_ranks
    found: list[tuple[Host, int]] = []
    for host in hosts:
        ranks = left if len(hosts) == 1 else min(host.slots, left)
        left -= ranks
        if ranks:
            found.append((host, ranks))
    return Facts(tuple(side_by_side(lambda pair: _fact_of(*pair, ask=ask), found)))


def _fact_of(host: Host, num_ranks: int, *, ask: bool) -> HostTraits:
    rdma = len(host.rdma) > 1 and any(device is not None for device in host.rdma)
    if host.ssh is None:
        mpi = find_mpi()
        version = ".".join(map(str, mpi.version)) if mpi else ""
        return HostTraits(host.name, num_ranks, platform.system(), nvidia_gpus(), version, rdma)
    answer = _ask(host) if ask else {}
    return HostTraits(
        host.name, num_ranks, answer.get("system"), answer.get("gpus"), rdma=rdma, here=False
    )


def _ask(host: Host) -> dict[str, Any]:
    """Return what the computer answers about itself; empty if it does not answer."""
    python = host.python or sys.executable
    with suppress(OSError, subprocess.TimeoutExpired, ValueError, ConfigError):
        done = subprocess.run(
            ssh.command(cast(str, host.ssh), [python, "-I", "-c", _QUESTION]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_ASK_S,
            check=False,
            start_new_session=True,
        )
        answers = [
            line
            for line in done.stdout.decode(errors="replace").splitlines()
            if line.startswith("@{")
        ]
        answer: dict[str, Any] = json.loads(answers[-1][1:]) if answers else {}
        return answer
    return {}
