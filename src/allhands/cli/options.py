"""Command-line options that are made from the configuration's fields."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import typer

from allhands.cli.option_groups import group_of
from allhands.cli.parser import App, twice, with_auto_resume
from allhands.config.aliases import canonical_flag
from allhands.config.schema import TrainConfig

# Options with numbers that may have a unit; the configuration parses them.
AS_TEXT = frozenset({"clear_cache_threshold"})
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
# Short flags besides the generated ones.
SHORT = {"config": ["-c"], "num_ranks": ["-n"]}


def option_function(
    run: Callable[..., None], doc: str, kind: type[TrainConfig] = TrainConfig
) -> Callable[..., None]:
    """Return a function for typer whose parameters are the fields of ``kind``.

    Args:
        run: called with a dictionary of the given options.
        doc: docstring of the function, which is the verb's help.

    Raises:
        ConfigError: (the function) both ``--verbose`` and ``--log-level`` are given.
    """

    def command(**given: Any) -> None:
        flags = {name: value for name, value in given.items() if value is not None}
        verbose = flags.pop("verbose", None)
        if verbose is not None:
            if "log_level" in flags:
                raise twice(("--log-level", "--verbose"), "--log-level")
            flags["log_level"] = "verbose"
        run(flags)

    parameters = options_of(kind, dict.fromkeys([*kind.FIRST, *kind.model_fields]))
    if "log_level" in kind.model_fields:
        words = "As --log-level verbose."
        panel = group_of("verbose")
        option = typer.Option(
            "-v", "--verbose", help=words, show_default=False, rich_help_panel=panel
        )
        parameters.append(
            inspect.Parameter(
                "verbose", _KEYWORD, default=None, annotation=Annotated[bool | None, option]
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = doc
    return command


def parsed_options(
    words: Sequence[str], command: str, kind: type[TrainConfig] = TrainConfig
) -> dict[str, Any]:
    """Return the options in ``words``, by the names of ``kind``, as the parser of ``allhands train``
    reads them.

    Args:
        command: the command that was called, for messages.

    Raises:
        ConfigError: a word is not understood.
    """
    given: dict[str, Any] = {}
    app = App(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"token_normalize_func": canonical_flag},
    )
    app.command()(option_function(given.update, "", kind))
    app(args=with_auto_resume(list(words)), prog_name=command, standalone_mode=False)
    return given


def options_of(kind: type[TrainConfig], names: Iterable[str]) -> list[inspect.Parameter]:
    """Return options for fields of a configuration; all default to ``None``."""
    return [
        inspect.Parameter(name, _KEYWORD, default=None, annotation=_annotation(name, kind))
        for name in names
    ]


def _annotation(name: str, kind_of: type[TrainConfig]) -> Any:
    field = kind_of.model_fields[name]
    flag = name.replace("_", "-")
    names = [*SHORT.get(name, []), f"--{flag}"]
    kind = str if name in AS_TEXT else _flag_type(field.annotation)
    if kind is bool:
        names[names.index(f"--{flag}")] = f"--{flag}/--no-{flag}"
    text = field.description or ""
    default = None if field.default_factory else field.default
    if default is not None and default is not False and default != "" and "[" not in text:
        text += f" [{'on' if default is True else default}]"
    return Annotated[
        kind | None,
        typer.Option(
            *names,
            help=text,
            show_default=False,
            metavar=_metavar(field.annotation, kind),
            hidden=name in kind_of.HIDDEN,
            rich_help_panel=group_of(name),
        ),
    ]


def _metavar(annotation: Any, kind: Any) -> str | None:
    """Return the word for the value in the help: the choices, if there are only some; ``None`` for
    switches.
    """
    if typing.get_origin(annotation) is Literal:
        return "|".join(typing.get_args(annotation))
    return None if kind is bool else {int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")


def _flag_type(annotation: Any) -> Any:
    """Return the type for the parser: int, float or bool; str for all other types, which the
    configuration parses.
    """
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(annotation) if part is not type(None)]
        return _flag_type(inner[0]) if len(inner) == 1 else str
    if annotation in (int, float, bool):
        return annotation
    return str
