"""Strict reader for JSON of unknown origin, and checks of the values in it.

Python's own reader takes NaN, numbers with thousands of digits, keys that come twice, halves of
letters (lone surrogates) that cannot be written, and lists in lists until its stack ends.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

Check = Callable[[Any], bool]

_MOST_DEPTH = 16
_MOST_DIGITS = 20
_MOST_WHOLE = 1 << 53
# A string without an end counts to the end of the text, so that the text is searched only once.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.?)*+"?|[\[\]{}]', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_object(
    content: bytes, most_depth: int = _MOST_DEPTH, halves: bool = False
) -> dict[str, Any] | None:
    """Return the JSON object in ``content``; ``None`` if there is none, or if it breaks a limit.

    Args:
        content: UTF-8 text; the caller must limit its length.
        most_depth: largest depth of lists and objects inside each other.
        halves: True if strings may hold halves of letters (lone surrogates), with which Python
            writes the bytes of odd file names.
    """
    try:
        text = content.decode("utf-8")
        if not _is_flat(text, most_depth):
            return None
        found = json.loads(
            text,
            parse_constant=_refuse,
            parse_int=_integer,
            parse_float=_number,
            object_pairs_hook=without_repeats,
        )
        if not halves and _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _is_flat(text: str, most_depth: int) -> bool:
    if text.count("[") + text.count("{") <= most_depth:
        return True
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > most_depth:
            return False
    return True


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("too many digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("too large")
    return value


def without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dictionary, for ``json.loads(object_pairs_hook=...)``.

    ``json.loads`` alone would silently take the last value of a name that comes twice.

    Raises:
        ValueError: a name comes twice in one object.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is given twice: keep one of them")
        found[name] = value
    return found


# --- checks of values -----------------------------------------------------------------------------


def is_integer(value: object, least: int, most: int) -> bool:
    """Return True for an integer from ``least`` to ``most``; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_text(value: Any) -> bool:
    """Return True for a string."""
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    """Return True for true or false."""
    return isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return True for a float, or an integer that a float can hold exactly."""
    return isinstance(value, float) or is_integer(value, -_MOST_WHOLE, _MOST_WHOLE)


def integer(least: int, most: int) -> Check:
    """Return the check for an integer from ``least`` to ``most``."""
    return lambda value: is_integer(value, least, most)


def maybe(check: Check) -> Check:
    """Return the check for null, or a value that passes ``check``."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """Return the check for a list of values that pass ``check``."""
    return lambda value: isinstance(value, list) and all(map(check, cast("list[Any]", value)))


def mapping_of(check: Check) -> Check:
    """Return the check for an object with any names, whose values pass ``check``."""
    return lambda value: (
        isinstance(value, dict) and all(map(check, cast("dict[str, Any]", value).values()))
    )


def object_of(needed: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return the check for an object with all names of ``needed``, perhaps those of ``optional``,
    and any others.
    """

    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        known = {name: one for name, one in (optional or {}).items() if name in value}
        return all(name in value and one(value[name]) for name, one in {**needed, **known}.items())

    return check
