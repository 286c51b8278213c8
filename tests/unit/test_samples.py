"""Texts that a model writes during training: neither padded rows nor a divided model change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load
from tiny import write_model
from twins import run_ranks

from allhands.distributed.backend import Communicator, MlxGroup, SingleProcess
from allhands.model.stages import blocks_of_stages, cut
from allhands.parallel.fsdp import FetchedModel
from allhands.parallel.pipeline import PipedModel
from allhands.parallel.piping import Piping
from allhands.parallel.sharding import shard
from allhands.run.samples import Sampler


class Watched(nn.Module):
    """A model that keeps the lengths of its rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.lengths = model, list[int]()

    def __call__(self, rows: mx.array) -> mx.array:
        self.lengths.append(rows.shape[1])
        return self.model(rows)


def texts(model: Any, tokenizer: Any, multiple: int, temperature: float = 1.0) -> list[str]:
    sampler = Sampler(
        model=model,
        tokenizer=tokenizer,
        prompts=["Once", "A B"],
        num_tokens=60,
        temperature=temperature,
        seed=3,
        most=50,
        beat=lambda phase, step: None,
        multiple=multiple,
    )
    return [each.text for each in sampler(1, 1)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_rows_give_the_same_texts_with_few_lengths(
    tmp_path: Path, temperature: float
) -> None:
    model, tokenizer, *_ = load(str(write_model(tmp_path / "model")))
    found: list[list[str]] = []
    for multiple, lengths in ((1, set(range(1, 50))), (16, {16, 32, 48, 50})):
        watched = Watched(model)
        found.append(texts(watched, tokenizer, multiple, temperature))
        assert set(watched.lengths) <= lengths
        assert max(watched.lengths) > 16
    assert found[0] == found[1]


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("way", ["fetched", "piped", "piped and fetched"])
def test_a_divided_model_writes_the_texts_of_the_whole_one(
    tmp_path: Path, multiple: int, way: str
) -> None:
    place = str(write_model(tmp_path / "model"))
    whole, tokenizer, *_ = load(place)
    expected = texts(whole, tokenizer, multiple)
    assert expected == texts(whole, tokenizer, 1)

    def written(ranks: Communicator) -> list[str]:
        model: Any
        model, tokenizer, *_ = load(place)
        stages = tuple(cut(model, blocks_of_stages([len(model.layers)]))) if "piped" in way else ()
        sharding = (
            shard(model, ranks, SingleProcess(), ranks, stages=stages) if "fetched" in way else None
        )
        if stages:
            piping = Piping(stages, MlxGroup(mx.distributed.init(), "ring"), SingleProcess())
            return texts(PipedModel(piping, sharding), tokenizer, multiple)
        assert sharding is not None
        return texts(FetchedModel(sharding), tokenizer, multiple)

    if "piped" in way:  # MLX's groups cannot be of several threads
        assert written(SingleProcess()) == expected
    else:
        assert run_ranks(2, written) == [expected] * 2
