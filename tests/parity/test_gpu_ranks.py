"""Ranks on GPUs that exchange over a ring, as those of several computers do."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from tiny import run_allhands, write_tokenizer

from allhands.cluster.processes import reserve_ports

WORDS = "once upon a time there was little cat who liked to sit in the sun and sing with big red bird"
OPTIONS = (
    "--shape llama --layers 2 --dims 256 --mlp-dims 512 --heads 4 --kv-heads 2 --block-size 64 --batch-size 4 "
    "--iters 12 --steps-per-report 1 --val-batches 0 --learning-rate 3e-3"
)


@pytest.mark.gpu
@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.gpu, reason="CPUs are tested elsewhere")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_on_a_ring_take_the_steps_of_one(tmp_path: Path, dtype: str) -> None:
    """Sums over a ring are parts of what has travelled, which begin anywhere in memory."""
    write_tokenizer(tmp_path / "tokenizer")
    words = random.Random(1)
    texts = [" ".join(words.choices(WORDS.split(), k=words.randint(5, 60))) for _ in range(40)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    held, ports = reserve_ports(2, shareable=False)
    for each in held:
        each.close()
    (tmp_path / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    ranks = [{"MLX_HOSTFILE": str(tmp_path / "hosts.json"), "MLX_RANK": str(rank)} for rank in range(2)]

    def train(run: tuple[str, dict[str, str]]) -> None:
        name, variables = run
        places = ["--data", tmp_path / "data", "--tokenizer", tmp_path / "tokenizer", "--adapter-path", tmp_path / name]
        done = run_allhands("pretrain", *places, *OPTIONS.split(), "--dtype", dtype, env=variables)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(train, [("one", {}), *(("two", rank) for rank in ranks)]))
    one, two = (_losses(tmp_path / name) for name in ("one", "two"))
    assert len(one) == 12
    # A GPU multiplies float32 numbers with 19 bits, by kernels that depend on how many rows there are.
    assert two == pytest.approx(one, rel=2e-4 if dtype == "float32" else 0.02)


def _losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "train"]
