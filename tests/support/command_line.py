"""The real command line in this process, and its parser without running what it parses."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from allhands.cli.main import main, make_app
from allhands.cli.parser import with_auto_resume
from allhands.config.aliases import canonical_flag


def call_allhands(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``tiny.run_allhands`` does without the second or two in which a process imports
    everything.

    For commands that start no processes and are no rank, which would end this process. What would
    be a traceback there is an exception here.
    """
    words = [str(argument) for argument in arguments]
    with ExitStack() as stack:
        if cwd is not None:
            stack.enter_context(chdir(cwd))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        patch.setattr("allhands.cluster.training.install", _needs_a_process)
        out = stack.enter_context(redirect_stdout(io.StringIO()))
        err = stack.enter_context(redirect_stderr(io.StringIO()))
        with pytest.raises(SystemExit) as ended:
            main(words)
    code = ended.value.code
    assert isinstance(code, int), code
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def _needs_a_process(*_: object) -> Any:
    raise AssertionError("this command is a rank: it takes the process over, so use run_allhands")


def parse(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The verb (``"model get"``) of ``allhands ARGUMENTS`` and the options that were given.

    Raises:
        ConfigError: the parser does not accept them.
    """
    command = _whole_command()
    rest, names = with_auto_resume(list(arguments)), list[str]()
    context = command.context_class(command, info_name="allhands", **command.context_settings)
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, rest)
        names.append(name)
        if hasattr(command, "commands"):
            context = command.context_class(command, parent=context, info_name=name)
    context = command.make_context(names[-1], rest, parent=context)
    return " ".join(names), {
        name: value for name, value in context.params.items() if value is not None
    }


def changed(fixed: Sequence[str | Path], more: Sequence[str | Path]) -> list[str | Path]:
    """The words ``fixed`` with ``more``, whose options take the place of the same ones among them."""

    def name_of(word: str | Path) -> str:
        name = str(word).partition("=")[0]
        flag = _SHORT.get(name, name)
        return (
            canonical_flag(flag[2:]).removeprefix("no-")
            if flag.startswith("--") and len(flag) > 2
            else ""
        )

    given = {name for word in more if (name := name_of(word))}
    result: list[str | Path] = []
    gone = False
    for word in fixed:
        gone = name_of(word) in given if name_of(word) else gone
        result += [] if gone else [word]
    return [*result, *more]


_SHORT = {"-n": "--num-ranks", "-c": "--config", "-m": "--max-tokens"}


def verbs() -> Iterator[tuple[str, Any]]:
    """Every verb with its command."""

    def walk(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield " ".join(names), command
            return
        for name, inner in command.commands.items():
            yield from walk(inner, (*names, name))

    yield from walk(_whole_command(), ())


@cache
def _whole_command() -> Any:
    """``allhands`` with all verbs: made once, because that takes five times as long as to parse a
    line.
    """
    return typer.main.get_command(make_app())
