"""Failures on purpose: when they happen, how often, and what they do to a real process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile import until

from allhands.errors import ConfigError
from allhands.runtime import faults
from allhands.runtime.memory import memory_limit

_PROGRAM = """
import sys
from allhands.runtime import faults
for step in range(6):
    print(step, faults.inject_fault("step", step, 0), flush=True)
"""


@pytest.fixture
def schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Write a schedule and put it in force, as for a process that has just started."""
    path = tmp_path / "faults.json"

    def write(*entries: Any, attempt: int = 1) -> Path:
        path.write_text(json.dumps(list(entries)))
        monkeypatch.setenv("ALLHANDS_FAULTS", str(path))
        monkeypatch.setenv("ALLHANDS_ATTEMPT", str(attempt))
        faults._schedule.cache_clear()
        return path

    yield write
    faults._schedule.cache_clear()


def _run(path: Path, seconds: float = 10.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM]
    environ = {**os.environ, "ALLHANDS_FAULTS": str(path)}
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=seconds, check=False
    )


def test_without_a_schedule_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLHANDS_FAULTS", raising=False)
    faults._schedule.cache_clear()
    assert not faults.active()
    assert faults.inject_fault("step", 0, 0) is None
    begun = time.perf_counter()
    for step in range(100_000):
        faults.inject_fault("step", step, 0)
    assert time.perf_counter() - begun < 1.0  # under 10 us each even on a slow machine


def test_rank_point_and_step_must_fit_and_it_happens_once(schedule: Callable[..., Path]) -> None:
    path = schedule(
        {"rank": 1, "step": 3, "kind": "nan"}, {"rank": 1, "step": 3, "kind": "slow", "seconds": 0}
    )
    assert faults.active()
    told = [
        (point, step, rank, kind)
        for step in range(6)
        for rank in (0, 1, 2)
        for point in ("step", "reduce", "update")
        if (kind := faults.inject_fault(point, step, rank))
    ]
    assert told == [("step", 3, 1, "slow"), ("reduce", 3, 1, "nan")]
    notes = faults.fired(path)
    assert [(note.index, note.kind, note.rank, note.step) for note in notes] == [
        (1, "slow", 1, 3),
        (0, "nan", 1, 3),
    ]
    assert all(note.pid == os.getpid() and abs(note.time - time.time()) < 60 for note in notes)


def test_a_step_that_is_never_reached_exactly_counts_when_it_is_passed(
    schedule: Callable[..., Path],
) -> None:
    schedule({"rank": 0, "step": 3, "kind": "nan"})
    assert [faults.inject_fault("reduce", step, 0) for step in (0, 2, 4, 6)] == [
        None,
        None,
        "nan",
        None,
    ]


def test_it_does_not_happen_again_in_the_next_process(schedule: Callable[..., Path]) -> None:
    entry = {"rank": 0, "step": 1, "kind": "nan"}
    schedule(entry)
    assert faults.inject_fault("reduce", 1, 0) == "nan"
    path = schedule(entry, attempt=2)
    assert faults.inject_fault("reduce", 1, 0) is None
    assert len(faults.fired(path)) == 1


def test_two_entries_alike_happen_one_after_the_other(schedule: Callable[..., Path]) -> None:
    entry = {"rank": 0, "step": 1, "kind": "nan"}
    schedule(entry, entry)
    assert [faults.inject_fault("reduce", 1, 0) for _ in range(3)] == ["nan", "nan", None]


def test_an_attempt_may_be_chosen(schedule: Callable[..., Path]) -> None:
    entry = {"rank": 0, "step": 1, "kind": "nan", "attempt": 2}
    schedule(entry)
    assert faults.inject_fault("reduce", 1, 0) is None
    schedule(entry, attempt=2)
    assert faults.inject_fault("reduce", 1, 0) == "nan"


def test_the_chosen_write_of_a_save_fails_and_no_other(schedule: Callable[..., Path]) -> None:
    schedule({"rank": 0, "step": 10, "kind": "disk-full", "write": 3})
    # Three writes a save, and the counting begins anew with each.
    failed: list[tuple[int, int, int | None]] = []
    for step in (5, 10, 15):
        for write in (1, 2, 3):
            try:
                faults.inject_fault("save", step, 0)
            except OSError as error:
                failed.append((step, write, error.errno))
    assert failed == [(10, 3, errno.ENOSPC)]


def test_raise_and_slow(schedule: Callable[..., Path]) -> None:
    schedule(
        {"rank": 0, "step": 0, "kind": "raise", "text": "no such luck"},
        {"rank": 0, "step": 1, "kind": "slow", "seconds": 0.2},
    )
    with pytest.raises(RuntimeError, match=r"^no such luck$"):
        faults.inject_fault("step", 0, 0)
    begun = time.monotonic()
    faults.inject_fault("step", 1, 0)
    assert time.monotonic() - begun >= 0.2


@pytest.mark.parametrize(
    ("kind", "more", "code"),
    [("kill", {}, -9), ("term", {}, -15), ("exit", {"code": 5}, 5), ("exit", {}, 1)],
)
def test_kinds_that_end_a_process(
    schedule: Callable[..., Path], kind: str, more: dict[str, int], code: int
) -> None:
    path = schedule({"rank": 0, "step": 2, "kind": kind, **more})
    done = _run(path)
    assert (done.returncode, done.stdout) == (code, "0 None\n1 None\n"), done.stderr
    assert [(note.kind, note.step) for note in faults.fired(path)] == [(kind, 2)]
    # The second start goes through.
    assert _run(path).returncode == 0


@pytest.mark.parametrize("kind", ["stop", "hang", "spin"])
def test_kinds_that_hold_a_process_up(schedule: Callable[..., Path], kind: str) -> None:
    path = schedule({"rank": 0, "step": 2, "kind": kind})
    environ = {**os.environ, "ALLHANDS_FAULTS": str(path)}
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], env=environ, stdout=subprocess.PIPE, text=True
    )
    process = psutil.Process(child.pid)
    try:
        until(
            lambda: faults._notes(path).is_dir() and any(faults._notes(path).iterdir()),
            10.0,
            "it has not fired",
        )
        wanted = {
            "stop": psutil.STATUS_STOPPED,
            "hang": psutil.STATUS_SLEEPING,
            "spin": psutil.STATUS_RUNNING,
        }[kind]
        until(lambda: process.status() == wanted, 5.0, f"it is not {wanted}")

        def computes() -> bool:
            before = sum(process.cpu_times()[:2])
            time.sleep(0.5)
            return sum(process.cpu_times()[:2]) - before > 0.05

        # What led to it may still be at its end.
        until(
            lambda: computes() == (kind == "spin"),
            5.0,
            "it computes" if kind != "spin" else "it does not compute",
        )
    finally:
        child.send_signal(signal.SIGKILL)
        out, _ = child.communicate()
    assert out == "0 None\n1 None\n"


# --- memory ---------------------------------------------------------------------------------------


def test_without_a_limit_nobody_elses_memory_is_touched(
    schedule: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "memory_limit", lambda: None)
    schedule({"rank": 0, "step": 0, "kind": "oom"})
    with pytest.raises(MemoryError, match="with 0 bytes taken"):
        faults.inject_fault("step", 0, 0)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        # Version 1, beside other controllers; version 2; the least of it and its parents counts.
        ("7:cpu:/a\n4:memory:/a/b\n", {"memory/a/b/memory.limit_in_bytes": "300"}, 300),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "200"}, 200),
        ("0::/\n", {"memory.max": "100"}, 100),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("0::/a\n", {}, None),
    ],
)
def test_the_limit_of_the_control_group(
    tmp_path: Path, membership: str, files: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    assert memory_limit(tmp_path / "fs", tmp_path / "membership") == expected


def test_where_there_are_no_control_groups(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path / "absent") is None


# --- what is written wrongly ----------------------------------------------------------------------

_GOOD = {"rank": 0, "step": 1, "kind": "kill"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"rank": 0, "step": 1}, "kind is missing"),
        ({**_GOOD, "kind": "explode"}, "kind must be 'kill', 'term'"),
        ({**_GOOD, "kind": []}, "kind must be 'kill'"),
        ({**_GOOD, "when": 2}, "when is unknown"),
        ({**_GOOD, "at": "lunch"}, "at must be 'step'"),
        ({**_GOOD, "rank": -1}, "rank must be greater than or equal to 0"),
        ({**_GOOD, "step": True}, "step must be a valid integer"),
        ({**_GOOD, "step": "1"}, "step must be a valid integer"),
        ({**_GOOD, "attempt": 0}, "attempt must be greater than or equal to 1"),
        ({**_GOOD, "seconds": 2}, "seconds goes with kind slow only"),
        ({**_GOOD, "kind": "slow", "seconds": "2"}, "seconds must be a valid number"),
        ({**_GOOD, "kind": "raise", "text": 5}, "text must be a valid string"),
        ({**_GOOD, "text": "a"}, "text goes with kind raise only"),
        ({**_GOOD, "code": 3}, "code goes with kind exit only"),
        ({**_GOOD, "write": 2}, "write goes with at save only"),
        ({**_GOOD, "kind": "nan", "at": "save"}, "nan happens at reduce only, not at save"),
        ({**_GOOD, "kind": "disk-full", "at": "step"}, "disk-full happens at save only"),
        ([], "must be keys and values"),
    ],
)
def test_a_schedule_that_makes_no_sense(
    schedule: Callable[..., Path], entry: Any, words: str
) -> None:
    path = schedule(_GOOD, entry)
    with pytest.raises(ConfigError, match=words) as caught:
        faults.active()
    assert caught.value.where == f"ALLHANDS_FAULTS={path}"
    assert "entry 1" in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "must be a valid list"), ("[", "is no JSON"), (None, "cannot be read")],
)
def test_a_file_that_is_no_schedule(
    schedule: Callable[..., Path], text: str | None, words: str
) -> None:
    path = schedule()
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        faults.inject_fault("step", 0, 0)


def test_a_key_that_is_there_twice_is_no_choice(schedule: Callable[..., Path]) -> None:
    path = schedule()
    path.write_text('[{"rank": 0, "step": 1, "kind": "kill", "rank": 1}]')
    with pytest.raises(ConfigError, match="rank is given twice"):
        faults.active()


# --- what cannot happen, and what has not ---------------------------------------------------------


def test_without_a_schedule_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLHANDS_FAULTS", raising=False)
    faults.check(1, 1)
    assert faults.already_fired() is None
    assert faults.outstanding() is None


@pytest.mark.parametrize(
    ("entry", "ranks", "steps", "words"),
    [
        ({"rank": 1}, 2, 10, None),
        ({"rank": 2}, 2, None, "rank 2 is none of this run, which has ranks 0 to 1"),
        ({"rank": 1}, 1, 10, "rank 1 is none of this run, which has rank 0 alone"),
        # "step" is the number of updates done: the tenth of ten has nine before it.
        ({"step": 9}, 1, 10, None),
        ({"step": 10}, 1, 10, "step 10 is never reached, step comes last with 9 of 10"),
        ({"step": 10}, 1, None, None),
        ({"step": 10, "at": "load"}, 1, 10, "load comes last with 9 of 10"),
        ({"step": 10, "kind": "nan"}, 1, 10, "reduce comes last with 9 of 10"),
        ({"step": 10, "at": "save"}, 1, 10, None),
        ({"step": 10, "at": "validate"}, 1, 10, None),
        (
            {"step": 11, "kind": "disk-full"},
            1,
            10,
            "step 11 is never reached, save comes last with 10 of 10",
        ),
    ],
)
def test_what_cannot_happen_is_refused(
    schedule: Callable[..., Path],
    entry: dict[str, Any],
    ranks: int,
    steps: int | None,
    words: str | None,
) -> None:
    path = schedule(
        {"rank": 0, "step": 0, "kind": "kill"}, {"rank": 0, "step": 1, "kind": "kill", **entry}
    )
    if words is None:
        faults.check(ranks, steps)
        return
    with pytest.raises(ConfigError, match=words) as caught:
        faults.check(ranks, steps)
    assert caught.value.where == f"ALLHANDS_FAULTS={path}"
    assert "entry 1" in caught.value.message
    assert "docs/reliability.md" in (caught.value.hint or "")


def test_notes_of_another_schedule_are_no_silent_end_of_this_one(
    schedule: Callable[..., Path],
) -> None:
    path = schedule({"rank": 0, "step": 0, "kind": "nan"})
    assert faults.inject_fault("reduce", 0, 0) == "nan"
    faults.check(1)
    for other in (
        [{"rank": 0, "step": 0, "kind": "kill"}],
        [{"rank": 1, "step": 0, "kind": "nan"}],
        [],
    ):
        schedule(*other)
        with pytest.raises(ConfigError, match=r"are of another schedule \(entry 0\)") as caught:
            faults.check(2)
        assert caught.value.where == f"{path}.fired"


def test_what_has_happened_and_what_has_not(schedule: Callable[..., Path]) -> None:
    path = schedule(
        {"rank": 0, "step": 1, "kind": "nan"},
        {"rank": 1, "step": 500, "kind": "kill"},
        {"rank": 2, "step": 7, "kind": "disk-full"},
    )
    assert faults.already_fired() is None
    assert faults.inject_fault("reduce", 1, 0) == "nan"
    told = f"1 of 3 failures on purpose happened before and will not again: remove {path}.fired to rehearse once more"
    assert faults.already_fired() == told
    one, two = (
        "(kill of rank 1 at step, from step 500)",
        "(disk-full of rank 2 at save, from step 7)",
    )
    assert (
        faults.outstanding()
        == f"2 failures on purpose have not happened: entry 1 {one}, entry 2 {two} of {path}"
    )
    assert (
        faults.outstanding({0, 1})
        == f"a failure on purpose has not happened: entry 1 {one} of {path}"
    )
    assert faults.outstanding({0}) is None
    with pytest.raises(OSError, match="No space"):
        faults.inject_fault("save", 8, 2)
    assert faults.outstanding({0, 2}) is None


def test_a_note_whose_writer_was_killed_over_it_harms_nobody(schedule: Callable[..., Path]) -> None:
    path = schedule({"rank": 0, "step": 1, "kind": "nan"})
    path.with_name(f"{path.name}.fired").mkdir()
    (path.with_name(f"{path.name}.fired") / "0").touch()
    (path.with_name(f"{path.name}.fired") / ".draft").touch()
    assert faults.fired(path) == []
    faults.check(1)
