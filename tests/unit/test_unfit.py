"""Weights that do not fit what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import run_allhands, write_adapter, write_model


@pytest.mark.slow
def test_all_commands_say_the_same_of_an_adapter_of_another_model(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    run = write_adapter(tiny_model, tmp_path / "a1")
    others = {
        "two": write_model(tmp_path / "two", layers=2),
        "wider": write_model(tmp_path / "wider", hidden=64),
    }
    for other in others.values():
        done = run_allhands("eval", "--model", other, "--data", tiny_data, "--adapter-path", run)
        assert done.returncode == 4, done.stderr
        assert f"{run}: the adapter does not fit the model: " in done.stderr
        assert (
            "use the model that the adapter was trained on (see adapter_config.json)" in done.stderr
        )
        assert "--num-layers" not in done.stderr
    words = [
        "train",
        "--train",
        "--data",
        tiny_data,
        "--iters",
        "1",
        "--adapter-path",
        tmp_path / "new",
    ]
    done = run_allhands(
        *words,
        "--model",
        others["wider"],
        "--num-layers",
        "-1",
        "--resume-adapter-file",
        run / "adapters.safetensors",
    )
    assert done.returncode == 4
    assert (
        "use the options that the file of --resume-adapter-file was made with: --model"
        in done.stderr
    )
