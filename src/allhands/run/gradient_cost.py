"""Cost of a pass of mlx_lm's own model, and the part of it that fits into the time before a
training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from allhands.model.adapters import count_parameters
from allhands.runtime.accelerator import Accelerator

# Floating-point operations a second of mlx_lm's own model: low guesses.
_RATES = {"cpu": 3e10, "metal": 1e12, "cuda": 1e13}
# A CPU makes quantised weights dense, forward and backward: seconds for each.
_DECODE_S = 2e-8
_ROOM_SHARE = 50  # of the device's memory, for what mlx_lm's model keeps for its backward pass
_ROOM_SHARE_UNBOUNDED = 4
_EXACT_SHARE = 0.1  # of the device's memory, for the same in float32
SHORT_TOKENS = 16
# Only the last places of a row are trained, so that a long row does not need all logits.
TRAINED = 32


@dataclass(frozen=True)
class PassCost:
    """The cost of a pass of mlx_lm's own model.

    Attributes:
        blocks: number of blocks of the model.
        per_block: parameters of a block.
        beside: parameters outside of the blocks that a token is multiplied with.
        floats: numbers for each token and block that the backward pass needs, without attention's
            scores.
        heads: query heads, for the scores.
        rate: floating-point operations per second.
        decode_s: seconds to make a parameter dense.
        room: bytes that may be kept.
        memory: bytes of the device's memory.
    """

    blocks: int
    per_block: float
    beside: float
    floats: float
    heads: int
    rate: float
    decode_s: float
    room: float
    memory: float

    @classmethod
    def of(
        cls, model: Any, config: Mapping[str, Any], accelerator: Accelerator, *, bounded: bool
    ) -> PassCost:
        """Return the cost for ``model``; not ``bounded``: as much memory as there may be."""
        inner = {**config, **(config.get("text_config") or {})}
        width = _integer(inner, ("hidden_size", "n_embd", "d_model", "dim"), 4096)
        layers = list(getattr(model, "layers", ()))
        in_blocks = sum(count_parameters(layer) for layer in layers)
        quantised = any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
        per_block = in_blocks / max(len(layers), 1)
        return cls(
            blocks=max(len(layers), 1),
            per_block=per_block,
            beside=min(
                count_parameters(model) - in_blocks,
                width * _integer(inner, ("vocab_size",), 1 << 17),
            ),
            floats=40.0 * width,
            heads=_integer(inner, ("num_attention_heads", "n_head", "num_heads"), 32),
            rate=_RATES[accelerator.kind],
            decode_s=_DECODE_S if quantised and accelerator.kind == "cpu" else 0.0,
            room=accelerator.memory_bytes / (_ROOM_SHARE if bounded else _ROOM_SHARE_UNBOUNDED),
            memory=accelerator.memory_bytes,
        )

    def fits_exact(self, blocks: int) -> bool:
        """True if there is room for so many blocks in float32 as well, and the gradient of all of
        it.
        """
        return 8.0 * (blocks * self.per_block + self.beside) <= _EXACT_SHARE * self.memory

    def affordable(self, tokens: int, seconds: float) -> tuple[int, int]:
        """Return the number of blocks, and of ``tokens``, that a pass of so many seconds can have."""
        while True:
            trained = min(tokens, TRAINED)
            left = seconds - self.beside * (6.0 * trained / self.rate + self.decode_s)
            operations = 6.0 * self.per_block * tokens + 0.3 * self.floats * tokens**2
            by_time = left / (operations / self.rate + self.per_block * self.decode_s)
            by_room = self.room / (4.0 * tokens * (self.floats + 3.0 * self.heads * tokens))
            blocks = int(min(by_time, by_room, self.blocks))
            if blocks >= 1 or tokens <= SHORT_TOKENS:
                return max(blocks, 1), tokens
            tokens = max(tokens // 2, SHORT_TOKENS)


def _integer(config: Mapping[str, Any], names: Sequence[str], otherwise: int) -> int:
    return next(
        (value for name in names if isinstance(value := config.get(name), int) and value > 0),
        otherwise,
    )
