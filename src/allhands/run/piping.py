"""This rank's part of a model that is divided into stages: its blocks, its computation, and its files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.nn as nn
from numpy.typing import NDArray

from allhands.checkpoints.arrays import CODES, DTYPES, ReadArray, SharedArray, StoredArrayReader, require_same
from allhands.checkpoints.resuming import Restored
from allhands.config.combinations import is_sharded, require_context, require_shards, require_stages, unfit_stages
from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can, require_neighbours
from allhands.distributed.groups import along
from allhands.distributed.handout import gather_json
from allhands.distributed.mesh import Mesh
from allhands.io.regions import Flat
from allhands.io.trees import flatten
from allhands.model.adapters import trained_weights
from allhands.model.stages import Stage
from allhands.objectives.base import Objective
from allhands.parallel.fsdp import FetchedSums
from allhands.parallel.pipeline import PipedSums
from allhands.parallel.piping import Piping
from allhands.parallel.sharding import Sharding, shard
from allhands.run.stage_costs import small_enough
from allhands.train.evaluation import SumsTogether


def divides(config: TrainConfig) -> bool:
    """True if each rank has a part of the model alone."""
    return config.strategy == "pipeline"


def as_left(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """Return ``config`` for fewer ranks than its stages or groups need, which ``--min-ranks`` allows.

    All remaining ranks are one pipeline, and its blocks are divided again; a single rank has the whole model. Rows are
    divided among as many ranks as make whole groups.
    """
    if mesh.size % config.cp and config.min_ranks is not None and mesh.size >= config.min_ranks:
        left = math.gcd(mesh.size, config.cp) if mesh.size > config.cp else mesh.size
        note = f"--cp is {left} in place of {config.cp}, for the ranks that are left"
        return config.model_copy(update={"cp": left}).noted((*config.notes, note))
    problem = unfit_stages(config, mesh.size)
    if problem is None or config.min_ranks is None or mesh.size < config.min_ranks:
        return config
    changed: dict[str, Any] = {"pp": None, "pp_split": "auto"}
    told = f"{problem.message} ({problem.where}): those that are left are one pipeline, whose blocks are divided anew"
    if mesh.size == 1:
        changed |= {"strategy": "auto", "pp_schedule": "1f1b"}
        told = "one rank is left of the pipeline: it trains the whole model"
    return config.model_copy(update=changed).noted((*config.notes, told))


def piped(config: TrainConfig, mesh: Mesh) -> Mesh:
    """Return the mesh with an axis of stages, of ranks that divide all arrays, or of ranks that divide rows.

    Raises:
        ConfigError: the ranks do not make up whole pipelines, or whole groups.
    """
    if is_sharded(config) and mesh.size > 1:
        require_shards(config, mesh.size)
        together = config.dp_shard or mesh.size
        return replace(mesh, data=mesh.size // together, shard=together)
    if config.cp > 1:
        require_context(config, mesh.size)
        return replace(mesh, data=mesh.size // config.cp, context=config.cp, weights=())
    if not divides(config):
        return mesh
    require_stages(config, mesh.size)
    stages = config.pp or mesh.size
    return replace(mesh, data=mesh.size // stages, pipe=stages, weights=())


def piping_of(config: TrainConfig, stages: tuple[Stage, ...], communicator: Communicator, mesh: Mesh) -> Piping:
    """Return the connections of this rank's stages; called on all ranks together.

    Raises:
        ConfigError: the back-end cannot connect them.
    """
    if communicator.size > 1 and not can(communicator.backend, "split"):
        require_neighbours(communicator.backend, mesh, "pipe")
    pipe = along(communicator, mesh, "pipe", alike=False)
    data = along(communicator, mesh, "data", alike=False)
    # As the first stage has it now: a CPU computes in float32 what is stored in other types.
    own = stages[0].type_of_hidden()
    told = gather_json(pipe, None if own is None else CODES[own])
    dtype = DTYPES[next(code for code in told if code is not None)]
    return Piping(tuple(replace(stage, dtype=dtype) for stage in stages), pipe, data, config.pp_schedule)


def sharded(config: TrainConfig, model: nn.Module, communicator: Communicator, mesh: Mesh) -> Sharding:
    """Leave this rank with its part of every array of ``model``; called on all ranks together.

    Raises:
        ConfigError: the back-end has no groups of some ranks.
        ModelError: the architecture cannot be cut.
    """
    together = along(communicator, mesh, "shard", alike=True)
    copies = along(communicator, mesh, "data", alike=True)
    keeps = config.strategy == "zero2" or config.reshard == "off"
    return shard(model, together, copies, communicator, keeps=keeps)


def sums_together(piping: Piping | None, sharding: Sharding | None, objective: Objective) -> SumsTogether | None:
    """Return the sums of an evaluation where each rank has a part of the model; ``None`` where it has everything."""
    if sharding is not None:
        return FetchedSums(sharding, objective)
    return None if piping is None else PipedSums(piping, objective)


def parts_of(restored: Restored, sharding: Sharding, progress: Callable[[], None]) -> Restored:
    """Return the part of a checkpoint that belongs to this rank's parts of arrays; called on all ranks together."""

    shapes = [(name, array.shape, array.dtype) for name, array in trained_weights(sharding.model).items()]
    require_same(restored.weights, shapes, restored.place)
    whole = {name: shape for name, shape, _ in shapes}

    def kept(stored: dict[str, StoredArrayReader], *, state: bool) -> dict[str, StoredArrayReader]:
        found: dict[str, StoredArrayReader] = {}
        for name, reader in stored.items():
            array = name.rpartition(".")[0] if state else name
            if array not in whole:
                found[name] = reader
                continue
            # All ranks read all arrays in the same order: where rank 0 hands them out others' numbers pass by.
            shape, region = sharding.regions.get(array, (whole[array], Flat(0, 0)))
            numbers = reader.read(region)
            progress()
            if region.size:
                found[name] = ReadArray(numbers.reshape(-1, 1) if len(shape) > 1 else numbers, reader.dtype)
        return found

    weights = kept(restored.weights, state=False)
    return replace(restored, weights=weights, optimizer=kept(restored.optimizer, state=True))


def micro_batch_tokens(config: TrainConfig, work: NDArray[Any], mesh: Mesh) -> int | None:
    """Return the tokens of a micro-batch, so that a step has several micro-batches for each stage."""
    if config.micro_batch_tokens is not None or not divides(config):
        return config.micro_batch_tokens
    return small_enough(int(work.max()), config.batch_size // mesh.data_size, mesh.pipe)


def kept_of(restored: Restored, model: nn.Module, progress: Callable[[], None]) -> Restored:
    """Return the part of a checkpoint that a rank with a part of the model needs; called on all ranks together.

    Where the ranks read by themselves nothing is read yet; where rank 0 hands out, all read all in the same order, and
    others' arrays pass by.
    """
    own = {name for name, _ in flatten(model.trainable_parameters())}
    foreign = tuple(f"{name}." for name in restored.weights if name not in own)

    def kept(stored: dict[str, StoredArrayReader]) -> dict[str, StoredArrayReader]:
        found: dict[str, StoredArrayReader] = {}
        for name, reader in stored.items():
            mine = not f"{name}.".startswith(foreign or ("\0",))
            if isinstance(reader, SharedArray):
                array = reader.read(None if mine else Flat(0, 0))
                reader = ReadArray(array, reader.dtype)
                progress()
            if mine:
                found[name] = reader
        return found

    return replace(restored, weights=kept(restored.weights), optimizer=kept(restored.optimizer))
