"""Spool of accepted rows: a file in order of arrival, with some 70 bytes a row in memory."""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO

import numpy as np

from allhands.data.arrays import Array

# Numbers of a row, with struct's types.
# start: place in the spool file; row_bytes, text_bytes: sizes of its JSON line and of its words.
# name, line: number of its source file, and line there.
# content: hash of the JSON line; words: hash of the words, equal for exact duplicates.
# key: hash of the key by which rows stay in one split.
# length: tokens or characters; given: split that the source gives; preference: goes to the
# preference files.
_FIELDS = {"start": "q", "row_bytes": "q", "text_bytes": "q", "name": "i", "line": "q"} | {
    "content": "Q",
    "words": "Q",
    "key": "Q",
    "length": "q",
    "given": "b",
    "preference": "?",
}
_ROW = struct.Struct("<" + "".join(_FIELDS.values()))
_DTYPE = np.dtype([(n, f"<{c}") for n, c in _FIELDS.items()])


class Spool:
    """Rows that can be added one after the other and then read in any order.

    ``file`` is opened for writing and reading in binary; it is the caller's.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._end, self._rows = file, 0, bytearray()
        self._names: dict[str, int] = {}
        self._table: Any = None

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def add(self, row: bytes, text: str, name: str, line: int, *numbers: int) -> None:
        """Append a row.

        Args:
            row: JSON line with its line end.
            text: the row's words, for the search of duplicates.
            name: the file that the row comes from, as in messages.
            line: line of the row in that file.
            numbers: content, words, key, length, given, preference.
        """
        raw = text.encode("utf-8", "surrogatepass")
        self._file.write(row + raw)
        number = self._names.setdefault(name, len(self._names))
        self._rows += _ROW.pack(self._end, len(row), len(raw), number, line, *numbers)
        self._end += len(row) + len(raw)

    def finish(self) -> None:
        """Make all added rows readable; no row may be added after this."""
        self._file.flush()
        self._order = list(self._names)
        self._table = np.frombuffer(self._rows, dtype=_DTYPE)

    def row(self, index: int) -> bytes:
        """Return the JSON line of a row."""
        return os.pread(
            self._file.fileno(), self._table["row_bytes"][index], self._table["start"][index]
        )

    def text(self, index: int) -> str:
        """Return the words of a row."""
        start, row_bytes, text_bytes = self._table[["start", "row_bytes", "text_bytes"]][index]
        return os.pread(self._file.fileno(), text_bytes, start + row_bytes).decode(
            "utf-8", "surrogatepass"
        )

    def where(self, index: int) -> str:
        """``file:line`` of a row."""
        return f"{self._order[self._table['name'][index]]}:{self._table['line'][index]}"

    def column(self, name: str) -> Array:
        """Return one number of each row, (rows,), by its name: "length", "key", ..."""
        return np.ascontiguousarray(self._table[name])
