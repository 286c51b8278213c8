"""The code in C for Linux CPUs: each operation and its gradient beside MLX's own, and products
beside float64.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS  # isort: skip
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from substituted import prepare_dense

from allhands.kernels import native, native_arrays, native_products
from allhands.kernels.documents import DocumentRow, caches_for
from allhands.model.quantized import UnpackedLinear
from allhands.model.remat import checkpoint_layers
from allhands.parallel.gradient import make_gradient
from allhands.runtime.blas import native_library
from allhands.runtime.native.library import architecture, wanted

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or not a Linux CPU")
Arrays = tuple[mx.array, ...]


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def assert_near(actual: mx.array, expected: mx.array, share: float = 3e-6) -> None:
    """Within ``share`` of the largest value."""
    one, other = np.array(actual, dtype=np.float64), np.array(expected, dtype=np.float64)
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, rtol=0, atol=share * np.abs(other).max())


def assert_same(
    ours: Callable[..., mx.array], plain: Callable[..., mx.array], inputs: Arrays
) -> None:
    """Values and all gradients."""
    expected = plain(*inputs)
    assert_near(ours(*inputs), expected)
    towards = random(*expected.shape)
    gradients = [mx.vjp(function, list(inputs), [towards])[1] for function in (ours, plain)]
    for one, other in zip(*gradients, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("width", [576, 37, 16, 3])
def test_rms_norm(width: int) -> None:
    mx.random.seed(1)
    weight = random(width)
    x = random(3, 21, width) * 4
    assert_same(
        lambda x: native.rms_norm(x, weight, 1e-5),
        lambda x: mx.fast.rms_norm(x, weight, 1e-5),
        (x,),
    )
    assert_same(
        lambda x, w: native.rms_norm(x, w, 1e-5, trained=True),
        lambda x, w: mx.fast.rms_norm(x, w, 1e-5),
        (x, weight),
    )


@pytest.mark.parametrize("shape", [(77, 53), (5,), (2, 9, 4096)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    mx.random.seed(2)
    assert_same(
        native.swiglu, lambda gate, up: nn.silu(gate) * up, (random(*shape) * 6, random(*shape))
    )


def test_swiglu_far_out() -> None:
    gate = mx.array([-1000.0, -90.0, -30.0, 30.0, 90.0, 1000.0, 0.0])
    np.testing.assert_allclose(
        np.array(native.swiglu(gate, mx.ones(7))), np.array(nn.silu(gate)), rtol=1e-6, atol=1e-11
    )


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "width"),
    [
        (2, 93, 9, 3, 64),
        (1, 7, 4, 4, 16),
        (2, 130, 4, 1, 48),
        (1, 1, 2, 2, 128),
        (2, 93, 4, 2, 24),
        (1, 33, 3, 3, 10),
    ],
)
def test_attention(batch: int, length: int, heads: int, kv_heads: int, width: int) -> None:
    mx.random.seed(3)
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))[None]
    turns = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rope, scale = nn.RoPE(width), width**-0.5

    def apart(x: mx.array, count: int) -> mx.array:
        return x.reshape(batch, length, count, width).transpose(0, 2, 1, 3)

    def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        turned = rope(apart(q, heads)), rope(apart(k, kv_heads)), apart(v, kv_heads)
        out = mx.fast.scaled_dot_product_attention(*turned, scale=scale, mask="causal")
        return out.transpose(0, 2, 1, 3).reshape(batch, length, -1)

    inputs = tuple(random(batch, length, count * width) for count in (heads, kv_heads, kv_heads))
    assert_same(lambda q, k, v: native.attention(q, k, v, turns, scale), plain, inputs)


@pytest.mark.parametrize("width", [32, 24])
def test_attention_that_does_not_cross_documents(width: int) -> None:
    mx.random.seed(3)
    numbers = mx.array([[0] * 5 + [1] * 40 + [2] * 48, [3] * 90 + [-1] * 3])
    row, length, heads, kv_heads = DocumentRow(numbers), numbers.shape[1], 4, 2
    assert row.starts.tolist() == [[0] * 5 + [5] * 40 + [45] * 48, [0] * 90 + [90] * 3]
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))[None]
    turns = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rope, scale, mask = nn.RoPE(width), width**-0.5, row.make_mask(length)

    def apart(x: mx.array, count: int) -> mx.array:
        return x.reshape(2, length, count, width).transpose(0, 2, 1, 3)

    def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        turned = rope(apart(q, heads)), rope(apart(k, kv_heads)), apart(v, kv_heads)
        out = mx.fast.scaled_dot_product_attention(*turned, scale=scale, mask=mask)
        return out.transpose(0, 2, 1, 3).reshape(2, length, -1)

    inputs = tuple(random(2, length, count * width) for count in (heads, kv_heads, kv_heads))
    assert_same(
        lambda q, k, v: native.attention(q, k, v, turns, scale, starts=row.starts), plain, inputs
    )


@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("before", [1, 37, 80])
def test_attention_of_later_places(before: int, width: int) -> None:
    mx.random.seed(3)
    length, heads, kv_heads = 93, 4, 2
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))[None]
    turns = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    starts = np.minimum(np.arange(length, dtype=np.int32) // 20 * 20, 60)[None].repeat(2, axis=0)
    own = np.ascontiguousarray(starts[:, before:])

    def whole(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        q = mx.concatenate([mx.zeros((2, before, q.shape[-1])), q], axis=1)
        return native.attention(q, k, v, turns, 0.2, starts=starts)[:, before:]

    inputs = tuple(
        random(2, count, size * width)
        for count, size in ((length - before, heads), *[(length, kv_heads)] * 2)
    )
    assert_same(
        lambda q, k, v: native.attention(q, k, v, turns, 0.2, before=before, starts=own),
        whole,
        inputs,
    )


def test_a_model_keeps_documents_apart_without_a_mask() -> None:
    mx.random.seed(9)
    tokens, numbers = mx.random.randint(0, 101, (2, 40)), mx.array([[0] * 11 + [1] * 29, [2] * 40])
    plain, ours = llama(), llama()
    prepare_dense(ours)
    assert native.use_native(ours) >= 10
    row = caches_for(3, numbers)
    computed = ours(tokens, cache=row)
    assert_near(computed, plain(tokens, cache=caches_for(3, numbers)), 1e-4)
    assert row[0]._starts is not None, "natively"
    narrow = caches_for(3, numbers)
    narrow[0].make_mask(40, window_size=4)
    ours(tokens, cache=narrow)
    assert narrow[0]._starts is None, "a window is not known to the native code"


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("tokens", [3, 100])
def test_products_of_codes_with_and_without_an_adapter(bits: int, tokens: int) -> None:
    mx.random.seed(4)
    source = nn.QuantizedLinear.from_linear(
        nn.Linear(192, 80, bias=False), group_size=32, bits=bits
    )
    layer: Any = UnpackedLinear(source)
    layer.multiply_at_once()
    dense = mx.dequantize(source.weight, source.scales, source.biases, group_size=32, bits=bits)
    x = random(2, tokens, 192)
    assert_same(layer, lambda x: x @ dense.T, (x,))
    a, b = random(192, 8), random(8, 80)
    assert_same(
        lambda x, a, b: native_products.adapted(layer.coded, x, a, b, 2.5),
        lambda x, a, b: x @ dense.T + 2.5 * (x @ a) @ b,
        (x, a, b),
    )


@pytest.mark.parametrize("shape", [(2, 9, 70, 33), (1, 300, 64, 192), (3, 1, 5, 7)])
def test_products_that_are_trained_or_adapted(shape: tuple[int, int, int, int]) -> None:
    batch, tokens, width, out = shape
    mx.random.seed(9)
    x, w, a, b = random(batch, tokens, width), random(out, width), random(width, 4), random(4, out)
    dense = native_products.DenseProduct(w)
    assert_same(native_products.trained, lambda x, w: x @ w.T, (x, w))
    assert_same(lambda x: native_products.differentiable(dense, x), lambda x: x @ w.T, (x,))
    assert_same(
        lambda x, a, b: native_products.adapted(dense, x, a, b, 0.5),
        lambda x, a, b: x @ w.T + 0.5 * (x @ a) @ b,
        (x, a, b),
    )


@pytest.mark.parametrize(
    "shape", [(37, 100, 45), (372, 192, 576), (700, 64, 900), (65, 49, 1600), (128, 3000, 32)]
)
@pytest.mark.parametrize(
    ("left", "right"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_products_are_as_exact_as_float32_can_be(
    shape: tuple[int, int, int], left: bool, right: bool
) -> None:
    m, n, k = shape
    draw = np.random.default_rng(5)
    # Magnitudes over ten decades, where dropped parts would show.
    a = (draw.standard_normal((m, k)) * 10.0 ** draw.uniform(-5, 5, (m, 1))).astype(np.float32)
    b = (draw.standard_normal((k, n)) * 10.0 ** draw.uniform(-5, 5, (1, n))).astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    left_side, right_side = (
        np.ascontiguousarray(x.T) if turned else x for x, turned in ((a, left), (b, right))
    )
    out = multiply(left_side, right_side, left, right, (m, n, k))
    # Rounding adds up like a random walk: far below the bound of k roundings.
    assert (np.abs(out - exact) / bound).max() < 2.0**-24 * 4 * np.sqrt(k)


def multiply(a: Any, b: Any, left: bool, right: bool, sizes: tuple[int, int, int]) -> Any:
    """By the library's sgemm."""
    out = np.full(sizes[:2], np.nan, dtype=np.float32)
    library: Any = native_library()
    forms = [
        ctypes.c_int(each) for each in (101, 112 if left else 111, 112 if right else 111, *sizes)
    ]
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (a, b, out)]
    widths = [ctypes.c_int(each.shape[1]) for each in (a, b, out)]
    library.cblas_sgemm(
        *forms, ctypes.c_float(1), pointers[0], widths[0], pointers[1], widths[1], ctypes.c_float(0), *(pointers[2:]),
        widths[2],
    )  # fmt: skip
    return out


def test_the_number_of_threads_changes_no_bit() -> None:
    mx.random.seed(6)
    x, w, library = random(300, 320), random(700, 320), native_library()
    assert library is not None
    found = []
    for threads in (1, 2, 3):
        library.allhands_set_threads(threads)
        y = x @ w.T
        mx.eval(y)
        found.append(bytes(np.asarray(y).data))
    library.allhands_set_threads(1)
    assert found[0] == found[1] == found[2]


def llama(**changes: Any) -> Any:
    arguments = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
    }
    arguments |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 101,
    }
    mx.random.seed(7)
    return Model(ModelArgs.from_dict(arguments | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_traditional": True},
        {"rope_theta": 500.0},
        {"attention_bias": True},
        {"hidden_size": 96},
    ],  # 24 a head
)
def test_a_model_computes_the_same(changes: dict[str, Any]) -> None:
    tokens = mx.random.randint(0, 101, (2, 40))
    plain, ours = llama(**changes), llama(**changes)
    for model in (plain, ours):
        mx.random.seed(8)
        model.freeze()
        linear_to_lora_layers(model, 2, {"rank": 2, "scale": 2.0, "dropout": 0.0})
        prepare_dense(model)
    assert native.use_native(ours) >= 10
    turned = type(ours.layers[0].self_attn) is not type(plain.layers[0].self_attn)
    # Pairs of neighbours are another rotation, which the substitute does not know.
    assert turned == (not changes.get("rope_traditional", False))
    assert [native.forward_only(layer) for layer in ours.layers] == [True, False, False]

    def loss(model: Any) -> mx.array:
        return nn.losses.cross_entropy(model(tokens), tokens, reduction="mean")

    found = [nn.value_and_grad(model, loss)(model) for model in (ours, plain)]
    assert_near(found[0][0], found[1][0], 1e-5)
    for one, other in zip(*(tree_flatten(grads) for _, grads in found), strict=True):
        assert_near(one[1], other[1], 1e-4)


def test_each_layer_is_judged_by_its_own_attributes() -> None:
    tokens = mx.random.randint(0, 101, (2, 40))
    plain, ours = llama(num_hidden_layers=5), llama(num_hidden_layers=5)
    for model in (plain, ours):
        model.freeze()
        prepare_dense(model)
        layers = [layer.self_attn for layer in model.layers]
        layers[1].rope.base = 500.0  # turns otherwise
        layers[3].rope.traditional = True  # not in a way that is known
    assert native.use_native(ours) > 0
    native_ones = [
        type(layer.self_attn) is not type(plain.layers[0].self_attn) for layer in ours.layers
    ]
    assert native_ones == [True, True, True, False, True]
    assert_near(ours(tokens), plain(tokens), 1e-5)
    shared = [ours.layers[i].self_attn._native_turns for i in (0, 1, 2, 4)]
    assert shared[0] is shared[2] is shared[3] is not shared[1]
    assert len(shared[0]["turns"][0]) >= 40


@pytest.mark.parametrize("kind", ["llama", "qwen2", "internlm3"])
def test_angles_that_depend_on_the_length_are_computed_by_the_model(kind: str) -> None:
    """In a row longer than the model's, and then in a short one."""
    more = {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 64,
        "use_qkv_bias": False,
    }
    if kind == "internlm3":
        more |= {"bias": False, "qkv_bias": False}
    arguments = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
    }
    arguments |= {
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 101,
        "model_type": kind,
    } | more
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(7)
    plain, ours = (module.Model(module.ModelArgs.from_dict(arguments)) for _ in range(2))
    # Attention that attends: by the weights of a fresh model all places are alike.
    plain.update(
        tree_map(lambda array: 3 * array if array.ndim == 2 else array, plain.parameters())
    )
    ours.update(plain.parameters())
    assert native.use_native(ours) > 0
    for length in (20, 200, 20):
        tokens = mx.random.randint(0, 101, (2, length))
        assert_near(ours(tokens), plain(tokens), 1e-4)


def gradient_and_peak(fine_tune: str, *, checkpointed: bool) -> tuple[dict[str, mx.array], float]:
    """Of a Llama of six layers; the peak in floats for each token and layer beyond what is there
    before.
    """
    model = llama(num_hidden_layers=6, hidden_size=128, intermediate_size=256)
    if fine_tune == "lora":
        mx.random.seed(8)
        model.freeze()
        linear_to_lora_layers(model, 6, {"rank": 2, "scale": 2.0, "dropout": 0.0})
    prepare_dense(model)
    native.use_native(model)
    if checkpointed:
        checkpoint_layers(model.layers, at_once=True)
    gradient = make_gradient(model, cpu_native=True)
    batch = (
        mx.random.randint(0, 101, (2, 256)),
        mx.arange(0, 512, 4),
        mx.random.randint(0, 101, (128,)),
    )
    mx.eval(model.parameters(), gradient(*batch))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    _, found = gradient(*batch)
    mx.eval(found)
    return dict(tree_flatten(found)), (mx.get_peak_memory() - before) / 4 / 512 / 6


@pytest.mark.parametrize("fine_tune", ["lora", "full"])
def test_a_backward_pass_keeps_what_it_needs_and_recomputes_it_if_asked(fine_tune: str) -> None:
    (plain, most), (again, least) = (
        gradient_and_peak(fine_tune, checkpointed=each) for each in (False, True)
    )
    for name, expected in plain.items():
        assert_near(again[name], expected, 1e-5)
    # The values between the operations of a block, forward, and not those of the backward pass,
    # too: 12 D + 3 F.
    assert most < 24 * 128 + 3 * 256
    assert least < most / 2


class TwoWays(nn.Module):
    """A block with two inputs and two outputs, and a word that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def __call__(
        self, x: mx.array, y: mx.array, word: str, *, factor: float
    ) -> tuple[mx.array, mx.array]:
        assert word == "causal"
        z = mx.tanh(self.linear(x)) * y
        return z, factor * y + x


def test_a_block_of_several_inputs_and_outputs_is_recomputed() -> None:
    mx.random.seed(10)
    plain, recomputed = TwoWays(), TwoWays()
    recomputed.update(plain.parameters())
    checkpoint_layers([recomputed], at_once=True)
    x, y = random(3, 6), random(3, 6)

    def loss(block: Any, weights: Any, x: mx.array, y: mx.array) -> mx.array:
        block.update(weights)
        z, u = block(2 * x, mx.sin(y), "causal", factor=3.0)
        return (z * u).sum()

    found = [
        mx.grad(partial(loss, block), argnums=(0, 1, 2))(plain.parameters(), x, y)
        for block in (plain, recomputed)
    ]
    for one, other in zip(*(tree_flatten(each) for each in found), strict=True):
        assert_near(other[1], one[1])


def test_it_can_be_switched_off() -> None:
    assert not wanted({"ALLHANDS_NATIVE": "off"})


def test_it_is_made_for_this_processor_unless_another_is_named() -> None:
    assert {architecture({"ALLHANDS_NATIVE": each}) for each in ("", "on", "1")} == {"native"}
    assert architecture({}) == "native"
    assert architecture({"ALLHANDS_NATIVE": "x86-64-v3"}) == "x86-64-v3"


def test_a_model_in_half_precision_has_its_gradient() -> None:
    """The product computes in float32 on a CPU; somebody's own loop may not."""
    model = llama()
    model.set_dtype(mx.bfloat16)
    tokens = mx.random.randint(0, 101, (2, 12))
    batch = tokens, mx.arange(0, 24, 2), mx.random.randint(0, 101, (12,))
    found = [
        make_gradient(model, cpu_native=cpu_native, compiled=False)(*batch)
        for cpu_native in (True, False)
    ]
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=0.02)
    grads = [dict(tree_flatten(gradient)) for _, gradient in found]
    for name, one in grads[0].items():
        assert_near(one.astype(mx.float32), grads[1][name].astype(mx.float32), 0.05)


@pytest.mark.parametrize(
    "shape", [(), (1,), (70_000,), (1, 70_000), (70_000, 1), (300, 256), (4, 70, 300), (0, 5)]
)
def test_new_memory_is_filled_through_its_view(shape: tuple[int, ...]) -> None:
    arrays = [native_arrays.new(*shape) for _ in range(3)]
    for value, (array, room) in enumerate(arrays):
        assert (array.shape, array.dtype, room.shape, room.dtype) == (
            shape,
            mx.float32,
            shape,
            np.float32,
        )
        room[...] = value
    for value, (array, _) in enumerate(arrays):
        assert mx.array_equal(array + 1, mx.full(shape, value + 1.0)).item()


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> Iterator[native_arrays.Unwritten]:
    made = native_arrays.Unwritten()
    monkeypatch.setattr(native_arrays, "unwritten", made)
    yield made
    library = native_library()
    assert library is not None
    library.allhands_leave_out(None)  # the address is free after this


def test_only_products_that_ask_for_memory_are_left_out(unwritten: native_arrays.Unwritten) -> None:
    def product(left: Any) -> set[float]:
        out = np.full((300, 256), 7.0, np.float32)
        native_arrays.multiply(left, np.ones((1, 256), np.float32), into=out, add=False)
        return set(out.flat)

    native_arrays.new(300, 256)
    factor = np.asarray(unwritten.ones)
    assert product(factor[:300, None]) == {7.0}
    assert product(factor[:300, None].copy()) == {1.0}
    assert product(factor[1:301, None]) == {1.0}
    native_arrays.new(2000, 256)  # for which there are not enough ones
    assert product(factor[:300, None]) == {1.0}
    assert product(np.asarray(unwritten.ones)[:300, None]) == {7.0}


@pytest.mark.parametrize(("window", "narrow"), [(None, False), (6, False), (4, True)])
def test_a_window_counts_where_it_is_narrower_than_the_row(
    window: int | None, narrow: bool
) -> None:
    row = DocumentRow(mx.array([[0, 0, 0, 0, 0, 1]]))
    mask = np.array(row.make_mask(6, window_size=window))[0, 0]
    expected = np.tril(np.ones((6, 6), bool)) & ~np.tril(np.ones((6, 6), bool), -(window or 6))
    expected[5, :5] = False
    assert (mask == expected).all()
    assert row.windowed == narrow
