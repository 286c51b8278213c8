"""The chunked losses against the plain cross-entropy, in value and gradients."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from allhands.objectives.cross_entropy import (
    CHUNK_ROWS,
    cross_entropy_sum,
    eager_linear_cross_entropy,
    linear_cross_entropy,
)

WIDTH, WORDS = 24, 97
# One row, a part of a chunk, a whole one, and more than two.
ROWS = [1, 100, CHUNK_ROWS, 2 * CHUNK_ROWS + 37]
Case = tuple[mx.array, mx.array, mx.array]
Float64 = np.ndarray[Any, np.dtype[np.float64]]


def case(rows: int, *, scale: float = 1.0, padding: int = 0) -> Case:
    """Hidden states, weight of the head, and targets, of which the last ``padding`` are -1."""
    random = np.random.default_rng(rows)
    hidden = mx.array(scale * random.normal(size=(rows, WIDTH)), dtype=mx.float32)
    weight = mx.array(random.normal(size=(WORDS, WIDTH)), dtype=mx.float32)
    targets = random.integers(0, WORDS, rows)
    targets[rows - padding :] = -1
    return hidden, weight, mx.array(targets, dtype=mx.int32)


def reference(
    hidden: mx.array, weight: mx.array, targets: mx.array
) -> tuple[float, Float64, Float64]:
    """Loss sum and both gradients in float64: ``(softmax - onehot) @ W`` and ``(softmax - onehot).T
    @ H``.
    """
    h, w, t = (np.array(a) for a in (hidden, weight, targets))
    h, w, kept = h.astype(np.float64), w.astype(np.float64), t >= 0
    logits = h @ w.T
    logits -= logits.max(axis=1, keepdims=True)
    normaliser = np.exp(logits).sum(axis=1)
    rows = np.arange(len(t))
    loss = (np.log(normaliser) - logits[rows, t])[kept].sum()
    softmax = np.exp(logits) / normaliser[:, None]
    softmax[rows, t] -= 1
    softmax[~kept] = 0
    return float(loss), softmax @ w, softmax.T @ h


def assert_close(actual: mx.array | None, expected: Float64) -> None:
    assert actual is not None
    np.testing.assert_allclose(
        np.array(actual), expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["usual", "large"])
@pytest.mark.parametrize("rows", ROWS)
def test_eager_form(rows: int, scale: float) -> None:
    hidden, weight, targets = case(rows, scale=scale)
    loss, grad_hidden, grad_weight = reference(hidden, weight, targets)
    value, first, second = eager_linear_cross_entropy(hidden, weight, targets, train_weight=True)
    assert value.item() == pytest.approx(loss, rel=2e-6)
    assert_close(first, grad_hidden)
    assert_close(second, grad_weight)
    value, first, second = eager_linear_cross_entropy(hidden, weight, targets, train_weight=False)
    assert value.item() == pytest.approx(loss, rel=2e-6)
    assert_close(first, grad_hidden)
    assert second is None
    value, first, second = eager_linear_cross_entropy(
        hidden, weight, targets, train_weight=False, with_grad=False
    )
    assert (first, second) == (None, None)
    assert value.item() == pytest.approx(loss, rel=2e-6)


def test_eager_form_without_rows() -> None:
    hidden, weight, targets = case(4)
    found = eager_linear_cross_entropy(hidden[:0], weight, targets[:0], train_weight=True)
    value, first, second = found
    assert value.item() == 0.0
    assert (first is None, second is None) == (False, False)
    assert first is not None
    assert first.shape == (0, hidden.shape[1])
    assert second is not None
    assert second.shape == weight.shape
    assert not mx.any(second).item()


def test_eager_form_leaves_its_inputs_alone() -> None:
    arrays = case(40)
    before = [np.array(a) for a in arrays]
    eager_linear_cross_entropy(*arrays, train_weight=True)
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(np.array(array), copy)


@pytest.mark.parametrize(
    ("rows", "padding", "compiled"),
    [
        *((rows, 0, False) for rows in ROWS),
        (100, 33, False),
        (ROWS[-1], 300, False),
        (ROWS[-1], 300, True),
    ],
)
def test_graph_form(rows: int, padding: int, compiled: bool) -> None:
    hidden, weight, targets = case(rows, padding=padding)
    loss, grad_hidden, grad_weight = reference(hidden, weight, targets)
    wrap: Any = mx.compile if compiled else (lambda function: function)

    def both(h: mx.array, w: mx.array, t: mx.array) -> mx.array:
        return linear_cross_entropy(h, w, t, train_weight=True)

    def only_hidden(h: mx.array, w: mx.array, t: mx.array) -> mx.array:
        return linear_cross_entropy(h, w, t, train_weight=False)

    value, (first, second) = wrap(mx.value_and_grad(both, argnums=(0, 1)))(hidden, weight, targets)
    assert value.item() == pytest.approx(loss, rel=2e-6)
    assert_close(first, grad_hidden)
    assert_close(second, grad_weight)
    value, first = wrap(mx.value_and_grad(only_hidden))(hidden, weight, targets)
    assert value.item() == pytest.approx(loss, rel=2e-6)
    assert_close(first, grad_hidden)
    alone = linear_cross_entropy(hidden, weight, targets, train_weight=False, with_grad=False)
    assert alone.item() == pytest.approx(loss, rel=2e-6)


def test_graph_form_carries_a_factor_and_what_lies_before_it() -> None:
    """The cotangent is not always one, and the hidden states come out of a network."""
    hidden, weight, targets = case(50)
    square = mx.array(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)) / 5, dtype=mx.float32)

    def chunked(matrix: mx.array, head: mx.array) -> mx.array:
        return 0.25 * linear_cross_entropy(
            mx.tanh(hidden @ matrix), head, targets, train_weight=True
        )

    def plain(matrix: mx.array, head: mx.array) -> mx.array:
        return 0.25 * nn.losses.cross_entropy(
            mx.tanh(hidden @ matrix) @ head.T, targets, reduction="sum"
        )

    actual = mx.value_and_grad(chunked, argnums=(0, 1))(square, weight)
    expected = mx.value_and_grad(plain, argnums=(0, 1))(square, weight)
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=1e-6)
    for mine, theirs in zip(actual[1], expected[1], strict=True):
        assert_close(mine, np.array(theirs, dtype=np.float64))


def test_graph_form_in_half_precision() -> None:
    """Logits and sums are float32; gradients have the type of what they belong to."""
    hidden, weight, targets = case(300, padding=20)
    half = [a.astype(mx.bfloat16) for a in (hidden, weight)]
    loss, grad_hidden, grad_weight = reference(*(a.astype(mx.float32) for a in half), targets)

    def both(h: mx.array, w: mx.array) -> mx.array:
        return linear_cross_entropy(h, w, targets, train_weight=True)

    value, grads = mx.value_and_grad(both, argnums=(0, 1))(*half)
    assert (value.dtype, grads[0].dtype, grads[1].dtype) == (mx.float32, mx.bfloat16, mx.bfloat16)
    # bfloat16 keeps 8 bits, and the logits themselves were rounded to it.
    assert value.item() == pytest.approx(loss, rel=2e-3)
    for mine, expected in zip(grads, (grad_hidden, grad_weight), strict=True):
        error = np.array(mine.astype(mx.float32)) - expected
        assert np.linalg.norm(error) < 0.02 * np.linalg.norm(expected)


def test_plain_form_over_logits() -> None:
    hidden, weight, targets = case(60, padding=7)
    loss, grad_hidden, _ = reference(hidden, weight, targets)

    def over_logits(h: mx.array) -> mx.array:
        return cross_entropy_sum(h @ weight.T, targets)

    value, grad = mx.value_and_grad(over_logits)(hidden)
    assert value.item() == pytest.approx(loss, rel=2e-6)
    assert_close(grad, grad_hidden)
