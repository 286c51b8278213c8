"""Parameters that ranks have divided among them: the parts that each keeps, fetched for some blocks
at a time.

The arrays of a block that have one type and are trained alike lie end to end in a row. Each rank
keeps a part of every row (ZeRO-3, arXiv 1910.02054). A pass fetches the rows of a unit, which is a
block, with the embedding before the first one and the head after the last, and drops them
afterwards. The next unit's rows travel meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from allhands.distributed.backend import (
    Collective,
    Communicator,
    collective,
    start,
    sum_scatter,
)
from allhands.io.regions import Region, Shape
from allhands.io.trees import flatten, number, unflatten
from allhands.model.stages import Blocks, Stage, cut
from allhands.parallel.rows import BoxedRow, DividedRow, KeptRow, Slot
from allhands.parallel.sums import places_of_all

# Beside the numbers of blocks: the table of tokens, and what follows the last block.
_TABLE, _OUTSIDE = -1, -2
# Numbers of an array that is worth an exchange of its own.
_LARGE = 1 << 17
# Layers with one input, by the names that architectures give them.
_OF_ONE_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention"),
    **dict.fromkeys(("gate_proj", "up_proj"), "feed-forward"),
}


@dataclass
class Unit:
    """A stage of one block, and the rows that it computes with.

    It is what :class:`~allhands.parallel.engine.StageCompute` takes for the trained weights of a
    stage.
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
        return list(
            {id(place.module): place.module for row in self.rows for place in row.places}.values()
        )

    @property
    def leaves(self) -> Unit:
        """The places of the trained arrays."""
        return self

    def weights(self) -> list[mx.array]:
        """Return the trained arrays, which have been fetched."""
        return [place.module[place.key] for row in self.trained_rows for place in row.places]

    def install(self, wholes: Sequence[mx.array]) -> None:
        """Give the model the arrays of whole rows."""
        for row, whole in zip(self.rows, wholes, strict=True):
            row.install(row.arrays(whole))

    def remove(self) -> None:
        """Leave the model without the arrays."""
        for row in self.rows:
            row.remove()

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
class BetweenPasses:
    """What becomes of a block between its forward and its backward pass.

    Attributes:
        keeps: True if fetched rows stay until the step ends, instead of being fetched again for the
            backward pass.
        twice: True if blocks are computed again in the backward pass, so that they keep nothing but
            their inputs.
    """

    keeps: bool = False
    twice: bool = False


@dataclass(frozen=True)
class Layout:
    """The parts into which arrays are divided.

    Attributes:
        boxed: True if each part has to be a box of the array, because other ranks have divided it
            already.
        shares: sizes of the parts of the ranks, in any unit; without them, and where parts are
            boxes, all are equal.
        kept: identities of modules whose arrays no other rank has.
    """

    boxed: bool = False
    shares: Sequence[float] = ()
    kept: Collection[int] = ()


@dataclass(frozen=True)
class Sharding:
    """A model of which each rank keeps a part of every array.

    Attributes:
        model: without arrays, but for those of units that are being computed.
        units: in the model's order.
        parts: this rank's numbers of the trained arrays, by the arrays' names.
        shard: the ranks that have divided the arrays; ``data``: those that keep the same parts, for
            other rows.
        world: all of them.
        fetching: how they are fetched.
        held: this rank's parts of trained rows as one array each, by the row's identity, while
            somebody has them.
    """

    model: nn.Module
    units: tuple[Unit, ...]
    parts: nn.Module
    shard: Communicator
    data: Communicator
    world: Communicator
    fetching: BetweenPasses = BetweenPasses()
    held: dict[int, mx.array] = field(default_factory=dict[int, mx.array])
    _kept: dict[int, Collective] = field(default_factory=dict[int, Collective])

    @property
    def rows(self) -> list[DividedRow]:
        """All rows, each once."""
        return list({id(row): row for unit in self.units for row in unit.rows}.values())

    @property
    def regions(self) -> dict[str, tuple[Shape, Region]]:
        """Shape of each trained array and this rank's place in it, by name; only where it keeps any
        of it.
        """
        return {
            place.name: (place.shape, region)
            for row in self.rows
            if row.trained
            for place, region in row.regions()
        }

    @property
    def first_trained(self) -> int:
        """Number of the first unit that trains anything."""
        return first_trained(self.units)

    def moved(self, move: Callable[[Communicator], Communicator]) -> Sharding:
        """Return the same over other communicators of the same ranks."""
        return replace(self, shard=move(self.shard), data=move(self.data), world=move(self.world))

    def anyone(self, wants: bool) -> bool:
        """True if any rank wants; asked on all ranks together, before each pass, of which all do
        the same number.
        """
        return number(self.world.all_sum(mx.array(float(wants)))) > 0

    def everyones(self, mine: float) -> mx.array:
        """(ranks,) each rank's number, handed out but not waited for; called on all ranks together."""
        every = self.world.all_sum(mx.array(places_of_all([mine], self.world)))
        mx.async_eval(every)
        return every

    def fetched(
        self, units: Sequence[Unit], wait: Callable[[list[mx.array]], None]
    ) -> Generator[Unit]:
        """Go through ``units``: each is given with its whole arrays in the model, and without them
        afterwards.

        Called on all ranks together. ``wait`` is called with arrays that are still on their way.
        """
        ahead: list[mx.array] = self.begin(self.wholes(units[0].rows)) if units else []
        for place, unit in enumerate(units):
            rows, ahead = (
                ahead,
                self.begin(self.wholes(units[place + 1].rows)) if place + 1 < len(units) else [],
            )
            wait(rows)
            unit.install(rows)
            # A name would keep arrays of the unit while the next ones are fetched.
            del rows
            try:
                yield unit
            finally:
                unit.remove()

    def wholes(self, rows: Sequence[DividedRow]) -> list[Collective]:
        """Return whole rows, which are still to be fetched: by :meth:`begin`, in the same order on
        all ranks.
        """
        found: list[Collective] = []
        for row in rows:
            if (whole := self._kept.get(id(row))) is None:
                part = row.part(self.parts, self.held.get(id(row)))
                whole = self._exchange(row, self.shard.all_gather, part)
                if self.fetching.keeps:
                    self._kept[id(row)] = whole
            found.append(whole)
        return found

    def push(self, row: DividedRow, gradients: Sequence[mx.array] | None) -> mx.array:
        """Begin to add up the gradients of a row's arrays over the ranks that divide it: this
        rank's part of the sums.

        Called on all ranks together; a rank that has none gives ``None``.
        """
        return self.push_rows([row], [row.joined(gradients)])[0]

    def push_rows(
        self, rows: Sequence[DividedRow], gradients: Sequence[mx.array]
    ) -> list[mx.array]:
        """:meth:`push` of the gradients of several whole rows."""
        scatter, given = partial(sum_scatter, self.shard), zip(rows, gradients, strict=True)
        sums = self.begin([self._exchange(row, scatter, gradient) for row, gradient in given])
        if self.scatters:
            # A stream that computes would wait for what is made of sums.
            return [each[: row.kept] for row, each in zip(rows, sums, strict=True)]
        # Where whole sums come of it, the part has memory of its own, so that the rest is given
        # back.
        mine = [mx.contiguous(each[: row.kept]) for row, each in zip(rows, sums, strict=True)]
        mx.async_eval(mine)
        return mine

    def _exchange(
        self, row: DividedRow, call: Callable[[mx.array], mx.array], array: mx.array
    ) -> Collective:
        """A collective of an array of a row, or the array where no other rank has any of it."""
        return Collective(array, array, array) if row.alone else collective(self.shard, call, array)

    @property
    def scatters(self) -> bool:
        """True if the back-end adds up parts of arrays, and gives each rank its own."""
        return bool(getattr(self.shard, "scatters", False))

    def begin(self, exchanges: Sequence[Collective]) -> list[mx.array]:
        """Hand out exchanges, in the same order on all ranks; returns what comes of them."""
        if self.scatters:
            # Together: what NCCL is handed out by itself waits for what was handed out before it,
            # and the host with it.
            return start(self.shard, exchanges)
        return [array for each in exchanges for array in start(self.shard, [each])]

    def forget(self) -> None:
        """Drop rows that were kept; their weights will not be those of the next step."""
        self._kept.clear()


def first_trained(units: Sequence[Unit]) -> int:
    """Return the number of the first of ``units`` that trains anything; the last one's where none
    does.
    """
    return next((at for at, unit in enumerate(units) if unit.trained_rows), len(units) - 1)


_EQUAL = Layout()


def shard(
    model: nn.Module,
    shard: Communicator,
    data: Communicator,
    world: Communicator,
    *,
    fetching: BetweenPasses = BetweenPasses(),
    stages: Sequence[Stage] = (),
    layout: Layout = _EQUAL,
) -> Sharding:
    """Leave this rank with its part of every array of ``model``, whose arrays may not have been
    read.

    Args:
        stages: of this rank, where ``model`` has their blocks alone.
        layout: of the parts of the ranks of ``shard``.

    Raises:
        ModelError: the architecture cannot be cut into stages.
    """
    units = _units(model, shard, stages, layout)
    every = {id(row): row for unit in units for row in unit.rows}.values()
    taken = [pair for row in every for pair in row.take().items()]
    parts = nn.Module()
    for key, value in unflatten(taken).items() if taken else ():
        parts[key] = value
    return Sharding(model, units, parts, shard, data, world, fetching)


def _units(
    model: nn.Module,
    communicator: Communicator,
    stages: Sequence[Stage],
    layout: Layout,
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
    rows = {at: _rows(named, communicator, layout) for at, named in _groups(model, owner).items()}
    return tuple(Unit(stage, tuple(_needed(stage, rows))) for stage in each)


def _needed(stage: Stage, rows: Mapping[int, Sequence[DividedRow]]) -> Iterator[DividedRow]:
    """The rows that a stage of one block computes with."""
    if stage.blocks.needs_embedding(tied=bool(stage.shared)):
        yield from rows.get(_TABLE, ())
    yield from rows.get(stage.blocks.first, ())
    if stage.blocks.is_last:
        yield from rows.get(_OUTSIDE, ())


def _groups(
    model: nn.Module, owner: Mapping[int, int]
) -> dict[int, list[tuple[str, nn.Module, str, bool]]]:
    """Each array of the model: its name, module, key there, and whether it is trained, by the block
    that has it.
    """
    trained = {name for name, _ in flatten(model.trainable_parameters())}
    found: dict[int, list[tuple[str, nn.Module, str, bool]]] = {}
    seen = set[tuple[int, str]]()
    for path, module in model.named_modules():
        for key, value in module.items():
            if not isinstance(value, mx.array) or (id(module), key) in seen or key.startswith("_"):
                continue
            seen.add((id(module), key))
            name = f"{path}.{key}" if path else key
            found.setdefault(owner.get(id(module), _OUTSIDE), []).append(
                (name, module, key, name in trained)
            )
    return found


def _rows(
    named: Sequence[tuple[str, nn.Module, str, bool]],
    communicator: Communicator,
    layout: Layout,
) -> list[DividedRow]:
    """The rows of some arrays: one of each type, and of trained and other ones. Those of modules
    that are ``kept`` are rows by themselves, or stay in the model.

    Where ranks scatter sums, large trained arrays are rows by themselves, or with those that one
    product multiplies by: their gradients need not be joined. Elsewhere few exchanges are faster.
    """
    apart = getattr(communicator, "scatters", False)
    kinds: dict[tuple[bool, mx.Dtype, str], list[Slot]] = {}
    own: list[DividedRow] = []
    for name, module, key, trained in _as_multiplied(named):
        array = module[key]
        if id(module) in layout.kept:
            place = Slot(name, module, key, tuple(array.shape), 0, array.size)
            own += [KeptRow([place], array.dtype, trained=True)] if trained else []
            continue
        group = _group_of(name) if apart and trained and array.size >= _LARGE else ""
        places = kinds.setdefault((trained, array.dtype, group), [])
        start = places[-1].start + places[-1].size if places else 0
        places.append(Slot(name, module, key, tuple(array.shape), start, array.size))
    make: Any = BoxedRow if layout.boxed else partial(DividedRow, shares=layout.shares)
    shared = [
        make(places, dtype, communicator, trained=trained)
        for (trained, dtype, _), places in kinds.items()
    ]
    return [*shared, *own]


def _as_multiplied(
    named: Sequence[tuple[str, nn.Module, str, bool]],
) -> list[tuple[str, nn.Module, str, bool]]:
    """Arrays with those of one product beside each other, in its order: a whole row is then its
    factor.
    """
    groups: dict[str, int] = {}
    for name, *_ in named:
        groups.setdefault(_group_of(name), len(groups))
    layers = {layer: place for place, layer in enumerate(_OF_ONE_INPUT)}

    def place(each: tuple[str, nn.Module, str, bool]) -> tuple[int, int]:
        return groups[_group_of(each[0])], layers.get(_layer_of(each[0])[1], 0)

    return sorted(named, key=place)


def _group_of(name: str) -> str:
    """What the weights of layers with one input have in common."""
    owner, layer = _layer_of(name)
    return f"{owner}.{_OF_ONE_INPUT.get(layer, name)}"


def _layer_of(name: str) -> tuple[str, str]:
    """The name of an array's layer, and of the module that has it."""
    owner, _, layer = name.rpartition(".")[0].rpartition(".")
    return owner, layer
