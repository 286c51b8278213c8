"""A group that is not what its launcher promised, or whose ranks do not mean the same run, never
trains.

Real processes; exit code 7 is that of :class:`allhands.errors.DistributedError`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ring_ranks import allhands_command, run_ring
from tiny import run_allhands, write_chat_data, write_model

import allhands
from allhands.cluster.mpi import find_mpi, mpi_variables

Command = Callable[..., list[str]]
_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``model`` and ``data``."""
    root = tmp_path_factory.mktemp("launch")
    write_model(root / "model", layers=1)
    write_chat_data(root / "data", train=4, valid=2, test=2, longest=20)
    return root


@pytest.fixture
def command(inputs: Path, tmp_path: Path) -> Command:
    """``allhands train`` for two steps, with further flags."""

    def arguments(*more: str) -> list[str]:
        text = f"train --model {inputs / 'model'} --data {inputs / 'data'} --adapter-path {tmp_path / 'out'} --train"
        return [*text.split(), "--iters", "2", "--batch-size", "2", "--val-batches", "0", *more]

    return arguments


def assert_nothing_trained(place: Path) -> None:
    assert not list(place.rglob("*.safetensors"))


def left_over(place: Path) -> list[list[str]]:
    """Command lines of processes that name ``place``."""
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(str(place) in part for part in process.info["cmdline"] or ())
    ]


# --- a world of another size ----------------------------------------------------------------------

PROMISES = {
    # The variables of a launcher that is not there: MPI then makes a world of one.
    "allhands": {"ALLHANDS_RANK": "0", "ALLHANDS_WORLD_SIZE": "2", "ALLHANDS_BACKEND": "mpi"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
}


@_needs_mpi
@pytest.mark.parametrize("launcher", PROMISES)
def test_promise_of_two_and_a_world_of_one(command: Command, tmp_path: Path, launcher: str) -> None:
    mpi = find_mpi()
    assert mpi is not None
    done = run_allhands(
        *command(), env={**mpi_variables(mpi, tmp_path), **PROMISES[launcher]}, timeout=60
    )
    assert done.returncode == 7, done.stderr
    assert (
        "the launcher promised 2 processes, but the mpi back-end could not connect" in done.stderr
    )
    assert "The world has a single process" in done.stderr
    assert "what to do:" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_trained(tmp_path / "out")


def test_promise_of_three_and_a_hostfile_of_two(command: Command, tmp_path: Path) -> None:
    env = {"ALLHANDS_RANK": "{rank}", "ALLHANDS_WORLD_SIZE": "3", "ALLHANDS_BACKEND": "ring"}
    for done in run_ring([allhands_command(*command())] * 2, env=env, timeout=60):
        assert done.returncode == 7, done.stderr
        assert (
            "promised 3 processes, but the ring group has 2: refusing to train alone" in done.stderr
        )
        assert "Traceback" not in done.stderr
    assert_nothing_trained(tmp_path / "out")


def test_backend_that_is_not_there(command: Command, tmp_path: Path) -> None:
    env = {"ALLHANDS_RANK": "0", "ALLHANDS_WORLD_SIZE": "2", "ALLHANDS_BACKEND": "jaccl"}
    done = run_allhands(*command(), env=env, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "is a build without jaccl" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_trained(tmp_path / "out")


@pytest.mark.parametrize("variables", [{}, {"ALLHANDS_RANK": "{rank}", "ALLHANDS_WORLD_SIZE": "2"}])
def test_rank_that_never_comes(command: Command, tmp_path: Path, variables: dict[str, str]) -> None:
    """Whoever has set the variables: without a supervisor of ours the rank keeps the deadline
    itself.
    """
    env = variables | ({"ALLHANDS_BACKEND": "ring"} if variables else {})
    started = time.monotonic()
    (done,) = run_ring(
        [allhands_command(*command("--start-timeout-s", "2"))] * 2, present=1, env=env, timeout=60
    )
    assert time.monotonic() - started < 40
    # MLX waits in such a way that nothing but SIGKILL ends it.
    assert done.returncode == -9
    assert "rank 0: the ring group of 2 did not come together within 2 s" in done.stderr
    assert "--start-timeout-s" in done.stderr
    assert_nothing_trained(tmp_path / "out")
    assert left_over(tmp_path) == []


# --- two launchers at once ------------------------------------------------------------------------


@_needs_mpi
def test_n_under_mpirun_is_explained(command: Command, tmp_path: Path) -> None:
    mpi = find_mpi()
    assert mpi is not None
    environment = {**os.environ, **mpi_variables(mpi, tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    launcher = [str(mpi.mpirun), "-np", "2", "--map-by", ":OVERSUBSCRIBE"]
    done = subprocess.run(
        [*launcher, *allhands_command(*command("-n", "3"))],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2, done.stderr
    assert "-n: 3 processes are asked for, but openmpi has started 2" in done.stderr
    assert "leave -n out under another launcher" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_trained(tmp_path / "out")
    assert left_over(tmp_path) == []


def test_another_backend_than_the_launchers_is_refused(command: Command, tmp_path: Path) -> None:
    (done,) = run_ring([allhands_command(*command("--backend", "mpi"))] * 2, present=1, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "--backend mpi: mlx.launch has started a group over ring" in done.stderr
    assert_nothing_trained(tmp_path / "out")


# --- ranks that do not mean the same run ----------------------------------------------------------


def test_ranks_with_different_flags_stop(command: Command, tmp_path: Path) -> None:
    commands = [allhands_command(*command("--learning-rate", rate)) for rate in ("1e-3", "2e-3")]
    for done in run_ring(commands, timeout=60):
        assert done.returncode == 7, done.stderr
        assert (
            "the ranks disagree: config.learning_rate is 0.001 on rank 0 and 0.002 on rank 1"
            in done.stderr
        )
        assert "what to do:" in done.stderr
        assert "Traceback" not in done.stderr
    assert_nothing_trained(tmp_path / "out")
    assert left_over(tmp_path) == []


# What rank 1 has otherwise than rank 0, and what both must be told. Paths are relative: on two
# computers the same path can hold different things.
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "agreed"),
    "method": (
        {"fine_tune_type": "dora"},
        "config.fine_tune_type is lora on rank 0 and dora on rank 1",
    ),
    "rank of the adapter": (
        {"lora_parameters": {"rank": 4}},
        "config.lora_parameters.rank is 8 on rank 0 and 4 on rank 1; parameters.model.layers.0.mlp.down_proj.lora_a is",
    ),
    "data": ({"cwd": "other data"}, "data.train is"),
    "shape of the model": (
        {"cwd": "other shape"},
        "parameters.model.layers.0.mlp.down_proj.lora_a is",
    ),
    "weights of the model": ({"cwd": "other weights"}, "model.weights is"),
    "adapter to go on from": (
        {"cwd": "other start", "resume_adapter_file": "start.safetensors"},
        "resume_adapter_file.weights is",
    ),
    # A rank may write and use what it likes, as long as it computes the same.
    "place and cores": ({"adapter_path": "elsewhere", "cores_per_rank": 1}, "agreed"),
}


@pytest.fixture(scope="module")
def told(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[str]]]:
    """What each rank was told in each case; all cases in one group, so the group survives a
    refusal.
    """
    root = tmp_path_factory.mktemp("disagree")
    for name in ("same", "other data", "other shape", "other weights", "other start"):
        shutil.copytree(inputs, root / name)
    write_chat_data(root / "other data" / "data", train=4, valid=2, test=2, longest=20, seed=5)
    write_model(root / "other shape" / "model", layers=1, hidden=64)
    write_model(root / "other weights" / "model", layers=1, seed=5)
    for name, scale in (("same", 1.0), ("other start", 2.0)):
        _write_start(root / name, scale)
    tasks: list[dict[str, Any]] = []
    for number, (name, (change, _)) in enumerate(DIFFERENCES.items()):
        flags = {
            "model": "model",
            "data": "data",
            "train": True,
            "iters": 1,
            "batch_size": 2,
            "val_batches": 0,
        }
        common: dict[str, Any] = flags | {"adapter_path": f"out-{number}"}
        if "resume_adapter_file" in change:
            common["resume_adapter_file"] = "start.safetensors"
        ranks = [common | {"cwd": str(root / "same")}, common | change]
        ranks[1]["cwd"] = str(root / change.get("cwd", "same"))
        tasks.append({"kind": "disagree", "path": str(root / f"told-{name}"), "ranks": ranks})
    (root / "tasks.json").write_text(json.dumps({"tasks": tasks}))
    program = Path(__file__).parents[1] / "support" / "ranked_tasks.py"
    # Eight cases, one after the other: much longer where others compete for the cores.
    for done in run_ring([[sys.executable, program, root / "tasks.json"]] * 2, timeout=240):
        assert done.returncode == 0, done.stderr
    return root, {
        name: [(root / f"told-{name}-{rank}.txt").read_text() for rank in (0, 1)]
        for name in DIFFERENCES
    }


def _write_start(directory: Path, scale: float) -> None:
    """Adapter weights of the shape that training begins with."""
    from ranked_tasks import finetune
    from runs import read_weights

    from allhands.config.schema import build_config

    flags = {
        "model": str(directory / "model"),
        "data": str(directory / "data"),
        "train": True,
        "iters": 1,
    }
    place = finetune(
        build_config(
            {**flags, "batch_size": 2, "val_batches": 0, "adapter_path": str(directory / "x")}
        )
    )
    import mlx.core as mx

    weights = {
        name: value * scale for name, value in read_weights(place / "adapters.safetensors").items()
    }
    mx.save_safetensors(str(directory / "start.safetensors"), weights)
    shutil.rmtree(place)


@pytest.mark.slow
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_every_rank_is_told_the_difference(
    told: tuple[Path, dict[str, list[str]]], difference: str
) -> None:
    root, texts = told
    expected = DIFFERENCES[difference][1]
    for text in texts[difference]:
        if expected == "agreed":
            assert text == "agreed"
            continue
        assert text.startswith("the ranks disagree: ")
        assert expected in text
        assert "what to do: give every rank the same" in text
    assert len(set(texts[difference])) == 1
    number = list(DIFFERENCES).index(difference)
    assert bool(list(root.glob(f"*/out-{number}/adapters.safetensors"))) == (expected == "agreed")


GROUPS = """
import os
import mlx.core as mx
from allhands.cluster.mpi import prepare_mpi_environment
from allhands.distributed.backend import connect
from allhands.distributed.groups import along
from allhands.distributed.mesh import Mesh

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
prepare_mpi_environment(os.environ)
group = along(connect("mpi", 4, rank), Mesh(rank, 4, tensor=2), "tensor")
total = group.all_sum(mx.array([float(rank)]))
mx.eval(total)
assert total.item() == 1 + 4 * (rank // 2)
"""


@_needs_mpi
def test_a_rank_with_a_group_of_mpi_ends_well() -> None:
    """MLX may free its groups after MPI has ended, which MPI forbids."""
    found = find_mpi()
    assert found is not None
    started = [found.mpirun, "--oversubscribe", "--bind-to", "none", "-n", "4"]
    done = subprocess.run(
        [*map(str, started), sys.executable, "-c", GROUPS],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PYTHONPATH": str(Path(allhands.__file__).parents[1]),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
