"""Estimate of the memory that this rank will need, from the loaded model and data.

The formulas are in :mod:`allhands.run.training_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from allhands.config.pretrain_schema import PretrainConfig, pretraining
from allhands.config.schema import TrainConfig
from allhands.data.loader import Largest, Loader
from allhands.data.order import GlobalOrder
from allhands.data.tokens import Windows
from allhands.distributed.codecs import CODECS
from allhands.distributed.groups import GroupWithinWorld
from allhands.distributed.mesh import Mesh
from allhands.distributed.reduce import BUCKET_BYTES
from allhands.errors import ModelError
from allhands.io.formatting import format_bytes
from allhands.io.trees import flatten
from allhands.kernels import native
from allhands.kernels.known import head_of
from allhands.model.fresh import shape_of
from allhands.model.load import LoadedModel, LoadedTokenizer
from allhands.model.quantized import bytes_of_form
from allhands.model.shapes import num_parameters
from allhands.model.stages import Stage
from allhands.model.weight_files import all_bytes
from allhands.parallel.costs import DelayedCosts, LocalCosts, Memory, PackedGradients, with_left_out
from allhands.parallel.rounds import rounds_of
from allhands.parallel.sharding import Sharding
from allhands.run.divided_costs import (
    Divided,
    Fetching,
    memory_of_experts,
    memory_of_matrices,
    memory_of_rows,
    outside_experts,
    sharded_costs,
    without_experts,
)
from allhands.run.model_sizes import left_to_adam
from allhands.run.piping import micro_batch_tokens
from allhands.run.stage_costs import Model, Weights, alive, of_stage, summing_bytes
from allhands.run.training_memory import (
    WRITING_BYTES,
    DecoderShape,
    Work,
    blocks_of,
    of_process,
    on_cpu,
    on_gpu,
)
from allhands.runtime.accelerator import Accelerator
from allhands.runtime.memory import memory_limit, usual_working_set
from allhands.runtime.sizing import Sizing

# Memory to generate answers: caches of keys and values, and a prompt's activations.
ANSWERING_BYTES = 100_000_000
_FLOAT, _HALF = 4, 2  # bytes of one value of the activations on a CPU, and on a GPU
# Part of a GPU's memory that arrays may take; part of a computer's memory that a program may take.
_USABLE = {"cpu": 0.95, "cuda": 0.94}


@dataclass(frozen=True)
class Device:
    """Device on which a rank computes.

    Attributes:
        present_bytes: resident bytes of the process after loading, before the optimizer has made
            its state.
    """

    accelerator: Accelerator
    mesh: Mesh
    present_bytes: int

    @property
    def room(self) -> int:
        """Bytes that this rank may have; 0 if unknown.

        They are a part of the GPU's memory, or of the computer's memory divided by its ranks. The
        memory that other programs use now is ignored, because a restarted run must cut its
        micro-batches as before.
        """
        whole, kind = self.accelerator.memory_bytes, self.accelerator.kind
        if kind == "cpu":
            whole = min(whole, memory_limit() or whole)
        if kind == "metal":
            usable = self.accelerator.working_set_bytes or usual_working_set(whole)
        else:
            usable = int(_USABLE[kind] * whole)
        return usable // (1 if kind == "cuda" else self.mesh.local_size)

    def holds(self, num_bytes: int) -> bool:
        """Return whether ``num_bytes`` fit into the room; True if the room is unknown."""
        return num_bytes <= self.room or not self.room


def expected_bytes(
    config: TrainConfig,
    loaded: LoadedModel,
    largest: Largest,
    device: Device,
    stages: Sequence[Stage] = (),
    sharding: Sharding | None = None,
) -> int | None:
    """Return :func:`estimated_bytes`; ``None`` on Macs, where the estimate was never compared with
    measurements.
    """
    if device.accelerator.kind == "metal":
        return None
    return estimated_bytes(config, loaded, largest, device, stages, sharding=sharding)


def estimated_bytes(
    config: TrainConfig,
    loaded: LoadedModel,
    largest: Largest,
    device: Device,
    stages: Sequence[Stage] = (),
    weights_bytes: int | None = None,
    *,
    sharding: Sharding | None = None,
) -> int | None:
    """Return the peak memory of the process in training, in bytes; ``None`` for kinds of models
    without an estimate.

    On a GPU it is the peak of MLX's memory.

    Args:
        largest: the result of :meth:`allhands.data.loader.Loader.largest` for whole rows.
        stages: this rank's stages, if it has only these of the model.
        weights_bytes: bytes of all weights, if their form will change.
        sharding: this rank's part of every array; ``None`` if it has whole arrays, or if they are not
            divided yet.
    """
    accelerator = device.accelerator
    native_way = accelerator.runs_natively(config.compile) and native.available()
    blocks = blocks_of(loaded.config) if native_way or not accelerator.cpu_native else None
    tokens, cuts, lengths, longest = largest
    if blocks is None or not tokens:
        return None
    model: Any = loaded.model
    trained, word = _bytes(model.trainable_parameters()), 2 if in_half(model) else 4
    blocks, through, has_head = _own_part(model, blocks, stages)
    work = Work(
        method=config.fine_tune_type,
        tokens=tokens,
        row_tokens=longest,
        trained_layers=through,
        weights_bytes=_bytes(model.parameters()) if weights_bytes is None else weights_bytes,
        trained_bytes=trained,
        by_adam_bytes=left_to_adam(blocks, config.optimizer, trained, word)
        if pretraining(config)
        else 0,
        optimizer=config.optimizer,
        recomputed=config.grad_checkpoint,
        accumulated=cuts > 1 or config.grad_accumulation_steps > 1,
        masters=has_masters(config, model, accelerator),
        packed=_packed(config, device.mesh, word),
        # If blocks are fetched, stages keep their inputs until the backward pass.
        alive=_alive(
            config, device.mesh, cuts, len(stages), native=native_way and sharding is None
        ),
        has_head=has_head,
        lengths=lengths,
        with_scores=config.deterministic,
    )
    own = _own_arrays(config, model, blocks, work, device, stages, sharding)
    memory = _of_rank(own, work, config, device.mesh)
    if not accelerator.cpu_native:
        return memory.arrays
    return _writing_bytes(config, device.mesh) + _peak(memory, device)


def _peak(memory: Memory, device: Device) -> int:
    """Return the peak memory of a CPU process with the arrays of ``memory``."""
    of = of_stage if device.mesh.pipe > 1 else of_process
    return of(memory, device.present_bytes - mx.get_cache_memory(), mx.get_active_memory())


def _own_arrays(
    config: TrainConfig,
    model: Any,
    blocks: DecoderShape,
    work: Work,
    device: Device,
    stages: Sequence[Stage],
    sharding: Sharding | None,
) -> Memory:
    """Return the arrays of a rank that has the model or a part of it."""
    if sharding is not None:
        return _own_parts(config, model, blocks, work, device, stages, sharding)
    own = _arrays_of(config, device)(blocks, work)
    trained, ranks, shared = work.trained_bytes, device.mesh.expert, 0
    if ranks > 1:
        shared = outside_experts(trained, [*map(_weights, model.layers)], blocks, work, ranks)
    summing = summing_bytes(device.mesh, trained, shared, BUCKET_BYTES)
    return replace(own, beside=own.beside + summing)


def _arrays_of(config: TrainConfig, device: Device) -> Callable[[DecoderShape, Work], Memory]:
    """Return the function that gives the arrays of a rank for its blocks and work.

    The work has the bytes of the rank's own weights.
    """
    mesh = device.mesh
    of, word = (on_cpu, _FLOAT) if device.accelerator.cpu_native else (on_gpu, _HALF)
    if mesh.tensor > 1:
        of = partial(memory_of_matrices, of, ranks=mesh.tensor, word=word)
    if config.ep > 1:
        of = partial(memory_of_experts, of, word=word, alike=mesh.expert == 1)
    if mesh.context > 1:
        how = {"ranks": mesh.context, "word": word, "heads": mesh.tensor}
        of = partial(memory_of_rows, of, **how)
    return of


def _own_parts(
    config: TrainConfig,
    model: Any,
    blocks: DecoderShape,
    work: Work,
    device: Device,
    stages: Sequence[Stage],
    sharding: Sharding,
) -> Memory:
    """Return the arrays of a fully sharded rank, also with stages or parts of matrices."""
    held, tied = _held(model, stages)
    mesh, kept = device.mesh, Weights(0.0, 0)
    if mesh.expert > 1:
        held, kept = without_experts(held, blocks, work, mesh.expert)
    fetching = Fetching(
        keeps=sharding.fetching.keeps,
        boxed=mesh.tensor > 1,
        copies=mesh.copies,
        slots=mesh.size // mesh.parts if isinstance(sharding.shard, GroupWithinWorld) else 1,
        turns=not stages or any(stage.blocks.is_last for stage in stages),
        pieces=mesh.context,
    )
    divided = Divided(
        held, blocks, work, _arrays_of(config, device), tied, device.accelerator.cpu_native, kept
    )
    costs = sharded_costs(divided, fetching)
    return costs.memory_of(divided.memory(work), _share(sharding))


def _share(sharding: Sharding) -> float:
    """Return this rank's part of all arrays, from 0 to 1; parts may follow the ranks' memory."""
    rows = [row for row in sharding.rows if not row.alone]
    bytes_of = [(row.kept * row.dtype.size, row.size * row.dtype.size) for row in rows]
    return sum(kept for kept, _ in bytes_of) / max(1, sum(whole for _, whole in bytes_of))


def _held(model: Any, stages: Sequence[Stage]) -> tuple[Model, bool]:
    """Return the weights of a model, or of its stages, and whether the head is the embedding.

    The weights outside the blocks are counted half for the embedding and half for the head, if a
    rank has both and they are not tied.
    """
    places = [place for stage in stages for place in stage.blocks.places] or range(
        len(model.layers)
    )
    blocks = tuple(_weights(model.layers[place]) for place in places)
    first, last = 0 in places, len(model.layers) - 1 in places
    tied = head_of(model) is getattr(getattr(model, "model", None), "embed_tokens", model)
    apart = first and last and not tied
    outside, nothing = _outside(model, blocks, 2 if apart else 1), Weights(0.0, 0)
    return Model(
        blocks, outside if first else nothing, outside if last else nothing
    ), tied and first and last


def _weights(module: Any) -> Weights:
    return Weights(0.0, _bytes(module.parameters()), _bytes(module.trainable_parameters()))


def _outside(model: Any, blocks: Sequence[Weights], parts: int) -> Weights:
    """Return the weights outside the blocks, divided by ``parts``."""
    whole = _weights(model)
    held = whole.held_bytes - sum(each.held_bytes for each in blocks)
    trained = whole.trained_bytes - sum(each.trained_bytes for each in blocks)
    return Weights(0.0, held // parts, trained // parts)


def _own_part(
    model: Any, blocks: DecoderShape, stages: Sequence[Stage]
) -> tuple[DecoderShape, int, bool]:
    """Return a rank's blocks, the number of those with a backward pass, and whether it has the
    head.
    """
    if not stages:
        return blocks, blocks.layers - len(native.before_training(model)), True
    own = replace(blocks, layers=sum(len(stage.blocks.places) for stage in stages))
    return own, _trained_through(model, stages), any(stage.blocks.is_last for stage in stages)


def _trained_through(model: Any, stages: Sequence[Stage]) -> int:
    """Return the number of blocks of these stages with a backward pass: in each stage, those from
    the first trained one on.
    """
    count = 0
    for stage in stages:
        own = model.layers[stage.blocks.first : stage.blocks.stop]
        trained = (
            place for place, block in enumerate(own) if flatten(block.trainable_parameters())
        )
        count += len(own) - next(trained, len(own))
    return count


def _alive(
    config: TrainConfig, mesh: Mesh, micro_batches: int, num_stages: int, *, native: bool
) -> float:
    """Return the number of micro-batches whose activations this rank holds at once."""
    if mesh.pipe == 1:
        return 1.0
    return alive(config.pp_schedule, mesh.pipe, micro_batches, num_stages, native=native)[
        mesh.coordinates().pipe
    ]


def roomy_form_fits(
    config: TrainConfig,
    loaded: LoadedModel,
    windows: Windows | None,
    device: Device,
    stages: Sequence[Stage],
) -> bool:
    """Return whether this rank can hold quantised weights in the fast form on a CPU, for training
    or evaluation.

    Call this while all weights are in their stored form. If a model's activations are not known,
    only its weights are counted. Micro-batches that memory decides (:func:`fitted_to_memory`) are
    counted at their smallest size.

    Args:
        windows: rows of the training or evaluation; ``None``: count only the weights.
    """
    held = bytes_of_form(loaded.model, "codes")
    present = device.present_bytes - mx.get_cache_memory()
    needed: int | None = None
    if windows is not None:
        order = GlobalOrder(windows.work, config.batch_size, config.seed)
        tokens = micro_batch_tokens(config, windows.work, device.mesh)
        if tokens is None and device.mesh.size > 1:
            tokens = int(windows.work.max())
        sizing = device.accelerator.sizing(tokens, compiled=False).fitted(windows.work)
        weights = (1.0,) * device.mesh.data_size
        largest = Loader(windows, order, sizing, device.mesh.data_rank, weights).largest()
        needed = estimated_bytes(config, loaded, largest, device, stages, held)
    if needed is None:
        needed = present + held - mx.get_active_memory()
    return device.holds(needed)


def dense_form_fits(model: Any, device: Device) -> bool:
    """Return whether this rank can hold quantised weights dense on a CPU, to generate answers.

    Call this while all weights are in their stored form.
    """
    dense = bytes_of_form(model, "dense")
    needed = (
        device.present_bytes
        - mx.get_cache_memory()
        + dense
        - mx.get_active_memory()
        + ANSWERING_BYTES
    )
    return device.holds(needed)


def packed_note(room: int) -> str:
    """Return the note for a run whose weights stay packed."""
    return (
        f"quantised weights stay packed, because this process may have {format_bytes(room)} of memory: "
        "half as many bytes, and slower steps, by a tenth with 500 tokens at once and a third with 30"
    )


def _of_rank(memory: Memory, work: Work, config: TrainConfig, mesh: Mesh) -> Memory:
    """Return the memory with the arrays that a rank keeps between exchanges."""
    if config.sync_every > 1:
        memory = LocalCosts(rounds_of(config)).memory(memory, mesh.size)
    elif config.sync_delay:
        memory = DelayedCosts().memory(memory, mesh.size)
    return with_left_out(memory, work)


def _packed(config: TrainConfig, mesh: Mesh, word: int) -> PackedGradients | None:
    """Return the form of compressed gradients; ``None`` if gradients are sent as they are.

    ``word``: bytes of one value of a gradient.
    """
    if config.compress == "none" or mesh.size == 1:
        return None
    return PackedGradients(CODECS[config.compress], "", word)


def fitted_to_memory(
    config: TrainConfig,
    loaded: LoadedModel,
    device: Device,
    sizing: Sizing,
    windows: Windows,
    order: GlobalOrder,
    sharding: Sharding | None,
) -> tuple[Sizing, list[str]]:
    """Return ``sizing`` with micro-batches that fit this rank's memory, and lines to print.

    The micro-batches fit even if the rank gets whole batches as its share.
    """

    def needs(cut: Sizing) -> int | None:
        largest = Loader(windows, order, cut, 0, (1.0,)).largest()
        return estimated_bytes(config, loaded, largest, device, sharding=sharding)

    longest = int(sizing.padded(windows.work.max(keepdims=True))[0])
    held = held_by(sizing, device.room, longest, needs)
    if held == sizing:
        return sizing, []
    room = format_bytes(device.room)
    return held, [
        f"note: {held.max_tokens:,} tokens at once, not {sizing.max_tokens:,}: each rank here has {room}"
    ]


def held_by(
    sizing: Sizing, room: int, longest: int, needs: Callable[[Sizing], int | None]
) -> Sizing:
    """Return ``sizing`` with micro-batches that fit into ``room`` bytes.

    A micro-batch has at least one row, so the result may still be too large.

    Args:
        longest: tokens of the longest row.
        needs: returns the bytes of a training with a sizing; ``None`` if that is not known.
    """
    while (needed := needs(sizing)) is not None and needed > room and sizing.max_tokens > longest:
        sizing = replace(sizing, max_tokens=max(sizing.max_tokens // 2, longest))
    return sizing


def has_masters(config: TrainConfig, model: Any, accelerator: Accelerator) -> bool:
    """Return True if the optimizer keeps a copy of the weights in float32."""
    return accelerator.kind == "cuda" and config.master_weights and in_half(model)


def _writing_bytes(config: TrainConfig, mesh: Mesh) -> int:
    """Return the bytes that a rank will need later to generate sample texts during training."""
    return WRITING_BYTES if config.sample_prompts and mesh.data_rank == 0 else 0


def in_half(model: Any) -> bool:
    """Return whether the trained weights have two bytes a number."""
    return any(array.dtype.size == 2 for _, array in flatten(model.trainable_parameters()))


def _bytes(tree: Any) -> int:
    return sum(array.nbytes for _, array in flatten(tree))


def require_room_for_weights(path: Path, accelerator: Accelerator, mesh: Mesh) -> None:
    """Refuse a model that is too large to be whole on every rank.

    Raises:
        ModelError: the files of weights alone are larger than a rank's memory.
    """
    hint = (
        "divide the model among computers: with a second one (--hosts) --strategy auto takes --strategy fsdp or "
        "--strategy pipeline; or quantise it"
    )
    if mesh.context > 1:
        hint = "add --strategy fsdp: ranks then divide the arrays of the model, too; or quantise it"
    _require_room(all_bytes(path), Device(accelerator, mesh, 0), str(path), hint)


def require_room_for_shape(
    config: PretrainConfig, tokenizer: LoadedTokenizer, accelerator: Accelerator, mesh: Mesh
) -> None:
    """Refuse a new model of which not even a rank's share of the weights fits into memory.

    Raises:
        ConfigError: the shape's numbers do not match.
        ModelError: the share is larger than a rank's memory.
    """
    needed = num_parameters(shape_of(config, tokenizer)) * (4 if accelerator.kind == "cpu" else 2)
    hint = (
        "choose a smaller --shape, fewer --layers, or less of --dims, --mlp-dims and --vocabulary"
    )
    _require_room(
        needed // mesh.size, Device(accelerator, mesh, 0), f"--shape {config.shape}", hint
    )


def _require_room(needed: int, device: Device, where: str, hint: str) -> None:
    if not device.holds(needed):
        raise ModelError(
            f"the weights are {format_bytes(needed)}, and this process may have {format_bytes(device.room)} of memory",
            code="memory-too-small",
            where=where,
            hint=hint,
        )


def scarce(expected: int, present_bytes: int, ranks: int, room: int = 0) -> str | None:
    """Return a warning if ``ranks`` processes with ``expected`` bytes each need more memory than is
    free, or than they may have.

    Args:
        present_bytes: bytes that each process has now.
        room: bytes that each may have; 0 if unknown.
    """
    missing, available = ranks * (expected - present_bytes), psutil.virtual_memory().available
    each = " each" if ranks > 1 else ""
    if missing > available:
        told = f"{format_bytes(missing)} more than now, but {format_bytes(available)} are free"
    elif 0 < room < expected:
        told = f"but may have {format_bytes(room)}{each}"
    else:
        return None
    return (
        f"this will need about {format_bytes(expected)} of memory{each}, {told}: try --grad-checkpoint, or fewer "
        "--micro-batch-tokens or --num-layers"
    )
