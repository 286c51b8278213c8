"""The choice of a back-end: from the table of possible back-ends, or by a measurement.

NCCL and JACCL are used wherever they are possible. On one computer a measured all-reduce decides
between MPI with shared memory and the ring. The measurement is kept in the user's cache. Without a
measurement the table decides; there MPI comes before the ring.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from allhands.cluster.candidates import (
    Choice,
    Facts,
    facts_here,
    table_choice,
)
from allhands.cluster.figures import Figures, Measurement
from allhands.cluster.hosts import Backend, Host
from allhands.cluster.netbench import BenchOptions, measure
from allhands.cluster.place import LaunchPlace
from allhands.errors import AllhandsError
from allhands.io.files import make_directory, write_whole
from allhands.io.formatting import format_duration
from allhands.runtime.blas import allowed_cores, cache_dir
from allhands.runtime.versions import versions_of

SMALL_BYTES, GRADIENT_BYTES = 4 << 10, 16 << 20
_SIZES = (SMALL_BYTES, 256 << 10, GRADIENT_BYTES)
_SMALL_A_STEP = 2  # exchanges of a few numbers beside the gradient
_MEASURED: tuple[Backend, ...] = ("mpi", "ring")  # a measurement decides between these
_BENCH_S, _ROUNDS_S = 8.0, 0.1
_WORTH_S = 300.0  # a training at least this long is worth a few seconds of measurement
_OLD_S = 30 * 86400.0
_VERSION = 1
_DAY = 86400.0

# --- measured -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChoiceSeams:
    """What :func:`choose` needs from outside; tests replace it.

    Attributes:
        measure: measures a back-end on this computer; takes its name, the number of ranks and the
            number of cores per rank.
        directory: the cache.
        now: returns the seconds since the epoch.
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
    seams: ChoiceSeams | None = None,
) -> Choice:
    """Return the back-end for a job that leaves it open.

    Between MPI and the ring a measurement of the last 30 days decides. If the cache has none, and
    training is expected to be long, both are measured now, in a few seconds. The table decides for
    short runs, and after a measurement that has failed.

    Args:
        training_s: expected seconds of training; ``None``: not known, so nothing is measured.
        gradient_bytes: bytes of the gradient that every step exchanges.
    """
    by_table, seams = table_choice(facts), seams or ChoiceSeams()
    if facts.num_ranks < 2:
        return replace(by_table, backend="ring", reason="one rank exchanges nothing")
    possible = {one.backend for one in by_table.candidates if one.possible}
    if (
        len(facts.hosts) > 1
        or by_table.backend not in _MEASURED
        or not possible.issuperset(_MEASURED)
    ):
        return by_table
    path = seams.directory / "backends" / f"{_key(facts, cores_per_rank)}.json"
    found, age_s = _read(path, seams.now())
    if not found and (training_s or 0.0) >= _WORTH_S:
        found, age_s = _measured_anew(facts.num_ranks, cores_per_rank, seams, path), 0.0
    # The exchanges of a step: the gradient, and a few numbers.
    times = {
        name: one.seconds(gradient_bytes) + _SMALL_A_STEP * one.seconds(SMALL_BYTES)
        for name, one in found.items()
    }
    if not times.keys() >= set(_MEASURED):
        return by_table
    best = min(_MEASURED, key=lambda one: times[one])  # the first one if they are equal
    return Choice(best, "measured on this computer", by_table.candidates, times, age_s)


def _measured_anew(
    ranks: int, cores_per_rank: int | None, seams: ChoiceSeams, path: Path
) -> dict[str, Figures]:
    """Measure the back-ends, leave out those that fail, and keep the figures in the cache."""
    found: dict[str, Figures] = {}
    for backend in _MEASURED:
        with suppress(AllhandsError, OSError):
            if whole := seams.measure(backend, ranks, cores_per_rank).whole:
                found[backend] = whole
    content = {"time": seams.now(), "figures": {name: one.as_json() for name, one in found.items()}}
    with suppress(AllhandsError):  # if the cache cannot be written, the next run measures again
        make_directory(path.parent, private=True)
        write_whole(
            path, lambda draft: draft.write_text(json.dumps(content, indent=1)), private=True
        )
    return found


def slower_than_ours(
    launch: LaunchPlace, command: str, facts: Facts | None = None, seams: ChoiceSeams | None = None
) -> str | None:
    """Return a note if ``mlx.launch`` has started all ranks on one computer with the ring, and
    another back-end is better; otherwise ``None``.

    MPI is better on Linux with Open MPI, unless it was measured to be slower here. NCCL is better
    where each rank has an NVIDIA GPU.

    Args:
        command: our command that starts the same number of ranks.
    """
    if (
        launch.launcher != "mlx.launch"
        or launch.backend != "ring"
        or not 1 < launch.size == launch.local_size
    ):
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
    """Return lines for the user: the chosen back-end and why, the measured times, and why others
    are not possible.
    """
    lines = [f"back-end {choice.backend}: {choice.reason}"]
    if choice.measured and choice.age_s is not None:
        days = choice.age_s / _DAY
        age = f"{days:.0f} days ago" if days >= 2 else f"{format_duration(choice.age_s)} ago"
        age = "just now" if choice.age_s < 1 else age
        times = ", ".join(
            f"{name} {seconds * 1e3:.3g} ms" for name, seconds in sorted(choice.measured.items())
        )
        lines.append(f"  a step's exchanges take: {times} (measured {age})")
    unlike = [one for one in choice.candidates if not one.possible]
    return lines + [f"  not {one.backend}: {one.reason}" for one in unlike]


def _measure(backend: str, num_ranks: int, cores_per_rank: int | None) -> Measurement:
    options = BenchOptions(
        sizes=_SIZES,
        timeout_s=_BENCH_S,
        links=False,
        seconds=_ROUNDS_S,
        cores_per_rank=cores_per_rank,
    )
    return measure([Host(socket.gethostname(), slots=num_ranks)], backend, options)


def _key(facts: Facts, cores_per_rank: int | None) -> str:
    """Return the name of a measurement in the cache, made from the computer, its ranks, and the
    versions of the software.
    """
    here, (host, *_) = (socket.gethostname(), platform.machine(), allowed_cores()), facts.hosts
    versions = versions_of("allhands", "mlx").values()
    parts = [_VERSION, *here, facts.num_ranks, cores_per_rank, host.mpi, host.gpus, *versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _read(path: Path, now: float) -> tuple[dict[str, Figures], float | None]:
    """Return a measurement that is not too old, and its age.

    ``{}`` and ``None`` if there is no such measurement, or if the file is damaged.
    """
    with suppress(
        OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError
    ):
        content = json.loads(path.read_text(encoding="utf-8"))
        age_s = now - float(content["time"])
        if 0 <= age_s <= _OLD_S:
            return {
                str(name): Figures.from_json(one) for name, one in content["figures"].items()
            }, age_s
    return {}, None
