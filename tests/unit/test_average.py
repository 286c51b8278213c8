"""Sums over ranks in memory, and ``average_gradients`` where there is one process (ranks:
tests/parity).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.llama import Model, ModelArgs
from twins import ThreadCommunicator, run_ranks

import allhands
from allhands.data.loader import MicroBatch
from allhands.distributed.backend import SingleProcess
from allhands.distributed.reduce import (
    Exchange,
    count_parts,
    lazy_count,
    mean_of_tokens,
    sum_over_ranks,
    whole_count,
)
from allhands.errors import ConfigError
from allhands.train.optimizers import SGD
from allhands.train.step import StepOptions, make_step


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
            # With the scalars 8 + 48 + 4 + 28 + 32 + 200 bytes: in six calls, in three (60, 60,
            # 200), in one.
            assert calls == {1: 6, 64: 3, 10**6: 1}[bucket_bytes]


def test_types_travel_apart_and_come_back_as_they_were() -> None:
    def work(communicator: ThreadCommunicator) -> tuple[list[mx.Dtype], int]:
        arrays = [
            mx.ones((3,), dtype=dtype) for dtype in (mx.float32, mx.float16, mx.float32, mx.float16)
        ]
        sums, _ = sum_over_ranks(communicator, arrays)
        assert all((np.array(one) == 2).all() for one in sums)
        return [one.dtype for one in sums], len(communicator.calls)

    types = [mx.float32, mx.float16, mx.float32, mx.float16]
    assert run_ranks(2, work) == [(types, 2), (types, 2)]


def gradients() -> dict[str, object]:
    return {
        "layers": [
            {"w": mx.array([[1.0, 2.0], [3.0, 4.0]])},
            {"w": mx.array([5.0], dtype=mx.bfloat16)},
        ]
    }


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


# --- more tokens than float32 can count -----------------------------------------------------------

# The tokens of each rank. As float32 the first is even, and sums of the others are rounded in steps
# of 2 to 16.
COUNTS = [
    [2**24 + 1],
    [2**24 + 1, 3],
    [2**24 + 1, 2**23 + 1, 1],
    [10**8 + 7] * 3,
    [0, 2**30 + 1],
    [4095, 4097, 2**33],
]


@pytest.mark.parametrize("counts", COUNTS)
def test_counts_are_exact_beyond_what_float32_holds(counts: list[int]) -> None:
    def work(communicator: ThreadCommunicator) -> tuple[int, float]:
        parts = count_parts(counts[communicator.rank])
        _, totals = sum_over_ranks(communicator, [mx.ones((3,))], [mx.array(0.5), *parts, 1.0])
        values = [float(value) for value in np.array(totals)]
        return whole_count(*values[1:3]), lazy_count(totals[1:3]).item()

    exact = sum(counts)
    assert run_ranks(len(counts), work) == [(exact, float(np.float32(exact)))] * len(counts)


@pytest.mark.parametrize("kind", [int, float, mx.int32, mx.int64, mx.uint32, mx.float32])
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 2**24 - 1, 2**24 + 2, 2**30 + 128])
def test_counts_come_in_any_type(kind: object, count: int) -> None:
    given = mx.array(count, dtype=kind) if isinstance(kind, mx.Dtype) else kind(count)  # type: ignore[operator]
    _, totals = sum_over_ranks(SingleProcess(), [], count_parts(given))
    assert whole_count(*(float(value) for value in np.array(totals))) == count


class Huge(MicroBatch):
    """One that says that it has more trained tokens than memory would hold."""

    @property
    def num_targets(self) -> int:
        return self.num_tokens


@pytest.mark.parametrize("cpu_native", [True, False])
@pytest.mark.parametrize(
    "counts", [[[2**24 + 1]], [[2**23 + 1, 2**23], [2**24 + 1]], [[2**24 + 1, 2], [], [5]]]
)
def test_a_step_counts_its_tokens_exactly_over_micro_batches_and_ranks(
    counts: list[list[int]], cpu_native: bool
) -> None:
    exact = sum(map(sum, counts))

    def batch(count: int) -> Huge:
        places = np.arange(4, dtype=np.int32)
        return Huge(
            places.reshape(1, 4),
            places,
            (places + 1) % 8,
            num_tokens=count,
            examples=np.zeros(1, np.int32),
        )

    def work(communicator: ThreadCommunicator) -> tuple[int, int, float]:
        mx.random.seed(0)
        shape = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "intermediate_size": 16,
            "num_attention_heads": 2,
        }
        more = {
            "model_type": "llama",
            "vocab_size": 8,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 2,
        }
        model = Model(ModelArgs.from_dict(shape | more))
        mx.eval(model.parameters())
        step = make_step(
            model,
            SGD(learning_rate=0.0),
            communicator,
            StepOptions(cpu_native=cpu_native, compiled=False),
        )
        result = step([batch(count) for count in counts[communicator.rank]])
        return result.num_targets, result.num_tokens, result.grad_norm

    results = run_ranks(len(counts), work)
    assert all(isinstance(result, tuple) for result in results), results
    assert [result[:2] for result in results] == [(exact, exact)] * len(counts)
    assert len({result[2] for result in results}) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [None, mx.float32])
def test_gradients_of_many_tokens_are_divided_by_all_of_them(
    reduction: str, dtype: mx.Dtype | None
) -> None:
    counts = [2**24 + 1] * 3
    total = sum(counts)

    def work(communicator: ThreadCommunicator) -> float:
        count = counts[communicator.rank]
        # Sums that float32 holds exactly: what comes of them is rounded in the division alone.
        own = mx.array([2.0**25 if reduction == "sum" else 2.0])
        exchange = Exchange(dtype=dtype)
        return mean_of_tokens(communicator, {"w": own}, count, reduction, exchange)["w"].item()  # type: ignore[arg-type]

    wanted = 3 * 2.0**25 / total if reduction == "sum" else 2.0
    assert run_ranks(3, work) == [pytest.approx(wanted, rel=1.2e-7)] * 3
