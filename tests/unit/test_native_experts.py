"""Mixtures of experts and attention with norms, computed natively: beside MLX's own operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import mixtral, olmo2, qwen3
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear

from allhands.kernels import native, native_experts

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or not a Linux CPU")

D, M, EXPERTS, CHOSEN = 64, 96, 5, 2


def assert_near(one: mx.array, other: mx.array, share: float) -> None:
    expected = np.asarray(other)
    np.testing.assert_allclose(
        np.asarray(one), expected, rtol=0, atol=share * np.abs(expected).max() + 1e-7
    )


def mixture(form: str, activation: Any = None) -> Any:
    """Weights, adapters or both; always the same of one form."""
    mx.random.seed(3)
    more = {} if activation is None else {"activation": activation}
    layer = SwitchGLU(D, M, EXPERTS, **more)
    if form in ("lora", "coded"):
        layer.freeze()
        for name in ("gate_proj", "up_proj", "down_proj"):
            below = layer[name].to_quantized(32, 4) if form == "coded" else layer[name]
            adapter = LoRASwitchLinear.from_base(below, r=3, scale=2.0)
            adapter.lora_b = mx.random.normal(adapter.lora_b.shape)
            setattr(layer, name, adapter)
    elif form == "frozen":
        layer.freeze()
    return layer


def value_and_gradients(
    layer: Any, x: mx.array, indices: mx.array
) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
    towards = mx.random.normal((*indices.shape, D), key=mx.random.key(9))

    def loss(weights: Any, x: mx.array) -> mx.array:
        layer.update(weights)
        return (layer(x, indices) * towards).sum()

    total, (grads, in_x) = mx.value_and_grad(loss, argnums=(0, 1))(layer.trainable_parameters(), x)
    return total, in_x, dict(tree_flatten(grads))


@pytest.mark.parametrize("form", ["trained", "lora", "coded", "frozen"])
@pytest.mark.parametrize("places", [3, 70])  # MLX sorts from 64 on
def test_experts_compute_the_same(form: str, places: int) -> None:
    plain, ours = mixture(form), mixture(form)
    assert native_experts.substitute(ours)
    x = mx.random.normal((1, places, D), key=mx.random.key(4))
    # Nothing goes to the last one: its gradient is zero, not what was in memory.
    indices = mx.random.randint(0, EXPERTS - 1, (1, places, CHOSEN), key=mx.random.key(5))
    expected, found = value_and_gradients(plain, x, indices), value_and_gradients(ours, x, indices)
    assert_near(found[0], expected[0], 1e-5)
    assert_near(found[1], expected[1], 1e-5)
    assert found[2].keys() == expected[2].keys()
    assert bool(found[2]) == (form != "frozen")
    for name, grad in found[2].items():
        assert grad.shape == expected[2][name].shape
        assert_near(grad, expected[2][name], 1e-5)
        assert mx.abs(grad[-1]).max().item() == 0


def test_other_mixtures_are_left_alone() -> None:
    assert not native_experts.substitute(mixture("trained", activation=nn.GELU()))
    assert not native_experts.substitute(SwitchLinear(D, M, EXPERTS))
    x, indices = mx.ones((1, 4, D)), mx.zeros((1, 4, 1), dtype=mx.uint32)
    for changed in (SwitchGLU(D, M, EXPERTS, bias=True), mixture("trained")):
        expected = changed(x, indices)
        assert native_experts.substitute(changed)
        if "bias" not in changed.gate_proj:  # half precision is MLX's own
            changed.set_dtype(mx.bfloat16)
            assert changed(x.astype(mx.bfloat16), indices).dtype == mx.bfloat16
        else:
            assert mx.array_equal(changed(x, indices), expected)


COMMON = {
    **{
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 101,
    },
    **{
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    },
}
MODELS = {
    "mixtral": (mixtral, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # Norms of each head, and of all heads together.
    "qwen3": (qwen3, {"head_dim": 16, "max_position_embeddings": 128}),
    "olmo2": (olmo2, {"head_dim": 16, "max_position_embeddings": 128}),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_computes_the_same(family: str) -> None:
    module, more = MODELS[family]
    tokens = mx.random.randint(0, 101, (2, 40), key=mx.random.key(1))

    def made() -> Any:
        mx.random.seed(7)
        model = module.Model(module.ModelArgs.from_dict({"model_type": family, **COMMON, **more}))
        if family != "mixtral":  # norms of ones would hide a norm that is not there
            for layer in model.layers:
                norms = (layer.self_attn.q_norm, layer.self_attn.k_norm)
                for norm in norms:
                    norm.weight = mx.random.uniform(0.5, 2.0, norm.weight.shape)
        return model

    def loss(model: Any) -> mx.array:
        return nn.losses.cross_entropy(model(tokens), tokens, reduction="mean")

    plain, ours = made(), made()
    native.use_native(ours)
    for layer, other in zip(ours.layers, plain.layers, strict=True):
        assert type(layer.self_attn) is not type(other.self_attn)
    found = [nn.value_and_grad(model, loss)(model) for model in (ours, plain)]
    assert_near(found[0][0], found[1][0], 1e-5)
    for (name, one), (same, other) in zip(
        *(tree_flatten(grads) for _, grads in found), strict=True
    ):
        assert name == same
        assert_near(one, other, 1e-4)
