"""Fully sharded ranks against one process: losses, norms, validation and weights, and what is
written.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from memory_groups import memory_groups
from tiny import run_allhands, write_tokenizer
from trained import (
    arrays,
    assert_same,
    assert_same_samples,
    told,
    train,
    write_models,
    write_poisoned,
)

SHARDED = ("--strategy", "fsdp")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    train(place, "alone", "--fine-tune-type", "full")
    return place / "alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("-n", "2", "--backend", "mpi", "--reshard", "off"),
        # Kernels may have to be built, for a minute.
        pytest.param(("-n", "3", "--backend", "ring", "--compile", "on"), marks=pytest.mark.long),
        ("-n", "4", "--backend", "mpi", "--dp-shard", "2"),
        ("-n", "4", "--backend", "ring", "--dp-shard", "2"),
        (
            "-n",
            "3",
            "--backend",
            "ring",
            "--rank-weights",
            "[1, 2, 4]",
            "--micro-batch-tokens",
            "96",
        ),
    ],
    ids=["kept", "in a graph", "two copies", "two copies on a ring", "unlike shares"],
)
def test_ranks_with_a_part_of_every_array_train_as_one_process(
    place: Path, alone: Path, more: tuple[str, ...]
) -> None:
    name = "-".join(more).translate({ord(each): None for each in ",[] "})
    train(place, name, "--fine-tune-type", "full", *more, *SHARDED)
    assert_same(alone, place / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("model", ("--num-layers", "2")),
        (
            "untied",
            ("--fine-tune-type", "full", "--grad-accumulation-steps", "2", "--batch-size", "3"),
        ),
        ("quantised", ("--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}')),
        pytest.param(
            "quantised", ("--fine-tune-type", "dora", "--compile", "on"), marks=pytest.mark.long
        ),
        ("model", ("--packing", "--isolate-documents", "--max-seq-length", "64")),
        ("model", ("--optimizer", "adamw", "--learning-rate", "0.001", "--grad-checkpoint")),
    ],
    ids=[
        "the last blocks",
        "few rows",
        "quantised, dropout",
        "dora, in a graph",
        "packed documents",
        "adamw",
    ],
)
def test_every_way_of_training_does(place: Path, model: str, more: tuple[str, ...]) -> None:
    one, other = f"one-{'-'.join(more)}"[:80], f"two-{'-'.join(more)}"[:80]
    train(place, one, *more, model=model)
    train(place, other, *more, "-n", "2", "--backend", "ring", *SHARDED, model=model)
    assert_same(place / one, place / other)


@pytest.mark.slow
def test_checkpoints_are_those_of_any_other_division(place: Path) -> None:
    adam = ("--fine-tune-type", "full", "--optimizer", "adamw", "--learning-rate", "0.001")
    train(place, "adam", *adam)
    train(place, "whole", *adam, "-n", "2", *SHARDED)
    train(place, "half", *adam, "-n", "2", *SHARDED, "--iters", "2")
    train(place, "half-alone", *adam, "--iters", "2")
    for name in ("bits", "three", "none", "stages"):
        shutil.copytree(place / "half", place / name)
    train(place, "bits", *adam, "-n", "2", *SHARDED, "--resume", "auto")
    train(place, "three", *adam, "-n", "3", *SHARDED, "--resume", "auto")
    train(place, "none", *adam, "--resume", "auto")
    train(place, "stages", *adam, "-n", "2", "--strategy", "pipeline", "--resume", "auto")
    train(place, "half-alone", *adam, "-n", "2", *SHARDED, "--resume", "auto")
    whole, again = (arrays(place / name / "adapters.safetensors") for name in ("whole", "bits"))
    assert all(mx.array_equal(whole[key], again[key]).item() for key in whole)
    for name in ("three", "none", "stages", "half-alone"):
        assert_same(place / "adam", place / name)


@pytest.mark.slow
def test_samples_are_those_of_one_process(place: Path) -> None:
    assert_same_samples(place, ("-n", "2", "--backend", "ring", *SHARDED))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("-n", "3", *SHARDED, "--dp-shard", "2"), "--dp-shard 2"),
        (("-n", "2", "--reshard", "off"), "--reshard"),
        (("-n", "2", *SHARDED, "--compress", "int8"), "--compress"),
        (("-n", "2", *SHARDED, "--optimizer", "muon"), "--strategy fsdp"),
        (("-n", "2", "--strategy", "zero2", "--reshard", "on"), "--reshard"),
    ],
)
def test_what_cannot_be_sharded_is_refused(place: Path, more: tuple[str, ...], words: str) -> None:
    assert words in train(place, "refused", *more, code=2)


@pytest.mark.slow
def test_examples_that_ruin_an_update_are_named_as_by_one_process(place: Path) -> None:
    write_poisoned(place)
    more = ("--data", str(place / "with-z"), "--non-finite", "skip", "--val-batches", "0")
    found: list[Any] = []
    for ranks in ("1", "2", "3"):
        parts = () if ranks == "1" else (*SHARDED, "--backend", "ring")
        train(place, f"skipped-{ranks}", *more, "-n", ranks, *parts, model="poisoned")
        found.append(told(place / f"skipped-{ranks}", "skipped", "step", "examples"))
    assert found[0] == found[1] == found[2]
    assert {each for examples in found[0][1::2] for each in examples} == {5, 12}


def _pretrained(
    place: Path, name: str, *more: str, env: dict[str, str] | None = None
) -> tuple[list[float], list[int]]:
    """Losses of a pre-training on two ranks, and the peak of the arrays of each."""
    if not (place / "texts").exists():
        write_tokenizer(place / "tokenizer")
        (place / "texts").mkdir()
        (place / "texts" / "train.jsonl").write_text(json.dumps({"text": "hello you " * 3}) + "\n")
    shape = "--shape llama --layers 12 --dims 256 --mlp-dims 704 --heads 4 --kv-heads 4 --block-size 16 --batch-size 2"
    words = f"{shape} --iters 3 --val-batches 0 --steps-per-report 1 --keep-last 0 --compile off --no-keep-best"
    places = [
        "--data",
        place / "texts",
        "--tokenizer",
        place / "tokenizer",
        "--adapter-path",
        place / name,
    ]
    done = run_allhands("pretrain", *places, *words.split(), *more, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    return told(place / name, "train", "loss"), told(place / name, "train", "peak_mlx_bytes")[-1]


BLOCK = 4 * (4 * 256**2 + 3 * 256 * 704 + 2 * 256)
WEIGHTS = 12 * BLOCK


@pytest.mark.slow
def test_each_rank_holds_its_part_and_a_few_blocks(place: Path) -> None:
    """Weights, gradients and Adam's two numbers are divided; four blocks are whole at the most."""
    two = ("-n", "2", "--backend", "ring")
    _, whole = _pretrained(place, "whole-model", *two)
    _, parts = _pretrained(place, "parts", *two, *SHARDED)
    assert max(whole) > 4 * WEIGHTS
    assert max(parts) < 1.1 * (4 * WEIGHTS / 2 + 4 * BLOCK)


@pytest.mark.long
def test_ranks_of_unlike_memory_hold_unlike_parts(place: Path) -> None:
    names = {"left": "127.0.0.1", "right": "127.0.0.2"}
    hosts = [
        {"ssh": name, "ips": [address], "slots": 1, "python": sys.executable}
        for name, address in names.items()
    ]
    (place / "hosts.json").write_text(json.dumps(hosts))
    alone, _ = _pretrained(place, "even", "-n", "2", "--backend", "ring")
    with memory_groups(tuple(names), (3_000_000_000, 1_000_000_000), place) as groups:
        env = {"ALLHANDS_SSH": groups.ssh}
        losses, peaks = _pretrained(
            place, "uneven", "--hostfile", str(place / "hosts.json"), *SHARDED, env=env
        )
    assert losses == pytest.approx(alone, rel=1e-5)
    # Three quarters and one quarter.
    assert peaks[0] - peaks[1] == pytest.approx(4 * WEIGHTS / 2, rel=0.15)
