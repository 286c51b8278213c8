"""The arithmetic of ``benchmarks/process_memory.py``, and what it sees of real processes. Nothing
is trained here.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import scripts_on_the_path

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    with scripts_on_the_path():
        yield


@pytest.fixture
def bench() -> Any:
    return importlib.import_module("process_memory")


@pytest.fixture
def look() -> Any:
    return importlib.import_module("process_memory_look")


SMAPS = """55d0-55d1 r-xp 00000000 fe:00 12                  /usr/bin/python3.11
Size:                100 kB
Rss:                 100 kB
Pss:                  25 kB
Pss_Dirty:             0 kB
Private_Clean:         4 kB
Private_Dirty:         0 kB
VmFlags: rd ex mr mw me sd
7f00-7f10 r--s 00000000 fe:00 77                  /w/tokens/a b/tokens.bin
Rss:                 800 kB
Pss:                 400 kB
Private_Clean:         8 kB
Private_Dirty:         0 kB
7f20-7f30 r--s 00000000 fe:00 78                  /w/tokens-of-others/tokens.bin
Rss:                  16 kB
Pss:                  16 kB
Private_Clean:        16 kB
Private_Dirty:         0 kB
7f40-7f50 rw-p 00000000 00:00 0 
Rss:                 300 kB
Pss:                 300 kB
Private_Clean:         0 kB
Private_Dirty:       300 kB
"""  # noqa: W291 - as the kernel writes it


def test_mappings_of_the_corpus_are_told_from_the_rest(look: Any) -> None:
    held = look.held_in(SMAPS, [Path("/w/tokens"), Path("/w/table")])
    assert held == look.Held(
        pss=741 * 1024, private=328 * 1024, corpus_pss=400 * 1024, corpus_rss=800 * 1024
    )
    assert look.held_in(SMAPS, []).corpus_rss == 0


def test_figures_are_of_the_ranks_at_their_highest_and_the_rest_is_the_launcher(
    bench: Any, look: Any
) -> None:
    def moment(time: float, launcher: int, *ranks: tuple[int, int, int]) -> Any:
        held = {
            pid: look.Held(pss, private, corpus, 2 * corpus)
            for pid, (pss, private, corpus) in enumerate(ranks, 2)
        }
        return look.Moment(time, {1: look.Held(launcher, launcher), **held}, time + 0.1)

    moments = [
        moment(1.0, 900),
        moment(2.0, 60, (500, 400, 10), (400, 300, 20)),
        # While the corpus was read through.
        moment(2.45, 50, (900, 900, 300), (900, 900, 300)),
        moment(2.7, 50, (900, 900, 300), (900, 900, 300)),
        moment(3.0, 50, (550, 300, 100), (460, 310, 100)),
        moment(4.0, 50, (700, 690, 0)),
    ]
    said = {"corpus_bytes": 7, "mlx_peak_bytes": 5, "losses": [3.0, 2.0]}
    found = bench.figures(moments, [{"pid": 2, **said}, {"pid": 3, **said}], reading=(2.5, 2.8))
    assert (found["pss_bytes"], found["private_bytes"], found["shared_bytes"]) == (1010, 610, 400)
    assert (found["corpus_bytes"], found["models_bytes"]) == (214, 796)
    assert found["corpus_rss_bytes"] == 414
    assert (found["before_reading_bytes"], found["before_reading_corpus_bytes"]) == (900, 44)
    assert (found["launcher_bytes"], found["mlx_peak_bytes"], found["last_loss"]) == (
        900,
        [5, 5],
        2.0,
    )


def test_only_fresh_samples_of_ranks_are_held_against_the_look_from_outside(
    bench: Any, look: Any
) -> None:
    moments = [
        look.Moment(10.0, {2: look.Held(100), 3: look.Held(80)}),
        look.Moment(20.0, {2: look.Held(200)}),
    ]

    def sample(time: float, pss: int, role: str = "rank", pid: int = 2) -> dict[str, Any]:
        return {"time": time, "pss_bytes": pss, "role": role, "pid": pid}

    samples = [sample(10.1, 90), sample(19.9, 90), sample(20.1, 220), sample(15.0, 500)]
    samples += [sample(10.0, 1, "orchestrator", 3), sample(20.0, 7, pid=4)]
    # 0.9 and 1.1: one sample repeats an old value, one is of a time at which nobody looked.
    assert bench.own_against_outside(samples, moments) == {
        "median": pytest.approx(1.0),
        "samples": 2,
    }
    assert bench.own_against_outside([], moments) == {"samples": 0}


def test_rows_and_table(bench: Any) -> None:
    def one(pss: int, corpus: int, launcher: int = 0) -> dict[str, Any]:
        parts = {
            "pss_bytes": pss,
            "corpus_bytes": corpus,
            "models_bytes": pss - corpus,
            "private_bytes": 64 * MIB,
        }
        sizes = parts | {"shared_bytes": pss - 64 * MIB, "launcher_bytes": launcher}
        return sizes | {
            "mlx_peak_bytes": [3 * MIB, 4 * MIB],
            "own_against_outside": {"median": 0.99, "samples": 3},
        }

    found = {
        "found": {
            "allhands": {"2": one(300 * MIB, 100 * MIB)},
            "every_rank_loads_all": {"2": one(600 * MIB, 400 * MIB, MIB)},
        },
        "settings": {
            "processes": [2],
            "iters": 20,
            "batch_size": 16,
            "block_size": 256,
            "text": "generated",
        },
        "corpus": {"tokens": 5_000_000},
    }
    rows = importlib.import_module("records").with_ratios(bench.rows(found))
    by_name = {(row.name, row.who): row for row in rows}
    whole = by_name["2 processes: all ranks", "allhands"]
    assert (whole.median, whole.unit, whole.ratios) == (300.0, "MiB", {"every rank loads all": 2.0})
    assert by_name["2 processes: of it the corpus", "allhands"].ratios == {
        "every rank loads all": 4.0
    }
    assert ("2 processes: who starts and watches them", "allhands") not in by_name
    assert by_name["2 processes: MLX's arrays of all ranks", "every rank loads all"].median == 7.0
    text = bench.report(found)
    assert "| 2 | allhands | 300 | 200 | 100 | 64 | 236 | 7 | 0 |" in text
    assert text.endswith("outside: 0.990")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iters", "9"], "--iters must be 10 or more"),
        (["--batch-size", "6"], "must be a multiple of the number"),
    ],
)
def test_wrong_options(
    bench: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_the_loop_that_loads_all_read_disjoint_rows(tmp_path: Path, size: int) -> None:
    worker = importlib.import_module("process_memory_worker")
    np.arange(8 * 4 + 3, dtype=np.int32).tofile(tmp_path / worker.FLAT)
    options = Namespace(action="every_rank_loads_all", work=tmp_path, block_size=4)
    seen: list[list[int]] = []
    for rank in range(size):
        read, count, allocated = worker.open_corpus(options, rank, size)
        assert allocated == 35 * 4
        seen += read(list(range(count))).tolist()
    assert sorted(seen) == [list(range(row * 4, row * 4 + 5)) for row in range(8)]


HOLDER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
pages[0]
print(flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_corpus_that_two_processes_have_read_through_counts_once(
    bench: Any, look: Any, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "tokens.bin").write_bytes(b"x" * (8 * MIB))
    command = [sys.executable, "-c", HOLDER, str(corpus / "tokens.bin")]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()

        def held() -> list[Any]:
            texts = [Path(f"/proc/{child.pid}/smaps").read_text() for child in children]
            return [look.held_in(text, [corpus]) for text in texts]

        # One page was read; what lies around it comes along, but not all.
        assert all(0 < one.corpus_rss < 8 * MIB for one in held())
        assert [bench.through_of(child.pid, [corpus]) for child in children] == [8 * MIB, 8 * MIB]
        first, second = held()
        assert (first.corpus_rss, second.corpus_rss) == (8 * MIB, 8 * MIB)
        assert (first + second).corpus_pss == 8 * MIB
    finally:
        for child in children:
            child.communicate("\n", timeout=20)


def test_ranks_of_allhands_are_found_in_its_own_files(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank in range(2):
        sample = {"role": "rank", "rank": rank, "pid": 70 + rank, "time": 1.0, "pss_bytes": 5}
        (tmp_path / "logs" / f"monitor-rank-{rank}.jsonl").write_text(
            f'\n{json.dumps(sample)}\n{{"torn'
        )
    assert bench.told_by_allhands(tmp_path, 5) == []
    events = [
        {"event": "train", "step": step, "loss": 9.0 - step, "peak_mlx_bytes": [step, 8]}
        for step in (5, 10)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    told = bench.told_by_allhands(tmp_path, 5)
    assert [(one["pid"], one["mlx_peak_bytes"], one["losses"]) for one in told] == [
        (70, 10, [4.0, -1.0]),
        (71, 8, [4.0, -1.0]),
    ]
    assert bench.told_by_allhands(tmp_path, 11) == []
