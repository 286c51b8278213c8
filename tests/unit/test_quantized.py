"""Quantised layers made fast for a CPU compute what MLX's own do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from substituted import prepare_quantized
from tiny import write_model

from allhands.kernels.instances import give_form
from allhands.kernels.packed import PackedLinear
from allhands.model.load import load_model
from allhands.model.passes import PassContext, apply_passes
from allhands.model.quantized import UnpackedLinear, bytes_of_form
from allhands.objectives.causal_lm import CAUSAL_LM
from allhands.runtime.accelerator import Accelerator


def quantized(bits: int, group_size: int, bias: bool = False) -> nn.QuantizedLinear:
    mx.random.seed(bits)
    return nn.QuantizedLinear.from_linear(
        nn.Linear(128, 24, bias=bias), group_size=group_size, bits=bits
    )


def numpy_weight(layer: nn.QuantizedLinear) -> np.ndarray[Any, Any]:
    """Unpack the words by hand: little-endian bit fields, ``scale * code + bias`` in each group."""
    words = np.array(layer.weight)
    stream = np.unpackbits(words.view(np.uint8).reshape(len(words), -1), axis=1, bitorder="little")
    fields = stream.reshape(len(words), -1, layer.bits)
    codes = (fields * (1 << np.arange(layer.bits))).sum(axis=2).astype(np.float32)
    grouped = codes.reshape(len(words), -1, layer.group_size)
    return (
        grouped * np.array(layer.scales)[..., None] + np.array(layer.biases)[..., None]
    ).reshape(len(words), -1)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_unpacked_layer_has_the_weight_of_the_quantised_one(bits: int, group_size: int) -> None:
    layer = quantized(bits, group_size, bias=True)
    layer.bias = mx.arange(24) * 0.1
    x = mx.random.normal((7, 128))
    expected = np.array(x) @ numpy_weight(layer).T + np.array(layer.bias)
    np.testing.assert_allclose(np.array(UnpackedLinear(layer)(x)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("native", [True, False])
def test_dense_layers_on_a_cpu_have_the_quantised_weights(
    bits: int, dtype: mx.Dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("allhands.model.quantized.available", lambda: False)
    mx.random.seed(bits)
    model: Any = nn.Sequential(
        nn.Embedding(300, 256), nn.Linear(256, 24)
    )  # more than is handed over by a copy
    model.set_dtype(dtype)
    nn.quantize(model, 32, bits)
    expected = [numpy_weight(floats(layer)) for layer in copy.deepcopy(model).layers]
    assert prepare_quantized(model, device("cpu"), compact=False) == 2
    for layer, weight in zip(model.layers, expected, strict=True):
        assert layer.weight.dtype == mx.float32
        # MLX rounds the weights of half precision, twice.
        bound = 1e-2 if dtype == mx.bfloat16 and not native else 1e-6
        np.testing.assert_allclose(np.array(layer.weight), weight, rtol=bound, atol=bound)


def floats(layer: Any) -> Any:
    """The same layer with scales and biases in float32."""
    layer.scales, layer.biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    return layer


def test_gradient_flows_through_an_unpacked_layer() -> None:
    layer = quantized(4, 32)
    unpacked = UnpackedLinear(layer)
    x, towards = mx.random.normal((2, 5, 128)), mx.random.normal((2, 5, 24))
    grad = mx.grad(lambda x: (unpacked(x) * towards).sum())(x)
    np.testing.assert_allclose(
        np.array(grad), np.array(towards) @ numpy_weight(layer), rtol=1e-5, atol=1e-5
    )


def test_nothing_of_an_unpacked_layer_is_trained_and_it_is_small() -> None:
    layer = quantized(4, 32)
    unpacked = UnpackedLinear(layer)
    assert unpacked.trainable_parameters() == {}
    held = sum(array.nbytes for _, array in tree_flatten(unpacked.parameters()))
    assert held == 24 * 128 + 2 * 4 * 24 * 128 // 32  # a byte a value, scale and bias a group


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_prepared_model_computes_the_same_under_the_same_names(
    tmp_path: Path, compact: bool, use_dora: bool
) -> None:
    path = write_model(tmp_path / "model", bits=4, tied=False)
    models: list[Any] = [load_model(str(path)).model for _ in range(2)]
    for model in models:
        model.freeze()
        mx.random.seed(5)
        linear_to_lora_layers(
            model, 2, {"rank": 4, "scale": 3.0, "dropout": 0.0}, use_dora=use_dora
        )
        for name, value in tree_flatten(model.trainable_parameters()):
            if name.endswith("lora_b"):
                mx.random.seed(len(name))
                model.load_weights([(name, mx.random.normal(value.shape) * 0.05)], strict=False)
    replaced = prepare_quantized(models[1], device("cpu"), compact=compact)
    assert replaced == 3 * 7 + 2  # three blocks of seven layers, embedding and head
    names = [[name for name, _ in tree_flatten(model.trainable_parameters())] for model in models]
    assert names[0] == names[1]
    tokens = mx.array([[5, 80, 200, 7, 13]])
    logits = [np.array(model(tokens).astype(mx.float32)) for model in models]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    unpacked = [
        name for name, module in models[1].named_modules() if isinstance(module, UnpackedLinear)
    ]
    assert len(unpacked) == (0 if not compact else 7 if use_dora else 21)


def device(kind: Any, memory_bytes: int = 10**12) -> Accelerator:
    return Accelerator(kind, kind, memory_bytes, 1, kind == "cpu", None)


@pytest.mark.parametrize(
    ("kind", "memory_bytes", "replaced"),
    [("metal", 10**12, 0), ("cuda", 10**6, 0), ("cuda", 10**12, 3 * 7 + 1)],
)
def test_other_devices_keep_their_layers_unless_small(
    tmp_path: Path, kind: str, memory_bytes: int, replaced: int
) -> None:
    model: Any = load_model(str(write_model(tmp_path / "model", bits=4))).model
    tokens = mx.array([[5, 80, 200]])
    model.set_dtype(mx.float16)
    before = np.array(model(tokens).astype(mx.float32))
    # As it computes, packed or not: float32 would be as slow as it is large.
    types = {mx.float16, mx.uint32}
    assert prepare_quantized(model, device(kind, memory_bytes), compact=True) == replaced
    left = sum(hasattr(module, "bits") for _, module in model.named_modules())
    assert {
        value.dtype for name, value in tree_flatten(model.parameters()) if name.endswith("weight")
    } <= types
    assert left == 3 * 7 + 1 - replaced
    np.testing.assert_allclose(
        np.array(model(tokens).astype(mx.float32)), before, rtol=0, atol=1e-2
    )


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("tokens", [2, 90])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_packed_layer_multiplies_and_differentiates_as_one_of_codes(
    bits: int, tokens: int, at_once: bool
) -> None:
    mx.random.seed(bits)
    dense = nn.Linear(512, 700)  # several blocks of rows, the last of another size
    dense.set_dtype(mx.bfloat16)
    layer = nn.QuantizedLinear.from_linear(dense, group_size=64, bits=bits)
    codes = UnpackedLinear(layer)
    before = sum(array.nbytes for _, array in tree_flatten(layer.parameters()))
    packed: Any = layer
    give_form(packed, PackedLinear)
    assert sum(array.nbytes for _, array in tree_flatten(packed.parameters())) == before
    assert packed.scales.dtype == mx.bfloat16
    if at_once:
        packed.multiply_at_once()
        codes.multiply_at_once()
        assert packed.coded is not None
    x, towards = mx.random.normal((2, tokens, 512)), mx.random.normal((2, tokens, 700))
    for one, other in zip(
        *(
            mx.vjp(layer, [x], [towards])[0] + mx.vjp(layer, [x], [towards])[1]
            for layer in (packed, codes)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(
            np.array(one), np.array(other), rtol=0, atol=1e-6 * float(mx.abs(other).max())
        )


# mlx_lm's DoRA takes no layers of 3 bits.
@pytest.mark.parametrize(
    ("bits", "use_dora"), [(3, False), (4, False), (8, False), (4, True), (8, True)]
)
def test_a_packed_model_has_the_loss_and_the_gradients_of_the_roomy_one(
    tmp_path: Path, bits: int, use_dora: bool
) -> None:
    path = write_model(tmp_path / "model", bits=bits, tied=bits == 4)
    found: list[Any] = []
    for short in (False, True):
        model: Any = load_model(str(path)).model
        model.freeze()
        stored = {
            module.scales.dtype
            for module in model.modules()
            if isinstance(module, nn.QuantizedLinear)
        }
        mx.random.seed(5)
        linear_to_lora_layers(
            model, 2, {"rank": 4, "scale": 3.0, "dropout": 0.0}, use_dora=use_dora
        )
        for name, value in tree_flatten(model.trainable_parameters()):
            if name.endswith("lora_b"):
                mx.random.seed(len(name))
                model.load_weights([(name, mx.random.normal(value.shape) * 0.05)], strict=False)
        applied = apply_passes(
            model, PassContext(device("cpu"), "train", at_once=True, longest=40, short=short)
        )
        assert any("stay packed" in each.words for each in applied) == short
        if short:
            left = [module for module in model.modules() if isinstance(module, nn.QuantizedLinear)]
            assert len(left) == 3 * 7 + (bits != 4)
            assert {module.scales.dtype for module in left} == stored
        tokens = mx.random.randint(0, 200, (3, 41), key=mx.random.key(1))
        positions = mx.arange(3 * 40)
        gradient = CAUSAL_LM.cpu_gradient(model)
        assert gradient is not None
        loss, grads = gradient(tokens[:, :-1], positions, tokens[:, 1:].reshape(-1))
        validated = CAUSAL_LM.sums(model, cpu_native=True, with_grad=False)
        assert (
            abs(
                validated(tokens[:, :-1], positions, tokens[:, 1:].reshape(-1))[0].item()
                / loss.item()
                - 1
            )
            < 1e-6
        )
        found.append({"loss": loss, **dict(tree_flatten(grads))})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        bound = 1e-5 * float(mx.abs(expected).max())
        np.testing.assert_allclose(
            np.array(found[1][name]), np.array(expected), rtol=0, atol=bound, err_msg=name
        )


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_modes_stay_packed_too(mode: str) -> None:
    mx.random.seed(3)
    model: Any = nn.Sequential(nn.Embedding(300, 256), nn.Linear(256, 600))
    nn.quantize(model, mode=mode)
    twin = copy.deepcopy(model)
    assert prepare_quantized(model, device("cpu"), compact=True, short=True) == 2
    assert prepare_quantized(twin, device("cpu"), compact=True) == 2
    tokens = mx.array([[5, 80, 200, 7, 13] * 4])
    np.testing.assert_allclose(
        np.array(model(tokens)), np.array(twin(tokens)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_answers_as_the_dense_one(tmp_path: Path, tied: bool) -> None:
    path = write_model(tmp_path / "model", bits=4, tied=tied)
    models: list[Any] = [load_model(str(path)).model for _ in range(2)]
    assert prepare_quantized(models[0], device("cpu"), compact=False) == 3 * 7 + 2 - tied
    assert (
        prepare_quantized(models[1], device("cpu"), compact=False, short=True) == 3 * 7 + 2 - tied
    )
    for count in (1, 30):
        tokens = mx.random.randint(0, 200, (1, count), key=mx.random.key(count))
        expected, logits = (np.array(model(tokens)) for model in models)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("form", ["codes", "dense", "packed"])
def test_bytes_of_a_form_are_told_before_it_is_made(
    tmp_path: Path, form: Any, use_dora: bool
) -> None:
    model: Any = load_model(str(write_model(tmp_path / "model", bits=4, tied=False))).model
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 3.0, "dropout": 0.0}, use_dora=use_dora)
    told = bytes_of_form(model, form)
    prepare_quantized(model, device("cpu"), compact=form != "dense", short=form == "packed")
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert abs(told - held) <= 0.01 * held
