"""Adapters to and from PEFT's form: by PEFT's own formulas in NumPy, and there and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from command_line import call_allhands
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load
from tiny import run_allhands, write_adapter, write_model

from allhands.errors import ModelError
from allhands.infer.generate import load_for_generation
from allhands.io.trees import flatten
from allhands.model.hf_names import ARCHITECTURES
from allhands.model.load import load_model
from allhands.model.peft import Adapter, to_peft
from allhands.model.peft_base import PeftBase
from allhands.model.peft_import import from_peft

LAYERS = 3
ALL = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("peft") / "model", layers=LAYERS, hidden=32)


def adapted(
    path: Path, *, num_layers: int = LAYERS, keys: tuple[str, ...] = ALL, dora: bool = False
) -> Any:
    """A model with adapters that do something."""
    model, *_ = load(str(path))
    model.freeze()
    mx.random.seed(5)
    settings = {"rank": 4, "scale": 2.5, "dropout": 0.0, "keys": list(keys)}
    linear_to_lora_layers(model, num_layers, settings, use_dora=dora)
    model.load_weights(
        [
            (n, mx.random.normal(v.shape) * 0.2 + (n.endswith(".m") * 1.0))
            for n, v in flatten(model.trainable_parameters())
        ],
        strict=False,
    )
    return model


def adapter_of(
    model: Any, *, num_layers: int = LAYERS, keys: tuple[str, ...] = ALL, dora: bool = False
) -> Adapter:
    config = {
        "fine_tune_type": "dora" if dora else "lora",
        "num_layers": num_layers,
        "lora_parameters": {"rank": 4, "scale": 2.5, "dropout": 0.1, "keys": list(keys)},
    }
    return Adapter(dict(flatten(model.trainable_parameters())), config)


def below(
    *names: str, shape: tuple[int, int] = (5, 6), kind: str = "llama", **how: Any
) -> PeftBase:
    """A model with layers of these names, all of one shape."""
    return PeftBase("b", kind, ARCHITECTURES[kind], dict.fromkeys(names, shape), **how)


def exported(path: Path, **how: Any) -> tuple[Any, Adapter]:
    model = adapted(path, **how)
    return model, to_peft(adapter_of(model, **how), PeftBase.of(load_model(str(path)), "org/base"))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_update_is_what_peft_computes(model_path: Path, dora: bool) -> None:
    """``W x + lora_alpha / r * B A x``; for DoRA its rows brought to the magnitudes."""
    model, made = exported(model_path, dora=dora)
    name = "model.layers.1.self_attn.q_proj"
    tensors = {
        key: np.array(value, dtype=np.float64) for key, value in made.weights.items() if name in key
    }
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert (a.shape[0], b.shape[1]) == (4, 4)
    layer = dict(model.named_modules())[name]
    weight = np.array(layer.linear.weight, dtype=np.float64)
    whole = weight + made.config["lora_alpha"] / made.config["r"] * b @ a
    if dora:
        magnitudes = tensors[f"base_model.model.{name}.lora_magnitude_vector"]
        whole *= (magnitudes / np.linalg.norm(whole, axis=1))[:, None]
    x = mx.random.normal((7, 32))
    np.testing.assert_allclose(
        np.array(layer(x)), np.array(x, dtype=np.float64) @ whole.T, rtol=2e-4, atol=2e-5
    )
    assert made.config["use_dora"] == dora
    assert (made.config["peft_type"], made.config["base_model_name_or_path"]) == (
        "LORA",
        "org/base",
    )
    assert (made.config["r"], made.config["lora_alpha"], made.config["lora_dropout"]) == (
        4,
        10,
        0.1,
    )


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("num_layers", [1, 2, LAYERS])
def test_there_and_back_are_the_same_bits(model_path: Path, num_layers: int, dora: bool) -> None:
    how: dict[str, Any] = {"num_layers": num_layers, "dora": dora}
    model, made = exported(model_path, **how)
    again = from_peft(made, PeftBase.of(load_model(str(model_path)), "b"), num_layers=LAYERS)
    before = adapter_of(model, **how)
    assert again.weights.keys() == before.weights.keys()
    assert all(mx.array_equal(again.weights[name], value) for name, value in before.weights.items())
    settings = before.config["lora_parameters"]
    assert again.config == {
        **before.config,
        "lora_parameters": {**settings, "keys": sorted(settings["keys"])},
    }


@pytest.mark.parametrize(
    ("how", "targets", "layers"),
    [
        ({}, ["down_proj", "q_proj", "v_proj"], None),
        ({"num_layers": 2}, ["down_proj", "q_proj", "v_proj"], [1, 2]),
        ({"num_layers": 1, "keys": ("mlp.up_proj",)}, ["up_proj"], [2]),
    ],
)
def test_modules_are_named_as_people_do(
    model_path: Path, how: dict[str, Any], targets: list[str], layers: list[int] | None
) -> None:
    config = exported(model_path, **how)[1].config
    assert (config["target_modules"], config["layers_to_transform"]) == (targets, layers)
    assert config["layers_pattern"] == (None if layers is None else "layers")


def test_modules_are_named_in_full_where_short_names_mean_more(model_path: Path) -> None:
    model = adapted(model_path)
    weights = {
        name: value
        for name, value in adapter_of(model).weights.items()
        if "layers.0.self_attn.q" in name or "layers.2.mlp" in name
    }
    made = to_peft(
        Adapter(weights, adapter_of(model).config), PeftBase.of(load_model(str(model_path)), "b")
    )
    assert made.config["target_modules"] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.2.mlp.down_proj",
    ]
    assert made.config["layers_to_transform"] is None


def tensors(
    module: str, rank: int, seed: int = 0, prefix: str = "base_model.model."
) -> dict[str, mx.array]:
    mx.random.seed(seed)
    return {
        f"{prefix}{module}.lora_A.weight": mx.random.normal((rank, 6)),
        f"{prefix}{module}.lora_B.weight": mx.random.normal((5, rank)),
    }


PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "lora_dropout": 0.05}


def update_of(adapter: Adapter, module: str) -> np.ndarray[Any, Any]:
    """(out, in) that is added to the weight."""
    a, b = (np.array(adapter.weights[f"{module}.lora_{part}"], dtype=np.float64) for part in "ab")
    return adapter.config["lora_parameters"]["scale"] * (a @ b).T


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_of_their_own(rslora: bool) -> None:
    """mlx_lm has one of each; the updates are the same."""
    first, second, third = (f"model.layers.{i}.self_attn.q_proj" for i in (3, 4, 10))
    weights = {**tensors(first, 4), **tensors(second, 2, 1), **tensors(third, 4, 2, "")}
    config = {
        **PLAIN,
        "use_rslora": rslora,
        "rank_pattern": {second: 2},
        "alpha_pattern": {"4.self_attn.q_proj": 3},
    }
    made = from_peft(Adapter(weights, config), below(first, second, third), num_layers=12)
    settings = made.config["lora_parameters"]
    assert settings == {
        "rank": 4,
        "scale": 4.0 if rslora else 2.0,
        "dropout": 0.05,
        "keys": ["self_attn.q_proj"],
    }
    assert made.config["num_layers"] == 9  # the fourth and all after it
    for module, rank, alpha in ((first, 4, 8), (second, 2, 3), (third, 4, 8)):
        found = {
            key.removeprefix("base_model.model."): np.array(value, dtype=np.float64)
            for key, value in weights.items()
        }
        a, b = (found[f"{module}.lora_{part}.weight"] for part in "AB")
        expected = alpha / (rank**0.5 if rslora else rank) * b @ a
        np.testing.assert_allclose(update_of(made, module), expected, rtol=1e-5, atol=1e-6)
        assert made.weights[f"{module}.lora_a"].shape == (6, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"r": 8},
        {"rank_pattern": {"4.self_attn.q_proj": 2}},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": True},
    ],
    ids=str,
)
def test_a_description_that_contradicts_the_weights_is_refused(wrong: dict[str, Any]) -> None:
    module = "model.layers.4.self_attn.q_proj"
    assert from_peft(Adapter(tensors(module, 4), PLAIN), below(module), num_layers=5).weights
    with pytest.raises(ModelError) as told:
        from_peft(Adapter(tensors(module, 4), {**PLAIN, **wrong}), below(module), num_layers=5)
    assert told.value.where == "adapter_config.json"


def test_what_stands_outside_of_the_blocks_is_named_in_full() -> None:
    embedding = {
        "base_model.model.model.embed_tokens.lora_embedding_A": mx.ones((4, 20)),
        "base_model.model.model.embed_tokens.lora_embedding_B": mx.ones((6, 4)),
    }
    base = PeftBase(
        "b",
        "llama",
        ARCHITECTURES["llama"],
        {"lm_head": (5, 6), "model.embed_tokens": (20, 6), "x.y": (1, 1)},
        embeddings=["model.embed_tokens"],
    )
    made = from_peft(Adapter({**tensors("lm_head", 4), **embedding}, PLAIN), base, num_layers=7)
    assert made.config["lora_parameters"]["keys"] == ["lm_head", "model.embed_tokens"]
    assert made.weights["model.embed_tokens.lora_a"].shape == (20, 4)
    assert made.config["num_layers"] == 1
    back = to_peft(made, base)
    assert all(mx.array_equal(back.weights[name], value) for name, value in embedding.items())


@pytest.mark.parametrize("middle", ["", ".default"])
def test_names_of_several_versions(middle: str) -> None:
    weights = {
        name.replace(".weight", f"{middle}.weight"): value
        for name, value in tensors("a.layers.0.q", 4).items()
    }
    weights[f"base_model.model.a.layers.0.q.lora_magnitude_vector{middle}.weight"] = mx.ones((5, 1))
    made = from_peft(
        Adapter(weights, {**PLAIN, "use_dora": True}), below("a.layers.0.q"), num_layers=1
    )
    assert {name: value.shape for name, value in made.weights.items()} == {
        "a.layers.0.q.lora_a": (6, 4),
        "a.layers.0.q.lora_b": (4, 5),
        "a.layers.0.q.m": (5,),
    }
    assert made.config["fine_tune_type"] == "dora"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"use_bdlora": {"a": 1}}, "use_bdlora"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"bias": "all"}, "biases"),
        ({"use_dora": True}, "contradict"),
        ({"trainable_token_indices": [3]}, "tokens"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_peft(
            Adapter(tensors("model.layers.0.q", 4), {**PLAIN, **changes}),
            below("model.layers.0.q"),
            num_layers=2,
        )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "no adapter"),
        ({"base_model.model.x.lora_A.weight": mx.ones((4, 6))}, "no lora_B"),
        ({"base_model.model.x.weight": mx.ones((4, 6))}, "not a part"),
        (
            {"m.x.lora_A.weight": mx.ones((4, 6)), "m.x.lora_B.weight": mx.ones((5, 3))},
            r"\(4, 6\) and \(5, 3\)",
        ),
    ],
)
def test_damaged_adapters_are_refused(weights: dict[str, mx.array], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_peft(Adapter(weights, PLAIN), below("x"), num_layers=2)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_what_changes_nothing_is_read(start: Any) -> None:
    """Settings for training, and the layout of the model's own weights, which the factors do not
    share.
    """
    config = {
        **PLAIN,
        "init_lora_weights": start,
        "fan_in_fan_out": True,
        "megatron_core": "megatron.core",
    }
    config |= {"runtime_config": {"ephemeral_gpu_offload": False}, "target_modules": "all-linear"}
    made = from_peft(
        Adapter(tensors("a.layers.0.q", 4), config), below("a.layers.0.q"), num_layers=1
    )
    assert made.weights["a.layers.0.q.lora_a"].shape == (6, 4)


def test_what_peft_cannot_hold_is_refused() -> None:
    config = {"fine_tune_type": "full", "lora_parameters": None}
    with pytest.raises(ModelError) as caught:
        to_peft(Adapter({"x.weight": mx.ones((2, 2))}, config), below("x"))
    assert caught.value.code == "adapter-is-full-weights"
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 1.0}}
    experts = {"m.switch.lora_a": mx.ones((4, 2, 6)), "m.switch.lora_b": mx.ones((4, 5, 2))}
    with pytest.raises(ModelError, match="experts of llama"):
        to_peft(Adapter(experts, config), below("m.switch", experts={"m.switch": 4}))
    dora = {"e.lora_a": mx.ones((5, 2)), "e.lora_b": mx.ones((2, 6)), "e.m": mx.ones(5)}
    with pytest.raises(ModelError, match="magnitude"):
        to_peft(Adapter(dora, {**config, "fine_tune_type": "dora"}), below("e", embeddings=["e"]))


# --- the commands ---------------------------------------------------------------------------------


def saved(model: Any, path: Path, base: Path, directory: Path, **how: Any) -> Path:
    directory.mkdir()
    adapter = adapter_of(model, **how)
    mx.save_safetensors(str(directory / "adapters.safetensors"), adapter.weights)
    (directory / "adapter_config.json").write_text(
        json.dumps({**adapter.config, "model": str(base)})
    )
    return directory


def logits(path: Path, adapter: Path) -> np.ndarray[Any, Any]:
    loaded: Any = load_for_generation(str(path), adapter)
    return np.array(loaded.model(mx.arange(20)[None]))


def test_export_and_import_by_hand(model_path: Path, tmp_path: Path) -> None:
    mine = saved(
        adapted(model_path, num_layers=2), model_path, model_path, tmp_path / "mine", num_layers=2
    )
    done = call_allhands(
        "export",
        "--adapter-path",
        mine,
        "--to",
        "peft",
        "--out",
        tmp_path / "peft",
        "--base",
        "org/name",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 4, lora_alpha 10, 6 layers" in done.stdout
    assert 'AutoModelForCausalLM.from_pretrained("org/name")' in done.stdout
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["layers_to_transform"]) == (
        "org/name",
        [1, 2],
    )
    again = call_allhands(
        "export", "--adapter-path", mine, "--to", "peft", "--out", tmp_path / "peft"
    )
    assert again.returncode == 2
    assert "--force" in again.stderr
    back = ["import", tmp_path / "peft", "--from", "peft", "--out", tmp_path / "back"]
    done = run_allhands(*back, "--model", model_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 4, scale 2.5, 6 layers" in done.stdout
    assert np.array_equal(logits(model_path, tmp_path / "back"), logits(model_path, mine))
    assert not np.allclose(
        logits(model_path, mine), np.array(load(str(model_path))[0](mx.arange(20)[None])), atol=1e-3
    )


def test_wrong_input_is_one_message_and_nothing_is_written(
    model_path: Path, tmp_path: Path
) -> None:
    mine = saved(adapted(model_path), model_path, model_path, tmp_path / "mine")
    small = write_model(tmp_path / "small", layers=1, hidden=16)
    peft, out = tmp_path / "peft", tmp_path / "out"
    assert (
        call_allhands("export", "--adapter-path", mine, "--to", "peft", "--out", peft).returncode
        == 0
    )
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_model.bin").write_bytes(b"x")
    whole = write_adapter(model_path, tmp_path / "whole", "full")
    strange = tmp_path / "strange"
    shutil.copytree(peft, strange)
    config = json.loads((peft / "adapter_config.json").read_text())
    (strange / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": None}))
    cases: list[tuple[list[Any], int, str]] = [
        (
            ["export", "--adapter-path", mine, "--to", "peft", "--out", out, "--model", small],
            4,
            "has no layer model.layers.",
        ),
        (
            ["export", "--adapter-path", tmp_path / "none", "--to", "peft", "--out", out],
            4,
            "there is no such directory",
        ),
        (
            ["export", "--adapter-path", mine, "--to", "peft", "--out", small, "--force"],
            2,
            "is there already",
        ),
        (
            ["import", peft, "--from", "peft", "--out", out, "--model", small],
            4,
            f"{peft}: the adapter does not fit",
        ),
        (
            ["import", mine, "--from", "peft", "--out", out],
            4,
            "adapter_model.safetensors is missing",
        ),
        (
            ["generate", "--model", model_path, "--adapter-path", peft, "--prompt", "x"],
            4,
            f"allhands import {peft}",
        ),
        (
            ["eval", "--model", model_path, "--adapter-path", peft, "--data", "demo"],
            4,
            f"allhands import {peft}",
        ),
        (["import", pickled, "--from", "peft", "--out", out], 4, "pickle"),
        (
            ["export", "--adapter-path", whole, "--to", "peft", "--out", out],
            4,
            "fine_tune_type full",
        ),
        (
            ["import", strange, "--from", "peft", "--out", out, "--model", small],
            4,
            f"{strange}/adapter_config.json",
        ),
    ]
    for arguments, code, message in cases:
        done = call_allhands(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), (
            arguments,
            done.stderr,
        )
        assert message in done.stderr
        assert "partial" not in done.stderr
        assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine",
        "peft",
        "pickled",
        "small",
        "strange",
        "whole",
    ]
