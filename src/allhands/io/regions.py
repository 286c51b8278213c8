"""Parts of an array: a box of it, or a range of its numbers in C order."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]
# Bytes of one number, by the code of its type in safetensors.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class Box:
    """The numbers from ``start`` on, ``shape`` of them along each axis."""

    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def flat(self, whole: Shape) -> Flat | None:
        """Return the box in an array of the shape ``whole`` as a range; ``None`` if its numbers do
        not follow each other there.
        """
        # It is a range if it has all of each axis behind the first axis with several numbers.
        first = next((axis for axis, n in enumerate(self.shape) if n != 1), len(whole))
        if any(
            n != most for n, most in zip(self.shape[first + 1 :], whole[first + 1 :], strict=True)
        ):
            return None
        start = 0
        for at, most in zip(self.start, whole, strict=True):
            start = start * most + at
        return Flat(start, start + self.size)

    def fits(self, whole: Shape) -> bool:
        """Return True if the box lies in an array of the shape ``whole``."""
        if not len(self.start) == len(self.shape) == len(whole):
            return False
        return all(
            0 <= at <= at + n <= most
            for at, n, most in zip(self.start, self.shape, whole, strict=True)
        )

    def overlaps(self, other: Box) -> bool:
        pairs = zip(self.start, self.shape, other.start, other.shape, strict=True)
        return all(max(at, there) < min(at + n, there + m) for at, n, there, m in pairs)


@dataclass(frozen=True)
class Flat:
    """The numbers from ``start`` to ``stop`` of an array in C order, as one dimension."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def shape(self) -> Shape:
        return (self.size,)

    def flat(self, whole: Shape) -> Flat:
        """Return the region itself, as :meth:`Box.flat` does."""
        return self

    def fits(self, whole: Shape) -> bool:
        """Return True if the range lies in an array of the shape ``whole``."""
        return 0 <= self.start <= self.stop <= math.prod(whole)

    def overlaps(self, other: Flat) -> bool:
        return max(self.start, other.start) < min(self.stop, other.stop)


Region = Box | Flat


def everything(shape: Shape) -> Box:
    """Return the region that is all of an array."""
    return Box((0,) * len(shape), shape)
