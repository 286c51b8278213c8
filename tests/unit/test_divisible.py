"""Numbers of blocks, heads and experts that options have to fit: refused before ranks start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands

from allhands.config.schema import build_config
from allhands.errors import AllhandsError
from allhands.model.divisible import require_divisible

_MODEL = {
    "model_type": "mixtral",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
}


def refused(
    directory: Path, ranks: int, options: dict[str, Any], **changed: Any
) -> tuple[str, int]:
    """The code and the exit code of the error; ("", 0) without one."""
    values = {name: one for name, one in (_MODEL | changed).items() if one is not None}
    (directory / "config.json").write_text(json.dumps(values))
    config = build_config({"train": True, "model": str(directory), **options})
    try:
        require_divisible(config, ranks)
    except AllhandsError as error:
        return error.code, error.exit_code
    return "", 0


@pytest.mark.parametrize(
    ("ranks", "options", "code"),
    [
        (2, {"strategy": "pipeline", "pp_split": "40,2"}, "pp-split-mismatch"),
        (2, {"strategy": "pipeline", "pp_split": "4,2"}, ""),
        (4, {"strategy": "pipeline", "pp": 2, "pp_split": "4,2"}, ""),
        (8, {"strategy": "pipeline"}, "stages-exceed-blocks"),
        (4, {"strategy": "pipeline", "pp_schedule": "interleaved"}, "stages-exceed-blocks"),
        (3, {"strategy": "pipeline", "pp_schedule": "interleaved"}, ""),
        (3, {"tp": 3}, "heads-not-divisible"),
        (4, {"tp": 4}, "heads-not-divisible"),
        (2, {"tp": 2}, ""),
        (4, {"ep": 4}, "experts-not-divisible"),
        (3, {"ep": 3}, ""),
        (2, {"num_layers": 7}, "value-out-of-range"),
        (2, {"num_layers": 6}, ""),
        (2, {"num_layers": -1}, ""),
        (4, {"strategy": "pipeline", "tp": 2, "pp_split": "40,2"}, "pp-split-mismatch"),
    ],
)
def test_numbers_of_the_model_are_compared_with_the_options(
    tmp_path: Path, ranks: int, options: dict[str, Any], code: str
) -> None:
    assert refused(tmp_path, ranks, options) == (code, 2 if code else 0)


def test_experts_of_a_model_without_any_are_not_divided(tmp_path: Path) -> None:
    found = refused(tmp_path, 2, {"ep": 2}, num_local_experts=None)
    assert found == ("model-without-experts", 4)


def test_numbers_that_are_not_told_are_left_to_the_ranks(tmp_path: Path) -> None:
    names = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"))
    for options in ({"tp": 3}, {"ep": 4}, {"num_layers": 70}):
        assert refused(tmp_path, 12, options, **names) == ("", 0)


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_the_command_refuses_it_with_one_message_and_starts_nothing(
    tmp_path: Path, verb: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MODEL))
    done = call_allhands(
        *(verb, "--model", tmp_path, "--data", tmp_path, "-n", "2"),
        *("--strategy", "pipeline", "--pp-split", "40,2"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2
    assert not list(tmp_path.rglob("logs"))


def test_the_shape_of_a_new_model_is_looked_at_too(tmp_path: Path) -> None:
    done = call_allhands(
        *("pretrain", "--data", tmp_path, "--tokenizer", tmp_path, "--shape", "llama-15m"),
        *("-n", "2", "--strategy", "pipeline", "--pp-split", "40,2"),
        cwd=tmp_path,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)
