"""Recompute a block's activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from allhands.model.fastmath import with_vjp
from allhands.model.native_arrays import floats, no_gradient_through
from allhands.trees import flatten, unflatten


def checkpoint_layers(layers: Iterable[nn.Module], *, at_once: bool = False) -> None:
    """Make each of ``layers`` forget its activations after the forward pass.

    Only these instances change (their class becomes a subclass); other models of the process do not.
    Doing it twice changes nothing.

    Args:
        at_once: for layers that compute when they are called (:mod:`allhands.model.native`), not in a graph.
    """
    for layer in layers:
        if not hasattr(layer, "_recomputes"):
            layer.__class__ = _recomputing(type(layer), _called_at_once if at_once else _called_in_a_graph)


def _recomputing(base: type[nn.Module], called: Callable[..., Any]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(cast("Any", base).__call__, self, *args, **kwargs)

    return type(base.__name__, (base,), {"__call__": call, "_recomputes": True})


def _called_in_a_graph(function: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    def inner(params: Any, *inner_args: Any) -> Any:
        layer.update(params)
        return function(layer, *inner_args, **kwargs)

    return mx.checkpoint(inner)(layer.trainable_parameters(), *args)


def _called_at_once(function: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """As :func:`mx.checkpoint`, which keeps what MLX is told of a forward pass as long as the pass around it lasts."""
    named = flatten(layer.trainable_parameters())
    weights = [value for _, value in named]
    places = [place for place, each in enumerate(args) if _is_differentiable(each)]

    def call(inputs: Sequence[mx.array]) -> Any:
        whole = list(args)
        for place, each in zip(places, inputs, strict=True):
            whole[place] = each
        return function(layer, *whole, **kwargs)

    def forward(*primals: mx.array) -> Any:
        with no_gradient_through(layer):
            # Copies are nothing that is differentiated: what comes of them is forgotten.
            return call([mx.array(floats(each)) for each in primals[: len(places)]])

    def again(*primals: mx.array) -> Any:
        _install(layer, named, primals[len(places) :])
        return call(primals[: len(places)])

    def backward(primals: Any, cotangents: Any, _: Any) -> Any:
        inputs, towards = (list(each) if isinstance(each, tuple | list) else [each] for each in (primals, cotangents))
        try:
            made = mx.vjp(again, inputs, towards)[1]
            # Copies again: what a sum came of, MLX would keep until the whole backward pass is done.
            return [mx.array(np.asarray(each)) for each in made]
        finally:
            _install(layer, named, weights)

    return with_vjp(forward, backward)(*(args[place] for place in places), *weights)


def _install(layer: nn.Module, named: Sequence[tuple[str, mx.array]], values: Sequence[mx.array]) -> None:
    layer.update(unflatten([(name, value) for (name, _), value in zip(named, values, strict=True)]))


def _is_differentiable(argument: Any) -> bool:
    return isinstance(argument, mx.array) and mx.issubdtype(argument.dtype, mx.floating)
