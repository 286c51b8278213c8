"""Ranks on GPUs that exchange over a ring, as those of several computers do."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from tiny import run_allhands, write_model, write_tokenizer

from allhands.cluster.processes import reserve_ports

WORDS = (
    "once upon a time there was little cat who liked to sit in the sun and sing with big red bird"
)
OPTIONS = (
    "--layers 2 --dims 256 --mlp-dims 512 --heads 4 --kv-heads 2 --block-size 64 --batch-size 4 "
    "--iters 12 --steps-per-report 1 --val-batches 0 --learning-rate 3e-3"
)

# A GPU would multiply float32 numbers with 19 bits, and hide what is wrong by a little.
FLOAT32 = {"MLX_ENABLE_TF32": "0"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        mx.default_device().type != mx.DeviceType.gpu, reason="CPUs are tested elsewhere"
    ),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a tokenizer and forty texts."""
    write_tokenizer(tmp_path / "tokenizer")
    words = random.Random(1)
    texts = [" ".join(words.choices(WORDS.split(), k=words.randint(5, 60))) for _ in range(40)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return tmp_path


def _losses_of_one_and_two(
    data: Path, options: str, ranks: list[dict[str, str]], of_two: str = ""
) -> list[list[float]]:
    """Losses of each step of a pre-training by one process, and by two ranks with these variables."""
    shape = "" if "--shape" in options else "--shape llama"
    given = f"{OPTIONS} {shape} {options}".split()
    words = ("pretrain", "--tokenizer", str(data / "tokenizer"), *given)
    return _one_and_two(data, words, ranks, of_two)


def _one_and_two(
    data: Path, words: Sequence[str], ranks: list[dict[str, str]], of_two: str
) -> list[list[float]]:
    """Losses of each step of a command, by one process and by two ranks with these variables."""

    def train(run: tuple[str, str, dict[str, str]]) -> None:
        name, more, variables = run
        places = ["--data", data / "data", "--adapter-path", data / name]
        # MLX compiles its kernels for quantised weights and for experts in the first run.
        done = run_allhands(
            *words, *places, *more.split(), env={**FLOAT32, **variables}, timeout=400
        )
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(train, [("one", "", {}), *(("two", of_two, rank) for rank in ranks)]))
    found = [_losses(data / name) for name in ("one", "two")]
    assert len(found[0]) == 12
    return found


def _on_a_ring(data: Path) -> list[dict[str, str]]:
    """The variables of two ranks of a ring."""
    held, ports = reserve_ports(2, shareable=False)
    for each in held:
        each.close()
    (data / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    return [{"MLX_HOSTFILE": str(data / "hosts.json"), "MLX_RANK": str(rank)} for rank in range(2)]


def _over_nccl() -> list[dict[str, str]]:
    """The variables of two ranks with a GPU each."""
    held, (port,) = reserve_ports(1, shareable=False)
    held[0].close()
    group = {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(port), "MLX_WORLD_SIZE": "2"}
    return [
        {**group, "MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)
    ]


@pytest.mark.parametrize(
    "way", ["--strategy data", "--strategy pipeline", "--strategy fsdp", "--tp 2"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_on_a_ring_take_the_steps_of_one(data: Path, dtype: str, way: str) -> None:
    """Sums over a ring are parts of what has travelled, which begin anywhere in memory."""
    one, two = _losses_of_one_and_two(data, f"--dtype {dtype}", _on_a_ring(data), way)
    assert two == pytest.approx(one, rel=1e-5 if dtype == "float32" else 0.02)


MIXTURE = "--shape mixtral --experts 4 --experts-per-token 2"
WAYS = [
    *("--strategy data", "--strategy zero1", "--strategy pipeline", "--tp 2", "--cp 2"),
    *("--strategy fsdp", "--strategy zero2", "--strategy fsdp --grad-checkpoint"),
    "--strategy fsdp --cp 2",
]
CASES = [
    *(("", way) for way in WAYS),
    *(("--optimizer sgd", "--strategy fsdp"), (MIXTURE, "--strategy fsdp"), (MIXTURE, "--ep 2")),
    (MIXTURE, "--strategy fsdp --ep 2"),
]


@pytest.mark.skipif(mx.device_count(mx.gpu) < 2, reason="one GPU for each rank")
@pytest.mark.parametrize(("options", "way"), CASES)
def test_two_ranks_over_nccl_take_the_steps_of_one(data: Path, options: str, way: str) -> None:
    one, two = _losses_of_one_and_two(data, f"--dtype float32 {options}", _over_nccl(), way)
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(
    "way", ["--strategy fsdp", "--strategy fsdp --grad-checkpoint", "--strategy pipeline", "--tp 2"]
)
def test_adapters_of_divided_models_learn_as_those_of_one(
    data: Path, way: str, bits: int | None
) -> None:
    write_model(data / "model", layers=4, hidden=256, bits=bits)
    options = "--train --iters 12 --batch-size 4 --num-layers -1 --steps-per-report 1 --val-batches 0 --seed 3"
    words = ("train", "--model", str(data / "model"), *options.split(), "--learning-rate", "1e-4")
    ranks = _over_nccl() if mx.device_count(mx.gpu) > 1 else _on_a_ring(data)
    one, two = _one_and_two(data, words, ranks, way)
    assert two == pytest.approx(one, rel=1e-5)


def _losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "train"]


STILL_COMPUTED = """
import allhands
import mlx.core as mx

world = allhands.init()
factor = mx.random.normal((4096, 4096), key=mx.random.key(1))
mx.eval(mx.tanh(factor @ factor))
wanted = None
for turn in range(4):
    x = factor
    for _ in range(60):
        x = mx.tanh(x @ factor)
    x = x[:512, :512] + 0  # few enough not to have the driver wait for the device
    if wanted is None:
        mx.eval(x)
        wanted = 2 * x
        continue
    mx.async_eval(x)
    total = world.all_sum(x) if turn % 2 else world.all_gather(x[None]).sum(axis=0)
    mx.eval(total)
    assert mx.array_equal(total, wanted), "exchanged before it was computed"
"""


def test_ranks_exchange_what_a_gpu_has_yet_to_compute(tmp_path: Path) -> None:
    """The host sends over a ring, and MLX does not have it wait for an array that was handed out
    before.
    """
    held, ports = reserve_ports(2, shareable=False)
    for each in held:
        each.close()
    (tmp_path / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    script = tmp_path / "script.py"
    script.write_text(STILL_COMPUTED)
    started = [
        subprocess.Popen(
            [sys.executable, script],
            env={
                **os.environ,
                **FLOAT32,
                "MLX_HOSTFILE": str(tmp_path / "hosts.json"),
                "MLX_RANK": str(rank),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in started]
    assert [rank.returncode for rank in started] == [0, 0], said
