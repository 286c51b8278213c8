"""Gradients in few arrays against those in each trained array, by the same names."""

from __future__ import annotations

from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import SingleProcess
from allhands.io.trees import flatten, number, unflatten
from allhands.kernels.fused import flat_params as leaves
from allhands.kernels.fused.blocks import fuse
from allhands.kernels.fused.linear import Product, products_of
from allhands.model.dropout import install_dropout
from allhands.model.remat import checkpoint_layers
from allhands.objectives.causal_lm import CAUSAL_LM, CausalLM
from allhands.parallel.batch_memory import BatchMemory
from allhands.parallel.gradient import make_gradient, make_joined_gradient
from allhands.train.graph_update import GraphUpdate
from allhands.train.step import StepOptions, make_step

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
}
BATCHES = 11  # more than there are places for
LORA = {"rank": 4, "scale": 3.0, "dropout": 0.0}


def trained(kind: str) -> Any:
    mx.random.seed(2)
    model: Any = Model(ModelArgs.from_dict({**SHAPE, "tie_word_embeddings": kind != "untied"}))
    if kind == "quantised":
        nn.quantize(model, group_size=64, bits=4)
    if kind in ("full", "untied", "recomputed", "norms"):
        for layer in model.layers if kind == "norms" else []:
            layer.input_layernorm.weight = mx.ones((64,), dtype=mx.bfloat16)
    else:
        model.freeze()
        keys = (
            {"keys": ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]}
            if kind == "some"
            else {}
        )
        linear_to_lora_layers(
            model, 2, {**LORA, **keys, "dropout": 0.5 if kind == "dropping" else 0.0}
        )
        for name, array in flatten(model.trainable_parameters()):
            if name.endswith("lora_b"):  # else the first factors would have no gradient
                model.update(unflatten([(name, mx.random.normal(array.shape) * 0.05)]))
    return model


BATCH = (
    mx.array([[(7 * i + j) % 96 for j in range(40)] for i in range(7)], dtype=mx.int32),
    mx.arange(280, dtype=mx.int32),
    (mx.arange(280, dtype=mx.int32) * 5) % 96,
)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "lazy"])
@pytest.mark.parametrize("grouped", [False, True], ids=["one", "groups"])
@pytest.mark.parametrize(
    "kind", ["lora", "some", "quantised", "full", "untied", "norms", "recomputed", "dropping"]
)
def test_gradients_are_the_same(
    kind: str, grouped: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grouped:
        monkeypatch.setattr(leaves, "_ONE_MOST", 0)
        monkeypatch.setattr(leaves, "_SMALL", 1024)
    model = trained(kind)
    dropout = install_dropout(model, 3) if kind == "dropping" else None
    fuse(model, 40)
    if kind == "recomputed":
        checkpoint_layers(model.layers)
    model.train()
    arrays: tuple[mx.array, ...] = BATCH
    if dropout is not None:
        arrays = (dropout.of(np.arange(7, dtype=np.int32), 40, 1), *BATCH)
    loss, expected = make_gradient(model, cpu_native=False, compiled=False, dropout=dropout)(
        *arrays
    )
    wanted = dict(flatten(expected))
    update = GraphUpdate(model, optim.AdamW(1e-3), None, compiled=False)
    gradient = make_joined_gradient(model, update.flat, compiled=compiled, dropout=dropout)
    before = dict(flatten(model.trainable_parameters()))
    for _ in range(2):
        mine, wholes = gradient(*arrays)
        assert number(mine) == pytest.approx(number(loss), rel=1e-6)
        found = dict(update.named([(str(i), whole) for i, whole in enumerate(wholes)]))
        assert found.keys() == wanted.keys()
        for name, array in found.items():
            assert array.dtype == before[name].dtype
            off = mx.abs(array.astype(mx.float32) - wanted[name].astype(mx.float32)).max()
            largest = number(mx.abs(wanted[name].astype(mx.float32)).max())
            assert largest > 0, name
            assert number(off) <= (2e-2 if array.dtype == mx.bfloat16 else 2e-5) * largest, name
    # Nothing of the tracing is left in the model.
    after = dict(flatten(model.trainable_parameters()))
    assert all(after[name] is array for name, array in before.items())


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("kind", ["lora", "some", "quantised", "full", "untied", "recomputed"])
def test_pieces_of_rows_have_the_same_gradients(kind: str, documents: bool) -> None:
    """Attention over divided rows computes with the arrays that it is given, as any other does."""
    model = trained(kind)
    places = np.arange(7 * 39, dtype=np.int32)
    numbers = np.repeat(np.arange(3, dtype=np.int32), 13)[None].repeat(7, axis=0)
    batch = MicroBatch(
        np.asarray(BATCH[0])[:, :39],
        places,
        places * 5 % 96,
        7 * 39,
        np.arange(7, dtype=np.int32),
        documents=numbers if documents else None,
    )
    whole = [mx.array(each) for each in CAUSAL_LM.values(batch)]
    loss, expected = make_gradient(model, cpu_native=False, compiled=False, dropout=None)(*whole)
    wanted = dict(flatten(expected))
    fuse(model, 40)
    if kind == "recomputed":
        checkpoint_layers(model.layers)
    model.train()
    update = GraphUpdate(model, optim.AdamW(1e-3), None, compiled=False)
    divided = CausalLM(SingleProcess())
    gradient = make_joined_gradient(
        model, update.flat, compiled=False, dropout=None, objective=divided
    )
    mine, wholes = gradient(*map(mx.array, divided.values(batch)))
    assert number(mine) == pytest.approx(number(loss), rel=2e-6)
    found = dict(update.named([(str(i), array) for i, array in enumerate(wholes)]))
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        largest = number(mx.abs(wanted[name]).max())
        assert number(mx.abs(array - wanted[name]).max()) <= 2e-5 * largest, name


def products(model: Any) -> list[Product]:
    return products_of(model.modules())


def test_adapters_are_one_array_and_all_products_get_their_factors_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = trained("lora")
    fuse(model, 40)
    made = leaves.FlatParams(model)
    assert len(made.chunks) == 1
    given = []
    give = Product.give
    monkeypatch.setattr(
        Product, "give", lambda self, arrays: (given.append(self), give(self, arrays))
    )
    whole = made.joined(dict(flatten(model.trainable_parameters())))
    with made.installed(whole):
        # Two of three layers: q/k/v, o, gate/up and down.
        assert len(given) == 8
        attention = model.layers[1].self_attn
        a, b = attention._group.product._given
        assert (a.shape, b.shape) == ((64, 12), (12, 128))
        expected = 3.0 * attention.k_proj.lora_b
        assert mx.abs(b[4:8, 64:96] - expected).max().item() < 1e-6
        assert mx.abs(b[4:8, :64]).max().item() == 0
        assert mx.array_equal(a[:, 4:8], attention.k_proj.lora_a)
    assert all(product._given is None for product in products(model))


def test_dense_layers_of_one_input_are_the_weight_of_one_product() -> None:
    model = trained("full")
    fuse(model, 40)
    made = leaves.FlatParams(model)
    assert len(made.chunks) == 1
    with made.installed(made.joined(dict(flatten(model.trainable_parameters())))):
        whole = [product._given[0].shape for product in products(model) if product._given]
        assert sorted(whole) == sorted([(128, 64), (256, 64)] * 3)


def test_many_numbers_are_an_array_for_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "_ONE_MOST", 1000)
    monkeypatch.setattr(leaves, "_SMALL", 1024)
    model = trained("full")
    fuse(model, 40)
    made = leaves.FlatParams(model)
    # The embedding, all norms, and for each layer q/k/v, o, gate/up and down.
    assert len(made.chunks) == 2 + 3 * 4
    # Ranks exchange the last array first: what has parts of all layers must not hold others up.
    assert [place.name for place in made.chunks[0].places if "norm" not in place.name] == []
    assert len(made.chunks[0].places) == 7
    named = dict(flatten(model.trainable_parameters()))
    assert {name for name, _ in made.named(made.joined(named))} == named.keys()
    # Those to which a backward pass comes after attention: one in each layer.
    begins = [made.chunks[number].places[0].name for number in sorted(made.before_attention)]
    assert begins == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_that_travel_are_several_arrays_in_the_order_of_the_model(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaves, "_TRAVELLING", 20_000)
    model = trained("full")
    fuse(model, 40)
    made = leaves.FlatParams(model, apart=apart, travelling=True)
    table = made.index_of(model.model.embed_tokens)
    assert table is not None
    assert [place.name for place in made.chunks[table].places] == ["model.embed_tokens.weight"]
    assert made.index_of(model.model.layers[0].self_attn.q_proj) is None
    others = [chunk for number, chunk in enumerate(made.chunks) if number != table]
    matrices = [chunk for chunk in others if chunk.places[0].array.ndim > 1] if apart else others
    assert len(matrices) > 2
    # Whole but for the last, and not much larger than asked for: a layer's largest product.
    assert all(
        20_000 <= chunk.size < 20_000 + 2 * 128 * 64 + 1024 or apart for chunk in matrices[:-1]
    )
    layers = [
        [int(place.name.split(".")[2]) for place in chunk.places if "layers" in place.name]
        for chunk in others
    ]
    assert [min(numbers) for numbers in layers if numbers] == sorted(
        min(numbers) for numbers in layers if numbers
    )
    named = dict(flatten(model.trainable_parameters()))
    found = dict(made.named(made.joined(named)))
    assert found.keys() == named.keys()
    assert all(mx.array_equal(found[name], array) for name, array in named.items())
    assert len(leaves.FlatParams(model, apart=apart).chunks) == 1 + apart


def micro_batch(number: int) -> MicroBatch:
    ids = (np.arange(80).reshape(2, 40) * (number + 3) + number) % 96
    return MicroBatch(
        inputs=ids.astype(np.int32),
        positions=np.arange(80, dtype=np.int32),
        targets=((ids * 5) % 96).reshape(-1).astype(np.int32),
        num_tokens=80,
        examples=np.arange(2, dtype=np.int32),
    )


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "lazy"])
def test_a_step_that_was_prepared_is_the_same_step(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(
        *, ahead: bool, staged: bool = False
    ) -> tuple[list[float], dict[str, np.ndarray[Any, Any]]]:
        model = trained("lora")
        fuse(model, 40)
        model.train()
        step = make_step(
            model,
            optim.AdamW(1e-2),
            SingleProcess(),
            StepOptions(cpu_native=False, compiled=compiled),
        )
        if staged:
            step.passes._to_arrays = BatchMemory()
        batches = [micro_batch(number) for number in range(BATCHES)]
        losses = []
        for here, following in zip(batches, [*batches[1:], None], strict=True):
            coming = [following] if ahead and following is not None else []
            losses.append(step([here], upcoming=lambda coming=coming: coming).loss_sum)
            prepared.append(step.strategy.ahead is not None)
            if here is batches[2]:  # somebody else sets weights between two steps
                layer = model.layers[2].mlp.down_proj
                layer.lora_b = layer.lora_b * 2
        return losses, {
            name: np.array(array) for name, array in flatten(model.trainable_parameters())
        }

    prepared: list[bool] = []
    plain, weights = run(ahead=False)
    assert prepared == [False] * BATCHES
    for staged in (False, True):
        prepared.clear()
        ahead, others = run(ahead=True, staged=staged)
        assert prepared == [True] * (BATCHES - 1) + [False]
        assert ahead == plain
        for name, array in weights.items():
            assert array.tobytes() == others[name].tobytes(), name
