"""Figures of the network: the fit, times between sizes, the slowest link, what is asked of whom, the tables."""

from __future__ import annotations

import io
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from rich.console import Console

from allhands.cli.netbench import chosen_hosts, rate_text, seconds_text, show, size_text
from allhands.cluster import netbench
from allhands.cluster.figures import SIZES, Failure, Figures, Measurement, Timing, fit
from allhands.cluster.hosts import Host
from allhands.cluster.netbench import BenchOptions, measure
from allhands.distributed.bench import BenchPlan, time_all_sum
from allhands.errors import ConfigError, DistributedError


def figures(latency_s: float, bytes_per_s: float, hosts: Sequence[str] = ("a", "b"), ranks: int = 2) -> Figures:
    """Of a network that is exactly a line."""
    times = [(size, latency_s + size / bytes_per_s) for size in SIZES]
    return Figures.of(hosts, ranks, "ring", [Timing(size, 5, t, t * 0.9, t * 1.1) for size, t in times])


# --- the fit ------------------------------------------------------------------------------------------


def test_sizes_are_those_that_were_asked_for() -> None:
    assert SIZES == (4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


@pytest.mark.parametrize(("latency", "rate"), [(20e-6, 1e9), (1e-3, 1.25e6), (5e-6, 50e9)])
def test_a_line_is_found_again(latency: float, rate: float) -> None:
    found = fit([(size, latency + size / rate) for size in SIZES])
    assert found == pytest.approx((latency, rate), rel=1e-6)


def test_noise_moves_the_fit_little() -> None:
    noise = np.random.default_rng(0).lognormal(0, 0.1, len(SIZES))
    latency, rate = fit([(size, (30e-6 + size / 1e9) * n) for size, n in zip(SIZES, noise, strict=True)])
    assert latency == pytest.approx(30e-6, rel=0.25)
    assert rate == pytest.approx(1e9, rel=0.25)


@pytest.mark.parametrize(
    "points", [[(4096, 1e-3)], [(4096, 1e-3), (65536, 0.9e-3)], [(4096, 1e-6), (65536, 100e-6)], [(4, 1.0), (8, 1.0)]]
)
def test_odd_times_give_no_impossible_line(points: list[tuple[float, float]]) -> None:
    latency, rate = fit(points)
    assert latency >= 0
    assert math.isfinite(rate)
    assert rate > 0


def test_seconds_are_as_measured_and_linear_between() -> None:
    timings = [Timing(4096, 9, 1e-3, 1e-3, 1e-3), Timing(8192, 9, 4e-3, 4e-3, 4e-3)]
    found = Figures.of(["a"], 2, "mpi", timings)
    assert [found.seconds(size) for size in (1, 4096, 8192)] == [1e-3, 1e-3, 4e-3]
    assert found.seconds(6144) == pytest.approx(2.5e-3)
    assert found.seconds(81920) == pytest.approx(40e-3)


def test_bus_bandwidth_is_that_of_a_link() -> None:
    # A ring sends each byte 2 (n - 1) / n times over each link, so links of 1 GB/s show 1 GB/s with any n.
    for ranks in (2, 3, 8):
        one = figures(0.0, 1e9 / (2 * (ranks - 1) / ranks), ranks=ranks)
        assert one.bus_bytes_per_s() == pytest.approx(1e9, rel=1e-6)
        assert one.bus_bytes_per_s(one.timings[0]) == pytest.approx(1e9, rel=1e-6)
    assert figures(0.0, 1e9).timings[2].bytes_per_s == pytest.approx(1e9)


# --- a measurement ------------------------------------------------------------------------------------


def links(slow: str | None) -> tuple[Figures, ...]:
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    return tuple(figures(50e-6, 5e6 if slow and slow in pair else 1e8, pair) for pair in pairs)


def test_the_slowest_link_and_the_slow_host() -> None:
    found = Measurement("ring", None, links("c"))
    assert found.slowest_link is not None
    assert "c" in found.slowest_link.hosts
    assert found.slow_host == "c"
    one = (figures(0.0, 1e8), figures(0.0, 5e6, ("a", "c")), figures(0.0, 1e8, ("b", "c")))
    single = Measurement("ring", None, one)
    assert single.slowest_link is one[1]
    assert single.slow_host is None, "the link of two computers is slow, not one of them"
    assert Measurement("ring", None, links(None)).slow_host is None
    assert Measurement("ring", None, links(None)[:1]).slowest_link is None


def test_a_median_by_accident_is_no_slow_host() -> None:
    """Three equal links of a busy computer: at 4 MiB all those of "a" look slow, at no other size."""
    found = list(links(None))
    for number, median in ((0, 0.0495), (1, 0.0421), (2, 0.0171)):
        timings = [replace(t, median_s=median) if t.num_bytes == 4 << 20 else t for t in found[number].timings]
        found[number] = replace(found[number], timings=tuple(timings))
    assert Measurement("ring", None, tuple(found)).slow_host is None
    # Nor where the rounds differ so much that the halves of them overlap.
    spread = [
        replace(link, timings=tuple(replace(t, low_s=t.median_s / 5, high_s=t.median_s * 5) for t in link.timings))
        for link in links("c")
    ]
    assert Measurement("ring", None, tuple(spread)).slow_host is None
    # What was measured at small sizes alone says nothing of a cable.
    small = [replace(link, timings=link.timings[:3]) for link in links("c")]
    assert Measurement("ring", None, tuple(small)).slow_host is None


def test_json_and_back() -> None:
    whole = figures(50e-6, 1e8, ("a", "b", "c"), 3)
    found = Measurement("ring", whole, links("c"), (Failure(("c",), ("a", "c"), "gone", "look", ("x",)),), (("b",),))
    content = json.loads(json.dumps(found.as_json()))
    assert Figures.from_json(content["whole"]) == whole
    assert content["slow_host"] == "c"
    assert content["links"][0]["timings"][0]["bus_bytes_per_s"] == pytest.approx(whole.timings[0].bytes_per_s)
    assert content["failures"][0]["log_tail"] == ["x"]
    assert content["not_measured"] == [["b"]]
    assert found.seconds_per_step(16 << 20) == pytest.approx(50e-6 + (16 << 20) / 1e8)
    assert Measurement("ring", None).seconds_per_step(1) is None


# --- whom it asks -------------------------------------------------------------------------------------


def hosts_of(count: int, slots: int = 1) -> list[Host]:
    return [Host(f"node{i}", f"node{i}", slots=slots) for i in range(count)]


def pairs_of(count: int, slots: int = 1) -> list[tuple[int, ...]]:
    groups = netbench._groups(hosts_of(count, slots), BenchOptions())
    assert groups[0] == (list(range(count)), [slots] * count)
    assert all(ranks == [1, 1] for _, ranks in groups[1:])
    return [tuple(members) for members, _ in groups[1:]]


def test_every_pair_up_to_six_computers_and_neighbours_beyond() -> None:
    assert pairs_of(1) == []
    assert pairs_of(2) == [], "the group is the link"
    assert pairs_of(2, slots=2) == [(0, 1)]
    assert len(pairs_of(6)) == 15
    assert pairs_of(7) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (0, 6)]
    assert netbench._groups(hosts_of(3), BenchOptions(links=False)) == [([0, 1, 2], [1, 1, 1])]


def answers(count: int) -> netbench._Answers:
    hosts = hosts_of(count)
    return netbench._Answers(hosts, netbench._groups(hosts, BenchOptions()))


def measured(number: int, hosts: Sequence[str]) -> dict[str, Any]:
    return {"kind": "measured", "group": number, **figures(1e-5, 1e9, hosts, len(hosts)).as_json()}


def test_answers_become_a_measurement() -> None:
    found = answers(3)
    found.take({"kind": "begins", "group": 0})
    found.take({"kind": "failed", "group": 0, "hosts": ["node2"], "message": "no", "hint": None, "log_tail": []})
    found.take(measured(0, ["node0", "node1"]))
    found.take(measured(1, ["node0", "node1"]))
    found.take({"kind": "left out", "group": 2})
    result = found.measurement("ring", 3.0)
    assert result.whole is not None
    assert result.whole.hosts == ("node0", "node1")
    assert [link.hosts for link in result.links] == [("node0", "node1")]
    assert result.failures == (Failure(("node2",), ("node0", "node1", "node2"), "no"),)
    assert result.not_measured == (("node1", "node2"),)


def test_two_computers_are_their_own_link() -> None:
    found = answers(2)
    found.take(measured(0, ["node0", "node1"]))
    result = found.measurement("ring", 1.0)
    assert result.links == (result.whole,)


def test_a_failure_without_a_log_gets_what_was_said() -> None:
    found = answers(2)
    said = iter([("old",), ("ImportError: x",)])
    found.take({"kind": "begins", "group": 0}, lambda: next(said))
    failed = {"kind": "failed", "group": 0, "hosts": [], "message": "no", "hint": None, "log_tail": []}
    found.take(failed, lambda: next(said))
    (failure,) = found.measurement("ring", 1.0).failures
    assert failure.log_tail == ("ImportError: x",)
    assert failure.hosts == ("node0", "node1")


@pytest.mark.parametrize(
    ("hosts", "backend", "options", "words"),
    [
        ([Host("here")], "ring", BenchOptions(), "one rank"),
        ([Host("here", slots=2)], "jaccl", BenchOptions(), "jaccl"),
        ([Host("here", slots=2)], "ring", BenchOptions(sizes=(8, 4)), "ascend"),
        ([Host("here", slots=2)], "ring", BenchOptions(sizes=()), "ascend"),
        (hosts_of(2), "mpi", BenchOptions(), "MPI is for this computer alone"),
    ],
)
def test_what_cannot_be_is_refused(hosts: list[Host], backend: str, options: BenchOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure(hosts, backend, options)


def test_a_program_that_hangs_is_ended_and_what_it_said_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"kind": "failed", "group": 0, "hosts": [], "message": "first", "hint": None, "log_tail": []}
    program = (
        f"import json, sys, time; mark = json.load(sys.stdin)['mark']; print('noise'); "
        f"print(mark + json.dumps({line!r}), flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(netbench, "_PROGRAM", ("-c", program))
    monkeypatch.setattr(netbench, "_GRACE_S", 0.2)
    began = time.monotonic()
    result = measure([Host("here", slots=2)], "ring", BenchOptions(timeout_s=1.5))
    assert 1.5 < time.monotonic() - began < 6
    assert [failure.message for failure in result.failures] == ["first"]


def test_a_program_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netbench, "_PROGRAM", ("-c", "raise SystemExit('out of luck')"))
    (failure,) = measure([Host("here", slots=2)], "ring", BenchOptions(timeout_s=20)).failures
    assert failure.message == "the measurement ended with code 1"
    assert failure.log_tail == ("out of luck",)


# --- timing -------------------------------------------------------------------------------------------


class Twin:
    """A communicator among threads; ``delay_s`` a round, ``wrong`` adds one to a number of every sum on rank 1."""

    backend = "ring"

    def __init__(self, rank: int, size: int, shared: dict[str, Any], delay_s: float = 0.0, wrong: bool = False) -> None:
        self.rank, self.size, self._shared, self._delay_s, self._wrong = rank, size, shared, delay_s, wrong

    def _all(self, array: mx.array) -> list[np.ndarray[Any, Any]]:
        self._shared[self.rank] = np.array(array)
        self._shared["barrier"].wait(20)
        found = [self._shared[rank] for rank in range(self.size)]
        self._shared["barrier"].wait(20)
        return found

    def all_sum(self, array: mx.array) -> mx.array:
        total = np.sum(self._all(array), axis=0)
        if array.size > 1:
            time.sleep(self._delay_s)
            total[-1] += float(self._wrong)
        return mx.array(total)

    def all_gather(self, array: mx.array) -> mx.array:
        return mx.array(np.concatenate(self._all(array)))


def run_twins(plan: BenchPlan, size: int = 3, slow: float = 0.0, wrong: bool = False) -> list[Any]:
    """What each rank gets; rank 1 is the slow, or the wrong, one."""
    shared: dict[str, Any] = {"barrier": threading.Barrier(size)}
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        twin = Twin(rank, size, shared, slow if rank == 1 else 0.0, wrong and rank == 1)
        try:
            found[rank] = time_all_sum(twin, plan)
        except DistributedError as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_a_round_takes_as_long_as_on_the_slowest_rank() -> None:
    found = run_twins(BenchPlan((4096, 16384), seconds=0.05), slow=0.02)
    assert found[0] == found[1] == found[2], "ranks disagree"
    assert [entry["num_bytes"] for entry in found[0]] == [4096, 16384]
    for entry in found[0]:
        assert entry["rounds"] == 5
        assert 0.02 <= entry["low_s"] <= entry["median_s"] <= entry["high_s"] < 0.2


def test_sizes_that_would_take_too_long_are_left_out() -> None:
    found = run_twins(BenchPlan((4096, 16384, 65536), seconds=0.01, budget_s=0.5), slow=0.03)
    assert [entry["num_bytes"] for entry in found[0]] == [4096]


def test_a_wrong_sum_is_told_by_every_rank() -> None:
    found = run_twins(BenchPlan((4096,)), wrong=True)
    assert all(isinstance(error, DistributedError) for error in found)
    assert all("has summed 4096 bytes wrongly on rank 1" in str(error) for error in found)


# --- the command line ---------------------------------------------------------------------------------


def test_texts() -> None:
    assert [size_text(size) for size in (4096, 262144, 64 << 20, 100)] == ["4 KiB", "256 KiB", "64 MiB", "100 B"]
    assert [seconds_text(t) for t in (1.25e-5, 2e-4, 5.1e-4, 0.034, 1.25)] == [
        "12.5 us",
        "0.20 ms",
        "0.51 ms",
        "34.0 ms",
        "1.25 s",
    ]
    assert [rate_text(rate) for rate in (6.2e6, 1.1e9, 123e6, 5e4)] == [
        "6.20 MB/s",
        "1.10 GB/s",
        "123 MB/s",
        "50.0 kB/s",
    ]


def test_the_tables_fit_and_name_what_matters() -> None:
    whole = figures(50e-6, 1e8, ("a", "b", "c"), 3)
    failure = Failure(("c",), ("a", "c"), "does not answer", "switch it on", ("last words",))
    found = Measurement("ring", whole, links("c"), (failure,), (("b", "c"),), 12.0)
    output = io.StringIO()
    show([found, Measurement("mpi", figures(1e-5, 1e9))], Console(file=output, width=80, highlight=False))
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "3 ranks on a, b, c, ring",
        "64 MiB",
        "slowest link: a - c",
        "every link of c is slow",
        "failed on c: does not answer",
        "  | last words",
        "what to do: switch it on",
        "not measured for want of time: b, c",
        "fastest for 16 MiB: ring",
        "middle half: half of the rounds took as long",
        "of the bus: what each link carries; compare it with the speed of the cable",
        "an exchange takes a step 42.0 ms with 4 MiB (a LoRA adapter), 10.7 s with 1 GiB",
    ):
        assert words in text, text


def test_which_computers(tmp_path: Path) -> None:
    assert [(host.ssh, host.slots) for host in chosen_hosts(None, None, 3)] == [(None, 3)]
    assert [host.ssh for host in chosen_hosts(None, "far-1, me@far-2", None)] == ["far-1", "me@far-2"]
    (tmp_path / "hosts").write_text("far-1 slots=2\n")
    assert [host.slots for host in chosen_hosts(str(tmp_path / "hosts"), None, None)] == [2]
    for wrong in (("x", "a", None), (None, "a", 2), (None, "a,a", None), (None, "a,-oProxyCommand=x", None)):
        with pytest.raises(ConfigError):
            chosen_hosts(*wrong)


def test_nothing_needs_mlx_before_it_measures() -> None:
    import subprocess

    modules = "allhands.cluster.netbench, allhands.cluster.choose, allhands.cli.netbench"
    code = f"import sys, {modules}; print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
