"""One attempt with real processes: progress is watched, and how it ended is told in facts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rank_jobs import ATTEMPT, Job, jobs, until

from allhands.cluster import processes
from allhands.cluster.attempt import Attempt
from allhands.cluster.mpi import find_mpi
from allhands.cluster.outcome import Outcome
from allhands.cluster.ranks import Beat, LaunchSpec, Marks, Place, RankExit, RankProcesses

BACKENDS = [
    "ring",
    pytest.param(
        "mpi", marks=pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
    ),
]


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    with jobs() as begin:

        def attempt(*scripts: str, **fields: Any) -> Job:
            return begin(*scripts, program=ATTEMPT, **fields)

        yield attempt


def _processes(job: Job) -> list[psutil.Process]:
    """The processes of the ranks' commands, without those who started them."""
    found: list[psutil.Process] = []
    for line in job.left():
        pid, _, command = line.split(" ", 2)
        if "/worker.py" in command and not any(
            name in command for name in ("supervisor.py", "guard.py", "mpirun")
        ):
            found.append(psutil.Process(int(pid)))
    return found


# --- hangs ----------------------------------------------------------------------------------------


def test_a_stopped_rank_is_noticed_in_4_s_and_named(start: Callable[..., Job]) -> None:
    """Without an option: steps take hundredths of a second, so that the least deadline counts."""
    job = start("steps", "steps stop 8 compute")
    job.wait_for("started")
    began = time.monotonic()
    assert job.finish() == 0
    outcome, fault = job.outcome(), job.outcome()["fault"]
    assert (fault["kind"], fault["rank"], fault["host"]) == ("hang", 1, socket.gethostname())
    assert (fault["step"], fault["phase"], fault["exit_code"]) == (8, "compute", 7)
    assert 4.0 <= fault["detected_s"] < 6.0
    assert time.monotonic() - began < 8.0
    words = f"rank 1 on {socket.gethostname()} made no progress for 4."
    assert fault["message"].startswith(words)
    assert fault["message"].endswith("(the process is stopped) at step 8, compute")
    assert outcome["started"] is True
    assert outcome["step"] == 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_stopped_while_all_wait_is_found_by_its_state(
    start: Callable[..., Job], backend: str
) -> None:
    """By its beats it is no different from rank 0: both are in the exchange of the same step."""
    job = start("steps", "steps stop 8 reduce", backend=backend, hang_timeout_s=1.0)
    assert job.finish() == 0
    fault = job.outcome()["fault"]
    assert (fault["kind"], fault["rank"], fault["step"], fault["phase"]) == ("hang", 1, 8, "reduce")


def test_a_spinning_rank_leaves_its_stack(start: Callable[..., Job]) -> None:
    job = start("steps spin 3 load", "steps", hang_timeout_s=1.0)
    assert job.finish() == 0
    fault = job.outcome()["fault"]
    assert (fault["kind"], fault["rank"], fault["step"], fault["phase"]) == ("hang", 0, 3, "load")
    assert any("in hurt" in line for line in fault["log_tail"])


def test_ranks_that_wait_for_each_other_are_said_to(start: Callable[..., Job]) -> None:
    """As in a deadlock, or with a cut network: nobody is behind, and nobody is stopped."""
    job = start("steps", "steps deaf 5 reduce", hang_timeout_s=1.0)
    assert job.finish() == 0
    fault = job.outcome()["fault"]
    assert (fault["kind"], fault["rank"], fault["step"]) == ("hang", 0, 5)
    assert "all ranks wait for each other" in fault["message"]


def test_a_computer_that_slept_is_not_a_hang(start: Callable[..., Job]) -> None:
    job = start("steps", "steps", hang_timeout_s=2.0)
    job.wait_for("started")
    until((job.directory / "polled").exists, 10.0)
    ranks = _processes(job)
    assert len(ranks) == 2
    everybody = [*ranks, psutil.Process(job.process.pid)]
    for process in everybody:
        process.suspend()
    time.sleep(3.5)
    for process in reversed(everybody):  # the one that judges first
        process.resume()
        time.sleep(0.2)
    time.sleep(1.0)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0
    assert job.outcome()["fault"] is None
    assert job.outcome()["stopped"] == signal.SIGTERM


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_regroup_when_told(start: Callable[..., Job], backend: str) -> None:
    job = start("steps", "steps regroup 5", backend=backend)
    assert job.finish() == 0
    outcome = job.outcome()
    assert (outcome["fault"], outcome["stopped"], outcome["regroup"], outcome["started"]) == (
        None,
        0,
        True,
        True,
    )
    assert outcome["step"] >= 5


def test_nobody_regroups_unasked(start: Callable[..., Job]) -> None:
    job = start("steps code75", "steps code75")
    assert job.finish() == 0
    assert job.outcome()["regroup"] is False
    assert job.outcome()["fault"]["exit_code"] == 75


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_somebody_else_stopped(
    start: Callable[..., Job], backend: str, number: int
) -> None:
    job = start("steps", "steps", backend=backend)
    job.wait_for("started")
    ranks = _processes(job)
    assert len(ranks) == 2
    for rank in ranks:
        rank.send_signal(number)
    assert job.finish() == 0
    outcome = job.outcome()
    assert (outcome["fault"], outcome["stopped"]) == (None, signal.SIGTERM)
    assert all((job.directory / f"saved-{rank}").exists() for rank in range(2))


def test_a_program_that_knows_no_signals_may_be_stopped_too(start: Callable[..., Job]) -> None:
    job = start("one", "two", command=["sleep", "60", "0.001"])
    until(lambda: len(_sleeps(job)) == 2, 20.0)
    for process in _sleeps(job):
        process.terminate()
    assert job.finish() == 0
    assert (job.outcome()["fault"], job.outcome()["stopped"]) == (None, signal.SIGTERM)


def _sleeps(job: Job) -> list[psutil.Process]:
    """The ranks that have become their command: before that the words of it stand in other
    programs' arguments, too.
    """
    found: list[psutil.Process] = []
    for process in psutil.Process(job.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] == ["sleep"]:
                found.append(process)
    return found


def test_one_rank_that_somebody_stopped_is_a_fault(start: Callable[..., Job]) -> None:
    job = start("wait", "code 143", stop_grace_s=0.5)
    assert job.finish() == 0
    outcome = job.outcome()
    assert (outcome["stopped"], outcome["fault"]["rank"], outcome["fault"]["exit_code"]) == (
        0,
        1,
        143,
    )


def test_a_scheduler_may_tell_everybody_and_more_than_once(start: Callable[..., Job]) -> None:
    """SIGUSR1 to the supervisor, then SIGTERM to it and to its ranks, as at the end of a Slurm job."""
    job = start("save 1", "save 1")
    job.wait_for("started")
    ranks = _processes(job)
    assert len(ranks) == 2
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("stopping")
    for process in (job.process, *ranks):
        process.send_signal(signal.SIGTERM)
    assert job.finish() == 0
    assert job.outcome()["stopped"] == signal.SIGTERM
    assert all((job.directory / f"saved-{rank}").exists() for rank in range(2))
    assert job.events("killing") == []


@pytest.mark.parametrize(("before", "kind"), [("oom_kill 3", "memory"), ("oom_kill 4", "killed")])
def test_a_kill_for_want_of_memory_is_told_from_another(
    start: Callable[..., Job], before: str, kind: str
) -> None:
    """The rank sets the counter to 4 before it is killed."""
    job = start("steps", "steps oom", files={"vmstat": f"pgfault 1\n{before}\n"})
    assert job.finish() == 0
    assert "oom_kill 4" in (job.directory / "vmstat").read_text()
    fault = job.outcome()["fault"]
    assert (fault["kind"], fault["rank"], fault["exit_code"]) == (kind, 1, 137)
    assert ("(out of memory)" in fault["message"]) == (kind == "memory")


def test_an_attempt_without_beats_is_watched_as_far_as_can_be(start: Callable[..., Job]) -> None:
    job = start("pause 1.5 0", "pause 1.5 0", hang_timeout_s=0.3, weights=[1.0, 2.5])
    assert job.finish() == 0
    assert (job.outcome()["fault"], job.outcome()["step"]) == (None, None)
    assert job.facts(1)["ALLHANDS_RANK_WEIGHTS"] == "[1.0, 2.5]"


# --- facts that real processes on one computer do not give ----------------------------------------


class _Elsewhere(RankProcesses):
    """Two ranks, each on a computer of its own, whose ends are given."""

    def __init__(self, ends: list[RankExit], lost: list[str]) -> None:
        self.ends, self.lost, self.killed = ends, lost, False

    def exits(self) -> list[RankExit]:
        left = {0, 1} - {end.rank for end in self.ends}
        killed = [RankExit(rank, -9, time.monotonic()) for rank in left] if self.killed else []
        return [*self.ends, *killed]

    def marks(self, rank: int) -> Marks:
        return Marks(started=True, beat=Beat(7, "compute", 30, time.monotonic()))

    def signal(self, rank: int, number: int) -> bool:
        return True

    def tell(self, word: str) -> None:
        pass

    def host(self, rank: int) -> str:
        return f"gpu{rank}"

    def lost_hosts(self) -> list[str]:
        return self.lost

    def error(self, rank: int) -> dict[str, Any] | None:
        return None

    def log_path(self, rank: int) -> Path:
        return Path(f"rank-{rank}.log")

    def log_tail(self, rank: int) -> tuple[str, ...]:
        return ("last line",)

    def out_of_memory(self, rank: int) -> bool:
        return False

    def kill(self) -> None:
        self.killed = True


def _outcome(ranks: _Elsewhere, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr("allhands.cluster.attempt.start_remote", lambda *_: ranks)
    places = (Place("gpu0", 1), Place("gpu1", 1))
    spec = LaunchSpec(["train"], 2, "ring", directory, places=places)
    return Attempt(spec, directory / "1", deque(), lambda event: None).run()


@pytest.mark.parametrize(
    "code", [-signal.SIGKILL, 8], ids=["by its own end", "by what the other rank saw"]
)
def test_a_lost_computer_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    rank = 1 if code < 0 else 0
    ends = [RankExit(rank, code, time.monotonic() - 5.0)]
    fault = _outcome(_Elsewhere(ends, ["gpu1"]), tmp_path, monkeypatch).fault
    assert fault is not None
    assert (fault.kind, fault.rank, fault.host, fault.exit_code) == ("lost host", 1, "gpu1", 7)
    assert fault.message == "gpu1 (rank 1) does not answer any more"
    assert (fault.step, fault.phase, fault.log_tail) == (7, "compute", ("last line",))


def test_a_rank_elsewhere_is_named_with_its_computer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [RankExit(1, 3, time.monotonic() - 5.0)]
    fault = _outcome(_Elsewhere(ends, []), tmp_path, monkeypatch).fault
    assert fault is not None
    assert fault.message == "rank 1 on gpu1 exited with code 3 at step 7, compute"
    assert 5.0 <= fault.detected_s < 6.0


def test_a_stop_that_ends_in_an_error_is_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        processes, "start", lambda *_: _Elsewhere([RankExit(0, 1, time.monotonic())], [])
    )
    spec = LaunchSpec(["train"], 2, "ring", tmp_path)
    outcome = Attempt(spec, tmp_path / "1", deque([signal.SIGTERM]), lambda event: None).run()
    assert outcome.fault is not None
    assert (outcome.code, outcome.stopped) == (1, signal.SIGTERM)


def test_processes_elsewhere_are_started_by_their_own_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def elsewhere(*arguments: Any) -> _Elsewhere:
        asked.append(arguments)
        return _Elsewhere([RankExit(0, 1, time.monotonic())], [])

    monkeypatch.setattr("allhands.cluster.attempt.start_remote", elsewhere)
    spec = LaunchSpec(["train"], 1, "ring", tmp_path, places=(Place("gpu0", 1),))
    Attempt(spec, tmp_path / "1", deque(), lambda event: None).run()
    assert asked == [(spec, tmp_path / "1")]


def test_no_rank_is_left_in_the_table_of_processes(start: Callable[..., Job]) -> None:
    """The end of an attempt also ends what a rank started in a group of its own and forgot."""
    job = start("steps child 1", "steps code75 9")
    assert job.finish() == 0
    assert (job.directory / "has-child").exists()
    assert not any(
        str(job.directory) in " ".join(p.cmdline())
        for p in psutil.Process(os.getpid()).children(True)
    )
