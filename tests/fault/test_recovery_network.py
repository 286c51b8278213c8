"""Several computers, of which one is cut off, comes back, or joins while the job is running.

The computers are network namespaces on this one, each with an sshd. Training on other ranks sums in
another order, so runs are compared to rounding.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty import ITERS, Bench, Result, Trial, digest, files_left
from hostile import until
from hosts import sharing_compiled, trial_among
from namespaces import Cluster

from allhands.observe.metrics import read_metrics

pytestmark = pytest.mark.long

# Steps of the tiny model take milliseconds. These make time for people to edit files and to pull
# cables.
_PAUSE_S = 1.5


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("network"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with sharing_compiled(3, directory, [directory / "own"]) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> Result:
    """Three ranks on this computer alone."""
    with bench.trial("undisturbed") as trial:
        trial.run()
        return trial.result()


@pytest.fixture
def trial(bench: Bench, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with trial_among(bench, cluster, request.node.name) as trial:
        yield trial


def _slow(rank: int, steps: range, attempt: int) -> list[dict[str, object]]:
    common = {"rank": rank, "kind": "slow", "seconds": _PAUSE_S, "attempt": attempt}
    return [{**common, "step": step} for step in steps]


def _assert_close(losses: list[tuple[int, float]], expected: Result) -> None:
    assert [step for step, _ in losses] == [step for step, _ in expected.losses][-len(losses) :]
    theirs = [loss for _, loss in expected.losses][-len(losses) :]
    # Another number of ranks adds up in another order: 7e-7 of a gradient. Adam makes whole steps
    # of gradients that are nearly zero, so that it grows with each: 6e-5 after 30.
    np.testing.assert_allclose([loss for _, loss in losses], theirs, rtol=2e-4)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rounds", [(), ("--sync-every", "5")], ids=["steps", "rounds"])
def test_a_host_joins_is_cut_off_and_comes_back(
    trial: Trial, cluster: Cluster, undisturbed: Result, tmp_path: Path, rounds: tuple[str, ...]
) -> None:
    """With rounds of local steps it joins between two of them; what a cut interrupts is the round
    it happens in.
    """
    hostfile = cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"])
    trial.plan(*_slow(0, range(2, 5), 1), *_slow(0, range(8, 9), 2), *_slow(0, range(6, 16), 3))
    job = trial.start("--hostfile", hostfile, "--min-ranks", "2", *rounds, ranks=1)
    trial.wait_for_fired(1)
    cluster.hostfile(hostfile)
    until(lambda: bool(trial.events("regrouping")), 20.0, "the new host is not noticed")
    trial.wait_for_fired(4)
    cluster.cut("node2")
    until(lambda: len(trial.events("restarting")) == 2, 40.0, "nothing has happened")
    cluster.heal("node2")
    assert job.finish(120) == 0, (job.out, job.err)

    assert [event["num_ranks"] for event in trial.events("restarting")] == [3, 2, 3]
    (fault,) = trial.events("fault")
    assert fault["host"] == "node2"
    assert "node2 (rank 2) does not answer any more" in fault["message"]
    joined, back = trial.events("regrouping")
    assert "node2 can take part now" in joined["message"]
    assert "node2 can take part again" in back["message"]
    # At a checkpoint nothing is lost, after a cut what followed the last one.
    starts = [
        json.loads(line)
        for line in (trial.out / "metrics.jsonl").read_text().splitlines()
        if '"started"' in line
    ]
    assert [start["num_ranks"] for start in starts] == [2, 3, 2, 3]
    assert starts[1]["step"] == starts[2]["step"] == 5
    assert starts[3]["step"] in (10, 15, 20, 25)
    found = trial.result()
    assert [step for step, _ in found.losses] == list(range(1, ITERS + 1))
    if not rounds:
        _assert_close(list(found.losses), undisturbed)
    else:  # another training, which learns as well
        last = [np.mean([loss for _, loss in each.losses][-5:]) for each in (found, undisturbed)]
        assert last[0] == pytest.approx(last[1], rel=0.05)
    assert found.trained_tokens == undisturbed.trained_tokens


@pytest.mark.timeout(240)
def test_the_host_that_writes_is_cut_off_and_nobody_else_sees_its_files(
    trial: Trial, cluster: Cluster, undisturbed: Result, tmp_path: Path
) -> None:
    trial.out = cluster.directory / "own" / trial.token
    trial.plan({"rank": 0, "step": 13, "kind": "slow", "seconds": 2.0, "attempt": 1})
    hostfile = cluster.hostfile(tmp_path / "hosts.json")
    job = trial.start("--hostfile", hostfile, "--min-ranks", "2", ranks=1)
    trial.wait_for_fired()
    cluster.cut("node0")
    until(lambda: bool(trial.events("restarting")), 40.0, "nothing has happened")
    assert trial.events("restarting")[0]["num_ranks"] == 2
    assert trial.events("restarting")[0]["step"] == 10
    (fault,) = trial.events("fault")
    assert fault["host"] == "node0"
    # It ends by itself what it runs; nobody can tell it to.
    cluster.wait_for_none("node0", 30.0)
    assert job.finish(120) == 0, (job.out, job.err)
    own = [cluster.directory / f"files-{name}-0" / trial.token for name in cluster.names]
    last = Path("checkpoints", f"step-{ITERS:07d}", "adapters.safetensors")
    copies = [path for path in own if (path / last).exists()]
    assert copies == own[1:]
    assert len({digest(path / last) for path in copies}) == 1
    told = [[(report.step, report.loss) for report in read_metrics(path).train] for path in copies]
    for losses in told:
        _assert_close(losses, undisturbed)
    assert max(map(len, told)) == ITERS


@pytest.mark.timeout(240)
def test_a_launcher_killed_leaves_nothing_anywhere(
    trial: Trial, cluster: Cluster, undisturbed: Result, tmp_path: Path
) -> None:
    hostfile = cluster.hostfile(tmp_path / "hosts.json")
    trial.plan({"rank": 1, "step": 12, "kind": "stop"})
    job = trial.start("--hostfile", hostfile, ranks=1)
    trial.wait_for_fired()
    assert all(cluster.processes(name) for name in cluster.names)
    job.process.send_signal(signal.SIGKILL)
    for name in cluster.names:
        cluster.wait_for_none(name, 10.0)
    job.finish()
    until(lambda: not files_left(trial.temporary), 5.0, "a temporary directory is left")
    trial.run("--resume", "--hostfile", hostfile, ranks=1)
    found = trial.result()
    _assert_close(list(found.losses), undisturbed)
