"""Each rank's part of a dataset: disjoint, whole, in one order for any number of ranks, resumable
on any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.data.order import Shuffle
from allhands.errors import CheckpointError, ConfigError, DataError
from allhands.loops.loader import DistributedLoader, shard
from allhands.loops.world import World


def world(rank: int, size: int) -> World:
    communicator: Any = None  # nothing is exchanged here
    return World(rank, size, rank, size, "ring", "test", communicator)


class Stream:
    """Numbers one after the other, as often as asked, and how many of them were ever asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.read += 1
            yield number


def loaders(
    size: int, dataset: Any, batch_size: int, **options: Any
) -> list[DistributedLoader[list[int]]]:
    return [
        DistributedLoader(dataset, batch_size, world=world(rank, size), **options)
        for rank in range(size)
    ]


def global_batches(parts: Iterable[Iterable[list[int]]]) -> list[set[int]]:
    """The batches that the ranks' parts make up, which must be as many on each rank, disjoint and
    even.
    """
    batches = []
    for of_ranks in zip(*parts, strict=True):
        together = [sample for part in of_ranks for sample in part]
        assert len(set(together)) == len(together)
        lengths = [len(part) for part in of_ranks]
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1
        batches.append(set(together))
    return batches


@given(
    count=st.integers(8, 70),
    batch_size=st.integers(8, 20),
    size=st.integers(1, 4),
    seed=st.integers(0, 5),
    drop_last=st.booleans(),
)
def test_ranks_make_up_the_batches_of_one(
    count: int, batch_size: int, size: int, seed: int, drop_last: bool
) -> None:
    options: dict[str, Any] = {"seed": seed, "drop_last": drop_last}
    if drop_last and count < batch_size:
        with pytest.raises(ConfigError, match="has 0 samples"):
            loaders(1, range(count), batch_size, **options)
        return
    (alone,), several = (
        loaders(1, range(count), batch_size, **options),
        loaders(size, range(count), batch_size, **options),
    )
    for epoch in range(2):
        batches = [set(batch) for batch in alone]
        assert global_batches(several) == batches
        # The order is the one shuffle of this project's, asked place by place.
        order = Shuffle(count, seed, epoch).at(np.arange(count)).tolist()
        kept = count // batch_size * batch_size if drop_last else count
        assert sum(map(len, batches)) == kept
        assert set().union(*batches) == set(order[:kept])
        assert batches[0] <= set(order[:batch_size])
        assert len(batches) == len(alone) == -(-kept // batch_size)
        assert all(len(batch) == batch_size for batch in batches[:-2])
        assert max(map(len, batches)) <= batch_size
        assert alone.epoch == epoch + 1


@given(
    count=st.integers(4, 60),
    batch_size=st.integers(8, 20),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_a_stream_has_the_batches_of_numbered_samples(
    count: int, batch_size: int, size: int, drop_last: bool
) -> None:
    expected = [set(batch) for batch in _plain(count, batch_size, drop_last)]
    for _ in range(2):
        assert (
            global_batches(loaders(size, Stream(count), batch_size, drop_last=drop_last))
            == expected
        )


def _plain(count: int, batch_size: int, drop_last: bool) -> list[list[int]]:
    """Cut one by one: full batches; what is left and the batch before it are halved."""
    left, batches = list(range(count)), []
    while (
        len(left) >= 2 * batch_size
        or len(left) == batch_size
        or (drop_last and len(left) > batch_size)
    ):
        batches.append(left[:batch_size])
        left = left[batch_size:]
    if drop_last or not left:
        return batches
    if len(left) < batch_size:
        return [*batches, left]
    half = -(-len(left) // 2)
    return [*batches, left[:half], left[half:]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", range(8))
def test_it_goes_on_with_another_number_of_ranks(after: int, stream: bool) -> None:
    dataset: Any = Stream(50) if stream else range(50)
    (whole,) = loaders(1, dataset, 8)
    expected = [set(batch) for _ in range(2) for batch in whole]
    two = loaders(2, dataset, 8)
    began = [[next(part) for _ in range(after)] for part in [loader.endless() for loader in two]]
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1]
    three = loaders(3, dataset, 8)
    for loader in three:
        loader.load_state_dict(states[0])
    # 50 in batches of 8 are 5 full ones and two of 5: after those seven there is nothing left of
    # the first epoch.
    rest = global_batches(list(loader) for loader in three) + global_batches(
        list(loader) for loader in three
    )
    assert (global_batches(began) + rest)[: len(expected)] == expected


def test_a_rank_asks_for_its_own_samples_only() -> None:
    class Seen:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 40

        def __getitem__(self, number: int) -> int:
            assert type(number) is int
            self.asked.append(number)
            return number

    seen = [Seen(), Seen()]
    for rank in range(2):
        list(DistributedLoader(seen[rank], 10, world=world(rank, 2)))
        list(shard(seen[rank], world(rank, 2)))
    assert [len(one.asked) for one in seen] == [40, 40]
    assert not set(seen[0].asked[:20]) & set(seen[1].asked[:20])
    assert not set(seen[0].asked[20:]) & set(seen[1].asked[20:])


def test_a_stream_is_read_two_batches_ahead_at_most() -> None:
    stream = Stream(10**9)
    batches = iter(DistributedLoader(stream, 8, world=world(1, 2)))
    assert [next(batches), next(batches)] == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert stream.read == 24


def test_samples_become_what_collate_makes_of_them() -> None:
    images = np.arange(24).reshape(12, 2)
    loader = DistributedLoader(images, 6, shuffle=False, collate=np.stack, world=world(1, 2))
    assert [batch.tolist() for batch in loader] == [images[1:6:2].tolist(), images[7::2].tolist()]


def test_the_next_epoch_is_in_another_order_and_a_left_loop_goes_on() -> None:
    loader = DistributedLoader(range(100), 100, world=world(0, 1))
    (first,), (second,) = list(loader), list(loader)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(100))
    loader = DistributedLoader(range(30), 10, shuffle=False, world=world(0, 1))
    for batch in loader:
        assert batch == list(range(10))
        break
    assert [batch[0] for batch in loader] == [10, 20]


def test_shards_are_disjoint_and_whole() -> None:
    parts = [shard("abcdefgh", world(rank, 3)) for rank in range(3)]
    assert ["".join(part) for part in parts] == ["adg", "beh", "cf"]
    assert len(parts[2]) == 2  # type: ignore[arg-type]
    assert parts[0][-1] == "g"  # type: ignore[index]
    assert parts[0][1:] == ["d", "g"]  # type: ignore[index]
    stream = shard(Stream(5), world(1, 2))
    assert [list(stream), list(stream)] == [[1, 3], [1, 3]]


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no dataset": (7, {}, "a int is no dataset"),
    "a dictionary of columns": (None, {}, "a NoneType is no dataset"),
    "batch size": ([1] * 9, {"batch_size": 0}, "batch_size is 0"),
    "batch size text": ([1] * 9, {"batch_size": "4"}, "batch_size is '4'"),
    "seed": ([1] * 9, {"seed": -1}, "seed is -1"),
    "too few for the ranks": ([1] * 9, {"batch_size": 2}, "has 1 sample for 2 ranks"),
    "no data": ([], {}, "has 0 samples for 2 ranks"),
    "less than a batch": (
        range(3),
        {"batch_size": 8, "drop_last": True},
        "3 samples has 0 samples for 2 ranks",
    ),
    "shuffled stream": (Stream(4), {"shuffle": True}, "an iterable cannot be shuffled"),
    "short batches of a stream": (
        Stream(4),
        {"batch_size": 2},
        "at the end of the stream has 1 sample for 2 ranks",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case: str) -> None:
    dataset, options, words = WRONG[case]
    with pytest.raises(ConfigError, match=words) as caught:
        DistributedLoader(dataset, **{"batch_size": 4, "world": world(0, 2), **options})
    assert caught.value.hint


def test_wrong_states() -> None:
    loader = DistributedLoader(range(10), 5, seed=3, world=world(0, 1))
    good = {"seed": 3, "epoch": 0, "consumed": 5, "batch_size": 5}
    for wrong, words in (
        ({"seed": 4}, "of seed 3"),
        ({"batch_size": 2}, "batch_size 5"),
        ({"consumed": 11}, "does not fit"),
        ({"epoch": None}, "does not fit"),
    ):
        with pytest.raises(CheckpointError, match=words):
            loader.load_state_dict({**good, **wrong})  # type: ignore[dict-item]
    # Ten samples are batches of 4, 3 and 3, or of 4 and 4.
    for drop_last, whole in ((False, (0, 4, 7, 10)), (True, (0, 4, 8))):
        loader = DistributedLoader(range(10), 4, drop_last=drop_last, world=world(0, 1))
        for consumed in range(11):
            state = {"seed": 0, "epoch": 0, "consumed": consumed, "batch_size": 4}
            if consumed in whole:
                loader.load_state_dict(state)
            else:
                with pytest.raises(CheckpointError):
                    loader.load_state_dict(state)
    stream = DistributedLoader(Stream(3), 5, seed=3, world=world(0, 1))
    stream.load_state_dict(good)
    with pytest.raises(CheckpointError, match="the stream has 3 samples, but 5"):
        list(stream)


def test_an_iterator_is_not_gone_through_twice() -> None:
    loader = DistributedLoader(iter(range(8)), 4, world=world(0, 1))
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataError) as caught:
        list(loader)
    assert caught.value.code == "iterator-exhausted"
    with pytest.raises(DataError) as caught:
        next(DistributedLoader(Stream(0), 4, world=world(0, 1)).endless())
    assert caught.value.code == "epoch-without-batch"
    with pytest.raises(TypeError):
        len(loader)
