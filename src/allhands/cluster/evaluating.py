"""Work with a trained model on this process or on several ranks: no training, and no files left."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.cluster.environment import LaunchPlace, recognise_here
from allhands.cluster.job import job_of
from allhands.cluster.join import surroundings_of
from allhands.cluster.rank import as_rank, collector_paused, prepare_rank
from allhands.cluster.reaper import Reaper
from allhands.cluster.training import (
    check_launch,
    rank_0_speaks_first,
    supervise_training,
    with_hostfile,
)
from allhands.cluster.worker import WorkerContext
from allhands.config.eval_schema import EvalConfig
from allhands.config.schema import build_config
from allhands.errors import Interrupted, ModelError
from allhands.io.terminal import progress_console
from allhands.run.adapter_files import what_is

if TYPE_CHECKING:
    from allhands.run.evaluating import Evaluation

_SHORT_OF_MEMORY = "divide the model among more computers (--strategy pipeline)"


def evaluate_on_ranks(flags: dict[str, Any], show: Callable[[EvalConfig, Evaluation], None]) -> int:
    """Measure loss and perplexity of a split; return the exit code.

    Args:
        flags: the given options of a test, by name.
        show: called on rank 0 with the result.

    Raises:
        AllhandsError: an option is invalid, or the evaluation failed in this process.
    """

    def work(config: EvalConfig, launch: LaunchPlace, worker: WorkerContext) -> None:
        cores = prepare_rank(config, launch)
        with collector_paused():
            from allhands.run.evaluating import run_evaluation

        console = progress_console(highlight=False) if launch.rank == 0 else None
        surroundings = replace(
            surroundings_of(worker, launch, config), console=console, cores_per_rank=cores
        )
        found = run_evaluation(config, surroundings)
        if launch.rank == 0:
            show(config, found)

    return run_on_ranks(flags, work, "stopped before the evaluation: there is no result")


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

    Raises:
        AllhandsError: an option is invalid, or the work failed in this process.
    """
    launch = recognise_here()
    with rank_0_speaks_first(launch):
        config = build_config({**flags, "test": True}, flags.get("config"), EvalConfig)
        assert isinstance(config, EvalConfig)
        check_launch(config, launch)
        elsewhere = launch.launcher == "single" and (config.hostfile or config.hosts)
        if not elsewhere:  # other computers have files of their own
            _check_adapter(config.adapter_path)
    if elsewhere or (launch.launcher == "single" and config.num_ranks > 1):
        return _supervise(config, env or {})
    return as_rank(launch, partial(work, config, launch), unstarted)


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
            code = supervise_training(config, job=job)
        kept = code not in (0, Interrupted.exit_code, 128 + signal.SIGTERM)
        return code
    finally:
        if not kept:
            shutil.rmtree(scratch, ignore_errors=True)


def _check_adapter(path: str) -> None:
    """Check that the adapter exists, before anything is started or loaded.

    Raises:
        ModelError: there is no adapter.
    """
    if path and not (Path(path) / "adapters.safetensors").is_file():
        found, hint = what_is(Path(path))
        raise ModelError(
            f"there is no adapter (adapters.safetensors): {found}",
            code="adapter-missing",
            where=path,
            hint=hint,
        )
