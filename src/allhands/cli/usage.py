"""Errors of the command-line parser as errors of allhands: one message, with what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from allhands.config.aliases import ALIKE, canonical_flag, instead_of_flag
from allhands.config.problems import meant, to_do
from allhands.errors import ConfigError, in_our_words

# Codes for words in the parser's messages, in all its versions. All other messages are about the
# type of a value.
_ERROR_CODES = {
    "is not one of": "value-unknown",
    "must be greater": "value-out-of-range",
    "must be less": "value-out-of-range",
    "is not in the range": "value-out-of-range",
    "": "value-of-wrong-type",
}


def usage_error(error: Exception, words: Sequence[str], context: Any) -> ConfigError:
    """Return our own error for the parser's ``error`` about ``words`` of the verb of ``context``.

    The parser's classes differ between its versions, so the attributes of the error are used.
    """
    if hasattr(error, "param_type"):
        return _missing(error)
    if hasattr(error, "param_hint"):
        return _bad_value(error)
    if hasattr(error, "possibilities"):
        flag = str(getattr(error, "option_name", ""))
        # The parser reads "-iters" as several options of one letter each.
        whole = next((word for word in words if word.startswith(flag)), flag)
        return _unknown_option(flag if flag.startswith("--") else whole, context)
    return _bad_use(str(getattr(error, "option_name", "")), context)


def _unknown_option(flag: str, context: Any) -> ConfigError:
    """Return the error for ``flag``, which the verb of ``context`` does not have."""
    verb = context.command_path.partition(" ")[2]
    flags = _flags_of(context)
    keys = {one.lstrip("-").replace("-", "_") for one in flags}
    hint = instead_of_flag(flag, verb, keys) or _near_flag(flag, flags)
    return ConfigError(
        f"not an option of {context.command_path}",
        code="option-unknown",
        where=flag,
        hint=hint or _see_help(context),
    )


def unexpected_words(words: Sequence[str], context: Any) -> ConfigError:
    """Return the error for words that belong to no option or argument."""
    flags = _flags_of(context)
    hint = _near_flag(f"--{words[0]}", flags)
    takes = any(one.param_type_name == "argument" for one in context.command.params)
    return ConfigError(
        f"{context.command_path} takes no {'further ' if takes else ''}word without an option",
        code="argument-unknown",
        where=" ".join(words),
        hint=hint or f"quote a value that has blanks; {_see_help(context)}",
    )


def _near_flag(flag: str, flags: Iterable[str]) -> str | None:
    """Return a question with the most similar of ``flags``; ``None`` if none is similar."""
    name = canonical_flag(flag.lstrip("-"))
    if len(name) < 2:
        return None
    known = {one.lstrip("-"): one for one in flags if one.startswith("--")}
    near = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
    return f"did you mean {known[near[0]]}?" if near else None


def _flags_of(context: Any) -> list[str]:
    return [
        name
        for option in context.command.get_params(context)
        if option.param_type_name == "option" and not option.hidden
        for name in (*option.opts, *option.secondary_opts)
    ]


def _see_help(context: Any) -> str:
    return f"`{context.command_path} --help` lists the options"


def _name_of(parameter: Any) -> str:
    """Return the longest flag of an option, or the help's word for an argument."""
    if parameter.param_type_name == "option":
        return max(parameter.opts, key=len)
    return (parameter.metavar or parameter.name or "").strip("[].").upper()


def _missing(error: Any) -> ConfigError:
    parameter = error.param
    where, hint = _name_of(parameter), f"add it{meant(parameter.help)}"
    if parameter.param_type_name == "option":
        return ConfigError("this option is missing", code="option-missing", where=where, hint=hint)
    return ConfigError("this argument is missing", code="argument-missing", where=where, hint=hint)


def _bad_value(error: Any) -> ConfigError:
    parameter = error.param
    cause = error.__cause__
    message = in_our_words(error.message).rstrip(".")
    errors: Callable[[], list[Any]] | None = getattr(cause, "errors", None)
    value = errors()[0].get("input") if callable(errors) else None
    if isinstance(value, str) and repr(value) not in message:
        message += f" (got {value!r})"
    code = next(code for words, code in _ERROR_CODES.items() if words in message)
    where = _name_of(parameter) if parameter is not None else str(error.param_hint)
    hint = to_do(message, value, getattr(parameter, "help", None))
    return ConfigError(message, code=code, where=where, hint=hint)


def _bad_use(flag: str, context: Any) -> ConfigError:
    """Return the error for an option without a value, or for a switch with a value."""
    normal = f"--{canonical_flag(flag[2:])}" if flag.startswith("--") else flag
    parameter = next(
        one
        for one in context.command.get_params(context)
        if normal in (*one.opts, *one.secondary_opts)
    )
    switch = parameter.is_flag or parameter.count
    meaning = meant(parameter.help)
    if switch:
        return ConfigError(
            "this option takes no value",
            code="value-unexpected",
            where=flag,
            hint=f"leave the value out{meaning}",
        )
    return ConfigError(
        "this option has no value", code="value-missing", where=flag, hint=f"add it{meaning}"
    )
