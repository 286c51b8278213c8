"""Quantised layers on a CPU: multiply by the dequantised weight, which BLAS can.

MLX multiplies quantised weights at 3 GFLOP/s there, and dequantises packed ones slowly. Two substitutes hold
the same values: the dense weight (fastest, 4 bytes a value), and codes of one byte from which the dense weight is
made at each use (at 350 tokens 7 % slower, 1.25 bytes a value).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.dora import DoRALinear
from numpy.typing import NDArray

from allhands.io.trees import unflatten
from allhands.kernels import native_products
from allhands.kernels.fused.ops import product_with
from allhands.kernels.native_arrays import available, forward_only
from allhands.kernels.selection import PLAIN, selection_of
from allhands.model.adapters import count_parameters
from allhands.model.split import dense_weight
from allhands.runtime.accelerator import Accelerator

# Of the device's memory.
_SMALL_SHARE = 0.025
_BLOCK_BYTES = 1 << 18  # that are unpacked at a time: what is made of them stays in the processor's cache


class UnpackedLinear(nn.Module):
    """A frozen quantised linear layer that keeps one code a byte and is dense only while it multiplies.

    Made from an affine :class:`mlx.nn.QuantizedLinear`, whose dequantised weight it has bit for bit.
    """

    def __init__(self, source: nn.QuantizedLinear) -> None:
        super().__init__()
        self.codes, self.scales, self.biases = _coded(source)
        if "bias" in source:
            self.bias = source.bias.astype(mx.float32)
        self.coded: native_products.CodedProduct | None = None
        self._bits = source.bits
        self._multiply = product_with(self._dense)
        self.freeze()

    @property
    def input_dims(self) -> int:
        """Width of the input."""
        return self.codes.shape[1] * self.codes.shape[2]

    def _dense(self) -> mx.array:
        """(out, in) float32 weight."""
        return (self.codes.astype(mx.float32) * self.scales + self.biases).reshape(self.codes.shape[0], -1)

    def multiply_at_once(self) -> None:
        """Compute natively from now on if that is possible: when called, not in a graph."""
        if native_products.CodedProduct.fits(self.codes):
            self.coded = native_products.CodedProduct(self.codes, self.scales, self.biases)

    def multiplies_natively(self, x: mx.array, name: str = "quantized_linear") -> bool:
        """Whether the product with ``x``, alone or as a part of the choice ``name``, is computed natively."""
        if self.coded is None or x.dtype != mx.float32:
            return False
        rows, groups, group = self.codes.shape
        shape = (rows, groups * group, self._bits, group)
        return selection_of(self).select(name, "cpu", x.dtype, x.size // x.shape[-1], shape) != PLAIN

    def __call__(self, x: mx.array) -> mx.array:
        if self.coded is not None and self.multiplies_natively(x):
            y = self.coded.run(x) if forward_only(self) else native_products.differentiable(self.coded, x)
        else:
            y = self._multiply(x)
        return y + self.bias if "bias" in self else y


def _coded(source: Any) -> tuple[mx.array, mx.array, mx.array]:
    """Of an affine layer: (out, groups, group size) uint8 codes, and (out, groups, 1) float32 scales and biases."""
    shape = *source.scales.shape, source.group_size
    scales, biases = (each.astype(mx.float32)[..., None] for each in (source.scales, source.biases))
    if source.bits in (4, 8):
        packed = np.asarray(source.weight).view(np.uint8)
        return mx.array((_nibbles(packed) if source.bits == 4 else packed).reshape(shape)), scales, biases
    ones = mx.ones_like(source.scales, dtype=mx.float32)
    integers = mx.dequantize(source.weight, ones, mx.zeros_like(ones), group_size=source.group_size, bits=source.bits)
    return integers.astype(mx.uint8).reshape(shape), scales, biases


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(out, 2 N) halves of (out, N) bytes, the lower one first: ten times as fast as MLX makes them there."""
    made = np.empty((len(packed), 2 * packed.shape[1]), dtype=np.uint8)
    step = max(1, _BLOCK_BYTES // packed.shape[1])
    for start in range(0, len(packed), step):
        wide = packed[start : start + step].astype("<u2")
        np.bitwise_and(wide | wide << 4, 0x0F0F, out=made[start : start + step].view("<u2"))
    return made


def replace_quantized(model: nn.Module, accelerator: Accelerator, *, compact: bool) -> int:
    """Replace the quantised layers of a frozen model, adapters on them or not, by what is fast on this device.

    The values, and so the adapters that come out, are those of the quantised model. CPUs need it; with CUDA, which
    builds its kernels for quantised products when they are first used (a minute and more), it is done for models
    that are small beside the device's memory, which then hold their weights in the type that they compute in.

    Args:
        compact: on a CPU, hold the blocks' layers as codes (training: many tokens at a time) instead of dense
            (generation: one token at a time, where making the weight would cost more than using it).

    Returns:
        Number of layers replaced.
    """
    if accelerator.kind == "cpu":
        return _substitute_all(model, compact=compact, dtype=mx.float32)
    if accelerator.kind == "cuda" and held_dense(count_parameters(model), accelerator.memory_bytes):
        return _substitute_all(model, compact=False, dtype=None)
    return 0


def held_dense(parameters: int, memory_bytes: int) -> bool:
    """Whether a quantised model of so many parameters is made dense for CUDA, with two bytes each."""
    return 2 * parameters < _SMALL_SHARE * memory_bytes


def _substitute_all(model: nn.Module, *, compact: bool, dtype: mx.Dtype | None) -> int:
    """Replace every quantised layer by a dense one, or with ``compact`` by codes where that is possible.

    Args:
        dtype: of dense weights, or ``None`` for what the layer computes in.

    Returns:
        Number of layers replaced.
    """
    adapted_weights = {name for name, module in model.named_modules() if isinstance(module, DoRALinear)}
    found = [(name, module) for name, module in model.named_modules() if _is_quantized(module)]
    count = len(found)
    while found:
        # One by one and forgotten, so that both forms of the whole model never stand in memory together.
        name, module = found.pop()
        # DoRA needs the weight itself, and the head its own dense form.
        in_block = ".layers." in f".{name}"
        as_codes = compact and in_block and name.rpartition(".")[0] not in adapted_weights
        new = _substitute(module, compact=as_codes, dtype=dtype)
        mx.eval(new.parameters())
        model.update_modules(unflatten([(name, new)]))
        del module
    return count


def hold_in_float32(model: nn.Module) -> None:
    """Let a CPU compute ``model`` in float32, several times as fast there as any other type."""
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def _is_quantized(module: Any) -> bool:
    # Exact types: a class derived from one of them may compute in its own way.
    return type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding)


def _substitute(module: Any, *, compact: bool, dtype: mx.Dtype | None) -> nn.Module:
    if isinstance(module, nn.QuantizedLinear) and compact and module.mode == "affine":
        return UnpackedLinear(module)
    new: nn.Module = nn.Linear(1, 1, bias="bias" in module)
    if isinstance(module, nn.QuantizedEmbedding):
        new = nn.Embedding(1, 1)
    elif "bias" in module:
        new.bias = module.bias.astype(dtype or module.bias.dtype)
    if dtype is not None and dtype == mx.float32 and module.mode == "affine" and available():
        new.weight = native_products.decoded(*_coded(module))
    else:
        weight = dense_weight(module)
        new.weight = weight.astype(dtype or weight.dtype)
    new.freeze()
    return new
