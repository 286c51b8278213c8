"""One optimizer update. The only place where sums are divided by token counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator
from allhands.distributed.reduce import BUCKET_BYTES, sum_over_ranks
from allhands.errors import NumericsError
from allhands.model.documents import caches_for
from allhands.model.split import SplitModel, split
from allhands.train.losses import cross_entropy_sum, eager_linear_cross_entropy, linear_cross_entropy
from allhands.train.optim import clip
from allhands.trees import flatten, number, numbers, unflatten

# (inputs, positions, targets[, documents]) -> loss sum; with gradients: -> (loss sum, tree of gradients).
LossFunction = Callable[..., mx.array]
GradFunction = Callable[..., tuple[mx.array, Any]]


def batch_arrays(batch: MicroBatch) -> tuple[mx.array, ...]:
    """The arguments of a :data:`LossFunction`; document numbers only where documents are kept apart."""
    arrays = (batch.inputs, batch.positions, batch.targets)
    return tuple(map(mx.array, arrays if batch.documents is None else (*arrays, batch.documents)))


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer update, the same on every rank but for the times.

    Attributes:
        loss_sum: over all trained tokens of the global batch.
        num_targets: trained tokens of the global batch.
        num_tokens: tokens computed, prompts included, padding not.
        grad_norm: global norm of the mean gradient, before clipping.
        stop_votes: ranks that have been asked to stop.
        compute_s: time of this rank's forward and backward passes.
        comm_s: time of this rank in the all-reduce, waiting for slower ranks included.
    """

    loss_sum: float
    num_targets: int
    num_tokens: int
    grad_norm: float
    stop_votes: int
    compute_s: float
    comm_s: float


def make_loss(model: Any, *, eager: bool, with_grad: bool = True) -> LossFunction:
    """The summed cross-entropy of ``model`` at the trained places.

    Uses the chunked loss over hidden states where the model can be split, the plain one over logits otherwise.
    With ``eager`` the result is a value, not to be differentiated.
    """
    parts = split(model)
    if parts is None:
        return partial(_plain_loss, model)
    return partial(_eager_loss, parts) if eager else partial(_split_loss, parts, with_grad)


def _plain_loss(
    model: Any, inputs: mx.array, positions: mx.array, targets: mx.array, documents: mx.array | None = None
) -> mx.array:
    logits = model(inputs) if documents is None else model(inputs, **_kept_apart(len(model.layers), documents))
    return cross_entropy_sum(logits.reshape(-1, logits.shape[-1])[positions], targets)


def _kept_apart(num_layers: int, documents: mx.array | None) -> dict[str, Any]:
    """Further arguments of a model for rows of several documents."""
    return {} if documents is None else {"cache": caches_for(num_layers, documents)}


def _rows(parts: SplitModel, inputs: mx.array, positions: mx.array, documents: mx.array | None) -> mx.array:
    """(N, D) hidden states at the trained places."""
    hidden = parts.body(inputs, **_kept_apart(parts.num_layers, documents))
    return hidden.reshape(-1, hidden.shape[-1])[positions]


def _split_loss(
    parts: SplitModel,
    with_grad: bool,
    inputs: mx.array,
    positions: mx.array,
    targets: mx.array,
    documents: mx.array | None = None,
) -> mx.array:
    rows = _rows(parts, inputs, positions, documents)
    weight = parts.head_weight().astype(rows.dtype)
    return linear_cross_entropy(rows, weight, targets, train_weight=parts.head_is_trained, with_grad=with_grad)


def _eager_loss(
    parts: SplitModel, inputs: mx.array, positions: mx.array, targets: mx.array, documents: mx.array | None = None
) -> mx.array:
    rows = _rows(parts, inputs, positions, documents)
    weight = parts.head_weight().astype(rows.dtype)
    return eager_linear_cross_entropy(rows, weight, targets, train_weight=False, with_grad=False)[0]


def make_gradient(model: nn.Module, *, eager: bool, compiled: bool = True) -> GradFunction:
    """Loss sum and its gradient in the trainable parameters.

    Either ``eager`` (Linux CPU), or one lazy graph, ``compiled`` or not.
    """
    parts = split(model)
    if eager and parts is not None:
        return partial(_eager_gradient, model, parts)
    function = nn.value_and_grad(model, make_loss(model, eager=False))
    if eager or not compiled:
        return function
    fused = mx.compile(function, inputs=[model.state, mx.random.state], outputs=[mx.random.state])

    def gradient(*arrays: mx.array) -> tuple[mx.array, Any]:
        weights = model.trainable_parameters()
        result = fused(*arrays)
        # Tracing a new shape has left its placeholders in the model.
        model.update(weights)
        return result

    return gradient


def _eager_gradient(
    model: nn.Module,
    parts: SplitModel,
    inputs: mx.array,
    positions: mx.array,
    targets: mx.array,
    documents: mx.array | None = None,
) -> tuple[mx.array, Any]:
    """Forward through the body, loss and its gradient at the head, then backward through the body.

    The backward graph is built before the head's gradient is known, with a buffer in its place that is
    filled in between. So the forward pass is evaluated outside of ``mx.vjp``'s tracing, in which everything,
    the activations of frozen layers too, would be kept.
    """
    names, values = zip(*flatten(model.trainable_parameters()), strict=True)

    def body(*arrays: mx.array) -> mx.array:
        model.update(unflatten(list(zip(names, arrays, strict=True))))
        return _rows(parts, inputs, positions, documents)

    weight = parts.head_weight().astype(mx.float32)
    grad_rows = mx.zeros((len(positions), weight.shape[-1]))
    mx.eval(grad_rows)
    (rows,), grads = mx.vjp(body, list(values), [grad_rows])
    model.update(unflatten(list(zip(names, values, strict=True))))
    mx.eval(rows)
    loss, grad, grad_weight = eager_linear_cross_entropy(rows, weight, targets, train_weight=parts.head_is_trained)
    np.asarray(grad_rows)[...] = np.asarray(grad)
    result = dict(zip(names, grads, strict=True))
    if grad_weight is not None:
        name = parts.head_weight_name(model)
        result[name] = result[name] + grad_weight
    return loss, unflatten(list(result.items()))


class TrainStep:
    """Forward, backward, sum over micro-batches and ranks, one division, clip, update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        communicator: Communicator,
        *,
        eager: bool,
        compiled: bool = True,
        max_grad_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        after_backward: Callable[[Any], None] | None = None,
    ) -> None:
        """``after_backward`` is given the tree of mean gradients of the global batch, before clipping."""
        self.eager = eager
        self._model = model
        self._optimizer = optimizer
        self._communicator = communicator
        self._gradient = make_gradient(model, eager=eager, compiled=compiled)
        # (B, T, N) of every micro-batch so far: a compiled step is traced once for each.
        self.shapes: set[tuple[int, int, int]] = set()
        self._max_grad_norm = max_grad_norm
        self._bucket_bytes = bucket_bytes
        self._after_backward = after_backward

    def __call__(self, micro_batches: Sequence[MicroBatch], *, stop: bool = False) -> StepResult:
        """Update the model by one global batch, of which ``micro_batches`` is this rank's share (may be empty).

        Args:
            stop: this rank has been asked to stop; all ranks learn of it in :attr:`StepResult.stop_votes`.

        Raises:
            NumericsError: loss or gradient is not finite, on every rank alike; the model is unchanged.
        """
        started = time.perf_counter()
        loss, grads = self._accumulate(micro_batches)
        computed = time.perf_counter()
        names = [name for name, _ in grads]
        mine = [loss, *(float(n) for n in _counts(micro_batches)), float(stop)]
        sums, totals = sum_over_ranks(
            self._communicator, [grad for _, grad in grads], mine, bucket_bytes=self._bucket_bytes
        )
        mx.eval(sums, totals)
        reduced = time.perf_counter()
        loss_sum, num_targets, num_tokens, votes = numbers(totals)
        # The one division: by the trained tokens of all micro-batches and all ranks.
        mean = unflatten([(n, g / max(num_targets, 1.0)) for n, g in zip(names, sums, strict=True)])
        if self._after_backward is not None:
            self._after_backward(mean)
        clipped, norm = clip(mean, self._max_grad_norm)
        grad_norm = number(norm)
        _refuse_non_finite(loss_sum, grad_norm)
        self._optimizer.update(self._model, clipped)
        mx.eval(self._model.trainable_parameters(), self._optimizer.state)
        return StepResult(
            loss_sum,
            int(num_targets),
            int(num_tokens),
            grad_norm,
            int(votes),
            computed - started,
            reduced - computed,
        )

    def _accumulate(self, micro_batches: Sequence[MicroBatch]) -> tuple[mx.array, list[tuple[str, mx.array]]]:
        """Sums of loss and gradients over this rank's micro-batches; zeros when it has none."""
        total, grads = mx.zeros(()), None
        for batch in micro_batches:
            self.shapes.add(batch.shape)
            loss, new = self._gradient(*batch_arrays(batch))
            # Contiguous, because a transposed gradient makes the optimizer's pass several times slower.
            new = tree_map(mx.contiguous, new) if grads is None else tree_map(mx.add, grads, new)
            total, grads = total + loss, new
            mx.eval(total, grads)
        if grads is None:
            grads = tree_map(mx.zeros_like, self._model.trainable_parameters())
        return total, flatten(grads)


def _counts(micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
    return sum(batch.num_targets for batch in micro_batches), sum(batch.num_tokens for batch in micro_batches)


def _refuse_non_finite(loss_sum: float, grad_norm: float) -> None:
    for name, value in (("loss", loss_sum), ("gradient", grad_norm)):
        if not math.isfinite(value):
            raise NumericsError(
                f"the {name} is {value}",
                hint="the update was not applied: lower --learning-rate, or add --max-grad-norm 1 or --warmup-steps",
            )
