"""``allhands train --hostfile`` on computers that share nothing but a network: no file of one is
seen by another.

The computers are network namespaces on this one, each with an sshd and with model, data and results
of its own. Sums over ranks are taken in another order than on one process, so losses and weights
are compared to rounding.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import Bench, Trial, digest, files_left
from hostile import until
from hosts import ITERS, Hosts, hosts_of
from runs import Run, distance, read_run
from twins import Table, ThreadCommunicator

from allhands.checkpoints import (
    BEST,
    Tensor,
    checkpoint_path,
    checkpoints_in,
    open_checkpoint,
    quick_step,
    write_checkpoint,
)
from allhands.checkpoints.resuming import Restored
from allhands.checkpoints.rundir import share_history
from allhands.cluster.agent import newest_step
from allhands.cluster.hosts import Host
from allhands.cluster.remote import newest_checkpoint
from allhands.observe.metrics import METRICS_FILE, read_metrics

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("hosts"))


# Adam divides a gradient by its own size: with the usual eps, those as small as rounding move
# weights all the same.
ADAM = ("--optimizer-config", '{"adam": {"eps": 1e-6}}')


@pytest.fixture(scope="module")
def hosts(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_of(3, bench, tmp_path_factory.mktemp("cluster")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Run:
    """One process, without a launcher or a network."""
    with bench.trial("alone") as trial:
        trial.run(*ADAM, ranks=1, iters=ITERS)
        return read_run(trial.out)


@pytest.fixture
def trial(bench: Bench, hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with bench.trial(request.node.name[:30]) as trial:
        yield trial
        for name in hosts.cluster.names:
            hosts.cluster.heal(name)
    for name, node in hosts.cluster.nodes.items():
        hosts.cluster.wait_for_none(name, 5.0)
        assert files_left(node.temporary) == []
        assert hosts.ports(name) == []


def losses(directory: Path) -> dict[int, float]:
    """The curve that a person sees, by step."""
    return {report.step: report.loss for report in read_metrics(directory).train}


def assert_same_curve(directory: Path, expected: Run) -> None:
    """Every step is there once, with the loss of the undisturbed run."""
    found = losses(directory)
    assert list(found) == list(range(1, ITERS + 1))
    np.testing.assert_allclose(list(found.values()), expected.losses, rtol=2e-5)


def assert_same_weights(directory: Path, expected: Run) -> None:
    moved = max(abs(array).max().item() for array in expected.weights.values())
    assert distance(read_run(directory).weights, expected.weights) < 1e-3 * moved


def steps_kept(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoints_in(directory))


def starts(directory: Path) -> list[tuple[int, int]]:
    """Ranks and first step of every start that is told of there."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["num_ranks"], line["step"]) for line in lines if line["event"] == "started"]


def slow(rank: int, step: int, attempt: int, seconds: float = 2.0) -> dict[str, Any]:
    """Steps of the tiny model take milliseconds: time for something to happen."""
    return {"rank": rank, "step": step, "kind": "slow", "seconds": seconds, "attempt": attempt}


def test_three_computers_compute_what_one_does(
    trial: Trial, hosts: Hosts, alone: Run, tmp_path: Path
) -> None:
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json")
    job = hosts.start(trial, hostfile, *ADAM, "--checkpoint-copies", "2")
    assert job.finish(90) == 0, (job.out, job.err)
    assert f"step {ITERS}/{ITERS}" in job.out
    first, second, third = (hosts.out(name, trial) for name in hosts.cluster.names)
    for out in (first, second):
        assert_same_curve(out, alone)
        assert_same_weights(out, alone)
        np.testing.assert_allclose(read_run(out).valid_losses, alone.valid_losses, rtol=2e-5)
        assert steps_kept(out) == [15, 16]
    assert losses(first) == losses(second)
    # With several computers shares follow the speeds by themselves; a checkpoint has them.
    last = open_checkpoint(checkpoint_path(first, ITERS)).state["shares"]
    assert len(last["weights"]) == 3
    assert [len(report.shares) for report in read_metrics(first).train] == [3] * len(
        read_metrics(first).train
    )
    arrays = sorted(path.relative_to(first) for path in first.rglob("*.safetensors"))
    assert len(arrays) >= 2 * len(("step 15", "step 16", "best"))
    assert arrays == sorted(path.relative_to(second) for path in second.rglob("*.safetensors"))
    assert [digest(first / path) for path in arrays] == [digest(second / path) for path in arrays]
    assert {path.name for path in third.iterdir()} == {"logs"}
    # Here there are no files but of the supervisor.
    assert {path.name for path in trial.out.iterdir()} == {"logs", "events.jsonl"}


def test_it_goes_on_where_the_checkpoint_is_and_takes_in_a_computer(
    trial: Trial, hosts: Hosts, alone: Run, tmp_path: Path
) -> None:
    only = ["--checkpoint-copies", "1", "--resume", "auto"]
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node1", "node0"])
    trial.plan(slow(0, 7, 1))
    job = hosts.start(trial, hostfile, *ADAM, *only)
    trial.wait_for_fired()
    job.signal(signal.SIGINT)
    assert job.finish(60) == 130, (job.out, job.err)
    assert "--resume" in job.out + job.err
    (stopped,) = (step for step in steps_kept(hosts.out("node1", trial)) if step % 5)
    assert stopped < ITERS - 5
    assert not (hosts.out("node0", trial) / "checkpoints").exists()

    # Another computer comes first now, which has nothing to go on from.
    hosts.cluster.hostfile(hostfile, names=["node0", "node1"])
    trial.schedule = tmp_path / "second.json"
    trial.plan(slow(0, stopped + 1, 1, 4.0))
    job = hosts.start(trial, hostfile, *ADAM, *only)
    trial.wait_for_fired()
    hosts.cluster.hostfile(hostfile)
    assert job.finish(90) == 0, (job.out, job.err)
    (joined,) = trial.events("regrouping")
    assert "node2 can take part now" in joined["message"]
    out = hosts.out("node1", trial)
    (first, again, together) = starts(out)
    assert (first, again) == ((2, 0), (2, stopped))
    assert together in ((3, 10), (3, 15))
    assert not (hosts.out("node0", trial) / "checkpoints").exists()
    assert_same_curve(out, alone)
    assert_same_weights(out, alone)


def test_a_copy_in_another_directory_is_no_less_the_runs(
    trial: Trial, hosts: Hosts, alone: Run, tmp_path: Path
) -> None:
    """Each computer works in a directory of its own, as ``cluster init`` writes it into the
    hostfile.
    """
    names = ["node0", "node1"]
    entries = json.loads(hosts.cluster.hostfile(tmp_path / "hosts.json", names=names).read_text())
    for name, entry in zip(names, entries, strict=True):
        entry["cwd"] = str(hosts.shown / f"work-of-{name}")
        (hosts.files(name) / f"work-of-{name}").mkdir()
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(entries))
    first, second = (hosts.files(name) / f"work-of-{name}" / trial.token for name in names)
    more = ["--adapter-path", trial.token, *ADAM]

    trial.plan(slow(0, 7, 1))
    job = hosts.start(trial, hostfile, *more)
    trial.wait_for_fired()
    job.signal(signal.SIGINT)
    assert job.finish(60) == 130, (job.out, job.err)
    stopped = steps_kept(first)
    assert stopped == steps_kept(second)
    # It goes on, and is lost before it saves again.
    trial.schedule = tmp_path / "second.json"
    trial.plan(slow(0, stopped[-1] + 1, 1, 30.0))
    job = hosts.start(trial, hostfile, *more, "--resume")
    trial.wait_for_fired()
    job.process.send_signal(signal.SIGKILL)
    for name in names:
        hosts.cluster.wait_for_none(name, 10.0)
    job.finish()
    assert steps_kept(second) == stopped
    assert not list(second.glob("*.1*"))
    # The other computer has lost all of it.
    shutil.rmtree(first)
    job = hosts.start(trial, hostfile, *more, "--resume", "auto")
    assert job.finish(90) == 0, (job.out, job.err)
    assert starts(second)[-1] == (2, stopped[-1])
    for out in (first, second):
        assert_same_curve(out, alone)
        assert_same_weights(out, alone)


def test_the_computer_with_rank_0_loses_its_power_and_comes_back(
    trial: Trial, hosts: Hosts, alone: Run, tmp_path: Path
) -> None:
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json")
    # The others are slow, too, so that it is back before the checkpoint at which they regroup.
    trial.plan(slow(1, 8, 1), *(slow(0, step, 2) for step in (7, 8, 9)))
    job = hosts.start(trial, hostfile, *ADAM, "--min-ranks", "2")
    trial.wait_for_fired()
    hosts.power_off("node0")
    until(lambda: bool(trial.events("restarting")), 40.0, "nothing has happened")
    hosts.cluster.heal("node0")
    assert job.finish(120) == 0, (job.out, job.err)

    (fault,) = trial.events("fault")
    assert fault["host"] == "node0"
    assert [(event["num_ranks"], event["step"]) for event in trial.events("restarting")] == [
        (2, 5),
        (3, 10),
    ]
    (back,) = trial.events("regrouping")
    assert "node0 can take part again" in back["message"]
    # It keeps a copy again, and has been told what happened without it.
    for out in (hosts.out("node1", trial), hosts.out("node0", trial)):
        assert starts(out) == [(3, 0), (2, 5), (3, 10)]
        assert_same_curve(out, alone)
        assert_same_weights(out, alone)
        assert steps_kept(out) == [15, 16]
        np.testing.assert_allclose(
            read_run(out).valid_losses[-1], alone.valid_losses[-1], rtol=2e-5
        )
    best = [hosts.out(name, trial) / "best" / "adapters.safetensors" for name in ("node0", "node1")]
    assert digest(best[0]) == digest(best[1])


def test_one_rank_is_left_and_then_its_supervisor_is_killed(
    trial: Trial, hosts: Hosts, alone: Run, tmp_path: Path
) -> None:
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"])
    trial.plan(slow(0, 8, 1), slow(0, 12, 2, 30.0))
    job = hosts.start(trial, hostfile, *ADAM, "--min-ranks", "1")
    trial.wait_for_fired()
    hosts.power_off("node1")
    trial.wait_for_fired(2)
    assert starts(hosts.out("node0", trial)) == [(2, 0), (1, 5)]
    (rank,) = [p for p in hosts.cluster.processes("node0") if "train" in p.cmdline()]
    # With these MLX would look for peers that nobody has started.
    assert (
        not {"MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "NCCL_HOST_IP"} & rank.environ().keys()
    )
    found, expected = losses(hosts.out("node0", trial)), alone.losses[:12]
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose(list(found.values()), expected, rtol=2e-5)
    os.kill(job.process.pid, signal.SIGKILL)
    hosts.cluster.wait_for_none("node0", 10.0)
    job.finish()
    until(lambda: not files_left(trial.temporary), 5.0, "a temporary directory is left")


# --- without namespaces ---------------------------------------------------------------------------


def test_a_newcomer_keeps_what_it_has_of_another_run_aside(tmp_path: Path) -> None:
    """Three ranks with directories of their own: the second kept the run's files from the start,
    the third did not.
    """

    def made(rank: int, step: int, run_id: str, curve: str) -> Path:
        directory = tmp_path / str(rank)
        for path in (checkpoint_path(directory, step), directory / BEST):
            tensors = {"adapters.safetensors": [Tensor("a", "U8", (3,), run_id.encode())]}
            write_checkpoint(
                path,
                step=step,
                run_id=run_id,
                state={"step": step, "iteration": step},
                tensors=tensors,
            )
        (directory / METRICS_FILE).write_text(curve)
        return directory

    runs = [
        made(0, 5, "one", "of rank 0"),
        made(1, 5, "one", "of rank 1"),
        made(2, 9, "two", "of another"),
    ]
    restored = Restored(
        {"step": 5, "iteration": 5}, {}, {}, str(checkpoint_path(runs[0], 5)), "one"
    )
    table = Table(3)

    def share(rank: int) -> None:
        share_history(
            ThreadCommunicator(rank, 3, table), runs[rank], restored, "next", newcomer=rank > 0
        )

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(share, range(3)))
    assert [(run / METRICS_FILE).read_text() for run in runs] == [
        "of rank 0",
        "of rank 1",
        "of rank 0",
    ]
    assert open_checkpoint(runs[2] / BEST).digest == open_checkpoint(runs[0] / BEST).digest
    assert quick_step(runs[2]) == 5, "the other run's checkpoints would be taken for this one's"
    assert (runs[2] / "metrics.1.jsonl").read_text() == "of another"
    assert quick_step(runs[2] / "checkpoints.1", "two") == 9


def test_what_is_gone_on_from_counts_until_the_run_has_a_checkpoint_of_its_own(
    tmp_path: Path,
) -> None:
    run, old = tmp_path / "run", tmp_path / "old"
    for directory, step, run_id in ((old, 40, "old"), (run, 30, "earlier")):
        write_checkpoint(
            checkpoint_path(directory, step), step, run_id, {"step": step, "iteration": step}, {}
        )

    def told(resume: Path | None) -> tuple[int | None, bool]:
        answer = newest_step(
            {"adapter_path": str(run), "run_id": "this", "resume": resume and str(resume)}
        )
        return answer["step"], answer["own"]

    assert told(None) == (None, False)
    assert [told(path) for path in (run, old, checkpoint_path(old, 40))] == [
        (30, False),
        (40, False),
        (40, False),
    ]
    assert told(checkpoint_path(old, 50)) == (None, False)
    here = Host("here")
    assert newest_checkpoint([here], run, "this", old) == {"here": 40}
    write_checkpoint(checkpoint_path(run, 5), 5, "this", {"step": 5, "iteration": 5}, {})
    assert told(old) == (5, True)
    assert newest_checkpoint([here], run, "this", old) == {"here": 5}
    assert newest_checkpoint([here], run, None) == {"here": 30}
