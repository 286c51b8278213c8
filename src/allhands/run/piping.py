"""This rank's part of a model that is divided into stages: which blocks, what it computes, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from numpy.typing import NDArray

from allhands.checkpoints.arrays import CODES, DTYPES, ReadArray, SharedArray, StoredArrayReader
from allhands.checkpoints.resuming import Restored
from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can, require_neighbours
from allhands.distributed.groups import along
from allhands.distributed.handout import gather_json
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.io.regions import Flat
from allhands.io.trees import flatten
from allhands.model.adapters import count_parameters
from allhands.model.stages import Blocks, Stage, blocks_of_stages, check_split, cut
from allhands.parallel.piping import Piping

# Stages of a rank where they are interleaved.
_INTERLEAVED = 2
# Micro-batches of a step for each stage: with so many a rank waits for a fifth of the time at most.
_MICRO_BATCHES = 4


def divides(config: TrainConfig) -> bool:
    """Whether each rank has a part of the model alone."""
    return config.strategy == "pipeline"


def left_alone(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """``config``; without a pipeline where ``--min-ranks 1`` has one rank of it go on, which has the whole model."""
    if not (divides(config) and config.min_ranks == 1 and mesh.size == 1):
        return config
    told = (*config.notes, "one rank is left of the pipeline: it trains the whole model")
    whole = {"strategy": "auto", "pp": None, "pp_schedule": "1f1b", "pp_split": "auto"}
    return config.model_copy(update=whole).noted(told)


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


def split_of(config: TrainConfig, num_blocks: int, num_ranks: int, head: float = 0.0) -> list[int]:
    """Blocks of each stage, in the model's order.

    Args:
        head: how many blocks take as long as the head, which the last stage has besides.

    Raises:
        ConfigError: what was asked for does not divide the model.
    """
    per_rank = _INTERLEAVED if config.pp_schedule == "interleaved" else 1
    count = num_ranks * per_rank
    if config.pp_split != "auto":
        sizes = [int(each) for each in config.pp_split.split(",")]
        if per_rank > 1 and len(sizes) % num_ranks == 0:
            count = len(sizes)
        check_split(sizes, num_blocks, count)
        return sizes
    if num_blocks < count:
        raise ConfigError(
            f"{num_blocks} blocks are too few for {count} stages",
            where="--strategy pipeline",
            hint="take fewer ranks, or --pp with fewer stages",
        )
    # Each block to the stage that would be done with it first; the last stage has its head already.
    sizes = [1] * count
    for _ in range(num_blocks - count):
        least = min(range(count), key=lambda place: sizes[place] + (head if place == count - 1 else 0.0))
        sizes[least] += 1
    return sizes


def head_in_blocks(model: nn.Module) -> float:
    """How many blocks multiply by as many numbers as the head, on average over the blocks."""
    blocks: Any = model.layers
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)]
    rows = max((each.weight.shape[0] for each in tables), default=0)
    width = max((each(mx.zeros((1,), dtype=mx.int32)).shape[-1] for each in tables), default=0)
    inside = sum(count_parameters(block) for block in blocks) / max(len(blocks), 1)
    return rows * width / inside if inside else 0.0


def parts_of(config: TrainConfig, model: nn.Module, mesh: Mesh, rank: int) -> list[Blocks]:
    """The blocks of the stages of a rank."""
    blocks: Any = model.layers
    parts = blocks_of_stages(split_of(config, len(blocks), mesh.pipe, head_in_blocks(model)))
    return parts[mesh.coordinates(rank).pipe :: mesh.pipe]


def stages_of(config: TrainConfig, model: nn.Module, mesh: Mesh) -> tuple[Stage, ...]:
    """Leave ``model`` with this rank's stages; nothing is computed."""
    return tuple(cut(model, parts_of(config, model, mesh, mesh.rank)))


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
    told = gather_json(pipe, None if own is None else CODES[own])
    dtype = DTYPES[next(code for code in told if code is not None)]
    return Piping(tuple(replace(stage, dtype=dtype) for stage in stages), pipe, data, config.pp_schedule)


def micro_batch_tokens(config: TrainConfig, work: NDArray[Any], mesh: Mesh) -> int | None:
    """Tokens of a micro-batch, so that a step has several for each stage."""
    if config.micro_batch_tokens is not None or not divides(config):
        return config.micro_batch_tokens
    longest = int(work.max())
    rows = config.batch_size // mesh.data_size
    return max(longest, longest * rows // (_MICRO_BATCHES * mesh.pipe))


def kept_of(restored: Restored, model: nn.Module, progress: Callable[[], None]) -> Restored:
    """What a rank with a part of the model needs of a checkpoint; called on all ranks together.

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
