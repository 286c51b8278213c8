"""Calls of the CUDA kernels: shapes in, shapes out. Nothing here is differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from allhands.model.fused import sources
from allhands.trees import number

_BLOCK = 256
_TYPES = (mx.bfloat16, mx.float16, mx.float32)
# Blocks of the RMS norm's gradient: four a multiprocessor of the largest GPUs.
_NORM_BLOCKS = 528


@cache
def available() -> bool:
    """Whether MLX computes on an NVIDIA GPU in this process, and can build a kernel for it."""
    if not (mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu):
        return False
    try:
        return number(sum_of_squares(mx.ones((8,), dtype=mx.bfloat16))) == 8.0
    except RuntimeError:  # no headers, or a GPU that is too old: MLX's own operations compute the same
        return False


def width(dtype: mx.Dtype) -> int:
    """Values of ``dtype`` that a thread reads at a time; rows must be a multiple of it."""
    return 16 // dtype.size


def suits(array: mx.array) -> bool:
    """Whether the kernels know the type, and rows of the last axis are whole."""
    return array.dtype in _TYPES and array.shape[-1] % width(array.dtype) == 0


def dequantize(weight: mx.array, scales: mx.array, biases: mx.array, group_size: int) -> mx.array:
    """As :func:`mlx.core.dequantize` of 4 bits in the affine mode, in half the time: (N, K / 8) uint32 -> (N, K)."""
    rows, words = weight.shape
    count = rows * words
    (out,) = _call(
        "dequantize",
        [weight, scales, biases],
        {"T": scales.dtype, "GROUP": group_size, "COUNT": count},
        -(-count // 1024) * _BLOCK,
        [((rows, 8 * words), scales.dtype)],
    )
    return out


def swiglu(x: mx.array) -> mx.array:
    """``silu(gate) * up`` for rows of gate beside up: (N, 2 F) -> (N, F)."""
    rows, features = x.shape[0], x.shape[1] // 2
    sizes = {"T": x.dtype, "ROWS": rows, "F": features}
    (out,) = _call("swiglu", [x], sizes, rows * features // width(x.dtype), [((rows, features), x.dtype)])
    return out


def swiglu_vjp(x: mx.array, cotangent: mx.array) -> mx.array:
    """Gradient of :func:`swiglu` in ``x``."""
    rows, features = x.shape[0], x.shape[1] // 2
    sizes = {"T": x.dtype, "ROWS": rows, "F": features}
    (out,) = _call("swiglu_vjp", [x, cotangent], sizes, rows * features // width(x.dtype), [(x.shape, x.dtype)])
    return out


def rope(x: mx.array, turns: mx.array, num_heads: int, num_kv_heads: int) -> mx.array:
    """Turn the queries and keys in (B, T, H + 2 KV, D), beside which values stand, by the (>= T, D / 2, 2) table."""
    batch, length, heads, features = x.shape
    sizes = {"T": x.dtype, "ROWS": batch * length, "LENGTH": length, "H": num_heads, "KV": num_kv_heads, "D": features}
    threads = batch * length * heads * features // 2 // width(x.dtype)
    (out,) = _call("rope", [x, turns], sizes, threads, [(x.shape, x.dtype)])
    return out


def rope_vjp(q: mx.array, k: mx.array, v: mx.array, turns: mx.array) -> mx.array:
    """Gradient of :func:`rope` in its input: (B, T, H, D), twice (B, T, KV, D) -> (B, T, H + 2 KV, D)."""
    batch, length, num_heads, features = q.shape
    num_kv_heads = k.shape[2]
    shape = (batch, length, num_heads + 2 * num_kv_heads, features)
    sizes = {"T": q.dtype, "ROWS": batch * length, "LENGTH": length, "H": num_heads, "KV": num_kv_heads, "D": features}
    threads = batch * length * shape[2] * features // 2 // width(q.dtype)
    (out,) = _call("rope_vjp", [q, k, v, turns], sizes, threads, [(shape, q.dtype)])
    return out


def cross_entropy(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Loss of each row, float32, and its gradient: for (N, V) logits and (N,) targets, negative ones counting 0."""
    rows = logits.shape[0]
    loss, grad = _call(
        "cross_entropy",
        [logits, targets.astype(mx.int32)],
        {"T": logits.dtype, "V": logits.shape[1]},
        1024 * rows,
        [((rows,), mx.float32), (logits.shape, logits.dtype)],
        block=1024,
    )
    return loss, grad


def rms_norm_vjp(x: mx.array, weight: mx.array, cotangent: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Gradients of :func:`mlx.core.fast.rms_norm` in (N, D) ``x`` and in (D,) ``weight``, the latter in float32."""
    rows, features = x.shape
    each = max(1, rows // _NORM_BLOCKS)
    blocks = -(-rows // each)
    threads = min(_BLOCK, -(-features // width(x.dtype) // 32) * 32)
    dx, dw = _call(
        "rms_norm_vjp",
        [x, weight, cotangent, mx.array([eps], dtype=mx.float32)],
        {"T": x.dtype, "ROWS": rows, "D": features, "EACH": each, "THREADS": threads},
        blocks * threads,
        [(x.shape, x.dtype), ((blocks, features), mx.float32)],
        block=threads,
    )
    return dx, dw.sum(axis=0)


def sum_of_squares(x: mx.array) -> mx.array:
    """Float32 scalar."""
    blocks = min(1024, -(-x.size // width(x.dtype) // _BLOCK))
    (out,) = _call("sum_of_squares", [x], {"T": x.dtype, "COUNT": x.size}, blocks * _BLOCK, [((blocks,), mx.float32)])
    return out.sum()


def adam(
    gradient: mx.array, weight: mx.array, moments: tuple[mx.array, mx.array], scalars: mx.array
) -> tuple[mx.array, ...]:
    """Weight and moments after an update of Adam, computed in float32; all of one shape and type.

    Args:
        scalars: (8,) float32, see :data:`sources.ADAM`.
    """
    outputs = [(weight.shape, weight.dtype)] * 3
    sizes = {"T": weight.dtype, "COUNT": weight.size}
    arrays = [gradient, weight, *moments, scalars]
    return tuple(_call("adam", arrays, sizes, weight.size // width(weight.dtype), outputs))


_INPUTS: dict[str, tuple[str, list[str], list[str]]] = {
    "dequantize": (sources.DEQUANTIZE, ["w", "s", "b"], ["out"]),
    "swiglu": (sources.SWIGLU, ["x"], ["out"]),
    "swiglu_vjp": (sources.SWIGLU_VJP, ["x", "c"], ["out"]),
    "rope": (sources.ROPE, ["x", "turns"], ["out"]),
    "rope_vjp": (sources.ROPE_VJP, ["q", "k", "v", "turns"], ["out"]),
    "cross_entropy": (sources.CROSS_ENTROPY, ["logits", "targets"], ["loss", "grad"]),
    "sum_of_squares": (sources.SUM_OF_SQUARES, ["x"], ["out"]),
    "adam": (sources.ADAM, ["g", "w", "m", "v", "s"], ["new_w", "new_m", "new_v"]),
    "rms_norm_vjp": (sources.RMS_NORM_VJP, ["x", "w", "c", "eps"], ["dx", "dw"]),
}


@cache
def _kernel(name: str) -> Any:
    source, inputs, outputs = _INPUTS[name]
    return mx.fast.cuda_kernel(
        name=f"allhands_{name}", input_names=inputs, output_names=outputs, source=source, header=sources.HEADER
    )


def _call(
    name: str,
    inputs: list[mx.array],
    sizes: dict[str, Any],
    threads: int,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    block: int = _BLOCK,
) -> list[mx.array]:
    """Run a kernel on at least ``threads`` threads, which are whole blocks; the kernel leaves out those beyond."""
    return _kernel(name)(
        inputs=inputs,
        template=list(sizes.items()),
        grid=(-(-threads // block) * block, 1, 1),
        threadgroup=(block, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
