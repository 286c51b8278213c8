"""JSON Lines and JSON, streamed one value at a time; reading continues after a broken value where
that is safe.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any, TypeVar, cast

from allhands.data.rows import (
    BOM,
    NAMES_OF_SPLITS,
    PIECE,
    Item,
    ReadOptions,
    Row,
    RowProblem,
    checked_value,
    lines,
    not_utf8,
    with_rest,
)
from allhands.data.values import SHAPES, SHORTEN

_NOT_BLANK = re.compile(r"[^ \t\r\n]")
_DECODER = json.JSONDecoder()
_LONGEST_WORD = len("-Infinity")
# Remainders of a line that was cut off outside a string: nothing, or a part of a word or a number.
_BEGUN = re.compile(r"|t(ru?)?|f(a(ls?)?)?|n(ul?)?|-|\.|[eE][-+]?")
_ESCAPE = len("u00e9")
_Each = TypeVar("_Each")
# Characters before a value that are kept to see how its line begins.
_INDENT = 1 << 10
# Keys of an object that holds the rows of a whole file, as exports and APIs write it.
ROW_KEYS = frozenset(
    (
        "data",
        "rows",
        "examples",
        "records",
        "items",
        "instances",
        "samples",
        "entries",
        "dataset",
        *NAMES_OF_SPLITS,
    )
)
# Keys that only a record has. A table by columns may also have one of the other keys below.
_OF_RECORDS = frozenset(
    {"messages", "conversations", "conversation", "prompt", "completion", "text", "chosen"}
)
_COLUMNS = _OF_RECORDS | {
    "instruction",
    "input",
    "output",
    "question",
    "answer",
    "query",
    "response",
    "rejected",
}
_BY_ROWS = (
    'write it by rows, for example: python -c "import pandas; '
    "pandas.read_json('FILE').to_json('NEW.jsonl', orient='records', lines=True)\""
)


def rows_of_lines(file: IO[bytes], name: str, options: ReadOptions) -> Iterator[Item]:
    """Yield the values of a JSON Lines file."""
    each = _with_last(lines(file, options.max_row_bytes))
    for number, ((raw, oversize), is_last) in enumerate(each, start=1):
        raw = raw.removeprefix(BOM)  # on any line: it stays where files are joined
        try:
            if oversize:
                yield RowProblem(
                    name,
                    number,
                    f"the line is too long to be read: {oversize:,} bytes",
                    "check that line ends are not lost; cut the row into several if it is meant to be so long",
                    code="row-too-long",
                )
            elif line := raw.decode().strip():
                yield checked_value(json.loads(line), line, name, number)
        except UnicodeDecodeError:
            yield cast(RowProblem, not_utf8(raw.decode("utf-8", "surrogateescape"), name, number))
        except json.JSONDecodeError as error:
            yield _bad_line(error, name, number, is_last=is_last)
        except (ValueError, RecursionError) as error:
            yield RowProblem(
                name, number, f"not usable JSON: {error}", SHORTEN, code="json-invalid"
            )


def _with_last(items: Iterator[_Each]) -> Iterator[tuple[_Each, bool]]:
    """Yield each item, and whether it is the last one."""
    before = next(items, None)
    for item in items:
        assert before is not None
        yield before, False
        before = item
    if before is not None:
        yield before, True


def _bad_line(error: json.JSONDecodeError, name: str, number: int, *, is_last: bool) -> RowProblem:
    line = error.doc
    rest = line[error.pos :]
    in_string = error.msg.startswith("Unterminated string") or (
        error.msg.startswith("Invalid \\uXXXX") and len(rest) <= _ESCAPE
    )
    cut_off = in_string or _BEGUN.fullmatch(rest) is not None
    if cut_off and is_last:
        message = f"the file ends in the middle of a record, after {_around(line, len(line))}"
        hint = "the file was probably cut off while it was written or copied: fetch it again, or delete its last line"
    elif cut_off:
        message = (
            f"the record does not end on its line: {error.msg}, after {_around(line, len(line))}"
        )
        hint = "write each record on one line; JSON over several lines belongs in a .json file"
    else:
        message = f"not JSON: {error.msg} at column {error.colno}, near {_around(line, error.pos)}"
        hint = f"each line must be one JSON object: {SHAPES}"
    return RowProblem(
        name,
        number,
        message,
        hint,
        code="record-cut-off" if cut_off and is_last else "json-invalid",
    )


def _may_be_cut(error: json.JSONDecodeError) -> bool:
    """Return True if the value may be valid but not yet read to its end."""
    return error.msg.startswith("Unterminated string") or error.pos > len(error.doc) - _LONGEST_WORD


def _around(text: str, position: int) -> str:
    return repr(text[max(0, position - 20) : position + 20])


def rows_key(head: bytes) -> str | None:
    """Return the first key that holds the rows of a JSON document; None if there is no such key.

    ``{"version": 1, "data": [{...}, ...]}`` gives "data". An object that is itself a record, for
    example with messages, gives None.

    Args:
        head: the first bytes of the document.
    """
    text = _Text(io.BytesIO(head), "", ReadOptions())
    if text.skip_blank() != "{":
        return None
    try:
        for name, has_rows in _keys(text):
            if has_rows:
                return name
            if name in _OF_RECORDS:
                return None
            text.take()
    except _BrokenError:
        pass
    return None


def keys_with_rows(file: IO[bytes]) -> tuple[str, ...]:
    """Return all keys of a JSON object that hold rows, as far as the object can be read."""
    text, keys = _Text(file, "", ReadOptions()), list[str]()
    text.skip_blank()
    for _ in _rows_under_keys(text, "", keys):
        pass
    return tuple(keys)


def rows_of_json(
    file: IO[bytes], name: str, options: ReadOptions, *, nested: bool = False
) -> Iterator[Item]:
    """Yield the values of a JSON document, as rows or problems.

    Args:
        nested: the document is an object that holds its rows under a key, see :func:`rows_key`.
    """
    text = _Text(file, name, options)
    first = text.skip_blank()
    if nested and first == "{":
        yield from _rows_under_keys(text, options.only, [])
    elif first == "[":
        text.position += 1
        yield from _elements(text)
        if not text.is_over and text.skip_blank():
            yield with_rest(text.problem("text after the end of the list"))
    else:
        while text.skip_blank():
            try:
                item = text.take()
            except _BrokenError as broken:
                item = broken.problem
                if not text.resume():
                    yield with_rest(item)
                    return
            if isinstance(item, Row) and not text.skip_blank() and _is_by_columns(item.value):
                item = RowProblem(
                    name,
                    item.line,
                    "this is a table written by columns",
                    _BY_ROWS,
                    code="table-by-columns",
                )
            yield item


def _is_by_columns(value: Any) -> bool:
    """Return True for a table written by columns, as pandas' ``to_json`` and ``to_dict`` do it."""
    if not isinstance(value, dict):
        return False
    table = cast(dict[str, Any], value)
    if {"columns", "data"} <= table.keys():
        return True
    if not _COLUMNS & table.keys():
        return False
    columns = [*table.values()]
    types = {*map(type, columns)}
    if types == {dict}:
        return all(column and all(map(str.isdigit, column)) for column in columns)
    if types != {list} or len({*map(len, columns)}) > 1:
        return False
    kinds = {*map(type, chain.from_iterable(columns))}
    return str in kinds and not kinds & {dict, list}  # numbers alone are tokens of one text


def _keys(text: _Text) -> Iterator[tuple[str, bool]]:
    """Yield each key of an object, and whether its value holds rows.

    The text's position is then at the value; the caller must move the position behind it.

    Raises:
        _BrokenError: a key is missing.
    """
    text.position += 1
    while (char := text.skip_blank()) and char != "}":
        name = text.take_key()
        yield name, text.skip_blank() == "[" and name.lower() in ROW_KEYS and text.after() == "{"
        if text.skip_blank() == ",":
            text.position += 1


def _rows_under_keys(text: _Text, only: str | None, found: list[str]) -> Iterator[Item]:
    """Yield the rows under one key of an object; pass over the other keys.

    Args:
        only: the key to read; None: the only key that holds rows, and several are a problem.
        found: list to which the keys with rows are appended.
    """
    try:
        for name, has_rows in _keys(text):
            if not has_rows:
                text.take()
                continue
            found.append(name)
            if len(found) > 1 and only is None:
                message = f"rows of several kinds: they are under {' and '.join(found)}"
                hint = "`allhands data prepare FILE --out DIR` takes splits apart; put others into files of their own"
                yield with_rest(
                    RowProblem(text.name, text.line(), message, hint, code="rows-of-several-kinds")
                )
                return
            text.position += 1
            yield from (item for item in _elements(text) if only in (None, name))
            if text.is_over:
                return
    except _BrokenError as broken:
        yield with_rest(broken.problem)


def _elements(text: _Text) -> Iterator[Item]:
    """Yield the elements of a list and move behind its end; else set ``text.is_over``."""
    while (char := text.skip_blank()) and char != "]":
        try:
            item = text.take()
            if (char := text.skip_blank()) not in (",", "]", ""):
                yield item
                raise _BrokenError(text.problem("expected ',' or the end of the list"))
            if char == ",":
                text.position += 1
        except _BrokenError as broken:
            item = broken.problem
            if not text.resume():
                text.is_over = True
                yield with_rest(item)
                return
        yield item
    text.is_over = not char
    text.position += 1
    if not char:
        yield text.problem("the list is not closed")


class _BrokenError(Exception):
    """Error for a value that is not JSON; ``problem`` says what is wrong."""

    def __init__(self, problem: RowProblem) -> None:
        super().__init__(problem)
        self.problem = problem


class _Text:
    """Window on a JSON file: ``text`` is the part in memory, and ``text[position:]`` is unread."""

    def __init__(self, file: IO[bytes], name: str, options: ReadOptions) -> None:
        self.name, self.text, self.position = name, "", 0
        # Whether reading stopped before the closing bracket of a list.
        self.is_over = False
        self._file, self._limit = file, options.max_row_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        # Line number at place _counted of the text; characters of the text's first line that were
        # dropped before it.
        self._line, self._counted, self._before = 1, 0, 0

    def _more(self) -> bool:
        """Read more, at least as much as is unread, and drop the text before the position.

        A short beginning of the position's line is kept. Returns False at the end of the file.
        """
        data = self._file.read(max(PIECE, len(self.text) - self.position))
        text = self._decode(data, not data)
        if not data and not text:
            return False
        self.line()
        newline = self.text.rfind("\n", 0, self.position)
        is_short = self.position - newline < _INDENT and (newline >= 0 or not self._before)
        start = newline + 1 if is_short else self.position
        self._before = start - newline - 1 + (self._before if newline < 0 else 0)
        self.text, self.position = self.text[start:] + text, self.position - start
        self._counted = self.position
        return True

    def line(self) -> int:
        """Return the line of the position."""
        self._line += self.text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def problem(self, message: str, position: int | None = None) -> RowProblem:
        """Return the problem of a syntax error at the position, or at ``position`` after it."""
        position = self.position if position is None else position
        newline = self.text.rfind("\n", 0, position)
        column = position - newline + (self._before if newline < 0 else 0)
        message = f"not JSON: {message} at column {column}, near {_around(self.text, position)}"
        return RowProblem(
            self.name,
            self.line() + self.text.count("\n", self.position, position),
            message,
            "repair the JSON at that place, or write one object a line (JSONL)",
            code="json-invalid",
        )

    def skip_blank(self) -> str:
        """Move to the next character that is not blank, and return it; "" at the end."""
        while True:
            found = _NOT_BLANK.search(self.text, self.position)
            self.position = found.start() if found else len(self.text)
            if found or not self._more():
                return found[0] if found else ""

    def after(self) -> str:
        """Return the first character that is not blank after the one at the position."""
        while not (found := _NOT_BLANK.search(self.text, self.position + 1)) and self._more():
            pass
        return found[0] if found else ""

    def take(self) -> Item:
        """Return the value at the position, as a row or a problem, and move behind it.

        Raises:
            _BrokenError: there is no JSON value; the position stays.
        """
        while True:
            is_long = len(self.text) - self.position > self._limit
            try:
                value, end = _DECODER.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                if (is_cut := _may_be_cut(error)) and is_long:
                    hint = "cut the value into several, or check that no quote or bracket is missing in it"
                    message = f"too long to be read: a value of over {self._limit:,} characters"
                    raise _BrokenError(
                        RowProblem(self.name, self.line(), message, hint, code="row-too-long")
                    ) from None
                if not (is_cut and self._more()):
                    raise _BrokenError(self.problem(error.msg, error.pos)) from None
            except (ValueError, RecursionError) as error:
                problem = RowProblem(
                    self.name,
                    self.line(),
                    f"not usable JSON: {error}",
                    SHORTEN,
                    code="json-invalid",
                )
                raise _BrokenError(problem) from None
            else:
                # The last digits of a number may be unread: 12, 12. or 12e- of 12e-3.
                if (
                    not isinstance(value, int | float)
                    or end < len(self.text) - 2
                    or is_long
                    or not self._more()
                ):
                    return self._taken(value, end)

    def _taken(self, value: Any, end: int) -> Item:
        """Return the row of a value that ends at ``end``, and move there."""
        line, start, self.position = self.line(), self.position, end
        text = self.text[start:end]
        bad = None if text.isascii() else not_utf8(self.text[:end], self.name, line, start)
        return bad or checked_value(value, text, self.name, line)

    def take_key(self) -> str:
        """Return the key of an object at the position, and move behind its colon.

        Raises:
            _BrokenError: the key or the colon is missing.
        """
        key = self.take()
        if self.skip_blank() != ":":
            raise _BrokenError(key if isinstance(key, RowProblem) else self.problem("expected ':'"))
        self.position += 1
        return str(key.value) if isinstance(key, Row) else ""

    def resume(self) -> bool:
        """Move from a broken value to the next line that begins like its own, or to the line that
        closes the list.

        A string has no line ends in it. So if values begin lines with the same indent and bracket,
        the next such line is the next value. If that guess is wrong, brackets are left over, and
        the rest of the file becomes a problem.

        Returns:
            True if such a line was found; the position is then at its bracket.
        """
        start = self.text.rfind("\n", 0, self.position) + 1
        lead = self.text[start : self.position]
        opener = self.text[self.position : self.position + 1]
        if lead.strip() or opener not in ("{", "[") or (not start and self._before):
            return False
        closing = rf"|[ \t]{{0,{len(lead)}}}\]" if opener == "{" else ""
        next_line = re.compile(rf"\n(?:{re.escape(lead + opener)}{closing})")
        while not (found := next_line.search(self.text, self.position)):
            self.position = max(self.position, len(self.text) - len(lead) - 2)
            if not self._more():
                return False
        self.position = found.end() - 1
        return True
