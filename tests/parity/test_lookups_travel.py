"""Rows that an embedding looked up, exchanged in place of its table's gradient: the numbers of the
whole gradient.

On two processes over MLX's ring; on NVIDIA GPUs it is NCCL that is used so.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from ring_ranks import told_by_two

from allhands.data.loader import MicroBatch
from allhands.kernels.fused.embedding import Apart, OrderedEmbedding
from allhands.parallel.lookups import TravellingLookups

PROGRAM = """
import json, os, sys
import allhands
import mlx.core as mx, mlx.nn as nn, numpy as np
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from allhands.data.loader import MicroBatch
from allhands.distributed import shards
from allhands.distributed.backend import connect
from allhands.model.dropout import install_dropout
from allhands.kernels.fused.embedding import make_deterministic
from allhands.kernels.fused.blocks import fuse
from allhands.train.optimizers import SGD
from allhands.train.step import StepOptions, make_step
from allhands.io.trees import flatten

rank = int(os.environ["MLX_RANK"])
shape = {"model_type": "llama", "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 128,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 514, "rms_norm_eps": 1e-5}
group = connect("ring", 2, rank)
# Parts of the table have 258 rows; the last two of the second rank's are none.
shards._LEAST = 4096

class Counting:
    def __init__(self, group):
        self.group, self.rank, self.size, self.backend = group, group.rank, group.size, group.backend
        self.summed, self.gathered = [], []
    def all_sum(self, array):
        self.summed.append(array.size)
        return self.group.all_sum(array)
    def all_gather(self, array):
        self.gathered.append(array.shape)
        return self.group.all_gather(array)

def batch(number, sole):
    # The second rank's rows are shorter; an id is looked up by both, and several times by one.
    width = 40 if rank == 0 else 34
    ids = (np.arange(2 * width).reshape(2, width) * (2 * number + rank + 3) + number) % 500
    ids[:, :3] = 7
    return MicroBatch(inputs=ids.astype(np.int32), positions=np.arange(2 * width, dtype=np.int32),
                      targets=((ids * 5) % 512).reshape(-1).astype(np.int32), num_tokens=2 * width,
                      examples=np.arange(2, dtype=np.int32) + 2 * rank, sole=sole, most=80 if sole else 0)

def trained(kind, overlap, compiled, ahead, shard):
    mx.random.seed(2)
    model = Model(ModelArgs.from_dict({**shape, "tie_word_embeddings": kind == "tied"}))
    if kind == "beside":
        # One row of the table is used beside the look-ups.
        class Other(type(model.model)):
            def __call__(self, inputs, *arguments, **named):
                return super().__call__(inputs, *arguments, **named) + self.embed_tokens.weight[5]
        model.model.__class__ = Other
    dropout = None
    if kind == "dropping":
        model.freeze()
        linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.2})
        model.model.embed_tokens.unfreeze()
        dropout = install_dropout(model, 3)
    make_deterministic(model)
    fuse(model, 40)
    model.train()
    counting = Counting(group)
    step = make_step(model, SGD(learning_rate=0.1), counting, StepOptions(cpu_native=False, compiled=compiled,
                     bucket_bytes=20_000, overlap=overlap, strategy="zero1" if shard else "data", dropout=dropout))
    plan = [[batch(number, True)] for number in range(4)]
    # One step accumulates: rows are not kept apart there.
    plan.insert(2, [batch(7, False), batch(8, False)])
    found = []
    for number, batches in enumerate(plan):
        counting.summed, counting.gathered = [], []
        coming = plan[number + 1] if ahead and number + 1 < len(plan) else []
        result = step(batches, upcoming=lambda: coming)
        found.append([result.loss_sum, result.grad_norm, counting.summed, counting.gathered])
    if shard:
        assert step.shards.divided[step.updater.flat.leaves.index_of(model.model.embed_tokens)]
    return [found, {name: np.array(value).tolist() for name, value in flatten(model.parameters())}]

print(json.dumps([trained(*case) for case in json.loads(sys.argv[1])]), flush=True)
os._exit(0)
"""
KINDS = ("tied", "untied", "beside", "dropping")
CASES = [
    (kind, overlap, ahead, ahead, shard)
    for kind in KINDS
    for overlap, ahead, shard in (
        (False, False, False),
        *itertools.product([True], [False, True], [False, True]),
    )
]


@cache
def all_cases() -> dict[tuple[Any, ...], Any]:
    """What two processes found in every case, which is the same."""
    return told_by_two(PROGRAM, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("shard", [True, False])
def test_weights_are_those_of_whole_gradients(kind: str, shard: bool, ahead: bool) -> None:
    """Where ranks have parts of the optimizer, too; compiled and handed out ahead, or neither."""
    steps, weights = all_cases()[kind, True, ahead, ahead, shard]
    expected, reference = all_cases()[kind, False, False, False, False]
    np.testing.assert_allclose([s[0] for s in steps], [s[0] for s in expected], rtol=1e-6)
    np.testing.assert_allclose(
        [s[1] for s in steps], [s[1] for s in expected], rtol=2e-4
    )  # squares summed in float32
    assert weights.keys() == reference.keys()
    for name, values in reference.items():
        np.testing.assert_allclose(weights[name], values, atol=5e-7, err_msg=name)
    moved = np.array(reference["model.embed_tokens.weight"])
    assert np.abs(moved).max() > 0
    assert len({step[0] for step in steps}) == len(steps)


@pytest.mark.parametrize(
    ("kind", "besides"), [("tied", True), ("untied", False), ("beside", True), ("dropping", False)]
)
def test_the_table_itself_travels_only_where_it_has_another_gradient(
    kind: str, besides: bool
) -> None:
    """It is the only array of its size, and fits no bucket beside others."""
    size, rows = 514 * 96, [[80], [80, 96]]
    first, _, accumulating, *_ = all_cases()[kind, True, False, False, False][0]
    assert (first[2].count(size), first[3]) == (int(besides), rows)
    assert (accumulating[2].count(size), accumulating[3]) == (1, [])
    # What is ahead of the second step goes beside the first.
    ahead = all_cases()[kind, True, True, True, False][0][0]
    assert (ahead[2].count(size), ahead[3]) == (2 * besides, rows * 2)


def test_rows_do_not_travel_where_a_table_is_smaller() -> None:
    """Ranks' 80 rows beside 512 of the table; decided alike by all of them."""
    table = OrderedEmbedding(512, 8)
    table.apart = Apart()
    none = np.zeros((1, 1), dtype=np.int32)
    batch = MicroBatch(none, none[0], none[0], 1, none[0], sole=True, most=80)
    assert TravellingLookups(table, 0, None, 6).fits(batch)
    assert not TravellingLookups(table, 0, None, 7).fits(batch)
    assert not TravellingLookups(table, 0, None, 2).fits(replace(batch, sole=False))
