"""Two ways of dividing at once, or three, against one process: losses, norms, validation, weights,
checkpoints.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import write_model
from trained import (
    assert_same,
    assert_same_ruined,
    assert_same_samples,
    told,
    train,
    write_models,
    write_poisoned,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FOUR = ("-n", "4", "--backend", "mpi")
WAYS = {
    "shard x tensor": (*FOUR, "--strategy", "fsdp", "--tp", "2"),
    "pipe x tensor": (*FOUR, "--strategy", "pipeline", "--tp", "2"),
    "pipe x shard": (*FOUR, "--strategy", "pipeline", "--dp-shard", "2"),
}
# Token positions are divided, and something else.
TWO, EIGHT, ROWS = ("-n", "2", "--backend", "ring"), ("-n", "8", "--backend", "mpi"), ("--cp", "2")
OF_ROWS = {
    "shard x context": (*TWO, *ROWS, "--strategy", "fsdp"),
    "shard x context of four": (*FOUR, *ROWS, "--strategy", "fsdp"),
    "tensor x context": (*FOUR, *ROWS, "--tp", "2"),
    "pipe x context": (*FOUR, *ROWS, "--strategy", "pipeline"),
}
OF_EIGHT = {
    "shard x context, copies": (*EIGHT, *ROWS, "--strategy", "fsdp", "--dp-shard", "2"),
    "shard x tensor x context": (*EIGHT, *ROWS, "--strategy", "fsdp", "--tp", "2"),
    "pipe x tensor x context": (*EIGHT, *ROWS, "--strategy", "pipeline", "--tp", "2"),
    "pipe x shard x context": (*EIGHT, *ROWS, "--strategy", "pipeline", "--dp-shard", "2"),
}
EXPERTS, ALL_IN_ONE = ("--ep", "2"), ("--ep", "2", "--tp", "2")
OF_EXPERTS = {
    "shard x expert": (*TWO, *EXPERTS, "--strategy", "fsdp"),
    "expert x context": (*FOUR, *EXPERTS, *ROWS),
    "shard x experts in matrices": (*FOUR, *ALL_IN_ONE, "--strategy", "fsdp"),
    "pipe x experts in matrices": (*FOUR, *ALL_IN_ONE, "--strategy", "pipeline"),
}
OF_MORE_EXPERTS = {
    "shard x expert, copies": (*FOUR, *EXPERTS, "--strategy", "fsdp"),
    "shard x expert, copies over a ring": ("-n", "4", *TWO[2:], *EXPERTS, "--strategy", "fsdp"),
    "experts in matrices x context": (*FOUR, *ALL_IN_ONE, *ROWS),
    "shard x experts in matrices x context": (*EIGHT, *ALL_IN_ONE, *ROWS, "--strategy", "fsdp"),
}
EVERY = WAYS | OF_ROWS | OF_EIGHT | OF_EXPERTS | OF_MORE_EXPERTS
LONG_EXPERTS = [pytest.param(way, marks=pytest.mark.long) for way in OF_MORE_EXPERTS]
LONG = [pytest.param(way, marks=pytest.mark.long) for way in OF_EIGHT]
DROPPED = '{"rank": 4, "scale": 4.0, "dropout": 0.3}'
ADAM = ("--fine-tune-type", "full", "--optimizer", "adamw", "--learning-rate", "0.001")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("together"))
    write_model(folder / "experts", layers=4, hidden=64, experts=4)
    return folder


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


def test_checkpoints_of_experts_are_those_of_any_other_division(place: Path) -> None:
    train(place, "adam of experts", *ADAM, model="experts")
    way = EVERY["shard x expert"]
    train(place, "half of experts", *ADAM, *way, "--iters", "2", model="experts")
    train(place, "one half of experts", *ADAM, "--iters", "2", model="experts")
    shutil.copytree(place / "half of experts", place / "again of experts")
    train(place, "half of experts", *ADAM, "--resume", "auto", model="experts")
    for name in ("one half of experts", "again of experts"):
        train(place, name, *ADAM, *way, "--resume", "auto", model="experts")
    for name in ("half of experts", "one half of experts", "again of experts"):
        assert_same(place / "adam of experts", place / name)


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


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A training of one process with AdamW; ``half`` beside it stopped after two of its steps."""
    train(place, "adam", *ADAM)
    train(place, "half", *ADAM, "--iters", "2")
    return place / "adam"


@pytest.mark.parametrize(
    "way", [*WAYS, *(pytest.param(way, marks=pytest.mark.long) for way in OF_ROWS)]
)
def test_checkpoints_are_those_of_any_other_division(place: Path, whole: Path, way: str) -> None:
    """Each goes on under another one, and as one process; what one process saved goes on under
    each.
    """
    ways = WAYS if way in WAYS else OF_ROWS
    names = list(ways)
    other = ways[names[(names.index(way) + 1) % len(names)]]
    train(place, f"{way} half", *ADAM, *ways[way], "--iters", "2")
    for run, saved, flags in (
        ("alone", f"{way} half", ()),
        ("other", f"{way} half", other),
        ("again", f"{way} half", ways[way]),
        ("from one", "half", ways[way]),
    ):
        shutil.copytree(place / saved, place / f"{way} {run}")
        train(place, f"{way} {run}", *ADAM, *flags, "--resume", "auto")
        assert_same(whole, place / f"{way} {run}")


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


@pytest.mark.parametrize("way", [*WAYS, *OF_ROWS])
def test_examples_that_ruin_an_update_are_named_as_by_one_process(place: Path, way: str) -> None:
    if not (place / "poisoned").exists():
        write_poisoned(place)
    more = ("--data", str(place / "with-z"), "--non-finite", "skip", "--val-batches", "0")
    found: list[Any] = []
    for name, ranks in (("one", ()), (way, EVERY[way])):
        train(place, f"skipped {name}", *more, *ranks, model="poisoned")
        found.append(told(place / f"skipped {name}", "skipped", "step", "examples"))
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
