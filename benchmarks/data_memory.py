"""Memory of processes and all that they have started, shared pages counted once (Linux)."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PROC = Path("/proc")


def tree(root: int) -> list[int]:
    """``root`` and the processes below it that live now."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # "pid (name) state parent ...", where the name may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children[int(fields[1])].append(int(entry.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def pss_bytes(roots: list[int]) -> int:
    """Proportional set size of the trees of ``roots``: a page that n processes share counts 1/n in each."""
    total = 0
    for pid in {pid for root in roots for pid in tree(root)}:
        # It may have ended since.
        with suppress(OSError):
            for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


class Peak:
    """The most memory of a process tree while the block runs, looked at every ``interval_s``: a lower bound."""

    def __init__(self, root: int, interval_s: float = 0.1) -> None:
        self.bytes = 0
        self._root = root
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._end.is_set():
            started = time.perf_counter()
            self.bytes = max(self.bytes, pss_bytes([self._root]))
            # Looking must not become the work.
            self._end.wait(max(self._interval_s, 4 * (time.perf_counter() - started)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
