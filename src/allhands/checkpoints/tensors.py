"""Arrays as safetensors, written piece by piece without a copy of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
# Hashed while they are in the processor's cache, written by few calls.
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Tensor:
    """An array as safetensors stores it.

    Attributes:
        name: unique within its file.
        dtype: code of safetensors, such as ``F32``, ``BF16`` or ``U32``.
        shape: ``()`` for a single number.
        data: C-contiguous, little-endian; must not change until it is written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


def safetensors_pieces(tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file. Large items come first, as the format asks, so that all are aligned.

    Raises:
        ValueError: at once: a name given twice, an unknown type, data that are not of the shape and type.
    """
    sizes = [_num_bytes(tensor) for tensor in tensors]
    if len({tensor.name for tensor in tensors}) != len(sizes):
        raise ValueError("two tensors of a file have the same name")
    ordered = sorted(tensors, key=lambda tensor: (-_ITEM_BYTES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + _num_bytes(tensor)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for tensor in ordered:
            yield from _pieces(tensor.data)

    return pieces()


def _num_bytes(tensor: Tensor) -> int:
    if tensor.dtype not in _ITEM_BYTES or tensor.name == "__metadata__":
        raise ValueError(f"{tensor.name}: safetensors has no such type, {tensor.dtype!r}, or no such name")
    size = math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
    view = memoryview(tensor.data)
    if view.nbytes != size or not view.c_contiguous:
        raise ValueError(
            f"{tensor.name}: {view.nbytes} bytes of data are not {tensor.dtype} of shape {tensor.shape} in C order"
        )
    return size


def _pieces(data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
    import numpy as np

    if memoryview(data).nbytes:
        # Unlike a cast of the view, it takes every type of items.
        flat = np.frombuffer(data, dtype=np.uint8).data
        for begin in range(0, len(flat), _PIECE_BYTES):
            yield flat[begin : begin + _PIECE_BYTES]
