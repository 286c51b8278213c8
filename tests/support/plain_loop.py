"""A fine-tuning loop in the plainest words, sharing nothing with ``allhands`` but MLX and mlx_lm's
models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

# Token ids of one chat, and whether each of them is trained.
Example = tuple[list[int], list[bool]]


def chats(model: Path, file: Path, *, mask_prompt: bool = False) -> list[Example]:
    """Every chat of one question and one answer; with ``mask_prompt`` the answer and its end token
    are trained.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    examples: list[Example] = []
    for line in file.read_text().splitlines():
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        pieces = [
            (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", not mask_prompt),
            (f"{answer}<|im_end|>", True),
            ("\n", not mask_prompt),
        ]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text, _ in pieces]
        mask = [trained for part, (_, trained) in zip(ids, pieces, strict=True) for _ in part]
        examples.append(([*chain.from_iterable(ids)], [False, *mask[1:]]))
    return examples


def loss_sum_and_count(model: nn.Module, batch: Sequence[Example]) -> tuple[mx.array, int]:
    """Cross-entropy summed over the trained tokens of a padded batch, and their number."""
    width = max(len(ids) for ids, _ in batch)
    tokens = mx.array([ids + [0] * (width - len(ids)) for ids, _ in batch])
    mask = mx.array([trained + [False] * (width - len(trained)) for _, trained in batch])
    logits = model(tokens[:, :-1])
    losses = nn.losses.cross_entropy(logits, tokens[:, 1:]) * mask[:, 1:]
    return losses.sum(), sum(sum(trained) for _, trained in batch)


def numpy_loss(model: Any, batch: Iterable[Example]) -> float:
    """Mean cross-entropy a trained token: each example alone and unpadded, the loss in float64."""
    total, count = 0.0, 0
    for ids, trained in batch:
        logits = np.array(model(mx.array([ids]))[0].astype(mx.float32), dtype=np.float64)[:-1]
        logits -= logits.max(axis=-1, keepdims=True)
        losses = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(ids) - 1), ids[1:]]
        total += float(losses[np.array(trained[1:])].sum())
        count += sum(trained)
    return total / count


def adapted_model(
    directory: Path, *, scale: float = 20.0, dropout: float = 0.0, dora: bool = False
) -> nn.Module:
    """mlx_lm's model with mlx_lm's adapters of rank 8 on all layers, drawn from seed 0; the rest is
    frozen.
    """
    model, _ = load_model(directory)
    model.freeze()
    mx.random.seed(0)
    linear_to_lora_layers(model, -1, {"rank": 8, "scale": scale, "dropout": dropout}, use_dora=dora)
    return model


def full_model(directory: Path) -> nn.Module:
    """mlx_lm's model, everything trainable."""
    model, _ = load_model(directory)
    model.unfreeze()
    return model


def train_plainly(
    model: nn.Module, optimizer: optim.Optimizer, batches: Iterable[Sequence[Example]]
) -> tuple[list[float], dict[str, mx.array]]:
    """One update a batch; the mean loss before each, and the trained parameters after the last."""

    def mean_loss(batch: Sequence[Example]) -> mx.array:
        total, count = loss_sum_and_count(model, batch)
        return total / count

    function = nn.value_and_grad(model, mean_loss)
    losses: list[float] = []
    for batch in batches:
        loss, grads = function(batch)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(loss.item())
    return losses, dict(tree_flatten(model.trainable_parameters()))
