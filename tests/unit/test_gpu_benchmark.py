"""What ``benchmarks/gpu.py`` takes over of a record that a shorter loan of the GPU left unfinished."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import scripts_on_the_path

MACHINE = {"cpu": "c", "cores": 4, "system": "Linux", "gpus": ["H, 700 W"], "gpu": "H, 700 W"}
DONE = {
    "tokens_per_s": 8.0,
    "step_s": {"median": 1.0, "best": 0.5, "worst": 2.0},
    "losses": [2.0, 1.0],
}
LEFT_OUT = {"error": "left out: the time of --limit is over"}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with scripts_on_the_path():
        yield importlib.import_module("gpu")


@pytest.fixture
def measured(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """An earlier record in which ``full`` is not whole, and what is measured from now on."""
    seen: list[tuple[str, str]] = []

    def command(_options: Any, work: str, peer: str, _steps: int) -> list[str]:
        seen.append((work, peer))
        return []

    def run_measured(_command: Any, log: Path, *_: Any) -> None:
        log.write_text(json.dumps({**DONE, "tokens_per_s": 9.0, "peak_bytes": 1}))

    results = {
        "qlora": {"allhands": DONE, "mlx_lm": LEFT_OUT},
        "lora": {"allhands": DONE, "mlx_lm": DONE},
        "full": {"allhands": LEFT_OUT, "mlx_lm": LEFT_OUT},
    }
    found = {
        "date": "2026-01-02",
        "commit": "abc",
        "machine": MACHINE,
        "settings": {"built": False},
        "steps": 20,
    }
    monkeypatch.setenv("ALLHANDS_BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setenv("ALLHANDS_BENCHMARK_COMMIT", "abc")
    records = importlib.import_module("records")
    records.write_record(records.make_record("gpu", {**found, "results": results}, [], "10:00:00"))
    monkeypatch.setattr(bench, "gpu", lambda: MACHINE["gpu"])
    monkeypatch.setattr(bench, "command", command)
    monkeypatch.setattr(bench, "run_measured", run_measured)
    monkeypatch.setattr(bench, "versions", lambda *_, **__: {})
    return seen


def measure(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *flags: str
) -> dict[str, Any]:
    flags = ("--works", "qlora,lora,smol", "--peers", "allhands,mlx_lm", "--steps", "20", *flags)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    return bench.measure(bench.parse(), tmp_path, {k: v for k, v in MACHINE.items() if k != "gpu"})


def test_whole_works_are_taken_over_and_the_others_measured_by_everybody(
    bench: Any, measured: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = measure(bench, monkeypatch, tmp_path, "--add")
    assert measured == [
        (work, peer) for work in ("qlora", "smol") for peer in ("allhands", "mlx_lm")
    ]
    speeds = {work: of["mlx_lm"]["tokens_per_s"] for work, of in record["results"].items()}
    assert speeds == {"qlora": 9.0, "lora": 8.0, "smol": 9.0}
    assert list(record["works"]) == ["qlora", "lora", "smol"]


@pytest.mark.parametrize("other", ["no --add", "code", "changes", "steps", "settings", "machine"])
def test_nothing_is_taken_over_of_what_is_another_thing(
    bench: Any,
    measured: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    other: str,
) -> None:
    flags = {
        "no --add": [],
        "steps": ["--add", "--steps", "30"],
        "settings": ["--add", "--built"],
    }.get(other, ["--add"])
    if other in ("code", "changes"):
        monkeypatch.setenv("ALLHANDS_BENCHMARK_COMMIT", {"code": "abd", "changes": "abc+"}[other])
    if other == "machine":
        monkeypatch.setattr(bench, "gpu", lambda: "another")
        monkeypatch.setitem(MACHINE, "gpus", ["another"])
    measure(bench, monkeypatch, tmp_path, *flags)
    assert {work for work, _ in measured} == {"qlora", "lora", "smol"}


def test_a_peer_that_the_record_lacks_is_measured(
    bench: Any, measured: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure(bench, monkeypatch, tmp_path, "--add", "--peers", "allhands,torch")
    assert {work for work, _ in measured} == {"qlora", "lora", "smol"}
