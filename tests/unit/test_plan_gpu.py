"""Plans on a GPU, where a step has the passes of the next one: what their short training counts,
and what runs show.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run, write_samples

from allhands.config.schema import TrainConfig
from allhands.io.names import PLAN_FILE
from allhands.observe.metrics import JsonlSink, RunStarted, TrainReport, read_metrics
from allhands.observe.monitor import decode_sample, encode_sample
from allhands.plan.calibration import Calibration, Calibrator, settings, steps_of
from allhands.plan.compared import compare
from allhands.plan.kept import keep_plan, read_plan

TOKENS = 4000.0
PASS_S, UPDATE_S, NEW_S = 0.040, 0.010, 0.100  # NEW_S more for a shape that was never met


def steps(tokens: float, shapes: list[int]) -> list[tuple[float, int]]:
    """Seconds of each step and shapes so far: its update, the pass of the next step, and its own if
    that is still due.

    A pass is not handed out in the step before where its shape was never met.
    """
    pass_s = tokens / TOKENS * PASS_S
    news = [after - before for before, after in pairwise([0, *shapes, shapes[-1]])]
    found: list[tuple[float, int]] = []
    for place, count in enumerate(shapes):
        seconds = UPDATE_S + (pass_s + NEW_S if news[place] else 0.0)
        if place < len(shapes) - 1 and not news[place + 1]:
            seconds += pass_s
        found.append((seconds, count))
    return found


def calibrated(
    monkeypatch: pytest.MonkeyPatch,
    told: dict[int, list[tuple[float, int]]],
    *,
    tokens: list[float] | None = None,
    **options: Any,
) -> tuple[Calibration, list[dict[str, Any]]]:
    """By trainings that write what is ``told`` of each batch size, and the options that they were
    given.
    """
    asked: list[dict[str, Any]] = []

    def train(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        values = json.loads(Path(command[-1]).read_text())
        asked.append(values)
        run = Path(values["adapter_path"])
        run.mkdir()
        sink = JsonlSink(run / "metrics.jsonl")
        facts = {
            "name": "run",
            "model": "m",
            "method": "lora",
            "num_ranks": 1,
            "backend": "none",
            "batch_size": 8,
        }
        numbers = {
            "total_steps": 24,
            "trainable_params": 10,
            "total_params": 100,
            "num_train_examples": 500,
        }
        sink.emit(
            RunStarted(
                **facts, **numbers, cores_per_rank=None, versions={}, time=9e9, largest=(8192, 1)
            )
        )  # type: ignore[arg-type]
        steps = told[values["batch_size"]]
        sizes = tokens or [TOKENS * values["batch_size"] / 8] * len(steps)
        for number, ((seconds, shapes), size) in enumerate(zip(steps, sizes, strict=True), 1):
            zeros = dict.fromkeys(
                ("loss", "learning_rate", "grad_norm", "data_wait_s", "comm_s", "elapsed_s"), 0.0
            )
            sink.emit(
                TrainReport(
                    step=number,
                    tokens_per_s=size / seconds,
                    trained_tokens_per_s=size / seconds,
                    trained_tokens=0,
                    step_time_s=seconds,
                    peak_memory_bytes=(30_000,),
                    epoch=0.0,
                    needed_bytes=(20_000,),
                    shapes=shapes,
                    **zeros,
                )
            )
        sink.close()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("allhands.plan.calibration.subprocess.run", train)
    return Calibrator(9.0, on_gpu=True).calibrate(TrainConfig(batch_size=8, **options)), asked


def test_the_last_step_has_no_pass_of_a_next_one_and_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [1] * steps_of(TrainConfig(), on_gpu=True)
    found, _ = calibrated(monkeypatch, {8: steps(TOKENS, shapes), 4: steps(TOKENS / 2, shapes)})
    assert found.points[0] == pytest.approx((TOKENS, PASS_S + UPDATE_S))
    assert found.points[1] == pytest.approx((TOKENS / 2, PASS_S / 2 + UPDATE_S))
    assert (found.peak_bytes, found.largest) == (
        20_000,
        (8192, 1),
    )  # what it needs, not what it took


def test_steps_that_met_a_shape_for_the_first_time_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 8, 8, 8, 8, 8]
    found, _ = calibrated(monkeypatch, {8: steps(TOKENS, shapes), 4: steps(TOKENS / 2, shapes)})
    assert found.points[0] == pytest.approx((TOKENS, PASS_S + UPDATE_S))
    # But they do as what the training takes once.
    assert found.first_s == pytest.approx(8 * NEW_S)


def test_lengths_that_vary_are_seen_in_more_steps() -> None:
    assert (
        steps_of(TrainConfig(), on_gpu=True)
        == 4 * steps_of(TrainConfig(packing=True), on_gpu=True)
        == 96
    )


def test_real_steps_foretell_those_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tokens, seconds and shapes so far of LoRA on 8 stories a step, a Llama of 1.08 billion on an
    # H200.
    steps = json.loads((Path(__file__).parent / "steps_of_lengths_h200.json").read_text())
    first, later = steps[:96], steps[96:]
    told = [(seconds, shapes) for _, seconds, shapes in first]
    found, _ = calibrated(
        monkeypatch, {8: told, 4: told}, tokens=[tokens for tokens, _, _ in first]
    )
    size, step_s = found.points[0]
    assert size == pytest.approx(sum(tokens for tokens, _, _ in first) / 96)
    assert step_s == pytest.approx(sum(seconds for _, seconds, _ in later) / len(later), rel=0.15)
    assert found.first_s + len(steps) * step_s == pytest.approx(
        sum(seconds for _, seconds, _ in steps), rel=0.15
    )


def test_where_all_shapes_are_new_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = list(range(1, 25))
    found, _ = calibrated(monkeypatch, {8: steps(TOKENS, shapes), 4: steps(TOKENS / 2, shapes)})
    assert found.points[0] == pytest.approx((TOKENS, PASS_S + UPDATE_S + NEW_S))


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({"iters": 399}, "auto"),
        ({"iters": 400}, "on"),
        ({}, "on"),
        # 500 rows in batches of 8 are 63 batches.
        ({"epochs": 3}, "auto"),
        ({"epochs": 6.3}, "auto"),
        ({"epochs": 6.4}, "on"),
        ({"epochs": 100, "compile": "off"}, "off"),
        ({"compile": "off"}, "off"),
    ],
)
def test_short_runs_are_compiled_if_the_training_will_be(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compiled: str
) -> None:
    shapes = [1] * steps_of(TrainConfig(), on_gpu=True)
    _, asked = calibrated(
        monkeypatch, {8: steps(TOKENS, shapes), 4: steps(TOKENS / 2, shapes)}, **options
    )
    # With epochs two steps come first, to count the rows.
    forms = [(one["compile"], one["iters"]) for one in asked if one["iters"] > 2]
    assert forms == [(compiled, 96)] * 2
    on_cpu = settings(TrainConfig(**options), 8, Path("run"))
    assert (on_cpu["compile"], on_cpu["iters"]) == (
        options.get("compile", "auto"),
        steps_of(TrainConfig(), on_gpu=False),
    )


def kept(**more: Any) -> dict[str, Any]:
    return {
        **{
            "time": 1.0,
            "options": {},
            "processor": "gpu",
            "device": None,
            "steps": 60,
            "start_s": 2.0,
        },
        **{"step": {"tokens": 200.0}, "measured": {"exchanged": 1_000, "cores_per_rank": 1}},
        "machines": [
            {"machines": 1, "prediction": {"step_s": 0.5, "exposed_s": 0.0}, "training_s": 32.0}
        ],
        "memory": [],
        **more,
    }


def test_a_step_is_measured_where_no_shape_was_new(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    keep_plan(run, kept())
    history = read_metrics(run)
    assert len(history.train) >= 5
    # The second and the third of the reports that count met new shapes, the last ones none.
    shapes = [1, 1, 5, 8, *([8] * len(history.train))]
    train = [
        replace(one, shapes=count, step_time_s=0.9 if count != before else 0.52)
        for one, before, count in zip(history.train, [0, *shapes], shapes, strict=False)
    ]
    found = compare(read_plan(run / PLAN_FILE), replace(history, train=train), {}, [])
    step = next(figure for figure in found.figures if figure.key == "step")
    assert (step.planned, step.measured) == (0.5, 0.52)


def test_a_plan_is_held_to_what_a_rank_needed_not_to_what_it_took(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    write_samples(run, ranks=1)
    memory = {
        "name": "as it is",
        "ranks": 1,
        "rank_bytes": 400_000_000,
        "flags": "",
        "strategy": "data",
    }
    keep_plan(run, kept(memory=[memory]))
    history = read_metrics(run)
    history = replace(
        history, train=[replace(one, needed_bytes=(410_000_000,)) for one in history.train]
    )
    lines = (run / "logs" / "monitor-rank-0.jsonl").read_text().splitlines()
    samples = [
        replace(decode_sample(line), estimated_bytes=None, mlx_estimated_bytes=395_000_000)
        for line in lines
    ]
    assert decode_sample(encode_sample(samples[0])) == samples[0]
    found = compare(read_plan(run / PLAN_FILE), history, {}, samples)
    told = {figure.key: figure for figure in found.figures}
    assert (
        told["memory"].told
        == "Memory that a rank needs (as it is): 410 MB, 1.02 times the 400 MB planned"
    )
    assert (told["expected"].planned, told["expected"].measured) == (395_000_000, 410_000_000)
