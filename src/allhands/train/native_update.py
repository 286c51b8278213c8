"""Adam and AdamW on Linux CPUs: the norm and the update of all arrays in one pass over each, on all
cores.

MLX makes a pass over memory on one thread for each operation, and an update has a dozen operations.
The formulas are MLX's, in float32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from itertools import chain

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from allhands.io.trees import flatten, part_of, unflatten
from allhands.kernels.native_arrays import Array, available, floats, new
from allhands.runtime.native_calls import at, call, pointers
from allhands.train.optimizers import KernelAdam

Named = tuple[str, mx.array]
_CHUNK = 16384  # numbers in a part, as in adam.c
# Size of a group of arrays that are updated together, in numbers. Old and new values are in memory
# at once only for one group, or for one array if it is larger.
_TOGETHER = 1 << 20


def native_update(model: nn.Module, optimizer: optim.Optimizer) -> NativeUpdate | None:
    """Return the native update of ``model`` by ``optimizer``; ``None`` if it does not apply here."""
    if not available() or not isinstance(optimizer, KernelAdam) or optimizer.masters:
        return None
    single = all(array.dtype == mx.float32 for _, array in flatten(model.trainable_parameters()))
    return NativeUpdate(model, optimizer) if single else None


class NativeUpdate:
    """The update of ``model`` by ``optimizer``. It makes new arrays, since the old ones may still
    be referenced.
    """

    def __init__(self, model: nn.Module, optimizer: KernelAdam) -> None:
        """Prepare; the optimizer's state may be new or restored."""
        self._model = model
        self._optimizer = optimizer

    def norm(self, sums: Sequence[Named]) -> float:
        """Return the square root of the sum of squares of all ``sums``; the same bits for any
        number of cores.
        """
        mx.eval([array for _, array in sums])
        total = 0.0
        for group in _groups(sums):
            gradients = [floats(array) for _, array in group]
            where = _Where(gradients)
            parts = np.empty(where.num_parts)
            call("allhands_squares", *where.arguments, pointers(gradients), at(parts))
            total += float(parts.sum())
        return math.sqrt(total)

    def __call__(self, sums: list[Named], factor: float) -> None:
        """Take the update by ``factor`` times ``sums``, which are emptied."""
        self._compute(sums, factor)
        sums.clear()

    def expect(self, sums: Sequence[Named], factor: float, squared: float) -> None:
        """Update the weights and the step, but not Adam's moments.

        The squares of gradients count ``squared`` times.
        """
        self._compute(sums, factor, squared)

    def _compute(self, sums: Sequence[Named], factor: float, squared: float | None = None) -> None:
        optimizer = self._optimizer
        optimizer.advance()
        mx.eval(optimizer.step, optimizer.learning_rate)
        rate, step, (b1, b2), root = (
            float(optimizer.learning_rate),
            int(optimizer.step),
            optimizer.betas,
            1.0,
        )
        shrunk = 1.0 - rate * optimizer.decay
        if optimizer.bias_correction:
            rate, root = rate / (1.0 - b1**step), 1.0 / math.sqrt(1.0 - b2**step)
        others = 1.0 - b1, (1.0 - b2) * (1.0 if squared is None else squared)
        numbers = np.array([factor, rate, b1, b2, *others, optimizer.eps, root], dtype=np.float32)
        weights = dict(flatten(self._model.trainable_parameters()))
        for group in _groups(sums):
            self._update(group, weights, numbers, shrunk, expected=squared is not None)

    def _update(
        self,
        group: list[Named],
        weights: dict[str, mx.array],
        numbers: Array,
        shrunk: float,
        *,
        expected: bool,
    ) -> None:
        names, arrays = zip(*group, strict=True)
        olds = list(map(weights.pop, names))
        homes = [part_of(self._optimizer.state, name) for name in names]
        read = [arrays, olds, *([home[kind] for home in homes] for kind in ("m", "v"))]
        mx.eval(read)
        made = [[new(*old.shape) for old in olds] for _ in range(1 if expected else 3)]
        views = [*map(floats, chain(*read)), *(view for _, view in chain(*made))]
        where = _Where(views[: len(group)])
        kept = np.where([self._optimizer.decays(old) for old in olds], shrunk, 1.0).astype(
            np.float32
        )
        call(
            "allhands_adam",
            ctypes.c_int(expected),
            *where.arguments,
            pointers(views),
            at(kept),
            at(numbers),
        )
        self._model.update(
            unflatten(list(zip(names, (weight for weight, _ in made[0]), strict=True)))
        )
        if not expected:
            for home, (first, _), (second, _) in zip(homes, *made[1:], strict=True):
                home["m"], home["v"] = first, second


def _groups(arrays: Iterable[Named]) -> Iterable[list[Named]]:
    """Yield groups of neighbouring arrays, of at most :data:`_TOGETHER` numbers or one array."""
    group: list[Named] = []
    size = 0
    for named in arrays:
        if group and size + named[1].size > _TOGETHER:
            yield group
            group, size = [], 0
        group.append(named)
        size += named[1].size
    if group:
        yield group


class _Where:
    """The parts into which the native code divides arrays."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._sizes = np.array([array.size for array in arrays], dtype=np.intp)
        ends = np.cumsum((self._sizes + _CHUNK - 1) // _CHUNK)
        self._starts = np.concatenate([[0], ends]).astype(np.intp)
        self.num_parts = int(ends[-1])

    @property
    def arguments(self) -> tuple[ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]:
        """Return number, sizes and first parts of the arrays, the first arguments of each call."""
        return ctypes.c_int(len(self._sizes)), at(self._sizes), at(self._starts)
