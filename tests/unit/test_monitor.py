"""Samples of processes: against the system's own numbers, beside each other, as a table, and when
something fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from allhands.cli.main import main
from allhands.cli.monitor import processes_table, view
from allhands.errors import DataError
from allhands.loops.recorder import Metrics
from allhands.observe.metrics import read_metrics
from allhands.observe.monitor import (
    Board,
    Follower,
    Identity,
    ProcessSampler,
    Sample,
    decode_sample,
    encode_sample,
    monitor_file,
    nvml,
    read_samples,
)
from allhands.observe.monitor.sampler import PhaseClock
from allhands.observe.plots import plot_memory

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="the proportional share is Linux's")

# A process that samples itself, holding an allocation and a file, until its input is closed.
SAMPLED = """
import mmap, os, sys, time
from pathlib import Path
from allhands.observe.monitor import Identity, ProcessSampler
file, size, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
with ProcessSampler(Identity("rank", 0, run="test"), {"ALLHANDS_MONITOR_EVERY_S": "0.05"}) as sampler:
    sampler.write_to(target)
    before = sampler.sample().rss_bytes
    held = b"\\1" * size
    with open(file, "rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        touched = sum(mapped[place] for place in range(0, len(mapped), 4096))
        print(before, flush=True)
        sys.stdin.read()
"""


@contextmanager
def sampled(
    directory: Path, file: Path, number: int, size: int
) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    target = directory / f"monitor-rank-{number}.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", SAMPLED, str(file), str(size), str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline()), target
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def latest(target: Path) -> Sample | None:
    found = [sample for line in target.read_text().splitlines() if (sample := decode_sample(line))]
    return found[-1] if found else None


def settled(target: Path, process: subprocess.Popen[str]) -> Sample:
    """The first sample that was taken after the growth: its proportional share, which is read
    rarely, is that of now.

    A sample reads one after the other, and the process may grow in between.
    """
    end = time.monotonic() + 20
    grown = psutil.Process(process.pid).memory_info().rss
    while time.monotonic() < end:
        sample = latest(target)
        if (
            sample
            and sample.rss_bytes > 0.9 * grown
            and abs(sample.pss_bytes / share_of(process) - 1) < 0.1
        ):
            return sample
        time.sleep(0.05)
    raise AssertionError(f"{latest(target)}, but it is {share_of(process)} of {grown}")


def share_of(process: subprocess.Popen[str]) -> int:
    """What the kernel itself says, in kB."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return 1024 * int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shared.bin"
    path.write_bytes(os.urandom(64 * MIB))
    return path


@linux
def test_a_sample_is_what_the_system_says(tmp_path: Path, file: Path) -> None:
    size = 200 * MIB
    with sampled(tmp_path, file, 0, size) as (process, before, target):
        sample = settled(target, process)
        system = psutil.Process(process.pid).memory_info()
        share = share_of(process)
    assert sample.pid == process.pid
    assert sample.rss_bytes == pytest.approx(system.rss, rel=0.1)
    assert sample.pss_bytes == pytest.approx(share, rel=0.1)
    assert sample.pss_kind == "pss"
    assert sample.rss_bytes - before == pytest.approx(size + 64 * MIB, rel=0.1)
    assert sample.peak_rss_bytes >= sample.rss_bytes
    last = latest(target)
    assert last is not None
    assert last.ended
    # A peak stays when the memory is gone.
    assert last.peak_rss_bytes >= before + size


@linux
def test_pages_of_a_file_that_two_processes_map_count_once(tmp_path: Path, file: Path) -> None:
    with ExitStack() as stack:
        one, alone_rss, target = stack.enter_context(sampled(tmp_path, file, 0, MIB))
        alone = settled(target, one)
        two, _, other = stack.enter_context(sampled(tmp_path, file, 1, MIB))
        first, second = settled(target, one), settled(other, two)
    # Resident memory has the file twice; the shares together have it once.
    assert first.rss_bytes + second.rss_bytes >= 2 * 64 * MIB + 2 * MIB
    own = alone.pss_bytes - 64 * MIB
    assert 0 < own < alone_rss + 2 * MIB
    assert first.pss_bytes + second.pss_bytes < alone.pss_bytes + own + 8 * MIB
    assert first.pss_bytes + second.pss_bytes > 64 * MIB


def test_what_a_process_does_is_counted_by_the_clock() -> None:
    clock = PhaseClock("start")
    began = time.perf_counter()
    time.sleep(0.05)
    clock.beat("compute", 3)
    time.sleep(0.1)
    clock.beat("reduce", 3)
    phase, step, spent = clock.take()
    assert (phase, step) == ("reduce", 3)
    assert spent["start"] >= 0.05
    assert spent["compute"] >= 0.1
    assert sum(spent.values()) == pytest.approx(time.perf_counter() - began, abs=0.02)
    assert clock.take()[2].keys() == {"reduce"}


def test_the_processor_time_is_that_of_all_threads() -> None:
    sampler = ProcessSampler(Identity("orchestrator"))
    sampler.sample()
    began = time.perf_counter()
    spent = time.process_time()
    while time.perf_counter() < began + 0.2:
        pass
    sample = sampler.sample()
    assert sample.cpu_cores == pytest.approx(
        (time.process_time() - spent) / (time.perf_counter() - began), rel=0.1
    )


def test_mlx_is_asked_once_the_training_has_begun() -> None:
    import mlx.core as mx

    sampler = ProcessSampler(Identity("rank", 0))
    assert sampler.sample().mlx_active_bytes is None
    sampler.beat("compute", 0)
    before = sampler.sample().mlx_active_bytes
    held = mx.ones((5 * MIB,), dtype=mx.float32)
    mx.eval(held)
    sample = sampler.sample()
    assert before is not None
    assert sample.mlx_active_bytes is not None
    assert sample.mlx_active_bytes - before == pytest.approx(20 * MIB, rel=0.01)
    assert sample.mlx_peak_bytes is not None
    assert sample.mlx_peak_bytes >= sample.mlx_active_bytes


class Driver:
    """NVML as far as it is called, with one GPU."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == self.broken:
                return 3
            if "Handle" in name:
                self.asked.append(arguments[0].value)
            elif name == "nvmlDeviceGetMemoryInfo":
                found = arguments[1]._obj
                found.total, found.free, found.used = 80 * 10**9, 73 * 10**9, 7 * 10**9
            elif name == "nvmlDeviceGetUtilizationRates":
                arguments[1]._obj.gpu = 93
            return 0

        return call


@pytest.mark.parametrize(
    ("visible", "uuid", "asked"),
    [
        ({}, "", 0),
        ("2,3", "", 2),
        ("", "", 0),
        ("GPU-1a2b,GPU-3c", "", b"GPU-1a2b"),
        # CUDA's number of a GPU is not NVML's.
        ("2,3", "GPU-5d", b"GPU-5d"),
        ({}, "GPU-5d", b"GPU-5d"),
        ("MIG-7e", "GPU-7e", b"MIG-7e"),
    ],
)
def test_the_first_visible_gpu_is_read(
    visible: Any, uuid: str, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: driver)
    environ = {"CUDA_VISIBLE_DEVICES": visible} if isinstance(visible, str) else visible
    gpu = nvml.Gpu(uuid, environ)
    assert list(gpu.read().values()) == [7 * 10**9, 80 * 10**9, 0.93]
    assert driver.asked == [asked]
    driver.broken = "nvmlDeviceGetUtilizationRates"  # as for a part of a GPU
    assert gpu.read()["gpu_load"] == 0.0
    driver.broken = "nvmlDeviceGetMemoryInfo"
    with pytest.raises(OSError, match="code 3"):
        gpu.read()


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_the_driver_says_what_nvidia_smi_says() -> None:
    words = [
        "nvidia-smi",
        "--query-gpu=memory.used,memory.total",
        "--format=csv,noheader,nounits",
        "-i",
        "0",
    ]
    used, total = map(
        int, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split(",")
    )
    found = nvml.Gpu(environ={}).read()
    assert found["gpu_total_bytes"] == pytest.approx(total * MIB, rel=0.02)
    assert found["gpu_used_bytes"] == pytest.approx(used * MIB, abs=1024 * MIB)


# --- lines, files, and what is made of them -------------------------------------------------------

SAMPLE = Sample(
    time=1000.0,
    role="rank",
    rank=0,
    host="here",
    pid=10,
    run="a",
    attempt=1,
    every_s=2.0,
    rss_bytes=300_000_000,
    pss_bytes=200_000_000,
    pss_kind="pss",
    peak_rss_bytes=310_000_000,
    cpu_cores=1.25,
    net={"lo": (100, 100), "eth0": (5000, 3000)},
    mlx_active_bytes=50_000_000,
    mlx_cache_bytes=20_000_000,
    mlx_peak_bytes=60_000_000,
    step=7,
    phase="compute",
    phases={"compute": 1.5, "reduce": 0.5},
)
DIRECTOR = replace(
    SAMPLE,
    role="orchestrator",
    rank=None,
    pid=9,
    rss_bytes=40_000_000,
    pss_bytes=30_000_000,
    mlx_active_bytes=None,
    mlx_cache_bytes=None,
    mlx_peak_bytes=None,
    step=None,
    phase=None,
    phases={},
)


@pytest.mark.parametrize(
    "sample", [SAMPLE, DIRECTOR, replace(SAMPLE, gpu_used_bytes=1, gpu_load=0.5, ended=True)]
)
def test_a_line_is_the_sample(sample: Sample) -> None:
    line = encode_sample(sample)
    assert decode_sample(line) == sample
    assert "\n" not in line
    assert decode_sample(line[:-5]) is None
    assert decode_sample('{"time": 1}') is None


def write(run: Path, *samples: Sample) -> None:
    for sample in samples:
        file = monitor_file(run / "logs", sample.role, "" if sample.rank is None else sample.rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(f"{encode_sample(sample)}\n")


def test_the_latest_job_is_read_each_sample_once(tmp_path: Path) -> None:
    old = replace(SAMPLE, rank=5, run="before", time=10.0)
    newer = replace(SAMPLE, time=1002.0)
    write(tmp_path, old, SAMPLE, newer, DIRECTOR)
    (tmp_path / "logs/monitor-of-node1.jsonl").write_text(f"torn\n{encode_sample(newer)}\n")
    assert sorted(read_samples(tmp_path), key=lambda one: (one.time, one.pid)) == [
        DIRECTOR,
        SAMPLE,
        newer,
    ]
    follower = Follower(tmp_path)
    assert len(follower.samples()) == 4
    assert follower.samples() == []
    write(tmp_path, replace(SAMPLE, time=1004.0))
    assert [sample.time for sample in follower.samples()] == [1004.0]
    with pytest.raises(DataError) as caught:
        read_samples(tmp_path.joinpath("logs", "..").resolve().parent)
    assert caught.value.code == "samples-missing"


def test_what_they_have_together_counts_who_lives() -> None:
    board = Board([DIRECTOR, SAMPLE, replace(SAMPLE, rank=1, pid=11)])
    assert board.together_bytes(1001.0) == 430_000_000
    assert board.peak_together_bytes == 430_000_000
    board.add(replace(SAMPLE, rank=1, pid=11, time=1002.0, ended=True))
    board.add(replace(SAMPLE, time=1002.0))
    board.add(replace(DIRECTOR, time=1002.0))
    # The pages that a rank shares with programs that are no part of the run are in memory, too.
    assert board.together_bytes(1003.0) == SAMPLE.rss_bytes
    assert board.peak_together_bytes == 430_000_000
    # A rank that is started again takes the place of its former self.
    board.add(replace(SAMPLE, rank=1, pid=20, attempt=2, time=1004.0, pss_bytes=1))
    assert board.together_bytes(1004.0) == SAMPLE.rss_bytes
    assert [row.last.name for row in board.rows()] == ["orchestrator", "rank 0", "rank 1"]
    assert board.together_bytes(1004.0, {("here", 9), ("here", 20)}) == SAMPLE.rss_bytes
    assert not board.over(1004.0)
    assert board.over(1004.0, {("here", 9), ("here", 10), ("here", 20)})
    assert board.over(1004.0 + 60.0)
    # Another job puts all that away.
    board.add(replace(SAMPLE, run="b", time=2000.0))
    assert [row.last.name for row in board.rows()] == ["rank 0"]
    assert board.peak_together_bytes == SAMPLE.peak_rss_bytes


def shown(board: Board, now: float, width: int = 200) -> list[list[str]]:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(processes_table(board, now, set(), width))
        return [line.split() for line in console.export_text().splitlines()]


def test_the_table_has_a_row_a_process() -> None:
    last = replace(SAMPLE, time=1002.0, net={"lo": (2100, 2100), "eth0": (8000, 4000)})
    lines = shown(Board([DIRECTOR, SAMPLE, last]), 1003.0)
    director, rank = (
        next(line for line in lines if line[:1] == [name]) for name in ("orchestrator", "rank")
    )
    assert " ".join(director) == "orchestrator 9 watches 40 MB 310 MB 30 MB 30 MB - - - 125% - -"
    told = "rank 0 10 compute 75% 300 MB 310 MB 200 MB 200 MB 50 MB 20 MB 60 MB 125% 2.5 kB 1.5 kB"
    assert " ".join(rank) == told
    gone = next(
        line for line in shown(Board([DIRECTOR, SAMPLE, last]), 2000.0) if line[:1] == ["rank"]
    )
    assert gone[3] == "silent"
    assert gone[-3:] == ["-", "-", "-"]


def test_traffic_is_told_once_for_each_computer() -> None:
    """It is that of the whole computer, so rows of the same one would only repeat it."""
    other = replace(SAMPLE, rank=2, host="there", pid=12)
    firsts = [DIRECTOR, SAMPLE, replace(SAMPLE, rank=1, pid=11), other]
    lasts = [replace(one, time=1002.0, net={"eth0": (9100, 5100)}) for one in firsts]
    lines = [line for line in shown(Board([*firsts, *lasts]), 1003.0) if line]
    told = {
        " ".join(line[:2]): " ".join(line[-4:])
        for line in lines
        if line[0] in ("orchestrator", "rank")
    }
    assert told["orchestrator here"].endswith("125% - -")
    assert told["rank 0"].endswith("2.0 kB 1.0 kB")
    assert told["rank 1"].endswith("125% - -")
    assert told["rank 2"].endswith("2.0 kB 1.0 kB")


def test_the_table_fits_a_narrow_terminal_and_names_gpus_and_estimates() -> None:
    sample = replace(
        SAMPLE,
        gpu_used_bytes=7 * 10**9,
        gpu_total_bytes=80 * 10**9,
        gpu_load=0.93,
        estimated_bytes=10**9,
    )
    board = Board([DIRECTOR, sample])
    wide = next(line for line in shown(board, 1001.0) if line[:1] == ["rank"])
    assert " ".join(wide).find("1 GB 50 MB 20 MB 60 MB 7 GB 93% 125%") > 0
    for width in (80, 60):
        lines = [line for line in shown(board, 1001.0, width) if line]
        assert all(not word.endswith("…") for line in lines for word in line)
        assert any(line[:2] == ["rank", "0"] for line in lines)


def test_the_heading_says_how_far_the_run_is() -> None:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(view(Board([DIRECTOR, SAMPLE]), 1003.0, set(), None))
    text = console.export_text()
    assert text.startswith("running, seen 3.0 s ago, step 7")
    assert "300 MB now, 310 MB at most" in text


@pytest.mark.parametrize(
    ("ended", "said"), [(True, "ended 1m39s ago, step 7"), (False, "broken off (it was killed), ")]
)
def test_the_heading_of_a_run_that_is_over_tells_an_end_from_a_kill(
    tmp_path: Path, ended: bool, said: str
) -> None:
    with Metrics(tmp_path) as metrics:  # no tokens a second, and no number of steps
        metrics.log(7, {"loss": 1.0})
    board = Board([replace(DIRECTOR, ended=ended), replace(SAMPLE, ended=ended)])
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(view(board, SAMPLE.time + 99.0, set(), read_metrics(tmp_path)))
    heading = console.export_text().splitlines()[0]
    assert f"{tmp_path.name}, {said}" in heading
    assert "nan" not in heading.lower().replace(tmp_path.name, "")
    assert " of " not in heading


def test_too_short_a_run_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        plot_memory([SAMPLE, replace(SAMPLE, time=1002.0)], tmp_path / "memory.png")
    assert caught.value.code == "samples-missing"


def test_what_was_estimated_is_in_the_picture_however_much_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [replace(SAMPLE, time=1000.0 + 2 * i, estimated_bytes=9 * 10**9) for i in range(10)]
    drawn: list[Figure] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.write_bytes(b""))
    )
    plot_memory(samples, tmp_path / "memory.png")
    memory = drawn[0].axes[0]
    [estimate] = memory.lines
    assert 0 == memory.get_ylim()[0] < np.asarray(estimate.get_ydata())[0] < memory.get_ylim()[1]


def test_many_ranks_and_a_restart_fit_into_the_picture(tmp_path: Path) -> None:
    samples = [
        replace(
            SAMPLE,
            rank=rank,
            pid=100 * attempt + rank,
            attempt=attempt,
            time=1000.0 + 40 * attempt + 2 * i,
        )
        for attempt in (1, 2)
        for i in range(10)
        for rank in range(20)
    ]
    samples += [
        replace(DIRECTOR, time=1040.0 + 2 * i, estimated_bytes=5 * 10**9) for i in range(30)
    ]
    out = plot_memory(
        sorted(samples, key=lambda one: one.time), tmp_path / "memory.png", title="Twenty ranks"
    )
    header = out.read_bytes()[:24]
    assert int.from_bytes(header[16:20], "big") == 1200
    assert 600 < int.from_bytes(header[20:24], "big") < 1600


@pytest.mark.parametrize("missing", ["nothing", "empty"])
def test_no_run_is_one_clear_error(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as caught:
        main(["monitor", str(tmp_path / missing), "--once"])
    assert caught.value.code == DataError.exit_code
    text = capsys.readouterr().err
    assert text.count("error:") == 1
    assert str(tmp_path / missing) in text
    assert "what to do: give the directory of a run" in text


@pytest.mark.parametrize(
    ("before", "lines"), [(None, 0), ("", 0), ('{"a": 1}\n', 1), ('{"a": 1}\n{"to', 2)]
)
def test_an_empty_line_is_written_only_after_a_torn_one(
    tmp_path: Path, before: str | None, lines: int
) -> None:
    target = tmp_path / "monitor-rank-0.jsonl"
    if before is not None:
        target.write_text(before)
    with ProcessSampler(Identity("rank", 0)) as sampler:
        sampler.write_to(target)
    written = target.read_text()
    assert written.startswith(before or "{")
    new = written.splitlines()[lines:]
    assert new
    assert all(decode_sample(line) for line in new)
    assert "" not in written.splitlines()


# --- what fails ends no run -----------------------------------------------------------------------


def test_a_sampler_that_fails_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: ProcessSampler) -> Sample:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(ProcessSampler, "sample", broken)
    with ProcessSampler(Identity("rank", 0), {"ALLHANDS_MONITOR_EVERY_S": "0.01"}) as sampler:
        sampler.write_to(tmp_path / "monitor-rank-0.jsonl")
        time.sleep(0.2)
    assert caplog.text.count("no such thing") == 1
    with ProcessSampler(Identity("rank", 0)) as sampler:
        sampler.write_to(Path("/proc/nowhere/monitor.jsonl"))
    assert caplog.text.count("the memory of this process is not recorded") == 2


def test_no_samples_are_taken_where_none_are_wanted(tmp_path: Path) -> None:
    with ProcessSampler(Identity("rank", 0), {"ALLHANDS_MONITOR_EVERY_S": "0"}) as sampler:
        sampler.write_to(tmp_path / "monitor-rank-0.jsonl")
    assert list(tmp_path.iterdir()) == []
    ProcessSampler(Identity("agent")).close()  # which has not begun


def test_a_sample_says_when_its_process_began() -> None:
    late = "import time; time.sleep(1); from allhands.observe.monitor import *;"
    code = f"{late} print(ProcessSampler(Identity('rank')).sample().began)"
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert before - 0.05 <= float(done.stdout) <= before + 0.7, "not when it was looked at"
