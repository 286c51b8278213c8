"""Trainings under a real Slurm: tasks of srun, batch scripts, signals, the end of the time, and
going on.

Two tasks of srun and ``-n 2`` are the same ring of two: their results are compared bit by bit.
Those of one process are compared to rounding, because sums are taken in another order.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import Bench, Result, Trial, result
from hostile import Job, until
from namespaces import namespaces
from runs import Run, read_run
from slurm import KILL_WAIT_S, Slurm, slurm

from allhands.checkpoints import checkpoints_in
from allhands.cluster.mpi import usable_mpi

ITERS = 12
SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "allhands.sbatch"
ALLHANDS = [sys.executable, "-m", "allhands"]


@pytest.fixture(scope="module")
def alone_here() -> Iterator[Slurm]:
    """A Slurm whose one node is this computer."""
    with slurm() as made:
        yield made


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("slurm"))


@pytest.fixture
def trial(bench: Bench, alone_here: Slurm, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with bench.trial(request.node.name[:30]) as trial:
        try:
            yield trial
            alone_here.wait_until_idle()
        finally:
            alone_here.end_all()


def options(bench: Bench, out: Path) -> list[str]:
    """Of ``allhands train``, with a checkpoint every fourth step."""
    text = f"--train --model {bench.model} --data {bench.data} --adapter-path {out} --iters {ITERS} --batch-size 4"
    report = "--save-every 4 --steps-per-report 1 --steps-per-eval 6 --val-batches 1 --learning-rate 1e-3"
    return [*text.split(), *report.split()]


@pytest.fixture(scope="module")
def one(bench: Bench) -> Run:
    """What one process computes, without a launcher."""
    with bench.trial("one") as trial:
        finish(Job("train", *options(bench, trial.out), env={"TMPDIR": str(trial.temporary)}))
        return read_run(trial.out)


@pytest.fixture(scope="module")
def two(bench: Bench) -> Result:
    """What ``-n 2`` computes."""
    with bench.trial("two") as trial:
        arguments = [*options(bench, trial.out), "-n", "2", "--backend", "ring"]
        finish(Job("train", *arguments, env={"TMPDIR": str(trial.temporary)}))
        return result(trial.out)


def finish(job: Job, code: int = 0, timeout: float = 60.0) -> Job:
    assert job.finish(timeout) == code, (job.process.returncode, job.out, job.err)
    return job


def srun(made: Slurm, trial: Trial, *arguments: str | Path, flags: tuple[str, ...] = ()) -> Job:
    """``srun -n 2 allhands ARGUMENTS``."""
    variables = {**made.env, "TMPDIR": str(trial.temporary)}
    if trial.schedule.exists():
        variables["ALLHANDS_FAULTS"] = str(trial.schedule)
    job = Job(*arguments, prefix=["srun", "-n", "2", *flags], env=variables, cwd=trial.out.parent)
    trial.jobs.append(job)
    return job


def slow(step: int, seconds: float) -> dict[str, Any]:
    """The steps of a tiny model take milliseconds: time for something to happen."""
    return {"rank": 0, "step": step, "kind": "slow", "seconds": seconds}


def steps_kept(out: Path) -> list[int]:
    """The steps of which there are checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoints_in(out))


def of_task(text: str, rank: int) -> str:
    """What a rank has printed, of ``srun --label``."""
    return "\n".join(
        line.partition(": ")[2] for line in text.splitlines() if line.startswith(f"{rank}: ")
    )


def only_job(made: Slurm) -> str:
    """The number of the job that runs."""
    (job,) = made.ask("squeue", "--noheader", "--format=%i").split()
    return job


# --- tasks of srun --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_tasks_compute_what_one_process_does(
    alone_here: Slurm, trial: Trial, bench: Bench, one: Run, two: Result
) -> None:
    job = finish(srun(alone_here, trial, "train", *options(bench, trial.out)))
    assert job.out.count(f"step {ITERS}/{ITERS}") == 1, "each rank tells the same"
    np.testing.assert_allclose(read_run(trial.out).losses, one.losses, rtol=2e-5)
    assert result(trial.out) == two


@pytest.fixture
def pmix(alone_here: Slurm) -> None:
    """Skip the test where Slurm has no PMIx, or Python no Open MPI."""
    if not usable_mpi():
        pytest.skip("Open MPI is not installed")
    if done := alone_here.run("srun", "--mpi=pmix", "true").returncode:
        pytest.skip(f"Slurm's PMIx does not work here ({done}); is libpmix-dev installed?")


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_every_task_knows_its_place(
    alone_here: Slurm, trial: Trial, mpi: str, request: pytest.FixtureRequest
) -> None:
    if mpi == "pmix":
        request.getfixturevalue("pmix")
    job = finish(srun(alone_here, trial, "env", "--json", flags=(f"--mpi={mpi}", "--label")))
    ranks: list[dict[str, Any]] = [json.loads(of_task(job.out, rank)) for rank in (0, 1)]
    for rank, told in enumerate(ranks):
        assert (told["launcher"], told["rank"], told["size"]) == ("slurm", rank, 2)
        assert (told["local_rank"], told["local_size"], told["node"], told["num_nodes"]) == (
            rank,
            2,
            0,
            1,
        )
        assert told["backend"] == ("mpi" if mpi == "pmix" else "ring")
        assert told["platform"] == "slurm"
        assert told["grace_s"] == KILL_WAIT_S
        assert told["hosts"] == ["alone", "alone"]
        assert (told["meeting"] or {}).get("host") == (None if mpi == "pmix" else "127.0.0.1")
        assert told["requeue"][:2] == ["scontrol", "requeue"]
    assert ranks[0]["requeue"] == ranks[1]["requeue"]
    assert ranks[0]["meeting"] == ranks[1]["meeting"]


@pytest.mark.slow
@pytest.mark.usefixtures("pmix")
def test_open_mpi_over_pmix_ends_well(
    alone_here: Slurm,
    trial: Trial,
    bench: Bench,
    one: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that ends without MPI's finalizer is a failure for it, and the others are killed."""
    # Slurm's PMIx hides that both ranks share a computer, so they talk over TCP. Other tests'
    # interfaces come and go.
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "lo")
    monkeypatch.setenv(
        "MPLCONFIGDIR", str(tmp_path)
    )  # rank 0 has to look for fonts before it can draw: seconds
    job = finish(
        srun(alone_here, trial, "train", *options(bench, trial.out), flags=("--mpi=pmix",))
    )
    assert "ranks       2 (mpi)" in job.out
    assert "Error handler invoked" not in job.err
    np.testing.assert_allclose(read_run(trial.out).losses, one.losses, rtol=2e-5)


@pytest.mark.long
def test_two_steps_of_one_job_do_not_meet(
    alone_here: Slurm, trial: Trial, bench: Bench, two: Result
) -> None:
    """Both have the same job number, the same node, and start at the same moment."""
    outs = [trial.out / name for name in ("first", "second")]
    script = trial.out.parent / f"{trial.token}.sh"
    lines = ["#!/bin/bash"]
    for out in outs:
        train = " ".join([*ALLHANDS, "train", *options(bench, out)])
        lines.append(f"srun -n 2 --exact {train} > {out.name}-{trial.token}.log 2>&1 &")
    script.write_text("\n".join([*lines, "wait -n && wait -n"]) + "\n")
    number = alone_here.submit(
        "-n", "4", "--output", script.with_suffix(".log"), script, cwd=script.parent
    )
    alone_here.wait_for(number, "COMPLETED", 60.0)
    assert [result(out) for out in outs] == [two, two]


@pytest.mark.long
def test_a_task_that_is_killed_ends_the_step(alone_here: Slurm, trial: Trial, bench: Bench) -> None:
    """Without ``--kill-on-bad-exit``: the other one notices by itself."""
    trial.plan({"rank": 1, "step": 6, "kind": "kill"})
    job = srun(alone_here, trial, "train", *options(bench, trial.out))
    began = time.monotonic()
    assert job.finish(60.0) != 0
    assert time.monotonic() - began < 30.0
    assert len(trial.fired()) == 1
    assert "task 1: Killed" in job.err
    assert "the connection to another rank was lost" in job.err


def test_another_size_than_srun_has_started(alone_here: Slurm, trial: Trial, bench: Bench) -> None:
    job = finish(srun(alone_here, trial, "train", *options(bench, trial.out), "-n", "3"), code=2)
    assert "allhands: error: -n: 3 processes are asked for, but slurm has started 2" in job.err
    assert "leave -n out under another launcher: srun -n 3 starts as many" in job.err
    assert not trial.out.exists()


# --- without srun ---------------------------------------------------------------------------------


def test_a_batch_script_without_srun_is_one_process_and_says_so(
    alone_here: Slurm, trial: Trial, bench: Bench, one: Run
) -> None:
    log = trial.out.parent / f"{trial.token}.log"
    command = " ".join([*ALLHANDS, "train", *options(bench, trial.out)])
    number = alone_here.submit(
        "-n", "2", "--output", log, "--wrap", command, env={"TMPDIR": str(trial.temporary)}
    )
    alone_here.wait_for(number, "COMPLETED", 60.0)
    assert (
        "allhands: note: the job has 2 tasks, and this shell or script is not one of them"
        in log.read_text()
    )
    assert read_run(trial.out).losses == one.losses


def test_a_shell_in_an_allocation_is_no_rank(alone_here: Slurm, trial: Trial) -> None:
    done = alone_here.run("salloc", "-n", "2", *ALLHANDS, "env", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["launcher"], told["rank"], told["size"]) == ("single", 0, 1)
    assert told["platform"] == "slurm"
    assert "srun allhands train" in " ".join(told["notes"])


# --- stops, and going on --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("how", ["scancel --signal=USR1", "scancel"])
def test_a_stop_saves_and_resume_goes_on_to_the_same_bits(
    alone_here: Slurm, trial: Trial, bench: Bench, two: Result, how: str
) -> None:
    trial.plan(slow(6, 2.0))
    job = srun(alone_here, trial, "train", *options(bench, trial.out))
    trial.wait_for_fired()
    alone_here.ask(*how.split(), only_job(alone_here))
    finish(job, 143)
    assert "rank 0: stopped after step 7 of 12; the weights are saved in" in job.err
    assert steps_kept(trial.out)[-1] == 7
    finish(srun(alone_here, trial, "train", *options(bench, trial.out), "--resume"))
    assert result(trial.out) == two


@pytest.mark.long
def test_ctrl_c_twice_at_srun_kills_and_resume_goes_on_from_the_last_checkpoint(
    alone_here: Slurm, trial: Trial, bench: Bench, two: Result
) -> None:
    """srun asks once, and then lets nobody save: it sends SIGINT, and SIGKILL at once."""
    trial.plan(slow(6, 2.0))
    job = srun(alone_here, trial, "train", *options(bench, trial.out))
    trial.wait_for_fired()
    job.signal(signal.SIGINT, signal.SIGINT, pause_s=0.1)
    finish(job, 137)
    assert "srun: forcing job termination" in job.err
    assert steps_kept(trial.out) == [4]
    finish(srun(alone_here, trial, "train", *options(bench, trial.out), "--resume"))
    assert result(trial.out) == two


class Submitted:
    """The shipped batch script, submitted for the training of a trial on two tasks."""

    def __init__(self, made: Slurm, trial: Trial, bench: Bench, *more: str) -> None:
        self.made, self.log = made, trial.out.parent / f"{trial.token}.log"
        variables = {
            "MODEL": str(bench.model),
            "DATA": str(bench.data),
            "OUT": str(trial.out),
            "VENV": str(Path(sys.executable).parents[1]),
            "ALLHANDS_FAULTS": str(trial.schedule),
            "TMPDIR": str(trial.temporary),
        }
        size = [
            "--nodes=1",
            "--ntasks-per-node=2",
            "--cpus-per-task=1",
            "--mem=500M",
            "--output",
            str(self.log),
        ]
        trained = options(bench, trial.out)
        script = [str(SCRIPT), *trained[trained.index("--iters") :]]
        self.number = made.submit(*size, *more, *script, env=variables, cwd=trial.out.parent)


@pytest.mark.long
def test_the_batch_script_saves_at_the_end_of_the_time_and_goes_on_by_itself(
    alone_here: Slurm, trial: Trial, bench: Bench, two: Result
) -> None:
    """No limit is shorter than a minute; the controller looks at it every half a minute, and warns
    in advance.
    """
    trial.plan(*(slow(step, 5.0) for step in range(3, ITERS - 1)))
    job = Submitted(alone_here, trial, bench, "--time=30", "--signal=USR1@55")
    until(lambda: len(trial.fired()) > 0, 60.0, "it does not train")
    alone_here.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
    until(
        lambda: alone_here.facts(job.number)["Restarts"] == "1",
        60.0,
        "it does not go back into the queue",
    )
    log = job.log.read_text()
    assert "stopped with a checkpoint" in log
    assert "back into the queue (restart 1 of at most 20)" in log
    assert 3 < steps_kept(trial.out)[-1] < ITERS - 1
    assert len(trial.fired()) in (steps_kept(trial.out)[-1] - 3, steps_kept(trial.out)[-1] - 2)
    alone_here.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    alone_here.wait_for(job.number, "COMPLETED", 90.0)
    assert len(trial.fired()) == ITERS - 4
    assert result(trial.out) == two


@pytest.mark.long
def test_cancelling_the_batch_script_ends_it_for_good(
    alone_here: Slurm, trial: Trial, bench: Bench
) -> None:
    trial.plan(slow(6, 2.0))
    job = Submitted(alone_here, trial, bench)
    until(lambda: len(trial.fired()) == 1, 60.0, "the fault has not fired")
    alone_here.ask("scancel", job.number)
    alone_here.wait_for(job.number, "CANCELLED", 30.0)
    alone_here.wait_until_idle()
    assert "back into the queue" not in job.log.read_text()
    assert alone_here.facts(job.number)["Restarts"] == "0"
    assert steps_kept(trial.out)[-1] >= 4


# --- several nodes --------------------------------------------------------------------------------


@pytest.mark.long
def test_tasks_on_three_computers_meet_by_their_names(
    bench: Bench, one: Run, tmp_path: Path
) -> None:
    with namespaces(3, tmp_path) as cluster, slurm(cluster) as made, bench.trial("three") as trial:
        flags = ("-n", "4", "--nodes=3", "--label")
        job = srun(made, trial, "env", "--json", flags=flags)
        finish(job)
        told = [json.loads(of_task(job.out, rank)) for rank in range(4)]
        assert [(one["rank"], one["node"]) for one in told] == [(0, 0), (1, 0), (2, 1), (3, 2)]
        assert {one["meeting"]["host"] for one in told} == {"node0"}
        finish(srun(made, trial, "train", *options(bench, trial.out), flags=flags))
        np.testing.assert_allclose(read_run(trial.out).losses, one.losses, rtol=2e-5)
        made.wait_until_idle()
