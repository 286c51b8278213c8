"""Quantised layers that stay packed, for CPUs with little memory: a product decodes one block of
rows at a time.

Scales and biases keep the type in which they are stored. If the mode is affine and operations
compute at once, blocks are multiplied as in :class:`native_products.CodedProduct`, otherwise by MLX
as dense arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.dora import DoRALinear

from allhands.kernels import native_products
from allhands.kernels.fastmath import with_vjp
from allhands.kernels.native_arrays import floats, forward_only, new

# Size of a block: values whose codes stay in the processor's cache, and the fewest rows with which
# a product is fast.
_BLOCK_VALUES, _LEAST_ROWS = 1 << 20, 256
# Up to so many tokens MLX's slow product takes less time than making codes.
_FEW_TOKENS = 4


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a quantised weight, as :func:`mlx.core.quantize` gives them.

    Attributes:
        weight: (rows, words) uint32.
        scales: (rows, groups); ``biases`` likewise, which some modes do not have.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str

    def dense(self) -> mx.array:
        """(rows, width) float32."""
        scales, biases = self.scales, self.biases
        if self.mode == "affine":  # MLX would compute in the type of the scales, and round to it
            scales, biases = (
                scales.astype(mx.float32),
                None if biases is None else biases.astype(mx.float32),
            )
        how: Any = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return mx.dequantize(self.weight, scales, biases, **how).astype(mx.float32)


def rows_of(layer: Any, rows: Any) -> QuantizedRows:
    """Rows of a quantised layer's weight, by a slice or by numbers."""
    biases = layer.get("biases")
    parts = layer.weight[rows], layer.scales[rows], None if biases is None else biases[rows]
    return QuantizedRows(*parts, layer.group_size, layer.bits, layer.mode)


def blocks_of_rows(layer: Any) -> Iterator[tuple[int, QuantizedRows]]:
    """Yield a quantised layer's weight in parts, each with the number of its first row."""
    outputs, groups = layer.scales.shape
    step = max(_LEAST_ROWS, _BLOCK_VALUES // (groups * layer.group_size))
    for first in range(0, outputs, step):
        yield first, rows_of(layer, slice(first, first + step))


class PackedProduct:
    """:class:`native_products.FrozenProduct` of a weight that stays packed."""

    def __init__(self, layer: Any) -> None:
        """Take an affine quantised layer, whose arrays are not changed."""
        self._layer = layer
        outputs, groups = layer.scales.shape
        self.shape = outputs, groups * layer.group_size

    def run(self, x: mx.array, *, back: bool = False) -> mx.array:
        values = floats(x)
        out, room = new(*x.shape[:-1], self.shape[int(back)])
        for first, block in blocks_of_rows(self._layer):
            held = [np.asarray(each) for each in native_products.coded(block)]
            rows = first, self.shape[0]
            native_products.multiply_codes(
                values, held, room, back=back, rows=rows, add=back and first > 0
            )
        return out


class _PackedLayer(native_products.CodedLayer):
    """Common methods of the packed forms."""

    coded: PackedProduct | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def multiply_at_once(self: Any) -> None:
        """From now on compute natively if possible: when called, not in a graph."""
        if self.mode == "affine" and native_products.CodedProduct.fits(self.group_size):
            object.__setattr__(self, "coded", PackedProduct(self))

    def product(self: Any, x: mx.array) -> mx.array:
        """``x @ w.T`` in float32."""
        x = x.astype(mx.float32)
        if x.size // x.shape[-1] <= _FEW_TOKENS and forward_only(self) and self.mode == "affine":
            parts = self.weight, self.scales.astype(mx.float32), self.biases.astype(mx.float32)
            return mx.quantized_matmul(
                x, *parts, transpose=True, group_size=self.group_size, bits=self.bits
            )
        if (product := self.native_product(x)) is not None:
            return native_products.applied(self, product, x)
        return with_vjp(
            partial(_by_blocks, self), lambda _x, cotangent, _y: _by_blocks_back(self, cotangent)
        )(x)


def _by_blocks(layer: Any, x: mx.array) -> mx.array:
    """``x @ w.T`` by MLX's operations; one block of the weight is dense at a time."""
    return mx.concatenate([x @ block.dense().T for _, block in blocks_of_rows(layer)], axis=-1)


def _by_blocks_back(layer: Any, cotangent: mx.array) -> mx.array:
    """``cotangent @ w`` in the same way."""
    dense = ((first, block.dense()) for first, block in blocks_of_rows(layer))
    parts = (cotangent[..., first : first + len(each)] @ each for first, each in dense)
    return sum(parts, mx.zeros(()))


class PackedLinear(_PackedLayer, nn.QuantizedLinear):
    """A frozen linear layer that stays packed: a form of :class:`mlx.nn.QuantizedLinear`."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(x)
        return y + self.bias if "bias" in self else y


class PackedEmbedding(_PackedLayer, nn.QuantizedEmbedding):
    """A table of embeddings that stays packed: a form of :class:`mlx.nn.QuantizedEmbedding`."""

    def __call__(self, x: mx.array) -> mx.array:
        return rows_of(self, x).dense()

    def as_linear(self, x: mx.array) -> mx.array:
        return self.product(x)


PACKED = (PackedLinear, PackedEmbedding)


class PackedDoRALinear(DoRALinear):
    """mlx_lm's DoRALinear over a packed layer, whose dense weight is never kept, not even for the
    backward pass.
    """

    def __call__(self, x: mx.array) -> mx.array:
        z = (self.dropout(x) @ self.lora_a) @ self.lora_b
        out = self.linear.product(x) + (self.scale * z).astype(x.dtype)
        out = (self.m / mx.stop_gradient(self._norms())).astype(x.dtype) * out
        return out + self.linear.bias if "bias" in self.linear else out

    def _norms(self) -> mx.array:
        """(out,) norms of the adapted weight's rows."""
        at_once = self.linear.coded is not None
        a, b = self.lora_a, self.lora_b
        if at_once:  # copies that are not differentiated: else every block would be kept
            a, b = mx.array(floats(a)), mx.array(floats(b))
        found: list[mx.array] = []
        for first, block in blocks_of_rows(self.linear):
            weight = block.dense()
            adapted = weight + (self.scale * b[:, first : first + len(weight)].T) @ a.T
            found.append(mx.linalg.norm(adapted, axis=1))
            if at_once:
                mx.eval(found[-1])
        return mx.concatenate(found)
