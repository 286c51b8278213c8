"""Error messages for calls from Python: keyword arguments take the place of flags."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from allhands.errors import AllhandsError

# A command stays as it is: between backticks, or from its name to the end of its clause.
_COMMAND = re.compile(r"`[^`]*`|\b(?:allhands|pip|python|mlx_lm\.\w+) [a-z-][^,;()\n]*")
_JSON = r"\[[^\]]*\]|\{(?:[^{}]|\{[^}]*\})*\}"
_VALUE = rf"'[^']*'|{_JSON}|\d+(?:,\d+)+|[^\s,;:()']+"
_FLAG = re.compile(rf"(?<![\w-])--(no-)?([a-z][a-z0-9-]*)(?:(?:=| )({_VALUE}))?")
# Options, and words that they take although their types do not list them.
_NAMED = {
    *((name, "auto") for name in ("resume", "pp_split")),
    *(("lr_schedule", word) for word in ("constant", "linear", "cosine")),
    ("report_to", "wandb"),
}
# An option as a YAML file spells it.
_KEY = re.compile(rf"(?<![\w.\"'-])([a-z][a-z_]*): ({_JSON}|[\w.-]+)")
_NUMBER = re.compile(r"-?\d[\d_]*(?:\.\d+)?(?:e[-+]?\d+)?")


@contextmanager
def named_as_arguments(schema: type[BaseModel]) -> Generator[None]:
    """Spell the options in the errors of the block as keyword arguments.

    Args:
        schema: has the options as fields.
    """
    try:
        yield
    except AllhandsError as error:
        error.message = as_call(error.message, schema)
        error.hint = error.hint and as_call(error.hint, schema)
        error.where = error.where and _place(error.where, schema)
        error.args = (error.message,)
        raise


def as_call(text: str, schema: type[BaseModel]) -> str:
    """Spell the options in ``text`` as keyword arguments: ``--strategy fsdp`` is
    ``strategy="fsdp"``, and ``--learning-rate`` without a value is ``learning_rate``.
    """
    parts: list[str] = []
    end = 0
    for command in _COMMAND.finditer(text):
        parts += [_spelled(text[end : command.start()], schema), command[0]]
        end = command.end()
    found = "".join([*parts, _spelled(text[end:], schema)])
    return re.sub(r"the same command with resume\b(?!=)", 'the same call with resume="auto"', found)


def _place(where: str, schema: type[BaseModel]) -> str:
    """Spell a flag alone, known or not, as ``name=``; everything else as :func:`as_call` does."""
    alone = re.fullmatch(r"--([a-z0-9-]+)", where)
    return f"{alone[1].replace('-', '_')}=" if alone else as_call(where, schema)


def _spelled(text: str, schema: type[BaseModel]) -> str:
    def argument(found: re.Match[str]) -> str:
        negative, flag, word = found.groups()
        name = flag.replace("-", "_")
        field = schema.model_fields.get(name)
        if field is None:
            return found[0]
        rest = found[0][found.end(2) - found.start() :]
        if negative:
            return f"{name}=False{rest}"
        value, left = _value(name, field, word or "")
        if value is None and field.annotation is bool:
            value = "True"
        if value is None:
            return f"{name}{rest}"
        return f"{name}={value}{left if word and value != 'True' else rest}"

    def key(found: re.Match[str]) -> str:
        name, word = found.groups()
        field = schema.model_fields.get(name)
        if field is None:
            return found[0]
        value, left = _value(name, field, word)
        if word.isupper():  # stands for a value
            value = word
        if word == "on" and bool in (field.annotation, *get_args(field.annotation)):
            value = "True"
        return found[0] if value is None else f"{name}={value}{left}"

    return _FLAG.sub(argument, _KEY.sub(key, text))


def _value(name: str, field: FieldInfo, word: str) -> tuple[str | None, str]:
    """Return ``word`` as Python writes it, and the dots after it; ``None`` if it is no value of the
    option.
    """
    bare = word.rstrip(".")
    left = word[len(bare) :]
    inner = bare.strip("'")
    if inner[:1] in ("[", "{") or _NUMBER.fullmatch(inner):
        return inner, left
    is_text = inner != bare or "/" in inner or re.fullmatch(r"\d+(,\d+)+", inner)
    if is_text or inner in _words(field.annotation) or (name, inner) in _NAMED:
        return f'"{inner}"', left
    return None, ""


def _words(annotation: Any) -> set[str]:
    """Return all words that a type lists."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return {str(one) for one in arguments}
    return {word for one in arguments for word in _words(one)}
