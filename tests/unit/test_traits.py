"""Modules are alike only where they compute the same with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Attention, ModelArgs
from mlx_lm.models.rope_utils import Llama3RoPE

from allhands.model.traits import traits_of

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 9}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "model_type": "llama"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def attention() -> Any:
    return Attention(ModelArgs.from_dict(SIZES))


def scaled(factor: float) -> Any:
    found = attention()
    settings = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found.rope = Llama3RoPE(8, scaling_config=settings | {"original_max_position_embeddings": 64})
    return found


def test_layers_of_one_kind_are_alike_whatever_their_weights_and_mode() -> None:
    one, other = attention(), attention()
    assert not mx.array_equal(one.q_proj.weight, other.q_proj.weight)
    other.eval()
    other.q_proj.freeze()
    assert traits_of(one) == traits_of(other)
    assert hash(traits_of(one)) == hash(traits_of(other))
    assert traits_of(scaled(8.0)) == traits_of(scaled(8.0))


def change(name: str, value: Any) -> Callable[[Any], None]:
    """Set ``name``, which may be one of a child."""

    def apply(module: Any) -> None:
        *path, last = name.split(".")
        for part in path:
            module = module[part]
        setattr(module, last, value)

    return apply


@pytest.mark.parametrize(
    "differ",
    [
        change("scale", 0.5),
        change("n_kv_heads", 4),
        change("n_kv_heads", 2.0),  # equal, but of another type
        change("rope.base", 500.0),
        change("rope", nn.ALiBi()),
        change("_slopes", mx.ones((4,))),
        change("q_proj.weight", mx.zeros((16, 32))),
        change("q_proj.weight", mx.zeros((32, 32), dtype=mx.bfloat16)),
        change("q_proj", nn.Linear(32, 32, bias=True)),
        change("window", [4]),
        change("act", lambda x: x),
        lambda module: setattr(module, "__class__", type("Attention", (Attention,), {})),
    ],
)
def test_whatever_else_differs_counts(differ: Callable[[Any], None]) -> None:
    one, other = attention(), attention()
    differ(other)
    assert traits_of(one) != traits_of(other)


def test_buffers_count_by_their_values_and_lists_by_what_is_in_them() -> None:
    assert traits_of(scaled(8.0)) != traits_of(scaled(4.0))
    one, other = attention(), attention()
    one.blocks, other.blocks = [nn.RMSNorm(8, eps=1e-5)], [nn.RMSNorm(8, eps=1e-6)]
    assert traits_of(one) != traits_of(other)
    other.blocks = [nn.RMSNorm(8, eps=1e-5)]
    assert traits_of(one) == traits_of(other)


def test_opaque_children_count_by_class_and_shapes() -> None:
    one, other = attention(), attention()
    one.q_proj.helper, other.q_proj.helper = object(), object()
    assert traits_of(one) != traits_of(other)
    assert traits_of(one, PROJECTIONS) == traits_of(other, PROJECTIONS)
    other.q_proj = nn.Linear(32, 16, bias=False)
    assert traits_of(one, PROJECTIONS) != traits_of(other, PROJECTIONS)
