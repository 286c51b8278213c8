"""New models, built from a config.json, with first weights that depend only on the seed."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from allhands.errors import ModelError
from allhands.io.tensors import Tensor
from allhands.io.trees import flatten, unflatten
from allhands.model.shapes import FAMILIES

_STD = 0.02  # standard deviation if a config has none
# Groups of parameters, by the last but one part of their names.
_RESIDUAL = ("o_proj", "down_proj")
_OTHERS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate", "lm_head")
# Names of an expert's matrices in Mixtral's files; mlx_lm stacks those of all experts.
_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_STACKED = ".switch_mlp."


def build_model(config: Mapping[str, Any], seed: int, *, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Build mlx_lm's model of a config, with evaluated first weights.

    Matrices and embeddings are drawn from a normal distribution with the config's
    ``initializer_range``. Matrices that write to the residual stream (``o_proj``, ``down_proj``)
    are divided by sqrt(2 layers), so that its variance does not grow with the depth (GPT-2). Norms
    are 1. Each array, and each expert of a stack, has its own generator, whose key is made of
    ``seed`` and the array's name. So weights are the same on every rank and device.

    Args:
        config: content of config.json, see :func:`allhands.model.shapes.model_config`.
        dtype: type of the parameters; they are drawn in float32 and rounded once.

    Raises:
        ModelError: the type of model is not supported, or the config is invalid.
    """
    model = _bare_model(config)
    shapes = [(name, value.shape) for name, value in flatten(model.parameters())]
    # mlx_lm's own first weights are not evaluated yet: they are dropped before they take memory.
    model.update(unflatten([(name, mx.zeros(())) for name, _ in shapes]))
    parameters: list[tuple[str, mx.array]] = []

    def draw(item: tuple[str, tuple[int, ...]]) -> NDArray[np.float32]:
        return _first(item[0], item[1], config, seed)

    # numpy releases Python's lock while it draws.
    with ThreadPoolExecutor() as pool:
        for (name, _), values in zip(shapes, pool.map(draw, shapes), strict=True):
            parameters.append((name, mx.array(values).astype(dtype)))
            mx.eval(parameters[-1][1])
    model.update(unflatten(parameters))
    return model


def _bare_model(config: Mapping[str, Any]) -> nn.Module:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"no model of type {family!r} is built anew",
            code="architecture-unsupported",
            where="model_type",
            hint=f"{', '.join(FAMILIES)}",
        )
    module = importlib.import_module(f"mlx_lm.models.{family}")
    try:
        return module.Model(module.ModelArgs.from_dict(dict(config)))
    except (TypeError, ValueError, KeyError) as error:
        hint = "make it with allhands.model.shapes.model_config"
        raise ModelError(
            f"no model can be built: {error}",
            code="model-not-buildable",
            where="config.json",
            hint=hint,
        ) from error


def _first(
    name: str, shape: tuple[int, ...], config: Mapping[str, Any], seed: int
) -> NDArray[np.float32]:
    """Return the first values of one parameter."""
    std = _std(name, config)
    if std is None:
        return np.ones(shape, dtype=np.float32)
    if _STACKED not in name:
        return _normal(seed, name, shape, std)
    return np.stack(
        [_normal(seed, f"{name}[{expert}]", shape[1:], std) for expert in range(shape[0])]
    )


def _std(name: str, config: Mapping[str, Any]) -> float | None:
    """Return the standard deviation of a parameter's first values; None for a norm."""
    part = name.split(".")[-2]
    std = float(config.get("initializer_range", _STD))
    if part.endswith("norm"):
        return None
    if part in _RESIDUAL:
        return std / math.sqrt(2 * config["num_hidden_layers"])
    assert part in _OTHERS, name
    return std


def _normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype="<u8")))
    values = random.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return values


def portable_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield parameters under the names of Hugging Face's files: experts one by one.

    mlx_lm reads these names, too.

    Args:
        tensors: parameters with mlx_lm's names.
    """
    for tensor in tensors:
        block, stacked, rest = tensor.name.partition(_STACKED)
        if not stacked:
            yield tensor
            continue
        matrix, _, kind = rest.partition(".")
        experts, *shape = tensor.shape
        data = tensor.content()
        size = len(data) // experts
        for expert in range(experts):
            name = f"{block}.experts.{expert}.{_EXPERT_NAMES[matrix]}.{kind}"
            yield Tensor(
                name, tensor.dtype, tuple(shape), data[expert * size : (expert + 1) * size]
            )
