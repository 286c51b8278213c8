"""Trainings of a few steps as commands, and the comparison of two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import run_allhands, write_chat_data, write_model
from tokenizers import Tokenizer

OPTIONS = (
    "--train --iters 4 --batch-size 8 --num-layers -1 --steps-per-report 1 --val-batches -1 --steps-per-eval 2 "
    "--save-every 2 --gradient-check off --learning-rate 0.05 --optimizer sgd --seed 3 --max-grad-norm 0.5"
)


# Events of a run, with the keys that tell which examples were left out, and what was written.
SKIPPED, SAMPLED = ("skipped", "step", "examples"), ("sampled", "step", "text")


def write_models(folder: Path) -> Path:
    """Models and chats for :func:`train`: with a shared table, without, and in 4 bits."""
    write_model(folder / "model", layers=4, hidden=64)
    write_model(folder / "untied", layers=3, hidden=64, tied=False)
    write_model(folder / "quantised", layers=3, hidden=64, bits=4)
    write_chat_data(folder / "data")
    return folder


def train(place: Path, name: str, *more: str, code: int = 0, model: str = "model") -> str:
    """Train into the folder ``name``; what the command has said on standard error."""
    given = [
        *OPTIONS.split(),
        "--model",
        place / model,
        "--data",
        place / "data",
        "--adapter-path",
        place / name,
    ]
    fields = [each for each in more if each.startswith("--")]
    # What a case gives in its own way is taken out of the common options.
    for field in fields:
        if field in given:
            del given[(at := given.index(field)) : at + 2]
    done = run_allhands("train", *given, *more)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def told(run: Path, event: str, *keys: str) -> list[Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if line["event"] == event for key in keys]


def arrays(path: Path) -> dict[str, mx.array]:
    found: Any = mx.load(str(path))
    return found


def assert_same(one: Path, other: Path, rel: float = 2e-5) -> None:
    assert told(other, "train", "loss", "grad_norm") == pytest.approx(
        told(one, "train", "loss", "grad_norm"), rel=rel
    )
    assert told(other, "valid", "loss") == pytest.approx(told(one, "valid", "loss"), rel=rel)
    expected, found = (arrays(run / "adapters.safetensors") for run in (one, other))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        apart = mx.linalg.norm(found[key] - array) / mx.maximum(mx.linalg.norm(array), 1e-6)
        assert apart.item() < 10 * rel, key


def write_poisoned(place: Path, experts: int = 0) -> None:
    """A model, ``poisoned``, whose frozen table poisons what holds a z: examples 5 and 12 of the
    chats ``with-z``.
    """
    model = write_model(place / "poisoned", layers=3, hidden=32, tied=False, experts=experts)
    weights = arrays(model / "model.safetensors")
    token = Tokenizer.from_file(str(place / "poisoned" / "tokenizer.json")).token_to_id("z")
    weights["model.embed_tokens.weight"][token] = float("nan")
    mx.save_safetensors(
        str(place / "poisoned" / "model.safetensors"), weights, metadata={"format": "mlx"}
    )
    write_chat_data(place / "with-z")
    file = place / "with-z" / "train.jsonl"
    lines = file.read_text().splitlines()
    for number in (4, 11):
        lines[number] = lines[number].replace('"content": "', '"content": "z', 1)
    file.write_text("\n".join(lines) + "\n")


def train_ruined(place: Path, name: str, *ranks: str, experts: int = 0) -> Path:
    """Train on examples that ruin updates, with samples; the run."""
    folder = place / f"ruined {experts}"
    if not folder.exists():
        folder.mkdir()
        write_poisoned(folder, experts)
    more = ("--data", str(folder / "with-z"), "--non-finite", "skip")
    more += ("--sample-prompts", '["hello", "you"]', "--sample-tokens", "12")
    train(folder, name, *more, *ranks, model="poisoned")
    return folder / name


def assert_ruined_alike(one: Path, other: Path) -> None:
    """The same examples of two runs of :func:`train_ruined` were named, and the same was written."""
    skipped, texts = told(one, *SKIPPED), told(one, *SAMPLED)
    assert (told(other, *SKIPPED), told(other, *SAMPLED)) == (skipped, texts)
    assert {each for examples in skipped[1::2] for each in examples} == {5, 12}
    assert len(texts) >= 4


def assert_same_ruined(place: Path, divided: tuple[str, ...], experts: int = 0) -> None:
    """Train on examples that ruin updates, as one process and as ``divided`` ranks, and compare."""
    one, other = (
        train_ruined(place, name, *ranks, experts=experts)
        for name, ranks in (("one", ()), ("divided", divided))
    )
    assert_ruined_alike(one, other)


def assert_same_samples(place: Path, divided: tuple[str, ...]) -> None:
    """Train with samples, as one process and as ``divided`` ranks, and compare what was written.

    Samples are written without the dropout of training.
    """
    texts: list[list[Any]] = []
    how = ["--sample-prompts", '["hello", "you"]', "--sample-tokens", "12"]
    how += ["--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}']
    for name, more in (("samples-1", ()), ("samples-2", divided)):
        train(place, name, *how, *more)
        texts.append(told(place / name, "sampled", "text"))
    assert texts[0] == texts[1]
    assert len(texts[0]) >= 2
