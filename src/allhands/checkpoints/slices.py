"""Reading of a checkpoint's arrays from mapped files: any slice, from any stored slices.

Numbers are handled as unsigned integers of the same size, so that the bits of every type are kept.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allhands.checkpoints.format import StoredArray, array_name
from allhands.checkpoints.reading import Checkpoint, damaged, unreadable
from allhands.io.regions import ITEM_BYTES, Box, Flat, Region, everything

Words = NDArray[Any]


class StoredNumbers:
    """One array of a checkpoint, whose slices are read when needed.

    The files stay open, so the checkpoint may be renamed or removed while it is read.

    Attributes:
        shape: shape of the whole array.
        dtype: name of the type in safetensors.
        size: count of the array's numbers.
    """

    def __init__(self, stored: StoredArray, files: Mapping[str, MappedFile]) -> None:
        self.shape, self.dtype, self.size = stored.shape, stored.dtype, stored.size
        self._slices = [
            (each.region, each.key, files[each.file]) for each in stored.slices if each.region.size
        ]
        self._word = np.dtype(f"u{ITEM_BYTES[stored.dtype]}")

    def words(self, region: Region | None = None) -> Words:
        """Return the numbers of ``region`` (default: all) in its shape, as integers.

        It never takes more memory than the whole array.

        Raises:
            CheckpointError: a file does not have the tensor that the manifest names.
        """
        wanted = everything(self.shape) if region is None else region
        assert wanted.fits(self.shape), (wanted, self.shape)
        result = np.empty(wanted.shape, dtype=self._word)
        flat = wanted.flat(self.shape)
        if not wanted.size:
            return result
        if flat is not None and self.in_ranges:
            self._fill(result.reshape(-1), flat)
        elif isinstance(wanted, Box) and all(isinstance(each, Box) for each, _, _ in self._slices):
            self._fill(result, wanted)
        else:
            # A range is cut from boxes, or a box from ranges: that is simple only in the whole
            # array.
            del result
            whole = np.empty(self.shape, dtype=self._word)
            for each, key, file in self._slices:
                cut(whole, each)[...] = file.words(key, each.shape, self._word)
                file.release()
            return cut(whole, wanted)
        return result

    @property
    def in_ranges(self) -> bool:
        """True if each slice is a range: numbers in a row are in a row in the files, too."""
        return all(each.flat(self.shape) is not None for each, _, _ in self._slices)

    def _fill(self, result: Words, wanted: Region) -> None:
        """Copy the numbers of ``wanted`` from the slices, which are regions of the same kind."""
        for each, key, file in self._slices:
            region = each.flat(self.shape) if isinstance(wanted, Flat) else each
            assert region is not None
            if (both := _shared(region, wanted)) is not None:
                source = file.words(key, region.shape, self._word)
                result[_within(both, wanted)] = source[_within(both, region)]
                file.release()


def cut(whole: Words, region: Region | None) -> Words:
    """Return the numbers of a region (``None``: all) of an array in C order, as a view of it."""
    if isinstance(region, Flat):
        return whole.reshape(-1)[region.start : region.stop]
    return whole if region is None else whole[_within(region, everything(whole.shape))]


def _within(inner: Region, outer: Region) -> tuple[slice, ...]:
    """Return the index of a region in a larger region of the same kind."""
    if isinstance(inner, Flat):
        assert isinstance(outer, Flat)
        return (slice(inner.start - outer.start, inner.stop - outer.start),)
    assert isinstance(outer, Box)
    places = zip(inner.start, inner.shape, outer.start, strict=True)
    return tuple(slice(at - base, at - base + n) for at, n, base in places)


def _shared(one: Region, other: Region) -> Region | None:
    """Return the common part of two regions of one kind; ``None`` if there is none."""
    if isinstance(one, Flat):
        assert isinstance(other, Flat)
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        return Flat(start, stop) if start < stop else None
    assert isinstance(other, Box)
    starts = tuple(map(max, one.start, other.start)) if one.start else ()
    stops = [
        min(a + n, b + m)
        for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True)
    ]
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Box(starts, shape) if all(n > 0 for n in shape) else None


class MappedFile:
    """A memory-mapped safetensors file; its pages are in memory only while they are read.

    Raises:
        CheckpointError: the file cannot be read, or is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(path, error) from None
        try:
            self._begin = 8 + int.from_bytes(self._map[:8], "little")
            self._entries: dict[str, Any] = json.loads(self._map[8 : self._begin])
        except ValueError:
            raise damaged(path, "it is not a safetensors file") from None

    def words(self, key: str, shape: tuple[int, ...], word: np.dtype[Any]) -> Words:
        """Return a view of a tensor (CheckpointError if it is missing or of another shape)."""
        try:
            start, stop = self._entries[key]["data_offsets"]
            numbers = (
                np.frombuffer(self._map, np.uint8, stop - start, self._begin + start)
                if stop > start
                else None
            )
            return np.empty(shape, word) if numbers is None else numbers.view(word).reshape(shape)
        except (KeyError, TypeError, ValueError):
            raise damaged(
                self._path, f"it has no {key} of the shape that the manifest says"
            ) from None

    def release(self) -> None:
        """Free the pages that were read; the views stay valid."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


def stored_numbers(checkpoint: Checkpoint, file: str) -> dict[str, StoredNumbers]:
    """Return the arrays of the group that is named after ``file``, by their own names.

    Raises:
        CheckpointError: a file cannot be read.
    """
    prefix = array_name(file, "")
    arrays = [array for array in checkpoint.arrays if array.name.startswith(prefix)]
    names = {each.file for array in arrays for each in array.slices}
    opened = {name: MappedFile(checkpoint.path / name) for name in sorted(names)}
    return {array.name.removeprefix(prefix): StoredNumbers(array, opened) for array in arrays}
