"""What to say about a record whose columns make no shape: the column that was probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any, NoReturn, Protocol, cast

from allhands.data.values import ValuePlace, key_list, quoted

SHAPES = '{"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'

_PROMPT_LIKE = ("question", "instruction", "input", "query", "problem", "user", "source")
_COMPLETION_LIKE = ("answer", "output", "response", "target", "solution", "reply", "assistant")
_CHAT_LIKE = ("chat", "dialogue", "dialog", "turns")
_TEXT_LIKE = ("content", "body", "story", "document", "raw_content")


# Pairs of columns that say by themselves what is asked and what is answered.
_ASKED = ("question", "query", "problem", "instruction", "input", "user", "q")
_ANSWERED = ("answer", "response", "output", "solution", "reply", "assistant", "a")
# What may stand beside them, about the row.
_ABOUT = ("id", "idx", "index", "uid", "uuid", "source", "url", "topic", "category", "subject", "type", "level")
_ABOUT_FURTHER = ("split", "date", "author", "lang", "language", "difficulty", "unnamed: 0", "")


def pair_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The columns of a question and its answer by their usual names; ``None`` unless nothing else has a say in it.

    A context, choices or any other words beside them belong to the question, or to nobody: that is not guessed.
    """
    names = [
        name for name, value in row.items() if value is not None and name.lower() not in (*_ABOUT, *_ABOUT_FURTHER)
    ]
    asked = [name for name in names if name.lower() in _ASKED and isinstance(row[name], str)]
    answered = [name for name in names if name.lower() in _ANSWERED and isinstance(row[name], str)]
    return (asked[0], answered[0]) if len(names) == 2 and len(asked) == len(answered) == 1 else None


_WORDS_OF_PROSE = 5  # in the name of a column


class ColumnParts(Protocol):
    """A record and what its parts are called."""

    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def place(self) -> ValuePlace: ...
    def name(self, part: str) -> str:
        """The column of a part."""
        ...

    def names_it(self, part: str) -> bool:
        """Whether that is not its usual name."""
        ...


def fail_on_mapping(parts: ColumnParts, mapped: list[str]) -> NoReturn:
    """A record without the columns that were mapped: name its keys, and the key that was probably meant."""
    absent = [part for part in mapped if not parts.names_it(part)]
    paths = {path.lower(): path for path in islice(_paths(parts.values), 300)}
    near: list[str] = []
    for part in absent:
        close = get_close_matches(parts.name(part).lower(), paths, n=1, cutoff=0.4)
        near += [f"{part}_feature: {quoted(paths[match])}" for match in close]
    keys = key_list(parts.values)
    names = ", ".join(f"{quoted(parts.name(part))} ({part}_feature)" for part in absent)
    if not names:
        present = ", ".join(f"{quoted(parts.name(part))} ({part}_feature)" for part in mapped)
        parts.place.fail(f"{present} alone makes no shape; the keys are {keys}", column_hint(parts))
    hint = f"the nearest: {', '.join(near)}" if near else column_hint(parts)
    parts.place.fail(f"{names} {'are' if len(absent) > 1 else 'is'} not there; the keys are {keys}", hint)


def _paths(values: Mapping[str, Any], depth: int = 3) -> Iterator[str]:
    """Keys, and dotted paths to the keys of nested objects."""
    for name, value in values.items():
        yield str(name)
        if isinstance(value, dict) and depth > 1:
            yield from (f"{name}.{path}" for path in _paths(cast(dict[str, Any], value), depth - 1))


def _is_prose(name: str) -> bool:
    """Whether the name of a column is a sentence: the table has no header then."""
    return len(name.split()) >= _WORDS_OF_PROSE or name.rstrip().endswith((".", "?", "!"))


def column_hint(parts: ColumnParts) -> str:
    """What to do about a record of unknown shape: a column mapping if its keys suggest one."""
    row = parts.values
    if "input_ids" in row:
        return f"data that is already tokenized cannot be read: give the text itself as {SHAPES}"

    def found(part: str, candidates: tuple[str, ...]) -> str | None:
        return parts.name(part) if parts.names_it(part) else next((name for name in candidates if name in row), None)

    completion, prompt = found("completion", _COMPLETION_LIKE), found("prompt", _PROMPT_LIKE)
    if completion and prompt:
        about = (prompt, completion, *_ABOUT, *_ABOUT_FURTHER)
        others = [key for key, value in row.items() if key.lower() not in about and isinstance(value, str) and value]
        unused = f'; join "{others[0]}" to it first, or it is ignored' if others else ""
        return f"name the columns: prompt_feature: {quoted(prompt)}, completion_feature: {quoted(completion)}{unused}"
    if chat := found("chat", _CHAT_LIKE):
        return f"name the column: chat_feature: {quoted(chat)} (a list of messages, each with role and content)"
    if text := found("text", _TEXT_LIKE):
        return f"name the column: text_feature: {quoted(text)}"
    if parts.place.source.lower().endswith((".csv", ".tsv")) and any(_is_prose(key) for key in row):
        header = {1: "text", 2: "prompt,completion"}.get(len(row), "prompt,completion and a name for each other column")
        return (
            "the first row seems to be data, where a table has the names of its columns: write a line above it, "
            f"{header} (with the file's own separator)"
        )
    return f"a record is {SHAPES}; other names: prompt_feature, completion_feature, chat_feature, text_feature"
