"""One optimizer update. The only place where sums are divided by token counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from allhands.accelerator import device_memory
from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator
from allhands.distributed.reduce import BUCKET_BYTES, sum_over_ranks
from allhands.errors import NumericsError
from allhands.model import native
from allhands.model.documents import caches_for
from allhands.model.dropout import DropoutKeys
from allhands.model.fused import kernels
from allhands.model.split import SplitModel, split
from allhands.train.losses import cross_entropy_sum, eager_linear_cross_entropy, eager_loss, linear_cross_entropy
from allhands.train.optim import clip
from allhands.train.poison import find_culprits
from allhands.train.runahead import RunAhead
from allhands.train.update import GraphUpdate
from allhands.trees import flatten, number, numbers, unflatten

# (inputs, positions, targets[, documents]) -> loss sum; with gradients: -> (loss sum, tree of gradients). Where there
# is dropout, the keys of the places come first.
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
        skipped: why the update was not applied ("the gradient is nan"), model and optimizer being as before and
            ``loss_sum`` and ``num_targets`` 0; empty if it was.
        culprits: numbers (from 0) of the windows whose loss or gradient is not finite; the first eight of each rank.
    """

    loss_sum: float
    num_targets: int
    num_tokens: int
    grad_norm: float
    stop_votes: int
    compute_s: float
    comm_s: float
    skipped: str = ""
    culprits: tuple[int, ...] = ()


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


def make_gradient(
    model: nn.Module, *, eager: bool, compiled: bool = True, dropout: DropoutKeys | None = None
) -> GradFunction:
    """Loss sum and its gradient in the trainable parameters.

    Either ``eager`` (Linux CPU), or one lazy graph, ``compiled`` or not. With ``dropout`` the function's first argument
    is the (B, T, 2) keys of the batch.
    """
    parts = split(model)
    if eager and parts is not None:
        return _keyed(partial(_eager_gradient, model, parts), dropout)
    function = _keyed(nn.value_and_grad(model, make_loss(model, eager=False)), dropout)
    if eager or not compiled:
        return function
    # MLX's own random state, too, for models that draw from it.
    fused = mx.compile(function, inputs=[model.state, mx.random.state], outputs=[mx.random.state])

    def gradient(*arrays: mx.array) -> tuple[mx.array, Any]:
        weights = model.trainable_parameters()
        result = fused(*arrays)
        # Tracing a new shape has left its placeholders in the model.
        model.update(weights)
        return result

    return gradient


def make_joined_gradient(
    model: nn.Module, update: GraphUpdate, *, compiled: bool, dropout: DropoutKeys | None
) -> GradFunction:
    """As :func:`make_gradient`, as one lazy graph and in the arrays of the update's leaves, a list."""
    leaves, loss = update.leaves, make_loss(model, eager=False)
    assert leaves is not None

    def of(wholes: list[mx.array], *arrays: mx.array) -> mx.array:
        with leaves.installed(wholes):
            return loss(*arrays)

    differentiated: Any = mx.value_and_grad(of)

    def function(wholes: list[mx.array], *arrays: mx.array) -> tuple[mx.array, Any]:
        return _keyed(partial(differentiated, wholes), dropout)(*arrays)

    call: Any = function
    if compiled:
        call = mx.compile(function, inputs=[model.state, mx.random.state], outputs=[mx.random.state])

    def gradient(*arrays: mx.array) -> tuple[mx.array, Any]:
        # Tracing a new shape leaves its placeholders in the model.
        with leaves.kept():
            return call(update.weights(), *arrays)

    return gradient


def _keyed(function: GradFunction, dropout: DropoutKeys | None) -> GradFunction:
    """``function`` with the keys of ``dropout`` as an argument before its own."""
    if dropout is None:
        return function

    def call(keys: mx.array, *arrays: mx.array) -> tuple[mx.array, Any]:
        with dropout.using(keys):
            return function(*arrays)

    return call


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
    if native.available():
        return _gradient_at_once(model, parts, names, (inputs, positions, targets, documents))

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


def _gradient_at_once(
    model: nn.Module, parts: SplitModel, names: Sequence[str], batch: tuple[Any, ...]
) -> tuple[mx.array, Any]:
    """As :func:`_eager_gradient` where operations compute when they are called, in the backward pass too."""
    inputs, positions, targets, documents = batch
    values = [value for _, value in flatten(model.trainable_parameters())]

    def loss(*arrays: mx.array) -> mx.array:
        model.update(unflatten(list(zip(names, arrays, strict=True))))
        rows = _rows(parts, inputs, positions, documents)
        weight = parts.head_weight().astype(mx.float32)
        return eager_loss(rows, weight, targets, train_weight=parts.head_is_trained)

    try:
        (total,), grads = mx.vjp(loss, values, [mx.ones(())])
    finally:
        model.update(unflatten(list(zip(names, values, strict=True))))
    # A copy, because the original holds on to the whole forward pass.
    return mx.array(total.item()), unflatten(list(zip(names, grads, strict=True)))


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
        dropout: DropoutKeys | None = None,
        non_finite: Literal["stop", "skip"] = "stop",
        packed: bool = False,
        beat: Callable[[str], None] = lambda phase: None,
        rehearse: Callable[[Literal["reduce", "update"]], object] = lambda point: None,
    ) -> None:
        """Prepare to train ``model``.

        Args:
            after_backward: is given the tree of mean gradients of the global batch, before clipping.
            dropout: of ``model``, as :func:`install_dropout` gave it.
            non_finite: whether a loss or gradient that is not finite is an error or leaves the update out.
            packed: whether windows are rows of packed documents, for messages.
            beat: is told "compute" (or "first", if a shape is compiled) before each micro-batch, "reduce" before
                waiting for other ranks and "update" before the optimizer's.
            rehearse: is asked before the exchange and the update whether to fail on purpose; "nan" spoils the gradient.
        """
        self.eager = eager
        self._model = model
        self._optimizer = optimizer
        self._communicator = communicator
        self._traced = compiled and not eager
        self._dropout = dropout
        self._graph = None if eager else GraphUpdate(model, optimizer, max_grad_norm, compiled=compiled)
        if self._graph is None or self._graph.leaves is None:
            self._gradient = make_gradient(model, eager=eager, compiled=compiled, dropout=dropout)
        else:
            self._gradient = make_joined_gradient(model, self._graph, compiled=compiled, dropout=dropout)
        # (B, T, N) of every micro-batch so far: a compiled step is traced once for each.
        self.shapes: set[tuple[int, int, int]] = set()
        self._max_grad_norm = max_grad_norm
        self._bucket_bytes = bucket_bytes
        self._after_backward = after_backward
        self._non_finite = non_finite
        self._window_name = "packed row" if packed else "training example"
        self._beat = beat
        self._rehearse = rehearse
        self._prepared: tuple[MicroBatch, list[mx.array], tuple[mx.array, Any]] | None = None
        self._ahead = RunAhead(device_memory()) if kernels.available() else None

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        stop: Callable[[], object] = lambda: False,
        upcoming: Callable[[], Sequence[MicroBatch]] = tuple,
    ) -> StepResult:
        """Update the model by one global batch, of which ``micro_batches`` is this rank's share (may be empty).

        Args:
            stop: whether this rank has been asked to stop, asked once it has computed; all ranks learn of it in
                :attr:`StepResult.stop_votes`.
            upcoming: gives the micro-batches of the step after this one, if there is one; asked while a device works.

        Raises:
            NumericsError: loss or gradient is not finite, on every rank alike; the model is unchanged.
        """
        started = time.perf_counter()
        if self._ahead is not None:
            self._ahead.before(max((batch.inputs.size for batch in micro_batches), default=0))
        loss, grads = self._accumulate(micro_batches)
        if self._rehearse("reduce") == "nan":
            grads = [(name, mx.full(grad.shape, math.nan, dtype=grad.dtype)) for name, grad in grads]
        computed = time.perf_counter()
        mine = [loss, *(float(n) for n in _counts(micro_batches)), float(bool(stop()))]
        sums, totals = self._reduce(grads, mine)
        del grads
        reduced = time.perf_counter()
        timed = StepResult(0.0, 0, 0, 0.0, 0, computed - started, reduced - computed)
        if self._graph is None:
            result = self._update_by_hand(sums, totals, timed)
        else:
            result = self._update_in_graph(sums, totals, timed, upcoming)
        if self._ahead is not None:
            self._ahead.after()
        if problem := _not_finite(result):
            # Every rank has the same sums and comes here. What is thrown away makes room for the search.
            del sums
            return self._refuse(result, problem, micro_batches)
        return result

    def _update_by_hand(self, sums: list[tuple[str, mx.array]], totals: mx.array, timed: StepResult) -> StepResult:
        """Look at the numbers, then update the model if all are finite."""
        num_targets = numbers(totals)[1]
        # The one division: by the trained tokens of all micro-batches and all ranks.
        mean = unflatten([(name, g / max(num_targets, 1.0)) for name, g in sums])
        if self._after_backward is not None:
            self._after_backward(mean)
        clipped, norm = clip(mean, self._max_grad_norm)
        result = _filled(timed, totals, norm)
        if not _not_finite(result):
            self._beat("update")
            self._rehearse("update")
            self._optimizer.update(self._model, clipped)
            mx.eval(self._model.trainable_parameters(), self._optimizer.state)
        return result

    def _update_in_graph(
        self,
        sums: list[tuple[str, mx.array]],
        totals: mx.array,
        timed: StepResult,
        upcoming: Callable[[], Sequence[MicroBatch]],
    ) -> StepResult:
        """Update the model if all numbers are finite, then look at them: on one rank the first wait of a step."""
        assert self._graph is not None
        if self._after_backward is not None:
            # Besides, and only as far as somebody looks at it.
            divisor = mx.maximum(totals[1], 1.0)
            self._after_backward(unflatten([(n, (g / divisor).astype(g.dtype)) for n, g in self._graph.named(sums)]))
        if self._communicator.size > 1:
            self._beat("update")
        self._rehearse("update")
        begun = time.perf_counter()
        norm = self._graph(sums, totals[0], totals[1])
        self._prepare(upcoming())
        mx.eval(norm, totals, self._graph.arrays())
        # On one rank this includes the passes themselves.
        waited = time.perf_counter() - begun if self._communicator.size == 1 else 0.0
        return _filled(replace(timed, compute_s=timed.compute_s + waited), totals, norm)

    def _prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Put the next step's first pass together, of weights that are still being computed.

        This takes the host a while, in which a device would have nothing to do.
        """
        known = self._graph is not None and self._graph.leaves is not None
        if known and micro_batches and micro_batches[0].shape in self.shapes:
            assert self._graph is not None
            batch = micro_batches[0]
            self._prepared = batch, self._graph.weights(), self._gradient(*self._arguments(batch))

    def _gradient_of(self, batch: MicroBatch) -> tuple[mx.array, Any]:
        prepared, self._prepared = self._prepared, None
        # Not if somebody has set weights since.
        if prepared and prepared[0] is batch and self._graph is not None and prepared[1] is self._graph.weights():
            return prepared[2]
        return self._gradient(*self._arguments(batch))

    def _accumulate(self, micro_batches: Sequence[MicroBatch]) -> tuple[mx.array, list[tuple[str, mx.array]]]:
        """Sums of loss and gradients over this rank's micro-batches; zeros when it has none."""
        total, grads = mx.zeros(()), None
        # Alone, what follows the last one's backward pass is handed out together with it.
        lazy_end = self._graph is not None and self._communicator.size == 1
        for number_of, batch in enumerate(micro_batches, 1):
            self._beat("first" if self._traced and batch.shape not in self.shapes else "compute")
            self.shapes.add(batch.shape)
            loss, new = self._gradient_of(batch)
            # Contiguous, because a transposed gradient makes the optimizer's pass several times slower.
            new = tree_map(mx.contiguous, new) if grads is None else tree_map(mx.add, grads, new)
            total, grads = total + loss, new
            if not (lazy_end and number_of == len(micro_batches)):
                mx.eval(total, grads)
        if grads is None:
            joined = None if self._graph is None or self._graph.leaves is None else self._graph.weights()
            grads = tree_map(mx.zeros_like, self._model.trainable_parameters() if joined is None else joined)
        return total, flatten(grads)

    def _arguments(self, batch: MicroBatch) -> tuple[mx.array, ...]:
        """What the gradient's function is called with."""
        if self._dropout is None:
            return batch_arrays(batch)
        keys = self._dropout.of(batch.examples, batch.inputs.shape[1], batch.iteration)
        return keys, *batch_arrays(batch)

    def _reduce(
        self, grads: list[tuple[str, mx.array]], scalars: list[float | mx.array]
    ) -> tuple[list[tuple[str, mx.array]], mx.array]:
        """Both summed over all ranks; the scalars as one array."""
        arrays = [grad for _, grad in grads]
        sums, totals = sum_over_ranks(self._communicator, arrays, scalars, bucket_bytes=self._bucket_bytes)
        if self._graph is None or self._communicator.size > 1:
            self._beat("reduce")
            mx.eval(sums, totals)
        return [(name, total) for (name, _), total in zip(grads, sums, strict=True)], totals

    def _refuse(self, result: StepResult, problem: str, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Find out why, and either leave the update out or raise."""
        # Not compiled: examples alone have shapes of their own, each to be computed once.
        gradient = make_gradient(self._model, eager=self.eager, compiled=False, dropout=self._dropout)
        blame = find_culprits(
            lambda batch: gradient(*self._arguments(batch)),
            self._model.trainable_parameters(),
            micro_batches,
            self._communicator,
            self._beat,
        )
        reason = f"{problem}; {blame.otherwise}" if blame.otherwise else problem
        if self._non_finite == "stop":
            raise NumericsError(reason + blame.named(self._window_name), hint=_HINT)
        return replace(result, loss_sum=0.0, num_targets=0, skipped=reason, culprits=blame.examples)


_HINT = (
    "the update was not applied: look at the examples named, lower --learning-rate, add --max-grad-norm 1 or "
    "--warmup-steps, or leave such updates out: --non-finite skip"
)


def _filled(timed: StepResult, totals: mx.array, norm: mx.array) -> StepResult:
    """``timed`` with the numbers of the step: sums of loss, trained tokens, tokens and votes."""
    loss_sum, num_targets, num_tokens, votes = numbers(totals)
    return replace(
        timed,
        loss_sum=loss_sum,
        num_targets=int(num_targets),
        num_tokens=int(num_tokens),
        grad_norm=number(norm),
        stop_votes=int(votes),
    )


def _counts(micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
    return sum(batch.num_targets for batch in micro_batches), sum(batch.num_tokens for batch in micro_batches)


def _not_finite(result: StepResult) -> str:
    """What is not finite, in words; empty if all is well."""
    values = {"loss": result.loss_sum, "gradient": result.grad_norm}
    return next((f"the {name} is {value}" for name, value in values.items() if not math.isfinite(value)), "")
