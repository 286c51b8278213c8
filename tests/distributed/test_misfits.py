"""Computers that do not fit to the others: named, and left out where the others are enough; nobody else is blamed.

Each computer is a network namespace with an sshd and with model, data and results of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from command_line import changed
from faulty import Bench, Trial, share_compiled
from hostile import Job, until
from namespaces import Cluster, namespaces

from allhands.metrics import read_metrics

pytestmark = pytest.mark.long

ITERS = 8


class Hosts:
    """Four computers, each with the model and the data; a test spoils copies, and all are put back after it."""

    def __init__(self, cluster: Cluster, bench: Bench) -> None:
        self.cluster = cluster
        self.bench = bench
        self.shown = cluster.directory / "own"  # every computer sees its own files here
        self.put_back()

    def put_back(self) -> None:
        for name in self.cluster.names:
            for part, source in (("model", self.bench.model), ("data", self.bench.data)):
                shutil.rmtree(self.files(name) / part, ignore_errors=True)
                shutil.copytree(source, self.files(name) / part)

    def files(self, name: str) -> Path:
        """Where this process sees what that computer has at ``shown``."""
        return self.cluster.directory / f"files-{name}-0"

    def start(self, trial: Trial, names: Sequence[str], *more: str | Path, hostfile: Path | None = None) -> Job:
        """Start the run on these computers."""
        trial.out = self.shown / trial.token
        paths = ["--model", self.shown / "model", "--data", self.shown / "data", "--adapter-path", trial.out]
        hostfile = hostfile or self.cluster.hostfile(self.cluster.directory / "hosts.json", names=names)
        return trial.start(*changed([*paths, "--hostfile", hostfile], more), ranks=1, iters=ITERS)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("misfits")
    with namespaces(4, directory, [directory / "own"]) as cluster:
        for node in cluster.nodes.values():
            share_compiled(node.temporary)
        yield Hosts(cluster, Bench(tmp_path_factory.mktemp("bench")))


@pytest.fixture
def trial(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with hosts.bench.trial(request.node.name.split("[")[0][:30]) as trial:
        yield trial
    hosts.put_back()


def flip(path: Path) -> None:
    """Change one bit in the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def letter(path: Path) -> None:
    """Change one letter of the data."""
    text = path.read_text()
    at = next(i for i in range(len(text) // 2, len(text)) if text[i].islower() and text[i + 1].islower())
    path.write_text(text[:at] + ("b" if text[at] == "a" else "a") + text[at + 1 :])


SPOILT = {"model.safetensors": ("model", flip), "train.jsonl": ("data", letter), "valid.jsonl": ("data", letter)}


def spoil(hosts: Hosts, host: str, name: str) -> None:
    folder, how = SPOILT[name]
    how(hosts.files(host) / folder / name)


@pytest.mark.parametrize("name", SPOILT)
def test_the_one_that_differs_is_named_and_nothing_is_tried_again(hosts: Hosts, trial: Trial, name: str) -> None:
    spoil(hosts, "node1", name)
    job = hosts.start(trial, ["node0", "node1", "node2"])
    message = job.fails(7, "node1", name, "allhands cluster sync --hostfile")
    print(message)
    assert not trial.events("restarting")
    assert not trial.events("left out")


def test_the_others_go_on_without_it(hosts: Hosts, trial: Trial) -> None:
    spoil(hosts, "node1", "train.jsonl")
    job = hosts.start(trial, ["node0", "node1", "node2"], "--min-ranks", "2")
    assert job.finish() == 0, job.err
    print(job.err)
    assert [event["host"] for event in trial.events("left out")] == ["node1"]
    assert not trial.events("fault")


def slowly(trial: Trial, seconds: float) -> None:
    """Steps of the tiny model take milliseconds: time for a computer to come."""
    steps = range(2, ITERS - 1)
    trial.plan(*({"rank": 0, "step": step, "kind": "slow", "seconds": seconds, "attempt": 1} for step in steps))


def steps(hosts: Hosts, trial: Trial, host: str = "node0") -> list[int]:
    return [report.step for report in read_metrics(hosts.files(host) / trial.token).train]


def starts(hosts: Hosts, trial: Trial, host: str = "node0") -> list[int]:
    """The ranks of every start that is told of there."""
    lines = (hosts.files(host) / trial.token / "metrics.jsonl").read_text().splitlines()
    return [one["num_ranks"] for one in map(json.loads, lines) if one["event"] == "started"]


@pytest.mark.parametrize("name", ["model.safetensors", "train.jsonl", "nothing there"])
def test_a_newcomer_that_does_not_fit_is_refused_and_nobody_is_disturbed(
    hosts: Hosts, trial: Trial, name: str, tmp_path: Path
) -> None:
    if name in SPOILT:
        spoil(hosts, "node2", name)
    else:
        shutil.rmtree(hosts.files("node2") / "data")
    slowly(trial, 4.0)
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"])
    job = hosts.start(trial, [], "--min-ranks", "1", "--hang-timeout-s", "60", hostfile=hostfile)
    until(lambda: bool(trial.events("started")), 60.0, "it does not start")
    hosts.cluster.hostfile(hostfile, names=["node0", "node1", "node2"])
    assert job.finish(120) == 0, job.err
    print(job.err)
    (left_out,) = trial.events("left out")
    assert left_out["host"] == "node2"
    assert (name if name in SPOILT else "data") in left_out["message"]
    assert not trial.events("regrouping")
    assert starts(hosts, trial) == [2]
    assert steps(hosts, trial) == list(range(1, ITERS + 1))
    assert not hosts.cluster.processes("node2")


def test_a_newcomer_that_fits_joins(hosts: Hosts, trial: Trial, tmp_path: Path) -> None:
    slowly(trial, 4.0)
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"])
    job = hosts.start(trial, [], "--min-ranks", "1", "--hang-timeout-s", "60", hostfile=hostfile)
    until(lambda: bool(trial.events("started")), 60.0, "it does not start")
    hosts.cluster.hostfile(hostfile, names=["node0", "node1", "node2"])
    assert job.finish(120) == 0, job.err
    print(job.err)
    assert not trial.events("left out")
    assert starts(hosts, trial) == [2, 3]
    assert steps(hosts, trial) == list(range(1, ITERS + 1))
