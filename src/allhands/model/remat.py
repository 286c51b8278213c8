"""Recompute a block's activations in the backward pass instead of keeping them.

A block may be called with arrays in any place: positional or by keyword, in lists, dictionaries or
objects such as caches, which it may also change. All of them are inputs of the recomputed function,
and what the block leaves in them is among its outputs.
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

    Only these instances change (their class becomes a subclass); other models of the process do
    not. Doing it twice changes nothing.

    Args:
        at_once: for layers that compute when they are called (:mod:`allhands.kernels.native`), not
            in a graph.
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
    """One call of a block, as a function of arrays alone: its inputs, then its trained weights.

    Attributes:
        inputs: arrays that the block is called with.
        weights: its trained arrays.
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
        """The arrays that come of it; what the block was called with is as it was afterwards."""
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
        # A block that passes on what it was given makes nothing, and MLX ends the process where a
        # function does.
        return outputs or [mx.zeros(())]

    def result(self, outputs: Sequence[mx.array]) -> Any:
        """Return the block's result, made of ``outputs``; its arguments are as it leaves them."""
        return self._made(outputs, self.inputs)[0]

    def _install(self, weights: Sequence[mx.array]) -> None:
        self.layer.update(unflatten(zip(self._names, weights, strict=True)))


def _called_in_a_graph(call: _Call) -> list[mx.array]:
    return cast("Any", mx.checkpoint)(call)(call.inputs, call.weights)


def _called_at_once(call: _Call) -> list[mx.array]:
    """Compute like :func:`mx.checkpoint`, without the memory that MLX would hold until the outer
    pass ends.
    """
    count = len(call.inputs)

    def forward(*primals: mx.array) -> Any:
        with no_gradient_through(call.layer):
            # Copies are nothing that is differentiated: what comes of them is forgotten.
            return call([mx.array(floats(each)) for each in primals[:count]], call.weights)

    def again(*primals: mx.array) -> Any:
        return call(primals[:count], primals[count:])

    def backward(primals: Any, cotangents: Any, _: Any) -> Any:
        inputs, towards = (
            list(each) if isinstance(each, tuple | list) else [each]
            for each in (primals, cotangents)
        )
        made = mx.vjp(again, inputs, towards)[1]
        # Copies again: what a sum came of, MLX would keep until the whole backward pass is done.
        return [mx.array(np.asarray(each)) for each in made]

    outputs = with_vjp(forward, backward)(*call.inputs, *call.weights)
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


# --- arrays in nested values ----------------------------------------------------------------------

# Gives a nested value again: of the arrays that were found in it, and of those that a block was
# given and passes on.
_Builder = Callable[[Sequence[mx.array], Sequence[mx.array]], Any]


class _Parts:
    """Takes nested values apart into ``arrays`` and functions that put them together again.

    Lists, dictionaries and objects keep their identity: they are filled in place, each where it is
    met first.
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
    """Return true for a container or an object such as a cache, in which a block may read or change
    arrays.
    """
    if isinstance(value, list | dict):
        return True
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, type | nn.Module)
    )
