"""What the supervisor sees of a run's progress: every phase of a real one, long saves, and frozen
processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pytest
from faulty import fill, small_disk
from tiny import write_chat_data, write_model

from allhands.checkpoints import Tensor, checkpoints_in, writing
from allhands.cluster import attempt, processes
from allhands.cluster.attempt import Attempt
from allhands.cluster.environment import LaunchPlace
from allhands.cluster.join import surroundings_of
from allhands.cluster.outcome import Outcome
from allhands.cluster.ranks import Beat, LaunchSpec, Marks, Phase, Place, RankExit
from allhands.cluster.runfiles import RunFiles
from allhands.cluster.watch import Limits, ProgressWatch
from allhands.cluster.worker import WorkerContext
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import Interrupted, NumericsError
from allhands.run.session import run_finetune


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("progress")
    data = write_chat_data(root / "data", train=12, valid=4, longest=20)
    return {"model": str(write_model(root / "model", layers=1)), "data": str(data)}


@pytest.fixture
def flags(inputs: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """Four batches: saved after the second and the last, validated before the first and after the
    last.
    """
    return {
        **inputs,
        "adapter_path": str(tmp_path / "run"),
        "train": True,
        "iters": 4,
        "batch_size": 4,
        "save_every": 2,
        "steps_per_report": 1,
        "steps_per_eval": 4,
        "val_batches": 1,
        "keep_best": False,
    }


class Seen(WorkerContext):
    """One rank in this process, and what the supervisor's side reads of it after each of its beats."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        super().__init__(
            LaunchPlace("allhands", 0, 1, 0, 1, "none", "a test"), directory, None, "r"
        )
        self.files = RunFiles(directory, directory, ())
        self.beats: list[tuple[int, str]] = []
        self.counts: list[int] = []

    def beat(self, phase: str, step: int, *more: Any) -> None:
        super().beat(phase, step, *more)
        seen = self.files.marks(0).beat
        assert seen is not None
        self.beats.append((seen.step, seen.phase))
        self.counts.append(seen.count)

    def train(self, config: TrainConfig) -> None:
        """Train, with the very surroundings that ``allhands train`` makes."""
        run_finetune(config, surroundings_of(self, self.launch, config))

    def phases(self) -> list[tuple[int, list[str]]]:
        """By batches done: the phases in their order, each named once however often it was told."""
        told = [key for key, _ in groupby(self.beats)]
        return [
            (step, [phase for _, phase in group])
            for step, group in groupby(told, key=lambda beat: beat[0])
        ]


# --- beats ----------------------------------------------------------------------------------------

STEP = ["load", "compute", "reduce", "update"]
FIRST = ["first", "reduce", "first"]


def test_every_phase_of_a_run_is_seen_in_its_order(flags: dict[str, Any], tmp_path: Path) -> None:
    """The end of a validation or save is a meeting of the ranks, "reduce"; so is a report that none
    of them hides.
    """
    seen = Seen(tmp_path / "beats")
    seen.train(build_config(flags))
    assert seen.phases() == [
        (0, ["start", "validate", "reduce", "load", *FIRST]),
        (1, STEP),
        (2, ["save", "reduce", *STEP]),
        (3, STEP),
        (4, ["reduce", "validate", "reduce", "save", "reduce", "end"]),
    ]
    assert {phase for _, phase in seen.beats} == set(get_args(Phase))
    assert seen.counts == list(range(1, len(seen.counts) + 1)), "a beat was not seen"


def test_the_first_update_after_each_start_is_told_as_such(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """It may compile and connect for long, also where a run goes on from a checkpoint."""
    flags |= {"grad_accumulation_steps": 2, "val_batches": 0}
    Seen(tmp_path / "beats-1").train(build_config(flags))
    again = Seen(tmp_path / "beats-2")
    again.train(build_config(flags | {"iters": 8, "resume": "auto"}))
    assert again.phases() == [
        (2, ["start", "load", *FIRST]),
        (3, ["save", "reduce", *STEP]),
        (4, ["reduce", "save", "reduce", "end"]),
    ]


@pytest.mark.parametrize(
    ("more", "stops", "error"),
    [({"learning_rate": 1e38, "optimizer": "sgd"}, False, NumericsError), ({}, True, Interrupted)],
    ids=["not a number", "stopped"],
)
def test_a_run_that_fails_or_is_stopped_draws_its_curves_at_its_end(
    flags: dict[str, Any], tmp_path: Path, more: dict[str, Any], stops: bool, error: type[Exception]
) -> None:
    """Drawing takes longer than a step may: in "reduce" it would count as a hang, and the run would
    start again.
    """
    seen = Seen(tmp_path / "beats")
    config = build_config(flags | {"val_batches": 0} | more)
    surroundings = replace(surroundings_of(seen, seen.launch, config), stop_requested=lambda: stops)
    with pytest.raises(error):
        run_finetune(config, surroundings)
    assert seen.phases()[-1][1][-1] == "end"


# --- saves that take long -------------------------------------------------------------------------


def test_a_save_at_the_end_shows_that_it_gets_on(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each piece written the rank has marked itself busy again, while its training thread
    waits in "save".
    """
    seen = Seen(tmp_path / "beats")
    mark = tmp_path / "beats" / "rank-0.busy"
    told: list[tuple[bool, str]] = []
    usual = writing.safetensors_pieces

    def watched(tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
        for piece in usual(tensors):
            mark.unlink(missing_ok=True)
            yield piece
            marks = seen.files.marks(0)
            assert marks.beat is not None
            told.append((marks.busy_time is not None, marks.beat.phase))

    monkeypatch.setattr(writing, "safetensors_pieces", watched)
    seen.train(build_config(flags | {"save_every": 100, "val_batches": 0}))
    assert len(told) > 10
    assert set(told) == {(True, "save")}
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-0000004"]


@pytest.mark.parametrize(("phase", "limit"), [("save", 600.0), ("end", 60.0)])
def test_whoever_is_busy_may_save_for_longer_than_a_phase_may_last(
    phase: str, limit: float
) -> None:
    """The others wait for it in the exchange."""
    watch = ProgressWatch(Limits(finish_s=60.0))
    beats = {0: Beat(4, phase, 9, 1000.0), 1: Beat(4, "reduce", 9, 1000.0)}
    now, busy, stall = 1000.0, 1000.0, None
    while now < 1000.0 + 3 * limit:
        now += 0.5
        busy = now if now % 30.0 == 0.0 else busy
        marks = {
            rank: Marks(started=True, busy_time=None if rank else busy, beat=beats[rank])
            for rank in beats
        }
        assert watch.check(now, marks, {0, 1}) is None
    last = busy
    while stall is None:
        now += 0.5
        stall = watch.check(now, marks, {0, 1})
    assert (stall.rank, stall.phase) == (0, phase)
    assert now - last == pytest.approx(limit, abs=1.0)


# --- frozen processes -----------------------------------------------------------------------------


class _Clock:
    """Time that passes only while somebody sleeps."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Freezing:
    """Two ranks that end after a minute, of which rank 1 does not go on in its phase, stopped at
    times.
    """

    def __init__(
        self, clock: _Clock, phase: str | None, stops: Sequence[tuple[float, float]]
    ) -> None:
        self.clock, self.phase, self.stops = clock, phase, stops
        self.killed, self.asked = False, 0

    def places(self) -> str:
        return ""

    def stopped(self, rank: int) -> bool:
        self.asked += 1
        return rank == 1 and any(begin <= self.clock.now < end for begin, end in self.stops)

    def exits(self) -> list[RankExit]:
        if self.clock.now >= 1060.0:
            return [RankExit(rank, 0, 1060.0) for rank in range(2)]
        return [RankExit(rank, -9, self.clock.now) for rank in range(2)] if self.killed else []

    def marks(self, rank: int) -> Marks:
        if rank == 0:
            return Marks(
                ready=True, started=self.phase is not None, beat=Beat(3, "reduce", 4, 1000.0)
            )
        if self.phase is None:
            return Marks()
        return Marks(ready=True, started=True, beat=Beat(3, self.phase, 4, 1000.0))

    def signal(self, rank: int, number: int) -> bool:
        return True

    def tell(self, word: str) -> None:
        pass

    def host(self, rank: int) -> str:
        return "here"

    def lost_hosts(self) -> list[str]:
        return []

    def error(self, rank: int) -> dict[str, Any] | None:
        return None

    def log_path(self, rank: int) -> Path:
        return Path(f"rank-{rank}.log")

    def log_tail(self, rank: int) -> tuple[str, ...]:
        return ()

    def out_of_memory(self, rank: int) -> bool:
        return False

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(attempt, "time", clock)
    return clock


def _outcome(
    ranks: _Freezing, directory: Path, monkeypatch: pytest.MonkeyPatch, *places: Place
) -> Outcome:
    monkeypatch.setattr(processes, "start", lambda *_: ranks)
    monkeypatch.setattr("allhands.cluster.attempt.start_remote", lambda *_: ranks)
    spec = LaunchSpec(["train"], 2, "ring", directory, places=places)
    reaper: Any = object()  # nothing that it would have to know of is started
    return Attempt(spec, directory / "1", deque(), lambda event: None, reaper).run()


# In "reduce" a rank waits for its peers, and so does rank 0 here.
@pytest.mark.parametrize(
    "phase", [None, *(phase for phase in get_args(Phase) if phase != "reduce")]
)
def test_a_frozen_process_is_found_in_every_phase(
    clock: _Clock, phase: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a silent one may be silent for minutes, and before it has said anything; ``None``
    is before that.
    """
    fault = _outcome(_Freezing(clock, phase, [(1010.0, 2000.0)]), tmp_path, monkeypatch).fault
    assert fault is not None
    assert (fault.kind, fault.rank, fault.phase) == ("hang", 1, phase)
    assert "(the process is stopped)" in fault.message
    assert 4.0 <= fault.detected_s < 5.0
    assert 1014.0 <= clock.now < 1018.0


def test_a_process_that_is_looked_at_is_not_frozen(
    clock: _Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who stops one for some seconds, as a debugger does, and then again, has not hung it."""
    ranks = _Freezing(clock, "first", [(1010.0, 1014.4), (1015.6, 1020.0)])
    outcome = _outcome(ranks, tmp_path, monkeypatch)
    assert (outcome.fault, outcome.code) == (None, 0)
    assert ranks.asked > 100


def test_other_computers_are_not_asked_for_frozen_processes(
    clock: _Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would cost a message each time: there a rank is found by the deadline of its phase."""
    ranks = _Freezing(clock, "first", [(1010.0, 2000.0)])
    outcome = _outcome(ranks, tmp_path, monkeypatch, Place("gpu0", 1), Place("gpu1", 1))
    assert (outcome.fault, ranks.asked) == (None, 0)


# --- what a rank says on a full disk --------------------------------------------------------------

_FAILING = """
import os, sys
from allhands.cluster import worker
from allhands.cluster.environment import LaunchPlace
from allhands.errors import DataError, Interrupted
with worker.install(LaunchPlace("allhands", int(sys.argv[1]), 2, 0, 2, "ring", "a test"), os.environ) as context:
    context.mark_started()
    raise {
        "data": DataError("no samples", code="data-empty", where="train.jsonl:12"),
        "stop": Interrupted("stopped after step 4", code="stopped"),
    }[sys.argv[2]]
"""


@pytest.mark.parametrize(
    ("rank", "kind", "code", "shown"),
    [(0, "data", 3, ""), (1, "data", 3, ""), (0, "stop", 130, "allhands: stopped after step 4\n")],
)
def test_a_full_disk_under_the_logs_hides_no_error(
    rank: int, kind: str, code: int, shown: str, tmp_path: Path
) -> None:
    """The exit code is the error's, its file is where the supervisor looks next, and rank 0 says
    how a run ended.
    """
    private = tmp_path / "private"
    private.mkdir()
    with small_disk(tmp_path / "logs", megabytes=1) as disk:
        if disk is None:
            pytest.skip("no file system can be mounted here: that needs root and Linux")
        fill(disk)
        env = {"ALLHANDS_RUN_DIR": str(private), "ALLHANDS_LOG_DIR": str(disk)}
        done = subprocess.run(
            [sys.executable, "-c", _FAILING, str(rank), kind],
            capture_output=True,
            text=True,
            env={**os.environ, **env},
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, "", shown)
        assert (disk / f"rank-{rank}.log").read_text() == ""
        found = RunFiles(private, disk, ()).error(rank)
    assert found is not None
    assert found["exit_code"] == code
    assert found["message"] == ("no samples" if kind == "data" else "stopped after step 4")
