"""Losses: each returns a *sum* over trained tokens; ``train/step.py`` alone divides by their
number.

The vocabulary is by far the widest layer of a small model: logits of 400 tokens over 49,152 words
are 80 MB, several times over in a plain loss. :func:`linear_cross_entropy` therefore takes the
hidden states and the head's weight, only at the places that are trained, and goes through them in
chunks, computing the gradient with the loss (both need the same softmax), so that one chunk of
logits exists at a time. There are two forms of it: a lazy graph, and an eager one for Linux CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from allhands.kernels import native_arrays
from allhands.kernels.fused import kernels
from allhands.kernels.packed import PackedProduct
from allhands.kernels.selection import BY_RULE, PLAIN, KernelSelection, Kind
from allhands.runtime.blas import available_cores
from allhands.runtime.jit_cache import launches_directly

Weight = TypeVar("Weight")

CHUNK_ROWS = 256
# Rows that one numpy pass handles at a time: 16 x 49,152 x 4 bytes stay in a core's L2 cache.
_BLOCK_ROWS = 16


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
    with_grad: bool = True,
    selection: KernelSelection = BY_RULE,
) -> mx.array:
    """Return the summed cross-entropy of ``hidden @ weight.T`` as one lazy graph, which never holds
    all logits.

    Args:
        hidden: (N, D) hidden states at the trained places.
        weight: (V, D) of the head, dense.
        targets: (N,) token ids; a negative one (padding) counts nothing.
        train_weight: True if the gradient of ``weight`` is wanted too.
        with_grad: ``False`` for validation: the loss alone, not differentiable.
        selection: decides the size of chunks and the form of the softmax.

    Returns:
        Scalar float32, differentiable in ``hidden`` and, with ``train_weight``, in ``weight``.
    """
    if not with_grad:
        size = _rows_of_chunk(weight, selection)
        losses = (_losses_in_graph(*part) for part in _chunks(hidden, weight, targets, size))
        return sum((each.sum() for each in losses), mx.zeros(()))

    # The forward pass computes the gradients too. Its inputs are stopped, so that MLX does not
    # differentiate this computation.
    def forward(*primals: mx.array) -> tuple[mx.array, ...]:
        rows = mx.stop_gradient(primals[0])
        matrix = mx.stop_gradient(primals[1]) if train_weight else weight
        return _graph_of_chunks(rows, matrix, targets, train_weight, selection)

    def backward(
        primals: mx.array | tuple[mx.array, ...],
        cotangents: tuple[mx.array, ...],
        outputs: tuple[mx.array, ...],
    ) -> tuple[mx.array, ...]:
        wanted = (primals,) if isinstance(primals, mx.array) else primals
        return tuple(
            _scaled(outputs[i + 1], cotangents[0], primal.dtype) for i, primal in enumerate(wanted)
        )

    loss: Any = mx.custom_function(forward)
    loss.vjp(backward)
    return loss(hidden, weight)[0] if train_weight else loss(hidden)[0]


def _scaled(gradient: mx.array, factor: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return ``gradient * factor`` in ``dtype``; ``factor`` is a float32 scalar."""
    if gradient.dtype == dtype and kernels.available() and kernels.suits(gradient):
        return kernels.scale(gradient, factor)
    return (gradient * factor).astype(dtype)


def eager_linear_cross_entropy(
    hidden: mx.array,
    weight: mx.array | PackedProduct,
    targets: mx.array,
    *,
    train_weight: bool,
    with_grad: bool = True,
    selection: KernelSelection = BY_RULE,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Compute :func:`linear_cross_entropy` at once, chunk by chunk: for Linux CPUs.

    MLX's own exponential is scalar there; numpy's is 20 times faster and works in place on MLX's
    buffers. Not to be called inside ``mx.grad`` or ``mx.compile``. A ``weight`` that is not
    trained may be a :class:`PackedProduct`. ``hidden`` and a dense ``weight`` are float32.

    Returns:
        Loss sum, its gradient in ``hidden`` (N, D) and in ``weight`` (V, D); ``None`` for a
        gradient that is not wanted.
    """
    total = mx.zeros((), dtype=mx.float32)
    grads: list[mx.array] = []
    grad_weight = mx.zeros(weight.shape, dtype=mx.float32) if train_weight and with_grad else None
    add = _add_product_in_place if native_arrays.available() else _add_product
    size = _rows_of_chunk(weight, selection)
    for rows, matrix, wanted in _chunks(hidden, weight, targets, size):
        value, grad_logits = _chunk_in_numpy(rows, matrix, wanted)
        total = total + value
        if with_grad:
            back = (
                matrix.run(grad_logits, back=True)
                if isinstance(matrix, PackedProduct)
                else grad_logits @ matrix
            )
            grads.append(back)
        if grad_weight is not None:
            grad_weight = add(grad_weight, grad_logits, rows)
        # Frees this chunk's logits before the next one's are allocated.
        mx.eval(total, grads, grad_weight)
        del grad_logits
    if not grads:  # no gradients are wanted, or there are no rows
        return total, mx.zeros(hidden.shape) if with_grad else None, grad_weight
    return total, mx.concatenate(grads), grad_weight


def _add_product(total: mx.array, x: mx.array, y: mx.array) -> mx.array:
    """Return ``total + x.T @ y``."""
    return total + x.T @ y


def _add_product_in_place(total: mx.array, x: mx.array, y: mx.array) -> mx.array:
    """Compute :func:`_add_product` in ``total`` itself, which is as large as the head's weight.

    Nothing else may reference ``total``.
    """
    native_arrays.multiply(
        native_arrays.rows(x), native_arrays.rows(y), left=True, into=np.asarray(total)
    )
    return total


def eager_loss(
    hidden: mx.array,
    weight: mx.array | None,
    targets: mx.array,
    *,
    values: mx.array | PackedProduct,
    train_weight: bool,
    selection: KernelSelection = BY_RULE,
) -> mx.array:
    """Compute :func:`eager_linear_cross_entropy` as a loss that MLX can differentiate in ``hidden``
    and, with ``train_weight``, in ``weight``.

    Args:
        weight: (V, D) of the head; used only with ``train_weight``, to receive the gradient.
        values: the values of ``weight`` in an array that is not being differentiated. MLX would
            keep all results computed from ``weight`` itself, the logits too.
    """

    def forward(*primals: mx.array) -> tuple[mx.array, ...]:
        rows = mx.array(np.asarray(primals[0]))
        found = eager_linear_cross_entropy(
            rows, values, targets, train_weight=train_weight, selection=selection
        )
        return tuple(each for each in found if each is not None)

    def backward(
        _primals: Any, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> Any:
        made = outputs[1:]
        if cotangents[0].item() != 1.0:
            made = tuple(output * cotangents[0] for output in made)
        return made if train_weight else made[0]

    loss: Any = mx.custom_function(forward)
    loss.vjp(backward)
    return loss(hidden, weight)[0] if train_weight else loss(hidden)[0]


def _chunks(
    hidden: mx.array, weight: Weight, targets: mx.array, size: int
) -> Iterator[tuple[mx.array, Weight, mx.array]]:
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        yield hidden[rows], weight, targets[rows]


def _rows_of_chunk(weight: mx.array | PackedProduct, selection: KernelSelection) -> int:
    """Return the number of rows in a chunk.

    On a GPU a chunk is as large as the memory for its logits allows, so that products run at full
    speed.
    """
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    kind: Kind = "cpu" if not on_gpu else "metal" if mx.metal.is_available() else "cuda"
    form = selection.select("loss_chunk", kind)
    if not form.endswith("MB"):
        return int(form)
    dtype = mx.float32 if isinstance(weight, PackedProduct) else weight.dtype
    rows = (int(form[:-2]) << 20) // (weight.shape[0] * dtype.size)
    return max(CHUNK_ROWS, rows // CHUNK_ROWS * CHUNK_ROWS)


def _graph_of_chunks(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    train_weight: bool,
    selection: KernelSelection,
) -> tuple[mx.array, ...]:
    """Return the loss, d loss / d hidden and, if wanted, d loss / d weight."""
    size = _rows_of_chunk(weight, selection)
    if train_weight and kernels.available() and launches_directly():
        # The gradient takes the logits' place. Smaller chunks would save less memory than they
        # need: each chunk has a gradient of the whole weight.
        size = max(size, 4 * weight.shape[1])
    losses: list[mx.array] = []
    grads: list[mx.array] = []
    parts: list[mx.array] = []
    for rows, matrix, wanted in _chunks(hidden, weight, targets, size):
        if grads:
            # One after the other: MLX would compute the logits of several chunks ahead.
            rows = cast("mx.array", mx.depends(rows, [grads[-1]]))
        each, grad_logits = _chunk_in_graph(rows, matrix, wanted, selection)
        losses.append(each)
        grads.append(grad_logits @ matrix)
        if train_weight:
            parts.append(grad_logits.T @ rows)
    if not grads:
        nothing = (mx.zeros((), dtype=mx.float32), mx.zeros_like(hidden))
        return (*nothing, mx.zeros_like(weight)) if train_weight else nothing
    found = (mx.concatenate(losses).sum(), mx.concatenate(grads))
    if not train_weight:
        return found
    # Summed in float32, so that the sum is rounded only once.
    first, *others = parts
    return (
        *found,
        sum((part.astype(mx.float32) for part in others), first.astype(mx.float32))
        if others
        else first,
    )


def _losses_in_graph(hidden: mx.array, weight: mx.array, targets: mx.array) -> mx.array:
    """Return the losses, (N,) float32, 0 for padding."""
    each = mx.fast.cross_entropy((hidden @ weight.T).astype(mx.float32), mx.maximum(targets, 0))
    return mx.where(targets >= 0, each, 0.0)


def _chunk_in_graph(
    hidden: mx.array, weight: mx.array, targets: mx.array, selection: KernelSelection
) -> tuple[mx.array, mx.array]:
    """Return the losses, (N,) and 0 for padding, and their gradient in the logits, (N, V)."""
    logits = hidden @ weight.T
    fits = kernels.available() and kernels.suits(logits)
    if fits and selection.select("cross_entropy", "cuda") != PLAIN:
        return kernels.cross_entropy(logits, targets)
    logits = logits.astype(mx.float32)
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    counts = (targets >= 0)[:, None]
    picked = mx.take_along_axis(logits, mx.maximum(targets, 0)[:, None], axis=-1)
    hot = mx.arange(logits.shape[-1])[None, :] == targets[:, None]
    grad = mx.where(counts, mx.exp(logits - normaliser) - hot, 0.0)
    return mx.where(counts, normaliser - picked, 0.0).squeeze(-1), grad.astype(hidden.dtype)


def _chunk_in_numpy(
    hidden: mx.array, weight: mx.array | PackedProduct, targets: mx.array
) -> tuple[mx.array, mx.array]:
    logits = weight.run(hidden) if isinstance(weight, PackedProduct) else hidden @ weight.T
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
    padding = targets < 0
    logits[padding] = 0.0
    return float(loss[~padding].sum())


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cores(), thread_name_prefix="allhands-softmax")
