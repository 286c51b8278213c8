"""The update as one graph against MLX's optimizers, one array at a time."""

from __future__ import annotations

import gc
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

from allhands.io.trees import flatten, number, unflatten
from allhands.kernels.fused import kernels
from allhands.parallel.norms import sum_of_squares
from allhands.train.graph_update import GraphUpdate, UpdatePieces
from allhands.train.optim import clip
from allhands.train.optimizers import KernelAdam, KernelAdamW

TOKENS = 37.0
Schedule = Callable[[mx.array], mx.array]
WARM_UP: Schedule = optim.linear_schedule(1e-3, 1e-2, 5)
OURS: dict[str, Callable[[], optim.Optimizer]] = {
    "adam": lambda: KernelAdam(WARM_UP),
    "adam-corrected": lambda: KernelAdam(1e-2, bias_correction=True),
    "adamw": lambda: KernelAdamW(WARM_UP, weight_decay=0.3),
    "sgd": lambda: optim.SGD(1e-2, momentum=0.9),
    "muon": lambda: optim.Muon(1e-2),
    "adafactor": lambda: optim.Adafactor(1e-2, relative_step=False),
}
MLX: dict[str, Callable[[], optim.Optimizer]] = {
    **OURS,
    "adam": lambda: optim.Adam(WARM_UP),
    "adam-corrected": lambda: optim.Adam(1e-2, bias_correction=True),
    "adamw": lambda: optim.AdamW(WARM_UP, weight_decay=0.3),
}


def network(dtype: mx.Dtype = mx.float32) -> Any:
    mx.random.seed(4)
    model = nn.Sequential(nn.Linear(24, 33), nn.Linear(33, 8, bias=False))
    model.layers[0].freeze(keys="bias")
    model.set_dtype(dtype)
    return model


def gradients(step: int) -> list[tuple[str, mx.array]]:
    """Sums over the tokens; of another size in every step."""
    weights = flatten(network().trainable_parameters())
    return [
        (name, mx.random.normal(w.shape, key=mx.random.key(10 * step + i)) * TOKENS * (step + 1))
        for i, (name, w) in enumerate(weights)
    ]


def arrays(model: Any, optimizer: optim.Optimizer) -> dict[str, np.ndarray[Any, Any]]:
    trees = {"model": model.parameters(), "optimizer": optimizer.state}
    return {name: np.array(value) for name, value in flatten(trees)}


def by_hand(
    model: Any, optimizer: optim.Optimizer, steps: range, max_norm: float | None
) -> list[float]:
    norms = []
    for step in steps:
        mean, norm = clip(unflatten([(name, g / TOKENS) for name, g in gradients(step)]), max_norm)
        optimizer.update(model, mean)
        norms.append(number(norm))
    return norms


def take(
    update: GraphUpdate,
    sums: list[tuple[str, mx.array]],
    loss: float = 1.0,
    num_targets: float = TOKENS,
) -> float:
    """An update by gradients of the trained arrays, in the form that ``update`` takes; the norm."""
    if update.flat is not None:
        sums = [(str(i), array) for i, array in enumerate(update.flat.leaves.joined(dict(sums)))]
    return number(update(sums, mx.array(loss), mx.array(num_targets)))


def in_graph(update: GraphUpdate, steps: range) -> list[float]:
    return [take(update, gradients(step)) for step in steps]


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, atol=1e-7, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("compiled", [False, True], ids=["lazy", "compiled"])
@pytest.mark.parametrize("name", OURS)
def test_weights_state_and_norms_are_those_of_mlx(
    name: str, compiled: bool, max_norm: float | None
) -> None:
    expected_model, expected_optimizer, model, optimizer = (
        network(),
        MLX[name](),
        network(),
        OURS[name](),
    )
    norms = by_hand(expected_model, expected_optimizer, range(4), max_norm)
    update = GraphUpdate(model, optimizer, max_norm, compiled=compiled)
    assert in_graph(update, range(4)) == pytest.approx(norms, rel=1e-5)
    assert_close(arrays(model, optimizer), arrays(expected_model, expected_optimizer))
    assert not (np.array(model.layers[1].weight) == np.array(network().layers[1].weight)).any()
    assert (np.array(model.layers[0].bias) == np.array(network().layers[0].bias)).all()


def adam_by_hand(
    gradient: mx.array, weight: mx.array, moments: tuple[mx.array, mx.array], scalars: mx.array
) -> tuple[mx.array, ...]:
    """What the kernel computes, in MLX's operations."""
    factor, finite, rate, b1, b2, eps, shrunk, root, c1, c2 = scalars
    g = gradient * factor
    m, v = b1 * moments[0] + c1 * g, b2 * moments[1] + c2 * g * g
    new = weight * shrunk - rate * m / (mx.sqrt(v) * root + eps)
    pairs = zip((new, m, v), (weight, *moments), strict=True)
    return tuple(mx.where(finite != 0, after, before) for after, before in pairs)


def squares_by_hand(arrays: list[mx.array]) -> mx.array:
    return sum((mx.square(x.astype(mx.float32)).sum() for x in arrays), mx.zeros(()))


def scalars_by_hand(
    numbers: tuple[mx.array, ...], options: mx.array, *, bias_correction: bool
) -> tuple[mx.array, mx.array, mx.array]:
    squares, loss, tokens, rate, step = (number.astype(mx.float32) for number in numbers)
    b1, b2, c1, c2, eps, decay, limit = options
    divisor = mx.maximum(tokens, 1.0)
    norm = mx.sqrt(squares) / divisor
    finite = mx.isfinite(norm) & mx.isfinite(loss)
    factor = mx.where(limit >= 0, mx.minimum(limit / (norm + 1e-6), 1.0), 1.0) / divisor
    rate_of, root = rate, mx.ones(())
    if bias_correction:
        rate_of, root = rate / (1 - b1**step), mx.rsqrt(1 - b2**step)
    sides = [
        mx.stack([factor, finite.astype(mx.float32), rate_of, b1, b2, eps, side, root, c1, c2])
        for side in (mx.ones(()), 1 - rate * decay)
    ]
    return mx.stack(sides), norm, finite


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("name", ["adam", "adam-corrected", "adamw"])
def test_what_is_handed_to_the_kernel_makes_the_update_of_mlx(
    name: str, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "sum_of_squares", squares_by_hand)
    monkeypatch.setattr(kernels, "adam_scalars", scalars_by_hand)
    monkeypatch.setattr(
        kernels, "adam", lambda g, *rest: (calls.append(g.shape), adam_by_hand(g, *rest))[1]
    )
    expected_model, expected_optimizer, model, optimizer = (
        network(),
        MLX[name](),
        network(),
        OURS[name](),
    )
    norms = by_hand(expected_model, expected_optimizer, range(4), max_norm)
    update = GraphUpdate(model, optimizer, max_norm, compiled=False)
    assert in_graph(update, range(4)) == pytest.approx(norms, rel=1e-5)
    assert_close(arrays(model, optimizer), arrays(expected_model, expected_optimizer))
    assert len(calls) == 4
    assert len(set(calls)) == 1  # all weights at once
    before = arrays(model, optimizer)
    take(update, gradients(4), loss=float("nan"))
    for key, value in arrays(model, optimizer).items():
        assert value.tobytes() == before[key].tobytes(), key


def test_float32_copies_are_updated_by_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are the copies rounded, and as MLX's operations make them."""

    def half(optimizer: Any) -> tuple[Any, Any]:
        model = network()
        model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
        optimizer.masters = True
        return model, optimizer

    def steps(update: GraphUpdate) -> None:
        for step in range(3):
            take(update, [(name, g.astype(mx.bfloat16)) for name, g in gradients(step)])

    expected = half(KernelAdamW(1e-2, weight_decay=0.3))
    steps(GraphUpdate(*expected, None, compiled=False))
    calls: list[mx.Dtype] = []

    def by_hand(g: mx.array, master: mx.array, *rest: Any) -> tuple[mx.array, ...]:
        calls.append(g.dtype)
        new, m, v = adam_by_hand(g.astype(mx.float32), master, *rest)
        return new.astype(g.dtype), new, m, v

    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "sum_of_squares", squares_by_hand)
    monkeypatch.setattr(kernels, "adam_scalars", scalars_by_hand)
    monkeypatch.setattr(kernels, "adam_master", by_hand)
    found = half(KernelAdamW(1e-2, weight_decay=0.3))
    steps(GraphUpdate(*found, None, compiled=True))
    assert calls == [mx.bfloat16] * 3
    for (name, one), (_, other) in zip(
        flatten(found[0].trainable_parameters()),
        flatten(expected[0].trainable_parameters()),
        strict=True,
    ):
        assert one.dtype == mx.bfloat16
        # MLX's operations round the mean gradient to half precision.
        pair = [np.array(array.astype(mx.float32)) for array in (one, other)]
        np.testing.assert_allclose(*pair, rtol=2**-7, atol=2e-4, err_msg=name)
    masters = [value for name, value in flatten(found[1].state) if name.endswith("master")]
    assert masters
    assert all(value.dtype == mx.float32 for value in masters)


def test_the_state_of_single_weights_is_shown_to_those_who_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not otherwise: thousands of views would cost every step some milliseconds."""
    model, optimizer = network(), KernelAdamW(WARM_UP)
    update = GraphUpdate(model, optimizer, None, compiled=False)
    named: list[int] = []
    assert update.flat is not None
    leaves: Any = update.flat.leaves
    plain = leaves.named
    monkeypatch.setattr(leaves, "named", lambda wholes: (named.append(1), plain(wholes))[1])
    in_graph(update, range(3))
    assert len(named) == 3  # the weights
    assert number(optimizer.learning_rate) == pytest.approx(number(WARM_UP(mx.array(2))))
    assert number(optimizer.step) == 3
    assert len(named) == 3
    seen = dict(flatten(optimizer.state))
    assert len(named) == 3 + 2  # and both moments
    assert {name: value.shape for name, value in seen.items() if name.endswith(".m")} == {
        f"{name}.m": value.shape for name, value in flatten(model.trainable_parameters())
    }
    in_graph(update, range(3, 4))
    # What was seen is not kept by the optimizer, which it would need for as long as nobody looks.
    hidden = [
        value for name, value in flatten(optimizer.present_state) if name.endswith((".m", ".v"))
    ]
    assert all(value.size == 1 for value in hidden)
    again = dict(flatten(optimizer.state))
    assert not any(mx.array_equal(seen[name], again[name]) for name in seen if name.endswith(".m"))


@pytest.mark.parametrize("name", OURS)
def test_a_restored_state_goes_on_to_the_same_bits(name: str) -> None:
    whole, optimizer = network(), OURS[name]()
    update = GraphUpdate(whole, optimizer, 1.0, compiled=True)
    in_graph(update, range(2))
    kept = arrays(whole, optimizer)
    in_graph(update, range(2, 4))
    resumed, other = network(), OURS[name]()
    resumed.load_weights(
        [(n.removeprefix("model."), mx.array(v)) for n, v in kept.items() if n.startswith("model.")]
    )
    other.state = unflatten(
        [
            (n.removeprefix("optimizer."), mx.array(v))
            for n, v in kept.items()
            if n.startswith("optimizer.")
        ]
    )
    in_graph(GraphUpdate(resumed, other, 1.0, compiled=True), range(2, 4))
    expected = arrays(whole, optimizer)
    for key, value in arrays(resumed, other).items():
        assert value.tobytes() == expected[key].tobytes(), key


@pytest.mark.parametrize("name", OURS)
def test_modules_without_weights_after_the_last_one_change_nothing(name: str) -> None:
    """As the blocks that a stage of a pipeline leaves to later stages."""
    expected, optimizer = network(), OURS[name]()
    in_graph(GraphUpdate(expected, optimizer, 1.0, compiled=True), range(4))
    stage, first = network(), OURS[name]()
    stage.layers.append(nn.Tanh())
    in_graph(GraphUpdate(stage, first, 1.0, compiled=True), range(2))
    restored = OURS[name]()
    restored.state = unflatten(flatten(first.state))
    in_graph(GraphUpdate(stage, restored, 1.0, compiled=True), range(2, 4))
    found = arrays(stage, restored)
    for key, value in arrays(expected, optimizer).items():
        assert found[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("name", OURS)
def test_nothing_changes_if_a_number_is_not_finite(name: str, where: str) -> None:
    model, optimizer = network(), OURS[name]()
    update = GraphUpdate(model, optimizer, 1.0, compiled=True)
    in_graph(update, range(2))
    before = arrays(model, optimizer)
    sums = gradients(2)
    if where == "gradient":
        sums[1] = (sums[1][0], sums[1][1].at[0].add(float("nan")))
    norm = take(update, sums, float("inf") if where == "loss" else 1.0)
    assert np.isfinite(norm) == (where == "loss")
    after = arrays(model, optimizer)
    for key, value in before.items():
        assert after[key].tobytes() == value.tobytes(), key
    in_graph(update, range(3, 4))
    assert (
        arrays(model, optimizer)["model.layers.1.weight"] != before["model.layers.1.weight"]
    ).all()


@pytest.mark.parametrize("name", OURS)
def test_half_precision_stays_half_precision(name: str) -> None:
    model, optimizer = network(mx.bfloat16), OURS[name]()
    update = GraphUpdate(model, optimizer, 1.0, compiled=True)
    before = {n: v.dtype for n, v in flatten(model.parameters())}
    for step in range(2):
        half = [(n, g.astype(mx.bfloat16)) for n, g in gradients(step)]
        take(update, half)
    assert {n: v.dtype for n, v in flatten(model.parameters())} == before


def test_weights_that_somebody_else_has_set_are_used() -> None:
    model, optimizer = network(), optim.SGD(1.0)
    update = GraphUpdate(model, optimizer, None, compiled=True)
    in_graph(update, range(1))
    model.layers[1].weight = mx.zeros_like(model.layers[1].weight)
    in_graph(update, range(1, 2))
    expected = -np.array(dict(gradients(1))["layers.1.weight"]) / TOKENS
    np.testing.assert_allclose(np.array(model.layers[1].weight), expected, rtol=1e-6)


def test_an_empty_step_divides_by_no_zero() -> None:
    model, optimizer = network(), optim.SGD(1.0)
    before = arrays(model, optimizer)
    zeros = [(name, mx.zeros_like(g)) for name, g in gradients(0)]
    assert take(GraphUpdate(model, optimizer, None, compiled=False), zeros, 0.0, 0.0) == 0
    assert (
        arrays(model, optimizer)["model.layers.1.weight"] == before["model.layers.1.weight"]
    ).all()


needs_gpu = pytest.mark.skipif(not kernels.available(), reason="needs an NVIDIA GPU")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_kernel_adam(dtype: mx.Dtype) -> None:
    gradient, weight = (mx.random.normal((129, 64)).astype(dtype) for _ in range(2))
    first, second = (mx.random.uniform(1e-4, 1e-3, (129, 64)).astype(dtype) for _ in range(2))
    scalars = mx.array([0.5, 1.0, 1e-2, 0.9, 0.999, 1e-8, 0.99, 1.0, 0.1, 0.001])
    g, w, m, v = (a.astype(mx.float32) for a in (gradient * 0.5, weight, first, second))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    expected = (w * 0.99 - 1e-2 * m / (mx.sqrt(v) + 1e-8), m, v)
    found = kernels.adam(gradient, weight, (first, second), scalars)
    for one, other in zip(found, expected, strict=True):
        assert mx.allclose(
            one.astype(mx.float32), other, rtol=1e-2 if dtype == mx.bfloat16 else 1e-5, atol=1e-7
        )
    scalars[1] = 0.0
    for one, other in zip(
        kernels.adam(gradient, weight, (first, second), scalars),
        (weight, first, second),
        strict=True,
    ):
        assert mx.array_equal(one, other)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("size", [8, 4096, 3_000_000])
def test_kernel_sum_of_squares(size: int) -> None:
    x = mx.random.normal((size,)).astype(mx.bfloat16)
    expected = np.square(np.array(x.astype(mx.float32)).astype(np.float64)).sum()
    assert number(kernels.sum_of_squares([x])) == pytest.approx(expected, rel=1e-5)
    several = [x.astype(mx.float32), x, x[:8]]
    expected = 2 * expected + np.square(np.array(x[:8].astype(mx.float32)).astype(np.float64)).sum()
    assert number(kernels.sum_of_squares(several)) == pytest.approx(expected, rel=1e-5)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("max_norm", [-1.0, 0.5])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_kernel_adam_scalars(bias_correction: bool, max_norm: float) -> None:
    options = mx.array([0.9, 0.999, 0.1, 0.001, 1e-8, 0.1, max_norm])
    numbers = (
        mx.array(81.0),
        mx.array(2.0),
        mx.array(4.0),
        mx.array(1e-2),
        mx.array(3, dtype=mx.uint64),
    )
    found = kernels.adam_scalars(numbers, options, bias_correction=bias_correction)
    expected = scalars_by_hand(numbers, options, bias_correction=bias_correction)
    for one, other in zip(found, expected, strict=True):
        assert mx.allclose(one.astype(mx.float32), other.astype(mx.float32), rtol=1e-5, atol=0)
    ended = kernels.adam_scalars(
        (mx.array(mx.inf), *numbers[1:]), options, bias_correction=bias_correction
    )
    assert not ended[2].item()
    assert ended[0][:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("size", [7, 4096, 1 << 24])
def test_the_norm_of_many_numbers_is_exact(size: int) -> None:
    """A CPU's own sum of so many numbers is 3 % off."""
    drawn = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    exact = np.sqrt((drawn.astype(np.float64) ** 2).sum())
    assert clip({"all": mx.array(drawn)}, None)[1].item() == pytest.approx(exact, rel=2e-6)
    assert mx.sqrt(sum_of_squares([mx.array(drawn)])).item() == pytest.approx(exact, rel=2e-6)


def held() -> int:
    """Bytes of all arrays, once everything is computed."""
    mx.synchronize()
    gc.collect()
    return mx.get_active_memory()


def test_parts_of_an_update_take_no_more_memory_than_passes_have_taken() -> None:
    size, count = 1 << 20, 10
    for room, begun in ((0, 2), (5, 5), (20, 10)):
        parts = [[mx.full((size // 4,), float(place)) + 1] for place in range(count)]
        held()  # what other tests have left is no room
        mx.reset_peak_memory()
        taken = mx.zeros((room * size // 4,))
        mx.eval(taken)
        del taken
        before, pieces = held(), UpdatePieces(parts)
        pieces.begin()
        assert round((held() - before) / size) == begun
        pieces.begin()  # nothing has been waited for, and what is computed is still there
        assert round((held() - before) / size) == begun
        pieces.finish()
        assert round((held() - before) / size) == count
        assert [part.item() for part in (one[0][0] for one in parts)] == list(range(1, count + 1))
        assert not pieces
