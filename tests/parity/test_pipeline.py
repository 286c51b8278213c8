"""Pipelines of real processes against one process: losses, norms, validation and weights, and what
is written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import run_allhands, write_chat_data, write_model
from trained import arrays, assert_same, assert_same_samples, told, train, write_poisoned

PIPELINE = ("--strategy", "pipeline")
DROPOUT = ("--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}')


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    write_model(folder / "model", layers=6, hidden=64)
    write_model(folder / "untied", layers=4, hidden=64, tied=False)
    write_model(folder / "quantised", layers=4, hidden=64, bits=4)
    write_chat_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    train(place, "alone")
    return place / "alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("-n", "2", "--backend", "mpi"),
        ("-n", "2", "--backend", "ring", "--compile", "on"),
        ("-n", "3", "--backend", "ring", "--pp-split", "1,3,2"),
        ("-n", "2", "--backend", "ring", "--pp-schedule", "zb", "--compile", "on"),
        ("-n", "2", "--backend", "ring", "--pp-schedule", "interleaved"),
        ("-n", "4", "--backend", "mpi", "--pp", "2"),
        ("-n", "2", "--backend", "ring", "--batch-size", "8", "--micro-batch-tokens", "4096"),
    ],
    ids=[
        "mpi",
        "compiled",
        "uneven",
        "zero bubble",
        "interleaved",
        "two pipelines",
        "one micro-batch",
    ],
)
def test_ranks_with_some_blocks_each_train_as_one_process(
    place: Path, alone: Path, more: tuple[str, ...]
) -> None:
    name = "-".join(more).replace(",", "")
    train(place, name, *more, *PIPELINE)
    assert_same(alone, place / name)


@pytest.fixture(scope="module")
def last_alone(place: Path) -> Path:
    train(place, "last", "--num-layers", "2")
    return place / "last"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("-n", "2"),
        ("-n", "2", "--compile", "on"),
        ("-n", "3", "--pp-split", "2,2,2"),
        ("-n", "3", "--pp-split", "1,4,1", "--compile", "on"),
        ("-n", "2", "--pp-schedule", "zb", "--pp-split", "4,2", "--compile", "on"),
        ("-n", "2", "--pp-schedule", "interleaved", "--compile", "on"),
    ],
    ids=["native", "compiled", "a stage alone", "in two stages", "zero bubble", "interleaved"],
)
def test_stages_that_train_nothing_pass_on_alone(
    place: Path, last_alone: Path, more: tuple[str, ...]
) -> None:
    """LoRA on the last two of six blocks: the stages before have no backward pass."""
    name = "last-" + "-".join(more).replace(",", "")
    train(place, name, *more, "--backend", "ring", "--num-layers", "2", *PIPELINE)
    assert_same(last_alone, place / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("model", ("--fine-tune-type", "full", "--grad-accumulation-steps", "2")),
        ("untied", ("--fine-tune-type", "full", "--compile", "on")),
        ("model", ("--fine-tune-type", "full", "--compile", "on")),
        (
            "quantised",
            ("--fine-tune-type", "dora", *DROPOUT),
        ),
        ("model", ("--packing", "--isolate-documents", "--max-seq-length", "64")),
        ("model", ("--grad-checkpoint", *DROPOUT)),
        ("model", ("--grad-checkpoint", "--compile", "on", *DROPOUT)),
    ],
    ids=[
        "full",
        "untied",
        "tied, compiled",
        "quantised, dropout",
        "packed documents",
        "recomputed",
        "in a graph",
    ],
)
def test_every_way_of_training_does(place: Path, model: str, more: tuple[str, ...]) -> None:
    one, other = f"one-{'-'.join(more)}"[:80], f"two-{'-'.join(more)}"[:80]
    train(place, one, *more, model=model)
    train(place, other, *more, "-n", "2", *PIPELINE, model=model)
    assert_same(place / one, place / other)


@pytest.mark.slow
def test_two_pipelines_train_all_weights(place: Path) -> None:
    """Ranks with the same blocks add up their gradients before any rank adds up the numbers of all."""
    how = ("--fine-tune-type", "full", "--max-restarts", "0")
    train(place, "full", *how, model="untied")
    train(
        place,
        "full-twice",
        *how,
        "-n",
        "4",
        "--backend",
        "mpi",
        *PIPELINE,
        "--pp",
        "2",
        model="untied",
    )
    assert_same(place / "full", place / "full-twice")


@pytest.mark.slow
def test_a_pipeline_goes_on_from_its_checkpoint_and_so_do_others(place: Path, alone: Path) -> None:
    train(place, "whole", "-n", "2", *PIPELINE)
    train(place, "half", "-n", "2", *PIPELINE, "--iters", "2")
    for name in ("bits", "three", "none"):
        shutil.copytree(place / "half", place / name)
    train(place, "bits", "-n", "2", *PIPELINE, "--resume", "auto")
    train(place, "three", "-n", "3", *PIPELINE, "--resume", "auto")
    train(place, "none", "--resume", "auto")
    whole, again = (arrays(place / name / "adapters.safetensors") for name in ("whole", "bits"))
    assert all(mx.array_equal(whole[key], again[key]).item() for key in whole)
    for name in ("three", "none"):
        assert_same(alone, place / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("-n", "2", *PIPELINE, "--pp-split", "3,4"), "--pp-split"),
        (("-n", "3", *PIPELINE, "--pp", "2"), "--pp 2"),
        (("--strategy", "pipeline"), "--strategy pipeline"),
        (("-n", "2", "--pp", "2"), "--pp"),
        (("-n", "2", *PIPELINE, "--compress", "int8"), "--compress"),
        (("-n", "4", "--backend", "ring", *PIPELINE, "--pp", "2"), "--backend ring"),
        (("-n", "2", *PIPELINE, "--pp-schedule", "zb"), "--pp-schedule"),
        (
            ("-n", "4", *PIPELINE, "--pp-schedule", "zb", "--compile", "on", "--dp-shard", "2"),
            "--dp-shard",
        ),
    ],
)
def test_what_makes_no_pipeline_is_refused(place: Path, more: tuple[str, ...], words: str) -> None:
    assert words in train(place, "refused", *more, code=2)


@pytest.mark.slow
def test_a_pipeline_evaluates_and_answers_as_one_process(place: Path, alone: Path) -> None:
    where = ("--model", place / "model", "--adapter-path", alone)
    ranks = ("-n", "2", "--backend", "ring", *PIPELINE)
    found: list[list[str]] = []
    for more in ((), ranks):
        evaluated = run_allhands(
            "eval", *where, "--data", place / "data", "--split", "valid", "--json", *more
        )
        asked = run_allhands(
            "generate", *where, "--prompt", "hello", "--max-tokens", "24", "--temp", "0", *more
        )
        assert evaluated.returncode == asked.returncode == 0, evaluated.stderr + asked.stderr
        loss = json.loads(evaluated.stdout)["loss"]
        found.append([f"{loss:.5f}", asked.stdout.partition("=====")[0]])
    assert found[0] == found[1]
    assert len(found[0][1]) > 10


@pytest.mark.slow
def test_samples_of_a_pipeline_are_those_of_one_process(place: Path) -> None:
    assert_same_samples(place, ("-n", "2", "--backend", "ring", *PIPELINE))


@pytest.mark.slow
def test_examples_that_ruin_an_update_are_named_as_by_one_process(place: Path) -> None:
    write_poisoned(place)
    more = ("--data", str(place / "with-z"), "--non-finite", "skip", "--val-batches", "0")
    found: list[Any] = []
    for ranks in ("1", "2", "3"):
        parts = () if ranks == "1" else (*PIPELINE, "--backend", "ring")
        train(place, f"skipped-{ranks}", *more, "-n", ranks, *parts, model="poisoned")
        found.append(told(place / f"skipped-{ranks}", "skipped", "step", "examples"))
    assert found[0] == found[1] == found[2]
    assert {each for examples in found[0][1::2] for each in examples} == {5, 12}
    refused = train(
        place,
        "stopped",
        "--data",
        str(place / "with-z"),
        "-n",
        "2",
        *PIPELINE,
        model="poisoned",
        code=6,
    )
    assert "(training example" in refused
