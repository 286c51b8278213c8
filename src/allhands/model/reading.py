"""Reading of a model's weights: with several threads onto an NVIDIA GPU, and with missing files.

On a GPU MLX reads one array after the other, with one core, into new memory each time: 1.7 GB a
second on a host whose memory gives 30. On other devices MLX's own threads are fast enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils as mlx_lm

from allhands.model.fingerprints import blocks_of
from allhands.model.weight_files import WeightFile, present
from allhands.runtime.blas import available_cores
from allhands.runtime.threads import side_by_side

THREADS = 8
SMALL_BYTES = 64 << 20  # below that, threads cost more than they save

Json = dict[str, Any]
Arrays = dict[str, mx.array]


def module_of(model_type: str) -> str:
    """Return the name of the module in mlx_lm.models that builds models of this type."""
    return mlx_lm.MODEL_REMAPPING.get(model_type, model_type)


def opened(path: Path) -> Iterator[tuple[Arrays, dict[str, str]]]:
    """Yield for each weight file in the directory ``path`` its lazy arrays by name, and its
    metadata.
    """
    for file in present(path):
        content: Any = mx.load(str(file), return_metadata=True)
        yield content


def worth_threads(files: Sequence[Path]) -> bool:
    """Return True if :func:`read_arrays` is faster here than MLX's own reading."""
    on_cuda = mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()
    return (
        on_cuda
        and available_cores() > 1
        and sum(file.stat().st_size for file in files) >= SMALL_BYTES
    )


def read_arrays(files: Sequence[Path], threads: int = THREADS) -> Arrays:
    """Return all arrays of safetensors files, read into memory.

    If several files have a name, the last file's array counts. Each thread has a stream of its own,
    and all read about the same number of bytes.

    Raises:
        RuntimeError: a file cannot be read.
    """
    sizes = {
        name: (file, array.nbytes) for file in files for name, array in lazy_arrays(file).items()
    }
    shares: list[list[str]] = [
        [] for _ in range(max(1, min(threads, available_cores(), len(sizes))))
    ]
    held = [0] * len(shares)
    for name in sorted(sizes, key=lambda name: -sizes[name][1]):
        least = held.index(min(held))
        shares[least].append(name)
        held[least] += sizes[name][1]

    def read(names: list[str]) -> Arrays:
        stream = mx.new_stream(mx.default_device())
        opened = {file: lazy_arrays(file, stream) for file in {sizes[name][0] for name in names}}
        arrays = {name: opened[sizes[name][0]][name] for name in names}
        mx.eval(arrays)
        mx.synchronize(stream)
        return arrays

    return {name: array for arrays in side_by_side(read, shares) for name, array in arrays.items()}


def classes_that_read(files: Sequence[Path]) -> Callable[[Json], tuple[Any, Any]]:
    """Return a ``get_model_classes`` for ``mlx_lm.utils.load_model`` with which arrays are read by
    :func:`read_arrays`.
    """
    return _classes(lambda lazy: {**lazy, **read_arrays(files)})


def classes_without(missing: Mapping[str, WeightFile]) -> Callable[[Json], tuple[Any, Any]]:
    """Return a ``get_model_classes`` that adds placeholders for the arrays of absent files."""
    arrays = {
        name: _nothing(facts) for file in missing.values() for name, facts in file.arrays.items()
    }
    return _classes(lambda there: {**arrays, **there})


def _nothing(facts: Sequence[Any]) -> mx.array:
    """Return a lazy placeholder of this type and shape: NaN if the type is floating, else 0."""
    dtype: mx.Dtype = getattr(mx, facts[0])
    empty = float("nan") if mx.issubdtype(dtype, mx.floating) else 0
    return mx.full(facts[1:], empty, dtype=dtype)


def list_of_files(files: Sequence[Path]) -> dict[str, WeightFile]:
    """Return the facts about a model's files for other computers, see
    :mod:`allhands.model.weight_files`.

    Raises:
        RuntimeError: a file cannot be read.
    """
    blocks = blocks_of(files)
    return {
        file.name: WeightFile(file.stat().st_size, blocks[file], _facts_of(file)) for file in files
    }


def _facts_of(file: Path) -> dict[str, list[Any]]:
    return {
        name: [str(array.dtype).removeprefix("mlx.core."), *array.shape]
        for name, array in lazy_arrays(file).items()
    }


def _classes(change: Callable[[Arrays], Arrays]) -> Callable[[Json], tuple[Any, Any]]:
    usual: Any = signature(mlx_lm.load_model).parameters["get_model_classes"].default

    def find(config: Json) -> tuple[Any, Any]:
        model_class, arguments_class = usual(config)

        def make(arguments: Any) -> Any:
            model = model_class(arguments)
            sanitize = getattr(model, "sanitize", lambda weights: weights)

            def changed(weights: Arrays) -> Arrays:
                del model.sanitize  # from now on the class's own method is found
                return sanitize(change(weights))

            model.sanitize = changed
            return model

        return make, arguments_class

    return find


def lazy_arrays(file: Path, stream: mx.Stream | None = None) -> Arrays:
    """Return the arrays of a file, each read by ``stream`` when it is used."""
    arrays: Any = mx.load(str(file), stream=stream)
    return arrays
