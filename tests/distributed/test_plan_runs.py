"""What is planned for one process and for two, beside what then happens."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from tiny import run_allhands

from allhands.metrics import read_metrics

pytestmark = pytest.mark.long

SHAPE = ("--shape", "llama", "--layers", "4", "--dims", "256", "--mlp-dims", "768", "--heads", "4")
TRAINING = (*SHAPE, "--block-size", "256", "--batch-size", "16", "--packing", "--sample-prompts", "[]")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import write_tokenizer

    folder = tmp_path_factory.mktemp("plan")
    write_tokenizer(folder / "tokenizer")
    (folder / "texts").mkdir()
    lines = [json.dumps({"text": " ".join(f"word{(7 * i + j) % 97}" for j in range(120))}) for i in range(400)]
    (folder / "texts" / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def words_of(place: Path) -> list[str]:
    return ["--data", str(place / "texts"), "--tokenizer", str(place / "tokenizer"), *TRAINING]


def seconds_of_a_step(place: Path, ranks: int) -> float:
    """The median of steps of a real run, after the first ones."""
    run = place / f"run-{ranks}"
    more = ("--iters", "24", "--steps-per-report", "1", "--val-batches", "0", "--save-every", "24")
    done = run_allhands(
        "pretrain", *words_of(place), *more, "-n", str(ranks), "--cores-per-rank", "1", "--adapter-path", str(run)
    )
    assert done.returncode == 0, done.stderr
    return statistics.median(report.step_time_s for report in read_metrics(run).train[4:])


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_steps_take_as_long_as_planned(place: Path) -> None:
    done = run_allhands("plan", *words_of(place), "--iters", "1000", "-n", "2", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    for line, ranks in zip(found["machines"], (1, 2), strict=True):
        assert line["machines"] == ranks
        assert line["prediction"]["step_s"] == pytest.approx(seconds_of_a_step(place, ranks), rel=0.15)
    assert "each of 2 processes of this computer has" in found["notes"][0]
