"""What the benchmarks of GPUs tell of power, clocks and kernels. No GPU is asked: an nvidia-smi of
our own answers.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark_scripts import scripts_on_the_path


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    with scripts_on_the_path():
        yield SimpleNamespace(
            **{name: importlib.import_module(name) for name in ("gpu_watch", "gpu_profile")}
        )


def test_power_and_clocks_of_the_time_that_counts(modules: Any) -> None:
    watch = modules.gpu_watch.Watch()
    told = [
        "0, 70.1, 345",
        "1, [N/A], 345",
        "0, 690.0, 1600",
        "1, 680.0, 1700",
        "2, 71.0, 345",
        "0, 694.0, 1500",
        "",
    ]
    watch._samples = [
        s
        for at, line in enumerate(told)
        if (s := modules.gpu_watch.parse(line, float(at))) is not None
    ]
    assert len(watch._samples) == 5
    # Of the busiest and of the slowest; the third GPU does nothing.
    assert watch.between(2.0, 5.0) == {"watts": 692.0, "mhz": 1550.0}
    assert watch.between(3.0, 4.0) == {"watts": 680.0, "mhz": 1700.0}
    assert watch.between(6.0, 9.0) == {}


def test_it_is_asked_while_something_is_measured(modules: Any, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nwhile :; do echo '0, 500.0, 1980'; sleep 0.05; done\n")
    program.chmod(0o700)
    began = time.time()
    with modules.gpu_watch.Watch(str(program)) as watch:
        end = time.monotonic() + 20.0
        while not watch.between(began, time.time()) and time.monotonic() < end:
            time.sleep(0.02)
    assert watch.between(began, time.time()) == {"watts": 500.0, "mhz": 1980.0}
    assert watch._asking.poll() is not None
    with modules.gpu_watch.Watch(str(tmp_path / "none")) as blind:
        pass
    assert blind.between(0.0, time.time()) == {}


# Two steps: computing from 0 to 100 and 130 to 200, an exchange from 90 to 120, another from 140 to
# 150.
EVENTS = [
    (0.0, 60.0, "gemm"),
    (50.0, 100.0, "norm"),
    (90.0, 120.0, "ncclDevKernel_AllReduce"),
    (130.0, 200.0, "gemm"),
    (140.0, 150.0, "ncclDevKernel_AllReduce"),
]


def test_what_waits_and_what_runs_beside_what(modules: Any) -> None:
    profile = modules.gpu_profile
    computing = [event for event in EVENTS if "nccl" not in event[2]]
    assert profile.gaps(computing) == (30.0, [(30.0, "norm", "gemm")])
    exchanges = [event for event in EVENTS if "nccl" in event[2]]
    assert profile.overlap(exchanges, computing) == [10.0, 10.0]
    assert profile.overlap([(0.0, 300.0, "x"), (105.0, 125.0, "x")], computing) == [170.0, 0.0]


def test_a_profile_is_told_by_the_step(modules: Any) -> None:
    events = [(1e3 * start, 1e3 * until, name) for start, until, name in EVENTS]
    lines = modules.gpu_profile.described(events, 2)
    assert lines[0] == "idle 15.0 ms a step; the longest waits:"
    assert "   30.00 ms between norm and gemm" in lines
    assert "exchange 20.0 ms a step in 1 calls, 10.0 ms of it beside kernels that compute" in lines
    assert "   65.00 ms      1 x  gemm" in lines
    assert not [line for line in modules.gpu_profile.described(events[:2], 1) if "exchange" in line]


def test_how_long_ranks_wait_for_each_other_s_calls(modules: Any) -> None:
    # By a clock that is 1,000 ahead. The first call waits 30 on rank 0, the second 5 on rank 1, the
    # third for nobody.
    first = [(100.0, 150.0), (205.0, 225.0), (300.0, 310.0)]
    second = [(1130.0, 1150.0), (1200.0, 1225.0), (1300.0, 1310.0)]
    assert modules.gpu_profile.waits([first, second]) == [(80.0, 30.0), (55.0, 5.0)]
    # Of three the last to begin counts.
    third = [(2140.0, 2150.0), (2205.0, 2225.0), (2300.0, 2310.0)]
    assert modules.gpu_profile.waits([first, second, third]) == [
        (80.0, 40.0),
        (55.0, 15.0),
        (40.0, 0.0),
    ]
    events = [(start, until, "ncclDevKernel") for start, until in reversed(first)] + [
        (0.0, 90.0, "product")
    ]
    assert modules.gpu_profile.exchanges(events) == first
    line = modules.gpu_profile.described_waits(
        [[(1e3 * a, 1e3 * b) for a, b in calls] for calls in (first, second)], 10
    )
    assert line.endswith("begin: 3.0 ms of 8.0 on rank 0, 0.5 ms of 5.5 on rank 1")
