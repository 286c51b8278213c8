"""Fast forms of blocks against the plain ones: values and gradients, and each kernel where there is
a GPU for it.

Without an NVIDIA GPU the forms are computed by MLX's own operations; with one the kernels are run,
too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load
from tiny import write_model

from allhands.io.trees import flatten
from allhands.kernels.documents import caches_for
from allhands.kernels.fused import blocks, kernels, ops
from allhands.kernels.fused.blocks import fuse, keep_dense, kept_bytes
from allhands.kernels.fused.linear import products_of
from allhands.kernels.selection import KernelSelection
from allhands.model.split import split

ROWS, LENGTH = 3, 96


def relative(actual: mx.array, expected: mx.array) -> float:
    actual, expected = actual.astype(mx.float32), expected.astype(mx.float32)
    return float(
        (mx.linalg.norm(actual - expected) / mx.maximum(mx.linalg.norm(expected), 1e-12)).item()
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fused")
    return {
        "dense": write_model(root / "dense", layers=2, hidden=64),
        "quantised": write_model(root / "quantised", layers=2, hidden=64, bits=4),
    }


def model_for(
    paths: dict[str, Path], method: str, dtype: mx.Dtype, norms: tuple[str, ...] = ()
) -> Any:
    """The model, ready to be trained; weights of ``norms`` are random."""
    model, *_ = load(str(paths["quantised" if method == "qlora" else "dense"]))
    mx.random.seed(3)
    for name, value in flatten(model.parameters()):
        if name.endswith(tuple(f"{norm}.weight" for norm in norms)):
            model.load_weights([(name, 1 + mx.random.normal(value.shape) * 0.2)], strict=False)
    model.set_dtype(dtype)
    model.freeze()
    if method == "full":
        model.unfreeze()
    elif method == "last":
        model.layers[-1].unfreeze()
    else:
        keys = (
            {"keys": ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"]}
            if method == "some"
            else {}
        )
        linear_to_lora_layers(
            model,
            1 if method == "some" else len(model.layers),
            {"rank": 8, "scale": 5.0, "dropout": 0.0, **keys},
        )
        # Untrained adapters give nothing, and their first factors no gradient.
        for name, value in flatten(model.trainable_parameters()):
            if name.endswith("lora_b"):
                model.load_weights([(name, mx.random.normal(value.shape) * 0.1)], strict=False)
    mx.eval(model.parameters())
    return model


def loss_and_gradients(model: Any, *, documents: bool) -> tuple[mx.array, dict[str, mx.array]]:
    ids = mx.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7 % 90
    numbers = mx.broadcast_to(mx.arange(LENGTH - 1) // 37, (ROWS, LENGTH - 1))
    more = {"cache": caches_for(len(model.layers), numbers)} if documents else {}

    def loss(model: Any) -> mx.array:
        logits = model(ids[:, :-1], **more)
        return nn.losses.cross_entropy(logits.astype(mx.float32), ids[:, 1:]).mean()

    model.train()
    value, gradients = nn.value_and_grad(model, loss)(model)
    mx.eval(value, gradients)
    return value, dict(flatten(gradients))


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("method", ["lora", "some", "qlora", "full", "last"])
def test_a_model_in_fast_forms_computes_the_same(
    paths: dict[str, Path], method: str, documents: bool, joins: bool
) -> None:
    plain, fast = (model_for(paths, method, mx.float32) for _ in range(2))
    assert fuse(fast, LENGTH, joins=joins) == 4
    names = [name for name, _ in flatten(plain.parameters())]
    assert [name for name, _ in flatten(fast.parameters())] == names
    expected, gradients = loss_and_gradients(plain, documents=documents)
    actual, found = loss_and_gradients(fast, documents=documents)
    assert abs(actual.item() - expected.item()) < 2e-5 * abs(expected.item())
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert mx.abs(gradient).max().item() > 0, name
        assert relative(found[name], gradient) < 2e-4, name


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_attention_whose_queries_and_keys_have_norms(
    tmp_path: Path, kind: str, method: str, documents: bool
) -> None:
    """Of each head by itself in qwen3, of all heads together in olmo2."""
    path = write_model(tmp_path / "model", layers=2, hidden=64, kind=kind)
    plain, fast = (
        model_for({"dense": path}, method, mx.float32, norms=("q_norm", "k_norm")) for _ in range(2)
    )
    assert fuse(fast, LENGTH) == 4
    expected, gradients = loss_and_gradients(plain, documents=documents)
    actual, found = loss_and_gradients(fast, documents=documents)
    assert abs(actual.item() - expected.item()) < 2e-5 * abs(expected.item())
    assert ("model.layers.0.self_attn.q_norm.weight" in gradients) == (method == "full")
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative(found[name], gradient) < 2e-4, name


@pytest.mark.parametrize("length", [96, 128])
def test_rows_that_attention_pads(length: int) -> None:
    """What lies beyond a row changes neither what attention returns nor its gradient."""
    x, cotangent = mx.random.normal((2, 96, 8, 16)), mx.random.normal((2, 4, 96, 16))
    angles = mx.random.uniform(0, 6, (96, 8))
    turns = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1)

    def attended(x: mx.array, length: int | None) -> mx.array:
        q, k, v = ops.rope_split(x, turns, (4, 2), length=length)
        assert q.shape[2] == (length or 96)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask="causal")
        return y[:, :, :96]

    (expected,), (gradient,) = mx.vjp(lambda x: attended(x, None), [x], [cotangent])
    (actual,), (found,) = mx.vjp(lambda x: attended(x, length), [x], [cotangent])
    assert relative(actual, expected) < 1e-6
    assert relative(found, gradient) < 1e-6


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_weights_that_are_not_joined_may_be_others_at_each_use(
    paths: dict[str, Path], method: str
) -> None:
    """The model computes with what its layers have at the moment, and keeps nothing of what they
    had.
    """
    model, other = (model_for(paths, method, mx.float32) for _ in range(2))
    fuse(model, LENGTH, joins=False)
    base, there = (each.layers[0].mlp.gate_proj.linear for each in (model, other))
    key = "scales" if method == "qlora" else "weight"
    base[key] = there[key] = there[key] * 1.5
    expected, _ = loss_and_gradients(other, documents=False)
    actual, _ = loss_and_gradients(model, documents=False)
    assert abs(actual.item() - expected.item()) < 2e-5 * abs(expected.item())
    unchanged, _ = loss_and_gradients(model_for(paths, method, mx.float32), documents=False)
    assert abs(actual.item() - unchanged.item()) > 1e-4


def test_dense_copies_of_quantised_weights(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept as far as there is room, of adapted layers alone; no number differs."""
    found: list[dict[str, mx.array]] = []
    for room, share in ((0, 0.0), (10**9, 1.0)):
        monkeypatch.setattr(blocks, "device_memory", lambda room=room: 32 * room)
        model = model_for(paths, "qlora", mx.float32)
        fuse(model, LENGTH)
        keep_dense(model)
        every = sum(layer.linear.weight.size * 8 * 4 for layer in adapters_of(model))
        assert kept_bytes(model) == share * every
        found.append(loss_and_gradients(model, documents=False)[1])
    assert all(mx.array_equal(found[0][name], found[1][name]) for name in found[0])
    one = max(product.keep_dense(10**9) for product in products_of(model.modules()))
    monkeypatch.setattr(blocks, "device_memory", lambda: 32 * (one + 1))
    model = model_for(paths, "qlora", mx.float32)
    fuse(model, LENGTH)
    keep_dense(model)
    assert 0 < kept_bytes(model) <= one + 1
    dropping = model_for(paths, "qlora", mx.float32)
    for layer in adapters_of(dropping):
        layer.dropout = nn.Identity()  # as one that is told what to drop
    fuse(dropping, LENGTH)
    keep_dense(dropping)
    assert kept_bytes(dropping) == 0
    plain = model_for(paths, "lora", mx.float32)
    fuse(plain, LENGTH)
    keep_dense(plain)
    assert kept_bytes(plain) == 0
    coded = model_for(paths, "qlora", mx.float32)
    fuse(coded, LENGTH, KernelSelection({"quantized_linear": "plain"}))
    keep_dense(coded)
    assert kept_bytes(coded) == 0


def adapters_of(model: Any) -> list[LoRALinear]:
    return [module for module in model.modules() if isinstance(module, LoRALinear)]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_the_loss_still_takes_the_model_apart(tmp_path: Path, method: str, tied: bool) -> None:
    bits = 4 if method == "qlora" else None
    path = write_model(tmp_path / "model", layers=1, hidden=64, tied=tied, bits=bits)
    model = model_for({"dense": path, "quantised": path}, method, mx.float32)
    fuse(model, LENGTH)
    parts = split(model)
    assert parts is not None
    assert parts.head_is_trained == (method == "full")


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_in_half_precision_the_difference_is_its_rounding(
    paths: dict[str, Path], method: str
) -> None:
    exact, plain, fast = (
        model_for(paths, method, dtype) for dtype in (mx.float32, mx.bfloat16, mx.bfloat16)
    )
    if method != "full":
        for model in (plain, fast):  # masters stay float32
            for name, value in flatten(model.trainable_parameters()):
                model.load_weights([(name, value.astype(mx.float32))], strict=False)
    assert fuse(fast, LENGTH) == 4
    _, reference = loss_and_gradients(exact, documents=False)
    _, expected = loss_and_gradients(plain, documents=False)
    _, found = loss_and_gradients(fast, documents=False)
    for name, gradient in reference.items():
        if method != "full":
            assert found[name].dtype == mx.float32
        assert relative(found[name], gradient) < 2 * relative(expected[name], gradient) + 0.01, name


def test_what_computes_otherwise_is_left_alone(paths: dict[str, Path]) -> None:
    model = model_for(paths, "lora", mx.float32)
    mlp, attention = model.layers[0].mlp, model.layers[1].self_attn

    class Clipped(type(mlp)):
        def __call__(self, x: mx.array) -> mx.array:
            return self.down_proj(nn.silu(mx.clip(self.gate_proj(x), -4, 4)) * self.up_proj(x))

    class Capped(type(attention)):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return 0.5 * super().__call__(x, mask, cache)

    mlp.__class__, attention.__class__ = Clipped, Capped
    assert fuse(model, LENGTH) == 2
    assert (type(mlp), type(attention)) == (Clipped, Capped)


@pytest.mark.parametrize("missing", ["scale", "n_heads", "n_kv_heads", "rope"])
def test_what_is_built_otherwise_is_left_alone(paths: dict[str, Path], missing: str) -> None:
    model = model_for(paths, "lora", mx.float32)
    attention = model.layers[1].self_attn
    kind = type(attention)

    class Other(kind):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            setattr(self, missing, self.kept)
            try:
                return super().__call__(x, mask, cache)
            finally:
                setattr(self, missing, object())

    attention.kept = getattr(attention, missing)
    attention.__class__ = Other
    expected = model(mx.arange(9)[None])
    assert fuse(model, LENGTH) == 3
    assert type(attention) is Other
    assert relative(model(mx.arange(9)[None]), expected) < 1e-5


def test_rows_longer_than_the_table_are_computed_in_the_plain_form(paths: dict[str, Path]) -> None:
    plain, fast = (model_for(paths, "lora", mx.float32) for _ in range(2))
    fuse(fast, 16)
    ids = mx.arange(300)[None] % 90
    assert relative(fast(ids), plain(ids)) < 1e-5


@pytest.mark.parametrize(("sum_of", "expected"), [(8.0, True), (7.0, False), (None, False)])
def test_kernels_are_used_only_if_one_can_be_built(
    sum_of: float | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(x: list[mx.array]) -> mx.array:
        if sum_of is None:
            raise RuntimeError("Failed to compile kernel")
        return mx.array(sum_of)

    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(kernels, "sum_of_squares", trial)
    assert kernels.available.__wrapped__() is expected


needs_gpu = pytest.mark.skipif(not kernels.available(), reason="needs an NVIDIA GPU")
TYPES = [mx.bfloat16, mx.float16, mx.float32]
CLOSE = {mx.bfloat16: 8e-3, mx.float16: 1e-3, mx.float32: 2e-6}


def normal(*shape: int, dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    return (mx.random.normal(shape) * scale).astype(dtype)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_kernel_dequantize(dtype: mx.Dtype, group: int) -> None:
    weight, scales, biases = mx.quantize(normal(77, 384, dtype=dtype), group_size=group, bits=4)
    expected = mx.dequantize(weight, scales, biases, group_size=group, bits=4)
    assert relative(kernels.dequantize(weight, scales, biases, group), expected) < CLOSE[dtype]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernel_swiglu(dtype: mx.Dtype) -> None:
    x, cotangent = normal(37, 2 * 104, dtype=dtype, scale=3), normal(37, 104, dtype=dtype)
    (expected,), (gradient,) = mx.vjp(
        ops.plain_swiglu, [x.astype(mx.float32)], [cotangent.astype(mx.float32)]
    )
    (actual,), (found,) = mx.vjp(ops.swiglu, [x], [cotangent])
    assert relative(actual, expected) < CLOSE[dtype]
    assert relative(found, gradient) < CLOSE[dtype]
    same, again = kernels.swiglu_vjp(x, cotangent, again=True)
    assert mx.array_equal(same, found)
    assert mx.array_equal(again, actual)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("ranks", [(8, 8, 8), (16, 4, 32)], ids=str)
def test_kernel_swiglu_adapted(dtype: mx.Dtype, ranks: tuple[int, int, int]) -> None:
    (gate, up, down), rows, features = ranks, 83, 544
    x, cotangent = normal(rows, 2 * features, dtype=dtype), normal(rows, features, dtype=dtype)
    inner, cinner = normal(rows, gate + up, dtype=dtype), normal(rows, down, dtype=dtype)
    a = normal(features, down, dtype=dtype, scale=0.3)
    first, second = (normal(rank, features, dtype=dtype, scale=0.3) for rank in (gate, up))
    b = mx.concatenate(
        [mx.pad(first, [(0, 0), (0, features)]), mx.pad(second, [(0, 0), (features, 0)])]
    )
    wide = [array.astype(mx.float32) for array in (x, inner, b, cotangent, cinner, a)]
    with mx.stream(mx.cpu):  # which keeps all of float32 in products
        whole = wide[3] + wide[4] @ wide[5].T
        (expected,), (gradient,) = mx.vjp(
            lambda x: ops.plain_swiglu(x + wide[1] @ wide[2]), [wide[0]], [whole]
        )
        mx.eval(expected, gradient)
    assert relative(kernels.swiglu_adapted(x, inner, b, (gate, up)), expected) < CLOSE[dtype]
    found, again = kernels.swiglu_adapted_vjp(x, inner, b, (gate, up), cotangent, cinner, a)
    assert relative(found, gradient) < CLOSE[dtype]
    assert relative(again, expected) < CLOSE[dtype]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "features"), [(4, 2, 64), (9, 3, 32), (2, 2, 128)])
def test_kernel_rope(
    dtype: mx.Dtype, heads: int, kv_heads: int, features: int, normed: bool
) -> None:
    x = normal(2, 19, heads + 2 * kv_heads, features, dtype=dtype)
    angles = mx.random.uniform(0, 6, (23, features // 2))
    turns = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1)
    factors = [1 + normal(features, dtype=dtype, scale=0.2) for _ in range(2)]
    mx.eval(turns, factors)
    norms = kernels.HeadNorms(*factors, 1e-5)
    cotangents = [normal(2, n, 19, features, dtype=dtype) for n in (heads, kv_heads, kv_heads)]

    def plain(x: mx.array) -> list[mx.array]:
        q, k, v = mx.split(x, [heads, heads + kv_heads], axis=2)
        if normed:
            wide = (each.astype(mx.float32) for each in factors)
            q, k = (mx.fast.rms_norm(y, w, 1e-5) for y, w in zip((q, k), wide, strict=True))
        y = ops.plain_rope(mx.concatenate([q, k, v], axis=2), turns, heads + kv_heads)
        return mx.split(y.transpose(0, 2, 1, 3), [heads, heads + kv_heads], axis=1)

    wide = [c.astype(mx.float32) for c in cotangents]
    expected, (gradient,) = mx.vjp(plain, [x.astype(mx.float32)], wide)
    assert ops.fuses_norms(x, norms, KernelSelection())
    split = partial(ops.rope_split, norms=norms if normed else None)
    actual, (found,) = mx.vjp(lambda x: list(split(x, turns, (heads, kv_heads))), [x], cotangents)
    for one, other in zip(actual, expected, strict=True):
        assert relative(one, other) < CLOSE[dtype]
    assert relative(found, gradient) < CLOSE[dtype]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("length", [77, 200, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "features"), [(4, 2, 64), (9, 3, 32), (2, 2, 128)])
def test_padded_attention(
    dtype: mx.Dtype, length: int, heads: int, kv_heads: int, features: int
) -> None:
    """Beside MLX's own operations in float32; the other form has its own, larger, rounding."""
    x = normal(3, length, heads + 2 * kv_heads, features, dtype=dtype)
    angles = mx.random.uniform(0, 6, (length, features // 2))
    turns = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1)
    cotangent = normal(3, heads, length, features, dtype=dtype)

    def attended(x: mx.array, selection: KernelSelection) -> mx.array:
        longer = ops.attended_length(x, "causal", selection)
        assert (longer % 128 == 0) == (x.dtype == dtype and not selection.requested)
        q, k, v = ops.rope_split(x, turns, (heads, kv_heads), selection, longer)
        scale = features**-0.5
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        return y[:, :, :length]

    def both(x: mx.array, requested: dict[str, str]) -> tuple[mx.array, mx.array]:
        selection = KernelSelection(requested)
        of = [cotangent.astype(x.dtype)]
        (value,), (gradient,) = mx.vjp(lambda x: attended(x, selection), [x], of)
        return value, gradient

    exact = both(x.astype(mx.float32), {"attention": "plain"})
    plain, padded = both(x, {"attention": "plain"}), both(x, {})
    for one, other, expected in zip(padded, plain, exact, strict=True):
        assert relative(one, expected) < max(CLOSE[dtype], 1.2 * relative(other, expected))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [8, 1000, 50_000])
@pytest.mark.parametrize("in_place", [True, False])
def test_kernel_cross_entropy(
    dtype: mx.Dtype, vocabulary: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "launches_directly", lambda: in_place)
    logits = normal(13, vocabulary, dtype=dtype, scale=4)
    targets = mx.random.randint(0, vocabulary, (13,))
    targets[3] = -1

    def plain(x: mx.array) -> mx.array:
        each = nn.losses.cross_entropy(x, mx.maximum(targets, 0))
        return mx.where(targets < 0, 0, each)

    (expected,), (gradient,) = mx.vjp(plain, [logits.astype(mx.float32)], [mx.ones(13)])
    mx.eval(expected, gradient, logits)
    mine = mx.contiguous(logits + 0)  # which may be written over
    mx.eval(mine)
    loss, found = kernels.cross_entropy(mine, targets)
    mx.eval(loss, found)
    assert relative(mine, found) == 0 if in_place else relative(mine, logits) == 0
    assert relative(loss, expected) < 1e-5
    assert relative(found, gradient) < CLOSE[dtype]
    assert mx.abs(found[3]).max().item() == 0
    poisoned = mx.where(mx.arange(vocabulary) == 2, mx.array(float("nan"), dtype=dtype), logits)
    assert bool(mx.isnan(kernels.cross_entropy(poisoned, targets)[0][0]).item())


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "features"), [(1, 64), (530, 576), (1061, 2048), (9, 5120)])
def test_kernel_rms_norm(dtype: mx.Dtype, rows: int, features: int) -> None:
    x, weight, cotangent = (
        normal(*s, dtype=dtype) for s in ((rows, features), (features,), (rows, features))
    )
    wide = [a.astype(mx.float32) for a in (x, weight, cotangent)]
    _, gradients = mx.vjp(lambda x, w: mx.fast.rms_norm(x, w, 1e-5), wide[:2], wide[2:])
    _, found = mx.vjp(lambda x, w: ops.rms_norm(x, w, 1e-5, trained=True), [x, weight], [cotangent])
    for one, other in zip(found, gradients, strict=True):
        assert relative(one, other) < CLOSE[dtype] * 2


def norms(x: mx.array, residual: mx.array, weight: mx.array) -> list[mx.array]:
    """Both forms of the norm that give the sum as well, one after the other, in MLX's own
    operations.
    """
    second = x + residual
    return [x + mx.fast.rms_norm(x, weight, 1e-5), second, mx.fast.rms_norm(second, weight, 1e-5)]


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("features", [72, 576, 2048, 4096])
def test_norms_with_sums(dtype: mx.Dtype, features: int, trained: bool) -> None:
    x, residual, weight = (
        normal(2, 301, features, dtype=dtype),
        normal(2, 301, features, dtype=dtype),
        normal(features, dtype=dtype),
    )
    cotangents = [normal(2, 301, features, dtype=dtype) for _ in range(3)]

    def fused(x: mx.array, residual: mx.array, weight: mx.array) -> list[mx.array]:
        same, normed = ops.added_rms_norm(x, None, weight, 1e-5, trained=trained)
        return [same + normed, *ops.added_rms_norm(x, residual, weight, 1e-5, trained=trained)]

    wide = [a.astype(mx.float32) for a in (x, residual, weight)]
    expected, gradients = mx.vjp(norms, wide, [c.astype(mx.float32) for c in cotangents])
    actual, found = mx.vjp(fused, [x, residual, weight], cotangents)
    for one, other in zip(actual, expected, strict=True):
        assert relative(one, other) < CLOSE[dtype]
    for one, other in list(zip(found, gradients, strict=True))[: 3 if trained else 2]:
        assert relative(one, other) < CLOSE[dtype] * 2


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernel_add_rows_onto_a_table(dtype: mx.Dtype) -> None:
    """In the table's own memory, where kernels run one after the other; other rows stay bit by bit."""
    rows, ids = normal(700, 256, dtype=dtype), mx.random.randint(0, 300, (700,))
    table = normal(900, 256, dtype=dtype)
    before = np.array(table.astype(mx.float32))
    expected = before.astype(np.float64)
    np.add.at(expected, np.array(ids), np.array(rows.astype(mx.float32)).astype(np.float64))
    found = np.array(
        kernels.add_rows(ids, rows, 900, onto=mx.contiguous(table + 0)).astype(mx.float32)
    )
    assert np.abs(found - expected).max() < CLOSE[dtype] * np.abs(expected).max()
    assert np.array_equal(found[300:], before[300:])
    # As part of a larger array, whose other numbers stay, and read by what comes after it.
    whole = mx.concatenate([table.reshape(-1), mx.ones((64,), dtype=dtype)])
    again = kernels.add_rows(ids, rows, 900, onto=whole[: table.size].reshape(table.shape))
    assert np.array_equal(np.array((again + 0).astype(mx.float32)), found)


def shifted(array: mx.array) -> mx.array:
    """The same numbers as a view of a larger array, which begins where no 16 bytes begin."""
    flat = mx.concatenate([mx.zeros((3,), dtype=array.dtype), array.reshape(-1)])
    mx.eval(flat)
    return flat[3:].reshape(array.shape)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernels_take_views_that_begin_anywhere(dtype: mx.Dtype) -> None:
    """As sums over ranks are, which are parts of what has travelled."""
    x, cotangent, weight = (
        normal(37, 208, dtype=dtype),
        normal(37, 104, dtype=dtype),
        normal(208, dtype=dtype),
    )
    ids = mx.random.randint(0, 37, (20,))
    moments = (normal(64, 104, dtype=dtype), mx.abs(normal(64, 104, dtype=dtype)))
    w, g = normal(64, 104, dtype=dtype), normal(64, 104, dtype=dtype)
    master, float_moments = w.astype(mx.float32), tuple(each.astype(mx.float32) for each in moments)
    scalars = mx.array([0.5, 1, 1e-3, 0.9, 0.99, 1e-8, 1, 1, 0.1, 0.01])

    def computed(view: Callable[[mx.array], mx.array]) -> list[mx.array]:
        firsts, seconds = (
            (view(moments[0]), view(moments[1])),
            (view(float_moments[0]), view(float_moments[1])),
        )
        return [
            kernels.sum_of_squares([view(x), view(cotangent)]),
            kernels.swiglu(view(x)),
            kernels.swiglu_vjp(view(x), view(cotangent))[0],
            *kernels.rms_norm(view(x), view(x), view(weight), 1e-5),
            *kernels.rms_norm_vjp(
                view(x), view(weight), view(x), 1e-5, residual=None, trained=True
            ),
            kernels.take_rows(view(x), ids),
            kernels.add_rows(ids, view(x)[:20], 64, onto=view(mx.zeros((64, 208), dtype=dtype))),
            *kernels.adam(view(g), view(w), firsts, scalars),
            *kernels.adam_master(view(g), view(master), seconds, scalars),
        ]

    for place, (found, expected) in enumerate(
        zip(computed(shifted), computed(lambda x: x), strict=True)
    ):
        assert relative(found, expected) < 1e-6, place
