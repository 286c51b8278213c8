"""Language models: the summed cross-entropy of the next token at every trained place.

It is computed at once on Linux CPUs, and as a lazy graph elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from allhands.data.loader import MicroBatch
from allhands.data.pieces import Pieces
from allhands.distributed.backend import Communicator
from allhands.errors import ConfigError
from allhands.io.trees import flatten, unflatten
from allhands.kernels import native
from allhands.kernels.context import caches_across
from allhands.kernels.documents import caches_for
from allhands.kernels.fused.ops import rows_at
from allhands.kernels.packed import PackedProduct
from allhands.model.split import SplitModel, split
from allhands.objectives.base import GradFunction, SumsFunction
from allhands.objectives.cross_entropy import (
    cross_entropy_sum,
    eager_linear_cross_entropy,
    eager_loss,
    linear_cross_entropy,
)

# (inputs, positions, targets[, documents]) -> loss sum.
LossFunction = Callable[..., mx.array]
# (number of blocks, inputs, *documents) -> further arguments of a model.
Caches = Callable[..., dict[str, Any]]


def _kept_apart(num_layers: int, _inputs: mx.array, *documents: mx.array) -> dict[str, Any]:
    """Return the keyword arguments of a model that keep the documents of a row apart; none if there
    are no document numbers.
    """
    return {"cache": caches_for(num_layers, documents[0])} if documents else {}


def _across_ranks(
    group: Communicator, num_layers: int, inputs: mx.array, *documents: mx.array
) -> dict[str, Any]:
    """Return the keyword arguments of a model for this rank's pieces of rows."""
    return {"cache": caches_across(num_layers, inputs, documents[0] if documents else None, group)}


class CausalLM:
    """:class:`~allhands.objectives.base.Objective` of language models: the cross-entropy of the
    next token.
    """

    further: tuple[str, ...] = ()

    def __init__(self, group: Communicator | None = None) -> None:
        """Prepare; ``group``: ranks that have the same rows, and divide the token positions among
        them.
        """
        self._pieces = None if group is None else Pieces(group.rank, group.size)
        self._caches: Caches = _kept_apart if group is None else partial(_across_ranks, group)

    def across(self, group: Communicator) -> CausalLM:
        if group.size == 1:
            return self
        if (
            type(self) is not CausalLM
        ):  # a subclass may call the model without the cache that divides rows
            what = f"the objective {type(self).__name__} cannot compute pieces of rows"
            raise ConfigError(
                what,
                code="objective-unsupported",
                where="--cp",
                hint="leave it out, or take the loss of the next token",
            )
        return CausalLM(group)

    def values(self, batch: MicroBatch) -> tuple[NDArray[Any], ...]:
        return batch_values(self._own(batch))

    def counts(self, batch: MicroBatch) -> dict[str, int]:
        own = self._own(batch)
        return {"targets": own.num_targets, "tokens": own.num_tokens}

    def places(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self._pieces is None else self._pieces.of(values)

    def _own(self, batch: MicroBatch) -> MicroBatch:
        return batch if self._pieces is None else self._pieces.of_batch(batch)

    def sums(self, model: Any, *, cpu_native: bool, with_grad: bool = True) -> SumsFunction:
        loss = make_loss(model, cpu_native=cpu_native, with_grad=with_grad, caches=self._caches)
        return lambda *arrays: (loss(*arrays),)

    def model_inputs(self, num_layers: int, *arrays: mx.array) -> tuple[mx.array, dict[str, Any]]:
        inputs, _, _, *documents = arrays
        return inputs, self._caches(num_layers, inputs, *documents)

    def cpu_gradient(self, model: Any) -> GradFunction | None:
        parts = split(model)
        return None if parts is None else partial(_eager_gradient, model, parts, self._caches)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {}


CAUSAL_LM = CausalLM()


def batch_values(batch: MicroBatch) -> tuple[NDArray[Any], ...]:
    """Return the arguments of a :data:`LossFunction`; document numbers only where documents are
    kept apart.
    """
    values = (batch.inputs, batch.positions, batch.targets)
    return values if batch.documents is None else (*values, batch.documents)


def make_loss(
    model: Any, *, cpu_native: bool, with_grad: bool = True, caches: Caches = _kept_apart
) -> LossFunction:
    """Return the summed cross-entropy of ``model`` at the trained places.

    Uses the chunked loss over hidden states where the model can be split, the plain one over logits
    otherwise. With ``cpu_native`` the result is a value, not to be differentiated.
    """
    parts = split(model)
    if parts is None:
        return partial(_plain_loss, model, caches)
    if cpu_native:
        return partial(_eager_loss, parts, caches)
    # In a native model operations compute at once: a graph of all chunks would keep all logits.
    form = _loss_at_once if native.is_native(model) else _split_loss
    return partial(form, parts, caches, with_grad)


def _plain_loss(model: Any, caches: Caches, *batch: mx.array) -> mx.array:
    inputs, positions, targets, *documents = batch
    known = documents or caches is not _kept_apart  # not every model has ``layers``
    more = caches(len(model.layers), inputs, *documents) if known else {}
    logits = model(inputs, **more)
    return cross_entropy_sum(logits.reshape(-1, logits.shape[-1])[positions], targets)


def _rows(parts: SplitModel, caches: Caches, *batch: mx.array) -> mx.array:
    """Return the hidden states at the trained places, (N, D)."""
    inputs, positions, targets, *documents = batch
    hidden = parts.body(inputs, **caches(parts.num_layers, inputs, *documents))
    return rows_at(hidden.reshape(-1, hidden.shape[-1]), positions, targets)


def _split_loss(parts: SplitModel, caches: Caches, with_grad: bool, *batch: mx.array) -> mx.array:
    rows, targets = _rows(parts, caches, *batch), batch[2]
    trained, selection = parts.head_is_trained, parts.selection
    if isinstance(parts.head_product(), PackedProduct):
        return _loss_of_rows(parts, with_grad, rows, targets)
    weight = parts.head_weight().astype(rows.dtype)
    return linear_cross_entropy(
        rows, weight, targets, train_weight=trained, with_grad=with_grad, selection=selection
    )


def _loss_at_once(parts: SplitModel, caches: Caches, with_grad: bool, *batch: mx.array) -> mx.array:
    """Compute :func:`_split_loss` chunk by chunk, for a model whose operations compute at once."""
    return _loss_of_rows(
        parts, with_grad, _rows(parts, caches, *batch).astype(mx.float32), batch[2]
    )


def _loss_of_rows(
    parts: SplitModel, with_grad: bool, rows: mx.array, targets: mx.array
) -> mx.array:
    """Cross-entropy of (N, D) hidden states, at once; differentiable ``with_grad``."""
    values, trained = parts.head_product(), parts.head_is_trained
    how: Any = {"train_weight": trained and with_grad, "selection": parts.selection}
    if not with_grad:
        return eager_linear_cross_entropy(rows, values, targets, with_grad=False, **how)[0]
    if trained and isinstance(values, mx.array):
        weight = values
        # A copy: MLX keeps all results computed from an array that is being differentiated.
        return eager_loss(rows, weight, targets, values=mx.array(np.asarray(weight)), **how)
    return eager_loss(rows, None, targets, values=values, **how)


def _eager_loss(parts: SplitModel, caches: Caches, *batch: mx.array) -> mx.array:
    rows, weight = _rows(parts, caches, *batch).astype(mx.float32), parts.head_product()
    how: Any = {"train_weight": False, "with_grad": False, "selection": parts.selection}
    return eager_linear_cross_entropy(rows, weight, batch[2], **how)[0]


def _eager_gradient(
    model: nn.Module, parts: SplitModel, caches: Caches, *batch: mx.array
) -> tuple[mx.array, Any]:
    """Forward through the body, loss and its gradient at the head, then backward through the body.

    The backward graph is built before the head's gradient is known, with a buffer in its place that
    is filled in between. So the forward pass is evaluated outside of ``mx.vjp``'s tracing, in which
    everything, the activations of frozen layers too, would be kept.
    """
    if native.available():
        return _gradient_at_once(model, parts, caches, *batch)
    trained = dict(flatten(model.trainable_parameters()))

    def body(*arrays: mx.array) -> mx.array:
        model.update(unflatten(zip(trained, arrays, strict=True)))
        return _rows(parts, caches, *batch)

    weight = parts.head_weight().astype(mx.float32)
    grad_rows = mx.zeros((len(batch[1]), weight.shape[-1]))
    mx.eval(grad_rows)
    (rows,), grads = mx.vjp(body, list(trained.values()), [grad_rows])
    model.update(unflatten(trained.items()))
    mx.eval(rows)
    loss, grad, grad_weight = eager_linear_cross_entropy(
        rows, weight, batch[2], train_weight=parts.head_is_trained, selection=parts.selection
    )
    np.asarray(grad_rows)[...] = np.asarray(grad)
    result = dict(zip(trained, grads, strict=True))
    if grad_weight is not None:
        name = parts.head_weight_name(model)
        result[name] = result[name] + grad_weight
    return loss, unflatten(result.items())


def _gradient_at_once(
    model: nn.Module, parts: SplitModel, caches: Caches, *batch: mx.array
) -> tuple[mx.array, Any]:
    """Compute :func:`_eager_gradient` where operations are not lazy, also in the backward pass."""
    trained = dict(flatten(model.trainable_parameters()))
    head = parts.head_product()

    def loss(*arrays: mx.array) -> mx.array:
        model.update(unflatten(zip(trained, arrays, strict=True)))
        # A CPU computes in float32 anyway, and NumPy has no bfloat16.
        rows = _rows(parts, caches, *batch).astype(mx.float32)
        train_weight = parts.head_is_trained
        # A head that is not trained needs no weight here, only its values.
        weight = parts.head_weight().astype(mx.float32) if train_weight else None
        how: Any = {"train_weight": train_weight, "selection": parts.selection}
        return eager_loss(rows, weight, batch[2], values=head, **how)

    try:
        (total,), grads = mx.vjp(loss, list(trained.values()), [mx.ones(())])
    finally:
        model.update(unflatten(trained.items()))
    # A copy, because the original holds on to the whole forward pass.
    return mx.array(total.item()), unflatten(zip(trained, grads, strict=True))
