"""Padded arrays against a naive reading of the same examples, token by token."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data.loader import Loader, MicroBatch, collate, cut_share, pad_targets
from allhands.data.order import GlobalOrder
from allhands.data.tokens import TokenSet
from allhands.distributed.backend import SingleProcess
from allhands.distributed.mesh import Mesh
from allhands.runtime.sizing import Sizing, best_ladder
from allhands.train.evaluation import Evaluator

quick = settings(max_examples=50, deadline=None, database=None)
Example = tuple[list[int], list[bool]]  # tokens and mask

# What a position sees (all tokens up to it) and what it must predict.
Task = tuple[tuple[int, ...], int]


@st.composite
def examples(draw: st.DrawFn, most: int = 12) -> list[Example]:
    result: list[Example] = []
    for _ in range(draw(st.integers(1, most))):
        tokens = draw(st.lists(st.integers(1, 90), min_size=2, max_size=30))
        mask = [
            False,
            *draw(st.lists(st.booleans(), min_size=len(tokens) - 1, max_size=len(tokens) - 1)),
        ]
        mask[draw(st.integers(1, len(tokens) - 1))] = True
        result.append((tokens, mask))
    return result


def token_set(content: Sequence[Example]) -> TokenSet:
    return TokenSet.of_examples(
        [(np.asarray(ids), np.asarray(mask, dtype=np.bool_)) for ids, mask in content]
    )


def naive_tasks(content: Sequence[Example]) -> Counter[Task]:
    """What must be learnt from ``content``, straight from the meaning of the mask."""
    return Counter(
        (tuple(tokens[:i]), tokens[i])
        for tokens, mask in content
        for i in range(len(tokens))
        if mask[i]
    )


def tasks_of(batch: MicroBatch) -> Counter[Task]:
    """What a causal model would learn from the padded arrays."""
    width = batch.inputs.shape[1]
    found: Counter[Task] = Counter()
    for place, target in zip(batch.positions.tolist(), batch.targets.tolist(), strict=True):
        if target >= 0:
            row, column = divmod(place, width)
            found[(tuple(batch.inputs[row, : column + 1].tolist()), target)] += 1
    return found


def naive_work(example: Example) -> int:
    """Tokens to compute: all before the last one that is predicted."""
    return max(i for i, trained in enumerate(example[1]) if trained)


@quick
@given(examples())
def test_work_is_everything_before_the_last_target(content: list[Example]) -> None:
    assert token_set(content).work.tolist() == [naive_work(example) for example in content]


def test_no_examples_are_no_work() -> None:
    assert token_set([]).work.shape == (0,)
    assert best_ladder(token_set([]).work, 4) == ()


@quick
@given(examples(), st.integers(0, 5))
def test_collated_positions_and_targets_are_those_of_the_mask(
    content: list[Example], spare: int
) -> None:
    chosen = list(range(0, len(content), 2))[::-1]
    width = max(naive_work(content[i]) for i in chosen) + spare
    batch = collate(token_set(content), np.asarray(chosen), width)
    assert batch.inputs.shape == (len(chosen), width)
    assert {a.dtype for a in (batch.inputs, batch.positions, batch.targets)} == {np.dtype(np.int32)}
    assert tasks_of(batch) == naive_tasks([content[i] for i in chosen])
    assert batch.num_targets == sum(sum(content[i][1]) for i in chosen)
    assert batch.num_tokens == sum(naive_work(content[i]) for i in chosen)
    assert batch.padding == sum(width - naive_work(content[i]) for i in chosen)
    assert batch.examples.tolist() == chosen
    # Row r holds example chosen[r], then zeros; no token of the data is 0 here.
    for row, i in zip(batch.inputs.tolist(), chosen, strict=True):
        work = naive_work(content[i])
        assert row == content[i][0][:work] + [0] * (width - work)


@quick
@given(examples())
def test_a_row_alone_is_the_task_of_its_example(content: list[Example]) -> None:
    width = max(map(naive_work, content)) + 3
    batch = replace(
        pad_targets(collate(token_set(content), np.arange(len(content)), width)), iteration=7
    )
    for row, example in enumerate(content):
        alone = batch.alone(row)
        assert tasks_of(alone) == naive_tasks([example])
        assert alone.inputs.shape == (1, width)
        assert alone.num_targets == sum(example[1])
        assert (alone.examples.tolist(), alone.iteration, alone.padding) == ([row], 7, 0)
        assert {a.dtype for a in (alone.inputs, alone.positions, alone.targets)} == {
            np.dtype(np.int32)
        }


@quick
@given(examples())
def test_padded_targets_change_no_task(content: list[Example]) -> None:
    batch = collate(token_set(content), np.arange(len(content)), max(map(naive_work, content)))
    padded = pad_targets(batch)
    assert tasks_of(padded) == tasks_of(batch)
    assert padded.num_targets == batch.num_targets
    assert padded.num_tokens == batch.num_tokens
    assert len(padded.positions) == len(padded.targets)
    assert padded.positions.max() < padded.inputs.size


@pytest.mark.parametrize("count", [1, 31, 32, 33, 255, 256, 257, 300, 511, 513, 1000, 4097])
def test_padding_of_targets_is_bounded_and_meets_few_shapes(count: int) -> None:
    def padded(n: int) -> int:
        places = np.zeros(n, dtype=np.int32)
        return len(
            pad_targets(
                MicroBatch(np.zeros((1, n), np.int32), places, places, n, np.zeros(1, np.int32))
            ).targets
        )

    assert count <= padded(count) <= max(count * 1.25, 32 * -(-count // 32))
    octave = range(count, 2 * count)
    assert len({padded(n) for n in octave}) <= 9


@quick
@given(
    examples(most=16),
    st.integers(1, 6),
    st.lists(st.floats(0.2, 4.0), min_size=1, max_size=8),
    st.integers(1, 100),
    st.sampled_from([(), (4, 8, 16, 32), (8, 12)]),
    st.integers(0, 2**31),
)
def test_all_ranks_together_learn_exactly_the_batch(
    content: list[Example],
    batch_size: int,
    weights: list[float],
    max_tokens: int,
    ladder: tuple[int, ...],
    seed: int,
) -> None:
    tokens = token_set(content)
    order = GlobalOrder(tokens.work, batch_size, seed)
    sizing = Sizing(max_tokens, overhead_tokens=4, few_shapes=bool(ladder), ladder=ladder)
    loaders = [Loader(tokens, order, sizing, rank, weights) for rank in range(len(weights))]
    for iteration in range(order.batches_per_epoch):
        parts = [batch for loader in loaders for batch in loader.load(iteration)]
        expected = [content[i] for i in order.batch(iteration)]
        assert sum((tasks_of(part) for part in parts), Counter[Task]()) == naive_tasks(expected)
        assert sum(part.num_tokens for part in parts) == sum(map(naive_work, expected))
        assert sorted(i for part in parts for i in part.examples.tolist()) == sorted(
            order.batch(iteration).tolist()
        )
        assert {part.iteration for part in parts} == {iteration}
        for part in parts:
            rows, width = part.inputs.shape
            assert rows == 1 or rows * width <= max_tokens
            assert not ladder or width in ladder or width > max(ladder)


@pytest.mark.parametrize("few_shapes", [False, True])
def test_rows_that_must_be_alike_are_not_padded(few_shapes: bool) -> None:
    lengths = np.random.default_rng(1).integers(3, 9, 40)
    rows = TokenSet.of_examples([(np.full(n + 1, n), np.arange(n + 1) > 0) for n in lengths])
    sizing = Sizing(24, overhead_tokens=1000, few_shapes=few_shapes, alike=True).fitted(rows.work)
    parts = list(cut_share(rows, np.arange(40), sizing))
    assert sorted(int(row) for part, _ in parts for row in part) == list(range(40))
    assert all((rows.work[part] == length).all() for part, length in parts)
    assert max(len(part) * length for part, length in parts) <= 24
    assert len(parts) < 30


def test_the_ladder_rounds_up_and_lets_longer_ones_be() -> None:
    lengths = np.array([1, 32, 33, 64, 100, 128, 129, 500])
    assert Sizing(1000, ladder=(32, 64, 128)).padded(lengths).tolist() == [
        32,
        32,
        64,
        64,
        128,
        128,
        129,
        500,
    ]
    assert Sizing(1000).padded(lengths).tolist() == lengths.tolist()


@quick
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 5))
def test_the_ladder_pads_least_of_all(lengths: list[int], num_rungs: int) -> None:
    def padding(rungs: tuple[int, ...]) -> int:
        return sum(min(rung for rung in rungs if rung >= length) - length for length in lengths)

    distinct = sorted(set(lengths))
    choices = [
        rungs for n in range(num_rungs) for rungs in itertools.combinations(distinct[:-1], n)
    ]
    found = best_ladder(np.array(lengths), num_rungs)
    assert len(found) <= num_rungs
    assert list(found) == sorted(set(found))
    assert padding(found) == min(padding((*rungs, distinct[-1])) for rungs in choices)


def test_long_and_many_lengths_make_a_ladder_quickly() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.5, 200_000).astype(np.int64) + 1
    started = time.process_time()
    rungs = best_ladder(lengths, 48)
    assert time.process_time() - started < 2.0
    assert len(rungs) == 48
    assert rungs[-1] >= lengths.max()
    fitted = Sizing(10**6, few_shapes=True).fitted(lengths)
    assert fitted.ladder == rungs
    assert Sizing(10**6).fitted(lengths).ladder == ()
    assert np.all(fitted.padded(lengths) >= lengths)


class Recorder(nn.Module):
    """A model of 100 words to which all are equally likely; it writes down the shapes that it is
    given.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes: list[tuple[int, ...]] = []

    def __call__(self, inputs: mx.array) -> mx.array:
        self._shapes.append(inputs.shape)
        return mx.zeros((*inputs.shape, 100))


def test_validation_keeps_to_the_ladder_and_the_limit() -> None:
    random = np.random.default_rng(3)
    content = [
        (random.integers(1, 90, n).tolist(), [False] + [True] * (n - 1))
        for n in random.integers(2, 60, 40)
    ]
    model, sizing = (
        Recorder(),
        Sizing(200, overhead_tokens=100, few_shapes=True, ladder=(16, 32, 48, 64)),
    )
    alone, every = SingleProcess(), {"batch_size": 4, "num_batches": -1}
    evaluator = Evaluator(
        model, token_set(content), alone, Mesh(), sizing, **every, cpu_native=True
    )
    loss, num_targets, _ = evaluator()
    assert loss == pytest.approx(np.log(100), rel=1e-5)
    assert num_targets == sum(sum(mask) for _, mask in content)
    assert {width for _, width in model._shapes} <= {16, 32, 48, 64}
    assert all(rows == 1 or rows * width <= 200 for rows, width in model._shapes)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_know_when_each_of_them_has_one_micro_batch(ranks: int) -> None:
    """And all say the same, whatever their own share."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, 60).tolist()
    windows = token_set([([1] * length, [False] + [True] * (length - 1)) for length in lengths])
    order = GlobalOrder(windows.work, 8, seed=0)
    seen: set[bool] = set()
    for limit in (40, 90, 1000):
        weights = [1.0 + rank for rank in range(ranks)]
        loaders = [
            Loader(windows, order, Sizing(limit), rank, weights, alike=True)
            for rank in range(ranks)
        ]
        for iteration in range(7):
            parts = [loader.load(iteration) for loader in loaders]
            expected = all(len(part) == 1 for part in parts)
            assert {batch.sole for part in parts for batch in part} == {expected}
            # And how large the largest of these is.
            most = max(batch.inputs.size for part in parts for batch in part) if expected else 0
            assert {batch.most for part in parts for batch in part} == {most}
            seen.add(expected)
    assert seen == {True, False}
    unlike = Loader(windows, order, Sizing(1000), 0, [1.0] * ranks)
    assert not any(batch.sole for batch in unlike.load(0))
