"""The check before the first step: what is right passes and is remembered, what is wrong is
refused.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import allhands

# isort: split
import mlx.core as mx
import mlx.nn as nn
import pytest
from command_line import call_allhands
from mlx.utils import tree_flatten
from tiny import write_chat_data, write_model, write_tokenizer

from allhands.config.schema import TrainConfig
from allhands.errors import ModelError
from allhands.kernels import known
from allhands.kernels.selection import KernelSelection
from allhands.model.adapters import make_trainable
from allhands.model.dropout import dropout_keys_of
from allhands.model.passes import apply_passes
from allhands.run import gradient_cost
from allhands.run.gradient_check import GradientCheck, GradientVerdict
from allhands.run.preparing import pass_context
from allhands.runtime.accelerator import detect

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 259,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLHANDS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gradient-checks"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One more number for each check that is made."""
    made = list[int]()
    init = GradientCheck.__init__

    def counting(self: GradientCheck, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        init(self, *args, **kwargs)

    monkeypatch.setattr(GradientCheck, "__init__", counting)
    return made


def build(kind: str, **more: Any) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict({**SIZES, **more, "model_type": kind}))
    # As in a trained model: with the weights of a fresh one, activations differ little from each
    # other.
    model.update_modules({})
    for name, array in tree_flatten(model.parameters()):
        if array.ndim == 2 and "embed" not in name:
            model.load_weights([(name, 3 * array)], strict=False)
    return model


def checked(model: Any, longest: int = 90, **settings: Any) -> GradientVerdict:
    config = TrainConfig.model_validate({"train": True, **settings})
    accelerator = detect()
    make_trainable(model, config)
    check = GradientCheck(model, accelerator, SIZES, longest=longest, largest_token=258)
    apply_passes(model, pass_context(model, config, accelerator, KernelSelection()))
    cpu_native = accelerator.cpu_native and config.compile != "on"
    return check.compare(model, cpu_native=cpu_native, dropout=dropout_keys_of(model))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fine_tune_type": "full"},
        {"fine_tune_type": "dora", "grad_checkpoint": True},
        {"num_layers": 1, "compile": "on"},
        {"fine_tune_type": "full", "num_layers": 2, "grad_checkpoint": True, "compile": "on"},
        {"lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.5}},
    ],
    ids=json.dumps,
)
def test_what_is_right_passes_on_a_short_and_a_long_row(settings: dict[str, Any]) -> None:
    verdict = checked(build("llama"), **settings)
    assert verdict.is_right
    assert [row.tokens for row in verdict.compared] == [16, 90]
    assert all(row.difference < 1e-4 for row in verdict.compared)
    verdict.raise_if_wrong("model")


def test_a_form_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GELU taken for SiLU: of small numbers both are half of them."""
    assert checked(build("gemma", head_dim=16)).is_right
    monkeypatch.setattr(known, "SWIGLU", known.SWIGLU | {"gemma.MLP"})
    verdict = checked(build("gemma", head_dim=16))
    assert not verdict.is_right
    with pytest.raises(ModelError) as caught:
        verdict.raise_if_wrong("model")
    assert caught.value.exit_code == 4


def test_what_only_a_long_row_shows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamic = {
        "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 64,
    }
    assert checked(build("llama", **dynamic), longest=200).is_right
    monkeypatch.setattr(known, "ROTATIONS", known.ROTATIONS | {"rope_utils.DynamicNTKScalingRoPE"})
    monkeypatch.setattr(known, "_ROTATION_ATTRIBUTES", known._ROTATION_ATTRIBUTES | {"factor"})
    verdict = checked(build("llama", **dynamic), longest=200)
    assert [row.is_off for row in verdict.compared] == [False, True]


def test_the_model_and_the_random_state_are_as_they_were() -> None:
    plain, model = build("llama"), build("llama")
    config = TrainConfig.model_validate({"train": True, "lora_parameters": {"dropout": 0.3}})
    for each in (plain, model):
        mx.random.seed(5)
        make_trainable(each, config)
    state, before = bytes(memoryview(mx.random.state[0])), dict(tree_flatten(model.parameters()))
    training = [module.training for module in model.modules()]
    kinds = [type(module) for module in model.modules()]
    GradientCheck(model, detect(), SIZES, longest=40, largest_token=258)
    assert bytes(memoryview(mx.random.state[0])) == state
    assert [module.training for module in model.modules()] == training
    assert [type(module) for module in model.modules()] == kinds
    assert all(
        mx.array_equal(array, before[name]) for name, array in tree_flatten(model.parameters())
    )


def test_fewer_blocks_or_a_shorter_row_where_all_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(gradient_cost._RATES, "cpu", 2e7)
    few = checked(build("llama"), longest=60)
    assert few.is_right
    assert few.compared[-1].blocks < 3
    monkeypatch.setitem(gradient_cost._RATES, "cpu", 1e4)
    short = checked(build("llama"), longest=2000)
    assert short.compared[-1].tokens < 2000
    assert any("2000" in note for note in short.notes)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_in_half_precision_rounding_is_no_error_and_an_error_is_no_rounding(kind: str) -> None:
    """As on a GPU: in the model's own type, whose rounding is measured beside float32."""
    metal = replace(detect(), kind="metal", cpu_native=False)
    model = build(kind, head_dim=16, num_hidden_layers=6)
    model.set_dtype(mx.bfloat16)
    make_trainable(model, TrainConfig.model_validate({"train": True}))
    check = GradientCheck(model, metal, SIZES, longest=60, largest_token=258)
    again = GradientCheck(model, metal, SIZES, longest=60, largest_token=258)
    assert check.compare(model, cpu_native=False, dropout=None).is_right
    kind_of = type(model.layers[0].mlp)
    for layer in model.layers:
        layer.mlp.__class__ = type(
            "Off", (kind_of,), {"__call__": lambda self, x: -kind_of.__call__(self, x)}
        )
    assert not again.compare(model, cpu_native=False, dropout=None).is_right


def half_check(**more: Any) -> tuple[Any, GradientCheck]:
    """A model in half precision as on a GPU, and mlx_lm's part of its check."""
    model = build("llama", **more)
    model.set_dtype(mx.bfloat16)
    if "quantised" in more:
        nn.quantize(model, group_size=32, bits=4)
    make_trainable(
        model, TrainConfig.model_validate({"train": True, "lora_parameters": {"rank": 64}})
    )
    metal = replace(detect(), kind="metal", cpu_native=False)
    return model, GradientCheck(model, metal, SIZES, longest=60, largest_token=258)


@pytest.mark.parametrize("more", [{}, {"quantised": True}], ids=str)
def test_adapters_in_float32_do_not_make_a_model_one_of_float32(more: dict[str, Any]) -> None:
    model, check = half_check(**more)
    verdict = check.compare(model, cpu_native=False, dropout=None)
    assert verdict.is_right
    assert all(row.limit >= 0.15 for row in verdict.compared)


@pytest.mark.parametrize(("wrong", "right"), [(1, True), (2, False), (9, False)])
def test_in_half_precision_one_row_that_differs_may_be_chance(wrong: int, right: bool) -> None:
    """A router that takes another expert; what is wrong is wrong in most rows."""
    model, check = half_check()
    left = [wrong]
    kind = type(model.layers[0].mlp)

    def call(self: Any, x: mx.array) -> mx.array:
        left[0] -= 1
        return (-1 if left[0] >= 0 else 1) * kind.__call__(self, x)

    model.layers[0].mlp.__class__ = type("Flips", (kind,), {"__call__": call})
    assert check.compare(model, cpu_native=False, dropout=None).is_right is right


@pytest.mark.parametrize(("factor", "right"), [(1, True), (-1, False)])
def test_where_mlx_lms_own_is_no_number_float32_is_compared(
    factor: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = importlib.import_module("mlx_lm.models.llama").MLP
    plain = kind.__call__

    def call(self: Any, x: mx.array) -> mx.array:
        return plain(self, x) * (float("nan") if x.dtype == mx.bfloat16 else 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "__call__", call)
        model, check = half_check()
    monkeypatch.setattr(kind, "__call__", lambda self, x: factor * plain(self, x))
    verdict = check.compare(model, cpu_native=False, dropout=None)
    assert verdict.is_right is right
    assert not verdict.is_complete
    assert any("not a number" in note for note in verdict.notes)


def test_a_body_that_counts_on_all_of_its_blocks_is_compared_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 3's looks up its sixth block, whatever it has."""
    monkeypatch.setitem(gradient_cost._RATES, "cpu", 4e7)
    verdict = checked(build("gemma3_text", head_dim=16, num_hidden_layers=6), longest=60)
    assert verdict.is_right
    assert {row.blocks for row in verdict.compared} == {6}


class Fails(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        raise RuntimeError("no such operation here")


def test_what_mlx_lm_cannot_compute_is_said_and_not_refused() -> None:
    model = build("llama")
    model.layers[1].mlp = Fails()
    verdict = checked(model, lora_parameters={"keys": ["self_attn.q_proj"]})
    assert verdict.compared == ()
    assert any("no such operation here" in note for note in verdict.notes)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    model, data = write_model(tmp_path / "model"), write_chat_data(tmp_path / "data")

    def train(**settings: Any) -> Any:
        options = {
            "model": str(model),
            "data": str(data),
            "iters": 1,
            "val_batches": 0,
            "progress": False,
        }
        return allhands.finetune(**{**options, "adapter_path": str(tmp_path / "out"), **settings})

    return train


def test_a_kind_of_step_is_checked_once_unless_asked_for(
    run: Any, counted: list[int], cache: Path
) -> None:
    run()
    run()
    assert (len(counted), len(list(cache.iterdir()))) == (1, 1)
    run(fine_tune_type="full")
    assert (len(counted), len(list(cache.iterdir()))) == (2, 2)
    run(gradient_check="on")
    assert len(counted) == 3
    run(grad_checkpoint=True, gradient_check="off")
    assert (len(counted), len(list(cache.iterdir()))) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [1, 2])
def test_a_check_that_could_not_compare_every_row_is_made_again(
    run: Any, counted: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """Memory may have been short for a moment."""
    usual, calls = GradientCheck.theirs, list[int]()

    def failing(self: GradientCheck, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == fails:
            raise RuntimeError("[malloc] Unable to allocate")
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(GradientCheck, "theirs", failing)
    run()
    assert not cache.exists()
    run()
    run()
    assert (len(counted), len(list(cache.iterdir()))) == (2, 1)


def test_a_training_that_would_be_wrong_is_refused_and_not_remembered(
    run: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from allhands.kernels import native

    right = native.swiglu
    monkeypatch.setattr(native, "swiglu", lambda gate, up: 1.1 * right(gate, up))
    for _ in range(2):
        with pytest.raises(ModelError):
            run()
    assert not cache.exists()
    run(gradient_check="off")


def test_a_check_changes_no_bit_of_a_training(run: Any, tmp_path: Path) -> None:
    settings = {"lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.2}, "iters": 3}
    run(**settings, gradient_check="off")
    without = (tmp_path / "out" / "adapters.safetensors").read_bytes()
    run(**settings, gradient_check="on")
    assert (tmp_path / "out" / "adapters.safetensors").read_bytes() == without


def test_model_check_prints_what_it_compared(tmp_path: Path) -> None:
    model, data = write_model(tmp_path / "model"), write_chat_data(tmp_path / "data")
    found = call_allhands(
        "model", "check", model, "--data", data, "--fine-tune-type", "full", "--grad-checkpoint"
    )
    assert (found.returncode, found.stderr) == (0, "")
    rows = [line.split() for line in found.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert next(row[0] for row in rows) == "16"
    assert all(float(row[4]) < 1e-4 for row in rows)


def test_the_model_is_named_in_either_way_and_once(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert call_allhands("model", "check", "--model", model).returncode == 0
    assert (
        call_allhands("model", "get", "--model", model, "--out", tmp_path / "other").returncode == 0
    )
    assert (tmp_path / "other" / "model.safetensors").exists()
    for words in ([], [model, "--model", model]):
        done = call_allhands("model", "check", *words)
        assert (done.returncode, done.stderr.count("error: MODEL: ")) == (2, 1)


def test_model_check_fails_where_a_step_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    model = build("gemma", head_dim=16)
    directory.mkdir()
    mx.save_safetensors(
        str(directory / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (directory / "config.json").write_text(
        json.dumps({**SIZES, "head_dim": 16, "model_type": "gemma"})
    )
    write_tokenizer(directory)
    asked = ("model", "check", directory, "--max-seq-length", "40")
    assert call_allhands(*asked).returncode == 0
    monkeypatch.setattr(known, "SWIGLU", known.SWIGLU | {"gemma.MLP"})
    assert call_allhands(*asked).returncode == 4
