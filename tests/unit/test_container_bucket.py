"""A bucket that is mounted as files, in which a container keeps a run's checkpoints and logs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from allhands.checkpoints import checkpoint_path, latest, open_checkpoint, write_checkpoint
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


def best(run: Path, step: int) -> None:
    """Write the best checkpoint: several files, each with the step, all of one size."""
    texts = {f"{name}.json": f'"{step} {name}"' for name in "abcd"} | {f"only-{step}.json": "1"}
    write_checkpoint(run / "best", step, "run", {"step": step}, {}, texts)


def restored(bucket: Path, place: Path) -> int:
    """The step of the best checkpoint that a new start gets; every sum in it is checked."""
    Mirror(place, bucket, lambda _: None).restore()
    return open_checkpoint(place / "best", verify=True).step


@pytest.mark.parametrize("at", range(8))
def test_a_best_that_is_replaced_while_it_is_copied_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    run, bucket, said = tmp_path / "run", tmp_path / "bucket", list[str]()
    best(run, 10)
    Mirror(run, bucket, said.append).finish()
    best(run, 20)
    copied, real = list[str](), shutil.copyfile

    def copy(source: Path, target: Path) -> object:
        if str(target).startswith(str(bucket)):
            copied.append(str(source))
            if len(copied) == at:
                best(run, 30)
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy)
    mirror = Mirror(run, bucket, said.append)
    mirror.finish()
    assert restored(bucket, tmp_path / "new") in (10, 20, 30)
    mirror.finish()
    assert restored(bucket, tmp_path / "newer") == open_checkpoint(run / "best", verify=True).step
    assert {path.name for path in (bucket / "best").iterdir()} == {
        path.name for path in (run / "best").iterdir()
    }
    assert said == []


class KilledError(BaseException):
    """The process is gone: nothing that it would still do is done."""


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only so many changes of files happen."""
    done = 0

    def change(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal done
            done += 1
            if done > step:
                raise KilledError
            return real(*args, **more)

        return call

    for owner, name in (
        *((Path, name) for name in ("replace", "unlink", "write_bytes", "mkdir")),
        *((shutil, name) for name in ("copyfile", "rmtree")),
    ):
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))


def test_a_kill_at_any_moment_leaves_a_whole_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()
    for step in range(100):
        run, bucket = tmp_path / f"run{step}", tmp_path / f"bucket{step}"
        best(run, 10)
        Mirror(run, bucket, lambda _: None).finish()
        best(run, 20)
        with monkeypatch.context() as patch:
            killed_at(step, patch)
            try:
                Mirror(run, bucket, lambda _: None).finish()
                ended = True
            except KilledError:
                ended = False
        found.append(restored(bucket, tmp_path / f"new{step}"))
        # The next start goes on with the copy.
        Mirror(run, bucket, lambda _: None).finish()
        assert restored(bucket, tmp_path / f"newer{step}") == 20
        if ended:
            break
    assert ended
    assert found == sorted(found)
    assert set(found) == {10, 20}


def test_a_copy_goes_only_when_a_later_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, bucket = tmp_path / "run", tmp_path / "bucket"
    checkpoint(run, 10)
    Mirror(run, bucket, lambda _: None).finish()
    shutil.rmtree(checkpoint_path(run, 10))
    checkpoint(run, 20)
    real = shutil.copyfile

    def copy(source: Path, target: Path) -> object:
        shutil.rmtree(checkpoint_path(run, 20), ignore_errors=True)  # pruned, for step 30
        return real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", copy)
        Mirror(run, bucket, lambda _: None).finish()
    whole = latest(bucket)
    assert whole is not None
    assert whole.step == 10
