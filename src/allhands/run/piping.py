"""This rank's part of a model that is divided into stages: its blocks, its computation, and its files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from numpy.typing import NDArray

from allhands.checkpoints.arrays import CODES, DTYPES, ReadArray, SharedArray, StoredArrayReader, require_same
from allhands.checkpoints.resuming import Restored, restore_weights
from allhands.config.combinations import is_sharded, require_groups, require_stages, unfit_stages
from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can, require_neighbours
from allhands.distributed.groups import along
from allhands.distributed.handout import gather_json
from allhands.distributed.mesh import Mesh
from allhands.io.regions import Flat, Region, Shape
from allhands.io.trees import flatten
from allhands.model.adapters import trained_weights
from allhands.model.stages import Stage
from allhands.objectives.base import Objective
from allhands.parallel.fsdp import FetchedSums
from allhands.parallel.matrices import Matrices, divide
from allhands.parallel.pipeline import PipedSums
from allhands.parallel.piping import Piping
from allhands.parallel.sharding import Sharding, shard
from allhands.run.stage_costs import small_enough
from allhands.train.evaluation import SumsTogether


def divides(config: TrainConfig) -> bool:
    """True if each rank has a part of the model alone."""
    return config.strategy == "pipeline"


def has_parts(config: TrainConfig, mesh: Mesh) -> bool:
    """Return true if each rank reads a part of the model alone."""
    return divides(config) or mesh.shard > 1 or mesh.tensor > 1


def as_left(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """Return ``config`` for fewer ranks than its stages or groups need, which ``--min-ranks`` allows.

    All remaining ranks are one pipeline, and its blocks are divided again; a single rank has the whole model. Groups of
    ranks are as large as makes whole ones.
    """
    if config.min_ranks is None or mesh.size < config.min_ranks:
        return config
    if config.strategy != "pipeline":
        return _in_smaller_groups(config, mesh)
    problem = unfit_stages(config, mesh.size)
    if problem is None:
        return config
    changed: dict[str, Any] = {"pp": None, "pp_split": "auto"}
    told = f"{problem.message} ({problem.where}): those that are left are one pipeline, whose blocks are divided anew"
    if mesh.size == 1:
        changed |= {"strategy": "auto", "pp_schedule": "1f1b"}
        told = "one rank is left of the pipeline: it trains the whole model"
    return config.model_copy(update=changed).noted((*config.notes, told))


def _in_smaller_groups(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """``config`` with groups of ranks of which so many make up whole ones."""
    changed: dict[str, Any] = {}
    for option in ("tp", "cp", "dp_shard"):
        size = getattr(config, option) or 1
        if (left := math.gcd(mesh.size, size)) != size:
            changed[option] = (None if left == 1 else left) if option == "dp_shard" else left
    if not changed:
        return config
    told = ", ".join(f"--{option.replace('_', '-')} is {left or 'left out'} now" for option, left in changed.items())
    return config.model_copy(update=changed).noted((*config.notes, f"{mesh.size} ranks are left: {told}"))


def piped(config: TrainConfig, mesh: Mesh) -> Mesh:
    """Return the mesh with an axis of stages, or of ranks that divide arrays, matrices or rows.

    Raises:
        ConfigError: the ranks do not make up whole pipelines, or whole groups.
    """
    require_groups(config, mesh.size)
    if config.tp > 1:
        return replace(mesh, data=mesh.size // config.tp, tensor=config.tp, weights=())
    if config.cp > 1:
        return replace(mesh, data=mesh.size // config.cp, context=config.cp, weights=())
    if is_sharded(config) and mesh.size > 1:
        together = config.dp_shard or mesh.size
        return replace(mesh, data=mesh.size // together, shard=together)
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


def sharded(config: TrainConfig, model: nn.Module, communicator: Communicator, mesh: Mesh) -> Sharding | None:
    """Leave this rank with its part of every array of ``model``, where ranks divide them; called on all together.

    Raises:
        ConfigError: the back-end has no groups of some ranks.
        ModelError: the architecture cannot be cut.
    """
    if mesh.shard == 1:
        return None
    together = along(communicator, mesh, "shard", alike=True)
    copies = along(communicator, mesh, "data", alike=True)
    keeps = config.strategy == "zero2" or config.reshard == "off"
    return shard(model, together, copies, communicator, keeps=keeps)


def divided(model: nn.Module, communicator: Communicator | None, mesh: Mesh) -> Matrices | None:
    """Leave this rank with its part of the matrices of ``model``, where they are divided; called on all ranks together.

    Raises:
        ConfigError: the back-end has no groups of some ranks, or so many ranks cannot divide the model.
        ModelError: the architecture cannot be divided.
    """
    if mesh.tensor == 1:
        return None
    assert communicator is not None
    # Ranks with other rows exchange other shapes at the same time.
    together = along(communicator, mesh, "tensor", alike=False)
    copies = along(communicator, mesh, "data", alike=True)
    return divide(model, together, copies)


def sums_together(piping: Piping | None, sharding: Sharding | None, objective: Objective) -> SumsTogether | None:
    """Return the sums of an evaluation where each rank has a part of the model; ``None`` where it has everything."""
    if sharding is not None:
        return FetchedSums(sharding, objective)
    return None if piping is None else PipedSums(piping, objective)


def parts_of(
    restored: Restored,
    whole: Mapping[str, tuple[Shape, mx.Dtype]],
    regions: Mapping[str, Region],
    progress: Callable[[], None],
) -> Restored:
    """Return the part of a checkpoint that belongs to this rank's parts of arrays; called on all ranks together.

    Args:
        whole: shape and type of every trained array, by name.
        regions: this rank's place in each of which it has anything.
    """
    require_same(restored.weights, ((name, *facts) for name, facts in whole.items()), restored.place)

    def kept(stored: dict[str, StoredArrayReader], *, state: bool) -> dict[str, StoredArrayReader]:
        found: dict[str, StoredArrayReader] = {}
        for name, reader in stored.items():
            array = name.rpartition(".")[0] if state else name
            if array not in whole:
                found[name] = reader
                continue
            # All ranks read all arrays in the same order: where rank 0 hands them out others' numbers pass by.
            region = regions.get(array, Flat(0, 0))
            numbers = reader.read(region)
            progress()
            if region.size:
                in_range = isinstance(region, Flat) and len(whole[array][0]) > 1
                found[name] = ReadArray(numbers.reshape(-1, 1) if in_range else numbers, reader.dtype)
        return found

    weights = kept(restored.weights, state=False)
    return replace(restored, weights=weights, optimizer=kept(restored.optimizer, state=True))


def part_of_matrices(
    restored: Restored, model: nn.Module, matrices: Matrices, progress: Callable[[], None]
) -> Restored:
    """:func:`parts_of` a checkpoint for a rank whose ``model`` has parts of matrices."""
    here = {name: array.dtype for name, array in trained_weights(model).items()}
    stored = {name: DTYPES[each.dtype] for name, each in restored.weights.items()}
    # An array that another rank has alone is nowhere here.
    whole = {name: (shape, here.get(name) or stored.get(name, mx.float32)) for name, shape in matrices.shapes.items()}
    return parts_of(restored, whole, matrices.places, progress)


def part_of_shards(restored: Restored, sharding: Sharding, progress: Callable[[], None]) -> Restored:
    """:func:`parts_of` a checkpoint for a rank with a part of every array."""
    whole = {name: (array.shape, array.dtype) for name, array in trained_weights(sharding.model).items()}
    return parts_of(restored, whole, {name: region for name, (_, region) in sharding.regions.items()}, progress)


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


def put_back(
    received: Restored | None,
    model: nn.Module,
    division: Sharding | Matrices | None,
    progress: Callable[[], None],
    *,
    in_stages: bool,
) -> Restored | None:
    """Return a checkpoint, or the part of it that this rank needs, whose weights the model has now."""
    if received is None:
        return None
    own, trained = received, model
    if in_stages:
        own = kept_of(received, model, progress)
    elif isinstance(division, Matrices):
        own = part_of_matrices(received, model, division, progress)
    elif division is not None:
        own, trained = part_of_shards(received, division, progress), division.parts
    restore_weights(trained, own, progress)
    return own
