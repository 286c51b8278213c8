"""Products of matrices in C, by each way that this processor has, beside float64: every edge of
every kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS  # isort: skip
import numpy as np
import pytest
from numpy.typing import NDArray

from allhands.kernels import native
from allhands.runtime.blas import native_library, preload_blas
from allhands.runtime.native_calls import at

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or not a Linux CPU")
Matrix = NDArray[Any]
WAYS = {"openblas": 0, "avx512": 1, "unit": 2}
# Rows and columns on both sides of what a kernel takes (14 and 32), of a block (896 and 128) and of
# lanes (16); K of a block (768).
SIZES = [
    *((m, 96, 40) for m in (1, 2, 3, 5, 7, 8, 9, 11, 13, 14, 15, 27, 28, 29)),
    *(
        (30, n, 33)
        for n in (1, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 127, 128, 129, 161, 257)
    ),
    *((17, 50, k) for k in (1, 2, 15, 16, 17, 31, 767, 768, 769, 1537)),
    *((895, 40, 20), (896, 33, 20), (897, 33, 17), (1800, 20, 790), (300, 1000, 64)),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[int]:
    """All products of the test go this way."""
    library: Any = native_library()
    asked, said = WAYS[request.param], preload_blas().reason
    if asked > (2 if "and AMX" in said else "and our AVX-512" in said):
        pytest.skip(f"not on this processor: {said}")
    library.allhands_force_way(asked)
    yield asked
    library.allhands_force_way(-1)
    library.allhands_set_threads(1)


def drawn(draw: np.random.Generator, *shape: int) -> Matrix:
    return draw.standard_normal(shape).astype(np.float32)


def sgemm(
    a: Matrix,
    b: Matrix,
    c: Matrix,
    turned: tuple[bool, bool],
    alpha: float = 1.0,
    beta: float = 0.0,
) -> None:
    """``c = alpha a b + beta c`` for (m, k), (k, n) and (m, n), of which the first two may be
    stored turned.
    """
    (m, n), k = c.shape, a.shape[0] if turned[0] else a.shape[1]
    forms = [101, *(112 if each else 111 for each in turned), m, n, k]
    library: Any = native_library()
    # NumPy's step from one row to the next says nothing where there is one row.
    widths = [ctypes.c_int(max(each.strides[0] // 4, each.shape[1])) for each in (a, b, c)]
    library.cblas_sgemm(
        *map(ctypes.c_int, forms),
        ctypes.c_float(alpha),
        *(at(a), widths[0], at(b), widths[1]),
        ctypes.c_float(beta),
        *(at(c), widths[2]),
    )


def assert_exact(c: Matrix, exact: Matrix, bound: Matrix, k: int) -> None:
    """Within what the rounding of each addition may do, as a random walk."""
    assert np.isfinite(c).all()
    assert (np.abs(c - exact) / bound).max() < 2.0**-24 * (4 + 4 * np.sqrt(k))


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_every_edge(way: int, turned: tuple[bool, bool]) -> None:
    draw = np.random.default_rng(1)
    for m, n, k in SIZES:
        a, b = drawn(draw, m, k), drawn(draw, k, n)
        stored = [
            np.ascontiguousarray(x.T) if turn else x for x, turn in zip((a, b), turned, strict=True)
        ]
        c = np.full((m, n), np.nan, dtype=np.float32)  # not to be read
        sgemm(*stored, c, turned)
        assert_exact(c, a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b), k)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 0.0), (-2.0, 0.25)])
def test_parts_of_larger_matrices_are_added_to_and_nothing_beside_them_is_written(
    way: int, alpha: float, beta: float
) -> None:
    draw = np.random.default_rng(2)
    for m, n, k in [(29, 70, 50), (45, 33, 800), (14, 16, 16)]:
        a, b, c = (
            drawn(draw, m, k + 7)[:, :k],
            drawn(draw, k, n + 5)[:, :n],
            drawn(draw, m + 2, n + 11),
        )
        before = c.copy()
        inside = c[1 : m + 1, 3 : n + 3]
        exact = alpha * (a.astype(np.float64) @ b) + beta * inside.astype(np.float64)
        bound = (
            abs(alpha) * (np.abs(a).astype(np.float64) @ np.abs(b))
            + abs(beta) * np.abs(inside)
            + 1e-3
        )
        sgemm(a, b, inside, (False, False), alpha, beta)
        assert_exact(inside, exact, bound, k)
        before[1 : m + 1, 3 : n + 3] = inside
        assert np.array_equal(c, before)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("back", [False, True])
def test_codes(way: int, group: int, back: bool) -> None:
    library: Any = native_library()
    draw = np.random.default_rng(3)
    for m, outputs, inputs in [
        (1, 40, 128),
        (15, 96, 256),
        (31, 161, 896),
        (200, 33, 128),
        (900, 48, 128),
    ]:
        codes = draw.integers(0, 256, (outputs, inputs)).astype(np.uint8)
        scales, biases = (
            drawn(draw, outputs, inputs // group),
            drawn(draw, outputs, inputs // group),
        )
        spread = [np.repeat(each, group, axis=1).astype(np.float64) for each in (scales, biases)]
        weight = codes * spread[0] + spread[1]
        x = drawn(draw, m, outputs if back else inputs)
        y = np.full((m, inputs if back else outputs), np.nan, dtype=np.float32)
        sizes = (ctypes.c_int * 4)(outputs, inputs, group, outputs)
        given = (at(x), m, at(codes), at(scales), at(biases), sizes, int(back))
        assert library.allhands_coded_product(*given, 0, at(y))
        factor = weight if back else weight.T
        exact, bound = x.astype(np.float64) @ factor, np.abs(x).astype(np.float64) @ np.abs(factor)
        assert_exact(y, exact, bound, x.shape[1])
        assert library.allhands_coded_product(*given, 1, at(y))
        assert_exact(y, 2 * exact, 2 * bound, x.shape[1])


@pytest.mark.parametrize("back", [False, True])
def test_codes_of_some_rows_of_a_weight(way: int, back: bool) -> None:
    library: Any = native_library()
    draw = np.random.default_rng(5)
    m, whole, first, outputs, inputs, group = 21, 90, 30, 40, 128, 32
    codes = draw.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    scales, biases = drawn(draw, outputs, inputs // group), drawn(draw, outputs, inputs // group)
    spread = [np.repeat(each, group, axis=1).astype(np.float64) for each in (scales, biases)]
    weight = codes * spread[0] + spread[1]
    x = drawn(draw, m, whole if back else inputs)
    y = np.full((m, inputs if back else whole), 7.0, dtype=np.float32)
    here = slice(first, first + outputs)
    source, target = (x[:, first:], y) if back else (x, y[:, first:])
    sizes = (ctypes.c_int * 4)(outputs, inputs, group, whole)
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (source, target)]
    args = (pointers[0], m, at(codes), at(scales), at(biases), sizes, int(back), 0, pointers[1])
    assert library.allhands_coded_product(*args)
    used = x[:, here] if back else x
    factor = weight if back else weight.T
    exact, bound = (
        used.astype(np.float64) @ factor,
        np.abs(used).astype(np.float64) @ np.abs(factor),
    )
    assert_exact(y if back else np.ascontiguousarray(y[:, here]), exact, bound, used.shape[1])
    if not back:
        assert (np.delete(y, np.r_[here], axis=1) == 7.0).all()


def test_no_bit_depends_on_threads_or_on_the_place_in_the_matrix(way: int) -> None:
    if way == WAYS["openblas"]:
        pytest.skip("OpenBLAS's order of additions depends on the size")
    library: Any = native_library()
    draw = np.random.default_rng(4)
    a, b = drawn(draw, 950, 800), drawn(draw, 800, 300)
    found: list[Matrix] = []
    for threads in (1, 2, 3, 8):
        library.allhands_set_threads(threads)
        c = np.zeros((950, 300), dtype=np.float32)
        sgemm(a, b, c, (False, False))
        found.append(c)
    part = np.zeros((37, 45), dtype=np.float32)
    sgemm(a[900:937], np.ascontiguousarray(b[:, 200:245]), part, (False, False))
    for c in found:
        assert np.array_equal(c, found[0])
        assert np.array_equal(part, c[900:937, 200:245])
