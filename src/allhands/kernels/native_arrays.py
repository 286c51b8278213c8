"""MLX arrays as memory for the code in ``allhands.runtime.native``, and its matrix product."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from allhands.runtime.blas import native_library
from allhands.runtime.native_calls import at, call

Array = NDArray[Any]
FORWARD_ONLY = "_native_forward_only"
_LARGE = 1 << 16  # values from which on a copy takes longer than :class:`Unwritten`
_MOST_FACTORS = 512


def available() -> bool:
    """Return true if the native code is there and MLX computes on the CPU."""
    return native_library() is not None and mx.default_device().type == mx.DeviceType.cpu


def forward_only(module: Any) -> bool:
    """Return true if no gradient goes back through ``module``, which then keeps nothing for it."""
    return bool(getattr(module, FORWARD_ONLY, False))


@contextmanager
def no_gradient_through(block: nn.Module) -> Generator[None]:
    """Inside the context, keep nothing that ``block`` computes for the backward pass."""
    changed = [module for module in block.modules() if not forward_only(module)]
    for module in changed:
        object.__setattr__(module, FORWARD_ONLY, True)
    try:
        yield
    finally:
        for module in changed:
            object.__setattr__(module, FORWARD_ONLY, False)


def floats(array: mx.array) -> Array:
    """Return a view of an evaluated array, or a copy if it is not row-contiguous."""
    return np.ascontiguousarray(np.asarray(array))


def rows(array: mx.array) -> Array:
    """Return a view of an evaluated array as (N, D) rows, or a copy."""
    return floats(array).reshape(-1, array.shape[-1])


def new(*shape: int) -> tuple[mx.array, Array]:
    """Return an array with arbitrary contents, and the view through which it is filled.

    It depends on no input, so MLX keeps nothing for it while it differentiates.
    """
    size = math.prod(shape)
    if size < _LARGE or min(shape[-1], size // shape[-1]) < 2:
        array = mx.array(np.empty(shape, dtype=np.float32))  # a copy
    else:
        array = unwritten(size // shape[-1], shape[-1]).reshape(shape)
    return array, np.asarray(array)


class Unwritten:
    """Maker of uninitialised arrays: products of a factor for which the native code skips the
    multiplication.

    A copy or a fill costs a pass over the memory on one thread: 9 % of a step in full training.
    Should MLX pass another pointer, or multiply in another way, the array is the product of ones,
    which is overwritten as well.

    Attributes:
        ones: the factor; must be held as long as the native code knows its address. ``None`` before
            the first use: an operation at import would make MLX read its environment variables
            before a run sets them.
    """

    def __init__(self) -> None:
        self.ones: mx.array | None = None
        self._factors: dict[tuple[int, int], mx.array] = {}

    def __call__(self, height: int, width: int) -> mx.array:
        ones, longest = self.ones, max(height, width)
        if ones is None or longest > ones.size:
            ones = self._grown(2 * longest)
        return self._factor(ones, height, 1) @ self._factor(ones, 1, width)

    def _grown(self, size: int) -> mx.array:
        ones = mx.ones((size,))
        # The native code must forget the old factor's address before another array can get it.
        call("allhands_leave_out", at(np.asarray(ones)))
        self.ones, self._factors = ones, {}
        return ones

    def _factor(self, ones: mx.array, height: int, width: int) -> mx.array:
        shape = height, width
        if shape not in self._factors:
            if len(self._factors) >= _MOST_FACTORS:
                self._factors.clear()
            self._factors[shape] = ones[: max(shape)].reshape(shape)
            mx.eval(self._factors[shape])
        return self._factors[shape]


unwritten = Unwritten()


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
    """Return ``scale * x @ y``; ``left`` transposes ``x``, and ``right`` transposes ``y``.

    The product is added to ``into`` if that is given, or overwrites it if ``add`` is false.
    """
    height, inner = x.shape[::-1] if left else x.shape
    columns = y.shape[0] if right else y.shape[1]
    out = np.empty((height, columns), dtype=np.float32) if into is None else into
    forms = 101, 112 if left else 111, 112 if right else 111
    integers = [ctypes.c_int(each) for each in (*forms, height, columns, inner)]
    factors = (at(x), ctypes.c_int(x.shape[1]), at(y), ctypes.c_int(y.shape[1]))
    beta = ctypes.c_float(1.0 if into is not None and add else 0.0)
    call(
        "cblas_sgemm",
        *integers,
        ctypes.c_float(scale),
        *factors,
        beta,
        at(out),
        ctypes.c_int(columns),
    )
    return out


def gate(gate: Array, up: Array, into: Array) -> None:
    """Write ``silu(gate) * up``, element-wise, to ``into``."""
    call("allhands_gated", *map(at, (gate, up, into)), ctypes.c_ssize_t(gate.size))


def gate_back(gate: Array, up: Array, cotangent: Array, in_gate: Array, in_up: Array) -> None:
    """Write the gradients of :func:`gate` to ``in_gate`` and ``in_up``."""
    pointers = map(at, (gate, up, cotangent, in_gate, in_up))
    call("allhands_gated_back", *pointers, ctypes.c_ssize_t(gate.size))
