"""Runs of ``gpu_sharded.py`` and ``activations_gpu.py``: each in processes of its own, which are
ended in time.

A run of allhands is ended as soon as it has reported the steps that count: what it would write at
its end, all weights of the model, is not what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from gpu_many import reason
from harness import BenchmarkError, clean_environ, num_cores, python_path, run_measured, say
from sharded_cases import CASES, WHOLE, row_of_shape, shape_of, write_rows

HERE = Path(__file__).resolve().parent
_GONE_S = 20.0  # for processes whose parent has been killed
_LOOK_S = 0.1


def run_until(
    command: Sequence[str],
    log: Path,
    environ: Mapping[str, str],
    timeout_s: float,
    done: Callable[[], bool],
) -> None:
    """Run ``command``, its output into ``log``, until ``done``; everything that it has started is
    ended then.

    Raises:
        BenchmarkError: it ended earlier, or is not done after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    how: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stderr": subprocess.STDOUT,
        "start_new_session": True,
    }
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(command, stdout=output, env=dict(environ), **how)
        try:
            while child.poll() is None and not done() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        finally:
            _end(child)
    if done():
        return
    if time.monotonic() >= deadline:
        raise BenchmarkError(f"did not finish in time: {timeout_s:.0f} s")
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    raise BenchmarkError(f"ended early with code {child.returncode}; the end of {log}:\n{tail}")


def _end(child: subprocess.Popen[Any]) -> None:
    """End a process and what it has started. allhands' ranks end with their launcher, and a helper
    clears up.
    """
    started: list[psutil.Process] = []
    with suppress(psutil.Error):
        started = psutil.Process(child.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + _GONE_S
    while (
        left := [process for process in started if _computes(process)]
    ) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    while any(_computes(process) for process in left) and time.monotonic() < deadline + _GONE_S:
        time.sleep(_LOOK_S)


def _computes(process: psutil.Process) -> bool:
    """Whether it is there. One that has ended may wait for ever for somebody to ask how."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# --- allhands -------------------------------------------------------------------------------------


def make_model(options: argparse.Namespace, work: Path, case: str, timeout_s: float) -> Path:
    """The case's model: made now, or where ``--models`` has it already.

    Raises:
        BenchmarkError: it could not be made in time.
    """
    directory = (options.models or work / "models") / f"{case}-{options.shape}"
    if not (directory / WHOLE).exists():
        asked = json.dumps({"case": case, "shape": options.shape, "out": str(directory)})
        environ = clean_environ(PYTHONPATH=python_path())
        command = [python_of(options, "mlx"), str(HERE / "sharded_cases.py"), asked]
        directory.parent.mkdir(parents=True, exist_ok=True)
        taken = run_measured(command, work / f"{case}-model.log", environ, timeout_s)
        say(f"    the model was made in {taken.wall_s:.0f} s")
    return directory


def python_of(options: argparse.Namespace, kind: str) -> str:
    """The Python that has MLX and allhands (``mlx``), or PyTorch (``torch``)."""
    return options.python.get(kind, sys.executable)


def words_of(
    options: argparse.Namespace,
    case: str,
    model: Path,
    data: Path,
    directory: Path,
    more: Iterable[str],
) -> list[str]:
    """The command line of a run of allhands: ``more`` says how the work is divided."""
    row = row_of_shape(options.shape)
    text = (
        f"train --train --model {model} --data {data} --adapter-path {directory} --max-seq-length {row + 1} --seed 1 "
        f"--batch-size {batch_of(options, case)} --iters {options.warmup + options.steps} --steps-per-report 1 "
        "--optimizer adamw --learning-rate 1e-5 --compile on --keep-last 0 --gradient-check off --no-keep-best "
        "--val-batches 0"
    )
    blocks = CASES[case].lora_layers
    if options.shape == "tiny":
        blocks = min(blocks, shape_of(case, "tiny")["num_hidden_layers"] // 2)
    kind = f"--fine-tune-type lora --num-layers {blocks}" if blocks else "--fine-tune-type full"
    size = (
        ["--micro-batch-tokens", str(options.micro_batch_rows * row)]
        if options.micro_batch_rows
        else []
    )
    return [*text.split(), *kind.split(), *size, *more]


def batch_of(options: argparse.Namespace, case: str) -> int:
    """Rows of a step of all GPUs."""
    return (options.rows or CASES[case].rows) * options.gpus


def write_data(options: argparse.Namespace, work: Path, case: str) -> Path:
    """Random rows: of each step others, for 16 steps."""
    directory, size = work / f"{case}-rows", shape_of(case, options.shape)["vocab_size"]
    if not directory.exists():
        write_rows(directory, 16 * batch_of(options, case), row_of_shape(options.shape), size)
    return directory


def launcher(options: argparse.Namespace, work: Path, name: str, backend: str) -> list[str]:
    """The command that starts a rank for each GPU, without the ranks' own command; a rank that
    fails ends the run.
    """
    launch = [
        "-m",
        "allhands",
        "launch",
        "-n",
        str(options.gpus),
        "--backend",
        backend,
        "--no-tag-output",
    ]
    launch += ["--max-restarts", "0", "--log-dir", str(work / f"{name}-logs"), "--"]
    return [python_of(options, "mlx"), *launch]


def train(
    options: argparse.Namespace,
    work: Path,
    name: str,
    words: Sequence[str],
    backend: str,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """The reports of a run's steps; its directory is removed, since it may hold all weights.

    Raises:
        BenchmarkError: it failed or took too long.
    """
    python, metrics = python_of(options, "mlx"), work / name / "metrics.jsonl"
    wanted = options.warmup + options.steps
    try:
        run_until(
            [
                *launcher(options, work, name, backend),
                python,
                str(HERE / "sharded_rank.py"),
                *words,
            ],
            work / f"{name}.log",
            clean_environ(PYTHONPATH=python_path()),
            timeout_s,
            lambda: len(reports_in(metrics)) >= wanted,
        )
        return reports_in(metrics)[:wanted]
    finally:
        shutil.rmtree(work / name, ignore_errors=True)


def reports_in(metrics: Path) -> list[dict[str, Any]]:
    """The reports of steps in a file that is still being written."""
    if not metrics.exists():
        return []
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    events = (json.loads(line) for line in lines if line.endswith("\n"))
    return [event for event in events if event["event"] == "train"]


def figures(reports: Sequence[Mapping[str, Any]], warmup: int, tokens: int) -> dict[str, Any]:
    """Tokens a second over all the steps that count, by the clock on the wall; memory of each rank;
    losses.

    Args:
        warmup: steps that do not count.
        tokens: of a step.

    Raises:
        BenchmarkError: the run has computed other tokens.
    """
    for report in reports:
        if (done := round(report["tokens_per_s"] * report["step_time_s"])) != tokens:
            raise BenchmarkError(
                f"step {report['step']} has {done} tokens, and the benchmark's have {tokens}"
            )
    counted = reports[warmup:]
    seconds = counted[-1]["elapsed_s"] - reports[warmup - 1]["elapsed_s"]
    return {
        "tokens_per_s": len(counted) * tokens / seconds,
        "step_s": seconds / len(counted),
        "peak_bytes": counted[-1]["peak_mlx_bytes"],
        "losses": [report["loss"] for report in reports],
    }


# --- PyTorch --------------------------------------------------------------------------------------


def train_torch(
    options: argparse.Namespace, work: Path, name: str, asked: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """What the ranks of ``gpu_sharded_torch.py`` have told.

    Raises:
        BenchmarkError: they failed or took too long.
    """
    out = work / f"{name}.json"
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(options.gpus),
    ]
    worker = [str(HERE / "gpu_sharded_torch.py"), json.dumps({**asked, "out": str(out)})]
    # As a person would set it: all cores, divided. torchrun alone gives one to each.
    threads = str(max(1, num_cores() // options.gpus))
    environ = clean_environ(PYTHONPATH=os.environ.get("PYTHONPATH", ""), OMP_NUM_THREADS=threads)
    run_until(
        [python_of(options, "torch"), *torchrun, *worker],
        work / f"{name}.log",
        environ,
        timeout_s,
        out.exists,
    )
    return json.loads(out.read_text(encoding="utf-8"))


def failed(work: Path, name: str, error: Exception) -> dict[str, Any]:
    """A failure as a result: what went wrong, in one line."""
    say(f"    {error}")
    log = work / f"{name}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return {"error": re.sub(r"\s+", " ", reason(text, error)).replace("|", "/")}
