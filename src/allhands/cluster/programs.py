"""The command of ``allhands launch``: which program it starts, and with which Python."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from allhands.errors import ConfigError
from allhands.io.terminal import say

_PYTHONS = ("python", "python3")
_LOOK_S = 10.0


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


def tell_python(command: Sequence[str]) -> None:
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
