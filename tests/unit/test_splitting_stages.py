"""Blocks among the ranks of a pipeline: against every split that there is, and against what is
known of easy ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from allhands.parallel.splitting import Layers, Part, Seat, divide, even_speeds, split_as


def equal(blocks: int, head: float = 0.0, *, num_bytes: int = 0, table: int = 0) -> Layers:
    parts = (Part(1.0, num_bytes),) * blocks
    return Layers(parts, Part(0.0, table), Part(head, table))


def all_splits(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, blocks)))


def drawn(seed: int) -> tuple[Layers, list[Seat]]:
    """Blocks of several kinds and unlike ranks, some of which have little memory."""
    rng = random.Random(seed)
    count, ranks = rng.randint(3, 9), rng.randint(2, 3)
    blocks = tuple(
        Part(
            rng.choice((1.0, 1.0, 2.0, 3.0)),
            rng.randint(1, 9),
            rng.randint(0, 3),
            rng.choice((0.0, 0.5)),
        )
        for _ in range(count)
    )
    ends = Part(0.0, rng.randint(0, 9)), Part(rng.choice((0.0, 1.5)), rng.randint(0, 9))
    layers = Layers(blocks, *ends, first_trained=rng.choice((0, 0, 1, 2, count - 1)))
    whole = sum(part.num_bytes for part in blocks)
    seats = [
        Seat(
            rng.choice((1.0, 1.0, 0.6, 0.3)),
            rng.choice((None, whole // 3, whole // 2, 2 * whole)),
            rng.randint(0, 2),
            ranks - place,
        )
        for place in range(ranks)
    ]
    return layers, seats


def test_the_last_stage_has_more_blocks_where_the_others_compute_them_again() -> None:
    parts = (Part(3.0, again=1.0),) * 14  # forward, and twice as much back
    found = divide(Layers(parts), [Seat(), Seat()])
    assert found.sizes == (6, 8)
    assert found.seconds == (24.0, 24.0)


@pytest.mark.parametrize("seed", range(150))
def test_no_split_is_better(seed: int) -> None:
    layers, seats = drawn(seed)
    found = divide(layers, seats)
    every = [split_as(layers, seats, sizes) for sizes in all_splits(len(layers.blocks), len(seats))]
    fitting = [each for each in every if each.fits]
    assert sum(found.sizes) == len(layers.blocks)
    assert found == split_as(layers, seats, found.sizes)
    if fitting:
        assert found.fits
        assert max(found.seconds) == pytest.approx(min(max(each.seconds) for each in fitting))
    else:
        assert sum(found.missing) == min(sum(each.missing) for each in every) > 0


@pytest.mark.parametrize("seed", range(40))
def test_several_stages_a_rank_fit_where_they_can_and_are_as_fast_as_any(seed: int) -> None:
    rng = random.Random(seed)
    layers = equal(
        rng.randint(6, 11), rng.choice((0.0, 1.0, 2.5)), num_bytes=10, table=rng.choice((0, 15))
    )
    seats = [Seat(rng.choice((1.0, 0.5)), rng.choice((None, 45, 60))) for _ in range(2)]
    found = divide(layers, seats, 2)
    every = [split_as(layers, seats, sizes) for sizes in all_splits(len(layers.blocks), 4)]
    fitting = [each for each in every if each.fits]
    assert found.fits == bool(fitting)
    if fitting:
        assert max(found.seconds) == pytest.approx(min(max(each.seconds) for each in fitting))


@pytest.mark.parametrize(
    ("blocks", "ranks", "head", "expected"),
    [
        (6, 2, 0.0, (3, 3)),
        (6, 2, 1.2, (4, 2)),
        (7, 2, 0.0, (4, 3)),
        (32, 2, 0.6, (16, 16)),
        (32, 3, 1.0, (11, 11, 10)),
        (80, 4, 0.2, (20, 20, 20, 20)),
        (3, 3, 9.0, (1, 1, 1)),
    ],
)
def test_equal_ranks_have_stages_that_take_equally_long(
    blocks: int, ranks: int, head: float, expected: tuple[int, ...]
) -> None:
    assert divide(equal(blocks, head), [Seat()] * ranks).sizes == expected


def test_slower_ranks_have_fewer_blocks_and_small_ones_what_they_hold() -> None:
    assert divide(equal(32), [Seat(1.0), Seat(0.6)]).sizes == (20, 12)
    small = [Seat(1.0, 24_000), Seat(1.0, 12_000)]
    found = divide(equal(32, num_bytes=1000, table=1500), small)
    assert (found.sizes, found.num_bytes) == ((22, 10), (23_500, 11_500))
    assert divide(equal(32, num_bytes=1000, table=1500), small[::-1]).sizes == (10, 22)
    # Memory comes before speed.
    assert divide(equal(32, num_bytes=1000), [Seat(0.5, 24_000), Seat(1.0, 12_000)]).sizes == (
        20,
        12,
    )
    none = divide(equal(32, num_bytes=1000), [Seat(1.0, 12_000)] * 2)
    assert not none.fits
    assert sum(none.missing) == 8000


def test_activations_count_for_as_many_micro_batches_as_are_alive() -> None:
    parts = (Part(1.0, 10, 5.0),) * 8
    layers = Layers(parts)
    assert divide(layers, [Seat(1.0, 100, 0, 2.0), Seat(1.0, None, 0, 1.0)]).sizes == (4, 4)
    assert divide(layers, [Seat(1.0, 70, 0, 2.0), Seat(1.0, None, 0, 1.0)]).sizes == (3, 5)
    assert divide(layers, [Seat(1.0, 70, 20, 2.0), Seat(1.0, None, 0, 1.0)]).sizes == (2, 6)


def test_interleaved_stages_are_equal_on_equal_ranks() -> None:
    assert divide(equal(8), [Seat(), Seat()], 2).sizes == (2, 2, 2, 2)
    assert divide(equal(6), [Seat(), Seat()], 2).sizes == (2, 2, 1, 1)
    with pytest.raises(ValueError, match="too few"):
        divide(equal(3), [Seat(), Seat()], 2)


def test_noise_of_measuring_is_no_difference() -> None:
    assert even_speeds([3.1e9, 3.0e9, 2.9e9]) == [1.0, 1.0, 1.0]
    assert even_speeds([1.00, 0.61, 0.58]) == [1.0, 0.6, 0.6]
    assert even_speeds([0.60, 1.02]) == even_speeds([0.61, 1.00]) == [0.6, 1.0]
    assert even_speeds([1.0, 1e-6]) == [1.0, 0.05]
