"""Counts of numbers in a training, from a model's widths: trained weights, products and sums of a
token.
"""

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
    """Weights of the matrices of one block with ``mlps`` times its MLP."""
    return sum(
        (mlps if name.startswith("mlp.") else 1) * getattr(blocks, a) * getattr(blocks, b)
        for name, (a, b) in _LINEARS.items()
    )


def all_weights(blocks: DecoderShape, *, tied: bool) -> int:
    """Weights of all matrices."""
    routers = blocks.layers * blocks.experts * blocks.dims
    rows = (1 if tied else 2) * blocks.vocabulary * blocks.dims
    return blocks.layers * block_weights(blocks, blocks.experts or 1) + routers + rows


def forms_on_cpu(
    blocks: DecoderShape, bits: int, group: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Bytes of the quantised weights of a block, and of a table of tokens, as a CPU holds them in
    training.

    First as codes of one byte beside a dense table, then packed, as where memory is short; experts
    always are.
    """
    every, table = block_weights(blocks, blocks.experts or 1), blocks.vocabulary * blocks.dims
    experts = every - block_weights(blocks, 0) if blocks.experts else 0
    # A CPU has the scales and biases of codes and of experts in float32.
    packed, in_float = bits / 8 + 4 / group, (bits / 8 + 8 / group) * experts
    codes = (1 + 8 / group) * (every - experts) + in_float
    return (codes, 4.0 * table), (packed * (every - experts) + in_float, packed * table)


def left_to_adam(blocks: DecoderShape, optimizer: str, trained_bytes: int, word: int) -> int:
    """Bytes of a new model's weights that muon leaves to adamw: all but the matrices of the blocks.

    Args:
        word: bytes of a number.
    """
    hidden = all_weights(blocks, tied=True) - blocks.vocabulary * blocks.dims
    return max(0, trained_bytes - word * hidden) if optimizer == "muon" else 0


def linears(blocks: DecoderShape) -> list[str]:
    """Return the linear layers of a block by the names that a key of LoRA has; of a mixture those
    of all experts.
    """
    return [name.replace("mlp.", "switch_mlp.") if blocks.experts else name for name in _LINEARS]


def adapter_weights(
    blocks: DecoderShape, layers: int, rank: int, keys: Collection[str] | None
) -> int:
    """Numbers of LoRA's factors in the last ``layers`` blocks."""
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
    """Products and sums of a token's passes, attention's own left out: 2 a weight forward, as many
    for each gradient.

    Args:
        layers: blocks through which gradients go back.
    """
    block, head = block_weights(blocks, blocks.active or 1), blocks.vocabulary * blocks.dims
    forward = _forward(blocks)
    backward = 2.0 * (layers * block + head)
    if method == "full":
        backward *= 2
    return forward + backward + (2.0 * layers * block if recomputed else 0.0)


def forward_share(blocks: DecoderShape, method: Method, layers: int, *, recomputed: bool) -> float:
    """Return the part of :func:`flops_per_token` that a validation has, too."""
    return _forward(blocks) / flops_per_token(blocks, method, layers, recomputed=recomputed)


def _forward(blocks: DecoderShape) -> float:
    return 2.0 * (
        blocks.layers * block_weights(blocks, blocks.active or 1) + blocks.vocabulary * blocks.dims
    )
