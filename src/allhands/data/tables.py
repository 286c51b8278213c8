"""Tables (CSV, TSV, Parquet, Arrow) and plain text, streamed."""

from __future__ import annotations

import codecs
import csv
import io
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any

from allhands.data.rows import BOM, Item, ReadOptions, Row, RowProblem, lines, not_utf8, with_rest

_PIECE = 1 << 20
_BATCH_BYTES = 8 << 20
# What may stand between the columns of a table, and how much of a file is looked at to find it out.
_DELIMITERS = ",;\t|"
_JUDGED_ROWS = 100
_SEP_LINE = re.compile(r'"?sep=(.)"?\r?\n')
_SEPARATORS = {"auto": re.escape("<|endoftext|>"), "file": None, "line": "\n", "blank-line": r"\n[^\S\n]*\n"}


class _TableLines:
    """Lines of a table for the csv module; what they held since ``begin`` is there to judge an error by."""

    def __init__(self, file: IO[bytes], name: str, limit: int) -> None:
        self.number = 0
        self._lines, self._name, self._limit = lines(file, limit), name, limit
        self.begin()

    def begin(self) -> None:
        """The next line begins a row."""
        self.first, self.quotes, self._size = self.number + 1, 0, 0
        self.text = ""
        self.bad: RowProblem | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw, too_long = next(self._lines)
        self.number += 1
        self.quotes += raw.count(b'"')
        self._size += too_long or len(raw)
        if self._size > self._limit:
            raise csv.Error(f"the row is too long to be read, {self._size:,} bytes")
        text = raw.removeprefix(BOM).decode("utf-8", "surrogateescape")
        self.text = self.text or text
        self.bad = self.bad or not_utf8(text, self._name, self.number)
        if "\0" in text and self.bad is None:
            self.bad = RowProblem(self._name, self.number, "the row has a NUL byte", "is this a text file? remove it")
        return text


@dataclass(frozen=True)
class Separator:
    """What stands between the columns of a table.

    Attributes:
        delimiter: the character.
        certain: whether it is the one that the file's name promises, or the only one that fits all that was looked at.
        lines: lines before the header, as Excel's ``sep=;``.
    """

    delimiter: str
    certain: bool = True
    lines: int = 0


def separator_of(head: bytes, usual: str, *, whole: bool) -> Separator:
    """The separator of a table, from its beginning.

    A separator fits if the first row has two different names or more, and each row after it as many fields. The usual
    one is taken where it fits; another where no third does.

    Args:
        head: the first bytes of the file.
        usual: what the file's name promises.
        whole: whether they are all of it.
    """
    text = head.removeprefix(BOM).decode("utf-8", "surrogateescape")
    if said := _SEP_LINE.match(text):
        return Separator(said[1], said[1] in _DELIMITERS, 1)
    if _fits(text, usual, whole):
        return Separator(usual)
    fitting = [other for other in _DELIMITERS if other != usual and _fits(text, other, whole)]
    if len(fitting) == 1:
        return Separator(fitting[0])
    first = re.sub('"[^"]*"', "", text.partition("\n")[0])
    meant = next((other for other in _DELIMITERS if other in first), None)
    return Separator(usual) if usual in first or meant is None else Separator(meant, False)


def _fits(text: str, delimiter: str, whole: bool) -> bool:
    rows: list[list[str]] = []
    try:
        for cells in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
            if "".join(cells).strip():
                rows.append(cells)
            if len(rows) > _JUDGED_ROWS:
                break
        else:
            # The last row of a part may be cut off.
            rows = rows if whole else rows[:-1]
    except csv.Error as error:
        if whole or "unexpected end" not in str(error):
            return False
    names = {cell.strip() for cell in rows[0]} if rows else set()
    return len(rows) > 1 and len(names) > 1 and "" not in names and {len(row) for row in rows} == {len(names)}


def rows_of_table(file: IO[bytes], name: str, options: ReadOptions, separator: Separator) -> Iterator[Item]:
    """The rows of a CSV or TSV file as objects of strings, by the names in its first row."""
    if not separator.certain:
        yield _unsure(name, separator.delimiter)
        return
    # The module has only one limit for the process, 128 KiB; it is raised, never lowered.
    csv.field_size_limit(max(csv.field_size_limit(), options.max_row_bytes))
    table = _TableLines(file, name, options.max_row_bytes)
    delimiter = separator.delimiter
    for _ in range(separator.lines):
        next(table, None)
    reader = csv.reader(table, delimiter=delimiter, strict=True)
    header: list[str] = []
    empty = True
    while True:
        table.begin()
        try:
            cells = next(reader, None)
        except csv.Error as error:
            problem, empty = _table_problem(table, name, error), False
            # With an odd number of quotes nobody knows whether the next line is inside a field.
            if table.quotes % 2 or not header:
                yield with_rest(problem)
                return
            yield problem
            continue
        if cells is None:
            if header and empty:
                yield RowProblem(
                    name, 0, "the file has a header and no rows", "add rows below it, or leave the file out"
                )
            return
        if table.bad is None and len(cells) <= 1 and not "".join(cells).strip():
            continue
        if header:
            empty = False
            yield table.bad or _table_item(cells, header, name, table.first)
            continue
        header = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, start=1)]
        if problem := table.bad or _twice(header, name, table.first):
            yield with_rest(problem)
            return


def _table_problem(table: _TableLines, name: str, error: csv.Error) -> RowProblem:
    several = f" (lines {table.first} to {table.number})" if table.number > table.first else ""
    hint = 'put a field with separators, quotes or line ends in "...", and write a quote in it as ""'
    return RowProblem(name, table.first, f"not a row of a table: {error}{several}", hint)


def _unsure(name: str, delimiter: str) -> RowProblem:
    shown = "a tab" if delimiter == "\t" else delimiter
    if delimiter not in _DELIMITERS:
        return RowProblem(name, 1, f"the separator {shown} is none that is read", "save it with commas")
    hint = f'save it with commas; or give each row as many fields, those with {shown} in them in "..."; '
    hint += 'if the first row is one name, put it in "..."'
    return RowProblem(name, 0, f"the separator seems to be {shown}, which is not certain", hint)


def _table_item(cells: list[str], header: list[str], name: str, line: int) -> Item:
    if len(cells) == len(header):
        return Row(dict(zip(header, cells, strict=True)), name, line)
    message = f"ragged row: {len(cells)} fields where the header has {len(header)}"
    return RowProblem(name, line, message, 'put a field that has separators in it in "..."')


def _twice(names: Sequence[str], source: str, line: int) -> RowProblem | None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    message = f"unusable columns: two are called {twice[0]!r}" if twice else ""
    return RowProblem(source, line, message, "rename one of them") if twice else None


def rows_of_columns(file: IO[bytes], head: bytes, name: str) -> Iterator[Item]:
    """The rows of a Parquet or Arrow file, in batches of about 8 MB.

    An Arrow file may be a stream (what ``datasets`` saves), a file or Feather.

    Args:
        head: how the file begins; b"PAR1" for Parquet.
    """
    kind = "Parquet" if head.startswith(b"PAR1") else "Arrow"
    row = 0
    try:
        with _seekable(file) as inner:
            for batch in _batches(inner, head):
                if problem := _twice(batch.schema.names, name, 0):
                    yield problem
                    return
                size = max(1, min(4096, _BATCH_BYTES * len(batch) // max(1, batch.nbytes)))
                for start in range(0, len(batch), size):
                    part = batch.slice(start, size)
                    yield from _rows_of_batch(part, name, row)
                    row += len(part)
    except ImportError:
        yield RowProblem(name, 0, f"{kind} files need pyarrow", "pip install pyarrow")
    except Exception as error:  # pyarrow and what it calls raise many kinds
        message = f"not readable as {kind} at row {row + 1}: {error}"
        hint = f"the file is cut off or damaged, or no {kind} file: fetch it again"
        yield with_rest(RowProblem(name, row + 1 if row else 0, message, hint))


def _batches(file: IO[bytes], head: bytes) -> Iterator[Any]:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]  # slow to import

    if head.startswith(b"PAR1"):
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

        with pq.ParquetFile(file, pre_buffer=False, buffer_size=_PIECE) as table:
            groups = [table.metadata.row_group(group) for group in range(table.num_row_groups)]
            num_bytes = max(1, sum(group.total_byte_size for group in groups))
            size = max(1, min(4096, _BATCH_BYTES * table.metadata.num_rows // num_bytes))
            yield from table.iter_batches(batch_size=size, use_threads=False)
    elif head.startswith(b"FEA1"):
        from pyarrow import feather  # pyright: ignore[reportMissingImports]

        yield from feather.read_table(file).to_batches()
    else:
        opened = pa.ipc.open_file(file) if head.startswith(b"ARROW1") else pa.ipc.open_stream(file)
        with opened as reader:
            numbers = range(getattr(reader, "num_record_batches", 0))
            yield from map(reader.get_batch, numbers) if head.startswith(b"ARROW1") else reader


def _seekable(file: IO[bytes]) -> IO[bytes]:
    if file.seekable():
        return file
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    shutil.copyfileobj(file, copy, _PIECE)
    copy.seek(0)
    return copy


def _rows_of_batch(batch: Any, name: str, before: int) -> Iterator[Item]:
    try:
        values = batch.to_pylist()
    except Exception:  # one bad value; found one row at a time below
        values = None
    for index in range(len(batch)):
        try:
            value = values[index] if values is not None else batch.slice(index, 1).to_pylist()[0]
        except Exception as error:
            message = f"row {before + index + 1} has a value that Python cannot hold: {error}"
            yield RowProblem(name, before + index + 1, message, "repair or drop the column")
        else:
            yield Row(value, name, before + index + 1)


def rows_of_text(file: IO[bytes], name: str, options: ReadOptions) -> Iterator[Item]:
    """The documents of a plain text file."""
    by = options.documents
    escaped = re.escape(by.replace("\\n", "\n").replace("\\t", "\t"))
    pattern = _SEPARATORS.get(by, escaped)
    separator = re.compile(pattern) if pattern else None
    for line, text in _documents(_text_pieces(file), separator, options.max_document_chars):
        document = text.strip("\n")
        if not document.strip():
            continue
        line += len(text) - len(text.lstrip("\n"))
        if "\0" in document:
            hint = "is this a text file? remove the byte"
            yield RowProblem(name, line + document[: document.index("\0")].count("\n"), "a NUL byte in the text", hint)
        else:
            yield not_utf8(document, name, line) or Row({"text": document}, name, line)


def _text_pieces(file: IO[bytes]) -> Iterator[str]:
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("surrogateescape"), translate=True)
    while data := file.read(_PIECE):
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


def _documents(pieces: Iterator[str], separator: re.Pattern[str] | None, size: int) -> Iterator[tuple[int, str]]:
    """(line, text) of every document, those of over twice ``size`` characters in parts of at most ``size``."""
    text, line = "", 1
    for piece in chain(pieces, [None]):
        text, start = text + (piece or ""), 0
        while start < len(text):
            match = separator.search(text, start) if separator else None
            end, after = match.span() if match else (len(text), len(text))
            if end - start > 2 * size:
                end = after = _cut(text, start, size)
            elif match is None and piece is not None:
                break
            yield line, text[start:end]
            line, start = line + text.count("\n", start, after), after
        text = text[start:]


def _cut(text: str, start: int, size: int) -> int:
    """Where the part that begins at ``start`` ends: after a paragraph, a line, a word, or anywhere."""
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, start + size // 2, start + size)
        if found >= 0:
            return found + len(mark)
    return start + size
