"""What a rank holds of weights and optimizer, as slices of arrays by name, whoever updates them; and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from allhands.checkpoints.arrays import owned, owned_tree
from allhands.checkpoints.format import LEFT_FILE, OPTIMIZER_FILE, WEIGHTS_FILE, OwnedSlice, ShardedState
from allhands.checkpoints.resuming import Restored, restore_optimizer
from allhands.distributed.packed import Left
from allhands.io.regions import Flat
from allhands.io.trees import flatten
from allhands.parallel.base import Strategy
from allhands.train.graph_update import GraphUpdate


def sharded_state(
    model: nn.Module, optimizer: optim.Optimizer, graph: GraphUpdate | None, strategy: Strategy | None = None
) -> dict[str, ShardedState]:
    """The state of training on this rank, by the file that is called after the group of arrays."""
    divided = graph if graph is not None and graph.shards is not None else None
    state = owned_tree(optimizer.state) if divided is None else dict(_divided(divided))
    found: dict[str, ShardedState] = {WEIGHTS_FILE: owned_tree(model.trainable_parameters()), OPTIMIZER_FILE: state}
    if strategy is not None and (left := dict(_left_out(model, graph, strategy))):
        found[LEFT_FILE] = left
    return found


def _left_out(model: nn.Module, graph: GraphUpdate | None, strategy: Strategy) -> Iterator[tuple[str, OwnedSlice]]:
    """What packing has left out of this rank's gradients, as its row of arrays that have one for each rank."""
    ranks, rank = strategy.communicator.size, strategy.communicator.rank
    for name, kept in _by_name(model, graph, strategy.left):
        row = Flat(rank * kept.size, (rank + 1) * kept.size)
        yield name, owned(kept.reshape(-1), (ranks, *kept.shape), row)


def _by_name(model: nn.Module, graph: GraphUpdate | None, left: Sequence[Left]) -> Iterator[tuple[str, mx.array]]:
    """What there is of ``left`` by the names of the trained arrays."""
    leaves = None if graph is None else graph.leaves
    if leaves is None:
        named = zip(flatten(model.trainable_parameters()), left, strict=False)
        yield from ((name, kept) for (name, _), kept in named if kept is not None)
        return
    for chunk, kept in zip(leaves.chunks, left, strict=False):
        if kept is not None:
            yield from zip((place.name for place in chunk.places), chunk.parts(kept), strict=True)


def load_left_out(
    model: nn.Module, graph: GraphUpdate | None, strategy: Strategy, restored: Restored, changed: str = ""
) -> str:
    """Give a strategy what packing had left out of this rank's gradients; called on all ranks together.

    Args:
        changed: why it is not to have it, in words.

    Returns:
        Why it has none of that, in words; empty where it has it, or where there was none.
    """
    stored = restored.left
    if not stored:
        return ""
    ranks, rank = strategy.communicator.size, strategy.communicator.rank
    wanted = {name: (ranks, *kept.shape) for name, kept in _by_name(model, graph, strategy.left)}
    if changed or not wanted:
        return changed or "gradients travel as they are now"
    before = next(iter(stored.values())).shape[0]
    if before != ranks:
        return f"it belongs to {before} ranks, and there are {ranks}"
    if {name: each.shape for name, each in stored.items()} != wanted:
        return "gradients travel in other arrays now"
    found: dict[str, mx.array] = {}
    for name, (_, *shape) in wanted.items():
        size = math.prod(shape)
        found[name] = stored[name].read(Flat(rank * size, (rank + 1) * size)).reshape(shape)
    leaves = None if graph is None else graph.leaves
    if leaves is None:
        names = [name for name, _ in flatten(model.trainable_parameters())]
        strategy.left = [found.get(name) for name in names]
    else:
        strategy.left = [
            kept if kept is None else chunk.joined([found[place.name] for place in chunk.places])
            for chunk, kept in zip(leaves.chunks, strategy.left, strict=True)
        ]
    return ""


def _divided(graph: GraphUpdate) -> Iterator[tuple[str, OwnedSlice]]:
    state = graph.flat_state()
    assert graph.leaves is not None
    assert graph.shards is not None
    for index in range(len(graph.leaves.chunks)):
        for kind, kept in state.pop(str(index)).items():
            flat = kept.reshape(-1)
            for name, shape, place, start in _ranges(graph, index):
                if graph.shards.divided[index] and place.size:
                    yield f"{name}.{kind}", owned(flat[start : start + place.size], shape, place)
                elif not graph.shards.divided[index]:
                    yield f"{name}.{kind}", owned(flat[start : start + place.size].reshape(shape))
    yield from owned_tree(state).items()


def _ranges(graph: GraphUpdate, index: int) -> Iterator[tuple[str, tuple[int, ...], Flat, int]]:
    """Of each array in a chunk its name and shape, which numbers of it this rank keeps, and where in its part."""
    assert graph.leaves is not None
    chunk = graph.leaves.chunks[index]
    first, last = (0, chunk.size) if graph.shards is None else graph.shards.range(index)
    for place, begin, shape in zip(chunk.places, chunk.starts, chunk.shapes, strict=False):
        size = math.prod(shape)
        start, stop = (min(max(edge - begin, 0), size) for edge in (first, last))
        yield place.name, shape, Flat(start, stop), max(begin - first, 0)


def load_optimizer(
    optimizer: optim.Optimizer,
    graph: GraphUpdate | None,
    restored: Restored,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Give the optimizer its state, or where ranks have divided it this rank's part; called on all ranks together.

    Args:
        progress: called after each array.
    """
    if graph is None or graph.leaves is None:
        restore_optimizer(optimizer, restored, progress)
        return
    state, stored = graph.flat_state(), restored.optimizer
    for index in range(len(graph.leaves.chunks)):
        kept: dict[str, mx.array] = state[str(index)]
        for kind in kept:
            shape, row = kept[kind].shape, mx.zeros((kept[kind].size,), dtype=kept[kind].dtype)
            kept[kind] = row
            for name, _, place, start in _ranges(graph, index):
                row[start : start + place.size] = stored[f"{name}.{kind}"].read(place)
                mx.eval(row)  # in place, and nothing is held twice
                progress()
            kept[kind] = row.reshape(shape)
    others: dict[str, Any] = {name: stored[name].read() for name in state if not name.isdecimal()}
    graph.put_flat_state({**state, **others})
