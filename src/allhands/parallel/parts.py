"""Arrays of a model that ranks have divided along one axis: shapes, places, and how a rank takes
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from allhands.io.regions import Box, Region, Shape, everything


@dataclass(frozen=True)
class OwnedParts:
    """This rank's part of the trained arrays.

    Attributes:
        shapes: shape of each trained array of the whole model, by name.
        parts: this rank's place in those of them that are divided, and an empty one where another
            rank has the array.
    """

    shapes: Mapping[str, Shape]
    parts: Mapping[str, Region]

    @property
    def regions(self) -> dict[str, tuple[Shape, Region]]:
        """Shape of each divided array and this rank's place in it, by name."""
        return {name: (self.shapes[name], part) for name, part in self.parts.items() if part.size}

    @property
    def places(self) -> dict[str, Region]:
        """This rank's place in every trained array, by name."""
        return {
            name: self.parts.get(name, everything(shape)) for name, shape in self.shapes.items()
        }

    def is_whole(self, name: str) -> bool:
        """Return true if all ranks have all of an array."""
        return name not in self.parts


def take(
    module: Any, key: str, axis: int, rank: int, size: int, *, lazy: bool = False
) -> Box | None:
    """Leave ``module[key]`` with the ``rank``-th of so many equal parts along an axis; its place,
    ``None``: no array.

    The array is read for that, if it has not been, and the rest of it is not kept; ``lazy``: not
    yet.
    """
    array = module.get(key)
    if not isinstance(array, mx.array):
        return None
    shape, axis = list(array.shape), axis % array.ndim
    each, start = shape[axis] // size, [0] * array.ndim
    start[axis], shape[axis] = rank * each, each
    index = tuple(slice(at, at + count) for at, count in zip(start, shape, strict=True))
    module[key] = mx.contiguous(array[index])
    if not lazy:
        mx.eval(module[key])
    return Box(tuple(start), tuple(shape))
