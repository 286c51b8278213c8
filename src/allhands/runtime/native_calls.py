"""Calls of the C library with arrays of NumPy, or evaluated arrays of MLX, in row-major order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from allhands.runtime.blas import native_library


def at(array: Any) -> ctypes.c_void_p:
    """Return the address of an array's first number; null for ``None``."""
    return ctypes.c_void_p(None if array is None else np.asarray(array).ctypes.data)


def pointers(arrays: Sequence[Any]) -> Any:
    """Return the addresses of several arrays as a C array of pointers."""
    return (ctypes.c_void_p * len(arrays))(*map(at, arrays))


def call(name: str, *arguments: Any) -> int:
    """Call a function of the library, and return its result.

    The result of a function without one has no meaning. The library must be there; see
    :func:`allhands.runtime.blas.native_library`.
    """
    return getattr(native_library(), name)(*arguments)


def call_checked(name: str, *arguments: Any) -> None:
    """Call a function that returns 0 if there is too little memory.

    Raises:
        MemoryError: the function has returned 0.
    """
    if call(name, *arguments) == 0:
        raise MemoryError(name)
