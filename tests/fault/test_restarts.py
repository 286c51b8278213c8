"""Restarts with real processes: ranks that die as a plan says, supervised by a program of its own.

All processes of a test have its directory in their command lines, which is how left-over ones are
found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import allhands
from allhands.observe.journal import read_events

_SOURCE = str(Path(allhands.__file__).parents[1])

_SUPERVISOR = """
import json, sys
from pathlib import Path
from allhands.observe.journal import Journal
from allhands.cluster.membership import LocalMembers
from allhands.cluster.supervisor import LaunchSpec, SuperviseOptions, supervise
directory, ranks, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
class Growing(LocalMembers):
    given = 0
    def roster(self):
        self.given = ranks + (directory / "more").exists()
        return LocalMembers(self.given).roster()
    def changed(self, current):
        return "there is room" if self.given == ranks and (directory / "more").exists() else None
command = [sys.executable, str(directory / "worker.py"), str(directory)]
spec = LaunchSpec(command, ranks, "ring", directory / "logs")
members = Growing(ranks) if options.pop("growing", False) else None
journal = Journal(directory / "events.jsonl")
sys.exit(supervise(spec, print, options=SuperviseOptions(**options), members=members, journal=journal))
"""

# Ten steps, of which every attempt makes those that rank 0 has not "saved"; the plan says, by
# attempt and rank or "*", at which step what goes wrong. Step 0 is before the first beat.
_WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from allhands.cluster import worker
from allhands.cluster.environment import recognise
here = Path(sys.argv[1])
launch = recognise(os.environ)
attempt = os.environ["ALLHANDS_ATTEMPT"]
plan = json.loads((here / "plan.json").read_text())
actions = {**plan.get("*", {}), **plan.get(attempt, {})}.get(str(launch.rank), {})
saved = here / "saved"
def act(step):
    what = actions.get(str(step))
    if what:
        (here / f"fired-{attempt}-{launch.rank}-{step}").touch()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError(f"this never works, object at {hex(id(object()))}")
def note(text):
    with (here / f"notes-{launch.rank}").open("a") as stream:
        print(text, file=stream)
def meet(step):
    context.beat("reduce", step)
    run_dir = Path(os.environ["ALLHANDS_RUN_DIR"])
    (run_dir / f"at-{launch.rank}-{step}").touch()
    while len(list(run_dir.glob(f"at-*-{step}"))) < launch.size:
        time.sleep(0.005)
with worker.install(launch, os.environ) as context:
    start = int(saved.read_text()) if saved.exists() else 0
    note(f"attempt {attempt} of {os.environ['ALLHANDS_RUN_ID']}, {launch.size} ranks, from {start}")
    print(f"attempt {attempt}", flush=True)
    context.mark_started()
    act(0)
    for step in range(start + 1, 11):
        context.beat("compute", step)
        act(step)
        meet(step)
        if launch.rank == 0 and plan.get("saves", True):
            (here / "draft").write_text(str(step))
            (here / "draft").rename(saved)
        while actions.get("regroup") == step:
            context.beat("compute", step)
            time.sleep(0.02)
            if context.regroup_requested():
                note("regroups")
                context.end_for_regroup()
"""


class _Job:
    def __init__(self, ranks: int, plan: dict[str, Any], **options: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ah-", dir="/tmp"))
        self.plan = plan
        (self.directory / "tmp").mkdir()
        (self.directory / "supervisor.py").write_text(_SUPERVISOR)
        (self.directory / "worker.py").write_text(_WORKER)
        (self.directory / "plan.json").write_text(json.dumps(plan))
        self.process = subprocess.Popen(
            [
                sys.executable,
                f"{self.directory}/supervisor.py",
                str(self.directory),
                str(ranks),
                json.dumps(options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": _SOURCE, "TMPDIR": str(self.directory / "tmp")},
        )

    def finish(self) -> int:
        """Wait, and check that nothing is left over."""
        self.out, _ = self.process.communicate(timeout=60)
        _until(lambda: not self.left() and not list((self.directory / "tmp").iterdir()), 5)
        return self.process.returncode

    def left(self) -> list[int]:
        found: list[int] = []
        for process in psutil.process_iter(["cmdline", "status", "pid"]):
            ours = str(self.directory) in " ".join(process.info["cmdline"] or [])
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.info["pid"])
        return found

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        records = read_events(self.directory)
        return [record for record in records if not kinds or record["kind"] in kinds]

    def fired(self) -> set[str]:
        return {path.name.removeprefix("fired-") for path in self.directory.glob("fired-*")}

    def notes(self, rank: int) -> list[str]:
        return (self.directory / f"notes-{rank}").read_text().splitlines()


def _until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def start() -> Iterator[Callable[..., _Job]]:
    """Start jobs, and end whatever a failed test leaves."""
    jobs: list[_Job] = []

    def begin(ranks: int, plan: dict[str, Any], **options: Any) -> _Job:
        jobs.append(_Job(ranks, plan, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.communicate()
        for pid in job.left():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(job.directory, ignore_errors=True)


def test_a_rank_that_dies_twice_and_then_no_more(start: Callable[..., _Job]) -> None:
    job = start(2, {"1": {"1": {"3": "kill"}}, "2": {"0": {"7": "kill"}}}, max_restarts=3)
    assert job.finish() == 0, job.out
    assert job.fired() == {"1-1-3", "2-0-7"}
    faults = job.events("fault")
    assert [(fault["rank"], fault["exit_code"], fault["step"]) for fault in faults] == [
        (1, 137, 3),
        (0, 137, 7),
    ]
    assert [event["pause_s"] for event in job.events("restarting")] == [0.0, 0.0]
    assert [event["attempt"] for event in job.events("launched")] == [1, 2, 3]
    assert job.events()[-1]["kind"] == "finished"
    assert (job.directory / "saved").read_text() == "10"
    # One run for all, and each attempt's own log.
    words = [line.split() for line in job.notes(1)]
    assert [line[1] for line in words] == ["1", "2", "3"]
    assert len({line[3] for line in words}) == 1
    logs = {path.name: path.read_text() for path in (job.directory / "logs").glob("rank-1*.log")}
    assert {name: text.split()[:2] for name, text in logs.items()} == {
        "rank-1.attempt-1.log": ["attempt", "1"],
        "rank-1.attempt-2.log": ["attempt", "2"],
        "rank-1.log": ["attempt", "3"],
    }
    assert faults[0]["log_path"] == str(job.directory / "logs" / "rank-1.attempt-1.log")


def test_the_same_exception_again_is_given_up(start: Callable[..., _Job]) -> None:
    job = start(2, {"*": {"1": {"3": "raise"}}}, max_restarts=9)
    assert job.finish() == 1, job.out
    assert job.fired() == {"1-1-3", "2-1-3"}
    *_, failed, given_up = job.events()
    assert (failed["kind"], failed["rank"], failed["step"]) == ("failed", 1, 3)
    assert given_up["kind"] == "given up"
    assert (
        "failed at step 3 in the same way, twice in a row: ValueError: this never works"
        in given_up["message"]
    )


def test_ctrl_c_during_a_pause_ends_it_at_once(start: Callable[..., _Job]) -> None:
    plan = {str(attempt): {"1": {str(5 - attempt): "kill"}} for attempt in (1, 2, 3)}
    job = start(2, plan | {"saves": False}, max_restarts=9)
    _until(lambda: [event for event in job.events("waiting") if event["pause_s"] == 2.0], 30)
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.out
    assert time.monotonic() - began < 1.5
    assert job.fired() == {"1-1-4", "2-1-3", "3-1-2"}
    assert [event["kind"] for event in job.events()[-2:]] == ["cancelling", "finished"]


def test_a_slot_that_always_dies_is_left_out(start: Callable[..., _Job]) -> None:
    job = start(3, {"*": {"2": {"2": "kill"}}}, max_restarts=9, min_ranks=2)
    assert job.finish() == 0, job.out
    assert job.fired() == {"1-2-2", "2-2-2", "3-2-2"}
    assert [event["host"] for event in job.events("left out")] == ["slot 2"]
    assert [event["num_ranks"] for event in job.events("restarting")] == [3, 3, 2]
    assert ", 2 ranks, " in job.notes(1)[-1]


def test_ranks_regroup_where_there_is_room_for_more(start: Callable[..., _Job]) -> None:
    plan = {"1": {str(rank): {"regroup": 4} for rank in range(2)}}
    job = start(2, plan, growing=True)
    _until(lambda: job.events("started"), 30)
    assert not job.events("regrouping")
    (job.directory / "more").touch()
    assert job.finish() == 0, job.out
    assert [event["message"] for event in job.events("regrouping")] == [
        "there is room: the ranks regroup at the next checkpoint"
    ]
    assert not job.events("fault", "failed")
    assert [event["num_ranks"] for event in job.events("restarting")] == [3]
    assert job.notes(0)[1] == "regroups"
    assert job.notes(2)[0].endswith(", 3 ranks, from 4")


def test_a_supervisor_killed_between_attempts_leaves_nothing(start: Callable[..., _Job]) -> None:
    job = start(2, {"*": {"1": {"0": "kill"}, "0": {"0": "kill"}}}, max_restarts=9)
    _until(lambda: job.events("waiting"), 30)
    assert list((job.directory / "tmp").iterdir()) != []
    job.process.kill()
    assert job.finish() == -signal.SIGKILL
