"""Which back-end: a table of computers, a measurement where it decides, and a cache that forgets in
time.
"""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from allhands.cluster.candidates import (
    Choice,
    Facts,
    HostTraits,
    candidates,
    facts_here,
    facts_of,
    table_choice,
)
from allhands.cluster.choose import (
    GRADIENT_BYTES,
    SMALL_BYTES,
    ChoiceSeams,
    choose,
    explain,
    slower_than_ours,
)
from allhands.cluster.figures import Figures, Measurement, Timing
from allhands.cluster.hosts import Host
from allhands.cluster.place import LaunchPlace
from allhands.errors import DistributedError
from allhands.runtime.gpus import nvidia_gpus

LINUX = HostTraits("one", 2, "Linux", 0, "5.0.11")
FAR = HostTraits("far", 1, "Linux", 0, "5.0.11")
GPUS = HostTraits("gpu", 2, "Linux", 2, "")
MAC = HostTraits("mac", 1, "Darwin", 0, "", rdma=True)
UNKNOWN = HostTraits("quiet", 1)
PRETENDED_SSH = '#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift 2\nexec /bin/sh -c "$*"\n'

# --- the table ------------------------------------------------------------------------------------

TABLE: dict[str, tuple[list[HostTraits], str]] = {
    "one Linux computer": ([LINUX], "mpi"),
    "without Open MPI": ([replace(LINUX, mpi="")], "ring"),
    "with an old Open MPI": ([replace(LINUX, mpi="4.1.4")], "ring"),
    "with a newer one": ([replace(LINUX, mpi="10.0.0")], "mpi"),
    "one Mac": ([HostTraits("mac", 2, "Darwin", 0, "5.0.11")], "ring"),
    "a GPU a rank": ([GPUS], "nccl"),
    "a GPU too few": ([replace(GPUS, num_ranks=3, mpi="5.0.11")], "mpi"),
    "two computers": ([LINUX, FAR], "ring"),
    "two with GPUs": ([GPUS, replace(GPUS, name="gpu2")], "nccl"),
    "one of two with GPUs": ([GPUS, FAR], "ring"),
    "one that has not been asked": ([GPUS, UNKNOWN], "ring"),
    "Macs with RDMA": ([MAC, replace(MAC, name="mac2")], "jaccl"),
}


@pytest.mark.parametrize("row", TABLE)
def test_table(row: str) -> None:
    hosts, expected = TABLE[row]
    assert table_choice(Facts(tuple(hosts))).backend == expected


@pytest.mark.parametrize(
    ("hosts", "backend", "words"),
    [
        ([LINUX], "nccl", "one: no NVIDIA GPU for 2 ranks"),
        ([GPUS, UNKNOWN], "nccl", "not known how many NVIDIA GPUs quiet has"),
        ([LINUX], "jaccl", "several Macs"),
        ([MAC, replace(MAC, rdma=False, name="mac2")], "jaccl", "names no RDMA devices of mac2"),
        ([MAC, replace(LINUX, rdma=True)], "jaccl", "one: not known to be a Mac"),
        ([MAC, replace(MAC, name="mac2", num_ranks=2)], "jaccl", "one rank a Mac"),
        ([replace(LINUX, mpi="")], "mpi", "no Open MPI 5 found on one"),
        ([replace(LINUX, mpi="4.1.4")], "mpi", "4.1.4 is too old"),
        ([LINUX, FAR], "mpi", "mpirun itself"),
    ],
)
def test_why_not(hosts: list[HostTraits], backend: str, words: str) -> None:
    (found,) = [one for one in candidates(Facts(tuple(hosts))) if one.backend == backend]
    assert not found.possible
    assert words in found.reason


# --- measured -------------------------------------------------------------------------------------


def network(backend: str, latency_s: float, bytes_per_s: float) -> Measurement:
    times = [(size, latency_s + size / bytes_per_s) for size in (SMALL_BYTES, GRADIENT_BYTES)]
    whole = Figures(("one",), 2, backend, tuple(Timing(size, 5, t, t, t) for size, t in times))
    return Measurement(backend, whole)


@dataclass
class Bench:
    """A pretended network; counts how often it is measured."""

    directory: Path
    times: dict[str, tuple[float, float]]
    now: float = 1e9
    asked: list[tuple[str, int, int | None]] = field(
        default_factory=list[tuple[str, int, "int | None"]]
    )

    def measure(self, backend: str, num_ranks: int, cores: int | None) -> Measurement:
        self.asked.append((backend, num_ranks, cores))
        if backend not in self.times:
            raise DistributedError("no such thing here", code="any-fault")
        return network(backend, *self.times[backend])

    @property
    def seams(self) -> ChoiceSeams:
        return ChoiceSeams(self.measure, self.directory, lambda: self.now)

    def choose(self, hosts: Sequence[HostTraits] = (LINUX,), **more: Any) -> Choice:
        return choose(Facts(tuple(hosts)), seams=self.seams, **more)


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **times: Bench(tmp_path / "cache", times)


FAST, SLOW = (10e-6, 5e9), (50e-6, 1e9)


def test_the_faster_one_is_taken_and_kept(make: Make) -> None:
    bench = make(mpi=SLOW, ring=FAST)
    first = bench.choose(training_s=3600.0, cores_per_rank=1)
    assert first.backend == "ring", "the table says mpi"
    assert bench.asked == [("mpi", 2, 1), ("ring", 2, 1)]
    expected = GRADIENT_BYTES / 5e9 + SMALL_BYTES / 5e9 * 2 + 3 * 10e-6
    assert first.measured["ring"] == pytest.approx(expected)
    bench.now += 3 * 86400
    again = bench.choose(cores_per_rank=1)
    assert (again.backend, again.age_s) == ("ring", 3 * 86400)
    assert len(bench.asked) == 2, "it was measured again"
    (kept,) = (bench.directory / "backends").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_what_is_exchanged_matters(make: Make) -> None:
    # Mpi begins at once, the ring is faster once it runs.
    bench = make(mpi=(1e-6, 1e9), ring=(1e-3, 4e9))
    assert bench.choose(training_s=3600.0, gradient_bytes=SMALL_BYTES).backend == "mpi"
    assert bench.choose(gradient_bytes=100 << 20).backend == "ring"
    assert len(bench.asked) == 2


def test_short_runs_and_unknown_ones_take_the_table(make: Make) -> None:
    bench = make(mpi=SLOW, ring=FAST)
    for training_s in (None, 20.0):
        found = bench.choose(training_s=training_s)
        assert (found.backend, found.measured, found.age_s) == ("mpi", {}, None)
    assert bench.asked == []


@pytest.mark.parametrize(
    "hosts", [[LINUX, FAR], [GPUS], [replace(LINUX, num_ranks=1)], [replace(LINUX, mpi="")]]
)
def test_where_nothing_is_to_be_decided_nothing_is_measured(
    make: Make, hosts: list[HostTraits]
) -> None:
    bench = make(mpi=SLOW, ring=FAST)
    assert bench.choose(hosts, training_s=1e6).measured == {}
    assert bench.asked == []


def test_one_rank_needs_nobody(make: Make) -> None:
    found = make(mpi=SLOW, ring=FAST).choose([replace(LINUX, num_ranks=1)], training_s=1e6)
    assert found.backend == "ring"
    assert "exchanges nothing" in explain(found)[0]


def test_a_measurement_that_fails_leaves_the_table(make: Make) -> None:
    bench = make(ring=FAST)
    assert bench.choose(training_s=1e6).backend == "mpi"
    assert [backend for backend, _, _ in bench.asked] == ["mpi", "ring"]


@pytest.mark.parametrize("change", ["old", "future", "torn", "wrong", "empty", "zero"])
def test_a_cache_that_cannot_be_trusted_is_measured_anew(make: Make, change: str) -> None:
    bench = make(mpi=SLOW, ring=FAST)
    bench.choose(training_s=1e6)
    (kept,) = (bench.directory / "backends").iterdir()
    content = json.loads(kept.read_text())
    if change in ("old", "future"):
        bench.now += 31 * 86400 if change == "old" else -10
    else:
        content["figures"]["ring"]["timings"][0]["median_s"] = 0.0
        content["figures"]["mpi"]["timings"][0]["median_s"] = 0.0
        texts = {
            "torn": kept.read_text()[:50],
            "wrong": "[1]",
            "empty": "",
            "zero": json.dumps(content),
        }
        kept.write_text(texts[change])
    assert bench.choose(training_s=1e6).backend == "ring"
    assert len(bench.asked) == 4


def test_another_version_or_another_number_of_ranks_is_another_measurement(make: Make) -> None:
    bench = make(mpi=SLOW, ring=FAST)
    bench.choose(training_s=1e6)
    assert bench.choose([replace(LINUX, mpi="5.0.12")]).measured == {}
    assert bench.choose([replace(LINUX, num_ranks=4)]).measured == {}
    assert bench.choose(cores_per_rank=3).measured == {}
    assert bench.choose().measured != {}


def test_a_cache_that_cannot_be_written_stops_nothing(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench = replace(make(mpi=SLOW, ring=FAST), directory=tmp_path / "file")
    assert bench.choose(training_s=1e6).backend == "ring"


def test_explanation(make: Make) -> None:
    bench = make(mpi=SLOW, ring=FAST)
    bench.choose(training_s=1e6)
    bench.now += 2.5 * 86400
    lines = explain(bench.choose())
    assert lines[0] == "back-end ring: measured on this computer"
    assert lines[1] == "  a step's exchanges take: mpi 16.9 ms, ring 3.39 ms (measured 2 days ago)"
    assert "  not nccl: one: no NVIDIA GPU for 2 ranks" in lines
    assert explain(table_choice(Facts((GPUS,))))[0] == "back-end nccl: every rank has an NVIDIA GPU"


# --- facts ----------------------------------------------------------------------------------------


def test_mpi_is_not_chosen_for_what_agents_start(tmp_path: Path) -> None:
    """Neither on one other computer nor on this one, if it stands in a hostfile."""
    for facts in (Facts((LINUX,), by_agents=True), Facts((replace(LINUX, here=False),))):
        assert table_choice(facts).backend == "ring"
        assert choose(facts, seams=ChoiceSeams(directory=tmp_path)).backend == "ring"
    assert table_choice(Facts((LINUX,))).backend == "mpi"
    assert [host.here for host in facts_of([Host("far", "far"), Host("here")]).hosts] == [
        False,
        True,
    ]


def test_facts_of_this_computer() -> None:
    import platform

    from allhands.cluster.mpi import find_mpi

    (host,) = facts_here(3).hosts
    mpi = find_mpi()
    assert (host.num_ranks, host.system) == (3, platform.system())
    assert host.mpi == (".".join(map(str, mpi.version)) if mpi else "")


def test_ranks_are_shared_out_in_the_order_of_the_hosts() -> None:
    hosts = [
        Host("a", "a", slots=2),
        Host("b", "b", slots=2, rdma=(None, "rdma_en2")),
        Host("c", "c"),
    ]
    found = facts_of(hosts, 3).hosts
    assert [(host.name, host.num_ranks, host.rdma) for host in found] == [
        ("a", 2, False),
        ("b", 1, True),
    ]
    assert all((host.gpus, host.mpi, host.system) == (None, None, None) for host in found)
    assert [host.num_ranks for host in facts_of(hosts).hosts] == [2, 2, 1]
    assert facts_of([Host("here", slots=1)], 4).num_ranks == 4


def launched(
    launcher: str = "mlx.launch", backend: str = "ring", size: int = 2, here: int = 2
) -> LaunchPlace:
    return LaunchPlace(launcher, 0, size, 0, here, backend, "test")  # type: ignore[arg-type]


def test_a_ring_of_one_computer_is_told_of_what_is_faster(make: Make) -> None:
    def told(
        launch: LaunchPlace, host: HostTraits = LINUX, bench: Bench | None = None
    ) -> str | None:
        return slower_than_ours(launch, "-n 2", Facts((host,)), (bench or make()).seams)

    assert "-n 2 takes mpi, and so does mpirun" in (told(launched()) or "")
    gpus = told(launched(), GPUS) or ""
    assert "-n 2 takes nccl," in gpus
    assert "mpirun" not in gpus
    # Not where it is no slower: without Open MPI, on a Mac, or where it was measured to be the
    # faster one.
    assert told(launched(), replace(LINUX, mpi="")) is None
    assert told(launched(), HostTraits("mac", 2, "Darwin", 0, "5.0.11")) is None
    bench = make(mpi=SLOW, ring=FAST)
    assert bench.choose(training_s=3600.0).backend == "ring"
    assert told(launched(), bench=bench) is None
    # Nor to somebody who has not started it so, nor over several computers.
    for other in (
        launched("openmpi", "mpi"),
        launched("allhands"),
        launched(backend="nccl"),
        launched(here=1),
    ):
        assert told(other) is None


def test_another_computer_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    programs = {
        "nvidia-smi": "echo 'GPU 0: X (UUID: 1)'; echo 'GPU 1: X (UUID: 2)'",
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o700)
    (tools / "python").symlink_to(sys.executable)
    (tools / "ssh").write_text(PRETENDED_SSH.replace("exec", "echo Welcome; echo @home; exec"))
    (tools / "ssh").chmod(0o700)
    monkeypatch.setenv("ALLHANDS_SSH", shlex.quote(str(tools / "ssh")))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    host = Host("far", "far", python=str(tools / "python"))
    (found,) = facts_of([host], ask=True).hosts
    assert (found.system, found.gpus) == ("Linux" if sys.platform == "linux" else "Darwin", 2)


@pytest.mark.parametrize("answer", ["exit 255", "echo '@{'", "echo hello", "sleep 60"])
def test_one_that_does_not_answer_is_not_known(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("ALLHANDS_SSH", shlex.quote(str(tmp_path / "ssh")))
    monkeypatch.setattr("allhands.cluster.candidates._ASK_S", 0.5)
    (found,) = facts_of([Host("far", "far")], ask=True).hosts
    assert (found.system, found.gpus, found.mpi) == (None, None, None)


def test_a_supervisor_that_chooses_loads_neither_mlx_nor_numpy() -> None:
    code = (
        "import sys, allhands.cli.train\nfrom allhands.cluster.candidates import facts_here\n"
        "from allhands.cluster.choose import choose\n"
        "print(choose(facts_here(2)).backend, [name for name in ('mlx', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split(maxsplit=1)[1] == "[]\n"


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, 2),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("1", 1),
        ("0, 1", 2),
        ("0,-1,1", 1),
        ("GPU-12ab,MIG-34cd", 2),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(
    visible: str | None, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: 1)'; echo 'GPU 1: X (UUID: 2)'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvidia_gpus() == gpus
