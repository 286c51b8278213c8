"""Samples of one process as lines of JSON, and the files of a run's directory that hold such lines."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from allhands.errors import DataError
from allhands.io.paths import meant

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Role = Literal["orchestrator", "agent", "rank"]
LOGS = "logs"
_PATTERN = "monitor-*.jsonl"
_NUMBERS = 2**31  # ranks and process ids are lower
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Sample:
    """Memory, load and phase of one process at one moment.

    ``role`` is ``rank`` for a worker, ``orchestrator`` for the process that starts and watches the
    ranks, ``agent`` for its helper on another computer. ``time`` is Unix time in seconds,
    ``every_s`` the time to the next sample.

    Attributes:
        run: the same for all processes of a job; ``attempt`` counts its starts, from 1.
        rss_bytes: resident memory, shared pages in full. ``peak_rss_bytes``: the highest so far.
        pss_bytes: resident memory, each shared page divided by the number of processes that map it,
            so that a sum over processes counts it once. It is read less often where reading takes
            long. Where the system does not know it, it is the memory of this process alone
            (``pss_kind`` is ``uss``) or that of ``rss_bytes`` (``rss``).
        cpu_cores: cores kept busy since the last sample: 1.5 is one and a half.
        net: bytes that the whole computer has sent and received since the process's first sample,
            by network interface.
        mlx_active_bytes: bytes of MLX's arrays; ``mlx_cache_bytes``: of freed buffers that it
            keeps; ``mlx_peak_bytes``: the most of the arrays so far. ``None`` where MLX is not
            loaded, or not yet in use.
        gpu_used_bytes: bytes of the rank's NVIDIA GPU in use by any process, out of
            ``gpu_total_bytes``; ``gpu_load`` is the share of time in which the GPU computed.
        step: optimizer updates done. ``phase`` is the present phase of the training thread,
            ``phases`` the seconds of each phase since the last sample.
        estimated_bytes: memory that the process was expected to need, if that was estimated;
            ``mlx_estimated_bytes``: the same of MLX's arrays on a GPU.
        ended: True if this is the process's last sample.
        began: Unix time in seconds at which the process itself began, before anything was loaded.
    """

    time: float
    role: Role
    rank: int | None
    host: str
    pid: int
    run: str
    attempt: int
    every_s: float
    rss_bytes: int
    pss_bytes: int
    pss_kind: Literal["pss", "uss", "rss"]
    peak_rss_bytes: int
    cpu_cores: float
    net: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    mlx_active_bytes: int | None = None
    mlx_cache_bytes: int | None = None
    mlx_peak_bytes: int | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_load: float | None = None
    step: int | None = None
    phase: str | None = None
    phases: dict[str, float] = field(default_factory=dict[str, float])
    estimated_bytes: int | None = None
    mlx_estimated_bytes: int | None = None
    ended: bool = False
    began: float | None = None

    @property
    def name(self) -> str:
        """The process's name in its run: ``rank 0``, ``orchestrator``, ``agent on node1``."""
        if self.role == "rank":
            return f"rank {self.rank}"
        return self.role if self.role == "orchestrator" else f"agent on {self.host}"


@cache
def _reader() -> TypeAdapter[Sample]:
    from pydantic import TypeAdapter  # not loaded to write samples

    return TypeAdapter(Sample)


def encode_sample(sample: Sample) -> str:
    """Return the sample as one line of JSON, without fields that are ``None``."""
    return json.dumps({name: value for name, value in vars(sample).items() if value is not None})


def decode_sample(line: str) -> Sample | None:
    """Return the sample of a line; ``None`` if it is torn or something else."""
    try:
        record: Any = json.loads(line)
        found = _reader().validate_python({"rank": None, **record})
    except (ValueError, TypeError, RecursionError):
        return None
    # Not trusted: the rank is used as a place in a list, and the id as a process of the system.
    return found if 0 <= (found.rank or 0) < _NUMBERS and 0 < found.pid < _NUMBERS else None


def relayed_file(log_dir: Path, host: str) -> Path:
    """Return the file in which a supervisor keeps the samples of another computer."""
    return log_dir / f"monitor-of-{_UNSAFE.sub('_', host)}.jsonl"


def monitor_file(log_dir: Path, role: Role, which: int | str = "") -> Path:
    """Return the file in which a process keeps its samples; ``which`` is its rank, or the name of
    its computer.
    """
    return (
        log_dir / f"monitor-{role}{'' if which == '' else '-'}{_UNSAFE.sub('_', str(which))}.jsonl"
    )


class Follower:
    """Reader of the new lines in the files of a run.

    Args:
        run: the run's directory, or that of its logs.
        names: names of the only files to read; ``None``: all.
    """

    def __init__(self, run: Path, names: Collection[str] | None = None) -> None:
        self._run = run
        self._names = names
        self._read: dict[Path, int] = {}

    def lines(self) -> list[str]:
        """Return the complete lines since the last call, those of a file in their order."""
        return [line for path in self._files() for line in self._new(path)]

    def samples(self) -> list[Sample]:
        """Return the new samples in the order of their times."""
        return in_order(sample for line in self.lines() if (sample := decode_sample(line)))

    def _files(self) -> list[Path]:
        found = [
            path for place in (self._run / LOGS, self._run) for path in sorted(place.glob(_PATTERN))
        ]
        return [path for path in found if self._names is None or path.name in self._names]

    def _new(self, path: Path) -> list[str]:
        done = self._read.get(path, 0)
        try:
            if path.stat().st_size < done:
                done = 0  # a new job's file: that of an earlier job has been set aside
            with path.open("rb") as stream:
                stream.seek(done)
                content = stream.read()
        except OSError:
            return []
        whole = content.rfind(b"\n") + 1
        self._read[path] = done + whole
        return content[:whole].decode("utf-8", errors="replace").splitlines()


def in_order(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples by time, each once: those of another computer may arrive twice."""
    found = {(sample.host, sample.pid, sample.time): sample for sample in samples}
    return sorted(found.values(), key=lambda sample: sample.time)


def require_run(run: Path) -> None:
    """Raise ``DataError`` if there is no such directory."""
    if not run.is_dir():
        raise DataError(
            "there is no such directory",
            code="run-missing",
            where=str(run),
            hint=meant(run, "give the directory of a run", read_samples),
        )


def no_samples(run: Path, reasons: str = "") -> DataError:
    """Return the error for a directory without samples."""
    hint = "give the directory of a run (its --adapter-path, or --log-dir of allhands launch); the first samples come "
    hint += "a few seconds after the start"
    return DataError(
        f"no process of a run has left samples of its memory here{reasons}",
        code="samples-missing",
        where=str(run),
        hint=hint,
    )


def read_samples(run: Path) -> list[Sample]:
    """Return the samples of the latest job in a run's directory, in the order of their times.

    Raises:
        DataError: there is no such directory, or it holds no samples.
    """
    require_run(run)
    samples = Follower(run).samples()
    if not samples:
        raise no_samples(run)
    return [sample for sample in samples if sample.run == samples[-1].run]
