"""The shape of recorded figures, what is found to be worse in them, and the page that is made of
them.
"""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("records", "regressions", "roofline", "ceilings", "instructions", "harness")


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Any]]:
    """Import by name as the scripts do."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


MACHINE = {
    "cpu": "Some CPU",
    "cores": 2,
    "memory_gib": 23.5,
    "system": "Linux x86_64",
    "load_at_start": 0.1,
}


def record(
    bench: dict[str, Any], rows: list[Any], date: str = "2026-01-01", **more: Any
) -> dict[str, Any]:
    found = {"date": date, "commit": "abc", "machine": MACHINE, "versions": {"python": "3"}, **more}
    return bench["records"].make_record("made_up", found, rows)


def speeds(bench: dict[str, Any], ours: float, theirs: float) -> list[Any]:
    row_of = bench["records"].row_of
    return [
        row_of("speed", "allhands", "tokens/s", [ours], "higher"),
        row_of("speed", "peer", "tokens/s", [theirs], "higher"),
    ]


def counted(bench: dict[str, Any], count: int) -> list[Any]:
    return [bench["records"].row_of("import", "allhands", "instructions", [count], "lower")]


# --- records --------------------------------------------------------------------------------------


def test_rows_hold_median_spread_and_ratios_that_are_above_1_where_allhands_is_ahead(
    bench: dict[str, Any],
) -> None:
    row_of = bench["records"].row_of
    rows = [
        row_of("time", "allhands", "s", [3.0, 1.0, 2.0], "lower"),
        row_of("time", "allhands, other way", "s", [9.0], "lower"),
        row_of("time", "rsync", "s", [8.0], "lower"),
        *speeds(bench, 50.0, 100.0),
    ]
    found = record(bench, rows)["rows"]
    assert [found[0][key] for key in ("median", "least", "most", "repeats", "better")] == [
        2.0,
        1.0,
        3.0,
        3,
        "lower",
    ]
    assert [row["ratios"] for row in found] == [{"rsync": 4.0}, {}, {}, {"peer": 0.5}, {}]


def test_a_record_says_when_where_and_with_what(bench: dict[str, Any]) -> None:
    made = record(
        bench, counted(bench, 7), commit="abc+", settings={"tool": "perf"}, counts={"import": [7]}
    )
    assert list(made) == [
        "name",
        "date",
        "time",
        "commit",
        "environment",
        "settings",
        "rows",
        "details",
    ]
    assert made["details"] == {"counts": {"import": [7]}}
    assert made["environment"] == {"machine": MACHINE, "versions": {"allhands": {"python": "3"}}}
    lines = bench["records"].environment_lines(made)
    assert lines[0] == "made_up, 2026-01-01, commit abc+ with changes that are not committed"
    assert lines[1] == "Some CPU, 2 cores, 23.5 GiB, Linux x86_64; load 0.1 at the start"
    assert lines[2] == "allhands: python 3"
    # Six digits are enough of a time, but not of a count.
    assert record(bench, counted(bench, 123_456_789))["rows"][0]["median"] == 123_456_789


def test_steps_of_training_become_rows(bench: dict[str, Any]) -> None:
    step = {"median": 0.5, "best": 0.4, "worst": 1.0}
    one = {"tokens_per_s": 200.0, "step_s": step, "peak_bytes": 3e9, "first_step_s": 9.0}
    found = {
        "results": {
            "lora": {
                "allhands": one,
                "torch": one | {"tokens_per_s": 100.0},
                "mlx_lm": {"error": "no"},
            }
        },
        "works": {"lora": {"rank": 8}},
        "steps": 20,
    }
    rows = bench["records"].with_ratios(bench["records"].work_rows(found))
    assert [(row.name, row.who, row.unit) for row in rows[:3]] == [
        ("lora: speed", "allhands", "tokens/s"),
        ("lora: peak memory", "allhands", "GB"),
        ("lora: first step", "allhands", "s"),
    ]
    speed = rows[0]
    # 100 tokens a step: in 1 s at worst, in 0.4 s at best.
    assert (speed.median, speed.least, speed.most, speed.repeats) == (200.0, 100.0, 250.0, 20)
    assert (speed.ratios, speed.work) == ({"torch": 2.0}, {"rank": 8})
    assert not [row for row in rows if row.who == "mlx_lm"]


def test_what_was_measured_again_takes_the_old_place(
    bench: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLHANDS_BENCHMARK_RESULTS", str(tmp_path / "kept"))
    write = bench["records"].write_record
    first = write(record(bench, counted(bench, 1)))
    assert first == tmp_path / "kept" / "made_up-2026-01-01.json"
    assert write(record(bench, counted(bench, 2))) == first
    others = [
        {"commit": "def"},
        {"machine": MACHINE | {"gpus": ["H200, 700 W"]}},
        {"settings": {"megabytes": 1}},
    ]
    places = [write(record(bench, counted(bench, 3), **other)).name for other in others]
    assert places == [f"made_up-2026-01-01-{number}.json" for number in (2, 3, 4)]
    read = bench["records"].read_records(tmp_path / "kept")
    assert [one["rows"][0]["median"] for one in read] == [3, 3, 3, 2]


def test_every_record_that_is_kept_can_be_read(bench: dict[str, Any]) -> None:
    kept = bench["records"].read_records(ROOT / "benchmarks" / "results")
    assert {"cpu_lora", "data", "backends", "sync", "recovery"} <= {one["name"] for one in kept}
    for one in kept:
        rows = bench["records"].rows_in(one)
        assert rows
        for row in rows:
            assert row.least <= row.median <= row.most, row
        for row, again in zip(rows, bench["records"].with_ratios(rows), strict=True):
            assert row.ratios == pytest.approx(again.ratios, rel=1e-3)


# --- regressions ----------------------------------------------------------------------------------


def found_worse(bench: dict[str, Any], *records: dict[str, Any]) -> list[tuple[str, float]]:
    regressions = bench["regressions"]
    return [
        (change.what, round(change.percent, 2))
        for comparison in regressions.compare(records)
        for change in regressions.worse(comparison, regressions.LIMIT_PERCENT)
    ]


def test_a_ratio_that_is_6_percent_worse_is_found_and_4_percent_are_not(
    bench: dict[str, Any],
) -> None:
    before = record(bench, speeds(bench, 100.0, 100.0))
    assert found_worse(bench, before, record(bench, speeds(bench, 94.0, 100.0))) == [
        ("speed, against peer", 6.0)
    ]
    assert found_worse(bench, before, record(bench, speeds(bench, 96.0, 100.0))) == []
    # The machine was half as fast for both: not ours to answer for.
    assert found_worse(bench, before, record(bench, speeds(bench, 50.0, 50.0))) == []


def test_less_is_better_where_it_says_so(bench: dict[str, Any]) -> None:
    def memory(ours: float) -> dict[str, Any]:
        row_of = bench["records"].row_of
        return record(
            bench,
            [
                row_of("memory", who, "GB", [value], "lower")
                for who, value in (("allhands", ours), ("p", 10))
            ],
        )

    assert found_worse(bench, memory(10.0), memory(9.0)) == []
    assert found_worse(bench, memory(10.0), memory(12.5)) == [("memory, against p", 20.0)]
    assert (
        found_worse(bench, record(bench, counted(bench, 1000)), record(bench, counted(bench, 940)))
        == []
    )
    assert found_worse(
        bench, record(bench, counted(bench, 1000)), record(bench, counted(bench, 1060))
    ) == [("import, instructions", 6.0)]
    assert (
        found_worse(bench, record(bench, counted(bench, 1000)), record(bench, counted(bench, 1040)))
        == []
    )


@pytest.mark.parametrize(
    "other",
    [
        {"machine": MACHINE | {"cores": 4}},
        {"machine": MACHINE | {"gpus": ["NVIDIA H200, 700.00 W"]}},
        {"settings": {"tool": "callgrind"}},
    ],
)
def test_other_machines_and_other_settings_are_not_compared(
    bench: dict[str, Any], other: dict[str, Any]
) -> None:
    before, after = (
        record(bench, counted(bench, 1000)),
        record(bench, counted(bench, 2000), **other),
    )
    assert found_worse(bench, before, after) == []
    assert (
        bench["regressions"]
        .report(bench["regressions"].compare([before, after]), 5)
        .count("nothing earlier")
        == 2
    )


def test_memory_load_and_the_number_of_repeats_do_not_keep_records_apart(
    bench: dict[str, Any],
) -> None:
    machine = MACHINE | {"memory_gib": 23.4, "load_at_start": 0.0, "os": "Debian"}
    after = record(bench, counted(bench, 2000), machine=machine, settings={"repeat": 9})
    assert found_worse(
        bench, record(bench, counted(bench, 1000), settings={"repeat": 3}), after
    ) == [("import, instructions", 100.0)]


def test_the_last_record_that_has_the_figure_counts(bench: dict[str, Any]) -> None:
    history = [counted(bench, 500), counted(bench, 1000), speeds(bench, 1.0, 1.0)]
    records = [record(bench, rows, date=f"2026-01-0{day}") for day, rows in enumerate(history, 1)]
    records.append(
        record(bench, [*counted(bench, 1020), *speeds(bench, 0.5, 1.0)], date="2026-01-04")
    )
    assert found_worse(bench, *records) == [("speed, against peer", 50.0)]


def works(
    bench: dict[str, Any], day: int, name: str = "made_up", **speeds_of: tuple[float, float]
) -> dict[str, Any]:
    """A record of some works, each with our speed and the peer's."""
    results = {
        f"{work}, 2 GPUs": {
            who: {"tokens_per_s": speed, "step_s": dict.fromkeys(("median", "best", "worst"), 1.0)}
            for who, speed in zip(("allhands", "peer"), both, strict=True)
        }
        for work, both in speeds_of.items()
    }
    rows = bench["records"].work_rows({"results": results})
    return {**record(bench, rows, date=f"2026-01-0{day}", results=results), "name": name}


def test_a_run_of_one_work_does_not_hide_what_another_has_become(bench: dict[str, Any]) -> None:
    first, second = (
        works(bench, 1, full=(2, 1), lora=(2, 1)),
        works(bench, 2, full=(1.5, 1), lora=(1.5, 1)),
    )
    last = works(bench, 3, lora=(1.6, 1))
    assert found_worse(bench, first, second, last) == [("full, 2 GPUs: speed, against peer", 25.0)]
    left = bench["records"].not_measured_since([first, second, last])
    assert [place for place, _ in left] == [1, 2]
    assert [list(one["details"]["results"]) for _, one in left] == [
        ["full, 2 GPUs"],
        ["lora, 2 GPUs"],
    ]
    assert {row["name"] for row in left[0][1]["rows"]} == {"full, 2 GPUs: speed"}
    assert left[1][1] == last


def test_the_command_ends_with_1_and_names_what_is_worse(
    bench: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(number: int, rows: list[Any], **more: Any) -> None:
        made = record(bench, rows, date=f"2026-01-0{number}", **more)
        (tmp_path / f"made_up-{number}.json").write_text(json.dumps(made))

    main = bench["regressions"].main
    assert main(["--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no records\n"
    write(1, counted(bench, 1000))
    assert main(["--results", str(tmp_path)]) == 0
    assert "nothing earlier to compare with" in capsys.readouterr().out
    write(
        2, [*counted(bench, 1100), *speeds(bench, 1.0, 1.0)], commit="def", versions={"python": "4"}
    )
    assert main(["--results", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "WORSE by 10.0 %: import, instructions: 1,100, was 1,000 (2026-01-01, abc)" in told
    assert "not in any earlier record: speed, against peer" in told
    assert "other versions: allhands: python 4, was 3 on 2026-01-01" in told
    assert main(["--results", str(tmp_path), "--limit", "12"]) == 0


# --- the limit ------------------------------------------------------------------------------------

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


def test_flops_are_those_of_the_weights_that_mlx_lm_makes(bench: dict[str, Any]) -> None:
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = Model(ModelArgs.from_dict({"model_type": "llama", "rms_norm_eps": 1e-5, **SHAPE}))
    multiplied = sum(m.weight.size for m in model.modules() if isinstance(m, nn.Linear))
    in_layers = multiplied - model.lm_head.weight.size
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 1.0, "dropout": 0.0})
    adapters = sum(value.size for _, value in tree_flatten(model.trainable_parameters()))
    flops = bench["roofline"].flops_per_token
    # Scores and sums over all places before, of which there are half as many as the length: 2
    # products, 2 each.
    attention = 3 * 2 * 2 * 64 / 2 * 32
    full = {"shape": SHAPE, "rank": 0, "layers": 3, "length": 64}
    assert flops(full) == 3 * (2 * multiplied + attention)
    lora = {"shape": SHAPE, "rank": 4, "layers": 2, "mean_length": 64}
    backward = 2 * (in_layers * 2 / 3) + 2 * 32 * 100 + 2 * attention * 2 / 3
    assert flops(lora) == pytest.approx(2 * multiplied + attention + backward + 6 * adapters)


def test_speed_is_held_against_the_fastest_product_of_the_type_on_the_same_device(
    bench: dict[str, Any],
) -> None:
    row_of = bench["records"].row_of
    rows = [
        row_of("matmul float32, 512, 2 threads", "allhands", "GFLOP/s", [80.0], "higher"),
        row_of("matmul float32, 1,024, 2 threads", "PyTorch", "GFLOP/s", [100.0], "higher"),
        row_of("matmul bfloat16, 1,024", "allhands", "TFLOP/s", [700.0], "higher"),
        row_of("memcpy, 2 threads", "memcpy", "GB/s", [1e9], "higher"),
    ]
    ceilings = {**record(bench, rows), "name": "ceilings"}
    work = {"shape": SHAPE, "rank": 0, "layers": 3, "length": 64, "dtype": "float32"}
    speed = row_of("speed", "allhands", "tokens/s", [1e4], "higher", work=work)
    found = bench["roofline"].utilisation(record(bench, [speed]), [ceilings])
    rate = 1e4 * bench["roofline"].flops_per_token(work)
    assert [(row.who, one, part) for row, one, part in found] == [
        ("allhands", rate, pytest.approx(rate / 100e9))
    ]
    elsewhere = record(bench, [speed], machine=MACHINE | {"cores": 4})
    assert bench["roofline"].utilisation(elsewhere, [ceilings]) == []


def test_ceilings_are_rows_by_threads_on_a_cpu_and_by_type_on_a_gpu(bench: dict[str, Any]) -> None:
    def part(library: str, device: str, *figures: dict[str, Any]) -> dict[str, Any]:
        return {"library": library, "threads": 2, "device": device, "figures": list(figures)}

    matmul = {"kind": "matmul", "dtype": "float32", "size": 1024, "flops_per_s": [2e12, 1e12, 3e12]}
    copy = {"kind": "copy", "bytes_per_s": [5e9]}
    exchange = [{"num_bytes": 16 << 20, "bus_bytes_per_s": rate} for rate in (3e9, 1e9, 2e9)]
    found = {
        "parts": [part("mlx", "cpu", matmul, copy), part("memory", "cpu", copy)],
        "exchange": exchange,
    }
    rows = {row.name: row for row in bench["ceilings"].rows(found)}
    assert set(rows) == {
        *("matmul float32, 1,024, 2 threads", "copy in memory, 2 threads", "memcpy, 2 threads"),
        "all-reduce of 16 MiB, 2 processes",
    }
    product = rows["matmul float32, 1,024, 2 threads"]
    assert (product.median, product.least, product.most, product.unit) == (
        2000.0,
        1000.0,
        3000.0,
        "GFLOP/s",
    )
    assert rows["all-reduce of 16 MiB, 2 processes"].median == 2.0
    parts = [part("mlx", "gpu", matmul, copy), part("memory", "cpu", copy)]
    on_gpu = bench["ceilings"].rows({"parts": parts, "exchange": []})
    assert [(row.name, row.unit) for row in on_gpu] == [
        ("matmul float32, 1,024", "TFLOP/s"),
        ("copy in memory", "GB/s"),
    ]


def test_rates_count_what_each_round_does(bench: dict[str, Any]) -> None:
    worker = importlib.import_module("ceilings_worker")
    done: list[int] = []
    rates = worker.per_second(done.append, 10.0, 3)
    assert len(rates) == 3
    # Two that warm up, then rounds of a chain.
    assert done[:2] == [1, 1]
    assert done[2:] == [50] * 3


# --- instructions ---------------------------------------------------------------------------------


def test_counts_are_read_from_what_the_tools_write(bench: dict[str, Any]) -> None:
    instructions = bench["instructions"]
    perf = "# started on Sat Nov 21 16:35:45 2026\n\n1234567,,instructions:u,580141629,100.00,,\n"
    assert instructions.count_in_perf(perf) == 1234567
    assert instructions.count_in_perf("<not supported>,,instructions:u,0,100.00,,\n") is None
    assert instructions.count_in_perf("") is None
    assert instructions.count_in_callgrind("desc: x\nsummary: 0\ntotals: 519890\n") == 519890
    with pytest.raises(instructions.BenchmarkError, match="no total"):
        instructions.count_in_callgrind("desc: x\n")


def test_without_a_tool_the_reason_is_told(
    bench: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert bench["instructions"].main([]) == 0
    told = capsys.readouterr().err
    assert told.startswith("skipped: ")
    assert sys.platform != "linux" or "valgrind is not installed" in told


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def docs() -> dict[str, Any]:
    before = list(sys.path)
    try:
        return runpy.run_path(str(ROOT / "scripts" / "write_performance_docs.py"))
    finally:
        sys.path[:] = before


def test_the_page_is_that_of_the_records(docs: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert page == docs["page"](), "run scripts/write_performance_docs.py"


def test_the_table_of_the_readme_is_that_of_the_last_record(
    docs: dict[str, Any], tmp_path: Path
) -> None:
    text = (ROOT / "README.md").read_text()
    assert text == docs["readme"](text), "run scripts/write_performance_docs.py"
    old = text.replace("| PyTorch + PEFT |", "| PyTorch + PEFT | 1 |")
    assert old != text
    assert docs["readme"](old) == text
    assert docs["readme"](old, tmp_path) == old, "no record, no change"


def test_the_page_shows_the_newest_and_says_where_a_peer_is_ahead(
    bench: dict[str, Any], docs: dict[str, Any], tmp_path: Path
) -> None:
    def write(name: str, rows: list[Any], date: str) -> None:
        (tmp_path / f"{name}-{date}.json").write_text(
            json.dumps({**record(bench, rows, date=date), "name": name})
        )

    write("cpu_lora", speeds(bench, 111.0, 1.0), "2026-01-01")
    write("cpu_lora", [*speeds(bench, 50.0, 100.0), *counted(bench, 7)], "2026-01-02")
    page = docs["page"](tmp_path)
    assert "111" not in page
    assert "| speed, tokens/s | 50 | 100 | **0.50 x peer** |" in page
    assert "| import, instructions | 7 |  |  |" in page
    assert (
        "- LoRA on a Linux CPU (Some CPU, 2 cores), speed: peer is better (ratio 0.50 x)." in page
    )
    assert "no record of a GPU yet" in page
    write("cpu_lora", speeds(bench, 97.0, 100.0), "2026-01-03")
    assert "- By less than 5 %: LoRA on a Linux CPU (Some CPU, 2 cores): speed (peer)." in docs[
        "page"
    ](tmp_path)
    write("cpu_lora", speeds(bench, 100.0, 100.0), "2026-01-04")
    assert "In none of the figures above." in docs["page"](tmp_path)


def test_the_page_shows_each_work_as_it_was_last_measured(
    bench: dict[str, Any], docs: dict[str, Any], tmp_path: Path
) -> None:
    every = [
        works(bench, 1, "gpu_many", full=(111, 1), lora=(222, 1), smol=(333, 1)),
        works(bench, 2, "gpu_many", full=(444, 1)),
        works(bench, 3, "gpu_many", smol=(555, 1)),
    ]
    for number, one in enumerate(every):
        (tmp_path / f"gpu_many-{number}.json").write_text(json.dumps(one))
    page = docs["page"](tmp_path)
    shown = [line.split(" | ")[:2] for line in page.splitlines() if "tokens/s | " in line]
    assert shown == [
        [f"| {work}, 2 GPUs: speed, tokens/s", f"{n}"]
        for work, n in (("lora", 222), ("full", 444), ("smol", 555))
    ]
    assert page.count("- gpu_many, 2026-01-0") == 3


def test_a_peer_that_failed_is_named(bench: dict[str, Any], docs: dict[str, Any]) -> None:
    made = record(
        bench, speeds(bench, 1.0, 1.0), results={"lora": {"torch": {"error": "out of memory"}}}
    )
    assert docs["section"](made).endswith("\n\ntorch has no figure for lora: out of memory\n")


def test_the_script_for_gpus_says_what_it_needs() -> None:
    script = ROOT / "benchmarks" / "h200.sh"
    done = subprocess.run(
        ["/bin/sh", script], env={"PATH": "/bin"}, capture_output=True, text=True, check=False
    )
    if "GPU" not in done.stderr:
        pytest.skip("there is a GPU here")
    assert done.returncode == 2
    assert "make bench" in done.stderr
