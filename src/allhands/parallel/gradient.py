"""The gradient of an objective's summed loss: computed at once, or as a lazy graph, compiled or
not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from allhands.kernels.fused.embedding import Apart
from allhands.kernels.fused.flat_params import FlatParams
from allhands.model.dropout import DropoutKeys
from allhands.objectives.base import GradFunction, Objective, SumsFunction
from allhands.objectives.causal_lm import CAUSAL_LM


@dataclass(frozen=True)
class Computing:
    """The way in which passes are computed.

    Attributes:
        cpu_native: whether operations compute when they are called (Linux CPUs).
        compiled: whether a pass is compiled where it is a graph.
        dropout: of the model, as :func:`install_dropout` gave it.
        heartbeat: is told "compute" (or "first", if a shape is compiled) before each micro-batch.
    """

    cpu_native: bool
    compiled: bool = True
    dropout: DropoutKeys | None = None
    heartbeat: Callable[[str], None] = lambda phase: None


class Installing(Protocol):
    """The places of trained weights in a model."""

    def installed(self, arrays: list[mx.array], /) -> AbstractContextManager[None]:
        """Compute with these weights inside the block."""
        ...

    def kept(self) -> AbstractContextManager[None]:
        """Leave the model with its own weights after the block."""
        ...


class StageWeights(Protocol):
    """The trained weights of a stage, in the order of their gradients."""

    @property
    def leaves(self) -> Installing:
        """The places of the weights."""
        ...

    def weights(self) -> list[mx.array]:
        """Return the weights at present."""
        ...


class FlatWeights(Protocol):
    """All trained weights as few arrays."""

    @property
    def leaves(self) -> FlatParams:
        """The places of the weights."""
        ...

    def weights(self) -> list[mx.array]:
        """Return the arrays of :attr:`leaves` at present."""
        ...


def make_gradient(
    model: nn.Module,
    *,
    cpu_native: bool,
    compiled: bool = True,
    dropout: DropoutKeys | None = None,
    objective: Objective = CAUSAL_LM,
) -> GradFunction:
    """Sums of ``objective`` and the gradient of its loss in the trainable parameters.

    Either ``cpu_native`` (Linux CPU), or one lazy graph, ``compiled`` or not. With ``dropout`` the
    function's first argument is the (B, T, 2) keys of the batch.
    """
    at_once = objective.cpu_gradient(model) if cpu_native else None
    if at_once is not None:
        return _keyed(at_once, dropout)
    function = _keyed(_as_one(nn.value_and_grad(model, _loss_first(model, objective))), dropout)
    if cpu_native or not compiled:
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
    model: nn.Module,
    flat: FlatWeights,
    *,
    compiled: bool,
    dropout: DropoutKeys | None,
    apart: Apart | None = None,
    objective: Objective = CAUSAL_LM,
) -> GradFunction:
    """Make the gradient of :func:`make_gradient` as one lazy graph and in the arrays of ``flat``, a
    list.

    With ``apart``, of the model's embedding, the function takes its (B, T, D) ``rows`` as well, and
    gives their gradient as the last of the list; that of the table is without it.
    """
    leaves, loss = flat.leaves, _loss_first(model, objective)
    count = len(leaves.chunks)

    def of(trained: list[mx.array], *arrays: mx.array) -> Any:
        with ExitStack() as stack:
            stack.enter_context(leaves.installed(trained[:count]))
            if apart is not None:
                stack.enter_context(apart.installed(trained[count]))
            return loss(*arrays)

    differentiated: Any = _as_one(mx.value_and_grad(of))

    def function(trained: list[mx.array], *arrays: mx.array) -> tuple[mx.array, Any]:
        return _keyed(partial(differentiated, trained), dropout)(*arrays)

    call: Any = function
    if compiled:
        call = mx.compile(
            function, inputs=[model.state, mx.random.state], outputs=[mx.random.state]
        )

    def gradient(*arrays: mx.array, rows: mx.array | None = None) -> tuple[mx.array, Any]:
        # Tracing a new shape leaves its placeholders in the model.
        with leaves.kept():
            weights = flat.weights()
            return call(weights if rows is None else [*weights, rows], *arrays)

    return gradient


def _loss_first(model: nn.Module, objective: Objective) -> Callable[..., Any]:
    """The loss alone, or, where there are further sums, the loss and an array of these."""
    sums: SumsFunction = objective.sums(model, cpu_native=False)
    if not objective.further:
        return lambda *arrays: sums(*arrays)[0]

    def function(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        loss, *further = sums(*arrays)
        return loss, mx.stack([mx.stop_gradient(each).astype(mx.float32) for each in further])

    return function


def _as_one(function: Callable[..., Any]) -> GradFunction:
    """``function`` with loss and further sums, if there are any, as one array."""

    def call(*arguments: Any) -> tuple[mx.array, Any]:
        value, grads = function(*arguments)
        if isinstance(value, mx.array):
            return value, grads
        loss, further = value
        return mx.concatenate([loss.astype(mx.float32).reshape(1), further]), grads

    return call


def _keyed(function: GradFunction, dropout: DropoutKeys | None) -> GradFunction:
    """``function`` with the keys of ``dropout`` as an argument before its own."""
    if dropout is None:
        return function

    def call(keys: mx.array, *arrays: mx.array) -> tuple[mx.array, Any]:
        with dropout.using(keys):
            return function(*arrays)

    return call
