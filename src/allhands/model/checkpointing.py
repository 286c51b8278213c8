"""Recompute a block's activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn


def checkpoint_layers(layers: Iterable[nn.Module]) -> None:
    """Make each of ``layers`` forget its activations after the forward pass.

    Only these instances change (their class becomes a subclass); other models of the process do not.
    Doing it twice changes nothing.
    """
    for layer in layers:
        if not hasattr(layer, "_recomputes"):
            layer.__class__ = _recomputing(type(layer))


def _recomputing(base: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def inner(params: Any, *inner_args: Any) -> Any:
            self.update(params)
            return cast("Any", base).__call__(self, *inner_args, **kwargs)

        return mx.checkpoint(inner)(self.trainable_parameters(), *args)

    return type(base.__name__, (base,), {"__call__": call, "_recomputes": True})
