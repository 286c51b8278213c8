"""Linear layers whose backward pass computes with other arrays than the forward pass: the same
numbers, fetched again.

Where ranks have divided the weights of a model, whole ones are fetched for a pass and dropped
afterwards. MLX's own products keep their weight for the backward pass; these keep only their input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from allhands.kernels.fastmath import with_vjp
from allhands.kernels.fused import ops


class Again:
    """A view of a layer, with the arrays for its backward pass in place of its own.

    They differ where ranks have divided the layer's arrays, and fetch them for each pass.
    """

    def __init__(self, layer: nn.Module, arrays: Mapping[str, mx.array]) -> None:
        self._layer, self._arrays = layer, arrays

    def get(self, key: str, default: Any = None) -> Any:
        return self._arrays.get(key, self._layer.get(key, default))

    def __getattr__(self, key: str) -> Any:
        arrays = self.__dict__["_arrays"]
        return arrays[key] if key in arrays else getattr(self.__dict__["_layer"], key)


def give_again(layer: nn.Module, arrays: Mapping[str, mx.array] | None) -> None:
    """Give ``layer`` the ``arrays`` for the backward pass of its next computations; ``None``: its
    own.
    """
    # Not among its parameters.
    object.__setattr__(layer, "_again", None if arrays is None else Again(layer, arrays))


def again_of(layer: Any) -> Any:
    """Return the layer that the backward pass of ``layer`` computes with: itself, or an
    :class:`Again`.
    """
    return vars(layer).get("_again") or layer


def for_backward(layer: Any) -> Any:
    """Return :func:`again_of`, with the present arrays: a layer's own may be gone when the backward
    pass is made.
    """
    again = again_of(layer)
    if again is not layer:
        return again
    return Again(layer, {key: layer[key] for key in ("weight", "scales", "biases") if key in layer})


def other_weight(layer: Any) -> mx.array | None:
    """Return the weight for the backward pass; ``None`` if it is the layer's own."""
    again = again_of(layer)
    return None if again is layer else again.weight


class FrozenLinear(nn.Linear):
    """A frozen dense layer; :func:`give_again` may change the weight of its backward pass."""

    def __call__(self, x: mx.array) -> mx.array:
        again = again_of(self)
        if again is self:
            return super().__call__(x)
        y = ops.product_with(lambda _: self.weight, lambda _: again.weight)(
            x.reshape(-1, x.shape[-1])
        )
        y = y.reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y


class FrozenQuantizedLinear(nn.QuantizedLinear):
    """A quantised layer; :func:`give_again` may change the arrays of its backward pass."""

    def __call__(self, x: mx.array) -> mx.array:
        again = again_of(self)
        if again is self:
            return super().__call__(x)
        y = quantised_product([self], [again])(x)
        return y + self.bias if "bias" in self else y


def quantised_product(
    layers: Sequence[Any], again: Sequence[Any]
) -> Callable[[mx.array], mx.array]:
    """Return a function that computes the products of frozen quantised ``layers`` with one input,
    side by side, by MLX's own operation.

    Its backward pass uses the layers ``again``; see :func:`again_of`.
    """

    def products(x: mx.array) -> mx.array:
        return _beside([_by_quantised(x, layer, transpose=True) for layer in layers])

    def backward(x: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
        ends = list(accumulate(layer.weight.shape[0] for layer in layers))[:-1]
        parts = mx.split(cotangent, ends, axis=-1) if ends else [cotangent]
        first, *rest = (
            _by_quantised(part, each, transpose=False)
            for part, each in zip(parts, again, strict=True)
        )
        return sum(rest, first)

    return (
        with_vjp(products, backward)
        if any(a is not b for a, b in zip(layers, again, strict=True))
        else products
    )


def _by_quantised(x: mx.array, layer: Any, *, transpose: bool) -> mx.array:
    how: dict[str, Any] = {name: getattr(layer, name) for name in ("group_size", "bits", "mode")}
    return mx.quantized_matmul(
        x, layer.weight, layer.scales, layer.get("biases"), transpose=transpose, **how
    )


def _beside(arrays: Sequence[mx.array]) -> mx.array:
    return mx.concatenate(list(arrays), axis=-1) if len(arrays) > 1 else arrays[0]
