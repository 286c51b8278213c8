"""Differentiable operations on the kernels, each with the plain form that it replaces.

Other devices compute the plain forms, and tests compare with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from allhands.kernels.fastmath import with_vjp
from allhands.kernels.fused import kernels
from allhands.kernels.selection import (
    BY_RULE,
    PADDED_FROM_TOKENS,
    PLAIN,
    TILE,
    KernelSelection,
    pads_heads,
)
from allhands.runtime.jit_cache import attends_by_cudnn


def swiglu(x: mx.array, selection: KernelSelection = BY_RULE) -> mx.array:
    """``silu(gate) * up`` for rows of gate beside up: (..., 2 F) -> (..., F)."""
    if not fuses_swiglu(x, selection):
        return plain_swiglu(x)
    return _swiglu(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], x.shape[-1] // 2)


def fuses_swiglu(x: mx.array, selection: KernelSelection = BY_RULE) -> bool:
    """Return true if a kernel computes :func:`swiglu` of ``x``."""
    features = x.shape[-1] // 2
    fits = kernels.available() and kernels.suits(x) and features % kernels.width(x.dtype) == 0
    return fits and selection.select("swiglu", "cuda") != PLAIN


@mx.compile
def plain_swiglu(x: mx.array) -> mx.array:
    """:func:`swiglu` in MLX's own operations."""
    gate, up = mx.split(x, 2, axis=-1)
    return nn.silu(gate) * up


_swiglu = with_vjp(kernels.swiglu, lambda x, cotangent, _: kernels.swiglu_vjp(x, cotangent)[0])


def swiglu_product(x: mx.array, weight: mx.array, again: mx.array | None = None) -> mx.array:
    """``swiglu(x) @ weight.T``; the backward pass computes ``swiglu(x)`` again.

    (N, 2 F), (M, F) -> (N, M), with gradients in both; only if :func:`fuses_swiglu`.

    Args:
        again: see :func:`trained_product`.
    """

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        x, weight = primals
        dx, y = kernels.swiglu_vjp(x, cotangent @ (weight if again is None else again), again=True)
        return dx, cotangent.T @ y

    return with_vjp(lambda x, weight: kernels.swiglu(x) @ weight.T, backward)(x, weight)


def attended_length(x: mx.array, mask: Any, selection: KernelSelection = BY_RULE) -> int:
    """Return the length L to which attention pads its rows: T, if that is of no use.

    MLX has a gradient of attention without a matrix of scores only for rows of a multiple of
    :data:`TILE` (``ScaledDotProductAttentionVJP::use_fallback`` of its CUDA back-end).

    Args:
        x: (B, T, heads, D), queries, keys and values.
        mask: as MLX's attention takes it. Only with a causal one nothing sees the padding.
    """
    length = x.shape[1]
    if not (isinstance(mask, str) and mask == "causal" and length >= PADDED_FROM_TOKENS):
        return length
    fits = kernels.available() and kernels.in_half(x) and pads_heads(x.shape[-1])
    if not (fits and attends_by_cudnn()) or selection.select("attention", "cuda") == PLAIN:
        return length
    return -(-length // TILE) * TILE


def rope_split(
    x: mx.array,
    turns: mx.array,
    heads: tuple[int, int],
    selection: KernelSelection = BY_RULE,
    length: int | None = None,
    norms: kernels.HeadNorms | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Split rows of queries, keys and values side by side; turn queries and keys by position.

    Args:
        x: (B, T, H + 2 KV, D).
        turns: (T or more, D / 2, 2) float32 cosine and sine for each position and pair of features
            (i, i + D / 2).
        heads: H and KV.
        length: positions L of the outputs, which are zeros from T on; default: T.
        norms: norms of queries and keys before they are turned; only if :func:`fuses_norms`.

    Returns:
        (B, H, L, D) and twice (B, KV, L, D).
    """
    length = x.shape[1] if length is None else length
    if _fuses_rope(x, selection):
        return _fused_rope(x, turns, heads, length, norms)
    turned = plain_rope(x, turns, sum(heads))
    longer = [(0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)]
    return _parted(mx.pad(turned, longer), heads)


def _fuses_rope(x: mx.array, selection: KernelSelection) -> bool:
    halves = x.shape[-1] // 2
    fits = kernels.available() and kernels.suits(x) and halves % kernels.width(x.dtype) == 0
    return fits and selection.select("rope", "cuda") != PLAIN


def fuses_norms(x: mx.array, norms: kernels.HeadNorms, selection: KernelSelection) -> bool:
    """Return true if a kernel computes ``norms`` in :func:`rope_split`."""
    fits = norms.fits(x) and _fuses_rope(x, selection)
    return fits and selection.select("rms_norm", "cuda") != PLAIN


def plain_rope(x: mx.array, turns: mx.array, num_turned: int) -> mx.array:
    """(B, T, heads, D) with the first ``num_turned`` heads turned, in MLX's own operations."""
    cosines, sines = turns[: x.shape[1], None, :, 0], turns[: x.shape[1], None, :, 1]
    first, second = mx.split(x[:, :, :num_turned].astype(mx.float32), 2, axis=-1)
    turned = mx.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )
    return mx.concatenate([turned.astype(x.dtype), x[:, :, num_turned:]], axis=2)


def _parted(x: mx.array, heads: tuple[int, int]) -> tuple[mx.array, mx.array, mx.array]:
    q, k, v = mx.split(x.transpose(0, 2, 1, 3), [heads[0], sum(heads)], axis=1)
    return q, k, v


def _fused_rope(
    x: mx.array,
    turns: mx.array,
    heads: tuple[int, int],
    length: int,
    norms: kernels.HeadNorms | None,
) -> tuple[mx.array, mx.array, mx.array]:
    tokens = x.shape[1]

    def forward(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        return _parted(kernels.rope(x, turns, heads, length, norms), heads)

    def backward(x: mx.array, cotangents: tuple[mx.array, ...], _y: Any) -> mx.array:
        q, k, v = (cotangent.transpose(0, 2, 1, 3) for cotangent in cotangents)
        return kernels.rope_vjp((q, k, v), turns, tokens, x, norms)

    return with_vjp(forward, backward)(x)


def rms_norm(
    x: mx.array,
    weight: mx.array,
    eps: float,
    *,
    trained: bool,
    selection: KernelSelection = BY_RULE,
) -> mx.array:
    """:func:`mlx.core.fast.rms_norm` with a gradient of our own: (..., D), (D,) -> (..., D)."""
    return added_rms_norm(x, None, weight, eps, trained=trained, selection=selection)[1]


def added_rms_norm(
    x: mx.array,
    residual: mx.array | None,
    weight: mx.array,
    eps: float,
    *,
    trained: bool,
    selection: KernelSelection = BY_RULE,
) -> tuple[mx.array, mx.array]:
    """Return ``x + residual`` and its norm, in one pass forward and one backward; without a
    residual, ``x`` and its norm.
    """
    fits = kernels.available() and kernels.holds_norm(x) and x.dtype == weight.dtype
    if not fits or selection.select("rms_norm", "cuda") == PLAIN:
        total = x if residual is None else x + residual
        return total, mx.fast.rms_norm(total, weight, eps)
    shape, rows = x.shape, x.reshape(-1, x.shape[-1])
    summands = [rows] if residual is None else [rows, residual.reshape(rows.shape)]

    def forward(*primals: mx.array) -> tuple[mx.array, mx.array]:
        matrix = primals[-1] if trained else weight
        out, total = kernels.rms_norm(
            primals[0], None if residual is None else primals[1], matrix, eps
        )
        return (primals[0] if residual is None else total), out

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        matrix = primals[-1] if trained else weight
        dx, dw = kernels.rms_norm_vjp(
            outputs[0], matrix, cotangents[1], eps, residual=cotangents[0], trained=trained
        )
        return (*[dx] * len(summands), *([dw.astype(matrix.dtype)] if trained else []))

    total, out = with_vjp(forward, backward)(*summands, *([weight] if trained else []))
    return total.reshape(shape), out.reshape(shape)


def rows_at(x: mx.array, places: mx.array, targets: mx.array) -> mx.array:
    """``x[places]``: (M, D), (N,) -> (N, D). Only places whose (N,) target is negative may occur
    twice.

    Their gradient is taken as zero.
    """
    if not (kernels.available() and kernels.suits(x)):
        return x[places]
    take = with_vjp(
        lambda x: kernels.take_rows(x, places),
        lambda x, cotangent, _: kernels.put_rows(cotangent, places, targets, x.shape[0]),
    )
    return take(x)


def product_with(
    dense: Callable[[mx.array], mx.array], again: Callable[[mx.array], mx.array] | None = None
) -> Callable[[mx.array], mx.array]:
    """Return the function ``x @ dense(x).T`` for a frozen weight that is made anew for the backward
    pass instead of being kept.

    ``dense`` gets the weight's factor, after which it must make the weight. ``again`` makes the
    weight for the backward pass; default: ``dense``.
    """
    back = dense if again is None else again

    def backward(x: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
        return (cotangent @ back(cotangent)).astype(x.dtype)

    return with_vjp(lambda x: x @ dense(x).T, backward)


def trained_product(x: mx.array, weight: mx.array, again: mx.array | None = None) -> mx.array:
    """``x @ weight.T``, whose gradient in ``weight`` lies in memory like the weight, as optimizers
    read it.

    MLX's own lies transposed. (N, K), (M, K) -> (N, M).

    Args:
        again: another array with the weight, for the backward pass, which then does not keep
            ``weight`` itself.
    """

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        x, weight = primals
        return cotangent @ (weight if again is None else again), cotangent.T @ x

    return with_vjp(lambda x, weight: x @ weight.T, backward)(x, weight)
