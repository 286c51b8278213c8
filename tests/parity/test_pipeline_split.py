"""Stages by memory and speed: what ranks agree on, that it trains as one process does, and that a
restart keeps it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import run_allhands, write_chat_data, write_model

OPTIONS = (
    "--train --iters 4 --batch-size 8 --num-layers -1 --steps-per-report 1 --val-batches -1 --steps-per-eval 2 "
    "--save-every 2 --gradient-check off --learning-rate 0.05 --optimizer sgd --seed 3"
)
PIPELINE = ("-n", "2", "--backend", "ring", "--strategy", "pipeline")
# What the ranks measure and have: speeds, and bytes beside what a process itself takes.
SITE = """
import importlib.abc, importlib.util, json, os, sys

GIVEN = json.loads(os.environ["TEST_RANKS"])

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "allhands.run.dividing":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def changed(module):
            execute(module)
            rank = int(os.environ.get("ALLHANDS_RANK", "0"))
            if "speeds" in GIVEN:
                module.time_products = lambda *_: GIVEN["speeds"]
                module.is_several = lambda mesh: True
            if "rooms" in GIVEN:
                module.present_bytes = lambda *_: 0
                module.Device.room = property(lambda self: GIVEN["rooms"][rank])
        spec.loader.exec_module = changed
        return spec

sys.meta_path.insert(0, Finder())
"""
# Bytes of buffers that a rank keeps for rows of other lengths, and those that the last stage and a
# block or two fit into.
BUFFERS, SMALL = 6_300_000, 2_600_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    write_model(folder / "model", layers=6, hidden=64)
    write_chat_data(folder / "data")
    (folder / "sitecustomize.py").write_text(SITE)
    train(folder, "alone")
    return folder


def train(place: Path, name: str, *more: str, code: int = 0, **ranks: list[float]) -> str:
    """Train into the folder ``name`` on ranks that have and measure what is given; what the command
    has said.
    """
    env = {"PYTHONPATH": str(place), "TEST_RANKS": json.dumps(ranks)} if ranks else {}
    given = [
        *OPTIONS.split(),
        "--model",
        place / "model",
        "--data",
        place / "data",
        "--adapter-path",
        place / name,
    ]
    for field in ("--iters", "--num-layers"):
        if field in more:
            del given[(at := given.index(field)) : at + 2]
    done = run_allhands("train", *given, *more, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def stages(said: str) -> list[int]:
    found = re.search(r"stages: ([0-9 +]+) blocks", said)
    assert found, said
    return [int(each) for each in found[1].split("+")]


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] in ("train", "valid")]


def recorded(run: Path) -> list[int]:
    newest = max(run.rglob("state.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())["stages"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ({"speeds": [1.0, 0.95]}, [2, 4]),  # but for the last, stages compute forward passes twice
        ({"speeds": [1.0, 0.4]}, [4, 2]),
        ({"speeds": [0.5, 1.0]}, [1, 5]),
    ],
    ids=["noise", "slow", "fast"],
)
def test_faster_ranks_have_more_blocks(
    place: Path, ranks: dict[str, Any], expected: list[int]
) -> None:
    name = "-".join(map(str, expected))
    said = train(place, name, *PIPELINE, **ranks)
    assert stages(said) == expected == recorded(place / name)
    assert losses(place / name) == pytest.approx(losses(place / "alone"), rel=2e-5)


@pytest.mark.slow
def test_a_rank_has_no_more_than_it_has_memory_for(place: Path) -> None:
    said = train(place, "small", *PIPELINE, rooms=[10**9, BUFFERS + SMALL])
    found = stages(said)
    assert found[0] > found[1]
    assert "rank 1 may have" in said
    assert losses(place / "small") == pytest.approx(losses(place / "alone"), rel=2e-5)


@pytest.mark.slow
def test_unlike_stages_have_a_reason(place: Path) -> None:
    said = train(place, "last", *PIPELINE, "--num-layers", "2")
    assert stages(said) == [4, 2]
    assert re.search(r"stages: 4 \+ 2 blocks \(.*first 4 blocks", said)
    assert re.search(
        r"stages: 3 \+ 3 blocks$", train(place, "full", *PIPELINE, "--fine-tune-type", "full"), re.M
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zb"])
def test_other_schedules_are_divided_by_memory_too(place: Path, schedule: str) -> None:
    said = train(
        place,
        schedule,
        *PIPELINE,
        "--pp-schedule",
        schedule,
        "--compile",
        "on",
        rooms=[10**9, BUFFERS + 3 * SMALL // 2],
    )
    found = stages(said)
    assert len(found) == (4 if schedule == "interleaved" else 2)
    assert sum(found[::2]) > sum(found[1::2])
    assert losses(place / schedule) == pytest.approx(losses(place / "alone"), rel=2e-5)
    refused = train(
        place,
        f"{schedule}-refused",
        *PIPELINE,
        "--pp-schedule",
        schedule,
        "--compile",
        "on",
        code=4,
        rooms=[1, 1],
    )
    assert re.search(r"rank 1 .* would need [1-9]", refused)


@pytest.mark.slow
def test_stages_that_were_asked_for_have_to_have_room(place: Path) -> None:
    said = train(place, "asked", *PIPELINE, "--pp-split", "2,4", rooms=[10**9, SMALL // 2])
    assert re.search(r"rank 1 with .* would need", said)
    assert losses(place / "asked") == pytest.approx(losses(place / "alone"), rel=2e-5)
    refused = train(
        place, "asked-refused", *PIPELINE, "--pp-split", "2,4", code=4, rooms=[10**9, SMALL // 10]
    )
    assert "--pp-split 2,4" in refused
    assert not (place / "asked-refused" / "metrics.jsonl").exists()


def test_what_fits_no_ranks_is_refused_with_what_is_missing(place: Path) -> None:
    refused = train(place, "refused", *PIPELINE, code=4, rooms=[1, 1])
    assert "--strategy pipeline" in refused
    assert re.search(r"rank 1 .* would need [1-9]", refused)


@pytest.mark.slow
def test_a_restart_keeps_its_split_and_other_ranks_have_their_own(place: Path) -> None:
    train(place, "again", *PIPELINE, "--iters", "2", speeds=[1.0, 0.5])
    before = recorded(place / "again")
    said = train(place, "again", *PIPELINE, "--resume", "auto", speeds=[0.5, 1.0])
    assert stages(said) == before == recorded(place / "again")
    assert "checkpoint" in said
    train(place, "whole", *PIPELINE, speeds=[1.0, 0.5])
    one, other = (
        mx.load(str(place / name / "adapters.safetensors")) for name in ("whole", "again")
    )
    assert isinstance(one, dict)
    assert isinstance(other, dict)
    assert all(mx.array_equal(one[key], other[key]).item() for key in one)
    # With less memory than the recorded split takes, there is a new one.
    train(place, "moved", *PIPELINE, "--iters", "2", speeds=[0.5, 1.0])
    said = train(place, "moved", *PIPELINE, "--resume", "auto", rooms=[10**9, BUFFERS + SMALL])
    assert stages(said) != before[::-1]
    assert stages(said)[0] > stages(said)[1]
