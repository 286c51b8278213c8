"""Small models, tokenizers and data with which whole runs take a second or two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import mixtral
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(directory: Path, merges: Sequence[tuple[str, str]] = ()) -> None:
    """A byte-level tokenizer (256 bytes, three special tokens, and what ``merges`` make) with a
    ChatML template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token: number for number, token in enumerate([*SPECIAL, *alphabet, *map("".join, merges)])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(directory))


def write_model(
    directory: Path,
    *,
    layers: int = 3,
    hidden: int = 32,
    tied: bool = True,
    bits: int | None = None,
    seed: int = 1,
    experts: int = 0,
    kind: str = "",
) -> Path:
    """A random Llama with a vocabulary of 259, in mlx_lm's directory format; ``bits`` quantises it.

    With ``experts`` it is a Mixtral with so many; ``kind``: another of mlx_lm's modules, such as
    ``"qwen3"``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 259,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
    }
    mx.random.seed(seed)
    if experts:
        config |= {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": experts,
        }
        config["num_experts_per_tok"] = 2
        model: Any = mixtral.Model(mixtral.ModelArgs.from_dict(config))
    elif kind:
        config |= {"model_type": kind, "head_dim": hidden // 4, "max_position_embeddings": 4096}
        # A window in every other block, of the kinds that have any.
        config |= {"rope_scaling": None, "sliding_window": 16, "sliding_window_pattern": 2}
        module: Any = import_module(f"mlx_lm.models.{kind}")
        model = module.Model(module.ModelArgs.from_dict(config))
    else:
        model = Model(ModelArgs.from_dict(config))
    if bits is not None:
        from mlx_lm.utils import quantize_model

        model, config = quantize_model(model, config, 32, bits)
    mx.save_safetensors(
        str(directory / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


def in_files(model: Path, files: Sequence[Sequence[str]]) -> Path:
    """``model`` with its weights in several files and an index: in each the arrays whose names have
    one of its words.

    A name belongs to the first file that has a word of it.
    """
    whole = model / "model.safetensors"
    arrays: dict[str, mx.array] = mx.load(str(whole))  # type: ignore[assignment]
    mx.eval(arrays)
    whole.unlink()
    placed: dict[str, str] = {}
    for name in arrays:
        number = next(i for i, words in enumerate(files) if any(word in name for word in words))
        placed[name] = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
    for file in set(placed.values()):
        own = {name: array for name, array in arrays.items() if placed[name] == file}
        mx.save_safetensors(str(model / file), own, metadata={"format": "mlx"})
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    return model


def with_positions(model: Path, count: int) -> Path:
    """``model`` with a bound of so many tokens, in its configuration and in its tokenizer's."""
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**content, key: count}))
    return model


def write_adapter(base: Path, directory: Path, kind: str = "lora") -> Path:
    """A random adapter on two blocks, or random weights for the last one (``full``), for the model
    in ``base``.
    """
    model: Any = load(str(base))[0]
    model.freeze()
    mx.random.seed(5)
    settings = {
        "rank": 4,
        "scale": 2.5,
        "dropout": 0.3,
        "keys": ["self_attn.q_proj", "mlp.down_proj"],
    }
    if kind == "full":
        model.layers[-1].unfreeze()
    else:
        linear_to_lora_layers(model, 2, settings, use_dora=kind == "dora")
    # Magnitudes and whole weights are moved a little, the rest begins at nothing.
    weights = {
        name: mx.random.normal(value.shape) * 0.2
        + (value if kind == "full" or name.endswith(".m") else 0)
        for name, value in tree_flatten(model.trainable_parameters())
    }
    directory.mkdir()
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    config = {
        "fine_tune_type": kind,
        "num_layers": 1 if kind == "full" else 2,
        "lora_parameters": None if kind == "full" else settings,
        "model": str(base),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def write_chat_data(
    directory: Path,
    *,
    train: int = 24,
    valid: int = 6,
    test: int = 6,
    seed: int = 0,
    longest: int = 60,
) -> Path:
    """Random chats of very unequal lengths."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefgh ,."))

    def words(low: int, high: int) -> str:
        return "".join(random.choice(letters, int(random.integers(low, high)))).strip() or "a"

    for name, number in (("train", train), ("valid", valid), ("test", test)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": words(2, longest // 2)},
                    {"role": "assistant", "content": words(2, longest)},
                ]
            }
            for _ in range(number)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def run_allhands(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120,
    lines: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, without a terminal; ``lines`` are its standard
    input.
    """
    command: Sequence[str] = [sys.executable, "-m", "allhands", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        input=lines,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(env or {})},
        cwd=cwd,
        timeout=timeout,
        check=False,
    )
