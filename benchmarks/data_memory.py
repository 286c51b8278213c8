"""Memory of processes and all that they have started, shared pages counted once (Linux)."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
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
    """Proportional set size of the trees of ``roots``: a page that n processes share counts 1/n in
    each.
    """
    total = 0
    for pid in {pid for root in roots for pid in tree(root)}:
        # It may have ended since.
        with suppress(OSError):
            for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


class Repeatedly:
    """Calls ``look`` again and again in a thread while the block runs, and rests four times as long
    as that takes.
    """

    def __init__(self, look: Callable[[], None], interval_s: float) -> None:
        self._look = look
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._end.is_set():
            started = time.perf_counter()
            self._look()
            # Looking must not become the work.
            self._end.wait(max(self._interval_s, 4 * (time.perf_counter() - started)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()


class Peak(Repeatedly):
    """The most memory of a process tree while the block runs, looked at every ``interval_s``: a
    lower bound.
    """

    def __init__(self, root: int, interval_s: float = 0.1) -> None:
        super().__init__(self._measure, interval_s)
        self.bytes = 0
        self._root = root

    def _measure(self) -> None:
        self.bytes = max(self.bytes, pss_bytes([self._root]))
