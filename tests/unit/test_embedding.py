"""The gradient of an embedding: the right sums, added in an order that nothing but a token's own
rows decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRAEmbedding
from mlx_lm.tuner.lora import LoRAEmbedding
from numpy.typing import NDArray

from allhands.kernels.fused import embedding
from allhands.kernels.fused.embedding import OrderedEmbedding, look_up, make_deterministic

SIZE, DIMS = 23, 5
Floats = NDArray[np.float64]


def rows_for(count: int, seed: int = 0) -> Floats:
    """(count, DIMS) of very unequal sizes, so that every order has a sum of its own."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, DIMS)) * 10.0 ** random.integers(-3, 4, (count, 1))
    return values.astype(np.float32).astype(np.float64)


def gradient(
    ids: Any,
    cotangent: Any,
    dtype: mx.Dtype = mx.float32,
    lookup: Callable[..., mx.array] = look_up,
) -> mx.array:
    """(SIZE, DIMS) gradient of a look-up of ``ids``."""
    table = mx.zeros((SIZE, DIMS), dtype=dtype)
    ids = mx.array(np.asarray(ids, dtype=np.int32))
    given = (
        mx.array(np.asarray(cotangent, dtype=np.float32)).astype(dtype).reshape(*ids.shape, DIMS)
    )
    (result,) = mx.vjp(lambda weight: lookup(weight, ids), [table], [given])[1]
    assert (result.shape, result.dtype) == (table.shape, dtype)
    return result


def bits(array: mx.array) -> bytes:
    """Also of bfloat16, which numpy does not have."""
    return bytes(memoryview(np.array(array.view(mx.uint8))))


def sums(ids: Any, cotangent: Any) -> Floats:
    """The gradient in float64."""
    result = np.zeros((SIZE, DIMS))
    np.add.at(
        result,
        np.asarray(ids).reshape(-1),
        np.asarray(cotangent, dtype=np.float64).reshape(-1, DIMS),
    )
    return result


# --- the numbers ----------------------------------------------------------------------------------

SHAPES = st.sampled_from([(), (1,), (2,), (3,), (64,), (65,), (4, 7), (2, 3, 4), (300,)])


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, kinds=st.integers(1, SIZE), seed=st.integers(0, 1000))
def test_gradient_is_the_sum_of_the_rows(shape: tuple[int, ...], kinds: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.integers(SIZE - kinds, SIZE, shape)
    ids = np.where(random.random(shape) < 0.3, ids - SIZE, ids)  # counted from the end
    cotangent = rows_for(ids.size, seed)
    # A tree of 300 rows is 9 additions deep.
    error = np.abs(np.array(gradient(ids, cotangent)) - sums(ids, cotangent))
    assert (error <= 10 * 2**-24 * sums(ids, np.abs(cotangent))).all()


@pytest.mark.parametrize(
    ("dtype", "eps"), [(mx.bfloat16, 2**-8), (mx.float16, 2**-11)], ids=["bfloat16", "float16"]
)
def test_half_precision_is_rounded_once(dtype: mx.Dtype, eps: float) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 3, 512)
    given = np.array(
        mx.array(random.uniform(0.5, 1, (512, DIMS)).astype(np.float32))
        .astype(dtype)
        .astype(mx.float32)
    )
    expected = sums(ids, given)
    result = np.array(gradient(ids, given, dtype).astype(mx.float32))
    assert (np.abs(result - expected) <= 1.001 * eps * expected).all()
    # MLX's own sum, rounded every time, is far off: the assertion above can fail.
    plain = np.array(
        gradient(ids, given, dtype, lambda weight, ids: weight[ids]).astype(mx.float32)
    )
    assert (np.abs(plain - expected) > 3 * eps * expected).any()


@pytest.mark.parametrize(
    "ids",
    [[7] * 100, [7], [[3, 3], [3, 4]], [*range(SIZE)], [-1, SIZE - 1, -SIZE, 0]],
    ids=["one token", "one place", "rows", "all different", "from the end"],
)
def test_sums_that_are_exact_in_any_order_are_those_of_mlx(ids: list[Any]) -> None:
    whole = np.random.default_rng(0).integers(-1000, 1000, (np.size(ids), DIMS))
    plain = gradient(ids, whole, lookup=lambda weight, ids: weight[ids])
    assert bits(gradient(ids, whole)) == bits(plain)
    assert np.array(plain).any()


def test_no_ids_no_gradient() -> None:
    assert not np.array(gradient(np.zeros((0,)), np.zeros((0, DIMS)))).any()
    assert not np.array(gradient(np.zeros((3, 0)), np.zeros((0, DIMS)))).any()


@pytest.mark.parametrize("kind", [mx.int8, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32])
def test_ids_of_any_type(kind: mx.Dtype) -> None:
    ids = mx.array([1, 2, 1, 120, 1]).astype(kind)
    table = mx.zeros((200, 2))
    result = mx.grad(lambda weight: look_up(weight, ids).sum())(table)
    assert {i: int(result[i, 0].item()) for i in range(200) if result[i].any().item()} == {
        1: 3,
        2: 1,
        120: 1,
    }


def test_values_and_the_gradient_in_a_table_of_one_axis() -> None:
    table = mx.array([0.5, 1.5, 2.5])
    value, result = mx.value_and_grad(
        lambda weight: (look_up(weight, mx.array([[2, 0], [2, 2]])) ** 2).sum()
    )(table)
    assert value.item() == 3 * 2.5**2 + 0.5**2
    assert result.tolist() == [1.0, 0.0, 15.0]


# --- the order ------------------------------------------------------------------------------------


def batch(counts: dict[int, int]) -> tuple[NDArray[Any], Floats]:
    ids = np.repeat([*counts], [*counts.values()])
    return ids, rows_for(len(ids))


def mixed(ids: NDArray[Any], rows: Floats, seed: int) -> tuple[NDArray[Any], Floats]:
    """Other places for all, while the rows of each token keep their order."""
    other = np.random.default_rng(seed).permutation(ids)
    result = np.empty_like(rows)
    for token in set(ids.tolist()):
        result[other == token] = rows[ids == token]
    return other, result


def tree(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sum of (N, DIMS) rows: the most recent ones, a power of two but not all of them, and the
    others before.
    """
    if len(rows) == 1:
        return rows[0]
    half = 1 << (len(rows) - 1).bit_length() - 1
    return tree(rows[-half:]) + tree(rows[:-half])


def test_rows_are_added_as_a_tree_in_the_order_of_their_places() -> None:
    ids, rows = batch({2: 1, 3: 37, 11: 150, 12: 64, 22: 5})
    ids, rows = mixed(ids, rows, 0)
    result = np.array(gradient(ids, rows))
    for token in (2, 3, 11, 12, 22):
        assert result[token].tobytes() == tree(rows[ids == token].astype(np.float32)).tobytes()


def test_an_id_counted_from_the_end_is_the_same_token() -> None:
    ids, rows = batch({3: 37, 11: 150})
    other = np.where(np.random.default_rng(0).random(len(ids)) < 0.5, ids - SIZE, ids)
    assert bits(gradient(other, rows)) == bits(gradient(ids, rows))


def test_only_the_order_of_a_tokens_own_rows_counts() -> None:
    ids, rows = batch({2: 1, 3: 37, 11: 150, 12: 64, 22: 5})
    expected = gradient(ids, rows)
    for seed in range(5):
        assert bits(gradient(*mixed(ids, rows, seed))) == bits(expected)
    # The sum does depend on that order, or nothing would have been shown.
    assert bits(gradient(ids, np.concatenate([rows[:1], rows[37:0:-1], rows[38:]]))) != bits(
        expected
    )


def test_other_tokens_do_not_change_a_tokens_bits() -> None:
    ids, rows = batch({3: 37, 11: 150})
    alone = gradient(ids[ids == 11], rows[ids == 11])
    assert bits(gradient(ids, rows)[11]) == bits(alone[11])


def test_equal_rows_may_change_places() -> None:
    ids, rows = batch({3: 37, 11: 150, 12: 2})
    rows = rows[ids]  # one row for each token
    order = np.random.default_rng(0).permutation(len(ids))
    assert bits(gradient(ids[order], rows[order])) == bits(gradient(ids, rows))


def test_of_all_that_is_added_to_a_row_one_is_not_zero() -> None:
    ids, rows = batch({0: 3, 3: 37, 11: 150, 22: 1})
    totals = np.array(embedding._totals(mx.array(ids), mx.array(rows.astype(np.float32))))
    places = np.flatnonzero(totals.any(axis=1))
    assert ids[places].tolist() == [0, 3, 11, 22]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_with_its_token(value: float) -> None:
    ids, rows = batch({3: 4, 11: 9, 12: 2})
    rows[6, 1] = value
    result, expected = np.array(gradient(ids, rows)), sums(ids, rows)
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))
    assert np.argwhere(~np.isfinite(result)).tolist() == [[11, 1]]


# --- under MLX's transformations ------------------------------------------------------------------


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_for_many_shapes_and_recomputed(compiled: bool, recomputed: bool) -> None:
    def loss(table: mx.array, ids: mx.array, factor: mx.array) -> mx.array:
        return (mx.tanh(look_up(table, ids)) * factor).sum()

    table = mx.array(np.random.default_rng(0).standard_normal((SIZE, DIMS)).astype(np.float32))
    function = mx.grad(mx.checkpoint(loss) if recomputed else loss)
    function = mx.compile(function) if compiled else function
    for seed, shape in enumerate([(3, 4), (2, 9), (3, 4), (1, 1)]):
        ids = np.random.default_rng(seed).integers(0, 4, shape)
        factor = rows_for(ids.size, seed).reshape(*shape, DIMS)
        result = function(table, mx.array(ids), mx.array(factor.astype(np.float32)))
        expected = sums(ids, factor * (1 - np.tanh(np.array(table, dtype=np.float64)[ids]) ** 2))
        np.testing.assert_allclose(np.array(result), expected, rtol=1e-4, atol=1e-3)


# --- which modules --------------------------------------------------------------------------------


class Other(nn.Embedding):
    """Somebody's class with a look-up of its own."""

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * self.weight[x]


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in tree_flatten(module.parameters())]


def test_trained_embeddings_are_changed_once_and_keep_their_names() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Embedding(8, 4), Other(8, 4), nn.Linear(4, 4))
    model.layers[1].freeze()
    before = names(model)
    assert make_deterministic(model) == 1
    assert [type(layer) for layer in model.layers] == [
        OrderedEmbedding,
        nn.Embedding,
        Other,
        nn.Linear,
    ]
    assert names(model) == before
    assert make_deterministic(model) == 0


def test_quantised_embeddings_stay() -> None:
    model = nn.Sequential(nn.Embedding(64, 64))
    nn.quantize(model, 32, 4)
    assert make_deterministic(model) == 0
    assert type(model.layers[0]) is nn.QuantizedEmbedding


def adapted(kind: Any) -> nn.Module:
    """An embedding adapter that has been trained a little: its ``lora_b`` is not zero."""
    mx.random.seed(0)
    module = (
        kind.from_base(nn.Embedding(SIZE, 8), r=3, scale=2.0)
        if kind is not nn.Embedding
        else kind(SIZE, 8)
    )
    if kind is not nn.Embedding:
        module.lora_b = mx.random.normal(module.lora_b.shape)
        module.embedding.freeze()
    return nn.Sequential(module)


@pytest.mark.parametrize("kind", [nn.Embedding, LoRAEmbedding, DoRAEmbedding])
def test_forward_head_and_gradient_are_those_of_the_plain_module(kind: Any) -> None:
    plain, ordered = adapted(kind), adapted(kind)
    assert make_deterministic(ordered) == 1
    assert isinstance(ordered.layers[0], kind)
    ids = mx.array([[1, 2, 1], [1, 22, 1]])
    hidden = mx.random.normal((2, 8))
    assert bits(ordered(ids)) == bits(plain(ids))
    assert bits(ordered.layers[0].as_linear(hidden)) == bits(plain.layers[0].as_linear(hidden))

    def loss(model: Any, ids: mx.array) -> mx.array:
        # Used twice, as with tied weights.
        return mx.logsumexp(model.layers[0].as_linear(model(ids)), axis=-1).sum()

    expected = dict(tree_flatten(nn.value_and_grad(plain, loss)(plain, ids)[1]))
    actual = dict(tree_flatten(nn.value_and_grad(ordered, loss)(ordered, ids)[1]))
    assert actual.keys() == expected.keys() > set()
    for name, value in expected.items():
        np.testing.assert_allclose(
            np.array(actual[name]), np.array(value), rtol=1e-5, atol=1e-5, err_msg=name
        )


def test_adapters_whose_tables_are_not_trained_stay() -> None:
    model = adapted(LoRAEmbedding)
    model.layers[0].freeze(keys="lora_a", recurse=False)
    assert make_deterministic(model) == 0


def test_a_dora_adapter_of_which_only_the_magnitude_is_trained_changes() -> None:
    model = adapted(DoRAEmbedding)
    model.layers[0].freeze(keys=["lora_a", "lora_b"], recurse=False)
    assert make_deterministic(model) == 1


@pytest.mark.parametrize("kind", [LoRAEmbedding, DoRAEmbedding])
def test_dropout_and_evaluation_of_adapters(kind: Any) -> None:
    plain, ordered = adapted(kind), adapted(kind)
    make_deterministic(ordered)
    ids = mx.array([1, 2, 1])
    results = []
    for model in (plain, ordered):
        model.layers[0].dropout = nn.Dropout(0.5)
        mx.random.seed(3)
        model.train()
        dropped = model(ids)
        model.eval()
        results.append((bits(dropped), bits(model(ids))))
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]
