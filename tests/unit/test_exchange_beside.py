"""What `start_all_reduce` hands to the other stream, in which calls and order (numbers over ranks:
tests/parity).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from allhands.distributed import reduce
from allhands.distributed.reduce import Lookups, start_all_reduce, start_sum
from allhands.io.trees import flatten


class Twin:
    """Two ranks that have the same; keeps what happens in ``events``: the sizes of calls, and what
    was evaluated.
    """

    rank, size, backend = 0, 2, "ring"

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def all_sum(self, array: mx.array) -> mx.array:
        self.events.append(("sum", array.size))
        return 2 * array

    def all_gather(self, array: mx.array) -> mx.array:
        self.events.append(("gather", array.size))
        return mx.concatenate([array, array])

    @property
    def calls(self) -> list[int]:
        """The sizes of sums but for those of a single number, at which ranks meet."""
        return [size for what, size in self.events if what == "sum" and size > 1]

    @property
    def all_calls(self) -> list[int]:
        return [size for what, size in self.events if what == "sum"]

    def place_of(self, array: mx.array) -> int:
        """Of the call in which ``array`` was handed out, among the events."""
        return next(
            at
            for at, (what, about) in enumerate(self.events)
            if what == "eval" and any(array is one for one in about)
        )

    def first(self, what: str) -> int:
        return next(at for at, (kind, _) in enumerate(self.events) if kind == what)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Twin:
    found = Twin()
    hand_out = mx.async_eval

    def kept(*trees: Any) -> None:
        found.events.append(("eval", [array for _, array in flatten(list(trees))]))
        hand_out(*trees)

    monkeypatch.setattr(mx, "async_eval", kept)
    return found


# Numbers of a layer's arrays in the model's order: queries, keys and values; attention's output;
# gate and up; down.
LAYER = (30, 20, 160, 80)


def test_a_call_ends_before_attention_and_large_arrays_go_by_themselves(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduce, "_ALONE_BYTES", 4 * 60)
    arrays = [
        mx.array(np.arange(count, dtype=np.float32) + layer)
        for layer in range(4)
        for count in LAYER
    ]
    stream = mx.new_stream(mx.default_device())
    begun = start_all_reduce(twin, arrays, bucket_bytes=4 * 300, stream=stream, cuts={0, 4, 8, 12})
    # From the last layer on: down, gate and up, output; then each with the queries of the layer
    # after it. Small ones are together. What fits a bucket at the end is cut at a quarter of one.
    assert twin.calls == [160, 80, 20, *[160, 80, 30 + 20] * 2, 30, 80, 160, 20 + 30]
    for total, array in zip(begun.arrays, arrays, strict=True):
        assert (np.array(total) == 2 * np.array(array)).all()


def test_ranks_meet_before_each_bucket(twin: Twin) -> None:
    arrays = [mx.array(np.arange(count, dtype=np.float32)) + 1 for _ in range(2) for count in LAYER]
    begun = start_all_reduce(
        twin, arrays, bucket_bytes=4 * 300, stream=mx.new_stream(mx.default_device()), cuts={0, 4}
    )
    # One number, then the bucket's sums.
    assert twin.all_calls == [1, 80 + 160 + 20, 1, 30, 1, 80, 1, 160, 1, 20 + 30]
    for total, array in zip(begun.arrays, arrays, strict=True):
        assert (np.array(total) == 2 * np.array(array)).all()
    sums = [at for at, (what, _) in enumerate(twin.events) if what == "sum"]
    for meeting, bucket in zip(sums[::2], sums[1::2], strict=True):
        # What is summed was handed out before the meeting, the meeting before the bucket, and what
        # waits for it after.
        assert [what for what, _ in twin.events[meeting - 1 : bucket + 3]] == [
            "eval",
            "sum",
            "eval",
            "sum",
            "eval",
            "eval",
        ]
    assert twin.place_of(arrays[-1]) < sums[0]


def test_without_cuts_buckets_are_filled(twin: Twin) -> None:
    arrays = [mx.ones((count,)) for _ in range(4) for count in LAYER]
    start_all_reduce(twin, arrays, bucket_bytes=4 * 300, stream=mx.new_stream(mx.default_device()))
    assert twin.calls == [
        80 + 160 + 20 + 30,
        80 + 160 + 20 + 30,
        80 + 160 + 20 + 30,
        80,
        160,
        20 + 30,
    ]


@pytest.mark.parametrize(
    ("one_call", "calls"), [(1160, [1160]), (580, [580] * 2), (290, [290] * 4), (1, [290] * 4)]
)
def test_what_is_less_than_a_bucket_travels_in_parts_if_it_is_no_trifle(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, one_call: int, calls: list[int]
) -> None:
    """As adapters' gradients are: in one call they would all be waited for after the backward pass."""
    monkeypatch.setattr(reduce, "_ONE_CALL_BYTES", 4 * one_call)
    arrays = [mx.ones((count,)) for _ in range(4) for count in LAYER]
    start_all_reduce(
        twin, arrays, bucket_bytes=4 * 100_000, stream=mx.new_stream(mx.default_device())
    )
    assert twin.calls == calls


def test_what_the_other_stream_takes_was_handed_out_before(twin: Twin) -> None:
    """Else two streams meet within one call of MLX's, whose memory for that is given back by
    ``cudaFree``.
    """
    stream = mx.new_stream(mx.default_device())
    ids = mx.array([1, 0, 2]) + 0
    rows, grads = mx.ones((3, 4)) * 2, [mx.ones((5, 4)) * 3, mx.ones((7,)) * 4]
    lookups = Lookups(0, rows, ids, besides=True)
    start_all_reduce(twin, grads, bucket_bytes=1 << 20, stream=stream, lookups=lookups)
    assert twin.place_of(ids) < twin.first("gather")
    assert max(twin.place_of(grad) for grad in grads) < twin.first("sum")
    gathers = [at for at, (what, _) in enumerate(twin.events) if what == "gather"]
    assert twin.place_of(rows) < gathers[1]

    loss = mx.ones(()) * 5
    before = len(twin.calls)
    total = start_sum(twin, [loss, 2.0], stream=stream)
    assert total.tolist() == [10.0, 4.0]
    summed = [at for at, (what, size) in enumerate(twin.events) if what == "sum" and size != 1][
        before
    ]
    assert twin.place_of(loss) < summed
