"""Files of training data as JSON values, each with its line. Everything wrong names file, line and remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from allhands.data.records import SHAPES, SHORTEN, ColumnNames, Place, Record, parse_record
from allhands.errors import DataError

_BOM = b"\xef\xbb\xbf"
_MAGIC = {
    b"\x1f\x8b": ("compressed with gzip", "unpack it first: gunzip -k FILE (keep the .jsonl name)"),
    b"PK\x03\x04": ("a zip archive", "unpack it first and point --data at the folder with the .jsonl files"),
    b"PAR1": ("a Parquet file", "convert it to JSONL, or read it with hf_dataset: {path: parquet, ...}"),
    b"\xff\xfe": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    b"\xfe\xff": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
}


def read_records(path: Path, columns: ColumnNames) -> Iterator[Record]:
    """The records of one file, in order, streamed line by line.

    A byte-order mark, CRLF line ends and blank lines are tolerated. A file that is one JSON array (any
    name) or a ``.json`` file with JSON values one after the other is read whole.

    Raises:
        DataError: the file cannot be read, is not UTF-8 or not JSON, holds no record, or a record is
            malformed.
    """
    try:
        with path.open("rb") as file:
            values = _json_values(file, path)
            first = next(values, None)
            if first is None:
                raise DataError("the file is empty", where=path.name, hint=f"write one JSON object a line: {SHAPES}")
            for line, value in chain([first], values):
                yield parse_record(value, columns, source=path.name, line=line)
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror}", where=str(path), hint=_os_hint(error)) from error


def _os_hint(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "give yourself permission to read it: chmod u+r FILE"
    if isinstance(error, IsADirectoryError):
        return "a file is needed here, this is a folder"
    return "check that the file exists and that the disk is healthy"


def _json_values(file: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    """(line, value) of every JSON value in the file."""
    head = file.read(4096)
    file.seek(0)
    for magic, (what, hint) in _MAGIC.items():
        if head.startswith(magic):
            raise DataError(f"the file is {what}, not JSON text", where=path.name, hint=hint)
    if path.suffix == ".json" or head.removeprefix(_BOM).lstrip()[:1] == b"[":
        return _values_of_document(file.read(), path.name)
    return _values_of_lines(file, path.name)


def _values_of_lines(file: BinaryIO, source: str) -> Iterator[tuple[int, Any]]:
    for number, raw in enumerate(file, start=1):
        place = Place(source, number)
        line = _decode(raw.removeprefix(_BOM) if number == 1 else raw, place).strip()
        if not line:
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            _fail_on_line(line, error, place, complete=raw.endswith(b"\n"))
        except (ValueError, RecursionError) as error:
            place.fail(f"not usable JSON: {error}", SHORTEN)
        yield number, value


def _values_of_document(raw: bytes, source: str) -> Iterator[tuple[int, Any]]:
    """The elements of one JSON array, or JSON values that follow each other."""
    text = _decode(raw.removeprefix(_BOM), Place(source, 1))
    decoder = json.JSONDecoder()
    position = _skip_blank(text, 0)
    in_array = text.startswith("[", position)
    line, counted, separator = 1, 0, "["
    while position < len(text):
        if in_array:
            if text.startswith("]", position) and not text[position + 1 :].strip():
                return
            if not text.startswith(separator, position):
                _fail_in_document(text, position, f"expected {separator!r} or the end of the list", source)
            position, separator = _skip_blank(text, position + 1), ","
            if text.startswith("]", position):
                continue
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            _fail_in_document(text, error.pos, error.msg, source)
        except (ValueError, RecursionError) as error:
            Place(source, line).fail(f"not usable JSON: {error}", SHORTEN)
        yield line, value
        position = _skip_blank(text, position)
    if in_array:
        _fail_in_document(text, position, "the list is not closed", source)


def _skip_blank(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _fail_in_document(text: str, position: int, problem: str, source: str) -> NoReturn:
    column = position - text.rfind("\n", 0, position)
    Place(source, text.count("\n", 0, position) + 1).fail(
        f"not JSON: {problem} at column {column}, near {_fragment(text, position)}",
        "repair the JSON at that place, or write one object a line (JSONL)",
    )


def _decode(raw: bytes, place: Place) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = place.line + raw.count(b"\n", 0, error.start)
        column = error.start - raw.rfind(b"\n", 0, error.start)
        Place(place.source, line).fail(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {column} of the line",
            "convert the file, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW",
        )


def _fail_on_line(line: str, error: json.JSONDecodeError, place: Place, *, complete: bool) -> NoReturn:
    cut_off = error.pos >= len(line) or error.msg.startswith("Unterminated string")
    if cut_off and not complete:
        place.fail(
            f"the file ends in the middle of a record, after {_fragment(line, len(line))}",
            "the file was cut off while it was written or copied: fetch it again, or delete its last line",
        )
    if cut_off:
        place.fail(
            f"the record does not end on its line: {error.msg}, after {_fragment(line, len(line))}",
            "write each record on one line; JSON over several lines belongs in a .json file",
        )
    place.fail(
        f"not JSON: {error.msg} at column {error.colno}, near {_fragment(line, error.pos)}",
        f"each line must be one JSON object: {SHAPES}",
    )


def _fragment(text: str, position: int) -> str:
    """About 40 characters around a position, quoted."""
    return repr(text[max(0, position - 20) : position + 20])
