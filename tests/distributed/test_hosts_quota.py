"""Disks on which nothing may be written any more, in the middle of a run: quotas, errors of the
disk, rights.
"""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import Bench, Trial, files_left
from hostile import Job, until
from hosts import ITERS, Hosts, hosts_of

from allhands.checkpoints import checkpoints_in
from allhands.observe.metrics import read_metrics

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="file systems of Linux"),
]

# What befalls the disk: the error, the calls that it meets, and what is said of it.
ILLS: dict[str, tuple[int, str, str, str]] = {
    "quota": (errno.EDQUOT, "write", "Disk quota exceeded", "quota is used up"),
    "quota of a server": (
        errno.EDQUOT,
        "sync",
        "Disk quota exceeded",
        "quota is used up",
    ),  # which takes all at first
    "error of the disk": (errno.EROFS, "write names", "Read-only file system", "is read-only"),
    "lost rights": (errno.EACCES, "names", "Permission denied", "no permission"),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("quota"))


@pytest.fixture(scope="module")
def hosts(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_of(2, bench, tmp_path_factory.mktemp("cluster")) as hosts:
        yield hosts


@pytest.fixture
def trial(bench: Bench, hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with bench.trial(request.node.name[:30].replace("[", "-").replace(" ", "-")) as trial:
        yield trial
    for name, node in hosts.cluster.nodes.items():
        hosts.cluster.wait_for_none(name, 5.0)
        assert files_left(node.temporary) == []


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What makes calls of a process fail."""
    compiler, made = shutil.which("cc"), tmp_path_factory.mktemp("library") / "refusing_disk.so"
    if compiler is None:
        pytest.skip("no C compiler here")
    source = Path(__file__).parents[1] / "support" / "refusing_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True)
    return made


class Disk:
    """That of one computer, as its processes have it."""

    def __init__(self, hosts: Hosts, trial: Trial, name: str, directory: Path) -> None:
        self._hosts, self._name, self._when = hosts, name, directory / "when"
        self.place = hosts.shown / trial.token
        self._directory = directory

    def hostfile(self, library: Path) -> Path:
        """Of both computers."""
        path = self._hosts.cluster.hostfile(self._directory / "hosts.json")
        entries = json.loads(path.read_text())
        variables = {
            "LD_PRELOAD": library,
            "REFUSED_DIRECTORY": self.place,
            "REFUSED_WHEN": self._when,
        }
        (entry,) = [entry for entry in entries if entry["ssh"] == self._name]
        entry["envs"] = [f"{name}={value}" for name, value in variables.items()]
        path.write_text(json.dumps(entries))
        return path

    def refuse(self, number: int, calls: str) -> None:
        """From now on these calls fail."""
        self._when.write_text(f"{number} {calls}")

    def checkpoints(self) -> list[str]:
        """What lies beside the copies."""
        return self._hosts.on(self._name, f"ls {self.place}/checkpoints").split()


def started_until_it_refuses(
    hosts: Hosts, trial: Trial, disk: Disk, library: Path, number: int, calls: str
) -> Job:
    """A run whose disk takes nothing more after the checkpoint of step 5."""
    trial.plan({"rank": 1, "step": 7, "kind": "slow", "seconds": 3})
    job = hosts.start(trial, disk.hostfile(library))
    trial.wait_for_fired()
    until(lambda: "step-0000005" in disk.checkpoints(), 5.0, "no checkpoint, or copy of it")
    disk.refuse(number, calls)
    return job


@pytest.mark.parametrize("ill", ILLS)
def test_a_disk_that_holds_only_the_copy(
    hosts: Hosts, trial: Trial, library: Path, tmp_path: Path, ill: str
) -> None:
    number, calls, words, _ = ILLS[ill]
    disk = Disk(hosts, trial, "node1", tmp_path)
    job = started_until_it_refuses(hosts, trial, disk, library, number, calls)
    assert job.finish() == 0, (job.out, job.err)
    assert "failed" not in job.err
    told = [line for line in job.out.splitlines() if "on node1 is of step" in line]
    assert len(told) == 2, job.out
    assert all(words in line and "step 5" in line for line in told)
    assert len(read_metrics(hosts.out("node0", trial)).warned) == 1
    assert checkpoints_in(hosts.out("node0", trial))[0].name == f"step-{ITERS:07d}"
    assert disk.checkpoints() == ["step-0000005"]


@pytest.mark.parametrize("ill", ["quota", "lost rights"])
def test_the_disk_of_the_run(
    hosts: Hosts, trial: Trial, library: Path, tmp_path: Path, ill: str
) -> None:
    """As one that is full: a warning while training goes on, and an error where nothing can be kept
    at the end.
    """
    number, calls, words, hint = ILLS[ill]
    disk = Disk(hosts, trial, "node0", tmp_path)
    job = started_until_it_refuses(hosts, trial, disk, library, number, calls)
    assert job.finish() == 5, (job.out, job.err)
    assert "Traceback" not in job.out + job.err
    assert words in job.err
    assert hint in job.err
    if (
        "write" not in calls
    ):  # otherwise rank 0's log, from which its lines are shown, is refused, too
        assert "no checkpoint was written" in job.out, job.out + job.err
    assert not trial.events("restarting")
    assert f"step-{ITERS:07d}" in hosts.on("node1", f"ls {hosts.shown / trial.token}/checkpoints")
