"""What ``benchmarks/gpu_many.py`` starts, and what it makes of ranks' answers. Nothing is trained
here.
"""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import BENCHMARKS, scripts_on_the_path

from allhands.distributed import reduce

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """Import by name as the scripts do."""
    with scripts_on_the_path():
        yield SimpleNamespace(
            **{name: importlib.import_module(name) for name in ("gpu_many", "records", "harness")}
        )


@pytest.fixture(scope="module")
def bench(modules: Any) -> Any:
    return modules.gpu_many


def case(
    bench: Any, gpus: int = 2, scaling: str = "weak", peer: str = "allhands", **more: Any
) -> Any:
    rows = 8 // gpus if scaling == "strong" else 8
    return bench.Case("full", gpus, scaling, peer, rows, **more)


# --- what is measured -----------------------------------------------------------------------------


def test_one_gpu_comes_once_and_buckets_only_where_bytes_are_exchanged(bench: Any) -> None:
    options = bench.parse(
        [
            "--gpus",
            "2,1",
            "--works",
            "full",
            "--peers",
            "torch,allhands",
            "--bucket-mb",
            "8,none,128",
        ]
    )
    names = [(one.name, one.who, one.rows) for one in bench.cases(options)]
    ours = ("allhands, buckets of 8 MB", "allhands, no buckets", "allhands")
    assert names == [
        ("full, 1 GPU", "allhands", 8),
        ("full, 1 GPU", "PyTorch DDP, eager", 8),
        *(("full, 2 GPUs", who, 8) for who in (*ours, "PyTorch DDP, eager")),
        *(("full, 2 GPUs, the batch of one", who, 4) for who in (*ours, "PyTorch DDP, eager")),
    ]
    only_strong = bench.parse(
        ["--gpus", "1,4", "--works", "smol", "--peers", "torch", "--scaling", "strong"]
    )
    assert [(one.gpus, one.rows) for one in bench.cases(only_strong)] == [(1, 32), (4, 8)]


def test_gpus_that_exchange_nothing_are_several(bench: Any) -> None:
    options = bench.parse(
        ["--gpus", "1,2", "--works", "full", "--peers", "allhands,apart", "--bucket-mb", "8,128"]
    )
    asked = {
        (one.name, one.who): json.loads(bench.command(one, options, Path("/x.json"))[-1])["apart"]
        for one in bench.cases(options)
    }
    apart = {
        name: told for (name, who), told in asked.items() if who == "allhands, nothing exchanged"
    }
    assert apart == {"full, 2 GPUs": True, "full, 2 GPUs, the batch of one": True}
    assert sum(asked.values()) == 2
    assert len(asked) == 7


def test_usual_command_has_all_works_and_peers_but_the_quantised_one(bench: Any) -> None:
    options = bench.parse([])
    assert set(options.works) == {"full", "smol", "lora"}
    assert options.peers == ("allhands", "apart", "torch", "torch-compiled")
    assert (options.steps, options.bucket_mb, options.gpus) == (30, (128.0,), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--works", "qlora"], "'qlora' is none of"),
        (["--gpus", "1,none"], "'none' is not a whole number above 0"),
        (["--bucket-mb", "8,-1"], "give sizes in MB, or none"),
        (["--bucket-mb", "many"], "give sizes in MB, or none"),
        (["--peers", "allhands,mlx_lm"], "'mlx_lm' is none of"),
        (["--set", "taper"], "'taper': give alone_bytes=NUMBER, taper=NUMBER"),
        (["--set", "taper=1,rest=2"], "'rest=2': give alone_bytes=NUMBER"),
        (["--set", "alone_bytes=many"], "'alone_bytes=many': give alone_bytes=NUMBER"),
    ],
)
def test_wrong_arguments(
    bench: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        bench.parse(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_ranks_of_allhands_are_started_by_allhands(bench: Any) -> None:
    options = bench.parse(["--python", "mlx=/m/python,torch=/t/python", "--steps", "7"])
    words = bench.command(case(bench, 4, bucket_mb=8.0), options, Path("/scratch/x.json"))
    program, task = words[words.index("--") + 1 :][:-1], json.loads(words[-1])
    assert words[:6] == ["/m/python", "-m", "allhands", "launch", "-n", "4"]
    assert words[words.index("--max-restarts") + 1] == "0"
    assert program == ["/m/python", str(BENCHMARKS / "gpu_many_mlx.py")]
    assert (task["rows"], task["steps"], task["bucket_bytes"], task["out"]) == (
        8,
        7,
        8_000_000,
        "/scratch/x.json",
    )
    assert task["work"] == {**bench.WORKS["full"], "dtype": "bfloat16"}
    alone = bench.command(case(bench, 4, bucket_mb=0.0), options, Path("/scratch/x.json"))
    assert json.loads(alone[-1])["bucket_bytes"] == 0


def test_constants_of_the_exchange_can_be_set_for_a_measurement_each(bench: Any) -> None:
    options = bench.parse(
        [
            "--set",
            "none",
            "--set",
            "alone_bytes=16e6,taper=2",
            "--works",
            "full",
            "--gpus",
            "1,2",
            "--scaling",
            "weak",
        ]
    )
    asked = [
        (
            one.gpus,
            one.who,
            json.loads(bench.command(one, options, Path("/scratch/x.json"))[-1]).get("set"),
        )
        for one in bench.cases(options)
        if one.peer in ("allhands", "torch")
    ]
    assert asked == [
        (1, "allhands", {}),
        (1, "PyTorch DDP, eager", None),
        (2, "allhands", {}),
        (2, "allhands, alone_bytes 1.6e+07, taper 2", {"alone_bytes": 16e6, "taper": 2}),
        (2, "PyTorch DDP, eager", None),
    ]
    # Those that there are.
    assert all(isinstance(getattr(reduce, f"_{name.upper()}"), int) for name in bench.CONSTANTS)


def test_command_of_allhands_is_one_that_it_understands(bench: Any, tmp_path: Path) -> None:
    words = bench.command(case(bench, 2), bench.parse([]), tmp_path / "x.json")
    # All options are read before the program is looked for.
    words = [*words[: words.index("--") + 1], "no-such-program-anywhere"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "'no-such-program-anywhere' is not a program that can be started" in done.stderr


def test_ranks_of_pytorch_are_started_by_torchrun(bench: Any) -> None:
    options = bench.parse(["--python", "mlx=/m/python,torch=/t/python"])
    words = bench.command(
        case(bench, 2, "strong", "torch-compiled"), options, Path("/scratch/x.json")
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert words[:-1] == ["/t/python", *launcher, str(BENCHMARKS / "gpu_many_torch.py")]
    task = json.loads(words[-1])
    assert (task["peer"], task["rows"], task["steps"]) == ("torch-compiled", 4, 30)


def test_ranks_together_have_the_tokens_of_one(bench: Any) -> None:
    work = bench.WORKS["tiny"]
    whole = bench.batch_of(work, 4, 0)
    assert whole.shape == (4, 65)
    assert whole.dtype == np.int32
    np.testing.assert_array_equal(
        np.concatenate([bench.batch_of(work, 2, rank) for rank in (0, 1)]), whole
    )
    assert len(np.unique(whole, axis=0)) == 4
    assert whole.min() >= 0
    assert 400 < whole.max() < 512


# --- what is made of it ---------------------------------------------------------------------------

# Two ranks; one step warms up, three count, of which the slowest ranks take 2, 4 and 1 seconds.
TOLD = {
    "times": [[9.0, 1.0, 4.0, 1.0], [8.0, 2.0, 3.0, 1.0]],
    "compute_s": [[8.0, 0.5, 2.0, 0.6], [7.0, 1.0, 2.0, 0.6]],
    "comm_s": [[1.0, 0.3, 1.0, 0.1], [1.0, 0.2, 0.4, 0.2]],
    "data_wait_s": [[0.0, 0.0, 0.0, 0.0]] * 2,
    "losses": [11.0, 10.0, 9.0, 8.0],
    "peak_bytes": [3e9, 4e9],
    "trained": 5,
    "backend": "nccl",
}


def test_speed_is_by_the_slowest_rank_of_each_step(bench: Any) -> None:
    found = bench.figures(case(bench), TOLD, 3)
    assert found["step_s"] == {"median": 2.0, "best": 1.0, "worst": 4.0}
    assert found["rank0_s"] == 1.0
    assert found["tokens_per_s"] == 2 * 8 * 1024 / 2.0
    assert (found["peak_bytes"], found["first_step_s"], found["losses"]) == (4e9, 9.0, [11.0, 8.0])
    assert found["parts"] == pytest.approx(
        {"compute_s": 0.6, "comm_s": 0.3, "data_wait_s": 0.0, "rest_s": 0.1}
    )
    assert found["exchange_s"] == pytest.approx(0.2)  # of 0.2, 0.4 and 0.1
    assert bench.figures(case(bench, 2, "strong"), TOLD, 3)["tokens_per_s"] == 8 * 1024 / 2.0


def speed(tokens_per_s: float) -> dict[str, Any]:
    step = {"median": 0.1, "best": 0.08, "worst": 0.2}
    more = {
        "rank0_s": 0.09,
        "watts": 690.4,
        "mhz": 1575.0,
        "peak_bytes": 2e9,
        "first_step_s": 3.0,
        "losses": [11.0, 10.5],
        "trained": 1,
    }
    return {"tokens_per_s": tokens_per_s, "step_s": step, "backend": "nccl", **more}


OURS_SPLIT = {
    "parts": {"compute_s": 0.06, "comm_s": 0.02, "data_wait_s": 0.0, "rest_s": 0.01},
    "exchange_s": 0.015,
}


@pytest.fixture
def found(bench: Any) -> dict[str, Any]:
    """As ``measure`` gives it, made up."""
    both = [case(bench, 1), case(bench, 4), case(bench, 4, "strong")]
    one, weak, strong = (one.name for one in both)
    results = {
        one: {"allhands": speed(100.0), "PyTorch DDP, eager": speed(80.0)},
        weak: {
            "allhands": speed(380.0) | OURS_SPLIT,
            "allhands, no buckets": speed(300.0) | OURS_SPLIT,
            "PyTorch DDP, eager": speed(240.0),
        },
        strong: {
            "allhands": speed(200.0) | OURS_SPLIT,
            "PyTorch DDP, eager": {"error": "out | of memory"},
        },
    }
    works = {name.name: name.described for name in both}
    bench.add_efficiency(results, works)
    settings = {"nccl": {"NCCL_NVLS_ENABLE": "0"}}
    facts = {"cpu": "c", "cores": 2, "system": "Linux", "gpus": ["H200, 700 W"] * 4}
    told = {
        "date": "2026-01-01",
        "commit": "abc",
        "machine": facts,
        "versions": {"mlx": {"python": "3"}},
    }
    return {**told, "settings": settings, "steps": 30, "works": works, "results": results}


def test_efficiency_is_of_n_times_the_same_peer_alone(found: dict[str, Any]) -> None:
    weak, strong = (
        found["results"]["full, 4 GPUs"],
        found["results"]["full, 4 GPUs, the batch of one"],
    )
    parts = {who: one["efficiency"] for who, one in weak.items()}
    assert parts == {"allhands": 0.95, "allhands, no buckets": 0.75, "PyTorch DDP, eager": 0.75}
    assert strong["allhands"]["efficiency"] == 0.5
    assert "efficiency" not in strong["PyTorch DDP, eager"]


def test_without_one_gpu_there_is_no_efficiency(bench: Any) -> None:
    results = {"full, 2 GPUs": {"allhands": speed(1.0)}}
    bench.add_efficiency(results, {"full, 2 GPUs": {"gpus": 2}})
    assert "efficiency" not in results["full, 2 GPUs"]["allhands"]


def test_table(bench: Any, found: dict[str, Any]) -> None:
    lines = bench.report(found).splitlines()
    over = "allhands over nccl, PyTorch DDP over nccl"
    assert (
        lines[0]
        == f"30 steps, median of rounds of 10 (worst to best) of the slowest rank; {over}; NCCL_NVLS_ENABLE=0"
    )
    ours = "| 95.0 % | 100.0 ms | 90.0 ms | 690 W, 1575 MHz | 2.0 GB | 3.0 s | 11.000, 10.500 |"
    assert f"| full, 4 GPUs | allhands | 380 (190 to 475) {ours}" in lines
    failed = next(line for line in lines if "out / of memory" in line)
    assert failed.count("|") == lines[2].count("|")
    parts = "60.0 ms (67 %) | 20.0 ms (22 %) | 0.0 ms (0 %) | 10.0 ms (11 %) | 15.0 ms |"
    assert f"| full, 4 GPUs, the batch of one | allhands | {parts}" in lines


def test_record_has_speeds_and_efficiency_compared_and_the_page_shows_them(
    modules: Any, bench: Any, found: dict[str, Any], tmp_path: Path
) -> None:
    record = modules.records.make_record("gpu_many", found, bench.rows(found))
    rows = {(row.name, row.who): row for row in modules.records.rows_in(record)}
    assert rows["full, 4 GPUs: speed", "allhands"].ratios == {
        "PyTorch DDP, eager": pytest.approx(1.583)
    }
    assert rows["full, 4 GPUs: weak scaling", "allhands"].median == 95.0
    assert rows["full, 4 GPUs, the batch of one: strong scaling", "allhands"].median == 50.0
    assert rows["full, 4 GPUs: exchange", "allhands"].median == 15.0
    assert rows["full, 4 GPUs: speed", "allhands"].work["gpus"] == 4
    assert ("full, 1 GPU: weak scaling", "allhands") not in rows
    (tmp_path / "gpu_many-2026-01-01.json").write_text(json.dumps(record))
    page = runpy.run_path(str(ROOT / "scripts" / "write_performance_docs.py"))["page"](tmp_path)
    assert "## Training on several GPUs" in page
    assert (
        "| full, 4 GPUs: speed, tokens/s | 380 (190 to 475) | 300 (150 to 375) | 240 (120 to 300) | 1.58 x"
        in page
    )
    assert (
        "PyTorch DDP, eager has no figure for full, 4 GPUs, the batch of one: out | of memory"
        in page
    )


def test_what_cannot_be_measured_is_not_tried(bench: Any) -> None:
    assert bench.obstacle(case(bench, 4), 2, 100.0) == "left out: there are 2 GPUs"
    assert bench.obstacle(case(bench, 4), 0, 100.0) == ""
    assert (
        bench.obstacle(case(bench, 3, "strong"), 4, 100.0)
        == "left out: a batch of 8 cannot be divided by 3"
    )
    assert bench.obstacle(case(bench, 3), 4, 100.0) == ""
    assert bench.obstacle(case(bench, 2), 4, 5.0) == "left out: the time of --limit is over"


def test_first_error_is_the_reason(bench: Any, modules: Any) -> None:
    failed = modules.harness.BenchmarkError("python ended with code 1; the end of log:\n=====")
    log = (
        "a warning\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\n[rank0]: RuntimeError: peer gone\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====="
    )
    assert bench.reason(log, failed) == "torch.OutOfMemoryError: CUDA out of memory. Tried"
    assert bench.reason("allhands: error: no MPI\n", failed) == "error: no MPI"
    assert bench.reason("killed", failed) == "====="
    late = modules.harness.BenchmarkError("a peer did not finish in time: raise --timeout")
    assert bench.reason("E: x\n", late) == "did not finish in time"


def test_a_peer_that_fails_is_a_line_of_the_table(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    broken.chmod(0o700)
    options = bench.parse(
        ["--gpus", "1", "--works", "tiny", "--peers", "torch", "--python", f"torch={broken}"]
    )
    monkeypatch.setattr(bench, "versions", lambda python, packages, **environ: {})
    found = bench.measure(options, tmp_path, {"gpus": []})
    assert found["results"] == {
        "tiny, 1 GPU": {
            "PyTorch DDP, eager": {"error": "ModuleNotFoundError: No module named torch"}
        }
    }
    assert found["works"]["tiny, 1 GPU"]["dtype"] == "float32"
    assert "ended with code 1" in capsys.readouterr().err
