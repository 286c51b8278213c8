"""Make small models and compute loss and gradient with mlx_lm alone: a worker of ``gradients.py``.

Reads one request a line from standard input, JSON, and answers each in one line. This process never
imports allhands.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils as mlx_lm
from gradients_rows import BATCHES, answer_requests, rows_of, save_tokenizer
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

RANK = {"rank": 4, "scale": 2.0, "dropout": 0.0}
GROUP_SIZE = 32


def make(directory: Path, config: dict[str, Any], dtype: str, seed: int) -> None:
    """A model with random weights, none of them all alike, and the same in four bits."""
    (directory / "model").mkdir()
    mlx_lm.save_config(dict(config), directory / "model" / "config.json")
    save_tokenizer(directory / "model")
    model_class, args_class = mlx_lm._get_classes(json.loads(json.dumps(config)))
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    new: list[tuple[str, mx.array]] = []
    for name, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            value = value.astype(mx.float32)
            if value.size > 1 and (value.max() - value.min()).item() == 0.0:
                value = value + 0.1 * mx.random.normal(value.shape)
            value = value.astype(getattr(mx, dtype))
        elif value.dtype == mx.uint32:
            value = mx.random.randint(0, 2**31 - 1, value.shape).astype(mx.uint32)  # packed weights
        if name.endswith(".signs"):
            value = mx.sign(mx.random.normal(value.shape))
        new.append((name, value))
    model.update(tree_unflatten(new))
    mx.eval(model.parameters())
    save(directory / "model", model, config)
    if "quantization" in config:
        return
    try:
        quantised, quantised_config = mlx_lm.quantize_model(model, dict(config), GROUP_SIZE, 4)
        save(directory / "model-4bit", quantised, quantised_config)
    except Exception as error:
        (directory / "not-quantised.txt").write_text(told(error))


def save(directory: Path, model: Any, config: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    mlx_lm.save_model(directory, model)
    mlx_lm.save_config(dict(config), directory / "config.json")
    save_tokenizer(directory)


def told(error: BaseException) -> str:
    """The error in a line, with the place in mlx_lm or MLX where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({place})"


def trained(model: Any, way: str, start: Path, keys: list[str] | None) -> None:
    """Make trainable what ``way`` trains, and let adapters begin at something."""
    kind, _, layers = way.partition(":")
    if kind == "full":
        if layers == "last":
            model.freeze()
            for layer in model.layers[-1:]:
                layer.unfreeze()
        else:
            model.unfreeze()
        return
    model.freeze()
    mx.random.seed(3)
    if kind == "dora":
        keys = keys or without_experts(model)
        start.with_suffix(".json").write_text(json.dumps(keys))
    settings = RANK | ({"keys": keys} if keys else {})
    linear_to_lora_layers(
        model, 1 if layers == "last" else len(model.layers), settings, use_dora=kind == "dora"
    )
    made: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.trainable_parameters()):
        if name.endswith("lora_b"):
            value = mx.random.normal(value.shape) * 0.05
        elif name.endswith(".m"):
            value = value * (1.0 + 0.1 * mx.random.normal(value.shape))
        made[name] = value.astype(mx.float32)
    mx.save_safetensors(str(start), made)
    model.load_weights(list(mx.load(str(start)).items()), strict=False)


def without_experts(model: Any) -> list[str] | None:
    """The linear layers of blocks, where there are experts, which cannot have DoRA; else ``None``:
    all.
    """
    named = [pair for layer in model.layers for pair in layer.named_modules()]
    if not any(isinstance(module, SwitchLinear | QuantizedSwitchLinear) for _, module in named):
        return None
    return sorted({name for name, module in named if type(module) is nn.Linear})


def gradient_of(model: Any, rows: list[list[int]]) -> tuple[float, dict[str, mx.array]]:
    width = max(map(len, rows))
    ids = mx.array([row + [0] * (width - len(row)) for row in rows])
    mask = mx.array([[1.0] * (len(row) - 1) + [0.0] * (width - len(row)) for row in rows])

    def loss(model: Any) -> mx.array:
        logits = model(ids[:, :-1]).astype(mx.float32)
        return (nn.losses.cross_entropy(logits, ids[:, 1:]) * mask).sum() / mask.sum()

    value, grads = nn.value_and_grad(model, loss)(model)
    named = {name: grad.astype(mx.float32) for name, grad in tree_flatten(grads)}
    mx.eval(value, named)
    return value.item(), named


def compute(request: dict[str, Any], way: str, judge: bool) -> dict[str, Any]:
    """Loss and gradient of each batch; gradients into files. A judge computes in float32, on the
    CPU.
    """
    directory = Path(request["directory"])
    model_directory = directory / ("model-4bit" if way.startswith("4bit") else "model")
    model: Any = mlx_lm.load_model(model_directory)[0]
    trained(model, way, directory / f"start-{way}.safetensors", request["keys"])
    if judge:
        floats = lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v  # noqa: E731
        model.update(tree_map(floats, model.parameters()))
    model.train()
    found: dict[str, Any] = {}
    for batch, rows in zip(BATCHES, rows_of(request["lengths"]), strict=True):
        value, grads = gradient_of(model, rows)
        file = f"{'judge' if judge else 'theirs'}-{way}-{batch}.safetensors"
        mx.save_safetensors(str(directory / file), grads)
        found[batch] = {"loss": value}
    return found


def attempt(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return function()
    except (Exception, SystemExit) as error:
        return {"error": told(error)}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Of one configuration what each way of training computes, or why mlx_lm cannot."""
    directory = Path(request["directory"])
    made = attempt(
        lambda: make(directory, request["config"], request["dtype"], request["seed"]) or {}
    )
    if made:
        return {"made": made["error"]}
    ways: dict[str, Any] = {}
    for way in request["ways"]:
        if way.startswith("4bit") and not (directory / "model-4bit").exists():
            why = directory / "not-quantised.txt"
            ways |= {way: {"none": why.read_text()}} if why.exists() else {}
            continue
        ways[way] = attempt(lambda way=way: compute(request, way, False))
        if request["judge"] and "error" not in ways[way]:
            device = mx.default_device()
            mx.set_default_device(mx.cpu)
            mx.disable_compile()
            ways[way]["judge"] = attempt(lambda way=way: compute(request, way, True))
            mx.set_default_device(device)
            if "MLX_DISABLE_COMPILE" not in os.environ:
                mx.enable_compile()
        mx.clear_cache()
    assert not any(name.partition(".")[0] == "allhands" for name in sys.modules)
    return {"ways": ways}


if __name__ == "__main__":
    answer_requests(answer)
