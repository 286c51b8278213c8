"""Trainings with options drawn at random, on several ranks and as one process: the same losses,
norms and weights.

``ALLHANDS_TEST_SEED`` draws other ones, of which so many are tried as ``ALLHANDS_TEST_CASES`` says.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from tiny import write_model
from trained import assert_same, train, write_models

SEED = int(os.environ.get("ALLHANDS_TEST_SEED", "1"))
CASES = int(os.environ.get("ALLHANDS_TEST_CASES", "16"))
MODELS = ("model", "untied", "quantised", "experts")
TWO = ("-n", "2")
FOUR = ("-n", "4", "--backend", "mpi")
PIPELINE = ("--strategy", "pipeline")
WAYS = [
    TWO,
    (*TWO, "--rank-weights", "[1, 3]"),
    (*TWO, *PIPELINE),
    (*TWO, *PIPELINE, "--pp-schedule", "interleaved"),
    (*TWO, *PIPELINE, "--pp-split", "3,1"),
    (*TWO, "--strategy", "fsdp"),
    (*TWO, "--strategy", "fsdp", "--reshard", "off"),
    (*TWO, "--tp", "2"),
    (*TWO, "--cp", "2"),
    (*FOUR, *PIPELINE, "--pp", "2"),
    (*FOUR, *PIPELINE, "--tp", "2"),
    (*FOUR, *PIPELINE, "--dp-shard", "2"),
    (*FOUR, "--strategy", "fsdp", "--tp", "2"),
    (*FOUR, "--cp", "2"),
    (*TWO, "--strategy", "fsdp", "--cp", "2"),
    (*FOUR, "--tp", "2", "--cp", "2"),
    (*FOUR, *PIPELINE, "--cp", "2"),
]
WITH_EXPERTS = [
    (*TWO, "--ep", "2"),
    (*FOUR, "--tp", "2", "--ep", "2"),
    (*FOUR, "--ep", "2", "--cp", "2"),
    (*TWO, "--strategy", "fsdp", "--ep", "2"),
    (*FOUR, "--strategy", "fsdp", "--tp", "2", "--ep", "2"),
    (*FOUR, *PIPELINE, "--tp", "2", "--ep", "2"),
]

pytestmark = pytest.mark.long


def drawn(seed: int) -> tuple[str, list[str], tuple[str, ...]]:
    """A model, options of a training, and ranks that divide it."""
    draw = random.Random(seed)

    def perhaps(chance: float, *words: str) -> list[str]:
        return list(words) if draw.random() < chance else []

    model = draw.choice(MODELS)
    way = draw.choice([*WAYS, *(WITH_EXPERTS if model == "experts" else [])])
    methods = ["lora", "dora", "full"]
    if model == "quantised":
        methods.remove("full")
    if model == "experts" or "--tp" in way:
        methods.remove("dora")
    method = draw.choice(methods)
    options = ["--fine-tune-type", method]
    options += draw.choice(
        [["--learning-rate", "0.02"], ["--optimizer", "adamw", "--learning-rate", "0.0005"]]
    )
    options += ["--batch-size", draw.choice("12358")]
    options += perhaps(0.3, "--grad-accumulation-steps", draw.choice("23"))
    options += perhaps(0.25, "--grad-checkpoint")
    options += perhaps(0.3, "--micro-batch-tokens", draw.choice(["64", "200", "4096"]))
    options += perhaps(0.3, "--lr-schedule", "cosine", "--warmup-steps", "1")
    packed = perhaps(0.3, "--packing", "--max-seq-length", "64")
    options += packed
    options += perhaps(0.5, "--isolate-documents") if packed else perhaps(0.3, "--mask-prompt")
    if method != "full":
        adapters = {"rank": 4, "scale": 4.0, "dropout": draw.choice([0.0, 0.3])}
        options += perhaps(0.5, "--lora-parameters", json.dumps(adapters))
        options += perhaps(0.3, "--num-layers", draw.choice("123"))
    return model, options, way


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("random"))
    write_model(folder / "untied", layers=4, hidden=64, tied=False)
    write_model(folder / "quantised", layers=4, hidden=64, bits=4)
    write_model(folder / "experts", layers=4, hidden=64, experts=4)
    return folder


@pytest.mark.parametrize("seed", range(SEED, SEED + CASES))
def test_ranks_train_as_one_process(place: Path, seed: int) -> None:
    model, options, way = drawn(seed)
    train(place, f"one {seed}", *options, model=model)
    train(place, f"several {seed}", *options, *way, model=model)
    assert_same(place / f"one {seed}", place / f"several {seed}")
