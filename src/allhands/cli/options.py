"""Command-line options made from the configuration's fields, so that there is one source of both."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from allhands.cli.option_groups import group_of
from allhands.cli.parser import twice
from allhands.config.schema import TrainConfig
from allhands.errors import ConfigError

if TYPE_CHECKING:
    from allhands.data.templates import ChatChoice

# Numbers that may be written with a unit: the configuration reads them.
AS_TEXT = frozenset({"clear_cache_threshold"})
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
# Flags that people's hands know besides the generated ones.
SHORT = {"config": ["-c"], "num_ranks": ["-n"]}


def option_function(run: Callable[..., None], doc: str, kind: type[TrainConfig] = TrainConfig) -> Callable[..., None]:
    """Return a function for typer whose parameters are the fields of ``kind``.

    ``run`` receives ``flags``, a dictionary of the options that were given.
    """

    def command(*, verbose: bool | None = None, **flags: Any) -> None:
        if verbose is not None:
            if "log_level" in flags:
                raise twice(("--log-level", "--verbose"), "--log-level")
            flags["log_level"] = "verbose"
        run(flags)

    parameters = options_of(kind, dict.fromkeys([*kind.FIRST, *kind.model_fields]))
    if "log_level" in kind.model_fields:
        words = "As --log-level verbose."
        panel = group_of("verbose")
        option = typer.Option("-v", "--verbose", help=words, show_default=False, rich_help_panel=panel)
        parameters.append(parameter("verbose", bool | None, option))
    return with_parameters(command, doc, parameters)


def options_of(kind: type[TrainConfig], names: Iterable[str]) -> list[inspect.Parameter]:
    """Return options for fields of a configuration; all default to ``None``."""
    return [inspect.Parameter(name, _KEYWORD, default=None, annotation=_annotation(name, kind)) for name in names]


def parameter(name: str, kind: Any, place: Any, default: Any = None) -> inspect.Parameter:
    """Return an option or argument of a verb's own, as typer describes its ``place``."""
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=Annotated[kind, place])


def with_parameters(run: Callable[..., None], doc: str, parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Return a function for typer with these parameters, which passes on to ``run`` those that are not ``None``."""

    def command(**given: Any) -> None:
        run(**{name: _plain(value) for name, value in given.items() if value is not None})

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = doc
    return command


ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE|NAME",
        help="Chat template in place of the model's or the adapter's: a Jinja file, or chatml, llama3 and so on.",
    ),
]
System = Annotated[
    str,
    typer.Option(
        "--system", metavar="template|merge", help="merge: put system messages before questions, as for training."
    ),
]

# Of the verbs that listen: ``serve`` and ``dashboard``.
Host = Annotated[
    str, typer.Option("--host", help="Address to listen on; of others than this computer's a token is asked for.")
]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 is any free one.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="ALLHANDS_TOKEN",
        help="What visitors must know; also ALLHANDS_TOKEN, which no list of processes shows. "
        "[made anew where others can reach it]",
        show_envvar=False,
    ),
]
HostNames = Annotated[
    list[str] | None,
    typer.Option("--name", help="Further name or address under which it is asked for. Repeatable."),
]


def chat_choice(template: str | None, system: str) -> ChatChoice:
    """What the two options ask for.

    Raises:
        ConfigError: ``system`` is neither of its two words.
    """
    from allhands.data.templates import ChatChoice

    if system not in ("template", "merge"):
        hint = "write merge, or leave it out; the words of a system message are given as --system-prompt"
        raise ConfigError(f"{system!r} is not known", where="--system", hint=hint)
    return ChatChoice(template, cast("Any", system))


def _plain(value: Any) -> Any:
    return value.value if hasattr(value, "value") else value


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
    """What stands for the value in the help: the choices, if it is one of a few."""
    if typing.get_origin(annotation) is Literal:
        return "|".join(typing.get_args(annotation))
    return None if kind is bool else {int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")


def _flag_type(annotation: Any) -> Any:
    """int, float, bool and choices as they are; everything structured travels as a JSON string."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(annotation) if part is not type(None)]
        return _flag_type(inner[0]) if len(inner) == 1 else str
    if annotation in (int, float, bool):
        return annotation
    return str
