"""Experts that are kept equally busy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from allhands.model.balance import balance_experts, imbalance
from allhands.model.pretraining import build_model
from allhands.model.shapes import find_shape, model_config
from allhands.run.datasets import Datasets
from allhands.run.padding import padding_told

NUMBERS = {"layers": 2, "dims": 32, "mlp_dims": 48, "heads": 4, "vocabulary": 64, "block_size": 32}


def mixtral() -> Any:
    shape = find_shape("mixtral", {**NUMBERS, "experts": 4, "experts_per_token": 2})
    return build_model(model_config(shape), 3)


def loss(model: Any, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="sum")


def test_the_measure_is_one_for_equal_experts_and_all_of_them_for_one() -> None:
    equal = mx.eye(4)[None] * 9.0
    assert imbalance(equal, 1).item() == pytest.approx(1.0, rel=1e-5)
    one = mx.zeros((1, 5, 4)) + mx.array([50.0, 0.0, 0.0, 0.0])
    assert imbalance(one, 1).item() == pytest.approx(4.0, rel=1e-5)
    # By hand, in numpy, a text at a time.
    logits = mx.random.normal((3, 7, 4), key=mx.random.key(1))
    for row, found in zip(np.array(logits), np.array(imbalance(logits, 2)), strict=True):
        best = np.argsort(-row, axis=-1)[:, :2]
        share = np.bincount(best.reshape(-1), minlength=4) / best.size
        probability = np.exp(row) / np.exp(row).sum(axis=-1, keepdims=True)
        assert found == pytest.approx(4 * (share * probability.mean(axis=0)).sum(), rel=1e-5)


def test_the_loss_stays_and_the_gradient_is_that_of_both_together() -> None:
    tokens = mx.random.randint(0, 64, (3, 17), key=mx.random.key(2))
    plain, ours = mixtral(), mixtral()
    assert balance_experts(ours, 0.3) == 2
    assert balance_experts(mixtral(), 0.0) == 0
    for model in (plain, ours):
        model.train()

    def both(model: Any) -> mx.array:
        total = loss(model, tokens)
        hidden = model.model.embed_tokens(tokens[:, :-1])
        for layer in model.layers:
            attended = hidden + layer.self_attn(layer.input_layernorm(hidden), "causal", None)
            router = layer.block_sparse_moe.gate
            logits = router(layer.post_attention_layernorm(attended))
            total = total + 0.3 * logits.shape[1] * imbalance(logits, 2).sum()
            hidden = attended + layer.block_sparse_moe(layer.post_attention_layernorm(attended))
        return total

    value, grads = nn.value_and_grad(ours, lambda m: loss(m, tokens))(ours)
    assert value.item() == pytest.approx(loss(plain, tokens).item(), rel=1e-6)
    _, expected = nn.value_and_grad(plain, both)(plain)
    flat = dict(tree_flatten(grads))
    for name, one in tree_flatten(expected):
        np.testing.assert_allclose(
            np.array(flat[name]), np.array(one), rtol=1e-3, atol=1e-4, err_msg=name
        )


def test_texts_count_one_by_one_however_they_are_cut_into_batches() -> None:
    tokens = mx.random.randint(0, 64, (4, 17), key=mx.random.key(4))
    model = mixtral()
    balance_experts(model, 0.3)
    model.train()
    gradient = nn.value_and_grad(model, lambda m, t: loss(m, t))
    whole = dict(tree_flatten(gradient(model, tokens)[1]))
    halves = [dict(tree_flatten(gradient(model, part)[1])) for part in (tokens[:1], tokens[1:])]
    for name, one in whole.items():
        np.testing.assert_allclose(
            np.array(one),
            np.array(halves[0][name] + halves[1][name]),
            rtol=1e-3,
            atol=1e-4,
            err_msg=name,
        )


def test_evaluation_is_left_alone() -> None:
    tokens = mx.random.randint(0, 64, (2, 9), key=mx.random.key(5))
    plain, ours = mixtral(), mixtral()
    balance_experts(ours, 0.3)
    ours.eval()
    assert mx.array_equal(plain(tokens), ours(tokens))


@pytest.mark.parametrize(
    ("coefficient", "lengths", "notes"), [(0.1, 2, 0), (0.1, 40, 1), (0.0, 40, 0)]
)
def test_many_lengths_of_rows_are_said_to_take_longer(
    coefficient: float, lengths: int, notes: int
) -> None:
    model, data = (
        mixtral(),
        SimpleNamespace(train=SimpleNamespace(work=np.arange(80) % lengths + 8)),
    )
    balance_experts(model, coefficient)
    assert len(padding_told(model, cast(Datasets, data))) == notes
