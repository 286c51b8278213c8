"""Rows: arrays of a block end to end, of one type and all trained or all frozen, of which each rank
keeps a part.

If ranks have divided an array already, a rank's part of it is whole rows of a matrix, so that it is
a box of the whole array (:class:`BoxedRow`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from allhands.distributed.backend import Communicator, SingleProcess
from allhands.io.regions import Box, Flat, Region, everything
from allhands.io.trees import part_of
from allhands.kernels.fused.flat_params import Laid

# The size of a part is a multiple of this, so that kernels' vectors fit.
_ALIGNED = 16


@dataclass(frozen=True)
class Slot:
    """An array of the model: ``module[key]``, with its dotted name and shape, and where it begins
    in its row.
    """

    name: str
    module: nn.Module
    key: str
    shape: tuple[int, ...]
    start: int
    size: int


class DividedRow:
    """Arrays of one type end to end, of which each rank keeps a part.

    Attributes:
        places: the arrays.
        trained: True if all of them are trained; otherwise none is.
        each: numbers that a rank exchanges: the size of the largest part; smaller ones are padded.
        alone: True if this rank has all of it, and nothing is exchanged.
    """

    alone = False

    def __init__(
        self,
        places: Sequence[Slot],
        dtype: mx.Dtype,
        communicator: Communicator,
        *,
        trained: bool,
        shares: Sequence[float] = (),
    ) -> None:
        """``shares``: relative sizes of the ranks' parts; default: equal parts."""
        self.places = tuple(places)
        self.dtype = dtype
        self.trained = trained
        self.size = sum(place.size for place in places)
        self._bounds = _bounds(self.size, shares) if shares else []
        self._rank, self._ranks = communicator.rank, communicator.size
        self.each = self._longest()
        ends = self._bounds or [place * self.each for place in range(self._ranks + 1)]
        self._own = ends[self._rank], ends[self._rank + 1]
        self._frozen: list[mx.array] = []

    def _longest(self) -> int:
        """Return the size of the largest part."""
        equal = _aligned(-(-self.size // self._ranks))
        return max(
            (_aligned(stop - start) for start, stop in pairwise(self._bounds)), default=equal
        )

    @property
    def kept(self) -> int:
        """Size of this rank's part, with the zeros at its end that pad it."""
        return _aligned(self._own[1] - self._own[0])

    @property
    def end_to_end(self) -> bool:
        """True if arrays lie one after the other in a whole row, as they do in :attr:`places`."""
        return True

    def laid(self) -> Laid:
        """Return the layout of the trained arrays in this rank's part."""
        sizes = [(place.name, region.size) for place, region in self.regions()]
        starts = [0, *accumulate(size for _, size in sizes)][: len(sizes)]
        return Laid(tuple(name for name, _ in sizes), tuple(starts), self.kept)

    def regions(self) -> Iterator[tuple[Slot, Region]]:
        """Yield the arrays of which this rank keeps numbers, in order, with the region of these."""
        for place in self.places:
            start, stop = (min(max(edge - place.start, 0), place.size) for edge in self._own)
            if start < stop:
                yield place, Flat(start, stop)

    def take(self) -> dict[str, mx.array]:
        """Read this rank's numbers, and remove the arrays; return trained numbers by name.

        Arrays are read one by one, and only those of which this rank keeps numbers.
        """
        mine: dict[str, mx.array] = {}
        for place, region in self.regions():
            mine[place.name] = mx.contiguous(_cut(place.module[place.key], region)).reshape(-1)
            mx.eval(mine[place.name])
        self.remove()
        if self.trained:
            return {
                place.name: _shaped(place, region, mine[place.name])
                for place, region in self.regions()
            }
        self._frozen = list(mine.values())
        if not self._bounds:  # padded as it is exchanged, because little is missing
            self._frozen = [self._filled(self._frozen)]
            mx.eval(self._frozen)
        return {}

    def part(self, parts: Mapping[str, Any], held: mx.array | None = None) -> mx.array:
        """(each,) this rank's part, from the tree of trained ``parts``, or from ``held``: (kept,)
        numbers that lie as :meth:`laid` says.
        """
        if held is not None:
            missing = self.each - held.size
            return mx.pad(held, (0, missing)) if missing else held
        if self._frozen:
            return self._frozen[0] if not self._bounds else self._filled(self._frozen)
        return self._filled([part_of(parts, place.name).reshape(-1) for place, _ in self.regions()])

    def row(self, whole: mx.array) -> mx.array:
        """Return the arrays end to end, from a whole row with parts as ranks exchange them."""
        if not self._bounds:
            return whole
        begins = range(0, whole.size, self.each)
        sizes = (stop - start for start, stop in pairwise(self._bounds))
        return mx.concatenate(
            [whole[at : at + size] for at, size in zip(begins, sizes, strict=True)]
        )

    def arrays(self, whole: mx.array) -> list[mx.array]:
        """Return the arrays, from a whole row with parts as ranks exchange them."""
        row = self.row(whole)
        return [row[p.start : p.start + p.size].reshape(p.shape) for p in self.places]

    def joined(self, arrays: Sequence[mx.array] | None) -> mx.array:
        """Join arrays to a whole row with parts as ranks exchange them; ``None``: zeros."""
        if arrays is None:
            return mx.zeros((self._ranks * self.each,), dtype=self.dtype)
        pieces = [array.astype(self.dtype).reshape(-1) for array in arrays]
        row = mx.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        if self._bounds:
            parts = [row[start:stop] for start, stop in pairwise(self._bounds)]
            return mx.concatenate([mx.pad(part, (0, self.each - part.size)) for part in parts])
        missing = self._ranks * self.each - self.size
        return mx.pad(row, (0, missing)) if missing else row

    def named(self, part: mx.array) -> Iterator[tuple[str, mx.array]]:
        """Yield this rank's numbers in a part, with the names of the arrays."""
        first = 0
        for place, region in self.regions():
            yield place.name, _shaped(place, region, part[first : first + region.size])
            first += region.size

    def install(self, arrays: Sequence[mx.array]) -> None:
        """Put arrays into the model."""
        for place, array in zip(self.places, arrays, strict=True):
            place.module[place.key] = array

    def remove(self) -> None:
        """Replace the model's arrays by ones that hold no memory."""
        self.install([self._absent(place) for place in self.places])

    def _absent(self, place: Slot) -> mx.array:
        return mx.broadcast_to(mx.zeros((), dtype=self.dtype), place.shape)

    def _filled(self, arrays: list[mx.array]) -> mx.array:
        missing = self.each - sum(array.size for array in arrays)
        return (
            mx.concatenate([*arrays, mx.zeros((missing,), dtype=self.dtype)])
            if missing
            else mx.concatenate(arrays)
        )


class BoxedRow(DividedRow):
    """:class:`DividedRow` of which each rank keeps equally many rows of each array; the last ranks
    may keep fewer, or none.

    Arrays lie in it part by part, so that whole ones have to be copied out of it.
    """

    def _longest(self) -> int:
        return _aligned(sum(map(self._most, self.places)))

    @property
    def kept(self) -> int:
        return self.each

    @property
    def end_to_end(self) -> bool:
        return False

    def laid(self) -> Laid:
        begins = dict(
            zip(
                (p.name for p in self.places),
                accumulate(map(self._most, self.places), initial=0),
                strict=False,
            )
        )
        names = tuple(place.name for place, _ in self.regions())
        return Laid(names, tuple(begins[name] for name in names), self.kept)

    def regions(self) -> Iterator[tuple[Slot, Region]]:
        for place in self.places:
            count = self._rows(place)
            start, stop = (min(at * count, place.shape[0]) for at in (self._rank, self._rank + 1))
            if start < stop:
                rest = place.shape[1:]
                yield place, Box((start, *[0] * len(rest)), (stop - start, *rest))

    def arrays(self, whole: mx.array) -> list[mx.array]:
        parts, first, found = whole.reshape(self._ranks, self.each), 0, list[mx.array]()
        for place in self.places:
            size = self._most(place)
            found.append(
                parts[:, first : first + size].reshape(-1)[: place.size].reshape(place.shape)
            )
            first += size
        return found

    def joined(self, arrays: Sequence[mx.array] | None) -> mx.array:
        if arrays is None:
            return super().joined(None)
        columns: list[mx.array] = []
        for place, array in zip(self.places, arrays, strict=True):
            most = self._most(place)
            numbers = array.astype(self.dtype).reshape(-1)
            missing = self._ranks * most - place.size
            columns.append(mx.pad(numbers, (0, missing)).reshape(self._ranks, most))
        rest = self.each - sum(map(self._most, self.places))
        return mx.pad(mx.concatenate(columns, axis=1), [(0, 0), (0, rest)]).reshape(-1)

    def _filled(self, arrays: list[mx.array]) -> mx.array:
        """Join arrays to a part, each padded to its size on the rank that has most of it."""
        have = {place.name: array for (place, _), array in zip(self.regions(), arrays, strict=True)}
        filled = [
            mx.pad(have[place.name], (0, self._most(place) - have[place.name].size))
            if place.name in have
            else mx.zeros((self._most(place),), dtype=self.dtype)
            for place in self.places
        ]
        rest = self.each - sum(map(self._most, self.places))
        return mx.concatenate([*filled, mx.zeros((rest,), dtype=self.dtype)])

    def named(self, part: mx.array) -> Iterator[tuple[str, mx.array]]:
        first, regions = 0, {place.name: region for place, region in self.regions()}
        for place in self.places:
            if (region := regions.get(place.name)) is not None:
                yield place.name, _shaped(place, region, part[first : first + region.size])
            first += self._most(place)

    def _rows(self, place: Slot) -> int:
        """Return the number of rows of an array that a rank keeps at most."""
        return -(-place.shape[0] // self._ranks)

    def _most(self, place: Slot) -> int:
        """Return the size of these rows."""
        return self._rows(place) * (place.size // place.shape[0])


class KeptRow(DividedRow):
    """:class:`DividedRow` that no other rank has: an array of this rank's own experts."""

    alone = True

    def __init__(self, places: Sequence[Slot], dtype: mx.Dtype, *, trained: bool) -> None:
        super().__init__(places, dtype, SingleProcess(), trained=trained)

    def regions(self) -> Iterator[tuple[Slot, Region]]:
        for place in self.places:
            yield place, everything(place.shape)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _bounds(size: int, shares: Sequence[float]) -> list[int]:
    """Return the bounds, from 0 on, of parts of ``size`` numbers in proportion to ``shares``."""
    units, total = -(-size // _ALIGNED), sum(shares)
    return [0, *(min(round(each / total * units) * _ALIGNED, size) for each in accumulate(shares))]


def _cut(array: mx.array, region: Region) -> mx.array:
    """Cut a region out of an array; a box consists of whole rows."""
    if isinstance(region, Flat):
        return array.reshape(-1)[region.start : region.stop]
    return array[region.start[0] : region.start[0] + region.shape[0]]


def _shaped(place: Slot, region: Region, numbers: mx.array) -> mx.array:
    """Give a region's numbers more than one dimension if the array has: optimizers tell matrices by
    that.
    """
    if isinstance(region, Box):
        return numbers.reshape(region.shape)
    return numbers.reshape(-1, 1) if len(place.shape) > 1 else numbers
