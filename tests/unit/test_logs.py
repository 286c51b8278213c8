"""Logs from one attempt to the next, and from one job to the next: nothing of the latest few is
lost.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from allhands.cluster.logs import archive_logs, clear_logs
from allhands.errors import StorageError

OURS = (
    "monitor-orchestrator.jsonl",
    "monitor-rank-11.jsonl",
    "rank-0.log",
    "rank-11.log",
    "mpirun.log",
    "rank-1.attempt-2.log",
    "mpirun.attempt-1.log",
    "error-rank-0.json",
)


def write(directory: Path, text: str) -> None:
    for name in OURS:
        (directory / name).write_text(text)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_logs_of_the_last_three_attempts_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rank-notes.log").touch()
    for attempt in range(1, 6):
        for name in ("rank-0.log", "rank-11.log", "mpirun.log", "error-rank-0.json"):
            (tmp_path / name).write_text(f"of {attempt}")
        moved = archive_logs(tmp_path, attempt)
        assert moved[tmp_path / "rank-11.log"] == tmp_path / f"rank-11.attempt-{attempt}.log"
    kept = {
        f"{name}.attempt-{attempt}.log"
        for name in ("rank-0", "rank-11", "mpirun")
        for attempt in (3, 4, 5)
    }
    assert names(tmp_path) == kept | {"rank-notes.log"}
    assert (tmp_path / "rank-11.attempt-4.log").read_text() == "of 4"


def test_logs_of_the_job_before_are_moved_with_all_their_words(tmp_path: Path) -> None:
    foreign = ("rank-notes.log", "events.jsonl", "host-node1.log", "rank-1.log.gz", "xrank-1.log")
    for name in foreign:
        (tmp_path / name).write_text("a person's")
    write(tmp_path, "crashed")
    assert clear_logs(tmp_path) == tmp_path / "earlier-1"
    assert names(tmp_path) == {*foreign, "earlier-1"}
    assert {
        path.name: path.read_text() for path in (tmp_path / "earlier-1").iterdir()
    } == dict.fromkeys(OURS, "crashed")


def test_nothing_of_ours_makes_no_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "rank-0.log").mkdir()
    assert clear_logs(tmp_path) is None
    assert names(tmp_path) == {"notes.txt", "rank-0.log"}


def test_the_last_five_jobs_are_kept_and_numbers_count_up(tmp_path: Path) -> None:
    for job in range(1, 9):
        write(tmp_path, f"of {job}")
        clear_logs(tmp_path)
    assert names(tmp_path) == {f"earlier-{job}" for job in range(4, 9)}
    assert all(
        (tmp_path / f"earlier-{job}" / "rank-0.log").read_text() == f"of {job}"
        for job in range(4, 9)
    )
    # After a person has removed the newest, or has put one of a high number there.
    (tmp_path / "earlier-40").touch()
    write(tmp_path, "new")
    assert clear_logs(tmp_path) == tmp_path / "earlier-41"


def test_what_a_person_has_put_there_is_never_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere, "a person's")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "earlier-1").symlink_to(elsewhere)
    (logs / "earlier-2").mkdir()
    write(logs / "earlier-2", "old")
    (logs / "earlier-2" / "my notes").write_text("why it crashed")
    for _ in range(7):
        write(logs, "new")
        clear_logs(logs)
    assert names(logs) == {"earlier-1", "earlier-2", *(f"earlier-{job}" for job in range(5, 10))}
    assert names(logs / "earlier-2") == {"my notes"}
    assert names(elsewhere) == set(OURS)


def test_they_are_private(tmp_path: Path) -> None:
    write(tmp_path, "")
    target = tmp_path / "target"
    target.touch(0o644)
    (tmp_path / "rank-0.log").chmod(0o644)
    (tmp_path / "rank-5.log").symlink_to(target)
    place = clear_logs(tmp_path)
    assert place is not None
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE((place / name).stat().st_mode) for name in OURS} == {0o600}
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_what_cannot_be_moved_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "")

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageError, match="cannot be written: Permission denied") as caught:
        clear_logs(tmp_path)
    assert caught.value.where == str(tmp_path / "error-rank-0.json")
