"""What ``benchmarks/backends.py`` makes of launchers' answers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import scripts_on_the_path


@pytest.fixture(scope="module")
def backends() -> Iterator[Any]:
    with scripts_on_the_path():
        yield importlib.import_module("backends")


def timings(*seconds: float) -> list[dict[str, Any]]:
    return [{"num_bytes": 4096 * 4**i, "median_s": value} for i, value in enumerate(seconds)]


def test_the_answer_is_found_among_what_a_launcher_prints(backends: Any) -> None:
    answer = json.dumps({"timings": timings(1.0)})
    assert backends.timings_in(f"[0] hello\n[rank 0] {backends.MARK}{answer}\nbye\n") == timings(
        1.0
    )


def test_the_middle_of_the_groups(backends: Any) -> None:
    rows = backends.summary([timings(3.0, 1.0), timings(1.0), timings(2.0)])
    assert rows == [
        {"num_bytes": 4096, "median_s": 2.0, "least_s": 1.0, "most_s": 3.0},
        {"num_bytes": 16384, "median_s": 1.0, "least_s": 1.0, "most_s": 1.0},
    ]


def test_the_table(backends: Any) -> None:
    record = {
        "machine": {"cpu": "c", "cores": 2, "system": "s", "load_at_start": 0.1},
        "settings": {"ranks": 2, "repeat": 1, "sizes": [4096, 16384]},
        "peers": {
            "allhands ring": backends.summary([timings(6e-3, 9e-3)]),
            "allhands mpi": backends.summary([timings(1e-3)]),
        },
        "versions": {"mlx": "1"},
    }
    lines = backends.report(record).splitlines()
    assert lines[2:6] == [
        "| bytes | allhands ring | allhands mpi |",
        "|---|---:|---:|",
        "| 4 KiB | 6 (6 to 6) | 1 (1 to 1) |",
        "| 16 KiB | 9 (9 to 9) | - |",
    ]
    assert "4 KiB 6.0" in lines[7]


def test_a_launcher_that_fails_or_hangs_is_told(backends: Any, tmp_path: Path) -> None:
    fails = [sys.executable, "-c", "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"]
    with pytest.raises(backends.BenchmarkError, match=r"no result \(code 3\):\nout of luck"):
        backends.run(fails, tmp_path / "log", 30)
    with pytest.raises(backends.BenchmarkError, match="did not finish in time"):
        backends.run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 0.3)
