"""Validations in plans: as many as training makes, of the rows that it takes, in the time of
forward passes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands, changed
from written_runs import write_run

from allhands.config.schema import TrainConfig
from allhands.io.names import PLAN_FILE
from allhands.observe.metrics import read_metrics
from allhands.plan.compared import Figure, compare
from allhands.plan.computers import Computer
from allhands.plan.job import Job
from allhands.plan.kept import keep_plan, read_plan
from allhands.plan.links import link_of
from allhands.plan.outlook import look_ahead
from allhands.plan.speed import StepModel
from allhands.plan.validations import ValidRows, number_of, seconds_of
from allhands.run.model_sizes import forward_share
from allhands.run.training_memory import DecoderShape, on_cpu

STEP = StepModel(0.1, 800.0, 0.9 / 800, 8, 80_000_000, 32_000_000)
BLOCKS = DecoderShape(layers=30, dims=576, mlp_dims=1536, queries=576, keys=192, vocabulary=49152)


@pytest.mark.parametrize(
    ("batches", "every", "accumulated", "number"),
    # Before the first batch; after each multiple; after the last, which may be one.
    [
        (40, 10, 1, 5),
        (45, 10, 1, 6),
        (9, 10, 1, 2),
        (40, 10, 3, 5),
        (41, 10, 3, 5),
        (44, 10, 3, 6),
        (40, 2, 4, 11),
    ],
)
def test_as_many_as_training_makes(batches: int, every: int, accumulated: int, number: int) -> None:
    # As the loop of the training counts them.
    made, done = 1, 0
    while done < batches:
        before, done = done, min(batches, done + accumulated)
        made += done == batches or done // every > before // every
    assert number_of(batches, every, accumulated) == made == number


def test_a_validation_is_a_forward_pass() -> None:
    # Full training has it and twice as much for the gradients; LoRA in all layers as much again.
    assert forward_share(BLOCKS, "full", 30, recomputed=False) == pytest.approx(1 / 3)
    assert forward_share(BLOCKS, "lora", 30, recomputed=False) == pytest.approx(1 / 2)
    assert forward_share(BLOCKS, "lora", 4, recomputed=False) > 0.6
    full, lora = (TrainConfig(fine_tune_type=method) for method in ("full", "lora"))
    # Of a step of 1 s with 800 tokens 0.1 s are the update in full training, and a part of the
    # passes in LoRA's.
    assert seconds_of(ValidRows(16, 1600), STEP, full, BLOCKS, 30) == pytest.approx(1.8 / 3)
    assert seconds_of(ValidRows(16, 1600), STEP, lora, BLOCKS, 30) == pytest.approx(2.0 / 2)
    assert seconds_of(ValidRows(16, 1600), STEP, lora, None, 0) == pytest.approx(2.0 / 2)


def test_ranks_share_validations_and_the_total_has_them() -> None:
    job = Job(
        **{
            "steps": 100,
            "start_s": 5.0,
            "step": STEP,
            "link": link_of("10GbE"),
            "computers": (Computer("one"),),
            "numbers": (1, 2, 4),
        },
        **{"blocks": None, "work": None, "of": on_cpu},
    )
    without, found = look_ahead(job), look_ahead(replace(job, validations=6, validation_s=4.0))
    assert [line.validation_s for line in found.lines] == [24.0, 12.0, 6.0]
    more = [
        one.training_s - other.training_s
        for one, other in zip(found.lines, without.lines, strict=True)
    ]
    assert more == pytest.approx([24.0, 12.0, 6.0])
    assert found.alone_s == found.job.alone_s() == pytest.approx(129.0)
    assert replace(found.job, whole_s=0.5).alone_s() == pytest.approx(5 + 50 + 12), (
        "by one process with all cores"
    )
    assert found.as_json()["machines"][1]["validation_s"] == 12.0


def test_the_command_counts_the_rows_of_the_validation_set(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    words = [
        "plan",
        "--device",
        "M1 Pro 32GB",
        "--model",
        str(tiny_model),
        "--batch-size",
        "4",
        "--iters",
        "40",
    ]
    words += ["--data", str(tiny_data), "--steps-per-eval", "10", "--num-layers", "-1"]

    def planned(*more: str) -> dict[str, Any]:
        done = call_allhands(*changed(words, more), "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found, one, none = planned(), planned("--val-batches", "1"), planned("--val-batches", "0")
    assert (found["validations"], none["validations"], none["validation_s"]) == (5, 0, 0.0)
    assert 0.0 < one["validation_s"] < found["validation_s"]
    line, bare = found["machines"][0], none["machines"][0]
    assert line["validation_s"] == pytest.approx(5 * found["validation_s"])
    assert line["training_s"] - bare["training_s"] == pytest.approx(line["validation_s"])
    shown = call_allhands(*words, cwd=tmp_path).stdout
    assert "This includes 5 validations (1: " in " ".join(shown.split())
    assert (
        "validations (1: " not in call_allhands(*words, "--val-batches", "0", cwd=tmp_path).stdout
    )
    bare_data = tmp_path / "bare"
    bare_data.mkdir()
    (bare_data / "train.jsonl").write_bytes((tiny_data / "train.jsonl").read_bytes())
    alone = planned("--data", str(bare_data))
    assert (
        alone["validations"],
        "no validations: the data have no validation set" in alone["notes"],
    ) == (0, True)


def test_what_was_planned_is_held_to_what_validations_took(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    history = read_metrics(run)
    valid = [replace(one, duration_s=12.0 / len(history.valid)) for one in history.valid]
    took = 12.0
    assert history.ended is not None
    ended = replace(history.ended, total_time_s=30.0 + took)
    history = replace(history, valid=valid, ended=ended)

    def compared(validation_s: float, **config: Any) -> dict[str, Figure]:
        line = {
            "machines": 1,
            "prediction": {"step_s": 0.5, "exposed_s": 0.0},
            "training_s": 32.0 + validation_s,
        }
        plan: dict[str, Any] = {
            **{
                "time": 1.0,
                "options": {"val_batches": 25},
                "processor": "cpu",
                "device": None,
                "steps": 60,
            },
            **{"start_s": 2.0, "step": {"tokens": 200.0}, "measured": None, "memory": []},
            "machines": [{**line, "validation_s": validation_s}],
        }
        keep_plan(run, plan)
        found = compare(read_plan(run / PLAN_FILE), history, {"val_batches": 25, **config})
        return {figure.key: figure for figure in found.figures}

    exact = compared(took)
    assert (exact["steps"].ratio, exact["steps"].off) == (1.0, False)
    assert exact["validations"].told.startswith(
        f"Of that all validations: {exact['steps'].shown(took)}, 1.00 times the"
    )
    without = compared(0.0)
    assert "validations" not in without
    assert without["steps"].off
    other = compared(took, val_batches=1)
    assert (other["step"].marked, other["steps"].marked, other["validations"].marked) == (
        False,
        True,
        True,
    )
