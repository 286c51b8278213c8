"""``allhands eval``: loss and perplexity of a split, on one process or on several, and public
benchmarks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from allhands.cli.launching import run
from allhands.cli.parser import refuse_idle
from allhands.cli.train import (
    check_launch,
    collector_paused,
    job_of,
    leave,
    rank_0_speaks_first,
    share_cores,
    with_hostfile,
)
from allhands.cli.verbs_training import Eval
from allhands.cluster.environment import LaunchPlace, recognise_here
from allhands.cluster.join import surroundings_of
from allhands.cluster.reaper import Reaper
from allhands.cluster.worker import WorkerContext, install
from allhands.config.combinations import require_stages
from allhands.config.eval_schema import EvalConfig
from allhands.config.schema import build_config
from allhands.errors import ConfigError, Interrupted, ModelError
from allhands.io.formatting import counted
from allhands.io.terminal import print_json, progress_console, tell
from allhands.model.divisible import require_divisible
from allhands.run.adapter_files import what_is
from allhands.runtime.blas import preload_blas

if TYPE_CHECKING:
    from allhands.run.evaluating import Evaluation

_SHORT_OF_MEMORY = "divide the model among more computers (--strategy pipeline)"


def evaluate(asked: Eval) -> None:
    """Run the verb."""
    if asked.tasks is not None:
        _run_tasks(asked, asked.tasks)
        return
    idle = {"--limit": asked.limit, "--num-shots": asked.num_shots}
    refuse_idle(idle, "without --tasks", "for less data give --test-batches")
    work = partial(_evaluate_as_rank, as_json=asked.as_json)
    unstarted = "stopped before the evaluation: there is no result"
    raise typer.Exit(run_on_ranks(asked.flags, work, unstarted))


def run_on_ranks(
    flags: dict[str, Any],
    work: Callable[[EvalConfig, LaunchPlace, WorkerContext], None],
    unstarted: str,
    env: Mapping[str, str] | None = None,
) -> int:
    """Work on this process, on several, or as a rank of another launcher; return the exit code.

    Args:
        flags: the given options of a test, by name.
        work: work of a rank.
        unstarted: message if a rank is stopped before it begins.
        env: further environment variables of started processes.
    """
    launch = recognise_here()
    with rank_0_speaks_first(launch):
        config = build_config({**flags, "test": True}, flags.get("config"), EvalConfig)
        assert isinstance(config, EvalConfig)
        check_launch(config, launch)
        _check_adapter_here(config, launch)
    if launch.launcher == "single" and (config.num_ranks > 1 or config.hostfile or config.hosts):
        return _supervise(config, env or {})
    with install(launch, os.environ) as worker:
        worker.unstarted = unstarted
        work(config, launch, worker)
        if launch.size > 1:
            leave(launch)
    return 0


def _supervise(config: EvalConfig, env: Mapping[str, str]) -> int:
    """Start the processes, here or on several computers, and wait for them; return the exit code.

    If they fail, their logs are kept. ``env``: further environment variables of all of them.
    """
    # Not in the run's directory, because the events there belong to the training.
    scratch = Path(tempfile.mkdtemp(prefix="allhands-eval-"))
    kept = False
    try:
        with Reaper() as reaper:
            reaper.directory(scratch)
            code = _supervised(config, scratch, env)
        kept = code not in (0, Interrupted.exit_code, 128 + signal.SIGTERM)
        return code
    finally:
        if not kept:
            shutil.rmtree(scratch, ignore_errors=True)


def _supervised(config: EvalConfig, scratch: Path, env: Mapping[str, str]) -> int:
    job = replace(
        job_of(with_hostfile(config, scratch)),
        directory=scratch,
        log_dir=scratch / "logs",
        checkpoints=None,
        resume=None,
        max_restarts=0,
        resumes=False,
        # Only rank 0 has output, and programs read it.
        tag_output=bool(config.tag_output),
        keep_logs=False,
        memory_hint=_SHORT_OF_MEMORY,
        env=env,
    )
    require_stages(config, job.size)
    require_divisible(config, job.size)
    return run(job, [sys.executable, "-m", "allhands", *sys.argv[1:]])


def _check_adapter_here(config: EvalConfig, launch: LaunchPlace) -> None:
    """Check that the adapter exists, before anything is started or loaded.

    Raises:
        ModelError: there is no adapter.
    """
    if launch.launcher == "single" and (config.hostfile or config.hosts):
        return  # other computers have files of their own
    if config.adapter_path and not (Path(config.adapter_path) / "adapters.safetensors").is_file():
        found, hint = what_is(Path(config.adapter_path))
        raise ModelError(
            f"there is no adapter (adapters.safetensors): {found}",
            code="adapter-missing",
            where=config.adapter_path,
            hint=hint,
        )


def _evaluate_as_rank(
    config: EvalConfig, launch: LaunchPlace, worker: WorkerContext, *, as_json: bool
) -> None:
    cores = share_cores(config, launch)
    # Only now, because importing MLX fixes its BLAS threads and device.
    preload_blas()
    with collector_paused():
        from allhands.run.evaluating import run_evaluation

    console = progress_console(highlight=False) if launch.rank == 0 else None
    surroundings = replace(
        surroundings_of(worker, launch, config), console=console, cores_per_rank=cores
    )
    found = run_evaluation(config, surroundings)
    if launch.rank == 0:
        for note in found.notes:
            tell(f"note: {note}")
        print(
            _as_json(config, found) if as_json else "\n".join(_as_lines(config, found)), flush=True
        )


def _as_json(config: EvalConfig, found: Evaluation) -> str:
    values = asdict(found)
    del values["notes"]
    named = {
        "model": config.model,
        "adapter_path": config.adapter_path or None,
        "data": config.data,
    }
    return json.dumps({**named, "split": config.split, **values})


def _as_lines(config: EvalConfig, found: Evaluation) -> list[str]:
    count = (
        f"{counted(config.test_batches, 'batch', 'batches')} of {counted(config.batch_size, 'row')}"
    )
    if found.num_examples is not None:
        count = counted(found.num_examples, "example")
    about = f"{config.split} split of {config.data}: {count}, {counted(found.num_tokens, 'token')} counted"
    lines = [about, f"loss {found.loss:.4f}  perplexity {found.perplexity:.3f}"]
    if found.bits_per_byte is not None:
        lines[1] += f"  {found.bits_per_byte:.4f} bits per byte"
    return lines


def _run_tasks(asked: Eval, tasks: str) -> None:
    """Run benchmarks of lm-evaluation-harness on this process."""
    flags, known = asked.flags, {"model", "adapter_path", "batch_size", "trust_remote_code"}
    idle = {f"--{name.replace('_', '-')}": flags[name] for name in flags if name not in known}
    refuse_idle(idle, "with --tasks", "leave one of the two out")

    if find_spec("lm_eval") is None:
        raise ConfigError(
            "benchmarks need lm-evaluation-harness, which is not installed",
            code="package-missing",
            where="--tasks",
            hint="pip install lm_eval",
        )
    preload_blas()
    from allhands.export.harness import Harness, run_harness

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError(
            "it names no task",
            code="value-empty",
            where="--tasks",
            hint="give names, as in arc_easy,piqa",
        )
    adapter = flags.get("adapter_path")
    harness = Harness(
        flags.get("model", "demo"),
        Path(adapter) if adapter else None,
        flags.get("batch_size", 8),
        asked.limit,
        asked.num_shots,
        flags.get("trust_remote_code", False),
    )
    results = run_harness(harness, names)
    if asked.as_json:
        print_json(results, default=str, indent=None)
        return
    for task, values in results.items():
        for name, value in values.items():
            if isinstance(value, float):
                print(f"{task}  {name} {value:.4f}")
