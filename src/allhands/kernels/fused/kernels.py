"""Calls of the CUDA kernels: shapes in, shapes out. Nothing here is differentiable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import mlx.core as mx

from allhands.io.trees import number
from allhands.kernels.fused.build import built
from allhands.kernels.fused.cuda import text_of
from allhands.runtime.jit_cache import launches_directly

_BLOCK = 256
_TYPES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}
_HALF = (mx.bfloat16, mx.float16)
_MOST_RANK = 32
# Four blocks a multiprocessor of the largest GPUs.
_NORM_BLOCKS = 528
# Bytes of a row that a warp holds without running out of registers.
_WARP_BYTES = 4096
_WIDEST_NORM_BYTES = 4 * _WARP_BYTES


@cache
def available() -> bool:
    """Return true if MLX computes on an NVIDIA GPU in this process and a kernel can be built for
    it.
    """
    if not (mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu):
        return False
    try:
        return number(sum_of_squares([mx.ones((8,), dtype=mx.bfloat16)])) == 8.0
    except (
        RuntimeError
    ):  # no NVRTC, or a GPU that is too old: MLX's own operations compute the same
        return False


def width(dtype: mx.Dtype) -> int:
    """Values of ``dtype`` that a thread reads at a time; rows must be a multiple of it."""
    return 16 // dtype.size


def suits(array: mx.array) -> bool:
    """Return true if kernels know the type, and the last axis is a multiple of :func:`width`."""
    return array.dtype in _TYPES and array.shape[-1] % width(array.dtype) == 0


def in_half(array: mx.array) -> bool:
    """Return true if ``array`` is in half precision."""
    return array.dtype in _HALF


def dequantize(weight: mx.array, scales: mx.array, biases: mx.array, group_size: int) -> mx.array:
    """Unpack 4-bit affine weights in half the time of :func:`mlx.core.dequantize`: (N, K / 8)
    uint32 -> (N, K).
    """
    rows, words = weight.shape
    count = rows * words
    outputs = [((rows, 8 * words), scales.dtype)]
    work = _Work(
        "dequantize", scales.dtype, {"GROUP": group_size}, (count,), -(-count // 1024) * _BLOCK
    )
    return work.run([weight, scales, biases], outputs)[0]


def take_rows(table: mx.array, ids: mx.array) -> mx.array:
    """``table[ids]``: (V, D) and integers of any shape, negative ones counting from the end ->
    ``ids.shape`` + (D,).
    """
    size, features = table.shape
    threads = ids.size * features // width(table.dtype)
    work = _Work("take_rows", table.dtype, {"D": features}, (ids.size, size), threads)
    return work.run([table, ids.astype(mx.int32)], [((*ids.shape, features), table.dtype)])[0]


def put_rows(rows: mx.array, places: mx.array, targets: mx.array, size: int) -> mx.array:
    """Put (N, D) rows at their (N,) places into (``size``, D) zeros, except rows with a negative
    target; no place may occur twice among the others.
    """
    count, features = rows.shape
    threads = rows.size // width(rows.dtype)
    work = _Work("put_rows", rows.dtype, {"D": features}, (count,), threads, fill=0.0)
    inputs = [rows, places.astype(mx.int32), targets.astype(mx.int32)]
    return work.run(inputs, [((size, features), rows.dtype)])[0]


def scale(x: mx.array, factor: mx.array) -> mx.array:
    """``x`` times a float32 scalar, in the type of ``x``."""
    work = _Work("scale_by", x.dtype, {}, (x.size,), x.size // width(x.dtype))
    return work.run([x, factor], [(x.shape, x.dtype)])[0]


def spread(x: mx.array, index: mx.array, scale: float, dtype: mx.Dtype) -> mx.array:
    """``(scale * x[index]).astype(dtype)`` for (M,) float32 and (N,) int32."""
    work = _Work("spread", dtype, {"SCALE": scale}, (index.size,), index.size)
    return work.run([x, index], [(index.shape, dtype)])[0]


def collect(x: mx.array, index: mx.array, scale: float) -> mx.array:
    """``scale * x[index]`` in float32, for (M,) of any type of the kernels' and (N,) int32."""
    work = _Work("collect", x.dtype, {"SCALE": scale}, (index.size,), index.size)
    return work.run([x, index], [(index.shape, mx.float32)])[0]


def add_rows(ids: mx.array, rows: mx.array, size: int, *, onto: mx.array | None = None) -> mx.array:
    """Sum the ``rows`` of each id, in their order and in float32: (N,) int32 from 0, (N, D) ->
    (``size``, D).

    ``onto``: (``size``, D), of the same type, contiguous and with no other user: where kernels are
    launched one after the other, the sums are added in its own memory, as in :func:`cross_entropy`.
    """
    if onto is not None and not launches_directly():
        return onto + add_rows(ids, rows, size)
    count, features = rows.shape
    parts = features // width(rows.dtype)
    block = min(_BLOCK, -(-parts // 32) * 32)
    constants = {"D": features, "THREADS": block, "ONTO": int(onto is not None)}
    threads = count * -(-parts // block) * block
    # The sort is stable, as MLX says: equal ids keep their order.
    inputs = [ids, mx.argsort(ids), rows, rows if onto is None else onto]
    work = _Work("add_rows", rows.dtype, constants, (count,), threads, block, fill=0.0)
    shape = (size, features) if onto is None else (1,)
    (out,) = work.run(inputs, [(shape, rows.dtype)])
    return out if onto is None else cast("list[mx.array]", mx.depends([onto], [out]))[0]


def swiglu(x: mx.array) -> mx.array:
    """``silu(gate) * up`` for rows of gate beside up: (N, 2 F) -> (N, F)."""
    rows, features = x.shape[0], x.shape[1] // 2
    work = _Work("swiglu", x.dtype, {"F": features}, (rows,), rows * features // width(x.dtype))
    return work.run([x], [((rows, features), x.dtype)])[0]


def swiglu_vjp(
    x: mx.array, cotangent: mx.array, *, again: bool = False
) -> tuple[mx.array, mx.array]:
    """Gradient of :func:`swiglu` in ``x``; with ``again`` also its value, which costs almost
    nothing.
    """
    rows, features = x.shape[0], x.shape[1] // 2
    constants = {"F": features, "AGAIN": int(again)}
    work = _Work("swiglu_vjp", x.dtype, constants, (rows,), rows * features // width(x.dtype))
    dx, value = work.run(
        [x, cotangent], [(x.shape, x.dtype), ((rows, features) if again else (1,), x.dtype)]
    )
    return dx, value


def swiglu_adapted(x: mx.array, inner: mx.array, b: mx.array, ranks: tuple[int, int]) -> mx.array:
    """:func:`swiglu` of ``x + inner @ b``, without that product in memory: (N, 2 F), (N, R), (R, 2
    F) -> (N, F).

    Args:
        ranks: rows of ``b`` that belong to gate and to up; their columns of the other are taken as
            zeros.
    """
    work, rows = _swiglu_adapted("swiglu_adapted", x, ranks, {}), x.shape[0]
    return work.run([x, inner, b], [((rows, x.shape[1] // 2), x.dtype)])[0]


def swiglu_adapted_vjp(
    x: mx.array,
    inner: mx.array,
    b: mx.array,
    ranks: tuple[int, int],
    c: mx.array,
    cinner: mx.array,
    a: mx.array,
) -> tuple[mx.array, mx.array]:
    """Gradient of :func:`swiglu_adapted` in ``x`` for the cotangent ``c + cinner @ a.T``, and its
    value again.

    ``c``, ``cinner`` and ``a``: (N, F), (N, D), (F, D) -> (N, 2 F), (N, F).
    """
    work = _swiglu_adapted("swiglu_adapted_vjp", x, ranks, {"DOWN": a.shape[1]})
    dx, y = work.run([x, inner, b, c, cinner, a], [(x.shape, x.dtype), (c.shape, x.dtype)])
    return dx, y


def fits_adapted(features: int, dtype: mx.Dtype, ranks: Sequence[int]) -> bool:
    """Return true if a thread of the adapted SwiGLU's kernels can keep factors of these ranks."""
    return (
        dtype in _HALF
        and features % 32 == 0
        and all(rank % 2 == 0 and rank <= _MOST_RANK for rank in ranks)
    )


def _swiglu_adapted(
    name: str, x: mx.array, ranks: tuple[int, int], more: Mapping[str, int]
) -> _Work:
    rows, features = x.shape[0], x.shape[1] // 2
    constants = {"F": features, "R": sum(ranks), "GATE": ranks[0], "UP": ranks[1], **more}
    blocks = -(-features // _BLOCK) * -(-rows // 64)
    return _Work(name, x.dtype, constants, (rows,), blocks * _BLOCK)


@dataclass(frozen=True)
class HeadNorms:
    """Frozen norms of each head of queries and of keys.

    Attributes:
        queries: (D,) factors of the norm of queries; ``keys`` likewise.
        eps: of both.
    """

    queries: mx.array
    keys: mx.array
    eps: float

    def fits(self, x: mx.array) -> bool:
        """Return true if :func:`rope` can norm the heads of (B, T, heads, D) ``x``."""
        lanes = x.shape[-1] // 2 // width(x.dtype)
        return (
            lanes in (1, 2, 4, 8, 16, 32)
            and lanes * 2 * width(x.dtype) == x.shape[-1]
            and self.queries.dtype == self.keys.dtype == x.dtype
        )


def rope(
    x: mx.array,
    turns: mx.array,
    heads: tuple[int, int],
    length: int,
    norms: HeadNorms | None = None,
) -> mx.array:
    """Norm and turn the queries and keys in (B, T, H + 2 KV, D), but not the values.

    Args:
        turns: (T or more, D / 2, 2), cosines and sines.
        heads: H and KV.
        length: L of the output (B, L, H + 2 KV, D), which has zeros from T on.
    """
    batch, tokens, *rest = x.shape
    work = _rope("rope", x, (batch, length, *rest), (length, tokens), heads, norms)
    factors = [norms.queries, norms.keys] if norms else [x, x]
    return work.run([x, turns, *factors], [((batch, length, *rest), x.dtype)])[0]


def rope_vjp(
    cotangents: tuple[mx.array, mx.array, mx.array],
    turns: mx.array,
    tokens: int,
    x: mx.array,
    norms: HeadNorms | None = None,
) -> mx.array:
    """Gradient of :func:`rope` in its input: (B, L, H, D), twice (B, L, KV, D) -> (B, ``tokens``,
    H + 2 KV, D).

    Args:
        x: the input of :func:`rope`, of which nothing is read without norms.
    """
    q, k, _ = cotangents
    batch, length, num_heads, features = q.shape
    heads = num_heads, k.shape[2]
    shape = (batch, tokens, num_heads + 2 * k.shape[2], features)
    work = _rope("rope_vjp", q, shape, (length, tokens), heads, norms)
    # Without norms the kernel does not read x; handing it over would keep it in memory.
    more = [x, norms.queries, norms.keys] if norms else [q, q, q]
    return work.run([*cotangents, turns, *more], [(shape, q.dtype)])[0]


def _rope(
    name: str,
    x: mx.array,
    shape: tuple[int, ...],
    lengths: tuple[int, int],
    num_heads: tuple[int, int],
    norms: HeadNorms | None,
) -> _Work:
    """Return the work whose output has this ``shape``; ``lengths``: with and without padding."""
    batch, places, heads, features = shape
    constants: dict[str, int | float] = {
        "H": num_heads[0],
        "KV": num_heads[1],
        "D": features,
        "NORMED": int(bool(norms)),
        "EPS": norms.eps if norms else 0.0,
    }
    threads = batch * places * heads * features // 2 // width(x.dtype)
    return _Work(name, x.dtype, constants, (batch * places, *lengths), threads)


def cross_entropy(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Loss of each row, float32, and its gradient, for (N, V) logits and (N,) targets; rows with a
    negative target count 0.

    ``logits`` must have no other user: where kernels are launched one after the other, the gradient
    overwrites them, which halves the memory. A CUDA graph does not know that they are overwritten,
    so that a reader of the gradient might come too early.
    """
    rows = logits.shape[0]
    in_place = launches_directly()
    constants = {"V": logits.shape[1], "INPLACE": int(in_place)}
    work = _Work("cross_entropy", logits.dtype, constants, (), 1024 * rows, block=1024)
    shape = (1,) if in_place else logits.shape
    loss, grad = work.run(
        [logits, targets.astype(mx.int32)], [((rows,), mx.float32), (shape, logits.dtype)]
    )
    return loss, cast("list[mx.array]", mx.depends([logits], [loss]))[0] if in_place else grad


def holds_norm(x: mx.array) -> bool:
    """Return true if the norm's kernels can hold rows of this type and width."""
    return suits(x) and x.shape[-1] * x.dtype.size <= _WIDEST_NORM_BYTES


def rms_norm(
    x: mx.array, residual: mx.array | None, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """:func:`mlx.core.fast.rms_norm` of (N, D) ``x + residual``, and that sum; without a residual
    the sum is (1,) of no meaning.
    """
    rows, features = x.shape
    per_block = 8 if features * x.dtype.size <= 2 * _WARP_BYTES else 4
    constants = {"D": features, "EPS": eps, "RESIDUAL": int(residual is not None)}
    work = _Work(
        "rms_norm",
        x.dtype,
        constants,
        (rows,),
        -(-rows // per_block) * 32 * per_block,
        32 * per_block,
    )
    inputs = [x, x if residual is None else residual, weight]
    out, total = work.run(
        inputs, [(x.shape, x.dtype), ((1,) if residual is None else x.shape, x.dtype)]
    )
    return out, total


def rms_norm_vjp(
    x: mx.array,
    weight: mx.array,
    cotangent: mx.array,
    eps: float,
    *,
    residual: mx.array | None,
    trained: bool,
) -> tuple[mx.array, mx.array]:
    """Gradients of :func:`mlx.core.fast.rms_norm` in (N, D) ``x`` and, if it is ``trained``, in
    (D,) ``weight``.

    ``residual``, a cotangent of ``x`` itself, is added to the first; the second is float32.
    """
    rows, features = x.shape
    # Sums over the rows take registers as well. More warps a row than registers require are faster:
    # for 4,096 features on an H200, eight take 69 us and four 110.
    held = _WARP_BYTES // (8 if trained else 4)
    warps = next((n for n in (1, 2, 4) if features * x.dtype.size <= n * held), 8)
    blocks = min(_NORM_BLOCKS if trained else rows, -(-rows * warps // 8))
    flags = {"RESIDUAL": int(residual is not None), "TRAINED": int(trained)}
    constants = {"D": features, "EPS": eps, "WARPS": warps, **flags}
    work = _Work("rms_norm_vjp", x.dtype, constants, (rows,), blocks * _BLOCK)
    inputs = [x, weight, cotangent, cotangent if residual is None else residual]
    dx, dw = work.run(
        inputs, [(x.shape, x.dtype), ((blocks, features) if trained else (1, 1), mx.float32)]
    )
    return dx, dw.sum(axis=0)


def sum_of_squares(arrays: Sequence[mx.array]) -> mx.array:
    """Float32 scalar, over all ``arrays``: one launch each, in their order, and one at the end."""
    most = max(array.size // width(array.dtype) for array in arrays)
    blocks = min(1024, -(-most // _BLOCK))
    out = None
    for array in arrays:
        work = _Work(
            "sum_of_squares",
            array.dtype,
            {"AFTER": int(out is not None)},
            (array.size,),
            blocks * _BLOCK,
        )
        (out,) = work.run([array, _zero() if out is None else out], [((blocks,), mx.float32)])
    assert out is not None
    return out.sum()


@cache
def _zero() -> mx.array:
    return mx.zeros((1,))


def adam_scalars(
    numbers: Sequence[mx.array], options: mx.array, *, bias_correction: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """Return :func:`adam`'s scalars without and with decay, the norm, and whether norm and loss are
    finite.

    Args:
        numbers: sum of the gradients' squares, loss, trained tokens, learning rate, number of the
            update; scalars.
        options: (7,) float32, see ``cuda/adam_scalars.cu``.
    """
    inputs = [number.astype(mx.float32).reshape(1) for number in numbers]
    work = _Work("adam_scalars", mx.float32, {"BIAS": int(bias_correction)}, (), 32, block=32)
    scalars, told = work.run([*inputs, options], [((2, 10), mx.float32), ((2,), mx.float32)])
    return scalars, told[0], told[1] != 0


def adam(
    gradient: mx.array, weight: mx.array, moments: tuple[mx.array, mx.array], scalars: mx.array
) -> tuple[mx.array, ...]:
    """Weight and moments after an update of Adam, computed in float32; all of one shape and type.

    Args:
        scalars: (10,) float32, see ``cuda/adam.cu``.
    """
    work = _Work("adam", weight.dtype, {}, (weight.size,), weight.size // width(weight.dtype))
    return tuple(
        work.run([gradient, weight, *moments, scalars], [(weight.shape, weight.dtype)] * 3)
    )


def adam_master(
    gradient: mx.array, master: mx.array, moments: tuple[mx.array, mx.array], scalars: mx.array
) -> tuple[mx.array, ...]:
    """Return the weight in the type of ``gradient``, its float32 copy and the float32 moments,
    after :func:`adam`.
    """
    work = _Work("adam_master", gradient.dtype, {}, (master.size,), master.size // 4)
    outputs = [(master.shape, gradient.dtype), *[(master.shape, mx.float32)] * 3]
    return tuple(work.run([gradient, master, *moments, scalars], outputs))


@dataclass(frozen=True)
class _Work:
    """A call of a kernel.

    Attributes:
        name: name of its file in :mod:`allhands.kernels.fused.cuda`.
        constants: constants that are compiled into it.
        scalars: arguments of the kernel.
        threads: least number of threads, rounded up to whole blocks; the kernel ignores threads
            beyond it.
        fill: value of the outputs where the kernel writes nothing.
    """

    name: str
    dtype: mx.Dtype
    constants: Mapping[str, int | float]
    scalars: tuple[int, ...]
    threads: int
    block: int = _BLOCK
    fill: float | None = None

    def run(
        self, inputs: list[mx.array], outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]]
    ) -> list[mx.array]:
        """Return the outputs, of these shapes and types."""
        if not self.threads:
            return [mx.zeros(shape, dtype=dtype) for shape, dtype in outputs]
        name, code = _built(self.name, self.dtype, tuple(self.constants.items()))
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=code,
            inputs=inputs,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            scalars=self.scalars,
            grid=(-(-self.threads // self.block) * self.block, 1, 1),
            threadgroup=(self.block, 1, 1),
            init_value=self.fill,
            ensure_row_contiguous=True,
        )


def source(
    name: str, dtype: mx.Dtype, constants: Iterable[tuple[str, int | float]]
) -> tuple[str, str]:
    """Return the name of a kernel, which includes its constants, and its whole text."""
    words = [f"{key.lower()}{value}" for key, value in constants]
    full = re.sub(r"\W", "_", "_".join(["allhands", name, _TYPES[dtype], *words]))
    defines = "".join(
        f"#define {key} {value}{'f' * isinstance(value, float)}\n" for key, value in constants
    )
    body = text_of(f"{name}.cu").replace("NAME", full)
    return (
        full,
        f"{text_of('numbers.cuh')}{text_of('vectors.cuh')}\ntypedef {_TYPES[dtype]} T;\n{defines}{body}",
    )


@cache
def _built(
    name: str, dtype: mx.Dtype, constants: tuple[tuple[str, int | float], ...]
) -> tuple[str, bytes]:
    full, text = source(name, dtype, constants)
    facts: Any = mx.device_info()
    return full, built(text, (facts["compute_capability_major"], facts["compute_capability_minor"]))
