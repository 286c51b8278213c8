"""What whole runs leave of their processes' memory, and what ``allhands monitor`` and ``plot`` make
of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny import run_allhands, write_chat_data, write_model

from allhands.cli.main import main
from allhands.cli.plot import plot
from allhands.cli.verbs_runs import Plot
from allhands.observe.metrics import read_metrics
from allhands.observe.monitor import Board, monitor_file, read_samples

MIB = 1 << 20


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("material")
    model, data = write_model(place / "model"), write_chat_data(place / "data")
    return [
        "--model",
        str(model),
        "--data",
        str(data),
        "--batch-size",
        "4",
        "--iters",
        "20",
        "--steps-per-report",
        "5",
    ]


@pytest.mark.slow
def test_a_run_tells_of_its_ranks_and_of_who_started_them(
    material: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def told(option: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["monitor", str(out), option])
        assert caught.value.code == 0
        return capsys.readouterr().out

    env = {"ALLHANDS_MONITOR_EVERY_S": "0.1"}
    done = run_allhands("train", "--train", *material, "--adapter-path", out, "-n", "2", env=env)
    assert done.returncode == 0, done.stderr
    board = Board(read_samples(out))
    rows = board.rows()
    assert [row.last.name for row in rows] == ["orchestrator", "rank 0", "rank 1"]
    assert all(row.last.ended for row in rows)
    director, *ranks = rows
    for rank in ranks:
        assert rank.last.step == 20
        # MLX, numpy and a tiny model.
        assert 50 * MIB < rank.peak_pss_bytes < 1000 * MIB
        assert rank.peak_rss_bytes >= rank.last.rss_bytes
        assert 0 < rank.peak_mlx_bytes < 500 * MIB
    assert director.last.mlx_active_bytes is None
    assert director.peak_pss_bytes < min(rank.peak_pss_bytes for rank in ranks)
    spent = {
        phase
        for sample in read_samples(out)
        for phase, seconds in sample.phases.items()
        if seconds and sample.step
    }
    assert {"compute", "reduce", "update", "validate", "save"} <= spent
    report = read_metrics(out).train[-1]
    assert len(report.peak_rss_bytes) == len(report.peak_mlx_bytes) == 2
    assert report.peak_rss_bytes[1] == pytest.approx(ranks[1].peak_rss_bytes, rel=0.1)
    assert report.peak_mlx_bytes[1] == pytest.approx(ranks[1].peak_mlx_bytes, rel=0.1)
    assert (out / "memory.png").stat().st_size > 10_000

    assert [
        word
        for word in ("orchestrator", "rank 0", "rank 1", "step 20 of 20")
        if word not in told("--once")
    ] == []
    lines = told("--json").splitlines()
    assert len(lines) == len(read_samples(out))
    assert {json.loads(line)["role"] for line in lines} == {"orchestrator", "rank"}
    plot(Plot([out], tmp_path / "again.png"))
    assert f"memory: {tmp_path / 'memory.png'}" in capsys.readouterr().out


def test_a_run_whose_memory_cannot_be_recorded_is_trained_all_the_same(
    material: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    file = monitor_file(out / "logs", "rank", 0)
    file.mkdir(parents=True)  # in the place of the file
    done = run_allhands("train", "--train", *material, "--adapter-path", out)
    assert done.returncode == 0, done.stderr
    assert (out / "adapters.safetensors").exists()
    assert not (out / "memory.png").exists()
    assert done.stderr.count("is not recorded") == 1


PROGRAM = """
import sys, time
import mlx.core as mx
import allhands
held = mx.ones((5 << 20,))
mx.eval(held)
for step in range(20):
    allhands.progress(step)
    time.sleep(0.05)
"""


def test_programs_of_ones_own_are_seen_too(tmp_path: Path) -> None:
    script, logs = tmp_path / "program.py", tmp_path / "logs"
    script.write_text(PROGRAM)
    env = {"ALLHANDS_MONITOR_EVERY_S": "0.1"}
    done = run_allhands(
        "launch", "-n", "2", "--log-dir", logs, "--", sys.executable, script, env=env
    )
    assert done.returncode == 0, done.stderr
    rows = Board(read_samples(logs)).rows()
    assert [row.last.name for row in rows] == ["orchestrator", "rank 0", "rank 1"]
    assert all(row.last.ended for row in rows)
    for row in rows[1:]:
        assert row.last.step == 19
        assert row.last.mlx_active_bytes is not None
        assert row.last.mlx_active_bytes >= 20 * MIB
