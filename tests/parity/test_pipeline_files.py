"""What a pipeline writes of a full model: in parts, none of which is a whole, and the same as one
process writes.
"""

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
    where = (
        "--data",
        place / "data",
        "--tokenizer",
        place / "tokenizer",
        "--adapter-path",
        place / name,
    )
    done = run_allhands("pretrain", *SHAPE.split(), *TRAINING.split(), *where, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / name


def as_mlx_lm_loads(model: Path, out: Path) -> dict[str, mx.array]:
    subprocess.run([sys.executable, "-c", BY_MLX_LM, model, out], check=True, timeout=120)
    return arrays(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [("--no-tied",), ("--tied", "--compile", "off")], ids=["untied", "tied"]
)
def test_a_model_in_parts_is_one_that_mlx_lm_loads(
    place: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
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
        assert all(
            mx.allclose(loaded[key], alone[key], rtol=1e-4, atol=1e-5).item() for key in alone
        )


@pytest.mark.slow
@pytest.mark.parametrize("write", [1, 2, 3])
def test_a_kill_in_a_save_leaves_the_model_before(place: Path, tmp_path: Path, write: int) -> None:
    plan = tmp_path / "faults.json"
    plan.write_text(
        json.dumps([{"rank": 0, "step": 4, "kind": "kill", "at": "save", "write": write}])
    )
    where = (
        "--data",
        place / "data",
        "--tokenizer",
        place / "tokenizer",
        "--adapter-path",
        tmp_path / "run",
    )
    more = ("-n", "2", *PIPELINE, "--max-restarts", "0")
    done = run_allhands(
        "pretrain",
        *SHAPE.split(),
        *TRAINING.split(),
        *where,
        *more,
        env={"ALLHANDS_FAULTS": str(plan)},
    )
    assert done.returncode == 137, done.stderr
    loaded = as_mlx_lm_loads(tmp_path / "run/model", tmp_path / "found.safetensors")
    assert_equal(loaded, arrays(tmp_path / "run/checkpoints/step-0000002/adapters.safetensors"))


# Ranks that do not see each other's files, as on computers that share none.
BLIND = """
import sys
import allhands.checkpoints.parts as parts
from allhands.cli.main import main
sees = parts.sees_main
parts.sees_main = lambda communicator, directory: sees(communicator, directory) and communicator.rank == 0
sys.argv[0] = "allhands"
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--keep-last", "0")], ids=["checkpoints", "none"])
def test_full_training_is_saved_alike_with_and_without_shared_files(
    place: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """And goes on from there, with other stages too."""
    (tmp_path / "blind.py").write_text(BLIND)
    blind = ("launch", "-n", "2", "--backend", "ring", "--", sys.executable, tmp_path / "blind.py")
    where = (
        "--model",
        place / "model",
        "--data",
        place / "data",
        "--fine-tune-type",
        "full",
        "--num-layers",
        "-1",
    )
    files = ("adapters.safetensors", "best/adapters.safetensors")
    found: list[list[bytes]] = []
    for name, start in (("seen", ()), ("blind", blind)):
        given = (
            "train",
            "--train",
            *TRAINING.split(),
            *where,
            *more,
            *PIPELINE[:2],
            "--adapter-path",
            tmp_path / name,
        )
        done = run_allhands(*start, *given, *(() if start else ("-n", "2", *PIPELINE[2:])))
        assert done.returncode == 0, done.stdout + done.stderr
        found.append([(tmp_path / name / file).read_bytes() for file in files])
        assert not list((tmp_path / name).rglob("*weights*"))
    assert found[0] == found[1]
    if not more:
        kept = ("checkpoints/step-0000002", "checkpoints/step-0000004")
        assert all((tmp_path / "seen" / each / "adapters.safetensors").is_file() for each in kept)
        assert [path.name for path in (tmp_path / "seen" / "best").glob("adapters*")] == [
            "adapters.safetensors"
        ]
        longer = TRAINING.replace("--iters 4", "--iters 6").split()
        words = ("train", "--train", *longer, *where, "--strategy", "pipeline", "-n", "3")
        done = run_allhands(*words, "--adapter-path", tmp_path / "seen", "--resume", "auto")
        assert done.returncode == 0, done.stdout + done.stderr
