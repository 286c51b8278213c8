"""What is planned for one process and for two, beside what then happens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import changed
from planned_training import TWENTY_STEPS, seconds_of_a_step, words_of, write_texts
from tiny import run_allhands

from allhands.observe.metrics import read_metrics

pytestmark = pytest.mark.long

ALL_CORES = {"OPENBLAS_NUM_THREADS": ""}
"""The plan counts cores, and `run_allhands` gives each command one unless it is told otherwise."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    write_texts(folder, 400)
    return folder


def highest_memory(place: Path, name: str, *options: str) -> int:
    """Of the rank that has taken most in a real run, before what is written and drawn at the end."""
    run = place / f"run-{name}"
    more = ("--iters", "6", "--steps-per-report", "1", "--val-batches", "0", "--save-every", "6")
    words = changed([*words_of(place), *more, "--adapter-path", str(run)], options)
    done = run_allhands("pretrain", *map(str, words), timeout=400)
    assert done.returncode == 0, done.stderr
    return max(peak for report in read_metrics(run).train for peak in report.peak_memory_bytes)


def planned(place: Path, *where: str) -> dict[str, Any]:
    kept = ("--adapter-path", str(place / "planned"))
    words = (*words_of(place), "--iters", "1000", *kept, *where, "--json")
    done = run_allhands("plan", *words, env=ALL_CORES, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert [line["machines"] for line in found["machines"]] == [1, 2]
    return found


@pytest.fixture(scope="module")
def found(place: Path) -> dict[str, Any]:
    return planned(place, "-n", "2")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_memory_is_as_planned(found: dict[str, Any]) -> None:
    """The peak of the short training itself, and what that expected of itself."""
    assert found["memory"][0]["rank_bytes"] == pytest.approx(
        found["measured"]["peak_bytes"], rel=0.1
    )
    assert found["memory"][0]["rank_bytes"] == pytest.approx(
        found["measured"]["expected_bytes"], rel=1e-6
    )
    assert "each of 2 processes" in found["notes"][0]
    assert (
        found["machines"][1]["prediction"]["compute_s"]
        < found["machines"][0]["prediction"]["compute_s"]
    )


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_each_way_takes_the_memory_that_was_planned(place: Path, found: dict[str, Any]) -> None:
    assert [way["name"] for way in found["memory"]] == [
        "as it is",
        "half micro-batches",
        "checkpointing",
        "data parallel",
    ]
    for number, way in enumerate(found["memory"]):
        options = ("--cores-per-rank", "1", *way["flags"].split())
        peak = highest_memory(place, f"way-{number}", *options)
        assert way["rank_bytes"] == pytest.approx(peak, rel=0.1), way["name"]


@pytest.mark.timeout(900)  # compiled for a CPU, each length of rows takes a compiler's time
@pytest.mark.parametrize(
    "more",
    [
        ("--shape", "mixtral", "--experts", "4", "--experts-per-token", "2"),
        ("--grad-accumulation-steps", "2", "--batch-size", "32"),
        ("--optimizer", "muon", "--shape", "qwen3"),
        ("--sample-prompts", '["word1 word2"]', "--sample-every", "5"),
        ("--compile", "on"),
    ],
)
def test_memory_of_other_trainings_is_as_planned(place: Path, more: tuple[str, ...]) -> None:
    kept = ("--adapter-path", str(place / "planned"))
    words = changed([*words_of(place), "--iters", "1000", *kept, "--json"], more)
    done = run_allhands("plan", *map(str, words), timeout=400)
    assert done.returncode == 0, done.stderr
    peak = highest_memory(place, "-".join(word.strip("-") for word in more), *more)
    assert json.loads(done.stdout)["memory"][0]["rank_bytes"] == pytest.approx(peak, rel=0.1)


@pytest.mark.skipif(
    not os.environ.get("ALLHANDS_TEST_TIMES"),
    reason="ALLHANDS_TEST_TIMES: on a quiet computer only",
)
def test_steps_of_processes_take_as_long_as_planned(place: Path, found: dict[str, Any]) -> None:
    if found["doubt"]:
        pytest.skip(found["doubt"])
    whole = place / "run-whole"
    alone = ("--adapter-path", str(whole))
    done = run_allhands(
        "pretrain", *words_of(place), *TWENTY_STEPS, *alone, env=ALL_CORES, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert found["one_process_s"] == pytest.approx(seconds_of_a_step(whole), rel=0.15), (
        "with all cores"
    )
    for line, ranks in zip(found["machines"], ("1", "2"), strict=True):
        run = ("-n", ranks, "--cores-per-rank", "1", "--adapter-path", str(place / f"run-{ranks}"))
        done = run_allhands("pretrain", *words_of(place), *TWENTY_STEPS, *run, timeout=200)
        assert done.returncode == 0, done.stderr
        really = seconds_of_a_step(place / f"run-{ranks}")
        assert line["prediction"]["step_s"] == pytest.approx(really, rel=0.15)
