"""Memory, traffic and GPU of this process, from the system and from MLX."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import psutil

from allhands.observe.monitor.nvml import Gpu

# Reading the proportional share walks all pages, so it may take only this part of the time. It may
# take ten times as much once the process has grown or shrunk by a tenth, which makes the last value
# wrong.
_PSS_SHARE, _PSS_SHARE_CHANGING, _CHANGED = 0.0005, 0.005, 0.1


def began_at(process: psutil.Process) -> float:
    """Return the Unix time in seconds at which this process began."""
    if sys.platform != "linux":
        return round(process.create_time(), 3)
    try:
        # Ticks since the boot, mostly hundredths of a second; psutil adds them to a boot time that
        # is known to a second only.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return round(time.time() - age, 3)
    except (OSError, AttributeError, ValueError, IndexError):  # a sandbox without /proc
        return round(process.create_time(), 3)


class ProportionalMemory:
    """The proportional share of a process's memory, read less often the longer reading takes."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._read_at, self._took, self._resident = float("-inf"), 0.0, 0
        self._bytes = 0
        self._kind: Literal["pss", "uss", "rss"] = "rss"

    def read(
        self, resident: int, *, last: bool = False
    ) -> tuple[int, Literal["pss", "uss", "rss"]]:
        """Return the latest value, and its kind.

        Args:
            resident: bytes that are resident now.
            last: read it anew, however long that takes: this is the process's last sample.
        """
        changed = abs(resident - self._resident) > _CHANGED * self._resident
        rest = self._took / (_PSS_SHARE_CHANGING if changed else _PSS_SHARE)
        if last or time.monotonic() >= self._read_at + rest:
            began = time.thread_time()
            self._measure()
            self._took = time.thread_time() - began
            self._read_at = time.monotonic()
            self._resident = resident
        return self._bytes, self._kind

    def _measure(self) -> None:
        try:
            full: Any = self._process.memory_full_info()
        except psutil.AccessDenied:
            full = self._process.memory_info()
        kinds: tuple[Literal["pss", "uss", "rss"], ...] = ("pss", "uss", "rss")
        self._kind = next(kind for kind in kinds if hasattr(full, kind))
        self._bytes = int(getattr(full, self._kind))


class NetworkTraffic:
    """Bytes that the computer has sent and received since this was made, by interface."""

    def __init__(self) -> None:
        self._before = _counters()

    def read(self) -> dict[str, tuple[int, int]]:
        """Return the interfaces that have carried anything."""
        found: dict[str, tuple[int, int]] = {}
        for name, (sent, received) in _counters().items():
            before = self._before.get(name, (0, 0))
            if (moved := (sent - before[0], received - before[1])) != (0, 0):
                found[name] = moved
        return found


def _counters() -> dict[str, tuple[int, int]]:
    return {
        name: (one.bytes_sent, one.bytes_recv)
        for name, one in psutil.net_io_counters(pernic=True).items()
    }


class OwnGpu:
    """The NVIDIA GPU on which MLX computes in this process, if it does."""

    @cached_property
    def _gpu(self) -> Gpu | None:
        mx: Any = sys.modules.get("mlx.core")
        if sys.platform != "linux" or mx is None or mx.default_device().type != mx.DeviceType.gpu:
            return None
        with suppress(OSError):
            return Gpu(str(mx.device_info().get("uuid", "")))
        return None

    def read(self) -> dict[str, int | float]:
        """Return a sample's fields about the GPU; none without a GPU."""
        with suppress(OSError):
            if self._gpu is not None:
                return self._gpu.read()
        return {}
