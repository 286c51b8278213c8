"""Facts about the device that a run reports."""

from __future__ import annotations

import json
import subprocess
import sys

# A process of its own: one that ran other tests has memory of theirs to give back while this one measures.
GROWS = """
import json, subprocess, sys
import numpy as np
from allhands.accelerator import detect, peak_memory_bytes
before = peak_memory_bytes(detect())
ballast = np.ones(60_000_000)
grown = peak_memory_bytes(detect())
command = "from allhands.accelerator import detect, peak_memory_bytes; print(peak_memory_bytes(detect()))"
child = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
print(json.dumps([before, grown, int(child.stdout), float(ballast[-1])]))
"""


def test_peak_memory_is_that_of_this_process_and_not_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, check=True)
    before, grown, child, last = json.loads(done.stdout)
    assert last == 1
    assert grown - before > 0.8 * 480e6
    assert 20e6 < child < grown - 0.5 * 480e6
