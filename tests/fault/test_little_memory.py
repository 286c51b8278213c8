"""A model that fits no computer alone trains on two, and answers: each has a control group of
little memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from memory_groups import MemoryGroups, memory_groups
from tiny import run_allhands, write_chat_data, write_tokenizer

from allhands.errors import ModelError

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's control groups"),
]

LIMIT = 900_000_000
HIDDEN, INNER, LAYERS, VOCABULARY, GROUP = 2048, 8192, 26, 4096, 64
HOSTS = {"left": "127.0.0.1", "right": "127.0.0.2"}
STEPS = 3
SCHEDULES = "1f1b", "interleaved"


def write_large(directory: Path) -> Path:
    """A Llama of random 4-bit weights, block by block alike, written without ever being dense."""
    directory.mkdir()
    draw = np.random.default_rng(3)

    def quantized(name: str, rows: int, columns: int) -> dict[str, mx.array]:
        words = draw.integers(0, 1 << 32, (rows, columns // 8), dtype=np.uint32)
        scales = np.full((rows, columns // GROUP), 0.25 / np.sqrt(columns), dtype=np.float32)
        made = (
            mx.array(words),
            mx.array(scales).astype(mx.bfloat16),
            mx.array(-7.5 * scales).astype(mx.bfloat16),
        )
        return {
            f"{name}.{part}": each
            for part, each in zip(("weight", "scales", "biases"), made, strict=True)
        }

    weights = {"model.norm.weight": mx.ones((HIDDEN,), dtype=mx.bfloat16)}
    for name in ("model.embed_tokens", "lm_head"):
        weights |= quantized(name, VOCABULARY, HIDDEN)
    shapes = {
        **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"},
        **{f"self_attn.{name}_proj": (HIDDEN // 2, HIDDEN) for name in "kv"},
        **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            weights |= quantized(f"model.layers.{layer}.{name}", *shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = mx.ones((HIDDEN,), dtype=mx.bfloat16)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "quantization": {"group_size": GROUP, "bits": 4},
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("little")
    write_large(directory / "model")
    write_chat_data(directory / "data", train=8, valid=2, test=2, longest=12)
    hosts = [
        {"ssh": name, "ips": [address], "slots": 1, "python": sys.executable}
        for name, address in HOSTS.items()
    ]
    (directory / "hosts.json").write_text(json.dumps(hosts))
    return directory


def training(files: Path, out: str) -> list[str]:
    options = [
        "train",
        "--model",
        "model",
        "--data",
        "data",
        "--train",
        "--iters",
        str(STEPS),
        "--batch-size",
        "4",
    ]
    more = [
        "--num-layers",
        "8",
        "--steps-per-report",
        "1",
        "--val-batches",
        "0",
        "--max-seq-length",
        "64",
    ]
    return [*options, *more, "--learning-rate", "1e-4", "--seed", "4", "--adapter-path", out]


def within(groups: MemoryGroups, files: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One process in the first group."""
    argv = groups.within("left", [sys.executable, "-m", "allhands", *arguments])
    return subprocess.run(argv, cwd=files, capture_output=True, text=True, timeout=120, check=False)


def losses(directory: Path) -> list[float]:
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "train"]


def test_two_computers_train_and_ask_what_neither_holds(files: Path) -> None:
    weights = (files / "model" / "model.safetensors").stat().st_size
    assert weights > LIMIT
    with memory_groups(tuple(HOSTS), LIMIT, files) as groups:
        refused = within(groups, files, *training(files, "alone"))
        assert refused.returncode == ModelError.exit_code, refused.stderr
        assert "--strategy pipeline" in refused.stderr
        assert not (files / "alone").exists()
        asked = ["generate", "--model", "model", "--prompt", "ahoy", "--max-tokens", "4"]
        refused = within(groups, files, *asked)
        assert refused.returncode == ModelError.exit_code, refused.stderr
        assert "--strategy pipeline" in refused.stderr

        two = ["--hostfile", "hosts.json", "--strategy", "pipeline"]
        env = {"ALLHANDS_SSH": groups.ssh}
        for schedule in SCHEDULES:
            way = [*two, "--pp-schedule", schedule]
            trained = run_allhands(
                *training(files, schedule), *way, env=env, cwd=files, timeout=300
            )
            assert trained.returncode == 0, trained.stdout + trained.stderr
            assert "stay packed" in trained.stdout + trained.stderr
        answer = run_allhands(
            *asked, "--adapter-path", SCHEDULES[0], *two, env=env, cwd=files, timeout=200
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert groups.killed() == 0
        assert max(groups.peaks()) <= LIMIT
        print(groups.peaks(), answer.stdout)
    one = run_allhands(
        *training(files, "one"),
        cwd=files,
        timeout=300,
        env={"OPENBLAS_NUM_THREADS": str(os.cpu_count())},
    )
    assert one.returncode == 0, one.stdout + one.stderr
    for schedule in SCHEDULES:
        np.testing.assert_allclose(losses(files / schedule), losses(files / "one"), rtol=1e-5)
    assert len(losses(files / "one")) == STEPS
