"""Files of training data as rows: broken parts become a :class:`RowProblem` with a line, the other
rows are read.

JSON Lines, JSON, CSV, TSV, Parquet, Arrow and plain text, each also with ``.gz``, ``.bz2``, ``.xz``
or ``.zst``. Every file is streamed: memory holds some megabytes and one row, and a row has at most
``ReadOptions.max_row_bytes``.
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
from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.rows import BOM, NAMES_OF_SPLITS, PIECE, Item, ReadOptions, RowProblem
from allhands.data.tables import (
    Separator,
    rows_of_columns,
    rows_of_table,
    rows_of_text,
    separator_of,
)
from allhands.data.values import SHAPES
from allhands.errors import DataError

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
_PACKED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
TYPE_NAMES = ".jsonl, .json, .csv, .tsv, .parquet, .arrow, .txt or .md, or one of them with .gz, .bz2, .xz or .zst"
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
# Advice on files of other types, by the ends of their names.
_WAYS = {
    (
        ".xlsx",
        ".xlsm",
        ".xlsb",
        ".xls",
        ".ods",
    ): "save the sheet as CSV, in the program that opens it",
    (
        ".docx",
        ".odt",
        ".epub",
        ".html",
        ".htm",
        ".rtf",
        ".tex",
    ): "write its text out: pandoc -t plain FILE -o NEW.txt",
    (".doc",): "write its text out: soffice --headless --convert-to txt:Text FILE",
    (".pdf",): "write its text out: pdftotext FILE NEW.txt",
    (".yaml", ".yml"): "write it as JSON",
    (
        ".pkl",
        ".pickle",
    ): "a pickle may run code when it is read: where you trust it, write it out as Parquet",
    (".zip", ".tar", ".tgz", ".7z", ".rar"): "unpack it, and name the files that were in it",
    (
        ".db",
        ".sqlite",
        ".sqlite3",
    ): "write the table as CSV: sqlite3 -header -csv FILE 'SELECT * FROM TABLE' > NEW.csv",
    (
        ".orc",
        ".avro",
        ".h5",
        ".hdf5",
        ".tfrecord",
    ): "write it as Parquet with the library that it is from",
}
_UTF16 = ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW")
_MAGIC = {
    b"\x1f\x8b": ("compressed with gzip", "let its name end in .gz"),
    b"PK\x03\x04": (
        "a zip archive, as spreadsheets and documents of office programs are",
        "unpack it, or export it",
    ),
    b"PAR1": (
        "a Parquet file",
        "let its name end in .parquet, or read it with hf_dataset: {path: parquet, ...}",
    ),
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"ARROW1": ("an Arrow file", "let its name end in .arrow"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "let its name end in .zst"),
    b"\xfd7zXZ\x00": ("compressed with xz", "let its name end in .xz"),
    b"BZh": ("compressed with bzip2", "let its name end in .bz2"),
    b"%PDF-": ("a PDF document", _WAYS[(".pdf",)]),
    b"\xd0\xcf\x11\xe0": ("an old document of an office program", "save it as CSV or text"),
}


def file_type(path: Path) -> FileType | None:
    """Return the type of a file by its name; None if files of its type cannot be read."""
    return _TYPES.get(Path(unpacked_name(path)).suffix)


def unpacked_name(path: Path) -> str:
    """Return the name of a file in lower case, without the ending of a compressed file."""
    name = path.name.lower()
    return name.removesuffix(next(filter(name.endswith, _PACKED), ""))


def require_type(path: Path, where: str) -> None:
    """Refuse a file whose type cannot be read (DataError)."""
    if file_type(path) is None:
        raise DataError(
            "files of this type cannot be read",
            code="file-type-unsupported",
            where=where,
            hint=unread_hint(path),
        )


def unread_hint(path: Path) -> str:
    """Advise on a file whose type is not read."""
    name = path.name.lower()
    return next(
        (way for ends, way in _WAYS.items() if name.endswith(ends)),
        f"let the name end in {TYPE_NAMES}",
    )


def read_rows(
    path: Path, options: ReadOptions | None = None, *, name: str | None = None
) -> Iterator[Item]:
    """Yield all rows of a file of any supported type, in order.

    Faults of the file or its rows are yielded as problems, not raised.

    - JSON Lines: one value a line; blank lines, CRLF and byte-order marks are tolerated. A file
      whose first character is ``[`` is read as one JSON array.
    - JSON: an array, one value, or values one after the other. After a broken element reading goes
      on at the next one if the layout of the lines shows where it begins; otherwise the problem
      says that the rest was not read. NaN and Infinity are read as Python's ``json`` reads them;
      more than 200 levels of nesting are a problem. An object may hold its rows under a key, see
      :func:`rows_key`.
    - CSV, TSV: the first row names the columns; all values are strings. Another separator than the
      comma or the tab is used where it is certain, see :func:`separator_of`.
    - Parquet, Arrow: pyarrow's Python values. A compressed file is unpacked into a temporary file
      first.
    - Text: ``{"text": ...}`` for each document, see :class:`ReadOptions`. Line ends become ``\\n``,
      those around a document are dropped. A bad byte makes the whole document, or a part of a long
      one, a problem.

    Args:
        name: the file's name in rows and problems; None: its name without the folder.
    """
    kind = file_type(path)
    if kind is None:
        yield RowProblem(
            name or path.name,
            0,
            "files of this type cannot be read",
            unread_hint(path),
            code="file-type-unsupported",
        )
    else:
        yield from _read(path, kind, options or ReadOptions(), name or path.name)


def read_records(path: Path, columns: ColumnNames, *, name: str | None = None) -> Iterator[Record]:
    """Yield the records of one file of any supported type, in order, streamed.

    A file whose name has no known ending is read as JSON Lines.

    Args:
        name: the file's name in records and errors; None: its name without the folder.

    Raises:
        DataError: the file cannot be read, is not UTF-8 or not JSON, holds no record, or a record
            is malformed.
    """
    for item in _read(path, file_type(path) or "jsonl", ReadOptions(), name or path.name):
        if isinstance(item, RowProblem):
            raise item.error()
        yield parse_record(item.value, columns, source=item.source, line=item.line)


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
                hint = (
                    f"write one JSON object a line: {SHAPES}" if kind in ("jsonl", "json") else fill
                )
                yield RowProblem(name, 0, "the file is empty", hint, code="data-empty")
    except OSError as error:
        yield RowProblem(
            str(path),
            0,
            f"cannot read the file: {error.strerror or error}",
            read_hint(error),
            code="data-unreadable",
        )


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow as pa  # pyright: ignore[reportMissingImports]  # slow to import

        return cast(IO[bytes], pa.CompressedInputStream(file, "zstd"))
    opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix)
    return file if opened is None else cast(IO[bytes], opened(file))


def _items(
    file: IO[bytes], stream: _Stream, kind: FileType, options: ReadOptions, name: str
) -> Iterator[Item]:
    buffered = io.BufferedReader(stream, PIECE)
    if kind in ("parquet", "arrow"):
        head = b"PAR1" if kind == "parquet" else buffered.peek(PIECE)[:6]
        if stream.inner is file:
            file.seek(0)  # behind what was looked at
        return rows_of_columns(file if stream.inner is file else buffered, head, name)
    head = buffered.peek(PIECE)
    for magic, (what, hint) in _MAGIC.items():
        if head.startswith(magic):
            text = "JSON text" if kind in ("jsonl", "json") else "text"
            return iter(
                [
                    RowProblem(
                        name, 0, f"the file is {what}, not {text}", hint, code="file-not-its-type"
                    )
                ]
            )
    if kind == "text":
        return rows_of_text(buffered, name, options)
    if kind in ("csv", "tsv"):
        return rows_of_table(buffered, name, options, _separator(head, kind))
    first = head.removeprefix(BOM).lstrip()[:1]
    if kind == "json" or first == b"[":
        return rows_of_json(buffered, name, options, nested=rows_key(head) is not None)
    return rows_of_lines(buffered, name, options)


def _separator(head: bytes, kind: FileType) -> Separator:
    return separator_of(head, "\t" if kind == "tsv" else ",", whole=len(head) < PIECE)


def notes_of(path: Path) -> tuple[str, ...]:
    """Return notes on how a file is read, where its name does not say it; none for an unreadable
    file.
    """
    kind = file_type(path)
    if kind == "json" and (key := rows_key(_head(path))) is not None:
        return (f'its rows are those under the key "{key}"',)
    if kind not in ("csv", "tsv"):
        return ()
    found = _separator(_head(path), kind)
    if not found.certain or found.delimiter == ("\t" if kind == "tsv" else ","):
        return ()
    shown = {"\t": "a tab", ",": "a comma"}.get(found.delimiter, found.delimiter)
    return (f"the columns are separated by {shown}, and it was read so",)


def splits_in(path: Path) -> tuple[str, ...]:
    """Return the keys of a JSON file that holds several splits; () for other files.

    Such a file is an object like ``{"train": [...], "test": [...]}``.
    """
    key = rows_key(_head(path)) if file_type(path) == "json" else None
    if key is None or key.lower() not in NAMES_OF_SPLITS:
        return ()
    try:
        with path.open("rb") as file, _unpacked(path, file) as inner:
            return keys_with_rows(inner)
    except _UNREADABLE:
        return ()  # the error is reported when the file is read


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file, _unpacked(path, file) as inner:
            return io.BufferedReader(_Stream(inner), PIECE).peek(PIECE)
    except (OSError, ImportError):
        return b""


class _Stream(io.RawIOBase):
    """Stream of a file's bytes that ends at a read error; ``failure`` then has the error."""

    def __init__(self, inner: IO[bytes]) -> None:
        self.inner = inner
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        done = 0
        try:
            # read1(), since read() loses the bytes that it has read before an error. (The type
            # IO[bytes] has no read1, but all real files have.)
            while not self.failure and (data := cast(Any, self.inner).read1(len(buffer) - done)):
                buffer[done : done + len(data)] = data
                done += len(data)
        except _UNREADABLE as error:
            self.failure = error
        return done


def _cut_short(error: Exception, path: Path, name: str) -> RowProblem:
    suffix = path.suffix.lower()
    kind = _PACKED.get(suffix, "")
    others = ("Not a gzipped", "Invalid data stream", "format not supported", "Unknown frame")
    if any(words in str(error) for words in others):
        return RowProblem(
            name,
            0,
            f"the name ends in {suffix}, but the content is not {kind}",
            f"take {suffix} away",
            code="file-not-its-type",
        )
    hint = f"the file is cut off or damaged: fetch it again; to see how much is whole: {kind} -t {path.name}"
    if isinstance(error, OSError) and error.errno is not None:
        hint = read_hint(error)
    return RowProblem(
        name,
        0,
        f"cannot be read to its end; only the rows before were read: {error}",
        hint,
        code="file-damaged",
    )


def read_hint(error: OSError) -> str:
    """Advise on a file that cannot be read."""
    if isinstance(error, PermissionError):
        return "give yourself permission to read it: chmod u+r FILE"
    if isinstance(error, IsADirectoryError):
        return "a file is needed here, this is a folder"
    return "check that the file exists and that the disk is healthy"
