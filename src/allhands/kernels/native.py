"""Norms, attention and SwiGLU by the code in ``allhands.runtime.native``, for training on Linux
CPUs.

MLX's CPU back-end computes one operation after the other, on one thread and one number at a time;
norms, rotations, softmax and SwiGLU are several passes each. Here each is one pass, on all cores.
These operations and their gradients compute at once, from values: they cannot be compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from allhands.io.trees import flatten
from allhands.kernels import known, native_arrays, native_experts, native_products
from allhands.kernels.context import ContextRow
from allhands.kernels.documents import DocumentRow
from allhands.kernels.fastmath import FastMlp, gated, with_vjp
from allhands.kernels.instances import give_form, mix_in
from allhands.kernels.native_arrays import (
    FORWARD_ONLY,
    Array,
    available,
    floats,
    forward_only,
    new,
)
from allhands.kernels.native_experts import NativeExperts
from allhands.kernels.native_products import AdaptedLinear, Linear
from allhands.kernels.selection import (
    BY_RULE,
    PLAIN,
    SELECTION,
    KernelSelection,
    give_selection,
    selection_of,
)
from allhands.runtime.native_calls import at, call, call_checked, pointers

_WIDTH = 16  # of a vector; the width of a head is padded to a multiple of it


def use_native(model: nn.Module, selection: KernelSelection = BY_RULE) -> int:
    """Let norms, attention, SwiGLU and linear layers of ``model`` compute natively if they can;
    return their number.

    Only instances change: each gets a subclass of its own class. The names and values of parameters
    stay. Call it after the choice of trained weights, and not for a model whose step is compiled.
    """
    if not available():
        return 0
    changed = 0
    for layer in before_training(model):
        for module in layer.modules():
            object.__setattr__(module, FORWARD_ONLY, True)
    for module in model.modules():
        if (multiply := getattr(module, "multiply_at_once", None)) is not None:
            multiply()
            give_selection(module, selection)
    turns: dict[Hashable, dict[str, tuple[Array, Array]]] = {}
    for module in model.modules():
        if type(module) is nn.RMSNorm:
            give_form(module, NativeNorm, **{SELECTION: selection})
            changed += 1
        elif isinstance(module, FastMlp):
            mix_in(module, NativeMlp, **{SELECTION: selection})
            changed += 1
        elif (sizes := known.attention_of(module)) is not None:
            _use_attention(module, sizes, turns, selection)
            changed += 1
        else:
            changed += native_experts.substitute(module, selection)
    blocks: list[nn.Module] = list(getattr(model, "layers", ()))
    return changed + sum(
        native_products.substitute(module) for block in blocks for module in block.modules()
    )


def is_native(model: nn.Module) -> bool:
    """Return true if a part of ``model`` computes natively: when it is called, not in a graph."""
    forms = (NativeNorm, NativeMlp, NativeAttention, NativeExperts, Linear, AdaptedLinear)
    return any(isinstance(module, forms) for module in model.modules())


def before_training(model: Any) -> list[Any]:
    """Return the blocks through which no gradient goes back: those before the first one that is
    trained.

    The list is empty if the model is not known to run each block once, in order.
    """
    if not known.runs_in_order(model):
        return []
    layers: list[Any] = list(model.layers)
    trained = [len(flatten(layer.trainable_parameters())) for layer in layers]
    if sum(trained) < len(flatten(model.trainable_parameters())):
        return []  # something outside the blocks is trained, perhaps the embedding below them
    return layers[: next((i for i, count in enumerate(trained) if count), 0)]


# --- norm -----------------------------------------------------------------------------------------


def rms_norm(
    x: mx.array, weight: mx.array, eps: float, *, frozen: bool = False, trained: bool = False
) -> mx.array:
    """:func:`mlx.core.fast.rms_norm` of float32: (..., D), (D,).

    It has a gradient in ``x``, and in ``weight`` if that is ``trained``; none if ``frozen``.
    """
    sizes = (ctypes.c_int(x.size // x.shape[-1]), ctypes.c_int(x.shape[-1]))

    def forward(x: mx.array, weight: mx.array) -> mx.array:
        values, factor = floats(x), floats(weight)
        out, room = new(*x.shape)
        call("allhands_norm", at(values), at(factor), ctypes.c_float(eps), at(room), *sizes)
        return out

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        views = [floats(each) for each in (*primals, cotangent)]
        made = [new(*primal.shape) for primal in (primals if trained else primals[:1])]
        outputs = [at(room) for _, room in made]
        call_checked(
            "allhands_norm_back",
            *map(at, views),
            ctypes.c_float(eps),
            *outputs,
            *[None] * (2 - len(made)),
            *sizes,
        )
        return tuple(array for array, _ in made)

    if frozen:
        return forward(x, weight)
    if trained:
        return with_vjp(forward, backward)(x, weight)
    back = lambda x, cotangent, y: backward((x, weight), cotangent, y)[0]  # noqa: E731
    return with_vjp(lambda x: forward(x, weight), back)(x)


class NativeNorm(nn.RMSNorm):
    """:class:`mlx.nn.RMSNorm` with :func:`rms_norm`."""

    def __call__(self, x: mx.array) -> mx.array:
        known = x.dtype == self.weight.dtype == mx.float32
        if not known or selection_of(self).select("rms_norm", "cpu") == PLAIN:
            return super().__call__(x)
        trained = "weight" not in self._no_grad
        return rms_norm(x, self.weight, self.eps, frozen=forward_only(self), trained=trained)


# --- SwiGLU ---------------------------------------------------------------------------------------


def _gated(gate: mx.array, up: mx.array) -> mx.array:
    out, room = new(*gate.shape)
    native_arrays.gate(floats(gate), floats(up), room)
    return out


def _gated_back(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    (in_gate, first), (in_up, second) = new(*cotangent.shape), new(*cotangent.shape)
    native_arrays.gate_back(
        floats(primals[0]), floats(primals[1]), floats(cotangent), first, second
    )
    return in_gate, in_up


# ``silu(gate) * up``, element-wise, of float32.
swiglu = with_vjp(_gated, _gated_back)


class NativeMlp:
    """A feed-forward block with :func:`swiglu`."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        gate, up = self.gate_proj(x), self.up_proj(x)
        selection = selection_of(self)
        if (
            not gate.dtype == up.dtype == mx.float32
            or selection.select("swiglu", "cpu") != "native"
        ):
            return self.down_proj(gated(gate, up, selection))
        return self.down_proj(_gated(gate, up) if forward_only(self) else swiglu(gate, up))


# --- attention ------------------------------------------------------------------------------------


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    turns: tuple[Array, Array],
    scale: float,
    *,
    before: int = 0,
    starts: Array | None = None,
    frozen: bool = False,
) -> mx.array:
    """Causal attention with rotary embedding, of float32.

    Args:
        q: (B, T - before, heads * D).
        k: (B, T, key-value heads * D); ``v`` likewise.
        turns: (T or more, D / 2) cosines and sines for the pairs (i, i + D / 2) of a head's
            features.
        before: position of the first query.
        starts: (B, T - before) int32, the first position that each query sees; default: the row's
            first.
        frozen: true if no gradient is wanted.

    Returns:
        Like ``q``.
    """
    computed = _Attention(turns, scale, before, starts)

    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        out, room = new(*q.shape)
        computed.forward([floats(each) for each in (q, k, v)], room)
        return out

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        made = [new(*primal.shape) for primal in primals]
        computed.backward(
            [floats(each) for each in (*primals, cotangent)], [room for _, room in made]
        )
        return tuple(array for array, _ in made)

    return forward(q, k, v) if frozen else with_vjp(forward, backward)(q, k, v)


def attention_across(
    row: ContextRow,
    own: tuple[mx.array, mx.array, mx.array],
    turns: tuple[Array, Array],
    scale: float,
    *,
    frozen: bool = False,
) -> mx.array:
    """:func:`attention` of a rank's two pieces of each row, which see the keys and values of all
    ranks.

    Args:
        own: q, k and v of (2 B, P, heads * D), the first pieces of all rows before the second ones.
        turns: for the positions of whole rows.

    Returns:
        Like q.
    """
    whole: list[Array] = []

    def pieces() -> Iterator[tuple[slice, slice, _Attention]]:
        for number, places in enumerate(row.places):
            starts = None if row.starts is None else row.starts[:, places.start : places.stop]
            computed = _Attention(
                turns, scale, places.start, None if starts is None else np.ascontiguousarray(starts)
            )
            yield slice(number * row.rows, (number + 1) * row.rows), slice(0, places.stop), computed

    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        # MLX keeps nothing for these copies while it differentiates.
        joined = row.joined_of([mx.array(floats(each)) for each in (k, v)])
        mx.eval(joined)
        whole[:] = map(floats, joined)
        (out, room), queries = new(*q.shape), floats(q)
        for rows, seen, computed in pieces():
            computed.forward(
                [queries[rows], *(np.ascontiguousarray(each[:, seen]) for each in whole)],
                room[rows],
            )
        return out

    def backward(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, ...]:
        queries, towards = floats(primals[0]), floats(cotangent)
        array, room = new(*queries.shape)
        sums = [np.zeros_like(each) for each in whole]
        for rows, seen, computed in pieces():
            keys, values = (np.ascontiguousarray(each[:, seen]) for each in whole)
            made = [np.empty_like(keys), np.empty_like(values)]
            computed.backward([queries[rows], keys, values, towards[rows]], [room[rows], *made])
            for total, new_part in zip(sums, made, strict=True):
                total[:, seen] += new_part
        mine = row.own_of([mx.array(total) for total in sums])
        mx.eval(mine)
        return array, *mine

    return forward(*own) if frozen else with_vjp(forward, backward)(*own)


@dataclass(frozen=True)
class _Attention:
    """The native code of :func:`attention` for any q, k and v."""

    turns: tuple[Array, Array]
    scale: float
    before: int
    starts: Array | None

    def forward(self, inputs: Sequence[Array], out: Array) -> None:
        """Compute ``out`` from ``inputs``: q, k and v."""
        width, wide = self._widths
        views = [_widened(each, width) for each in inputs]
        tables = self._tables(width, wide)
        _narrowed(
            [out],
            width,
            lambda rooms: self._run([*views, *tables, None], [*rooms, None, None, None], wide),
        )

    def backward(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute ``outputs``, the gradients in q, k and v, from these and the cotangent."""
        width, wide = self._widths
        *views, cotangent = (_widened(each, width) for each in inputs)
        tables = self._tables(width, wide)
        _narrowed(
            outputs,
            width,
            lambda rooms: self._run([*views, *tables, cotangent], [None, *rooms], wide),
        )

    @property
    def _widths(self) -> tuple[int, int]:
        width = 2 * self.turns[0].shape[1]
        return width, _filled_up(width)

    def _tables(self, width: int, wide: int) -> list[Array]:
        return [
            np.pad(each, ((0, 0), (0, (wide - width) // 2))) if wide > width else each
            for each in self.turns
        ]

    def _run(self, inputs: Sequence[Any], outputs: Sequence[Array | None], wide: int) -> None:
        q, k = inputs[:2]
        heads, kv_heads = (each[0, 0].size // wide for each in (q, k))
        sizes = (ctypes.c_int * 6)(*k.shape[:2], heads, kv_heads, wide, self.before)
        scale = ctypes.c_float(self.scale)
        call_checked(
            "allhands_attention", pointers(inputs), pointers(outputs), scale, sizes, at(self.starts)
        )


def _filled_up(width: int) -> int:
    """Return the width of a head, padded for the native code."""
    return -(-width // _WIDTH) * _WIDTH


def _widened(heads: Array, width: int) -> Array:
    """Pad (..., heads * D) with zeros after each half of a head, if needed; pairs of features stay
    pairs.

    Zeros add nothing to a score, and their outputs are zero.
    """
    wide = _filled_up(width)
    if wide == width:
        return heads
    room = np.zeros((*heads.shape[:-1], heads.shape[-1] // width, 2, wide // 2), dtype=np.float32)
    room[..., : width // 2] = heads.reshape(*room.shape[:-1], width // 2)
    return room


def _narrowed(rooms: Sequence[Array], width: int, fill: Callable[[Sequence[Array]], None]) -> None:
    """Let ``fill`` write arrays padded like :func:`_widened` ones, and copy them without padding
    into ``rooms``.
    """
    wide = _filled_up(width)
    if wide == width:
        return fill(rooms)
    shapes = [(*room.shape[:-1], room.shape[-1] // width, 2, wide // 2) for room in rooms]
    made = [np.empty(shape, dtype=np.float32) for shape in shapes]
    fill(made)
    for room, shape, each in zip(rooms, shapes, made, strict=True):
        room.reshape(*shape[:-1], width // 2)[...] = each[..., : width // 2]


class NativeAttention:
    """A known attention block with :func:`attention`."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        row = cache if isinstance(cache, DocumentRow | ContextRow) and not cache.windowed else None
        causal = cache is None and isinstance(mask, str) and mask == "causal"
        if x.dtype != mx.float32 or not (row or causal):
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        if selection_of(self).select("attention", "cpu") == PLAIN:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        sizes: known.Attention = self._native_sizes
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if sizes.normed:
            q, k = known.normed(self.q_norm, q), known.normed(self.k_norm, k)
        frozen = forward_only(self)
        if isinstance(row, ContextRow):
            turns = _turns(self, row.length, sizes.width)
            return self.o_proj(attention_across(row, (q, k, v), turns, self.scale, frozen=frozen))
        turns = _turns(self, x.shape[1], sizes.width)
        starts = row.starts if row else None
        return self.o_proj(attention(q, k, v, turns, self.scale, starts=starts, frozen=frozen))


def _turns(module: Any, length: int, width: int) -> tuple[Array, Array]:
    """(length or more, width / 2) cosines and sines. Layers that turn alike share them."""
    known_turns: dict[str, tuple[Array, Array]] = module._native_turns
    if not known_turns or len(known_turns["turns"][0]) < length:
        cosines, sines = known.turns_of(module.rope, 2 * length, width)
        known_turns["turns"] = floats(cosines), floats(sines)
    return known_turns["turns"]


def _use_attention(
    module: Any,
    sizes: known.Attention,
    turns: dict[Hashable, dict[str, tuple[Array, Array]]],
    selection: KernelSelection,
) -> None:
    """Give a known attention block the native form; ``turns``: the tables so far, by rotation."""
    shared = turns.setdefault((known.key_of_rotation(module.rope), sizes.width), {})
    needed = {"_native_sizes": sizes, "_native_turns": shared, SELECTION: selection}
    mix_in(module, NativeAttention, **needed)
