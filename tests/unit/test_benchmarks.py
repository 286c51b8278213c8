"""The benchmarks' own arithmetic: what they run, read, compare and print. Nothing is trained here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Any:
    """Import by name as the scripts do; their directory is on the path for as long as that takes."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in ("harness", "cpu_lora", "cpu_lora_prepare")}
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def bench(modules: dict[str, ModuleType]) -> Any:
    return modules["cpu_lora"]


@pytest.fixture(scope="module")
def harness(modules: dict[str, ModuleType]) -> Any:
    return modules["harness"]


@pytest.fixture(scope="module")
def preparing(modules: dict[str, ModuleType]) -> Any:
    return modules["cpu_lora_prepare"]


def test_defaults_are_those_of_the_published_table(bench: Any) -> None:
    options = bench.parse([])
    assert options.peers == ("mlx_lm", "peft", "allhands")
    assert (options.warmup, options.steps, options.mlx_lm_warmup, options.mlx_lm_steps) == (3, 20, 1, 2)
    assert (options.batch_size, options.num_layers, options.rank) == (4, 8, 8)


def test_peers_run_in_a_fixed_order(bench: Any) -> None:
    assert bench.parse(["--peers", "allhands, mlx_lm"]).peers == ("mlx_lm", "allhands")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "allhands,axolotl"], "'axolotl' is none of mlx_lm"),
        (["--peers", ","], "no peer named"),
        (["--steps", "0"], "0 is below 1"),
        (["--warmup", "-1"], "not a whole number"),
    ],
)
def test_wrong_arguments(bench: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench.parse(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_mlx_lm_draws_the_batches_that_were_planned(preparing: Any) -> None:
    from mlx_lm.tuner.datasets import CacheDataset
    from mlx_lm.tuner.trainer import iterate_batches

    class Examples:
        """Records of one key, of which mlx_lm takes the 'length' to be 1, as it does with chat records."""

        def __init__(self, numbers: list[int]) -> None:
            self.numbers = numbers

        def __len__(self) -> int:
            return len(self.numbers)

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"messages": self.numbers[index]}

        def process(self, record: dict[str, int]) -> tuple[list[int], int]:
            return [record["messages"] + 1] * 5, 0

    planned = [np.asarray([0, 1, 2, 3]) + 4 * i for i in (3, 0, 4, 1, 2)]
    for seed in (0, 7):
        np.random.seed(seed)
        data = CacheDataset(Examples(preparing.in_mlx_lm_order(planned, seed)))
        drawn = [np.asarray(batch)[:, 0] - 1 for batch, _ in iterate_batches(data, 4, 64)]
        assert [batch.tolist() for batch in drawn] == [batch.tolist() for batch in planned]


def test_the_longest_example_is_in_the_first_batch(preparing: Any) -> None:
    lengths = np.asarray([5, 9, 30, 7, 8, 6, 12, 11, 10, 13, 14, 15], dtype=np.int64)
    order = preparing.longest_first(lengths, 4)
    assert 2 in order.batch(0)
    assert sorted(int(i) for step in range(3) for i in order.batch(step)) == list(range(12))


MANIFEST = {
    "model": "/models/tiny",
    "steps": [
        {
            "examples": [
                {"tokens": [1, 2, 3, 4], "trained": [False, True, True, True], "mlx_lm_from": 1},
                {"tokens": [5, 6], "trained": [False, True], "mlx_lm_from": 1},
            ],
            "tokens": 6,
            "places": {"allhands": 6, "mlx_lm": 64, "peft": 8},
        }
    ],
}


@pytest.fixture
def plan(bench: Any, tmp_path: Path) -> Any:
    return bench.Plan(bench.parse([]), tmp_path, MANIFEST)


def test_allhands_metrics(bench: Any, plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # Four inputs (3 + 1) in half a second.
    report = {"event": "train", "step": 1, "loss": 2.5, "tokens_per_s": 8.0, "step_time_s": 0.5}
    path.write_text(json.dumps({"event": "opened"}) + "\n" + json.dumps(report) + "\n")
    assert bench.read_allhands(plan, path) == [bench.Step(2.5, 0.5, 6, 6)]
    path.write_text(json.dumps({**report, "tokens_per_s": 6.0}) + "\n")
    with pytest.raises(bench.BenchmarkError, match="allhands reports 3 tokens in step 1; the batch has 4"):
        bench.read_allhands(plan, path)


def test_mlx_lm_reports_pass_through_the_recorder(
    bench: Any, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "mlx_lm.jsonl"
    monkeypatch.setenv("BENCHMARK_RECORD", str(record))
    spec = importlib.util.spec_from_file_location("recorder_wandb", BENCHMARKS / "recorder" / "wandb.py")
    assert spec is not None
    assert spec.loader is not None
    recorder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)
    recorder.init(project="p", name="n", dir="d", config={})
    # Its mask counts one token of padding an example: 4 + 2 where 3 + 1 are trained.
    values = {"iteration": 1, "train_loss": 3.0, "iterations_per_second": 0.25, "trained_tokens": 6}
    recorder.log(values, step=1)
    assert bench.read_mlx_lm(plan, record) == [bench.Step(3.0, 4.0, 6, 64)]


def result(bench: Any, harness: Any, peer: str, times: list[float], mib: int) -> Any:
    steps = [bench.Step(2.0, time, 100, 120) for time in times]
    return bench.Result(peer, ["python"], {"python": "3.12"}, 1, steps, harness.Measured(9.0, 8.0, mib << 20))


def test_table(bench: Any, harness: Any) -> None:
    theirs = result(bench, harness, "mlx_lm", [99.0, 25.0, 25.0], 700)
    ours = result(bench, harness, "allhands", [99.0, 0.8, 1.0, 0.5], 701)
    lines = bench.table([theirs, ours])
    assert lines[2] == "| mlx_lm.lora as pip installs it | 4.0 (4.0 to 4.0) | 4.8 | 1.0 | 700 MiB | 2 after 1 |"
    assert lines[3] == "| allhands | 125.0 (100.0 to 200.0) | 150.0 | 31.2 | 701 MiB | 3 after 1 |"
    verdict = "\n".join(bench.verdict([theirs, ours]))
    assert "31.2 times mlx_lm (the mark is 25): met" in verdict
    assert "701 against 700 MiB (no higher is the mark): MISSED" in verdict


def test_table_without_mlx_lm_compares_nothing(bench: Any, harness: Any) -> None:
    ours = result(bench, harness, "allhands", [1.0, 1.0], 100)
    assert bench.table([ours])[2].split(" | ")[3] == "-"
    assert bench.verdict([ours]) == [""]


def test_record_holds_no_place_of_this_machine(bench: Any, harness: Any, plan: Any, tmp_path: Path) -> None:
    places = [sys.executable, f"{tmp_path}/x", "/models/tiny", f"{BENCHMARKS}/a.py", f"{plan.options.cache}/peft-env"]
    shown = [bench.shorten(place, plan) for place in places]
    assert shown == ["python", "RUN/x", "MODEL", "benchmarks/a.py", "CACHE/peft-env"]
    options = bench.parse(["--data", str(tmp_path / "mine")])
    facts = {"cpu": "c", "cores": 2}
    record = bench.make_record(options, "2026-01-31", facts, [result(bench, harness, "peft", [1, 1], 5)], None)
    assert record["settings"]["data"] == "mine"
    assert record["peers"]["peft"]["tokens_per_s"] == 100.0
    assert str(tmp_path) not in json.dumps(record)


def test_peak_memory_is_the_childs(tmp_path: Path) -> None:
    # From a small process of its own, as the benchmark is: pytest's own memory would be counted in.
    allocate = "import sys; x = bytearray(int(sys.argv[1]) << 20); x[::4096] = b'1' * len(x[::4096])"
    program = f"""
import sys, pathlib, harness
for size in ("0", "160"):
    command = [sys.executable, "-c", {allocate!r}, size]
    print(harness.run_measured(command, pathlib.Path("log"), {{}}, 60).peak_rss_bytes / 2**20)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(BENCHMARKS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    empty, full = map(float, done.stdout.split())
    assert empty < 40
    assert 160 <= full < 200


def test_a_failing_child_is_quoted(harness: Any, tmp_path: Path) -> None:
    with pytest.raises(harness.BenchmarkError, match=r"ended with code 3.*\n.*out of luck"):
        harness.run_measured(
            [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"], tmp_path / "log", {}, 60
        )


def test_a_slow_child_is_ended(harness: Any, tmp_path: Path) -> None:
    with pytest.raises(harness.BenchmarkError, match="did not finish in time"):
        harness.run_measured([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", {}, 0.3)


def test_peers_are_shielded_from_the_persons_settings(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    environ = harness.clean_environ(PYTHONPATH="/recorder")
    assert "OPENBLAS_NUM_THREADS" not in environ
    assert environ["PYTHONPATH"] == "/recorder"
