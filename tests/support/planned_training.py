"""A small pre-training that is planned, then run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from tiny import write_tokenizer

from allhands.observe.metrics import read_metrics

SHAPE = ("--shape", "llama", "--layers", "4", "--dims", "256", "--mlp-dims", "768", "--heads", "4")
TRAINING = (
    *SHAPE,
    "--block-size",
    "256",
    "--batch-size",
    "16",
    "--packing",
    "--sample-prompts",
    "[]",
)
TWENTY_STEPS = (
    "--iters",
    "20",
    "--steps-per-report",
    "1",
    "--val-batches",
    "0",
    "--save-every",
    "20",
)


def write_texts(folder: Path, count: int) -> list[str]:
    """A tokenizer and so many texts, in folders of their own; the lines of the texts."""
    write_tokenizer(folder / "tokenizer")
    (folder / "texts").mkdir()
    lines = [
        json.dumps({"text": " ".join(f"word{(7 * i + j) % 97}" for j in range(120))})
        for i in range(count)
    ]
    (folder / "texts" / "train.jsonl").write_text("\n".join(lines) + "\n")
    return lines


def words_of(folder: Path) -> list[str]:
    """What the training is told, without where it leaves its results."""
    return ["--data", str(folder / "texts"), "--tokenizer", str(folder / "tokenizer"), *TRAINING]


def seconds_of_a_step(run: Path) -> float:
    """The median of a real run's steps, after the first ones."""
    return statistics.median(report.step_time_s for report in read_metrics(run).train[4:])
