"""Splits as arithmetic: exact sizes, groups that stay whole, and nothing that depends on the order
of rows.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.data.splitting import (
    NONE,
    TEST,
    TRAIN,
    VALID,
    Groups,
    SplitShare,
    WantedSplit,
    assign,
    hash64,
    keepers,
    shuffled,
)
from allhands.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "total", "rows"),
    [
        ("0.05", 1000, 50),
        ("0.05", 10, 1),
        ("0.1", 25, 2),
        ("200", 1000, 200),
        ("0", 9, 0),
        ("0.0", 9, 0),
        ("1", 9, 1),
    ],
)
def test_a_share_is_a_fraction_or_a_number(text: str, total: int, rows: int) -> None:
    assert SplitShare.parse(text, "--valid").rows(total) == rows


@pytest.mark.parametrize("text", ["-0.1", "1.5", "many", "nan", "inf", "-3", ""])
def test_other_shares_are_refused_with_their_flag(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SplitShare.parse(text, "--test")
    assert caught.value.where == "--test"


def test_shuffling_of_hashes_is_the_published_mixer() -> None:
    def splitmix(value: int) -> int:
        mask = (1 << 64) - 1
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    hashes = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    key = hash64("seed", "7")
    assert shuffled(hashes, 7).tolist() == [splitmix(int(value) ^ key) for value in hashes]


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=25))
def test_groups_are_connected_components(pairs: list[tuple[int, int]]) -> None:
    groups = Groups(20)
    groups.join(pairs)
    reached = {row: {row} for row in range(20)}
    for _ in range(20):
        for one, other in pairs:
            reached[one] |= reached[other]
            reached[other] |= reached[one]
    assert groups.labels().tolist() == [min(reached[row]) for row in range(20)]


@given(
    labels=st.lists(st.integers(0, 12), min_size=1, max_size=60),
    wanted=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    seed=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_groups_stay_whole_and_their_split_does_not_depend_on_the_order(
    labels: list[int], wanted: tuple[int, int], seed: int, order: random.Random
) -> None:
    label = np.array(labels, dtype=np.int64)
    keys = np.array([hash64(f"{group} {i}") for i, group in enumerate(labels)], dtype=np.uint64)
    none = np.full(len(labels), NONE, dtype=np.int8)
    split = assign(label, keys, none, WantedSplit(*wanted), seed)
    for group in set(labels):
        assert len(set(split[label == group].tolist())) == 1
    sizes = [int(np.sum(label == group)) for group in set(labels)]
    for number, target in ((VALID, wanted[0]), (TEST, wanted[1])):
        got = int(np.sum(split == number))
        assert got <= target or (target > 0 and got in sizes), (
            "more than wanted only where one group is more"
        )
    assert TRAIN in split
    mixed = list(range(len(labels)))
    order.shuffle(mixed)
    # The labels themselves come from the order of rows: other names, the same groups.
    assert np.array_equal(
        assign(100 - label[mixed], keys[mixed], none, WantedSplit(*wanted), seed), split[mixed]
    )


def test_single_rows_give_exact_counts_and_seeds_differ() -> None:
    keys = np.array([hash64(str(i)) for i in range(1000)], dtype=np.uint64)
    rows, none = np.arange(1000), np.full(1000, NONE, dtype=np.int8)
    first, second = (assign(rows, keys, none, WantedSplit(50, 37), seed) for seed in (0, 1))
    for split in (first, second):
        assert np.bincount(split, minlength=3).tolist() == [913, 50, 37]
    # Of 37 rows, two independent choices out of 1000 share 1.4 on average.
    assert np.sum((first == TEST) & (second == TEST)) < 10


def test_given_splits_stay_and_undecided_rows_follow_their_twins() -> None:
    labels = np.array([0, 0, 0, 3, 3, 5, 6])
    given_splits = np.array([TRAIN, VALID, NONE, TEST, NONE, TRAIN, NONE], dtype=np.int8)
    keys = np.arange(7, dtype=np.uint64)
    split = assign(labels, keys, given_splits, WantedSplit(0, 0), 0)
    assert split.tolist() == [TRAIN, VALID, VALID, TEST, TEST, TRAIN, TRAIN]
    # Train is cut only where a whole group is free: 5 and 6.
    cut = assign(labels, keys, given_splits, WantedSplit(0, 1), 0)
    assert cut.tolist()[:5] == split.tolist()[:5]
    assert sorted(cut.tolist()[5:]) == [TRAIN, TEST]


def test_the_one_that_is_kept_is_held_out_rather_than_trained_on() -> None:
    labels = np.array([0, 0, 0, 3, 3])
    given_splits = np.array([TRAIN, TEST, VALID, NONE, NONE], dtype=np.int8)
    contents = np.array([1, 2, 3, 9, 4], dtype=np.uint64)
    assert keepers(labels, given_splits, contents).tolist() == [1, 1, 1, 4, 4]
