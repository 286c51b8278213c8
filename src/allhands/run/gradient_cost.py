"""Cost of a pass of mlx_lm's own model, and the row and blocks that a time limit allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from allhands.model.adapters import count_parameters
from allhands.runtime.accelerator import Accelerator

# Floating-point operations a second of mlx_lm's own model: low guesses.
_RATES = {"cpu": 3e10, "metal": 1e12, "cuda": 1e13}
# A CPU makes quantised weights dense, forward and backward: seconds for each weight.
_DECODE_S = 2e-8
# One 50th of the device's memory is for the activations that mlx_lm's model keeps for its backward
# pass; a 4th, if the check is not bounded.
_ROOM_SHARE = 50
_ROOM_SHARE_UNBOUNDED = 4
_EXACT_SHARE = 0.1  # part of the device's memory for weights and gradient in float32
SHORT_TOKENS = 16
# Only the last places of a row are trained, so that a long row does not need all logits.
TRAINED = 32


@dataclass(frozen=True)
class PassCost:
    """The cost of a pass of mlx_lm's own model.

    Attributes:
        blocks: number of blocks of the model.
        per_block: parameters of a block.
        beside: parameters outside the blocks that a token is multiplied with.
        floats: values for each token and block that the backward pass needs, without attention's
            scores.
        heads: number of query heads, for the scores.
        rate: floating-point operations per second.
        decode_s: seconds to make a parameter dense.
        room: bytes of activations that may be kept.
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
        """Return the cost for ``model``; without ``bounded``, a pass may take more memory."""
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
        """Return True if ``blocks`` blocks in float32 and their gradient fit into memory, too."""
        return 8.0 * (blocks * self.per_block + self.beside) <= _EXACT_SHARE * self.memory

    def affordable(self, tokens: int, seconds: float) -> tuple[int, int]:
        """Return the number of blocks, and of tokens up to ``tokens``, that ``seconds`` allow."""
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
