"""What ``gpu_sharded.py`` and ``activations_gpu.py`` train: shapes, and models with random weights
in files.

    python benchmarks/sharded_cases.py '{"case": "7b", "shape": "full", "out": "DIRECTORY"}'

makes a model, a block at a time, in a process of its own, so that its memory on a GPU is given
back. Ranks read what they need of the files. Every word of the model's tokenizer is a token, so
that rows of random words are random tokens. Nothing beyond Python's own library is imported before
a model is made: see ``harness.py`` for why.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROW = 1024  # tokens that are computed of a row; it has one more, which is only a target
END = "</s>"
WHOLE = "complete"  # a file that is there once all others are


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        title: what the table calls it.
        shape: of the model, by the names of its configuration.
        rows: of each GPU in a step.
        bits: of a quantised model; 0: bfloat16.
        lora_layers: the last blocks, on which adapters are trained; 0: everything is trained.
        ways: that are measured unless others are asked for.
        reference: PyTorch's way that the bar is about; empty: there is no bar.
    """

    title: str
    shape: dict[str, Any]
    rows: int
    ways: tuple[str, ...]
    bits: int = 0
    lora_layers: int = 0
    reference: str = ""
    judged: str = "fsdp"


def _shape(
    width: int, blocks: int, mlp: int, heads: int, values: int, vocabulary: int = 32000
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": values,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


# The ways of each case, those first that matter most: time may run out.
CASES = {
    "7b": Case(
        "full training of a 7B shape",
        _shape(4096, 32, 14336, 32, 8),
        4,
        (
            "torch-compiled",
            "fsdp",
            "torch-compiled-checkpoint",
            "zero1",
            "data",
            "tp",
            "torch",
            "torch-checkpoint",
        ),
        reference="torch-compiled",
    ),
    "13b": Case(
        "full training of a 13B shape",
        _shape(5120, 40, 13824, 40, 40),
        4,
        ("torch-compiled-checkpoint", "fsdp-checkpoint", "fsdp", "tp", "zero1"),
        reference="torch-compiled-checkpoint",
        judged="fsdp-checkpoint",
    ),
    "70b": Case(
        "QLoRA of a 70B shape",
        _shape(8192, 80, 28672, 64, 8),
        4,
        ("fsdp", "pipeline"),
        bits=4,
        lora_layers=16,
    ),
}
TINY = _shape(128, 4, 256, 4, 2, 512)
TINY_ROW = 64


def shape_of(case: str, shape: str) -> dict[str, Any]:
    """The case's own shape (``full``), or one that two cores train in a second (``tiny``)."""
    return TINY if shape == "tiny" else CASES[case].shape


def row_of_shape(shape: str) -> int:
    """Tokens that are computed of a row."""
    return TINY_ROW if shape == "tiny" else ROW


def parameters(shape: dict[str, Any]) -> int:
    """Numbers of a model of this shape."""
    width, mlp = shape["hidden_size"], shape["intermediate_size"]
    values = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    block = 2 * width * width + 2 * width * values + 3 * width * mlp + 2 * width
    return shape["num_hidden_layers"] * block + 2 * shape["vocab_size"] * width + width


def config_of(case: str, shape: str) -> dict[str, Any]:
    """The model's configuration."""
    found = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 0,
        **shape_of(case, shape),
    }
    if bits := CASES[case].bits:
        found["quantization"] = {"group_size": 64, "bits": bits}
    return found


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """A model with random weights and a tokenizer, file after file."""
    import allhands  # noqa: F401 - before MLX, for its BLAS

    # isort: split
    import mlx.core as mx
    from pipeline_gpu import arrays_of

    directory.mkdir(parents=True, exist_ok=True)
    mx.set_cache_limit(0)
    placed: dict[str, str] = {}
    for file, arrays in arrays_of(config):
        mx.save_safetensors(str(directory / file), arrays, metadata={"format": "mlx"})
        placed |= dict.fromkeys(arrays, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, config["vocab_size"])
    (directory / WHOLE).write_text("")


def write_tokenizer(directory: Path, size: int) -> None:
    """A tokenizer of ``size`` words: the end of a text, and ``w1``, ``w2`` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {END: 0, **{f"w{number}": number for number in range(1, size)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=END
    ).save_pretrained(str(directory))


def write_rows(directory: Path, rows: int, row: int, size: int) -> None:
    """So many random rows for training, and one for validation: ``row`` words and the end of a text
    in each.
    """
    draw = random.Random(1)
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in {"train": rows, "valid": 1}.items():
        texts = (" ".join(f"w{draw.randrange(1, size)}" for _ in range(row)) for _ in range(count))
        (directory / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    write_model(Path(asked["out"]), config_of(asked["case"], asked["shape"]))
