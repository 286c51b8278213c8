"""``allhands launch``: start your own program on every rank, and restart it after faults."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import typer

from allhands.cli.launching import TrainingJob, run, step_in
from allhands.cli.notices import say
from allhands.cli.verbs_training import Launch
from allhands.cluster.environment import recognise_here
from allhands.cluster.hosts import write_hosts
from allhands.errors import ConfigError
from allhands.io.formatting import counted
from allhands.loops.supervised import DIRECTORY_VARIABLE

_PYTHONS = ("python", "python3")
_LOOK_S = 10.0


def launch(asked: Launch) -> None:
    """Run the verb."""
    options = asked
    _check_options(options)
    _refuse_another_launcher()
    if options.hosts is not None:
        path = write_hosts(options.hosts, options.log_dir / "hosts.txt")
        options = options._replace(hosts=None, hostfile=str(path))
    words = resolved(asked.command or [], anywhere=options.hostfile is not None)
    if options.hostfile is None:
        _tell_python(words)
    job = _job(options)
    if options.checkpoints is None:
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
        start_deadline_s=math.inf if options.start_timeout_s is None else options.start_timeout_s,
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
    step = step_in(job.checkpoints) if job.checkpoints else None
    if step is not None:
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


def resolved(command: Sequence[str], *, anywhere: bool = False) -> list[str]:
    """Return the command with this Python for ``python``, unless another Python comes first on
    ``PATH``.

    Args:
        anywhere: True if the command also runs on other computers. Their files may differ, so
            nothing is checked here.

    Raises:
        ConfigError: there is no command, no such program, or no such script.
    """
    if not command:
        raise ConfigError(
            "there is no command to start",
            code="command-missing",
            where="allhands launch",
            hint="write it after the options: allhands launch -n 2 -- python my_script.py",
        )
    program, *arguments = command
    if program in _PYTHONS and _is_this_python(shutil.which(program)):
        program = sys.executable
    if not anywhere:
        _check_program(program, command[0])
        if re.fullmatch(r"python[\d.]*", Path(program).name):
            _check_script(arguments)
    return [program, *arguments]


def _is_this_python(found: str | None) -> bool:
    # Links are not resolved: the Python of a virtual environment is a link to another Python.
    return found is None or Path(found).parent.absolute() == Path(sys.executable).parent


def _tell_python(command: Sequence[str]) -> None:
    """Print a note if ``python`` is another Python than this one, and lacks packages that the
    program probably needs.
    """
    found = shutil.which(command[0]) if command[0] in _PYTHONS else None
    if found is None or _is_this_python(found) or not (lacking := _lacking(found)):
        return
    say(
        f"note: {command[0]} is {found}, which comes first on PATH and has no {' and no '.join(lacking)}\n"
        f"  what to do: if the program needs them, write {sys.executable} in place of {command[0]}"
    )


def _lacking(python: str) -> list[str]:
    """Return which of MLX and allhands the interpreter lacks; none if it does not answer."""
    look = "import importlib.util as u; print(*(n for n in ('mlx', 'allhands') if u.find_spec(n) is None))"
    try:
        done = subprocess.run(
            [python, "-c", look],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _check_program(program: str, said: str) -> None:
    if shutil.which(program) is not None:
        return
    if Path(said).suffix == ".py":
        hint = f"write allhands launch ... -- python {said}"
    elif Path(said).is_file():
        hint = f"make it executable: chmod +x {said}"
    else:
        hint = "check its name; what comes after the options of allhands launch, or after --, is the command"
    raise ConfigError(
        f"{said!r} is not a program that can be started",
        code="program-not-found",
        where="allhands launch",
        hint=hint,
    )


def _check_script(arguments: Sequence[str]) -> None:
    """Refuse a script that does not exist; otherwise every rank would print Python's message.

    Raises:
        ConfigError: there is no such script.
    """
    if arguments and not arguments[0].startswith("-") and not Path(arguments[0]).exists():
        raise ConfigError(
            "there is no such script",
            code="path-missing",
            where=arguments[0],
            hint="check the path of the script",
        )
