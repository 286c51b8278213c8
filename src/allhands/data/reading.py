"""Files of training data as rows: whatever is broken becomes a :class:`Problem` with its line, the rest is read.

JSON Lines, JSON, CSV, TSV, Parquet and plain text, each also with ``.gz``. Every file is streamed: memory holds
some megabytes and one row, and a row has at most ``ReadOptions.max_row_bytes``.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

from allhands.data.records import SHAPES, SHORTEN, ColumnNames, Record, parse_record
from allhands.errors import ConfigError, DataError

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

_PIECE = 1 << 16
_MAX_DEPTH = 200
_BOM = b"\xef\xbb\xbf"
_BAD_BYTE = re.compile("[\udc80-\udcff]")
_NOT_BLANK = re.compile(r"[^ \t\r\n]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_DECODER = json.JSONDecoder()
_LONGEST_WORD = len("-Infinity")
_REST = ", and the rest of the file from here was not read"
_MAGIC = {
    b"\x1f\x8b": ("compressed with gzip", "rename it so that it ends in .gz, then unpack it: gunzip FILE.gz"),
    b"PK\x03\x04": ("a zip archive", "unpack it first and name the files that were in it"),
    b"PAR1": ("a Parquet file", "let its name end in .parquet, or read it with hf_dataset: {path: parquet, ...}"),
    b"\xff\xfe": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    b"\xfe\xff": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it first: unzstd FILE"),
    b"\xfd7zXZ\x00": ("compressed with xz", "unpack it first: unxz FILE"),
}


@dataclass(frozen=True)
class ReadOptions:
    """How files are read.

    Attributes:
        documents: what one document of a plain text file is: "file", "line", "blank-line" (paragraphs), any other
            string that separates documents (``\\n`` and ``\\t`` stand for line end and tab), or "auto": separated
            by ``<|endoftext|>`` where that occurs, else the file.
        max_row_bytes: a longer line, JSON value or CSV row is a Problem.
        max_document_chars: a longer document is cut, at the end of a paragraph if there is one, into rows of about
            this many characters.

    Raises:
        ConfigError: the separator is empty.
    """

    documents: str = "auto"
    max_row_bytes: int = 64 << 20
    max_document_chars: int = 1 << 20

    def __post_init__(self) -> None:
        if not self.documents:
            hint = "use file, line, blank-line or the string between two documents"
            raise ConfigError("the separator is empty", where="--documents", hint=hint)


@dataclass(frozen=True)
class Row:
    """One value as it was found. ``line`` (1-based) is where it begins; in a Parquet file, its row."""

    value: Any
    source: str
    line: int


@dataclass(frozen=True)
class Problem:
    """What could not be read: one row, or the rest of the file if the message says so; line 0 is the file itself."""

    source: str
    line: int
    message: str
    hint: str | None = None

    @property
    def where(self) -> str:
        """``file:line``, or the file."""
        return f"{self.source}:{self.line}" if self.line else self.source

    def error(self) -> DataError:
        """The same, to be raised."""
        return DataError(self.message, where=self.where, hint=self.hint)


Item = Row | Problem


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


def read_records(path: Path, columns: ColumnNames) -> Iterator[Record]:
    """The records of one JSON Lines or JSON file, in order, streamed.

    Raises:
        DataError: the file cannot be read, is not UTF-8 or not JSON, holds no record, or a record is
            malformed.
    """
    kind: FileType = "json" if path.suffix == ".json" else "jsonl"
    for item in _read(path, kind, ReadOptions(), path.name):
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
                hint = f"write one JSON object a line: {SHAPES}" if kind in ("jsonl", "json") else "leave it out"
                yield Problem(name, 0, "the file is empty", hint)
    except OSError as error:
        yield Problem(str(path), 0, f"cannot read the file: {error.strerror or error}", _os_hint(error))


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.name.lower().endswith(".gz") else file


def _items(file: IO[bytes], stream: _Stream, kind: FileType, options: ReadOptions, name: str) -> Iterator[Item]:
    buffered = io.BufferedReader(stream, _PIECE)
    is_json = kind in ("jsonl", "json")
    head = b"" if kind == "parquet" else buffered.peek(4096)
    for magic, (what, hint) in _MAGIC.items():
        if head.startswith(magic):
            return iter([Problem(name, 0, f"the file is {what}, not {'JSON text' if is_json else 'text'}", hint)])
    if not is_json:
        from allhands.data import sources  # it reads through this module

        if kind == "parquet":
            return sources.rows_of_parquet(file if stream.inner is file else buffered, name)
        if kind == "text":
            return sources.rows_of_text(buffered, name, options)
        return sources.rows_of_table(buffered, name, options, "\t" if kind == "tsv" else ",")
    if kind == "json" or head.removeprefix(_BOM).lstrip()[:1] == b"[":
        return _rows_of_json(_Window(buffered, name, options.max_row_bytes))
    return _rows_of_lines(buffered, name, options)


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
        hint = _os_hint(error)
    else:
        hint = f"the file is cut off or damaged: fetch it again; to see how much is whole: gzip -t {path.name}"
    return Problem(name, 0, f"cannot be read to its end, only the rows before were read: {error}", hint)


def _os_hint(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "give yourself permission to read it: chmod u+r FILE"
    if isinstance(error, IsADirectoryError):
        return "a file is needed here, this is a folder"
    return "check that the file exists and that the disk is healthy"


def lines(file: IO[bytes], limit: int) -> Iterator[tuple[bytes, int]]:
    """(line with its end, 0), or, of a line over ``limit`` bytes, (all its double quotes, number of bytes)."""
    while raw := file.readline(limit + 1):
        if len(raw) <= limit or raw.endswith(b"\n"):
            yield raw, 0
            continue
        size, quotes = len(raw), raw.count(b'"')
        while not raw.endswith(b"\n") and (raw := file.readline(_PIECE)):
            size, quotes = size + len(raw), quotes + raw.count(b'"')
        yield b'"' * quotes, size


# JSON


def _rows_of_lines(file: IO[bytes], name: str, options: ReadOptions) -> Iterator[Item]:
    for number, (raw, too_long) in enumerate(lines(file, options.max_row_bytes), start=1):
        item = _too_long(name, number, too_long) if too_long else _item_of_line(raw, name, number)
        if item is not None:
            yield item


def _item_of_line(raw: bytes, name: str, number: int) -> Item | None:
    raw = raw.removeprefix(_BOM)  # on any line: it stays where files are joined
    try:
        line = raw.decode().strip()
        return _checked(json.loads(line), line, name, number) if line else None
    except UnicodeDecodeError:
        return not_utf8(raw.decode("utf-8", "surrogateescape"), name, number)
    except json.JSONDecodeError as error:
        return _bad_line(error, name, number, complete=raw.endswith(b"\n"))
    except (ValueError, RecursionError) as error:
        return Problem(name, number, f"not usable JSON: {error}", SHORTEN)


def _bad_line(error: json.JSONDecodeError, name: str, number: int, *, complete: bool) -> Problem:
    line = error.doc
    cut_off = error.pos >= len(line) or error.msg.startswith("Unterminated string")
    if cut_off and not complete:
        message = f"the file ends in the middle of a record, after {_fragment(line, len(line))}"
        hint = "the file was cut off while it was written or copied: fetch it again, or delete its last line"
    elif cut_off:
        message = f"the record does not end on its line: {error.msg}, after {_fragment(line, len(line))}"
        hint = "write each record on one line; JSON over several lines belongs in a .json file"
    else:
        message = f"not JSON: {error.msg} at column {error.colno}, near {_fragment(line, error.pos)}"
        hint = f"each line must be one JSON object: {SHAPES}"
    return Problem(name, number, message, hint)


def _fragment(text: str, position: int) -> str:
    """About 40 characters around a position, quoted."""
    return repr(text[max(0, position - 20) : position + 20])


def _too_long(name: str, number: int, size: int) -> Problem:
    hint = "check that line ends are not lost; cut the row into several if it is meant to be so long"
    return Problem(name, number, f"the line is too long to be read: {size:,} bytes", hint)


def not_utf8(text: str, name: str, line: int, start: int = 0) -> Problem | None:
    """A Problem if ``text[start:]``, decoded with "surrogateescape", had a bad byte; it begins in ``line``."""
    found = None if text.isascii() else _BAD_BYTE.search(text, start)
    if found is None:
        return None
    place = found.start()
    column = len(text[text.rfind("\n", 0, place) + 1 : place].encode("utf-8", "surrogateescape")) + 1
    message = f"not UTF-8: byte 0x{ord(found.group()) - 0xDC00:02x} at byte {column} of the line"
    hint = "convert the file, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW"
    return Problem(name, line + text.count("\n", start, place), message, hint)


def _checked(value: Any, text: str, name: str, line: int) -> Item:
    # Deeper values could be read, but whoever walks them by recursion would fail.
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deep(value):
        return Problem(name, line, f"not usable JSON: more than {_MAX_DEPTH} levels of nesting", SHORTEN)
    return Row(value, name, line)


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH + 1):
        parts = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [inner for part in parts for inner in part]
    return bool(level)


def with_rest(problem: Problem) -> Problem:
    """The same, and that nothing after it was read."""
    what, _, why = problem.message.partition(":")
    return replace(problem, message=f"{what}{_REST}:{why}")


def _rows_of_json(window: _Window) -> Iterator[Item]:
    in_array = window.skip_blank() == "["
    if in_array:
        window.step()
    while char := window.skip_blank():
        if in_array and char == "]":
            window.step()
            problem = window.problem("text after the end of the list", window.position)
            if window.skip_blank():
                yield with_rest(problem)
            return
        item, is_broken = window.take()
        if is_broken and not window.resume():
            yield with_rest(item) if isinstance(item, Problem) else item
            return
        yield item
        if not in_array or is_broken or (char := window.skip_blank()) in ("]", ""):
            continue
        if char == ",":
            window.step()
            continue
        problem = window.problem("expected ',' or the end of the list", window.position)
        if not window.resume():
            yield with_rest(problem)
            return
        yield problem
    if in_array:
        yield window.problem("the list is not closed", window.position)


class _Window:
    """The part of a JSON text that is being read.

    ``indent`` is what stands before the position on its line if that is only blanks, else None.
    """

    def __init__(self, file: IO[bytes], name: str, limit: int) -> None:
        self.text, self.position = "", 0
        self.indent: str | None = ""
        self._file, self._name, self._limit = file, name, limit
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        # Lines before the text and, of the line in which it begins, characters; up to where lines are counted.
        self._line, self._before, self._counted = 1, 0, 0
        self._one_per_line: bool | None = None

    def more(self) -> bool:
        """Read on, at least as much again as there is, and forget what lies before the position; at the end, False."""
        rest = self.text[self.position :]
        data = self._file.read(max(_PIECE, len(rest)))
        text = self._decode(data, not data)
        if not data and not text:
            return False
        self.line()
        newline = self.text.rfind("\n", 0, self.position)
        self._before = self.position - newline - 1 + (self._before if newline < 0 else 0)
        self.text, self.position, self._counted = rest + text, 0, 0
        return True

    def line(self) -> int:
        """The line of the position."""
        self._line += self.text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def problem(self, message: str, position: int) -> Problem:
        """What is wrong at a place at or after the position."""
        newline = self.text.rfind("\n", 0, position)
        column = position - newline + (self._before if newline < 0 else 0)
        message = f"not JSON: {message} at column {column}, near {_fragment(self.text, position)}"
        hint = "repair the JSON at that place, or write one object a line (JSONL)"
        return Problem(self._name, self.line() + self.text.count("\n", self.position, position), message, hint)

    def step(self) -> None:
        """Move behind a character that is not blank."""
        self.position, self.indent = self.position + 1, None

    def skip_blank(self) -> str:
        """Move to the next character that is not blank, and return it; "" at the end."""
        while True:
            found = _NOT_BLANK.search(self.text, self.position)
            blank = self.text[self.position : found.start() if found else len(self.text)]
            newline = blank.rfind("\n")
            if newline >= 0:
                self.indent = blank[newline + 1 :]
            elif self.indent is not None:
                self.indent += blank
            self.position += len(blank)
            if found or not self.more():
                return found.group() if found else ""

    def take(self) -> tuple[Item, bool]:
        """The value at the position, which moves behind it. If it is broken: (Problem, True), and no move."""
        while True:
            is_long = len(self.text) - self.position > self._limit
            try:
                value, end = _DECODER.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - _LONGEST_WORD
                if is_cut and is_long:
                    return self._too_long(), True
                if not (is_cut and self.more()):
                    return self.problem(error.msg, error.pos), True
            except (ValueError, RecursionError) as error:
                return Problem(self._name, self.line(), f"not usable JSON: {error}", SHORTEN), True
            else:
                # Of a number, the last digits may be still to come: 12, 12. or 12e- of 12e-3.
                if not isinstance(value, int | float) or end < len(self.text) - 2 or is_long or not self.more():
                    return self._taken(value, end), False

    def _too_long(self) -> Problem:
        hint = "cut the value into several, or check that no quote or bracket is missing in it"
        return Problem(
            self._name, self.line(), f"too long to be read: a value of over {self._limit:,} characters", hint
        )

    def _taken(self, value: Any, end: int) -> Item:
        line, start, text = self.line(), self.position, self.text[self.position : end]
        alone = self.indent is not None and "\n" not in text
        self._one_per_line = alone and self._one_per_line is not False
        self.position, self.indent = end, None
        bad = None if text.isascii() else not_utf8(self.text[:end], self._name, line, start)
        return bad or _checked(value, text, self._name, line)

    def resume(self) -> bool:
        """Move from a broken element to the next, if the layout of the lines shows safely where it begins.

        Safe is a line that begins as the broken element's does, with the same indent and bracket, where all lines
        between are indented deeper (a string has no line ends in it). If there are none between, the broken line
        must have balanced brackets, or every element so far have stood on one line.
        """
        opener, indent = self.text[self.position : self.position + 1], self.indent
        if indent is None or opener not in ("{", "["):
            return False
        is_safe = bool(self._one_per_line) or self._is_balanced()
        while char := self._next_line():
            here = self.indent or ""
            if char == "]" and opener == "{" and len(here) <= len(indent):
                return True
            if char == opener and here == indent:
                return is_safe
            if not here.startswith(indent) or (here == indent and char not in "]}"):
                return False
            is_safe = True
        return False

    def _is_balanced(self) -> bool:
        end = self.text.find("\n", self.position)
        line = _STRING.sub("", self.text[self.position : max(end, self.position)])
        opened, closed = (sum(map(line.count, brackets)) for brackets in ("{[", "]}"))
        return opened == closed > 0 and '"' not in line

    def _next_line(self) -> str:
        """Move to the first character of the next line that is not blank, and return it; "" at the end."""
        self.indent = None
        while (end := self.text.find("\n", self.position)) < 0:
            self.position = len(self.text)
            if not self.more():
                return ""
        self.position = end
        return self.skip_blank()
