"""Weights that do not fit what is trained: the option that is named is the one that differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import run_allhands, write_adapter, write_model

from allhands.model.unfit import Shapes, difference, remedy, remedy_of_new

RANK = """use the rank that the file was made with: --lora-parameters '{"rank": 8}'"""
KEYS = "use the keys of --lora-parameters that the file was made with"


def adapter(
    *blocks: int, rank: int = 8, dims: int = 32, keys: tuple[str, ...] = ("q_proj",), dora: bool = False
) -> Shapes:
    found: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        for key in keys:
            name = f"model.layers.{block}.self_attn.{key}"
            found |= {f"{name}.lora_a": (dims, rank), f"{name}.lora_b": (rank, dims)}
            found |= {f"{name}.m": (dims,)} if dora else {}
    return found


def whole(blocks: int, *, dims: int = 32, rows: int = 259, tied: bool = True) -> Shapes:
    found = {"model.embed_tokens.weight": (rows, dims), "model.norm.weight": (dims,)}
    found |= {} if tied else {"lm_head.weight": (rows, dims)}
    return found | {f"model.layers.{n}.mlp.up_proj.weight": (64, dims) for n in range(blocks)}


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (adapter(0, 1), adapter(0, 1, 2, 3), "use the --model that the file was trained on"),
        (adapter(2, 3), adapter(0, 1, 2, 3), "use the --num-layers that the file was made with: 4"),
        (adapter(0, 1, 2, 3), adapter(3), "use the --num-layers that the file was made with: 1"),
        (adapter(0, 1, dims=64), adapter(0, 1), "use the --model that the file was trained on"),
        (
            adapter(0, rank=4),
            adapter(0),
            RANK,
        ),
        (adapter(0), adapter(0, dora=True), "use the --fine-tune-type that the file was made with"),
        (adapter(0), whole(1), "use the --fine-tune-type that the file was made with"),
        (whole(2, dims=64), whole(2), "use the --model that the file was trained on"),
        (
            adapter(0, keys=("q_proj", "k_proj")),
            adapter(0),
            KEYS,
        ),
    ],
)
def test_of_a_fine_tuning(here: Shapes, there: Shapes, words: str) -> None:
    found = difference(here, there)
    assert found is not None
    assert remedy(here, there, found[1]) == words
    assert difference(here, here) is None


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (whole(2), whole(3), "use the --layers that the file was made with: 3"),
        (whole(3), whole(2), "use the --layers that the file was made with: 2"),
        (whole(2), whole(2, dims=64), "use the --shape that the file was made with, with its --dims, --mlp-dims"),
        (
            whole(2),
            whole(2, rows=300),
            "use the --tokenizer that the file was made with, or its --vocabulary (300 rows in the file)",
        ),
        (whole(2), whole(2, tied=False), "use the --shape that the file was made with, with its --experts and --tied"),
    ],
)
def test_of_a_pre_training(here: Shapes, there: Shapes, words: str) -> None:
    found = difference(here, there)
    assert found is not None
    assert remedy_of_new(here, there, found[1]).startswith(words)


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
        assert "use the model that the adapter was trained on (see adapter_config.json)" in done.stderr
        assert "--num-layers" not in done.stderr
    words = ["train", "--train", "--data", tiny_data, "--iters", "1", "--adapter-path", tmp_path / "new"]
    done = run_allhands(
        *words, "--model", others["wider"], "--num-layers", "-1", "--resume-adapter-file", run / "adapters.safetensors"
    )
    assert done.returncode == 4
    assert "what to do: use the --model that the file was trained on (--resume-adapter-file)" in done.stderr
