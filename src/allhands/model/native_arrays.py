"""MLX's arrays as the code in ``allhands.native`` takes and gives them, and its matrix product."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from allhands.blas import native_library

Array = NDArray[Any]
FORWARD_ONLY = "_native_forward_only"


def available() -> bool:
    """Whether the code is there and MLX computes on the CPU."""
    return native_library() is not None and mx.default_device().type == mx.DeviceType.cpu


def forward_only(module: Any) -> bool:
    """Whether no gradient goes back through ``module``; then nothing needs to be kept for one."""
    return bool(getattr(module, FORWARD_ONLY, False))


@contextmanager
def no_gradient_through(block: nn.Module) -> Generator[None]:
    """Inside, nothing that ``block`` computes is kept for a gradient."""
    changed = [module for module in block.modules() if not forward_only(module)]
    for module in changed:
        object.__setattr__(module, FORWARD_ONLY, True)
    try:
        yield
    finally:
        for module in changed:
            object.__setattr__(module, FORWARD_ONLY, False)


def floats(array: mx.array) -> Array:
    """A view of an evaluated array, or a copy in rows if it lies otherwise."""
    return np.ascontiguousarray(np.asarray(array))


def rows(array: mx.array) -> Array:
    """The same as (N, D)."""
    return floats(array).reshape(-1, array.shape[-1])


def new(*shape: int) -> tuple[mx.array, Array]:
    """An array of anything, and the view through which it is filled.

    It does not come of other arrays, so that MLX, while it differentiates, keeps nothing for its sake.
    """
    array = mx.array(np.empty(shape, dtype=np.float32))  # a copy: several times faster than zeros of MLX's own
    return array, np.asarray(array)


def at(array: Array | None) -> ctypes.c_void_p:
    """Where its values are."""
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def call(name: str, *arguments: Any) -> None:
    """Call what returns 0 where memory is short."""
    if getattr(native_library(), name)(*arguments) == 0:
        raise MemoryError(name)


def multiply(
    x: Array,
    y: Array,
    *,
    left: bool = False,
    right: bool = False,
    into: Array | None = None,
    add: bool = True,
    scale: float = 1.0,
) -> Array:
    """``scale * x @ y``, of which ``left`` or ``right`` is transposed.

    With ``into`` it is added to that, or with ``add`` false takes the place of what is there.
    """
    height, inner = x.shape[::-1] if left else x.shape
    columns = y.shape[0] if right else y.shape[1]
    out = np.empty((height, columns), dtype=np.float32) if into is None else into
    forms = 101, 112 if left else 111, 112 if right else 111
    integers = [ctypes.c_int(each) for each in (*forms, height, columns, inner)]
    factors = (at(x), ctypes.c_int(x.shape[1]), at(y), ctypes.c_int(y.shape[1]))
    beta = ctypes.c_float(1.0 if into is not None and add else 0.0)
    native_library().cblas_sgemm(*integers, ctypes.c_float(scale), *factors, beta, at(out), ctypes.c_int(columns))  # type: ignore[union-attr]
    return out


def gate(gate: Array, up: Array, into: Array) -> None:
    """``silu(gate) * up``, element-wise."""
    native_library().allhands_gated(*map(at, (gate, up, into)), ctypes.c_ssize_t(gate.size))  # type: ignore[union-attr]


def gate_back(gate: Array, up: Array, cotangent: Array, in_gate: Array, in_up: Array) -> None:
    """The gradients of :func:`gate`, written to the last two."""
    pointers = map(at, (gate, up, cotangent, in_gate, in_up))
    native_library().allhands_gated_back(*pointers, ctypes.c_ssize_t(gate.size))  # type: ignore[union-attr]
