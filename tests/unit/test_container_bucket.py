"""A bucket that is mounted as files, in which a container keeps a run's checkpoints and logs."""

from __future__ import annotations

import shutil
from pathlib import Path

from allhands.checkpoints import checkpoint_path, latest, write_checkpoint
from allhands.cluster.containers.results import Mirror


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def checkpoint(run: Path, step: int) -> None:
    write_checkpoint(
        checkpoint_path(run, step), step, "run", {"step": step}, {}, {"note.json": f'"{step}"'}
    )


def test_the_mirror_follows_and_brings_back(tmp_path: Path) -> None:
    run, bucket, said = tmp_path / "run", tmp_path / "bucket", list[str]()
    mirror = Mirror(run, bucket, said.append)
    mirror.restore()  # nothing there yet
    write(run / "metrics.jsonl", "1\n")
    checkpoint(run, 10)
    checkpoint(run, 20)
    mirror.finish()
    found = latest(bucket)
    assert found is not None
    assert found.step == 20
    shutil.rmtree(checkpoint_path(run, 10))
    checkpoint(run, 30)
    mirror.finish()
    assert sorted(path.name for path in (bucket / "checkpoints").iterdir()) == [
        "step-0000020",
        "step-0000030",
    ]
    other = tmp_path / "other"
    Mirror(other, bucket, said.append).restore()
    again = latest(other)
    assert again is not None
    assert again.step == 30
    assert (other / "metrics.jsonl").read_text() == "1\n"
    assert said == []


def test_the_mirror_keeps_logs_of_all_computers_and_starts(tmp_path: Path) -> None:
    run, other, bucket, said = (
        tmp_path / "run",
        tmp_path / "other",
        tmp_path / "bucket",
        list[str](),
    )
    for start in (1, 2):
        shutil.rmtree(run, ignore_errors=True)
        first, second = (
            Mirror(run, bucket, said.append),
            Mirror(other, bucket, said.append, logs_only=True),
        )
        first.restore()
        second.restore()
        write(run / "logs/rank-0.log", f"start {start}")
        write(run / "logs/error-rank-0.json", "{}")
        write(other / "logs/rank-1.log", f"other {start}")
        write(other / "metrics.jsonl", "none")
        second.finish()
        first.finish()
    logs = bucket / "logs"
    assert {path.name: path.read_text() for path in logs.glob("*.log")} == {
        "rank-0.log": "start 2",
        "rank-1.log": "other 2",
    }
    assert (logs / "earlier-1/rank-0.log").read_text() == "start 1"
    assert (logs / "earlier-1/rank-1.log").read_text() == "other 1"
    assert not (bucket / "metrics.jsonl").exists()
    assert said == []


def test_a_copy_that_was_cut_short_is_not_brought_back(tmp_path: Path) -> None:
    run, bucket, said = tmp_path / "run", tmp_path / "bucket", list[str]()
    checkpoint(run, 10)
    Mirror(run, bucket, said.append).finish()
    checkpoint(run, 20)
    torn = checkpoint_path(bucket, 20)
    torn.mkdir()
    shutil.copy(checkpoint_path(run, 20) / "state.json", torn)  # killed before the manifest
    other = tmp_path / "other"
    Mirror(other, bucket, said.append).restore()
    assert [path.name for path in (other / "checkpoints").iterdir()] == ["step-0000010"]
    checkpoint(other, 20)  # the place is free
    Mirror(other, bucket, said.append).finish()
    whole = latest(bucket)
    assert whole is not None
    assert whole.step == 20


def test_a_bucket_that_fails_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()
    checkpoint(run, 10)
    write(tmp_path / "file")
    mirror = Mirror(run, tmp_path / "file" / "bucket", said.append)
    mirror.start()
    mirror.finish()
    mirror.finish()
    assert len(said) == 1
    assert "could not be copied" in said[0]
