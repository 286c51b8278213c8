"""Guards of a run on real processes: who may write into its directory, how ranks regroup, what is
found frozen.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from faulty import Bench, Trial, share_compiled
from hostile import Job
from namespaces import namespaces
from rank_jobs import ATTEMPT, jobs

from allhands.checkpoints import checkpoints_in, open_checkpoint
from allhands.cluster.attempt import Attempt
from allhands.cluster.mpi import find_mpi
from allhands.cluster.ranks import LaunchSpec
from allhands.observe.journal import SupervisorEvent
from allhands.runtime.faults import fired

TAKEN = "another run is writing into this directory"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("guards"))


@pytest.fixture
def trial(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with bench.trial(request.node.name[:30]) as trial:
        yield trial


def checkpoints(directory: Path) -> dict[int, str]:
    """The run that each whole checkpoint in ``directory`` belongs to, by step."""
    opened = map(open_checkpoint, checkpoints_in(directory))
    return {checkpoint.step: checkpoint.run_id for checkpoint in opened}


# --- claims ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_second_run_into_a_directory_is_refused(trial: Trial) -> None:
    """Supervised or not, and also by a rank that was told of the claim of another supervisor, on
    another directory.
    """
    trial.plan({"rank": 0, "step": 2, "kind": "slow", "seconds": 30})
    first = trial.start(ranks=2)
    trial.wait_for_fired()
    for ranks, env in ((1, {}), (2, {}), (1, {"ALLHANDS_CLAIMED": "here:1:1"})):
        arguments = trial.arguments("--max-restarts", "0", ranks=ranks)
        Job(*arguments, env={"TMPDIR": str(trial.temporary), **env}).fails(5, TAKEN, str(trial.out))
    first.signal(signal.SIGINT, signal.SIGINT)
    assert first.finish() == 130
    trial.run("--max-restarts", "0", ranks=1, iters=3)  # nothing of a claim outlives its run


@pytest.mark.long
def test_a_copy_is_kept_on_the_supervisors_own_computer(tmp_path: Path) -> None:
    """Rank 0 is elsewhere; rank 1 keeps its copy in the directory that the supervisor beside it has
    claimed.
    """
    own = tmp_path / "own"
    with namespaces(1, tmp_path, [own]) as cluster, Bench(own).trial("copy") as trial:
        there = tmp_path / "files-node0-0"
        for name in ("model", "data"):
            shutil.copytree(own / name, there / name)
        share_compiled(cluster.nodes["node0"].temporary)
        hostfile = cluster.hostfile(tmp_path / "hosts.json")
        here = {"ssh": "localhost", "ips": [cluster.address], "slots": 1}
        hostfile.write_text(json.dumps([*json.loads(hostfile.read_text()), here]))
        job = trial.run(
            "--hostfile",
            hostfile,
            "--checkpoint-copies",
            "2",
            "--max-restarts",
            "0",
            ranks=1,
            iters=5,
        )
        assert "2 processes" in trial.events("launched")[0]["message"]
        kept = checkpoints(trial.out)
        assert list(kept) == [5], job.err
        assert kept == checkpoints(there / trial.token)


# --- one name for all -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
def test_under_a_plain_mpirun_all_keepers_write_the_same_run(trial: Trial) -> None:
    """Each rank is told that it is alone on its computer, so that rank 1 keeps a copy where rank 0
    does not look.
    """
    found = find_mpi()
    assert found is not None
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = [str(found.mpirun), *root, "--oversubscribe", "--bind-to", "none", "-np", "2"]
    script = (
        "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 "
        f'exec "$@" --adapter-path {trial.out}-$OMPI_COMM_WORLD_RANK'
    )
    arguments = trial.arguments(
        "-n", "2", "--backend", "auto", "--checkpoint-copies", "2", ranks=2, iters=5
    )
    for option in ("--max-restarts", "--adapter-path"):
        place = arguments.index(option)
        del arguments[place : place + 2]
    job = Job(
        *arguments, prefix=[*mpirun, "sh", "-c", script, "sh"], env={"TMPDIR": str(trial.temporary)}
    )
    assert job.finish() == 0, job.err
    one, other = (checkpoints(Path(f"{trial.out}-{rank}")) for rank in range(2))
    assert list(one) == [5]
    assert one == other


# --- a regroup needs a checkpoint -----------------------------------------------------------------


@pytest.mark.slow
def test_ranks_end_with_the_code_of_a_regroup_after_a_save_that_succeeds(trial: Trial) -> None:
    """They are told at once; the disk is full at the first boundary, after five batches."""
    trial.plan({"rank": 0, "step": 5, "kind": "disk-full", "write": 1})
    command = [
        sys.executable,
        "-m",
        "allhands",
        *map(str, trial.arguments("--val-batches", "0", ranks=2)),
    ]
    env = {"ALLHANDS_FAULTS": str(trial.schedule), "OPENBLAS_NUM_THREADS": "1"}
    spec = LaunchSpec(command, 2, "ring", trial.out / "logs", env=env)
    spec.log_dir.mkdir(parents=True)
    told: list[SupervisorEvent] = []

    def tell(event: SupervisorEvent) -> None:
        told.append(event)
        if event.kind == "launched":
            attempt.request_regroup()

    with TemporaryDirectory(prefix="allhands-") as private:
        attempt = Attempt(spec, Path(private, "1"), deque(), tell)
        outcome = attempt.run()
        ends = {end.rank: end.code for end in attempt._ranks.exits()}
    assert [fault.kind for fault in fired(trial.schedule)] == ["disk-full"]
    assert ends == {0: 75, 1: 75}
    assert (outcome.regroup, outcome.fault, outcome.stopped, outcome.step) == (True, None, 0, 10)
    assert trial.steps() == list(range(1, 11))
    assert list(checkpoints(trial.out)) == [10]
    assert "started" in [event.kind for event in told]


# --- frozen processes -----------------------------------------------------------------------------

_FREEZING = """
import os, signal, sys
from pathlib import Path
from allhands.cluster import worker
from allhands.cluster.environment import recognise
launch = recognise(os.environ)
with worker.install(launch, os.environ) as context:
    phase = sys.argv[2]
    if phase != "nothing":
        context.beat("start", 0)
        context.mark_started()
        context.beat(phase, 0)
    (Path(sys.argv[1]) / "frozen").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.long
def test_a_frozen_process_is_found_whatever_it_was_doing() -> None:
    """All of these may be silent for a minute or more; "nothing" is before the first sign of life."""
    phases = ["nothing", "start", "first", "validate", "save", "end"]
    with jobs() as begin:
        started = {
            phase: begin(phase, program=ATTEMPT, files={"worker.py": _FREEZING}) for phase in phases
        }
        for phase, job in started.items():
            assert job.finish() == 0, job.err
            assert (job.directory / "frozen").exists()
            fault: dict[str, Any] = job.outcome()["fault"]
            assert (fault["kind"], fault["rank"]) == ("hang", 0)
            assert fault["phase"] == (None if phase == "nothing" else phase)
            assert "(the process is stopped)" in fault["message"]
            assert (
                4.0 <= fault["detected_s"] < 8.0
            )  # computed on shared cores, where a look may come late
