"""Quantised layers in training: multiply by the dequantised weight where that is faster."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from allhands.model.fastmath import use_fast_mlp
from allhands.model.split import dense_weight


def prepare_quantized(model: nn.Module, kind: str) -> int:
    """Replace the quantised linear layers of a frozen model by what trains fastest on this device.

    On a CPU, MLX multiplies quantised weights at 3 GFLOP/s against 100 and more through BLAS, and
    dequantising at every use costs as much as the product itself: so the weights are dequantised once, into
    float32, which is also the only type that BLAS takes. On other devices nothing is replaced.

    The values, and so the adapters that come out, are those of the quantised model.

    Returns:
        Number of layers replaced.
    """
    if kind != "cpu":
        return 0
    replaced: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            replaced.append((name, _dense_linear(module)))
        elif isinstance(module, nn.QuantizedEmbedding):
            replaced.append((name, _dense_embedding(module)))
    if replaced:
        model.update_modules(tree_unflatten(replaced))
    prepare_dense(model)
    return len(replaced)


def prepare_dense(model: nn.Module) -> None:
    """Make a model without quantised weights fast on a CPU: float32, and products of our own where faster."""
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    if sys.platform == "linux":
        use_fast_mlp(model)


def _dense_linear(module: nn.QuantizedLinear) -> nn.Linear:
    weight = dense_weight(module).astype(mx.float32)
    linear = nn.Linear(1, 1, bias="bias" in module)
    linear.weight = weight
    if "bias" in module:
        linear.bias = module.bias.astype(mx.float32)
    return linear


def _dense_embedding(module: nn.QuantizedEmbedding) -> nn.Embedding:
    embedding = nn.Embedding(1, 1)
    embedding.weight = dense_weight(module).astype(mx.float32)
    return embedding
