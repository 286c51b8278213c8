"""Gradients that travel beside what is computed, and passes handed out ahead: the numbers of one
after the other.

On two processes over MLX's ring; on NVIDIA GPUs it is NCCL that is used so.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from ring_ranks import told_by_two

PROGRAM = """
import hashlib, json, os, sys
import allhands
import mlx.core as mx, numpy as np
from mlx_lm.models.llama import Model, ModelArgs
from allhands.data.loader import MicroBatch
from allhands.distributed import shards
from allhands.distributed.backend import connect
from allhands.distributed.codecs import CODECS
from allhands.kernels.fused import flat_params as leaves
from allhands.kernels.fused.blocks import fuse
from allhands.io.regions import Box
from allhands.train.optimizers import KernelAdamW
from allhands.train.sharded_state import sharded_state
from allhands.train.step import StepOptions, make_step
from allhands.train.updater import Rules
from allhands.io.trees import flatten

rank = int(os.environ["MLX_RANK"])
# An array for each product and one for the norms, the latter not divided.
leaves._ONE_MOST, leaves._SMALL, shards._LEAST = 0, 1024, 4096
shape = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-5}
group = connect("ring", 2, rank)

def batch(number, sole):
    ids = (np.arange(80).reshape(2, 40) * (2 * number + rank + 3) + number) % 96
    return MicroBatch(inputs=ids.astype(np.int32), positions=np.arange(80, dtype=np.int32),
                      targets=((ids * 5) % 96).reshape(-1).astype(np.int32), num_tokens=80,
                      examples=np.arange(2, dtype=np.int32), sole=sole and number not in (1, 2, 3))

def whole(each, shape):
    # Bits of a rank's numbers among zeros, where it has a part or nothing.
    if each is not None and isinstance(each.region, Box):
        return each.array
    row = mx.zeros((int(np.prod(shape)),), dtype=mx.uint32)
    if each is not None:
        row[each.region.start : each.region.stop] = each.array.view(mx.uint32)
    return group.all_sum(row).view(mx.float32).reshape(shape)

def trained(overlap, ahead, poisoned, sole, shard, clipped, compress="none"):
    mx.random.seed(2)
    model = Model(ModelArgs.from_dict(shape))
    fuse(model, 40)
    model.train()
    shapes = {name: array.shape for name, array in flatten(model.parameters())}
    optimizer, faults = KernelAdamW(learning_rate=1e-2), []
    rules = Rules(max_grad_norm=clipped, inject_fault=lambda point: "nan" if point in faults else None)
    step = make_step(model, optimizer, group, StepOptions(cpu_native=False, rules=rules, bucket_bytes=20_000,
                     overlap=overlap, non_finite="skip", strategy="zero1" if shard else "data",
                     codec=CODECS.get(compress)))
    # The second step accumulates; rank 1 has nothing in the third.
    first, *more = [batch(number, sole) for number in range(7)]
    plan = [[first], more[:2], more[2:3] if rank == 0 else [], *([one] for one in more[3:])]
    found, begun = [], []
    for number, batches in enumerate(plan):
        coming = plan[number + 1] if ahead and number + 1 < len(plan) else []
        if poisoned and number == 3:
            faults += ["reduce"] if rank == 1 else []
        # What ranks tell each other changes nothing else.
        tell = [100.0 * rank + number, 0.5] if number % 2 else []
        result = step(batches, upcoming=lambda: coming, extra=tell)
        expected = [number, 0.5, 100.0 + number, 0.5] if tell else []
        assert list(result.gathered) == expected, result.gathered
        faults.clear()
        found.append([result.loss_sum, result.num_targets, result.num_tokens, result.grad_norm, result.skipped])
        assert result.comm_s >= 0 and result.compute_s >= 0
        begun.append(step.strategy.ahead is not None and step.strategy.ahead.pending is not None)
    names = [name for name, _ in flatten(optimizer.present_state)]
    kept = sharded_state(model, optimizer, step.updater.flat)["optimizer.safetensors"]
    if shard:
        assert step.shards is not None and set(step.shards.divided) == {True, False}
    state = [(name, whole(kept.get(name), shapes.get(name.rpartition(".")[0]))) for name in names]
    if shard:
        sizes = [(kept[name].region.size if name in kept else 0, array.size) for name, array in state]
        assert sum(mine for mine, _ in sizes) < 0.6 * sum(size for _, size in sizes)
    # What is left out is every rank's own: of both, so that both tell the same.
    left = [] if compress == "none" else [group.all_gather(each) for each in step.strategy.left if each is not None]
    state += [("left out", each) for each in left]
    moments = hashlib.sha256(b"".join(np.array(v).tobytes() for _, v in state)).hexdigest()
    digest = hashlib.sha256(b"".join(np.array(v).tobytes() for _, v in flatten(model.parameters()))).hexdigest()
    return [found, [digest, moments, len(state)], begun]

print(json.dumps([trained(*case) for case in json.loads(sys.argv[1])]), flush=True)
os._exit(0)
"""


# Of what travels packed: whether it overlaps and hands out ahead, lone batches, a divided
# optimizer.
PACKED = (
    (False, False, False),
    (False, False, True),
    (True, False, False),
    (True, True, False),
    (True, True, True),
)
# Whether it overlaps, hands out ahead, is poisoned, is told of lone batches, divides the optimizer;
# the clipped norm.
CASES: list[tuple[Any, ...]] = [
    *(
        (overlap, ahead, False, False, False, 1.0)
        for overlap in (False, True)
        for ahead in (False, True)
    ),
    *(
        (overlap, ahead, True, False, False, 1.0)
        for overlap, ahead in ((False, False), (False, True), (True, True))
    ),
    *((True, True, poisoned, True, False, 1.0) for poisoned in (False, True)),
    *((False, False, poisoned, False, False, None) for poisoned in (False, True)),
    *(
        (overlap, True, poisoned, sole, True, None)
        for overlap, sole in ((False, False), (True, False), (True, True))
        for poisoned in (False, True)
    ),
    (True, True, False, True, True, 1.0),
]


PACKED_CASES: list[tuple[Any, ...]] = [
    (overlap, overlap, poisoned, sole, shard, None, compress)
    for compress in ("bf16", "int4")
    for overlap, sole, shard in PACKED
    for poisoned in (False, True)
]


@cache
def packed_cases() -> dict[tuple[Any, ...], Any]:
    """As :func:`all_cases`."""
    return told_by_two(PROGRAM, PACKED_CASES)


@cache
def all_cases() -> dict[tuple[Any, ...], Any]:
    """What two processes found in every case, one case after the other: a start costs more than ten
    of them.
    """
    return told_by_two(PROGRAM, CASES)


def ran(
    overlap: bool,
    ahead: bool,
    poisoned: bool,
    sole: bool = False,
    shard: bool = False,
    clipped: float | None = 1.0,
) -> Any:
    """Losses, counts and norms of each step, weights and optimizer after the last, and when an
    exchange was begun.

    The same on both ranks. ``sole``: batches are told of which each rank has one.
    """
    return all_cases()[overlap, ahead, poisoned, sole, shard, clipped]


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "ahead"), [(True, False), (False, True), (True, True)])
def test_what_travels_beside_the_passes_is_the_same(overlap: bool, ahead: bool) -> None:
    steps, weights, begun = ran(overlap, ahead, False)
    expected, reference, _ = ran(False, False, False)
    assert not any(begun)
    assert [step[1:3] for step in steps] == [[160, 160], [320, 320], [80, 80], *[[160, 160]] * 3]
    assert steps == expected
    assert weights == reference
    assert len({step[0] for step in steps}) == len(steps)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pass_handed_out_ahead_survives_an_update_that_is_left_out(overlap: bool) -> None:
    steps, weights, _ = ran(overlap, True, True)
    expected, reference, _ = ran(False, False, True)
    assert [bool(step[4]) for step in steps] == [False, False, False, True, False, False]
    assert str(steps) == str(expected)  # of which a norm is nan
    assert weights == reference
    assert weights != ran(False, False, False)[1]


def test_an_exchange_is_begun_while_its_pass_is_handed_out() -> None:
    """Where every rank has one micro-batch, so that all begin it: for the 4th step's batch and
    those after it.
    """
    steps, weights, begun = ran(True, True, False, True)
    expected, reference, _ = ran(False, False, False)
    # Nothing is handed out in the second step, which looks how long an exchange takes, and after
    # the last.
    assert begun == [False, False, True, True, True, False]
    assert steps == expected
    assert weights == reference


def test_an_exchange_that_was_begun_survives_an_update_that_is_left_out() -> None:
    steps, weights, begun = ran(True, True, True, True)
    expected, reference, _ = ran(False, False, True)
    assert [bool(step[4]) for step in steps] == [False, False, False, True, False, False]
    # What was begun in that step is begun anew.
    assert begun == [False, False, True, False, True, False]
    assert [step[:3] for step in steps] == [step[:3] for step in expected]
    assert weights == reference


@pytest.mark.parametrize(("overlap", "sole"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("poisoned", [False, True])
def test_ranks_that_keep_a_part_of_the_optimizer_train_the_same_model(
    overlap: bool, sole: bool, poisoned: bool
) -> None:
    """Weights and optimizer bit by bit; the norm is summed in another order."""
    steps, weights, _ = ran(overlap, True, poisoned, sole, True, None)
    expected, reference, _ = ran(False, False, poisoned, clipped=None)
    assert weights == reference
    assert [step[:3] for step in steps] == [step[:3] for step in expected]
    # Of the step that is left out only a loss need be NaN.
    norms = [
        (step[3], other[3]) for step, other in zip(steps, expected, strict=True) if not other[4]
    ]
    assert [norm for norm, _ in norms] == pytest.approx([norm for _, norm in norms], rel=1e-5)
    assert [bool(step[4]) for step in steps] == [bool(step[4]) for step in expected]


def test_ranks_that_keep_a_part_of_the_optimizer_clip_by_the_norm_of_all() -> None:
    steps, _, _ = ran(True, True, False, True, True)
    expected, _, _ = ran(False, False, False)
    assert min(step[3] for step in expected) > 1.0, "else nothing is clipped"
    assert [step[:4] for step in steps] == [pytest.approx(step[:4], rel=1e-5) for step in expected]
    assert steps != ran(True, True, False, True, True, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["bf16", "int4"])
@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize(("overlap", "sole", "shard"), PACKED[1:])
def test_packed_gradients_are_the_same_whenever_they_travel(
    overlap: bool, sole: bool, shard: bool, poisoned: bool, compress: str
) -> None:
    """Weights, optimizer and what is left out: also after an update that was left out, when one
    ahead was begun.
    """
    steps, weights, _ = packed_cases()[overlap, overlap, poisoned, sole, shard, None, compress]
    expected, reference, _ = packed_cases()[False, False, poisoned, False, False, None, compress]
    assert weights == reference
    assert [step[:3] for step in steps] == [step[:3] for step in expected]
    assert [bool(step[4]) for step in steps] == [bool(step[4]) for step in expected]
    # It is not what it is unpacked.
    plain, exact, _ = ran(False, False, poisoned, clipped=None)
    assert weights[0] != exact[0]
    # What is not finite is seen in the same steps.
    assert [bool(step[4]) for step in steps] == [bool(step[4]) for step in plain]
    known = [place for place, step in enumerate(plain) if not step[4]]
    assert [expected[i][0] for i in known] == pytest.approx([plain[i][0] for i in known], rel=0.05)


ORDER = """
import json, os, sys
import allhands
import mlx.core as mx
from allhands.distributed import reduce
from allhands.distributed.backend import connect, on_stream

rank = int(os.environ["MLX_RANK"])
group = connect("ring", 2, rank)
stream = mx.new_stream(mx.cpu)
reduce._ALONE_BYTES = 4

def sums():
    arrays = [mx.full((4,), (rank + 1) * 10.0**power) for power in range(4)]
    if rank == 0:
        with mx.stream(mx.cpu):
            how = {"bucket_bytes": 1 << 20, "stream": stream}
            begun = reduce.start_all_reduce(on_stream(group, stream), arrays, **how).arrays
        return [total[0].item() for total in begun]
    # One after the other, in the order in which the other rank should: that in which they came, the last first.
    reduce.barrier(group)
    found = []
    for array in reversed(arrays):
        total = group.all_sum(array)
        mx.eval(total)
        found.insert(0, total[0].item())
    return found

print(json.dumps([sums(*case) for case in json.loads(sys.argv[1])]), flush=True)
os._exit(0)
"""


def test_a_bucket_is_computed_in_the_order_in_which_it_is_put_together() -> None:
    """MLX computes the last of the arrays that it is handed first; both ranks say what they had for
    each.
    """
    assert told_by_two(ORDER, [()])[()] == [3.0, 30.0, 300.0, 3000.0]
