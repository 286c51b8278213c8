"""What decides how a module computes, beside the values of its weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

# Of a module: what is trained, and in which mode it is, changes nothing that a native form does.
_IDLE = {"_no_grad", "_training"}


def traits_of(module: nn.Module, opaque: Collection[str] = ()) -> tuple[Any, ...]:
    """Equal for two modules of one class only if they compute the same with the same weights; in doubt unequal.

    Buffers (arrays whose names begin with an underscore) count by their values, weights by their shapes and types.

    Args:
        opaque: names of children that count by their class and the shapes of their weights alone.

    Returns:
        Something that can be a key as long as the modules live.
    """
    everything = {**vars(module), **module}
    told = [(name, _trait(name, value, opaque)) for name, value in everything.items() if name not in _IDLE]
    return type(module), *sorted(told, key=lambda item: item[0])


def _trait(name: str, value: Any, opaque: Collection[str]) -> Any:
    if isinstance(value, mx.array):
        buffer = name.startswith("_")
        return str(value.dtype), value.shape, np.asarray(value.astype(mx.float32)).tobytes() if buffer else None
    if isinstance(value, nn.Module):
        if name not in opaque:
            return traits_of(value, opaque)
        weights = {key: each for key, each in value.items() if isinstance(each, mx.array)}
        return type(value), *sorted((key, str(each.dtype), each.shape) for key, each in weights.items())
    if isinstance(value, list | tuple):
        return type(value), *(_trait(name, each, opaque) for each in value)
    if isinstance(value, dict):
        return type(value), *((key, _trait(name, each, opaque)) for key, each in value.items())
    # 1, 1.0 and True are equal, and not the same.
    return (type(value), value) if isinstance(value, str | int | float | None) else id(value)
