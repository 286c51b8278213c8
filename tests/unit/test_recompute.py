"""Recomputed blocks have the gradients of plain ones, however arrays come to them and leave them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS  # isort: skip
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from allhands.kernels import native
from allhands.model.remat import checkpoint_layers

AT_ONCE = [
    False,
    pytest.param(
        True, marks=pytest.mark.skipif(not native.available(), reason="no native code here")
    ),
]


class Cache:
    """As mlx_lm's: keys and values that a block leaves behind."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.offset = 0

    def add(self, keys: mx.array) -> mx.array:
        self.keys = keys if self.keys is None else mx.concatenate([self.keys, keys])
        self.offset += len(keys)
        return self.keys


class Block(nn.Module):
    """Takes arrays in every way there is, and leaves some in what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def __call__(
        self,
        x: mx.array,
        mask: Any = None,
        cache: Cache | None = None,
        *,
        gate: mx.array | None = None,
        shared: tuple[mx.array, int] | None = None,
        seen: list[mx.array] | None = None,
        named: dict[str, Any] | None = None,
    ) -> Any:
        y = mx.tanh(self.linear(x))
        if mask is not None:
            y = mx.where(mask, y, 0.5 * y)
        if gate is not None:
            y = y * gate
        if shared is not None:
            y = y * shared[0] + shared[1]
        if seen is not None:
            y = y + sum(seen)
            seen.append(mx.sin(y))
        if named is not None:
            y = y * named["scale"]
            named["last"] = mx.cos(y)
        if cache is not None:
            y = y + cache.add(mx.exp(0.1 * y)).sum(axis=0)
        return y, x, (mx.arange(3), None, y * y)


WAYS: dict[str, Callable[[mx.array], dict[str, Any]]] = {
    "mask": lambda z: {"mask": mx.arange(6) > 2},
    "keyword": lambda z: {"gate": mx.cos(z)},
    "tuple": lambda z: {"shared": (mx.exp(z), 2)},
    "list": lambda z: {"seen": [z, 2 * z]},
    "dictionary": lambda z: {"named": {"scale": 1 + z, "word": "causal"}},
    "object": lambda z: {"cache": Cache()},
    "all": lambda z: {
        "gate": z,
        "shared": (z, 1),
        "seen": [z],
        "named": {"scale": z},
        "cache": Cache(),
    },
}


def loss(blocks: list[Block], way: str, weights: Any, x: mx.array) -> mx.array:
    for block, values in zip(blocks, weights, strict=True):
        block.update(values)
    given = WAYS[way](mx.sin(x))
    # Twice through each: a block's second pass is differentiated, too.
    total = mx.array(0.0)
    for block in [*blocks, *blocks]:
        x, before, (places, nothing, square) = block(x, **given)
        assert nothing is None
        total = total + (square * places.sum()).sum() + before.sum()
    for left in (
        given.get("seen", []),
        [v for v in given.get("named", {}).values() if isinstance(v, mx.array)],
    ):
        total = total + sum((each * each).sum() for each in left)
    cache = given.get("cache")
    if cache is not None:
        assert cache.offset == len(blocks) * 2 * len(x)
        total = total + (cache.keys * 0.1).sum()
    return total + x.sum()


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("way", WAYS)
def test_every_array_is_differentiated_whatever_way_it_comes(way: str, at_once: bool) -> None:
    mx.random.seed(3)
    plain, recomputed = [Block(), Block()], [Block(), Block()]
    weights = [block.parameters() for block in plain]
    checkpoint_layers(recomputed, at_once=at_once)
    x = mx.random.normal((3, 6))
    found = []
    for blocks in (plain, recomputed):
        value, grads = mx.value_and_grad(partial(loss, blocks, way), argnums=(0, 1))(weights, x)
        found.append((value.item(), dict(tree_flatten(grads))))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name, expected in found[0][1].items():
        assert mx.allclose(found[1][1][name], expected, rtol=1e-4, atol=1e-5).item(), name


@pytest.mark.parametrize("at_once", AT_ONCE)
def test_a_block_has_its_own_weights_after_a_pass(at_once: bool) -> None:
    block = Block()
    weights = dict(tree_flatten(block.parameters()))
    checkpoint_layers([block], at_once=at_once)
    mx.eval(mx.grad(lambda x: block(x, gate=x)[0].sum())(mx.ones((2, 6))))
    assert all(array is weights[name] for name, array in tree_flatten(block.parameters()))


class Skips(nn.Module):
    """Has a weight, and passes on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def __call__(self, x: mx.array) -> mx.array:
        return x


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("kind", [Skips, nn.Identity])
def test_a_block_that_passes_on_its_input_hands_its_gradient_back(
    kind: type[nn.Module], at_once: bool
) -> None:
    block, x = kind(), mx.arange(12.0).reshape(2, 6)
    checkpoint_layers([block], at_once=at_once)
    assert mx.array_equal(block(x), x)
    assert mx.array_equal(mx.grad(lambda x: (block(x) ** 2).sum())(x), 2 * x)
