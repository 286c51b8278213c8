"""Arrays that ranks have divided: every number is one rank's, and comes back whole; passes say when
they wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.llama import Model, ModelArgs
from twins import run_ranks

from allhands.data.tokens import TokenSet
from allhands.distributed.backend import SingleProcess
from allhands.distributed.mesh import Mesh
from allhands.io.regions import Flat
from allhands.objectives.causal_lm import CAUSAL_LM
from allhands.parallel.fsdp import FetchedModel, FetchedSums
from allhands.parallel.rows import BoxedRow, DividedRow, Slot
from allhands.parallel.sharding import shard
from allhands.runtime.sizing import Sizing
from allhands.train.evaluation import Evaluator

SHAPES = st.lists(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
)


class Seat:
    """A rank's place, for rows that exchange nothing."""

    backend = "none"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def rows_of(
    shapes: Sequence[tuple[int, ...]], ranks: int, boxed: bool, shares: Sequence[float]
) -> list[Any]:
    """The same row as each rank has it, of modules with counted numbers."""
    found: list[Any] = []
    for rank in range(ranks):
        places: list[Slot] = []
        start = 0
        for number, shape in enumerate(shapes):
            module, size = nn.Module(), int(np.prod(shape))
            module.weight = mx.arange(start, start + size).reshape(shape).astype(mx.float32)
            places.append(Slot(f"{number}.weight", module, "weight", shape, start, size))
            start += size
        make = BoxedRow if boxed else partial(DividedRow, shares=shares)
        found.append(make(places, mx.float32, Seat(rank, ranks), trained=True))
    return found


@settings(max_examples=60, deadline=None)
@given(
    SHAPES,
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.floats(0.1, 10), min_size=5, max_size=5),
    st.booleans(),
)
def test_parts_of_a_row_are_all_of_it(
    shapes: list[tuple[int, ...]], ranks: int, boxed: bool, shares: list[float], uneven: bool
) -> None:
    rows = rows_of(shapes, ranks, boxed, shares[:ranks] if uneven else ())
    whole = [np.array(place.module.weight) for place in rows[0].places]
    seen = [np.zeros(array.shape, dtype=int) for array in whole]
    for row in rows:
        for place, region in row.regions():
            numbers = seen[int(place.name.partition(".")[0])]
            if isinstance(region, Flat):
                numbers.reshape(-1)[region.start : region.stop] += 1
            else:
                numbers[
                    tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))
                ] += 1
    assert all((each == 1).all() for each in seen)
    joined = rows[0].joined([mx.array(array) for array in whole])
    trees: list[Any] = [{} for _ in rows]
    for row, tree in zip(rows, trees, strict=True):
        for name, array in row.take().items():
            tree.setdefault(name.partition(".")[0], {})["weight"] = array
    parts = [row.part(tree) for row, tree in zip(rows, trees, strict=True)]
    assert {part.size for part in parts} == {rows[0].each}
    gathered = mx.concatenate(parts)
    for row in rows:
        assert all(np.array_equal(a, b) for a, b in zip(row.arrays(gathered), whole, strict=True))
    # What gradients are added up in lies as what was gathered, and each rank's part of it has its
    # names.
    assert all(np.array_equal(a, b) for a, b in zip(rows[0].arrays(joined), whole, strict=True))
    for place, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        own = joined[place * row.each : place * row.each + row.kept]
        for name, array in row.named(own):
            assert mx.array_equal(array, tree[name.partition(".")[0]]["weight"])


def test_parts_are_as_large_as_their_shares() -> None:
    rows = rows_of([(300, 40)], 3, False, (1.0, 2.0, 3.0))
    sizes = [sum(region.size for _, region in row.regions()) for row in rows]
    assert sizes == pytest.approx([2000, 4000, 6000], abs=32)


def small() -> Any:
    mx.random.seed(5)
    args = ModelArgs(
        **{
            "model_type": "llama",
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "intermediate_size": 32,
        },
        **{
            "num_attention_heads": 2,
            "rms_norm_eps": 1e-5,
            "vocab_size": 40,
            "num_key_value_heads": 2,
        },
    )
    model = Model(args)
    mx.eval(model.parameters())
    return model


def test_an_evaluation_with_fetched_blocks_says_when_it_waits() -> None:
    """A rank that waits for a part of another one is not taken for one that stands still."""
    lengths = np.random.default_rng(0).integers(4, 20, 12)
    windows = TokenSet.of_examples([(np.full(n, n), np.arange(n) > 0) for n in lengths])
    asked: Any = {"batch_size": 12, "num_batches": 1, "cpu_native": False}
    expected = Evaluator(small(), windows, SingleProcess(), Mesh(), Sizing(40), **asked)()

    def evaluated(twin: Any) -> tuple[Any, list[tuple[str, int]], int]:
        sharding = shard(small(), twin, SingleProcess(), twin)
        heard: list[tuple[str, int]] = []
        more: Any = {
            **asked,
            "beat": lambda phase, step: heard.append((phase, step)),
            "together": FetchedSums(sharding, CAUSAL_LM),
        }
        found = Evaluator(
            sharding.model, windows, twin, Mesh(twin.rank, 2, shard=2), Sizing(40), **more
        )(7)
        answering, said = FetchedModel(sharding), list[str]()
        answering.heartbeat = said.append
        answering(mx.array([[1, 2, 3]]))
        return found, heard, len(said)

    for each in run_ranks(2, evaluated):
        assert not isinstance(each, BaseException), each
        found, heard, said = each
        assert found[:2] == (pytest.approx(expected.loss, rel=1e-6), expected.num_targets)
        assert {step for _, step in heard} == {7}
        # For each block of each pass, and once at the end.
        assert heard.count(("reduce", 7)) > 3 * 2
        assert heard.count(("validate", 7)) >= heard.count(("reduce", 7))
        assert said == 3 * 2
