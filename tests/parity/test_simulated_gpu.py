"""The forms for NVIDIA GPUs under each way of dividing, on this computer's CPU, against one process
of the CPU's own forms.

``simulated_gpu`` has allhands take this computer for one with a GPU. So fused blocks, flat arrays
and fetched graphs are tested where there is no GPU; their kernels are not.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest
from tiny import run_allhands, write_model
from trained import (
    assert_ruined_alike,
    assert_same,
    told,
    train,
    train_ruined,
    write_models,
)

import allhands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DOUBLE = Path(__file__).parents[1] / "support" / "simulated_gpu"
SOURCE = Path(allhands.__file__).parents[1]
TWO, FOUR = ("-n", "2", "--backend", "ring"), ("-n", "4", "--backend", "mpi")
WAYS = {
    "one process": (),
    "data": (*TWO, "--strategy", "data"),
    "optimizer": (*TWO, "--strategy", "zero1"),
    "arrays": (*TWO, "--strategy", "fsdp"),
    "stages": (*TWO, "--strategy", "pipeline"),
    "matrices": (*TWO, "--tp", "2"),
    "rows": (*TWO, "--cp", "2"),
    "arrays x rows": (*TWO, "--strategy", "fsdp", "--cp", "2"),
}
OF_FOUR = {
    "arrays x matrices": (*FOUR, "--strategy", "fsdp", "--tp", "2"),
    "stages x matrices": (*FOUR, "--strategy", "pipeline", "--tp", "2"),
    "stages x arrays": (*FOUR, "--strategy", "pipeline", "--dp-shard", "2"),
    "stages x rows": (*FOUR, "--strategy", "pipeline", "--cp", "2"),
    "matrices x rows": (*FOUR, "--tp", "2", "--cp", "2"),
}
OF_EXPERTS = {
    "experts": (*TWO, "--ep", "2"),
    "arrays x experts": (*TWO, "--strategy", "fsdp", "--ep", "2"),
}
DROPPED = '{"rank": 4, "scale": 4.0, "dropout": 0.3}'
TRAININGS = {
    "full": ("--fine-tune-type", "full"),
    "LoRA": (),
    "LoRA with dropout": ("--num-layers", "2", "--lora-parameters", DROPPED),
}
MORE_TRAININGS = {
    "QLoRA": (),
    "documents": ("--packing", "--isolate-documents"),
    "recomputed": ("--fine-tune-type", "full", "--grad-checkpoint"),
    # Some ranks have fewer micro-batches than others.
    "Adam": (
        *("--fine-tune-type", "full", "--optimizer", "adamw", "--learning-rate", "0.001"),
        *("--batch-size", "3", "--micro-batch-tokens", "64"),
    ),
}
# Optimizers that update arrays as a whole, in ways that leave arrays whole.
OF_WHOLE_ARRAYS = {
    "Muon": ("--fine-tune-type", "full", "--optimizer", "muon", "--learning-rate", "0.001"),
    "Adafactor": ("--fine-tune-type", "full", "--optimizer", "adafactor"),
}
# Their models answer for one token alone, or by all ranks together.
SAMPLED = ("one process", "arrays", "stages", "arrays x experts")
EVERY_WAY = WAYS | OF_FOUR | OF_EXPERTS
EVERY_TRAINING = TRAININGS | MORE_TRAININGS | OF_WHOLE_ARRAYS
CASES = [
    *((training, way) for training in TRAININGS for way in (*WAYS, *OF_EXPERTS)),
    *((training, "stages") for training in OF_WHOLE_ARRAYS),
    *(
        pytest.param(training, way, marks=pytest.mark.long)
        for training in OF_WHOLE_ARRAYS
        for way in ("one process", "data", "rows", "stages x rows")
    ),
    *(
        pytest.param(training, way, marks=pytest.mark.long)
        for training, ways in [(t, OF_FOUR) for t in TRAININGS]
        + [(t, WAYS | OF_FOUR) for t in MORE_TRAININGS]
        for way in ways
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("simulated"))
    write_model(folder / "experts", layers=4, hidden=64, experts=4)
    write_model(folder / "normed", layers=4, hidden=64, kind="qwen3")
    return folder


@cache
def one_process(place: Path, training: str, model: str) -> Path:
    """The run of one process in the forms for a CPU."""
    name = f"{training} of {model}"
    train(place, name, *EVERY_TRAINING[training], model=model)
    return place / name


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are started from now on find a GPU."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (DOUBLE, SOURCE))))
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")  # MLX would call a compiler for each kernel


@pytest.mark.parametrize(("training", "way"), CASES)
def test_forms_for_gpus_train_as_those_for_a_cpu(
    place: Path, monkeypatch: pytest.MonkeyPatch, training: str, way: str
) -> None:
    model = "experts" if way in OF_EXPERTS else "quantised" if training == "QLoRA" else "model"
    expected = one_process(place, training, model)
    simulate(monkeypatch)
    name = f"{training} by {way}"
    train(place, name, *EVERY_TRAINING[training], *EVERY_WAY[way], model=model)
    assert_same(expected, place / name)


@pytest.mark.parametrize("way", ["arrays", "stages", "matrices", "rows"])
def test_norms_of_queries_and_keys(place: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    expected = one_process(place, "LoRA", "normed")
    simulate(monkeypatch)
    name = f"normed by {way}"
    train(place, name, *TRAININGS["LoRA"], *WAYS[way], model="normed")
    assert_same(expected, place / name)


@cache
def ruined_in_one(place: Path, experts: int) -> Path:
    """The run of one process in the forms for a CPU."""
    return train_ruined(place, "in one", experts=experts)


@pytest.mark.parametrize(
    "way",
    [
        *SAMPLED,
        *(
            pytest.param(way, marks=pytest.mark.long)
            for way in (*WAYS, *OF_FOUR, *OF_EXPERTS)
            if way not in SAMPLED
        ),
    ],
)
def test_samples_and_ruined_updates(place: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A GPU pads the rows of samples, so a divided model must answer before the end of a row."""
    experts = 4 if way in OF_EXPERTS else 0
    expected = ruined_in_one(place, experts)
    simulate(monkeypatch)
    assert_ruined_alike(expected, train_ruined(place, way, *EVERY_WAY[way], experts=experts))


@pytest.mark.parametrize("ranks", [(), ("-n", "2", "--ep", "2")], ids=["one", "experts"])
def test_routers_that_learn_balance_count_no_padding(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    """The last row of an epoch is short, and a GPU would pad it to the length of the others."""
    asked = ["--shape", "mixtral-tiny", "--layers", "2", "--experts", "4", "--block-size", "80"]
    asked += ["--router-aux-loss", "0.5", "--dtype", "float32", "--iters", "4", "--batch-size", "8"]
    asked += ["--val-batches", "0", "--steps-per-report", "1", "--gradient-check", "off"]
    asked += ["--tokenizer", str(place / "model"), "--data", str(place / "data")]
    for name, more in (("cpu", ()), ("gpu", ranks)):
        if name == "gpu":
            simulate(monkeypatch)
        done = run_allhands("pretrain", *asked, "--adapter-path", tmp_path / name, *more)
        assert done.returncode == 0, done.stderr
    losses, norms = (
        [told(tmp_path / name, "train", key) for name in ("gpu", "cpu")]
        for key in ("loss", "grad_norm")
    )
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert norms[0] == pytest.approx(norms[1], rel=2e-5)


def test_the_forms_are_those_for_gpus(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    asked = ("--model", place / "model", "--data", place / "data", "--iters", "1", "-v")
    done = run_allhands("train", "--train", *asked, "--adapter-path", place / "told")
    assert done.returncode == 0, done.stderr
    assert re.search("[1-9][0-9]* .*use few matrix products", done.stdout + done.stderr)
