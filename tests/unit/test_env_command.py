"""``allhands env`` under real and contradictory launchers, as a person and as a program reads it."""

from __future__ import annotations

import json
import os

import pytest
import typer
from typer.testing import CliRunner, Result

from allhands.cli.commands import function_of
from allhands.errors import DistributedError

SLURM = {
    **{"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0"},
    **{
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_NODELIST": "n[08-09],m1",
    },
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_CONF": "/nonexistent/slurm.conf"},
}
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]},
            "task": {"type": "workerpool0", "index": 0},
        }
    ),
    **{"AIP_MODEL_DIR": "gs://bucket/model", "AIP_TRAINING_DATA_URI": "gs://bucket/data"},
}
LAUNCHERS = (
    "ALLHANDS_",
    "MLX_",
    "NCCL_",
    "OMPI_",
    "PMI",
    "MV2_",
    "SLURM_",
    "PET_",
    "SM_",
    "AIP_",
    "TORCHELASTIC_",
)


def _run(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], *arguments: str) -> Result:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name in (
            "RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "CLUSTER_SPEC",
            "TF_CONFIG",
        ):
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    app = typer.Typer()
    app.command()(function_of("runs.Env env:show_environment"))
    return CliRunner().invoke(app, list(arguments))


def _lines(result: Result) -> list[str]:
    assert result.exception is None
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    return lines


def test_outside_any_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _lines(_run(monkeypatch, {}))
    assert lines[0] == "nothing recognised: one process; allhands train -n N starts several here"
    assert any(line.startswith("    versions  python ") for line in lines)
    assert any(line.startswith("    device    ") for line in lines)
    assert "recognised:" not in lines
    assert "ignored:" not in lines


def test_each_fact_has_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _lines(_run(monkeypatch, SLURM | {"JOB_COMPLETION_INDEX": "1"}))
    assert lines[0] == "slurm: rank 4 of 5, 0 of 1 on this computer"
    assert "    rank 4 of 5: SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=5 in step 0" in lines
    assert "    computer m1 of n08, n09, m1: SLURM_STEP_NODELIST" in lines
    assert "    back-end ring: MLX here is a build without CUDA" in lines
    assert "    30 s from SIGTERM to SIGKILL: KillWait, unless changed" in lines
    assert "    peers        n08, n09, m1" in lines
    assert "    time to end  30 s after SIGTERM" in lines
    assert "    to requeue   scontrol requeue 12345" in lines
    assert lines[lines.index("ignored:") + 1] == "    JOB_COMPLETION_INDEX=1: slurm comes first"


def test_paths_of_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _lines(_run(monkeypatch, VERTEX))
    assert lines[0] == "vertex: rank 0 of 2, 0 of 1 on this computer"
    assert "    data, train  /gcs/bucket/data" in lines
    assert "    model        /gcs/bucket/model" in lines
    assert any("computer 0 of 2: workerpool0 0 in CLUSTER_SPEC" in line for line in lines)


def test_what_to_do_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "0",
        "SLURM_CONF": "/nonexistent/slurm.conf",
    }
    text = "\n".join(_lines(_run(monkeypatch, shell)))
    assert text.startswith("one process on slurm\n")
    assert "srun allhands train" in " ".join(text.split())
    assert "SLURM_PROCID=0: this variable alone does not make a rank" in text


def test_nothing_that_a_variable_says_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _run(
        monkeypatch, SLURM | {"SLURM_STEP_NODELIST": "n[08-09],m\x1b]0;x\x07", "RANK": "\x1b[2J"}
    )
    lines = _lines(result)
    assert "\x1b" not in result.output
    assert any("m?]0;x?" in line for line in lines)
    assert "    RANK: slurm comes first" in lines


def test_json_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _run(monkeypatch, VERTEX | {"SLURM_PROCID": "0"}, "--json")
    assert result.exception is None
    found = json.loads(result.output)
    expected = {
        "launcher": "vertex",
        "rank": 0,
        "size": 2,
        "local_rank": 0,
        "local_size": 1,
        "backend": "ring",
    }
    assert {name: found[name] for name in expected} == expected
    assert (found["node"], found["num_nodes"], found["ranks_per_node"]) == (0, 2, 1)
    assert found["hosts"] == ["a", "b"]
    assert found["meeting"] == {"host": "a", "ports": [2222, 2223, 2224, 2225]}
    assert found["paths"]["data"] == {"train": "/gcs/bucket/data"}
    assert (found["paths"]["model"], found["paths"]["checkpoints"]) == ("/gcs/bucket/model", None)
    assert (found["platform"], found["grace_s"], found["failure_file"]) == ("vertex", None, None)
    assert found["ignored"] == ["SLURM_PROCID"]
    assert set(found["versions"]) == {"python", "allhands", "mlx", "mlx-lm"}
    assert found["device"]["cores"] >= 1


def test_a_contradiction_is_exit_code_7(monkeypatch: pytest.MonkeyPatch) -> None:
    error = _run(monkeypatch, SLURM | {"SLURM_PROCID": "9"}).exception
    assert isinstance(error, DistributedError)
    assert error.exit_code == 7
    assert "rank 9 of a world of 5" in error.message


def test_a_broken_mlx_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from allhands.runtime import accelerator

    def broken() -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(accelerator, "detect", broken)
    text = "\n".join(_lines(_run(monkeypatch, {})))
    assert "MLX does not work here: libcuda.so.1" in text
