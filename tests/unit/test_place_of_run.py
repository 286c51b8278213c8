"""A run's directory is none of its inputs, and holds no other program's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import allhands

# isort: split
import pytest
from command_line import call_allhands
from tiny import write_adapter

from allhands.config.schema import build_config
from allhands.errors import AllhandsError, ConfigError
from allhands.observe.metrics import METRICS_FILE
from allhands.observe.metrics.sinks import JsonlSink


def trained(model: Path, data: Path, place: Path, **more: Any) -> tuple[int, str]:
    """Exit code and code of the fault, with the message."""
    options = {
        "iters": 1,
        "batch_size": 2,
        "val_batches": 0,
        "max_seq_length": 64,
        "progress": False,
        **more,
    }
    try:
        allhands.finetune(model=str(model), data=str(data), adapter_path=str(place), **options)
    except AllhandsError as error:
        return error.exit_code, f"{error.code}: {error.message}"
    return 0, ""


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("below", ["", "runs/first"])
@pytest.mark.parametrize("inputs", ["model", "data"])
def test_a_run_in_the_directory_of_what_it_reads_is_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, inputs: str, below: str
) -> None:
    place = (tiny_model if inputs == "model" else tiny_data) / below
    before = files_of(tiny_model) | files_of(tiny_data)
    code, text = trained(tiny_model, tiny_data, place)
    assert (code, text.partition(":")[0]) == (2, "output-place-unsuitable")
    several = call_allhands(
        "train", "-n", "2", "--model", tiny_model, "--data", tiny_data, "--adapter-path", place
    )
    assert several.returncode == 2
    (tmp_path / "link").symlink_to(place)
    assert trained(tiny_model, tiny_data, tmp_path / "link")[0] == 2
    assert files_of(tiny_model) | files_of(tiny_data) == before
    # Beside them is well.
    assert trained(tiny_model, tiny_data, tmp_path / "beside")[0] == 0


def test_a_model_that_would_be_set_aside_is_not_trained_into_its_run(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(tiny_model)
    (run / "other").symlink_to(tiny_model)
    copied = tmp_path / "pretrained" / "model"
    copied.mkdir(parents=True)
    for path in tiny_model.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    assert trained(copied, tiny_data, copied.parent)[0] == 2
    assert trained(copied, tiny_data, copied.parent / "adapters")[0] == 0


PEFT = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", json.dumps(PEFT)),
        ("adapter_model.safetensors", "weights"),
        ("trainer_state.json", "{}"),
        (METRICS_FILE, '{"step": 1, "loss": 2.0}\n'),
        ("loss.png", "a picture"),
        ("checkpoints/epoch-1.pt", "weights"),
        ("best/weights.pt", "weights"),
    ],
)
def test_another_programs_files_are_left_alone(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, name: str, content: str
) -> None:
    file = tmp_path / "place" / name
    file.parent.mkdir(parents=True)
    file.write_text(content)
    code, text = trained(tiny_model, tiny_data, tmp_path / "place")
    assert (code, text.partition(":")[0]) == (2, "place-taken")
    assert name.partition("/")[0] in text
    assert files_of(tmp_path / "place") == {file: content.encode()}


def test_a_model_in_the_place_of_a_run(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny_model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    before = files_of(other)
    assert trained(tiny_model, tiny_data, other)[0] == 2
    assert files_of(other) == before


def test_what_runs_and_people_leave_is_no_hindrance(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "config.json").write_text("{}")
    assert trained(tiny_model, tiny_data, place)[0] == 0
    assert trained(tiny_model, tiny_data, place)[0] == 0
    assert trained(tiny_model, tiny_data, place, iters=2, resume="auto")[0] == 0
    (place / METRICS_FILE).write_text('{"event": "trai')  # torn by a kill
    assert trained(tiny_model, tiny_data, place)[0] == 0
    # A run that ended before its first step.
    (place / METRICS_FILE).unlink()
    JsonlSink(place / METRICS_FILE).close()
    assert trained(tiny_model, tiny_data, place)[0] == 0
    # An adapter of mlx_lm's is kept as one of ours.
    theirs = write_adapter(tiny_model, tmp_path / "theirs")
    (theirs / "loss.png").write_bytes(b"")
    weights = (theirs / "adapters.safetensors").read_bytes()
    assert trained(tiny_model, tiny_data, theirs)[0] == 0
    assert weights in files_of(theirs).values()


def test_who_evaluates_writes_nothing_there(tiny_model: Path, tiny_data: Path) -> None:
    from allhands.checkpoints.place import require_place_of_run

    asked = {"model": str(tiny_model), "data": str(tiny_data), "adapter_path": str(tiny_model)}
    require_place_of_run(build_config({**asked, "train": False, "test": True}))
    with pytest.raises(ConfigError):
        require_place_of_run(build_config({**asked, "train": True}))
