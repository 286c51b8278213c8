"""How much memory this rank is going to need, by :mod:`allhands.run.training_memory`, from what is loaded."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import psutil

from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.distributed.codecs import CODECS
from allhands.distributed.mesh import Mesh
from allhands.io.formatting import format_bytes
from allhands.io.trees import flatten
from allhands.kernels import native
from allhands.model.load import LoadedModel
from allhands.parallel.costs import LocalCosts, Memory, PackedGradients, with_left_out
from allhands.parallel.rounds import rounds_of
from allhands.run.model_sizes import left_to_adam
from allhands.run.training_memory import WRITING_BYTES, Work, blocks_of, of_process, on_cpu, on_gpu
from allhands.runtime.accelerator import Accelerator


def expected_bytes(
    config: TrainConfig,
    loaded: LoadedModel,
    largest: tuple[int, int],
    mesh: Mesh,
    accelerator: Accelerator,
    present_bytes: int,
) -> int | None:
    """The process's peak in training; ``None`` where that is not known: on Macs, and for other kinds of models.

    On an NVIDIA GPU it is what the rank needs of MLX's memory there.

    Args:
        largest: as :meth:`allhands.data.loader.Loader.largest` has it.
        present_bytes: resident, now that everything is loaded and the optimizer has made nothing yet.
    """
    native_way = accelerator.runs_natively(config.compile) and native.available()
    blocks = blocks_of(loaded.config) if native_way or accelerator.kind == "cuda" else None
    tokens, cuts = largest
    if blocks is None or not tokens:
        return None
    model: Any = loaded.model
    trained, word = _bytes(model.trainable_parameters()), 2 if _in_half(model) else 4
    work = Work(
        method=config.fine_tune_type,
        tokens=tokens,
        trained_layers=blocks.layers - len(native.before_training(model)),
        weights_bytes=_bytes(model.parameters()),
        trained_bytes=trained,
        by_adam_bytes=left_to_adam(blocks, config.optimizer, trained, word) if pretraining(config) else 0,
        optimizer=config.optimizer,
        recomputed=config.grad_checkpoint,
        accumulated=cuts > 1 or config.grad_accumulation_steps > 1,
        masters=accelerator.kind == "cuda" and config.master_weights and _in_half(model),
        packed=_packed(config, mesh, word),
    )
    if accelerator.kind == "cuda":
        return _of_rank(on_gpu(blocks, work), work, config, mesh).arrays
    later = WRITING_BYTES if config.sample_prompts and mesh.data_rank == 0 else 0
    memory = _of_rank(on_cpu(blocks, work), work, config, mesh)
    return later + of_process(memory, present_bytes - mx.get_cache_memory(), mx.get_active_memory())


def _of_rank(memory: Memory, work: Work, config: TrainConfig, mesh: Mesh) -> Memory:
    """With what a rank keeps for the exchange, from one to the next."""
    if config.sync_every > 1:
        memory = LocalCosts(rounds_of(config)).memory(memory, mesh.size)
    return with_left_out(memory, work)


def _packed(config: TrainConfig, mesh: Mesh, word: int) -> PackedGradients | None:
    """How gradients of so many bytes a number travel, if not as they are."""
    if config.compress == "none" or mesh.size == 1:
        return None
    return PackedGradients(CODECS[config.compress], "", word)


def _in_half(model: Any) -> bool:
    """Whether what is trained has two bytes a number."""
    return any(array.dtype.size == 2 for _, array in flatten(model.trainable_parameters()))


def _bytes(tree: Any) -> int:
    return sum(array.nbytes for _, array in flatten(tree))


def scarce(expected: int, present_bytes: int, ranks: int) -> str | None:
    """What a person should know where ``ranks`` such processes of this computer need more than it has left."""
    missing, available = ranks * (expected - present_bytes), psutil.virtual_memory().available
    if missing <= available:
        return None
    each = " each" if ranks > 1 else ""
    return (
        f"this will need about {format_bytes(expected)} of memory{each}, {format_bytes(missing)} more than now, but "
        f"{format_bytes(available)} are free: try --grad-checkpoint, or fewer --micro-batch-tokens or --num-layers"
    )
