"""Memory use of this process, from the system and from MLX, and limits on it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any


def peak_rss_bytes() -> int:
    """Return the highest resident memory of this process so far."""
    if sys.platform == "linux":
        # Not ru_maxrss, into which Linux counts the process that started this one.
        status = Path("/proc/self/status").read_text()
        return int(re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# Memory of the first Macs whose GPU gets three quarters of it, and bytes of a page.
_LARGE_MAC, _MAC_PAGE = 36 << 30, 16384


def usual_working_set(memory_bytes: int) -> int:
    """Return the bytes that macOS lets the GPU of a Mac use, if that Mac does not tell.

    These are the figures of macOS 13 to 15 (recommendedMaxWorkingSetSize): two thirds of the
    memory below 36 GB, else three quarters. Later versions give some Macs more.
    """
    share, of = (3, 4) if memory_bytes >= _LARGE_MAC else (2, 3)
    return -(-memory_bytes * share // (of * _MAC_PAGE)) * _MAC_PAGE


class MlxPeak:
    """Peak bytes of MLX's arrays, of the whole process and since the last :meth:`begin`.

    MLX itself has one counter only. Use this after MLX has been loaded.
    """

    def __init__(self) -> None:
        self._before = 0

    def begin(self) -> None:
        """Begin a new part of the process's time."""
        self._before = self.whole()
        _mlx().reset_peak_memory()

    def part(self) -> int:
        """Return the peak bytes since the part began."""
        return int(_mlx().get_peak_memory())

    def whole(self) -> int:
        """Return the peak bytes since the process began."""
        return max(self._before, self.part())


def _mlx() -> Any:
    return sys.modules["mlx.core"]


MLX_PEAK = MlxPeak()


def limit_cache(threshold: int) -> None:
    """Clear MLX's cache of freed buffers if it has more than ``threshold`` bytes; 0: never."""
    if threshold and _mlx().get_cache_memory() > threshold:
        _mlx().clear_cache()


def mlx_memory() -> dict[str, int]:
    """Return MLX's active, cached and peak bytes, by the names of a sample's fields; empty if MLX
    is not loaded.

    Any thread may call this: MLX only reads its counters.
    """
    mx: Any = sys.modules.get("mlx.core")
    if mx is None:
        return {}
    return {
        "mlx_active_bytes": int(mx.get_active_memory()),
        "mlx_cache_bytes": int(mx.get_cache_memory()),
        "mlx_peak_bytes": MLX_PEAK.whole(),
    }


def memory_limit(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the memory limit of this process's control group in bytes; ``None`` if there is none
    below the computer's memory.
    """
    if sys.platform != "linux":
        return None
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            limits += _limits(root / "memory", group, "memory.limit_in_bytes")
        elif controllers == "":
            limits += _limits(root, group, "memory.max")
    least = min(limits, default=physical)
    return least if least < physical else None


def _limits(root: Path, group: str, name: str) -> list[int]:
    """Return the limits of a control group and of the groups above it."""
    place = root / group.lstrip("/")
    files = [folder / name for folder in (place, *place.parents) if folder.is_relative_to(root)]
    texts = [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text.isdecimal()]
