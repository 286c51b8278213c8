"""Checkpoints of two ways of dividing at once go on under other ways, and as one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from together import ADAM, EVERY, OF_ROWS, WAYS, write_models_of_every_way
from trained import assert_same, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models_of_every_way(tmp_path_factory.mktemp("resumed"))


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
