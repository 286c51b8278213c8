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
from itertools import chain, islice
from typing import IO, Any, NamedTuple

from allhands.data.rows import BOM, Item, ReadOptions, Row, RowProblem, lines, not_utf8, with_rest

_PIECE = 1 << 20
_BATCH_BYTES = 8 << 20
# Separators of columns, and the number of rows by which the separator of a file is judged.
_DELIMITERS = ",;\t|"
_JUDGED_ROWS = 100
_SEP_LINE = re.compile(r'"?sep=(.)"?\r?\n')
_SEPARATORS = {
    "auto": re.escape("<|endoftext|>"),
    "file": None,
    "line": "\n",
    "blank-line": r"\n[^\S\n]*\n",
}


class Separator(NamedTuple):
    """The separator of a table's columns.

    Attributes:
        delimiter: the character.
        certain: whether it is the one that the file's name promises, or the only one that fits the
            rows looked at, or a ``sep=`` line names it.
        lines: lines before the header, such as Excel's ``sep=;``.
    """

    delimiter: str
    certain: bool = True
    lines: int = 0


def separator_of(head: bytes, usual: str, *, whole: bool) -> Separator:
    """Return the separator of a table, from its beginning.

    A separator fits if the first row has at least two names, all different, and each row after it
    has as many fields. The usual separator is taken if it fits; another one, if only that one fits.

    Args:
        head: the first bytes of the file.
        usual: the separator that the file's name promises.
        whole: whether ``head`` is the whole file.
    """
    text = head.removeprefix(BOM).decode("utf-8", "surrogateescape")
    if said := _SEP_LINE.match(text):
        return Separator(said[1], said[1] in _DELIMITERS, 1)
    fitting = [each for each in (usual, *_DELIMITERS) if _fits(text, each, whole)]
    if usual in fitting or len(fitting) == 1:
        return Separator(fitting[0])
    first = re.sub('"[^"]*"', "", text.partition("\n")[0])
    meant = next((other for other in _DELIMITERS if other in first), None)
    return Separator(usual) if usual in first or meant is None else Separator(meant, False)


def _fits(text: str, delimiter: str, whole: bool) -> bool:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    filled = (cells for cells in reader if "".join(cells).strip())
    rows: list[list[str]] = []
    try:
        for cells in islice(filled, _JUDGED_ROWS + 1):
            rows.append(cells)  # noqa: PERF402  # those before an error count
        if not whole and len(rows) <= _JUDGED_ROWS:
            del rows[-1:]  # the last row of a part may be cut off
    except csv.Error as error:
        if whole or "unexpected end" not in str(error):
            return False
    names = {cell.strip() for cell in chain(*rows[:1])}
    return (
        min(len(rows), len(names)) > 1
        and "" not in names
        and {len(row) for row in rows} == {len(names)}
    )


def rows_of_table(
    file: IO[bytes], name: str, options: ReadOptions, separator: Separator
) -> Iterator[Item]:
    """Yield the rows of a CSV or TSV file as objects of strings, by the names in its first row."""
    if not separator.certain:
        shown = "a tab" if separator.delimiter == "\t" else separator.delimiter
        yield RowProblem(
            name,
            separator.lines,
            f"the separator seems to be {shown}, which is not certain",
            "save it with commas; or give each row as many fields, and put those with separators in quotes",
            code="separator-uncertain",
        )
        return
    # The csv module has one limit for the whole process, 128 KiB; it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), options.max_row_bytes))
    table = _TableLines(file, name, options.max_row_bytes)
    for _ in range(separator.lines):
        next(table, None)
    rows = table.rows(separator.delimiter)
    if (first := next(rows, None)) is None:
        return
    header = _header(*first, name)
    if isinstance(header, RowProblem):
        yield with_rest(header)
        return
    empty = True
    for line, cells in rows:
        empty = False
        yield cells if isinstance(cells, RowProblem) else _table_item(cells, header, name, line)
    if empty:
        yield RowProblem(
            name,
            0,
            "the file has a header and no rows",
            "add rows below it, or leave the file out",
            code="data-empty",
        )


def _header(line: int, cells: list[str] | RowProblem, name: str) -> list[str] | RowProblem:
    if isinstance(cells, RowProblem):
        return cells
    header = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, start=1)]
    return _twice(header, name, line) or header


class _TableLines:
    """Feeds the lines of a table to the csv module, and yields the rows that it parses."""

    def __init__(self, file: IO[bytes], name: str, limit: int) -> None:
        self._number, self._quotes = 0, 0
        # Problem in the text of the row that is being read.
        self._bad: RowProblem | None = None
        self._lines, self._name = lines(file, limit), name

    def rows(self, delimiter: str) -> Iterator[tuple[int, list[str] | RowProblem]]:
        """Yield the first line of each row that is not blank, and its fields or problem."""
        reader = csv.reader(self, delimiter=delimiter, strict=True)
        while True:
            self._quotes, self._bad, first = 0, None, self._number + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                hint = 'put a field with separators, quotes or line ends in "...", and write a quote in it as ""'
                message = f"not a row of a table: {error} (to line {self._number})"
                problem = RowProblem(self._name, first, message, hint, code="table-row-invalid")
                # With an odd number of quotes it is unknown whether the next line is in a field.
                if self._quotes % 2 == 1:
                    yield first, with_rest(problem)
                    return
                yield first, problem
            else:
                if self._bad or len(cells) > 1 or "".join(cells).strip():
                    yield first, self._bad or cells

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw, too_long = next(self._lines)
        self._number += 1
        self._quotes += raw.count(b'"')
        if too_long:
            raise csv.Error(f"the row is too long to be read, {too_long:,} bytes")
        text = raw.removeprefix(BOM).decode("utf-8", "surrogateescape")
        self._bad = self._bad or not_utf8(text, self._name, self._number)
        if "\0" in text and self._bad is None:
            self._bad = RowProblem(
                self._name,
                self._number,
                "the row has a NUL byte",
                "is this a text file? remove it",
                code="character-invalid",
            )
        return text


def _table_item(cells: list[str], header: list[str], name: str, line: int) -> Item:
    if len(cells) == len(header):
        return Row(dict(zip(header, cells, strict=True)), name, line)
    return RowProblem(
        name,
        line,
        f"ragged row: {len(cells)} fields where the header has {len(header)}",
        'put a field that has separators in it in "..."',
        code="table-row-invalid",
    )


def _twice(names: Sequence[str], source: str, line: int) -> RowProblem | None:
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    message = f"unusable columns: two are called {name!r}"
    if count > 1:
        return RowProblem(source, line, message, "rename one of them", code="column-name-twice")
    return None


def rows_of_columns(file: IO[bytes], head: bytes, name: str) -> Iterator[Item]:
    """Yield the rows of a Parquet or Arrow file, in batches of about 8 MB.

    An Arrow file may be a stream (what ``datasets`` saves), a file or Feather.

    Args:
        head: first bytes of the file; b"PAR1" for Parquet.
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
        yield RowProblem(
            name,
            0,
            f"{kind} files need pyarrow",
            "pip install pyarrow",
            code="data-package-missing",
        )
    except Exception as error:  # pyarrow and what it calls raise many kinds
        message = f"not readable as {kind} at row {row + 1}: {error}"
        hint = f"the file is cut off or damaged, or no {kind} file: fetch it again"
        yield with_rest(RowProblem(name, row + 1 if row else 0, message, hint, code="file-damaged"))


def _batches(file: IO[bytes], head: bytes) -> Iterator[Any]:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]  # slow to import

    if head.startswith(b"PAR1"):
        import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

        with pq.ParquetFile(file, pre_buffer=False, buffer_size=_PIECE) as table:
            num_bytes = sum(
                table.metadata.row_group(group).total_byte_size
                for group in range(table.num_row_groups)
            )
            size = max(1, min(4096, _BATCH_BYTES * table.metadata.num_rows // max(1, num_bytes)))
            yield from table.iter_batches(batch_size=size, use_threads=False)
    elif head.startswith(b"FEA1"):
        from pyarrow import feather  # pyright: ignore[reportMissingImports]

        yield from feather.read_table(file).to_batches()
    elif head.startswith(b"ARROW1"):
        with pa.ipc.open_file(file) as reader:
            yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        with pa.ipc.open_stream(file) as reader:
            yield from reader


def _seekable(file: IO[bytes]) -> IO[bytes]:
    if file.seekable():
        return file
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    shutil.copyfileobj(file, copy, _PIECE)
    copy.seek(0)
    return copy


def _rows_of_batch(batch: Any, name: str, before: int) -> Iterator[Item]:
    try:
        yield from (
            Row(value, name, before + place)
            for place, value in enumerate(batch.to_pylist(), start=1)
        )
    except Exception as error:  # one bad value: go on row by row to find it
        if len(batch) > 1:
            for place in range(len(batch)):
                yield from _rows_of_batch(batch.slice(place, 1), name, before + place)
        else:
            yield RowProblem(
                name,
                before + 1,
                f"row {before + 1} has a value that Python cannot hold: {error}",
                "repair or drop the column",
                code="value-unreadable",
            )


def rows_of_text(file: IO[bytes], name: str, options: ReadOptions) -> Iterator[Item]:
    """Yield the documents of a plain text file."""
    by = options.documents
    pattern = _SEPARATORS.get(by, re.escape(by.replace("\\n", "\n").replace("\\t", "\t")))
    for line, text in _documents(
        file, re.compile(pattern) if pattern else None, options.max_document_chars
    ):
        document = text.strip("\n")
        if not document.strip():
            continue
        line += len(text) - len(text.lstrip("\n"))
        if "\0" in document:
            yield RowProblem(
                name,
                line + document[: document.index("\0")].count("\n"),
                "a NUL byte in the text",
                "is this a text file? remove the byte",
                code="character-invalid",
            )
        else:
            yield not_utf8(document, name, line) or Row({"text": document}, name, line)


def _documents(
    file: IO[bytes], separator: re.Pattern[str] | None, size: int
) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each document.

    A document of over twice ``size`` characters comes in parts; all but the last have at most
    ``size`` characters.
    """
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")("surrogateescape"), translate=True
    )
    text, line, is_last = "", 1, False
    while not is_last:
        data = file.read(_PIECE)
        is_last = not data
        text, start = text + decoder.decode(data, final=is_last), 0
        while start < len(text):
            match = separator.search(text, start) if separator else None
            end, after = match.span() if match else (len(text), len(text))
            if end - start > 2 * size:
                end = after = _cut(text, start, size)
            elif match is None and not is_last:
                break
            yield line, text[start:end]
            line, start = line + text.count("\n", start, after), after
        text = text[start:]


def _cut(text: str, start: int, size: int) -> int:
    """Return the end of the part that begins at ``start``: after a paragraph, a line, a word, or
    anywhere.
    """
    ends = (
        (text.rfind(mark, start + size // 2, start + size), mark) for mark in ("\n\n", "\n", " ")
    )
    return next((found + len(mark) for found, mark in ends if found >= 0), start + size)
