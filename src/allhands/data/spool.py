"""Accepted rows on disk, in the order they came, with some 70 bytes of numbers each in memory."""

from __future__ import annotations

import os
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SpoolEntry:
    """What is kept of an accepted row besides its bytes.

    Attributes:
        name: the file it comes from, as in messages; ``line`` its line there.
        source: number of the source on the command line that it belongs to.
        content: hash of the row as it is written.
        words: hash of its words; equal for exact duplicates.
        key: hash of what holds rows together in one split.
        given: number of the split that its source gives.
        is_preference: whether it goes to the preference files.
        length: tokens or characters.
    """

    name: str
    line: int
    source: int
    content: int
    words: int
    key: int
    given: int
    is_preference: bool
    length: int


class Spool:
    """Rows that can be added one after the other and then read in any order.

    ``file`` is opened for writing and reading in binary; it is the caller's.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = 0
        self._names: dict[str, int] = {}
        self._order: list[str] = []
        self._offset, self._row_bytes, self._text_bytes = array("q"), array("q"), array("q")
        self._name, self._line, self._source = array("i"), array("q"), array("i")
        self._content, self._words, self._key = array("Q"), array("Q"), array("Q")
        self._length, self._given, self._preference = array("q"), array("b"), array("b")

    def __len__(self) -> int:
        return len(self._offset)

    def add(self, row: bytes, text: str, entry: SpoolEntry) -> None:
        """Append ``row``, a JSON line with its line end, and ``text``, its words for the search of duplicates."""
        raw = text.encode("utf-8", "surrogatepass")
        self._file.write(row)
        self._file.write(raw)
        self._offset.append(self._end)
        self._row_bytes.append(len(row))
        self._text_bytes.append(len(raw))
        self._end += len(row) + len(raw)
        if entry.name not in self._names:
            self._names[entry.name] = len(self._order)
            self._order.append(entry.name)
        self._name.append(self._names[entry.name])
        self._line.append(entry.line)
        self._source.append(entry.source)
        self._content.append(entry.content)
        self._words.append(entry.words)
        self._key.append(entry.key)
        self._length.append(entry.length)
        self._given.append(entry.given)
        self._preference.append(entry.is_preference)

    def finish(self) -> None:
        """Make everything that was added readable."""
        self._file.flush()

    def row(self, index: int) -> bytes:
        """The JSON line of a row."""
        return os.pread(self._file.fileno(), self._row_bytes[index], self._offset[index])

    def text(self, index: int) -> str:
        """The words of a row."""
        start = self._offset[index] + self._row_bytes[index]
        return os.pread(self._file.fileno(), self._text_bytes[index], start).decode("utf-8", "surrogatepass")

    def where(self, index: int) -> str:
        """``file:line`` of a row."""
        return f"{self._order[self._name[index]]}:{self._line[index]}"

    @property
    def sources(self) -> NDArray[np.int32]:
        """(rows,) number of the source."""
        return np.array(self._source, dtype=np.int32)

    @property
    def contents(self) -> NDArray[np.uint64]:
        """(rows,) hash of the content."""
        return np.array(self._content, dtype=np.uint64)

    @property
    def words(self) -> NDArray[np.uint64]:
        """(rows,) hash of the words."""
        return np.array(self._words, dtype=np.uint64)

    @property
    def keys(self) -> NDArray[np.uint64]:
        """(rows,) hash of the key."""
        return np.array(self._key, dtype=np.uint64)

    @property
    def given(self) -> NDArray[np.int8]:
        """(rows,) split that the source gives."""
        return np.array(self._given, dtype=np.int8)

    @property
    def preferences(self) -> NDArray[np.bool_]:
        """(rows,) whether it is a preference or a rating."""
        return np.array(self._preference, dtype=np.bool_)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(rows,) tokens or characters."""
        return np.array(self._length, dtype=np.int64)


def open_spool(directory: Path) -> BinaryIO:
    """A file of ``directory`` that has no name there, so that nothing of it can be left behind."""
    return tempfile.TemporaryFile(dir=directory)  # type: ignore[return-value]
