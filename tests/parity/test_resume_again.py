"""A run that is resumed after its end, or again and again: nothing is written twice, counted twice
or begun anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_resume import BATCHES, STEPS, Killed, content, options, train
from tiny import write_chat_data, write_model

from allhands.config.schema import build_config
from allhands.errors import CheckpointError, ConfigError, DataError, Interrupted
from allhands.observe.metrics import read_metrics
from allhands.run.session import RunContext, run_finetune

ADAPTER = ("adapters.safetensors", "adapter_config.json")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("again")
    return write_model(root / "model", layers=2), write_chat_data(
        root / "data", train=11, valid=4, longest=30
    )


@pytest.fixture
def flags(sources: tuple[Path, Path], tmp_path: Path) -> dict[str, Any]:
    return options(*sources, tmp_path / "run")


def written(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every checkpoint and adapter: which file it is, when it was written, and its bytes."""
    files = [
        *directory.glob("checkpoints/*/*"),
        *directory.glob("best/*"),
        *directory.glob("*adapter*.*"),
    ]
    facts = {str(file.relative_to(directory)): file.stat() for file in files}
    return {
        name: (at.st_ino, at.st_mtime_ns, (directory / name).read_bytes())
        for name, at in facts.items()
    }


def saved(directory: Path) -> list[int]:
    """Steps of which something was written, over all starts."""
    return [r["step"] for r in records(directory) if r["event"] == "saved"]


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_has_nothing_left_to_do(flags: dict[str, Any]) -> None:
    """What it has written stays as it is, and what need not be kept any more stays, too."""
    directory = train(flags, keep_last=3)
    before, told, files = content(directory), saved(directory), written(directory)
    assert (
        len(files) == 3 * 5 + 5 + 4 + 2
    )  # three checkpoints, the best, the numbered ones, the adapter to use
    assert content(train(flags, resume="auto", keep_last=1)) == before
    assert written(directory) == files
    assert saved(directory) == told
    last = directory / "checkpoints" / f"step-{STEPS:07d}"
    assert content(train(flags, resume=str(last))) == before
    assert written(directory) == files


def test_of_a_finished_run_only_what_is_missing_or_wrong_is_written(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    directory = train(flags)
    before, files = content(directory), written(directory)
    numbered = f"{BATCHES:07d}_adapters.safetensors"
    (directory / numbered).unlink()
    (directory / "adapters.safetensors").write_bytes(b"another run's")
    assert content(train(flags, resume="auto")) == before
    again = written(directory)
    assert {name for name in files if again[name] != files[name]} == {numbered, *ADAPTER}
    assert all(again[name][2] == files[name][2] for name in files if name.endswith(".safetensors"))
    assert saved(directory)[-1] == STEPS
    # Into another directory all of it.
    assert (
        content(train(flags, resume=str(directory), adapter_path=str(tmp_path / "other"))) == before
    )
    assert {f"checkpoints/step-{STEPS:07d}/state.json", numbered, *ADAPTER} <= written(
        tmp_path / "other"
    ).keys()


def test_a_finished_run_goes_on_with_more_batches(flags: dict[str, Any]) -> None:
    flags |= {"lr_schedule": None, "warmup_steps": 0}
    directory = train(flags, iters=6)
    files = written(directory)
    train(flags, resume="auto")
    assert written(directory)["adapters.safetensors"][2] != files["adapters.safetensors"][2]
    assert (directory / "checkpoints" / f"step-{STEPS:07d}").is_dir()


def test_the_time_of_all_starts_is_counted(
    flags: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the checkpoint; what was lost with a start is not in the weights, and not in their
    time.
    """
    from rich.console import Console

    with pytest.raises(Interrupted):
        train(flags, stop_at=3)
    directory = Path(flags["adapter_path"])
    first = json.loads((max(directory.glob("checkpoints/step-*")) / "state.json").read_text())[
        "elapsed_s"
    ]
    assert 0 < first < read_metrics(directory).ended.total_time_s  # type: ignore[union-attr]
    run_finetune(build_config(flags | {"resume": "auto"}), RunContext(console=Console(width=400)))
    starts = [r["elapsed_s"] for r in records(directory) if r["event"] == "started"]
    assert starts == [0.0, first]
    last = [r["total_time_s"] for r in records(directory) if r["event"] == "ended"][-1]
    ended = read_metrics(directory).ended
    assert ended is not None
    assert ended.total_time_s == pytest.approx(first + last)
    assert "since the last start)" in capsys.readouterr().out
    second = json.loads((max(directory.glob("checkpoints/step-*")) / "state.json").read_text())[
        "elapsed_s"
    ]
    assert first < second < first + last


def test_steps_that_are_trained_again_are_twice_in_the_file_and_count_once(
    flags: dict[str, Any],
) -> None:
    flags |= {"grad_accumulation_steps": 1, "steps_per_report": 1, "save_every": 4}
    with pytest.raises(Killed):
        train(flags, kill_at=7)
    lost = records(Path(flags["adapter_path"]))
    # As if the start that was lost had seen other losses: the curve must show those of the weights
    # that are there.
    for record in lost:
        record["loss"] = (
            99.0 if record["event"] == "train" and record["step"] > 4 else record.get("loss")
        )
    text = "".join(json.dumps(record) + "\n" for record in lost)
    (Path(flags["adapter_path"]) / "metrics.jsonl").write_text(text)
    directory = train(flags, resume="auto")
    steps = [r["step"] for r in records(directory) if r["event"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10, 11]
    history = read_metrics(directory)
    assert [report.step for report in history.train] == list(range(1, BATCHES + 1))
    assert max(report.loss for report in history.train) < 99.0


def test_if_all_are_damaged_nothing_is_begun_or_moved(flags: dict[str, Any]) -> None:
    directory = train(flags, iters=6)
    for file in [
        *directory.glob("checkpoints/*/optimizer.safetensors"),
        directory / "best/optimizer.safetensors",
    ]:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    files, curve = written(directory), (directory / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* is whole"):
        train(flags, resume="auto")
    assert written(directory) == files
    assert (directory / "metrics.jsonl").read_bytes() == curve
    train(flags)  # as the error advises
    assert {f"checkpoints.1/{name}" for name in ("step-0000003", "step-0000002")} == {
        str(path.relative_to(directory)) for path in directory.glob("checkpoints.1/*")
    }


def test_a_chat_template_that_was_given_is_asked_for_again(flags: dict[str, Any]) -> None:
    """By name, or as the checkpoint holds it: both are what was trained with."""
    flags = {**flags, "warmup_steps": 0, "save_every": 2}
    directory = train(flags, chat_template="zephyr", iters=2)
    with pytest.raises(ConfigError) as told:
        train(flags, iters=4, resume="auto")
    kept = directory / "checkpoints" / "step-0000001" / "chat_template.jinja"
    assert told.value.where == "--chat-template"
    assert str(kept) in (told.value.hint or "")
    train(flags, iters=4, resume="auto", chat_template=str(kept))
    train(flags, iters=6, resume="auto", chat_template="zephyr")
    with pytest.raises(DataError):
        train(flags, iters=8, resume="auto", chat_template="chatml")
    assert [report.step for report in read_metrics(directory).train][-1] == 3
