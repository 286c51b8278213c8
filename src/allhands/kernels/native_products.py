"""Linear layers whose products are computed at once, also in the backward pass: for training on
Linux CPUs.

While MLX differentiates, it keeps all results of its own operations on a trained weight, including
every intermediate result of the backward pass: that was more than half of a step's memory. MLX does
not see the products here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear

from allhands.kernels.fastmath import with_vjp
from allhands.kernels.instances import give_form
from allhands.kernels.native_arrays import (
    Array,
    available,
    floats,
    forward_only,
    multiply,
    new,
    rows,
)
from allhands.kernels.selection import PLAIN, selection_of
from allhands.runtime.native_calls import at, call, call_checked

_LEAST_GROUP = 16
_BLOCK_BYTES = (
    1 << 18
)  # that are unpacked at a time, so that the results stay in the processor's cache


class FrozenProduct(Protocol):
    """``x @ w.T`` for a weight that is not trained."""

    def run(self, x: mx.array, *, back: bool = False) -> mx.array:
        """Return ``x @ w.T``, or ``x @ w`` if ``back``."""
        ...


class CodedProduct:
    """``x @ w.T`` for the weight ``codes * scales + biases``, which is never dense as a whole."""

    def __init__(self, codes: mx.array, scales: mx.array, biases: mx.array) -> None:
        """Take (out, groups, group size) uint8 codes; (out, groups, 1) float32 scales, biases."""
        outputs, groups, group = codes.shape
        self._shape = outputs, groups * group
        self._held = [np.asarray(each) for each in (codes, scales, biases)]

    @staticmethod
    def fits(group: int) -> bool:
        """Return true if groups of so many codes can be multiplied here."""
        return available() and group >= _LEAST_GROUP and group & (group - 1) == 0

    def run(self, x: mx.array, *, back: bool = False) -> mx.array:
        values = floats(x)
        out, room = new(*x.shape[:-1], self._shape[int(back)])
        multiply_codes(values, self._held, room, back=back)
        return out


def multiply_codes(
    x: Array,
    held: Sequence[Array],
    to: Array,
    *,
    back: bool,
    rows: tuple[int, int] | None = None,
    add: bool = False,
) -> None:
    """Write ``x @ w.T``, or ``x @ w`` if ``back``, to ``to``.

    Args:
        held: codes, scales and biases, as :class:`CodedProduct` takes them.
        rows: number of the first row in a larger weight, and of all its rows; the product is then
            written to these columns of ``to``, or if ``back`` takes these columns of ``x``.
        add: true to add the product to what is there.
    """
    outputs, groups, group = held[0].shape
    first, whole = rows or (0, outputs)
    sizes = (ctypes.c_int * 4)(outputs, groups * group, group, whole)
    tokens = ctypes.c_int(x.size // x.shape[-1])
    offset = first * x.itemsize
    source = ctypes.c_void_p(x.ctypes.data + (offset if back else 0))
    target = ctypes.c_void_p(to.ctypes.data + (0 if back else offset))
    call_checked(
        "allhands_coded_product", source, tokens, *map(at, held), sizes, int(back), int(add), target
    )


def coded(source: Any) -> tuple[mx.array, mx.array, mx.array]:
    """Return codes, scales and biases of an affine layer, or of rows of one, for
    :class:`CodedProduct`.
    """
    shape = *source.scales.shape, source.group_size
    scales, biases = (each.astype(mx.float32)[..., None] for each in (source.scales, source.biases))
    if source.bits in (4, 8):
        packed = np.asarray(source.weight).view(np.uint8)
        return (
            mx.array((_nibbles(packed) if source.bits == 4 else packed).reshape(shape)),
            scales,
            biases,
        )
    ones = mx.ones_like(source.scales, dtype=mx.float32)
    integers = mx.dequantize(
        source.weight, ones, mx.zeros_like(ones), group_size=source.group_size, bits=source.bits
    )
    return integers.astype(mx.uint8).reshape(shape), scales, biases


def _nibbles(packed: Array) -> Array:
    """(out, N) bytes -> (out, 2 N) half bytes, the lower one first: ten times as fast as MLX on a
    CPU.
    """
    made = np.empty((len(packed), 2 * packed.shape[1]), dtype=np.uint8)
    step = max(1, _BLOCK_BYTES // packed.shape[1])
    for start in range(0, len(packed), step):
        wide = packed[start : start + step].astype("<u2")
        np.bitwise_and(wide | wide << 4, 0x0F0F, out=made[start : start + step].view("<u2"))
    return made


def decoded(codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """Return the (out, in) float32 weight of (out, groups, group size) uint8 codes; the arguments
    are those of :class:`CodedProduct`.
    """
    outputs, groups, group = codes.shape
    sizes = (ctypes.c_int * 3)(outputs, groups * group, group)
    out, room = new(outputs, groups * group)
    views = [np.asarray(each) for each in (codes, scales, biases)]
    call("allhands_decode", *map(at, views), sizes, at(room))
    return out


class DenseProduct:
    """``x @ w.T`` for an (out, in) float32 weight."""

    def __init__(self, weight: mx.array) -> None:
        self._weight = floats(weight)

    def run(self, x: mx.array, *, back: bool = False) -> mx.array:
        out, room = new(*x.shape[:-1], self._weight.shape[int(back)])
        multiply(
            rows(x), self._weight, right=not back, into=room.reshape(-1, room.shape[-1]), add=False
        )
        return out


def differentiable(product: FrozenProduct, x: mx.array) -> mx.array:
    """Return the product, with a gradient in ``x``."""
    return with_vjp(product.run, lambda _x, cotangent, _y: product.run(cotangent, back=True))(x)


def applied(layer: Any, product: FrozenProduct, x: mx.array) -> mx.array:
    """Return a ``layer``'s product with ``x``, with a gradient in ``x`` if one goes back through
    the layer.
    """
    return product.run(x) if forward_only(layer) else differentiable(product, x)


def adapted(
    product: FrozenProduct,
    x: mx.array,
    a: mx.array,
    b: mx.array,
    scale: float,
    *,
    frozen: bool = False,
) -> mx.array:
    """Return ``x @ w.T + scale * (x @ a) @ b``; keep only ``x`` and ``x @ a`` for the backward
    pass, or nothing if ``frozen``.
    """
    inner: list[Array] = []

    def forward(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        y = product.run(x)
        inner[:] = [multiply(rows(x), floats(a))]
        multiply(inner[0], floats(b), into=rows(y), scale=scale)
        return y

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        x, a, b = primals
        (in_a, first), (in_b, second) = new(*a.shape), new(*b.shape)
        in_x = product.run(cotangent, back=True)
        towards = multiply(rows(cotangent), floats(b), right=True, scale=scale)
        multiply(towards, floats(a), right=True, into=rows(in_x))
        multiply(rows(x), towards, left=True, into=first, add=False)
        multiply(inner[0], rows(cotangent), left=True, into=second, add=False, scale=scale)
        return in_x, in_a, in_b

    return forward(x, a, b) if frozen else with_vjp(forward, backward)(x, a, b)


def trained(x: mx.array, weight: mx.array) -> mx.array:
    """Return ``x @ weight.T``, with gradients in both."""

    def forward(x: mx.array, weight: mx.array) -> mx.array:
        return DenseProduct(weight).run(x)

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        x, weight = primals
        in_weight, room = new(*weight.shape)
        multiply(rows(cotangent), rows(x), left=True, into=room, add=False)
        return DenseProduct(weight).run(cotangent, back=True), in_weight

    return with_vjp(forward, backward)(x, weight)


# --- layers ---------------------------------------------------------------------------------------


class CodedLayer:
    """A frozen quantised layer whose product is computed natively once :attr:`coded` is set."""

    coded: FrozenProduct | None = None

    def native_product(self, x: mx.array, name: str = "quantized_linear") -> FrozenProduct | None:
        """Return the native product for ``x`` in operation ``name``; ``None``: MLX multiplies."""
        if x.dtype != mx.float32 or selection_of(self).select(name, "cpu") == PLAIN:
            return None
        return self.coded


class AdaptedLinear(LoRALinear):
    """mlx_lm's LoRALinear with :func:`adapted`."""

    def __call__(self, x: mx.array) -> mx.array:
        # With dropout, allhands.model.dropout has put a class of its own there.
        plain = (
            type(self.dropout) is nn.Dropout
            and self.lora_a.dtype == self.lora_b.dtype == x.dtype == mx.float32
        )
        product = _product_of(self.linear, x) if plain else None
        if product is None:
            return super().__call__(x)
        y = adapted(product, x, self.lora_a, self.lora_b, self.scale, frozen=forward_only(self))
        return y + self.linear.bias if "bias" in self.linear else y


def _product_of(linear: Any, x: mx.array) -> FrozenProduct | None:
    """Return the native product of the layer below an adapter; ``None`` if MLX multiplies."""
    if type(linear) is nn.Linear or type(linear) is Linear:
        return DenseProduct(linear.weight) if linear.weight.dtype == mx.float32 else None
    return linear.native_product(x, "adapted_linear")


class Linear(nn.Linear):
    """A linear layer that computes natively in float32."""

    def __call__(self, x: mx.array) -> mx.array:
        if not x.dtype == self.weight.dtype == mx.float32:
            return super().__call__(x)
        if forward_only(self) or "weight" in self._no_grad:
            y = applied(self, DenseProduct(self.weight), x)
        else:
            y = trained(x, self.weight)
        return y + self.bias if "bias" in self else y


def substitute(module: Any) -> bool:
    """Give a linear layer, adapted or not, the native form; return true if it has one."""
    if type(module) is nn.Linear:
        give_form(module, Linear)
    elif type(module) is LoRALinear and (
        type(module.linear) in (nn.Linear, Linear) or _is_coded(module.linear)
    ):
        give_form(module, AdaptedLinear)
    else:
        return False
    return True


def _is_coded(linear: Any) -> bool:
    return getattr(linear, "coded", None) is not None
