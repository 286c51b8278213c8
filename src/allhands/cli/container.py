"""``allhands container``: the program of the image, under SageMaker, Vertex AI, Kubernetes or
alone.

The platform's inputs become options of ``allhands train``. The training runs with a rank for each
GPU of this computer, or as this computer's share of a job on several computers. The results go to
the place where the platform collects them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from allhands.cli.options import parsed_options
from allhands.cli.verbs_runs import Container
from allhands.cluster.containers.options import as_flags
from allhands.cluster.containers.results import tell_failure
from allhands.cluster.containers.training import ContainerRun, Machine
from allhands.cluster.environment import has_cuda
from allhands.cluster.place import below
from allhands.cluster.training import supervise_training, work
from allhands.errors import AllhandsError, ConfigError
from allhands.io.terminal import say
from allhands.runtime.command import exit_at_term
from allhands.runtime.gpus import nvidia_gpus


def container(asked: Container) -> None:
    """Run the verb."""
    machine = Machine(gpus=nvidia_gpus(), cuda=True) if has_cuda() else Machine()
    raise typer.Exit(run_container(asked.arguments or [], machine))


def run_container(arguments: Sequence[str], machine: Machine) -> int:
    """Train, or become the program that the arguments name; return the exit code.

    The reason of a failure is written to the platform's failure file.

    Raises:
        AllhandsError: an input is wrong, or the training cannot be started.
    """
    words = list(arguments)
    if words[:1] == ["train"]:
        words = words[1:]
    elif words and not words[0].startswith("-"):
        _become(words)
    if "--help" in words:
        parsed_options(words, "allhands train")
        return 0
    # SageMaker's file, if even the platform cannot be recognised.
    output = below(machine.root, "/opt/ml/output")
    failure_file = output / "failure" if output.is_dir() else None
    # Linux ignores signals for which the first process of a container has no handler.
    before = signal.getsignal(signal.SIGTERM)
    exit_at_term()
    try:
        launch = machine.launch()
        failure_file = launch.failure_file
        with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
            code, reason = _train(ContainerRun(machine, launch, Path(scratch), say), words)
        if reason is not None:
            tell_failure(failure_file, f"allhands: error: {reason}", say)
        return code
    except Exception as error:
        text = f"allhands: error: {error}"
        if not isinstance(error, AllhandsError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"a defect of allhands: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        tell_failure(failure_file, text, say)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _become(words: Sequence[str]) -> NoReturn:
    """Replace this process by another program, as images do.

    Raises:
        ConfigError: there is no such program.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"{words[0]!r} is not a program of this image",
            code="program-not-found",
            where="arguments",
            hint="give options of allhands train (they begin with --), or a program: allhands env",
        )
    os.execvp(words[0], list(words))


def _train(run: ContainerRun, words: Sequence[str]) -> tuple[int, str | None]:
    """Return the exit code, and the reason of a failure or ``None``."""
    config, launch = run.configure(parsed_options(words, "allhands train")), run.launch
    flags = as_flags(config)
    say(f"{run.place}: allhands train {shlex.join(flags)}")
    for note in launch.notes:
        say(f"note: {note}")
    if launch.size > 1 and not run.is_share:
        return work(config, launch), None  # a rank of another launcher
    command = [sys.executable, "-m", "allhands", "train", *flags]
    return run.train(config, command, lambda: supervise_training(config, command))
