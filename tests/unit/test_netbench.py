"""Figures of the network: times between sizes, the slowest link, what is asked of whom, the tables."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from rich.console import Console

from allhands.cli.main import main
from allhands.cli.netbench import rate_text, seconds_text, show, size_text
from allhands.cluster import netbench
from allhands.cluster.connection import HostError
from allhands.cluster.figures import SIZES, Failure, Figures, Measurement, Timing
from allhands.cluster.hosts import Host
from allhands.cluster.netbench import BenchOptions, measure, measured_hosts
from allhands.cluster.outcome import Fault, Outcome
from allhands.cluster.ranks import LaunchSpec
from allhands.distributed.bench import BenchPlan, time_all_sum
from allhands.errors import ConfigError, DistributedError


def figures(
    latency_s: float, bytes_per_s: float, hosts: Sequence[str] = ("a", "b"), ranks: int = 2
) -> Figures:
    """Of a network that is exactly a line."""
    times = [(size, latency_s + size / bytes_per_s) for size in SIZES]
    return Figures(
        tuple(hosts),
        ranks,
        "ring",
        tuple(Timing(size, 5, t, t * 0.9, t * 1.1) for size, t in times),
    )


# --- figures --------------------------------------------------------------------------------------


def test_sizes_are_those_that_were_asked_for() -> None:
    assert SIZES == (4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


def test_small_arrays_tell_the_latency_and_large_ones_the_speed() -> None:
    found = figures(1e-3, 1e9)
    assert found.latency_s == pytest.approx(1e-3, rel=1e-2)
    assert found.bytes_per_s == pytest.approx(1e9, rel=2e-2)


def test_seconds_are_as_measured_and_linear_between() -> None:
    timings = [Timing(4096, 9, 1e-3, 1e-3, 1e-3), Timing(8192, 9, 4e-3, 4e-3, 4e-3)]
    found = Figures(("a",), 2, "mpi", tuple(timings))
    assert [found.seconds(size) for size in (1, 4096, 8192)] == [1e-3, 1e-3, 4e-3]
    assert found.seconds(6144) == pytest.approx(2.5e-3)
    assert found.seconds(81920) == pytest.approx(40e-3)


def test_bus_bandwidth_is_that_of_a_link() -> None:
    # A ring sends each byte 2 (n - 1) / n times over each link, so links of 1 GB/s show 1 GB/s with
    # any n.
    for ranks in (2, 3, 8):
        one = figures(0.0, 1e9 / (2 * (ranks - 1) / ranks), ranks=ranks)
        assert one.bus_bytes_per_s() == pytest.approx(1e9, rel=1e-6)
        assert one.bus_bytes_per_s(one.timings[0]) == pytest.approx(1e9, rel=1e-6)
    assert figures(0.0, 1e9).timings[2].bytes_per_s == pytest.approx(1e9)


# --- a measurement --------------------------------------------------------------------------------


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
        timings = [
            replace(t, median_s=median) if t.num_bytes == 4 << 20 else t
            for t in found[number].timings
        ]
        found[number] = replace(found[number], timings=tuple(timings))
    assert Measurement("ring", None, tuple(found)).slow_host is None
    # Nor where the rounds differ so much that the halves of them overlap.
    spread = [
        replace(
            link,
            timings=tuple(
                replace(t, low_s=t.median_s / 5, high_s=t.median_s * 5) for t in link.timings
            ),
        )
        for link in links("c")
    ]
    assert Measurement("ring", None, tuple(spread)).slow_host is None
    # What was measured at small sizes alone says nothing of a cable.
    small = [replace(link, timings=link.timings[:3]) for link in links("c")]
    assert Measurement("ring", None, tuple(small)).slow_host is None


def test_json_and_back() -> None:
    whole = figures(50e-6, 1e8, ("a", "b", "c"), 3)
    found = Measurement(
        "ring", whole, links("c"), (Failure(("c",), ("a", "c"), "gone", "look", ("x",)),), (("b",),)
    )
    content = json.loads(json.dumps(found.as_json()))
    assert Figures.from_json(content["whole"]) == whole
    assert content["slow_host"] == "c"
    assert content["links"][0]["timings"][0]["bus_bytes_per_s"] == pytest.approx(
        whole.timings[0].bytes_per_s
    )
    assert content["failures"][0]["log_tail"] == ["x"]
    assert content["not_measured"] == [["b"]]
    assert found.seconds_per_step(16 << 20) == pytest.approx(50e-6 + (16 << 20) / 1e8)
    assert Measurement("ring", None).seconds_per_step(1) is None


# --- whom it asks ---------------------------------------------------------------------------------


def hosts_of(count: int, slots: int = 1) -> list[Host]:
    return [Host(f"node{i}", f"node{i}", slots=slots) for i in range(count)]


@dataclass
class Attempts:
    """Attempts that are pretended: each takes no time, and ends as ``ends`` says for its computers."""

    ends: dict[tuple[str, ...], Exception | Outcome] = field(
        default_factory=dict[tuple[str, ...], "Exception | Outcome"]
    )
    made: list[LaunchSpec] = field(default_factory=list[LaunchSpec])
    told: Mapping[str, Any] = field(default_factory=lambda: figures(1e-5, 1e9).as_json())

    def __call__(self, spec: LaunchSpec, *_: object) -> Attempts:
        self.made.append(spec)
        return self

    def run(self, poll: Callable[[], None]) -> Outcome:
        poll()
        end = self.ends.get(self.groups[-1][0], Outcome())
        if isinstance(end, Exception):
            raise end
        return end

    def attested(self) -> Mapping[str, Any]:
        return self.told

    @property
    def groups(self) -> list[tuple[tuple[str, ...], list[int]]]:
        """The computers of each attempt, with their ranks."""
        return [
            (tuple(p.name for p in spec.places), [p.num_ranks for p in spec.places])
            for spec in self.made
        ]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    made = Attempts()
    monkeypatch.setattr(netbench, "Attempt", made)
    return made


def test_every_pair_up_to_six_computers_and_neighbours_beyond(attempts: Attempts) -> None:
    def pairs(count: int, slots: int = 1, **options: Any) -> list[tuple[str, ...]]:
        attempts.made.clear()
        measure(hosts_of(count, slots), "ring", BenchOptions(**options))
        whole, *links = attempts.groups
        assert whole == (tuple(f"node{i}" for i in range(count)), [slots] * count)
        assert all(ranks == [1, 1] for _, ranks in links)
        return [names for names, _ in links]

    assert pairs(2) == [], "the group is the link"
    assert pairs(2, slots=2) == [("node0", "node1")]
    assert len(pairs(6)) == 15
    numbers = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (0, 6)]
    assert pairs(7) == [(f"node{one}", f"node{other}") for one, other in numbers]
    assert pairs(3, links=False) == []


def test_a_computer_that_is_missing_is_named_and_the_others_are_measured(
    attempts: Attempts,
) -> None:
    everybody = ("node0", "node1", "node2")
    attempts.ends[everybody] = HostError(["node2"], "no", code="any-fault", hint="look")
    result = measure(hosts_of(3), "ring")
    assert attempts.groups == [
        (everybody, [1, 1, 1]),
        (("node0", "node1"), [1, 1]),
        (("node0", "node1"), [1, 1]),
    ]
    assert result.whole is not None
    assert result.whole.hosts == ("node0", "node1")
    assert [link.hosts for link in result.links] == [("node0", "node1")]
    assert result.failures == (Failure(("node2",), everybody, "no", "look", code="any-fault"),)
    assert result.not_measured == ()


def test_two_computers_are_their_own_link(attempts: Attempts) -> None:
    result = measure(hosts_of(2), "ring")
    assert result.links == (result.whole,)


def test_a_fault_is_told_with_its_computer_and_its_log(attempts: Attempts) -> None:
    fault = Fault(
        "error",
        1,
        "node1",
        "rank 1 failed",
        5,
        explanation="no\n  what to do: it",
        log_tail=("last",),
    )
    attempts.ends["node0", "node1"] = Outcome(fault)
    (failure,) = measure(hosts_of(2), "ring").failures
    assert failure == Failure(("node1",), ("node0", "node1"), "no", "it", ("last",))


def test_groups_for_which_there_is_no_time_are_told(attempts: Attempts) -> None:
    result = measure(hosts_of(3), "ring", BenchOptions(timeout_s=1.0))
    assert attempts.made == []
    assert len(result.not_measured) == 4


@pytest.mark.parametrize("told", [{}, {"timings": []}, {"timings": [{"num_bytes": "x"}]}])
def test_what_is_no_measurement_is_a_failure(attempts: Attempts, told: dict[str, Any]) -> None:
    attempts.told = told
    result = measure(hosts_of(2), "ring")
    assert result.whole is None
    assert [failure.hosts for failure in result.failures] == [("node0", "node1")]


def test_a_signal_ends_the_measurement(attempts: Attempts) -> None:
    attempts.ends["node0", "node1"] = Outcome(stopped=2)
    with pytest.raises(KeyboardInterrupt):
        measure(hosts_of(2), "ring")


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
def test_what_cannot_be_is_refused(
    hosts: list[Host], backend: str, options: BenchOptions, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        measure(hosts, backend, options)


@pytest.mark.slow
def test_ranks_that_hang_are_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('ALLHANDS_RANK') == '1':\n    time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began = time.monotonic()
    (failure,) = measure(
        [Host("here", slots=2)], "ring", BenchOptions(timeout_s=4.5, connect_s=60)
    ).failures
    assert time.monotonic() - began < 10
    assert failure.hosts == ("here",)


# --- timing ---------------------------------------------------------------------------------------


class Twin:
    """A communicator among threads; ``delay_s`` a round, ``wrong`` adds one to a number of every
    sum on rank 1.
    """

    backend = "ring"

    def __init__(
        self,
        rank: int,
        size: int,
        shared: dict[str, Any],
        delay_s: float = 0.0,
        wrong: bool = False,
    ) -> None:
        self.rank, self.size, self._shared, self._delay_s, self._wrong = (
            rank,
            size,
            shared,
            delay_s,
            wrong,
        )

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


# --- the command line -----------------------------------------------------------------------------


def test_texts() -> None:
    assert [size_text(size) for size in (4096, 262144, 64 << 20, 100)] == [
        "4 KiB",
        "256 KiB",
        "64 MiB",
        "100 B",
    ]
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
    show(
        [found, Measurement("mpi", figures(1e-5, 1e9))],
        Console(file=output, width=80, highlight=False),
    )
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
        "not measured, because the time was over: b, c",
        "fastest for 16 MiB: ring",
        "middle half: half of the rounds took as long",
        "of the bus: what each link carries; compare it with the speed of the cable",
        "a step's exchange takes 42.0 ms with 4 MiB (a LoRA adapter), 10.7 s with 1 GiB",
    ):
        assert words in text, text


def test_which_computers(tmp_path: Path) -> None:
    assert [(host.ssh, host.slots) for host in measured_hosts(None, None, 3)] == [(None, 3)]
    assert [host.ssh for host in measured_hosts(None, "far-1, me@far-2", None)] == [
        "far-1",
        "me@far-2",
    ]
    (tmp_path / "hosts").write_text("far-1 slots=2\n")
    assert [host.slots for host in measured_hosts(str(tmp_path / "hosts"), None, None)] == [2]
    for wrong in (
        ("x", "a", None),
        (None, "a", 2),
        (None, "a,a", None),
        (None, "a,-oProxyCommand=x", None),
    ):
        with pytest.raises(ConfigError):
            measured_hosts(*wrong)


def test_ctrl_c_tells_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("allhands.cluster.netbench.measure", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "bench", "--backend", "ring"])
    assert ended.value.code == 130
    assert "interrupted: " in capsys.readouterr().err


def test_nothing_needs_mlx_before_it_measures() -> None:
    import subprocess

    modules = "allhands.cluster.netbench, allhands.cluster.choose, allhands.cli.netbench"
    code = f"import sys, {modules}; print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
