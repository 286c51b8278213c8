"""What ``benchmarks/startup.py`` makes of a command's output and of what a run has written down."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import scripts_on_the_path


@pytest.fixture(scope="module")
def startup() -> Iterator[Any]:
    with scripts_on_the_path():
        yield importlib.import_module("startup")


def printing(*lines: str, pause_s: float = 0.0) -> list[str]:
    code = f"import time\nfor line in {lines!r}:\n    print(line, flush=True)\n    time.sleep({pause_s})"
    return [sys.executable, "-c", code]


def test_the_first_step_is_told_from_what_comes_before_and_after(startup: Any) -> None:
    before = time.time()
    lines = (
        "Iter 1: Val loss 3",
        "  \x1b[38;5;244m   1\x1b[0m    val  nan",
        "   1    \x1b[1;32m5.739\x1b[0m  572",
        "   2  5.6 ",
    )
    seen = startup.wait_for(printing(*lines, pause_s=0.3), startup.FIRST[startup.MLX_LM], 20.0)
    # Two pauses before it, two after it.
    assert before + 0.6 <= seen <= time.time() - 0.5
    assert (
        startup.wait_for(printing("run out", "step 1/3  loss 5"), startup.FIRST[startup.ONE], 20.0)
        > seen
    )


def test_what_comes_after_the_first_step_need_not_be_waited_for(startup: Any) -> None:
    before = time.time()
    command = [
        sys.executable,
        "-c",
        "import time; print('step 1/3  loss 5', flush=True); time.sleep(60)",
    ]
    seen = startup.wait_for(command, startup.FIRST[startup.ONE], 20.0, to_its_end=False)
    assert before < seen <= time.time() < before + 20.0


def test_a_run_without_a_first_step_is_an_error(startup: Any) -> None:
    with pytest.raises(startup.BenchmarkError, match="ended with code 0") as caught:
        startup.wait_for(printing("step 10/30"), startup.FIRST[startup.ONE], 20.0)
    assert "step 10/30" in str(caught.value)


def test_phases_are_read_off_the_run_of_this_start(startup: Any, tmp_path: Path) -> None:
    def write(name: str, *records: dict[str, Any]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    write(
        "metrics.jsonl",
        {"event": "opened"},
        {"event": "started", "time": 12.5},
        {"event": "train", "step": 1},
    )
    assert startup.phases_of(tmp_path, 10.0) == {"started": 2.5}
    # What an earlier start has left in the directory does not count.
    write("events.jsonl", {"time": 9.0, "kind": "launched"}, {"time": 10.25, "kind": "launched"})
    assert startup.phases_of(tmp_path, 10.0) == {"launched": 0.25, "started": 2.5}


def test_the_tables(startup: Any) -> None:
    record = {
        "machine": {"cpu": "c", "cores": 2, "system": "s", "load_at_start": 0.1},
        "settings": {"repeat": 3, "models": ["tiny"]},
        "starts": {
            startup.HELP: startup.summary([{"whole": second} for second in (0.3, 0.1, 0.2)]),
            f"{startup.RING}, tiny": startup.summary(
                [{"launched": 0.5, "started": 2.0, "first step": 2.5}]
            ),
            f"{startup.MLX_LM}, tiny": startup.summary([{"first step": 3.0}]),
        },
        "versions": {"mlx": "1"},
    }
    assert startup.report(record).splitlines()[2:] == [
        "| command | to its end |",
        "|---|---:|",
        "| allhands --help | 0.20 (0.10 to 0.30) |",
        "",
        "| command, model | launched | started | first step |",
        "|---|---:|---:|---:|",
        "| allhands train -n 2, ring, tiny | 0.50 (0.50 to 0.50) | 2.00 (2.00 to 2.00) | 2.50 (2.50 to 2.50) |",
        "| mlx_lm.lora, tiny | - | - | 3.00 (3.00 to 3.00) |",
        "",
        "mlx 1",
    ]


def test_rows_stand_beside_each_other(startup: Any) -> None:
    runs = {
        startup.HELP: [{"whole": 0.3}, {"whole": 0.2}, {"whole": 0.4}],
        f"{startup.ONE}, demo": [
            {"started": 1.0, "first step": 2.0},
            {"started": 1.1, "first step": 2.4},
        ],
        f"{startup.RING}, demo": [{"first step": 2.5}],
        f"{startup.MLX_LM}, demo": [{"first step": 11.0}],
        f"{startup.READ}, mine, of 1 B": [{"whole": 0.5}],
        f"{startup.ONE}, mine, of 1 B": [{"started": 1.0, "first step": 3.0}],
    }
    found = {
        (row.name, row.who): (row.median, row.least, row.most, row.repeats)
        for row in startup.rows({"runs": runs})
    }
    step = "demo model: to the first step"
    assert found == {
        ("allhands --help", "allhands"): (0.3, 0.2, 0.4, 3),
        (step, "allhands"): (2.2, 2.0, 2.4, 2),
        (step, "allhands, 2 processes, ring"): (2.5, 2.5, 2.5, 1),
        (step, "mlx_lm"): (11.0, 11.0, 11.0, 1),
        ("mine, of 1 B model: reading its weights", "allhands"): (0.5, 0.5, 0.5, 1),
        ("mine, of 1 B model: to the first step", "allhands"): (3.0, 3.0, 3.0, 1),
    }
