"""The arithmetic of ``benchmarks/cpu_scaling.py``. Nothing is trained here."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import scripts_on_the_path

from allhands.config.schema import build_config


@pytest.fixture(scope="module")
def bench() -> Any:
    with scripts_on_the_path():
        yield importlib.import_module("cpu_scaling")


def test_the_kinds_differ_in_processes_and_cores_alone(bench: Any, tmp_path: Path) -> None:
    options = Namespace(batch_size=8, iters=40, method="lora")
    found = {}
    for kind, more in bench.kinds(2).items():
        _, _, _, verb, *words = bench.command(options, tmp_path, more)
        assert verb == "train"
        flags: dict[str, Any] = {}
        while words:
            name = words.pop(0).lstrip("-").replace("-", "_")
            value = words.pop(0) if words and not words[0].startswith("-") else True
            flags[{"n": "num_ranks"}.get(name, name)] = value
        found[kind] = build_config(flags)
    values = [
        config.model_dump(exclude={"num_ranks", "cores_per_rank"}) for config in found.values()
    ]
    assert values[0] == values[1] == values[2]
    assert [(config.num_ranks, config.cores_per_rank) for config in found.values()] == [
        (1, 1),
        (2, 1),
        (1, None),
    ]


def test_the_rate_counts_tokens_over_seconds_after_the_warm_up(bench: Any, tmp_path: Path) -> None:
    speeds = [(1.0, 9.0), (1.0, 9.0), (100.0, 1.0), (400.0, 0.5)]
    lines = [
        {"event": "train", "tokens_per_s": speed, "step_time_s": seconds}
        for speed, seconds in speeds
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(map(json.dumps, [{"event": "started"}, *lines]))
    )
    assert bench.rate(tmp_path) == pytest.approx((100 + 200) / 1.5)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines[:2])))
    with pytest.raises(bench.BenchmarkError, match="raise --iters"):
        bench.rate(tmp_path)


def test_turns_are_compared_with_their_own(bench: Any) -> None:
    found = {"one": [100.0, 50.0], "two": [190.0, 100.0], "all": [150.0, 80.0]}
    gains = bench.gains(found)
    assert gains["two"] == [1.9, 2.0]
    settings = {"ranks": 2, "method": "lora"}
    result = {"tokens_per_s": found, "times_one": gains, "settings": settings}
    assert "| two | 145 (100 to 190) | 1.95 (1.90 to 2.00) |" in bench.report(result)
    rows = list(bench.rows(result))
    assert [(row.unit, row.median) for row in rows] == [
        ("tokens/s", 75.0),
        ("tokens/s", 145.0),
        ("tokens/s", 115.0),
        ("times", 1.95),
        ("times", 1.55),
    ]
