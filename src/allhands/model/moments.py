"""Context managers that change a model for one pass: fewer blocks, no dropout, no compilation.

Each of them restores the model at its end.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from allhands.io.trees import flatten, unflatten
from allhands.kernels.fused.linear import dequantized_by_mlx
from allhands.kernels.instances import form_for_a_while
from allhands.model.dropout import SampleDropout


@contextmanager
def one_pass(model: nn.Module, blocks: int) -> Generator[None]:
    """Prepare a training pass through the last ``blocks`` blocks, without dropout, with adapters
    that have an effect.

    Trained arrays get their values back afterwards: differentiation leaves placeholders in the
    model.
    """
    with last_blocks(model, blocks), _without_dropout(model), _with_adapters(model), _uncompiled():
        weights = model.trainable_parameters()
        try:
            yield
        finally:
            model.update(weights)


@contextmanager
def last_blocks(model: Any, count: int) -> Generator[None]:
    """Let ``model`` use only its last ``count`` blocks."""
    blocks = getattr(model, "layers", None)
    fewer = isinstance(blocks, list) and count < len(cast("list[Any]", blocks))
    owner = _owner_of(model, blocks) if fewer else None
    if owner is None:
        yield
        return
    module, name = owner
    module[name] = cast("list[Any]", blocks)[-count:]
    try:
        yield
    finally:
        module[name] = blocks


def _owner_of(model: nn.Module, blocks: Any) -> tuple[nn.Module, str] | None:
    """Return the module that holds the list of blocks, and the list's name in it."""
    for module in model.modules():
        for name, value in module.items():
            if value is blocks:
                return module, name
    return None


@contextmanager
def _without_dropout(model: nn.Module) -> Generator[None]:
    """Set training mode, as in a step, except for dropout."""
    found = [module for module in model.modules() if isinstance(module, nn.Dropout | SampleDropout)]
    before = {id(module): module.training for module in model.modules()}
    model.train()
    for module in found:
        module.train(False)
    try:
        yield
    finally:
        for module in model.modules():
            module._training = before[id(module)]  # type: ignore[attr-defined]


@contextmanager
def _with_adapters(model: nn.Module) -> Generator[None]:
    """Make the second factors of adapters non-zero, as they are once training has begun."""
    found = [module for module in model.modules() if "lora_b" in module]
    before = [module["lora_b"] for module in found]

    def moved(array: mx.array, index: int) -> mx.array:
        noise = mx.random.normal(array.shape, key=mx.random.key(index))
        return array + (0.02 * noise).astype(array.dtype)

    for index, module in enumerate(found):
        # Some layers have several factors, in a list.
        module["lora_b"] = tree_map(partial(moved, index=index), before[index])
    try:
        yield
    finally:
        for module, array in zip(found, before, strict=True):
            module["lora_b"] = array


@contextmanager
def in_float32(model: nn.Module) -> Generator[None]:
    """Compute in float32; quantised layers multiply their dense weights, since packed ones are slow
    on a CPU.
    """
    before = flatten(model.parameters())
    half = [(name, array) for name, array in before if array.dtype in (mx.float16, mx.bfloat16)]
    quantised = [module for module in model.modules() if type(module) in _DENSE]
    model.update(unflatten([(name, array.astype(mx.float32)) for name, array in half]))
    with ExitStack() as stack:
        stack.callback(lambda: model.update(unflatten(half)))
        for module in quantised:
            stack.enter_context(form_for_a_while(module, _DENSE[type(module)]))
        yield


class _DenseLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        y = x @ mx.stop_gradient(dequantized_by_mlx(self)).T
        return y + self.bias if "bias" in self else y


class _DenseEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return x @ mx.stop_gradient(dequantized_by_mlx(self)).T


class _DenseSwitch(QuantizedSwitchLinear):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weight = mx.stop_gradient(dequantized_by_mlx(self)).swapaxes(-1, -2)
        y = mx.gather_mm(x, weight, rhs_indices=indices, sorted_indices=sorted_indices)
        return y + mx.expand_dims(self.bias[indices], -2) if "bias" in self else y


_DENSE: dict[type, type] = {
    nn.QuantizedLinear: _DenseLinear,
    nn.QuantizedEmbedding: _DenseEmbedding,
    QuantizedSwitchLinear: _DenseSwitch,
}


@contextmanager
def _uncompiled() -> Generator[None]:
    """Switch off MLX's compilation: each kernel that it would make takes seconds to build."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@contextmanager
def last_places(model: Any, length: int, count: int) -> Generator[None]:
    """Let ``model`` compute logits only for the last ``count`` of ``length`` places.

    The body then returns the hidden states of these places only.
    """
    outer = getattr(model, "language_model", model)
    body: Any = next(
        (outer[name] for name in ("model", "transformer", "backbone") if name in outer), None
    )
    if not isinstance(body, nn.Module):
        yield
        return
    kind = type(body)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = cast("Any", kind).__call__(self, *args, **kwargs)
        whole = isinstance(made, mx.array) and made.ndim == 3 and made.shape[1] == length
        return made[:, -count:] if whole else made

    with form_for_a_while(body, type(kind.__name__, (kind,), {"__call__": call})):
        yield
