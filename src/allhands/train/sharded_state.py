"""What a rank holds of weights and optimizer, as slices of arrays by name, whoever updates them; and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from allhands.checkpoints.arrays import owned, owned_tree
from allhands.checkpoints.format import OPTIMIZER_FILE, WEIGHTS_FILE, OwnedSlice, ShardedState
from allhands.checkpoints.resuming import Restored, restore_optimizer
from allhands.io.regions import Flat
from allhands.train.graph_update import GraphUpdate


def sharded_state(model: nn.Module, optimizer: optim.Optimizer, graph: GraphUpdate | None) -> dict[str, ShardedState]:
    """The state of training on this rank, by the file that is called after the group of arrays."""
    divided = graph if graph is not None and graph.shards is not None else None
    state = owned_tree(optimizer.state) if divided is None else dict(_divided(divided))
    return {WEIGHTS_FILE: owned_tree(model.trainable_parameters()), OPTIMIZER_FILE: state}


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
