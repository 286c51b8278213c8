"""Computers of a pipeline that are cut off in the middle of a step, and stages that take long
without having hung.

The computers are network namespaces on this one, each with an sshd.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty import ITERS, Bench, Result, Trial
from hostile import until
from hosts import sharing_compiled, trial_among
from namespaces import Cluster

pytestmark = pytest.mark.long

PIPELINE = ("--strategy", "pipeline")
FOUND_S = 5.0  # from the cut to the word that a computer is lost
PAUSE_S = 2.0  # between two messages of a step, in which the cable is pulled


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("pipeline-network"), layers=4)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with sharing_compiled(3, tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def trial(bench: Bench, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with trial_among(bench, cluster, request.node.name) as trial:
        yield trial


@pytest.fixture(scope="module")
def undisturbed(bench: Bench, cluster: Cluster) -> dict[int, Result]:
    """Two and three computers with a stage each."""
    found: dict[int, Result] = {}
    for count in (2, 3):
        hostfile = cluster.hostfile(bench.directory / f"{count}.json", names=cluster.names[:count])
        with bench.trial(f"undisturbed-{count}") as trial:
            trial.run(*PIPELINE, "--hostfile", hostfile, ranks=1)
            found[count] = trial.result()
    return found


def _cut(trial: Trial, cluster: Cluster, name: str) -> float:
    """Pull the cable of a computer within a step, and return how long it took until that was found."""
    trial.wait_for_fired()
    began = time.time()
    cluster.cut(name)
    until(lambda: bool(trial.events("fault")), 30.0, "nothing is found")
    (fault,) = trial.events("fault")
    assert fault["host"] == name
    assert "does not answer any more" in fault["message"]
    return fault["time"] - began


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cut_off", ["node0", "node1"])
def test_a_cut_within_a_step_is_found_and_the_same_stages_go_on_bitwise(
    trial: Trial, cluster: Cluster, undisturbed: dict[int, Result], tmp_path: Path, cut_off: str
) -> None:
    """Before the first stage hands on what it has computed, or before its gradient comes back."""
    rank = cluster.names.index(cut_off)
    trial.plan({"rank": rank, "step": 13, "kind": "slow", "seconds": PAUSE_S, "at": "message"})
    hostfile = cluster.hostfile(tmp_path / "hosts.json", names=cluster.names[:2])
    job = trial.start(*PIPELINE, "--hostfile", hostfile, ranks=1)
    found_s = _cut(trial, cluster, cut_off)
    print(f"found after {found_s:.2f} s")
    assert found_s <= FOUND_S
    cluster.heal(cut_off)
    assert job.finish(120) == 0, (job.out, job.err)
    assert [event["step"] for event in trial.events("restarting")] == [10]
    assert trial.result() == undisturbed[2]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("left", "asked"),
    [(2, ()), (1, ()), (2, ("--pp-split", "2,1,1")), (2, ("--pp", "3"))],
    ids=["two", "one", "split", "stages"],
)
def test_without_the_computer_fewer_stages_go_on(
    trial: Trial,
    cluster: Cluster,
    undisturbed: dict[int, Result],
    tmp_path: Path,
    left: int,
    asked: tuple[str, ...],
) -> None:
    """Three stages become two, whatever was asked for; two become one process with the whole model."""
    count, cut_off = left + 1, cluster.names[left]
    trial.plan({"rank": left, "step": 13, "kind": "slow", "seconds": PAUSE_S, "at": "message"})
    hostfile = cluster.hostfile(tmp_path / "hosts.json", names=cluster.names[:count])
    job = trial.start(*PIPELINE, "--hostfile", hostfile, "--min-ranks", str(left), *asked, ranks=1)
    found_s = _cut(trial, cluster, cut_off)
    print(f"found after {found_s:.2f} s")
    assert found_s <= FOUND_S
    assert job.finish(120) == 0, (job.out, job.err)
    assert [(event["num_ranks"], event["step"]) for event in trial.events("restarting")] == [
        (left, 10)
    ]
    found = trial.result()
    steps, losses = zip(*found.losses, strict=True)
    assert list(steps) == list(range(1, ITERS + 1))
    np.testing.assert_allclose(losses, [loss for _, loss in undisturbed[count].losses], rtol=1e-4)
    assert found.trained_tokens == undisturbed[count].trained_tokens


@pytest.mark.timeout(240)
def test_a_stage_that_takes_long_is_no_hang(
    trial: Trial, cluster: Cluster, undisturbed: dict[int, Result], tmp_path: Path
) -> None:
    """The others wait in a bubble of seconds where steps take milliseconds: for one rank's message,
    then another's.
    """
    pauses = [
        (1, 12, 3.0, "message"),
        (0, 17, 3.0, "message"),
        (2, 22, 3.5, "message"),
        (0, 24, 3.5, "step"),
    ]
    trial.plan(
        *(
            {"rank": rank, "step": step, "kind": "slow", "seconds": s, "at": at}
            for rank, step, s, at in pauses
        )
    )
    job = trial.start(*PIPELINE, "--hostfile", cluster.hostfile(tmp_path / "hosts.json"), ranks=1)
    assert job.finish(120) == 0, (job.out, job.err)
    assert [fault.index for fault in trial.fired()] == list(range(len(pauses)))
    assert not trial.events("fault")
    assert not trial.events("restarting")
    assert trial.result() == undisturbed[3]
