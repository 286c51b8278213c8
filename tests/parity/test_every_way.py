"""Every way of dividing work, once each: two ranks train as one process does.

The other cases of a way are in its own file, most of them ``slow``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_chat_data, write_model
from trained import assert_same, train

WAYS = {
    "data parallel": (),
    "fsdp": ("--strategy", "fsdp"),
    "pipeline": ("--strategy", "pipeline"),
    "tensor": ("--tp", "2"),
    "context": ("--cp", "2"),
    "expert": ("--ep", "2"),
    "fsdp and context": ("--strategy", "fsdp", "--cp", "2"),
    "fsdp and expert": ("--strategy", "fsdp", "--ep", "2"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    write_model(folder / "model", layers=3, hidden=64)
    write_model(folder / "experts", layers=2, hidden=64, experts=4)
    write_chat_data(folder / "data")
    for model in ("model", "experts"):
        train(folder, f"{model} alone", "--fine-tune-type", "full", model=model)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_one_process(place: Path, way: str) -> None:
    model = "experts" if "expert" in way else "model"
    ranks = ("-n", "2", "--backend", "ring", *WAYS[way])
    train(place, way, "--fine-tune-type", "full", *ranks, model=model)
    assert_same(place / f"{model} alone", place / way)
