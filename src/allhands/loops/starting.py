"""Python call for ``allhands launch``: start a script or a function on several ranks."""

from __future__ import annotations

import difflib
import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.errors import ConfigError, DistributedError, Interrupted
from allhands.io.paths import local_path

# Not "__main__": code under `if __name__ == "__main__":` is for the process that launches.
_RUN_NAME = "__allhands_rank__"
_WHERE = "allhands.launch"
# The options of `allhands launch`, without the number of ranks.
_OPTIONS = (
    *(
        "hostfile",
        "hosts",
        "backend",
        "cores_per_rank",
        "min_ranks",
        "max_restarts",
        "hang_timeout_s",
    ),
    *("start_timeout_s", "stop_grace_s", "log_dir", "checkpoints", "tag_output"),
)


def launch(
    target: str | Path | Callable[..., object],
    arguments: Sequence[object] | Mapping[str, Any] = (),
    *,
    num_ranks: int = 1,
    **options: Any,
) -> None:
    """Start a script or a function on ``num_ranks`` processes, restart after faults, and return when all have ended.

    It runs ``allhands launch`` in another process, with its output, restarts and log directory. Each rank imports the
    function from its file, so nothing of this process is shared. All other code of this file belongs under
    ``if __name__ == "__main__":``. The function returns nothing to the caller: ranks write files.

    Args:
        target: the path of a Python script, or a function at the top level of a file.
        arguments: words of a script's command line, or a function's arguments, in order or by name, as JSON values.
        num_ranks: number of processes; with ``hostfile`` or ``hosts`` the highest number.
        **options: the options of ``allhands launch``, such as ``hostfile="hosts"``, ``backend="ring"``,
            ``checkpoints="run"``, ``log_dir="logs"``, ``max_restarts=0`` or ``tag_output=False``.

    Raises:
        ConfigError: the target cannot be started, or there is no such option.
        DistributedError: the ranks ended with an exit code other than 0; the error was printed to
            standard error.
        Interrupted: the ranks were stopped by Ctrl-C.

    Examples:
        >>> if __name__ == "__main__":
        ...     allhands.launch(train, {"steps": 100}, num_ranks=2)
    """
    _check_names(options)
    command = _call(target, arguments) if callable(target) else _script(target, arguments)
    flags = _flags({"num_ranks": num_ranks, **options})
    process = subprocess.Popen([sys.executable, "-m", "allhands", "launch", *flags, "--", *command])
    interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            # The terminal also sent Ctrl-C to the ranks' supervisor, which lets them save and end.
            interrupted = True
    if interrupted or code == Interrupted.exit_code:
        raise Interrupted("stopped by Ctrl-C", code="stopped", where=_WHERE)
    if code:
        raise DistributedError(
            f"the ranks ended with code {code}",
            code="ranks-failed",
            where=_WHERE,
            hint="read the messages above",
        )


def _check_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, ("arguments", "num_ranks", *_OPTIONS), n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"there are num_ranks, {', '.join(_OPTIONS)}"
            )
            raise ConfigError(
                f"there is no argument {name}", code="argument-unknown", where=_WHERE, hint=hint
            )


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return the options as flags of ``allhands launch``."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags


def _script(target: object, arguments: Sequence[object] | Mapping[str, Any]) -> list[str]:
    if not isinstance(target, str | Path):
        raise ConfigError(
            f"{target!r} cannot be started",
            code="argument-invalid",
            where=_WHERE,
            hint="give a script's path or a function",
        )
    if isinstance(arguments, Mapping | str):
        hint = 'give its words: ["--steps", "100"]'
        raise ConfigError(
            "the arguments of a script are a list", code="argument-invalid", where=_WHERE, hint=hint
        )
    return [sys.executable, local_path(target, _WHERE), *map(str, arguments)]


def _call(
    function: Callable[..., object], arguments: Sequence[object] | Mapping[str, Any]
) -> list[str]:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    file = getattr(sys.modules.get(str(module)), "__file__", None)
    if name is None or file is None or not str(name).isidentifier():
        raise ConfigError(
            f"{name or function!r} is no function at the top level of a file",
            code="function-not-importable",
            where=_WHERE,
            hint="each rank imports it: write it with `def` at the left margin of a script or module",
        )
    try:
        text = json.dumps(
            dict(arguments) if isinstance(arguments, Mapping) else list(arguments), allow_nan=False
        )
    except (TypeError, ValueError) as error:
        hint = "give texts, numbers, lists and dictionaries"
        raise ConfigError(
            f"an argument is not a JSON value: {error}",
            code="value-not-json",
            where=_WHERE,
            hint=hint,
        ) from None
    # A module of a package is imported by its name, a script or single file by its path.
    place = str(module) if "." in str(module) else str(Path(file).resolve())
    return [sys.executable, "-m", __name__, place, str(name), text]


def run_call(place: str, name: str, text: str) -> None:
    """Run as a rank: import the function and call it.

    Args:
        place: a Python file or the dotted name of a module.
        name: the function's name.
        text: the function's arguments as a JSON list or object.
    """
    if Path(place).is_absolute():
        # Let the script import files of its directory, as Python itself does.
        sys.path.insert(0, str(Path(place).parent))
        function = runpy.run_path(place, run_name=_RUN_NAME)[name]
    else:
        function = getattr(importlib.import_module(place), name)
    arguments: Any = json.loads(text)
    if isinstance(arguments, dict):
        function(**arguments)
    else:
        function(*arguments)


if __name__ == "__main__":
    run_call(*sys.argv[1:])
