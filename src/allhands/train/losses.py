"""Losses: each returns a *sum* over trained tokens; ``train/step.py`` alone divides by their number.

The vocabulary is by far the widest layer of a small model: logits of 400 tokens over 49,152 words are
80 MB, several times over in a plain loss. :func:`linear_cross_entropy` therefore takes the hidden states and the
head's weight, only at the places that are trained, and goes through them in chunks, computing the
gradient with the loss (both need the same softmax), so that one chunk of logits exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from allhands.blas import available_cores

CHUNK_ROWS = 256
# Rows that one numpy pass handles at a time: 16 x 49,152 x 4 bytes stay in a core's L2 cache.
_BLOCK_ROWS = 16

# (hidden rows, head weight, targets) -> (summed loss, gradient of the logits).
Chunk = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


def cross_entropy_sum(logits: mx.array, targets: mx.array) -> mx.array:
    """Sum over rows of ``logsumexp(logits) - logits[target]``, in float32: (N, V), (N,) -> scalar.

    Rows with a negative target (padding) count nothing.
    """
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, mx.maximum(targets, 0)[:, None], axis=-1).squeeze(-1)
    return mx.where(targets >= 0, mx.logsumexp(logits, axis=-1) - picked, 0.0).sum()


def linear_cross_entropy(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    *,
    train_weight: bool,
    eager: bool,
    with_grad: bool = True,
) -> mx.array:
    """Cross-entropy of ``hidden @ weight.T``, summed, without ever holding all logits.

    Args:
        hidden: (N, D) hidden states at the trained places.
        weight: (V, D) of the head, dense.
        targets: (N,) token ids; a negative one (padding, only without ``eager``) counts nothing.
        train_weight: whether the gradient of ``weight`` is wanted too.
        eager: evaluate chunk by chunk, with numpy's vectorised exponential (Linux CPU, where MLX's own
            is scalar). Not possible inside ``mx.compile``.
        with_grad: ``False`` for validation: the loss alone, not differentiable.

    Returns:
        Scalar float32, differentiable in ``hidden`` and, with ``train_weight``, in ``weight``.
    """
    chunk = _chunk_in_numpy if eager else _chunk_in_graph
    if not with_grad:
        return _sum_of_chunks(chunk, hidden, weight, targets)

    @mx.custom_function
    def loss(hidden: mx.array, weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        return _in_chunks(chunk, hidden, weight, targets, train_weight)

    @loss.vjp
    def loss_vjp(
        primals: tuple[mx.array, mx.array], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, mx.array]:
        scale = cotangents[0]
        grad_weight = outputs[2] * scale if train_weight else mx.zeros_like(primals[1])
        return (outputs[1] * scale).astype(primals[0].dtype), grad_weight.astype(primals[1].dtype)

    return loss(hidden, weight)[0]


def _sum_of_chunks(chunk: Chunk, hidden: mx.array, weight: mx.array, targets: mx.array) -> mx.array:
    total = mx.zeros((), dtype=mx.float32)
    for start in range(0, hidden.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        total = total + chunk(hidden[rows], weight, targets[rows])[0]
    return total


def _in_chunks(
    chunk: Chunk, hidden: mx.array, weight: mx.array, targets: mx.array, train_weight: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """Loss, d loss / d hidden and (if wanted, else an empty array) d loss / d weight."""
    total = mx.zeros((), dtype=mx.float32)
    grads: list[mx.array] = []
    grad_weight = mx.zeros(weight.shape if train_weight else (0,), dtype=mx.float32)
    for start in range(0, hidden.shape[0], CHUNK_ROWS):
        rows = hidden[start : start + CHUNK_ROWS]
        value, grad_logits = chunk(rows, weight, targets[start : start + CHUNK_ROWS])
        total = total + value
        grads.append(grad_logits @ weight)
        if train_weight:
            grad_weight = grad_weight + (grad_logits.T @ rows).astype(mx.float32)
        if chunk is _chunk_in_numpy:
            # Frees this chunk's logits before the next one's are allocated.
            mx.eval(total, grads[-1], grad_weight)
    return total, mx.concatenate(grads), grad_weight


def _chunk_in_graph(hidden: mx.array, weight: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    logits = (hidden @ weight.T).astype(mx.float32)
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    counts = (targets >= 0)[:, None]
    picked = mx.take_along_axis(logits, mx.maximum(targets, 0)[:, None], axis=-1)
    hot = mx.arange(logits.shape[-1])[None, :] == targets[:, None]
    grad = mx.where(counts, mx.exp(logits - normaliser) - hot, 0.0)
    return mx.where(counts, normaliser - picked, 0.0).sum(), grad.astype(hidden.dtype)


def _chunk_in_numpy(hidden: mx.array, weight: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    logits = hidden @ weight.T
    mx.eval(logits, targets)
    # A view of MLX's own buffer: the logits become their gradient in place, nothing is copied.
    values = np.asarray(logits)
    wanted = np.asarray(targets)
    blocks = [slice(i, i + _BLOCK_ROWS) for i in range(0, len(values), _BLOCK_ROWS)]
    sums = _threads().map(lambda block: _softmax_block(values[block], wanted[block]), blocks)
    return mx.array(sum(sums), dtype=mx.float32), logits


def _softmax_block(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> float:
    """Turn a block of logits into ``softmax - onehot`` in place and return its summed loss."""
    rows = np.arange(len(logits))
    logits -= logits.max(axis=1, keepdims=True)
    picked = logits[rows, targets].astype(np.float64)
    np.exp(logits, out=logits)
    sums = logits.sum(axis=1, keepdims=True)
    loss = np.log(sums[:, 0].astype(np.float64)) - picked
    logits *= 1.0 / sums
    logits[rows, targets] -= 1.0
    return float(loss.sum())


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cores(), thread_name_prefix="allhands-softmax")
