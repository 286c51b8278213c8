"""Files of training data as rows: whatever is broken becomes a :class:`RowProblem` with its line, the rest is read.

JSON Lines, JSON, CSV, TSV, Parquet, Arrow and plain text, each also with ``.gz``, ``.bz2``, ``.xz`` or ``.zst``. Every
file is streamed: memory holds some megabytes and one row, and a row has at most ``ReadOptions.max_row_bytes``.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

from allhands.data.jsontext import keys_with_rows, rows_key, rows_of_json, rows_of_lines
from allhands.data.other_types import true_kind, way_from
from allhands.data.records import SHAPES, ColumnNames, Record, parse_record
from allhands.data.rows import BOM, NAMES_OF_SPLITS, PIECE, Item, ReadOptions, RowProblem
from allhands.data.tables import Separator, rows_of_columns, rows_of_table, rows_of_text, separator_of

FileType = Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow", "text"]
_TYPES: dict[str, FileType] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".txt", ".text", ".md", ".markdown"), "text"),
}
_PACKED = (".gz", ".bz2", ".xz", ".zst")
TYPE_NAMES = ".jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt or .md, or one of them with .gz, .bz2, .xz or .zst"
# Characters of a table or a JSON document that tell how it is to be read.
_HEAD_BYTES = PIECE

_MAGIC = {
    b"\x1f\x8b": ("compressed with gzip", "rename it so that it ends in .gz, then unpack it: gunzip FILE.gz"),
    b"PK\x03\x04": ("a zip archive", "unpack it first and name the files that were in it"),
    b"PAR1": ("a Parquet file", "let its name end in .parquet, or read it with hf_dataset: {path: parquet, ...}"),
    b"\xff\xfe": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    b"\xfe\xff": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    b"ARROW1": ("an Arrow file", "let its name end in .arrow"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "let its name end in .zst, or unpack it: unzstd FILE"),
    b"\xfd7zXZ\x00": ("compressed with xz", "let its name end in .xz, or unpack it: unxz FILE"),
    b"%PDF-": ("a PDF document", ""),
    b"\xd0\xcf\x11\xe0": ("an old document of an office program", ""),
    b"BZh": ("compressed with bzip2", "let its name end in .bz2, or unpack it: bunzip2 FILE"),
}


def file_type(path: Path) -> FileType | None:
    """What the name of a file promises; None if it is nothing that can be read."""
    return _TYPES.get(Path(unpacked_name(path)).suffix)


def unpacked_name(path: Path) -> str:
    """The name of a file in small letters, without what says that it is compressed."""
    name = path.name.lower()
    return name.removesuffix(next(filter(name.endswith, _PACKED), ""))


def unread_hint(path: Path) -> str:
    """What to do about a file whose type is not read."""
    return way_from(path) or f"let the name end in {TYPE_NAMES}"


def read_rows(path: Path, options: ReadOptions | None = None, *, name: str | None = None) -> Iterator[Item]:
    """All rows of a file of any supported type, in order. Nothing in a file raises; it becomes a Problem.

    - JSON Lines: one value a line; blank lines, CRLF and byte-order marks are tolerated. A file whose first
      character is ``[`` is read as one JSON array.
    - JSON: an array, one value, or values one after the other. After a broken element reading goes on at the next
      one if the layout of the lines shows where it begins; otherwise the Problem says that the rest was not read.
      NaN and Infinity are read as Python's ``json`` reads them; more than 200 levels of nesting are a Problem.
      The rows of an object may stand under a key of it, see :func:`rows_key`.
    - CSV, TSV: the first row names the columns; all values are strings. Another separator than the comma or the tab is
      used where it is certain, see :func:`separator_of`.
    - Parquet, Arrow: pyarrow's Python values. With ``.gz`` it is unpacked into a temporary file first.
    - Text: ``{"text": ...}`` a document, see :class:`ReadOptions`. Line ends become ``\\n``, those around a document
      are dropped. A bad byte makes the whole document, or the part of one that was cut, a Problem.

    Args:
        name: the file's name in rows and problems; its own without the folder if None.
    """
    kind = file_type(path)
    if kind is None:
        yield RowProblem(name or path.name, 0, "files of this type cannot be read", unread_hint(path))
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
        if isinstance(item, RowProblem):
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
                yield RowProblem(name, 0, "the file is empty", hint)
    except OSError as error:
        yield RowProblem(str(path), 0, f"cannot read the file: {error.strerror or error}", read_hint(error))


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], gzip.GzipFile(fileobj=file))
        case ".bz2":
            return cast(IO[bytes], bz2.BZ2File(file))
        case ".xz":
            return cast(IO[bytes], lzma.LZMAFile(file))
        case ".zst":
            import pyarrow as pa  # pyright: ignore[reportMissingImports]  # slow to import

            return cast(IO[bytes], pa.CompressedInputStream(file, "zstd"))
        case _:
            return file


def _items(file: IO[bytes], stream: _Stream, kind: FileType, options: ReadOptions, name: str) -> Iterator[Item]:
    buffered = io.BufferedReader(stream, _HEAD_BYTES)
    is_json = kind in ("jsonl", "json")
    head = b"" if kind == "parquet" else buffered.peek(_HEAD_BYTES)
    for magic, (what, hint) in _MAGIC.items() if kind != "arrow" else ():
        if head.startswith(magic):
            what, hint = true_kind(Path(name), file) or (what, hint)
            return iter([RowProblem(name, 0, f"the file is {what}, not {'JSON text' if is_json else 'text'}", hint)])
    if kind in ("parquet", "arrow"):
        whole = file if stream.inner is file else buffered
        if whole is file:
            file.seek(0)  # behind what was looked at
        return rows_of_columns(whole, b"PAR1" if kind == "parquet" else head[:6], name)
    if kind == "text":
        return rows_of_text(buffered, name, options)
    if not is_json:
        return rows_of_table(buffered, name, options, _separator(head, kind))
    first = head.removeprefix(BOM).lstrip()[:1]
    if kind == "json" or first == b"[":
        nested = first == b"{" and rows_key(head) is not None
        return rows_of_json(buffered, name, options, nested=nested, only=options.only)
    return rows_of_lines(buffered, name, options)


def _separator(head: bytes, kind: FileType) -> Separator:
    return separator_of(head, "\t" if kind == "tsv" else ",", whole=len(head) < _HEAD_BYTES)


def notes_of(path: Path) -> tuple[str, ...]:
    """How a file is read where its name does not say it; nothing for one that cannot be read."""
    kind = file_type(path)
    if kind not in ("csv", "tsv", "json"):
        return ()
    head = _head(path)
    if kind == "json":
        key = rows_key(head)
        return () if key is None else (f'its rows are those under the key "{key}"',)
    found = _separator(head, kind)
    if not found.certain or found.delimiter == ("\t" if kind == "tsv" else ","):
        return ()
    shown = {"\t": "a tab", ",": "a comma"}.get(found.delimiter, found.delimiter)
    return (f"the columns are separated by {shown}, which is how it was read",)


def splits_in(path: Path) -> tuple[str, ...]:
    """The keys of a JSON object that holds splits of a data set, ``{"train": [...], "test": [...]}``; () for others."""
    key = rows_key(_head(path)) if file_type(path) == "json" else None
    if key is None or key.lower() not in NAMES_OF_SPLITS:
        return ()
    try:
        with path.open("rb") as file, _unpacked(path, file) as inner:
            return keys_with_rows(inner)
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return ()  # told when it is read


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file, _unpacked(path, file) as inner:
            return io.BufferedReader(_Stream(inner), _HEAD_BYTES).peek(_HEAD_BYTES)
    except (OSError, ImportError):
        return b""


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
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            self.failure = error
            return b""


def _cut_short(error: Exception, path: Path, name: str) -> RowProblem:
    suffix = path.suffix.lower()
    other = isinstance(error, gzip.BadGzipFile) and "Not a gzipped" in str(error)
    other |= (
        "Invalid data stream" in str(error) or "format not supported" in str(error) or "Unknown frame" in str(error)
    )
    if other:
        kind = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}.get(suffix, "zstd")
        hint = f"take {suffix} from the name"
        return RowProblem(name, 0, f"the name ends in {suffix}, but the content is not {kind}", hint)
    if isinstance(error, OSError) and error.errno is not None:
        hint = read_hint(error)
    else:
        hint = f"the file is cut off or damaged: fetch it again; to see how much is whole: {_TESTS[suffix]} {path.name}"
    return RowProblem(name, 0, f"cannot be read to its end, only the rows before were read: {error}", hint)


_TESTS = {".gz": "gzip -t", ".bz2": "bzip2 -t", ".xz": "xz -t", ".zst": "zstd -t"}


def read_hint(error: OSError) -> str:
    """What to do about a file that cannot be read."""
    if isinstance(error, PermissionError):
        return "give yourself permission to read it: chmod u+r FILE"
    if isinstance(error, IsADirectoryError):
        return "a file is needed here, this is a folder"
    return "check that the file exists and that the disk is healthy"
