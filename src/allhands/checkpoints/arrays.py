"""Conversion of MLX's arrays to a checkpoint's tensors and back, bit for bit, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np
import psutil
from numpy.typing import NDArray

from allhands.checkpoints.format import Groups, OwnedSlice, ShardedState, num_bytes_of
from allhands.checkpoints.reading import Checkpoint
from allhands.checkpoints.slices import StoredNumbers, cut, stored_numbers
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import hand_out_bytes, hand_out_json
from allhands.errors import CheckpointError
from allhands.io.regions import ITEM_BYTES, Flat, Region, Shape, everything
from allhands.io.tensors import Tensor
from allhands.io.trees import flatten

# Names of types in safetensors. Numpy has no bfloat16: its bits are handled as integers.
CODES: dict[mx.Dtype, str] = {
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
DTYPES = {code: dtype for dtype, code in CODES.items()}
_PIECE_BYTES = 4 << 20
_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


# --- writing --------------------------------------------------------------------------------------


def owned(array: mx.array, shape: Shape | None = None, region: Region | None = None) -> OwnedSlice:
    """Return ``array`` as the slice ``region`` of a whole array of ``shape``; by default as all
    of it.
    """
    shape = array.shape if shape is None else shape
    return OwnedSlice(
        shape, CODES[array.dtype], everything(shape) if region is None else region, array
    )


def owned_tree(tree: Any) -> dict[str, OwnedSlice]:
    """Return the arrays of a tree by their dotted names, as whole arrays."""
    return {name: owned(array) for name, array in flatten(tree)}


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the arrays of a tree as tensors with dotted names.

    Further training does not change them.
    """
    return held(owned_tree(tree), on_device=False)


def held(state: ShardedState, *, on_device: bool) -> list[Tensor]:
    """Keep the present slices as tensors that any thread can write to files.

    MLX's arrays never change, and a reference keeps their memory. So nothing is copied if the CPU
    can read that memory.

    Args:
        on_device: True to copy the slices in a GPU's own memory, after the queued work, and to read
            the copies one by one for writing. If the arrays themselves were read, MLX would move
            them to shared memory, and the next step would wait until they are back.
    """
    own = {name: each.get() for name, each in state.items()}
    arrays = {name: array.view(_WORDS[array.dtype.size]) for name, array in own.items()}
    data: dict[str, Any]
    if on_device:
        # The sum with 0 copies the bits, which are integers here, into new memory.
        arrays = {name: array + mx.array(0, array.dtype) for name, array in arrays.items()}
        mx.async_eval(list(arrays.values()))
        data = {name: _later(array) for name, array in arrays.items()}
    else:
        mx.eval(list(arrays.values()))
        data = {name: _view(array) for name, array in arrays.items()}
    parts = {name: (each.shape, each.region) for name, each in state.items()}
    return [
        Tensor(name, state[name].dtype, state[name].region.shape, data[name], parts[name])
        for name in state
    ]


@dataclass(frozen=True)
class Held:
    """The state of a step that is held while training goes on.

    Attributes:
        groups: returns the slices that this rank holds now.
        spare_bytes: bytes of a GPU's own memory that a step leaves free.
        ranks_here: number of ranks that share this computer's memory.
    """

    groups: Callable[[], Groups]
    spare_bytes: Callable[[], int] = lambda: 0
    ranks_here: int = 1

    def waits(self) -> bool:
        """Return True if training must wait, because memory cannot hold this state beside the next
        steps.
        """
        size = num_bytes_of(self.groups())
        return (
            2 * size >= self.spare_bytes()
            and psutil.virtual_memory().available < self.ranks_here * size
        )


def snapshot(groups: Groups, spare_bytes: int) -> Callable[[], dict[str, list[Tensor]]]:
    """Hold a rank's present state, see :func:`held`; return a function that returns it, by file.

    Args:
        spare_bytes: bytes of a GPU's own memory that a step leaves free. Copies are made there only
            if they fit twice, because weights and optimizer may be held one after the other.
    """
    on_device = 2 * num_bytes_of(groups) < spare_bytes
    kept = {file: held(state, on_device=on_device) for file, state in groups.items()}
    return lambda: kept


def _later(array: mx.array) -> Callable[[], memoryview]:
    def get() -> memoryview:
        mx.eval(array)
        return np.asarray(array).reshape(-1).data

    return get


def _view(array: mx.array) -> memoryview | Callable[[], memoryview]:
    """Return a view of MLX's bytes; for an array in another order a copy, made when it is written."""
    plain = cast("NDArray[Any]", np.asarray(array))
    return plain.reshape(-1).data if plain.flags.c_contiguous else lambda: plain.reshape(-1).data


# --- reading --------------------------------------------------------------------------------------


class StoredArrayReader(Protocol):
    """An array of a checkpoint that can be read.

    ``shape`` and ``dtype`` (a name of safetensors) are those of the whole array.
    """

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> str: ...

    def read(self, region: Region | None = None) -> mx.array:
        """Read and return the numbers of ``region``, by default all, in its shape.

        If several ranks read together (see :func:`shared_arrays`), they read arrays in the same order,
        each its own region.
        """
        ...


@dataclass(frozen=True)
class LocalArray:
    """An array that this rank reads by itself."""

    numbers: StoredNumbers

    @property
    def shape(self) -> Shape:
        return self.numbers.shape

    @property
    def dtype(self) -> str:
        return self.numbers.dtype

    def read(self, region: Region | None = None) -> mx.array:
        return _array(self.numbers.words(region), self.dtype)


@dataclass(frozen=True)
class SharedArray:
    """An array that rank 0 reads and sends; only rank 0 has ``numbers``."""

    communicator: Communicator
    shape: Shape
    dtype: str
    numbers: StoredNumbers | None

    def read(self, region: Region | None = None) -> mx.array:
        wanted = everything(self.shape) if region is None else region
        flat, word = wanted.flat(self.shape), ITEM_BYTES[self.dtype]
        # A range is cut out of the stream; a box that is no range needs the whole array.
        taken = Flat(0, math.prod(self.shape)) if flat is None else flat
        result, at = np.empty(taken.size * word, dtype=np.uint8), -taken.start * word
        for piece in hand_out_bytes(
            self.communicator, self._pieces(), math.prod(self.shape) * word
        ):
            begin, end = max(at, 0), min(at + len(piece), len(result))
            if begin < end:
                result[begin:end] = piece[begin - at : end - at]
            at += len(piece)
        words = result.view(f"u{word}")
        return _array(
            words.reshape(wanted.shape) if flat else cut(words.reshape(self.shape), wanted),
            self.dtype,
        )

    def _pieces(self) -> Iterator[memoryview]:
        if self.numbers is None:
            return
        step = (
            _PIECE_BYTES // ITEM_BYTES[self.dtype] if self.numbers.in_ranges else self.numbers.size
        )
        for start in range(0, self.numbers.size, step):
            words = self.numbers.words(Flat(start, min(start + step, self.numbers.size)))
            yield words.view(np.uint8).data


@dataclass(frozen=True)
class ReadArray:
    """An array that has been read."""

    array: mx.array
    dtype: str

    @property
    def shape(self) -> Shape:
        return self.array.shape

    def read(self, region: Region | None = None) -> mx.array:
        if region is None:
            return self.array
        if isinstance(region, Flat):
            return self.array.reshape(-1)[region.start : region.stop]
        stops = [start + size for start, size in zip(region.start, region.shape, strict=True)]
        return self.array[
            tuple(slice(start, stop) for start, stop in zip(region.start, stops, strict=True))
        ]


def local_arrays(checkpoint: Checkpoint, file: str) -> dict[str, StoredArrayReader]:
    """Return the arrays in a checkpoint's file or group of files ``file``, by name.

    Raises:
        CheckpointError: the files cannot be read.
    """
    return {name: LocalArray(numbers) for name, numbers in stored_numbers(checkpoint, file).items()}


def shared_arrays(
    communicator: Communicator, checkpoint: Checkpoint | None, file: str
) -> dict[str, StoredArrayReader]:
    """Return :func:`local_arrays` of rank 0's checkpoint on every rank.

    All ranks call this together, and read the arrays together.
    """
    numbers = {} if checkpoint is None or communicator.rank else stored_numbers(checkpoint, file)
    facts = hand_out_json(
        communicator, [(name, each.shape, each.dtype) for name, each in numbers.items()]
    )
    return {
        name: SharedArray(communicator, tuple(shape), code, numbers.get(name))
        for name, shape, code in facts
    }


def _array(words: NDArray[Any], dtype: str) -> mx.array:
    array = mx.array(words).view(DTYPES[dtype])
    mx.eval(array)
    return array


def require_same(
    stored: Mapping[str, StoredArrayReader],
    wanted: Iterable[tuple[str, Shape, mx.Dtype]],
    place: str,
) -> None:
    """Compare a checkpoint's arrays with the arrays that will receive their numbers: names, shapes
    and types.

    Raises:
        CheckpointError: the arrays differ.
    """
    here = {name: (shape, CODES[dtype]) for name, shape, dtype in wanted}
    there = {name: (each.shape, each.dtype) for name, each in stored.items()}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise CheckpointError(
                f"{name} is {_described(there.get(name))} in the checkpoint, {_described(here.get(name))} here",
                code="checkpoint-mismatch",
                where=place,
                hint="resume with the model and the settings that the checkpoint was made with",
            )


def _described(facts: tuple[Shape, str] | None) -> str:
    if facts is None:
        return "not trained"
    shape, code = facts
    return f"{shape} {str(DTYPES[code]).removeprefix('mlx.core.')}"
