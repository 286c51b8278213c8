"""How often the proportional share of a process's memory is read, which walks all of its pages."""

from __future__ import annotations

import mmap
import sys
import time
from typing import Any

import psutil
import pytest

from allhands.observe.monitor import process
from allhands.observe.monitor.process import ProportionalMemory
from allhands.observe.monitor.sampler import Identity, ProcessSampler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell it")


class Dear:
    """A process whose share takes 10 ms to read, and grows each time."""

    def __init__(self) -> None:
        self.reads = 0

    def memory_full_info(self) -> Any:
        self.reads += 1
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return type("Full", (), {"pss": 1000 * self.reads})()


def test_a_dear_share_is_read_rarely() -> None:
    dear = Dear()
    memory = ProportionalMemory(dear)  # type: ignore[arg-type]
    # 10 ms: not again for twenty seconds, if nothing changes but a little.
    assert [memory.read(10_000 + 100 * i) for i in range(6)] == [(1000, "pss")] * 6
    assert dear.reads == 1


def test_it_is_read_again_when_the_process_has_grown_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    dear = Dear()
    memory = ProportionalMemory(dear)  # type: ignore[arg-type]
    assert memory.read(10_000) == (1000, "pss")
    now += 1.0  # less than 10 ms may take even then
    assert memory.read(20_000) == (1000, "pss")
    now += 9.0
    assert memory.read(10_500) == (1000, "pss")
    assert memory.read(20_000) == (2000, "pss")
    # Smaller is other, too.
    now += 10.0
    assert memory.read(10_000) == (3000, "pss")
    assert memory.read(10_000, last=True) == (4000, "pss")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no proportional share")
def test_what_remains_of_a_process_is_its_share_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PSS_SHARE_CHANGING", 1e-9)  # in between it is never read again
    sampler = ProcessSampler(Identity("rank"))
    first = sampler.sample()
    # New pages: what the process has freed before might be used again.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert sampler.sample().pss_bytes == first.pss_bytes
        last = sampler.sample(last=True)
        assert last.pss_bytes == pytest.approx(psutil.Process().memory_full_info().pss, rel=0.05)
        assert last.pss_bytes != first.pss_bytes
