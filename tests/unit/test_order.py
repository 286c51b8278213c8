"""The global order, its division among ranks, and micro-batches: properties, bounds and brute
force.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data.order import GlobalOrder, Shuffle, divide, micro_batches

quick = settings(max_examples=60, deadline=None, database=None)
Lengths = st.lists(st.integers(1, 500), min_size=1, max_size=90)
Weights = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8)


def order_of(lengths: list[int], batch_size: int, seed: int) -> GlobalOrder:
    return GlobalOrder(np.asarray(lengths, dtype=np.int64), batch_size, seed)


# --- the global order -----------------------------------------------------------------------------


@quick
@given(Lengths, st.integers(1, 12), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_every_example_comes_exactly_once_an_epoch(
    lengths: list[int], batch_size: int, seed: int, epoch: int
) -> None:
    order = order_of(lengths, batch_size, seed)
    first = epoch * order.batches_per_epoch
    batches = [order.batch(first + i) for i in range(order.batches_per_epoch)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    sizes = sorted(len(batch) for batch in batches)
    assert sizes[-1] <= batch_size
    # Only one batch may be small: the rest of the division.
    assert sizes[1:] == [batch_size] * (len(sizes) - 1)
    assert {order.epoch(first + i) for i in range(order.batches_per_epoch)} == {epoch}


@quick
@given(
    Lengths,
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
)
def test_a_batch_is_a_pure_function_of_seed_and_iteration(
    lengths: list[int], batch_size: int, seed: int, asked: list[int]
) -> None:
    straight = order_of(lengths, batch_size, seed)
    expected = [straight.batch(i).tolist() for i in range(max(asked) + 1)]
    jumping = order_of(lengths, batch_size, seed)
    for iteration in asked:
        assert jumping.batch(iteration).tolist() == expected[iteration]
        assert order_of(lengths, batch_size, seed).batch(iteration).tolist() == expected[iteration]


def test_seeds_and_epochs_give_different_orders() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        order = order_of([1] * 64, 8, seed)
        return np.concatenate([order.batch(8 * number + i) for i in range(8)]).tolist()

    orders = [epoch(seed, number) for seed in range(4) for number in range(4)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    # Written down once: a resumed run, or a rank with another numpy, must find these very batches.
    order = order_of([5, 3, 8, 1, 9, 2, 7, 4, 6, 10], 3, 2024)
    assert [order.batch(i).tolist() for i in range(5)] == [
        [7, 0, 8],
        [9],
        [6, 2, 4],
        [3, 5, 1],
        [7, 0, 8],
    ]


def test_batches_hold_similar_lengths_within_a_pool() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 512)
    order = GlobalOrder(lengths, 8, 0)
    spreads = [np.ptp(lengths[order.batch(i)]) for i in range(order.batches_per_epoch)]
    # 512 sorted lengths over 1000 are 2 apart: 8 neighbours span about 14, at random about 780.
    assert np.mean(spreads) < 30


# --- shuffles -------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.integers(0, 9))
def test_a_shuffle_is_a_permutation_wherever_it_is_asked(size: int, seed: int, epoch: int) -> None:
    whole = Shuffle(size, seed, epoch).at(np.arange(size))
    assert sorted(whole.tolist()) == list(range(size))
    some = np.arange(size)[:: max(1, size // 7)][::-1]
    assert Shuffle(size, seed, epoch).at(some).tolist() == whole[some].tolist()


def test_shuffles_of_a_few_are_uniform() -> None:
    # All 24 orders of 4, each about 250 times of 6000: chi-square with 23 degrees of freedom is
    # below 49.7 in 99.9 %.
    counts = Counter(tuple(Shuffle(4, seed, 5).at(np.arange(4)).tolist()) for seed in range(6000))
    assert len(counts) == 24
    assert sum((count - 250) ** 2 / 250 for count in counts.values()) < 49.7


def test_shuffles_of_many_have_no_trend() -> None:
    size, table = 1000, np.zeros((10, 10))
    adjacent, correlations = [], []
    for seed in range(300):
        order = Shuffle(size, seed).at(np.arange(size))
        table += np.histogram2d(np.arange(size), order, bins=10)[0]
        adjacent.append(np.count_nonzero(np.diff(order) == 1))
        correlations.append(np.corrcoef(np.arange(size), order)[0, 1])
    expected = 300 * size / 100
    # 81 degrees of freedom: below 125 in 99.9 %.
    assert ((table - expected) ** 2 / expected).sum() < 125
    # A random permutation has one rising neighbour on average, and correlations spread by 1 /
    # sqrt(size).
    assert np.mean(adjacent) == pytest.approx(1.0, abs=0.2)
    assert np.std(correlations) == pytest.approx(size**-0.5, rel=0.15)


def test_any_batch_of_a_large_set_costs_the_same() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 1_000_000, dtype=np.int32)
    order = GlobalOrder(lengths, 8, 1)
    far = order.batches_per_epoch * 1000 + 77

    def time_s(iterations: range) -> float:
        started = time.process_time()
        for iteration in iterations:
            GlobalOrder(lengths, 8, 1).batch(iteration)
        return time.process_time() - started

    near, distant = time_s(range(200)), time_s(range(far, far + 200))
    # A fraction of a millisecond each, though a million examples are shuffled; nothing of an epoch
    # is kept.
    assert near < 0.4
    assert distant < 3 * near + 0.1


# --- division among ranks -------------------------------------------------------------------------


@quick
@given(Lengths, Weights)
def test_shares_unite_to_the_batch(lengths: list[int], weights: list[float]) -> None:
    sizes = np.asarray(lengths, dtype=np.int64)
    batch = np.random.default_rng(len(lengths)).permutation(len(lengths))[
        : max(1, len(lengths) // 2)
    ]
    shares = divide(batch, sizes, tuple(weights))
    assert len(shares) == len(weights)
    assert sorted(np.concatenate(shares).tolist()) == sorted(batch.tolist())
    # The order in which the batch is written down must not matter: ranks divide it independently.
    again = divide(batch[::-1].copy(), sizes, tuple(weights))
    assert [share.tolist() for share in again] == [share.tolist() for share in shares]


@quick
@given(Lengths, st.integers(1, 8))
def test_equal_ranks_differ_by_at_most_the_longest_example(lengths: list[int], ranks: int) -> None:
    sizes = np.asarray(lengths, dtype=np.int64)
    loads = [
        int(sizes[share].sum()) for share in divide(np.arange(len(sizes)), sizes, (1.0,) * ranks)
    ]
    # Each example went to the least loaded rank (Graham 1966): so no rank is ahead by more than one
    # example.
    assert max(loads) - min(loads) <= max(lengths)
    assert max(loads) <= sum(lengths) / ranks + max(lengths) * (1 - 1 / ranks) + 1e-9


def best_makespan(lengths: list[int], weights: tuple[float, ...]) -> float:
    """Over all assignments, the earliest time at which every rank can be done."""
    choices = np.array(list(itertools.product(range(len(weights)), repeat=len(lengths))))
    sizes = np.asarray(lengths)
    loads = np.stack(
        [(sizes * (choices == rank)).sum(axis=1) / w for rank, w in enumerate(weights)]
    )
    return float(loads.max(axis=0).min())


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=7),
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=3),
)
def test_the_division_is_within_the_lpt_bound_of_the_best(
    lengths: list[int], weights: list[float]
) -> None:
    sizes = np.asarray(lengths, dtype=np.int64)
    speeds = tuple(weights)
    shares = divide(np.arange(len(sizes)), sizes, speeds)
    makespan = max(float(sizes[share].sum()) / w for share, w in zip(shares, speeds, strict=True))
    ranks = len(speeds)
    # Graham 1969 for equal speeds; Gonzalez, Ibarra and Sahni 1977 for unequal ones.
    bound = 4 / 3 - 1 / (3 * ranks) if len(set(speeds)) == 1 else 2 - 2 / (ranks + 1)
    assert makespan <= bound * best_makespan(lengths, speeds) + 1e-9


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_speeds_meet_the_sharper_bound(ranks: int) -> None:
    random = np.random.default_rng(ranks)
    for _ in range(10):
        lengths = random.integers(1, 40, 7)
        shares = divide(np.arange(7), lengths, (1.0,) * ranks)
        makespan = max(int(lengths[share].sum()) for share in shares)
        assert (
            makespan
            <= (4 / 3 - 1 / (3 * ranks)) * best_makespan(lengths.tolist(), (1.0,) * ranks) + 1e-9
        )


def test_a_rank_of_three_times_the_speed_gets_three_times_the_tokens() -> None:
    lengths = np.random.default_rng(1).integers(5, 50, 400)
    fast, slow = divide(np.arange(400), lengths, (3.0, 1.0))
    assert lengths[fast].sum() / lengths[slow].sum() == pytest.approx(3.0, rel=0.01)


def test_more_ranks_than_examples_leaves_ranks_without_work() -> None:
    shares = divide(np.array([4, 2]), np.array([1, 1, 7, 1, 9]), (1.0,) * 5)
    assert [share.tolist() for share in shares] == [[4], [2], [], [], []]
    assert all(share.dtype == np.int64 for share in shares)


# --- micro-batches --------------------------------------------------------------------------------


def padded_cost(parts: list[list[int]], lengths: np.ndarray, overhead: int) -> int:
    return sum(int(lengths[part].max()) * len(part) + overhead for part in parts)


@cache
def partitions(count: int) -> list[list[list[int]]]:
    """All ways to put ``count`` things into unnamed heaps (Bell numbers)."""

    def grow(index: int, heaps: list[list[int]]) -> Iterator[list[list[int]]]:
        if index == count:
            yield [list(heap) for heap in heaps]
            return
        for heap in heaps:
            heap.append(index)
            yield from grow(index + 1, heaps)
            heap.pop()
        yield from grow(index + 1, [*heaps, [index]])

    return list(grow(0, []))


@quick
@given(Lengths, st.integers(1, 2000), st.integers(0, 100))
def test_micro_batches_hold_every_example_and_respect_the_limit(
    lengths: list[int], max_tokens: int, overhead: int
) -> None:
    sizes = np.asarray(lengths, dtype=np.int64)
    parts = micro_batches(np.arange(len(sizes)), sizes, max_tokens, overhead)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(sizes)))
    for part in parts:
        assert len(part) == 1 or int(sizes[part].max()) * len(part) <= max_tokens


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 120), st.integers(0, 30)
)
def test_micro_batches_cost_the_least_of_all_partitions(
    lengths: list[int], max_tokens: int, overhead: int
) -> None:
    sizes = np.asarray(lengths, dtype=np.int64)

    def allowed(parts: list[list[int]]) -> bool:
        return all(
            len(part) == 1 or int(sizes[part].max()) * len(part) <= max_tokens for part in parts
        )

    best = min(
        padded_cost(parts, sizes, overhead) for parts in partitions(len(lengths)) if allowed(parts)
    )
    found = [
        part.tolist() for part in micro_batches(np.arange(len(sizes)), sizes, max_tokens, overhead)
    ]
    assert padded_cost(found, sizes, overhead) == best


def test_no_examples_make_no_micro_batch() -> None:
    assert micro_batches(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 100, 8) == []


def test_padding_on_real_chats_is_small_beside_random_batches(shared_data: Path) -> None:
    rows = (shared_data / "pirate-dolly" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(row)["messages"] for row in rows]
    # About four characters a token, and a handful of tokens for the template.
    lengths = np.array(
        [sum(len(m["content"]) for m in chat) // 4 + 10 for chat in chats], dtype=np.int64
    )
    order = GlobalOrder(lengths, 16, 0)

    def padding(batches: list[np.ndarray]) -> float:
        padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
        return 1 - sum(int(lengths[batch].sum()) for batch in batches) / padded

    sorted_batches = [order.batch(i) for i in range(order.batches_per_epoch)]
    cut = [
        part for batch in sorted_batches for part in micro_batches(batch, lengths[batch], 2048, 24)
    ]
    shuffled = np.random.default_rng(0).permutation(len(lengths))
    plain = [shuffled[i : i + 16] for i in range(0, len(shuffled), 16)]
    assert padding(plain) > 0.40
    assert padding(sorted_batches) < 0.10
    assert padding(cut) < 0.05
    print(
        f"padding: random {padding(plain):.1%}, sorted {padding(sorted_batches):.1%}, cut {padding(cut):.1%}"
    )
