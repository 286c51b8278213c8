"""Files by which the ranks of one attempt and the process that has started them exchange facts, on
one computer.

``run_dir`` has the marks and beats of ranks, and the words that ranks are told. ``log_dir`` has
logs and error files.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allhands.cluster.frames import BEAT, ERROR
from allhands.cluster.ranks import Beat, Marks
from allhands.io.strict_json import read_object

BEAT_BYTES = 128  # size of the file with the latest beat, which each beat overwrites
ATTESTED_FILE = "attested.json"  # what the ranks have agreed on
_LOG_LINES = 20
_MOST_BYTES = 4 << 20  # that are read of a file that a rank has written
_TAIL_BYTES = 65536
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_LOOK_S = 1.0  # between two looks at what the kernel has killed
_DYING_S = 5.0  # the longest time from when the kernel chooses a process to kill until it has ended


class RunFiles:
    """The files of one attempt; create it before the first rank starts."""

    def __init__(
        self, run_dir: Path, log_dir: Path, counters: Sequence[Path] | None = None
    ) -> None:
        self.run_dir = run_dir
        self.log_dir = log_dir
        self._beats: dict[int, Beat] = {}
        self._busy: dict[
            int, tuple[int, float]
        ] = {}  # when the mark was touched, and when that was seen here
        here = oom_counters() if sys.platform == "linux" else ()
        self._counters = here if counters is None else counters
        self._oom_kills = deque([(time.monotonic(), self._count_oom_kills())])
        self._short: dict[int, bool] = {}

    def marks(self, rank: int) -> Marks:
        """Return the marks that the rank has set so far.

        The times of its beat and of "busy" are those at which they were first seen here.
        """
        ready, started, listening = (
            self._path(rank, name).exists() for name in ("ready", "started", "listening")
        )
        return Marks(ready, started, self._busy_time(rank), self._beat(rank), listening)

    def tell(self, word: str) -> None:
        """Tell all ranks ``word``."""
        (self.run_dir / word).touch()

    def attested(self) -> dict[str, Any] | None:
        """Return what the ranks have agreed on; ``None``: no report yet, or none was asked for."""
        return read_file(self.run_dir / ATTESTED_FILE)

    def error(self, rank: int) -> dict[str, Any] | None:
        """Return the content of the rank's error file; ``None`` if there is none that can be read."""
        name = f"error-rank-{rank}.json"
        # If the disk of the logs is full, a rank writes its error file into ``run_dir``.
        found = (read_file(directory / name) for directory in (self.log_dir, self.run_dir))
        return next((error for error in found if error and ERROR(error)), None)

    def tells_error(self, rank: int, line: bytes) -> bool:
        """Return whether a line of the rank's log is part of the error in its error file.

        Such a line need not be shown, because the supervisor shows the error. The exception is a
        run that the user has stopped: then rank 0 itself shows how it has ended.
        """
        error = self.error(rank)
        if not error or not error.get("text") or (rank == 0 and error["type"] == "Interrupted"):
            return False
        text = (
            line.decode("utf-8", errors="replace")
            .removeprefix("allhands: ")
            .removeprefix("error: ")
        )
        return bool(text.strip()) and text in error["text"].splitlines()

    def log_path(self, rank: int) -> Path:
        """Return the path of the file with the rank's output."""
        return self.log_dir / f"rank-{rank}.log"

    def look_at_kills(self) -> None:
        """Record how many processes the kernel has killed because memory was short.

        To be called often; it looks at most once a second.
        """
        now = time.monotonic()
        if now < self._oom_kills[-1][0] + _LOOK_S:
            return
        self._oom_kills.append((now, self._count_oom_kills()))
        while len(self._oom_kills) > 1 and self._oom_kills[1][0] < now - _DYING_S:
            self._oom_kills.popleft()

    def note_end(self, rank: int) -> None:
        """Record that the rank has just ended, and whether the kernel has killed a process shortly
        before.

        What the kernel has killed earlier does not count: it may have been other programs.
        """
        self._short[rank] = self._count_oom_kills() > self._oom_kills[0][1]

    def out_of_memory(self, rank: int) -> bool:
        """Return whether the kernel has killed a process for lack of memory as the rank ended."""
        return self._short.get(rank, False)

    def _path(self, rank: int, name: str) -> Path:
        return self.run_dir / f"rank-{rank}.{name}"

    def _busy_time(self, rank: int) -> float | None:
        try:
            touched = self._path(rank, "busy").stat().st_mtime_ns
        except OSError:
            return None
        # Never compare it with the time of day, which may be changed while a job runs.
        if self._busy.get(rank, (None, 0.0))[0] != touched:
            self._busy[rank] = touched, time.monotonic()
        return self._busy[rank][1]

    def _beat(self, rank: int) -> Beat | None:
        found, last = read_file(self._path(rank, "beat")), self._beats.get(rank)
        if found and BEAT(found) and (last is None or found["count"] != last.count):
            last = Beat(
                found["step"],
                found["phase"],
                found["count"],
                time.monotonic(),
                found.get("waited_s", 0.0),
            )
            self._beats[rank] = last
        return last

    def _count_oom_kills(self) -> int:
        return sum(_counter(path) for path in self._counters)


def tail(log: Path) -> tuple[str, ...]:
    """Return the last lines of a log, which may be large; empty if there is no log."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(text.splitlines()[-_LOG_LINES:])


def oom_counters(proc: Path = Path("/proc"), cgroups: Path = _CGROUP_ROOT) -> list[Path]:
    """Return the files in which Linux counts the processes that were killed for lack of memory.

    They are those of this process's control group (version 1 or 2), because its ranks are in the
    same group. If the group has no such file, it is the one of the whole computer, which also
    counts other programs.
    """
    found = list[Path]()
    try:
        groups = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    found = [path for path in found if path.exists()]
    return found or [path for path in (proc / "vmstat",) if path.exists()]


def _counter(path: Path) -> int:
    """Return the number after ``oom_kill``; all three kinds of files have such a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def read_file(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file that a rank has written; ``None`` if none is valid."""
    try:
        with path.open("rb") as stream:
            return read_object(stream.read(_MOST_BYTES), halves=True)
    except OSError:
        return None
