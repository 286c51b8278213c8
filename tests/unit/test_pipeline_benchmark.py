"""The arithmetic of ``benchmarks/pipeline.py``, and that a bar which is missed is told. Nothing is
trained here.
"""

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
        found = bench.judged(
            options, tmp_path, {"none": {"pipeline": [{"ranks": ranks, "losses": [1.0]}]}}
        )
        return found["missed"]

    import mlx.core as mx

    opened: Any = mx.load(str(tmp_path / "model" / "model.safetensors"))
    sizes = {name: array.nbytes for name, array in opened.items()}
    assert judged(1.0, 0.1, 2) == []
    assert [text.split(":")[0] for text in judged(1.0, 0.2, 2)] == [
        "waiting of rank 0",
        "waiting of rank 1",
    ]
    assert {text.split(":")[0] for text in judged(1.2, 0.1, 2)} == {
        "memory of rank 0",
        "memory of rank 1",
    }
    assert judged(1.0, 0.1, 3) == ["rank 0 holds 3 micro-batches", "rank 1 holds 3 micro-batches"]


@pytest.fixture(scope="module")
def on_gpus() -> Iterator[Any]:
    with scripts_on_the_path():
        yield importlib.import_module("pipeline_gpu")


@pytest.mark.parametrize(
    ("refused", "speed", "peak", "missed"),
    [
        ("needs more; take --strategy pipeline", 6100.0, 40e9, 0),
        ("needs more", 6100.0, 40e9, 1),
        ("", 6099.0, 40e9, 2),
        ("needs more; take --strategy pipeline", 6000.0, 41e9, 2),
    ],
)
def test_bars_on_gpus_are_missed(
    on_gpus: Any, refused: str, speed: float, peak: float, missed: int
) -> None:
    runs = {
        "refused": {"refused": refused},
        "pipeline": {"tokens_per_s": speed, "peak_bytes": [peak, 1e9]},
    }
    assert len(on_gpus.missed_by(on_gpus.parse([]), runs)) == missed


def test_the_large_model_is_one_that_mlx_lm_reads(on_gpus: Any, tmp_path: Path) -> None:
    options = on_gpus.parse(
        ["--dims", "256", "--layers", "2", "--vocabulary", "512", "--batch-size", "2"]
    )
    on_gpus.write_inputs(options, tmp_path)
    import mlx.core as mx
    from mlx_lm.utils import load

    model: Any = load(str(tmp_path / "model"))[0]
    numbers = model(mx.array([[1, 2, 3]]))
    assert numbers.shape == (1, 3, 512)
    assert mx.isfinite(numbers).all().item()
    assert type(model.layers[1].mlp.down_proj).__name__ == "QuantizedLinear"
