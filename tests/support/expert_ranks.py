"""A rank that divides the experts of small models with the others, and compares gradients with
mlx_lm's own model.

The first argument is a JSON list of cases ``[architecture, way, form]``; a second one is the number
of ranks of a group. All ranks print the same list: for each case how far loss, gradients and the
sum of their squares are from those of the whole model for the rows of all ranks, which part of the
numbers of experts is here, and the bytes sent by what they should be if all ranks are one group; or
what was refused.
"""

from __future__ import annotations

import sys
from itertools import zip_longest
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from tensor_ranks import answer, far, model_of

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator, sent_bytes
from allhands.distributed.groups import along
from allhands.distributed.mesh import Mesh
from allhands.io.trees import numbers
from allhands.model.balance import balance_experts
from allhands.model.passes import PassContext, apply_passes
from allhands.objectives.causal_lm import CAUSAL_LM
from allhands.parallel.base import Exchanging
from allhands.parallel.costs import ExpertCosts
from allhands.parallel.expert import ExpertParallel
from allhands.parallel.experts import Experts, divide_experts, let_experts_compute
from allhands.parallel.gradient import Computing
from allhands.parallel.passes import Passes
from allhands.runtime.accelerator import detect

# Rows and tokens of the micro-batches of each rank: more than one, one, and in one form none.
SHAPES = (((2, 14), (1, 40)), ((3, 5),), ((1, 2), (1, 9)), ((2, 70),))


def micro_batches(rank: int, form: str) -> list[MicroBatch]:
    """The micro-batches of a rank; the same each time."""
    if form == "nothing" and rank == 1:
        return []
    random = np.random.default_rng(rank)
    found: list[MicroBatch] = []
    for rows, width in SHAPES[rank]:
        tokens = random.integers(0, 60, (rows, width + 1)).astype(np.int32)
        positions = np.arange(rows * width, dtype=np.int32)
        examples = np.arange(rows, dtype=np.int32)
        found.append(
            MicroBatch(tokens[:, :-1], positions, tokens[:, 1:].reshape(-1), rows * width, examples)
        )
    return found


def of_whole(model: Any, batches: list[MicroBatch]) -> tuple[float, dict[str, mx.array]]:
    """The summed loss of mlx_lm's model over micro-batches, and its gradients by name."""
    total, sums = 0.0, dict[str, mx.array]()
    for batch in batches:

        def loss(batch: MicroBatch = batch) -> mx.array:
            logits = model(mx.array(batch.inputs)).astype(mx.float32)
            targets = mx.array(batch.targets)
            return nn.losses.cross_entropy(
                logits.reshape(len(targets), -1), targets, reduction="sum"
            )

        value, grads = nn.value_and_grad(model, loss)()
        named = dict(tree_flatten(grads))
        sums = {name: sums[name] + grad if sums else grad for name, grad in named.items()}
        mx.eval(value, sums)
        total += value.item()
    return total, sums


def compared(world: Communicator, each: int, name: str, way: str, form: str) -> Any:
    """How far loss, gradients and squares are from the whole model's, and the share of the experts'
    numbers here.
    """
    whole, model = model_of(name, way), model_of(name, way)
    if form == "balanced":
        assert balance_experts(whole, 0.5) == balance_experts(model, 0.5) > 0
    everything = [batch for rank in range(world.size) for batch in micro_batches(rank, form)]
    expected_loss, expected = of_whole(whole, everything)
    mesh = Mesh(world.rank, world.size, expert=each)
    experts = divide_experts(
        model, *(along(world, mesh, axis, alike=True) for axis in ("expert", "data"))
    )
    native = form == "native"
    if native:
        apply_passes(model, PassContext(detect(), "train", at_once=True, longest=80))
    let_experts_compute(experts)
    strategy = ExpertParallel(Exchanging(world, cpu_native=native, experts=experts))
    passes = Passes(model, CAUSAL_LM, Computing(native, compiled=False), None, waits=True)
    strategy.prepare(passes, lambda *_: None)
    sent = sent_bytes(world)
    mine = strategy.gradients(passes, micro_batches(world.rank, form))
    reduced = strategy.reduce(mine, [*mine.each_sum, float(mine.num_targets)])
    sent = sent_bytes(world) - sent
    loss, targets = numbers(reduced.totals)[:2]
    assert targets == sum(batch.num_targets for batch in everything), numbers(reduced.totals)
    assert experts.parts.keys() & expected.keys()
    apart = far(experts, dict(reduced.grads), expected)
    assert reduced.squares is not None
    squares = sum((grad.square().sum() for grad in expected.values()), mx.zeros(())).item()
    told = [abs(loss - expected_loss) / expected_loss, max(apart.values())]
    told.append(abs(reduced.squares.item() - squares) / squares)
    worst = np.array(world.all_gather(mx.array(told)[None])).max(axis=0).tolist()
    return [
        *worst,
        held(model) / held(whole),
        sent / costed(whole, expected, experts, world.size, form),
    ]


def costed(
    whole: Any, expected: dict[str, mx.array], experts: Experts, size: int, form: str
) -> int:
    """The bytes that a rank sends in a step by the costs of the strategy, where all ranks are one
    group.
    """
    lengths = [[batch.inputs.size for batch in micro_batches(rank, form)] for rank in range(size)]
    filled = sum(size * max(each) for each in zip_longest(*lengths, fillvalue=0))
    width = whole.args.hidden_size
    weights = sum(grad.nbytes for grad in expected.values())
    share = sum(grad.nbytes for name, grad in expected.items() if name in experts.parts) / weights
    costs = ExpertCosts(share, 4 * filled * width, len(experts.mixtures))
    return costs.traffic(weights, weights, scatters=False).sent(size)


def held(model: Any) -> int:
    """Numbers of the experts' arrays in a model, as they are stored."""
    return sum(
        array.size
        for path, array in tree_flatten(model.parameters())
        if ".experts." in path or "switch" in path
    )


if __name__ == "__main__":
    answer(lambda world, *case: compared(world, int(sys.argv[2]), *case))
