"""The PyTorch peer of ``pretrain.py``: the loop that everybody writes, after nanoGPT, for a model
of transformers.

Tokens lie in one memory-mapped file; a batch is rows from random places of it. AdamW with decay of
matrices alone, warm-up and cosine, clipping; on a GPU float32 weights with bfloat16 autocast; data
parallel under torchrun. One JSON object on ``--out``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "out", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("iters", "batch-size", "block-size", "threads", "report", "validate", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def tokens_of(options: argparse.Namespace, split: str) -> np.ndarray:
    """All texts of a split, each with its end, in a file that every rank maps."""
    file = options.scratch / f"{split}.bin"
    if not file.exists():
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        lines = (options.data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        ids = [
            [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_token_id] for line in lines
        ]
        draft = file.with_suffix(f".{os.getpid()}")
        np.array([token for text in ids for token in text], dtype=np.uint16).tofile(draft)
        draft.replace(file)
    return np.memmap(file, dtype=np.uint16, mode="r")


def rows_at(tokens: np.ndarray, starts: Any, length: int, device: str) -> torch.Tensor:
    """(B, length + 1) token ids."""
    rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(rows).to(device)


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def rate(options: argparse.Namespace, iteration: int) -> float:
    """Linear warm-up over a twentieth, then a cosine to 0."""
    warmup = min(options.iters // 20, 1000)
    if iteration < warmup:
        return options.learning_rate * (iteration + 1) / (warmup + 1)
    return (
        options.learning_rate
        * 0.5
        * (1 + math.cos(math.pi * (iteration - warmup) / (options.iters - warmup)))
    )


def validate(
    model: Any, tokens: np.ndarray, options: argparse.Namespace, cast: Any, device: str
) -> float:
    """Mean loss over the whole split, in rows that follow each other."""
    model.eval()
    total, count = 0.0, 0
    starts = list(range(0, len(tokens) - options.block_size - 1, options.block_size))
    with torch.no_grad():
        for at in range(0, len(starts), options.batch_size):
            rows = rows_at(tokens, starts[at : at + options.batch_size], options.block_size, device)
            with cast():
                total += loss_of(model, rows).item() * len(rows)
            count += len(rows)
    model.train()
    return total / count


def model_of(options: argparse.Namespace, device: str) -> Any:
    """The model with new weights."""
    torch.manual_seed(options.seed)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(options.model), attn_implementation="sdpa"
    )
    # As nanoGPT does, and allhands: what writes to the residual stream begins smaller, the deeper
    # the model is.
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(
                weight, std=model.config.initializer_range / math.sqrt(2 * len(model.model.layers))
            )
    return model.float().to(device).train()


def main() -> None:
    options = parse()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    torch.set_num_threads(options.threads)
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if size > 1:
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    train, valid = tokens_of(options, "train"), tokens_of(options, "valid")
    model = model_of(options, device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=on_gpu)
    called = model
    if size > 1:
        called = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if options.compile:
        called = torch.compile(called)

    def cast() -> Any:
        return torch.autocast("cuda" if on_gpu else "cpu", dtype=torch.bfloat16, enabled=on_gpu)

    draw = np.random.default_rng([options.seed, rank])
    curve, valid_curve, times, began = [], [], [], time.perf_counter()
    for iteration in range(options.iters):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(options, iteration)
        starts = draw.integers(0, len(train) - options.block_size - 1, options.batch_size // size)
        with cast():
            loss = loss_of(called, rows_at(train, starts, options.block_size, device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        times.append(time.perf_counter() - begun)
        if (iteration + 1) % options.report == 0:
            curve.append([iteration + 1, value])
            print(f"step {iteration + 1} loss {value:.3f}", file=sys.stderr, flush=True)
        if (iteration + 1) % options.validate == 0 or iteration + 1 == options.iters:
            valid_curve.append([iteration + 1, validate(model, valid, options, cast, device)])
    trained_s = time.perf_counter() - began
    result = {
        "step_s": times,
        "trained_s": trained_s,
        "curve": curve,
        "valid_curve": valid_curve,
        "valid_loss": valid_curve[-1][1],
        "valid_tokens": len(valid),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else _peak(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if rank == 0:
        options.out.write_text(json.dumps(result))
    if size > 1:
        torch.distributed.destroy_process_group()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


if __name__ == "__main__":
    main()
