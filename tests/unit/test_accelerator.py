"""Facts about the device that a run reports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from allhands.accelerator import detect, peak_memory_bytes

PEAK = "from allhands.accelerator import detect, peak_memory_bytes; print(peak_memory_bytes(detect()))"


def test_peak_memory_is_that_of_this_process_and_not_of_its_parent() -> None:
    accelerator = detect()
    before = peak_memory_bytes(accelerator)
    ballast = np.ones(60_000_000)
    grown = peak_memory_bytes(accelerator)
    assert grown - before > 0.8 * ballast.nbytes - 100e6
    child = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 20e6 < int(child.stdout) < grown - 0.5 * ballast.nbytes
