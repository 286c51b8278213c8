"""Arrays of a checkpoint, read where they lie: any slice of them from whatever slices there are.

Numbers are handled as unsigned integers of the same bits, so that every type comes back as it was.
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
    """One array of a checkpoint, from which slices are read when they are asked for.

    The files stay open: neither renaming nor removing the checkpoint harms who reads it.

    Attributes:
        shape: of the whole array.
        dtype: code of safetensors.
        size: how many numbers it has.
    """

    def __init__(self, stored: StoredArray, files: Mapping[str, MappedFile]) -> None:
        self.shape, self.dtype, self.size = stored.shape, stored.dtype, stored.size
        self._slices = [
            (each.region, each.key, files[each.file]) for each in stored.slices if each.region.size
        ]
        self._word = np.dtype(f"u{ITEM_BYTES[stored.dtype]}")

    def words(self, region: Region | None = None) -> Words:
        """Return the numbers of ``region`` (default: all) in its shape, as integers; no more than
        the array is in memory.

        Raises:
            CheckpointError: a file has not what the manifest says.
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
            # Ranges of boxes, or boxes of ranges: both are simple in the whole array, and in
            # nothing smaller.
            del result
            whole = np.empty(self.shape, dtype=self._word)
            for each, key, file in self._slices:
                cut(whole, each)[...] = file.words(key, each.shape, self._word)
                file.release()
            return cut(whole, wanted)
        return result

    @property
    def in_ranges(self) -> bool:
        """True if numbers that follow each other do so in the files, too, slice by slice."""
        return all(each.flat(self.shape) is not None for each, _, _ in self._slices)

    def _fill(self, result: Words, wanted: Region) -> None:
        """Copy what slices have of a region of their kind."""
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
    """The index of a region in another of its kind, of which it is a part."""
    if isinstance(inner, Flat):
        assert isinstance(outer, Flat)
        return (slice(inner.start - outer.start, inner.stop - outer.start),)
    assert isinstance(outer, Box)
    places = zip(inner.start, inner.shape, outer.start, strict=True)
    return tuple(slice(at - base, at - base + n) for at, n, base in places)


def _shared(one: Region, other: Region) -> Region | None:
    """The common part of two regions of one kind."""
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
    """A safetensors file, of which pages are in memory only while they are read."""

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
        """Return a view of a tensor."""
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
        """Let go of the pages that were read; the views stay as they are."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


def stored_numbers(checkpoint: Checkpoint, file: str) -> dict[str, StoredNumbers]:
    """Return the arrays of a group, which is called like ``file``, by their own names.

    Raises:
        CheckpointError: a file cannot be read.
    """
    prefix = array_name(file, "")
    arrays = [array for array in checkpoint.arrays if array.name.startswith(prefix)]
    names = {each.file for array in arrays for each in array.slices}
    opened = {name: MappedFile(checkpoint.path / name) for name in sorted(names)}
    return {array.name.removeprefix(prefix): StoredNumbers(array, opened) for array in arrays}
