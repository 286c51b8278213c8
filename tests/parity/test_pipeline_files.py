"""What a pipeline writes of a full model: in parts, none of which is a whole, and the same as one process writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import run_allhands, write_chat_data, write_model, write_tokenizer

TRAINING = (
    "--iters 4 --batch-size 8 --steps-per-report 1 --val-batches 2 --steps-per-eval 2 --save-every 2 "
    "--learning-rate 0.01 --optimizer sgd --seed 3 --gradient-check off"
)
SHAPE = "--shape llama --layers 4 --dims 32 --mlp-dims 64 --heads 4 --kv-heads 2 --block-size 48"
PIPELINE = ("--strategy", "pipeline", "--backend", "ring")
# By mlx_lm alone: what it answers, and its weights.
BY_MLX_LM = """
import sys
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import load
model, tokenizer = load(sys.argv[1])
mx.save_safetensors(sys.argv[2], dict(tree_flatten(model.parameters())))
assert "allhands" not in sys.modules
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_tokenizer(folder / "tokenizer")
    write_model(folder / "model", layers=4, hidden=64)
    write_chat_data(folder / "data")
    return folder


def arrays(path: Path) -> dict[str, mx.array]:
    found: Any = mx.load(str(path))
    return found


def assert_equal(one: dict[str, mx.array], other: dict[str, mx.array]) -> None:
    assert one.keys() == other.keys()
    assert all(mx.array_equal(one[name], other[name]).item() for name in one)


def pretrain(place: Path, name: str, *more: str) -> Path:
    where = ("--data", place / "data", "--tokenizer", place / "tokenizer", "--adapter-path", place / name)
    done = run_allhands("pretrain", *SHAPE.split(), *TRAINING.split(), *where, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / name


def as_mlx_lm_loads(model: Path, out: Path) -> dict[str, mx.array]:
    subprocess.run([sys.executable, "-c", BY_MLX_LM, model, out], check=True, timeout=120)
    return arrays(out)


@pytest.mark.parametrize("more", [("--no-tied",), ("--tied", "--compile", "off")], ids=["untied", "tied"])
def test_a_model_in_parts_is_one_that_mlx_lm_loads(place: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    one = pretrain(place, f"one{len(more)}", *more)
    run = pretrain(place, f"parts{len(more)}", "-n", "3", *PIPELINE, "--pp-split", "1,2,1", *more)
    for name, kept in (("model", "checkpoints/step-0000004"), ("model-best", "best")):
        index = json.loads((run / name / "model.safetensors.index.json").read_text())
        parts = sorted(path.name for path in (run / name).glob("model*.safetensors"))
        assert parts == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
        found = {key: part for part in parts for key in arrays(run / name / part)}
        assert index["weight_map"] == found
        sizes = [sum(each.nbytes for each in arrays(run / name / part).values()) for part in parts]
        assert index["metadata"]["total_size"] == sum(sizes) > 2 * max(sizes)
        loaded = as_mlx_lm_loads(run / name, tmp_path / f"{name}.safetensors")
        assert_equal(loaded, arrays(run / kept / "adapters.safetensors"))
        alone = arrays(one / name / "model.safetensors")
        assert loaded.keys() == alone.keys()
        assert all(mx.allclose(loaded[key], alone[key], rtol=1e-4, atol=1e-5).item() for key in alone)
