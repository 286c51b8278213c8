"""Recomputation of a block's activations in the backward pass, in place of keeping them.

A block may be called with arrays in any place: positional or by keyword, in lists, dictionaries or
objects such as caches, which it may also change. All these arrays are inputs of the recomputed
function, and arrays that the block stores in these objects are among its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from allhands.io.trees import flatten, unflatten
from allhands.kernels.fastmath import with_vjp
from allhands.kernels.instances import give_form
from allhands.kernels.native_arrays import floats, no_gradient_through


def checkpoint_layers(layers: Iterable[nn.Module], *, at_once: bool = False) -> None:
    """Make each of ``layers`` forget its activations after the forward pass.

    Only these instances change: their class becomes a subclass. Layers that recompute already, or
    have no parameters, stay as they are.

    Args:
        at_once: True for layers that compute when they are called, not in a graph
            (:mod:`allhands.kernels.native`).
    """
    for layer in layers:
        if not hasattr(layer, "_recomputes") and flatten(layer.parameters()):
            give_form(
                layer, _recomputing(type(layer), _called_at_once if at_once else _called_in_a_graph)
            )


def _recomputing(
    base: type[nn.Module], called: Callable[[_Call], list[mx.array]]
) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        floating_only = called is _called_at_once
        this = _Call(cast("Any", base).__call__, self, (args, kwargs), floating_only=floating_only)
        return this.result(called(this))

    return type(base.__name__, (base,), {"__call__": call, "_recomputes": True})


class _Call:
    """One call of a block, as a function of arrays alone: inputs and trained weights.

    Attributes:
        inputs: arrays that the block is called with.
        weights: the block's trained arrays.
    """

    def __init__(
        self, function: Callable[..., Any], layer: nn.Module, given: Any, *, floating_only: bool
    ) -> None:
        self.layer = layer
        self._function = function
        self._floating_only = floating_only
        self.inputs: list[mx.array] = []
        self._given = _Parts(self.inputs, floating_only=floating_only).take_apart(given)
        named = flatten(layer.trainable_parameters())
        self._names = [name for name, _ in named]
        self.weights = [value for _, value in named]
        self._made: Any = None

    def __call__(self, inputs: Sequence[mx.array], weights: Sequence[mx.array]) -> list[mx.array]:
        """Compute the block and return its output arrays; its arguments are restored afterwards."""
        outputs: list[mx.array] = []
        try:
            self._install(weights)
            args, kwargs = self._given(inputs, ())
            result = self._function(self.layer, *args, **kwargs)
            parts = _Parts(outputs, floating_only=True, passed_on=inputs)
            self._made = parts.take_apart((result, args, kwargs))
        finally:
            self._given(self.inputs, ())
            self._install(self.weights)
        # A block that only passes on its inputs has no outputs, and MLX ends the process if a
        # differentiated function has none.
        return outputs or [mx.zeros(())]

    def result(self, outputs: Sequence[mx.array]) -> Any:
        """Return the block's result, made of ``outputs``; its arguments get the block's changes."""
        return self._made(outputs, self.inputs)[0]

    def _install(self, weights: Sequence[mx.array]) -> None:
        self.layer.update(unflatten(zip(self._names, weights, strict=True)))


def _called_in_a_graph(call: _Call) -> list[mx.array]:
    return cast("Any", mx.checkpoint)(call)(call.inputs, call.weights)


def _called_at_once(call: _Call) -> list[mx.array]:
    """Compute like :func:`mx.checkpoint`, but free memory that MLX would hold until the outer pass
    ends.
    """
    count = len(call.inputs)

    def forward(*primals: mx.array) -> Any:
        with no_gradient_through(call.layer):
            # Copies are not differentiated, so MLX does not keep results computed from them.
            return call([mx.array(floats(each)) for each in primals[:count]], call.weights)

    def again(*primals: mx.array) -> Any:
        return call(primals[:count], primals[count:])

    def backward(primals: Any, cotangents: Any, _: Any) -> Any:
        inputs, towards = (
            list(each) if isinstance(each, tuple | list) else [each]
            for each in (primals, cotangents)
        )
        made = mx.vjp(again, inputs, towards)[1]
        # Copies again: MLX would keep the inputs of a sum until the whole backward pass is done.
        return [mx.array(np.asarray(each)) for each in made]

    outputs = with_vjp(forward, backward)(*call.inputs, *call.weights)
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


# --- arrays in nested values ----------------------------------------------------------------------

# Rebuilds a nested value from the arrays that were found in it, and from the inputs that a block
# passes on.
_Builder = Callable[[Sequence[mx.array], Sequence[mx.array]], Any]


class _Parts:
    """Takes nested values apart into ``arrays`` and functions that rebuild the values.

    Lists, dictionaries and objects keep their identity: they are filled in place, once each.

    Args:
        arrays: list to which the found arrays are appended.
        floating_only: True to leave arrays of other types in their places.
        passed_on: inputs of a block; if found, they are not appended but rebuilt by their number.
    """

    def __init__(
        self, arrays: list[mx.array], *, floating_only: bool, passed_on: Sequence[mx.array] = ()
    ) -> None:
        self._arrays = arrays
        self._floating_only = floating_only
        self._passed_on = {id(array): number for number, array in enumerate(passed_on)}
        self._seen: set[int] = set()

    def take_apart(self, value: Any) -> _Builder:
        if isinstance(value, mx.array):
            return self._array(value)
        if isinstance(value, tuple):
            members = [self.take_apart(each) for each in cast("tuple[Any, ...]", value)]
            kind = type(value) if hasattr(value, "_fields") else lambda *parts: parts
            return lambda *of: kind(*(build(*of) for build in members))
        if not _is_filled(value) or id(value) in self._seen:
            return lambda *_: value
        self._seen.add(id(value))
        is_list = isinstance(value, list)
        held: Any = value if isinstance(value, list | dict) else vars(value)
        names = range(len(held)) if is_list else list(held)
        builders = {name: self.take_apart(held[name]) for name in names}

        def fill(*of: Sequence[mx.array]) -> Any:
            made = {name: build(*of) for name, build in builders.items()}
            held.clear()
            held.extend(made.values()) if is_list else held.update(made)
            return value

        return fill

    def _array(self, array: mx.array) -> _Builder:
        if (number := self._passed_on.get(id(array))) is not None:
            return lambda _, passed_on: passed_on[number]
        if self._floating_only and not mx.issubdtype(array.dtype, mx.floating):
            return lambda *_: array
        self._arrays.append(array)
        place = len(self._arrays) - 1
        return lambda arrays, _: arrays[place]


def _is_filled(value: Any) -> bool:
    """Return True for a container, or an object such as a cache, in which a block may read or
    change arrays.
    """
    if isinstance(value, list | dict):
        return True
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, type | nn.Module)
    )
