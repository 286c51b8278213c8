"""Peak memory of a training, estimated before it begins.

A step's peak is the highest of three peaks:

- in the backward pass: activations kept by the forward pass, a block's own intermediate results,
  and the gradients;
- in the loss: the kept activations, and the logits of a chunk;
- in the update: the gradients, and new values beside the old.

Activations are counted in values for each token and block, as multiples of the widths of a block.
The multiples were measured: ``tests/parity/test_expected_memory.py`` compares them with real runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allhands.kernels.known import attends_padded
from allhands.kernels.selection import TILE
from allhands.model.reading import module_of
from allhands.parallel.costs import Memory, Method, Work

# Bytes that a back-end takes in a process from the beginning. The ring: 8 MiB, twice for each of
# two neighbours. MPI: its libraries, and memory that the processes of a computer share.
BACKEND_BYTES = {"ring": 34_000_000, "mpi": 12_000_000}
# Most bytes of unused buffers that MLX keeps on a CPU (allhands.runtime.accelerator); it keeps as
# many if rows have many lengths.
KEPT_BYTES = 67_000_000
WRITING_BYTES = (
    60_000_000  # bytes of buffers of all sizes that MLX keeps after the model has written samples
)
_FLOAT = 4  # bytes of a value: a CPU computes in float32
_HALF = 2
_LENGTHS = 16  # most lengths of rows for which buffers of a block are kept
_CHUNK_ROWS = 256  # rows of a chunk of the loss
_LOGITS = 512 << 20  # bytes of logits at once on a GPU
# Values for each token and each number of an MLP's width in arrays that MLX frees only after some
# further operations (allhands.runtime.jit_cache: FREED_AFTER).
_LAUNCHED = 14.1
# Bytes for each score of attention, where MLX computes its gradient by a matrix of scores.
_SCORE_BYTES = 4
_ONE_ARRAY = (
    1 << 28
)  # most trained numbers in one flat array on a GPU, as in allhands.kernels.fused.flat_params
# Values for each trained weight that an optimizer keeps.
_STATES = {"adam": 2, "adamw": 2, "muon": 1, "sgd": 1, "lion": 1, "adafactor": 0}
# Values for each trained weight in the update: the gradient, and a part of the new values.
_UPDATE, _UPDATE_OF_MUON = 1.25, 1.5
_HEADS = 2.95  # copies of the embedding's gradient in the update of a full training
# Keys of configurations for the number of experts. All blocks are alike if no key of _UNEVEN is
# set.
_EXPERTS = ("num_local_experts", "num_experts")
_UNEVEN = (
    "n_routed_experts",
    "mlp_only_layers",
    "first_k_dense_replace",
    "shared_expert_intermediate_size",
)


@dataclass(frozen=True)
class DecoderShape:
    """Widths of a decoder with equal blocks, each of attention and a gated MLP or several experts.

    Attributes:
        layers: number of blocks.
        dims: width of the hidden states.
        mlp_dims: width of the MLP, or of one expert.
        queries: number of query heads times their width.
        keys: the same for the keys, and for the values.
        vocabulary: number of rows of the embedding.
        experts: number of experts of a block; 0 if it has one MLP.
        active: number of experts that compute a token; 0 if there are none.
        heads: number of query heads; 0 if unknown.
        padded: True if a GPU pads rows for attention (:mod:`allhands.kernels.fused.ops`), which
            then needs no matrix of scores.
    """

    layers: int
    dims: int
    mlp_dims: int
    queries: int
    keys: int
    vocabulary: int
    experts: int = 0
    active: int = 0
    heads: int = 0
    padded: bool = False


def blocks_of(config: Mapping[str, Any]) -> DecoderShape | None:
    """Return the widths in a model's ``config.json``; ``None`` for models of another structure."""
    if any(config.get(name) for name in _UNEVEN) or int(config.get("decoder_sparse_step") or 1) > 1:
        return None
    try:
        experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
        active = int(config["num_experts_per_tok"]) if experts else 0
        heads, dims = int(config["num_attention_heads"]), int(config["hidden_size"])
        width = int(config.get("head_dim") or dims // heads)
        key_heads = int(config.get("num_key_value_heads") or heads)
        inner = config.get("moe_intermediate_size") if experts else None
        layers, vocabulary = int(config["num_hidden_layers"]), int(config["vocab_size"])
        mlp_dims = int(inner or config["intermediate_size"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    widths = heads * width, key_heads * width
    padded = attends_padded(module_of(str(config.get("model_type"))), width)
    return DecoderShape(layers, dims, mlp_dims, *widths, vocabulary, experts, active, heads, padded)


def on_cpu(blocks: DecoderShape, work: Work) -> Memory:
    """Estimate the memory of a step on a Linux CPU with the native operations, in float32."""
    values = work.tokens * _FLOAT
    kept, passing = _of_a_block(blocks, work.method)
    layers = work.trained_layers
    if work.recomputed:
        each = blocks.dims + (
            3.3 * blocks.dims + 0.2 * blocks.active * blocks.mlp_dims if blocks.experts else 0.0
        )
        forward, held = layers * blocks.dims, work.alive * layers * each + kept + passing
    else:
        forward, held = layers * _before_backward(kept), work.alive * layers * kept + passing
    gradients = _gradients(blocks, work)
    states = _STATES.get(work.optimizer, 2)
    logits = blocks.vocabulary * _FLOAT if work.has_head else 0
    chunk = min(_CHUNK_ROWS, work.tokens) * logits
    update = int((_UPDATE_OF_MUON if work.optimizer == "muon" else _UPDATE) * work.trained_bytes)
    others = min(work.lengths, _LENGTHS) - 1
    head = 0
    if work.method == "full" and layers == blocks.layers:
        # The embedding's gradient, as input and as head, before they are one.
        head = blocks.vocabulary * blocks.dims * _FLOAT
        update = max(update, work.trained_bytes + int(_HEADS * head))
    return Memory(
        weights=work.weights_bytes,
        optimizer=states * work.trained_bytes + work.by_adam_bytes,
        backward=int(values * held) + gradients,
        loss=int(values * forward) + chunk,
        update=update,
        trained=work.trained_bytes,
        activations=int(values * held),
        logits=chunk,
        beside=int(1.2 * chunk + 0.5 * head),
        # Buffers of logits are counted in `beside` already.
        buffers=max(0, int(min(KEPT_BYTES, others * values * kept) - 1.2 * chunk)),
    )


def on_gpu(blocks: DecoderShape, work: Work) -> Memory:
    """Estimate the memory of a step on a GPU with nothing queued ahead, in half precision.

    The multiples were measured on an H200 (``benchmarks/results/plan_gpu-*.md``), those for experts
    with one model, a mixture with 693 million weights. SwiGLU's output is computed again. In full
    training the loss has all logits at once, otherwise at most four times
    :data:`_LOGITS` bytes. Arrays of the loss and of finished operations do not exist together.
    """
    values = work.tokens * _HALF
    kept = (
        7.7 * blocks.dims
        + 2.0 * blocks.mlp_dims
        + (0.0 if work.method == "full" else 2.1 * blocks.dims)
    )
    if blocks.experts:
        kept = _dot(_mixed(blocks), (7.4, 4.3, 2.3, 2.1))
    layers = work.trained_layers
    held = (
        work.alive * layers * blocks.dims + kept if work.recomputed else work.alive * layers * kept
    )
    gradients = work.trained_bytes * (2 if work.accumulated else 1)
    logits = work.tokens * blocks.vocabulary * _HALF if work.has_head else 0
    if work.method != "full":
        logits = 4 * min(_LOGITS, logits)
    launched = int(_LAUNCHED * max(1, blocks.active) * blocks.mlp_dims * values)
    without_scores = not work.with_scores and (blocks.padded or work.row_tokens % TILE == 0)
    scores = 0 if without_scores else blocks.heads * work.tokens * work.row_tokens * _SCORE_BYTES
    passing = max(logits, launched + scores)
    states = _STATES.get(work.optimizer, 2) * work.trained_bytes + work.by_adam_bytes
    if work.masters:  # copies and states in float32
        states = 2 * (states + work.trained_bytes)
    # Numbers that are updated at once exist twice: all of them, or, in a large model, one flat
    # array.
    numbers = max(1, work.trained_bytes // _HALF)
    if numbers > _ONE_ARRAY:
        numbers = max(blocks.vocabulary * blocks.dims, _ONE_ARRAY // 2)
    renewed = int(
        min(1.0, numbers * _HALF / max(1, work.trained_bytes)) * (work.trained_bytes + states)
    )
    return Memory(
        weights=work.weights_bytes,
        optimizer=states,
        backward=int(values * held) + gradients + passing,
        loss=int(values * held) + logits,
        update=gradients + renewed,
        renewed=renewed,
        trained=work.trained_bytes,
        activations=int(values * held),
        logits=logits,
    )


def _of_a_block(blocks: DecoderShape, method: Method) -> tuple[float, float]:
    """Return the values for a token that a block keeps, and those that exist only in its backward
    pass.
    """
    parts = (blocks.dims, blocks.mlp_dims, blocks.queries, blocks.keys)
    if method == "dora":  # computed by MLX's own operations, which keep every result
        return _dot(parts, (28.0, 17.8, 10.1, 15.4)), 0.0
    if blocks.experts:
        mixed = _mixed(blocks)
        if method == "full":
            return _dot(mixed, (8.4, 0.4, 3.2, 2.6)), _dot(mixed, (6.0, 4.5, 0.0, 0.0))
        return _dot(mixed, (9.0, 1.0, 3.0, 2.6)), _dot(mixed, (3.0, 5.0, 0.0, 0.0))
    return _dot(parts, (10.0, 3.0, 2.0, 2.0)), _dot(parts, (2.4, 3.0, 0.0, 0.0))


def _mixed(blocks: DecoderShape) -> tuple[int, ...]:
    """Return the widths of a block with experts for one token; active experts count one by one."""
    return blocks.dims, blocks.active * blocks.mlp_dims, blocks.active * blocks.dims, blocks.keys


def _gradients(blocks: DecoderShape, work: Work) -> int:
    """Return the bytes of gradients in the backward pass."""
    # Experts' gradients are copied once.
    share = 1.4 if blocks.experts and work.method == "full" else 1.0
    return int(share * work.trained_bytes) + (work.trained_bytes if work.accumulated else 0)


def _before_backward(kept: float) -> float:
    """Return the part of a block's kept values that exists when the loss is computed; the rest
    comes in the backward pass.
    """
    return 0.84 * kept


def _dot(sizes: tuple[int, ...], factors: tuple[float, ...]) -> float:
    return sum(size * factor for size, factor in zip(sizes, factors, strict=True))


def of_process(memory: Memory, present_bytes: int, present_arrays: int) -> int:
    """Return the peak memory of a CPU process with the whole model, in bytes.

    Args:
        present_bytes: bytes that the process has in memory now.
        present_arrays: bytes of arrays among them.
    """
    new = memory.arrays - present_arrays
    # Memory for the matrix products, and pages that the allocator keeps between sizes; few if
    # arrays are small.
    more = min(16e6 + 0.05 * new, 5e6 + 0.2 * new)
    return int(present_bytes + new + more + memory.beside)
