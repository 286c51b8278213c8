"""Trainings of a few steps as commands, and the comparison of two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import run_allhands

OPTIONS = (
    "--train --iters 4 --batch-size 8 --num-layers -1 --steps-per-report 1 --val-batches -1 --steps-per-eval 2 "
    "--save-every 2 --gradient-check off --learning-rate 0.05 --optimizer sgd --seed 3 --max-grad-norm 0.5"
)


def train(place: Path, name: str, *more: str, code: int = 0, model: str = "model") -> str:
    """Train into the folder ``name``; what the command has said on standard error."""
    given = [*OPTIONS.split(), "--model", place / model, "--data", place / "data", "--adapter-path", place / name]
    fields = [each for each in more if each.startswith("--")]
    # What a case gives in its own way is taken out of the common options.
    for field in fields:
        if field in given:
            del given[(at := given.index(field)) : at + 2]
    done = run_allhands("train", *given, *more)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def told(run: Path, event: str, *keys: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if line["event"] == event for key in keys]


def arrays(path: Path) -> dict[str, mx.array]:
    found: Any = mx.load(str(path))
    return found


def assert_same(one: Path, other: Path, rel: float = 2e-5) -> None:
    assert told(other, "train", "loss", "grad_norm") == pytest.approx(told(one, "train", "loss", "grad_norm"), rel=rel)
    assert told(other, "valid", "loss") == pytest.approx(told(one, "valid", "loss"), rel=rel)
    expected, found = (arrays(run / "adapters.safetensors") for run in (one, other))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        apart = mx.linalg.norm(found[key] - array) / mx.maximum(mx.linalg.norm(array), 1e-6)
        assert apart.item() < 10 * rel, key
