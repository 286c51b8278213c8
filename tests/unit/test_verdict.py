"""How a run stands: told the same by report, dashboard and monitor, from all that is known of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from written_runs import BEGAN, write_run

from allhands.cli.main import main
from allhands.observe.metrics import RunEnded
from allhands.observe.monitor import Sample, encode_sample, monitor_file
from allhands.report import read_facts
from allhands.report.dashboard.runs import summary_of


@pytest.fixture
def dead() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def sample(pid: int, *, ended: bool = False, at: float | None = None) -> Sample:
    return Sample(
        time=time.time() if at is None else at,
        role="rank",
        rank=0,
        host=socket.gethostname(),
        pid=pid,
        run="job",
        attempt=1,
        every_s=1.0,
        rss_bytes=10**8,
        pss_bytes=10**8,
        pss_kind="pss",
        peak_rss_bytes=10**8,
        cpu_cores=1.0,
        ended=ended,
    )


def sampled(run: Path, *samples: Sample) -> None:
    (run / "logs").mkdir(exist_ok=True)
    monitor_file(run / "logs", "rank", 0).write_text(
        "".join(f"{encode_sample(one)}\n" for one in samples)
    )


def journal(run: Path, kind: str, *, at: float = BEGAN + 100, **facts: Any) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"time": at, "kind": kind, "attempt": 1, "message": kind, **facts}) + "\n"
        )


def standing(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The status, which all three must tell."""
    status = read_facts(run).status
    summary = summary_of(run.name, run)
    assert summary is not None
    assert summary.status == status
    if (run / "logs").is_dir():
        with pytest.raises(SystemExit):
            main(["monitor", str(run), "--once"])
        heading = capsys.readouterr().out.splitlines()[0]
        assert ("running" if status == "going on" else status) in heading
    return status


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    return lambda **options: write_run(tmp_path / "run", **options)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ({"kind": "finished", "exit_code": 130}, "interrupted"),
        ({"kind": "finished", "exit_code": 143}, "interrupted"),
        ({"kind": "finished"}, "finished"),
        ({"kind": "finished", "exit_code": 0}, "finished"),
        ({"kind": "failed", "exit_code": 137}, "failed"),
        ({"kind": "given up", "exit_code": 8}, "failed"),
        ({"kind": "stopping"}, "crashed or killed"),
        ({"kind": "fault"}, "crashed or killed"),
    ],
)
def test_the_supervisors_last_word_counts(
    make: Callable[..., Path],
    dead: int,
    capsys: pytest.CaptureFixture[str],
    last: dict[str, Any],
    status: str,
) -> None:
    run = make(ended=None)
    sampled(run, sample(dead, at=BEGAN))
    journal(run, "launched", at=BEGAN)
    journal(run, **last)
    assert standing(run, capsys) == status


def test_a_supervisors_word_on_an_earlier_start_does_not_count(
    make: Callable[..., Path], dead: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(ended=None)
    journal(run, "finished", at=BEGAN - 50, exit_code=130)
    sampled(run, sample(dead))
    assert standing(run, capsys) == "crashed or killed"
    sampled(run, sample(os.getpid()))
    assert standing(run, capsys) == "going on"


def test_a_process_that_was_killed_a_moment_ago_does_not_go_on(
    make: Callable[..., Path], dead: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(ended=None)
    sampled(run, sample(os.getpid()))
    assert standing(run, capsys) == "going on"
    sampled(run, sample(dead))
    assert standing(run, capsys) == "crashed or killed"
    # Of another computer nothing but its silence tells.
    sampled(run, replace(sample(dead), host="elsewhere"))
    assert standing(run, capsys) == "going on"
    sampled(run, replace(sample(dead, at=time.time() - 60), host="elsewhere"))
    assert standing(run, capsys) == "crashed or killed"


def test_its_number_may_be_anothers_since(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(ended=None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        sampled(run, sample(other.pid, at=time.time() - 4))
        assert standing(run, capsys) == "crashed or killed"
        other.communicate(b"\n")


@pytest.mark.parametrize("reason", ["finished", "stopped early", "interrupted", "failed"])
def test_an_end_in_the_metrics_is_the_end(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str], reason: Any
) -> None:
    run = make(ended=RunEnded(60, reason, 30.0))
    sampled(run, sample(os.getpid(), at=BEGAN), sample(os.getpid(), ended=True))
    assert standing(run, capsys) == reason


def test_a_run_that_is_being_resumed_goes_on(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(ended=RunEnded(60, "interrupted", 30.0))
    os.utime(run / "metrics.jsonl", (BEGAN, BEGAN))
    sampled(run, sample(os.getpid()))
    assert standing(run, capsys) == "going on"


STARTED = {"kind": "launched", "message": "2 processes"}
FAILED = {"kind": "failed", "message": "rank 0 exited with code 2", "error": "ConfigError: no optimizer"}  # fmt: skip
GIVEN_UP = {"kind": "given up", "message": "not started again: the settings would be the same"}


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([STARTED, FAILED], ["no optimizer"]),
        ([STARTED, FAILED, GIVEN_UP], ["no optimizer", "not started again"]),
        ([{"kind": "given up", "message": "not started: no ranks"}], ["no ranks"]),
        # An error that the last event repeats is told once.
        (
            [STARTED, FAILED, {**GIVEN_UP, "message": "twice the same: ConfigError: no optimizer"}],
            ["twice the same: ConfigError: no optimizer"],
        ),
    ],
)
def test_why_a_run_failed(events: list[dict[str, Any]], named: list[str], tmp_path: Path) -> None:
    lines = [json.dumps({"time": 1e9 + at, **event}) for at, event in enumerate(events)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    facts = read_facts(tmp_path)
    assert facts.status == "failed"
    assert all(word in facts.reason for word in named)
    assert facts.reason.count("no optimizer") <= 1
