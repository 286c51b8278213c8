"""Which back-end moves the bytes, and why: a table of what can be, and a measurement where several can.

NCCL and JACCL win wherever they are possible. Between MPI's shared memory and the ring on one computer a measured
all-reduce decides, kept in the user's cache; without one the table does, in which MPI is the faster on Linux.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from allhands.blas import allowed_cores, cache_dir
from allhands.cluster import ssh
from allhands.cluster.figures import Figures, Measurement
from allhands.cluster.hosts import Host
from allhands.cluster.place import Launch
from allhands.errors import AllhandsError, ConfigError
from allhands.files import make_directory, write_whole
from allhands.formatting import format_duration
from allhands.versions import versions_of

Backend = Literal["ring", "mpi", "nccl", "jaccl"]

SMALL_BYTES, GRADIENT_BYTES = 4 << 10, 16 << 20
_SIZES = (SMALL_BYTES, 256 << 10, GRADIENT_BYTES)
_SMALL_A_STEP = 2  # exchanges of a few numbers beside the gradient
_MEASURED: tuple[Backend, ...] = ("mpi", "ring")  # between which a measurement decides
_BENCH_S, _ROUNDS_S = 8.0, 0.1
_WORTH_S = 300.0  # of training: then a few seconds that may halve its communication are well spent
_OLD_S = 30 * 86400.0
_ASK_S = 10.0
_VERSION = 1
_DAY = 86400.0

# Run by the Python of each host; the standard library only.
_QUESTION = """
import json, platform, re, shutil, subprocess, sys, os
def said(*argv):
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=6, stdin=subprocess.DEVNULL).stdout
    except Exception:
        return ""
beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
mpirun = beside if os.path.exists(beside) else shutil.which("mpirun")
found = re.search(r"Open MPI\\)? (\\d+\\.\\d+\\.\\d+)", said(mpirun, "--version")) if mpirun else None
gpus = sum(line.startswith("GPU ") for line in said("nvidia-smi", "-L").splitlines())
print("@" + json.dumps({"system": platform.system(), "gpus": gpus, "mpi": found.group(1) if found else None}))
"""


@dataclass(frozen=True)
class HostFacts:
    """What matters of one computer; ``None``: not known.

    Attributes:
        system: as ``platform.system()`` has it.
        gpus: NVIDIA GPUs that its ranks may use.
        mpi: the version of its Open MPI, empty if it has none.
        rdma: whether the hostfile names RDMA devices to the others.
        here: whether it is this one.
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
    """A job: its computers, in order.

    Attributes:
        by_agents: whether ranks are started by an agent on each computer, as those of every hostfile are.
    """

    hosts: tuple[HostFacts, ...]
    by_agents: bool = False

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return sum(host.num_ranks for host in self.hosts)


@dataclass(frozen=True)
class Candidate:
    """A back-end, whether it can be used, and why, or why not."""

    backend: Backend
    possible: bool
    reason: str


@dataclass(frozen=True)
class Choice:
    """The back-end to use.

    Attributes:
        reason: why this one.
        candidates: all, in the order in which they would be taken without a measurement.
        measured: seconds that a step's exchanges take, by back-end, if that decided.
        age_s: of the measurement; ``None``: there is none.
    """

    backend: Backend
    reason: str
    candidates: tuple[Candidate, ...]
    measured: Mapping[str, float] = field(default_factory=dict[str, float])
    age_s: float | None = None


# --- the table ----------------------------------------------------------------------------------------


def candidates(facts: Facts) -> list[Candidate]:
    """Every back-end that MLX has, best first where nothing is measured."""
    return [_nccl(facts), _jaccl(facts), _mpi(facts), Candidate("ring", True, "TCP: needs nothing but a network")]


def table_choice(facts: Facts) -> Choice:
    """The first back-end of the table that is possible."""
    found = candidates(facts)
    best = next(candidate for candidate in found if candidate.possible)
    return Choice(best.backend, best.reason, tuple(found))


def _nccl(facts: Facts) -> Candidate:
    for host in facts.hosts:
        if host.gpus is None:
            return Candidate("nccl", False, f"not known how many NVIDIA GPUs {host.name} has")
        if host.gpus < host.num_ranks or host.system not in (None, "Linux"):
            ranks = f"{host.num_ranks} rank{'s' * (host.num_ranks != 1)}"
            return Candidate("nccl", False, f"{host.name}: {host.gpus or 'no'} NVIDIA GPU for {ranks}")
    return Candidate("nccl", True, "every rank has an NVIDIA GPU")


def _jaccl(facts: Facts) -> Candidate:
    if len(facts.hosts) < 2:
        return Candidate("jaccl", False, "RDMA over Thunderbolt joins several Macs")
    if lacking := [host.name for host in facts.hosts if not host.rdma]:
        return Candidate("jaccl", False, f"the hostfile names no RDMA devices of {', '.join(lacking)}")
    if other := [host.name for host in facts.hosts if host.system != "Darwin"]:
        return Candidate("jaccl", False, f"{', '.join(other)}: not known to be a Mac")
    if any(host.num_ranks > 1 for host in facts.hosts):
        return Candidate("jaccl", False, "it takes one rank a Mac")
    return Candidate("jaccl", True, "RDMA over Thunderbolt")


def _mpi(facts: Facts) -> Candidate:
    if lacking := [host.name for host in facts.hosts if not host.mpi]:
        return Candidate("mpi", False, f"no Open MPI 5 found on {', '.join(lacking)}: pip install 'allhands[mpi]'")
    if len({host.mpi for host in facts.hosts}) > 1:
        versions = ", ".join(f"{host.name} has {host.mpi}" for host in facts.hosts)
        return Candidate("mpi", False, f"different versions of Open MPI: {versions}")
    if old := [host.mpi for host in facts.hosts if int((host.mpi or "0").partition(".")[0]) < 5]:
        return Candidate("mpi", False, f"Open MPI {old[0]} is too old: 5.0 or newer is needed")
    if len(facts.hosts) != 1:
        return Candidate("mpi", False, "the supervisor starts it on one computer only; for several use mpirun itself")
    (host,) = facts.hosts
    if facts.by_agents or not host.here:
        return Candidate("mpi", False, "it is for this computer alone, without a hostfile")
    if host.system != "Linux":
        # Possible there, too, but nobody has shown that it is faster.
        return Candidate("mpi", False, "only on Linux is it chosen by itself: give --backend mpi")
    return Candidate("mpi", True, f"Open MPI {host.mpi}, shared memory on one computer")


# --- facts --------------------------------------------------------------------------------------------


def facts_here(num_ranks: int) -> Facts:
    """Facts of this computer alone."""
    return Facts((_fact_here(socket.gethostname(), num_ranks, False),))


def facts_of(hosts: Sequence[Host], num_ranks: int | None = None, *, ask: bool = False) -> Facts:
    """Facts of a hostfile's computers, as far as they are known here.

    Args:
        num_ranks: of all together, in the order of the hosts; ``None``: all slots.
        ask: whether the others are asked over ssh, all at once, for no longer than ten seconds.
    """
    left, found = num_ranks, list[tuple[Host, int]]()
    for host in hosts:
        ranks = host.slots if left is None or len(hosts) == 1 else min(host.slots, left)
        ranks = num_ranks if num_ranks is not None and len(hosts) == 1 else ranks
        left = None if left is None else left - ranks
        found.append((host, ranks))
    with ThreadPoolExecutor(len(found)) as pool:
        return Facts(tuple(pool.map(lambda pair: _fact_of(*pair, ask=ask), [pair for pair in found if pair[1]])))


def _fact_of(host: Host, num_ranks: int, *, ask: bool) -> HostFacts:
    rdma = len(host.rdma) > 1 and any(device is not None for device in host.rdma)
    if host.ssh is None:
        return _fact_here(host.name, num_ranks, rdma)
    answer = _ask(host) if ask else {}
    mpi = (answer.get("mpi") or "") if answer else None
    return HostFacts(host.name, num_ranks, answer.get("system"), answer.get("gpus"), mpi, rdma, here=False)


def _fact_here(name: str, num_ranks: int, rdma: bool) -> HostFacts:
    # Only now: they need a moment, and the table alone needs neither.
    from allhands.cluster.mpi import find_mpi
    from allhands.gpus import nvidia_gpus

    mpi = find_mpi()
    version = ".".join(map(str, mpi.version)) if mpi else ""
    return HostFacts(name, num_ranks, platform.system(), nvidia_gpus(), version, rdma)


def _ask(host: Host) -> dict[str, Any]:
    """What the computer says of itself; empty if it says nothing."""
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
        answers = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("@{")]
        answer: dict[str, Any] = json.loads(answers[-1][1:]) if answers else {}
        return answer
    return {}


# --- measured -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seams:
    """The outside world of :func:`choose`, for tests.

    Attributes:
        measure: time one back-end with so many ranks here.
        directory: of the cache.
        now: seconds since the epoch.
    """

    measure: Callable[[str, int, int | None], Measurement] = field(default_factory=lambda: _measure)
    directory: Path = field(default_factory=cache_dir)
    now: Callable[[], float] = time.time


def choose(
    facts: Facts,
    *,
    training_s: float | None = None,
    gradient_bytes: int = GRADIENT_BYTES,
    cores_per_rank: int | None = None,
    seams: Seams | None = None,
) -> Choice:
    """Return the back-end for a job that leaves it open.

    Where only a measurement can tell, one of the last 30 days is taken from the cache; otherwise it is made, in a few
    seconds, if training is expected to be long enough to be worth that. What goes wrong with it decides nothing: then,
    and for short runs, the table does.

    Args:
        training_s: how long training may take, roughly; ``None``: not known, and nothing is measured.
        gradient_bytes: exchanged in every step.
    """
    by_table, seams = table_choice(facts), seams or Seams()
    if facts.num_ranks < 2:
        return replace(by_table, backend="ring", reason="one rank has nobody to exchange with")
    rivals = [one.backend for one in by_table.candidates if one.possible and one.backend in _MEASURED]
    if len(facts.hosts) > 1 or by_table.backend not in _MEASURED or len(rivals) < 2:
        return by_table
    path = seams.directory / "backends" / f"{_key(facts, cores_per_rank)}.json"
    found, age_s = _read(path, seams.now())
    if not found and training_s is not None and training_s >= _WORTH_S:
        found, age_s = _measure_all(rivals, facts.num_ranks, cores_per_rank, seams), 0.0
        _write(path, found, seams.now())
    if not set(rivals) <= set(found):
        return by_table
    times = {name: _step_s(figures, gradient_bytes) for name, figures in found.items() if name in rivals}
    best = cast(Backend, min(times, key=lambda name: times[name]))
    return Choice(best, "measured on this computer", by_table.candidates, times, age_s)


def slower_than_ours(
    launch: Launch, command: str, facts: Facts | None = None, seams: Seams | None = None
) -> str | None:
    """What to say to somebody whose ranks on one computer ``mlx.launch`` has joined by its ring; ``None``: nothing.

    It is said only where another back-end would be chosen for the same ranks: on Linux with Open MPI, unless it was
    measured to be slower here, and where each rank has an NVIDIA GPU.

    Args:
        command: of ours that starts as many, with its own choice.
    """
    if launch.launcher != "mlx.launch" or launch.backend != "ring" or not 1 < launch.size == launch.local_size:
        return None
    best = choose(facts or facts_here(launch.size), seams=seams)
    if best.backend == "ring":
        return None
    also = ", and so does mpirun" if best.backend == "mpi" else ""
    return (
        f"mlx.launch joins the processes of one computer over TCP (ring): {command} takes {best.backend}{also}, "
        f"which is faster here ({best.reason})"
    )


def explain(choice: Choice) -> list[str]:
    """Lines for people: what was chosen and why, the numbers, and what was not."""
    lines = [f"back-end {choice.backend}: {choice.reason}"]
    if choice.measured and choice.age_s is not None:
        age = "just now" if choice.age_s < 1 else f"{_age(choice.age_s)} ago"
        times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in sorted(choice.measured.items()))
        lines.append(f"  a step's exchanges take: {times} (measured {age})")
    unlike = [one for one in choice.candidates if not one.possible]
    return lines + [f"  not {one.backend}: {one.reason}" for one in unlike]


def _age(seconds: float) -> str:
    return f"{seconds / _DAY:.0f} days" if seconds >= 2 * _DAY else format_duration(seconds)


def _step_s(figures: Figures, gradient_bytes: int) -> float:
    """Seconds of what a step exchanges: the gradient, and a few numbers."""
    return figures.seconds(gradient_bytes) + _SMALL_A_STEP * figures.seconds(SMALL_BYTES)


def _measure(backend: str, num_ranks: int, cores_per_rank: int | None) -> Measurement:
    from allhands.cluster.netbench import BenchOptions, measure

    options = BenchOptions(
        sizes=_SIZES, timeout_s=_BENCH_S, links=False, seconds=_ROUNDS_S, cores_per_rank=cores_per_rank
    )
    return measure([Host(socket.gethostname(), slots=num_ranks)], backend, options)


def _measure_all(rivals: Sequence[str], num_ranks: int, cores_per_rank: int | None, seams: Seams) -> dict[str, Figures]:
    """Figures of those that could be measured, up to the size of a gradient."""
    found: dict[str, Figures] = {}
    for backend in rivals:
        with suppress(AllhandsError, OSError):
            whole = seams.measure(backend, num_ranks, cores_per_rank).whole
            if whole is not None:
                found[backend] = whole
    return found


def _key(facts: Facts, cores_per_rank: int | None) -> str:
    """What a measurement depends on: the computer, its ranks, and the versions of what moves the bytes."""
    parts: list[Any] = [
        _VERSION,
        socket.gethostname(),
        platform.machine(),
        allowed_cores(),
        facts.num_ranks,
        cores_per_rank,
    ]
    parts += [facts.hosts[0].mpi, facts.hosts[0].gpus]
    parts += versions_of("allhands", "mlx").values()
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _read(path: Path, now: float) -> tuple[dict[str, Figures], float | None]:
    """A measurement that is not too old, and its age; nothing if there is none, or it is not understood."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        age_s = now - float(content["time"])
        if 0 <= age_s <= _OLD_S:
            return {str(name): Figures.from_json(one) for name, one in content["figures"].items()}, age_s
    return {}, None


def _write(path: Path, found: Mapping[str, Figures], now: float) -> None:
    """Keep it, whole or not at all; a cache that cannot be written only costs the next measurement."""
    text = json.dumps({"time": now, "figures": {name: figures.as_json() for name, figures in found.items()}}, indent=1)
    with suppress(AllhandsError):
        make_directory(path.parent, private=True)
        write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"), private=True)
