"""How many numbers a training touches, from a model's widths: what is trained, and products and sums of a token."""

from __future__ import annotations

from collections.abc import Collection

from allhands.plan.memory import Blocks, Method

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


def block_weights(blocks: Blocks) -> int:
    """Weights of the matrices of one block."""
    return sum(getattr(blocks, a) * getattr(blocks, b) for a, b in _LINEARS.values())


def all_weights(blocks: Blocks, *, tied: bool) -> int:
    """Weights of all matrices."""
    return blocks.layers * block_weights(blocks) + (1 if tied else 2) * blocks.vocabulary * blocks.dims


def adapter_weights(blocks: Blocks, layers: int, rank: int, keys: Collection[str] | None) -> int:
    """Numbers of LoRA's factors in the last ``layers`` blocks."""
    wanted = [pair for name, pair in _LINEARS.items() if keys is None or name in keys]
    return layers * rank * sum(getattr(blocks, a) + getattr(blocks, b) for a, b in wanted)


def flops_per_token(blocks: Blocks, method: Method, layers: int, *, recomputed: bool) -> float:
    """Products and sums of a token's passes, attention's own left out: 2 a weight forward, as many for each gradient.

    Args:
        layers: blocks through which gradients go back.
    """
    block, head = block_weights(blocks), blocks.vocabulary * blocks.dims
    forward = 2.0 * (blocks.layers * block + head)
    backward = 2.0 * (layers * block + head)
    if method == "full":
        backward *= 2
    return forward + backward + (2.0 * layers * block if recomputed else 0.0)
