"""Bring micro-batches to a GPU without keeping the host waiting.

``mx.array`` of NumPy's values takes memory that the host can write. On NVIDIA GPUs MLX looks for it
in its cache, where there is what kernels have left, memory of the device, and makes it the host's
by ``cudaMemcpy`` and ``cudaFree``: both wait until the device has done all that was handed out. So
each step's values are written over those of an earlier one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from allhands.kernels.fused import kernels

ToArrays = Callable[[Sequence[NDArray[Any]]], tuple[mx.array, ...]]

# Two are on the device at a time: a step's last micro-batch and the next one's first, or two passes
# of a validation.
_PLACES = 4
_SHAPES = 64


def as_arrays(values: Sequence[NDArray[Any]]) -> tuple[mx.array, ...]:
    """Copies for MLX."""
    return tuple(map(mx.array, values))


def arrays_of_batches() -> ToArrays:
    """Return the function that makes arrays of micro-batches here, one after the other."""
    return BatchMemory() if kernels.available() else as_arrays


class BatchMemory:
    """Arrays of the same memory again and again, for each set of shapes.

    What a call returns holds until :data:`_PLACES` more calls with the same shapes; by then it must
    have been computed with.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Any, cycle[tuple[mx.array, ...]]] = OrderedDict()

    def __call__(self, values: Sequence[NDArray[Any]]) -> tuple[mx.array, ...]:
        """Arrays with ``values``, of their shapes and types."""
        kind = tuple((each.shape, each.dtype.str) for each in values)
        if kind not in self._places:
            if len(self._places) >= _SHAPES:
                self._places.popitem(last=False)
            self._places[kind] = cycle([as_arrays(values) for _ in range(_PLACES)])
        self._places.move_to_end(kind)
        arrays = next(self._places[kind])
        for array, each in zip(arrays, values, strict=True):
            np.copyto(np.asarray(array), each)  # a view
        return arrays
