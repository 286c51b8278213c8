"""The supervisor's record: whole lines, private, no secrets, and never the end of a run."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from pathlib import Path

import pytest

from allhands.observe.journal import EVENTS_FILE, Journal, SupervisorEvent, read_events

_FAULT = SupervisorEvent(
    "fault",
    "rank 1 was killed",
    rank=1,
    exit_code=137,
    log_path=Path("/logs/rank-1.log"),
    log_tail=("token=secret",),
    explanation="secret",
    step=7,
)


def test_events_are_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / EVENTS_FILE)
    before = time.time()
    journal.write(SupervisorEvent("launched", "2 processes, ring"), 1)
    journal.write(_FAULT, 1)
    journal.close()
    journal.close()
    first, second = read_events(tmp_path / "run")
    assert before - 0.001 <= first.pop("time") <= time.time() + 0.001
    assert first == {"kind": "launched", "attempt": 1, "message": "2 processes, ring"}
    del second["time"]
    facts = {"rank": 1, "exit_code": 137, "step": 7, "log_path": "/logs/rank-1.log"}
    assert second == {"kind": "fault", "attempt": 1, "message": "rank 1 was killed"} | facts
    text = (tmp_path / "run" / EVENTS_FILE).read_text()
    assert "secret" not in text
    assert text.count("\n") == 2


def test_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    path.touch(0o644)
    Journal(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    Journal(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / EVENTS_FILE
    for number in (1, 2):
        journal = Journal(path)
        journal.write(SupervisorEvent("started", f"run {number}"), number)
        journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    journal = Journal(path)
    journal.write(SupervisorEvent("started", "run 3"), 3)
    journal.close()
    # Less its line feed alone, the second line is whole.
    assert [event["attempt"] for event in read_events(path)] == ([1, 2, 3] if cut == 1 else [1, 3])


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    good = {"time": 1.0, "kind": "started", "attempt": 1, "message": "\ud800 ü"}
    lines = [
        "[]",
        "null",
        "{}",
        '{"kind": 3, "time": 1}',
        "[" * 100_000,
        json.dumps(good),
        "\x00",
        '{"kind": "x"',
    ]
    path.write_bytes("\n".join(lines).encode() + b"\xff\xfe")
    assert read_events(path) == [good]
    assert read_events(tmp_path / "none") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_warned_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fchmod", lambda *_: None)  # the device stays as it is
    with caplog.at_level(logging.WARNING):
        journal = Journal("/dev/full")
        for _ in range(3):
            journal.write(_FAULT, 1)
    journal.close()
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full: no events can be written (No space left on device); the run goes on"
    ]


def test_a_place_where_nothing_can_be_written_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        journal = Journal(tmp_path / "file" / EVENTS_FILE)
        journal.write(_FAULT, 1)
    journal.close()
    assert len(caplog.records) == 1
