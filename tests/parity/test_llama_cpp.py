"""Exported GGUF files in llama.cpp itself: it cuts texts as the model's tokenizer does, and
computes MLX's logits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from command_line import call_allhands
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load
from test_export_models import with_words
from tiny import write_adapter, write_model
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from allhands.io.trees import flatten

SIDE = Path(__file__).parents[1] / "support" / "llama_side.py"
PYTHON = os.environ.get("ALLHANDS_TEST_LLAMA") or (
    sys.executable if find_spec("llama_cpp") else None
)
pytestmark = pytest.mark.skipif(
    PYTHON is None,
    reason="needs llama-cpp-python, here or in the Python that ALLHANDS_TEST_LLAMA names",
)
TEXTS = [
    "the thing, then 1234 don't",
    "<|im_start|>user\nÜber allen<|im_end|>\n<|im_start|>assistant\n",
    "  two  spaces\n\n\tand 日本 🙂",
]


def assert_same(gguf: Path, base: Path, adapter: Path | None, temporary: Path) -> None:
    """llama.cpp's tokens and logits of all texts are those of ``mlx_lm``, which does not compute in
    float16.
    """
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, SIDE, gguf, temporary / "found.npz"],
        input=json.dumps(TEXTS), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(temporary / "found.npz") as file:
        found = dict(file)
    model: Any
    model, tokenizer, *_ = load(str(base))
    if adapter is not None:
        load_adapters(model, str(adapter))
    model.eval()
    for number, text in enumerate(TEXTS):
        tokens = tokenizer.encode(text)
        assert found[f"tokens-{number}"].tolist() == tokens, text
        wanted = np.array(model(mx.array([tokens])).astype(mx.float32))[0]
        off = np.abs(found[f"logits-{number}"] - wanted) / wanted.std()
        assert np.sqrt(np.mean(off**2)) < 5e-3
        assert off.max() < 0.05


@pytest.mark.parametrize(
    ("kind", "bits", "tied"),
    [("lora", None, True), ("dora", None, False), ("full", None, True), ("lora", 4, False)],
)
def test_llama_cpp_computes_what_was_trained(
    tmp_path: Path, kind: str, bits: int | None, tied: bool
) -> None:
    base = with_words(write_model(tmp_path / "base", layers=3, hidden=64, bits=bits, tied=tied))
    adapter = write_adapter(base, tmp_path / "run", kind)
    done = call_allhands(
        "export", "--adapter-path", adapter, "--to", "gguf", "--out", tmp_path / "gguf"
    )
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "gguf" / "model.gguf", base, adapter, tmp_path)


def exported(base: Path, out: Path, **change: Any) -> Path:
    """The model, with another config, as GGUF."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **change}))
    done = call_allhands("export", "--model", base, "--to", "gguf", "--out", out)
    assert done.returncode == 0, done.stderr
    return out / "model.gguf"


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_a_linearly_scaled_rotation_stays_scaled(tmp_path: Path, key: str) -> None:
    base = write_model(tmp_path / "base", layers=2, hidden=64)
    gguf = exported(
        base,
        tmp_path / "gguf",
        rope_scaling={key: "linear", "factor": 4.0},
        max_position_embeddings=512,
    )
    assert_same(gguf, base, None, tmp_path)


def test_experts_and_texts_cut_as_sentencepiece_does(tmp_path: Path) -> None:
    from mlx_lm.models.mixtral import Model, ModelArgs

    base = write_model(tmp_path / "base")
    config = {**json.loads((base / "config.json").read_text()), "model_type": "mixtral"}
    # All are asked: of two that are nearly alike rounding decides.
    config |= {
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "vocab_size": 300,
        "bos_token_id": 1,
    }
    mx.random.seed(3)
    weights = dict(flatten(Model(ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(base / "model.safetensors"), weights)
    ends = ["<unk>", "<|im_start|>", "<|im_end|>"]
    words = ["▁", *"theandin", "th", "the", "▁the", "an", "and", "▁and", "in"]
    names = list(dict.fromkeys([*ends, *(f"<0x{byte:02X}>" for byte in range(256)), *words]))
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("a", "n"),
        ("an", "d"),
        ("▁", "and"),
        ("i", "n"),
    ]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.add_special_tokens(ends)
    tokenizer.save(str(base / "tokenizer.json"))
    assert_same(exported(base, tmp_path / "gguf", **config), base, None, tmp_path)
