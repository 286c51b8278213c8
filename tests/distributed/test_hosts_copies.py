"""Checkpoints' copies on other computers that cannot be kept: a warning, and no end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import Bench, Trial, files_left
from hostile import Job, until
from hosts import ITERS, Hosts, hosts_of
from runs import Run, distance, read_run

from allhands.checkpoints import checkpoints_in
from allhands.observe.metrics import RunHistory, read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def hosts(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_of(2, bench, tmp_path_factory.mktemp("cluster")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Run:
    with bench.trial("alone") as trial:
        trial.run(ranks=1, iters=ITERS)
        return read_run(trial.out)


@pytest.fixture
def trial(bench: Bench, hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with bench.trial(request.node.name[:30]) as trial:
        yield trial
    for name, node in hosts.cluster.nodes.items():
        hosts.on(
            name,
            f"while mountpoint -q {hosts.shown / trial.token}; do umount -l {hosts.shown / trial.token}; done",
        )
        hosts.cluster.wait_for_none(name, 5.0)
        assert files_left(node.temporary) == []


def disk(hosts: Hosts, trial: Trial, name: str, options: str = "size=2m") -> Path:
    """Give the run's directory on that computer a disk of its own."""
    place = hosts.shown / trial.token
    hosts.on(name, f"mkdir -p {place}; mount -t tmpfs -o {options} tmpfs {place}")
    return place


def fill(hosts: Hosts, name: str, place: Path) -> None:
    hosts.on(name, f"dd if=/dev/zero of={place}/filler bs=4k 2>/dev/null || true")


def start(hosts: Hosts, trial: Trial, tmp_path: Path, *more: str) -> Job:
    return hosts.start(trial, hosts.cluster.hostfile(tmp_path / "hosts.json"), *more)


def of_rank_0(hosts: Hosts, trial: Trial) -> RunHistory:
    return read_metrics(hosts.out("node0", trial))


def warnings(history: RunHistory) -> list[str]:
    return [one.message for one in history.warned]


def test_a_full_disk_that_holds_only_the_copy(
    hosts: Hosts, trial: Trial, alone: Run, tmp_path: Path
) -> None:
    place = disk(hosts, trial, "node1")
    trial.plan({"rank": 1, "step": 7, "kind": "slow", "seconds": 3})
    job = start(hosts, trial, tmp_path)
    trial.wait_for_fired()
    until(lambda: "step-0000005" in hosts.on("node1", f"ls {place}/checkpoints"), 5.0, "no copy")
    fill(hosts, "node1", place)
    assert job.finish() == 0, (job.out, job.err)
    assert "failed" not in job.err
    assert checkpoints_in(hosts.out("node0", trial))[0].name == f"step-{ITERS:07d}"
    # On the terminal, when it happens and at the end, and in what a report is made of.
    told = [
        line
        for line in job.out.splitlines()
        if "copy" in line and "node1" in line and "step 5" in line
    ]
    assert len(told) == 2, job.out
    assert all("No space left on device" in line for line in told)
    assert "training goes on" in told[0]
    (warning,) = warnings(of_rank_0(hosts, trial))
    assert "on node1 is of step 5" in warning
    assert distance(read_run(hosts.out("node0", trial)).weights, alone.weights) < 1e-4
    # What is left there is whole, and no half of a later one.
    assert hosts.on("node1", f"ls -A {place}/checkpoints").split() == ["step-0000005"]
    # The computer with the copy alone goes on from it.
    hosts.on("node1", f"rm {place}/filler")
    trial.schedule.unlink()
    again = hosts.start(
        trial, hosts.cluster.hostfile(tmp_path / "one.json", names=["node1"]), "--resume"
    )
    assert again.finish() == 0, (again.out, again.err)
    assert "from step 5" in again.out


def test_room_that_comes_back_is_told_and_nothing_is_left_of_the_warning(
    hosts: Hosts, trial: Trial, tmp_path: Path
) -> None:
    place = disk(hosts, trial, "node1")
    fill(hosts, "node1", place)
    trial.plan({"rank": 1, "step": 7, "kind": "slow", "seconds": 3})
    job = start(hosts, trial, tmp_path)
    trial.wait_for_fired()
    hosts.on("node1", f"rm {place}/filler")
    assert job.finish() == 0, (job.out, job.err)
    assert "there is no copy of the checkpoint on node1" in job.out
    assert "kept again: it is of step 10" in job.out
    assert warnings(of_rank_0(hosts, trial)) == []
    assert f"step-{ITERS:07d}" in hosts.on("node1", f"ls {place}/checkpoints")


@pytest.mark.parametrize("what", ["read-only", "in the way"])
def test_a_directory_that_cannot_be_written(
    hosts: Hosts, trial: Trial, tmp_path: Path, what: str
) -> None:
    if what == "read-only":
        disk(hosts, trial, "node1", "ro")
    else:
        hosts.on("node1", f"echo something > {hosts.shown / trial.token}")
    job = start(hosts, trial, tmp_path)
    assert job.finish() == 0, (job.out, job.err)
    (warning,) = warnings(of_rank_0(hosts, trial))
    assert "there is no copy of the checkpoint on node1" in warning
    assert ("Read-only file system" in warning) == (what == "read-only")


def test_the_runs_own_disk_is_no_copy(hosts: Hosts, trial: Trial, tmp_path: Path) -> None:
    place = disk(hosts, trial, "node0")
    trial.plan({"rank": 1, "step": 7, "kind": "slow", "seconds": 3})
    job = start(hosts, trial, tmp_path)
    trial.wait_for_fired()
    fill(hosts, "node0", place)
    assert job.finish() == 5, (job.out, job.err)
    # The copy is the only one that is left.
    assert f"step-{ITERS:07d}" in hosts.on("node1", f"ls {hosts.shown / trial.token}/checkpoints")


def test_copies_that_are_kept_are_not_told_of(hosts: Hosts, trial: Trial, tmp_path: Path) -> None:
    job = start(hosts, trial, tmp_path)
    assert job.finish() == 0, (job.out, job.err)
    assert "copy" not in job.out + job.err
    assert warnings(of_rank_0(hosts, trial)) == []


def test_what_a_computer_without_power_left_is_removed_at_the_next_start(
    hosts: Hosts, trial: Trial, tmp_path: Path
) -> None:
    trial.plan({"rank": 1, "step": 8, "kind": "slow", "seconds": 30})
    job = start(hosts, trial, tmp_path, "--max-restarts", "0")
    trial.wait_for_fired()
    temporary = hosts.cluster.nodes["node1"].temporary
    hosts.power_off("node1", keeps_files=True)
    assert job.finish() == 7, (job.out, job.err)
    assert files_left(temporary) != []
    half = hosts.out("node1", trial) / "checkpoints" / ".step-0000099.partial-0123456789"
    half.mkdir()
    (half / "adapters.safetensors").write_bytes(b"half")
    hosts.cluster.heal("node1")
    trial.schedule.unlink()
    again = start(hosts, trial, tmp_path, "--resume")
    assert again.finish() == 0, (again.out, again.err)
    assert "from step 5" in again.out
    assert files_left(temporary) == []
    assert not half.exists()
