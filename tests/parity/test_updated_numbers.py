"""The trained numbers that a rank says it updates, under every way of dividing them."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest
from tiny import run_allhands, write_model
from trained import arrays, write_models

from allhands.distributed.shards import Shards

TWO = (
    "--train",
    "-n",
    "2",
    "--backend",
    "ring",
    "--optimizer",
    "adamw",
    "--iters",
    "2",
    "--num-layers",
    "-1",
)
MORE = (
    "--lora-parameters",
    '{"rank": 64}',
    "--val-batches",
    "0",
    "--gradient-check",
    "off",
    "--log-level",
    "verbose",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("updated"))
    write_model(folder / "mixture", layers=2, hidden=64, experts=4)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "model", "part"),
    [
        (("--strategy", "data"), "model", None),
        (("--strategy", "zero1", "--compile", "on"), "model", 0.5),
        (("--strategy", "fsdp"), "model", 0.5),
        (("--strategy", "pipeline"), "model", 0.5),
        (("--strategy", "pipeline", "--pp-split", "3,1"), "model", 0.75),
        # Of each pair of factors one is whole.
        (("--tp", "2"), "model", 0.7),
        (("--ep", "2", "--fine-tune-type", "full"), "mixture", 0.6),
    ],
)
def test_ranks_say_what_they_update(
    place: Path, way: tuple[str, ...], model: str, part: float | None
) -> None:
    name = " ".join(way)
    words = (
        "--model",
        place / model,
        "--data",
        place / "data",
        "--adapter-path",
        place / name,
        *way,
    )
    done = run_allhands("train", *TWO, *MORE, *words)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "chosen: optimizer: " in line)
    *own, every = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", line)[:2])
    assert every == sum(
        array.size for array in arrays(place / name / "adapters.safetensors").values()
    )
    if part is None:
        assert not own
    else:
        assert own[0] == pytest.approx(part * every, rel=0.05)


def test_parts_of_flat_arrays_have_all_numbers_once() -> None:
    class Rank:
        size, backend = 3, "none"

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_sum(self, array: mx.array) -> mx.array:
            return array

        all_gather = all_sum

    shapes = [(100_000,), (1_000, 64), (7,)]
    own = [Shards(Rank(rank), shapes).num_own for rank in range(3)]
    assert sum(own) == 100_000 + 64_000 * 3 + 7 * 3, "what is small is everybody's"
    assert own[0] > own[2], "zeros fill up the last part"
