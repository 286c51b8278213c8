"""Accepted rows on disk, in the order they came, with some 70 bytes of numbers each in memory."""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO

import numpy as np

from allhands.data.arrays import Array

# Where a row begins, bytes of its JSON and of its words; number of its file, line; hashes of the
# row as it is written, of its words (equal for exact duplicates), of what holds rows together in
# one split; tokens or characters; number of the split that its source gives; whether it goes to the
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
        """Append ``row``, a JSON line with its line end, and ``text``, its words for the search of
        duplicates.

        Args:
            name: the file it comes from, as in messages.
            numbers: content, words, key, length, given, preference.
        """
        raw = text.encode("utf-8", "surrogatepass")
        self._file.write(row + raw)
        number = self._names.setdefault(name, len(self._names))
        self._rows += _ROW.pack(self._end, len(row), len(raw), number, line, *numbers)
        self._end += len(row) + len(raw)

    def finish(self) -> None:
        """Make everything that was added readable."""
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
        """(rows,) one of the numbers of each row, by its name in :meth:`add`."""
        return np.ascontiguousarray(self._table[name])
