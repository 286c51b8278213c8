"""Tokens of the data that the model does not learn, because its embedding is not trained."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np

from allhands.config.schema import TrainConfig
from allhands.data.token_roles import own_tokens
from allhands.io.trees import flatten
from allhands.run.datasets import Datasets

# Tokens of the training set that are looked at: this takes a fraction of a second.
_LOOKED_AT = 20_000_000
_SHOWN = 3


def unlearned(model: nn.Module, tokenizer: Any, data: Datasets, config: TrainConfig) -> list[str]:
    """Return a note on tokens of the training set that may be new to the model, if the embedding is
    not trained.
    """
    table = _fixed_table(model)
    if table is None or "train" not in data.stored:
        return []
    own = own_tokens(tokenizer, chosen=config.chat_template is not None)
    tokens = data.stored["train"].tokens.tokens[:_LOOKED_AT]
    found = [own[number] for number in _present(tokens, list(own))]
    if not found:
        return []
    head = next(
        (
            name
            for name, _ in model.named_modules()
            if name.rpartition(".")[2] in ("lm_head", "output", "embed_out")
        ),
        None,
    )
    keys = table + (f" and {head}" if head else "")
    way = f"add {keys} to the keys of --lora-parameters, or train in full (--fine-tune-type full)"
    if config.fine_tune_type == "full":
        way = "--num-layers -1 trains it, too"
    shown = ", ".join(found[:_SHOWN]) + (
        f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    )
    what = {"lora": "LoRA on these keys", "dora": "DoRA on these keys"}.get(
        config.fine_tune_type, "this training"
    )
    why = f"{what} leaves the rows of the embedding as they are"
    return [f"{shown}: not learned if new to the model, since {why}; {way}"]


def _fixed_table(model: nn.Module) -> str | None:
    """Return the name of the model's embedding if it is not trained; ``None`` if it is trained or
    missing.
    """
    named: list[tuple[str, Any]] = list(model.named_modules())
    # An adapter has its table under a name of its own: model.embed_tokens.embedding.
    tables = [
        name for name, module in named if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ]
    table = min((name.removesuffix(".embedding") for name in tables), key=len, default=None)
    trained = any(name.startswith(f"{table}.") for name, _ in flatten(model.trainable_parameters()))
    return None if trained else table


def _present(tokens: Any, wanted: list[int]) -> list[int]:
    """Return the ids of ``wanted`` that occur in ``tokens``."""
    if not wanted:
        return []
    table = np.zeros(max(wanted) + 1, dtype=np.bool_)
    for start in range(0, len(tokens), 1 << 20):
        part = np.asarray(tokens[start : start + (1 << 20)])
        table[part[part < len(table)]] = True
    return [number for number in wanted if table[number]]
