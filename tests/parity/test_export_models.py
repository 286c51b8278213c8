"""Exported models: logits in PyTorch, and GGUF files read back by readers that have not written
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from asked import Asked
from command_line import call_allhands
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load
from tiny import write_adapter, write_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from allhands.errors import ModelError
from allhands.io.trees import flatten
from allhands.model.gguf import convert_gguf, read_gguf
from allhands.model.sources import name_of

SIDE = Path(__file__).parents[1] / "support" / "torch_side.py"
KNOWN = Path.home() / ".cache" / "allhands" / "benchmarks" / "peft-env" / "bin" / "python"
PYTHON = Path(os.environ.get("ALLHANDS_TEST_TORCH") or KNOWN)
needs_torch = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="needs a Python with PyTorch: ALLHANDS_TEST_TORCH, or benchmarks/cpu_lora.py",
)
IDS = mx.arange(3, 40)[None]


def logits(path: Path, adapter: Path | None = None) -> np.ndarray[Any, Any]:
    """By mlx_lm alone."""
    model: Any = load(str(path))[0]
    if adapter is not None:
        load_adapters(model, str(adapter))
        model.eval()
    return np.array(model(IDS).astype(mx.float32))


def export(adapter: Path, to: str, out: Path, *words: str) -> str:
    done = call_allhands("export", "--adapter-path", adapter, "--to", to, "--out", out, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def by_torch() -> Iterator[Asked]:
    with Asked(PYTHON, SIDE) as ask:
        yield ask


# --- transformers ---------------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize(
    ("kind", "bits", "tied", "words"),
    [
        ("lora", None, True, ()),
        ("dora", None, False, ()),
        ("full", None, True, ()),
        ("lora", 4, False, ()),
        ("lora", None, True, ("--dtype", "bfloat16")),
    ],
)
def test_transformers_computes_what_was_trained(
    by_torch: Asked, tmp_path: Path, kind: str, bits: int | None, tied: bool, words: tuple[str, ...]
) -> None:
    base = write_model(tmp_path / "base", layers=3, hidden=64, bits=bits, tied=tied)
    adapter = write_adapter(base, tmp_path / "run", kind)
    export(adapter, "hf", tmp_path / "hf", *words)
    by_torch("logits", tmp_path / "hf", tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as file:
        found = dict(file)
    wanted = logits(base, adapter)
    assert np.abs(wanted - logits(base)).max() > 0.1
    if words:
        assert str(found["dtype"]) == "torch.bfloat16"
        assert np.abs(found["logits"] - wanted).max() < 0.25 * wanted.std()
    else:
        assert str(found["dtype"]) == "torch.float32"
        np.testing.assert_allclose(found["logits"], wanted, atol=1e-4)


def test_an_architecture_with_names_that_are_not_known_is_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps({**config, "model_type": "internlm3", "qkv_bias": False})
    )
    done = call_allhands("export", "--model", base, "--to", "hf", "--out", tmp_path / "hf")
    assert done.returncode == 4
    assert "weights of internlm3 is not known" in done.stderr
    assert "allhands fuse" in done.stderr
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("damage", ["value", "missing", "type"])
def test_a_model_that_is_read_back_otherwise_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """One number in one row that no token of the probe looks up."""
    base = write_model(tmp_path / "base", layers=2)
    save = mx.save_safetensors

    def damaged(file: str, tensors: dict[str, mx.array], *words: Any, **how: Any) -> None:
        tensors, name = dict(tensors), "model.layers.1.mlp.up_proj.weight"
        if damage == "missing":
            del tensors[name]
        elif damage == "type":
            tensors[name] = tensors[name].astype(mx.float16)
        else:
            rows = np.array(tensors["model.embed_tokens.weight"])
            rows[258, 3] = np.nextafter(rows[258, 3], np.float32(9))
            tensors["model.embed_tokens.weight"] = mx.array(rows)
        save(file, tensors, *words, **how)

    monkeypatch.setattr(mx, "save_safetensors", damaged)
    for words in (
        ["export", "--to", "hf", "--out", tmp_path / "out"],
        ["fuse", "--save-path", tmp_path / "out"],
    ):
        if words[0] == "fuse":
            adapter = tmp_path / "run"
            monkeypatch.undo()
            write_adapter(base, adapter)
            monkeypatch.setattr(mx, "save_safetensors", damaged)
            words += ["--adapter-path", adapter]
        done = call_allhands(*words, "--model", base)
        assert done.returncode == 4, done.stderr
        assert not (tmp_path / "out").exists()


# --- GGUF -----------------------------------------------------------------------------------------


def with_words(base: Path) -> Path:
    """Give the model a tokenizer with merges that cuts words as SmolLM's does."""
    plain = Tokenizer.from_file(str(base / "tokenizer.json"))
    vocabulary = {
        name: number for name, number in plain.get_vocab().items() if number not in (0, 1, 2)
    }
    ends = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    # Two bytes that no UTF-8 text has make room for two words.
    spare = sorted(vocabulary.items(), key=lambda item: item[1])[-2:]
    for (name, number), word in zip(spare, ("th", "the"), strict=True):
        del vocabulary[name]
        vocabulary[word] = number
    tokenizer = Tokenizer(BPE(vocab={**vocabulary, **ends}, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(ends))
    tokenizer.save(str(base / "tokenizer.json"))
    return base


@pytest.mark.parametrize("bits", [None, 8])
def test_a_gguf_read_back_computes_and_cuts_texts_as_before(
    tmp_path: Path, bits: int | None
) -> None:
    base = with_words(write_model(tmp_path / "base", layers=3, hidden=64, bits=bits, tied=False))
    adapter = write_adapter(base, tmp_path / "run")
    export(adapter, "gguf", tmp_path / "gguf")
    convert_gguf(tmp_path / "gguf" / "model.gguf", tmp_path / "back")
    # Matrices are float16 there.
    np.testing.assert_allclose(logits(tmp_path / "back"), logits(base, adapter), atol=5e-3)
    before, after = (load(str(path))[1] for path in (base, tmp_path / "back"))
    for text in ("the thing, then 1234", "<|im_start|>user\nÜber<|im_end|>"):
        assert after.encode(text) == before.encode(text)
    assert len(before.encode("the")) == 1
    assert after.chat_template == before.chat_template
    assert (after.eos_token_id, after.bos_token_id) == (before.eos_token_id, before.bos_token_id)


def test_tensors_have_the_names_that_llama_cpp_knows(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    base = write_model(tmp_path / "base", layers=3, hidden=64, tied=False)
    adapter = write_adapter(base, tmp_path / "run")
    said = export(adapter, "gguf", tmp_path / "gguf")
    assert "checked: every weight of model.gguf is that of the model, within rounding" in said
    assert "checked, before it was converted: its logits differ" in said
    reader = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf")
    known = {
        gguf.TENSOR_NAMES[kind].format(bid=layer) + ".weight"
        for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.LLAMA]
        for layer in range(3)
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) <= known
    assert len(tensors) == 3 + 3 * 9
    call_allhands("fuse", "--adapter-path", adapter, "--save-path", tmp_path / "fused")
    fused: Any = mx.load(str(tmp_path / "fused" / "model.safetensors"))
    down = np.array(fused["model.layers.2.mlp.down_proj.weight"])
    np.testing.assert_array_equal(tensors["blk.2.ffn_down.weight"].data, down.astype(np.float16))
    norm = tensors["blk.0.attn_norm.weight"]
    assert norm.tensor_type == gguf.GGMLQuantizationType.F32
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.attention.key_length"] == 16
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == 259
    assert fields["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    kinds = reader.fields["tokenizer.ggml.token_type"].types
    assert kinds == [
        gguf.GGUFValueType.ARRAY,
        gguf.GGUFValueType.INT32,
    ]  # llama.cpp takes no others
    assert fields["llama.context_length"] == 2048
    assert fields["tokenizer.ggml.eos_token_id"] == 2


@pytest.mark.parametrize("damage", ["value", "missing", "order"])
def test_a_gguf_file_that_is_not_the_model_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    from allhands.export.fusing import FuseOptions
    from allhands.export.ollama import export_gguf

    base = write_model(tmp_path / "base", layers=2)
    save = mx.save_gguf

    def damaged(file: str, tensors: dict[str, mx.array], metadata: dict[str, Any]) -> None:
        tensors, name = dict(tensors), "blk.1.attn_q.weight"
        if damage == "missing":
            del tensors[name]
        elif damage == "order":
            tensors[name] = tensors[name][::-1]
        else:
            rows = np.array(tensors[name])
            rows[3, 5] += 0.01
            tensors[name] = mx.array(rows)
        save(file, tensors, metadata)

    monkeypatch.setattr(mx, "save_gguf", damaged)
    with pytest.raises(ModelError, match=r"not kept: model\.layers\.1\.self_attn\.q_proj\.weight"):
        export_gguf(FuseOptions(str(base), None), tmp_path / "out", modelled=False)
    assert not (tmp_path / "out").exists()


def test_experts_are_named_as_llama_cpp_names_them(tmp_path: Path) -> None:
    from mlx_lm.models.mixtral import Model, ModelArgs

    from allhands.export.gguf import write_gguf

    base = write_model(tmp_path / "base")
    config = {**json.loads((base / "config.json").read_text()), "model_type": "mixtral"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    (base / "config.json").write_text(json.dumps(config))
    model = Model(ModelArgs.from_dict(config))
    weights = dict(flatten(model.parameters()))
    mx.save_safetensors(str(base / "model.safetensors"), weights)
    write_gguf(base, tmp_path / "model.gguf")
    tensors, metadata = read_gguf(tmp_path / "model.gguf")
    assert metadata["llama.expert_count"] == 4
    up = weights["model.layers.1.block_sparse_moe.switch_mlp.up_proj.weight"]
    assert mx.array_equal(tensors["blk.1.ffn_up_exps.weight"], up.astype(mx.float16))
    assert tensors["blk.1.ffn_gate_inp.weight"].dtype == mx.float32
    assert not [name for name in tensors if "mlp" in name or "moe" in name]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen2"}, "its architecture is qwen2"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled (llama3)"),
        ({"attention_bias": True}, "its layers have biases"),
    ],
)
@pytest.mark.parametrize("to", ["gguf", "ollama"])
def test_what_gguf_cannot_hold_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str, to: str
) -> None:
    base = write_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **change}))
    done = call_allhands("export", "--model", base, "--to", to, "--out", tmp_path / "out")
    assert done.returncode == 4
    assert said in done.stderr
    assert "export --to hf" in done.stderr
    assert not (tmp_path / "out").exists()


def test_fuse_writes_the_gguf_too_and_an_export_is_not_written_over(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "run")
    words = ["fuse", "--adapter-path", adapter, "--save-path", tmp_path / "fused", "--export-gguf"]
    done = call_allhands(*words)
    assert done.returncode == 0
    assert "checked: every weight of ggml-model-f16.gguf is that of the model" in done.stdout
    export(adapter, "gguf", tmp_path / "gguf")
    file = tmp_path / "gguf" / "model.gguf"
    assert (tmp_path / "fused" / "ggml-model-f16.gguf").read_bytes() == file.read_bytes()
    done = call_allhands(
        "export", "--adapter-path", adapter, "--to", "gguf", "--out", tmp_path / "gguf"
    )
    assert done.returncode == 2
    assert "--force" in done.stderr
    export(adapter, "gguf", tmp_path / "gguf", "--force")
    done = call_allhands(
        "export", "--adapter-path", adapter, "--to", "gguf", "--out", adapter, "--force"
    )
    assert done.returncode == 2
    assert (adapter / "adapters.safetensors").exists()


def named(file: Path) -> str:
    """The name of a model as the ``gguf`` package reads it."""
    from gguf import GGUFReader

    field = GGUFReader(str(file)).fields["general.name"]
    return bytes(field.parts[field.data[0]]).decode()


def test_a_gguf_has_the_models_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_model(tmp_path / "Tea-Llama-1B")
    adapter = write_adapter(base, tmp_path / "run")
    done = call_allhands("export", "--to", "gguf", "--model", base, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    done = call_allhands(
        "export", "--to", "ollama", "--adapter-path", adapter, "--out", tmp_path / "two"
    )
    assert done.returncode == 0, done.stderr
    words = ("fuse", "--adapter-path", adapter, "--save-path", tmp_path / "three", "--export-gguf")
    assert call_allhands(*words).returncode == 0
    files = (
        tmp_path / "one/model.gguf",
        tmp_path / "two/model.gguf",
        tmp_path / "three/ggml-model-f16.gguf",
    )
    assert [named(file) for file in files] == ["Tea-Llama-1B"] * 3


def test_what_models_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--owner--Tea--Llama" / "snapshots" / ("0" * 40)
    for made in (snapshot, tmp_path / "mine" / "model", tmp_path / "models" / "model"):
        made.mkdir(parents=True)
    (tmp_path / "mine" / "metrics.jsonl").touch()
    assert name_of("owner/Tea-Llama") == "Tea-Llama"
    assert name_of("demo") == "SmolLM2-135M-Instruct"
    assert name_of(str(snapshot)) == "Tea--Llama"
    assert name_of(str(tmp_path / "mine" / "model")) == "mine"
    assert name_of(str(tmp_path / "models" / "model")) == "model"
    monkeypatch.chdir(tmp_path / "mine")
    assert name_of(".") == "mine"
    assert name_of("../models/") == "models"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_every_export_has_the_modes_of_the_umask(tmp_path: Path, umask: int) -> None:
    """Also what is copied from a run, or from a model that is its owner's alone."""
    base = write_model(tmp_path / "base")
    run = write_adapter(base, tmp_path / "run")
    (run / "chat_template.jinja").write_bytes((base / "chat_template.jinja").read_bytes())
    for directory in (base, run):
        for file in directory.iterdir():
            file.chmod(0o600)
        directory.chmod(0o700)
    before = os.umask(umask)
    try:
        for to in ("peft", "hf", "gguf", "ollama"):
            done = call_allhands(
                "export", "--adapter-path", run, "--to", to, "--out", tmp_path / "out" / to
            )
            assert done.returncode == 0, done.stderr
        done = call_allhands(
            "fuse", "--adapter-path", run, "--save-path", tmp_path / "out" / "fused"
        )
        assert done.returncode == 0, done.stderr
    finally:
        os.umask(before)
    for path in (tmp_path / "out").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path
