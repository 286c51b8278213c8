"""Conversion of a rank's weights and optimizer state to named slices of arrays, and back.

It works for every updater. If each rank has an optimizer state of its own, an array of it has a row
for every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from allhands.checkpoints.arrays import StoredArrayReader, owned, owned_tree
from allhands.checkpoints.format import (
    LEFT_FILE,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    OwnedSlice,
    ShardedState,
)
from allhands.checkpoints.resuming import Restored, restore_optimizer
from allhands.distributed.packed import Left
from allhands.io.formatting import counted
from allhands.io.regions import Box, Flat, Region, Shape, everything
from allhands.io.trees import flatten
from allhands.kernels.fused.flat_params import FlatParams
from allhands.parallel.base import Strategy
from allhands.train.graph_update import FlatState

# Prefixes of the names of arrays with a row for every rank, and of a strategy's own arrays.
_ROWS, _OUTER = "each-rank/", "outer/"


def sharded_state(
    model: nn.Module,
    optimizer: optim.Optimizer,
    flat: FlatState | None,
    strategy: Strategy | None = None,
) -> dict[str, ShardedState]:
    """Return the state of training on this rank: slices of arrays by name, for each file of a
    checkpoint.
    """
    regions = {} if strategy is None else strategy.regions
    state = (
        _in_regions(optimizer.state, regions)
        if flat is None or flat.shards is None
        else dict(_divided(flat))
    )
    if strategy is not None:
        if strategy.keeps_own_optimizer and strategy.communicator.size > 1:
            state = dict(_in_rows(state, strategy.communicator.rank, strategy.communicator.size))
        state |= {_OUTER + name: owned(array) for name, array in strategy.outer_state.items()}
        communicator, own = strategy.communicator, strategy.own_state
        state |= {
            f"{_OUTER}{_ROWS}{name}": _row(owned(array), communicator.rank, communicator.size)
            for name, array in own.items()
        }
    found: dict[str, ShardedState] = {
        WEIGHTS_FILE: _in_regions(model.trainable_parameters(), regions),
        OPTIMIZER_FILE: state,
    }
    if strategy is not None and (left := dict(_left_out(model, flat, strategy))):
        found[LEFT_FILE] = left
    return found


def _in_regions(tree: Any, regions: Mapping[str, tuple[Shape, Region]]) -> dict[str, OwnedSlice]:
    """Return the arrays of a tree of weights or of an optimizer's state, as this rank's regions."""
    found = owned_tree(tree)
    for name, each in found.items():
        part = regions.get(name) or regions.get(name.rpartition(".")[0])
        if part is not None and each.get().size == part[1].size:
            found[name] = owned(each.get().reshape(part[1].shape), *part)
    return found


def _left_out(
    model: nn.Module, flat: FlatState | None, strategy: Strategy
) -> Iterator[tuple[str, OwnedSlice]]:
    """Yield this rank's rounding errors of packing, as its row of arrays with a row per rank."""
    ranks, rank = strategy.communicator.size, strategy.communicator.rank
    for name, kept in _by_name(model, _places(flat, strategy), strategy.left):
        row = Flat(rank * kept.size, (rank + 1) * kept.size)
        yield name, owned(kept.reshape(-1), (ranks, *kept.shape), row)


def _places(flat: FlatState | None, strategy: Strategy) -> FlatParams | None:
    """Return the places of the trained arrays, if the exchanged arrays are the gradients of the
    passes.
    """
    return None if flat is None or strategy.keeps_own_optimizer else flat.leaves


def _by_name(
    model: nn.Module, leaves: FlatParams | None, left: Sequence[Left]
) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays of ``left`` by the names of the trained arrays."""
    if leaves is None:
        named = zip(flatten(model.trainable_parameters()), left, strict=False)
        yield from ((name, kept) for (name, _), kept in named if kept is not None)
        return
    for chunk, kept in zip(leaves.chunks, left, strict=False):
        if kept is not None:
            yield from zip((place.name for place in chunk.places), chunk.parts(kept), strict=True)


def load_left_out(
    model: nn.Module,
    flat: FlatState | None,
    strategy: Strategy,
    restored: Restored,
    changed: str = "",
) -> str:
    """Restore a strategy's rounding errors of packing; called on all ranks together.

    Args:
        changed: a reason not to restore them, in words.

    Returns:
        The reason why they were not restored; empty if they were, or if there were none.
    """
    stored = restored.left
    if not stored:
        return ""
    ranks, rank, leaves = (
        strategy.communicator.size,
        strategy.communicator.rank,
        _places(flat, strategy),
    )
    wanted = {name: (ranks, *kept.shape) for name, kept in _by_name(model, leaves, strategy.left)}
    if changed or (changed := _unlike({name: each.shape for name, each in stored.items()}, wanted)):
        return changed
    found: dict[str, mx.array] = {}
    for name, (_, *shape) in wanted.items():
        size = math.prod(shape)
        found[name] = stored[name].read(Flat(rank * size, (rank + 1) * size)).reshape(shape)
    strategy.left = _in_place(model, leaves, strategy.left, found)
    return ""


def _in_place(
    model: nn.Module, leaves: FlatParams | None, left: Sequence[Left], named: Mapping[str, mx.array]
) -> list[Left]:
    """Return the arrays ``named`` in the order of ``left``; the reverse of :func:`_by_name`.

    ``left``: the present arrays of the strategy.
    """
    if leaves is None:
        return [named.get(name) for name, _ in flatten(model.trainable_parameters())]
    return [
        kept if kept is None else chunk.joined([named[place.name] for place in chunk.places])
        for chunk, kept in zip(leaves.chunks, left, strict=True)
    ]


def _unlike(stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Return why arrays of the shapes ``stored`` cannot be the ``wanted`` ones; empty if they can."""
    if not wanted:
        return "gradients travel as they are now"
    before, ranks = next(iter(stored.values()))[0], next(iter(wanted.values()))[0]
    if before != ranks:
        return f"it belongs to {counted(before, 'rank')}, and now there are {ranks}"
    return "" if stored == wanted else "gradients travel in other arrays now"


def _in_rows(state: ShardedState, rank: int, size: int) -> Iterator[tuple[str, OwnedSlice]]:
    """Yield this rank's own arrays as its rows; scalars such as the step are common to all."""
    for name, each in state.items():
        if not each.shape:
            yield name, each
            continue
        yield _ROWS + name, _row(each, rank, size)


def _row(each: OwnedSlice, rank: int, size: int) -> OwnedSlice:
    """Return a whole array of this rank as its row of an array with a row for each rank."""
    place = Box((rank, *[0] * len(each.shape)), (1, *each.shape))
    return OwnedSlice((size, *each.shape), each.dtype, place, each.get()[None])


@dataclass(frozen=True)
class _Rows:
    """:class:`StoredArrayReader` for one row of an array, or for the mean of several rows."""

    whole: StoredArrayReader
    rows: range

    @property
    def shape(self) -> Shape:
        return self.whole.shape[1:]

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    def read(self, region: Region | None = None) -> mx.array:
        wanted = everything(self.shape) if region is None else region
        found = [self._row(row, wanted) for row in self.rows]
        if len(found) == 1 or not mx.issubdtype(found[0].dtype, mx.floating):
            return found[0]
        mean = sum(
            (each.astype(mx.float32) for each in found[1:]), found[0].astype(mx.float32)
        ) / len(found)
        return mean.astype(found[0].dtype)

    def _row(self, row: int, wanted: Region) -> mx.array:
        size = math.prod(self.shape)
        if isinstance(wanted, Flat):
            return self.whole.read(Flat(row * size + wanted.start, row * size + wanted.stop))
        return self.whole.read(Box((row, *wanted.start), (1, *wanted.shape))).reshape(wanted.shape)


def _own_state(
    stored: Mapping[str, StoredArrayReader], strategy: Strategy
) -> dict[str, StoredArrayReader]:
    """Return this rank's optimizer state: its row if there is one for each rank, else the mean."""
    communicator, found = strategy.communicator, dict[str, StoredArrayReader]()
    for name, each in stored.items():
        if name.startswith(_ROWS):
            same = strategy.keeps_own_optimizer and each.shape[0] == communicator.size
            rows = range(communicator.rank, communicator.rank + 1) if same else range(each.shape[0])
            found[name.removeprefix(_ROWS)] = _Rows(each, rows)
        elif not name.startswith(_OUTER):
            found[name] = each
    return found


def _load_outer_state(strategy: Strategy, stored: Mapping[str, StoredArrayReader]) -> None:
    names = strategy.outer_state.keys()
    if names and all(_OUTER + name in stored for name in names):
        strategy.load_outer_state({name: stored[_OUTER + name].read() for name in names})
    communicator = strategy.communicator
    rows = {name: stored.get(f"{_OUTER}{_ROWS}{name}") for name in strategy.own_state}
    own = {
        name: _Rows(each, range(communicator.rank, communicator.rank + 1)).read()
        for name, each in rows.items()
        if each is not None and each.shape[0] == communicator.size
    }
    if own and len(own) == len(rows):
        strategy.load_own_state(own)


def _divided(flat: FlatState) -> Iterator[tuple[str, OwnedSlice]]:
    state = flat.state()
    assert flat.shards is not None
    for index in range(len(flat.leaves.chunks)):
        for kind, kept in state.pop(str(index)).items():
            for name, shape, place, start in _ranges(flat, index):
                mine = kept.reshape(-1)[start : start + place.size]
                if not flat.shards.divided[index]:
                    yield f"{name}.{kind}", owned(mine.reshape(shape))
                elif place.size:
                    yield f"{name}.{kind}", owned(mine, shape, place)
    yield from owned_tree(state).items()


def _ranges(flat: FlatState, index: int) -> Iterator[tuple[str, tuple[int, ...], Flat, int]]:
    """Yield for each array of a flat buffer its name, its shape, the range of its numbers that this
    rank has, and their place in the rank's part of the buffer.
    """
    chunk = flat.leaves.chunks[index]
    first, last = (0, chunk.size) if flat.shards is None else flat.shards.range(index)
    for place, begin, shape in zip(chunk.places, chunk.starts, chunk.shapes, strict=False):
        size = math.prod(shape)
        start, stop = (min(max(edge - begin, 0), size) for edge in (first, last))
        yield place.name, shape, Flat(start, stop), max(begin - first, 0)


def load_optimizer(
    optimizer: optim.Optimizer,
    flat: FlatState | None,
    restored: Restored,
    progress: Callable[[], None] = lambda: None,
    strategy: Strategy | None = None,
) -> int:
    """Give the optimizer its state, or this rank's part of a divided state; called on all ranks
    together.

    Args:
        progress: called after each array.
        strategy: gets its own further state.

    Returns:
        The number of ranks with their own state; 0 for a common state.
    """
    rows = max(
        (each.shape[0] for name, each in restored.optimizer.items() if name.startswith(_ROWS)),
        default=0,
    )
    if strategy is not None:
        _load_outer_state(strategy, restored.optimizer)
        restored = replace(restored, optimizer=_own_state(restored.optimizer, strategy))
    if flat is None:
        restore_optimizer(optimizer, restored, progress)
        return rows
    state, stored = flat.state(), restored.optimizer
    for index in range(len(flat.leaves.chunks)):
        kept: dict[str, mx.array] = state[str(index)]
        for kind in kept:
            shape, row = kept[kind].shape, mx.zeros((kept[kind].size,), dtype=kept[kind].dtype)
            kept[kind] = row
            for name, _, place, start in _ranges(flat, index):
                row[start : start + place.size] = stored[f"{name}.{kind}"].read(place)
                mx.eval(row)  # in place, so that nothing is in memory twice
                progress()
            kept[kind] = row.reshape(shape)
    others: dict[str, Any] = {name: stored[name].read() for name in state if not name.isdecimal()}
    flat.put({**state, **others})
    return rows
