"""The native update of Adam and AdamW beside MLX's own, and beside an update in float64."""

from __future__ import annotations

from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS  # isort: skip
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map

from allhands.io.trees import flatten, part_of, unflatten
from allhands.kernels import native
from allhands.runtime.blas import native_library
from allhands.train import native_update
from allhands.train.graph_update import initialise
from allhands.train.native_update import NativeUpdate
from allhands.train.optimizers import SGD, KernelAdam, KernelAdamW

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or not a Linux CPU")
# On both sides of a part of 16,384 numbers and of what is updated together.
SHAPES = [(3,), (16, 5), (1,), (16384,), (16385,), (200, 300), (1024, 1025)]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng(1)
        self.parts = [
            {"weight": mx.array(draw.standard_normal(shape).astype(np.float32))} for shape in SHAPES
        ]


def gradients(step: int) -> list[tuple[str, mx.array]]:
    draw = np.random.default_rng([2, step])
    return [
        (
            f"parts.{i}.weight",
            mx.array((draw.standard_normal(shape) * 10.0 ** (i - 2)).astype(np.float32)),
        )
        for i, shape in enumerate(SHAPES)
    ]


def plain_norm(sums: list[tuple[str, mx.array]]) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(g).astype(np.float64)).sum() for _, g in sums)))


def make(kind: str, **options: Any) -> tuple[Network, Any]:
    rate = optim.linear_schedule(1e-3, 3e-2, 4)
    network, optimizer = (
        Network(),
        {"adam": KernelAdam, "adamw": KernelAdamW}[kind](rate, **options),
    )
    return network, optimizer


@pytest.mark.parametrize("matrices_only", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("adam", {}),
        ("adam", {"bias_correction": True, "betas": [0.8, 0.95], "eps": 1e-6}),
        ("adamw", {"weight_decay": 0.3}),
        ("adamw", {"weight_decay": 0.1, "bias_correction": True, "betas": [0.9, 0.95]}),
    ],
)
def test_it_is_mlxs_update(kind: str, options: dict[str, Any], matrices_only: bool) -> None:
    (ours, optimizer), (theirs, expected) = make(kind, **options), make(kind, **options)
    optimizer.matrices_only = expected.matrices_only = matrices_only
    for network, each in ((ours, optimizer), (theirs, expected)):
        initialise(each, network)
    update = native_update.native_update(ours, optimizer)
    assert update is not None
    for step in range(4):
        sums = gradients(step)
        assert update.norm(sums) == pytest.approx(plain_norm(sums), rel=1e-6)
        mean = unflatten([(name, g * 0.25) for name, g in sums])
        update(sums, 0.25)
        assert sums == []
        expected.update(theirs, mean)
        mx.eval(theirs.parameters(), expected.state)
    one, other = (
        [*flatten(each.state), *flatten(net.parameters())]
        for net, each in ((ours, optimizer), (theirs, expected))
    )
    assert [name for name, _ in one] == [name for name, _ in other]
    assert float(optimizer.learning_rate) == float(expected.learning_rate)
    assert int(optimizer.step) == 4
    for (name, array), (_, reference) in zip(one, other, strict=True):
        assert array.shape == reference.shape, name
        # Sums of numbers of both signs lose digits, in either.
        close = {"rtol": 1e-6, "atol": 1e-6 * float(mx.abs(reference).max())}
        np.testing.assert_allclose(np.asarray(array), np.asarray(reference), **close, err_msg=name)


def test_it_is_as_exact_as_float32_can_be() -> None:
    network, optimizer = make("adamw", weight_decay=0.3, bias_correction=True)
    initialise(optimizer, network)
    update = NativeUpdate(network, optimizer)
    exact = {
        name: np.asarray(array).astype(np.float64) for name, array in flatten(network.parameters())
    }
    moments = {name: [np.zeros_like(array), np.zeros_like(array)] for name, array in exact.items()}
    for step in range(3):
        sums = gradients(step)
        rate = float(optim.linear_schedule(1e-3, 3e-2, 4)(mx.array(step)))
        for name, gradient in sums:
            g = np.asarray(gradient).astype(np.float64) * 0.5
            m, v = moments[name]
            m[...] = 0.9 * m + 0.1 * g
            v[...] = 0.999 * v + 0.001 * g * g
            root = np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8
            exact[name] = exact[name] * (1 - rate * 0.3) - rate * m / (1 - 0.9 ** (step + 1)) / root
        update(sums, 0.5)
    for name, array in flatten(network.parameters()):
        np.testing.assert_allclose(
            np.asarray(array), exact[name], rtol=1e-6, atol=2e-7, err_msg=name
        )


def test_threads_change_no_bit_and_what_others_hold_stays() -> None:
    library: Any = native_library()
    found: list[list[bytes]] = []
    for threads in (1, 3):
        library.allhands_set_threads(threads)
        network, optimizer = make("adamw", weight_decay=0.1)
        initialise(optimizer, network)
        held = [
            (np.asarray(array), np.array(array))
            for _, array in flatten([network.parameters(), optimizer.state])
        ]
        update = NativeUpdate(network, optimizer)
        for step in range(2):
            sums = gradients(step)
            update(sums, 1.0 / (1.0 + update.norm(sums)))
        for view, copy in held:
            assert np.array_equal(view, copy)
        found.append(
            [np.array(a).tobytes() for _, a in flatten([network.parameters(), optimizer.state])]
        )
    library.allhands_set_threads(1)
    assert found[0] == found[1]


def test_what_is_not_finite_is_seen() -> None:
    network, optimizer = make("adam")
    initialise(optimizer, network)
    for value in (np.nan, np.inf):
        sums = gradients(0)
        spoiled = np.array(sums[-1][1])
        spoiled[-1, -1] = value
        sums[-1] = (sums[-1][0], mx.array(spoiled))
        assert not np.isfinite(NativeUpdate(network, optimizer).norm(sums))


def test_what_it_cannot_do_is_left_to_others() -> None:
    network, optimizer = make("adam")
    assert native_update.native_update(network, SGD(1e-2)) is None
    optimizer.masters = True
    assert native_update.native_update(network, optimizer) is None
    optimizer.masters = False
    assert native_update.native_update(network, optimizer) is not None
    network.update(tree_map(lambda array: array.astype(mx.bfloat16), network.parameters()))
    assert native_update.native_update(network, optimizer) is None


def test_a_part_of_a_tree_by_its_name() -> None:
    tree = {"a": [{"b": 1}, {"b": [2, 3]}], "c": 4}
    assert (part_of(tree, "a.1.b.1"), part_of(tree, "c"), part_of(tree, "a.0")) == (3, 4, {"b": 1})
