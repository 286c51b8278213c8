"""The operations of a model that can be computed in several forms, at its sizes: what :mod:`measuring` times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear

from allhands.errors import ModelError
from allhands.kernels import fastmath, native, native_products
from allhands.kernels.fused import linear, ops
from allhands.kernels.selection import (
    FORMS,
    PLAIN,
    Choices,
    KernelSelection,
    Kind,
    Selector,
    SizedOperation,
    forms,
    give_selection,
)
from allhands.model.quantized import UnpackedLinear
from allhands.objectives.cross_entropy import eager_linear_cross_entropy, linear_cross_entropy
from allhands.runtime.accelerator import Accelerator
from allhands.train.graph_update import GraphUpdate
from allhands.train.optim import KernelAdamW

# A form of an operation: everything it computes, forward and backward.
Form = Callable[[], list[mx.array]]
_RANK = 8  # of an adapter
_LONGEST_ROW = 1024  # of attention: its plain form holds the square of it
_WEIGHTS = (1 << 18, 1 << 21, 1 << 24)  # trained by an optimizer: few adapters, many, a small model
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class ModelSizes:
    """What the sizes of operations follow from.

    Attributes:
        bits: of quantised weights; 0 if they are dense.
        group: values that share a scale.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    bits: int
    group: int
    dtype: str


SHAPES: Mapping[str, ModelSizes] = {
    "small": ModelSizes(576, 1536, 9, 3, 64, 49152, 4, 32, "bfloat16"),  # the demo model
    "1b": ModelSizes(2048, 8192, 32, 8, 64, 128256, 4, 64, "bfloat16"),
    "7b": ModelSizes(4096, 11008, 32, 32, 128, 32000, 4, 64, "bfloat16"),
}


def sizes_named(name: str, kind: Kind) -> ModelSizes:
    """Of one of :data:`SHAPES`, in the type that models are computed in on a kind of device."""
    return replace(SHAPES[name], dtype="float32") if kind == "cpu" else SHAPES[name]


def sizes_of(config: Mapping[str, Any], accelerator: Accelerator) -> ModelSizes:
    """Of a model, by its configuration.

    Raises:
        ModelError: it does not say them.
    """
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    codes = config.get("quantization") or {}
    affine = codes.get("mode", "affine") == "affine"
    named = str(config.get("torch_dtype") or config.get("dtype"))
    return ModelSizes(
        hidden=hidden,
        inner=_positive(config, "intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or hidden // heads,
        vocabulary=_positive(config, "vocab_size"),
        bits=codes.get("bits", 0) if affine else 0,
        group=codes.get("group_size", 64),
        dtype="float32" if accelerator.kind == "cpu" else named if named in _DTYPES else "bfloat16",
    )


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, int) and value > 0:
        return value
    hint = f"measure a shape near to it: --shape {'|'.join(SHAPES)}"
    raise ModelError(f"its config.json does not have {name}", where="--model", hint=hint)


def problems(sizes: ModelSizes, kind: Kind, tokens: Sequence[int]) -> list[SizedOperation]:
    """The operations of a model that are a choice on a kind of device, at its sizes."""
    made: list[SizedOperation] = []

    def add(name: str, shape: tuple[int, ...], counts: Sequence[int]) -> None:
        if kind in FORMS[name]:
            made.extend(SizedOperation(name, sizes.dtype, shape, count) for count in dict.fromkeys(counts))

    heads = (sizes.heads, sizes.kv_heads, sizes.head_width)
    add("rms_norm", (sizes.hidden,), tokens)
    add("swiglu", (sizes.inner,), tokens)
    add("rope", heads, tokens)
    add("attention", heads, [min(count, _LONGEST_ROW) for count in tokens])
    for weight in _weights(sizes, kind) if sizes.bits else ():
        add("quantized_linear", (*weight, sizes.bits, sizes.group), tokens)
        add("adapted_linear", (*weight, sizes.bits, sizes.group), tokens)
        if sizes.bits == 4 and sizes.dtype != "float32":
            add("dequantize", (*weight, sizes.bits, sizes.group), [0])
    add("cross_entropy", (sizes.vocabulary,), [0])
    add("loss_chunk", (sizes.vocabulary, sizes.hidden), tokens)
    add("adamw", (), _WEIGHTS)
    return made


def _weights(sizes: ModelSizes, kind: Kind) -> list[tuple[int, int]]:
    """(out, in) of a block's linear layers; on CUDA those of one input are one."""
    queries, values = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
    first = [queries + 2 * values, 2 * sizes.inner] if kind == "cuda" else [queries, values, sizes.inner]
    rows = [(out, sizes.hidden) for out in first] + [(sizes.hidden, queries), (sizes.hidden, sizes.inner)]
    return list(dict.fromkeys(rows))


def operation(problem: SizedOperation, kind: Kind) -> dict[str, Form]:
    """Each form of ``problem`` that this device can compute, on the same numbers."""
    mx.random.seed(0)
    dtype = _DTYPES[problem.dtype]
    made = _MAKERS[problem.name](problem, dtype, kind)
    runnable = [form for form in forms(problem.name, kind, problem.tokens) if form in made]
    return {form: made[form] for form in runnable}


def _random(*shape: int, dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    array = (scale * mx.random.normal(shape)).astype(dtype)
    mx.eval(array)
    return array


def _both_ways(function: Callable[..., Any], inputs: list[mx.array], cotangents: list[mx.array]) -> list[mx.array]:
    """Outputs of ``function`` and gradients in its inputs."""
    outputs, gradients = mx.vjp(lambda *primals: _listed(function(*primals)), inputs, cotangents)
    return [*outputs, *gradients]


def _listed(outputs: Any) -> list[mx.array]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _under(problem: SizedOperation, kind: Kind, form: Callable[[Choices], list[mx.array]]) -> dict[str, Form]:
    """``form`` with each choice made for it: it asks for one itself, as in training."""
    return {name: partial(form, _only(problem, name)) for name in FORMS[problem.name][kind]}


def _only(problem: SizedOperation, form: str) -> Choices:
    """One operation in one form, all others by rule."""
    return Choices(wished={problem.name: form})


def _norm(problem: SizedOperation, dtype: mx.Dtype, kind: Kind) -> dict[str, Form]:
    x, c = (_random(problem.tokens, *problem.shape, dtype=dtype) for _ in range(2))
    weight = 1 + _random(*problem.shape, dtype=dtype, scale=0.1)
    if kind == "cuda":

        def norm(selection: Selector) -> list[mx.array]:
            function = partial(ops.rms_norm, weight=weight, eps=1e-5, trained=False, selection=selection)
            return _both_ways(function, [x], [c])

        return _under(problem, kind, norm)
    made: dict[str, Form] = {"plain": lambda: _both_ways(lambda x: mx.fast.rms_norm(x, weight, 1e-5), [x], [c])}
    if native.available():
        made["native"] = lambda: _both_ways(lambda x: native.rms_norm(x, weight, 1e-5), [x], [c])
    return made


def _swiglu(problem: SizedOperation, dtype: mx.Dtype, kind: Kind) -> dict[str, Form]:
    features = problem.shape[0]
    c = _random(problem.tokens, features, dtype=dtype)
    if kind == "cuda":
        x = _random(problem.tokens, 2 * features, dtype=dtype)
        return _under(problem, kind, lambda choices: _both_ways(lambda x: ops.swiglu(x, choices), [x], [c]))
    parts = [_random(problem.tokens, features, dtype=dtype) for _ in range(2)]
    made: dict[str, Form] = {
        "plain": lambda: _both_ways(lambda gate, up: nn.silu(gate) * up, parts, [c]),
        "polynomial": lambda: _both_ways(fastmath.swiglu, parts, [c]),
    }
    if native.available():
        made["native"] = lambda: _both_ways(native.swiglu, parts, [c])
    return made


def _rope(problem: SizedOperation, dtype: mx.Dtype, kind: Kind) -> dict[str, Form]:
    heads, kv_heads, width = problem.shape
    x = _random(1, problem.tokens, heads + 2 * kv_heads, width, dtype=dtype)
    cs = [_random(1, count, problem.tokens, width, dtype=dtype) for count in (heads, kv_heads, kv_heads)]
    turns = mx.stack([mx.array(each) for each in _turns(problem.tokens, width)], axis=-1)

    def rope(selection: Selector) -> list[mx.array]:
        return _both_ways(lambda x: ops.rope_split(x, turns, heads, kv_heads, selection), [x], cs)

    return _under(problem, kind, rope)


def _turns(length: int, width: int) -> tuple[Any, Any]:
    """(length, width / 2) float32 cosines and sines."""
    angles = np.arange(length)[:, None] * 10000.0 ** (-2.0 * np.arange(width // 2) / width)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _attention(problem: SizedOperation, dtype: mx.Dtype, _: Kind) -> dict[str, Form]:
    heads, kv_heads, width = problem.shape
    length, scale = problem.tokens, problem.shape[2] ** -0.5
    inputs = [_random(1, length, count * width, dtype=dtype) for count in (heads, kv_heads, kv_heads)]
    c, turns = _random(1, length, heads * width, dtype=dtype), _turns(problem.tokens, width)

    def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        q, k, v = (each.reshape(1, length, -1, width).transpose(0, 2, 1, 3) for each in (q, k, v))
        q, k = (mx.fast.rope(e, width, traditional=False, base=10000.0, scale=1.0, offset=0) for e in (q, k))
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        return y.transpose(0, 2, 1, 3).reshape(1, length, -1)

    made: dict[str, Form] = {"plain": lambda: _both_ways(plain, inputs, [c])}
    if native.available():
        made["native"] = lambda: _both_ways(lambda q, k, v: native.attention(q, k, v, turns, scale), inputs, [c])
    return made


def _linear(problem: SizedOperation, dtype: mx.Dtype, kind: Kind) -> dict[str, Form]:
    x, c = (_random(problem.tokens, width, dtype=dtype) for width in problem.shape[1::-1])
    layer, selection = _quantised(problem, dtype), KernelSelection()

    def product(choices: Choices) -> list[mx.array]:
        selection.select_by(choices)
        return _both_ways(layer, [x], [c])

    if kind != "cpu":
        linear.use_dense(layer, selection)
        return _under(problem, kind, product)
    (unpacked,) = (UnpackedLinear(each) for each in layer.layers)
    mx.eval(unpacked.parameters())
    made: dict[str, Form] = {"plain": lambda: _both_ways(unpacked, [x], [c])}
    if native_products.CodedProduct.fits(unpacked.codes.shape[2]):
        coded = native_products.CodedProduct(unpacked.codes, unpacked.scales, unpacked.biases)
        made["native"] = lambda: _both_ways(partial(native_products.differentiable, coded), [x], [c])
    return made


def _adapted(problem: SizedOperation, dtype: mx.Dtype, kind: Kind) -> dict[str, Form]:
    """As trained: a layer and its adapter, with the gradients of both factors."""
    out, width = problem.shape[:2]
    x, c = (_random(problem.tokens, features, dtype=dtype) for features in (width, out))
    layer: Any = LoRALinear(width, out, r=_RANK)
    (layer.linear,) = (UnpackedLinear(each) for each in _quantised(problem, dtype).layers)
    factors = [_random(width, _RANK, dtype=dtype), _random(_RANK, out, dtype=dtype, scale=0.1)]
    selection = KernelSelection()
    native.use_native(nn.Sequential(layer), selection)

    def run(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        layer.lora_a, layer.lora_b = a, b
        return layer(x)

    def product(choices: Choices) -> list[mx.array]:
        selection.select_by(choices)
        return _both_ways(run, [x, *factors], [c])

    both = _under(problem, kind, product)
    return both if native.available() else {PLAIN: both[PLAIN]}


def _quantised(problem: SizedOperation, dtype: mx.Dtype) -> nn.Sequential:
    out, width, bits, group = problem.shape
    layer = nn.QuantizedLinear(width, out, bias=False, group_size=group, bits=bits)
    weight = _random(out, width, dtype=dtype, scale=width**-0.5)
    layer.weight, layer.scales, layer.biases = mx.quantize(weight, group_size=group, bits=bits)
    mx.eval(layer.parameters())
    return nn.Sequential(layer)


def _dequantize(problem: SizedOperation, dtype: mx.Dtype, kind: Kind) -> dict[str, Form]:
    (layer,) = _quantised(problem, dtype).layers
    return _under(problem, kind, lambda choices: [linear.dequantized(layer, choices)])


def _loss(problem: SizedOperation, dtype: mx.Dtype, kind: Kind) -> dict[str, Form]:
    vocabulary, width = problem.shape if len(problem.shape) == 2 else (*problem.shape, 1024)
    rows = problem.tokens or 1024
    hidden, weight = _random(rows, width, dtype=dtype), _random(vocabulary, width, dtype=dtype, scale=width**-0.5)
    targets = mx.random.randint(0, vocabulary, (rows,))
    if kind == "cpu":

        def run(choices: Choices) -> list[mx.array]:
            loss, gradient, _ = eager_linear_cross_entropy(
                hidden, weight, targets, train_weight=False, selection=choices
            )
            assert gradient is not None
            return [loss, gradient]

        return _under(problem, kind, run)
    loss = partial(linear_cross_entropy, weight=weight, targets=targets, train_weight=False)

    def both(choices: Choices) -> list[mx.array]:
        return _both_ways(partial(loss, selection=choices), [hidden], [mx.array(1.0)])

    return _under(problem, kind, both)


def _adam(problem: SizedOperation, dtype: mx.Dtype, kind: Kind) -> dict[str, Form]:
    weight, gradient = (_random(problem.tokens, dtype=dtype, scale=0.02) for _ in range(2))

    def updates(choices: Choices) -> Form:
        # Each form has a model of its own, since an update changes it.
        model: Any = nn.Module()
        give_selection(model, choices)
        model.weight = weight + 0
        update = GraphUpdate(model, KernelAdamW(1e-3, weight_decay=0.01), 1.0, compiled=True)

        def run() -> list[mx.array]:
            norm = update([("weight", gradient + 0)], mx.array(1.0), mx.array(8.0))
            return [model.weight, norm]

        return run

    return {name: updates(_only(problem, name)) for name in FORMS["adamw"][kind]}


_MAKERS: Mapping[str, Callable[[SizedOperation, mx.Dtype, Kind], dict[str, Form]]] = {
    "rms_norm": _norm,
    "swiglu": _swiglu,
    "rope": _rope,
    "attention": _attention,
    "quantized_linear": _linear,
    "adapted_linear": _adapted,
    "dequantize": _dequantize,
    "cross_entropy": _loss,
    "loss_chunk": _loss,
    "adamw": _adam,
}
