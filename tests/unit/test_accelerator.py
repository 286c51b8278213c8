"""Facts about the device that a run reports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import psutil

from allhands.accelerator import detect, peak_memory_bytes

PEAK = "from allhands.accelerator import detect, peak_memory_bytes; print(peak_memory_bytes(detect()))"


def test_peak_memory_is_that_of_this_process_and_not_of_its_parent() -> None:
    accelerator = detect()
    before = peak_memory_bytes(accelerator)
    # What the process has let go of since its peak is filled first.
    spare = max(0, before - psutil.Process().memory_info().rss)
    ballast = np.ones(60_000_000 + spare // 8)
    grown = peak_memory_bytes(accelerator)
    assert ballast[-1] == 1
    assert grown - before > 0.8 * 480e6 - 100e6
    child = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 20e6 < int(child.stdout) < grown - 0.5 * 480e6
