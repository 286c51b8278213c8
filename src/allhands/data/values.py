"""Values of records as JSON gives them: their place, their types in words, and simple checks."""

from __future__ import annotations

import ast
import json
import reprlib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time
from typing import Any, NoReturn

from allhands.errors import DataError

SHAPES = '{"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'
SHORTEN = "shorten the number or the nesting that it names"
DELETE = "fill it in or delete the record"
_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


@dataclass(frozen=True)
class ValuePlace:
    """The place of a record: source and line, for the errors of its checks."""

    source: str
    line: int

    def fail(self, message: str, hint: str | None = None, *, code: str) -> NoReturn:
        raise DataError(message, code=code, where=f"{self.source}:{self.line}", hint=hint)


def type_name(value: Any) -> str:
    """Return the type of a JSON value in words, with its article."""
    if value is None:
        return "null or missing"
    return _NAMES.get(type(value)) or f"a value of type {type(value).__name__}"


def quoted(name: Any) -> str:
    """Return a key or other short text from the data for a message: in quotes, at most 60
    characters, writable as UTF-8.
    """
    text = name if isinstance(name, str) else reprlib.repr(name)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f'"{text.encode("utf-8", "backslashreplace").decode("utf-8")}"'


def key_list(names: Iterable[str]) -> str:
    """Return the first 12 keys, quoted, for a message."""
    first = [quoted(name) for name in names]
    return (", ".join(first[:12]) or "none") + (", ..." if len(first) > 12 else "")


def is_list_of_objects(value: Any) -> bool:
    """Return True for a list that holds only objects."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def check_string(value: Any, what: str, place: ValuePlace) -> str:
    """Return the value if it is a string that UTF-8 can write.

    Raises:
        DataError: the value is not such a string; ``what`` names it in the message.
    """
    if not isinstance(value, str):
        repair = DELETE if value is None else "write it as a string, in quotes"
        place.fail(
            f"{what} is {type_name(value)}, it must be a string", repair, code="field-of-wrong-type"
        )
    return value if value.isascii() else as_json(value, what, place)


def as_json(value: Any, what: str, place: ValuePlace) -> Any:
    """Return the value as it is after writing it as JSON and reading it again.

    Such a value can be written, hashed and given to a template.

    Raises:
        DataError: the value cannot be written as JSON in UTF-8.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_date_as_text)
        text.encode("utf-8")
        return value if isinstance(value, str) else json.loads(text)
    except UnicodeEncodeError as error:
        bad = f"\\u{ord(error.object[error.start]):04x}"
        place.fail(
            f"{what} has half a surrogate pair ({bad})",
            "write the whole character, or remove it",
            code="character-invalid",
        )
    except (TypeError, ValueError, RecursionError) as error:
        place.fail(
            f"{what} holds something that JSON cannot write: {error}",
            "write it as text, or remove it",
            code="field-of-wrong-type",
        )


def _date_as_text(value: Any) -> str:
    # Tables may have dates in messages: nothing is learned from them, but they are no fault.
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"{type_name(value)} is no JSON")


def parse_json(text: str, what: str, place: ValuePlace) -> Any:
    """Return a JSON value that stands in the data as a string.

    Raises:
        DataError: the string is not JSON; ``what`` names it in the message.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        place.fail(
            f"{what} is a string that is not JSON: {error}",
            "write it as a JSON list or object",
            code="json-invalid",
        )


def list_if_text(value: Any, what: str, place: ValuePlace) -> Any:
    """Return the list in a string, None for a blank string (a table's empty cell), or the value.

    The string is JSON, maybe encoded twice, or a Python list as pandas writes it into a CSV. A
    value that is no string, or a string that is no list, is returned unchanged.

    Raises:
        DataError: a string looks like a list but cannot be read.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text[:2] == '"[':
        return list_if_text(parse_json(text, what, place), what, place)
    if not text or text[0] != "[" or (text[-1] != "]" and "{" not in text):
        return value if text else None
    try:
        return parse_json(text, what, place)
    except DataError:
        with (
            warnings.catch_warnings(),
            suppress(ValueError, SyntaxError, MemoryError, RecursionError),
        ):
            warnings.simplefilter("ignore")
            items: Any = ast.literal_eval(text)
            # NumPy writes strings without commas, which Python would join; so only lists of objects
            # or lists are accepted.
            if isinstance(items, list) and all(isinstance(item, dict | list) for item in items):
                return items
        raise


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that are not null."""
    return {key: value for key, value in fields.items() if value is not None}
