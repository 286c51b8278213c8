"""Arrays as safetensors, written piece by piece without a copy of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.io.regions import ITEM_BYTES, Region, Shape

# Hashed while they are in the processor's cache, written by few calls.
_PIECE_BYTES = 4 << 20

_Data = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Tensor:
    """An array as safetensors stores it.

    Attributes:
        name: unique within its file.
        dtype: code of safetensors, such as ``F32``, ``BF16`` or ``U32``.
        shape: ``()`` for a single number.
        data: C-contiguous, little-endian; must not change until it is written. Or a function that
            gives it.
        part: the shape of the array of which this is a slice, and where it lies there; ``None``: it
            is whole.
    """

    name: str
    dtype: str
    shape: Shape
    data: _Data | Callable[[], _Data]
    part: tuple[Shape, Region] | None = None

    def content(self) -> memoryview:
        """Return the data as bytes.

        Raises:
            ValueError: they are not of the shape and type.
        """
        view = memoryview(self.data() if isinstance(self.data, Callable) else self.data)
        if view.nbytes != self.num_bytes or not view.c_contiguous:
            raise ValueError(
                f"{self.name}: {view.nbytes} bytes of data are not {self.dtype} of shape {self.shape} in C order"
            )
        if not view.nbytes:
            return memoryview(b"")
        import numpy as np

        # Unlike a cast of the view, it takes every type of items.
        return np.frombuffer(view, dtype=np.uint8).data

    @property
    def num_bytes(self) -> int:
        """Size of the data.

        Raises:
            ValueError: an unknown type, or no name of a tensor.
        """
        if self.dtype not in ITEM_BYTES or self.name == "__metadata__":
            raise ValueError(
                f"{self.name}: safetensors has no such type, {self.dtype!r}, or no such name"
            )
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def safetensors_pieces(tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file. Large items come first, as the format asks, so that
    all are aligned.

    Raises:
        ValueError: at once: a name given twice, an unknown type, data that are not of the shape and
            type. Data that a function gives are asked for, and looked at, when it is their turn.
    """
    ordered = _ordered(tensors)
    for tensor in ordered:
        if not isinstance(tensor.data, Callable):
            tensor.content()

    def pieces() -> Iterator[bytes | memoryview]:
        yield _header(ordered)
        for tensor in ordered:
            content = tensor.content()
            for begin in range(0, len(content), _PIECE_BYTES):
                yield content[begin : begin + _PIECE_BYTES]

    return pieces()


def safetensors_size(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of such a file, without looking at the data."""
    return len(_header(_ordered(tensors))) + sum(tensor.num_bytes for tensor in tensors)


def _ordered(tensors: Sequence[Tensor]) -> list[Tensor]:
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("two tensors of a file have the same name")
    for tensor in tensors:
        _ = tensor.num_bytes
    return sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))


def _header(ordered: Sequence[Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
