"""Parsing, bars and tables of ``benchmarks/gpu_sharded.py`` and ``activations_gpu.py``, and what
they train.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from benchmark_scripts import scripts_on_the_path

NAMES = (
    "gpu_sharded",
    "sharded_cases",
    "sharded_runs",
    "sharded_rank",
    "activations_gpu",
    "activations_worker",
    "records",
)
MACHINE = {"cpu": "c", "cores": 2, "system": "Linux", "gpus": ["NVIDIA H200, 700 W"] * 2}


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with scripts_on_the_path():
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})


def figures(speed: float, *peaks: float) -> dict[str, Any]:
    return {
        "tokens_per_s": speed,
        "step_s": 0.5,
        "peak_bytes": list(peaks),
        "losses": [10.5, 10.4, 10.3, 10.2],
    }


# --- options --------------------------------------------------------------------------------------


def test_every_case_measures_first_what_its_bar_compares(bench: Any) -> None:
    options = bench.gpu_sharded.parse([])
    assert options.cases == ("7b", "13b", "70b")
    assert options.limit <= 240
    for case in bench.sharded_cases.CASES.values():
        assert set(case.ways) <= set(bench.gpu_sharded.WAYS)
        if case.reference:
            assert case.ways[:2] == (case.reference, case.judged)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("gpu_sharded", ["--cases", "1b"], "'1b' is none of 7b, 13b, 70b"),
        ("gpu_sharded", ["--ways", "ddp"], "'ddp' is none of torch-compiled"),
        ("gpu_sharded", ["--steps", "0"], "not a whole number above 0"),
        ("activations_gpu", ["--ways", "gloo"], "'gloo' is none of nccl"),
        ("activations_gpu", ["--sizes", "4,-1"], "give sizes in MB"),
        ("activations_gpu", ["--sizes", "large"], "give sizes in MB"),
    ],
)
def test_wrong_options(
    bench: Any, module: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        getattr(bench, module).parse(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_of_messages(bench: Any) -> None:
    parse = bench.activations_gpu.parse
    assert parse([]).sizes == [4, 8, 16, 32, 64, 128]
    assert parse(["--sizes", "64,2.5,64"]).sizes == [2.5, 64]


# --- what is trained ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["7b", "70b"])
def test_models_of_random_weights_are_read_by_mlx_lm(bench: Any, case: str, tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load

    cases = bench.sharded_cases
    cases.write_model(tmp_path / "model", cases.config_of(case, "tiny"))
    found: Any = load(str(tmp_path / "model"))
    model, tokenizer = found[:2]
    assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all().item()
    arrays = dict(tree_flatten(model.parameters()))
    if case == "7b":
        assert sum(array.size for array in arrays.values()) == cases.parameters(cases.TINY)
        assert {array.dtype for array in arrays.values()} == {mx.bfloat16}
    else:
        assert arrays["model.layers.3.mlp.down_proj.weight"].dtype == mx.uint32
    cases.write_rows(tmp_path / "data", 3, cases.TINY_ROW, cases.TINY["vocab_size"])
    texts = [
        json.loads(line)["text"]
        for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()
    ]
    rows = [tokenizer.encode(text) for text in texts]
    assert [len(row) for row in rows] == [cases.TINY_ROW] * 3
    assert len({token for row in rows for token in row}) > cases.TINY_ROW
    assert all(0 < token < cases.TINY["vocab_size"] for row in rows for token in row)


def test_shapes_are_as_large_as_their_names_say(bench: Any) -> None:
    sizes = {
        name: bench.sharded_cases.parameters(case.shape) / 1e9
        for name, case in bench.sharded_cases.CASES.items()
    }
    assert sizes == {
        "7b": pytest.approx(7.24, abs=0.01),
        "13b": pytest.approx(13.02, abs=0.01),
        "70b": pytest.approx(68.98, abs=0.01),
    }


def test_commands_divide_the_batch_among_all_gpus(bench: Any, tmp_path: Path) -> None:
    options = bench.gpu_sharded.parse(["--gpus", "4", "--steps", "7", "--micro-batch-rows", "2"])
    words = bench.sharded_runs.words_of(
        options, "70b", tmp_path, tmp_path, tmp_path, ["--strategy", "fsdp"]
    )
    given = dict(pairwise(words))
    assert {
        name: given[f"--{name}"]
        for name in ("batch-size", "iters", "max-seq-length", "micro-batch-tokens")
    } == {
        "batch-size": "16",
        "iters": "10",
        "max-seq-length": "1025",
        "micro-batch-tokens": "2048",
    }
    assert (given["--fine-tune-type"], given["--num-layers"], given["--strategy"]) == (
        "lora",
        "16",
        "fsdp",
    )
    words = bench.sharded_runs.words_of(options, "13b", tmp_path, tmp_path, tmp_path, [])
    assert words[words.index("--fine-tune-type") + 1] == "full"


@pytest.mark.parametrize(
    ("before", "visible"),
    [
        ({}, "0"),
        ({"ALLHANDS_LOCAL_RANK": "1"}, "1"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "1"),
        ({"ALLHANDS_LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}, "3"),
        ({"ALLHANDS_LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, "6"),
    ],
)
def test_a_rank_takes_one_gpu(bench: Any, before: dict[str, str], visible: str) -> None:
    bench.sharded_rank.take_gpu(before)
    assert before["CUDA_VISIBLE_DEVICES"] == visible


# --- runs -----------------------------------------------------------------------------------------

STARTS_ANOTHER = """
import pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(other.pid))
time.sleep(120)
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_time", [True, False])
def test_a_run_is_ended_with_all_that_it_has_started(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    told, runs = tmp_path / "pid", bench.sharded_runs
    monkeypatch.setattr(runs, "_GONE_S", 0.5)
    command, began = [sys.executable, "-c", STARTS_ANOTHER, str(told)], time.monotonic()
    if in_time:
        runs.run_until(
            command, tmp_path / "log", {}, 60.0, lambda: told.exists() and told.read_text() != ""
        )
    else:
        with pytest.raises(runs.BenchmarkError, match="did not finish in time"):
            runs.run_until(command, tmp_path / "log", {}, 6.0, lambda: False)
    assert time.monotonic() - began < 30
    other = int(told.read_text())
    assert not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_ends_early_is_quoted(bench: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('allhands: error: out of luck'); raise SystemExit(3)"]
    with pytest.raises(bench.sharded_runs.BenchmarkError, match="code 3") as error:
        bench.sharded_runs.run_until(command, tmp_path / "way.log", {}, 60.0, lambda: False)
    assert bench.sharded_runs.failed(tmp_path, "way", error.value) == {
        "error": "error: out of luck"
    }


def test_reports_that_are_still_being_written_are_left(bench: Any, tmp_path: Path) -> None:
    assert bench.sharded_runs.reports_in(tmp_path / "none") == []
    lines = [{"event": "start"}, {"event": "train", "step": 1}, {"event": "train", "step": 2}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [each["step"] for each in bench.sharded_runs.reports_in(tmp_path / "metrics.jsonl")] == [
        1
    ]


def report_of(step: int, elapsed_s: float, tokens: int = 100) -> dict[str, Any]:
    times = {"step_time_s": 0.5, "tokens_per_s": tokens / 0.5, "elapsed_s": elapsed_s}
    return {
        **times,
        "step": step,
        "loss": 3.0 - step / 10,
        "peak_mlx_bytes": [10 * step, 20 * step],
    }


def test_speed_is_that_of_the_clock_on_the_wall(bench: Any) -> None:
    reports = [report_of(1, 30.0), report_of(2, 31.0), report_of(3, 33.0), report_of(4, 35.0)]
    found = bench.sharded_runs.figures(reports, 2, 100)
    assert (found["tokens_per_s"], found["step_s"], found["peak_bytes"]) == (50.0, 2.0, [40, 80])
    assert found["losses"] == pytest.approx([2.9, 2.8, 2.7, 2.6])
    with pytest.raises(
        bench.sharded_runs.BenchmarkError,
        match="step 3 has 99 tokens, and the benchmark's have 100",
    ):
        bench.sharded_runs.figures([*reports[:2], report_of(3, 33.0, 99)], 2, 100)


@pytest.fixture
def counted(bench: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Ways that are measured, in place of measuring."""
    seen: dict[str, list[str]] = {"ours": [], "torch": []}

    def train(_options: Any, _work: Path, name: str, words: list[str], *_: Any) -> list[Any]:
        seen["ours"].append(f"{name} {' '.join(words[-2:])}")
        if name.endswith("zero1"):
            raise bench.gpu_sharded.BenchmarkError("out of memory")
        return [report_of(step, float(step), 8 * 64) for step in range(1, 6)]

    def train_torch(
        _options: Any, _work: Path, name: str, asked: Any, _timeout_s: float
    ) -> dict[str, Any]:
        seen["torch"].append(name)
        size = bench.sharded_cases.parameters(asked["shape"]) - (name.endswith("checkpoint"))
        return {"seconds": 2.0, "peak_bytes": [1, 1], "losses": [3.0] * 5, "parameters": size}

    monkeypatch.setattr(bench.gpu_sharded, "train", train)
    monkeypatch.setattr(bench.gpu_sharded, "train_torch", train_torch)
    monkeypatch.setattr(bench.gpu_sharded, "make_model", lambda *_: Path("model"))
    return seen


def test_a_way_that_fails_is_a_row(
    bench: Any, counted: dict[str, list[str]], tmp_path: Path
) -> None:
    options = bench.gpu_sharded.parse(["--shape", "tiny", "--gpus", "2", "--steps", "2"])
    found = bench.gpu_sharded.run_case(options, tmp_path, "13b")
    ours = [
        f"13b-{way}" for way in bench.sharded_cases.CASES["13b"].ways if not way.startswith("torch")
    ]
    assert [line.split()[0] for line in counted["ours"]] == ours
    assert "13b-tp --tp 2" in counted["ours"]
    assert found["zero1"] == {"error": "out of memory"}
    assert found["fsdp"]["tokens_per_s"] == found["tp"]["tokens_per_s"] == 512.0
    # A model of another size is no comparison.
    assert "PyTorch's model has" in found["torch-compiled-checkpoint"]["error"]
    options.ways = ("torch",)
    assert bench.gpu_sharded.run_case(options, tmp_path, "7b")["torch"]["tokens_per_s"] == 512.0
    assert bench.gpu_sharded.run_case(options, tmp_path, "70b")["torch"]["error"].startswith(
        "left out"
    )
    options.limit = 1.0
    assert bench.gpu_sharded.run_case(options, tmp_path, "7b")["torch"] == {
        "error": "left out: the time of --limit is over"
    }


def test_a_python_that_does_not_run_is_no_end(bench: Any, tmp_path: Path) -> None:
    options = bench.gpu_sharded.parse(
        ["--python", f"torch={tmp_path / 'none'}", "--gpus", "2", "--ways", "torch"]
    )
    found = bench.gpu_sharded.measure(options, tmp_path, MACHINE)
    assert "No such file" in found["results"]["full training of a 7B shape"]["torch"]["error"]
    assert found["versions"]["torch"] == {}


# --- bars and tables ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "peak", "met", "missed"),
    [
        (1050.0, 40e9, ["1.050 times", "40.0 GB, at most the 42.6 GB"], []),
        (
            1049.0,
            40e9,
            ["40.0 GB"],
            ["1.049 times the tokens/s of PyTorch FSDP2, blocks compiled, at least 1.05"],
        ),
        (1200.0, 43e9, ["1.200 times"], ["43.0 GB, at most the 42.6 GB"]),
        (900.0, 43e9, [], ["0.900 times", "43.0 GB"]),
    ],
)
def test_the_bar_is_speed_at_no_more_memory(
    bench: Any, speed: float, peak: float, met: list[str], missed: list[str]
) -> None:
    ways = {"torch-compiled": figures(1000.0, 41e9, 42.6e9), "fsdp": figures(speed, peak, 39e9)}
    told = bench.gpu_sharded.verdicts(1.05, "7b", ways)
    for key, wanted in (("met", met), ("missed", missed)):
        assert len(told[key]) == len(wanted)
        assert all(text in line for text, line in zip(wanted, told[key], strict=True))


def test_a_bar_without_figures_is_missed_and_one_without_a_peer_is_none(bench: Any) -> None:
    verdicts, mine = bench.gpu_sharded.verdicts, figures(1.0, 1.0)
    told = verdicts(
        1.05, "13b", {"torch-compiled-checkpoint": {"error": "no GPU"}, "fsdp-checkpoint": mine}
    )
    assert told == {
        "met": [],
        "missed": ["13b: PyTorch FSDP2, blocks compiled, checkpointing: no GPU"],
    }
    assert verdicts(1.05, "13b", {"torch-compiled": mine, "fsdp": mine}) == {
        "met": [],
        "missed": [],
    }
    assert verdicts(1.05, "70b", {"fsdp": mine, "pipeline": mine}) == {"met": [], "missed": []}


def found_of(bench: Any, ways: dict[str, Any], **more: Any) -> dict[str, Any]:
    settings = {"gpus": 2, "shape": "full", "rows": None, "warmup": 3, "steps": 1}
    found = {
        "settings": settings,
        "machine": MACHINE,
        "results": {"full training of a 7B shape": ways},
        "met": [],
        "missed": [],
    }
    return found | {"date": "2026-01-01", "commit": "abc", "versions": {"python": "3"}} | more


def test_table_of_sharded_training(bench: Any) -> None:
    ways = {
        "torch-compiled": figures(20_000.0, 42e9, 42.5e9),
        "fsdp": figures(21_500.4, 30e9, 31e9),
    }
    ways["tp"] = {"error": "out of memory"}
    lines = bench.gpu_sharded.report(
        found_of(bench, ways, met=["speed"], missed=["memory"])
    ).splitlines()
    assert lines[0] == (
        "full training of a 7B shape: 7.24 billion numbers, 2 GPUs, 4 x 1,024 tokens on each; 1 steps count, after 3"
    )
    assert lines[5] == (
        "| allhands, --strategy fsdp | 21,500 | 1.075 | 500 ms | 30.00 GB, 31.00 GB | 10.5000, 10.3000, 10.2000 |"
    )
    assert lines[6] == "| allhands, --tp 2 | out of memory | | | |  |"
    assert lines[-2:] == ["MET: speed", "MISSED: memory"]
    assert not any("differ" in line for line in lines)
    ways["zero1"] = figures(1.0, 1.0) | {"losses": [10.5, 10.4, 10.3, 10.302]}
    told = bench.gpu_sharded.report(found_of(bench, ways))
    assert "Losses of allhands' ways differ by 1.0e-02 of them at most." in told


def test_rows_of_sharded_training_have_ratios(bench: Any) -> None:
    ways = {
        "torch-compiled": figures(20_000.0, 42e9),
        "fsdp": figures(21_000.0, 21e9),
        "tp": {"error": "no"},
    }
    found = found_of(bench, ways)
    rows = bench.records.make_record("gpu_sharded", found, bench.gpu_sharded.rows(found))["rows"]
    assert [(row["who"], row["unit"]) for row in rows] == [
        ("PyTorch FSDP2, blocks compiled", "tokens/s"),
        ("PyTorch FSDP2, blocks compiled", "GB"),
        ("allhands", "tokens/s"),
        ("allhands", "GB"),
    ]
    assert [row["ratios"] for row in rows[2:]] == [
        {"PyTorch FSDP2, blocks compiled": 1.05},
        {"PyTorch FSDP2, blocks compiled": 2.0},
    ]


# --- activations ----------------------------------------------------------------------------------


def message(mb: float, both: bool, alone: float, **more: float) -> dict[str, Any]:
    times = {"alone_s": alone, "beside_s": 2 * alone, "without_s": 8 * alone, "with_s": 8.5 * alone}
    return {"mb": mb, "both": both, **times, **more}


def test_what_a_message_costs(bench: Any) -> None:
    module = bench.activations_gpu
    one = message(100.0, False, 0.010)
    assert module.speed(one, "alone_s") == pytest.approx(10.0)
    assert module.speed(one, "beside_s") == pytest.approx(5.0)
    assert module.speed(message(100.0, True, 0.010), "alone_s") == pytest.approx(20.0)
    assert module.stolen_s(one) == pytest.approx(0.005)
    # The host has waited for the message, not for the computation.
    assert module.stolen_s(message(100.0, False, 0.010, beside_s=0.085)) is None


def test_tables_of_activations(bench: Any) -> None:
    module = bench.activations_gpu
    told = {
        "nccl": {"messages": [message(4.0, False, 0.001), message(4.0, True, 0.002)]},
        "nccl-gather": {"messages": [message(4.0, False, 0.0011), message(4.0, True, 0.001)]},
        "mpi": {"error": "no Open MPI"},
    }
    found = found_of(
        bench,
        {},
        messages=told,
        pipelines={"nccl": figures(6800.0, 35e9, 34e9), "ring": {"error": "no"}},
    )
    lines = module.report(found).splitlines()
    assert lines[2] == (
        "| NCCL, sum with zeros | 4 | one way | 4.00 GB/s (1.00 ms) | 2.00 GB/s (2.00 ms) | 0.50 of 8.0 ms |"
    )
    assert "| Open MPI, message | no Open MPI | | | | |" in lines
    assert "4 MB, one way: NCCL, sum with zeros, 1.10 times as fast as NCCL, all-gather" in lines
    assert (
        "4 MB, both ways at once: NCCL, all-gather, 2.00 times as fast as NCCL, sum with zeros"
        in lines
    )
    assert "| --backend nccl | 6,800 | 500 ms | 35.00 GB, 34.00 GB | 10.5000, 10.2000 |" in lines
    rows = list(module.rows(found))
    assert len(rows) == 4 * 3 + 1
    assert (rows[-1].who, rows[-1].median) == ("allhands, --backend nccl", 6800.0)


def test_a_message_that_is_another_is_noticed(bench: Any) -> None:
    worker = bench.activations_worker

    class Twisted:
        """Gives to each rank what it has sent itself."""

        def begin(self, array: Any, *, both: bool) -> Any:
            return array

        def end(self, coming: Any) -> Any:
            return coming

    class Right(Twisted):
        def end(self, coming: Any) -> Any:
            return worker.filled(coming.size, 0)

    mine = worker.filled(300, 1)
    worker.check(Right(), mine, 1, both=False)
    with pytest.raises(RuntimeError, match="rank 1 has not received"):
        worker.check(Twisted(), mine, 1, both=True)


def test_pipelines_are_measured_once_for_each_backend(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, seen = bench.activations_gpu, list[str]()

    def pipeline(
        _options: argparse.Namespace, _work: Path, way: str, timeout_s: float
    ) -> dict[str, Any]:
        seen.append(way)
        if way == "ring":
            raise module.BenchmarkError("no ring")
        return figures(1.0, 1.0)

    monkeypatch.setattr(module, "pipeline", pipeline)
    found = module.measure(module.parse(["--parts", "pipelines"]), tmp_path, MACHINE)
    assert seen == ["nccl", "mpi", "ring"]
    assert found["pipelines"]["ring"] == {"error": "no ring"}
    assert "messages" not in found
