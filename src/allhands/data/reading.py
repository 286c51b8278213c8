"""Files of training data as rows: whatever is broken becomes a :class:`Problem` with its line, the rest is read.

JSON Lines, JSON, CSV, TSV, Parquet and plain text, each also with ``.gz``. Every file is streamed: memory holds
some megabytes and one row, and a row has at most ``ReadOptions.max_row_bytes``.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

from allhands.data.jsontext import rows_of_json, rows_of_lines
from allhands.data.records import SHAPES, ColumnNames, Record, parse_record
from allhands.data.rows import BOM, PIECE, Item, Problem, ReadOptions
from allhands.data.tables import rows_of_parquet, rows_of_table, rows_of_text

FileType = Literal["jsonl", "json", "csv", "tsv", "parquet", "text"]
_TYPES: dict[str, FileType] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".txt", ".text", ".md", ".markdown"), "text"),
}
TYPE_NAMES = ".jsonl, .json, .csv, .tsv, .parquet, .txt or .md, or one of them with .gz"

_MAGIC = {
    b"\x1f\x8b": ("compressed with gzip", "rename it so that it ends in .gz, then unpack it: gunzip FILE.gz"),
    b"PK\x03\x04": ("a zip archive", "unpack it first and name the files that were in it"),
    b"PAR1": ("a Parquet file", "let its name end in .parquet, or read it with hf_dataset: {path: parquet, ...}"),
    b"\xff\xfe": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    b"\xfe\xff": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it first: unzstd FILE"),
    b"\xfd7zXZ\x00": ("compressed with xz", "unpack it first: unxz FILE"),
}


def file_type(path: Path) -> FileType | None:
    """What the name of a file promises; None if it is nothing that can be read."""
    name = path.name.lower().removesuffix(".gz")
    return _TYPES.get(Path(name).suffix)


def read_rows(path: Path, options: ReadOptions | None = None, *, name: str | None = None) -> Iterator[Item]:
    """All rows of a file of any supported type, in order. Nothing in a file raises; it becomes a Problem.

    - JSON Lines: one value a line; blank lines, CRLF and byte-order marks are tolerated. A file whose first
      character is ``[`` is read as one JSON array.
    - JSON: an array, one value, or values one after the other. After a broken element reading goes on at the next
      one if the layout of the lines shows where it begins; otherwise the Problem says that the rest was not read.
      NaN and Infinity are read as Python's ``json`` reads them; more than 200 levels of nesting are a Problem.
    - CSV, TSV: the first row names the columns; all values are strings.
    - Parquet: pyarrow's Python values. With ``.gz`` it is unpacked into a temporary file first.
    - Text: ``{"text": ...}`` a document, see :class:`ReadOptions`. Line ends become ``\\n``, those around a document
      are dropped. A bad byte makes the whole document, or the part of one that was cut, a Problem.

    Args:
        name: the file's name in rows and problems; its own without the folder if None.
    """
    kind = file_type(path)
    if kind is None:
        yield Problem(name or path.name, 0, "files of this type cannot be read", f"let the name end in {TYPE_NAMES}")
    else:
        yield from _read(path, kind, options or ReadOptions(), name or path.name)


def read_records(path: Path, columns: ColumnNames, *, name: str | None = None) -> Iterator[Record]:
    """The records of one file of any supported type, in order, streamed; JSON Lines if its name says nothing.

    Args:
        name: the file's name in records and errors; its own without the folder if None.

    Raises:
        DataError: the file cannot be read, is not UTF-8 or not JSON, holds no record, or a record is
            malformed.
    """
    kind = file_type(path) or "jsonl"
    for item in _read(path, kind, ReadOptions(), name or path.name):
        if isinstance(item, Problem):
            raise item.error()
        yield parse_record(item.value, columns, source=item.source, line=item.line)


# Opening


def _read(path: Path, kind: FileType, options: ReadOptions, name: str) -> Iterator[Item]:
    empty = True
    try:
        with path.open("rb") as file, _unpacked(path, file) as inner:
            stream = _Stream(inner)
            for item in _items(file, stream, kind, options, name):
                empty = False
                yield item
            if stream.failure is not None:
                yield _cut_short(stream.failure, path, name)
            elif empty:
                fill = "write text into it, or remove it if there are other files"
                hint = f"write one JSON object a line: {SHAPES}" if kind in ("jsonl", "json") else fill
                yield Problem(name, 0, "the file is empty", hint)
    except OSError as error:
        yield Problem(str(path), 0, f"cannot read the file: {error.strerror or error}", read_hint(error))


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.name.lower().endswith(".gz") else file


def _items(file: IO[bytes], stream: _Stream, kind: FileType, options: ReadOptions, name: str) -> Iterator[Item]:
    buffered = io.BufferedReader(stream, PIECE)
    is_json = kind in ("jsonl", "json")
    head = b"" if kind == "parquet" else buffered.peek(4096)
    for magic, (what, hint) in _MAGIC.items():
        if head.startswith(magic):
            return iter([Problem(name, 0, f"the file is {what}, not {'JSON text' if is_json else 'text'}", hint)])
    if not is_json:
        if kind == "parquet":
            return rows_of_parquet(file if stream.inner is file else buffered, name)
        if kind == "text":
            return rows_of_text(buffered, name, options)
        return rows_of_table(buffered, name, options, "\t" if kind == "tsv" else ",")
    if kind == "json" or head.removeprefix(BOM).lstrip()[:1] == b"[":
        return rows_of_json(buffered, name, options)
    return rows_of_lines(buffered, name, options)


class _Stream(io.RawIOBase):
    """A file's bytes, which end where it cannot be read any further; ``failure`` then says why."""

    def __init__(self, inner: IO[bytes]) -> None:
        self.inner = inner
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        done = 0
        while done < len(buffer) and (data := self._next(len(buffer) - done)):
            buffer[done : done + len(data)] = data
            done += len(data)
        return done

    def _next(self, size: int) -> bytes:
        try:
            # Not read(): where that fails, it forgets what it had read before. (Typed files lack read1, real ones not.)
            return b"" if self.failure else cast(Any, self.inner).read1(size)
        except (OSError, EOFError, zlib.error) as error:
            self.failure = error
            return b""


def _cut_short(error: Exception, path: Path, name: str) -> Problem:
    if isinstance(error, gzip.BadGzipFile) and "Not a gzipped" in str(error):
        return Problem(name, 0, "the name ends in .gz, but the content is not gzip", "take .gz from the name")
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        hint = read_hint(error)
    else:
        hint = f"the file is cut off or damaged: fetch it again; to see how much is whole: gzip -t {path.name}"
    return Problem(name, 0, f"cannot be read to its end, only the rows before were read: {error}", hint)


def read_hint(error: OSError) -> str:
    """What to do about a file that cannot be read."""
    if isinstance(error, PermissionError):
        return "give yourself permission to read it: chmod u+r FILE"
    if isinstance(error, IsADirectoryError):
        return "a file is needed here, this is a folder"
    return "check that the file exists and that the disk is healthy"
