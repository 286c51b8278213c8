"""Ranks that find out by themselves how to divide a training that none of them holds: each has
little memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from memory_groups import MemoryGroups, memory_groups
from tiny import run_allhands, write_chat_data, write_model

from allhands.errors import ModelError

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's control groups"),
]
# 29 million weights, of which gradients and two states are as large each: a rank with all of it
# takes 830 MB.
LAYERS, HIDDEN = 12, 512
HOSTS = {"left": "127.0.0.1", "right": "127.0.0.2"}
TIGHT, ROOMY, SMALL = 700_000_000, 1_300_000_000, 330_000_000
STEPS = 3
FULL = ("--fine-tune-type", "full", "--optimizer", "adamw")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chosen")
    write_model(directory / "model", layers=LAYERS, hidden=HIDDEN, tied=False)
    write_chat_data(directory / "data", train=16, valid=2, test=2)
    hosts = [
        {"ssh": name, "ips": [address], "slots": 1, "python": sys.executable}
        for name, address in HOSTS.items()
    ]
    (directory / "hosts.json").write_text(json.dumps(hosts))
    return directory


def training(out: str, *more: str) -> list[str]:
    options = f"--iters {STEPS} --batch-size 4 --num-layers -1 --steps-per-report 1 --val-batches 0 --keep-last 0"
    options += (
        " --max-seq-length 128 --learning-rate 1e-4 --seed 4 --gradient-check off --no-keep-best"
    )
    return [
        "train",
        "--model",
        "model",
        "--data",
        "data",
        "--train",
        *options.split(),
        "--adapter-path",
        out,
        *more,
    ]


@contextmanager
def computers(files: Path, limit: int) -> Iterator[MemoryGroups]:
    with memory_groups(tuple(HOSTS), limit, files) as groups:
        yield groups
        assert groups.killed() == 0
        assert max(groups.peaks()) <= limit


def on_two(
    files: Path, groups: MemoryGroups, out: str, *more: str
) -> subprocess.CompletedProcess[str]:
    words = [*training(out, *more), "--hostfile", "hosts.json"]
    return run_allhands(*words, env={"ALLHANDS_SSH": groups.ssh}, cwd=files, timeout=300)


def losses(directory: Path) -> list[float]:
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "train"]


@pytest.fixture(scope="module")
def alone(files: Path) -> list[float]:
    """The losses of one process with all memory."""
    done = run_allhands(
        *training("alone", *FULL),
        cwd=files,
        timeout=300,
        env={"OPENBLAS_NUM_THREADS": str(os.cpu_count())},
    )
    assert done.returncode == 0, done.stderr
    return losses(files / "alone")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ((), ("fsdp", "pipeline")),  # by the link and the speeds that were measured
        (("--rank-weights", "[1, 1]"), ("fsdp",)),  # a pipeline divides no batch
    ],
    ids=["either", "sharded"],
)
def test_ranks_of_little_memory_divide_the_model(
    files: Path, alone: list[float], more: tuple[str, ...], names: tuple[str, ...]
) -> None:
    out = f"tight{len(more)}"
    with computers(files, TIGHT) as groups:
        done = on_two(files, groups, out, *FULL, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert any(f"(--strategy {name}): for a whole model rank " in said for name in names), said
    assert "may have 665 MB (2 of 2 ranks have too little)" in said
    assert len(losses(files / out)) == STEPS
    np.testing.assert_allclose(losses(files / out), alone, rtol=1e-5)


def test_ranks_whose_optimizer_needs_whole_arrays_are_a_pipeline(files: Path) -> None:
    muon = ("--fine-tune-type", "full", "--optimizer", "muon")
    whole = {"OPENBLAS_NUM_THREADS": str(os.cpu_count())}
    done = run_allhands(*training("muon-alone", *muon), cwd=files, timeout=300, env=whole)
    assert done.returncode == 0, done.stderr
    with computers(files, TIGHT) as groups:
        done = on_two(files, groups, "muon", *muon)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "pipeline (--strategy pipeline): for a whole model rank " in done.stdout + done.stderr
    np.testing.assert_allclose(losses(files / "muon"), losses(files / "muon-alone"), rtol=1e-4)


def test_ranks_with_room_are_data_parallel(files: Path, alone: list[float]) -> None:
    with computers(files, ROOMY) as groups:
        done = on_two(files, groups, "roomy", *FULL)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "for a whole model" not in done.stdout + done.stderr
    np.testing.assert_allclose(losses(files / "roomy"), alone, rtol=1e-5)
    events = [
        json.loads(line) for line in (files / "roomy" / "metrics.jsonl").read_text().splitlines()
    ]
    sent = [event["sent_bytes"] for event in events if event["event"] == "train"]
    weights = next(event["trainable_params"] for event in events if event["event"] == "started")
    assert sent[-1] == pytest.approx(4 * weights, rel=1e-3), (
        "a sum of all gradients, and nothing else"
    )


def test_what_no_way_fits_is_refused_before_it_is_read(files: Path) -> None:
    with computers(files, SMALL) as groups:
        done = on_two(files, groups, "small", *FULL)
        assert done.returncode == ModelError.exit_code, done.stdout + done.stderr
        assert max(groups.peaks()) < SMALL / 1.5
    said = done.stdout + done.stderr
    assert (
        "no strategy fits this training into the ranks' memory: with --strategy fsdp rank " in said
    )
    assert "such ranks would hold it (--strategy fsdp)" in said
    assert "Traceback" not in said
    assert not (files / "small" / "metrics.jsonl").exists()
