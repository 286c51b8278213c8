"""Dropout is a function of the sample: the same gradient however a batch is cut, padded and shared
out.

The reference is always the whole batch, or a layer's mask, computed in another arrangement.
Statistics allow six standard deviations, so that a test fails by chance once in 500 million times;
the draws are fixed anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2_moe
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from plain_loop import adapted_model
from substituted import prepare_dense
from tiny import write_model

from allhands.data.loader import Loader, MicroBatch, collate
from allhands.data.order import GlobalOrder
from allhands.data.tokens import PackedRows, TokenSet, Windows
from allhands.errors import ConfigError
from allhands.kernels.documents import require_isolation
from allhands.model.dropout import DropoutKeys, SampleDropout, install_dropout
from allhands.model.remat import checkpoint_layers
from allhands.objectives.causal_lm import batch_values, make_loss
from allhands.parallel.gradient import make_gradient
from allhands.runtime.sizing import Sizing

Grads = dict[str, np.ndarray[Any, Any]]
BATCH = 8


# --- the masks of one layer -----------------------------------------------------------------------


def masks(
    p: float = 0.5,
    *,
    seed: int = 0,
    iteration: int = 0,
    examples: int = 64,
    width: int = 64,
    features: int = 64,
    name: str = "a",
) -> np.ndarray[Any, Any]:
    """(examples, width, features) 1.0 where a feature is kept, else 0.0."""
    keys = DropoutKeys(seed)
    layer = SampleDropout(p, name, keys)
    with keys.using(keys.of(np.arange(examples), width, iteration)):
        output = np.array(layer(mx.ones((examples, width, features))))
    kept = output != 0
    np.testing.assert_allclose(output[kept], 1 / (1 - p), rtol=1e-4)
    return kept.astype(np.float64)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_the_share_that_is_kept_is_right_along_every_axis(p: float) -> None:
    kept = masks(p)
    sigma = np.sqrt(p * (1 - p))
    assert abs(kept.mean() - (1 - p)) < 6 * sigma / np.sqrt(kept.size)
    for axes in ((1, 2), (0, 2), (0, 1), (0,), (2,)):
        means = kept.mean(axis=axes)
        deviations = (means - (1 - p)) / (sigma / np.sqrt(kept.size / means.size))
        assert np.abs(deviations).max() < 6
        # Spread as much as independent draws would, no less either.
        assert abs(deviations.std() - 1) < 6 / np.sqrt(2 * deviations.size)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "b"},
        {"iteration": 1},
        {"seed": 1},
        {"seed": 1, "iteration": 1},
        {"name": "layers.1.a"},
    ],
)
def test_other_layers_batches_and_seeds_draw_independently(change: dict[str, Any]) -> None:
    first, second = masks(), masks(**change)
    assert abs(correlation(first, second)) < 6
    # Nor is one a shifted copy of the other.
    for axis in range(3):
        assert abs(correlation(first, np.roll(second, 1, axis))) < 6


def test_places_and_features_draw_independently() -> None:
    kept = masks()
    assert abs(correlation(kept, kept)) > 100  # the measure sees what it should
    for axis in range(3):
        for shift in (1, 2, 7, 32):
            assert abs(correlation(kept, np.roll(kept, shift, axis))) < 6
    # Neighbours in two directions at once: position t of example e and t - 1 of e + 1.
    assert abs(correlation(kept, np.roll(kept, (1, -1), (0, 1)))) < 6


def correlation(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """In standard deviations of what independent draws give."""
    return float(
        ((one - one.mean()) * (other - other.mean())).mean()
        / (one.std() * other.std())
        * np.sqrt(one.size)
    )


def test_a_mask_is_the_same_in_any_arrangement() -> None:
    keys = DropoutKeys(3)
    layer = SampleDropout(0.4, "layer", keys)

    def drawn(
        examples: list[int], width: int, shape: Callable[..., tuple[int, ...]] = lambda *s: s
    ) -> Any:
        with keys.using(keys.of(np.array(examples), width, 5)):
            x = mx.ones(shape(len(examples), width, 10))
            return np.array(layer(x)).reshape(len(examples), width, 10)

    whole = drawn([4, 9, 2, 100_000], 12)
    assert np.array_equal(drawn([2], 12)[0], whole[2])
    assert np.array_equal(drawn([100_000, 4], 17)[:, :12], whole[[3, 0]])
    assert np.array_equal(drawn([9, 2], 5), whole[1:3, :5])
    # Rows of all examples joined, as some architectures compute; heads, each with features of its
    # own.
    assert np.array_equal(drawn([4, 9, 2, 100_000], 12, lambda b, t, d: (b * t, d)), whole)
    assert np.array_equal(drawn([4, 9, 2, 100_000], 12, lambda b, t, d: (b, t, 2, d // 2)), whole)
    assert not np.array_equal(drawn([5], 12)[0], whole[0])


def test_masks_are_the_same_on_every_machine_and_in_every_release() -> None:
    """The whole way from the seed to the mask in plain integers, so that a run can go on from any
    checkpoint.
    """
    seed, iteration, p, width, features = 7, 3, 0.3, 5, 22
    kept = masks(
        p,
        seed=seed,
        iteration=iteration,
        examples=3,
        width=width,
        features=features,
        name="layers.0.up",
    )
    limit, stride = 2**64 - 1, 0x9E3779B97F4A7C15
    own = int.from_bytes(hashlib.sha256(b"layers.0.up").digest()[:8], "little")
    batch = int(np.random.SeedSequence([seed, iteration]).generate_state(1, np.uint64)[0])
    for example in range(3):
        for place in range(width):
            row = split_mix((batch + example * stride) & limit)
            key = split_mix((row + (place + 1) * stride) & limit) ^ own
            words = -(-features // 4) * 2
            pairs = [
                threefry(key & 0xFFFFFFFF, key >> 32, i, words // 2 + i) for i in range(words // 2)
            ]
            drawn = np.array([*(a for a, _ in pairs), *(b for _, b in pairs)], dtype="<u4").view(
                "<u2"
            )[:features]
            assert np.array_equal(kept[example, place], drawn < round(0.7 * 65536)), (
                example,
                place,
            )


def split_mix(value: int) -> int:
    """The finaliser of SplitMix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ value >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return value ^ value >> 31


def threefry(k0: int, k1: int, x0: int, x1: int) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    2011).
    """
    word = 0xFFFFFFFF
    keys = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + k0) & word, (x1 + k1) & word
    for block in range(5):
        for rotation in (13, 15, 26, 6) if block % 2 == 0 else (17, 29, 16, 24):
            x0 = (x0 + x1) & word
            x1 = ((x1 << rotation | x1 >> (32 - rotation)) & word) ^ x0
        x0, x1 = (
            (x0 + keys[(block + 1) % 3]) & word,
            (x1 + keys[(block + 2) % 3] + block + 1) & word,
        )
    return x0, x1


def test_inputs_without_the_axes_of_the_batch_are_refused() -> None:
    keys = DropoutKeys(0)
    layer = SampleDropout(0.5, "layers.3.odd", keys)
    with (
        keys.using(keys.of(np.arange(3), 4, 0)),
        pytest.raises(ConfigError, match=r"layers.3.odd.*\(4, 3, 8\)"),
    ):
        layer(mx.ones((4, 3, 8)))


def test_half_precision_stays_and_no_feature_count_is_odd() -> None:
    keys = DropoutKeys(0)
    layer = SampleDropout(0.25, "a", keys)
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        with keys.using(keys.of(np.arange(2), 3, 0)):
            assert layer(mx.ones((2, 3, 5), dtype=dtype)).dtype == dtype
            assert layer(mx.ones((2, 3, 1), dtype=dtype)).shape == (2, 3, 1)


# --- whole models ---------------------------------------------------------------------------------


def token_set(count: int = 20, vocabulary: int = 90) -> TokenSet:
    random = np.random.default_rng(2)
    lengths = random.integers(3, 40, count)
    return TokenSet.of_examples(
        [(random.integers(1, vocabulary, n), np.arange(n) > n // 3) for n in lengths]
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dropout") / "llama", layers=2)


def adapted(path: Path, *, dropout: float = 0.3, dora: bool = False) -> Any:
    model = adapted_model(path, scale=2.0, dropout=dropout, dora=dora)
    show_adapters(model)
    model.train()
    return model


def show_adapters(model: Any) -> None:
    """Adapters are zero at first, so that nothing that is dropped would show."""
    random = np.random.default_rng(5)

    def fill(_: str, module: Any) -> None:
        if "lora_b" in module:
            module.lora_b = mx.array(
                random.normal(size=module.lora_b.shape) * 0.1, dtype=mx.float32
            )

    model.apply_to_modules(fill)


def moe(dropout: float = 0.3) -> Any:
    """Two blocks of four experts, two for each place, with adapters on the experts too."""
    arguments = {
        "model_type": "qwen2_moe",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "rms_norm_eps": 1e-6,
        "vocab_size": 96,
        "num_key_value_heads": 2,
    }
    mx.random.seed(1)
    model: Any = qwen2_moe.Model(qwen2_moe.ModelArgs.from_dict(arguments))
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": 4, "scale": 2.0, "dropout": dropout})
    assert any(isinstance(module, LoRASwitchLinear) for _, module in model.named_modules())
    show_adapters(model)
    model.train()
    return model


def total(
    gradient: Callable[..., Any], keys: DropoutKeys | None, batches: list[MicroBatch]
) -> tuple[float, Grads]:
    """Loss and gradient, summed in float64."""
    loss, grads = 0.0, dict[str, Any]()
    for batch in batches:
        key = (
            []
            if keys is None
            else [keys.of(batch.examples, batch.inputs.shape[1], batch.iteration)]
        )
        value, tree = gradient(*key, *map(mx.array, batch_values(batch)))
        loss += value.item()
        for name, grad in tree_flatten(tree):
            grads[name] = grads.get(name, 0) + np.array(grad, dtype=np.float64)
    return loss, grads


def shared_out(windows: Windows, ranks: int, sizing: Sizing, iteration: int) -> list[MicroBatch]:
    """What all ranks together compute of a batch."""
    order = GlobalOrder(windows.work, BATCH, seed=0)
    weights = [1.0 + rank for rank in range(ranks)]
    loaders = [Loader(windows, order, sizing, rank, weights) for rank in range(ranks)]
    parts = [loader.load(iteration) for loader in loaders]
    assert all(parts)
    return [batch for part in parts for batch in part]


def assert_same(one: tuple[float, Grads], other: tuple[float, Grads]) -> None:
    assert one[0] == pytest.approx(other[0], rel=2e-6)
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        np.testing.assert_allclose(
            other[1][name], grad, rtol=1e-3, atol=2e-5 * np.abs(grad).max(), err_msg=name
        )


def differ(one: tuple[float, Grads], other: tuple[float, Grads]) -> bool:
    return all(
        np.abs(one[1][name] - other[1][name]).max() > 1e-2 * np.abs(one[1][name]).max()
        for name in one[1]
    )


LARGE = Sizing(10_000, overhead_tokens=100_000)
SMALL = Sizing(50, overhead_tokens=1)
LADDER = Sizing(200, overhead_tokens=1, few_shapes=True, ladder=(24, 48))


@pytest.mark.parametrize("kind", ["lora", "dora", "moe", "rows"])
def test_any_number_of_ranks_drops_the_same(llama: Path, kind: str) -> None:
    model = moe() if kind == "moe" else adapted(llama, dora=kind == "dora")
    keys = install_dropout(model, seed=4)
    assert keys is not None
    tokens = token_set()
    windows: Windows = PackedRows(tokens, 24, isolate=True) if kind == "rows" else tokens
    gradient = make_gradient(model, cpu_native=False, compiled=False, dropout=keys)
    expected = total(gradient, keys, shared_out(windows, 1, LARGE, 1))
    if kind == "moe":
        # Experts are given places as they come below 64 copies, two of each place here, and sorted
        # above.
        assert all(batch.inputs.size * 2 < 64 for batch in shared_out(windows, 3, SMALL, 1))
        assert all(batch.inputs.size * 2 >= 64 for batch in shared_out(windows, 1, LARGE, 1))
    for ranks, sizing in ((1, SMALL), (2, LARGE), (2, LADDER), (3, SMALL)):
        assert_same(expected, total(gradient, keys, shared_out(windows, ranks, sizing, 1)))


@pytest.mark.parametrize("form", ["eager", "compiled", "recomputed", "eager, recomputed"])
def test_every_way_of_computing_drops_the_same(llama: Path, form: str) -> None:
    def gradient_of(model: Any, **how: bool) -> tuple[Callable[..., Any], DropoutKeys | None]:
        keys = install_dropout(model, seed=4)
        return make_gradient(model, dropout=keys, **how), keys

    model, tokens = adapted(llama), token_set()
    if "recomputed" in form:
        checkpoint_layers(model.layers)
    if "eager" in form:
        prepare_dense(model)
    gradient, keys = gradient_of(model, cpu_native="eager" in form, compiled=form == "compiled")
    plain, plain_keys = gradient_of(adapted(llama), cpu_native=False, compiled=False)
    # The same shape twice: the second time nothing is traced anew.
    for iteration, ranks in ((0, 1), (1, 1), (0, 2)):
        expected = total(plain, plain_keys, shared_out(tokens, 1, LARGE, iteration))
        assert_same(expected, total(gradient, keys, shared_out(tokens, ranks, SMALL, iteration)))


def test_gradients_are_those_of_the_loss_under_this_mask(llama: Path) -> None:
    """Were the mask another one in the backward pass, the gradient would not be the loss's slope."""
    for recomputed in (False, True):
        model = adapted(llama)
        if recomputed:
            checkpoint_layers(model.layers)
        keys = install_dropout(model, seed=4)
        assert keys is not None
        batches = [collate(token_set(), np.arange(6), 40)]
        gradient = make_gradient(model, cpu_native=False, compiled=False, dropout=keys)
        _, grads = total(gradient, keys, batches)
        layer = model.layers[1].self_attn.q_proj
        direction = mx.array(
            np.random.default_rng(0).normal(size=layer.lora_b.shape), dtype=mx.float32
        )
        center, losses = layer.lora_b, []
        for step in (1e-2, -1e-2):
            layer.lora_b = center + step * direction
            losses.append(total(gradient, keys, batches)[0])
        slope = float((grads["model.layers.1.self_attn.q_proj.lora_b"] * np.array(direction)).sum())
        assert abs(slope) > 0.1
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(slope, rel=1e-2)


def test_other_batches_and_seeds_drop_others(llama: Path) -> None:
    tokens = token_set()
    batch = collate(tokens, np.arange(6), 40)
    found = {}
    for seed in (0, 1):
        model = adapted(llama)
        keys = install_dropout(model, seed)
        gradient = make_gradient(model, cpu_native=False, compiled=False, dropout=keys)
        found[seed] = [total(gradient, keys, [replace(batch, iteration=i)]) for i in (0, 1, 0)]
    assert_same(found[0][0], found[0][2])
    assert differ(found[0][0], found[0][1])
    assert differ(found[0][0], found[1][0])
    without = adapted(llama, dropout=0.0)
    plain = total(make_gradient(without, cpu_native=False, compiled=False), None, [batch])
    assert differ(plain, found[0][0])


def test_compiled_steps_take_new_keys_without_tracing_again(llama: Path) -> None:
    traces: list[int] = []

    class Counting(LoRALinear):
        def __call__(self, x: mx.array) -> mx.array:
            traces.append(1)
            return super().__call__(x)

    model = adapted(llama)
    model.layers[0].self_attn.q_proj.__class__ = Counting
    keys = install_dropout(model, seed=0)
    gradient = make_gradient(model, cpu_native=False, dropout=keys)
    traces.clear()
    batch = collate(token_set(), np.arange(6), 40)
    first = total(gradient, keys, [batch])
    traced = len(traces)
    assert traced > 0
    second = total(gradient, keys, [replace(batch, iteration=1)])
    again = total(gradient, keys, [batch])
    assert len(traces) == traced
    assert differ(first, second)
    assert first[0] == again[0]
    assert all(np.array_equal(first[1][name], again[1][name]) for name in first[1])


def test_evaluation_drops_nothing_and_needs_no_keys(llama: Path) -> None:
    arrays = [mx.array(each) for each in batch_values(collate(token_set(), np.arange(6), 40))]
    losses = []
    for dropout in (0.0, 0.3):
        model = adapted(llama, dropout=dropout)
        installed = install_dropout(model, seed=0)
        assert (installed is None) == (dropout == 0)
        model.eval()
        losses.append(make_loss(model, cpu_native=False, with_grad=False)(*arrays).item())
    assert losses[0] == losses[1]


def test_experts_drop_nothing_in_evaluation() -> None:
    tokens = mx.array(np.random.default_rng(0).integers(1, 96, (2, 40)))
    with_dropout, without = moe(0.3), moe(0.0)
    install_dropout(with_dropout, seed=0)
    for model in (with_dropout, without):
        model.eval()
    assert mx.array_equal(with_dropout(tokens), without(tokens))


def test_a_model_in_evaluation_can_be_probed_with_fresh_adapters(llama: Path) -> None:
    """Adapters come in training mode; what compares two passes of a loaded model must not meet
    dropout.
    """
    model = adapted(llama)
    model.eval()
    for _, module in model.named_modules():
        if isinstance(module, LoRALinear):
            module.train()
    install_dropout(model, seed=0)
    require_isolation(model, "llama")
    prepare_dense(model)


def test_nothing_changes_without_dropout(llama: Path) -> None:
    model = adapted(llama, dropout=0.0)
    before = [(name, type(module)) for name, module in model.named_modules()]
    assert install_dropout(model, seed=0) is None
    assert [(name, type(module)) for name, module in model.named_modules()] == before


def test_parameters_stay_the_same(llama: Path) -> None:
    model = adapted(llama)
    names = [name for name, _ in tree_flatten(model.parameters())]
    assert any(type(module) is nn.Dropout for _, module in model.named_modules())
    install_dropout(model, seed=0)
    assert not any(type(module) is nn.Dropout for _, module in model.named_modules())
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    layer = model.layers[0].mlp.up_proj.dropout
    assert layer.training
    assert "p=0.3" in repr(layer)
