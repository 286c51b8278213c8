"""Calls of the code in C with arrays: NumPy's, or evaluated ones of MLX's, whose numbers lie in
rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from allhands.runtime.blas import native_library


def at(array: Any) -> ctypes.c_void_p:
    """Return the address of an array's numbers; null for ``None``."""
    return ctypes.c_void_p(None if array is None else np.asarray(array).ctypes.data)


def pointers(arrays: Sequence[Any]) -> Any:
    """Return the addresses of the arrays' numbers as an array in C."""
    return (ctypes.c_void_p * len(arrays))(*map(at, arrays))


def call(name: str, *arguments: Any) -> int:
    """Call a function of the library; what it returns, if it returns something."""
    return getattr(native_library(), name)(*arguments)


def call_checked(name: str, *arguments: Any) -> None:
    """Call what returns 0 where memory is short.

    Raises:
        MemoryError: it is.
    """
    if call(name, *arguments) == 0:
        raise MemoryError(name)
