"""Optimizers beside MLX's: float32 copies, decay of matrices alone, Muon for the matrices of
blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map

from allhands.io.trees import flatten, unflatten
from allhands.train.graph_update import GraphUpdate, initialise
from allhands.train.optimizers import SGD, HiddenMuon, KernelAdamW, Muon, Optimizer, orthogonalised


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 40, bias=False)
        self.down = nn.Linear(40, 24)
        self.norm = nn.RMSNorm(24)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.layers = [Block(), Block()]
        self.norm = nn.RMSNorm(24)


def network(dtype: mx.Dtype = mx.float32) -> Any:
    mx.random.seed(1)
    model = Network()
    model.set_dtype(dtype)
    return model


def gradients(model: nn.Module, step: int) -> Any:
    flat = flatten(model.trainable_parameters())
    made = [
        (name, mx.random.normal(w.shape, key=mx.random.key(100 * step + i)).astype(w.dtype))
        for i, (name, w) in enumerate(flat)
    ]
    return unflatten(made)


def weights(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: np.array(w.astype(mx.float32)) for name, w in flatten(model.trainable_parameters())
    }


def by_hand(
    model: nn.Module, optimizer: optim.Optimizer, steps: int = 5
) -> dict[str, np.ndarray[Any, Any]]:
    initialise(optimizer, model)
    for step in range(steps):
        optimizer.update(model, gradients(model, step))
    return weights(model)


def in_graph(
    model: nn.Module, optimizer: optim.Optimizer, steps: int = 5
) -> dict[str, np.ndarray[Any, Any]]:
    """As the trainer does it on a GPU, in joined arrays where the optimizer allows that."""
    update = GraphUpdate(model, optimizer, None, compiled=True)
    for step in range(steps):
        sums = flatten(gradients(model, step))
        if update.flat is not None:
            sums = [
                (str(i), array) for i, array in enumerate(update.flat.leaves.joined(dict(sums)))
            ]
        mx.eval(update(sums, mx.array(1.0), mx.array(1.0)))
    mx.eval(update.arrays())
    return weights(model)


WAYS: list[Callable[..., dict[str, np.ndarray[Any, Any]]]] = [by_hand, in_graph]


@pytest.mark.parametrize("way", WAYS)
def test_weight_decay_of_matrices_alone(
    way: Callable[..., dict[str, np.ndarray[Any, Any]]],
) -> None:
    ours = KernelAdamW(1e-2, weight_decay=0.5)
    ours.matrices_only = True
    found = way(network(), ours)
    decayed = by_hand(network(), optim.AdamW(1e-2, weight_decay=0.5))
    plain = by_hand(network(), optim.AdamW(1e-2, weight_decay=0.0))
    for name, array in found.items():
        expected = decayed if array.ndim > 1 else plain
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert not np.allclose(decayed["norm.weight"], plain["norm.weight"], rtol=1e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [KernelAdamW, SGD, Muon, HiddenMuon])
def test_half_precision_is_the_rounding_of_a_run_in_float32(
    way: Callable[..., dict[str, np.ndarray[Any, Any]]], kind: Callable[..., Optimizer]
) -> None:
    """Updates far below half precision's step add up."""
    rough, fine = network(mx.bfloat16), network(mx.bfloat16)
    fine.update(tree_map(lambda w: w.astype(mx.float32), fine.parameters()))

    def same(model: nn.Module, step: int) -> Any:
        # The same numbers for both.
        return tree_map(lambda g: g.astype(mx.bfloat16).astype(g.dtype), gradients(model, step))

    masters = kind(learning_rate=1e-5)
    masters.masters = True
    plain = kind(learning_rate=1e-5)
    initialise(plain, fine)
    for step in range(5):
        plain.update(fine, same(fine, step))
    found = way(rough, masters)
    expected = {
        name: np.array(w.astype(mx.bfloat16).astype(mx.float32))
        for name, w in flatten(fine.parameters())
    }
    for name, array in found.items():
        # Products of Newton and Schulz's iteration depend on where in memory they stand, in the
        # last bits.
        assert np.mean(array != expected[name]) <= (0.01 if "uon" in kind.__name__ else 0.002), name
        np.testing.assert_allclose(array, expected[name], rtol=2**-7)
    lost = network(mx.bfloat16)
    by_hand(lost, kind(learning_rate=1e-5))
    start = weights(network(mx.bfloat16))
    moved = [np.mean(array != start[name]) for name, array in found.items()]
    stuck = [np.mean(array != start[name]) for name, array in weights(lost).items()]
    assert sum(stuck) < sum(moved) or kind is SGD


def test_newton_and_schulz_bring_singular_values_near_one() -> None:
    for shape in [(3, 20, 60), (60, 20), (32, 32)]:
        matrices = mx.random.normal(shape, key=mx.random.key(3))
        values = np.linalg.svd(np.array(orthogonalised(matrices, 5)), compute_uv=False)
        # A square random matrix has singular values near 0, which five steps do not bring up.
        assert values.max() < 1.3
        assert np.median(values) > 0.65
    several = mx.random.normal((3, 20, 60), key=mx.random.key(4))
    alone = mx.stack([orthogonalised(one) for one in several])
    np.testing.assert_allclose(
        np.array(orthogonalised(several)), np.array(alone), rtol=1e-4, atol=1e-5
    )
    theirs = optim.Muon(1.0)._zeropower_via_newtonschulz5(several[0], 5)
    np.testing.assert_allclose(np.array(alone[0]), np.array(theirs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_muon_is_for_the_matrices_of_blocks_and_adamw_for_the_rest(
    way: Callable[..., dict[str, np.ndarray[Any, Any]]],
) -> None:
    found = way(network(), HiddenMuon(1e-2, weight_decay=0.1))
    adamw = optim.AdamW(1e-2, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, bias_correction=True)
    rest = by_hand(network(), adamw)
    hidden = {
        "layers.0.up.weight",
        "layers.0.down.weight",
        "layers.1.up.weight",
        "layers.1.down.weight",
    }
    for name, array in found.items():
        if name not in hidden:
            np.testing.assert_allclose(array, rest[name], rtol=1e-4, atol=1e-6, err_msg=name)
    # One step from the start, by MLX's own iteration.
    first = by_hand(network(), HiddenMuon(1e-2, weight_decay=0.1), 1)
    model = network()
    gradient = dict(flatten(gradients(model, 0)))["layers.0.up.weight"]
    ahead = 0.05 * gradient + 0.95 * 0.05 * gradient
    step = optim.Muon(1.0)._zeropower_via_newtonschulz5(ahead, 5) * 0.2 * 40**0.5
    expected = model.layers[0].up.weight * (1 - 1e-3) - 1e-2 * step
    np.testing.assert_allclose(
        first["layers.0.up.weight"], np.array(expected), rtol=1e-3, atol=1e-4
    )


def test_a_state_that_was_saved_goes_on_as_it_was() -> None:
    whole = by_hand(network(), HiddenMuon(1e-2), 4)
    model, optimizer = network(), HiddenMuon(1e-2)
    by_hand(model, optimizer, 2)
    saved = dict(flatten(optimizer.state))
    resumed = HiddenMuon(1e-2)
    resumed.state = unflatten(list(saved.items()))
    for step in (2, 3):
        resumed.update(model, gradients(model, step))
    for name, array in weights(model).items():
        np.testing.assert_array_equal(array, whole[name], err_msg=name)
