"""A step is one optimizer update wherever a run is told of; an iteration is one batch, as in
mlx_lm's options.

Ten batches of which four make an update, and the last update of two: what counts one for the other
is seen.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_resume import bits
from tiny import run_allhands, write_model

from allhands.checkpoints import checkpoints_in, open_checkpoint
from allhands.observe.journal import read_events
from allhands.observe.metrics import RunHistory, read_metrics
from allhands.observe.monitor.samples import read_samples
from allhands.observe.times import times_of
from allhands.observe.trackers import TrackerSink
from allhands.report import make_page, read_facts, to_markdown
from allhands.report.dashboard.runs import summary_of
from allhands.runtime.accelerator import detect

BATCHES, OF_STEP = 10, 4
ITERATIONS = [4, 8, 10]
SETTINGS = [
    *("--batch-size", "4", "--grad-accumulation-steps", str(OF_STEP), "--learning-rate", "1e-3"),
    *(
        "--steps-per-report",
        "4",
        "--steps-per-eval",
        "5",
        "--save-every",
        "4",
        "--val-batches",
        "1",
    ),
    *("--max-seq-length", "64", "--max-restarts", "1"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("steps-model") / "tiny", layers=2)


@dataclass
class Trainings:
    """Makes runs, one in each directory."""

    model: Path
    data: Path
    root: Path
    console: dict[str, str] = field(default_factory=dict)

    def __call__(
        self, name: str, ranks: int, *more: str, faults: list[dict[str, Any]] | None = None
    ) -> Path:
        words = [
            "train",
            "--train",
            "--model",
            str(self.model),
            "--data",
            str(self.data),
            *SETTINGS,
        ]
        words += ["--adapter-path", str(self.root / name)]
        words += [] if "--iters" in more else ["--iters", str(BATCHES)]
        env: dict[str, str] = {}
        if faults is not None:
            (self.root / f"{name}.json").write_text(json.dumps(faults))
            env["ALLHANDS_FAULTS"] = str(self.root / f"{name}.json")
        many = ["-n", str(ranks), "--backend", "ring"] if ranks > 1 else []
        done = run_allhands(*words, *many, *more, env=env)
        assert done.returncode == 0, done.stderr
        self.console[name] = done.stdout
        return self.root / name


@pytest.fixture(scope="module")
def trainings(model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(model, tiny_data, tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module", params=[1, 2])
def run(request: pytest.FixtureRequest, trainings: Trainings) -> Path:
    """The whole run, on one rank and on two; only to be read."""
    return trainings(f"whole-{request.param}", request.param)


def ranks_of(run: Path) -> int:
    return int(run.name.rpartition("-")[2])


def test_reports_count_updates_and_iterations(run: Path, trainings: Trainings) -> None:
    history = read_metrics(run)
    started, ended = history.started, history.ended
    assert started is not None
    assert ended is not None
    assert (started.step, started.total_steps, started.iteration, started.total_iterations) == (
        0,
        3,
        0,
        BATCHES,
    )
    assert [(one.step, one.iteration) for one in history.train] == list(
        zip([1, 2, 3], ITERATIONS, strict=True)
    )
    # Every five batches: with the update that completes them.
    assert [(one.step, one.iteration) for one in history.valid] == [(0, 0), (2, 8), (3, 10)]
    assert history.saved[-1].step == 3
    assert (ended.step, ended.iteration) == (3, BATCHES)
    told = trainings.console[run.name]
    assert f"3 ({BATCHES} iterations)" in told
    assert all(f"step {step}/3  loss" in told for step in (1, 2, 3))
    assert "finished at step 3" in told


def test_a_rate_times_its_time_is_what_was_done(run: Path) -> None:
    """Also with the last, smaller step; the rest of the time is validation, saving and reporting."""
    history = read_metrics(run)
    tokens = before = 0
    spent = 0.0
    for report in history.train:  # one a step
        assert report.iteration is not None
        assert report.iterations_per_s * report.step_time_s == pytest.approx(
            report.iteration - before
        )
        trained = report.trained_tokens - tokens
        assert report.trained_tokens_per_s * report.step_time_s == pytest.approx(trained, rel=1e-6)
        assert report.compute_s + report.comm_s + report.data_wait_s <= report.step_time_s * 1.001
        before, tokens, spent = report.iteration, report.trained_tokens, spent + report.step_time_s
        assert spent <= report.elapsed_s
    validating = sum(one.duration_s for one in history.valid)
    pauses = sum(one.pause_s for one in history.saved)
    assert spent > 0.5 * (history.train[-1].elapsed_s - validating - pauses)


def test_files_are_called_by_steps_and_mlx_lms_by_iterations(run: Path) -> None:
    found = [open_checkpoint(path) for path in reversed(checkpoints_in(run))]
    assert [(one.path.name, one.step, one.iteration) for one in found] == [
        ("step-0000002", 2, 8),
        ("step-0000003", 3, 10),
    ]
    assert [(one.state["step"], one.state["iteration"]) for one in found] == [(2, 8), (3, 10)]
    best = json.loads((run / "best" / "manifest.json").read_text())
    assert (best["step"], best["iteration"]) in ((2, 8), (3, 10))
    assert found[-1].state["best_step"] == best["step"]
    numbered = sorted(path.name for path in run.glob("0*_adapters.safetensors"))
    assert numbered == [f"{iteration:07d}_adapters.safetensors" for iteration in ITERATIONS]
    shown = run_allhands("checkpoint", "inspect", found[0].path).stdout.splitlines()
    assert [line.split()[:2] for line in shown if line.startswith(("step", "iteration"))] == [
        ["step", "2"],
        ["iteration", "8"],
    ]


class Told:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], *, step: int) -> None:
        self.logged.append((step, data))

    def finish(self) -> None: ...


def tracked(history: RunHistory) -> list[tuple[int, dict[str, Any]]]:
    told = Told()
    sink = TrackerSink("told", told)
    for event in (*history.train, *history.valid):
        sink.emit(event)
    sink.close()
    return told.logged


def test_who_reads_the_run_says_the_same(run: Path) -> None:
    history, facts = read_metrics(run), read_facts(run, read_events(run))
    summary = summary_of("run", run)
    assert summary is not None
    assert (summary.step, summary.total_steps) == (3, 3)
    told = tracked(history)
    assert [(step, data["iteration"]) for step, data in told] == [
        (1, 4),
        (2, 8),
        (3, 10),
        (0, 0),
        (2, 8),
        (3, 10),
    ]
    rates = [data["iterations_per_second"] for _, data in told[:3]]
    assert rates == pytest.approx(
        [count / one.step_time_s for count, one in zip((4, 4, 2), history.train, strict=True)]
    )
    page = to_markdown(make_page([facts]))
    assert "| steps | 3 |" in page
    assert f"| iterations (batches) | {BATCHES} |" in page
    charts = {one.key: one for section in make_page([facts]).sections for one in section.charts}
    assert charts["loss-steps"].lines[0].x == (1.0, 2.0, 3.0)
    assert charts["step-time"].lines[0].x == (1.0, 2.0, 3.0)
    ranks = [one for one in read_samples(run) if one.role == "rank"]
    assert {one.rank: one.step for one in ranks} == dict.fromkeys(range(ranks_of(run)), 3)
    assert dict(times_of([history])[1])["steps"] == ["3"]


@pytest.mark.slow
def test_the_plan_counts_as_the_run_does(trainings: Trainings) -> None:
    words = [
        "plan",
        "--model",
        str(trainings.model),
        "--data",
        str(trainings.data),
        *SETTINGS,
        "--iters",
        str(BATCHES),
    ]
    words += [
        "--device",
        "M1 Pro 32GB",
        "--json",
        "--adapter-path",
        str(trainings.root / "planned"),
    ]
    done = run_allhands(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    run = trainings("planned", 1)
    page = to_markdown(make_page([read_facts(run)]))
    assert "3 steps, trained" not in page
    assert "were planned: their share" not in page


@pytest.mark.slow
def test_resumed_in_the_middle(run: Path, trainings: Trainings) -> None:
    """From the checkpoint of step 2: the data go on with batch 8, and the end is the same bit for
    bit.
    """
    name = f"resumed-{ranks_of(run)}"
    again = trainings(name, ranks_of(run), "--resume", str(run / "checkpoints" / "step-0000002"))
    history, whole = read_metrics(again), read_metrics(run)
    started = history.started
    assert started is not None
    assert (started.step, started.iteration, started.total_steps, started.total_iterations) == (
        2,
        8,
        3,
        BATCHES,
    )
    assert "resumed     from step 2" in trainings.console[name]
    assert [(one.step, one.iteration, one.loss) for one in history.train] == [
        (one.step, one.iteration, one.loss) for one in whole.train
    ]
    assert bits(again / "adapters.safetensors") == bits(run / "adapters.safetensors")


@pytest.mark.slow
def test_more_batches_after_a_smaller_last_step(trainings: Trainings) -> None:
    """Updates of before count as they were: 4 + 4 + 2 batches, then 4 + 1."""
    trainings("more", 1)
    again = trainings("more", 1, "--resume", "auto", "--iters", "15")
    history = read_metrics(again)
    assert history.started is not None
    assert history.started.total_steps == 5
    assert [(one.step, one.iteration) for one in history.train][-2:] == [(4, 14), (5, 15)]
    assert history.ended is not None
    assert history.ended.step == 5
    assert math.isfinite(history.train[-1].loss)


@pytest.mark.slow
def test_failures_on_purpose_and_restarts_count_steps(trainings: Trainings) -> None:
    plan = [{"rank": 1, "step": 2, "kind": "kill"}]
    run = trainings("killed", 2, faults=plan)
    (note,) = [
        json.loads(path.read_text()) for path in (trainings.root / "killed.json.fired").iterdir()
    ]
    assert note["step"] == 2
    events = read_events(run)
    (restart,) = [one for one in events if one["kind"] == "restarting"]
    (fault,) = [one for one in events if one["kind"] == "fault"]
    assert restart["step"] in (1, 2)
    assert fault["step"] in (1, 2)
    history = read_metrics(run)
    assert history.restarts[0][0] == restart["step"]
    assert history.ended is not None
    assert (history.ended.step, history.ended.iteration) == (3, BATCHES)
    assert bits(run / "adapters.safetensors") == bits(
        trainings("undisturbed", 2) / "adapters.safetensors"
    )


def test_a_failure_after_the_last_step_is_refused(trainings: Trainings) -> None:
    """Step 5 is none of three, although there are more batches."""
    (trainings.root / "late.json").write_text(json.dumps([{"rank": 0, "step": 5, "kind": "kill"}]))
    words = [
        "train",
        "--train",
        "--model",
        str(trainings.model),
        "--data",
        str(trainings.data),
        *SETTINGS,
    ]
    words += ["--iters", str(BATCHES), "--adapter-path", str(trainings.root / "late")]
    done = run_allhands(*words, env={"ALLHANDS_FAULTS": str(trainings.root / "late.json")})
    assert done.returncode == 2
    assert "step 5 is never reached" in done.stderr


@pytest.mark.skipif(detect().kind != "cpu", reason="a GPU computes passes that are queued ahead")
def test_a_step_of_compiled_passes_takes_the_time_of_its_own(
    trainings: Trainings, tmp_path: Path
) -> None:
    words = ["train", "--model", trainings.model, "--data", "demo", "--adapter-path", tmp_path]
    done = run_allhands(
        *words,
        *("--iters", "10", "--steps-per-report", "1", "--val-batches", "0", "--batch-size", "4"),
        *("--packing", "--max-seq-length", "512", "--compile", "on"),
    )
    assert done.returncode == 0, done.stderr
    seconds = [report.step_time_s for report in read_metrics(tmp_path).train][2:]
    assert min(seconds) > 0.3 * statistics.median(seconds), seconds
