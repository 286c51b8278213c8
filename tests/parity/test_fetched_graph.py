"""Passes over fetched blocks as one graph against mlx_lm's own model: sums and gradients, of each
architecture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from test_stages import CUT, loss_of, model_of, tokens_of

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import SingleProcess, collective, start
from allhands.errors import DistributedError
from allhands.io.trees import number
from allhands.kernels.fused.blocks import fuse
from allhands.objectives.causal_lm import CAUSAL_LM, CausalLM
from allhands.parallel.fetched import FetchedGraph
from allhands.parallel.gradient import Computing
from allhands.parallel.sharding import BetweenPasses, Layout, Sharding, shard
from allhands.train.optimizers import SGD, KernelAdamW
from allhands.train.step import StepOptions, make_step

OBJECTIVE: Any = SimpleNamespace(
    further=(),
    sums=lambda model, **_: lambda tokens: (loss_of(model(tokens), tokens),),
    model_inputs=lambda _, tokens: (tokens, {}),
)


class Copying(SingleProcess):
    """One process, in whose memory a whole row is another array than its part."""

    scatters = False

    def all_gather(self, array: mx.array) -> mx.array:
        return array + 0


class Scattering(Copying):
    """The same as a back-end that scatters sums."""

    scatters = True


class Groups:
    """Groups of exchanges that NCCL would make one kernel each."""

    def __init__(self, error: int = 0) -> None:
        self.opened, self.closed, self.error = 0, 0, error
        self.bytes_at_start: list[int] = []

    def ncclGroupStart(self) -> None:
        assert self.opened == self.closed
        self.opened += 1
        self.bytes_at_start.append(mx.get_active_memory())

    def ncclGroupEnd(self) -> int:
        self.closed += 1
        return self.error


class Joining(Scattering):
    """The same as a back-end that joins exchanges."""

    def __init__(self, error: int = 0) -> None:
        self.nccl = Groups(error)


class Asked(SingleProcess):
    """One process that counts sums of numbers."""

    times = 0

    def all_sum(self, array: mx.array) -> mx.array:
        self.times += array.size == 1
        return array + 0


def sharded(model: Any, *, scatters: bool = False, **more: Any) -> Sharding:
    alone: Any = Scattering() if scatters else Copying()
    return shard(model, alone, alone, alone, **more)


def passes(sharding: Sharding, room: Callable[[], float] | None = None) -> FetchedGraph:
    return FetchedGraph(sharding, OBJECTIVE, Computing(cpu_native=False, compiled=False), room=room)


def found_by(graph: FetchedGraph, *arrays: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    """Loss and gradients by name."""
    (loss,), parts = graph.begin(graph.prepare(arrays, arrays[0].size))
    named: dict[str, mx.array] = {}
    for row, part in zip(graph.rows, parts, strict=True):
        shapes = {place.name: place.shape for place in row.places}
        named |= {name: array.reshape(shapes[name]) for name, array in row.named(part)}
    return loss, named


def assert_same(
    one: tuple[mx.array, dict[str, mx.array]], other: tuple[mx.array, dict[str, mx.array]]
) -> None:
    assert other[0].item() == pytest.approx(one[0].item(), rel=1e-6)
    assert other[1].keys() == one[1].keys()
    # Attention without rotary positions has no gradient for a bias of its keys: rounding alone.
    least = 1e-3 * max(number(mx.linalg.norm(array)) for array in one[1].values())
    for name, array in one[1].items():
        apart = mx.linalg.norm(other[1][name] - array) / mx.maximum(mx.linalg.norm(array), least)
        assert number(apart) < 5e-6, name


def by_mlx(model: Any, tokens: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    loss, gradients = nn.value_and_grad(model, lambda: loss_of(model(tokens), tokens))()
    return loss, dict(tree_flatten(gradients))


@pytest.mark.parametrize("name", CUT)
def test_every_architecture_has_the_gradient_of_its_whole_model(name: str) -> None:
    tokens = tokens_of(name)
    expected = by_mlx(model_of(name), tokens)
    assert_same(expected, found_by(passes(sharded(model_of(name))), tokens))
    assert_same(expected, found_by(passes(sharded(model_of(name)), lambda: 0.0), tokens))


def adapted(name: str, kind: str, *, bits: int = 0, blocks: int = 1) -> Any:
    model = model_of(name)
    if bits:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=lambda _, m: divides(m))
    model.freeze()
    mx.random.seed(11)
    linear_to_lora_layers(
        model, blocks, {"rank": 4, "scale": 3.0, "dropout": 0.0}, use_dora=kind == "dora"
    )
    for module in model.modules():
        if "lora_b" in module:
            module["lora_b"] = 0.1 * mx.random.normal(module["lora_b"].shape)
    mx.eval(model.parameters())
    return model


def divides(module: Any) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) and module.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize("room", [None, lambda: 0.0], ids=["once", "twice"])
@pytest.mark.parametrize("blocks", [1, 9], ids=["the last block", "all"])
@pytest.mark.parametrize(("kind", "bits"), [("lora", 0), ("lora", 4), ("dora", 0), ("dora", 4)])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_adapters_have_the_gradients_of_a_whole_model(
    kind: str, bits: int, blocks: int, room: Callable[[], float] | None, fused: bool
) -> None:
    tokens = tokens_of("llama")
    expected = by_mlx(adapted("llama", kind, bits=bits, blocks=blocks), tokens)
    model = adapted("llama", kind, bits=bits, blocks=blocks)
    if fused:
        fuse(model, 64, joins=False)
    assert_same(expected, found_by(passes(sharded(model), room), tokens))


@pytest.mark.parametrize("room", [None, lambda: 0.0], ids=["once", "twice"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"layout": Layout(boxed=True)},
        {"layout": Layout(shares=(1.0,))},
        {"fetching": BetweenPasses(True)},
        {"fetching": BetweenPasses(False, True)},
    ],
    ids=str,
)
def test_fused_blocks_have_the_gradient_of_a_whole_model(
    more: dict[str, Any], room: Callable[[], float] | None
) -> None:
    tokens = tokens_of("llama")
    expected = by_mlx(model_of("llama"), tokens)
    model = model_of("llama")
    fuse(model, 64, joins=False)
    assert_same(expected, found_by(passes(sharded(model, **more), room), tokens))


@pytest.mark.parametrize("room", [None, lambda: 0.0], ids=["once", "twice"])
def test_pieces_of_rows_have_the_gradient_of_a_whole_model(
    room: Callable[[], float] | None,
) -> None:
    """Attention over divided rows computes with what is fetched, as any other does."""
    tokens = np.asarray(tokens_of("llama"), dtype=np.int32)
    rows, width = tokens.shape
    places = np.arange(rows * (width - 1), dtype=np.int32)
    batch = MicroBatch(
        tokens[:, :-1],
        places,
        tokens[:, 1:].reshape(-1),
        places.size,
        np.arange(rows, dtype=np.int32),
    )
    whole = [mx.array(each) for each in CAUSAL_LM.values(batch)]
    model, computing = model_of("llama"), Computing(cpu_native=False, compiled=False)
    loss, gradients = nn.value_and_grad(
        model, lambda: CAUSAL_LM.sums(model, cpu_native=False)(*whole)[0]
    )()
    divided, other = CausalLM(SingleProcess()), model_of("llama")
    fuse(other, 64, joins=False)
    graph = FetchedGraph(sharded(other), divided, computing, room=room)
    pieces = tuple(mx.array(each) for each in divided.values(batch))
    assert_same((loss, dict(tree_flatten(gradients))), found_by(graph, *pieces))


def wide(*, bits: int = 0, blocks: int = 16) -> Any:
    """A model whose blocks are larger than all that is computed with them."""
    mx.random.seed(5)
    shape = {
        "hidden_size": 384,
        "num_hidden_layers": blocks,
        "intermediate_size": 512,
        "vocab_size": 64,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model: Any = Model(
        ModelArgs.from_dict({"model_type": "llama", "rms_norm_eps": 1e-5, **shape, **heads})
    )
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        model.freeze()
        linear_to_lora_layers(model, blocks, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    mx.eval(model.parameters())
    return model


def beside_gradients(
    blocks: int, bits: int, fused: bool, room: Callable[[], float] | None
) -> tuple[int, list[int]]:
    """Bytes of a pass beside the gradients that it leaves, and the bytes of each block."""
    model = wide(bits=bits, blocks=blocks)
    if fused:
        fuse(model, 64, joins=False)
    sharding = sharded(model)
    sizes = [sum(row.size * row.dtype.size for row in unit.rows) for unit in sharding.units]
    gradients = sum(row.size * row.dtype.size for row in sharding.rows if row.trained)
    graph, tokens = passes(sharding, room), mx.random.randint(0, 60, (1, 2))
    batch = graph.prepare((tokens,), tokens.size)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loss, parts = graph.begin(batch)
    mx.eval(loss, parts)
    return mx.get_peak_memory() - before - gradients, sizes


@pytest.mark.slow
@pytest.mark.parametrize("room", [None, lambda: 0.0], ids=["once", "twice"])
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_whole_arrays_of_few_blocks_are_in_memory_at_once(
    bits: int, fused: bool, room: Callable[[], float] | None
) -> None:
    short, _ = beside_gradients(16, bits, fused, room)
    long, sizes = beside_gradients(32, bits, fused, room)
    # Sixteen more blocks need the memory of one more at most. Passes of adapters
    # that compute once keep small arrays of each block until the backward pass.
    assert long < short + (4 if bits else 1) * max(sizes)
    # A dense weight is made of a quantised one, beside it.
    assert long < sum(sizes) / (2 if bits else 4)


def test_rows_of_a_block_leave_memory_when_it_is_computed() -> None:
    sharding = sharded(wide(), scatters=True, fetching=BetweenPasses(twice=True))
    blocks = [sum(row.size * row.dtype.size for row in unit.rows) for unit in sharding.units]
    gradients = sum(row.size * row.dtype.size for row in sharding.rows)
    graph, tokens = passes(sharding), mx.random.randint(0, 60, (1, 2))
    batch = graph.prepare((tokens,), tokens.size)
    gc.collect()
    mx.synchronize()
    before, limit = mx.get_active_memory(), mx.set_memory_limit(0)
    mx.reset_peak_memory()
    try:
        loss, parts = graph.begin(batch)
        mx.eval(loss, parts)
    finally:
        mx.set_memory_limit(limit)
    # At the fullest moment of the second block's backward pass, that is beside all gradients but the
    # first block's: its own rows, and the next ones.
    assert mx.get_peak_memory() - before - gradients < 2 * max(blocks)


def test_blocks_that_are_fetched_one_by_one_are_two_in_memory() -> None:
    sharding, held = sharded(wide()), list[int]()

    def wait(rows: list[mx.array]) -> None:
        mx.eval(rows)
        mx.synchronize()
        held.append(mx.get_active_memory() - before)

    blocks = [sum(row.size * row.dtype.size for row in unit.rows) for unit in sharding.units]
    mx.synchronize()
    before = mx.get_active_memory()
    for unit in sharding.fetched(sharding.units, wait):
        mx.eval(unit.weights())
    assert len(held) == len(blocks)
    assert max(held) < 2.1 * max(blocks)


def test_outputs_of_blocks_stay_no_longer_than_passes_need_them() -> None:
    sharding, tokens = sharded(wide()), mx.random.randint(0, 60, (2, 64))
    gradients = sum(row.size * row.dtype.size for row in sharding.rows)
    graph = passes(sharding, lambda: 0.0)
    batch = graph.prepare((tokens,), tokens.size)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    loss, parts = graph.begin(batch)
    mx.eval(loss, parts)
    output = tokens.size * 384 * 4
    assert mx.get_active_memory() - before - gradients < output
    assert len(batch.graph.sums) == 1


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_rows_by_product_have_the_gradient_of_a_whole_model(fused: bool, boxed: bool) -> None:
    tokens = mx.random.randint(0, 60, (2, 9))
    expected = by_mlx(wide(), tokens)
    model = wide()
    if fused:
        fuse(model, 64, joins=False)
    sharding = sharded(model, scatters=True, layout=Layout(boxed=boxed))
    of_a_block = len(sharding.units[1].rows)
    assert_same(expected, found_by(passes(sharding), tokens))
    # Gate with up, and each other large array; with queries go keys and values.
    assert of_a_block == 5
    # In the order of the product, which then takes a fetched row as it is.
    layers = [[place.name.split(".")[-2] for place in row.places] for row in sharding.units[1].rows]
    assert ["q_proj", "k_proj", "v_proj"] in layers
    assert ["gate_proj", "up_proj"] in layers


def test_rows_and_gradients_of_a_block_are_one_exchange() -> None:
    tokens = mx.random.randint(0, 60, (2, 9))
    joining: Any = Joining()
    sharding = shard(wide(), joining, joining, joining)
    assert_same(by_mlx(wide(), tokens), found_by(passes(sharding), tokens))
    units = len(sharding.units)
    # Rows of each block twice, but of the last one, and its gradients.
    assert joining.nccl.opened == joining.nccl.closed == (units - 1) + units + units
    refused: Any = Joining(error=5)
    with pytest.raises(DistributedError) as raised:
        found_by(passes(shard(wide(), refused, refused, refused)), tokens)
    assert raised.value.code == "exchange-not-started"


def test_what_is_given_is_computed_before_a_group_of_exchanges_opens() -> None:
    """Within it, an exchange that this needs would be launched only when the group ends."""
    joining: Any = Joining()
    given = [mx.ones((1 << 18,)) + place for place in range(2)]
    exchanges = [collective(joining, joining.all_gather, array) for array in given]
    mx.synchronize()
    before = mx.get_active_memory()
    found = start(joining, exchanges)
    taken = joining.nccl.bytes_at_start[0] - before
    assert taken > 0.9 * sum(array.nbytes for array in given)
    assert [number(array.max()) for array in found] == [1, 2]


def batches(step: int, count: int) -> list[MicroBatch]:
    drawn = np.random.default_rng(step)
    found: list[MicroBatch] = []
    for _ in range(count):
        ids = drawn.integers(0, 60, (2, 10)).astype(np.int32)
        places, rows = np.arange(18, dtype=np.int32), np.arange(2, dtype=np.int32)
        found.append(
            MicroBatch(ids[:, :-1], places, ids[:, 1:].reshape(-1), 18, rows, iteration=step)
        )
    return found


# Adam divides a gradient by its own size: with the usual 1e-8, rounding alone moves a weight whose
# gradient is next to nothing by as much as any other.
EPS = 1e-6


def adam() -> Any:
    return KernelAdamW(1e-3, eps=EPS)


def decaying_matrices() -> Any:
    optimizer = KernelAdamW(1e-3, eps=EPS, weight_decay=0.5)
    optimizer.matrices_only = True
    return optimizer


def trained(
    optimizer: Any, counts: Sequence[int], **options: Any
) -> tuple[list[float], dict[str, mx.array]]:
    """Losses of some steps of so many micro-batches each, and the weights after them."""
    model: Any = wide()
    if options:
        model = (sharding := options["sharding"]).parts
        step = make_step(
            sharding.model, optimizer, sharding.world, StepOptions(False, compiled=False, **options)
        )
    else:
        step = make_step(
            model, optimizer, SingleProcess(), StepOptions(cpu_native=False, compiled=False)
        )
    every = [batches(number, count) for number, count in enumerate(counts)]
    losses: list[float] = []
    for place, mine in enumerate(every):
        result = step(mine, upcoming=lambda at=place: every[at + 1] if at + 1 < len(every) else ())
        losses.append(result.loss_sum / result.num_targets)
    return losses, dict(tree_flatten(model.trainable_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("scatters", [False, True], ids=["summed", "scattered"])
@pytest.mark.parametrize("make", [adam, lambda: SGD(1e-2), decaying_matrices])
def test_steps_are_those_of_a_whole_model(make: Callable[[], Any], scatters: bool) -> None:
    counts = (1, 2, 1, 3, 1)
    losses, weights = trained(make(), counts)
    found = trained(make(), counts, strategy="fsdp", sharding=sharded(wide(), scatters=scatters))
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1].keys() == weights.keys()
    for name, array in weights.items():
        assert mx.allclose(found[1][name].reshape(array.shape), array, rtol=1e-5, atol=5e-6), name


@pytest.mark.parametrize("scatters", [False, True], ids=["summed", "scattered"])
def test_ranks_ask_once_a_step_how_many_passes_there_are(scatters: bool) -> None:
    # Asked between passes, the host would wait for the device.
    def asked(count: int) -> int:
        world: Any = Asked()
        sharding = replace(sharded(wide(), scatters=scatters), world=world)
        trained(KernelAdamW(1e-3), (count,), strategy="fsdp", sharding=sharding)
        return world.times

    assert asked(3) == asked(1)


def test_blocks_are_computed_twice_only_where_memory_is_short_or_has_to_be() -> None:
    args = {"hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 128, "vocab_size": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}

    def twice(room: Callable[[], float] | None, tokens: int = 100, **more: Any) -> list[int]:
        model: Any = Model(ModelArgs.from_dict({"model_type": "llama", **args, **heads}))
        return sorted(passes(sharded(model, **more), room).computed_twice(tokens))

    # Neither the table of tokens in front nor the head keeps a block from being computed once.
    assert twice(None) == []
    assert twice(lambda: 1e12) == []
    assert twice(lambda: 0.0) == [1, 2, 3, 4]
    # With room for some the first ones, which would keep theirs the longest; more tokens take more.
    each = 3.5 * 100 * (4 * 64 + 2 * 128 + 64) * 4
    assert twice(lambda: 2.5 * each) == [1, 2]
    assert twice(lambda: 2.5 * each, tokens=50) == []
    assert twice(None, fetching=BetweenPasses(twice=True)) == [0, 1, 2, 3, 4]
    mixture = passes(sharded(model_of("mixtral")))
    assert len(mixture.computed_twice(100)) == len(model_of("mixtral").layers) - 1
