"""Command-line options made from the configuration's fields, so that there is one source of both."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from allhands.config import ALIASES, TrainConfig

# Flags that people's hands know besides the generated ones.
SHORT = {"config": ["-c"], "num_ranks": ["-n"]}
GROUPS = {
    "What to train": ("model", "data", "fine_tune_type", "num_layers", "lora_parameters", "adapter_path"),
    "Processes": ("num_ranks", "backend", "cores_per_rank", "bucket_mb", "start_timeout_s"),
}


def option_function(run: Callable[..., None], doc: str) -> Callable[..., None]:
    """A function for typer whose parameters are the fields of :class:`TrainConfig`; all default to ``None``.

    ``run`` receives ``flags``, a dictionary of the options that were given.
    """

    def command(**flags: Any) -> None:
        run({name: _plain(value) for name, value in flags.items() if value is not None})

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name))
        for name in TrainConfig.model_fields
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = doc
    return command


def _plain(value: Any) -> Any:
    return value.value if hasattr(value, "value") else value


def _annotation(name: str) -> Any:
    field = TrainConfig.model_fields[name]
    flag = name.replace("_", "-")
    names = [*SHORT.get(name, []), f"--{flag}", *(f"--{a.replace('_', '-')}" for a in _aliases(name))]
    kind = _flag_type(field.annotation)
    if kind is bool:
        names[names.index(f"--{flag}")] = f"--{flag}/--no-{flag}"
    panel = next((title for title, members in GROUPS.items() if name in members), "Options")
    default = None if field.default_factory else field.default
    shown = str(default) if default is not None and kind is not bool and "[" not in (field.description or "") else False
    return Annotated[
        kind | None,
        typer.Option(*names, help=field.description, show_default=shown, rich_help_panel=panel, metavar=_metavar(kind)),
    ]


def _aliases(name: str) -> list[str]:
    return [alias for alias, target in ALIASES.items() if target == name and len(alias) > 1]


def _metavar(kind: Any) -> str | None:
    return None if kind is bool or typing.get_origin(kind) is Literal else str(kind.__name__).upper()


def _flag_type(annotation: Any) -> Any:
    """int, float, bool and choices as they are; everything structured travels as a JSON string."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(annotation) if part is not type(None)]
        return _flag_type(inner[0]) if len(inner) == 1 else str
    if annotation in (int, float, bool):
        return annotation
    return str
