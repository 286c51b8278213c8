"""CUDA kernels run on a CPU, a warp at a time: their arithmetic and which thread computes what.

What differs on a GPU (many warps at once, its own rounding) is tested there, in
tests/parity/test_fused.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from allhands.io.trees import number
from allhands.kernels.fused import embedding, kernels, ops
from allhands.kernels.fused.cuda import text_of
from allhands.kernels.fused.linear import _adapted_mlp

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs g++; that of macOS is clang"
)

# What CUDA's own compiler knows by itself.
PRELUDE = r"""
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>
#undef INFINITY
#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
struct uint3_ { unsigned x, y, z; };
static uint3_ blockIdx, blockDim, gridDim;
static thread_local uint3_ threadIdx;
static std::barrier<> warp(32);
typedef unsigned int uint32;
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline void __stcs(uint4* p, uint4 v) { *p = v; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
static float lanes_[32];
inline float __shfl_xor_sync(unsigned, float x, int other) {
  lanes_[threadIdx.x % 32] = x;
  warp.arrive_and_wait();
  x = lanes_[threadIdx.x % 32 ^ other];
  warp.arrive_and_wait();
  return x;
}
inline void __syncthreads() {}
using std::isfinite;
inline int min(int x, int y) { return x < y ? x : y; }

struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  explicit bfloat16(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    bits = (y + 0x7fff + (y >> 16 & 1)) >> 16;
  }
  operator float() const { return __uint_as_float((uint32)bits << 16); }
};
inline uint32 pair(float first, float second, bfloat16) {
  return bfloat16(first).bits | (uint32)bfloat16(second).bits << 16;
}
inline float half_of(uint32 word, int which) { return __uint_as_float(word >> (16 * which) << 16); }

static float left_[16][8], right_[8][8];
inline void add_product(float (&to)[4], const uint32 (&left)[2], uint32 right, bfloat16) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int i = 0; i < 2; i++) {
    left_[row][column + i] = half_of(left[0], i);
    left_[row + 8][column + i] = half_of(left[1], i);
    right_[column + i][row] = half_of(right, i);
  }
  warp.arrive_and_wait();
  for (int k = 0; k < 8; k++)
    for (int i = 0; i < 4; i++) to[i] += left_[row + i / 2 * 8][k] * right_[k][column + i % 2];
  warp.arrive_and_wait();
}
"""
CALL = """
extern "C" void run(int blocks, int threads, void** arrays, const int* numbers) {{
  gridDim = {{(unsigned)blocks, 1, 1}};
  blockDim = {{(unsigned)threads, 1, 1}};
  auto one = [&](int thread) {{
    threadIdx.x = thread;
    {call};
  }};
  for (int block = 0; block < blocks; block++) {{
    blockIdx.x = block;
    for (int first = 0; first < threads; first += {together}) {{
      if ({together} == 1) {{
        one(first);
        continue;
      }}
      std::vector<std::thread> lanes;
      for (int lane = 0; lane < {together}; lane++) lanes.emplace_back(one, first + lane);
      for (auto& lane : lanes) lane.join();
    }}
  }}
}}
"""


@pytest.fixture(scope="module")
def prelude(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prelude, already parsed, in the directory where kernels are compiled: most of that time
    is its headers'.
    """
    header = tmp_path_factory.mktemp("kernels") / "prelude.h"
    header.write_text(PRELUDE)
    compile_to(header.with_suffix(".h.gch"), "-x", "c++-header", header)
    return header


def compile_to(out: Path, *words: str | Path) -> None:
    options = ["-std=c++20", "-O1", "-w", "-fPIC", "-pthread"]
    subprocess.run([str(COMPILER), *options, *words, "-o", out], check=True)


@pytest.fixture
def emulated(prelude: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are run by a C++ program; the names of those that were."""
    ran: list[str] = []

    def run(
        self: Any, inputs: list[mx.array], outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]]
    ) -> list[mx.array]:
        name, text = kernels.source(self.name, self.dtype, tuple(self.constants.items()))
        found = re.search(rf"void {name}\(([^)]*)\)", text)
        assert found is not None
        kinds = [parameter.strip().rpartition(" ")[0] for parameter in found[1].split(",")]
        pointers = [f"({kind})arrays[{i}]" for i, kind in enumerate(kinds) if kind.endswith("*")]
        numbers = [f"numbers[{i}]" for i in range(len(kinds) - len(pointers))]
        assert (len(pointers), len(numbers)) == (len(inputs) + len(outputs), len(self.scalars))
        text = text.removeprefix(text_of("numbers.cuh"))
        warps = "add_product(" in text or self.constants.get("NORMED")
        together = 32 if warps else 1
        call = CALL.format(call=f"{name}({', '.join(pointers + numbers)})", together=together)
        program = f'#include "{prelude.name}"\n{text}{call}'
        library = prelude.with_name(f"{hashlib.sha256(program.encode()).hexdigest()}.so")
        if not library.exists():
            library.with_suffix(".cpp").write_text(program)
            compile_to(library, "-shared", library.with_suffix(".cpp"))
        fill = np.nan if self.fill is None else self.fill
        made = [bits_of(mx.full(shape, fill, dtype=dtype)) for shape, dtype in outputs]
        arrays = [bits_of(each) for each in inputs] + made
        ctypes.CDLL(str(library)).run(
            -(-self.threads // self.block),
            self.block,
            (ctypes.c_void_p * len(arrays))(*(each.ctypes.data for each in arrays)),
            (ctypes.c_int * max(1, len(self.scalars)))(*self.scalars),
        )
        ran.append(self.name)
        return [
            mx.array(each).view(dtype) if dtype == mx.bfloat16 else mx.array(each)
            for each, (_, dtype) in zip(made, outputs, strict=True)
        ]

    monkeypatch.setattr(kernels._Work, "run", run)
    return ran


def bits_of(array: mx.array) -> np.ndarray:
    """What is in memory; NumPy has no bfloat16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def normal(*shape: int, scale: float = 1.0) -> mx.array:
    mx.random.seed(sum(shape))
    return scale * mx.random.normal(shape)


def off(actual: mx.array, expected: mx.array) -> float:
    """The largest difference, as a share of the largest value."""
    assert actual.shape == expected.shape
    return number(mx.abs(actual - expected).max()) / number(mx.abs(expected).max())


def with_gradients(
    function: Callable[..., mx.array], arrays: list[mx.array], cotangent: mx.array
) -> tuple[mx.array, list[mx.array]]:
    (value,), gradients = mx.vjp(function, arrays, [cotangent])
    return value, gradients


@pytest.mark.parametrize(("rows", "features"), [(5, 12), (33, 1028)])
def test_swiglu(emulated: list[str], rows: int, features: int) -> None:
    x, cotangent = normal(rows, 2 * features), normal(rows, features)
    value, (gradient,) = with_gradients(ops.plain_swiglu, [x], cotangent)
    assert off(kernels.swiglu(x), value) < 1e-6
    for again in (False, True):
        dx, same = kernels.swiglu_vjp(x, cotangent, again=again)
        assert off(dx, gradient) < 1e-6
        assert not again or off(same, value) < 1e-6
    assert emulated == ["swiglu", "swiglu_vjp", "swiglu_vjp"]


@pytest.mark.parametrize("features", [4, 1100])
def test_rows_of_a_table(emulated: list[str], features: int) -> None:
    table, ids = normal(9, features), mx.array([[3, 0, 8], [-1, 3, 3]])
    assert mx.array_equal(kernels.take_rows(table, ids), table[ids])
    assert emulated == ["take_rows"]


def test_rows_are_put_back_where_they_are_trained(emulated: list[str]) -> None:
    rows, places = normal(5, 8), mx.array([7, 2, 0, 0, 4])
    found = kernels.put_rows(rows, places, mx.array([3, 0, 9, -1, -1]), 9)
    expected = mx.zeros((9, 8))
    expected[mx.array([7, 2, 0])] = rows[:3]
    assert mx.array_equal(found, expected)
    assert emulated == ["put_rows"]


def test_numbers_are_spread_and_collected(emulated: list[str]) -> None:
    x, index = normal(11), mx.array([3, 3, 0, 10], dtype=mx.int32)
    assert mx.array_equal(kernels.spread(x, index, 2.5, mx.float32), 2.5 * x[index])
    assert mx.array_equal(kernels.collect(x, index, 0.1), 0.1 * x[index])
    matrix = normal(3, 12)
    assert mx.array_equal(kernels.scale(matrix, mx.array(0.3)), 0.3 * matrix)
    assert emulated == ["spread", "collect", "scale_by"]


@pytest.mark.parametrize(
    "ids", [[3, 0, 8, 3, 3, 0, 3, 3, 3, 3], [5], [1] * 13, list(range(9))], ids=str
)
@pytest.mark.parametrize("features", [4, 1100])
def test_the_gradient_of_an_embedding(
    emulated: list[str], ids: list[int], features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, table = normal(len(ids), features), mx.zeros((9, features))
    expected = embedding.add_in_order(table, mx.array(ids), rows)
    monkeypatch.setattr(embedding, "goes_by_kernels", lambda table: True)
    found = embedding.add_in_order(table, mx.array(ids) - 9, rows)
    assert off(found, expected) < 1e-6
    one_by_one = np.zeros((9, features), dtype=np.float32)
    for id, row in zip(ids, np.array(rows), strict=True):
        one_by_one[id] += row
    assert np.array_equal(np.array(found), one_by_one)
    table = normal(9, features)
    onto = embedding.add_in_order(table, mx.array(ids), rows, onto=True)
    assert np.array_equal(np.array(onto), np.array(table) + one_by_one)
    assert emulated == ["add_rows"] * 2


def rounded(*shape: int, scale: float = 1.0) -> mx.array:
    """Float32 numbers that bfloat16 has."""
    return normal(*shape, scale=scale).astype(mx.bfloat16).astype(mx.float32)


def halves(*arrays: mx.array) -> list[mx.array]:
    return [array.astype(mx.bfloat16) for array in arrays]


def most_off(actual: mx.array, expected: mx.array) -> float:
    """The largest difference of a number, as a share of it, in units of what rounding to bfloat16
    takes at most.
    """
    difference = mx.abs(actual.astype(mx.float32) - expected)
    return number((difference / (mx.abs(expected) + 1e-3)).max()) * 2**8


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(8, 8, 8), (4, 8, 2), (32, 4, 16), (20, 24, 32)], ids=str)
@pytest.mark.parametrize(("rows", "features"), [(5, 32), (83, 288)])
def test_swiglu_of_adapted_products(
    emulated: list[str], rows: int, features: int, ranks: tuple[int, int, int]
) -> None:
    gate, up, down = ranks
    x, inner, cotangent = (
        rounded(rows, 2 * features),
        rounded(rows, gate + up),
        rounded(rows, features),
    )
    cinner, a = rounded(rows, down), rounded(features, down, scale=0.3)
    b = block_diagonal(rounded(gate, features, scale=0.3), rounded(up, features, scale=0.2))
    value, (gradient,) = with_gradients(
        lambda x: ops.plain_swiglu(x + inner @ b), [x], cotangent + cinner @ a.T
    )
    assert kernels.fits_adapted(features, mx.bfloat16, ranks)
    given = halves(x, inner, b)
    # The one rounding at the end, and a little for sums in another order.
    assert most_off(kernels.swiglu_adapted(given[0], given[1], given[2], (gate, up)), value) < 1.1
    dx, again = kernels.swiglu_adapted_vjp(
        given[0], given[1], given[2], (gate, up), *halves(cotangent, cinner, a)
    )
    assert most_off(dx, gradient) < 1.1
    assert most_off(again, value) < 1.1


def block_diagonal(first: mx.array, second: mx.array) -> mx.array:
    return mx.concatenate(
        [
            mx.pad(first, [(0, 0), (0, second.shape[1])]),
            mx.pad(second, [(0, 0), (first.shape[1], 0)]),
        ]
    )


def test_an_adapted_feed_forward_block(emulated: list[str]) -> None:
    """Value and all gradients against the same block in MLX's operations and float32."""
    rows, width, features = 37, 20, 32
    x, cotangent = rounded(rows, width), rounded(rows, width + 4)
    wide, down = rounded(2 * features, width, scale=0.3), rounded(width + 4, features, scale=0.3)
    b = block_diagonal(rounded(8, features, scale=0.3), rounded(8, features + 0, scale=0.2))
    arrays = [
        x,
        rounded(width, 16, scale=0.3),
        b,
        rounded(features, 8, scale=0.3),
        rounded(8, width + 4, scale=0.3),
    ]

    def plain(x: mx.array, a1: mx.array, b1: mx.array, a2: mx.array, b2: mx.array) -> mx.array:
        y = ops.plain_swiglu(x @ wide.T + (x @ a1) @ b1)
        return y @ down.T + (y @ a2) @ b2

    expected, gradients = with_gradients(plain, arrays, cotangent)
    dense, dense_down = halves(wide, down)

    def fused(*arrays: mx.array) -> mx.array:
        into, back = (
            (lambda _: dense, lambda _: dense),
            (lambda _: dense_down, lambda _: dense_down),
        )
        return _adapted_mlp(arrays[0], into, back, (8, 8), *arrays[1:])

    # The kernels compute when they are called, which a traced function's would not.
    given = halves(*arrays)
    forward, backward = _parts_of(fused, given)
    outputs = forward(*given)
    assert off(outputs[0], expected) < 0.01
    found = backward(tuple(given), (cotangent.astype(mx.bfloat16), None, None, None), outputs)
    for name, one, other in zip(("x", "a1", "b1", "a2", "b2"), found, gradients, strict=True):
        assert off(one, other) < 0.01, name
    assert emulated == ["swiglu_adapted", "swiglu_adapted_vjp"]


def _parts_of(function: Callable[..., mx.array], arrays: list[mx.array]) -> tuple[Any, Any]:
    """The forward and backward parts that ``function`` hands to ``with_vjp``."""
    from allhands.kernels.fused import linear

    taken: list[Any] = []

    def with_vjp(forward: Any, backward: Any) -> Any:
        taken.extend([forward, backward])
        return lambda *given: (given[0],)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "with_vjp", with_vjp)
        function(*arrays)
    return taken[0], taken[1]


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("masters", [True, False])
def test_adam(emulated: list[str], masters: bool, finite: bool) -> None:
    gradient, weight = normal(7, 12), normal(7, 12, scale=2)
    first, second = normal(7, 12, scale=0.1), mx.square(normal(7, 12))
    factor, rate, b1, b2, eps, shrunk, root = 0.5, 1e-2, 0.9, 0.999, 1e-8, 0.99, 1.25
    scalars = mx.array([factor, float(finite), rate, b1, b2, eps, shrunk, root, 1 - b1, 1 - b2])
    g = factor * gradient
    m, v = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g * g
    expected = (
        [shrunk * weight - rate * m / (root * mx.sqrt(v) + eps), m, v]
        if finite
        else [weight, first, second]
    )
    kernel = kernels.adam_master if masters else kernels.adam
    found = list(kernel(gradient, weight, (first, second), scalars))
    if masters:
        assert mx.array_equal(found[0], found[1])  # of one type here
        found = found[1:]
    for one, other in zip(found, expected, strict=True):
        assert off(one, other) < 1e-6 if finite else mx.array_equal(one, other)
    assert emulated == ["adam_master" if masters else "adam"]


@pytest.mark.parametrize("max_norm", [-1.0, 0.5, 1e3])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(("squares", "loss"), [(81.0, 2.0), (math.inf, 2.0), (81.0, math.nan)])
def test_what_adam_is_told(
    emulated: list[str], squares: float, loss: float, bias_correction: bool, max_norm: float
) -> None:
    b1, b2, eps, decay, rate, step, tokens = 0.9, 0.999, 1e-8, 0.1, 1e-2, 3, 4.0
    options = mx.array([b1, b2, 1 - b1, 1 - b2, eps, decay, max_norm])
    numbers = [mx.array(value) for value in (squares, loss, tokens, rate)]
    scalars, norm, finite = kernels.adam_scalars(
        [*numbers, mx.array(step, dtype=mx.uint64)], options, bias_correction=bias_correction
    )
    assert bool(finite.item()) == (math.isfinite(squares) and math.isfinite(loss))
    assert number(norm) == math.sqrt(squares) / tokens
    assert emulated == ["adam_scalars"]
    if not finite.item():
        assert scalars[:, 1].tolist() == [0.0, 0.0]
        return
    factor = min(1.0, max_norm / (9 / tokens + 1e-6)) if max_norm >= 0 else 1.0
    corrected, root = (
        (rate / (1 - b1**step), (1 - b2**step) ** -0.5) if bias_correction else (rate, 1.0)
    )
    for side, shrunk in zip(scalars.tolist(), (1.0, 1 - rate * decay), strict=True):
        expected = [factor / tokens, 1.0, corrected, b1, b2, eps, shrunk, root, 1 - b1, 1 - b2]
        # A power of float32.
        assert side == pytest.approx(expected, rel=3e-5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "features"), [(4, 2, 16), (3, 1, 8), (1, 1, 64)])
def test_rope(
    emulated: list[str], heads: int, kv_heads: int, features: int, length: int, normed: bool
) -> None:
    both = heads + kv_heads
    x = normal(2, 5, both + kv_heads, features)
    angles = normal(7, features // 2)
    turns = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1)
    cotangent = normal(*x.shape)
    norms = kernels.HeadNorms(normal(features), normal(features, scale=2.0), 1e-3)
    assert norms.fits(x)

    def plain(x: mx.array) -> mx.array:
        q, k, v = mx.split(x, [heads, both], axis=2)
        if normed:
            q = mx.fast.rms_norm(q, norms.queries, norms.eps)
            k = mx.fast.rms_norm(k, norms.keys, norms.eps)
        return ops.plain_rope(mx.concatenate([q, k, v], axis=2), turns, both)

    value, (gradient,) = with_gradients(plain, [x], cotangent)
    found = kernels.rope(x, turns, (heads, kv_heads), length, norms if normed else None)
    assert off(found[:, :5], value) < 1e-6
    assert found.shape[1] == length
    assert not mx.any(found[:, 5:]).item()
    # What belongs to padding does not count.
    longer = mx.pad(cotangent, [(0, 0), (0, length - 5), (0, 0), (0, 0)], constant_values=math.nan)
    q, k, v = (mx.contiguous(part) for part in mx.split(longer, [heads, both], axis=2))
    back = kernels.rope_vjp((q, k, v), turns, 5, x, norms if normed else None)
    assert off(back, gradient) < 2e-6
    assert emulated == ["rope", "rope_vjp"]
