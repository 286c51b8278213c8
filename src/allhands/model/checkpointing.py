"""Recompute a block's activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def _called_at_once(function: Callable[..., Any], layer: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
    """As :func:`mx.checkpoint`, which keeps what MLX is told of a forward pass as long as the pass around it lasts."""
    names, values = zip(*flatten(layer.trainable_parameters()), strict=True) if _is_trained(layer) else ((), ())

    def forward(x: mx.array, *_: mx.array) -> mx.array:
        with no_gradient_through(layer):
            # A copy is nothing that is differentiated: what comes of it is forgotten.
            return function(layer, mx.array(floats(x)), *args, **kwargs)

    def again(x: mx.array, *weights: mx.array) -> mx.array:
        layer.update(unflatten(list(zip(names, weights, strict=True))))
        return function(layer, x, *args, **kwargs)

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
        try:
            made = mx.vjp(again, list(primals) if values else [primals], [cotangent])[1]
            return [mx.array(np.asarray(each)) for each in made]
        finally:
            layer.update(unflatten(list(zip(names, values, strict=True))))

    return with_vjp(forward, backward)(x, *values)


def _is_trained(layer: nn.Module) -> bool:
    return bool(flatten(layer.trainable_parameters()))
