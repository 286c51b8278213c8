"""Rows of training data as they are read, and helpers for the readers of all file types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any

from allhands.data.values import SHORTEN
from allhands.errors import ConfigError, DataError

BOM = b"\xef\xbb\xbf"
PIECE = 1 << 16
# Names of splits in files and folders.
NAMES_OF_SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
}
_MAX_DEPTH = 200
_BAD_BYTE = re.compile("[\udc80-\udcff]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")


@dataclass(frozen=True)
class ReadOptions:
    """Options of reading files.

    Attributes:
        documents: how a plain text file is cut into documents: "file" (one document), "line",
            "blank-line" (paragraphs), any other string that separates documents (``\\n`` and
            ``\\t`` stand for line end and tab), or "auto": at ``<|endoftext|>`` if that occurs,
            else one document.
        only: key of the one split to read from a JSON object that holds several.
        max_row_bytes: a longer line, JSON value or CSV row is a problem.
        max_document_chars: a longer document is cut, at the end of a paragraph if there is one,
            into rows of about this many characters.

    Raises:
        ConfigError: the separator is empty.
    """

    documents: str = "auto"
    only: str | None = None
    max_row_bytes: int = 64 << 20
    max_document_chars: int = 1 << 20

    def __post_init__(self) -> None:
        if not self.documents:
            raise ConfigError(
                "the separator is empty",
                code="value-empty",
                where="--documents",
                hint="use file, line, blank-line or the string between two documents",
            )


@dataclass(frozen=True)
class Row:
    """One value as it was read. ``line``, from 1, is its first line; in a Parquet file, its row."""

    value: Any
    source: str
    line: int


@dataclass(frozen=True)
class RowProblem:
    """A row that could not be read; with ``is_rest``, the file from there on; line 0: all of it."""

    source: str
    line: int
    message: str
    hint: str | None = None
    is_rest: bool = False
    code: str = field(kw_only=True)

    @property
    def where(self) -> str:
        """``file:line``, or the file."""
        return f"{self.source}:{self.line}" if self.line else self.source

    def error(self) -> DataError:
        """Return the problem as an error, to be raised."""
        return DataError(self.message, code=self.code, where=self.where, hint=self.hint)


Item = Row | RowProblem


def lines(file: IO[bytes], limit: int) -> Iterator[tuple[bytes, int]]:
    """Yield (line with its end, 0) for each line of at most ``limit`` bytes.

    A longer line gives (its double quotes only, its number of bytes); with the quotes a reader
    still knows whether a quoted field is open.
    """
    while raw := file.readline(limit + 1):
        if len(raw) <= limit or raw.endswith(b"\n"):
            yield raw, 0
            continue
        size, quotes = len(raw), raw.count(b'"')
        while not raw.endswith(b"\n") and (raw := file.readline(PIECE)):
            size, quotes = size + len(raw), quotes + raw.count(b'"')
        yield b'"' * quotes, size


def not_utf8(text: str, name: str, line: int, start: int = 0) -> RowProblem | None:
    """Return a problem if ``text[start:]``, decoded with "surrogateescape", has a bad byte.

    ``line`` is the line number at ``start``.
    """
    found = None if text.isascii() else _BAD_BYTE.search(text, start)
    if found is None:
        return None
    place = found.start()
    column = (
        len(text[text.rfind("\n", 0, place) + 1 : place].encode("utf-8", "surrogateescape")) + 1
    )
    message = f"not UTF-8: byte 0x{ord(found[0]) - 0xDC00:02x} at byte {column} of the line"
    # CP1252 has the curly quotes that Windows writes where Latin-1 has control characters.
    hint = "convert the file; from Windows, for example: iconv -f CP1252 -t UTF-8 OLD > NEW"
    if _CONTROL.search(text, start):
        hint = "this does not look like text: look at the file, and name another"
    return RowProblem(
        name, line + text.count("\n", start, place), message, hint, code="text-not-utf8"
    )


def checked_value(value: Any, text: str, name: str, line: int) -> Item:
    """Return the row of a JSON value read from ``text``; a problem if it is nested too deeply."""
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        level: list[Any] = [value]
        for _ in range(_MAX_DEPTH + 1):
            parts = [each.values() if isinstance(each, dict) else each for each in level]  # pyright: ignore[reportUnknownVariableType]
            level = [
                inner
                for part in parts
                if not isinstance(part, str | int | float | None)
                for inner in part
            ]
        if level:
            return RowProblem(
                name,
                line,
                f"not usable JSON: more than {_MAX_DEPTH} levels of nesting",
                SHORTEN,
                code="json-invalid",
            )
    return Row(value, name, line)


def with_rest(problem: RowProblem) -> RowProblem:
    """Return the problem with the addition that the rest of the file was not read."""
    if problem.is_rest:
        return problem
    what, _, why = problem.message.partition(":")
    return replace(
        problem,
        message=f"{what}, and the rest of the file from here was not read:{why}",
        is_rest=True,
    )
