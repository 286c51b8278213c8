"""The real command-line parser, without running what it parses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer.main

from allhands.cli.main import make_app, with_auto_resume


def parse(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The verb (``"model get"``) of ``allhands ARGUMENTS`` and the options that were given.

    Raises:
        Exception: the parser's own, with ``show`` and ``exit_code``, for what it does not accept.
    """
    command: Any = typer.main.get_command(make_app())
    rest, names = with_auto_resume(list(arguments)), list[str]()
    context = command.context_class(command, info_name="allhands", **command.context_settings)
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, rest)
        names.append(name)
        if hasattr(command, "commands"):
            context = command.context_class(command, parent=context, info_name=name)
    context = command.make_context(names[-1], rest, parent=context)
    return " ".join(names), {name: value for name, value in context.params.items() if value is not None}


def verbs() -> Iterator[tuple[str, Any]]:
    """Every verb with its command."""

    def walk(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield " ".join(names), command
            return
        for name, inner in command.commands.items():
            yield from walk(inner, (*names, name))

    yield from walk(typer.main.get_command(make_app()), ())
