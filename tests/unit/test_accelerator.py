"""Facts about the device that a run reports."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from allhands.data.order import micro_batches
from allhands.runtime.accelerator import detect, sizing_of
from allhands.runtime.memory import usual_working_set

# A process of its own: one that ran other tests has memory of theirs to give back while this one
# measures.
GROWS = """
import json, subprocess, sys
import numpy as np
from allhands.runtime.accelerator import detect, peak_memory_bytes
before = peak_memory_bytes(detect())
ballast = np.ones(60_000_000)
grown = peak_memory_bytes(detect())
command = "from allhands.runtime.accelerator import detect, peak_memory_bytes; print(peak_memory_bytes(detect()))"
child = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
print(json.dumps([before, grown, int(child.stdout), float(ballast[-1])]))
"""


@pytest.mark.skipif(detect().kind != "cpu", reason="the peak is that of the device's memory")
def test_peak_memory_is_that_of_this_process_and_not_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", GROWS], capture_output=True, text=True, check=True)
    before, grown, child, last = json.loads(done.stdout)
    assert last == 1
    assert grown - before > 0.8 * 480e6
    assert 20e6 < child < grown - 0.5 * 480e6


def test_cuda_meets_few_shapes_whether_compiled_or_not() -> None:
    """cuDNN plans attention anew for each length, and a pass of few tokens takes as long as one of
    two thousand.
    """
    assert sizing_of("cuda", None, compiled=False) == sizing_of("cuda", None, compiled=True)
    cuda, metal = sizing_of("cuda", None, compiled=False), sizing_of("metal", None, compiled=False)
    assert (cuda.few_shapes, metal.few_shapes) == (True, False)
    lengths = np.random.default_rng(0).integers(40, 1000, 5000)
    assert len(cuda.fitted(lengths).ladder) == 24
    assert metal.fitted(lengths).ladder == ()
    # Eight chats of which one is long: one pass on CUDA; for 30 tokens on a CPU it would be two.
    sizes = np.array([100] * 7 + [350])
    assert [
        len(micro_batches(np.arange(8), sizes, 16384, each.overhead_tokens))
        for each in (cuda, metal)
    ] == [1, 2]


@pytest.mark.parametrize(
    ("gigabytes", "told"),
    [
        # recommendedMaxWorkingSetSize in MB, as Metal told it on Macs with so much memory.
        (8, 5726.63),
        (16, 11453.25),
        (24, 17179.87),
        (32, 22906.50),
        (36, 28991.03),
        (64, 51539.61),
        (96, 77309.41),
    ],
)
def test_macos_gives_two_thirds_or_three_quarters_to_the_gpu(gigabytes: int, told: float) -> None:
    assert usual_working_set(gigabytes << 30) / 1e6 == pytest.approx(told, abs=0.02)
