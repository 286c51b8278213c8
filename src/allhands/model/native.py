"""What a block computes beside its products, by the code in ``allhands.native``: for training on Linux CPUs.

MLX's CPU back-end computes one operation after the other, on one thread and one number at a time; norms, rotations,
softmax and SwiGLU are several passes each. Here each is one, on all cores. These operations compute when they are
called: they cannot be compiled, and their gradients ask for values, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear
from numpy.typing import NDArray

from allhands.blas import native_library
from allhands.model.choices import PLAIN, chosen
from allhands.model.fastmath import FastMlp, gated, near, swiglu_form, with_vjp
from allhands.trees import flatten

Array = NDArray[Any]
_WIDTH = 16  # a head's width must be a multiple of it
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "rope"}
_PROBE_TOKENS = 24
_CLOSE = 1e-4  # of the largest value
_FORWARD_ONLY = "_native_forward_only"


def available() -> bool:
    """Whether the code is there and MLX computes on the CPU."""
    return native_library() is not None and mx.default_device().type == mx.DeviceType.cpu


def use_native(model: nn.Module) -> int:
    """Let the norms, attention and SwiGLU blocks of ``model`` compute natively where they can; returns how many.

    Only instances change, by a subclass of their own class; the names and values of parameters stay. To be called when
    it is settled what is trained, and not for a model whose step is compiled.
    """
    if not available():
        return 0
    changed = 0
    for layer in _before_training(model):
        for module in layer.modules():
            object.__setattr__(module, _FORWARD_ONLY, True)
    for module in model.modules():
        if (multiply := getattr(module, "multiply_at_once", None)) is not None:
            multiply()
    for module in model.modules():
        if type(module) is nn.RMSNorm and "weight" not in module.trainable_parameters():
            module.__class__ = _Norm
            changed += 1
        elif type(module) is LoRALinear and getattr(module.linear, "coded", None) is not None:
            module.__class__ = _Adapted
            changed += 1
        elif isinstance(module, FastMlp):
            module.__class__ = type(type(module).__name__, (_Mlp, type(module)), {})
            changed += 1
        elif set(module.children()) == _ATTENTION and hasattr(module, "n_kv_heads"):
            changed += _substitute_attention(module)
    return changed


def _before_training(model: Any) -> list[Any]:
    """The blocks through which no gradient goes back: those before the first one that is trained."""
    layers: list[Any] = list(getattr(model, "layers", ()))
    trained = [len(flatten(layer.trainable_parameters())) for layer in layers]
    if sum(trained) < len(flatten(model.trainable_parameters())):
        return []  # something beside the blocks, perhaps the embedding below them
    return layers[: next((i for i, count in enumerate(trained) if count), 0)]


def forward_only(module: Any) -> bool:
    """Whether no gradient goes back through ``module``; then nothing needs to be kept for one."""
    return bool(getattr(module, _FORWARD_ONLY, False))


def _floats(array: mx.array) -> Array:
    """A view of an evaluated array, or a copy in rows if it lies otherwise."""
    return np.ascontiguousarray(np.asarray(array))


def _new(*shape: int) -> tuple[mx.array, Array]:
    """An array of anything, and the view through which it is filled."""
    array = mx.array(np.empty(shape, dtype=np.float32))  # a copy: several times faster than zeros of MLX's own
    return array, np.asarray(array)


def _at(array: Array | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _call(name: str, *arguments: Any) -> None:
    if getattr(native_library(), name)(*arguments) == 0:
        raise MemoryError(name)


# --- norm -----------------------------------------------------------------------------------------


def rms_norm(x: mx.array, weight: mx.array, eps: float, *, frozen: bool = False) -> mx.array:
    """:func:`mlx.core.fast.rms_norm` of float32, differentiable in ``x`` alone, not if ``frozen``: (..., D), (D,)."""
    factor = _floats(weight)
    sizes = (ctypes.c_int(x.size // x.shape[-1]), ctypes.c_int(x.shape[-1]))

    def forward(x: mx.array) -> mx.array:
        values = _floats(x)
        out, room = _new(*x.shape)
        native_library().allhands_norm(_at(values), _at(factor), ctypes.c_float(eps), _at(room), *sizes)  # type: ignore[union-attr]
        return out

    def backward(x: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
        values, towards = _floats(x), _floats(cotangent)
        out, room = _new(*x.shape)
        pointers = (_at(values), _at(factor), _at(towards))
        native_library().allhands_norm_back(*pointers, ctypes.c_float(eps), _at(room), *sizes)  # type: ignore[union-attr]
        return out

    return forward(x) if frozen else with_vjp(forward, backward)(x)


class _Norm(nn.RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        known = x.dtype == self.weight.dtype == mx.float32
        if not known or chosen("rms_norm", "cpu", x.dtype, x.size // x.shape[-1], x.shape[-1:]) == PLAIN:
            return super().__call__(x)
        return rms_norm(x, self.weight, self.eps, frozen=forward_only(self))


# --- SwiGLU ---------------------------------------------------------------------------------------


def _gated(gate: mx.array, up: mx.array) -> mx.array:
    views = _floats(gate), _floats(up)
    out, room = _new(*gate.shape)
    native_library().allhands_gated(*map(_at, views), _at(room), ctypes.c_ssize_t(gate.size))  # type: ignore[union-attr]
    return out


def _gated_back(primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    views = _floats(primals[0]), _floats(primals[1]), _floats(cotangent)
    (in_gate, first), (in_up, second) = _new(*cotangent.shape), _new(*cotangent.shape)
    pointers = [_at(each) for each in (*views, first, second)]
    native_library().allhands_gated_back(*pointers, ctypes.c_ssize_t(cotangent.size))  # type: ignore[union-attr]
    return in_gate, in_up


# ``silu(gate) * up``, element-wise, of float32.
swiglu = with_vjp(_gated, _gated_back)


class _Mlp:
    def __call__(self: Any, x: mx.array) -> mx.array:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not gate.dtype == up.dtype == mx.float32 or swiglu_form(gate) != "native":
            return self.down_proj(gated(gate, up))
        return self.down_proj(_gated(gate, up) if forward_only(self) else swiglu(gate, up))


# --- attention ------------------------------------------------------------------------------------


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    turns: tuple[Array, Array],
    scale: float,
    *,
    frozen: bool = False,
) -> mx.array:
    """Causal attention with rotary embedding, of float32.

    Args:
        q: (B, T, heads * D).
        k: (B, T, fewer heads * D), as ``v``.
        turns: (T, D / 2) cosines and sines for the pairs (i, i + D / 2) of a head's features.
        frozen: whether no gradient is wanted.

    Returns:
        Like ``q``.
    """
    width = 2 * turns[0].shape[1]
    sizes = (ctypes.c_int * 5)(*q.shape[:2], q.shape[2] // width, k.shape[2] // width, width)

    def run(inputs: Sequence[Array | None], outputs: Sequence[Array | None]) -> None:
        pointers = [(ctypes.c_void_p * len(each))(*map(_at, each)) for each in (inputs, outputs)]
        _call("allhands_attention", *pointers, ctypes.c_float(scale), sizes)

    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        views = [_floats(each) for each in (q, k, v)]
        out, room = _new(*q.shape)
        run([*views, *turns, None], [room, None, None, None])
        return out

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        views = [_floats(each) for each in (*primals, cotangent)]
        made = [_new(*primal.shape) for primal in primals]
        run([*views[:3], *turns, views[3]], [None, *(room for _, room in made)])
        return tuple(array for array, _ in made)

    return forward(q, k, v) if frozen else with_vjp(forward, backward)(q, k, v)


class _Attention:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if x.dtype != mx.float32 or cache is not None or not isinstance(mask, str) or mask != "causal":
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        sizes = (self.n_heads, self.n_kv_heads, self._native_width)
        if chosen("attention", "cpu", x.dtype, x.shape[1], sizes) == PLAIN:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        turns = _turns(self, x.shape[1], q.shape[-1] // self.n_heads)
        return self.o_proj(attention(q, k, v, turns, self.scale, frozen=forward_only(self)))


def _turns(module: Any, length: int, width: int) -> tuple[Array, Array]:
    """(length, width / 2) cosines and sines, asked of the model: whatever its base and scaling are."""
    known = module.__dict__.get("_native_turns")
    if known is None or len(known[0]) < length:
        ones = mx.concatenate([mx.ones((width // 2,)), mx.zeros((width // 2,))])
        turned = module.rope(mx.contiguous(mx.broadcast_to(ones, (1, 1, 2 * length, width))))
        cosines, sines = mx.split(turned[0, 0].astype(mx.float32), 2, axis=-1)
        known = _floats(cosines), _floats(sines)
        object.__setattr__(module, "_native_turns", known)
    return known


def _substitute_attention(module: Any) -> bool:
    """Give ``module`` the native form if it then computes the same, also of large inputs."""
    kind = type(module)
    substitute = type(kind.__name__, (_Attention, kind), {})
    try:
        width = module.k_proj(probe := _probe(module)).shape[-1] // module.n_kv_heads
        if width % _WIDTH or module.n_heads % module.n_kv_heads:
            return False
        object.__setattr__(module, "_native_width", width)
        training = module.training
        module.eval()  # dropout would make two passes differ
        try:
            same = all(_agree(module, substitute, factor * probe) for factor in (1.0, 10.0))
        finally:
            module.train(training)
    except (TypeError, ValueError, AttributeError):
        return False
    if same:
        module.__class__ = substitute
    return same


def _agree(module: Any, substitute: Any, x: mx.array) -> bool:
    return near(module(x, "causal"), substitute.__call__(module, x, "causal"), _CLOSE)


def _probe(module: Any) -> mx.array:
    """(1, T, D) input for ``module``."""
    base = module.q_proj.get("linear", module.q_proj)
    width = getattr(base, "input_dims", None) or base.weight.shape[1]
    return mx.sin(mx.arange(_PROBE_TOKENS * width, dtype=mx.float32)).reshape(1, _PROBE_TOKENS, width)


# --- quantised weights ----------------------------------------------------------------------------


class CodedProduct:
    """``x @ w.T`` for the weight ``codes * scales + biases``, which is never made."""

    def __init__(self, codes: mx.array, scales: mx.array, biases: mx.array) -> None:
        """Take (out, groups, group size) uint8 codes, and for each group (out, groups, 1) float32."""
        rows, groups, group = codes.shape
        self._sizes = (ctypes.c_int * 3)(rows, groups * group, group)
        self._held = [np.asarray(each) for each in (codes, scales, biases)]
        self.differentiable = with_vjp(self.forward, lambda _x, cotangent, _y: self._run(cotangent, 1))

    @staticmethod
    def fits(codes: mx.array) -> bool:
        """Whether it can be had for these codes here."""
        group = codes.shape[2]
        return available() and group >= _WIDTH and group & (group - 1) == 0

    def forward(self, x: mx.array) -> mx.array:
        """The product alone."""
        return self._run(x, 0)

    def adapted(self, x: mx.array, a: mx.array, b: mx.array, scale: float) -> mx.array:
        """``x @ w.T + scale * (x @ a) @ b``, of which nothing is kept but ``x`` and ``x @ a``."""
        inner: list[Array] = []

        def forward(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
            y = self._run(x, 0)
            inner[:] = [_multiply(_rows(x), _floats(a))]
            _multiply(inner[0], _floats(b), into=_rows(y), scale=scale)
            return y

        def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
            x, a, b = primals
            made = self._run(cotangent, 1), *(mx.array(np.zeros(each.shape, dtype=np.float32)) for each in (a, b))
            towards = _multiply(_rows(cotangent), _floats(b), right=True, scale=scale)
            _multiply(towards, _floats(a), right=True, into=_rows(made[0]))
            _multiply(_rows(x), towards, left=True, into=np.asarray(made[1]))
            _multiply(inner[0], _rows(cotangent), left=True, into=np.asarray(made[2]), scale=scale)
            return made

        return with_vjp(forward, backward)(x, a, b)

    def _run(self, x: mx.array, back: int) -> mx.array:
        values = _floats(x)
        out, room = _new(*x.shape[:-1], self._sizes[back])
        tokens = ctypes.c_int(x.size // x.shape[-1])
        held = map(_at, self._held)
        _call("allhands_coded_product", _at(values), tokens, *held, self._sizes, ctypes.c_int(back), _at(room))
        return out


class _Adapted(LoRALinear):
    def __call__(self, x: mx.array) -> mx.array:
        # Where something is dropped, allhands.model.dropout has put a class of its own.
        plain = type(self.dropout) is nn.Dropout and self.lora_a.dtype == self.lora_b.dtype == x.dtype == mx.float32
        linear: Any = self.linear
        if not plain or "bias" in linear or not linear.multiplies_natively(x, "adapted_linear"):
            return super().__call__(x)
        return linear.coded.adapted(x, self.lora_a, self.lora_b, self.scale)


def _rows(x: mx.array) -> Array:
    """(N, D) view."""
    return _floats(x).reshape(-1, x.shape[-1])


def _multiply(
    x: Array, y: Array, *, left: bool = False, right: bool = False, into: Array | None = None, scale: float = 1.0
) -> Array:
    """``scale * x @ y``, of which ``left`` or ``right`` is transposed, added to ``into`` if that is given."""
    rows, inner = x.shape[::-1] if left else x.shape
    columns = y.shape[0] if right else y.shape[1]
    out = np.empty((rows, columns), dtype=np.float32) if into is None else into
    forms = 101, 112 if left else 111, 112 if right else 111
    integers = [ctypes.c_int(each) for each in (*forms, rows, columns, inner)]
    factors = (_at(x), ctypes.c_int(x.shape[1]), _at(y), ctypes.c_int(y.shape[1]))
    add = ctypes.c_float(0.0 if into is None else 1.0)
    native_library().cblas_sgemm(*integers, ctypes.c_float(scale), *factors, add, _at(out), ctypes.c_int(columns))  # type: ignore[union-attr]
    return out
