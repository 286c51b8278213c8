"""What a new run does with the files of the one before: all set aside, under one number, and told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_checkpoints import write
from twins import ThreadCommunicator, run_ranks

from allhands.checkpoints import checkpoint_path, checkpoints_in, find
from allhands.checkpoints.resuming import Restored, receive
from allhands.checkpoints.rundir import kept_as, make_room
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import build_config
from allhands.errors import ModelError
from allhands.run.context import RunContext
from allhands.run.starting import starting_weights

FILES = (
    "metrics.jsonl",
    "loss.png",
    "0000200_adapters.safetensors",
    "0000400_adapters.safetensors",
)
ANSWERS = "answers.json"
ADAPTER = ("adapters.safetensors", "adapter_config.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """All that a run leaves, and a file of a person's."""
    directory = tmp_path / "run"
    for step in (100, 200):
        write(checkpoint_path(directory, step), step)
    write(directory / "best", 100)
    fill(directory, "old")
    (directory / "notes.txt").write_text("mine")
    return directory


def fill(directory: Path, text: str) -> None:
    for name in (*FILES, *ADAPTER, ANSWERS):
        (directory / name).write_text(f"{text} {name}")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def restored(path: Path, step: int) -> Restored:
    return Restored(
        {"step": step, "iteration": 2 * step}, {}, {}, str(path.resolve()), "old", own=True
    )


def test_a_new_run_sets_everything_aside_under_one_number(run: Path) -> None:
    (note,) = make_room(run, None, "new")
    kept = [
        "adapters.1",
        "answers.1.json",
        "best.1",
        "checkpoints.1",
        "loss.1.png",
        "metrics.1.jsonl",
    ]
    # The adapter to use stays until there is a new one; what is not of a run is not touched.
    assert names(run) == sorted([".run", *ADAPTER, "notes.txt", *kept])
    assert names(run / "adapters.1") == list(FILES[2:])
    assert (run / "adapters.1" / FILES[2]).read_text() == f"old {FILES[2]}"
    assert (run / "metrics.1.jsonl").read_text() == "old metrics.jsonl"
    assert "\n" not in note
    assert all(name in note for name in kept)
    assert note.endswith(f"to go on from it: --resume {run / 'checkpoints.1'}")
    assert (run / "adapters.1").stat().st_mode & 0o777 == 0o700


def test_the_next_one_has_the_next_number_for_all(run: Path) -> None:
    make_room(run, None, "new")
    fill(run, "newer")  # without checkpoints: it died early
    (run / "best.7").mkdir()
    make_room(run, None, "newest")
    assert (run / "metrics.8.jsonl").read_text() == "newer metrics.jsonl"
    assert names(run / "adapters.8") == sorted([*ADAPTER, *FILES[2:]])
    assert not list(run.glob("*.2*"))


def test_a_restart_and_a_resumed_run_keep_all(run: Path) -> None:
    before = names(run)
    assert make_room(run, restored(checkpoint_path(run, 200), 200), "new") == []
    assert names(run) == sorted([*before, ".run"])
    (run / "more").touch()
    assert make_room(run, None, "new") == []
    assert names(run) == sorted([*before, ".run", "more"])


def test_a_copy_at_another_path_is_the_runs_own_too(run: Path, tmp_path: Path) -> None:
    """Computers work in directories of their own: what rank 0 goes on from has another path on
    each.
    """
    elsewhere = shutil.copytree(run, tmp_path / "home" / "work" / "run")
    before = names(run)
    found = find(str(run), run)

    def go_on(communicator: ThreadCommunicator) -> list[str]:
        directory = elsewhere if communicator.rank else run
        restored = receive(communicator, None if communicator.rank else found, directory)
        return make_room(directory, restored, "new")

    assert run_ranks(2, go_on) == [[], []]
    assert names(run) == names(elsewhere) == sorted([*before, ".run"])
    assert [path.name for path in checkpoints_in(elsewhere)] == ["step-0000200", "step-0000100"]


@pytest.mark.parametrize("place", ["elsewhere", "aside"])
def test_what_is_not_gone_on_from_is_set_aside_on_every_computer(
    place: str, run: Path, tmp_path: Path
) -> None:
    """Rank 0 goes on from another directory, or from what was set aside: that holds for the copies,
    too.
    """
    copy = shutil.copytree(run, tmp_path / "home" / "run")
    source = shutil.copytree(run / "checkpoints", tmp_path / "old" / "checkpoints")
    if place == "aside":
        make_room(run, None, "between")
        make_room(copy, None, "between")
        source = run / "checkpoints.1"
        for directory in (run, copy):
            write(checkpoint_path(directory, 50), 50)
    found = find(str(source / "step-0000200"), run)

    def go_on(communicator: ThreadCommunicator) -> list[str]:
        directory = copy if communicator.rank else run
        restored = receive(communicator, None if communicator.rank else found, directory)
        return make_room(directory, restored, "new")

    notes = run_ranks(2, go_on)
    number = 2 if place == "aside" else 1
    assert all(f"checkpoints.{number}" in note[0] for note in notes if isinstance(note, list)), (
        notes
    )
    assert checkpoints_in(run) == checkpoints_in(copy) == []
    assert len(checkpoints_in(copy / f"checkpoints.{number}")) == (1 if place == "aside" else 2)


def test_of_a_branch_that_is_left_the_numbered_adapters_are_kept_too(run: Path) -> None:
    make_room(run, restored(checkpoint_path(run, 100), 100), "new")
    assert [path.name for path in checkpoints_in(run)] == ["step-0000100"]
    assert names(run / "checkpoints.1") == ["step-0000200"]
    assert names(run / "adapters.1") == ["0000400_adapters.safetensors"]
    assert (run / "0000200_adapters.safetensors").exists()
    assert (run / "metrics.jsonl").exists()


def test_damaged_checkpoints_are_not_recommended(run: Path) -> None:
    for path in checkpoints_in(run):
        (path / "state.json").unlink()
    (note,) = make_room(run, None, "new")
    assert "--resume" not in note
    assert note.endswith("none of its checkpoints is whole")


@pytest.mark.parametrize("links", [True, False])
def test_an_adapter_that_no_checkpoint_holds_outlives_the_new_one(
    links: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mlx_lm leaves it, whose last one has no number if it was not due."""

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    shutil.rmtree(run / "checkpoints")
    make_room(run, None, "new")
    for name in ADAPTER:
        (run / name).with_suffix(".draft").write_text("new")
        (run / name).with_suffix(".draft").replace(run / name)
    assert {name: (run / "adapters.1" / name).read_text() for name in ADAPTER} == {
        n: f"old {n}" for n in ADAPTER
    }
    assert names(run / "adapters.1") == sorted([*ADAPTER, *FILES[2:]])


def test_one_that_has_another_name_already_is_not_kept_again(run: Path) -> None:
    """A new run that dies before its first save, and another one after it."""
    shutil.rmtree(run / "checkpoints")
    make_room(run, None, "one")
    assert make_room(run, None, "two") == []
    assert not (run / "adapters.2").exists()
    assert (run / "adapters.safetensors").read_text() == "old adapters.safetensors"


# --- weights to start from that were set aside ----------------------------------------------------


STARTS = (
    "0000200_adapters.safetensors",
    "best/adapters.safetensors",
    "checkpoints/step-0000200/adapters.safetensors",
)


@pytest.mark.parametrize("start", STARTS)
def test_a_restart_starts_from_the_same_weights(start: str, run: Path) -> None:
    """The first attempt has set them aside; what is in their place now is the new run's."""
    config = build_config(
        {"train": True, "adapter_path": str(run), "resume_adapter_file": str(run / start)}
    )
    content = (run / start).read_bytes()
    first = starting_weights(config, run, RunContext(run_id="new"))
    assert first == run / start
    make_room(run, None, "new")
    second = starting_weights(config, run, RunContext(run_id="new", attempt=2))
    assert second is not None
    assert second.read_bytes() == content
    (run / start).parent.mkdir(parents=True, exist_ok=True)
    (run / start).write_text("the new run's")
    assert (
        starting_weights(config, run, RunContext(run_id="new", attempt=3))
        == second
        == kept_as(run, run / start)
    )
    # For another run it is the file of that name.
    assert starting_weights(config, run, RunContext(run_id="other", attempt=2)) == run / start
    assert starting_weights(config, run, RunContext(run_id="new")) == run / start


def test_a_person_is_told_where_they_are_now(run: Path) -> None:
    start = run / STARTS[0]
    config = build_config(
        {"train": True, "adapter_path": str(run), "resume_adapter_file": str(start)}
    )
    make_room(run, None, "new")
    with pytest.raises(ModelError) as caught:
        starting_weights(config, run, RunContext())
    assert caught.value.code == "adapter-missing"
    assert f"--resume-adapter-file {run / 'adapters.1' / STARTS[0]}" in (caught.value.hint or "")
    missing = config.model_copy(update={"resume_adapter_file": str(run.parent / "nowhere")})
    with pytest.raises(ModelError) as caught:
        starting_weights(missing, run, RunContext())
    assert caught.value.code == "adapter-missing"
    assert (
        caught.value.hint == "give the adapters.safetensors, or a numbered one, of an earlier run"
    )
    fresh = PretrainConfig(
        tokenizer="t",
        data="d",
        adapter_path=str(run),
        resume_adapter_file=str(run.parent / "nowhere"),
    )
    with pytest.raises(ModelError) as caught:
        starting_weights(fresh, run, RunContext())
    assert caught.value.code == "adapter-missing"
    assert caught.value.hint == "give the model.safetensors of an earlier run"
