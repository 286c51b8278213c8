"""The PyTorch + PEFT peer of ``cpu_lora.py``: the standard loop, in an environment of its own.

One JSON object a step on ``--out``. The batches, their padding apart, come from the manifest;
labels of padding and of places that are not trained are -100, which the model's own loss leaves
out.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Batch = dict[str, torch.Tensor]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    steps = json.loads(options.manifest.read_text())["steps"]
    model = load(options)
    with options.out.open("w", encoding="utf-8") as out:
        if options.expect:
            out.write(json.dumps(expected_losses(model, steps[0]["examples"])) + "\n")
            return
        for report in train(model, steps[: options.steps], options.learning_rate):
            out.write(json.dumps(report) + "\n")
            out.flush()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model", "manifest", "adapter", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "threads", "num-layers", "rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument(
        "--expect", action="store_true", help="only the first batch's losses, by both definitions"
    )
    return parser.parse_args()


def load(options: argparse.Namespace) -> Any:
    """The float32 model with adapters on the linear layers of its last blocks, set to the common
    start.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    # PyTorch's loader draws what it does not find, with no more than a warning.
    if wrong := {kind: names for kind, names in report.items() if names}:
        raise SystemExit(f"{options.model} is not the model that PyTorch expects: {wrong}")
    count = model.config.num_hidden_layers
    shape = LoraConfig(
        r=options.rank,
        lora_alpha=options.scale * options.rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=LINEAR_LAYERS,
        layers_to_transform=list(range(count - options.num_layers, count)),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, shape)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = load_file(options.adapter)
    if len(start) != len(parameters):
        raise SystemExit(
            f"{len(parameters)} adapter matrices here, {len(start)} in {options.adapter}"
        )
    with torch.no_grad():
        for name, value in start.items():
            # mlx_lm keeps the transpose of PEFT's matrices.
            parameters[_peft_name(name)].copy_(value.T)
    return model.train()


def _peft_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"base_model.model.{module}.{'lora_A' if leaf == 'lora_a' else 'lora_B'}.default.weight"


def collate(examples: list[dict[str, Any]]) -> Batch:
    """Padded to the longest example, as PyTorch's usual collators do."""
    shape = (len(examples), max(len(example["tokens"]) for example in examples))
    inputs, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, -100, dtype=torch.long)
    for row, example in enumerate(examples):
        ids, trained = torch.tensor(example["tokens"]), torch.tensor(example["trained"])
        inputs[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = torch.where(trained, ids, -100)
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


def train(model: Any, steps: list[dict[str, Any]], learning_rate: float) -> Any:
    """Yield loss and time of each step."""
    optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=learning_rate
    )
    for number, step in enumerate(steps, start=1):
        started = time.perf_counter()
        loss = model(**collate(step["examples"]), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        yield {"step": number, "loss": value, "time_s": time.perf_counter() - started}


@torch.no_grad()
def expected_losses(model: Any, examples: list[dict[str, Any]]) -> dict[str, float]:
    """The first batch's loss before any update, as PyTorch and allhands define it and as mlx_lm
    does.

    mlx_lm's mask lets one target more through at the end of each example: the padding token 0 that
    follows it.
    """
    batch = collate(examples)
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    log_p = torch.log_softmax(logits.float(), dim=-1)
    exact: list[float] = []
    mlx_lm: list[float] = []
    for row, example in enumerate(examples):
        for place, target in enumerate([*example["tokens"][1:], 0], start=1):
            loss = -log_p[row, place - 1, target].item()
            if place < len(example["tokens"]) and example["trained"][place]:
                exact.append(loss)
            if place >= example["mlx_lm_from"]:
                mlx_lm.append(loss)
    return {"exact": sum(exact) / len(exact), "mlx_lm": sum(mlx_lm) / len(mlx_lm)}


if __name__ == "__main__":
    main()
