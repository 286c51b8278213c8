"""Format of a checkpoint: manifest, arrays as slices, and the slices that a rank holds.

An array has a global name, shape and type. Its numbers are in one or several slices. A slice is a
box of the array or a range of its numbers in C order, under a key of one safetensors file. No slice
names a rank: a run with another division of the arrays reads the slices that it needs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from allhands.io.regions import ITEM_BYTES, Box, Flat, Region, Shape

# Raise this number whenever earlier versions cannot read a checkpoint of this version.
FORMAT = 3
WEIGHTS_FILE = "adapters.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
# Rounding errors of compressed gradients: each array has a row for every rank.
LEFT_FILE = "left-out.safetensors"


@dataclass(frozen=True)
class OwnedSlice:
    """The slice that a rank holds of an array.

    Attributes:
        shape: shape of the whole array.
        dtype: name of the type in safetensors, such as ``F32``.
        region: place of the slice in the array.
        array: the slice's numbers, in the region's shape, or a function that returns them when they
            are written.
    """

    shape: Shape
    dtype: str
    region: Region
    array: Any

    def get(self) -> Any:
        """Return the numbers."""
        found: Any = self.array() if callable(self.array) else self.array
        return found

    @property
    def num_bytes(self) -> int:
        """Size of the numbers."""
        return self.region.size * ITEM_BYTES[self.dtype]


# A rank's slices of the run's state, by the arrays' names. If several ranks hold a slice, their
# numbers are equal, and the first of these ranks owns it.
ShardedState = Mapping[str, OwnedSlice]
# Slices by the file of their group of arrays, such as the weights.
Groups = Mapping[str, ShardedState]


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and hexadecimal SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredSlice:
    """Place of a slice of an array: under ``key`` of a safetensors ``file``."""

    file: str
    key: str
    region: Region

    def to_json(self) -> dict[str, Any]:
        place: dict[str, Any] = {"file": self.file, "key": self.key}
        if isinstance(self.region, Flat):
            return {**place, "flat": [self.region.start, self.region.stop]}
        return {**place, "start": list(self.region.start), "shape": list(self.region.shape)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StoredSlice:
        if "flat" in entry:
            region: Region = Flat(*map(int, entry["flat"]))
        else:
            region = Box(tuple(map(int, entry["start"])), tuple(map(int, entry["shape"])))
        return cls(str(entry["file"]), str(entry["key"]), region)


@dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint: global shape, type (name in safetensors), and slices."""

    name: str
    shape: Shape
    dtype: str
    slices: tuple[StoredSlice, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def check(self, files: Mapping[str, object]) -> None:
        """Check that each number is in exactly one slice.

        Raises:
            ValueError: a number is in no slice or in several, or a slice is in no file of
                ``files``.
        """
        regions = [each.region for each in self.slices]
        if any(each.file not in files or not each.region.fits(self.shape) for each in self.slices):
            raise ValueError(f"{self.name} has a slice outside of the array, or in no file")
        if sum(region.size for region in regions) != self.size:
            raise ValueError(f"the slices of {self.name} are not the whole array")
        for one, other in combinations(regions, 2):
            if type(one) is type(other) and one.overlaps(other):  # type: ignore[arg-type]
                raise ValueError(f"slices of {self.name} overlap")

    def to_json(self) -> dict[str, Any]:
        slices = [each.to_json() for each in self.slices]
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "slices": slices}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StoredArray:
        slices = tuple(StoredSlice.from_json(each) for each in entry["slices"])
        return cls(str(entry["name"]), tuple(map(int, entry["shape"])), str(entry["dtype"]), slices)


def num_bytes_of(groups: Groups) -> int:
    """Return the bytes of all slices that a rank holds."""
    return sum(each.num_bytes for state in groups.values() for each in state.values())


def array_name(file: str, key: str) -> str:
    """Return the name of an array in a checkpoint: the stem of its group's file, and its own
    name.
    """
    return f"{file.partition('.')[0]}.{key}"


def file_of_rank(file: str, rank: int) -> str:
    """Return the file of a rank's part of a divided group of arrays."""
    stem, dot, suffix = file.partition(".")
    return f"{stem}-{rank}{dot}{suffix}"


def merged(slices: Sequence[StoredArray]) -> list[StoredArray]:
    """Join the slices of each array; return the arrays, sorted by name.

    Raises:
        ValueError: parts of one array differ in its shape or type.
    """
    found: dict[str, StoredArray] = {}
    for part in slices:
        known = found.get(part.name, StoredArray(part.name, part.shape, part.dtype, ()))
        if (known.shape, known.dtype) != (part.shape, part.dtype):
            raise ValueError(f"{part.name} has two shapes or types")
        found[part.name] = StoredArray(
            part.name, part.shape, part.dtype, known.slices + part.slices
        )
    return [found[name] for name in sorted(found)]


def dumped(values: Any) -> bytes:
    """Return values as JSON, always in the same spelling.

    Raises:
        ValueError: a value is NaN or infinity, which JSON does not have.
    """
    return json.dumps(values, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def manifest_text(body: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest: ``body`` with its own SHA-256 sum, and one array a line."""
    return _lines({**body, "sha256": hashlib.sha256(_lines(body)).hexdigest()})


def _lines(body: Mapping[str, Any]) -> bytes:
    text = dumped({**body, "arrays": []})
    arrays = [b"\n  " + json.dumps(each, allow_nan=False).encode() for each in body["arrays"]]
    # Keys are sorted, so "arrays" is the first one: other places in the text are not replaced.
    return text.replace(b'"arrays": []', b'"arrays": [' + b",".join(arrays) + b"]", 1)
