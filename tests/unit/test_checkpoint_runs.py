"""The checkpoints of a run: the latest, retention, and what --resume takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_checkpoints import RUN, flip, names, run, step_of, write

from allhands.checkpoints import (
    Checkpoint,
    best_in,
    checkpoint_path,
    checkpoints_in,
    find,
    latest,
    open_checkpoint,
    prune,
    quick_step,
    survey,
)
from allhands.errors import CheckpointError, StorageError

__all__ = ["run"]

# --- the checkpoints of a run ---------------------------------------------------------------------


def test_the_latest_is_that_of_the_highest_step_in_a_manifest(run: Path) -> None:
    assert checkpoints_in(run) == [checkpoint_path(run, step) for step in (300, 200, 100)]
    assert step_of(latest(run)) == 300
    # Names are not believed, neither high nor low ones.
    checkpoint_path(run, 100).rename(checkpoint_path(run, 900))
    checkpoint_path(run, 300).rename(checkpoint_path(run, 1))
    found = latest(run)
    assert found is not None
    assert (found.step, found.path) == (300, checkpoint_path(run, 1))
    assert quick_step(run, RUN) == 300
    # What is not named so does not count.
    (run / "checkpoints" / "step-x").mkdir()
    shutil.copytree(found.path, run / "checkpoints" / "copy")
    (run / "checkpoints" / "step-0000400").touch()
    assert [look.path.name for look in survey(run)] == [
        "step-0000001",
        "step-0000200",
        "step-0000900",
    ]


def test_best_counts_where_it_is_later(run: Path) -> None:
    write(run / "best", 300)
    found = latest(run)
    assert found is not None
    assert found.path == checkpoint_path(run, 300)
    write(run / "best", 350)
    assert (step_of(latest(run)), quick_step(run, RUN)) == (350, 350)


def test_only_the_wanted_run_counts(run: Path) -> None:
    write(checkpoint_path(run, 400), 400, "other")
    assert step_of(latest(run)) == 400
    assert step_of(latest(run, run_id=RUN)) == 300
    assert step_of(latest(run, run_id="other")) == 400
    assert latest(run, run_id="none") is None
    assert (quick_step(run, RUN), quick_step(run, "other"), quick_step(run, "none")) == (
        300,
        400,
        None,
    )


def test_damaged_ones_are_left_out_and_told(run: Path) -> None:
    flip(checkpoint_path(run, 300) / "optimizer.safetensors", -1)
    (checkpoint_path(run, 200) / "manifest.json").unlink()
    rejected: list[CheckpointError] = []
    assert step_of(latest(run, rejected=rejected)) == 100
    wheres = {str(error.where).removeprefix(str(run)) for error in rejected}
    assert wheres == {
        "/checkpoints/step-0000300/optimizer.safetensors",
        "/checkpoints/step-0000200/manifest.json",
    }
    # Sizes alone do not tell.
    assert quick_step(run, RUN) == 300
    (checkpoint_path(run, 300) / "optimizer.safetensors").write_bytes(b"")
    assert quick_step(run, RUN) == 100
    shutil.rmtree(checkpoint_path(run, 100))
    assert latest(run) is None
    assert latest(run / "nowhere") is None
    assert quick_step(run / "nowhere", RUN) is None


def test_one_that_is_pruned_or_replaced_while_it_is_read_is_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from allhands.checkpoints import finding

    write(run / "best", 50)
    done: list[Path] = []
    real = finding.check_sizes

    def meanwhile(found: Checkpoint) -> None:
        if found.path.name in ("step-0000100", "best") and found.path not in done:
            done.append(found.path)
            shutil.rmtree(found.path)
            if found.path.name == "best":
                write(found.path, 60)
        real(found)

    monkeypatch.setattr(finding, "check_sizes", meanwhile)
    seen = [
        (look.path.name, look.checkpoint and look.checkpoint.step, look.error)
        for look in survey(run)
    ]
    assert seen == [("step-0000300", 300, None), ("step-0000200", 200, None), ("best", 60, None)]
    assert len(done) == 2


# --- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "protected", "kept"),
    [
        (1, None, (), {600}),
        (2, None, (), {600, 500}),
        (1, 300, (), {600, 300}),
        (2, 400, (100,), {600, 500, 400, 100}),
        (9, None, (), {100, 200, 300, 400, 500, 600}),
    ],
)
def test_what_is_kept(
    keep_last: int, keep_every: int | None, protected: Any, kept: set[int], run: Path
) -> None:
    for step in (400, 500, 600):
        write(checkpoint_path(run, step), step)
    write(run / "best", 100)
    removed = prune(run, keep_last, keep_every, protected)
    assert names(run / "checkpoints") == [f"step-{step:07d}" for step in sorted(kept)]
    assert sorted(removed) == [
        checkpoint_path(run, s) for s in range(100, 700, 100) if s not in kept
    ]
    assert best_in(run) is not None


def test_the_newest_whole_one_stays(run: Path) -> None:
    flip(checkpoint_path(run, 300) / "adapters.safetensors", -1)
    flip(checkpoint_path(run, 200) / "adapters.safetensors", -1)
    assert prune(run, 1, None, ()) == [checkpoint_path(run, 200)]
    assert step_of(latest(run)) == 100
    # With no whole one at all, nothing goes.
    flip(checkpoint_path(run, 100) / "state.json", 3)
    assert prune(run, 1, None, ()) == []


def spoil(path: Path) -> None:
    (path / "optimizer.safetensors").unlink()


def test_damaged_ones_do_not_count_as_kept(run: Path) -> None:
    write(checkpoint_path(run, 400), 400)
    spoil(checkpoint_path(run, 400))
    spoil(checkpoint_path(run, 200))
    assert prune(run, 1, None, ()) == [checkpoint_path(run, step) for step in (200, 100)]
    assert names(run / "checkpoints") == ["step-0000300", "step-0000400"]


def test_what_is_not_a_checkpoint_of_ours_is_not_touched(run: Path, tmp_path: Path) -> None:
    strange: dict[str, Callable[[Path], object]] = {
        "step-0000001": lambda path: path.mkdir(),
        "step-0000002": lambda path: (
            shutil.copytree(checkpoint_path(run, 100), path),
            (path / "mine").touch(),
        ),
        "step-0000003": lambda path: path.symlink_to(
            shutil.copytree(checkpoint_path(run, 100), tmp_path / "away")
        ),
        "step-0000004": lambda path: path.write_text("a file"),
        "copy": lambda path: shutil.copytree(checkpoint_path(run, 100), path),
        ".other.removed-1": lambda path: path.mkdir(),
    }
    for name, make in strange.items():
        make(run / "checkpoints" / name)
    removed = prune(run, 1, None, ())
    assert removed == [checkpoint_path(run, step) for step in (200, 100)]
    assert names(run / "checkpoints") == sorted([*strange, "step-0000300"])
    assert open_checkpoint(tmp_path / "away").step == 100


def test_the_one_just_written_is_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from allhands.checkpoints import finding

    write(checkpoint_path(run, 50), 50, "the run that this one goes on from")
    written = write(checkpoint_path(run, 400), 400)
    monkeypatch.setattr(
        finding, "with_state", lambda *_, **__: pytest.fail("the contents were read")
    )
    removed = prune(run, 1, None, (), written)
    assert removed == [checkpoint_path(run, step) for step in (300, 200, 100, 50)]
    assert names(run / "checkpoints") == ["step-0000400"]


def test_no_checkpoints_are_nothing_to_prune(tmp_path: Path) -> None:
    assert prune(tmp_path, 1, None, ()) == []
    assert prune(tmp_path / "nowhere", 1, None, ()) == []


# --- resume ---------------------------------------------------------------------------------------


def test_resume_takes_a_checkpoint_or_the_latest_of_a_directory(run: Path) -> None:
    assert find(str(checkpoint_path(run, 100)), run).step == 100
    assert find(str(run), run / "other").step == 300
    assert find(str(run / "checkpoints"), run).step == 300
    # As when a new run has set it aside.
    (run / "checkpoints").rename(run / "checkpoints.1")
    assert find(str(run / "checkpoints.1"), run).step == 300
    write(run / "best", 150)
    assert find(str(run / "best"), run).step == 150


def test_resume_from_what_is_no_checkpoint_says_what_to_do(run: Path, tmp_path: Path) -> None:
    weights = checkpoint_path(run, 300) / "adapters.safetensors"
    shutil.copytree(run, tmp_path / "damaged")
    for path in checkpoints_in(tmp_path / "damaged"):
        spoil(path)
    shutil.copy(weights, run / "adapters.safetensors")
    (tmp_path / "adapter").mkdir()
    shutil.copy(weights, tmp_path / "adapter" / "adapters.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    cases = {
        run / "nowhere": ("no such directory", f"{checkpoint_path(run, 300)}"),
        weights: ("is a file", f"--resume {weights.parent}; ", f"--resume-adapter-file {weights}"),
        run / "adapters.safetensors": (
            "is a file",
            f"--resume-adapter-file {run / 'adapters.safetensors'}",
        ),
        weights.with_name("manifest.json"): ("is a file", f"--resume {weights.parent}"),
        tmp_path / "notes.txt": ("is a file", "directory of a checkpoint"),
        tmp_path / "adapter": (
            "no checkpoint",
            f"--resume-adapter-file {tmp_path / 'adapter/adapters.safetensors'}",
        ),
        tmp_path / "empty": ("holds no checkpoint", f"{checkpoint_path(run, 300)}"),
        tmp_path / "damaged": (
            "no checkpoint in it is whole",
            "step-0000100",
            "optimizer.safetensors",
        ),
        checkpoint_path(tmp_path / "damaged", 100): ("is missing", "checkpoint verify"),
    }
    for path, words in cases.items():
        with pytest.raises(CheckpointError) as caught:
            find(str(path), run)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert caught.value.hint
    with pytest.raises(CheckpointError) as caught:
        find("nowhere", tmp_path / "empty")
    assert caught.value.code == "checkpoint-missing"
    assert "that has some" in (caught.value.hint or "")


def test_a_directory_that_may_not_be_read_is_told(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def iterdir(self: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    for look in (latest, survey, checkpoints_in):
        with pytest.raises(CheckpointError) as caught:
            look(run)
        assert caught.value.code == "checkpoint-unreadable"
        assert str(caught.value.where).startswith(str(run))
    with pytest.raises(StorageError) as caught:
        prune(run, 1, None, ())
    assert caught.value.code == "permission-denied"
