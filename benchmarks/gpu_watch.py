"""Power and clocks of NVIDIA GPUs while something is measured on them, as nvidia-smi tells them.

A GPU that draws all the power it may lowers its clock: the same kernels then take longer, whatever
waits for what.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_EVERY_MS = 250


@dataclass(frozen=True)
class Sample:
    """One GPU's at one moment.

    Attributes:
        at: seconds of this computer's clock, as ``time.time`` has them.
        gpu: its number.
        watts: that it draws.
        mhz: of its multiprocessors.
    """

    at: float
    gpu: int
    watts: float
    mhz: float


class Watch:
    """Asks nvidia-smi again and again while it is open; where there is none, it has seen nothing."""

    def __init__(self, program: str = "nvidia-smi") -> None:
        self._program = program
        self._samples: list[Sample] = []
        self._asking: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        query = [
            "--query-gpu=index,power.draw,clocks.sm",
            "--format=csv,noheader,nounits",
            "-lms",
            str(_EVERY_MS),
        ]
        try:
            self._asking = subprocess.Popen(
                [self._program, *query],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return self
        assert self._asking.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._asking.stdout,), daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._asking is None or self._reader is None or self._asking.stdout is None:
            return
        self._asking.kill()
        self._asking.wait()
        self._reader.join()
        self._asking.stdout.close()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            sample = parse(line, time.time())
            if sample is not None:
                self._samples.append(sample)

    def between(self, began: float, ended: float) -> dict[str, Any]:
        """Medians from ``began`` to ``ended``: ``watts`` of the GPU that draws most, ``mhz`` of the
        slowest.

        Only of GPUs in use: others draw next to nothing. Empty if nothing was seen.
        """
        seen = [sample for sample in self._samples if began <= sample.at <= ended]
        by_gpu: dict[int, list[Sample]] = {}
        for sample in seen:
            by_gpu.setdefault(sample.gpu, []).append(sample)
        medians = [
            (
                statistics.median(each.watts for each in mine),
                statistics.median(each.mhz for each in mine),
            )
            for mine in by_gpu.values()
        ]
        if not medians:
            return {}
        most = max(watts for watts, _ in medians)
        return {"watts": most, "mhz": min(mhz for watts, mhz in medians if watts > most / 2)}


def parse(line: str, at: float) -> Sample | None:
    """A line of nvidia-smi's, ``0, 693.92, 1575``; ``None`` for one that says something else, as
    ``[N/A]``.
    """
    try:
        gpu, watts, mhz = line.split(",")
        return Sample(at, int(gpu), float(watts), float(mhz))
    except ValueError:
        return None
