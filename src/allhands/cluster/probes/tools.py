"""Output of programs and content of small files, with deadlines; a missing one is no error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from allhands.runtime.threads import in_background

# A command over ssh gets a short PATH, without the directories of administrators and Homebrew.
_MORE_PATH = "/usr/sbin:/sbin:/usr/local/bin:/opt/homebrew/bin"


def program_environment() -> dict[str, str]:
    """Return the environment in which programs are found and print English."""
    path = os.environ.get("PATH", "/usr/bin:/bin")
    return {**os.environ, "LC_ALL": "C", "PATH": f"{path}:{_MORE_PATH}"}


def output_of(argv: Sequence[str], timeout_s: float = 8.0) -> str | None:
    """Return the output of a program; ``None``: there is no such program, it fails, or takes too
    long.
    """
    done = finished(argv, timeout_s)
    return done[1] if done is not None and done[0] == 0 else None


def finished(argv: Sequence[str], timeout_s: float) -> tuple[int, str, str] | None:
    """Return exit code, output and error output; ``None``: it cannot be started, or takes too long."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=program_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        done.returncode,
        done.stdout.decode(errors="replace"),
        done.stderr.decode(errors="replace"),
    )


def text_of(path: str) -> str | None:
    """Return the content of a small file; ``None`` if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 20)
    except OSError:
        return None


def gathered(
    collectors: Mapping[str, Callable[[], Any]], timeout_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Call all functions at the same time; return their values, and the errors of those without a
    value.

    A function that fails or hangs does not delay the others.
    """
    calls = {name: in_background(function) for name, function in collectors.items()}
    wait(calls.values(), timeout_s)
    done = {name: call for name, call in calls.items() if call.done()}
    # Any error is reported, and does not stop the rest.
    errors = {
        name: f"{type(error).__name__}: {error}"
        for name, call in done.items()
        if (error := call.exception()) is not None
    }
    errors.update((name, "no answer") for name in calls if name not in done)
    return {name: call.result() for name, call in done.items() if name not in errors}, errors
