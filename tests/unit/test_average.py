"""Sums over ranks in memory, and ``average_gradients`` where there is one process (ranks: tests/parity)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from twins import ThreadCommunicator, run_ranks

import allhands
from allhands.distributed.reduce import sum_over_ranks
from allhands.errors import ConfigError


def rank_arrays(rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    shapes = [(3, 4), (), (0, 2), (7,), (2, 2, 2), (50,)]
    return [random.integers(-50, 50, shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10**6])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sums_are_those_of_numpy_whatever_the_buckets(ranks: int, bucket_bytes: int) -> None:
    def work(communicator: ThreadCommunicator) -> tuple[list[np.ndarray], list[float], int]:
        arrays = [mx.array(array) for array in rank_arrays(communicator.rank)]
        scalars = [float(communicator.rank), mx.array(2.0)]
        sums, totals = sum_over_ranks(communicator, arrays, scalars, bucket_bytes=bucket_bytes)
        return [np.array(one) for one in sums], totals.tolist(), len(communicator.calls)

    expected = [sum(arrays) for arrays in zip(*map(rank_arrays, range(ranks)), strict=True)]
    for result in run_ranks(ranks, work):
        assert not isinstance(result, BaseException), result
        sums, totals, calls = result
        # Whole numbers, so that the order of the additions does not matter.
        assert all((ours == wanted).all() for ours, wanted in zip(sums, expected, strict=True))
        assert [one.shape for one in sums] == [np.shape(one) for one in expected]
        assert totals == [sum(range(ranks)), 2.0 * ranks]
        if ranks > 1:
            # With the scalars 8 + 48 + 4 + 28 + 32 + 200 bytes: in six calls, in three (60, 60, 200), in one.
            assert calls == {1: 6, 64: 3, 10**6: 1}[bucket_bytes]


def test_types_travel_apart_and_come_back_as_they_were() -> None:
    def work(communicator: ThreadCommunicator) -> tuple[list[mx.Dtype], int]:
        arrays = [mx.ones((3,), dtype=dtype) for dtype in (mx.float32, mx.float16, mx.float32, mx.float16)]
        sums, _ = sum_over_ranks(communicator, arrays)
        assert all((np.array(one) == 2).all() for one in sums)
        return [one.dtype for one in sums], len(communicator.calls)

    types = [mx.float32, mx.float16, mx.float32, mx.float16]
    assert run_ranks(2, work) == [(types, 2), (types, 2)]


def gradients() -> dict[str, object]:
    return {"layers": [{"w": mx.array([[1.0, 2.0], [3.0, 4.0]])}, {"w": mx.array([5.0], dtype=mx.bfloat16)}]}


def test_one_process_keeps_a_mean_and_divides_a_sum() -> None:
    mean = allhands.average_gradients(gradients(), num_tokens=10)
    assert mean["layers"][0]["w"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    total = allhands.average_gradients(gradients(), num_tokens=mx.array(10), reduction="sum")
    assert np.allclose(total["layers"][0]["w"], np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert total["layers"][1]["w"].dtype == mx.bfloat16
    assert total["layers"][1]["w"].item() == 0.5


def test_no_token_at_all_is_no_gradient_and_no_nan() -> None:
    nothing = {"w": mx.array([float("nan"), 1.0])}
    assert allhands.average_gradients(nothing, num_tokens=0)["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("count", [-3, -0.5, float("nan"), float("inf"), np.float64("nan")])
def test_a_number_of_tokens_that_is_none_is_refused(count: float) -> None:
    with pytest.raises(ConfigError) as caught:
        allhands.average_gradients(gradients(), num_tokens=count)
    assert str(caught.value) == (
        f"average_gradients: num_tokens={count}\n  what to do: give the number of this rank's tokens: 0 or more"
    )
