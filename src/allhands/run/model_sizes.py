"""Counts from a model's widths: weights, bytes of quantised forms, floating-point operations."""

from __future__ import annotations

from collections.abc import Collection

from allhands.run.training_memory import DecoderShape, Method

# Linear layers of a block, as (inputs, outputs) of its widths, by the names that LoRA's keys have.
_LINEARS = {
    "self_attn.q_proj": ("dims", "queries"),
    "self_attn.k_proj": ("dims", "keys"),
    "self_attn.v_proj": ("dims", "keys"),
    "self_attn.o_proj": ("queries", "dims"),
    "mlp.gate_proj": ("dims", "mlp_dims"),
    "mlp.up_proj": ("dims", "mlp_dims"),
    "mlp.down_proj": ("mlp_dims", "dims"),
}


def block_weights(blocks: DecoderShape, mlps: int = 1) -> int:
    """Return the number of weights in the matrices of one block with ``mlps`` MLPs."""
    return sum(
        (mlps if name.startswith("mlp.") else 1) * getattr(blocks, a) * getattr(blocks, b)
        for name, (a, b) in _LINEARS.items()
    )


def all_weights(blocks: DecoderShape, *, tied: bool) -> int:
    """Return the number of weights of all matrices; a ``tied`` embedding is also the head."""
    routers = blocks.layers * blocks.experts * blocks.dims
    rows = (1 if tied else 2) * blocks.vocabulary * blocks.dims
    return blocks.layers * block_weights(blocks, blocks.experts or 1) + routers + rows


def forms_on_cpu(
    blocks: DecoderShape, bits: int, group: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the bytes of quantised weights on a CPU in training, in each of two forms.

    Each form is a pair: bytes of a block, and bytes of a table of tokens. The first form has codes
    of one byte and a dense table. The second is packed, for little memory. Experts are always
    packed.

    Args:
        bits: bits of a quantised weight.
        group: weights with a common scale.
    """
    every, table = block_weights(blocks, blocks.experts or 1), blocks.vocabulary * blocks.dims
    experts = every - block_weights(blocks, 0) if blocks.experts else 0
    # A CPU has the scales and biases of codes and of experts in float32.
    packed, in_float = bits / 8 + 4 / group, (bits / 8 + 8 / group) * experts
    codes = (1 + 8 / group) * (every - experts) + in_float
    return (codes, 4.0 * table), (packed * (every - experts) + in_float, packed * table)


def left_to_adam(blocks: DecoderShape, optimizer: str, trained_bytes: int, word: int) -> int:
    """Return the bytes of weights that muon leaves to adamw: all but the matrices of the blocks.

    0 for other optimizers.

    Args:
        word: bytes of one weight.
    """
    hidden = all_weights(blocks, tied=True) - blocks.vocabulary * blocks.dims
    return max(0, trained_bytes - word * hidden) if optimizer == "muon" else 0


def linears(blocks: DecoderShape) -> list[str]:
    """Return the names of a block's linear layers as in LoRA's keys; a mixture has those of its
    joined experts.
    """
    return [name.replace("mlp.", "switch_mlp.") if blocks.experts else name for name in _LINEARS]


def adapter_weights(
    blocks: DecoderShape, layers: int, rank: int, keys: Collection[str] | None
) -> int:
    """Return the number of weights in LoRA's factors of the last ``layers`` blocks.

    ``keys``: LoRA's keys; ``None``: all linear layers.
    """
    numbers = (
        (blocks.dims + blocks.experts) if blocks.experts and keys is None else 0
    )  # of the router
    for (name, (a, b)), inner in zip(_LINEARS.items(), linears(blocks), strict=True):
        of_mlp = name.startswith("mlp.")
        if keys is None or any(key == name or key.endswith(inner) for key in keys):
            numbers += (blocks.experts or 1 if of_mlp else 1) * (
                getattr(blocks, a) + getattr(blocks, b)
            )
    return layers * rank * numbers


def flops_per_token(
    blocks: DecoderShape, method: Method, layers: int, *, recomputed: bool
) -> float:
    """Return the floating-point operations of one token's forward and backward pass.

    Each weight takes 2 operations forward and 2 for each gradient. Attention's scores are not
    counted.

    Args:
        layers: number of blocks with a backward pass.
        recomputed: whether their forward pass is computed twice.
    """
    block, head = block_weights(blocks, blocks.active or 1), blocks.vocabulary * blocks.dims
    forward = _forward(blocks)
    backward = 2.0 * (layers * block + head)
    if method == "full":
        backward *= 2
    return forward + backward + (2.0 * layers * block if recomputed else 0.0)


def forward_share(blocks: DecoderShape, method: Method, layers: int, *, recomputed: bool) -> float:
    """Return the forward pass's part of :func:`flops_per_token`, from 0 to 1: a validation's
    cost.
    """
    return _forward(blocks) / flops_per_token(blocks, method, layers, recomputed=recomputed)


def _forward(blocks: DecoderShape) -> float:
    return 2.0 * (
        blocks.layers * block_weights(blocks, blocks.active or 1) + blocks.vocabulary * blocks.dims
    )
