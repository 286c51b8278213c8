"""Fused models against model and adapter, and against what mlx_lm.fuse makes of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from command_line import call_allhands
from mlx_lm import fuse as mlx_fuse
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load
from tiny import write_adapter, write_model

IDS = mx.arange(3, 40)[None]


def logits(path: Path, adapter: Path | None = None) -> np.ndarray[Any, Any]:
    """By mlx_lm alone."""
    model: Any
    model, *_ = load(str(path))
    if adapter is not None:
        load_adapters(model, str(adapter))
        model.eval()
    return np.array(model(IDS).astype(mx.float32))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("fuse") / "model", layers=3, hidden=64)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantised to eight bits, where a second rounding is small beside an adapter."""
    return write_model(tmp_path_factory.mktemp("fuse") / "packed", layers=3, hidden=64, bits=8)


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_the_fused_model_is_the_model_with_its_adapter(
    base: Path, tmp_path: Path, kind: str
) -> None:
    adapter = write_adapter(base, tmp_path / "run", kind)
    done = call_allhands("fuse", "--adapter-path", adapter, "--save-path", tmp_path / "fused")
    assert done.returncode == 0, done.stderr
    wanted = logits(base, adapter)
    assert np.abs(wanted - logits(base)).max() > 0.1
    np.testing.assert_allclose(logits(tmp_path / "fused"), wanted, atol=2e-5)
    assert "checked: its logits differ" in done.stdout
    # As mlx_lm fuses it, and nothing of the adapter is left.
    names = set(mx.load(str(tmp_path / "fused" / "model.safetensors")))
    assert names == set(mx.load(str(base / "model.safetensors")))
    assert (tmp_path / "fused" / "tokenizer.json").read_bytes() == (
        base / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("flag", [None, "--dequantize", "--de-quantize"])
def test_a_quantised_model_is_fused_with_and_without_unpacking(
    packed: Path, tmp_path: Path, kind: str, flag: str | None
) -> None:
    adapter = write_adapter(packed, tmp_path / "run", kind)
    words = [
        "fuse",
        "--adapter-path",
        adapter,
        "--save-path",
        tmp_path / "fused",
        *([flag] if flag else []),
    ]
    done = call_allhands(*words)
    assert done.returncode == 0, done.stderr
    wanted, found = logits(packed, adapter), logits(tmp_path / "fused")
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    if flag:
        # Exactly what model and adapter compute, up to float32.
        np.testing.assert_allclose(found, wanted, atol=5e-5)
        assert "quantization" not in config
        assert "quantization_config" not in config
        assert "again" not in done.stdout
    else:
        # Rounded to eight bits once more: near, but not equal.
        assert 1e-5 < np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std() < 0.02
        assert config["quantization"]["bits"] == 8
        assert "quantised again" in done.stdout


def test_weights_are_those_of_mlx_lms_fuse(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(base, tmp_path / "run")
    theirs = [
        "fuse",
        "--model",
        base,
        "--adapter-path",
        adapter,
        "--save-path",
        tmp_path / "theirs",
    ]
    monkeypatch.setattr(sys, "argv", [str(word) for word in theirs])
    mlx_fuse.main()
    done = call_allhands(
        "fuse", "--model", base, "--adapter-path", adapter, "--save-path", tmp_path / "ours"
    )
    assert done.returncode == 0, done.stderr
    ours = mx.load(str(tmp_path / "ours" / "model.safetensors"))
    for name, value in mx.load(str(tmp_path / "theirs" / "model.safetensors")).items():
        assert mx.array_equal(ours[name], value), name


@pytest.mark.parametrize(("kind", "dtype"), [("dora", "bfloat16"), ("lora", "float16")])
def test_half_precision_stays_half_precision(tmp_path: Path, kind: str, dtype: str) -> None:
    float32 = write_model(tmp_path / "float32", layers=3, hidden=64)
    done = call_allhands("model", "get", float32, "--dtype", dtype, "--out", tmp_path / "half")
    assert done.returncode == 0, done.stderr
    adapter = write_adapter(tmp_path / "half", tmp_path / "run", kind)
    done = call_allhands("fuse", "--adapter-path", adapter, "--save-path", tmp_path / "fused")
    assert done.returncode == 0, done.stderr
    kinds = {
        str(value.dtype)
        for value in mx.load(str(tmp_path / "fused" / "model.safetensors")).values()
    }
    assert kinds == {f"mlx.core.{dtype}"}
    done = call_allhands(
        "fuse", "--adapter-path", adapter, "--save-path", tmp_path / "wide", "--dtype", "float32"
    )
    assert done.returncode == 0, done.stderr
    kinds = {
        str(value.dtype) for value in mx.load(str(tmp_path / "wide" / "model.safetensors")).values()
    }
    assert kinds == {"mlx.core.float32"}


def test_nothing_is_overwritten_unless_asked_and_nothing_but_a_model_ever(
    base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "run")
    words = ["fuse", "--adapter-path", adapter, "--save-path"]
    for out, said in ((adapter, "not a model"), (base, "overlaps the source")):
        done = call_allhands(*words, out, "--force")
        assert done.returncode == 2
        assert said in done.stderr
    assert call_allhands(*words, tmp_path / "fused").returncode == 0
    before = (tmp_path / "fused" / "model.safetensors").read_bytes()
    mx.save_safetensors(
        str(adapter / "adapters.safetensors"),
        {name: value * 2 for name, value in mx.load(str(adapter / "adapters.safetensors")).items()},
    )
    done = call_allhands(*words, tmp_path / "fused")
    assert done.returncode == 2
    assert "add --force" in done.stderr
    assert (tmp_path / "fused" / "model.safetensors").read_bytes() == before
    assert call_allhands(*words, tmp_path / "fused", "--force").returncode == 0
    assert (tmp_path / "fused" / "model.safetensors").read_bytes() != before
    assert not list(tmp_path.glob(".fused*"))


@pytest.mark.parametrize(
    "wrong", ["no model", "other model", "torn", "missing", "upload", "list", "name"]
)
def test_wrong_input_is_one_message_and_leaves_nothing(
    base: Path, tmp_path: Path, wrong: str
) -> None:
    adapter = write_adapter(base, tmp_path / "run")
    words: list[str | Path] = ["fuse", "--adapter-path", adapter, "--save-path", tmp_path / "fused"]
    if wrong == "no model":
        (tmp_path / "empty").mkdir()
        words += ["--model", tmp_path / "empty"]
    elif wrong == "other model":
        words += ["--model", write_model(tmp_path / "wider", hidden=32)]
    elif wrong == "torn":
        (adapter / "adapters.safetensors").write_bytes(b"torn")
    elif wrong == "missing":
        words[2] = tmp_path / "nowhere"
    elif wrong == "list":
        (adapter / "adapter_config.json").write_text("[1]")
    elif wrong == "name":
        words += ["--gguf-path", "mine.gguf"]
    else:
        words += ["--upload-repo", "me/mine"]
    done = call_allhands(*words)
    said = {
        "no model": "no config.json",
        "other model": "does not fit the model",
        "torn": "is torn",
        "missing": "there is no such directory",
        "upload": "allhands upload",
        "list": "it is not an object",
        "name": "--export-gguf",
    }[wrong]
    assert done.returncode in (2, 4)
    assert said in done.stderr
    assert "what to do" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "fused").exists()
    assert not list(tmp_path.glob(".fused*"))


def test_a_fused_model_that_computes_something_else_is_not_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.tuner.lora import LoRALinear

    from allhands.errors import ModelError
    from allhands.export import fusing

    adapter = write_adapter(base, tmp_path / "run")
    # As if mlx_lm's merging forgot the adapter.
    monkeypatch.setattr(LoRALinear, "fuse", lambda module: module["linear"])
    with pytest.raises(ModelError, match="are not those of model and adapter"):
        fusing.fuse_model(fusing.FuseOptions(None, adapter), tmp_path / "fused")
    assert not (tmp_path / "fused").exists()


@pytest.mark.parametrize("times", [1e6, float("nan")])
@pytest.mark.parametrize("verb", ["float16", "gguf"])
def test_what_a_training_has_ruined_is_told_of_the_weights_that_were_named(
    base: Path, tmp_path: Path, verb: str, times: float
) -> None:
    adapter, out = write_adapter(base, tmp_path / "run"), tmp_path / "out"
    file = str(adapter / "adapters.safetensors")
    weights: Any = mx.load(file)
    mx.save_safetensors(file, {name: value * times for name, value in weights.items()})
    how: dict[str, list[Any]] = {
        "float16": ["fuse", "--dtype", "float16", "--save-path", out],
        "gguf": ["export", "--to", "gguf", "--out", out],
    }
    done = call_allhands(*how[verb], "--adapter-path", adapter)
    assert done.returncode == 4, done.stderr
    if times == times:
        assert "bfloat16" in done.stderr, "what can hold them"
    else:
        assert f"error: {adapter}: " in done.stderr
    assert "fused/" not in done.stderr, "no path that is gone"
    assert "report it" not in done.stderr
    assert not out.exists()


def test_a_gguf_of_a_quantised_model_is_refused_before_any_work(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", bits=4)
    adapter = write_adapter(base, tmp_path / "run")
    words = ["fuse", "--adapter-path", adapter, "--save-path", tmp_path / "fused", "--export-gguf"]
    done = call_allhands(*words)
    assert done.returncode == 4
    assert f"{base}: a quantised model cannot be written as GGUF" in done.stderr
    assert "--dequantize" in done.stderr
    assert not (tmp_path / "fused").exists()
    assert call_allhands(*words, "--dequantize").returncode == 0


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ("[1]", "it is not an object"),
        ("{}", "there are no lora_parameters"),
        ('{"lora_parameters": 3, "num_layers": 2}', "there are no lora_parameters"),
        ('{"lora_parameters": {"rank": 4, "scale": 2.5}}', "num_layers is no number"),
        ('{"lora_parameters": {"rank": "a", "scale": 2.5}, "num_layers": 2}', "rank is no number"),
        ('{"lora_parameters": {"rank": 4}, "num_layers": 2}', "scale is no number"),
    ],
)
def test_a_description_that_is_none_is_found_before_a_model_is_loaded(
    base: Path, tmp_path: Path, described: str, said: str
) -> None:
    from allhands.errors import ModelError
    from allhands.run.adapter_files import check_adapter

    adapter = write_adapter(base, tmp_path / "run")
    check_adapter(adapter)
    (adapter / "adapter_config.json").write_text(described)
    with pytest.raises(ModelError, match=said) as caught:
        check_adapter(adapter)
    assert caught.value.where == str(adapter / "adapter_config.json")
