"""A rank that divides the matrices of small models with the others, and compares gradients with
mlx_lm's own model.

The first argument is a JSON list of cases ``[architecture, way, form]``. All ranks print the same
list: for each case how far loss, gradients and the sum of their squares are from those of the whole
model, or what was refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
from architectures import architecture
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes

from allhands.distributed.backend import Communicator, SingleProcess, connect
from allhands.errors import AllhandsError
from allhands.io.regions import Flat, Region
from allhands.model.balance import balance_experts
from allhands.model.passes import PassContext, apply_passes
from allhands.parallel.base import Exchanging
from allhands.parallel.matrices import compute_together, divide
from allhands.parallel.parts import OwnedParts
from allhands.parallel.sums import Gradients
from allhands.parallel.tensor import TensorParallel
from allhands.runtime.accelerator import detect

WIDE = {"intermediate_size": 128, "moe_intermediate_size": 64, "kv_lora_rank": 32}


def model_of(name: str, way: str) -> Any:
    """A new model of that configuration, ready to be trained that way; the same numbers each time."""
    told = architecture(name.removesuffix("+"))
    config = (
        {**told.config, **WIDE} if way == "quantised" and not name.endswith("+") else told.config
    )
    mx.random.seed(7)
    kind, arguments = _get_classes(config)
    model: Any = kind(arguments.from_dict(config))
    model.train()
    _draw(model, 0.1)
    if way == "quantised":
        nn.quantize(model, group_size=32, bits=4, class_predicate=_in_groups)
    if way != "full":
        model.freeze()
        linear_to_lora_layers(
            model, len(model.layers), {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": told.keys}
        )
        _draw(model, 0.1)
    mx.eval(model.parameters())
    return model


def _in_groups(_: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def _draw(model: Any, scale: float) -> None:
    for key, value in tree_flatten(model.trainable_parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            drawn = scale * mx.random.normal(value.shape)
            model.update(tree_unflatten([(key, drawn if value.ndim > 1 else 1 + drawn)]))


def gradients(model: Any) -> tuple[mx.array, list[tuple[str, mx.array]]]:
    """The summed loss on some tokens, and its gradients by name."""
    mx.random.seed(3)
    tokens = mx.random.randint(0, 60, (2, 14))

    def loss() -> mx.array:
        logits = model(tokens)[:, :-1].astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="sum")

    value, grads = nn.value_and_grad(model, loss)()
    mx.eval(value, grads)
    return value, list(tree_flatten(grads))


def cut(array: mx.array, region: Region | None) -> mx.array:
    """The part of an array in a region; ``None``: all."""
    if region is None:
        return array
    assert not isinstance(region, Flat)
    return array[
        tuple(slice(at, at + size) for at, size in zip(region.start, region.shape, strict=True))
    ]


def compared(world: Communicator, name: str, way: str, form: str) -> Any:
    """How far loss, gradients and squares are from the whole model's, and the array that is
    farthest.
    """
    whole, model = model_of(name, way), model_of(name, way)
    if form == "balanced":
        assert balance_experts(whole, 0.5) == balance_experts(model, 0.5) > 0
    expected_loss, expected = gradients(whole)
    matrices = divide(model, world, SingleProcess(), whole_experts="experts" in form)
    if "native" in form:
        apply_passes(model, PassContext(detect(), "train", at_once=True, longest=14))
    compute_together(matrices)
    if form == "forgotten":
        matrices = replace(matrices, partial=frozenset())
    loss, found = gradients(model)
    strategy = TensorParallel(
        Exchanging(world, cpu_native=True, matrices=matrices, same_rows=matrices.tensor)
    )
    reduced = strategy.reduce(
        Gradients(loss, found, {"targets": 1, "tokens": 1}), [float(world.rank == 0)]
    )
    apart = far(matrices, dict(reduced.grads), dict(expected))
    total = sum((mx.square(grad).sum() for _, grad in expected), mx.zeros(()))
    assert reduced.squares is not None
    numbers = [
        abs(loss - expected_loss) / expected_loss,
        mx.array(max(apart.values())),
        reduced.squares / total - 1,
    ]
    worst = [float(each.item()) for each in numbers]
    everyone = world.all_gather(mx.array([worst])).tolist()
    return [max(abs(rank[i]) for rank in everyone) for i in range(3)]


def far(
    matrices: OwnedParts, found: dict[str, mx.array], expected: dict[str, mx.array]
) -> dict[str, float]:
    """Distance of each gradient from its part of the whole model's, by the norm of that.

    Beside a tenth of the largest norm, what is smaller is rounding.
    """
    here = {name for name in expected if name not in matrices.parts or matrices.parts[name].size}
    assert found.keys() == here, here ^ found.keys()
    largest = max(float(mx.linalg.norm(grad).item()) for grad in expected.values())
    apart: dict[str, float] = {}
    for name in here:
        part = cut(expected[name], matrices.parts.get(name))
        norm = max(float(mx.linalg.norm(part).item()), 0.1 * largest)
        apart[name] = float(mx.linalg.norm(found[name] - part).item()) / norm
    return apart


def answer(compared: Callable[..., Any]) -> None:
    """Join the others, and print what ``compared`` finds of every case, in order."""
    size = len(json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text()))
    world = connect("ring", size, int(os.environ["MLX_RANK"]))
    told: list[Any] = []
    for case in json.loads(sys.argv[1]):
        try:
            told.append(compared(world, *case))
        except AllhandsError as error:
            told.append(f"{type(error).__name__}: {error.message}")
    print(json.dumps(told), flush=True)
    os._exit(0)


if __name__ == "__main__":
    answer(compared)
