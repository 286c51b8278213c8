"""Arrays in the safetensors format, written piece by piece without a copy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.io.regions import ITEM_BYTES, Region, Shape

# Size of a piece: small enough to be hashed in the processor's cache, large enough for few calls.
_PIECE_BYTES = 4 << 20

_Data = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Tensor:
    """An array as safetensors stores it.

    Attributes:
        name: unique within its file.
        dtype: code of safetensors, such as ``F32``, ``BF16`` or ``U32``.
        shape: ``()`` for a single number.
        data: C-contiguous and little-endian, or a function that returns such data; it must not
            change until it is written.
        part: if this is a slice of a larger array: the shape of that array, and the slice's region.
    """

    name: str
    dtype: str
    shape: Shape
    data: _Data | Callable[[], _Data]
    part: tuple[Shape, Region] | None = None

    def content(self) -> memoryview:
        """Return the data as bytes.

        Raises:
            ValueError: the data do not fit the shape and type.
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
            ValueError: the type is unknown, or the name is reserved.
        """
        if self.dtype not in ITEM_BYTES or self.name == "__metadata__":
            raise ValueError(
                f"{self.name}: safetensors has no such type, {self.dtype!r}, or no such name"
            )
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def safetensors_pieces(tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """Return an iterator over the bytes of a safetensors file.

    Types with large items come first, so that all arrays are aligned.

    Raises:
        ValueError: at once: a name comes twice, a type is unknown, or data do not fit shape and
            type. If a function returns the data, they are checked when it is their turn.
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
    """Return the size in bytes of the safetensors file, without looking at the data.

    Raises:
        ValueError: a name comes twice, or a type is unknown.
    """
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
