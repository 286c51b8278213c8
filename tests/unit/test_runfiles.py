"""What ranks leave in their directories, and what the kernel counts, as their starter reads it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from allhands.cluster import runfiles
from allhands.cluster.environment import LaunchPlace
from allhands.cluster.ranks import Beat, Marks
from allhands.cluster.runfiles import BEAT_BYTES, RunFiles, oom_counters, tail
from allhands.cluster.worker import WorkerContext, as_message
from allhands.errors import AllhandsError, DataError, Interrupted


def _pair(tmp_path: Path, rank: int = 1) -> tuple[WorkerContext, RunFiles]:
    launch = LaunchPlace("allhands", rank, 2, rank, 2, "ring", "a test")
    return WorkerContext(launch, tmp_path, tmp_path), RunFiles(tmp_path, tmp_path, counters=[])


@pytest.mark.parametrize(
    ("rank", "error", "hidden"),
    [
        (1, DataError("it is empty", code="data-empty", where="data", hint="fill it"), True),
        (0, DataError("it is empty", code="data-empty", where="data", hint="fill it"), True),
        (1, Interrupted("stopped after step 3", code="stopped", hint="go on"), True),
        (0, Interrupted("stopped after step 3", code="stopped", hint="go on"), False),
        (1, ValueError("a defect"), False),
    ],
)
def test_what_the_supervisor_tells_of_an_error_is_known(
    tmp_path: Path, rank: int, error: Exception, hidden: bool
) -> None:
    """Of a stop rank 0 speaks itself, and the supervisor has no more of a defect than its name."""
    worker, files = _pair(tmp_path, rank)
    text = as_message(error) if isinstance(error, AllhandsError) else f"ValueError: {error}"
    lines = [line.encode() for line in text.splitlines()]
    assert not any(files.tells_error(rank, line) for line in lines)
    worker._write_error_file(error, 3)
    assert [files.tells_error(rank, line) for line in lines] == [hidden] * len(lines)
    assert not any(
        files.tells_error(rank, line) for line in (b"", b"step 3/9  loss 2.0", b"\xff\xfe")
    )


def test_marks_and_beats_arrive(tmp_path: Path) -> None:
    worker, files = _pair(tmp_path)
    assert files.marks(1) == Marks()
    began = time.monotonic()
    worker.mark_ready()
    worker.mark_busy()
    worker.beat("load", 0)
    worker.beat("compute", 12345, 2.5)
    worker.mark_started()
    marks = files.marks(1)
    assert (marks.ready, marks.started) == (True, True)
    assert marks.beat == Beat(12345, "compute", 2, marks.beat.time if marks.beat else 0.0, 2.5)
    assert marks.beat is not None
    assert marks.busy_time is not None
    assert began <= marks.busy_time <= marks.beat.time <= time.monotonic()
    assert files.marks(0) == Marks()
    content = (tmp_path / "rank-1.beat").read_bytes()
    assert (len(content), content[-1:]) == (BEAT_BYTES, b"\n")


def test_a_sign_is_as_old_as_its_first_sight(tmp_path: Path) -> None:
    worker, files = _pair(tmp_path)
    worker.beat("load", 3)
    worker.mark_busy()
    first = files.marks(1)
    time.sleep(0.02)
    assert files.marks(1) == first
    worker.beat("load", 3)  # nothing new but that it lives
    os.utime(tmp_path / "rank-1.busy", (0, 0))  # even where somebody has set the time of day
    second = files.marks(1)
    assert first.beat is not None
    assert second.beat is not None
    assert second.beat.time >= first.beat.time + 0.02
    assert first.busy_time is not None
    assert second.busy_time is not None
    assert second.busy_time >= first.busy_time + 0.02


def test_a_torn_beat_is_left_out(tmp_path: Path) -> None:
    worker, files = _pair(tmp_path)
    worker.beat("load", 3)
    before = files.marks(1)
    (tmp_path / "rank-1.beat").write_text('{"step": 4, "pha')
    assert files.marks(1) == before


def test_a_beat_never_fails(tmp_path: Path) -> None:
    launch = LaunchPlace("single", 0, 1, 0, 1, "none", "a test")
    WorkerContext(launch, None, None).beat("load", 1)
    WorkerContext(launch, tmp_path / "absent", None).beat("load", 1)
    assert list(tmp_path.iterdir()) == []


def test_words_arrive(tmp_path: Path) -> None:
    worker, files = _pair(tmp_path)
    assert worker.regroup_requested() is False
    files.tell("regroup")
    assert worker.regroup_requested() is False  # it has just looked
    deadline = time.monotonic() + 2.0
    while not worker.regroup_requested():
        assert time.monotonic() < deadline
    (tmp_path / "regroup").unlink()
    assert worker.regroup_requested() is True


@pytest.mark.parametrize("content", [None, "", "[1]", '{"type": "Val'])
def test_an_error_file_that_cannot_be_read_is_none(tmp_path: Path, content: str | None) -> None:
    files = RunFiles(tmp_path, tmp_path, counters=[])
    if content is not None:
        (tmp_path / "error-rank-0.json").write_text(content)
    assert files.error(0) is None


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    assert tail(tmp_path / "absent.log") == ()
    log = tmp_path / "rank-1.log"
    log.write_bytes(
        b"x" * 100_000 + b"\n" + b"".join(b"line %d\n" % number for number in range(30)) + b"\xff"
    )
    assert tail(log) == (*(f"line {number}" for number in range(11, 30)), "\ufffd")


def test_counters_of_both_kinds_of_control_group(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert oom_counters(proc, groups) == []  # macOS
    (proc / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    (proc / "self/cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/box/a:b\n0::/slice/job\n")
    (groups / "memory/box/a:b").mkdir(parents=True)
    (groups / "memory/box/a:b/memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
    )
    (groups / "slice/job").mkdir(parents=True)
    events = groups / "slice/job/memory.events"
    events.write_text("low 0\nhigh 9\nmax 3\noom 2\noom_kill 1\noom_group_kill 0\n")
    # Those of the group, whose processes are ours: on the whole computer other programs may be
    # killed.
    assert oom_counters(proc, groups) == [groups / "memory/box/a:b/memory.oom_control", events]
    (proc / "self/cgroup").write_text("9:name=systemd:/\n0::/nothing/counted\n")
    assert oom_counters(proc, groups) == [proc / "vmstat"]


class Kernel:
    """A counter of processes that were killed for want of memory, and the clock by which ranks are
    watched.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = tmp_path / "memory.events"
        self.kills(0)
        self.now = 1000.0
        monkeypatch.setattr(runfiles.time, "monotonic", lambda: self.now)
        self.files = RunFiles(tmp_path, tmp_path, counters=[self.file])

    def kills(self, count: int) -> None:
        # Of the other lines none is the end of a process.
        self.file.write_text(
            f"low 0\nhigh {count + 9}\nmax 3\noom {count + 2}\noom_kill {count}\noom_group_kill 0\n"
        )

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 20)):
            self.now += 0.05
            self.files.look_at_kills()


@pytest.mark.parametrize(
    ("before_s", "told"), [(0.0, True), (0.5, True), (3.0, True), (8.0, False), (3600.0, False)]
)
def test_only_a_kill_for_want_of_memory_just_before_is_why_a_rank_ended(
    before_s: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(tmp_path, monkeypatch)
    kernel.wait(30.0)
    kernel.kills(1)
    kernel.wait(before_s)
    kernel.files.note_end(1)
    # Later kills are of others.
    kernel.wait(1.0)
    kernel.kills(2)
    assert kernel.files.out_of_memory(1) is told
    assert kernel.files.out_of_memory(0) is False


def test_a_rank_that_is_killed_by_hand_is_not_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(tmp_path, monkeypatch)
    kernel.wait(2.0)
    kernel.files.note_end(0)
    assert kernel.files.out_of_memory(0) is False


def test_a_rank_that_ends_at_once_is_judged_by_what_was_before_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(tmp_path, monkeypatch)
    kernel.kills(1)
    kernel.files.note_end(0)
    assert kernel.files.out_of_memory(0) is True
    assert RunFiles(tmp_path, tmp_path, counters=[kernel.file]).out_of_memory(0) is False


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[",
            "[" * 5000,
            "null",
            "1",
            "[]",
            "{}",
            '{"a": 1}',
            '{"type": "x"}',
            '{"type": 1, "message": "x"}',
        ),
        *(
            '{"type": "x", "message": null}',
            '{"type": "x", "message": "y", "text": 3}',
            '{"type": NaN, "message": "y"}',
        ),
        *(
            '{"type": "x", "message": "y", "more": ' + "[" * 100 + "]" * 100 + "}",
            '{"type": "x", "type": "message"}',
        ),
    ],
)
def test_an_error_file_that_is_none_is_none(tmp_path: Path, text: str) -> None:
    _, files = _pair(tmp_path)
    (tmp_path / "error-rank-1.json").write_text(text)
    assert files.error(1) is None
    assert not files.tells_error(1, b"a line")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[]", '{"step": 1}', '{"step": "1", "phase": "load", "count": 9}'),
        *('{"step": 1, "phase": 2, "count": 9}', '{"step": true, "phase": "load", "count": 9}'),
        *(
            '{"step": 1, "phase": "load", "count": 1e400}',
            '{"step": 1, "phase": "load", "count": 9, "waited_s": "x"}',
        ),
    ],
)
def test_a_beat_that_is_none_leaves_the_last_one(tmp_path: Path, text: str) -> None:
    worker, files = _pair(tmp_path)
    worker.beat("load", 3)
    last = files.marks(1)
    assert last.beat is not None
    (tmp_path / "rank-1.beat").write_text(text)
    assert files.marks(1) == last
