"""The choice of a back-end: a table of computers, and the facts about them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allhands.cluster.candidates import (
    Facts,
    HostTraits,
    candidates,
    choose,
    explain,
    facts_here,
    facts_of,
    slower_than_ours,
)
from allhands.cluster.hosts import Host
from allhands.cluster.place import Launch

LINUX = HostTraits("one", 2, "Linux", 0, "5.0.11")
FAR = HostTraits("far", 1, "Linux", 0, "5.0.11")
GPUS = HostTraits("gpu", 2, "Linux", 2, "")
MAC = HostTraits("mac", 1, "Darwin", 0, "", rdma=True)
UNKNOWN = HostTraits("quiet", 1)
PRETENDED_SSH = '#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift 2\nexec /bin/sh -c "$*"\n'

# --- the table ----------------------------------------------------------------------------------------

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
    assert choose(Facts(tuple(hosts))).backend == expected


@pytest.mark.parametrize(
    ("hosts", "backend", "words"),
    [
        ([LINUX], "nccl", "one: no NVIDIA GPU for 2 ranks"),
        ([GPUS, UNKNOWN], "nccl", "not known how many NVIDIA GPUs quiet has"),
        ([LINUX], "jaccl", "several Macs"),
        ([MAC, replace(MAC, rdma=False, name="mac2")], "jaccl", "names no RDMA devices of mac2"),
        ([MAC, replace(LINUX, rdma=True)], "jaccl", "one: not known to be a Mac"),
        ([MAC, replace(MAC, name="mac2", num_ranks=2)], "jaccl", "one rank a Mac"),
        ([LINUX, UNKNOWN], "mpi", "no Open MPI 5 found on quiet"),
        ([LINUX, replace(FAR, mpi="5.0.3")], "mpi", "one has 5.0.11, far has 5.0.3"),
        ([replace(LINUX, mpi="4.1.4")], "mpi", "4.1.4 is too old"),
        ([LINUX, FAR], "mpi", "mpirun itself"),
    ],
)
def test_why_not(hosts: list[HostTraits], backend: str, words: str) -> None:
    (found,) = [one for one in candidates(Facts(tuple(hosts))) if one.backend == backend]
    assert not found.possible
    assert words in found.reason


def test_one_rank_needs_nobody() -> None:
    found = choose(Facts((replace(LINUX, num_ranks=1),)))
    assert found.backend == "ring"
    assert "nobody" in explain(found)[0]


def test_explanation() -> None:
    lines = explain(choose(Facts((LINUX,))))
    assert lines[0] == "back-end mpi: Open MPI 5.0.11, shared memory on one computer"
    assert "  not nccl: one: no NVIDIA GPU for 2 ranks" in lines
    assert explain(choose(Facts((GPUS,))))[0] == "back-end nccl: every rank has an NVIDIA GPU"


# --- facts --------------------------------------------------------------------------------------------


def test_mpi_is_not_chosen_for_what_agents_start() -> None:
    """Neither on one other computer nor on this one, if it stands in a hostfile."""
    for facts in (Facts((LINUX,), by_agents=True), Facts((replace(LINUX, here=False),))):
        assert choose(facts).backend == "ring"
    assert choose(Facts((LINUX,))).backend == "mpi"
    assert [host.here for host in facts_of([Host("far", "far"), Host("here")]).hosts] == [False, True]


def test_facts_of_this_computer() -> None:
    import platform

    from allhands.cluster.mpi import find_mpi

    (host,) = facts_here(3).hosts
    mpi = find_mpi()
    assert (host.num_ranks, host.system) == (3, platform.system())
    assert host.mpi == (".".join(map(str, mpi.version)) if mpi else "")


def test_ranks_are_shared_out_in_the_order_of_the_hosts() -> None:
    hosts = [Host("a", "a", slots=2), Host("b", "b", slots=2, rdma=(None, "rdma_en2")), Host("c", "c")]
    found = facts_of(hosts, 3).hosts
    assert [(host.name, host.num_ranks, host.rdma) for host in found] == [("a", 2, False), ("b", 1, True)]
    assert all((host.gpus, host.mpi, host.system) == (None, None, None) for host in found)
    assert [host.num_ranks for host in facts_of(hosts).hosts] == [2, 2, 1]
    assert facts_of([Host("here", slots=1)], 4).num_ranks == 4


def launched(launcher: str = "mlx.launch", backend: str = "ring", size: int = 2, here: int = 2) -> Launch:
    return Launch(launcher, 0, size, 0, here, backend, "test")  # type: ignore[arg-type]


def test_a_ring_of_one_computer_is_told_of_what_is_faster() -> None:
    def told(launch: Launch, host: HostTraits = LINUX) -> str | None:
        return slower_than_ours(launch, "-n 2", Facts((host,)))

    assert "-n 2 takes mpi, and so does mpirun" in (told(launched()) or "")
    gpus = told(launched(), GPUS) or ""
    assert "-n 2 takes nccl," in gpus
    assert "mpirun" not in gpus
    # Not where it is no slower: without Open MPI, or on a Mac.
    assert told(launched(), replace(LINUX, mpi="")) is None
    assert told(launched(), HostTraits("mac", 2, "Darwin", 0, "5.0.11")) is None
    # Nor to somebody who has not started it so, nor over several computers.
    for other in (launched("openmpi", "mpi"), launched("allhands"), launched(backend="nccl"), launched(here=1)):
        assert told(other) is None


def test_another_computer_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    programs = {
        "nvidia-smi": "echo 'GPU 0: X (UUID: 1)'; echo 'GPU 1: X (UUID: 2)'",
        "mpirun": "echo 'mpirun (Open MPI) 5.1.2'",
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
    assert (found.system, found.gpus, found.mpi) == ("Linux" if sys.platform == "linux" else "Darwin", 2, "5.1.2")


@pytest.mark.parametrize("answer", ["exit 255", "echo '@{'", "echo hello", "sleep 60"])
def test_one_that_does_not_answer_is_not_known(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("ALLHANDS_SSH", shlex.quote(str(tmp_path / "ssh")))
    monkeypatch.setattr("allhands.cluster.candidates._ASK_S", 0.5)
    (found,) = facts_of([Host("far", "far")], ask=True).hosts
    assert (found.system, found.gpus, found.mpi) == (None, None, None)


def test_a_supervisor_that_chooses_loads_neither_mlx_nor_numpy() -> None:
    code = (
        "import sys, allhands.cli.train\nfrom allhands.cluster.candidates import choose, facts_here\n"
        "print(choose(facts_here(2)).backend, [name for name in ('mlx', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(maxsplit=1)[1] == "[]\n"
