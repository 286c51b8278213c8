"""Texts that a model writes during training: what padding of rows changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load
from tiny import write_model

from allhands.run.samples import Sampler


class Watched(nn.Module):
    """A model that keeps the lengths of its rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.lengths = model, list[int]()

    def __call__(self, rows: mx.array) -> mx.array:
        self.lengths.append(rows.shape[1])
        return self.model(rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_rows_give_the_same_texts_with_few_lengths(
    tmp_path: Path, temperature: float
) -> None:
    model, tokenizer, *_ = load(str(write_model(tmp_path / "model")))
    found: list[list[str]] = []
    for multiple, lengths in ((1, set(range(1, 50))), (16, {16, 32, 48, 50})):
        watched = Watched(model)
        sampler = Sampler(
            model=watched,
            tokenizer=tokenizer,
            prompts=["Once", "A B"],
            num_tokens=60,
            temperature=temperature,
            seed=3,
            most=50,
            beat=lambda phase, step: None,
            multiple=multiple,
        )
        found.append([each.text for each in sampler(1, 1)])
        assert set(watched.lengths) <= lengths
        assert max(watched.lengths) > 16
    assert found[0] == found[1]
