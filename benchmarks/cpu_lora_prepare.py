"""First part of ``cpu_lora.py``, in allhands' environment: what all peers train on, made once.

Writes into the run's directory:

* ``manifest.json``: the model's directory, and for every step the token ids and trained places of
  its batch, and how many places each peer's own padding makes of it;
* ``allhands-data/train.jsonl`` and ``mlx_lm-data/train.jsonl``: the same examples, each in the
  order from which the peer's own sampler draws those very batches;
* ``start.safetensors``: the adapter that everybody starts from;

and, for PyTorch, the model's weights in float32 and its configuration, into a directory in
``--torch-models``.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS  # isort: skip
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from allhands.config.schema import build_config
from allhands.data.demo import demo_records
from allhands.data.loader import Loader
from allhands.data.order import GlobalOrder
from allhands.data.records import ColumnNames, Record
from allhands.data.render import Renderer
from allhands.data.splits import split_of_folder
from allhands.data.tokens import TokenSet
from allhands.model.adapters import make_trainable, trained_weights
from allhands.model.load import load_model
from allhands.runtime.accelerator import detect

# mlx_lm pads a batch to a multiple of this, and one place more for the target of the last.
MLX_LM_PAD_TO = 32


def main() -> None:
    options = parse()
    loaded = load_model(options.model)
    records = read_records(options.data)
    renderer = Renderer(loaded.tokenizer, mask_prompt=options.mask_prompt, max_seq_length=10**6)
    chosen = choose(records, renderer, options.steps * options.batch_size, options.max_seq_length)
    rendered = [renderer.render(record) for record in chosen]
    tokens = TokenSet.of_examples([(example.tokens, example.mask) for example in rendered])
    order = longest_first(tokens.work, options.batch_size)
    batches = [order.batch(step) for step in range(options.steps)]
    padded = allhands_places(tokens, order, options.steps)
    steps = [describe(tokens, batch, places) for batch, places in zip(batches, padded, strict=True)]
    add_mlx_lm_offsets(
        steps,
        [chosen[i] for batch in batches for i in batch],
        loaded.tokenizer,
        options.mask_prompt,
    )
    write_data(options.out / "allhands-data", chosen)
    write_data(
        options.out / "mlx_lm-data", [chosen[i] for i in in_mlx_lm_order(batches, order.seed)]
    )
    # Before the adapters, which rename the layers that they wrap.
    torch_model = (
        write_torch_model(loaded.model, loaded.path, options.torch_models)
        if options.torch_models
        else None
    )
    write_adapter(loaded.model, options)
    manifest = {
        "model": str(loaded.path),
        "torch_model": str(torch_model),
        "seed": order.seed,
        "steps": steps,
    }
    (options.out / "manifest.json").write_text(json.dumps(manifest))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--torch-models", type=Path)
    for name in ("steps", "batch-size", "max-seq-length", "num-layers", "rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--mask-prompt", action="store_true")
    return parser.parse_args()


def read_records(data: str) -> list[Record]:
    """The training split of ``demo`` or of a directory."""
    if data == "demo":
        return demo_records("train")
    split = split_of_folder(Path(data), "train", ColumnNames(), required=True)
    assert split is not None
    return list(split.records())


def choose(records: list[Record], renderer: Renderer, count: int, max_tokens: int) -> list[Record]:
    """``count`` examples of at most ``max_tokens``, of all the lengths that the data have, the
    longest included.
    """
    lengths = np.asarray([len(renderer.render(record).tokens) for record in records])
    fitting = np.flatnonzero(lengths <= max_tokens)
    if len(fitting) < count:
        raise SystemExit(
            f"{count} examples of at most {max_tokens} tokens are needed: fewer --steps, or other --data"
        )
    by_length = fitting[np.argsort(lengths[fitting], kind="stable")]
    return [records[i] for i in by_length[np.linspace(0, len(by_length) - 1, count, dtype=int)]]


def longest_first(lengths: NDArray[Any], batch_size: int) -> GlobalOrder:
    """The order with the first seed that puts the longest example into the first batch.

    Memory is made by the longest batch: every peer must meet it, the one that makes few steps too.
    """
    orders = (GlobalOrder(lengths, batch_size, seed) for seed in itertools.count())
    return next(order for order in orders if lengths[order.batch(0)].max() == lengths.max())


def allhands_places(tokens: TokenSet, order: GlobalOrder, steps: int) -> list[int]:
    """Places, padding included, that allhands computes in each step on this device."""
    loader = Loader(tokens, order, detect().sizing(None, compiled=False), 0, (1.0,))
    return [sum(part.inputs.size for part in loader.load(step)) for step in range(steps)]


def describe(tokens: TokenSet, batch: NDArray[np.int64], places: int) -> dict[str, Any]:
    """One step: its examples, and the sizes that the table is made of."""
    examples = [tokens.example(int(i)) for i in batch]
    longest = max(len(ids) for ids, _ in examples)
    mlx_lm = MLX_LM_PAD_TO * -(-longest // MLX_LM_PAD_TO)
    return {
        "examples": [{"tokens": ids.tolist(), "trained": mask.tolist()} for ids, mask in examples],
        "tokens": sum(len(ids) for ids, _ in examples),
        "places": {"allhands": places, "mlx_lm": mlx_lm * len(batch), "peft": longest * len(batch)},
    }


def add_mlx_lm_offsets(
    steps: list[dict[str, Any]], records: list[Record], tokenizer: Any, mask_prompt: bool
) -> None:
    """Note the first token of each example that mlx_lm trains; ``records`` are in the order of the
    steps.
    """
    examples = [example for step in steps for example in step["examples"]]
    for example, record in zip(examples, records, strict=True):
        prompt = list(record.messages or ())[:-1]
        length = len(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        )
        example["mlx_lm_from"] = length if mask_prompt else 1


def in_mlx_lm_order(batches: list[NDArray[np.int64]], seed: int) -> list[int]:
    """Examples in the order of file from which mlx_lm draws ``batches``, the first one first.

    mlx_lm cuts the file into batches from top to bottom (it means to sort by length, but what it
    measures is the number of keys of a record) and visits them in a permutation drawn from
    ``--seed``.
    """
    visited = np.random.RandomState(seed).permutation(len(batches))
    blocks: list[NDArray[np.int64]] = [batches[0]] * len(batches)
    for batch, block in zip(batches, visited, strict=True):
        blocks[block] = batch
    return [int(i) for block in blocks for i in block]


def write_data(directory: Path, records: list[Record]) -> None:
    directory.mkdir(parents=True)
    lines = [json.dumps({"messages": list(record.messages or ())}) + "\n" for record in records]
    (directory / "train.jsonl").write_text("".join(lines), encoding="utf-8")


def write_torch_model(model: Any, source: Path, parent: Path) -> Path:
    """The model as Hugging Face has it: the same names, the quantised weights as the numbers they
    stand for.
    """
    weights = [
        f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}"
        for file in source.glob("*.safetensors")
    ]
    key = hashlib.sha256(" ".join([str(source), *sorted(weights)]).encode()).hexdigest()[:12]
    target = parent / f"torch-{source.name}-{key}"
    if (target / "config.json").exists():
        return target
    config = json.loads((source / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    target.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(target / "model.safetensors"), dense_weights(model), {"format": "pt"})
    # Last, because its presence says that the directory is whole.
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def dense_weights(model: nn.Module) -> dict[str, mx.array]:
    """All weights by name, in float32."""
    weights: dict[str, mx.array] = {}
    for path, module in model.named_modules():
        # Children come up on their own.
        own = {name: value for name, value in module.items() if isinstance(value, mx.array)}
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            packed = [own.pop(name, None) for name in ("weight", "scales", "biases")]
            own["weight"] = mx.dequantize(
                *packed, group_size=module.group_size, bits=module.bits, mode=module.mode
            )
        weights |= {f"{path}.{name}": value.astype(mx.float32) for name, value in own.items()}
    return weights


def write_adapter(model: Any, options: argparse.Namespace) -> None:
    """The adapters as they are drawn at the start of a run, so that no peer starts from others."""
    shape = {"rank": options.rank, "scale": options.scale, "dropout": 0.0}
    values = {"num_layers": options.num_layers, "lora_parameters": shape}
    make_trainable(model, build_config(values))
    mx.save_safetensors(
        str(options.out / "start.safetensors"), trained_weights(model), metadata={"format": "mlx"}
    )


if __name__ == "__main__":
    main()
