"""This rank's part of a model that is divided into stages: which blocks, what it computes, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from numpy.typing import NDArray

from allhands.checkpoints.arrays import owned_tree
from allhands.checkpoints.format import WEIGHTS_FILE, ShardedState
from allhands.checkpoints.resuming import Restored
from allhands.checkpoints.saving import Save, Saved, SaveKind
from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can, require_neighbours
from allhands.distributed.groups import along
from allhands.distributed.handout import gather_json
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.io.regions import Flat, Region
from allhands.io.trees import flatten, unflatten
from allhands.model.stages import Stage
from allhands.parallel.piping import Piping

# Micro-batches of a step for each stage: with so many a rank waits for a fifth of the time at most.
_MICRO_BATCHES = 4


def divides(config: TrainConfig) -> bool:
    """Whether each rank has a part of the model alone."""
    return config.strategy == "pipeline"


def piped(config: TrainConfig, mesh: Mesh) -> Mesh:
    """The mesh with an axis of stages.

    Raises:
        ConfigError: the ranks do not make up whole pipelines.
    """
    if not divides(config):
        return mesh
    stages = config.pp or mesh.size
    if mesh.size == 1:
        raise ConfigError(
            "a pipeline needs several ranks, and there is one",
            where="--strategy pipeline",
            hint="add a second computer (--hosts), or -n 2 to try it on this one",
        )
    if mesh.size % stages:
        raise ConfigError(
            f"{mesh.size} ranks are not whole pipelines of {stages}",
            where=f"--pp {stages}",
            hint="take a number of stages that divides that of the ranks",
        )
    return replace(mesh, data=mesh.size // stages, pipe=stages, weights=())


def piping_of(config: TrainConfig, stages: tuple[Stage, ...], communicator: Communicator, mesh: Mesh) -> Piping:
    """How this rank's stages are connected; called on all ranks together.

    Raises:
        ConfigError: the back-end cannot connect them.
    """
    if communicator.size > 1 and not can(communicator.backend, "split"):
        require_neighbours(communicator.backend, mesh, "pipe")
    pipe = along(communicator, mesh, "pipe", alike=False)
    data = along(communicator, mesh, "data", alike=False)
    # As the first stage has it now: a CPU computes in float32 what is stored in other types.
    own = stages[0].type_of_hidden()
    told = gather_json(pipe, None if own is None else str(own).removeprefix("mlx.core."))
    dtype: mx.Dtype = getattr(mx, next(each for each in told if each is not None))
    return Piping(tuple(replace(stage, dtype=dtype) for stage in stages), pipe, data, config.pp_schedule)


def micro_batch_tokens(config: TrainConfig, work: NDArray[Any], mesh: Mesh) -> int | None:
    """Tokens of a micro-batch, so that a step has several for each stage."""
    if config.micro_batch_tokens is not None or not divides(config):
        return config.micro_batch_tokens
    longest = int(work.max())
    rows = config.batch_size // mesh.data_size
    return max(longest, longest * rows // (_MICRO_BATCHES * mesh.pipe))


@dataclass(frozen=True)
class _Read:
    """:class:`~allhands.checkpoints.arrays.StoredArrayReader` of an array that has been read."""

    array: mx.array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, region: Region | None = None) -> mx.array:
        if region is None:
            return self.array
        if isinstance(region, Flat):
            return self.array.reshape(-1)[region.start : region.stop]
        stops = [start + size for start, size in zip(region.start, region.shape, strict=True)]
        return self.array[tuple(slice(start, stop) for start, stop in zip(region.start, stops, strict=True))]


def kept_of(restored: Restored, model: nn.Module, progress: Callable[[], None]) -> Restored:
    """What a rank with a part of the model needs of a checkpoint; read on all ranks together, in the same order."""
    own = {name for name, _ in flatten(model.trainable_parameters())}
    foreign = tuple(f"{name}." for name in restored.weights if name not in own)

    def read(stored: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, reader in stored.items():
            array = reader.read()
            if not f"{name}.".startswith(foreign or ("\0",)):
                mx.eval(array)
                found[name] = _Read(array, reader.dtype)
            progress()
        return found

    return replace(restored, weights=read(restored.weights), optimizer=read(restored.optimizer))


def whole_weights(model: nn.Module, communicator: Communicator) -> dict[str, mx.array]:
    """The trained weights of all ranks, bit for bit, on every rank; called on all of them together."""
    mine = dict(flatten(model.trainable_parameters()))
    told = [[name, list(array.shape), str(array.dtype).removeprefix("mlx.core.")] for name, array in mine.items()]
    everyone: list[list[tuple[str, list[int], str]]] = gather_json(communicator, told)
    owners: dict[str, tuple[int, list[int], str]] = {}
    for rank, held in enumerate(everyone):
        for name, shape, kind in held:
            owners.setdefault(name, (rank, shape, kind))
    found: dict[str, mx.array] = {}
    for name, (rank, shape, kind) in owners.items():
        dtype: mx.Dtype = getattr(mx, kind)
        bits = mx.uint32 if dtype.size == 4 else mx.uint16
        own = (
            mine[name].reshape(-1).view(bits)
            if rank == communicator.rank
            else mx.zeros((math.prod(shape),), dtype=bits)
        )
        total = communicator.all_sum(own)
        mx.eval(total)
        found[name] = total.view(dtype).reshape(shape)
    return found


class WholeWeights:
    """The trained weights of all stages, as they were when a save began: what an adapter is written of."""

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        self._now: dict[str, mx.array] = {}

    def gather(self) -> None:
        """Take those of now; called on all ranks together."""
        self._now = whole_weights(self._model, self._communicator)

    def put_into(self, groups: dict[str, ShardedState]) -> dict[str, ShardedState]:
        """``groups`` with the weights of all stages in place of this rank's."""
        return {**groups, WEIGHTS_FILE: owned_tree(unflatten(list(self._now.items())))}

    @contextmanager
    def saved_by(self, saving: Callable[[], AbstractContextManager[tuple[Save[Any], Saved]]]) -> Generator[Any]:
        """What saves, with a gathering before each save."""
        self.gather()
        with saving() as (save, saved):

            def gathered(state: Any, kind: SaveKind) -> None:
                self.gather()
                save(state, kind)

            yield gathered, saved
