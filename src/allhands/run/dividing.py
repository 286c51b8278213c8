"""Division of a model's blocks over the stages of a pipeline, by the ranks' speeds and memory; all
ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import mlx.nn as nn
import psutil
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from numpy.typing import NDArray

from allhands.config.schema import TrainConfig
from allhands.data.loader import num_lengths
from allhands.distributed.backend import Communicator
from allhands.distributed.bench import time_products
from allhands.distributed.handout import gather_json, hand_out_json
from allhands.distributed.mesh import Mesh
from allhands.distributed.reduce import BUCKET_BYTES
from allhands.errors import ModelError
from allhands.io.formatting import counted, format_bytes
from allhands.io.trees import flatten
from allhands.model.adapters import count_parameters
from allhands.model.divisible import split_given, stages_per_rank
from allhands.model.quantized import Form, held_dense, is_quantized, own_bytes
from allhands.model.stages import Stage, blocks_of_stages, cut
from allhands.parallel.costs import Work
from allhands.parallel.splitting import Layers, Part, Seat, Split, divide, even_speeds, split_as
from allhands.run.divided_costs import memory_of_rows
from allhands.run.expecting import Device, has_masters
from allhands.run.piping import keeps_fetched, micro_batch_tokens
from allhands.run.stage_costs import (
    ON_CPU,
    ROOM_OF_PRODUCTS,
    Model,
    Weights,
    alive,
    layers_of,
    on_the_way,
    summing_bytes,
)
from allhands.run.training_memory import blocks_of, on_cpu, on_gpu
from allhands.runtime.accelerator import Accelerator

STAGES = "stages"  # key in the state of a checkpoint
# Keys of configurations for the number of experts that compute a token.
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
_MEASURED_S = 0.4

T = TypeVar("T")


@dataclass(frozen=True)
class DividedModel:
    """A model that is to be divided.

    Attributes:
        model: the model; its weights need not be read yet.
        config: configuration of the model from its files.
        work: tokens of every row of the training data; ``None``: nothing is trained.
        for_answers: True if tokens are generated one at a time; a CPU then holds quantised weights
            dense.
    """

    model: nn.Module
    config: Mapping[str, Any]
    work: NDArray[Any] | None = None
    for_answers: bool = False


def split_agreed(
    config: TrainConfig,
    divided: DividedModel,
    mesh: Mesh,
    accelerator: Accelerator,
    communicator: Communicator,
    recorded: Mapping[str, Any] | None = None,
) -> tuple[tuple[int, ...], list[str]]:
    """Return the number of blocks of each stage, the same on every rank, and notes with the reason.

    All ranks call this together.

    Args:
        recorded: state of a checkpoint, on rank 0: its split stays if the number of stages is the
            same and it still fits.

    Raises:
        ConfigError: the requested split does not divide the model.
        ModelError: no split fits into the ranks' memory, or the requested one does not.
    """
    blocks: Any = divided.model.layers
    given = split_given(config, len(blocks), mesh.pipe)
    per_rank = stages_per_rank(config, len(given), len(blocks), mesh.pipe)
    found = _part_costs(config, divided, mesh, accelerator)
    device = Device(accelerator, mesh, 0)
    present = present_bytes(accelerator)
    kept = recorded.get(STAGES) if recorded else None
    own = {
        "room": device.room,
        "taken": int(present + found.once),
        "kept": kept,
        "several": is_several(mesh),
    }
    told: list[dict[str, Any]] = gather_json(communicator, own)
    if len(told) < mesh.size:  # a rank on trial, alone: it stands for all
        told = [own] * mesh.size
    seats = _seats(
        config, found, mesh, told, per_rank, native=accelerator.runs_natively(config.compile)
    )
    if given:
        refusal, notes = _judged(given, found, seats)
        if refusal := hand_out_json(
            communicator, refusal
        ):  # ranks of another kind may count bytes in another way
            raise ModelError(
                refusal,
                code="memory-too-small",
                where=f"--pp-split {config.pp_split}",
                hint="leave it out: memory divides them",
            )
        return tuple(given), notes
    kept = told[0]["kept"]
    if any(_still_fits(kept, way, seats, per_rank) for way in found.ways):
        return tuple(kept), [f"stages: {_told(kept)} blocks{_copies(mesh)}, as in the checkpoint"]
    if told[0]["several"] and communicator.size == mesh.size:
        speeds = even_speeds(time_products(communicator, _MEASURED_S, _widths(divided)))
        slowest = map(min, _by_place(mesh, speeds))
        seats = [replace(seat, speed=speed) for speed, seat in zip(slowest, seats, strict=True)]
    best, layers = _fitting(found.ways, seats, per_rank)
    sizes = tuple(gather_json(communicator, best.sizes)[0])
    return sizes, [
        f"stages: {_told(sizes)} blocks{_copies(mesh)}{_why(best, layers, seats, per_rank)}"
    ]


def _copies(mesh: Mesh) -> str:
    """Return words with the number of pipelines; empty if there is one."""
    return f" in each of {mesh.data_size} pipelines" if mesh.data_size > 1 else ""


@dataclass(frozen=True)
class PipedSplit:
    """Stages of a pipeline that fit the ranks' memory.

    Attributes:
        seconds: time of each stage, in any unit.
        micro_batches: number of micro-batches of a step.
        hidden_bytes: bytes that a stage hands on for each micro-batch.
        again: True if stages compute their forward passes twice.
    """

    seconds: tuple[float, ...]
    micro_batches: int
    hidden_bytes: int
    again: bool


def split_that_fits(
    config: TrainConfig,
    divided: DividedModel,
    mesh: Mesh,
    accelerator: Accelerator,
    rooms: Sequence[int],
    taken: Sequence[int],
) -> PipedSplit | None:
    """Return the stages that :func:`split_agreed` would find for equally fast ranks; ``None`` if no
    stages fit.

    Args:
        mesh: mesh with a pipeline axis.
        rooms: bytes that each rank may have.
        taken: bytes of each rank's process without the model.
    """
    blocks: Any = divided.model.layers
    if len(blocks) < mesh.pipe:
        return None
    found, again = (
        _part_costs(config, divided, mesh, accelerator),
        accelerator.runs_natively(config.compile),
    )
    told = [
        {"room": room, "taken": int(each + found.once)}
        for room, each in zip(rooms, taken, strict=True)
    ]
    seats = _seats(config, found, mesh, told, 1, native=again)
    splits = [divide(way, seats, 1) for way in found.ways]
    best = next((split for split in splits if split.fits), None)
    if best is None:
        return None
    return PipedSplit(tuple(best.seconds), found.micro_batches, found.hidden_bytes, again)


def stages_of(model: nn.Module, split: Sequence[int], mesh: Mesh) -> tuple[Stage, ...]:
    """Return this rank's stages of ``model``; nothing is computed."""
    parts = blocks_of_stages(split)
    return tuple(cut(model, parts[mesh.coordinates().pipe :: mesh.pipe]))


def is_several(mesh: Mesh) -> bool:
    """Return True if the ranks are on several computers, so that their speeds may differ."""
    return mesh.local_size < mesh.size


def present_bytes(accelerator: Accelerator) -> int:
    """Return the bytes that this process takes without a model; 0 on a GPU."""
    return psutil.Process().memory_info().rss + ROOM_OF_PRODUCTS if accelerator.kind == "cpu" else 0


def _by_place(mesh: Mesh, of_ranks: Sequence[T]) -> list[list[T]]:
    """Group the values of all ranks by the ranks' place in the pipeline."""
    places: list[list[T]] = [[] for _ in range(mesh.pipe)]
    for rank, value in enumerate(of_ranks):
        places[mesh.coordinates(rank).pipe].append(value)
    return places


def _seats(
    config: TrainConfig,
    found: _PartCosts,
    mesh: Mesh,
    told: Sequence[Mapping[str, Any]],
    per_rank: int,
    *,
    native: bool,
) -> list[Seat]:
    """Return the room and speed at each place of the pipeline; ``told``: facts of each rank."""
    held, beside = [0.0] * mesh.pipe, [0] * mesh.pipe
    if found.micro_batches:
        held = alive(config.pp_schedule, mesh.pipe, found.micro_batches, per_rank, native=native)
        begun = alive(config.pp_schedule, mesh.pipe, found.micro_batches, per_rank, native=False)
        beside = [on_the_way(found.hidden_bytes, mesh.pipe, each * per_rank) for each in begun]
    return list(map(_seat, _by_place(mesh, told), held, beside))


def _seat(said: Sequence[Mapping[str, Any]], held: float, beside: int) -> Seat:
    """Return the least room and the most taken bytes of ranks with the same stages, at speed 1."""
    rooms = [each["room"] for each in said if each["room"]]
    return Seat(1.0, min(rooms, default=None), beside + max(each["taken"] for each in said), held)


def _judged(
    given: Sequence[int], found: _PartCosts, seats: Sequence[Seat]
) -> tuple[str, list[str]]:
    """Return the reason to refuse stages that the user has asked for, or "" and notes on them.

    Stages are refused if their weights alone are larger than a rank's memory. If they are too large
    by an estimate, a note says so.
    """
    bare = [replace(seat, taken=0, alive=0.0) for seat in seats]
    weights = split_as(found.weights, bare, given)
    if not weights.fits:
        return (
            f"stages of {_told(given)} blocks do not fit, by their weights alone: {_lacking(weights, seats)}",
            [],
        )
    splits = [split_as(way, seats, given) for way in found.ways]
    if any(each.fits for each in splits):
        return "", []
    return "", [f"stages of {_told(given)} blocks may be too large: {_lacking(splits[-1], seats)}"]


def _fitting(ways: Sequence[Layers], seats: Sequence[Seat], per_rank: int) -> tuple[Split, Layers]:
    """Return the split that fits with the first possible form of the weights, and the layers in
    that form.

    Raises:
        ModelError: no split fits.
    """
    splits = [divide(way, seats, per_rank) for way in ways]
    for split, way in zip(splits, ways, strict=True):
        if split.fits:
            return split, way
    raise _no_room(splits[-1], seats, len(ways[0].blocks))


def _still_fits(kept: Any, layers: Layers, seats: Sequence[Seat], per_rank: int) -> bool:
    """Return True if a recorded split suits this model and number of stages, and still fits."""
    if (
        not isinstance(kept, list)
        or len(kept) != len(seats) * per_rank
        or sum(kept) != len(layers.blocks)
    ):
        return False
    return split_as(layers, seats, kept).fits


# --- in words -------------------------------------------------------------------------------------


def _told(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


def _why(found: Split, layers: Layers, seats: Sequence[Seat], per_rank: int) -> str:
    """Return the reasons for unlike stages, in parentheses; empty without any."""
    fastest = max(seat.speed for seat in seats)
    reasons = [
        f"rank {place} is {seat.speed / fastest:.2g} times as fast"
        for place, seat in enumerate(seats)
        if seat.speed < fastest
    ]
    roomy = [Seat(seat.speed, None, seat.taken, seat.alive) for seat in seats]
    free = divide(layers, roomy, per_rank)
    reasons += _work_told(free, layers, roomy, per_rank)
    if free.sizes != found.sizes:
        held = [(place, seat.room or 0) for place, seat in enumerate(seats)]
        reasons += [
            f"rank {place} may have {format_bytes(room)} of memory"
            for place, room in held
            if room and free.num_bytes[place] > room
        ]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _work_told(found: Split, layers: Layers, seats: Sequence[Seat], per_rank: int) -> list[str]:
    """Return the differences of work between blocks that have changed the split, in words."""
    if max(found.sizes) - min(found.sizes) <= 1:
        return []
    blocks, first, last = layers.blocks, layers.first_trained, layers.blocks[-1]
    trained = [replace(each, cost=max(each.cost, last.cost)) for each in blocks[:first]]
    once = [replace(each, again=0.0) for each in blocks]
    without: dict[str, dict[str, Any]] = {
        f"the head takes as long as {max(1, round(layers.head.cost / last.cost))} blocks": {
            "head": Part(0.0)
        },
        "all stages but the last compute forward passes twice": {"blocks": tuple(once)},
    }
    if 0 < first < len(blocks):
        as_trained = {"blocks": (*trained, *blocks[first:]), "first_trained": 0}
        without[f"the first {first} blocks have no backward pass"] = as_trained
    return [
        reason
        for reason, changed in without.items()
        if divide(replace(layers, **changed), seats, per_rank).sizes != found.sizes
    ]


def _lacking(found: Split, seats: Sequence[Seat]) -> str:
    """Return the ranks that have too little memory for their stages, in words."""
    return "; ".join(
        f"rank {place} with {format_bytes(seat.room or 0)} would need {format_bytes(num_bytes)}"
        for place, (seat, num_bytes, missing) in enumerate(
            zip(seats, found.num_bytes, found.missing, strict=True)
        )
        if missing
    )


def _no_room(found: Split, seats: Sequence[Seat], blocks: int) -> ModelError:
    return ModelError(
        f"no division of the model's {counted(blocks, 'block')} fits these ranks: "
        f"{format_bytes(sum(found.missing))} of memory are missing in all. "
        f"The best one, {_told(found.sizes)}: {_lacking(found, seats)}",
        code="memory-too-small",
        where="--strategy pipeline",
        hint="add a computer, or take less: --grad-checkpoint, fewer --micro-batch-tokens, a quantised model",
    )


# --- costs of the parts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _PartCosts:
    """The costs of the model's parts.

    Attributes:
        ways: layers by form of their weights, the preferred form first. A quantised model on a CPU
            has a second form, packed, for ranks with little memory.
        weights: the layers with their weights alone, in the smallest form.
        once: bytes that a rank needs for a short time in a pass.
        micro_batches: number of micro-batches of a step; 0 if nothing is trained.
        hidden_bytes: bytes that a stage hands on for each micro-batch.
    """

    ways: list[Layers]
    weights: Layers
    once: int
    micro_batches: int
    hidden_bytes: int


def _part_costs(
    config: TrainConfig, divided: DividedModel, mesh: Mesh, accelerator: Accelerator
) -> _PartCosts:
    forms: list[Form] = [_form(divided, mesh, accelerator)]
    computes, more, word = (on_cpu, ON_CPU, 4) if accelerator.kind == "cpu" else (on_gpu, 1.0, 2)
    if accelerator.kind == "cpu" and is_quantized(divided.model):
        forms.append("packed")
    ranks, keeps = (mesh.tensor, mesh.shard), keeps_fetched(config)
    models = [weights_of(divided, form, accelerator).divided(*ranks, keeps=keeps) for form in forms]
    work, batches = _work(config, divided, models[0], mesh, accelerator)
    blocks = blocks_of(divided.config)
    of = None if blocks is None else partial(computes, blocks)
    if blocks is not None and mesh.context > 1:
        rows = {"ranks": mesh.context, "word": word, "heads": mesh.tensor}
        of = partial(memory_of_rows, computes, blocks, **rows)
    found = [
        layers_of(model, work, of, more=more, again=accelerator.runs_natively(config.compile))
        for model in models
    ]
    weights, _ = layers_of(models[-1], None, None)
    once, hidden = found[0][1], 0
    once += models[0].fetched_bytes(mesh.shard, keeps=keeps)
    if work is not None and blocks is not None:
        hidden = work.tokens // mesh.context * blocks.dims * word
        once += summing_bytes(mesh, work.trained_bytes // mesh.pipe, 0, BUCKET_BYTES)
    return _PartCosts([layers for layers, _ in found], weights, once, batches, hidden)


def _form(divided: DividedModel, mesh: Mesh, accelerator: Accelerator) -> Form:
    """Return the form in which a rank holds quantised weights if it has enough memory."""
    if accelerator.kind == "cpu":
        return "dense" if divided.for_answers else "codes"
    dense = held_dense(count_parameters(divided.model) // mesh.pipe, accelerator.memory_bytes)
    return "dense" if dense else "packed"


def _work(
    config: TrainConfig, divided: DividedModel, model: Model, mesh: Mesh, accelerator: Accelerator
) -> tuple[Work | None, int]:
    """Return the work of one micro-batch, and the number of micro-batches of a step.

    ``None`` and 0 if nothing is trained.
    """
    if divided.work is None:
        return None, 0
    longest = int(divided.work.max())
    tokens = micro_batch_tokens(config, divided.work, mesh) or longest
    rows = max(1, config.batch_size // mesh.data_size)
    batches = -(-rows // max(1, min(rows, tokens // max(1, longest))))
    work = Work(
        method=config.fine_tune_type,
        tokens=max(longest, min(tokens, rows * longest)),
        row_tokens=longest,
        with_scores=config.deterministic,
        trained_layers=len(model.blocks),
        weights_bytes=0,
        trained_bytes=sum(
            each.trained_bytes for each in (*model.blocks, model.embedding, model.head)
        ),
        optimizer=config.optimizer,
        recomputed=config.grad_checkpoint,
        accumulated=True,
        masters=has_masters(config, divided.model, accelerator),
        lengths=num_lengths(divided.work),
    )
    return work, batches


def weights_of(divided: DividedModel, form: Form, accelerator: Accelerator) -> Model:
    """Return the weights of a model as a rank would hold them, with quantised layers in ``form``.

    The weights need not be read yet.
    """
    model: Any = divided.model
    held = own_bytes(model, form, on_cpu=accelerator.kind == "cpu")
    # Number of a block's experts that compute a token; None if the config does not say it.
    active = next((int(divided.config[name]) for name in _ACTIVE if divided.config.get(name)), None)

    def of(module: nn.Module) -> Weights:
        num_bytes = sum(held[id(each)] for each in module.modules())
        trained_bytes = sum(array.nbytes for _, array in flatten(module.trainable_parameters()))
        return Weights(_multiplied(module, active), num_bytes, trained_bytes)

    parts = tuple(map(of, model.layers))
    tables = [
        each for each in model.modules() if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)
    ]
    table: Any = max(tables, key=count_parameters, default=None)
    if table is None:
        return Model(parts, Weights(0, 0), Weights(0, 0))
    whole, embedding = of(model), of(table)
    inside = (*parts, embedding)
    beside = whole.numbers - sum(each.numbers for each in inside)
    others = whole.trained_bytes - sum(each.trained_bytes for each in inside)
    num_bytes = whole.held_bytes - sum(each.held_bytes for each in inside)
    if beside < embedding.numbers // 2:  # the table is the head, too: the last stage has a copy
        head = Weights(
            embedding.numbers, num_bytes + embedding.held_bytes, others + embedding.trained_bytes
        )
        return Model(parts, embedding, head)
    return Model(parts, embedding, Weights(beside, num_bytes, others))


def _multiplied(module: nn.Module, active: int | None) -> float:
    """Return the count of weights that each token is multiplied by; of experts only the ``active``
    ones count.
    """
    numbers = float(count_parameters(module))
    for each in module.modules():
        if isinstance(each, SwitchGLU | SwitchMLP) and active is not None:
            experts = next(
                array.shape[0] for _, array in flatten(each.parameters()) if array.ndim == 3
            )
            numbers -= count_parameters(each) * (1 - min(1.0, active / experts))
    return numbers


def _widths(divided: DividedModel) -> tuple[int, int] | None:
    """Return the widths of the largest matrix of a block; ``None`` if they are not known."""
    blocks = blocks_of(divided.config)
    return None if blocks is None else (blocks.dims, blocks.mlp_dims)
