"""Two ways of dividing at once, or three, against one process: losses, norms, validation, weights,
samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from together import (
    EVERY,
    OF_EIGHT,
    OF_EXPERTS,
    OF_MORE_EXPERTS,
    OF_ROWS,
    WAYS,
    write_models_of_every_way,
)
from trained import (
    assert_same,
    assert_same_ruined,
    assert_same_samples,
    told,
    train,
    write_poisoned,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG_EXPERTS = [pytest.param(way, marks=pytest.mark.long) for way in OF_MORE_EXPERTS]
LONG = [pytest.param(way, marks=pytest.mark.long) for way in OF_EIGHT]
DROPPED = '{"rank": 4, "scale": 4.0, "dropout": 0.3}'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_of_every_way(tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    train(place, "alone", "--fine-tune-type", "full")
    return place / "alone"


@pytest.mark.parametrize("way", [*WAYS, *OF_ROWS, *LONG])
def test_ranks_train_as_one_process(place: Path, alone: Path, way: str) -> None:
    train(place, way, "--fine-tune-type", "full", *EVERY[way])
    assert_same(alone, place / way)


@pytest.mark.parametrize("way", [*OF_EXPERTS, *LONG_EXPERTS])
def test_ranks_with_experts_train_as_one_process(place: Path, way: str) -> None:
    """Some ranks have no rows, and take part with nothing."""
    full = ("--fine-tune-type", "full", "--batch-size", "3", "--micro-batch-tokens", "64")
    if not (place / "experts alone").exists():
        train(place, "experts alone", *full, model="experts")
    train(place, way, *full, *EVERY[way], model="experts")
    assert_same(place / "experts alone", place / way)


@pytest.mark.parametrize(
    "more",
    [
        ("--num-layers", "1", "--lora-parameters", DROPPED),
        *(
            pytest.param(more, marks=pytest.mark.long)
            for more in (
                ("--fine-tune-type", "full", "--compile", "on"),
                ("--fine-tune-type", "full", "--grad-checkpoint", "--batch-size", "1"),
                ("--fine-tune-type", "full", "--reshard", "off"),
                ("--packing", "--isolate-documents"),
            )
        ),
    ],
)
def test_every_way_of_training_experts_does(place: Path, more: tuple[str, ...]) -> None:
    words = " ".join(more)
    one, other = f"one of experts {words}"[:80], f"shard x expert {words}"[:80]
    train(place, one, *_of_one(more), model="experts")
    train(place, other, *EVERY["shard x expert"], *more, model="experts")
    assert_same(place / one, place / other)


def test_samples_and_ruined_updates_of_experts_are_those_of_one_process(place: Path) -> None:
    assert_same_ruined(place, EVERY["shard x expert"], experts=4)


@pytest.mark.parametrize(
    ("way", "model", "more"),
    [
        (
            "shard x tensor",
            "quantised",
            ("--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}'),
        ),
        (
            "pipe x tensor",
            "quantised",
            ("--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}'),
        ),
        (
            "pipe x shard",
            "quantised",
            ("--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}'),
        ),
        # Some ranks have no row, or another number of micro-batches than the others.
        ("shard x tensor", "untied", ("--fine-tune-type", "full", "--batch-size", "1")),
        (
            "pipe x shard",
            "untied",
            ("--fine-tune-type", "full", "--batch-size", "3", "--micro-batch-tokens", "64"),
        ),
        pytest.param(
            "pipe x shard",
            "untied",
            ("--fine-tune-type", "full", "--batch-size", "1", "--grad-accumulation-steps", "3"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pipe x tensor",
            "model",
            ("--num-layers", "1", "--pp-schedule", "zb", "--compile", "on"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pipe x shard",
            "model",
            ("--num-layers", "1", "--pp-split", "1,3"),
            marks=pytest.mark.long,
        ),
        (
            "pipe x shard",
            "model",
            ("--fine-tune-type", "full", "--pp-schedule", "interleaved", "--reshard", "off"),
        ),
        pytest.param(
            "pipe x tensor",
            "model",
            ("--fine-tune-type", "full", "--pp-schedule", "interleaved"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "shard x tensor",
            "model",
            ("--packing", "--isolate-documents", "--max-seq-length", "64"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pipe x tensor",
            "model",
            ("--fine-tune-type", "full", "--compile", "on"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pipe x shard",
            "model",
            ("--fine-tune-type", "full", "--compile", "on"),
            marks=pytest.mark.long,
        ),
        (
            "shard x context",
            "quantised",
            ("--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}'),
        ),
        (
            "shard x context of four",
            "untied",
            ("--fine-tune-type", "full", "--batch-size", "3", "--micro-batch-tokens", "64"),
        ),
        *(
            pytest.param(way, model, more, marks=pytest.mark.long)
            for way, model, more in (
                ("shard x context", "model", ("--fine-tune-type", "full", "--compile", "on")),
                ("shard x context", "model", ("--packing", "--isolate-documents")),
                ("shard x context", "model", ("--fine-tune-type", "full", "--grad-checkpoint")),
                ("tensor x context", "quantised", ("--lora-parameters", DROPPED)),
                ("tensor x context", "model", ("--packing", "--isolate-documents")),
                ("pipe x context", "quantised", ("--lora-parameters", DROPPED)),
                ("pipe x context", "model", ("--num-layers", "1", "--batch-size", "1")),
                ("pipe x context", "model", ("--fine-tune-type", "full", "--compile", "on")),
                (
                    "pipe x context",
                    "model",
                    ("--fine-tune-type", "full", "--pp-schedule", "interleaved"),
                ),
                (
                    "pipe x context",
                    "model",
                    ("--num-layers", "1", "--pp-schedule", "zb", "--compile", "on"),
                ),
            )
        ),
    ],
)
def test_every_way_of_training_does(
    place: Path, way: str, model: str, more: tuple[str, ...]
) -> None:
    words = " ".join(more)
    one, other = f"one {words}"[:80], f"{way} {words}"[:80]
    if not (place / one).exists():
        train(place, one, *_of_one(more), model=model)
    train(place, other, *EVERY[way], *more, model=model)
    assert_same(place / one, place / other)


def _of_one(more: tuple[str, ...]) -> list[str]:
    """Options without those that only divided ranks have, and their values."""
    ours = ("--pp-schedule", "--pp-split", "--reshard")
    before = ("", *more[:-1])
    return [
        word
        for word, last in zip(more, before, strict=True)
        if word not in ours and last not in ours
    ]


@pytest.mark.parametrize(
    "way",
    [
        "pipe x shard",
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in ("shard x tensor", "shard x context", "tensor x context", "pipe x context")
        ),
    ],
)
def test_samples_are_those_of_one_process(place: Path, way: str) -> None:
    assert_same_samples(place, EVERY[way])


@pytest.mark.parametrize(
    "way",
    [
        *("shard x tensor", "pipe x shard", "tensor x context", "shard x context of four"),
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in ("pipe x tensor", "shard x context", "pipe x context")
        ),
    ],
)
def test_examples_that_ruin_an_update_are_named_as_by_one_process(place: Path, way: str) -> None:
    if not (place / "poisoned").exists():
        write_poisoned(place)
    more = ("--data", str(place / "with-z"), "--non-finite", "skip", "--val-batches", "0")
    found: list[Any] = []
    for name, ranks in (("one", ()), (way, EVERY[way])):
        run = place / f"skipped {name}"
        if not run.exists():
            train(place, run.name, *more, *ranks, model="poisoned")
        found.append(told(run, "skipped", "step", "examples"))
    assert found[0] == found[1]
    assert {each for examples in found[0][1::2] for each in examples} == {5, 12}


@pytest.mark.parametrize(
    "way",
    [
        "pipe x shard",
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in ("shard x tensor", "shard x context of four", "pipe x shard x context")
        ),
    ],
)
def test_examples_are_named_where_ranks_have_unlike_numbers_of_rows(place: Path, way: str) -> None:
    if not (place / "poisoned").exists():
        write_poisoned(place)
    more = (
        *("--data", str(place / "with-z"), "--non-finite", "skip", "--val-batches", "0"),
        *("--batch-size", "3", "--iters", "8", "--hang-timeout-s", "60"),
    )
    found: list[Any] = []
    for name, ranks in (("one", ()), (way, EVERY[way])):
        run = place / f"skipped of three {name}"
        if not run.exists():
            train(place, run.name, *more, *ranks, model="poisoned")
        found.append(told(run, "skipped", "step", "examples"))
    assert found[0] == found[1]
    assert {each for examples in found[0][1::2] for each in examples} == {5, 12}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("-n", "4", "--backend", "ring", "--strategy", "fsdp", "--tp", "2"), "--backend ring"),
        (("-n", "4", "--backend", "ring", "--strategy", "pipeline", "--tp", "2"), "--backend ring"),
        (("-n", "4", "--strategy", "pipeline", "--pp", "3", "--tp", "2"), "--pp 3 --tp 2"),
        (("-n", "2", "--strategy", "pipeline", "--tp", "2"), "--tp 2"),
        (("-n", "4", "--strategy", "fsdp", "--dp-shard", "4", "--tp", "2"), "--tp 2 --dp-shard 4"),
        (
            ("-n", "4", "--strategy", "pipeline", "--dp-shard", "2", "--optimizer", "muon"),
            "--dp-shard 2",
        ),
        (("-n", "4", "--strategy", "pipeline", "--reshard", "off"), "--reshard"),
        (("-n", "4", "--strategy", "zero1", "--tp", "2"), "--tp 2"),
        (("-n", "3", "--strategy", "fsdp", "--cp", "2"), "--cp 2"),
        (("-n", "4", "--strategy", "pipeline", "--ep", "2"), "--tp 2"),
        (("-n", "4", "--strategy", "zero1", "--ep", "2"), "--strategy zero1"),
        (("-n", "4", "--strategy", "fsdp", "--ep", "2", "--dp-shard", "2"), "--dp-shard"),
        (("-n", "4", "--strategy", "fsdp", "--ep", "2", "--cp", "2"), "--cp"),
        (("-n", "4", "--backend", "ring", "--strategy", "fsdp", "--cp", "2"), "--backend ring"),
        (("-n", "4", "--strategy", "pipeline", "--pp", "4", "--cp", "2"), "--pp 4 --cp 2"),
    ],
)
def test_what_does_not_go_together_is_refused(
    place: Path, more: tuple[str, ...], words: str
) -> None:
    assert words in train(place, "refused", *more, code=2)
