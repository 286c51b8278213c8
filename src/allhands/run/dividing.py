"""Which blocks each rank of a pipeline has: agreed by all ranks, by measured speed and the memory that each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.bench import time_products
from allhands.distributed.handout import gather_json
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError, ModelError
from allhands.io.formatting import format_bytes
from allhands.io.trees import flatten
from allhands.model.adapters import count_parameters
from allhands.model.quantized import held_dense, is_quantized
from allhands.model.stages import Stage, blocks_of_stages, check_split, cut
from allhands.parallel.costs import Work
from allhands.parallel.splitting import Layers, Seat, Split, divide, even_speeds, split_as
from allhands.run.expecting import Device
from allhands.run.piping import micro_batch_tokens
from allhands.run.stage_costs import ON_CPU, ROOM_OF_PRODUCTS, Model, Weights, alive, layers_of
from allhands.run.training_memory import blocks_of, on_cpu, on_gpu
from allhands.runtime.accelerator import Accelerator

STAGES = "stages"  # of what a checkpoint says
# Stages of a rank where they are interleaved.
_INTERLEAVED = 2
# Bytes of a quantised number as a CPU holds it in training, scales included; dense ones, there and on a small GPU.
_CODE, _FLOAT, _HALF = 1.25, 4, 2
_MEASURED_S = 0.4


@dataclass(frozen=True)
class Divided:
    """A model that is to be cut.

    Attributes:
        config: of the model, as its files have it.
        work: tokens of every row of the training data; ``None``: nothing is trained.
        for_answers: whether tokens come one at a time, for which a CPU holds quantised weights dense.
        packed: whether it keeps them as they are stored.
    """

    model: nn.Module
    config: Mapping[str, Any]
    work: NDArray[Any] | None = None
    for_answers: bool = False
    packed: bool = False


def split_agreed(
    config: TrainConfig,
    divided: Divided,
    mesh: Mesh,
    accelerator: Accelerator,
    communicator: Communicator,
    recorded: Mapping[str, Any] | None = None,
) -> tuple[tuple[int, ...], list[str]]:
    """Blocks of each stage, the same on every rank, and how they came about; called on all ranks together.

    Args:
        recorded: what a checkpoint says, on rank 0: as many stages stay as they were.

    Raises:
        ConfigError: what was asked for does not divide the model.
        ModelError: no split fits into the ranks' memory.
    """
    blocks: Any = divided.model.layers
    if given := split_given(config, len(blocks), mesh.pipe):
        return tuple(given), []
    per_rank = _INTERLEAVED if config.pp_schedule == "interleaved" else 1
    if len(blocks) < mesh.pipe * per_rank:
        raise ConfigError(
            f"{len(blocks)} blocks are too few for {mesh.pipe * per_rank} stages",
            where="--strategy pipeline",
            hint="take fewer ranks, or --pp with fewer stages",
        )
    layers, once, batches = _layers(config, divided, mesh, accelerator)
    ways = [layers]
    if accelerator.kind == "cpu" and is_quantized(divided.model):  # a rank whose memory is short keeps weights packed
        ways.append(_layers(config, replace(divided, packed=True), mesh, accelerator)[0])
    device = Device(accelerator, mesh, 0)
    present = present_bytes(accelerator)
    kept = recorded.get(STAGES) if recorded else None
    own = {"room": device.room, "taken": int(present + once), "kept": kept, "several": is_several(mesh)}
    told: list[dict[str, Any]] = gather_json(communicator, own)
    if len(told) < mesh.size:  # a rank on trial, alone: it stands for all
        told = [own] * mesh.size
    held = [0.0 if divided.work is None else 1.0] * mesh.pipe
    if divided.work is not None and not accelerator.runs_natively(config.compile):  # there passes are computed again
        held = alive(config.pp_schedule, mesh.pipe, batches, per_rank)
    seats = [
        _seat([said for rank, said in enumerate(told) if mesh.coordinates(rank).pipe == place], held[place])
        for place in range(mesh.pipe)
    ]
    kept = told[0]["kept"]
    if any(_still_fits(kept, way, seats, per_rank) for way in ways):
        return tuple(kept), [f"stages: {_told(kept)} blocks, as in the checkpoint"]
    if told[0]["several"] and communicator.size == mesh.size:
        measured = even_speeds(time_products(communicator, _MEASURED_S, _widths(divided)))
        slowest = [
            min(speed for rank, speed in enumerate(measured) if mesh.coordinates(rank).pipe == place)
            for place in range(mesh.pipe)
        ]
        seats = [Seat(speed, seat.room, seat.taken, seat.alive) for speed, seat in zip(slowest, seats, strict=True)]
    found = [divide(way, seats, per_rank) for way in ways]
    best, layers = next(((each, way) for each, way in zip(found, ways, strict=True) if each.fits), (None, layers))
    if best is None:
        raise _no_room(found[-1], seats, len(blocks))
    sizes = tuple(gather_json(communicator, best.sizes)[0])  # ranks of another kind may count bytes in another way
    return sizes, [f"stages: {_told(sizes)} blocks{_why(best, layers, seats, per_rank)}"]


def split_given(config: TrainConfig, num_blocks: int, num_ranks: int) -> list[int]:
    """Blocks of each stage as ``--pp-split`` has them; empty where they are to be found.

    Raises:
        ConfigError: they do not divide the model.
    """
    if config.pp_split == "auto":
        return []
    given = [int(each) for each in config.pp_split.split(",")]
    interleaved = config.pp_schedule == "interleaved" and len(given) % num_ranks == 0
    per_rank = _INTERLEAVED if config.pp_schedule == "interleaved" else 1
    check_split(given, num_blocks, len(given) if interleaved else num_ranks * per_rank)
    return given


def stages_of(model: nn.Module, split: Sequence[int], mesh: Mesh) -> tuple[Stage, ...]:
    """Leave ``model`` with this rank's stages; nothing is computed."""
    parts = blocks_of_stages(split)
    return tuple(cut(model, parts[mesh.coordinates().pipe :: mesh.pipe]))


def is_several(mesh: Mesh) -> bool:
    """Whether the ranks are on several computers, so that their speeds may differ."""
    return mesh.local_size < mesh.size


def present_bytes(accelerator: Accelerator) -> int:
    """Of a rank's memory what a process has before a model is read."""
    return psutil.Process().memory_info().rss + ROOM_OF_PRODUCTS if accelerator.kind == "cpu" else 0


def _seat(said: Sequence[Mapping[str, Any]], held: float) -> Seat:
    """What ranks that have the same stages may have in common."""
    rooms = [each["room"] for each in said if each["room"]]
    return Seat(1.0, min(rooms, default=None), max(each["taken"] for each in said), held)


def _still_fits(kept: Any, layers: Layers, seats: Sequence[Seat], per_rank: int) -> bool:
    """Whether a recorded split is one of as many stages that has room, here as there."""
    if not isinstance(kept, list) or len(kept) != len(seats) * per_rank or sum(kept) != len(layers.blocks):
        return False
    return split_as(layers, seats, kept).fits


# --- in words -----------------------------------------------------------------------------------------


def _told(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


def _why(found: Split, layers: Layers, seats: Sequence[Seat], per_rank: int) -> str:
    """What has made stages unlike; empty where nothing has."""
    fastest = max(seat.speed for seat in seats)
    reasons = [
        f"rank {place} is {seat.speed / fastest:.2g} times as fast"
        for place, seat in enumerate(seats)
        if seat.speed < fastest
    ]
    roomy = [Seat(seat.speed, None, seat.taken, seat.alive) for seat in seats]
    free = divide(layers, roomy, per_rank)
    if free.sizes != found.sizes:
        held = [(place, seat.room or 0) for place, seat in enumerate(seats)]
        reasons += [
            f"rank {place} may have {format_bytes(room)} of memory"
            for place, room in held
            if room and free.num_bytes[place] > room
        ]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _no_room(found: Split, seats: Sequence[Seat], blocks: int) -> ModelError:
    each = "; ".join(
        f"rank {place} with {format_bytes(seat.room or 0)} would need {format_bytes(num_bytes)}"
        for place, (seat, num_bytes, missing) in enumerate(zip(seats, found.num_bytes, found.missing, strict=True))
        if missing
    )
    return ModelError(
        f"no division of the model's {blocks} blocks fits these ranks: {format_bytes(sum(found.missing))} of memory "
        f"are missing in all. The best one, {_told(found.sizes)}: {each}",
        where="--strategy pipeline",
        hint="add a computer, or take less: --grad-checkpoint, fewer --micro-batch-tokens, a quantised model",
    )


# --- what is divided ----------------------------------------------------------------------------------


def _layers(config: TrainConfig, divided: Divided, mesh: Mesh, accelerator: Accelerator) -> tuple[Layers, int, int]:
    """What the model's parts cost, what a rank has for a while in a pass, and the micro-batches of a step."""
    more = ON_CPU if accelerator.kind == "cpu" else 1.0
    model = weights_of(divided, mesh, accelerator)
    if divided.work is None:
        return *layers_of(model, None, None, more=more), 1
    longest = int(divided.work.max())
    tokens = micro_batch_tokens(config, divided.work, mesh) or longest
    rows = max(1, config.batch_size // mesh.data_size)
    batches = -(-rows // max(1, min(rows, tokens // max(1, longest))))
    blocks = blocks_of(divided.config)
    work = Work(
        method=config.fine_tune_type,
        tokens=max(longest, min(tokens, rows * longest)),
        trained_layers=len(model.blocks),
        weights_bytes=0,
        trained_bytes=sum(each.trained_bytes for each in (*model.blocks, model.embedding, model.head)),
        optimizer=config.optimizer,
        recomputed=config.grad_checkpoint,
        accumulated=True,
        masters=accelerator.kind == "cuda" and config.master_weights and _in_half(divided.model),
    )
    of = None if blocks is None else partial(on_cpu if accelerator.kind == "cpu" else on_gpu, blocks)
    again = accelerator.runs_natively(config.compile)
    return *layers_of(model, work, of, more=more, again=again), batches


def _in_half(model: nn.Module) -> bool:
    return any(array.dtype.size == 2 for _, array in flatten(model.trainable_parameters()))


def weights_of(divided: Divided, mesh: Mesh, accelerator: Accelerator) -> Model:
    """The weights of a model that need not have been read, as this rank would hold them."""
    model: Any = divided.model
    blocks: list[nn.Module] = list(model.layers)
    dense = held_dense(count_parameters(model) // mesh.pipe, accelerator.memory_bytes)
    holds = _Holding(accelerator.kind, dense=dense, compact=not divided.for_answers, packed=divided.packed)
    parts = tuple(Weights(count_parameters(each), holds(each, in_block=True), _trained(each)) for each in blocks)
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)]
    table: Any = max(tables, key=count_parameters, default=None)
    if table is None:
        return Model(parts, Weights(0, 0), Weights(0, 0))
    numbers, trained = count_parameters(table), _trained(table)
    embedding = Weights(numbers, holds(table, in_block=False), trained)
    beside = count_parameters(model) - sum(map(count_parameters, blocks)) - numbers
    held = holds(model, in_block=False) - holds.all_of(blocks) - embedding.held_bytes
    others = _trained(model) - sum(map(_trained, blocks)) - trained
    if beside < numbers // 2:  # the table is the head, too: the last stage has a copy
        return Model(parts, embedding, Weights(numbers, held + embedding.held_bytes, others + trained))
    return Model(parts, embedding, Weights(beside, held, others))


@dataclass(frozen=True)
class _Holding:
    """Bytes of weights as a device holds them.

    Attributes:
        dense: whether a GPU unpacks quantised weights.
        compact: whether a CPU holds those of blocks as codes; ``packed``: whether it keeps all as they are stored.
    """

    kind: str
    dense: bool
    compact: bool
    packed: bool

    def __call__(self, module: nn.Module, *, in_block: bool) -> int:
        return sum(self._own(each, in_block=in_block) for each in module.modules())

    def all_of(self, blocks: Sequence[nn.Module]) -> int:
        """Of blocks as if they were none."""
        return sum(self(each, in_block=False) for each in blocks)

    def _own(self, module: nn.Module, *, in_block: bool) -> int:
        arrays = [value for value in module.values() if isinstance(value, mx.array)]
        if type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding) and (self.kind == "cpu" or self.dense):
            if self.packed:
                return sum(each.nbytes for each in arrays)
            quantised: Any = module
            numbers = quantised.weight.size * 32 // quantised.bits
            codes = in_block and self.compact and isinstance(module, nn.QuantizedLinear)
            each = _HALF if self.kind != "cpu" else _CODE if codes else _FLOAT
            return int(each * numbers)
        if self.kind == "cpu":
            return sum(_FLOAT * each.size if mx.issubdtype(each.dtype, mx.floating) else each.nbytes for each in arrays)
        return sum(each.nbytes for each in arrays)


def _trained(module: nn.Module) -> int:
    arrays: Any = tree_flatten(module.trainable_parameters())
    return sum(array.nbytes for _, array in arrays)


def _widths(divided: Divided) -> tuple[int, int] | None:
    """Of the largest matrix of a block; ``None`` where that is not known."""
    blocks = blocks_of(divided.config)
    return None if blocks is None else (blocks.dims, blocks.mlp_dims)
