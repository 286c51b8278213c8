"""JSON Lines and JSON, streamed: one value at a time, going on after a broken one where that is safe."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any

from allhands.data.records import SHAPES, SHORTEN
from allhands.data.rows import (
    BOM,
    NAMES_OF_SPLITS,
    PIECE,
    Item,
    ReadOptions,
    Row,
    RowProblem,
    checked_value,
    fragment,
    lines,
    not_utf8,
    too_long,
    with_rest,
)

_NOT_BLANK = re.compile(r"[^ \t\r\n]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_DECODER = json.JSONDecoder()
_LONGEST_WORD = len("-Infinity")


def rows_of_lines(file: IO[bytes], name: str, options: ReadOptions) -> Iterator[Item]:
    """The values of a JSON Lines file."""
    for number, (raw, oversize) in enumerate(lines(file, options.max_row_bytes), start=1):
        item = too_long(name, number, oversize) if oversize else _item_of_line(raw, name, number)
        if item is not None:
            yield item


def _item_of_line(raw: bytes, name: str, number: int) -> Item | None:
    raw = raw.removeprefix(BOM)  # on any line: it stays where files are joined
    try:
        line = raw.decode().strip()
        return checked_value(json.loads(line), line, name, number) if line else None
    except UnicodeDecodeError:
        return not_utf8(raw.decode("utf-8", "surrogateescape"), name, number)
    except json.JSONDecodeError as error:
        return _bad_line(error, name, number, complete=raw.endswith(b"\n"))
    except (ValueError, RecursionError) as error:
        return RowProblem(name, number, f"not usable JSON: {error}", SHORTEN)


def _bad_line(error: json.JSONDecodeError, name: str, number: int, *, complete: bool) -> RowProblem:
    line = error.doc
    cut_off = error.pos >= len(line) or error.msg.startswith("Unterminated string")
    if cut_off and not complete:
        message = f"the file ends in the middle of a record, after {fragment(line, len(line))}"
        hint = "the file was cut off while it was written or copied: fetch it again, or delete its last line"
    elif cut_off:
        message = f"the record does not end on its line: {error.msg}, after {fragment(line, len(line))}"
        hint = "write each record on one line; JSON over several lines belongs in a .json file"
    else:
        message = f"not JSON: {error.msg} at column {error.colno}, near {fragment(line, error.pos)}"
        hint = f"each line must be one JSON object: {SHAPES}"
    return RowProblem(name, number, message, hint)


# Keys of an object that holds the rows of a whole file, as exports and APIs write it.
_COMMON_KEYS = ("data", "rows", "examples", "records", "items", "instances", "samples", "entries", "dataset")
ROW_KEYS = frozenset((*_COMMON_KEYS, *NAMES_OF_SPLITS))


def rows_key(head: bytes) -> str | None:
    """The first key under which the rows of a JSON document stand; None if it is no object that holds rows.

    ``{"version": 1, "data": [{...}, ...]}`` is one; an object that is a record itself, with messages, say, is not.

    Args:
        head: the first bytes of the document.
    """
    text = head.removeprefix(BOM).decode("utf-8", "replace").lstrip()
    place = 1 if text.startswith("{") else 0
    try:
        while place:
            key, place = _DECODER.raw_decode(text, _next(text, place))
            place = _next(text, place, ":")
            inner = _next(text, place + 1) if text[place : place + 1] == "[" else 0
            if inner and text[inner : inner + 1] == "{" and str(key).lower() in ROW_KEYS:
                return str(key)
            if key in _OF_RECORDS:
                return None
            _, place = _DECODER.raw_decode(text, place)
            place = _next(text, place, ",")
    except (ValueError, IndexError, RecursionError):  # the beginning ends, or is no JSON
        pass
    return None


# What only a record has.
_OF_RECORDS = frozenset({"messages", "conversations", "conversation", "prompt", "completion", "text", "chosen"})


# By one of these a table of training data is known.
_COLUMNS = _OF_RECORDS | {"instruction", "input", "output", "question", "answer", "query", "response", "rejected"}


def _next(text: str, place: int, skip: str = "") -> int:
    """The place of the next character that is not blank, after ``skip``."""
    found = _NOT_BLANK.search(text, place)
    if found is None or (skip and found[0] != skip):
        raise ValueError("the text ends, or goes on otherwise")
    return _next(text, found.end()) if skip else found.start()


def rows_of_json(
    file: IO[bytes], name: str, options: ReadOptions, *, nested: bool = False, only: str | None = None
) -> Iterator[Item]:
    """The values of a JSON document.

    Args:
        nested: the document is an object that holds its rows, see :func:`rows_key`.
        only: the one key to read.
    """
    window = _Window(file, name, options.max_row_bytes)
    first = window.skip_blank()
    if nested and first == "{":
        yield from _rows_under_keys(window, only, [])
        return
    if first == "[":
        window.step()
        yield from _elements(window)
        if window.ended:
            return
        problem = window.problem("text after the end of the list", window.position)
        if window.skip_blank():
            yield with_rest(problem)
        return
    while window.skip_blank():
        item, is_broken = window.take()
        if is_broken and not window.resume():
            yield with_rest(item) if isinstance(item, RowProblem) else item
            return
        by_columns = isinstance(item, Row) and not window.skip_blank() and _is_by_columns(item.value)
        yield RowProblem(name, item.line, "this is a table written by columns", _BY_COLUMNS) if by_columns else item


_BY_COLUMNS = (
    'write it by rows, for example: python -c "import pandas; '
    "pandas.read_json('FILE').to_json('NEW.jsonl', orient='records', lines=True)\""
)


def _is_by_columns(value: Any) -> bool:
    """Whether an object is a table as pandas or ``to_dict`` write it: a value or a number for each row, by column."""
    if not isinstance(value, dict) or not (_COLUMNS & set(value) or {"columns", "data"} <= set(value)):  # pyright: ignore[reportUnknownArgumentType]
        return False
    columns: list[Any] = list(value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if all(isinstance(column, dict) and column and all(str(key).isdigit() for key in column) for column in columns):  # pyright: ignore[reportUnknownVariableType]
        return True
    if {"columns", "data"} <= set(value):  # pyright: ignore[reportUnknownArgumentType]
        return True
    lists = all(isinstance(column, list) and column for column in columns) and len({len(c) for c in columns}) == 1
    kinds = {type(cell) for column in columns for cell in column} if lists else set[type]()
    # Numbers alone are tokens of one text.
    return str in kinds and not kinds & {dict, list}


def _rows_under_keys(window: _Window, only: str | None, found: list[str]) -> Iterator[Item]:
    """The rows of an object that holds them under one of its keys; what stands under others is passed over."""
    window.step()
    while (char := window.skip_blank()) and char != "}":
        key, is_broken = window.take()
        if is_broken or window.skip_blank() != ":":
            yield with_rest(key if isinstance(key, RowProblem) else window.problem("expected ':'", window.position))
            return
        window.step()
        char, name = window.skip_blank(), str(key.value) if isinstance(key, Row) else ""
        if char == "[" and name.lower() in ROW_KEYS:
            found.append(name)
            if len(found) > 1 and only is None:
                yield with_rest(window.several(found))
                return
            window.step()
            for item in _elements(window):
                if only in (None, name):
                    yield item
            if window.ended:
                return
        else:
            item, is_broken = window.take()
            if is_broken:
                yield with_rest(item) if isinstance(item, RowProblem) else item
                return
        if window.skip_blank() == ",":
            window.step()


def keys_with_rows(file: IO[bytes]) -> tuple[str, ...]:
    """The keys under which the rows of such an object stand, as far as it can be read."""
    window, keys = _Window(file, "", ReadOptions().max_row_bytes), list[str]()
    window.skip_blank()
    for _ in _rows_under_keys(window, "", keys):
        pass
    return tuple(keys)


def _elements(window: _Window) -> Iterator[Item]:
    """The elements of a list, to behind its end; ``window.ended`` if that was not reached."""
    window.ended = True
    while char := window.skip_blank():
        if char == "]":
            window.step()
            window.ended = False
            return
        item, is_broken = window.take()
        if is_broken and not window.resume():
            yield with_rest(item) if isinstance(item, RowProblem) else item
            return
        yield item
        if is_broken or (char := window.skip_blank()) in ("]", ""):
            continue
        if char == ",":
            window.step()
            continue
        problem = window.problem("expected ',' or the end of the list", window.position)
        if not window.resume():
            yield with_rest(problem)
            return
        yield problem
    yield window.problem("the list is not closed", window.position)


class _Window:
    """The part of a JSON text that is being read.

    ``indent`` is what stands before the position on its line if that is only blanks, else None.
    """

    def __init__(self, file: IO[bytes], name: str, limit: int) -> None:
        self.text, self.position = "", 0
        self.indent: str | None = ""
        # Whether a list has ended before its closing bracket.
        self.ended = False
        self._file, self._name, self._limit = file, name, limit
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        # Lines before the text and, of the line in which it begins, characters; up to where lines are counted.
        self._line, self._before, self._counted = 1, 0, 0
        self._one_per_line: bool | None = None

    def more(self) -> bool:
        """Read on, at least as much again as there is, and forget what lies before the position; at the end, False."""
        rest = self.text[self.position :]
        data = self._file.read(max(PIECE, len(rest)))
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

    def problem(self, message: str, position: int) -> RowProblem:
        """What is wrong at a place at or after the position."""
        newline = self.text.rfind("\n", 0, position)
        column = position - newline + (self._before if newline < 0 else 0)
        message = f"not JSON: {message} at column {column}, near {fragment(self.text, position)}"
        hint = "repair the JSON at that place, or write one object a line (JSONL)"
        return RowProblem(self._name, self.line() + self.text.count("\n", self.position, position), message, hint)

    def several(self, keys: Sequence[str]) -> RowProblem:
        """That the rows stand under more keys than one."""
        named = " and ".join(f'"{key}"' for key in keys)
        hint = "`allhands data prepare FILE --out DIR` takes splits apart; write anything else into files of its own"
        return RowProblem(self._name, self.line(), f"rows of several kinds: they stand under {named}", hint)

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
                return RowProblem(self._name, self.line(), f"not usable JSON: {error}", SHORTEN), True
            else:
                # Of a number, the last digits may be still to come: 12, 12. or 12e- of 12e-3.
                if not isinstance(value, int | float) or end < len(self.text) - 2 or is_long or not self.more():
                    return self._taken(value, end), False

    def _too_long(self) -> RowProblem:
        hint = "cut the value into several, or check that no quote or bracket is missing in it"
        return RowProblem(
            self._name, self.line(), f"too long to be read: a value of over {self._limit:,} characters", hint
        )

    def _taken(self, value: Any, end: int) -> Item:
        line, start, text = self.line(), self.position, self.text[self.position : end]
        alone = self.indent is not None and "\n" not in text
        self._one_per_line = alone and self._one_per_line is not False
        self.position, self.indent = end, None
        bad = None if text.isascii() else not_utf8(self.text[:end], self._name, line, start)
        return bad or checked_value(value, text, self._name, line)

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
