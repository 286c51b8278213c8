"""``allhands launch``: start your own program on every rank, and restart it after faults."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, cast

import typer

from allhands.cli.verbs_training import Launch
from allhands.cluster.environment import recognise_here
from allhands.cluster.hosts import write_hosts
from allhands.cluster.job import TrainingJob, step_in
from allhands.cluster.launching import run
from allhands.cluster.programs import resolved, tell_python
from allhands.errors import ConfigError
from allhands.io.formatting import counted
from allhands.io.terminal import say
from allhands.loops.supervised import DIRECTORY_VARIABLE


def launch(asked: Launch) -> None:
    """Run the verb."""
    _check_options(asked)
    _refuse_another_launcher()
    if asked.hosts is not None:
        path = write_hosts(asked.hosts, asked.log_dir / "hosts.txt")
        asked = asked._replace(hosts=None, hostfile=str(path))
    words = resolved(asked.command or [], anywhere=asked.hostfile is not None)
    if asked.hostfile is None:
        tell_python(words)
    job = _job(asked)
    if asked.checkpoints is None:
        _tell_found(job)
    raise typer.Exit(run(job, words))


def _job(options: Launch) -> TrainingJob:
    logs = options.log_dir.resolve()
    chosen = options.checkpoints or os.path.expanduser(os.environ.get(DIRECTORY_VARIABLE, ""))
    directory = Path(chosen).resolve() if chosen else logs
    return TrainingJob(
        directory=logs,
        log_dir=logs,
        num_ranks=options.num_ranks,
        backend=cast(Any, options.backend.value),
        cores_per_rank=options.cores_per_rank,
        hostfile=options.hostfile,
        min_ranks=options.min_ranks,
        max_restarts=options.max_restarts,
        hang_timeout_s=options.hang_timeout_s,
        start_deadline_s=options.start_timeout_s or math.inf,
        stop_grace_s=options.stop_grace_s,
        # One rank may have more work at the end than another: only ranks that hang are ended, not
        # busy ones.
        finish_grace_s=math.inf,
        checkpoints=directory,
        env={DIRECTORY_VARIABLE: str(directory)},
        resumes=False,
        tag_output=options.tag_output,
    )


def _tell_found(job: TrainingJob) -> None:
    """Print a note if the default directory has a checkpoint: a program that was finished before
    would go on from it, and seem to do nothing.
    """
    if (step := step_in(job.checkpoints)) is not None:
        there = f"{job.checkpoints} has a checkpoint of step {step}"
        text = f"{there}, and a program that reads the last checkpoint goes on from it"
        say(f"note: {text}\n  to begin anew: --checkpoints with another directory")


def _check_options(options: Launch) -> None:
    if options.hosts is not None and options.hostfile is not None:
        raise ConfigError(
            "--hosts and --hostfile: give one of the two",
            code="options-conflict",
            where="--hosts",
            hint="leave one of them out",
        )
    for name in ("hang_timeout_s", "start_timeout_s", "stop_grace_s"):
        seconds = getattr(options, name)
        if seconds is not None and not seconds > 0:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{seconds:g} is not a time to wait",
                code="value-out-of-range",
                where=flag,
                hint="give seconds, more than 0",
            )


def _refuse_another_launcher() -> None:
    found = recognise_here()
    if found.size > 1:
        raise ConfigError(
            f"{found.launcher} has started {counted(found.size, 'process', 'processes')} already",
            code="launcher-conflict",
            where="allhands launch",
            hint="start a single allhands launch without another launcher, with -n or --hostfile",
        )
