"""Updaters for a step: by hand, in native code on Linux CPUs, or in the graph on GPUs.

Each updater divides the summed gradients once, by the trained tokens of the global batch, clips and
updates. If a number is not finite, model and optimizer stay unchanged.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from allhands.io.trees import flatten, number, part_of, unflatten
from allhands.parallel.base import Strategy
from allhands.parallel.sums import Named, Reduced
from allhands.train.graph_update import FlatState, GraphUpdate, UpdatePieces, initialise
from allhands.train.native_update import NativeUpdate, native_update
from allhands.train.optim import clip
from allhands.train.optimizers import KernelAdam, Optimizer
from allhands.train.result import all_finite, divisor_of


@dataclass(frozen=True)
class Rules:
    """The rules for a mean gradient.

    Attributes:
        max_grad_norm: largest norm of the whole gradient; ``None``: it is not clipped.
        after_backward: called with the tree of mean gradients, unclipped; may return other
            gradients in their place.
        heartbeat: called with "update" before the optimizer's update, if it is not queued.
        inject_fault: called with the name of a point of the step; it may inject a fault there.
    """

    max_grad_norm: float | None = None
    after_backward: Callable[[Any], Any] | None = None
    heartbeat: Callable[[str], None] = lambda phase: None
    inject_fault: Callable[[Literal["message", "reduce", "update", "round"]], object] = (
        lambda point: None
    )

    def begin(self) -> None:
        """Report the update and inject a planned fault; called just before the update."""
        self.heartbeat("update")
        self.inject_fault("update")


@dataclass(frozen=True)
class Updated:
    """The result of an update.

    Attributes:
        norm: norm of the mean gradient, (), before clipping.
        lazy: arrays that are not computed yet; ``None``: all are computed.
        pieces: parts of the update that are computed one after the other, because memory is short.
    """

    norm: mx.array
    lazy: Any = None
    pieces: UpdatePieces = field(default_factory=UpdatePieces)


class Updater(ABC):
    """One way of updating. It can also predict the update from a part of the sums.

    Attributes:
        flat: flat buffers of all trained weights, in which the gradients must be; ``None``:
            gradients have the names of the weights.
    """

    flat: FlatState | None = None

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, rules: Rules) -> None:
        self._model = model
        self._optimizer = optimizer
        self._rules = rules

    def weights(self) -> Any:
        """Return the tree of the arrays that are updated."""
        return self._model.trainable_parameters()

    def __call__(self, reduced: Reduced) -> Updated:
        """Take the update of a global batch; empties ``reduced.grads``."""
        return self._update(reduced)

    @abstractmethod
    def _update(self, reduced: Reduced) -> Updated:
        """Take the update; each kind of updater has its own way."""

    def expected(self, reduced: Reduced, part: bool, last_norm: float) -> Any:
        """Return the tree of trained weights that this update would make; nothing changes.

        Args:
            part: True if these are sums of a part of the batch, with their ``squares``.
            last_norm: norm of the last update's mean gradient; NaN: there was none.
        """
        model, rules = self._model, self._rules
        self._rules = Rules(rules.max_grad_norm)
        try:
            with self._as_it_was():
                if part:
                    self._expect(reduced, last_norm)
                else:
                    self._update(reduced)
                return model.trainable_parameters()
        finally:
            self._rules = rules

    def _expect(self, part: Reduced, last_norm: float) -> None:
        """Take the update that is expected from a part of the sums, whose ``squares`` are known.

        A part's mean gradient is noisier, and its norm is larger. So it is clipped by the same
        factor as the last sum, and its squares in Adam's second moment count by the ratio of the
        norms. Then the mean of the ranks' predictions is the real update.
        """
        most, optimizer = self._rules.max_grad_norm, self._optimizer
        assert part.squares is not None
        tokens = mx.maximum(divisor_of(part), 1.0)
        norm = mx.sqrt(part.squares) / tokens
        last = mx.array(last_norm) if math.isfinite(last_norm) else norm
        factor = (1.0 if most is None else mx.minimum(most / (last + 1e-6), 1.0)) / tokens
        if isinstance(optimizer, KernelAdam):
            ratio = mx.minimum(last / mx.maximum(norm, 1e-30), 1.0)
            self._expect_moments(optimizer, part.grads, factor, mx.square(ratio))
        else:
            self._update(Reduced(part.grads, part.totals, divisor=1.0 / factor))

    def _expect_moments(
        self, optimizer: KernelAdam, grads: list[Named], factor: mx.array, squared: mx.array
    ) -> None:
        """Take Adam's update by ``factor`` times ``grads``, whose squares count ``squared`` times.

        The gradients are added to the moments first, and then the update uses gradients of zero.
        """
        (b1, b2), state = optimizer.betas, self._state()
        for name, gradient in grads:
            home, mean = part_of(state, name), gradient.astype(mx.float32) * factor
            for kind, more in (
                ("m", (1.0 - b1) / b1 * mean),
                ("v", (1.0 - b2) / b2 * squared * mx.square(mean)),
            ):
                home[kind] = home[kind] + more.astype(home[kind].dtype)
        self._take(state)
        zeros = [(name, mx.zeros_like(gradient)) for name, gradient in grads]
        self._update(Reduced(zeros, mx.zeros((1,)), divisor=mx.array(1.0)))

    def _state(self) -> Any:
        """Return the optimizer's state by the names of the gradients, in a tree that may be
        changed.
        """
        return tree_map(lambda x: x, self._optimizer.state)

    def _take(self, state: Any) -> None:
        """Give the optimizer a state from :meth:`_state`."""
        self._optimizer.state = state

    @contextmanager
    def _as_it_was(self) -> Generator[None]:
        """Restore model and optimizer after the block."""
        weights, state = self._model.trainable_parameters(), self._state()
        try:
            yield
        finally:
            self._model.update(weights)
            self._take(state)


class UpdateByHand(Updater):
    """Check the numbers, then update by MLX's optimizer."""

    def _update(self, reduced: Reduced) -> Updated:
        rules, sums = self._rules, reduced.grads
        num_targets = number(divisor_of(reduced))
        # The one division: by the trained tokens of all micro-batches and all ranks.
        mean = unflatten([(name, g / max(num_targets, 1.0)) for name, g in sums])
        sums.clear()
        if rules.after_backward is not None and (given := rules.after_backward(mean)) is not None:
            mean = given
        norm = None if reduced.squares is None else mx.sqrt(reduced.squares) / max(num_targets, 1.0)
        clipped, norm = clip(mean, rules.max_grad_norm, norm)
        del mean
        if all_finite(reduced.loss, norm):
            rules.begin()
            self._optimizer.update(self._model, clipped)
            del clipped
            mx.eval(self._model.trainable_parameters(), self._optimizer.state)
        return Updated(norm)


class NativeUpdater(Updater):
    """:class:`UpdateByHand` in one native pass over all arrays; the one division is a factor of the
    update.
    """

    def __init__(
        self, native: NativeUpdate, model: nn.Module, optimizer: optim.Optimizer, rules: Rules
    ) -> None:
        super().__init__(model, optimizer, rules)
        self._native = native

    def _expect_moments(
        self, optimizer: KernelAdam, grads: list[Named], factor: mx.array, squared: mx.array
    ) -> None:
        self._native.expect(grads, number(factor), number(squared))

    def _update(self, reduced: Reduced) -> Updated:
        rules, sums = self._rules, reduced.grads
        num_targets = max(number(divisor_of(reduced)), 1.0)
        if rules.after_backward is not None:
            given = rules.after_backward(unflatten([(name, g / num_targets) for name, g in sums]))
            if given is not None:
                sums, num_targets = flatten(given), 1.0
        squares = reduced.squares  # over all ranks, if each has a part of the gradients
        norm = (
            self._native.norm(sums) if squares is None else math.sqrt(number(squares))
        ) / num_targets
        if all_finite(reduced.loss, mx.array(norm)):
            rules.begin()
            clipped = (
                1.0
                if rules.max_grad_norm is None
                else min(rules.max_grad_norm / (norm + 1e-6), 1.0)
            )
            self._native(sums, clipped / num_targets)
        return Updated(mx.array(norm))


class GraphUpdater(Updater):
    """Update lazily if all numbers are finite; the host reads the check afterwards."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        strategy: Strategy,
        rules: Rules,
        *,
        compiled: bool,
    ) -> None:
        super().__init__(model, optimizer, rules)
        how: Any = {"compiled": compiled, "travelling": strategy.overlaps, "laid": strategy.laid}
        # A hook needs whole gradients, and the state of an optimizer of another class is unknown.
        if isinstance(optimizer, Optimizer) and rules.after_backward is None:
            how["place"] = strategy.place
        self._graph = GraphUpdate(model, optimizer, rules.max_grad_norm, **how)
        self.flat = self._graph.flat
        self._strategy = strategy

    @contextmanager
    def _as_it_was(self) -> Generator[None]:
        if self.flat is None:
            with super()._as_it_was():
                yield
            return
        weights, state = self.flat.weights(), self.flat.state()
        try:
            yield
        finally:
            self.flat.put(state, weights)

    def _state(self) -> Any:
        return super()._state() if self.flat is None else tree_map(lambda x: x, self.flat.state())

    def _take(self, state: Any) -> None:
        if self.flat is None:
            super()._take(state)
        else:
            self.flat.put(state)

    def _update(self, reduced: Reduced) -> Updated:
        graph, rules, sums = self._graph, self._rules, reduced.grads
        counted = divisor_of(reduced)
        if rules.after_backward is not None:
            # Lazy: MLX computes these means only if the hook reads or returns them.
            divisor = mx.maximum(counted, 1.0)
            named = [(name, (g / divisor).astype(g.dtype)) for name, g in graph.named(sums)]
            if (given := rules.after_backward(unflatten(named))) is not None:
                sums, counted = graph.joined(given), mx.array(1.0)
        rules.inject_fault("update")
        exchange = None if reduced.squares is None else self._strategy.whole
        norm = graph(sums, reduced.loss, counted, squares=reduced.squares, exchange=exchange)
        return Updated(norm, graph.arrays(), graph.pieces)


def make_updater(
    model: nn.Module,
    optimizer: optim.Optimizer,
    strategy: Strategy,
    rules: Rules,
    *,
    cpu_native: bool,
    compiled: bool,
) -> Updater:
    """Return the updater of ``model`` by ``optimizer`` on this device; the optimizer's state may be
    new or restored.
    """
    # MLX would initialise the state from the first gradients; here the weights decide types.
    initialise(optimizer, model)
    if not cpu_native:
        return GraphUpdater(model, optimizer, strategy, rules, compiled=compiled)
    native = native_update(model, optimizer)
    return (
        UpdateByHand(model, optimizer, rules)
        if native is None
        else NativeUpdater(native, model, optimizer, rules)
    )
