"""A model whose embedding adds its gradient in a fixed order trains as one that does not.

On the CPU, where MLX adds one row after another, both must agree within rounding. On a GPU
(``pytest -m gpu``) the whole gradient must be the same bits each time, which MLX's own is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from plain_loop import full_model
from tiny import write_model

from allhands.kernels.fused.embedding import OrderedEmbedding, make_deterministic
from allhands.model.remat import checkpoint_layers
from allhands.model.split import split
from allhands.objectives.causal_lm import make_loss
from allhands.parallel.gradient import make_gradient

VOCABULARY = 259
EMBEDDING = "model.embed_tokens.weight"
WAYS = {
    "eager": {"cpu_native": True},
    "compiled": {"cpu_native": False},
    "lazy": {"cpu_native": False, "compiled": False},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("embedding"), layers=2, tied=request.param)


def ordered_model(directory: Path) -> Any:
    model: Any = full_model(directory)
    assert make_deterministic(model) == 1
    assert type(model.model.embed_tokens) is OrderedEmbedding
    return model


def task(seed: int, rows: int = 3, width: int = 20) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs of few kinds of tokens, places of half as many trained ones, and the tokens."""
    random = np.random.default_rng(seed)
    positions = np.sort(random.choice(rows * width, rows * width // 2, replace=False)).astype(
        np.int32
    )
    inputs = random.choice([1, 2, 40, 41, 42, VOCABULARY - 1], (rows, width)).astype(np.int32)
    targets = random.integers(0, VOCABULARY, len(positions)).astype(np.int32)
    return mx.array(inputs), mx.array(positions), mx.array(targets)


def flat(gradient: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.array(value.astype(mx.float32)) for name, value in tree_flatten(gradient)}


def assert_same(actual: Any, expected: Any) -> None:
    one, other = flat(actual), flat(expected)
    assert one.keys() == other.keys()
    for name, value in other.items():
        np.testing.assert_allclose(
            one[name], value, rtol=0, atol=2e-6 * np.abs(value).max(), err_msg=name
        )


def test_the_model_is_still_parted_into_body_and_head(directory: Path) -> None:
    model = ordered_model(directory)
    plain = full_model(directory)
    parts, expected = split(model), split(plain)
    assert parts is not None
    assert expected is not None
    assert parts.head_is_trained
    assert parts.head_weight_name(model) == expected.head_weight_name(plain)
    assert np.array_equal(np.array(parts.head_weight()), np.array(expected.head_weight()))


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradient_are_those_of_the_plain_model(
    directory: Path, way: str, recomputed: bool
) -> None:
    plain, ordered = full_model(directory), ordered_model(directory)
    for model in (plain, ordered):
        model.train()
        if recomputed:
            checkpoint_layers(model.layers)
    ours, theirs = make_gradient(ordered, **WAYS[way]), make_gradient(plain, **WAYS[way])
    for seed, (rows, width) in enumerate([(3, 20), (1, 7), (3, 20)]):
        arrays = task(seed, rows, width)
        loss, gradient = ours(*arrays)
        expected_loss, expected = theirs(*arrays)
        assert loss.item() == expected_loss.item()
        assert_same(gradient, expected)
        assert float(np.abs(flat(gradient)[EMBEDDING]).max()) > 0.01
        again = flat(ours(*arrays)[1])
        assert all(
            value.tobytes() == again[name].tobytes() for name, value in flat(gradient).items()
        )


def test_evaluation_gives_the_same_bits(directory: Path) -> None:
    losses = []
    for model in (full_model(directory), ordered_model(directory)):
        model.eval()
        losses.append(make_loss(model, cpu_native=False, with_grad=False)(*task(0)).item())
    assert losses[0] == losses[1]


def test_the_gradient_is_the_slope_of_the_loss(tmp_path: Path) -> None:
    """By differences, where it is steepest: one value of each of three tokens."""
    model = ordered_model(write_model(tmp_path / "model", layers=2, tied=False))
    arrays = task(5)
    gradient = flat(make_gradient(model, cpu_native=False, compiled=False)(*arrays)[1])[EMBEDDING]
    loss = make_loss(model, cpu_native=False, with_grad=False)
    table = np.array(model.model.embed_tokens.weight)
    for token in (1, 42, VOCABULARY - 1):
        place = (token, int(np.abs(gradient[token]).argmax()))
        values = []
        for shift in (0.01, -0.01):
            moved = table.copy()
            moved[place] += shift
            model.model.embed_tokens.weight = mx.array(moved)
            values.append(float(loss(*arrays).item()))
        assert (values[0] - values[1]) / 0.02 == pytest.approx(gradient[place], rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.gpu,
    reason="needs a GPU: a CPU adds one row after another anyway",
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_a_gpu_computes_the_same_bits_each_time(directory: Path, dtype: mx.Dtype) -> None:
    model = ordered_model(directory)
    model.update(tree_map(lambda value: value.astype(dtype), model.parameters()))
    gradient = nn.value_and_grad(model, make_loss(model, cpu_native=False))
    results = [flat(gradient(*task(0, 8, 256))[1]) for _ in range(10)]
    for result in results[1:]:
        assert [
            n for n, value in results[0].items() if value.tobytes() != result[n].tobytes()
        ] == []
