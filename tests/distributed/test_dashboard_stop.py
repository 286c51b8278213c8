"""The dashboard's stop button and a training that goes on: it saves, and ends as when a scheduler
asks it to.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from dashboards import dashboard

from allhands.checkpoints import checkpoints_in


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_asked_to_stop_saves_and_ends(
    ranks: int, tiny_model: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLHANDS_MONITOR_EVERY_S", "0.2")
    where = [
        "--model",
        str(tiny_model),
        "--data",
        str(tiny_data),
        "--adapter-path",
        str(tmp_path / "run"),
    ]
    options = [
        "--iters",
        "100000",
        "--val-batches",
        "0",
        "--steps-per-report",
        "5",
        "--num-layers",
        "2",
    ]
    command = [
        sys.executable,
        "-m",
        "allhands",
        "train",
        "--train",
        *where,
        *options,
        "-n",
        str(ranks),
    ]
    with (
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as run,
        dashboard(tmp_path) as running,
    ):
        until = time.monotonic() + 60
        while not any(one["can_stop"] and one["step"] > 0 for one in running.json("/api/runs")):
            assert time.monotonic() < until
            assert run.poll() is None
            time.sleep(0.2)
        told = running.json("/api/stop?run=run", method="POST", headers={"X-Allhands": "stop"})[
            "told"
        ]
        assert told.startswith(f"asked process {run.pid} to save and stop")
        assert run.wait(60) == 143
        assert run.stderr is not None
        assert "the weights are saved" in run.stderr.read()
        (one,) = running.json("/api/runs")
        assert (one["status"], one["can_stop"]) == ("interrupted", False)
    assert checkpoints_in(tmp_path / "run")
    assert (tmp_path / "run" / "adapters.safetensors").exists()
