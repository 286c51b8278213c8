"""Models and adapters of every architecture whose names are known, against transformers and PEFT.

transformers builds and saves a model; mlx_lm reads it and saves it under its own names; what is
exported from that has to be transformers' file again, bit by bit, and PEFT has to compute with an
exported adapter what mlx_lm does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from asked import Asked
from command_line import call_allhands
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, save_model
from tiny import write_tokenizer

from allhands.io.trees import flatten
from allhands.model.hf_names import ARCHITECTURES

SUPPORT = Path(__file__).parents[1] / "support"
KNOWN = Path.home() / ".cache" / "allhands" / "benchmarks" / "peft-env" / "bin" / "python"
PYTHON = Path(os.environ.get("ALLHANDS_TEST_TORCH") or KNOWN)
pytestmark = [
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="needs a Python with PyTorch and PEFT: ALLHANDS_TEST_TORCH, or benchmarks/cpu_lora.py",
    ),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about settings that mlx_lm reads
]
SAMPLE = (
    "deepseek_v3",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "granitemoe",
    "llama",
    "mamba",
    "mixtral",
    "phi3",
    "qwen3_moe",
)
KINDS = [
    kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.long)
    for kind, known in ARCHITECTURES.items()
    if known.whole
]
# Of the logits' spread: some of mlx_lm's activation functions are approximations.
CLOSE = 2e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model as transformers saves it and as mlx_lm does, by kind."""
    root = tmp_path_factory.mktemp("kinds")
    with Asked(PYTHON, SUPPORT / "torch_models.py") as ask:

        def make(kind: str) -> tuple[Path, Path]:
            theirs, ours = root / kind / "theirs", root / kind / "ours"
            if not theirs.exists():
                ask("make", kind, theirs)
                if (
                    kind == "gpt2"
                ):  # mlx_lm reads names as in the published file, without the first part
                    file = str(theirs / "model.safetensors")
                    tensors: Any = mx.load(file)
                    short = {
                        name.removeprefix("transformer."): mx.array(value)
                        for name, value in tensors.items()
                    }
                    mx.eval(short)
                    mx.save_safetensors(file, short, metadata={"format": "pt"})
                model, _ = load_model(theirs)
                save_model(ours, model)
                shutil.copy(theirs / "config.json", ours)
                write_tokenizer(ours)
            return theirs, ours

        yield make


@pytest.fixture(scope="module")
def by_torch() -> Iterator[Asked]:
    with Asked(PYTHON, SUPPORT / "torch_side.py") as ask:
        yield ask


@pytest.fixture(scope="module")
def by_peft() -> Iterator[Asked]:
    with Asked(PYTHON, SUPPORT / "peft_side.py") as ask:
        yield ask


def weights(directory: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        found |= dict(mx.load(str(file)))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_is_what_transformers_wrote(
    made: Any, by_torch: Asked, tmp_path: Path, kind: str
) -> None:
    theirs, ours = made(kind)
    done = call_allhands("export", "--model", ours, "--to", "hf", "--out", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    wanted, found = weights(theirs), weights(tmp_path / "hf")
    assert found.keys() == wanted.keys()
    assert all(mx.array_equal(found[name], value) for name, value in wanted.items())
    by_torch(
        "logits", tmp_path / "hf", tmp_path / "found.npz"
    )  # nothing missing, nothing unexpected
    with np.load(tmp_path / "found.npz") as file:
        logits = file["logits"]
    model: Any = load_model(ours)[0]
    model.eval()
    mine = np.array(model(mx.arange(3, 40)[None]))
    assert np.abs(mine - logits).max() < CLOSE * logits.std()


def adapter(
    base: Path, directory: Path, keys: list[str] | None, *, dora: bool = False
) -> np.ndarray[Any, Any]:
    """Write a random adapter; the logits that mlx_lm has with it."""
    model: Any = load_model(base)[0]
    model.freeze()
    mx.random.seed(3)
    settings = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), settings, use_dora=dora)
    trained = flatten(model.trainable_parameters())
    assert trained
    values = {
        name: mx.random.normal(v.shape) * 0.15 + (v if name.endswith(".m") else 0)
        for name, v in trained
    }
    model.load_weights(list(values.items()), strict=False)
    directory.mkdir()
    mx.save_safetensors(str(directory / "adapters.safetensors"), values)
    kind = "dora" if dora else "lora"
    config = {
        "fine_tune_type": kind,
        "num_layers": len(model.layers),
        "lora_parameters": settings,
        "model": str(base),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    model.eval()
    return np.array(model(mx.arange(20)[None]))


def keys_of(base: Path, what: str) -> list[str] | None:
    """Adapter keys: ``all`` of mlx_lm's, or the embedding with one layer of each block."""
    if what == "all":
        return None
    model: Any = load_model(base)[0]
    embeddings = [
        n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and not n.endswith("wpe")
    ]
    inside = {
        re.sub(r"^.*?\.\d+\.", "", name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search(r"\.\d+\..*(attn|attention|in_proj)", name)
    }
    return [*embeddings, *sorted(key for key in inside if "out_proj" not in key)[:1]]


@pytest.mark.parametrize("what", ["all", "embedding"])
@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_an_exported_adapter_or_the_advice_of_the_refusal_works(
    made: Any, by_peft: Asked, by_torch: Asked, tmp_path: Path, kind: str, what: str
) -> None:
    theirs, ours = made(kind)
    mine = adapter(ours, tmp_path / "mine", keys_of(ours, what))
    done = call_allhands(
        "export", "--adapter-path", tmp_path / "mine", "--to", "peft", "--out", tmp_path / "peft"
    )
    if done.returncode == 4:
        assert "--to hf" in done.stderr
        assert not (tmp_path / "peft").exists()
        done = call_allhands(
            "export", "--adapter-path", tmp_path / "mine", "--to", "hf", "--out", tmp_path / "hf"
        )
        assert done.returncode == 0, done.stderr
        by_torch("logits", tmp_path / "hf", tmp_path / "found.npz")
        return
    assert done.returncode == 0, done.stderr
    by_peft("read", theirs, tmp_path / "peft", tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as file:
        plain, adapted = file["plain"], file["adapted"]
    assert np.abs(adapted - mine).max() < CLOSE * mine.std()
    assert np.abs(mine - plain).max() > 0.5 * plain.std()


REFUSED = {"afmoe", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"}


@pytest.mark.parametrize(
    "kind",
    [
        "mixtral",
        "qwen3_moe",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in (*sorted(REFUSED), "olmoe", "mellum")
        ),
    ],
)
def test_peft_computes_adapters_of_experts(
    made: Any, by_peft: Asked, tmp_path: Path, kind: str
) -> None:
    theirs, ours = made(kind)
    model: Any = load_model(ours)[0]
    stacks = {
        re.sub(r"^.*?\.\d+\.", "", name)
        for name, module in model.named_modules()
        if "Switch" in type(module).__name__
    }
    keys = [name for name in stacks if re.search("(gate|up|down)_proj$", name)]
    mine = adapter(ours, tmp_path / "mine", keys)
    done = call_allhands(
        "export", "--adapter-path", tmp_path / "mine", "--to", "peft", "--out", tmp_path / "peft"
    )
    assert done.returncode == 0, done.stderr
    by_peft("read", theirs, tmp_path / "peft", tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as file:
        plain, adapted = file["plain"], file["adapted"]
    assert np.abs(adapted - mine).max() < CLOSE * mine.std()
    assert np.abs(mine - plain).max() > 0.2 * plain.std()


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_dora_of_renamed_and_transposed_layers(
    made: Any, by_peft: Asked, tmp_path: Path, kind: str
) -> None:
    theirs, ours = made(kind)
    mine = adapter(ours, tmp_path / "mine", None, dora=True)
    done = call_allhands(
        "export", "--adapter-path", tmp_path / "mine", "--to", "peft", "--out", tmp_path / "peft"
    )
    assert done.returncode == 0, done.stderr
    by_peft("read", theirs, tmp_path / "peft", tmp_path / "found.npz")
    with np.load(tmp_path / "found.npz") as file:
        assert np.abs(file["adapted"] - mine).max() < CLOSE * mine.std()


@pytest.mark.parametrize("changed", [False, True])
def test_a_model_that_is_not_in_the_table_is_written_only_from_files_that_prove_its_names(
    made: Any, by_torch: Asked, tmp_path: Path, changed: bool
) -> None:
    """``internlm3`` is read by mlx_lm under the very names of its files."""
    theirs, _ = made("llama")
    base = tmp_path / "base"
    shutil.copytree(theirs, base)
    write_tokenizer(base)
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "internlm3", "bias": False, "qkv_bias": False}
    (base / "config.json").write_text(json.dumps(config))
    if changed:  # as mlx_lm writes it, nobody can say where the names are from
        tensors = {name: mx.array(value) for name, value in weights(base).items()}
        mx.eval(tensors)
        mx.save_safetensors(str(base / "model.safetensors"), tensors, metadata={"format": "mlx"})
    done = call_allhands("export", "--model", base, "--to", "hf", "--out", tmp_path / "hf")
    if changed:
        assert done.returncode == 4
        assert "allhands fuse" in done.stderr
        assert not (tmp_path / "hf").exists()
        adapter(base, tmp_path / "mine", ["self_attn.q_proj"])
        for words in (("--to", "peft"), ("--to", "hf")):
            done = call_allhands(
                "export", "--adapter-path", tmp_path / "mine", *words, "--out", tmp_path / "out"
            )
            assert done.returncode == 4
            assert "allhands fuse" in done.stderr
        done = call_allhands(
            "fuse", "--adapter-path", tmp_path / "mine", "--save-path", tmp_path / "fused"
        )
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = weights(tmp_path / "hf")
    assert all(mx.array_equal(found[name], value) for name, value in weights(theirs).items())
