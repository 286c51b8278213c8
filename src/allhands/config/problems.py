"""Error messages about options: place, problem and meaning."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from allhands.config.aliases import ALIASES
from allhands.errors import ConfigError, in_our_words

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Codes for pydantic's error types; every other type is a value of the wrong type.
_ERROR_CODES = {
    "extra_forbidden": "option-unknown",
    "missing": "option-missing",
    "literal_error": "value-unknown",
    "greater_than": "value-out-of-range",
    "greater_than_equal": "value-out-of-range",
    "less_than": "value-out-of-range",
    "less_than_equal": "value-out-of-range",
    "finite_number": "value-out-of-range",
    "other": "value-of-wrong-type",
}


def canonical_key(raw: Any) -> str:
    """Return the name of the option for the spelling of a file or a call."""
    key = str(raw).replace("-", "_")
    return ALIASES.get(key, key)


def place_in_yaml(path: str | Path, key: str) -> str:
    """Return ``file:line: key`` for an option, with its name or alias as the file spells it.

    Without a line if the file does not have the key at its top level.
    """
    from allhands.config.yaml_files import keys_of

    found = next((one for one in keys_of(path) if canonical_key(one[0]) == key), None)
    return f"{path}:{found[1]}: {found[0]}" if found else f"{path}: {key}"


def meant(description: str | None) -> str:
    """Return the description of an option as the end of a hint; empty if there is none."""
    return f". About the option: {description.rstrip('.')}" if description else ""


def to_do(message: str, value: Any, description: str | None) -> str:
    """Return the hint for a wrong value: a similar choice from ``message``, or the option's
    description.
    """
    choices = [one for one in re.findall(r"'([^']*)'", message) if one != value]
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"did you mean {near[0]}?" if near else f"give another value{meant(description)}"


def explained(
    error: ValidationError,
    flags: Mapping[str, Any],
    yaml_file: str | Path | None,
    kind: type[BaseModel],
) -> ConfigError:
    """Return a validator's complaints about options of ``kind`` as one error.

    It has the place, code and hint of the first complaint, in the order of the file; its message
    lists all complaints.

    Args:
        flags: the options that were given as flags, by name or alias.
        yaml_file: the file of all other options, or ``None``.
    """

    def place_of(key: str) -> str:
        from_flag = key in flags or not yaml_file or any(ALIASES.get(name) == key for name in flags)
        if yaml_file and not from_flag:
            return place_in_yaml(yaml_file, key)
        return f"--{key.replace('_', '-')}"

    # The first problem of each option: where it is, what is wrong, its code, and what to do.
    found: dict[str, tuple[str, str, str, str]] = {}
    for one in error.errors():
        key, *inner = [str(part) for part in one["loc"]] or [""]
        message = in_our_words(str(one["msg"]))
        if not key:
            code = _code_of(one, "options-conflict")
            return ConfigError(message, code=code, hint="change one of the options named")
        got = one.get("input")
        shown = f" (got {got!r})" if isinstance(got, (str, int, float, bool)) else ""
        text = f"{'.'.join(inner)}: {message}{shown}" if inner else f"{message}{shown}"
        text += _known_instead(kind, key, inner, message)
        field = kind.model_fields.get(key)
        hint = to_do(message, got, field.description if field else None)
        found.setdefault(key, (place_of(key), text, _code_of(one, "value-invalid"), hint))
    # In the order of the file.
    key, *others = sorted(found, key=lambda name: _line_of(found[name][0]))
    place, text, code, hint = found[key]
    more = "".join(f"; and {where}: {what}" for where, what, *_ in map(found.__getitem__, others))
    return ConfigError(f"{text}{more}", code=code, where=place, hint=hint)


def _code_of(problem: ErrorDetails, otherwise: str) -> str:
    """Return the code for a validator's complaint.

    ``otherwise``: the code for one of our own checks that has no code.
    """
    refusal = problem.get("ctx", {}).get("error")
    if isinstance(refusal, ValueError):
        return getattr(refusal, "code", otherwise)
    return _ERROR_CODES.get(problem["type"], _ERROR_CODES["other"])


def _line_of(place: str) -> int:
    """Return the line number in ``file:line: key``; 0 for a flag."""
    found = re.search(r":(\d+): ", place)
    return int(found[1]) if found else 0


def _known_instead(kind: type[BaseModel], key: str, inner: Sequence[str], message: str) -> str:
    """Return a list of a structured option's keys, for a complaint about an unknown key; empty for
    other complaints.
    """
    annotation = kind.model_fields[key].annotation if key in kind.model_fields else None
    models = [
        one
        for one in (annotation, *get_args(annotation))
        if inspect.isclass(one) and issubclass(one, BaseModel)
    ]
    if message != "is unknown" or len(inner) != 1 or not models:
        return ""
    return f"; it has {', '.join(models[0].model_fields)}"
