"""Which checkpoint a start goes on from, and that damage to all of them is told instead of
beginning anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_checkpoints import RUN, flip, write

from allhands.checkpoints import RUN_NAME, checkpoint_path, checkpoints_in, find, find_latest
from allhands.checkpoints import reading as checkpoint_reading
from allhands.checkpoints.resuming import find_checkpoint
from allhands.cli.train import train
from allhands.config.schema import build_config
from allhands.errors import CheckpointError

SHORT, ALTERED = "bytes instead of", "SHA-256 sum is wrong"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints and the best one, which is the first of them."""
    for step in (100, 200):
        write(checkpoint_path(tmp_path / "run", step), step)
    write(tmp_path / "run" / "best", 100)
    return tmp_path / "run"


def shorten(path: Path) -> None:
    file = path / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def damage_all(run: Path, how: Any = shorten) -> None:
    for path in [*checkpoints_in(run), run / "best"]:
        how(path)


def chosen(
    run: Path, resume: str | None = "auto", run_id: str = "new", attempt: int = 1
) -> tuple[int | None, str]:
    config = build_config({"train": True, "adapter_path": str(run), "resume": resume})
    found, notes = find_checkpoint(config, run, run_id, attempt)
    return found.step if found else None, "\n".join(notes)


# --- by a person ----------------------------------------------------------------------------------


def test_without_any_checkpoint_a_new_run_begins_and_says_so(tmp_path: Path) -> None:
    step, notes = chosen(tmp_path / "new")
    assert step is None
    assert notes == f"there is no checkpoint in {tmp_path / 'new'} to go on from: a new run begins"
    assert chosen(tmp_path / "new", resume=None) == (None, "")


def test_what_was_set_aside_is_named(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints").rename(run / "checkpoints.4")
    shutil.rmtree(run / "best")
    shorten(write(run / "checkpoints.7" / "step-0000300", 300).path)  # nothing to go on from
    assert chosen(run)[1].endswith(
        f"an earlier run's, up to step 200: --resume {run / 'checkpoints.4'}"
    )


@pytest.mark.parametrize("how", [shorten, lambda path: flip(path / "optimizer.safetensors", -1)])
def test_if_all_are_damaged_it_is_an_error_that_names_each(how: Any, run: Path) -> None:
    damage_all(run, how)
    what = SHORT if how is shorten else ALTERED
    with pytest.raises(CheckpointError) as caught:
        chosen(run)
    assert caught.value.code == "checkpoints-all-damaged"
    assert caught.value.exit_code == 9
    assert caught.value.where == "--resume auto"
    for name in ("step-0000200", "step-0000100", "best"):
        assert f"{name}/optimizer.safetensors: it" in caught.value.message
    assert caught.value.message.count(what) == 3
    hint = caught.value.hint or ""
    assert "--resume PATH" in hint
    assert "leave --resume out" in hint
    # Their weights are as they were.
    assert (
        f"or begin a new run from the weights of step 200, which are whole: --resume-adapter-file {run}"
        in hint
    )


def test_the_hint_names_only_what_is_whole(run: Path) -> None:
    aside = shutil.copytree(run / "checkpoints", run / "checkpoints.1")
    damage_all(run, lambda path: flip(path / "adapters.safetensors", -1))
    with pytest.raises(CheckpointError) as caught:
        chosen(run)
    assert f"--resume PATH (there is {aside})" in (caught.value.hint or "")
    assert "--resume-adapter-file" not in (caught.value.hint or "")
    assert find(str(aside), run).step == 200
    for path in checkpoints_in(aside):
        shorten(path)
    with pytest.raises(CheckpointError) as caught:
        chosen(run)
    assert "there is" not in (caught.value.hint or "")


def test_one_that_is_whole_is_enough(run: Path) -> None:
    for path in checkpoints_in(run):
        shorten(path)
    step, notes = chosen(run)
    assert step == 100  # best
    assert notes.count("a damaged checkpoint is left out") == 2


# --- on a supervised restart ----------------------------------------------------------------------


def test_a_restart_with_its_own_all_damaged_begins_as_the_first_attempt_did(run: Path) -> None:
    damage_all(run)
    (run / RUN_NAME).write_text(RUN)
    for resume in ("auto", None):
        step, notes = chosen(run, resume, run_id=RUN, attempt=2)
        assert step is None
        assert notes.count("a damaged checkpoint is left out") == 3
        assert notes.endswith("so it starts again like the first time: from the beginning")
        assert "a new run begins" not in notes
    # The one that a person starts is refused nevertheless.
    with pytest.raises(CheckpointError):
        chosen(run, run_id=RUN, attempt=1)


def test_a_restart_goes_back_to_what_it_went_on_from(run: Path, tmp_path: Path) -> None:
    write(checkpoint_path(tmp_path / "old", 50), 50, run_id="old")
    damage_all(run)
    (run / RUN_NAME).write_text(RUN)
    step, notes = chosen(run, str(tmp_path / "old"), run_id=RUN, attempt=2)
    assert step == 50
    assert notes.endswith(f"like the first time: from {checkpoint_path(tmp_path / 'old', 50)}")


def test_a_restart_does_not_begin_anew_where_the_first_attempt_went_on(run: Path) -> None:
    """The run's own checkpoints and those that it went on from are in one directory: all are
    damaged now.
    """
    write(checkpoint_path(run, 50), 50, run_id="old")
    (run / RUN_NAME).write_text(RUN)
    damage_all(run)
    with pytest.raises(CheckpointError) as caught:
        chosen(run, run_id=RUN, attempt=2)
    assert caught.value.code == "checkpoints-all-damaged"
    # Nor if the first attempt has died before it came so far.
    shutil.rmtree(checkpoint_path(run, 50))
    (run / RUN_NAME).write_text("old")
    with pytest.raises(CheckpointError) as caught:
        chosen(run, run_id=RUN, attempt=2)
    assert caught.value.code == "checkpoints-all-damaged"


# --- before anything is started -------------------------------------------------------------------


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started, by name."""
    started: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: started.append(name) or 0

    monkeypatch.setattr("allhands.cluster.training.supervise_training", note("ranks"))
    monkeypatch.setattr("allhands.cluster.training.work", note("this process"))
    return started


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_resume_is_found_before_anything_is_started(
    ranks: int, run: Path, nothing_starts: list[str]
) -> None:
    def flags(resume: str, **more: Any) -> dict[str, Any]:
        return {
            "train": True,
            "num_ranks": ranks,
            "adapter_path": str(run),
            "resume": resume,
            **more,
        }

    with pytest.raises(CheckpointError) as caught:
        train(flags(str(run / "nowhere")))
    assert caught.value.code == "checkpoint-missing"
    assert caught.value.where == f"--resume {run / 'nowhere'}"
    shorten(checkpoint_path(run, 200))
    with pytest.raises(CheckpointError, match=SHORT):
        train(flags(str(checkpoint_path(run, 200))))
    damage_all(run)
    for resume in ("auto", str(run)):
        with pytest.raises(CheckpointError) as caught:
            train(flags(resume))
        assert caught.value.code == "checkpoints-all-damaged"
    assert nothing_starts == []
    # Which computer has the checkpoint is not known here; an adapter that is only tested goes on
    # from nothing.
    train(flags("auto", hostfile=str(run / "hosts")))
    train(flags("auto", train=False, test=True, num_ranks=1))
    train(flags("auto", adapter_path=str(run / "new")))
    assert len(nothing_starts) == 3


def test_the_look_before_the_start_reads_no_tensors(
    run: Path, nothing_starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(file: Path) -> str:
        raise AssertionError(file)

    monkeypatch.setattr(checkpoint_reading, "sum_of", unexpected)
    for resume in ("auto", str(run), str(checkpoint_path(run, 100))):
        train({"train": True, "num_ranks": 2, "adapter_path": str(run), "resume": resume})
    assert nothing_starts == ["ranks"] * 3
    with pytest.raises(AssertionError):
        find_latest(run)


# --- of another version ---------------------------------------------------------------------------


def of_an_earlier_version(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 2'))


def test_one_of_an_earlier_version_is_no_damage_and_its_weights_can_be_used(
    run: Path, tmp_path: Path
) -> None:
    damage_all(run, of_an_earlier_version)
    weights = checkpoint_path(run, 200) / "adapters.safetensors"
    for resume in (str(checkpoint_path(run, 200)), str(run), "auto"):
        with pytest.raises(CheckpointError, match="earlier version") as caught:
            chosen(run, resume)
        assert caught.value.exit_code == 9
        assert "damaged" not in caught.value.message
        assert f"--resume-adapter-file {weights}" in str(caught.value.hint)
    # One that can be read is taken, and the others are told.
    write(checkpoint_path(run, 50), 50)
    step, notes = chosen(run)
    assert step == 50
    assert "earlier version" in notes
