"""Architectures whose rows may be divided over ranks by token positions.

A rank computes pieces of rows as if they were whole rows; keys and values of other positions come
through the cache of :mod:`allhands.kernels.context`. So a block may mix positions in attention
only, and only with the keys and values of that cache. Rows are divided only for architectures that
have been compared with mlx_lm's own model in one process: :data:`CAN_DIVIDE_ROWS`.
"""

from __future__ import annotations

import mlx.nn as nn

from allhands.errors import ModelError
from allhands.kernels.known import follows_length, sees_ahead
from allhands.model.stages import kind_of

# Names of modules in mlx_lm.models; `tests/parity/test_context.py` compares all of them.
CAN_DIVIDE_ROWS = frozenset(
    """
    Klear afmoe apertus bailing_moe cohere cohere2 deepseek deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone
    exaone4 exaone_moe gemma gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_oss granite granitemoe
    helium hunyuan_v1_dense internlm2 llama mellum mimo minicpm mixtral nemotron olmo2 olmo3 olmoe phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
    """.split()  # noqa: SIM905
)


def check_rows(model: nn.Module) -> None:
    """Refuse an architecture whose rows cannot be divided.

    Raises:
        ModelError: the architecture is not in :data:`CAN_DIVIDE_ROWS`, its rotary angles follow the
            length of a row, or a token sees later ones.
    """
    kind = kind_of(model)
    if kind in CAN_DIVIDE_ROWS and not follows_length(model) and sees_ahead(model) is None:
        return
    raise ModelError(
        f"rows of models of the kind {kind}, or with such rotations, cannot be divided by token positions",
        code="model-not-divisible",
        where="--cp",
        hint=f"leave it out, or take a model of one of these kinds: {', '.join(sorted(CAN_DIVIDE_ROWS))}",
    )
