"""A plan, the training that it was for, and the report in which both stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import changed
from planned_training import write_texts
from tiny import run_allhands

from allhands.cluster.mpi import find_mpi
from allhands.observe.metrics import read_metrics
from allhands.plan.kept import read_plan

pytestmark = pytest.mark.long
_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")

SHAPE = ("--shape", "llama", "--layers", "2", "--dims", "64", "--mlp-dims", "128", "--heads", "2")
ASKED = ("--iters", "40", "--val-batches", "2", "-n", "2")
TRAINING = (*SHAPE, "--block-size", "64", "--batch-size", "8", "--sample-prompts", "[]", *ASKED)


def words_of(place: Path) -> list[str]:
    lines = write_texts(place, 200)
    (place / "texts" / "valid.jsonl").write_text("\n".join(lines[:20]) + "\n")
    return ["--data", "texts", "--tokenizer", "tokenizer", "--adapter-path", "run", *TRAINING]


def test_planned_trained_and_told(tmp_path: Path) -> None:
    words = words_of(tmp_path)
    planned = run_allhands("plan", *words, cwd=tmp_path, timeout=200)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.splitlines()[-1].startswith("the plan is kept in run/plan.json: ")
    content = (tmp_path / "run" / "plan.json").read_bytes()
    report_each = ("--steps-per-report", "5")
    trained = run_allhands("pretrain", *words, *report_each, cwd=tmp_path, timeout=200)
    assert trained.returncode == 0, trained.stderr
    # The run takes its directory with the plan in it, and leaves that as it is.
    assert (tmp_path / "run" / "plan.json").read_bytes() == content
    done = run_allhands("report", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "run" / "report.md").read_text()
    plan, history = read_plan(tmp_path / "run" / "plan.json"), read_metrics(tmp_path / "run")
    rows = {
        cells[1]: cells[2:6]
        for row in page.splitlines()
        if len(cells := [one.strip() for one in row.split("|")]) > 5
    }
    memory = next(way for way in plan.memory if way.flags == "-n 2")
    peak = max(max(report.peak_memory_bytes) for report in history.train)
    shown = rows[f"memory of a rank at its peak ({memory.name})"]
    assert shown[:2] == [f"{memory.rank_bytes / 1e6:.0f} MB", f"{peak / 1e6:.0f} MB"]
    assert float(shown[2]) == pytest.approx(peak / memory.rank_bytes, abs=0.006)
    assert memory.rank_bytes == pytest.approx(peak, rel=0.2)
    # A plan that was measured on a busy computer says so, and its times are compared with nothing.
    times = {"a step", "all steps", "time to the start"}
    assert times & rows.keys() == (set() if plan.doubt else times)
    assert all(float(rows[name][2]) > 0 for name in times & rows.keys())
    assert "Not trained with the options that were planned" not in page
    # A second run, with other options, is compared with the same plan, and says so.
    second = run_allhands(
        "pretrain", *changed(words, ["--batch-size", "4"]), *report_each, cwd=tmp_path, timeout=200
    )
    assert second.returncode == 0, second.stderr
    told = run_allhands("plan", "--after", "run", cwd=tmp_path)
    assert ["--batch-size", "8", "--batch-size", "4"] in [
        line.split() for line in told.stdout.splitlines()
    ]
    assert told.stdout.count("other than planned") == 1


@pytest.mark.parametrize("backend", ["ring", pytest.param("mpi", marks=_needs_mpi)])
def test_a_rank_takes_the_memory_of_its_back_end(tmp_path: Path, backend: str) -> None:
    """A ring's buffers are a fifth of so small a process, and MPI has none of them."""
    words = [*words_of(tmp_path), "--backend", backend, "--cores-per-rank", "1"]
    planned = run_allhands("plan", *words, cwd=tmp_path, timeout=200)
    assert planned.returncode == 0, planned.stderr
    trained = run_allhands("pretrain", *words, cwd=tmp_path, timeout=200)
    assert trained.returncode == 0, trained.stderr
    history = read_metrics(tmp_path / "run")
    assert history.started is not None
    assert history.started.backend == backend
    memory = next(
        way for way in read_plan(tmp_path / "run" / "plan.json").memory if way.flags == "-n 2"
    )
    assert memory.rank_bytes == pytest.approx(max(history.train[-1].peak_memory_bytes), rel=0.08)
