"""The part of a step after the sums: one division, the norm, clipping and the optimizer's update, as one graph.

On a GPU each of these is a pass over all weights that reads much and computes little, so they are compiled into one;
and whether all numbers are finite is decided where they are, so that the host need not look first. Adapters are
hundreds of small arrays, each of which would take longer to start with than to compute: as long as the optimizer treats
each number by itself, they are one array, of which the model's are views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from allhands.model.fused import kernels
from allhands.train.optim import KernelAdam, clip
from allhands.trees import flatten, unflatten

# Optimizers for which an array is no more than its numbers.
_ELEMENTWISE = (optim.Adam, optim.AdamW, optim.SGD)
_FLAT_MOST = 1 << 27
_ALIGNED = 64  # values, so that rows begin where vectors may


class GraphUpdate:
    """Update ``model`` by ``optimizer``, lazily, or leave both as they are if a number is not finite."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, max_norm: float | None, *, compiled: bool) -> None:
        """Prepare; the optimizer's state may be new or restored."""
        self._model = model
        self._optimizer = optimizer
        self._max_norm = max_norm
        weights = flatten(model.trainable_parameters())
        if not optimizer.state.keys() - {"step", "learning_rate"}:
            optimizer.init(model.trainable_parameters())
        # Float32 alone: beside the gradient's mean half precision would become it.
        fits = {weight.dtype for _, weight in weights} == {mx.float32} and isinstance(optimizer, _ELEMENTWISE)
        flat = fits and sum(weight.size for _, weight in weights) <= _FLAT_MOST
        self._flat = _Flat(model, optimizer) if flat else None
        function: Any = self._compute if self._flat is None else self._compute_flat
        self._function: Any = mx.compile(function) if compiled else function

    def __call__(self, sums: list[tuple[str, mx.array]], loss: mx.array, num_targets: mx.array) -> mx.array:
        """Take the update of the global batch; nothing is evaluated.

        Args:
            sums: names and summed gradients; emptied, since what is held could not be written in place.
            loss: summed.
            num_targets: by which everything is divided.

        Returns:
            The norm of the mean gradient before clipping.
        """
        if self._flat is not None:
            flat = self._flat
            gradients = [gradient for _, gradient in sums]
            sums.clear()
            result = self._function(gradients, flat.weights(), flat.moments, flat.others(), loss, num_targets)
            del gradients
            flat.put(*result[:-1])
            return result[-1]
        gradients, weights = unflatten(sums), self._model.trainable_parameters()
        sums.clear()
        new, state, norm = self._function(gradients, weights, self._optimizer.state, loss, num_targets)
        # The old arrays are now nobody's but the graph's, which writes the new ones in their place.
        self._model.update(new)
        self._optimizer.state = state
        return norm

    def _compute(
        self, gradients: Any, weights: Any, state: Any, loss: mx.array, num_targets: mx.array
    ) -> tuple[Any, Any, mx.array]:
        divisor = mx.maximum(num_targets, 1.0)
        optimizer = self._optimizer
        optimizer.state = tree_map(lambda x: x, state)  # a copy of the tree, which the optimizer changes
        if isinstance(optimizer, KernelAdam) and kernels.available():
            norm = mx.sqrt(sum((_squares(g) for _, g in flatten(gradients)), mx.zeros(()))) / divisor
            finite = mx.isfinite(norm) & mx.isfinite(loss)
            factor = 1.0 if self._max_norm is None else mx.minimum(self._max_norm / (norm + 1e-6), 1.0)
            new = optimizer.apply_where(finite, factor / divisor, gradients, weights)
            return new, optimizer.state, norm
        # In float32, because a token count does not fit half precision.
        mean = tree_map(lambda g: (g.astype(mx.float32) / divisor).astype(g.dtype), gradients)
        mean, norm = clip(mean, self._max_norm)
        finite = mx.isfinite(norm) & mx.isfinite(loss)
        new = optimizer.apply_gradients(mean, weights)
        return _chosen(finite, new, weights), _chosen(finite, optimizer.state, state), norm

    def _compute_flat(
        self, gradients: Any, weights: mx.array, moments: Any, others: Any, loss: mx.array, num_targets: mx.array
    ) -> tuple[Any, ...]:
        assert self._flat is not None
        total = self._flat.joined(gradients) / mx.maximum(num_targets, 1.0)
        mean, norm = clip({_KEY: total}, self._max_norm)
        finite = mx.isfinite(norm) & mx.isfinite(loss)
        optimizer = self._optimizer
        optimizer.state = {**others, _KEY: dict(moments)}
        new = _chosen(finite, optimizer.apply_gradients(mean, {_KEY: weights})[_KEY], weights)
        state = dict(optimizer.state)
        after = _chosen(finite, state.pop(_KEY), moments)
        views = {name: self._flat.parts(array) for name, array in after.items()}
        return new, self._flat.parts(new), after, views, _chosen(finite, state, others), norm


_KEY = "all"


def _chosen(finite: mx.array, after: Any, before: Any) -> Any:
    return tree_map(lambda new, old: mx.where(finite, new, old), after, before)


def _squares(gradient: mx.array) -> mx.array:
    """The sum of squares, in float32."""
    if gradient.size % kernels.width(gradient.dtype) == 0:
        return kernels.sum_of_squares(gradient)
    return mx.square(gradient.astype(mx.float32)).sum()


class _Flat:
    """All trained weights, and the optimizer's moments, as one array each; what model and optimizer hold are views."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        trained = flatten(model.trainable_parameters())
        self._shapes = [weight.shape for _, weight in trained]
        self._starts = [0]
        for shape in self._shapes:
            self._starts.append(self._starts[-1] + -(-math.prod(shape) // _ALIGNED) * _ALIGNED)
        modules: dict[str, Any] = dict(model.named_modules())
        self._places = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name, _ in trained]
        self._optimizer = optimizer
        self._state: Any = optimizer.state
        self._leaves = [self._leaf(name) for name, _ in trained]
        moments = {name: self.joined([leaf[name] for leaf in self._leaves]) for name in self._leaves[0]}
        weights = self.joined([weight for _, weight in trained])
        # Views from the first step on: products may depend on where in memory their factors lie, in the last bits.
        self.put(weights, self.parts(weights), moments, {n: self.parts(a) for n, a in moments.items()}, {})
        mx.eval(model.trainable_parameters(), optimizer.state)

    def _leaf(self, name: str) -> dict[str, mx.array]:
        """The optimizer's arrays for one weight."""
        place = self._state
        for part in name.split("."):
            place = place[int(part)] if isinstance(place, list) else place[part]
        return place

    def joined(self, arrays: Sequence[mx.array]) -> mx.array:
        """One array of all, each beginning at a multiple of :data:`_ALIGNED`, with zeros between."""
        pieces: list[mx.array] = []
        for array, start, end in zip(arrays, self._starts, self._starts[1:], strict=False):
            pieces.append(array.reshape(-1))
            if array.size < end - start:
                pieces.append(mx.zeros((end - start - array.size,), dtype=array.dtype))
        return mx.concatenate(pieces)

    def parts(self, whole: mx.array) -> list[mx.array]:
        """Views of ``whole`` in the shapes of the weights."""
        places = zip(self._starts, self._shapes, strict=False)
        return [whole[start : start + math.prod(shape)].reshape(shape) for start, shape in places]

    def weights(self) -> mx.array:
        """All trained weights, also where somebody else has set them since."""
        present = [module[name] for module, name in self._places]
        if any(one is not other for one, other in zip(present, self._views, strict=True)):
            self._weights = self.joined(present)
        return self._weights

    def others(self) -> dict[str, mx.array]:
        """The optimizer's state that belongs to no weight."""
        return {name: value for name, value in self._state.items() if isinstance(value, mx.array)}

    def put(self, weights: mx.array, views: list[mx.array], moments: Any, parts: Any, others: Any) -> None:
        """Hand all to the model and the optimizer."""
        self._weights, self._views, self.moments = weights, views, moments
        for (module, name), view in zip(self._places, views, strict=True):
            module[name] = view
        for name, arrays in parts.items():
            for leaf, array in zip(self._leaves, arrays, strict=True):
                leaf[name] = array
        self._state.update(others)
        self._optimizer.state = self._state
