"""The network benchmark with real groups: on this computer, and on several with real faults."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from namespaces import Cluster, namespaces

from allhands.cluster.figures import Figures, Measurement
from allhands.cluster.hosts import Host, read_hostfile
from allhands.cluster.mpi import find_mpi, mpi_variables
from allhands.cluster.netbench import BenchOptions, measure
from allhands.distributed.backend import SingleProcess

HERE = Host("here", slots=2)
SIZES = (4096, 65536, 1 << 20)
_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory, in which nothing may be left, nor a process of the measurement."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "work"
    assert list((tmp_path / "work").iterdir()) == []
    assert own_processes() == []


def own_processes() -> list[list[str]]:
    """What this process has started for a measurement."""
    found: list[list[str]] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            said = process.cmdline()
            if process.name() == "ssh" or any(
                ".bench_" in word or word.endswith("reaper.py") for word in said
            ):
                found.append(said)
    return found


def assert_sound(figures: Figures, hosts: tuple[str, ...], num_ranks: int, backend: str) -> None:
    assert (figures.hosts, figures.num_ranks, figures.backend) == (hosts, num_ranks, backend)
    assert figures.timings
    for timing in figures.timings:
        assert 0 < timing.low_s <= timing.median_s <= timing.high_s < 30
        assert 5 <= timing.rounds <= 200
    assert figures.latency_s >= 0
    # Between a bad Wi-Fi and the memory of a large computer.
    assert 1e5 < figures.bus_bytes_per_s() < 1e12


# --- on this computer -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["ring", pytest.param("mpi", marks=_needs_mpi)])
def test_two_ranks_here(backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    found = measure(
        [HERE], backend, BenchOptions(sizes=SIZES, timeout_s=60, seconds=0.05, progress=told.append)
    )
    assert found.failures == ()
    assert found.whole is not None
    assert_sound(found.whole, ("here",), 2, backend)
    assert all(1e8 < speed < 1e15 for speed in found.whole.speeds)
    assert len(found.whole.speeds) == 2
    assert [timing.num_bytes for timing in found.whole.timings] == list(SIZES)
    assert (found.links, found.not_measured, found.slowest_link) == ((), (), None)
    assert told == ["measuring here"]
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", ""), "ranks wrote between the caller's output"


def test_a_back_end_that_cannot_form_its_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    if __import__("mlx.core").core.cuda.is_available():
        pytest.skip("NCCL works here")
    found = measure([HERE], "nccl", BenchOptions(sizes=SIZES, timeout_s=60))
    (failure,) = found.failures
    assert found.whole is None
    assert "is a build without nccl" in failure.message
    assert failure.hint is not None
    assert "mlx[cuda13]" in failure.hint


def test_ctrl_c_ends_all_ranks(place: Path) -> None:
    code = (
        "from allhands.cluster.netbench import *; from allhands.cluster.hosts import Host;"
        "measure([Host('here', slots=2)], 'ring', BenchOptions(seconds=30, progress=lambda s: print(s, flush=True)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"measuring here\n"
        deadline = time.monotonic() + 20
        while not (
            ranks := [p for p in psutil.Process(program.pid).children(recursive=True) if is_rank(p)]
        ):
            assert time.monotonic() < deadline, "no rank was started"
            time.sleep(0.05)
        program.send_signal(2)
        program.wait(20)
    gone, left = psutil.wait_procs(ranks, timeout=10)
    assert left == []
    assert gone


def is_rank(process: psutil.Process) -> bool:
    try:
        return "allhands.cluster.bench_rank" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@_needs_mpi
def test_a_rank_measures_under_plain_mpirun(tmp_path: Path) -> None:
    mpi = find_mpi()
    assert mpi is not None
    request = json.dumps({"mark": "@", "sizes": [4096], "seconds": 0.01})
    ranks = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-np", "2", sys.executable]
    done = subprocess.run(
        [mpi.mpirun, *ranks, "-P", "-m", "allhands.cluster.bench_rank", request],
        env={**os.environ, **mpi_variables(mpi, tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("@")]
    result = json.loads(line[1:])
    assert (result["backend"], result["num_ranks"], len(result["timings"])) == ("mpi", 2, 1)


def test_one_process_alone_is_its_own_sum() -> None:
    from allhands.distributed.bench import BenchPlan, time_all_sum

    (entry,) = time_all_sum(SingleProcess(), BenchPlan([4096], seconds=0.001))
    assert entry["num_bytes"] == 4096


# --- on several computers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with namespaces(3, tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def hosts(cluster: Cluster, tmp_path: Path) -> Iterator[tuple[Host, ...]]:
    yield read_hostfile(cluster.hostfile(tmp_path / "hosts.json"))
    for name in cluster.names:
        cluster.wait_for_none(name, 10)


def rate_of(found: Measurement, *names: str) -> float:
    """Megabits a second of the bus between two computers, at the largest size."""
    (link,) = [link for link in found.links if link.hosts == names]
    return link.bus_bytes_per_s(link.timings[-1]) * 8e-6


@pytest.mark.long
def test_three_computers_one_of_them_slow(cluster: Cluster, hosts: tuple[Host, ...]) -> None:
    cluster.slow("node2", "50mbit")
    try:
        found = measure(hosts, "ring", BenchOptions(sizes=SIZES, timeout_s=90, seconds=0.1))
    finally:
        cluster.heal("node2")
    assert found.failures == ()
    assert found.not_measured == ()
    assert found.whole is not None
    assert_sound(found.whole, ("node0", "node1", "node2"), 3, "ring")
    assert len(found.links) == 3
    assert found.slowest_link is not None
    assert "node2" in found.slowest_link.hosts
    assert found.slow_host == "node2"
    # 50 Mbit/s less the packets' headers, with a little more from the 64 kB that the shaper lets
    # through at once.
    for others in ("node0", "node1"):
        assert 35 < rate_of(found, others, "node2") < 60
    assert rate_of(found, "node0", "node1") > 100
    seconds = found.seconds_per_step(1 << 20)
    assert seconds is not None
    assert 0.5 < seconds / ((1 << 20) * 8 / 50e6 * 4 / 3) < 2


@pytest.mark.long
def test_a_computer_that_is_cut_off_is_named_and_the_others_are_measured(
    cluster: Cluster, hosts: tuple[Host, ...]
) -> None:
    cluster.cut("node1")
    try:
        began = time.monotonic()
        found = measure(hosts, "ring", BenchOptions(sizes=SIZES[:1], timeout_s=60, seconds=0.02))
        assert time.monotonic() - began < 66
    finally:
        cluster.heal("node1")
    (failure,) = found.failures
    assert failure.hosts == ("node1",)
    assert "node1" in failure.message
    assert found.whole is not None
    assert_sound(found.whole, ("node0", "node2"), 2, "ring")
    assert [link.hosts for link in found.links] == [("node0", "node2")]


@pytest.mark.long
def test_a_blocked_link_is_named(cluster: Cluster, hosts: tuple[Host, ...]) -> None:
    rule = ["-s", cluster.nodes["node1"].address, "-p", "tcp", "--syn", "-j", "DROP"]
    if cluster.run("node2", ["iptables", "-w", "-A", "INPUT", *rule], check=False).returncode:
        pytest.skip("no iptables")
    try:
        options = BenchOptions(sizes=SIZES[:1], timeout_s=80, seconds=0.02, connect_s=8)
        found = measure(hosts, "ring", options)
    finally:
        cluster.run("node2", ["iptables", "-w", "-D", "INPUT", *rule])
    assert found.whole is None
    assert {failure.group for failure in found.failures} == {
        ("node0", "node1", "node2"),
        ("node1", "node2"),
    }
    assert all(
        "did not form a ring group within 8 s" in failure.message for failure in found.failures
    )
    assert {link.hosts for link in found.links} == {("node0", "node1"), ("node0", "node2")}


@pytest.mark.long
def test_the_time_is_kept(cluster: Cluster, hosts: tuple[Host, ...]) -> None:
    cluster.slow("node1", "2mbit")
    try:
        began = time.monotonic()
        found = measure(hosts, "ring", BenchOptions(timeout_s=15))
        assert time.monotonic() - began < 22
    finally:
        cluster.heal("node1")
    assert found.whole is not None
    assert len(found.whole.timings) < 6, "sizes that take too long are left out"
    assert found.not_measured
