"""Which models are parted into body and head, and that both ways give the loss of their logits."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from allhands.model.split import split
from allhands.objectives.causal_lm import make_loss
from allhands.parallel.gradient import make_gradient

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 101,
    "rope_theta": 10000.0,
}
GRANITE = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 1.0,
    "max_position_embeddings": 99,
}
GRANITE |= {"attention_bias": False, "mlp_bias": False}
ODD: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8},  # logits capped by tanh at 30
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.0625},
    "granite": {**GRANITE, "logits_scaling": 8.0, "tie_word_embeddings": True},
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False, "max_position_embeddings": 99},
    "gemma": {"head_dim": 8},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": False, "max_position_embeddings": 99},
}


def build(kind: str, more: dict[str, Any], seed: int = 0) -> Any:
    """A tiny random model of one of mlx_lm's architectures."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({**SIZES, **more, "model_type": kind}))
    mx.eval(model.parameters())
    return model


def llama(*, tied: bool, bits: int | None = None) -> Any:
    model = build("llama", {"tie_word_embeddings": tied})
    if bits is not None:
        nn.quantize(model, 32, bits)
    return model


def task(seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs (3, 12), places of 17 trained tokens, and the tokens."""
    random = np.random.default_rng(seed)
    positions = np.sort(random.choice(36, 17, replace=False)).astype(np.int32)
    return (
        mx.array(random.integers(0, 101, (3, 12)).astype(np.int32)),
        mx.array(positions),
        mx.array(random.integers(0, 101, 17).astype(np.int32)),
    )


def reference(model: Any, inputs: mx.array, positions: mx.array, targets: mx.array) -> float:
    """Summed cross-entropy in float64, from the model's own logits."""
    rows = np.array(model(inputs).astype(mx.float32), dtype=np.float64).reshape(-1, 101)[
        np.array(positions)
    ]
    top = rows.max(axis=1, keepdims=True)
    normaliser = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
    return float((normaliser - rows[np.arange(len(rows)), np.array(targets)]).sum())


MODELS = {
    "tied": lambda: llama(tied=True),
    "untied": lambda: llama(tied=False),
    "tied, 4 bits": lambda: llama(tied=True, bits=4),
    "untied, 8 bits": lambda: llama(tied=False, bits=8),
    **{kind: (lambda kind=kind, more=more: build(kind, more)) for kind, more in PLAIN.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_plain_heads_are_accepted_and_reproduce_the_logits(name: str) -> None:
    model = MODELS[name]()
    parts = split(model)
    assert parts is not None
    inputs, _, _ = task()
    logits = np.array(model(inputs))
    ours = np.array(parts.body(inputs) @ parts.head_weight().T)
    assert np.abs(ours - logits).max() <= 1e-5 * np.abs(logits).max()
    assert parts.head_weight().shape == (101, 32)
    assert parts.head is (model.model.embed_tokens if "lm_head" not in model else model.lm_head)
    expected = "lm_head.weight" if "lm_head" in model else "model.embed_tokens.weight"
    assert parts.head_weight_name(model) == expected


def test_whether_the_head_is_trained_follows_freezing() -> None:
    model = llama(tied=False)
    parts = split(model)
    assert parts is not None
    assert parts.head_is_trained
    model.freeze()
    assert not parts.head_is_trained


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_scaled_and_capped_logits_are_refused_however_small_they_are(
    kind: str, scale: float
) -> None:
    model = build(kind, ODD[kind])
    # A cap is hardly seen in small logits, but training makes them grow.
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * scale
    assert split(model) is None


class BiasedHead(nn.Module):
    """Logits with a bias of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama(tied=True).model
        self.lm_head = nn.Linear(32, 101, bias=True)

    def __call__(self, inputs: mx.array) -> mx.array:
        return self.lm_head(self.model(inputs))


def test_a_biased_or_adapted_head_is_refused() -> None:
    assert split(BiasedHead()) is None
    model = llama(tied=False)
    model.lm_head = importlib.import_module("mlx_lm.tuner.lora").LoRALinear.from_base(model.lm_head)
    assert split(model) is None


class OfTheirOwn(type(llama(tied=False))):
    """Somebody's own class: it may make its logits in any way."""


def test_a_class_that_is_not_listed_is_refused() -> None:
    model = llama(tied=False)
    model.__class__ = OfTheirOwn
    assert split(model) is None


def test_a_head_that_is_a_bare_array_is_refused() -> None:
    model = llama(tied=False)
    model.lm_head = model.lm_head.weight
    assert split(model) is None


@pytest.mark.parametrize("cpu_native", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("name", [*MODELS, *ODD])
def test_the_loss_is_that_of_the_logits_in_both_forms(name: str, cpu_native: bool) -> None:
    model = MODELS[name]() if name in MODELS and name not in ODD else build(name, ODD[name])
    loss = make_loss(model, cpu_native=cpu_native, with_grad=False)(*task())
    assert loss.item() == pytest.approx(reference(model, *task()), rel=2e-6)


@pytest.mark.parametrize("cpu_native", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("name", ["untied", "cohere"])
def test_padded_places_count_nothing_in_loss_and_gradient(name: str, cpu_native: bool) -> None:
    model = MODELS[name]() if name in MODELS else build(name, ODD[name])
    inputs, positions, targets = task()
    places = mx.concatenate([positions, mx.zeros((5,), dtype=mx.int32)])
    padded = mx.concatenate([targets, mx.full((5,), -1, dtype=mx.int32)])
    gradient = (
        make_gradient(model, cpu_native=True)
        if cpu_native
        else nn.value_and_grad(model, make_loss(model, cpu_native=False))
    )
    value, grads = gradient(inputs, places, padded)
    expected, wanted = gradient(inputs, positions, targets)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    for (key, ours), (_, theirs) in zip(tree_flatten(grads), tree_flatten(wanted), strict=True):
        assert float(mx.abs(ours - theirs).max()) <= 1e-5 * float(mx.abs(theirs).max()) + 1e-7, key


@pytest.mark.parametrize("cpu_native", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("name", ["tied", "untied", "gemma2", "cohere"])
def test_gradients_are_those_of_the_plain_loss(name: str, cpu_native: bool) -> None:
    def model() -> Any:
        made = MODELS[name]() if name in MODELS else build(name, ODD[name])
        made.freeze()
        linear_to_lora_layers(made, 2, {"rank": 2, "scale": 2.0, "dropout": 0.0})
        # lora_b begins at zero, where lora_a has no gradient.
        made.apply_to_modules(
            lambda _, m: m.update({"lora_b": m.lora_b + 0.1}) if "lora_b" in m else None
        )
        return made

    def plain(made: Any, inputs: mx.array, positions: mx.array, targets: mx.array) -> mx.array:
        rows = made(inputs).reshape(-1, 101)[positions]
        return nn.losses.cross_entropy(rows, targets, reduction="sum")

    mx.random.seed(1)
    one = model()
    mx.random.seed(1)
    other = model()
    # The lazy form as it is compiled for a GPU, without the minutes that a C++ compiler takes here.
    gradient = (
        make_gradient(one, cpu_native=True)
        if cpu_native
        else nn.value_and_grad(one, make_loss(one, cpu_native=False))
    )
    value, grads = gradient(*task())
    expected, wanted = nn.value_and_grad(other, plain)(other, *task())
    assert value.item() == pytest.approx(expected.item(), rel=2e-6)
    flat, wanted_flat = dict(tree_flatten(grads)), dict(tree_flatten(wanted))
    assert flat.keys() == wanted_flat.keys()
    assert any("lora_a" in key for key in flat)
    for key, array in wanted_flat.items():
        scale = max(float(mx.abs(array).max()), 1e-3)
        assert float(mx.abs(flat[key] - array).max()) <= 2e-4 * scale, key
