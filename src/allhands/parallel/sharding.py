"""Parameters that ranks have divided among them: the parts that each keeps, fetched for some blocks at a time.

The arrays of a block that have one type and are trained alike lie end to end in a row. Each rank keeps a part of
every row (ZeRO-3, arXiv 1910.02054). A pass fetches the rows of a unit, which is a block, with the embedding before the
first one and the head after the last, and drops them afterwards. The next unit's rows travel meanwhile.

Where other ranks have divided an array already, this rank's part of it is whole rows of a matrix, so that it is a box
of the whole array (:class:`BoxedRow`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from allhands.distributed.backend import Communicator, sum_scatter
from allhands.io.regions import Box, Flat, Region, Shape
from allhands.io.trees import flatten, number, part_of, unflatten
from allhands.model.stages import Blocks, Stage, cut

# Numbers of a part are a multiple, so that kernels' vectors fit.
_ALIGNED = 16
# Beside the numbers of blocks: the table of tokens, and what follows the last block.
_TABLE, _OUTSIDE = -1, -2


@dataclass(frozen=True)
class Place:
    """An array of the model: ``module[key]``, with its dotted name and shape, and where it begins in its row."""

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
        each: numbers that a rank exchanges: of the largest part; zeros follow a smaller one.
    """

    def __init__(
        self,
        places: Sequence[Place],
        dtype: mx.Dtype,
        communicator: Communicator,
        *,
        trained: bool,
        shares: Sequence[float] = (),
    ) -> None:
        """``shares``: of each rank; without them all have equal parts."""
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
        """The numbers of the largest part."""
        equal = -(-self.size // (self._ranks * _ALIGNED)) * _ALIGNED
        return max((stop - start for start, stop in pairwise(self._bounds)), default=equal)

    @property
    def kept(self) -> int:
        """Numbers of this rank's part, as far as it may not be filled up."""
        return self._own[1] - self._own[0]

    def regions(self) -> Iterator[tuple[Place, Region]]:
        """This rank's numbers of each array of which it keeps any, in order."""
        for place in self.places:
            start, stop = (min(max(edge - place.start, 0), place.size) for edge in self._own)
            if start < stop:
                yield place, Flat(start, stop)

    def take(self) -> dict[str, mx.array]:
        """Read this rank's numbers and take the arrays out of the model; the trained ones by name.

        One array after the other is read, and none of which this rank keeps nothing.
        """
        mine: dict[str, mx.array] = {}
        for place, region in self.regions():
            mine[place.name] = mx.contiguous(_cut(place.module[place.key], region)).reshape(-1)
            mx.eval(mine[place.name])
        self.remove()
        if self.trained:
            return {place.name: _shaped(place, region, mine[place.name]) for place, region in self.regions()}
        self._frozen = list(mine.values())
        if not self._bounds:  # there is little to fill up: as it is exchanged
            self._frozen = [self._filled(self._frozen)]
            mx.eval(self._frozen)
        return {}

    def part(self, parts: Mapping[str, Any]) -> mx.array:
        """(each,) this rank's part, of the tree of trained ``parts``."""
        if self._frozen:
            return self._frozen[0] if not self._bounds else self._filled(self._frozen)
        return self._filled([part_of(parts, place.name).reshape(-1) for place, _ in self.regions()])

    def arrays(self, whole: mx.array) -> list[mx.array]:
        """Return the arrays in a whole row, in which parts lie as ranks exchange them."""
        if self._bounds:
            begins = range(0, whole.size, self.each)
            sizes = (stop - start for start, stop in pairwise(self._bounds))
            whole = mx.concatenate([whole[at : at + size] for at, size in zip(begins, sizes, strict=True)])
        return [whole[p.start : p.start + p.size].reshape(p.shape) for p in self.places]

    def joined(self, arrays: Sequence[mx.array] | None, size: int) -> mx.array:
        """Return the row of these arrays, long enough for ``size`` parts; ``None``: of zeros."""
        if arrays is None:
            return mx.zeros((size * self.each,), dtype=self.dtype)
        row = mx.concatenate([array.astype(self.dtype).reshape(-1) for array in arrays])
        if self._bounds:
            parts = [row[start:stop] for start, stop in pairwise(self._bounds)]
            return mx.concatenate([mx.pad(part, (0, self.each - part.size)) for part in parts])
        missing = size * self.each - self.size
        return mx.pad(row, (0, missing)) if missing else row

    def named(self, part: mx.array) -> Iterator[tuple[str, mx.array]]:
        """Return this rank's numbers in a part by the names of the arrays."""
        first = 0
        for place, region in self.regions():
            yield place.name, _shaped(place, region, part[first : first + region.size])
            first += region.size

    def install(self, arrays: Sequence[mx.array]) -> None:
        """Put arrays into the model."""
        for place, array in zip(self.places, arrays, strict=True):
            place.module[place.key] = array

    def remove(self) -> None:
        """Leave what holds no memory in their place."""
        self.install([self._absent(place) for place in self.places])

    def _absent(self, place: Place) -> mx.array:
        return mx.broadcast_to(mx.zeros((), dtype=self.dtype), place.shape)

    def _filled(self, arrays: list[mx.array]) -> mx.array:
        missing = self.each - sum(array.size for array in arrays)
        return mx.concatenate([*arrays, mx.zeros((missing,), dtype=self.dtype)]) if missing else mx.concatenate(arrays)


class BoxedRow(DividedRow):
    """:class:`DividedRow` of which each rank keeps an equal number of each array's rows, as far as there are any.

    Arrays lie in it part by part, so that whole ones have to be copied out of it.
    """

    def _longest(self) -> int:
        return -(-sum(map(self._most, self.places)) // _ALIGNED) * _ALIGNED

    @property
    def kept(self) -> int:
        return self.each

    def regions(self) -> Iterator[tuple[Place, Region]]:
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
            found.append(parts[:, first : first + size].reshape(-1)[: place.size].reshape(place.shape))
            first += size
        return found

    def joined(self, arrays: Sequence[mx.array] | None, size: int) -> mx.array:
        if arrays is None:
            return super().joined(None, size)
        columns: list[mx.array] = []
        for place, array in zip(self.places, arrays, strict=True):
            most = self._most(place)
            numbers = array.astype(self.dtype).reshape(-1)
            missing = self._ranks * most - place.size
            columns.append(mx.pad(numbers, (0, missing)).reshape(self._ranks, most))
        rest = self.each - sum(map(self._most, self.places))
        return mx.pad(mx.concatenate(columns, axis=1), [(0, 0), (0, rest)]).reshape(-1)

    def _filled(self, arrays: list[mx.array]) -> mx.array:
        """A part, in which each array has as many numbers as on the rank that has most of it."""
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

    def _rows(self, place: Place) -> int:
        """The rows of an array that a rank keeps at most."""
        return -(-place.shape[0] // self._ranks)

    def _most(self, place: Place) -> int:
        """The numbers of these rows."""
        return self._rows(place) * (place.size // place.shape[0])


def _bounds(size: int, shares: Sequence[float]) -> list[int]:
    """The ends of parts of ``size`` numbers that are as large as ``shares`` say, from 0 on."""
    units, total = -(-size // _ALIGNED), sum(shares)
    return [0, *(min(round(each / total * units) * _ALIGNED, size) for each in accumulate(shares))]


def _cut(array: mx.array, region: Region) -> mx.array:
    """The numbers of a region, of which a box is whole rows."""
    if isinstance(region, Flat):
        return array.reshape(-1)[region.start : region.stop]
    return array[region.start[0] : region.start[0] + region.shape[0]]


def _shaped(place: Place, region: Region, numbers: mx.array) -> mx.array:
    """Numbers of a region with two dimensions if the array has several, by which optimizers tell matrices."""
    if isinstance(region, Box):
        return numbers.reshape(region.shape)
    return numbers.reshape(-1, 1) if len(place.shape) > 1 else numbers


@dataclass
class Unit:
    """A stage of one block, and the rows that it computes with.

    It is what :class:`~allhands.parallel.engine.StageCompute` takes for the trained weights of a stage.
    """

    stage: Stage
    rows: tuple[DividedRow, ...]

    @property
    def trained_rows(self) -> list[DividedRow]:
        """The rows that are trained."""
        return [row for row in self.rows if row.trained]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that have the arrays."""
        return list({id(place.module): place.module for row in self.rows for place in row.places}.values())

    @property
    def leaves(self) -> Unit:
        """The places of the trained arrays."""
        return self

    def weights(self) -> list[mx.array]:
        """Return the trained arrays, which have been fetched."""
        return [place.module[place.key] for row in self.trained_rows for place in row.places]

    @contextmanager
    def installed(self, arrays: list[mx.array]) -> Generator[None]:
        """Compute with these trained arrays inside the block."""
        with self.kept():
            rest = list(arrays)
            for row in self.trained_rows:
                row.install(rest[: len(row.places)])
                del rest[: len(row.places)]
            yield

    @contextmanager
    def kept(self) -> Generator[None]:
        """Leave the model with its own arrays after the block."""
        before = [[place.module[place.key] for place in row.places] for row in self.trained_rows]
        try:
            yield
        finally:
            for row, arrays in zip(self.trained_rows, before, strict=True):
                row.install(arrays)


@dataclass(frozen=True)
class Sharding:
    """A model of which each rank keeps a part of every array.

    Attributes:
        model: without arrays, but for those of units that are being computed.
        units: in the model's order.
        parts: this rank's numbers of the trained arrays, by the arrays' names.
        shard: the ranks that have divided the arrays; ``data``: those that keep the same parts, for other rows.
        world: all of them.
        keeps: True if fetched rows stay until the step ends, instead of being fetched again for the backward pass.
    """

    model: nn.Module
    units: tuple[Unit, ...]
    parts: nn.Module
    shard: Communicator
    data: Communicator
    world: Communicator
    keeps: bool = False
    _kept: dict[int, mx.array] = field(default_factory=dict[int, mx.array])

    @property
    def rows(self) -> list[DividedRow]:
        """All rows, each once."""
        return list({id(row): row for unit in self.units for row in unit.rows}.values())

    @property
    def regions(self) -> dict[str, tuple[Shape, Region]]:
        """Shape of each trained array and this rank's place in it, by name; only where it keeps any of it."""
        return {
            place.name: (place.shape, region) for row in self.rows if row.trained for place, region in row.regions()
        }

    @property
    def first_trained(self) -> int:
        """Number of the first unit that trains anything."""
        return first_trained(self.units)

    def moved(self, move: Callable[[Communicator], Communicator]) -> Sharding:
        """Return the same over other communicators of the same ranks."""
        return replace(self, shard=move(self.shard), data=move(self.data), world=move(self.world))

    def anyone(self, wants: bool) -> bool:
        """True if any rank wants; asked on all ranks together, before each pass, of which all do the same number."""
        return number(self.world.all_sum(mx.array(float(wants)))) > 0

    def fetched(self, units: Sequence[Unit], wait: Callable[[list[mx.array]], None]) -> Generator[Unit]:
        """Go through ``units``: each is given with its whole arrays in the model, and without them afterwards.

        Called on all ranks together. ``wait`` is called with arrays that are still on their way.
        """
        ahead: list[mx.array] = self._begin(units[0]) if units else []
        for place, unit in enumerate(units):
            rows, ahead = ahead, self._begin(units[place + 1]) if place + 1 < len(units) else []
            wait(rows)
            for row, whole in zip(unit.rows, rows, strict=True):
                row.install(row.arrays(whole))
            del rows
            try:
                yield unit
            finally:
                for row in unit.rows:
                    row.remove()

    def push(self, row: DividedRow, gradients: Sequence[mx.array] | None) -> mx.array:
        """Begin to add up the gradients of a row's arrays over the ranks that divide it: this rank's part of the sums.

        Called on all ranks together; a rank that has none gives ``None``.
        """
        # Where whole sums come of it, the part has memory of its own, so that the rest is given back.
        sums = sum_scatter(self.shard, row.joined(gradients, self.shard.size))
        mine = mx.contiguous(sums[: row.kept])
        mx.async_eval(mine)
        return mine

    def forget(self) -> None:
        """Drop rows that were kept; their weights will not be those of the next step."""
        self._kept.clear()

    def _begin(self, unit: Unit) -> list[mx.array]:
        """Begin to fetch a unit's rows."""
        found: list[mx.array] = []
        for row in unit.rows:
            if (whole := self._kept.get(id(row))) is None:
                # By itself, so that all ranks exchange in the same order.
                whole = self.shard.all_gather(row.part(self.parts))
                mx.async_eval(whole)
                if self.keeps:
                    self._kept[id(row)] = whole
            found.append(whole)
        return found


def first_trained(units: Sequence[Unit]) -> int:
    """Return the number of the first of ``units`` that trains anything; the last one's where none does."""
    return next((at for at, unit in enumerate(units) if unit.trained_rows), len(units) - 1)


def shard(
    model: nn.Module,
    shard: Communicator,
    data: Communicator,
    world: Communicator,
    *,
    keeps: bool = False,
    stages: Sequence[Stage] = (),
    boxed: bool = False,
    shares: Sequence[float] = (),
) -> Sharding:
    """Leave this rank with its part of every array of ``model``, whose arrays may not have been read.

    Args:
        stages: of this rank, where ``model`` has their blocks alone.
        boxed: True if each part has to be a box of the array, because other ranks have divided it already.
        shares: sizes of the parts of the ranks of ``shard``, in any unit; without them, and where parts are boxes, all
            are equal.

    Raises:
        ModelError: the architecture cannot be cut into stages.
    """
    make = BoxedRow if boxed else partial(DividedRow, shares=shares)
    units = _units(model, shard, stages, make)
    every = {id(row): row for unit in units for row in unit.rows}.values()
    taken = [pair for row in every for pair in row.take().items()]
    parts = nn.Module()
    for key, value in unflatten(taken).items() if taken else ():
        parts[key] = value
    return Sharding(model, units, parts, shard, data, world, keeps)


def _units(
    model: nn.Module, communicator: Communicator, stages: Sequence[Stage], make: Callable[..., DividedRow]
) -> tuple[Unit, ...]:
    """All blocks of this rank, and the rows that they compute with."""
    blocks: Any = model
    owner = {id(module): at for at, block in enumerate(blocks.layers) for module in block.modules()}
    count = len(blocks.layers)
    if stages:
        each = [block for stage in stages for block in stage.by_block()]
    else:
        each = cut(model, [Blocks(at, at + 1, count) for at in range(count)])
    owner |= dict.fromkeys(map(id, each[0].table.modules()), _TABLE)
    rows = {at: _rows(named, communicator, make) for at, named in _groups(model, owner).items()}
    return tuple(Unit(stage, tuple(_needed(stage, rows))) for stage in each)


def _needed(stage: Stage, rows: Mapping[int, Sequence[DividedRow]]) -> Iterator[DividedRow]:
    """The rows that a stage of one block computes with."""
    if stage.blocks.needs_embedding(tied=bool(stage.shared)):
        yield from rows.get(_TABLE, ())
    yield from rows.get(stage.blocks.first, ())
    if stage.blocks.is_last:
        yield from rows.get(_OUTSIDE, ())


def _groups(model: nn.Module, owner: Mapping[int, int]) -> dict[int, list[tuple[str, nn.Module, str, bool]]]:
    """Each array of the model: its name, module, key there, and whether it is trained, by the block that has it."""
    trained = {name for name, _ in flatten(model.trainable_parameters())}
    found: dict[int, list[tuple[str, nn.Module, str, bool]]] = {}
    seen = set[tuple[int, str]]()
    for path, module in model.named_modules():
        for key, value in module.items():
            if not isinstance(value, mx.array) or (id(module), key) in seen or key.startswith("_"):
                continue
            seen.add((id(module), key))
            name = f"{path}.{key}" if path else key
            found.setdefault(owner.get(id(module), _OUTSIDE), []).append((name, module, key, name in trained))
    return found


def _rows(
    named: Sequence[tuple[str, nn.Module, str, bool]], communicator: Communicator, make: Callable[..., DividedRow]
) -> list[DividedRow]:
    """The rows of some arrays: one of each type, and of trained and other ones."""
    kinds: dict[tuple[bool, mx.Dtype], list[Place]] = {}
    for name, module, key, trained in named:
        array = module[key]
        places = kinds.setdefault((trained, array.dtype), [])
        start = places[-1].start + places[-1].size if places else 0
        places.append(Place(name, module, key, tuple(array.shape), start, array.size))
    return [make(places, dtype, communicator, trained=trained) for (trained, dtype), places in kinds.items()]
