"""``allhands checkpoint list|inspect|verify``: what a person reads, what a machine reads, exit
codes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from test_checkpoints import RUN, flip, write
from typer.testing import CliRunner

from allhands.checkpoints import (
    Tensor,
    checkpoint_path,
    checkpoints_in,
    open_checkpoint,
    write_checkpoint,
)
from allhands.cli.commands import function_of
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig
from allhands.errors import CheckpointError

STATE = {
    "iteration": 400,
    "epoch": 1.25,
    "trained_tokens": 1_234_567,
    "best_loss": 1.23456,
    "best_step": 300,
    "elapsed_s": 200.0,
    "world_size": 2,
    "model": {"path": "models/tiny", "fingerprint": "f00dcafe" * 8},
    "data": {"train": "0123456789abcdef", "valid": "fedcba9876543210", "test": None},
    "versions": {"allhands": "0.1.0", "mlx": "0.32.1"},
    "config": TrainConfig.model_validate({"batch_size": 8, "seed": 5}).model_dump(mode="json")
    | {"new_option": [1]},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with three checkpoints and the best one."""
    monkeypatch.chdir(tmp_path)
    path = Path("adapters")
    for step in (100, 200, 300):
        write(checkpoint_path(path, step), step)
    write(path / "best", 200)
    return path


list_checkpoints = function_of("runs.CheckpointList checkpoint:list_checkpoints")
inspect_checkpoint = function_of("runs.CheckpointInspect checkpoint:inspect_checkpoint")
verify_checkpoints = function_of("runs.CheckpointVerify checkpoint:verify_checkpoints")


def invoke(function: Callable[..., None], *arguments: str | Path) -> tuple[int, str]:
    """Exit code and output; errors come as they are."""
    app = typer.Typer(rich_markup_mode=None)
    app.command()(function)
    done = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.exit_code, done.output


def rows(text: str) -> list[str]:
    """The lines without their padding, continued ones joined."""
    joined: list[str] = []
    for line in text.splitlines():
        if line.startswith(" " * 20) and line.strip():
            joined[-1] += " " + line.strip()
        else:
            joined.append(" ".join(line.split()))
    return joined


def test_a_list_says_when_how_large_and_which_is_the_latest(run: Path) -> None:
    code, text = invoke(list_checkpoints)
    assert code == 0
    head, names, *table = rows(text)
    assert head == "adapters"
    assert names == "step when size run state"
    found = open_checkpoint(checkpoint_path(run, 300))
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.time))
    size = sum(file.stat().st_size for file in found.path.iterdir() if file.name != "manifest.json")
    assert size < 1000
    assert table[0] == f"300 {when} {size} B {RUN[:8]} whole, latest"
    assert [row.split()[0] for row in table] == ["300", "200", "200", "100"]
    assert [row.partition(RUN[:8])[2] for row in table[1:]] == [" whole", " whole, best", " whole"]
    assert max(map(len, text.splitlines())) <= 80


def test_a_list_names_what_is_damaged_or_misnamed(run: Path) -> None:
    flip(checkpoint_path(run, 300) / "optimizer.safetensors", -1)
    (checkpoint_path(run, 100) / "manifest.json").unlink()
    checkpoint_path(run, 200).rename(checkpoint_path(run, 900))
    code, text = invoke(list_checkpoints, run)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    table = rows(text)[2:]
    assert "damaged: step-0000300/optimizer.safetensors: its SHA-256 sum is wrong" in table[0]
    assert table[1].endswith("whole, latest, in step-0000900")
    assert table[2].endswith("whole, best")
    assert "damaged: step-0000100/manifest.json: it is missing" in table[3]
    # Sizes alone: that byte is not noticed, and the list does not say that it is whole.
    table = rows(invoke(list_checkpoints, run, "--quick")[1])[2:]
    assert table[0].endswith("sizes are right, latest")
    assert "whole" not in " ".join(table)


def test_what_is_no_checkpoint_is_one_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (run / "adapters.safetensors").touch()
    cases = {
        tmp_path / "empty": "it holds no checkpoint",
        tmp_path / "nowhere": "there is no such file or directory",
        run / "adapters.safetensors": "this file does not belong to a checkpoint",
    }
    for function in (list_checkpoints, verify_checkpoints, inspect_checkpoint):
        for path, message in cases.items():
            with pytest.raises(CheckpointError, match=message) as caught:
                invoke(function, path)
            assert caught.value.where == str(path)
            assert caught.value.hint
            assert caught.value.exit_code == 9


@pytest.mark.parametrize("file", [None, "manifest.json", "state.json"])
def test_one_checkpoint_alone(file: str | None, run: Path) -> None:
    """Its directory, or a file in it."""
    path = checkpoint_path(run, 200)
    given = path / file if file else path
    for function in (list_checkpoints, verify_checkpoints):
        code, text = invoke(function, given)
        assert code == 0
        head, names, *table = rows(text)
        assert (head, names) == (str(path), "step when size run state")
        assert [row.split()[0] for row in table] == ["200"]
        # Whether it is the latest, and what --resume would take, is a question about a run.
        assert table[0].endswith(f"{RUN[:8]} whole")
    assert invoke(inspect_checkpoint, given) == invoke(inspect_checkpoint, path)
    assert invoke(list_checkpoints, run / "best")[1].count("\n") == 3
    flip(path / "optimizer.safetensors", -1)
    for function in (list_checkpoints, verify_checkpoints):
        code, text = invoke(function, given)
        assert code == 9
        assert "damaged: step-0000200/optimizer.safetensors: its SHA-256 sum" in " ".join(
            text.split()
        )
    assert invoke(verify_checkpoints, checkpoint_path(run, 100))[0] == 0


def test_one_without_a_manifest(run: Path) -> None:
    path = checkpoint_path(run, 200)
    (path / "manifest.json").unlink()
    for function in (list_checkpoints, verify_checkpoints):
        code, text = invoke(function, path)
        assert code == 9
        assert "damaged: step-0000200/manifest.json: it is missing" in text


def test_a_list_without_a_whole_one_is_9(run: Path) -> None:
    for path in checkpoints_in(run):
        flip(path / "optimizer.safetensors", -1)
    assert invoke(list_checkpoints, run)[0] == 0  # best is whole
    flip(run / "best" / "state.json", -3)
    code, text = invoke(list_checkpoints, run)
    assert code == 9
    table = rows(text)[2:]
    assert [row.split()[0] for row in table] == ["300", "200", "200", "100"]
    assert all("damaged: " in row for row in table)
    assert "latest" not in text
    assert invoke(list_checkpoints, run, "--quick")[0] == 0


def test_verify_is_9_if_any_is_damaged_and_says_what_resume_takes(run: Path) -> None:
    code, text = invoke(verify_checkpoints)
    assert code == 0
    assert rows(text)[-2:] == [
        "0 of 4 damaged; --resume would take step 300:",
        str(checkpoint_path(run, 300)),
    ]
    flip(checkpoint_path(run, 300) / "state.json", 0)
    code, text = invoke(verify_checkpoints, run)
    assert code == CheckpointError.exit_code == 9
    assert "damaged: step-0000300/state.json" in " ".join(text.split())
    assert rows(text)[-2:] == [
        "1 of 4 damaged; --resume would take step 200:",
        str(checkpoint_path(run, 200)),
    ]
    for path in [*checkpoints_in(run), run / "best"]:
        (path / "optimizer.safetensors").write_bytes(b"")
    code, text = invoke(verify_checkpoints, run)
    assert code == 9
    assert rows(text)[-1] == "4 of 4 damaged; --resume would take nothing"


def layers(number: int) -> list[Tensor]:
    data = np.zeros((4, 2), dtype=np.uint16).tobytes()
    found = [Tensor(f"model.layers.{i}.q_proj.lora_a", "BF16", (4, 2), data) for i in range(number)]
    return [*found, Tensor("step", "U64", (), bytes(8))]


@pytest.fixture
def full(run: Path) -> Path:
    target = checkpoint_path(run, 400)
    files = {"adapters.safetensors": layers(12)}
    return write_checkpoint(target, 400, RUN, STATE, files, {"adapter_config.json": "{}"}).path


def test_inspect_shows_what_a_checkpoint_holds(run: Path, full: Path) -> None:
    code, text = invoke(inspect_checkpoint, full)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == str(full)
    for line in (
        "step 400",
        "epoch 1.25",
        "trained tokens 1.23 M",
        "best loss 1.235 at step 300",
        f"run {RUN}",
        "trained for 3m20s",
        "ranks 2",
        "model models/tiny",
        "its fingerprint f00dcafe",
        "data train 01234567, valid fedcba98",
        "versions allhands 0.1.0, mlx 0.32.1",
        "model.layers.*.q_proj.lora_a 12 of BF16 4x2",
        "step 1 of U64 one number",
    ):
        assert line in lines, line
    begin = lines.index("settings that differ from the defaults")
    assert lines[begin + 1 : begin + 4] == ["batch_size 8", "new_option [1]", "seed 5"]
    assert lines[begin + 4] == ""
    # Of a run's directory it is the latest one.
    assert invoke(inspect_checkpoint) == (code, text)


def test_inspect_of_a_new_model_compares_with_the_defaults_of_pretraining(run: Path) -> None:
    config = PretrainConfig.model_validate({"tokenizer": "words", "data": "stories", "layers": 2})
    state = {**STATE, "config": config.model_dump(mode="json")}
    made = write_checkpoint(
        checkpoint_path(run, 400), 400, RUN, state, {}, {"adapter_config.json": "{}"}
    )
    code, text = invoke(inspect_checkpoint, made.path)
    assert code == 0
    lines = [" ".join(line.split()) for line in text.splitlines()]
    begin = lines.index("settings that differ from the defaults")
    assert lines[begin + 1 : begin + 5] == ['data "stories"', "layers 2", 'tokenizer "words"', ""]
    assert "tokenizer models/tiny" in lines


def test_inspect_for_machines(full: Path) -> None:
    code, text = invoke(inspect_checkpoint, full, "--json")
    assert code == 0
    told = json.loads(text)
    found = open_checkpoint(full)
    assert told.keys() == {
        "path",
        "step",
        "iteration",
        "run_id",
        "time",
        "state",
        "files",
        "arrays",
        "digest",
    }
    assert (told["path"], told["step"], told["run_id"], told["digest"]) == (
        str(full),
        400,
        RUN,
        found.digest,
    )
    assert told["state"] == STATE
    assert told["files"].keys() == found.files.keys()
    weights = told["files"]["adapters.safetensors"]
    assert weights["sha256"] == found.files["adapters.safetensors"].sha256
    assert len(told["arrays"]) == 13
    assert told["arrays"][-1] == {
        "name": "adapters.step",
        "shape": [],
        "dtype": "U64",
        "slices": [{"file": "adapters.safetensors", "key": "step", "start": [], "shape": []}],
    }


def test_inspect_refuses_a_damaged_one(run: Path) -> None:
    flip(checkpoint_path(run, 300) / "state.json", 0)
    with pytest.raises(CheckpointError, match=r"state\.json: the checkpoint is damaged"):
        invoke(inspect_checkpoint, checkpoint_path(run, 300))


ODD: list[dict[str, Any]] = [
    {},
    dict.fromkeys(STATE),
    {key: [1, {"a": "b"}] for key in STATE},
    dict.fromkeys(STATE, "\x1b[31m[red]x[/red]\n"),
    {key: {"path": "\x1b[31m", "a": "[bold]"} for key in STATE},
]


@pytest.mark.parametrize("state", ODD, ids=range(len(ODD)))
def test_whatever_the_state_holds_is_shown_and_steers_nothing(
    state: dict[str, Any], run: Path
) -> None:
    tensor = Tensor("a\x1b[0m[b]", "U8", (1,), b"1")
    write_checkpoint(
        checkpoint_path(run, 500), 500, "\x1b[31m[x]", state, {"w.safetensors": [tensor]}
    )
    for function in (inspect_checkpoint, list_checkpoints, verify_checkpoints):
        code, text = invoke(function)
        assert code == 0
        assert "\x1b" not in text
        assert "?[31m[x]" in text
    assert "a?[*m[b]" in invoke(inspect_checkpoint)[1]


def test_a_list_needs_neither_mlx_nor_numpy(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from allhands.cli.checkpoint import list_checkpoints as l\n"
        "from allhands.cli.verbs_runs import CheckpointList as A\n"
        "l(A(Path('adapters'))); print(sorted({'mlx', 'mlx.core', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
