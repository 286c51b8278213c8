"""What each method of training does to the weights, measured on runs of a tiny model.

References are mlx_lm's model with a loop in the plainest words (``plain_loop``), formulas, and the
files a run leaves behind. Data sets as large as a batch keep the order of samples out of the
comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import TransformerBlock
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as mlx_lm_load
from plain_loop import Example, adapted_model, chats, full_model, numpy_loss, train_plainly
from ranked_tasks import finetune
from runs import Run, distance, read_run, read_weights
from substituted import prepare_dense
from tiny import write_chat_data, write_model

from allhands.config.schema import build_config
from allhands.data.loader import MicroBatch, pad_targets
from allhands.distributed.backend import SingleProcess
from allhands.model.load import Conversion, get_model
from allhands.model.remat import checkpoint_layers
from allhands.parallel.gradient import make_gradient
from allhands.train.step import StepOptions, make_step
from allhands.train.updater import Rules

Train = Callable[..., Run]
# Adam's default of 1e-8 makes an update out of a gradient's rounding error: see
# test_data_parallel.py.
ADAM = {"adam": {"eps": 1e-6}}
ADAPTERS = {"rank": 8, "scale": 2.0, "dropout": 0.0}
SAME_LOSS = {"rtol": 0, "atol": 1e-5}
SAME_WEIGHTS = 5e-6
PROJECTIONS = {f"self_attn.{p}_proj" for p in "qkvo"} | {
    f"mlp.{p}_proj" for p in ("gate", "up", "down")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks, and a head of its own."""
    return write_model(tmp_path_factory.mktemp("methods") / "untied", layers=2, tied=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six chats to train on, four to validate, four to test."""
    return write_chat_data(
        tmp_path_factory.mktemp("methods-data"), train=6, valid=4, test=4, longest=30
    )


@pytest.fixture(scope="module")
def train_chats(model: Path, data: Path) -> list[Example]:
    return chats(model, data / "train.jsonl")


@pytest.fixture
def train(model: Path, data: Path, tmp_path: Path) -> Train:
    """Train with a few flags of its own: by default 6 updates of Adam on all six chats, without
    validation.
    """
    runs = iter(range(100))

    def run(**flags: Any) -> Run:
        common: dict[str, Any] = {
            "model": str(model),
            "data": str(data),
            "adapter_path": str(tmp_path / f"run-{next(runs)}"),
            "train": True,
            "iters": 6,
            "batch_size": 6,
            "val_batches": 0,
            "steps_per_report": 1,
            "learning_rate": 1e-3,
            "lora_parameters": ADAPTERS,
            "optimizer_config": ADAM,
        }
        return read_run(finetune(build_config(common | flags)))

    return run


# --- what is trained ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "leaves"), [("lora", {"lora_a", "lora_b"}), ("dora", {"lora_a", "lora_b", "m"})]
)
def test_adapters_are_on_every_linear_layer_of_the_last_blocks(
    train: Train, method: str, leaves: set[str]
) -> None:
    last = train(fine_tune_type=method, num_layers=1, iters=1)
    assert set(last.weights) == {
        f"model.layers.1.{path}.{leaf}" for path in PROJECTIONS for leaf in leaves
    }
    assert last.weights["model.layers.1.mlp.down_proj.lora_a"].shape == (64, 8)
    # More than there are by default: 16 means all of two.
    assert len(train(fine_tune_type=method, iters=1).weights) == 2 * len(last.weights)


def test_dora_equals_a_plain_loop(train: Train, model: Path, train_chats: list[Example]) -> None:
    run = train(fine_tune_type="dora")
    reference = adapted_model(model, scale=2.0, dora=True)
    losses, weights = train_plainly(reference, optim.Adam(1e-3, eps=1e-6), [train_chats] * 6)
    np.testing.assert_allclose(run.losses, losses, **SAME_LOSS)
    assert distance(run.weights, weights) <= SAME_WEIGHTS


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_full_changes_everything(train: Train, model: Path, tmp_path: Path, tied: bool) -> None:
    path = write_model(tmp_path / "tied", layers=2) if tied else model
    before = read_weights(path / "model.safetensors")
    after = train(model=str(path), fine_tune_type="full", iters=2).weights
    assert after.keys() == before.keys()
    assert {"model.embed_tokens.weight", "model.norm.weight"} < set(after)
    assert ("lm_head.weight" in after) is not tied
    for name, value in after.items():
        assert mx.abs(value - before[name]).max().item() > 1e-4, name


def test_full_with_num_layers_changes_only_those_blocks(
    train: Train, model: Path, train_chats: list[Example]
) -> None:
    run = train(fine_tune_type="full", num_layers=1)
    assert set(run.weights) == {
        n for n in read_weights(model / "model.safetensors") if n.startswith("model.layers.1.")
    }
    reference: Any = full_model(model)
    reference.freeze()
    reference.layers[-1].unfreeze()
    _, weights = train_plainly(reference, optim.Adam(1e-3, eps=1e-6), [train_chats] * 6)
    assert distance(run.weights, weights) <= SAME_WEIGHTS


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_quantised_model_trains_as_the_same_model_dequantised(
    train: Train, tmp_path: Path, method: str, train_chats: list[Example]
) -> None:
    quantised = write_model(tmp_path / "quantised", layers=2, bits=4)
    dense = get_model(
        str(quantised), tmp_path / "dense", Conversion(dequantize=True, dtype="float32")
    )
    run = train(model=str(quantised), fine_tune_type=method)
    np.testing.assert_allclose(
        run.losses, train(model=str(dense), fine_tune_type=method).losses, **SAME_LOSS
    )
    # mlx_lm multiplies with the quantised weights themselves.
    reference = adapted_model(quantised, scale=2.0, dora=method == "dora")
    losses, weights = train_plainly(reference, optim.Adam(1e-3, eps=1e-6), [train_chats] * 6)
    np.testing.assert_allclose(run.losses, losses, **SAME_LOSS)
    assert distance(run.weights, weights) <= SAME_WEIGHTS


# --- how a step is computed -----------------------------------------------------------------------


def test_recomputing_activations_changes_nothing(train: Train) -> None:
    for method in ("lora", "full"):
        plain, recomputed = (train(fine_tune_type=method, grad_checkpoint=c) for c in (False, True))
        np.testing.assert_allclose(recomputed.losses, plain.losses, **SAME_LOSS)
        assert distance(recomputed.weights, plain.weights) <= SAME_WEIGHTS


def test_activations_are_recomputed_in_the_backward_pass() -> None:
    calls: list[int] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def __call__(self, x: mx.array) -> mx.array:
            calls.append(1)
            return mx.tanh(self.linear(x))

    block, untouched = Block(), Block()
    untouched.update(block.parameters())
    checkpoint_layers([block])
    checkpoint_layers([block])
    x = mx.arange(4.0)
    grads, counts = [], []
    for module in (untouched, block):
        calls.clear()
        grads.append(nn.value_and_grad(module, lambda y, m=module: m(y).sum())(x)[1]["linear"])
        counts.append(len(calls))
    assert counts == [1, 2]
    assert mx.allclose(grads[0]["weight"], grads[1]["weight"])
    assert not hasattr(TransformerBlock, "_recomputes")


def test_accumulation_equals_one_larger_batch(train: Train) -> None:
    """An epoch of three batches of two holds the samples of one batch of six, whatever their order."""
    large = train(batch_size=6, iters=6, max_grad_norm=0.1)
    small = train(
        batch_size=2, iters=18, max_grad_norm=0.1, grad_accumulation_steps=3, steps_per_report=3
    )
    np.testing.assert_allclose(small.losses, large.losses, **SAME_LOSS)
    assert distance(small.weights, large.weights) <= SAME_WEIGHTS
    norms = ([report["grad_norm"] for report in run.reports] for run in (small, large))
    np.testing.assert_allclose(*norms, rtol=1e-4)


def test_clipping_scales_the_whole_gradient_to_the_norm(train: Train, model: Path) -> None:
    before = read_weights(model / "model.safetensors")
    options = {"fine_tune_type": "full", "optimizer": "sgd", "learning_rate": 0.5, "iters": 1}
    moved: list[np.ndarray[Any, Any]] = []
    reported: list[float] = []
    for limit in (None, 0.25):
        run = train(**options, max_grad_norm=limit)
        moved.append(
            np.concatenate(
                [np.array(run.weights[name] - before[name]).ravel() for name in sorted(before)]
            )
        )
        reported.append(run.reports[0]["grad_norm"])
    norm = np.linalg.norm(moved[0]) / 0.5
    assert norm > 0.5
    assert reported == pytest.approx([norm, norm], rel=1e-5)
    assert np.linalg.norm(moved[1]) / 0.5 == pytest.approx(0.25, rel=1e-4)
    np.testing.assert_allclose(moved[1], moved[0] * 0.25 / norm, atol=1e-6)


def test_training_is_in_training_mode_without_validation_too(
    train: Train, model: Path, tmp_path: Path
) -> None:
    """A model whose answer says in which mode it is: without hidden states every word is as likely."""
    own = write_model(tmp_path / "own", layers=1)
    code = (
        "import mlx.core as mx\nfrom mlx_lm.models import llama\nfrom mlx_lm.models.llama import ModelArgs\n"
        "class Body(llama.LlamaModel):\n    def __call__(self, *args, **options):\n"
        "        return super().__call__(*args, **options) * (0.0 if self.training else 1.0)\n"
        "class Model(llama.Model):\n    def __init__(self, args):\n"
        "        super().__init__(args)\n        self.model = Body(args)\n"
    )
    (own / "own.py").write_text(code)
    config = (own / "config.json").read_text()
    (own / "config.json").write_text(config[:-1] + ', "model_file": "own.py"}')
    run = train(model=str(own), trust_remote_code=True, iters=1)
    assert run.losses == pytest.approx([math.log(259)], abs=1e-5)
    with_validation = train(model=str(own), trust_remote_code=True, iters=1, val_batches=-1)
    assert with_validation.losses == pytest.approx([math.log(259)], abs=1e-5)
    assert with_validation.valid_losses[0] > math.log(259) + 0.01


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "lazy"])
def test_step_as_a_graph_equals_the_eager_one(
    model: Path, train_chats: list[Example], compiled: bool
) -> None:
    """Where steps are compiled (GPU) places are padded with targets of -1; three updates, two
    shapes.
    """
    results: list[tuple[list[float], dict[str, mx.array]]] = []
    for cpu_native in (True, False):
        network: Any = adapted_model(model, scale=2.0)
        prepare_dense(network)
        network.model.norm.unfreeze()
        network.lm_head.unfreeze()
        optimizer = optim.Adam(1e-3, eps=1e-6)
        step = make_step(
            network,
            optimizer,
            SingleProcess(),
            StepOptions(cpu_native=cpu_native, compiled=compiled, rules=Rules(max_grad_norm=1.0)),
        )
        batches = [_micro_batch(part) for part in (train_chats[:3], train_chats[3:])]
        if not cpu_native:
            batches = [pad_targets(batch) for batch in batches]
            assert all((batch.targets < 0).any() for batch in batches)
        sums = [step(batches) for _ in range(3)]
        assert {s.num_targets for s in sums} == {sum(sum(mask) for _, mask in train_chats)}
        results.append(
            (
                [s.loss_sum / s.num_targets for s in sums],
                dict(tree_flatten(network.trainable_parameters())),
            )
        )
    (eager_losses, eager_weights), (losses, weights) = results
    np.testing.assert_allclose(losses, eager_losses, **SAME_LOSS)
    assert losses[2] < losses[0]
    assert distance(weights, eager_weights) <= SAME_WEIGHTS


def test_compiled_gradient_draws_new_dropout_each_time(
    model: Path, train_chats: list[Example]
) -> None:
    batch = [mx.array(a) for a in _arrays(_micro_batch(train_chats))]
    network: Any = adapted_model(model, scale=2.0, dropout=0.5)
    # Zero at first, so that nothing that is dropped would show.
    network.apply_to_modules(
        lambda _, m: m.update({"lora_b": m.lora_b + 0.05}) if "lora_b" in m else None
    )
    network.train()
    compiled = make_gradient(network, cpu_native=False)
    losses: list[float] = []
    for seed in (1, 2, 1):
        mx.random.seed(seed)
        losses += [compiled(*batch)[0].item() for _ in range(2)]
    assert losses[:2] == losses[4:]
    assert len(set(losses[:4])) == 4


def test_compiled_gradient_follows_the_weights(model: Path, train_chats: list[Example]) -> None:
    """Nothing may be baked in when the function is traced: it is called again with other weights."""
    batch = [mx.array(a) for a in _arrays(_micro_batch(train_chats))]
    network = full_model(model)
    compiled = make_gradient(network, cpu_native=False)
    first = compiled(*batch)[0].item()
    network.update(
        full_model(write_model(model.parent / "other", layers=2, tied=False, seed=9)).parameters()
    )
    second, grads = compiled(*batch)
    loss, expected = make_gradient(network, cpu_native=True)(*batch)
    assert abs(second.item() - first) > 1
    assert second.item() == pytest.approx(loss.item(), rel=1e-5)
    assert distance(dict(tree_flatten(grads)), dict(tree_flatten(expected))) <= 1e-3


def _arrays(batch: MicroBatch) -> tuple[Any, Any, Any]:
    return batch.inputs, batch.positions, batch.targets


def _micro_batch(examples: list[Example]) -> MicroBatch:
    """Every token but the first of each example is trained."""
    width = max(len(ids) for ids, _ in examples) - 1
    inputs = np.zeros((len(examples), width), dtype=np.int32)
    positions: list[int] = []
    targets: list[int] = []
    for row, (ids, _) in enumerate(examples):
        inputs[row, : len(ids) - 1] = ids[:-1]
        positions += range(row * width, row * width + len(ids) - 1)
        targets += ids[1:]
    arrays = [
        np.array(values, dtype=np.int32) for values in (positions, targets, range(len(examples)))
    ]
    return MicroBatch(inputs, arrays[0], arrays[1], len(targets), arrays[2])


# --- optimizers and schedules ---------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[], optim.Optimizer]]] = {
    "adam": ({"optimizer_config": ADAM}, lambda: optim.Adam(1e-3, eps=1e-6)),
    "adamw": (
        {"optimizer_config": {"adamw": {"eps": 1e-6}}, "weight_decay": 0.1},
        lambda: optim.AdamW(1e-3, eps=1e-6, weight_decay=0.1),
    ),
    "sgd": (
        {"learning_rate": 0.1, "optimizer_config": {"sgd": {"momentum": 0.5}}},
        lambda: optim.SGD(0.1, momentum=0.5),
    ),
    "muon": (
        {"optimizer_config": {}, "weight_decay": 0.0},
        lambda: optim.Muon(1e-3, weight_decay=0.0),
    ),
    "adafactor": (
        {"optimizer_config": {}, "learning_rate": 1e-2},
        lambda: optim.Adafactor(1e-2, relative_step=False),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_in_a_plain_loop(
    train: Train, model: Path, train_chats: list[Example], name: str
) -> None:
    flags, optimizer = OPTIMIZERS[name]
    run = train(optimizer=name, fine_tune_type="full", **flags)
    losses, weights = train_plainly(full_model(model), optimizer(), [train_chats] * 6)
    assert run.losses[-1] < run.losses[0] - 0.05
    # Muon computes in bfloat16.
    loose = 400 if name == "muon" else 4
    np.testing.assert_allclose(run.losses, losses, rtol=0, atol=loose * SAME_LOSS["atol"])
    assert distance(run.weights, weights) <= loose * SAME_WEIGHTS


def _rates(run: Run) -> list[float]:
    return [report["learning_rate"] for report in run.reports]


def test_warm_up_and_cosine(train: Train) -> None:
    rates = _rates(train(lr_schedule="cosine", warmup_steps=3, iters=8, learning_rate=2e-3))
    warm = [2e-3 * (k + 1) / 4 for k in range(3)]
    cosine = [2e-3 * 0.5 * (1 + math.cos(math.pi * k / 5)) for k in range(5)]
    np.testing.assert_allclose(rates, warm + cosine, rtol=1e-5)


def test_linear_schedule_counts_updates_not_batches(train: Train) -> None:
    run = train(
        lr_schedule="linear", iters=10, batch_size=2, grad_accumulation_steps=2, steps_per_report=2
    )
    np.testing.assert_allclose(_rates(run), [1e-3 * (1 - k / 5) for k in range(5)], rtol=1e-5)


def test_schedule_of_mlx_lm_with_its_arguments(train: Train) -> None:
    schedule = {
        "name": "cosine_decay",
        "warmup": 2,
        "warmup_init": 1e-4,
        "arguments": [1e-3, 4, 1e-5],
    }
    rates = _rates(train(lr_schedule=schedule))
    warm = [1e-4 + (1e-3 - 1e-4) * k / 2 for k in range(3)]
    cosine = [1e-5 + (1e-3 - 1e-5) * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(3)]
    np.testing.assert_allclose(rates, warm + cosine, rtol=1e-5)


# --- how long, and from where ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "batch_size", "batches"), [(1, 4, 2), (1.5, 4, 3), (0.1, 4, 1), (2, 6, 2)]
)
def test_epochs_are_whole_batches(
    train: Train, epochs: float, batch_size: int, batches: int
) -> None:
    run = train(epochs=epochs, batch_size=batch_size, iters=None)
    assert len(run.losses) == run.ended["step"] == batches


def test_early_stopping_keeps_the_best(train: Train) -> None:
    flags = {
        "iters": 40,
        "val_batches": -1,
        "steps_per_eval": 2,
        "save_every": 2,
        "learning_rate": 2e-2,
    }
    run = train(**flags, early_stopping_patience=2)
    assert run.ended["reason"] == "stopped early"
    assert run.ended["step"] < 40
    steps = [validation["step"] for validation in run.validations]
    best = steps[int(np.argmin(run.valid_losses))]
    assert 0 < best == run.ended["best_step"] == run.ended["step"] - 4
    assert run.ended["best_valid_loss"] == min(run.valid_losses)
    assert run.valid_losses[0] > run.ended["best_valid_loss"] + 0.1
    kept = read_weights(run.directory / "best" / "adapters.safetensors")
    assert distance(kept, read_weights(run.directory / f"{best:07d}_adapters.safetensors")) == 0
    assert distance(kept, run.weights) > 1e-3
    assert (
        distance(
            run.weights,
            read_weights(run.directory / f"{run.ended['step']:07d}_adapters.safetensors"),
        )
        == 0
    )


def test_best_of_an_earlier_run_is_not_mistaken_for_this_ones(train: Train, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"val_batches": -1, "adapter_path": str(tmp_path / "same"), "iters": 3}
    first = train(**flags)
    kept = read_weights(first.directory / "best" / "adapters.safetensors")
    # No validation is better than the one before training.
    second = train(**flags, learning_rate=1e-30)
    assert second.ended["best_step"] == 0
    assert not (second.directory / "best").exists()
    assert distance(read_weights(second.directory / "best.1" / "adapters.safetensors"), kept) == 0


def test_small_improvements_do_not_count(train: Train) -> None:
    flags = {"iters": 6, "val_batches": -1, "steps_per_eval": 1}
    run = train(**flags, early_stopping_patience=3, early_stopping_min_delta=10.0, keep_best=False)
    assert run.valid_losses == sorted(run.valid_losses, reverse=True)
    assert (run.ended["reason"], run.ended["step"]) == ("stopped early", 3)
    assert not (run.directory / "best").exists()


def test_losses_are_those_of_the_written_adapter(train: Train, model: Path, data: Path) -> None:
    """Validation before training, after it, and the test loss, against mlx_lm with numpy's
    cross-entropy.
    """
    run = train(val_batches=-1, test=True, test_batches=-1, mask_prompt=True)
    base, _ = mlx_lm_load(model)
    valid, test = (
        chats(model, data / f"{split}.jsonl", mask_prompt=True) for split in ("valid", "test")
    )
    assert run.valid_losses[0] == pytest.approx(numpy_loss(base, valid), abs=1e-5)
    trained = load_adapters(base, str(run.directory))
    assert run.valid_losses[-1] == pytest.approx(numpy_loss(trained, valid), abs=1e-5)
    assert run.ended["test_loss"] == pytest.approx(numpy_loss(trained, test), abs=1e-5)
    alone = build_config(
        {
            "model": str(model),
            "data": str(data),
            "test": True,
            "mask_prompt": True,
            "adapter_path": str(run.directory),
        }
        | {"lora_parameters": ADAPTERS}
    )
    from allhands.run.session import RunContext, run_finetune

    assert run_finetune(alone, RunContext()).ended.test_loss == pytest.approx(
        run.ended["test_loss"], abs=1e-6
    )


def test_resuming_starts_from_those_weights(
    train: Train, model: Path, train_chats: list[Example]
) -> None:
    first = train(iters=3)
    second = train(
        iters=1,
        resume_adapter_file=str(first.directory / "adapters.safetensors"),
        learning_rate=1e-30,
    )
    assert distance(first.weights, second.weights) == 0
    base, _ = mlx_lm_load(model)
    assert second.losses == pytest.approx(
        [numpy_loss(load_adapters(base, str(first.directory)), train_chats)], abs=1e-5
    )
    # SGD has no memory of its own: three updates and then three more are six.
    sgd = {"optimizer": "sgd", "learning_rate": 0.1, "optimizer_config": {}}
    half = train(iters=3, **sgd)
    resumed = train(
        iters=3, **sgd, resume_adapter_file=str(half.directory / "0000003_adapters.safetensors")
    )
    assert distance(train(iters=6, **sgd).weights, resumed.weights) <= SAME_WEIGHTS


def test_dropout_is_for_training_only_and_drawn_from_the_seed(train: Train) -> None:
    options = {"val_batches": -1, "iters": 4, "learning_rate": 1e-2}
    without = train(**options)
    one, same, other = (
        train(**options, lora_parameters=ADAPTERS | {"dropout": 0.5}, seed=seed)
        for seed in (0, 0, 1)
    )
    assert one.losses == same.losses
    assert distance(one.weights, same.weights) == 0
    assert one.valid_losses[0] == without.valid_losses[0]
    # The adapter is zero at first, whatever is dropped.
    assert one.losses[0] == without.losses[0]
    assert abs(one.losses[-1] - without.losses[-1]) > 1e-4
    assert other.losses != one.losses
    assert one.losses[-1] < one.losses[0] - 0.1
