"""Advice on a record whose columns make no shape: the column that was probably meant."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from allhands.data.values import SHAPES, quoted

# Columns that are probably meant by each part, the likeliest first.
_LIKE = {
    "prompt": ("question", "instruction", "input", "query", "problem", "user", "source"),
    "completion": ("answer", "output", "response", "target", "solution", "reply", "assistant"),
    "chat": ("chat", "dialogue", "dialog", "turns"),
    "text": ("content", "body", "story", "document", "raw_content"),
}
# Pairs of columns that say by themselves what is asked and what is answered.
_ASKED = ("question", "query", "problem", "instruction", "input", "user", "q")
_ANSWERED = ("answer", "response", "output", "solution", "reply", "assistant", "a")
# Columns that may stand beside them, about the row.
_ABOUT = (
    "id",
    "idx",
    "index",
    "uid",
    "uuid",
    "source",
    "url",
    "topic",
    "category",
    "subject",
    "type",
    "level",
    "split",
    "date",
    "author",
    "lang",
    "language",
    "difficulty",
    "unnamed: 0",
    "",
)


def pair_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the columns of a question and its answer, found by their usual names.

    ``None`` if the row has other columns with content: a context or choices may belong to the
    question, and that is not guessed.
    """
    names = [
        name for name, value in row.items() if value is not None and name.lower() not in _ABOUT
    ]
    if len(names) != 2 or not all(isinstance(row[name], str) for name in names):
        return None
    pairs = (names, names[::-1])
    return next(((q, a) for q, a in pairs if q.lower() in _ASKED and a.lower() in _ANSWERED), None)


def column_hint(row: Mapping[str, Any], known: Mapping[str, str], source: str) -> str:
    """Advise on a record of unknown shape: a column mapping if its keys suggest one.

    Args:
        known: columns of the row that are known already, by part ("prompt", "completion", ...).
        source: name of the file.
    """
    if "input_ids" in row:
        return f"data that is already tokenized cannot be read: give the text itself as {SHAPES}"
    found = {
        part: known.get(part) or next((n for n in names if n in row), None)
        for part, names in _LIKE.items()
    }
    prompt, completion = found["prompt"], found["completion"]
    if prompt and completion:
        named = f"name the columns: prompt_feature: {quoted(prompt)}, completion_feature: {quoted(completion)}"
        return named + _unused(row, (prompt, completion))
    for part in ("chat", "text"):
        if column := found[part]:
            return f"name the column: {part}_feature: {quoted(column)}"
    if source.lower().endswith((".csv", ".tsv")) and any(map(_is_prose, row)):
        names = {1: "text", 2: "prompt,completion"}.get(
            len(row), "prompt,completion and a name for each other column"
        )
        return f"the first row seems to be data: write a line above it, {names} (with the file's own separator)"
    return f"a record is {SHAPES}; other names: prompt_feature, completion_feature, chat_feature, text_feature"


def _unused(row: Mapping[str, Any], used: tuple[str, ...]) -> str:
    names = (name for name in row if name.lower() not in used + _ABOUT)
    others = (name for name in names if isinstance(row[name], str) and row[name])
    return next((f'; join "{name}" to it first, or it is ignored' for name in others), "")


def _is_prose(name: str) -> bool:
    return len(name.split()) > 4 or name.endswith((".", "?", "!"))


def nearest(row: Mapping[str, Any], wanted: Mapping[str, str]) -> str:
    """Return a hint with the row's columns, nested ones too, named most like the wanted ones.

    The hint is empty if there are none.
    """
    paths = {key.lower(): key for key in row}
    for name, value in row.items():
        if isinstance(value, dict):
            paths |= {f"{name}.{key}".lower(): f"{name}.{key}" for key in value}
    close = {
        part: get_close_matches(name.lower(), paths, n=1, cutoff=0.4)
        for part, name in wanted.items()
    }
    return ", ".join(
        f"{part}_feature: {quoted(paths[found[0]])}" for part, found in close.items() if found
    )
