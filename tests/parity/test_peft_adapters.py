"""Adapters that PyTorch and PEFT read and write, against the same in MLX: logits of one model.

They are asked in a Python that has both: $ALLHANDS_TEST_TORCH, or the environment that
benchmarks/cpu_lora.py makes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from asked import Asked
from command_line import call_allhands
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load
from tiny import write_model

from allhands.infer.generate import load_for_generation
from allhands.io.trees import flatten

SIDE = Path(__file__).parents[1] / "support" / "peft_side.py"
KNOWN = Path.home() / ".cache" / "allhands" / "benchmarks" / "peft-env" / "bin" / "python"
PYTHON = Path(os.environ.get("ALLHANDS_TEST_TORCH") or KNOWN)
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="needs a Python with PyTorch and PEFT: ALLHANDS_TEST_TORCH, or benchmarks/cpu_lora.py",
)
ByTorch = Callable[..., dict[str, np.ndarray[Any, Any]]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("peft") / "model", layers=3, hidden=32)


@pytest.fixture(scope="module")
def by_torch() -> Iterator[ByTorch]:
    """Logits of the model without and with the adapter."""
    with Asked(PYTHON, SIDE) as ask:

        def logits(*words: object) -> dict[str, np.ndarray[Any, Any]]:
            ask(*words)
            with np.load(str(words[3])) as found:
                return dict(found)

        yield logits


def by_mlx(base: Path, adapter: Path | None) -> np.ndarray[Any, Any]:
    loaded: Any = load_for_generation(str(base), adapter)
    return np.array(loaded.model(mx.arange(20)[None]))


def assert_alike(base: Path, adapter: Path, theirs: dict[str, np.ndarray[Any, Any]]) -> None:
    plain, mine = by_mlx(base, None), by_mlx(base, adapter)
    np.testing.assert_allclose(theirs["plain"], plain, atol=1e-5)
    np.testing.assert_allclose(theirs["adapted"], mine, atol=2e-5)
    assert np.abs(mine - plain).max() > 0.5


@pytest.mark.parametrize(
    ("kind", "num_layers", "embedding"),
    [("lora", 3, False), ("lora", 2, False), ("dora", 3, False), ("lora", 2, True)],
)
def test_peft_computes_what_was_exported(
    base: Path, by_torch: ByTorch, tmp_path: Path, kind: str, num_layers: int, embedding: bool
) -> None:
    """Also where the embedding is the output layer, too."""
    model, *_ = load(str(base))
    model.freeze()
    mx.random.seed(5)
    keys = ["self_attn.q_proj", "mlp.down_proj", *(["model.embed_tokens"] if embedding else [])]
    settings = {"rank": 4, "scale": 2.5, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, num_layers, settings, use_dora=kind == "dora")
    trained = flatten(model.trainable_parameters())
    weights = {
        name: mx.random.normal(v.shape) * 0.2 + (v if name.endswith(".m") else 0)
        for name, v in trained
    }
    mine = tmp_path / "mine"
    mine.mkdir()
    mx.save_safetensors(str(mine / "adapters.safetensors"), weights)
    config = {
        "fine_tune_type": kind,
        "num_layers": num_layers,
        "lora_parameters": settings,
        "model": str(base),
    }
    (mine / "adapter_config.json").write_text(json.dumps(config))
    done = call_allhands(
        "export", "--adapter-path", mine, "--to", "peft", "--out", tmp_path / "peft"
    )
    assert done.returncode == 0, done.stderr
    assert_alike(base, mine, by_torch("read", base, tmp_path / "peft", tmp_path / "found.npz"))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8},
        {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, "use_rslora": True},
        {"target_modules": ["up_proj"], "r": 4, "lora_alpha": 12, "use_dora": True},
        {
            "target_modules": ["q_proj", "down_proj"],
            "layers_to_transform": [1, 2],
            "r": 4,
            "lora_alpha": 8,
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"down_proj": 6, "1.self_attn.q_proj": 3},
        },
        {"target_modules": r".*\.[02]\..*(up|q)_proj", "r": 4, "init_lora_weights": "orthogonal"},
        {
            "target_modules": ["q_proj", "embed_tokens"],
            "r": 4,
            "lora_alpha": 8,
            "ensure_weight_tying": True,
        },
        {
            "target_modules": ["q_proj", "lm_head"],
            "r": 4,
            "lora_alpha": 8,
            "ensure_weight_tying": True,
        },
    ],
    ids=["lora", "all-rslora", "dora", "patterns", "regex", "tied", "tied-by-head"],
)
def test_what_peft_wrote_is_imported(
    base: Path, by_torch: ByTorch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = {"task_type": "CAUSAL_LM", **settings}
    theirs = by_torch("write", base, tmp_path / "peft", tmp_path / "found.npz", json.dumps(config))
    done = call_allhands("import", tmp_path / "peft", "--from", "peft", "--out", tmp_path / "mine")
    assert done.returncode == 0, done.stderr
    assert_alike(base, tmp_path / "mine", theirs)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3, 5]}, "trainable_token_indices"),
        ({"bias": "all"}, "bias: all"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "share their weights"),
        ({"target_modules": ["q_proj", "lm_head"]}, "share their weights"),
    ],
)
def test_what_is_refused_can_be_used_as_the_message_says(
    base: Path, by_torch: ByTorch, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    config = {
        "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj"],
        "r": 4,
        "lora_alpha": 8,
        **settings,
    }
    theirs = by_torch("write", base, tmp_path / "peft", tmp_path / "found.npz", json.dumps(config))
    words = [
        "import",
        tmp_path / "peft",
        "--from",
        "peft",
        "--out",
        tmp_path / "mine",
        "--model",
        base,
    ]
    done = call_allhands(*words)
    assert done.returncode == 4
    assert said in done.stderr
    assert "merge_and_unload()" in done.stderr
    verb = "part" if "tie_word_embeddings = False" in done.stderr else "merge"
    assert not (tmp_path / "mine").exists()
    by_torch(verb, base, tmp_path / "peft", tmp_path / "merged.npz", tmp_path / "merged")
    written = tmp_path / "merged" / "config.json"
    written.write_text(
        json.dumps(
            {**json.loads((base / "config.json").read_text()), **json.loads(written.read_text())}
        )
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "merged")
    np.testing.assert_allclose(by_mlx(tmp_path / "merged", None), theirs["adapted"], atol=5e-5)
