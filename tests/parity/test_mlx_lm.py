"""Adapters go both ways between allhands and mlx_lm, and its command lines and files are taken as
they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.fuse
import pytest
import yaml
from command_line import call_allhands, verbs
from mlx_lm.lora import build_parser
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as mlx_lm_load
from plain_loop import chats, numpy_loss
from ranked_tasks import finetune
from runs import read_run, read_weights
from tiny import run_allhands, write_chat_data, write_model

from allhands.config.schema import build_config
from allhands.errors import ModelError
from allhands.infer.generate import load_for_generation

TOKENS = mx.array([[1, 7, 99, 31, 200, 7, 45, 2]])
# What is trained, and the model: a head of its own, one tied to the embedding, weights of 4 bits.
CASES = [
    (method, kind)
    for kind in ("untied", "tied", "quantised")
    for method in ("lora", "dora", "full")
    if (method, kind) != ("full", "quantised")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mlx-lm-models")
    return {
        "untied": write_model(root / "untied", layers=2, tied=False),
        "tied": write_model(root / "tied", layers=2),
        "quantised": write_model(root / "quantised", layers=2, bits=4),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_data(
        tmp_path_factory.mktemp("mlx-lm-data"), train=6, valid=4, test=4, longest=30
    )


Adapter = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def adapter(
    models: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Adapter:
    """The run of a method on a kind of model, trained when first asked for, far enough to see its
    effect.
    """
    root = tmp_path_factory.mktemp("adapters")

    def trained(method: str, kind: str) -> Path:
        directory = root / f"{method}-{kind}"
        if not directory.exists():
            flags: dict[str, Any] = {
                "model": str(models[kind]),
                "data": str(data),
                "adapter_path": str(directory),
            }
            # At 2e-2 hidden states grow to millions, and rounding to what a test sees.
            flags |= {
                "fine_tune_type": method,
                "train": True,
                "iters": 4,
                "batch_size": 6,
                "learning_rate": 5e-3,
            }
            # Not the defaults: they must travel in adapter_config.json.
            shape = {
                "rank": 4,
                "scale": 3.0,
                "dropout": 0.1,
                "keys": ["self_attn.q_proj", "mlp.down_proj"],
            }
            flags |= {"num_layers": 1, "lora_parameters": shape} if method == "dora" else {}
            finetune(
                build_config({**flags, "val_batches": -1, "steps_per_eval": 2, "save_every": 2})
            )
        return directory

    return trained


def logits_of_mlx_lm(model: Path, adapter_path: Path | None = None) -> mx.array:
    loaded, _ = mlx_lm_load(model)
    if adapter_path is not None:
        loaded = load_adapters(loaded, str(adapter_path))
    loaded.eval()
    return loaded(TOKENS).astype(mx.float32)


def assert_close(one: mx.array, other: mx.array, tolerance: float = 2e-5) -> None:
    assert mx.abs(one - other).max().item() <= tolerance * mx.abs(one).max().item()


def run_mlx_lm(*arguments: str | Path) -> str:
    """``python -m mlx_lm ARGUMENTS``; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- ours in mlx_lm -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), CASES)
def test_mlx_lm_loads_the_adapter_and_computes_the_same(
    models: dict[str, Path], data: Path, adapter: Adapter, method: str, kind: str
) -> None:
    directory = adapter(method, kind)
    theirs = logits_of_mlx_lm(models[kind], directory)
    ours: Any = load_for_generation(str(models[kind]), directory).model
    assert_close(theirs, ours(TOKENS).astype(mx.float32))
    assert mx.abs(theirs - logits_of_mlx_lm(models[kind])).max().item() > 0.05
    # And what both compute is what was in memory while training.
    network, _ = mlx_lm_load(models[kind])
    network = load_adapters(network, str(directory))
    network.eval()
    expected = numpy_loss(network, chats(models[kind], data / "valid.jsonl"))
    assert read_run(directory).valid_losses[-1] == pytest.approx(expected, abs=2e-5)


def test_best_adapter_is_a_directory_of_its_own(
    models: dict[str, Path], data: Path, adapter: Adapter
) -> None:
    directory = adapter("lora", "untied")
    network, _ = mlx_lm_load(models["untied"])
    network = load_adapters(network, str(directory / "best"))
    network.eval()
    expected = numpy_loss(network, chats(models["untied"], data / "valid.jsonl"))
    assert min(read_run(directory).valid_losses) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("place", [".", "best"])
def test_mlx_lm_generate_takes_the_adapter(
    models: dict[str, Path], adapter: Adapter, place: str
) -> None:
    directory = adapter("lora", "quantised") / place
    command = ["generate", "--model", models["quantised"], "--adapter-path", directory]
    out = run_mlx_lm(*command, "--prompt", "x", "--max-tokens", "3")
    # Three tokens, or fewer if the random model says that it has finished.
    assert "Generation: " in out


def test_mlx_lm_fuse_as_a_command(
    models: dict[str, Path], adapter: Adapter, tmp_path: Path
) -> None:
    directory = adapter("lora", "untied")
    run_mlx_lm(
        "fuse",
        "--model",
        models["untied"],
        "--adapter-path",
        directory,
        "--save-path",
        tmp_path / "fused",
    )
    assert_close(
        logits_of_mlx_lm(tmp_path / "fused"), logits_of_mlx_lm(models["untied"], directory), 1e-4
    )
    ours: Any = load_for_generation(str(tmp_path / "fused"), None).model
    assert_close(ours(TOKENS), logits_of_mlx_lm(models["untied"], directory), 1e-4)


@pytest.mark.parametrize(("method", "kind"), CASES[1:])
def test_mlx_lm_fuse(
    models: dict[str, Path],
    adapter: Adapter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: str,
) -> None:
    directory, fused = adapter(method, kind), tmp_path / "fused"
    command = [
        "fuse",
        "--model",
        str(models[kind]),
        "--adapter-path",
        str(directory),
        "--save-path",
        str(fused),
    ]
    # Quantising again would round what was trained.
    monkeypatch.setattr(sys, "argv", command + (["--dequantize"] if kind == "quantised" else []))
    mlx_lm.fuse.main()
    assert_close(logits_of_mlx_lm(fused), logits_of_mlx_lm(models[kind], directory), 1e-4)


# --- mlx_lm's in ours -----------------------------------------------------------------------------


@pytest.mark.slow
def test_adapter_of_mlx_lm_in_allhands(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    common: list[str | Path] = [
        "--model",
        models["untied"],
        "--data",
        data,
        "--batch-size",
        "2",
        "--num-layers",
        "2",
    ]
    run_mlx_lm(
        "lora",
        *common,
        "--train",
        "--iters",
        "2",
        "--learning-rate",
        "0.02",
        "--adapter-path",
        theirs,
    )
    reference = logits_of_mlx_lm(models["untied"], theirs)
    assert mx.abs(reference - logits_of_mlx_lm(models["untied"])).max().item() > 0.05
    ours: Any = load_for_generation(str(models["untied"]), theirs).model
    assert_close(reference, ours(TOKENS))
    command = [
        "generate",
        "--model",
        models["untied"],
        "--adapter-path",
        theirs,
        "--prompt",
        "x",
        "--max-tokens",
        "3",
    ]
    done = call_allhands(*command)
    assert done.returncode == 0, done.stderr
    assert "Generation: " in done.stdout
    # Training goes on from it.
    flags = {
        "model": str(models["untied"]),
        "data": str(data),
        "train": True,
        "iters": 1,
        "batch_size": 6,
    }
    flags |= {"resume_adapter_file": str(theirs / "adapters.safetensors"), "val_batches": 0}
    resumed = read_run(finetune(build_config({**flags, "adapter_path": str(tmp_path / "on")})))
    network, _ = mlx_lm_load(models["untied"])
    network = load_adapters(network, str(theirs))
    expected = numpy_loss(network, chats(models["untied"], data / "train.jsonl"))
    assert resumed.losses == pytest.approx([expected], abs=2e-5)


@pytest.mark.parametrize("method", ["dora", "full"])
def test_testing_takes_the_adapter_as_its_own_file_describes_it(
    models: dict[str, Path], data: Path, adapter: Adapter, method: str
) -> None:
    """``--model M --adapter-path A --data D --test`` is all that mlx_lm wants, whatever the
    adapter's shape.
    """
    from allhands.run.session import RunContext, run_finetune

    directory = adapter(method, "untied")
    flags = {
        "model": str(models["untied"]),
        "adapter_path": str(directory),
        "data": str(data),
        "test": True,
    }
    result = run_finetune(build_config(flags), RunContext())
    network, _ = mlx_lm_load(models["untied"])
    network = load_adapters(network, str(directory))
    network.eval()
    expected = numpy_loss(network, chats(models["untied"], data / "test.jsonl"))
    assert result.ended.test_loss == pytest.approx(expected, abs=2e-5)


def test_adapter_of_another_model_is_refused(
    models: dict[str, Path], adapter: Adapter, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", layers=2, hidden=64)
    with pytest.raises(ModelError, match="does not fit the model"):
        load_for_generation(str(other), adapter("lora", "tied"))


# --- its command lines and files ------------------------------------------------------------------


def test_every_flag_of_mlx_lm_lora_is_a_flag_of_allhands_train() -> None:
    command = dict(verbs())["train"]
    ours = {name for parameter in command.params for name in parameter.opts}
    theirs = {name for action in build_parser()._actions for name in action.option_strings} - {
        "-h",
        "--help",
    }
    assert len(theirs) > 25
    assert theirs <= ours


@pytest.mark.slow
def test_the_whole_command_line(
    models: dict[str, Path], data: Path, adapter: Adapter, tmp_path: Path
) -> None:
    """The flags that many hands type, in that order, only the program's name is another."""
    (tmp_path / "run.yaml").write_text("optimizer: adamw\nbatch_size: 6\n")
    place = tmp_path / "out"
    resumed = adapter("lora", "untied") / "adapters.safetensors"
    text = (
        f"train --model {models['untied']} --train --data {data} --fine-tune-type lora --num-layers 2 --batch-size 2 "
        "--iters 4 --val-batches 1 --learning-rate 1e-4 --steps-per-report 1 --steps-per-eval 2 "
        f"--resume-adapter-file {resumed} --adapter-path {place} --save-every 2 --test --test-batches 1 "
        f"--max-seq-length 64 --config {tmp_path / 'run.yaml'} --grad-checkpoint --seed 7 --lr-schedule cosine"
    )
    shape = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    done = run_allhands(*text.split(), "--lora-parameters", json.dumps(shape))
    assert done.returncode == 0, done.stderr
    run = read_run(place)
    assert [report["step"] for report in run.reports] == [1, 2, 3, 4]
    assert [validation["step"] for validation in run.validations] == [0, 2, 4]
    assert run.reports[0]["learning_rate"] == pytest.approx(1e-4)
    assert run.reports[2]["learning_rate"] == pytest.approx(5e-5)
    assert run.ended["test_loss"] > 0
    names = {path.name for path in place.iterdir()}
    assert {
        "0000002_adapters.safetensors",
        "0000004_adapters.safetensors",
        "adapters.safetensors",
    } < names
    assert {"adapter_config.json", "metrics.jsonl", "loss.png", "logs"} < names
    config = json.loads((place / "adapter_config.json").read_text())
    given = {
        "optimizer": "adamw",
        "batch_size": 2,
        "seed": 7,
        "grad_checkpoint": True,
        "max_seq_length": 64,
    }
    assert given.items() <= config.items()
    assert config["lora_parameters"].items() >= shape.items()
    start, end = read_weights(resumed), run.weights
    assert 0 < max(mx.abs(end[name] - start[name]).max().item() for name in start) < 3e-3


# Every key that mlx_lm's own lora_config.yaml names, the commented ones included.
LORA_CONFIG = """
model: "{model}"
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw:
    betas: [0.9, 0.98]
    eps: 1e-6
    weight_decay: 0.05
    bias_correction: true
data: "{data}"
seed: 0
num_layers: 16
batch_size: 4
iters: 2
val_batches: 25
learning_rate: 1e-5
report_to: null
project_name: null
steps_per_report: 1
steps_per_eval: 200
grad_accumulation_steps: 1
resume_adapter_file: null
adapter_path: "{place}"
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 1
  warmup_init: 1e-7
  arguments: [1e-5, 1000, 1e-7]
"""


def test_lora_config_yaml_runs_as_it_is(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """But for ``num_layers``: 16 is more than the tiny model has, which mlx_lm refuses too."""
    text = LORA_CONFIG.format(model=models["untied"], data=data, place=tmp_path / "out")
    (tmp_path / "lora_config.yaml").write_text(text)
    done = run_allhands("train", "-c", tmp_path / "lora_config.yaml", "--num-layers", "2")
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "out")
    paths = {f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qv"}
    assert {name.rsplit(".", 1)[0] for name in run.weights} == paths
    assert [report["learning_rate"] for report in run.reports] == pytest.approx([1e-7, 1e-5])
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (
        config["optimizer_config"]
        == yaml.safe_load(text.replace("1e-6", "1.0e-6"))["optimizer_config"]
    )


def test_lora_config_yaml_with_a_data_set_of_the_hub_is_understood(tmp_path: Path) -> None:
    hub = {"path": "billsum", "train_split": "train[:1000]", "valid_split": "train[-100:]"}
    hub |= {"prompt_feature": "text", "completion_feature": "summary"}
    (tmp_path / "lora_config.yaml").write_text(yaml.safe_dump({"hf_dataset": hub}))
    config = build_config({}, tmp_path / "lora_config.yaml")
    assert not isinstance(config.hf_dataset, list)
    assert config.hf_dataset is not None
    assert hub.items() <= config.hf_dataset.model_dump().items()
