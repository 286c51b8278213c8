"""The benchmarks' own arithmetic: what they run, read, compare and print. Nothing is trained here."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import BENCHMARKS, scripts_on_the_path


@pytest.fixture(scope="module")
def modules() -> Any:
    """Import by name as the scripts do; their directory is on the path for as long as that takes."""
    with scripts_on_the_path():
        yield {
            name: importlib.import_module(name)
            for name in ("harness", "cpu_lora", "cpu_lora_prepare")
        }


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
    assert (options.warmup, options.steps, options.mlx_lm_warmup, options.mlx_lm_steps) == (
        3,
        20,
        1,
        2,
    )
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
def test_wrong_arguments(
    bench: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        bench.parse(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_mlx_lm_draws_the_batches_that_were_planned(preparing: Any) -> None:
    from mlx_lm.tuner.datasets import CacheDataset
    from mlx_lm.tuner.trainer import iterate_batches

    class Examples:
        """Records of one key, of which mlx_lm takes the 'length' to be 1, as it does with chat
        records.
        """

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
    with pytest.raises(
        bench.BenchmarkError, match="allhands reports 3 tokens in step 1; the batch has 4"
    ):
        bench.read_allhands(plan, path)


def test_mlx_lm_reports_pass_through_the_recorder(
    bench: Any, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "mlx_lm.jsonl"
    monkeypatch.setenv("BENCHMARK_RECORD", str(record))
    spec = importlib.util.spec_from_file_location(
        "recorder_wandb", BENCHMARKS / "recorder" / "wandb.py"
    )
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
    return bench.Result(
        peer, ["python"], {"python": "3.12"}, 1, [steps], harness.Measured(9.0, 8.0, mib << 20)
    )


def test_table(bench: Any, harness: Any) -> None:
    theirs = result(bench, harness, "mlx_lm", [99.0, 25.0, 25.0], 700)
    ours = result(bench, harness, "allhands", [99.0, 0.8, 1.0, 0.5], 701)
    lines = bench.table([theirs, ours])
    assert (
        lines[2]
        == "| mlx_lm.lora as pip installs it | 4.0 (4.0 to 4.0) | 4.8 | 1.0 | 700 MiB | 1 x 2 after 1 |"
    )
    assert (
        lines[3] == "| allhands | 125.0 (100.0 to 200.0) | 150.0 | 31.2 | 701 MiB | 1 x 3 after 1 |"
    )
    verdict = "\n".join(bench.verdict([theirs, ours]))
    assert "31.2 times mlx_lm (the mark is 25): met" in verdict
    assert "701 against 700 MiB (no higher is the mark): MISSED" in verdict


def test_runs_in_turn_are_one_result(
    bench: Any, harness: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is half as fast in the second round, for everybody; of each run the first step
    warms up.
    """
    seen: list[str] = []

    def run_peer(_plan: Any, peer: str, _python: Path) -> Any:
        slow = 1 + seen.count("peft")
        seen.append(peer)
        return result(bench, harness, peer, [9.0, slow * 1.0, slow * 0.5], 100 * slow)

    monkeypatch.setattr(bench, "prepare", lambda options, _work: plan)
    monkeypatch.setattr(bench, "run_peer", run_peer)
    monkeypatch.setattr(bench, "expect", lambda *_: None)
    monkeypatch.setattr(bench, "work_of", lambda _: {})
    monkeypatch.setattr(type(plan), "python", lambda _self, peer: Path(peer))
    options = bench.parse(["--rounds", "2", "--peers", "mlx_lm,peft,allhands"])
    record = bench.measure(options, Path(), {})
    assert seen == ["mlx_lm", "peft", "allhands", "peft", "allhands"]
    counts = {
        peer: [len(steps) for steps in found["rounds"]] for peer, found in record["peers"].items()
    }
    assert counts == {"mlx_lm": [3], "peft": [3, 3], "allhands": [3, 3]}
    assert record["peers"]["peft"]["tokens_per_s"] == 100.0  # the middle of 100, 200, 50 and 100
    assert record["peers"]["peft"]["peak_rss_mib"] == 200.0


def test_table_without_mlx_lm_compares_nothing(bench: Any, harness: Any) -> None:
    ours = result(bench, harness, "allhands", [1.0, 1.0], 100)
    assert bench.table([ours])[2].split(" | ")[3] == "-"
    assert bench.verdict([ours]) == [""]


def test_record_holds_no_place_of_this_machine(
    bench: Any, harness: Any, plan: Any, tmp_path: Path
) -> None:
    places = [
        sys.executable,
        f"{tmp_path}/x",
        "/models/tiny",
        f"{BENCHMARKS}/a.py",
        f"{plan.options.cache}/peft-env",
    ]
    shown = [bench.shorten(place, plan) for place in places]
    assert shown == ["python", "RUN/x", "MODEL", "benchmarks/a.py", "CACHE/peft-env"]
    options = bench.parse(["--data", str(tmp_path / "mine")])
    facts = {"cpu": "c", "cores": 2}
    record = bench.make_record(
        options, "2026-01-31", facts, [result(bench, harness, "peft", [1, 1], 5)], None
    )
    assert record["settings"]["data"] == "mine"
    assert record["peers"]["peft"]["tokens_per_s"] == 100.0
    assert str(tmp_path) not in json.dumps(record)


def test_peak_memory_is_the_childs(tmp_path: Path) -> None:
    # From a small process of its own, as the benchmark is: pytest's own memory would be counted in.
    allocate = (
        "import sys; x = bytearray(int(sys.argv[1]) << 20); x[::4096] = b'1' * len(x[::4096])"
    )
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
            [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"],
            tmp_path / "log",
            {},
            60,
        )


def test_a_slow_child_is_ended(harness: Any, tmp_path: Path) -> None:
    with pytest.raises(harness.BenchmarkError, match="did not finish in time"):
        harness.run_measured(
            [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", {}, 0.3
        )


def test_peers_are_shielded_from_the_persons_settings(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    environ = harness.clean_environ(PYTHONPATH="/recorder")
    assert "OPENBLAS_NUM_THREADS" not in environ
    assert environ["PYTHONPATH"] == "/recorder"


# --- data.py --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_bench() -> Any:
    with scripts_on_the_path():
        names = ("data", "data_memory", "data_padding", "data_text", "data_worker")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_generated_text(data_bench: Any, tmp_path: Path) -> None:
    write = data_bench.data_text.write_documents
    count = write(tmp_path / "a" / "train.jsonl", 300_000)
    assert write(tmp_path / "b" / "train.jsonl", 300_000) == count
    text = (tmp_path / "a" / "train.jsonl").read_bytes()
    assert text == (tmp_path / "b" / "train.jsonl").read_bytes()
    assert 230_000 < len(text) <= 300_000
    documents = [json.loads(line)["text"] for line in text.splitlines()]
    assert len(documents) == count
    lengths = sorted(len(document.split()) for document in documents)
    assert 120 < lengths[count // 2] < 260
    assert lengths[-1] > 8 * lengths[count // 2]
    # Natural text: the commonest word is common, and many come once.
    words = Counter(re.findall(r"[a-z']+", " ".join(documents).lower()))
    assert words.most_common(1)[0][1] > 0.02 * words.total()
    assert sum(times == 1 for times in words.values()) > 1000
    write(tmp_path / "c" / "train.jsonl", 100_000)
    assert text.startswith((tmp_path / "c" / "train.jsonl").read_bytes())
    assert write(tmp_path / "d" / "train.jsonl", 1) == 1


SHARING = """
import os, sys
mine = bytearray(b"1") * (64 << 20)
child = os.fork()
own = bytearray(b"2") * (32 << 20) if child == 0 else None
if child == 0:
    print("ready", flush=True)
    sys.stdin.readline()
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_tree_counts_shared_pages_once(data_bench: Any) -> None:
    memory = data_bench.data_memory
    command = [sys.executable, "-c", SHARING]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        with memory.Peak(process.pid, interval_s=0.01) as peak:
            assert process.stdout.readline() == "ready\n"
            assert len(memory.tree(process.pid)) == 2
            found = memory.pss_bytes([process.pid]) / 2**20
            # 64 in both, 32 in one, and two interpreters.
            assert 96 <= found < 96 + 30
            assert memory.pss_bytes([process.pid] * 2) == pytest.approx(
                memory.pss_bytes([process.pid]), rel=0.05
            )
            deadline = time.monotonic() + 10
            while peak.bytes < 96 << 20 and time.monotonic() < deadline:
                time.sleep(0.02)
        assert 96 <= peak.bytes / 2**20 < 96 + 30
        process.communicate("\n")
    assert memory.pss_bytes([process.pid]) == 0


def test_padding_of_passes(data_bench: Any) -> None:
    padding = data_bench.data_padding
    passes = [((2, 10), 15), ((2, 10), 20), ((1, 20), 13)]
    assert padding.summary(passes) == {
        "padding": 0.2,
        "places": 60,
        "inputs": 48,
        "passes": 3,
        "shapes": 2,
    }
    assert padding.padded(np.array([3, 7, 5])) == ((3, 7), 15)


def test_every_token_is_in_one_pass_of_an_epoch(data_bench: Any) -> None:
    from allhands.data.tokens import TokenSet

    padding = data_bench.data_padding
    lengths = np.random.default_rng(0).integers(2, 200, size=70)
    examples = [(np.arange(length), np.arange(length) > 0) for length in lengths]
    tokens = TokenSet.of_examples(examples)
    wanted = int(lengths.sum()) - 70
    assert sum(count for _, count in padding.random_passes(tokens, 8)) == wanted
    found = {
        name: padding.summary(padding.allhands_passes(tokens, 8, sizing))
        for name, sizing in padding.SIZINGS.items()
    }
    assert [figures["inputs"] for figures in found.values()] == [wanted] * 3
    assert found["allhands_gpu_ladder"]["shapes"] <= found["allhands_gpu"]["shapes"]
    random = padding.summary(padding.random_passes(tokens, 8))
    assert found["allhands_gpu"]["padding"] < random["padding"]


def test_mlx_lm_batches_are_counted_as_it_makes_them(
    data_bench: Any, tiny_model: Path, tiny_data: Path
) -> None:
    passes = data_bench.data_padding.mlx_lm_passes(str(tiny_data), str(tiny_model), 2)
    rows = [json.loads(line) for line in (tiny_data / "train.jsonl").read_text().splitlines()]
    assert len(passes) == len(rows) // 2
    # A byte a token; <|im_start|>, the role, a line break, <|im_end|>, a line break.
    sizes = [
        sum(len(f"{m['role']}{m['content']}".encode()) + 4 for m in row["messages"]) - 1
        for row in rows[: len(rows) // 2 * 2]
    ]
    assert sum(count for _, count in passes) == sum(sizes)
    for (height, width), count in passes:
        assert height == 2
        assert width % 32 == 0
        assert count <= height * width


def test_waits_are_those_of_each_step_after_the_first(data_bench: Any) -> None:
    loaded: list[int] = []
    waits = data_bench.data_worker.step_waits(loaded.append, 5, 0.0)
    assert loaded == [0, 1, 2, 3, 4]
    assert len(waits) == 4
    assert all(wait >= 0 for wait in waits)


PEER = {
    "num_bytes": 100_000_000,
    "build_s": 20.0,
    "num_tokens": 25 << 20,
    "first": 7,
    "peak_pss_bytes": 300 << 20,
    "open_s": 0.0204,
    "one_process_bytes": 50 << 20,
    "all_processes_bytes": 55 << 20,
    "processes_ratio": 1.1,
}


def test_data_tables(data_bench: Any) -> None:
    rows = data_bench.data.peer_table({"allhands": PEER, "mlx_lm": PEER | {"open_s": None}})[2:]
    assert (
        rows[0]
        == "| allhands | 100 MB | 20.0 s | 5.0 | 300 MiB | 20 ms | 50.0 MiB | 55.0 MiB | 1.10 | 2.0 |"
    )
    assert rows[1].split(" | ")[5] == "tokenises again"
    one = {"padding": 0.0312, "shapes": 4}
    batches = {"4": {"random": one}, "8": {"random": one | {"shapes": 9}}}
    table = data_bench.data.chat_table(
        "mine", {"num_examples": 3, "num_inputs": 99, "batches": batches}
    )
    assert table[0].startswith("padding, mine (3 examples, 99 tokens)")
    assert table[-1] == "| random batches | 3.1 % (4 shapes) | 3.1 % (9 shapes) |"


def test_peers_must_have_the_same_tokens(data_bench: Any) -> None:
    data_bench.data.same_tokens({"allhands": PEER, "mlx_lm": PEER})
    with pytest.raises(data_bench.data.BenchmarkError, match="'mlx_lm': 8"):
        data_bench.data.same_tokens({"allhands": PEER, "mlx_lm": PEER | {"first": 8}})


def test_what_is_for_mlx_lm(data_bench: Any) -> None:
    parse = data_bench.data.parse
    assert [parse([]).megabytes, parse([]).mlx_lm_megabytes] == [1000, 100]
    assert parse(["--megabytes", "20"]).mlx_lm_megabytes == 5
    assert parse(["--megabytes", "3"]).mlx_lm_megabytes == 3
    assert parse(["--megabytes", "20", "--mlx-lm-megabytes", "7"]).mlx_lm_megabytes == 7


def data_run(data_bench: Any, tmp_path: Path, timeout: float) -> Any:
    text = data_bench.data.Text(tmp_path, 1, 1)
    return data_bench.data.Run(
        SimpleNamespace(timeout=timeout, step_ms=1.0), tmp_path, tmp_path, text, text
    )


def test_data_workers_answer_or_are_quoted(data_bench: Any, tmp_path: Path) -> None:
    told = data_bench.data.told
    run = data_run(data_bench, tmp_path, 60)
    assert told([sys.executable, "-c", "print('noise'); print('@{\"a\": 1}')"], run) == {"a": 1}
    with pytest.raises(data_bench.data.BenchmarkError, match="ended with code 3:\nout of luck"):
        told(
            [
                sys.executable,
                "-c",
                "import sys; print('out of luck', file=sys.stderr); sys.exit(3)",
            ],
            run,
        )
    with pytest.raises(data_bench.data.BenchmarkError, match="ended with code -9"):
        told(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            data_run(data_bench, tmp_path, 0.2),
        )
