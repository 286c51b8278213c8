"""Whole trainings in containers of platforms that are made of directories and variables."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from command_line import changed
from runs import read_weights
from tiny import run_allhands, write_chat_data, write_model

# `allhands container` with another root in place of /.
DRIVER = """
import sys
from pathlib import Path
from allhands.cli.container import run_container
from allhands.cluster.containers.training import Machine
from allhands.errors import AllhandsError
try:
    sys.exit(run_container(sys.argv[2:], Machine(root=Path(sys.argv[1]))))
except AllhandsError as error:
    print(f"allhands: error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
OPTIONS = {
    "iters": 8,
    "batch_size": 4,
    "learning_rate": 1e-3,
    "num_layers": 2,
    "val_batches": 1,
    "save_every": 2,
}
CLEAN = (
    "SM_",
    "AIP_",
    "CLUSTER_SPEC",
    "CLOUD_ML",
    "JOB_COMPLETION",
    "KUBERNETES_",
    "OMPI_",
    "PMI",
    "MLX_",
    "PET_",
)


@pytest.fixture
def containers() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a container; what is left of it at the end is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(root: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith((*CLEAN, "ALLHANDS_"))
        }
        child = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(root), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**env, "OPENBLAS_NUM_THREADS": "1", **variables},
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
        child.communicate()


def sagemaker(root: Path, **options: object) -> Path:
    """The tree that SageMaker prepares, with a tiny model and data; hyperparameters are strings."""
    place = root / "opt/ml"
    write_model(place / "input/data/model")
    write_chat_data(place / "input/data/train")
    config = place / "input/config"
    config.mkdir(parents=True)
    values = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in options.items()
    }
    (config / "hyperparameters.json").write_text(
        json.dumps({**values, "sagemaker_region": "eu-west-1"})
    )
    (config / "resourceconfig.json").write_text(
        json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]})
    )
    (config / "inputdataconfig.json").write_text(json.dumps({"train": {}, "model": {}}))
    (place / "model").mkdir()
    (place / "output/data").mkdir(parents=True)
    return place


def finished(child: subprocess.Popen[str], timeout: float = 90) -> tuple[int, str]:
    text, _ = child.communicate(timeout=timeout)
    return child.returncode, text


def same(one: Path, other: Path) -> bool:
    first, second = read_weights(one), read_weights(other)
    return first.keys() == second.keys() and all(
        bool(mx.array_equal(first[name], second[name])) for name in first
    )


def flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.mark.slow
def test_sagemaker_trains_as_the_command_line_does(
    tmp_path: Path, containers: Callable[..., Any]
) -> None:
    place = sagemaker(tmp_path, **OPTIONS, mask_prompt="true")
    code, text = finished(containers(tmp_path, "train"))
    assert code == 0, text
    found = {
        str(path.relative_to(place / "model"))
        for path in (place / "model").rglob("*")
        if path.is_file()
    }
    assert {"adapters.safetensors", "adapter_config.json", "best/adapters.safetensors"} <= found
    assert (place / "output/data/loss.png").stat().st_size > 1000
    metrics = [
        json.loads(line) for line in (place / "output/data/metrics.jsonl").read_text().splitlines()
    ]
    assert max(entry.get("step", 0) for entry in metrics) == 8
    assert not (place / "output/failure").exists()
    assert (place / "checkpoints/checkpoints/step-0000008/manifest.json").exists()
    words = [
        "--model",
        place / "input/data/model",
        "--data",
        place / "input/data/train",
        "--mask-prompt",
    ]
    done = run_allhands(
        "train", "--train", *words, *flags(OPTIONS), "--adapter-path", tmp_path / "plain"
    )
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "plain/adapters.safetensors", place / "model/adapters.safetensors")


def test_a_wrong_hyperparameter_is_the_reason_of_the_failure(
    tmp_path: Path, containers: Callable[..., Any]
) -> None:
    place = sagemaker(tmp_path, **OPTIONS, learnig_rate="1e-4")
    code, text = finished(containers(tmp_path, "train"))
    reason = (place / "output/failure").read_text()
    assert code == 2, text
    assert reason.startswith("allhands: error: hyperparameter learnig_rate: unknown option")
    assert "did you mean learning_rate" in reason
    assert list((place / "model").iterdir()) == []
    assert "Traceback" not in text


def test_a_failure_of_the_training_is_told_with_its_place(
    tmp_path: Path, containers: Callable[..., Any]
) -> None:
    place = sagemaker(tmp_path, **OPTIONS)
    with (place / "input/data/train/train.jsonl").open("a") as file:
        file.write('{"messages": "none"}\n')
    code, text = finished(containers(tmp_path, "train"))
    reason = (place / "output/failure").read_text()
    assert code == 3, text
    assert "train.jsonl:25" in reason
    assert len(reason) <= 1024
    assert list((place / "model").iterdir()) == []
    assert (place / "output/data/logs/rank-0.log").exists()


def test_contradicting_platform_files_are_a_failure_too(
    tmp_path: Path, containers: Callable[..., Any]
) -> None:
    place = sagemaker(tmp_path, **OPTIONS)
    (place / "input/config/resourceconfig.json").write_text(
        '{"current_host": "algo-9", "hosts": ["algo-1"]}'
    )
    code, _ = finished(containers(tmp_path, "train"))
    assert code == 7
    assert "algo-9" in (place / "output/failure").read_text()


def wait_for(
    condition: Callable[[], bool], child: subprocess.Popen[str], timeout: float = 60
) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_spot_instance_goes_on_where_it_was(
    tmp_path: Path, containers: Callable[..., Any]
) -> None:
    options = {**OPTIONS, "iters": 120, "save_every": 20}
    place = sagemaker(tmp_path / "spot", **options)
    child = containers(tmp_path / "spot", "train")
    wait_for((place / "checkpoints/checkpoints/step-0000020").exists, child)
    child.send_signal(signal.SIGTERM)
    code, text = finished(child)
    steps = sorted(path.name for path in (place / "checkpoints/checkpoints").iterdir())
    assert code == 143, text
    assert steps[-1] < "step-0000120"
    assert (
        place / "model/adapters.safetensors"
    ).exists()  # SageMaker keeps the model of a stopped job
    assert not (place / "output/failure").exists()
    code, text = finished(containers(tmp_path / "spot", "train"))
    assert code == 0, text
    assert "resumed" in text
    whole = sagemaker(tmp_path / "whole", **options)
    code, text = finished(containers(tmp_path / "whole", "train"))
    assert code == 0, text
    assert same(whole / "model/adapters.safetensors", place / "model/adapters.safetensors")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def vertex(port: int, node: int, nodes: int) -> dict[str, str]:
    """The variables of one replica; each has a loopback address of its own."""
    pools = {"workerpool0": [f"127.0.0.1:{port}"]}
    if nodes > 1:
        pools["workerpool1"] = [f"127.0.0.{n + 1}:{port}" for n in range(1, nodes)]
    task = {"type": f"workerpool{min(node, 1)}", "index": max(node - 1, 0)}
    return {
        "CLUSTER_SPEC": json.dumps({"cluster": pools, "task": task, "environment": "cloud"}),
        "CLOUD_ML_JOB_ID": "1234",
        "AIP_MODEL_DIR": "gs://bucket/out/model/",
        "AIP_CHECKPOINT_DIR": "gs://bucket/out/checkpoints/",
    }


@pytest.mark.long
def test_two_vertex_replicas_of_two_ranks_are_one_training(
    tmp_path: Path, containers: Callable[..., Any]
) -> None:
    bucket = tmp_path / "gcs/bucket"
    write_model(bucket / "model")
    write_chat_data(bucket / "data")
    words = [
        "--model=gs://bucket/model",
        "--data=gs://bucket/data",
        *flags({**OPTIONS, "steps_per_report": 1}),
    ]
    port = free_port()
    replicas = [
        containers(tmp_path, *words, **vertex(port, n, 2), ALLHANDS_RANKS_PER_NODE="2")
        for n in (1, 0)
    ]
    ends = [finished(replica) for replica in replicas]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "4 (ring)" in ends[1][1]
    assert (bucket / "out/model/adapters.safetensors").exists()
    assert {path.name for path in (bucket / "out/checkpoints/logs").glob("rank-?.log")} == {
        f"rank-{rank}.log" for rank in range(4)
    }
    place = ["--model", bucket / "model", "--data", bucket / "data"]
    options = flags({**OPTIONS, "steps_per_report": 1})
    done = run_allhands("train", "--train", *place, *options, "--adapter-path", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    several, one = (
        losses(path / "metrics.jsonl") for path in (bucket / "out/checkpoints", tmp_path / "one")
    )
    assert several == pytest.approx(one, rel=1e-4)
    assert len(several) == 8


@pytest.mark.long
def test_a_vertex_job_goes_on_from_its_bucket(
    tmp_path: Path, containers: Callable[..., Any]
) -> None:
    bucket = tmp_path / "gcs/bucket"
    write_model(bucket / "model")
    write_chat_data(bucket / "data")
    words = ["--model=gs://bucket/model", "--data=gs://bucket/data", *flags(OPTIONS)]
    for iters, said in ((4, "a new run begins"), (8, "from step 4")):
        these = changed(words, [f"--iters={iters}"])
        code, text = finished(containers(tmp_path, *these, **vertex(free_port(), 0, 1)))
        assert code == 0, text
        assert said in text
        assert (bucket / f"out/checkpoints/checkpoints/step-{iters:07d}/manifest.json").exists()
        assert [path for path in (bucket / "out/checkpoints/logs").iterdir() if path.is_file()]
    place = ["--model", bucket / "model", "--data", bucket / "data"]
    done = run_allhands(
        "train", "--train", *place, *flags(OPTIONS), "--adapter-path", tmp_path / "one"
    )
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "one/adapters.safetensors", bucket / "out/model/adapters.safetensors")


def losses(file: Path) -> list[float]:
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    return [entry["loss"] for entry in entries if entry["event"] == "train"]


@pytest.fixture
def pods(
    tmp_path: Path, containers: Callable[..., subprocess.Popen[str]]
) -> list[subprocess.Popen[str]]:
    """Two pods of an Indexed Job with one volume, at work, with a checkpoint of the second batch."""
    write_model(tmp_path / "model")
    write_chat_data(tmp_path / "data")
    places = {
        "model": tmp_path / "model",
        "data": tmp_path / "data",
        "adapter-path": tmp_path / "run",
    }
    variables = {
        "ALLHANDS_NUM_NODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started: list[subprocess.Popen[str]] = []
    for index in (0, 1):
        (tmp_path / f"pod-{index}/dev").mkdir(parents=True)
        own = {
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"job-{index}",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        }
        words = flags({**places, **OPTIONS, "iters": 100000, "save_every": 20})
        started.append(containers(tmp_path / f"pod-{index}", *words, **variables, **own))
    wait_for((tmp_path / "run/checkpoints/step-0000020").exists, started[0])
    return started


# It waits for four processes, which may all be late on a busy computer.
@pytest.mark.flaky(reruns=1, reruns_delay=2)
@pytest.mark.slow
def test_a_rank_that_dies_ends_both_pods_with_a_reason(
    tmp_path: Path, pods: list[subprocess.Popen[str]]
) -> None:
    ranks = [
        p for p in psutil.Process(pods[1].pid).children(recursive=True) if "train" in p.cmdline()
    ]
    victim = next(p for p in ranks if not any("guard" in word for word in p.cmdline()))
    victim.kill()
    ends = [finished(one) for one in pods]
    assert ends[1][0] == 137, ends[1][1]
    assert ends[0][0] not in (0, 130, 143), ends[0][1]
    assert "rank 1 was killed by SIGKILL" in (tmp_path / "pod-1/dev/termination-log").read_text()
    assert "rank 0" in (tmp_path / "pod-0/dev/termination-log").read_text()
    assert not [p for p in ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_pod_that_has_to_go_leaves_a_checkpoint_of_all(
    tmp_path: Path, pods: list[subprocess.Popen[str]]
) -> None:
    pods[1].send_signal(signal.SIGTERM)
    ends = [finished(one, 30) for one in pods]
    assert ends[1][0] == 143, ends[1][1]
    assert ends[0][0] in (130, 143), ends[0][1]
    last = max((tmp_path / "run/checkpoints").iterdir())
    assert (last / "manifest.json").exists()
    stopped = re.search(r"stopped after step (\d+) of 100000", ends[0][1])
    assert stopped is not None, ends[0][1]
    assert last.name == f"step-{int(stopped[1]):07d}"
    assert not list(tmp_path.glob("pod-*/dev/termination-log"))


def test_a_pod_without_the_other_ends_when_it_is_told_to(
    tmp_path: Path, containers: Callable[..., Any]
) -> None:
    variables = {
        "ALLHANDS_NUM_NODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    own = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "job-1"}
    child = containers(
        tmp_path, "--data=demo", f"--adapter-path={tmp_path / 'run'}", **variables, **own
    )
    line = child.stdout.readline()
    assert "computer 1 of 2" in line
    wait_for(
        lambda: any(
            "reaper" in " ".join(p.cmdline()) for p in psutil.Process(child.pid).children()
        ),
        child,
    )
    child.send_signal(signal.SIGTERM)
    code, text = finished(child, 20)
    assert code == 143, text
    assert "stopped before the first step" in text
