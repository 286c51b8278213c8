"""The vectorised SwiGLU against float64 numpy, and which models it is put into."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from numpy.typing import NDArray
from test_split import build, llama

from allhands.kernels.fastmath import sigmoid, swiglu, use_fast_mlp

Float64 = NDArray[np.float64]


def exact_sigmoid(x: Float64) -> Float64:
    return 1.0 / (1.0 + np.exp(-x))


def points(seed: int = 0) -> NDArray[np.float32]:
    """Where it matters: a fine grid over the range, far ends, tiny values, and zero."""
    grid = np.linspace(-30, 30, 60001)
    ends = np.array(
        [0.0, -0.0, 1e-20, -1e-20, 17.99, 18.01, -17.99, -18.01, 88.0, -88.0, 1e4, -1e4]
    )
    return np.concatenate([grid, ends, np.random.default_rng(seed).normal(0, 3, 5000)]).astype(
        np.float32
    )


def test_sigmoid_is_within_its_stated_error() -> None:
    x = points()
    actual = np.array(sigmoid(mx.array(x)), dtype=np.float64)
    assert np.abs(actual - exact_sigmoid(np.clip(x.astype(np.float64), -700, 700))).max() < 2e-7
    assert actual.min() >= -1e-7
    assert actual.max() <= 1.0 + 1e-7


def test_swiglu_has_the_value_of_silu_times_up() -> None:
    gate, up = points(1), np.random.default_rng(2).normal(0, 2, points(1).size).astype(np.float32)
    actual = np.array(swiglu(mx.array(gate), mx.array(up)), dtype=np.float64)
    wide = np.clip(gate.astype(np.float64), -700, 700)
    expected = wide * exact_sigmoid(wide) * up
    # gate x 2e-7 x up, and a few roundings of the product itself.
    assert (
        np.abs(actual - expected) <= 3e-7 * np.abs(gate * up) + 3e-7 * np.abs(expected) + 1e-12
    )[np.abs(gate) < 50].all()
    # Where the logistic function is 0 or 1 to float32, so must it be here.
    assert np.array(
        swiglu(mx.array([100.0, -100.0]), mx.array([2.0, 2.0]))
    ).tolist() == pytest.approx([200.0, 0.0], abs=1e-5)


def test_swiglu_has_the_gradient_of_silu_times_up() -> None:
    random = np.random.default_rng(3)
    gate, up, weight = (random.normal(0, 4, (64, 33)).astype(np.float32) for _ in range(3))

    def weighted(a: mx.array, b: mx.array) -> mx.array:
        return (swiglu(a, b) * mx.array(weight)).sum()

    grad_gate, grad_up = (
        np.array(g) for g in mx.grad(weighted, argnums=(0, 1))(mx.array(gate), mx.array(up))
    )
    g, u, w = (array.astype(np.float64) for array in (gate, up, weight))
    s = exact_sigmoid(g)
    # d/dg [g s(g)] = s + g s (1 - s)
    # The error of s, 2e-7, as it goes into either product, and a few roundings.
    assert (
        np.abs(grad_gate - w * u * (s + g * s * (1 - s)))
        <= 4e-7 * np.abs(w * u) * (1 + np.abs(g)) + 1e-6
    ).all()
    assert (np.abs(grad_up - w * g * s) <= 4e-7 * np.abs(w * g) + 1e-6).all()


def test_the_gradient_agrees_with_finite_differences() -> None:
    gate, step = np.linspace(-8, 8, 97), 1e-4
    s_plus, s_minus = ((gate + d) * exact_sigmoid(gate + d) for d in (step, -step))
    numeric = (s_plus - s_minus) / (2 * step)
    analytic = np.array(
        mx.grad(lambda x: swiglu(x, mx.ones_like(x)).sum())(mx.array(gate.astype(np.float32)))
    )
    assert np.abs(analytic - numeric).max() < 1e-5


def logits(model: Any) -> NDArray[np.float32]:
    return np.array(model(mx.array([[1, 5, 9, 30, 77, 2, 100]])))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_swiglu_models_are_changed_and_compute_the_same(kind: str) -> None:
    more = {"tie_word_embeddings": True, "max_position_embeddings": 99}
    model, untouched = build(kind, more), build(kind, more)
    names = [name for name, _ in tree_flatten(model.parameters())]
    before = logits(model)
    assert use_fast_mlp(model) == 2
    assert np.abs(logits(model) - before).max() <= 1e-5 * np.abs(before).max()
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    # The class that both models share is as it was: only the instances changed.
    assert type(untouched.layers[0].mlp) is not type(model.layers[0].mlp)
    assert isinstance(model.layers[0].mlp, type(untouched.layers[0].mlp))
    assert (logits(untouched) == before).all()
    # Once is enough.
    assert use_fast_mlp(model) == 0


@pytest.mark.parametrize("kind", ["gemma", "gemma2"])
def test_gelu_models_are_left_alone(kind: str) -> None:
    model = build(kind, {"head_dim": 8})
    kinds = [type(module) for _, module in model.named_modules()]
    assert use_fast_mlp(model) == 0
    assert [type(module) for _, module in model.named_modules()] == kinds


class ClippedMlp(nn.Module):
    """SwiGLU whose gate may not exceed 7, as some mixture-of-experts models have it: invisible on
    small inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 16, bias=False)
        self.up_proj = nn.Linear(8, 16, bias=False)
        self.down_proj = nn.Linear(16, 8, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.minimum(self.gate_proj(x), 7.0), mx.clip(self.up_proj(x), -7.0, 7.0)
        return self.down_proj(nn.silu(gate) * up)


class ScaledMlp(ClippedMlp):
    """SwiGLU with a factor on its output."""

    def __call__(self, x: mx.array) -> mx.array:
        return 1.01 * self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("kind", [ClippedMlp, ScaledMlp])
def test_variants_of_swiglu_are_left_alone(kind: type[ClippedMlp]) -> None:
    model = nn.Sequential(kind())
    assert use_fast_mlp(model) == 0
    assert type(model.layers[0]) is kind


def test_adapters_in_the_projections_keep_their_part_and_their_gradients() -> None:
    def adapted() -> Any:
        mx.random.seed(4)
        model = llama(tied=True)
        model.freeze()
        keys = ["mlp.gate_proj", "mlp.down_proj"]
        linear_to_lora_layers(model, 2, {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": keys})
        model.apply_to_modules(
            lambda _, m: m.update({"lora_b": m.lora_b + 0.3}) if "lora_b" in m else None
        )
        return model

    def gradients(model: Any) -> dict[str, mx.array]:
        loss = nn.value_and_grad(model, lambda m: (m(mx.array([[3, 1, 4, 1, 5]])) ** 2).sum())
        return dict(tree_flatten(loss(model)[1]))

    plain, fast = adapted(), adapted()
    assert use_fast_mlp(fast) == 2
    assert np.abs(logits(fast) - logits(plain)).max() <= 1e-5 * np.abs(logits(plain)).max()
    expected, actual = gradients(plain), gradients(fast)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert float(mx.abs(actual[name] - value).max()) <= 1e-4 * float(mx.abs(value).max()), name
