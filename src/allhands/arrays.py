"""Arrays of MLX as bytes, and back: for files, and for handing rank 0's state to the others, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from allhands.checkpoints import Tensor
from allhands.distributed.backend import Communicator
from allhands.trees import flatten, unflatten

# Names of safetensors' types. Numpy has no bfloat16: it travels as the integers of the same bits.
_CODES: dict[mx.Dtype, str] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
# Bytes a collective: large enough for speed, small beside any model.
_CHUNK_BYTES = 32 << 20


def tensors_of(tree: Any) -> list[Tensor]:
    """The arrays of a tree with their dotted names, as bytes that stay what they are while training goes on.

    MLX's arrays never change, and a reference keeps their memory: nothing is copied where the processor can read
    it, on a GPU with memory of its own it is copied here.
    """
    arrays = flatten(tree)
    mx.eval([array for _, array in arrays])
    return [Tensor(name, _CODES[array.dtype], tuple(array.shape), _bytes(array).data) for name, array in arrays]


def hold(tree: Any, *, on_device: bool) -> Callable[[], list[Tensor]]:
    """Keep the arrays of a tree as they are; what is returned gives :func:`tensors_of` them, once, in any thread.

    Args:
        on_device: copy them in a GPU's own memory, behind the work that it has been given already; whoever asks waits
            until they have come from it. Were the arrays themselves read, MLX would move them to memory that both can
            use, and the next step would wait until they are back.
    """
    if not on_device:
        tensors = tensors_of(tree)
        return lambda: tensors
    arrays = [(name, _CODES[array.dtype], tuple(array.shape), _copied(array)) for name, array in flatten(tree)]
    mx.async_eval([copy for *_, copy in arrays])

    def get() -> list[Tensor]:
        mx.eval([copy for *_, copy in arrays])
        return [Tensor(name, code, shape, _bytes(copy).data) for name, code, shape, copy in arrays]

    return get


def _copied(array: mx.array) -> mx.array:
    """The bits of ``array`` in memory of their own: integers, to which nothing is added."""
    words = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    return array.view(words) + mx.array(0, dtype=words)


def _bytes(array: mx.array) -> NDArray[np.uint8]:
    """(nbytes,) the bytes of an evaluated array in C order."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    # A view of what MLX holds; it is copied only if it lies in another order there.
    return np.ascontiguousarray(np.asarray(plain)).reshape(-1).view(np.uint8)


def load_tree(file: Path) -> Any:
    """The tree whose arrays were written as safetensors under their dotted names; empty parts are lost."""
    return unflatten(list(load_arrays(file).items()))


def load_arrays(file: Path) -> dict[str, mx.array]:
    """The arrays of a safetensors file by name, read now."""
    arrays: dict[str, mx.array] = mx.load(str(file), format="safetensors")  # type: ignore[assignment]
    mx.eval(list(arrays.values()))
    return arrays


def hand_out(communicator: Communicator, arrays: Mapping[str, mx.array] | None) -> dict[str, mx.array]:
    """Rank 0's ``arrays`` on every rank, bit for bit; the others' arguments do not matter.

    They are sums of integers to which the others add zero: every back-end has those.
    """
    if communicator.size == 1:
        return dict(arrays or {})
    leads = communicator.rank == 0
    own = dict(arrays or {}) if leads else {}
    rows = [[name, _CODES[array.dtype], list(array.shape)] for name, array in own.items()]
    header: list[tuple[str, str, list[int]]] = hand_out_json(communicator, rows)
    mx.eval(list(own.values()))
    pieces = [_bytes(array) for array in own.values()]
    sizes = [int(np.prod(shape)) * _DTYPES[code].size for _, code, shape in header]
    everything = _received(communicator, pieces, sum(sizes))
    result: dict[str, mx.array] = {}
    at = 0
    for (name, code, shape), size in zip(header, sizes, strict=True):
        result[name] = mx.array(everything[at : at + size]).view(_DTYPES[code]).reshape(shape)
        at += size
    mx.eval(list(result.values()))
    return result


def hand_out_json(communicator: Communicator, value: Any) -> Any:
    """Rank 0's JSON ``value`` on every rank; the others' arguments do not matter."""
    if communicator.size == 1:
        return value
    leads = communicator.rank == 0
    text = np.frombuffer(json.dumps(value).encode() if leads else b"", dtype=np.uint8)
    length = communicator.all_sum(mx.array([len(text)], dtype=mx.uint32))
    mx.eval(length)
    return json.loads(_received(communicator, [text], int(np.asarray(length)[0])).tobytes())


def _received(communicator: Communicator, pieces: Sequence[NDArray[np.uint8]], size: int) -> NDArray[np.uint8]:
    """(size,) the bytes that rank 0 holds in ``pieces``."""
    result = np.empty(size, dtype=np.uint8)
    own = _chunks(pieces) if communicator.rank == 0 else None
    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        words = np.zeros(-(-length // 4), dtype=np.uint32)
        if own is not None:
            words.view(np.uint8)[:length] = next(own)
        total = communicator.all_sum(mx.array(words))
        mx.eval(total)
        result[start : start + length] = np.asarray(total).view(np.uint8)[:length]
    return result


def _chunks(pieces: Sequence[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of ``pieces``, end to end, in chunks of ``_CHUNK_BYTES``."""
    held: list[NDArray[np.uint8]] = []
    room = _CHUNK_BYTES
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + room]
            held.append(part)
            at, room = at + len(part), room - len(part)
            if room == 0:
                yield np.concatenate(held)
                held, room = [], _CHUNK_BYTES
    if held:
        yield np.concatenate(held)
