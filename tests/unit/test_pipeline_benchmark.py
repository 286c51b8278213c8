"""The arithmetic of ``benchmarks/pipeline.py``, and that a bar which is missed is told. Nothing is trained here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import scripts_on_the_path
from tiny import write_model

NOTED = {"tokens": 256, "alive": 2, "blocks": [[0, 4]]}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with scripts_on_the_path():
        yield importlib.import_module("pipeline")


def test_both_formulas_agree_and_count_micro_batches(bench: Any) -> None:
    weights, blocks = 38_000_000, range(4)
    first = bench.formula(512, weights, blocks, NOTED)
    assert bench.expectation(512, weights, blocks, NOTED) == pytest.approx(first, rel=0.04)
    one_more = bench.formula(512, weights, blocks, {**NOTED, "alive": 3}) - first
    assert one_more == 2 * 256 * 512 * 4
    assert bench.formula(512, 2 * weights, blocks, NOTED) - first == weights


def test_what_is_missed_is_told(bench: Any, tmp_path: Path) -> None:
    options = bench.parse(["--layers", "4", "--hidden", "64", "--links", "none"])
    write_model(tmp_path / "model", layers=4, hidden=64, tied=False)

    def judged(more: float, waited: float, alive: int) -> list[str]:
        ranks: list[dict[str, Any]] = []
        for rank, (first, stop) in enumerate([(0, 2), (2, 4)]):
            noted = {"tokens": 256, "alive": alive, "blocks": [[first, stop]]}
            weights = bench.own_bytes(sizes, rank, range(first, stop))
            peak = more * bench.formula(64, weights, range(first, stop), noted)
            steps = [{"seconds": 1.0, "waited": waited}] * 4
            ranks.append({**noted, "peak_bytes": peak, "steps": steps})
        found = bench.judged(options, tmp_path, {"none": {"pipeline": [{"ranks": ranks, "losses": [1.0]}]}})
        return found["missed"]

    import mlx.core as mx

    opened: Any = mx.load(str(tmp_path / "model" / "model.safetensors"))
    sizes = {name: array.nbytes for name, array in opened.items()}
    assert judged(1.0, 0.1, 2) == []
    assert [text.split(":")[0] for text in judged(1.0, 0.2, 2)] == ["waiting of rank 0", "waiting of rank 1"]
    assert {text.split(":")[0] for text in judged(1.2, 0.1, 2)} == {"memory of rank 0", "memory of rank 1"}
    assert judged(1.0, 0.1, 3) == ["rank 0 holds 3 micro-batches", "rank 1 holds 3 micro-batches"]
