"""Training records: read from JSONL or JSON files or the ``datasets`` library, and checked one by one.

The shapes are those of mlx_lm: ``messages`` (with optional ``tools``), ``prompt`` + ``completion``, and
``text``; each record is recognised by itself, so a file may mix them. Everything wrong is a
:class:`DataError` that names file and line. Nothing here knows a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, cast

from allhands.errors import ConfigError, DataError

Message = dict[str, Any]
RecordKind = Literal["chat", "completion", "text"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAPES = '{"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'

_BOM = b"\xef\xbb\xbf"
_MAGIC = {
    b"\x1f\x8b": ("compressed with gzip", "unpack it first: gunzip -k FILE (keep the .jsonl name)"),
    b"PK\x03\x04": ("a zip archive", "unpack it first and point --data at the folder with the .jsonl files"),
    b"PAR1": ("a Parquet file", "convert it to JSONL, or read it with hf_dataset: {path: parquet, ...}"),
    b"\xff\xfe": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    b"\xfe\xff": ("encoded as UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
}
_PROMPT_LIKE = ("question", "instruction", "input", "query", "problem", "user", "source")
_COMPLETION_LIKE = ("answer", "output", "response", "target", "solution", "reply", "assistant")
_CHAT_LIKE = ("conversations", "conversation", "chat", "dialogue", "turns")
_TEXT_LIKE = ("content", "body", "story", "document", "raw_content")
_ROLE_LIKE = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
}


@dataclass(frozen=True)
class ColumnNames:
    """The keys that hold each part of a record; the fields are named after mlx_lm's options."""

    prompt_feature: str = "prompt"
    completion_feature: str = "completion"
    chat_feature: str = "messages"
    text_feature: str = "text"

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ColumnNames:
        """Column names from a mapping that may carry any of the four keys; None means the default."""
        given = {name: options.get(name) for name in cls.__dataclass_fields__}
        return cls(**{name: str(value) for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Record:
    """One checked training example.

    ``messages`` (content always a string) and ``tools`` are set for a chat; ``prompt`` and ``completion``
    for a completion, each a string or a list of messages; ``text`` for plain text. ``source`` is the file
    name and ``line`` the line (1-based) where the record begins; for a Hub dataset, its name and row.
    """

    kind: RecordKind
    messages: tuple[Message, ...] | None = None
    tools: list[Any] | None = None
    prompt: str | list[Message] | None = None
    completion: str | list[Message] | None = None
    text: str | None = None
    source: str = ""
    line: int = 0

    @property
    def where(self) -> str:
        """``file:line``, as in error messages."""
        return f"{self.source}:{self.line}"


@dataclass(frozen=True)
class _Place:
    """Where a record begins, so that every check can raise with it."""

    source: str
    line: int

    def fail(self, message: str, hint: str | None = None) -> NoReturn:
        raise DataError(message, where=f"{self.source}:{self.line}", hint=hint)


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
        place = _Place(source, number)
        line = _decode(raw.removeprefix(_BOM) if number == 1 else raw, place).strip()
        if not line:
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            _fail_on_line(line, error, place, complete=raw.endswith(b"\n"))
        except (ValueError, RecursionError) as error:
            place.fail(f"not usable JSON: {error}", _SHORTEN)
        yield number, value


def _values_of_document(raw: bytes, source: str) -> Iterator[tuple[int, Any]]:
    """The elements of one JSON array, or JSON values that follow each other."""
    text = _decode(raw.removeprefix(_BOM), _Place(source, 1))
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
            _Place(source, line).fail(f"not usable JSON: {error}", _SHORTEN)
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
    _Place(source, text.count("\n", 0, position) + 1).fail(
        f"not JSON: {problem} at column {column}, near {_fragment(text, position)}",
        "repair the JSON at that place, or write one object a line (JSONL)",
    )


def _decode(raw: bytes, place: _Place) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = place.line + raw.count(b"\n", 0, error.start)
        column = error.start - raw.rfind(b"\n", 0, error.start)
        _Place(place.source, line).fail(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {column} of the line",
            "convert the file, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW",
        )


def _fail_on_line(line: str, error: json.JSONDecodeError, place: _Place, *, complete: bool) -> NoReturn:
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


def parse_record(value: Any, columns: ColumnNames, *, source: str, line: int) -> Record:
    """Check one decoded JSON value and recognise its shape (mlx_lm's order of precedence).

    Raises:
        DataError: with ``where="source:line"``.
    """
    place = _Place(source, line)
    if not isinstance(value, dict):
        place.fail(f"a record must be a JSON object, this is {_type_name(value)}", f"write {SHAPES}")
    row = cast(dict[str, Any], value)
    tools = _tools(row.get("tools"), place)
    if columns.prompt_feature in row and columns.completion_feature in row:
        prompt = _text_or_messages(row[columns.prompt_feature], columns.prompt_feature, place)
        completion = _text_or_messages(row[columns.completion_feature], columns.completion_feature, place)
        if isinstance(completion, str) and not completion.strip():
            place.fail(f'"{columns.completion_feature}" is empty: there is nothing to learn', _DELETE)
        if isinstance(completion, list):
            _require_answer(completion, columns.completion_feature, place)
            prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Record("completion", prompt=prompt, completion=completion, tools=tools, source=source, line=line)
    if columns.chat_feature in row:
        messages = _messages(row[columns.chat_feature], columns.chat_feature, place)
        _require_answer(messages, columns.chat_feature, place)
        return Record("chat", messages=tuple(messages), tools=tools, source=source, line=line)
    if columns.text_feature in row:
        text = _string(row[columns.text_feature], f'"{columns.text_feature}"', place)
        if not text.strip():
            place.fail(f'"{columns.text_feature}" is empty: there is nothing to learn', _DELETE)
        return Record("text", text=text, source=source, line=line)
    place.fail(f"no known shape; the keys are {_names(row)}", _column_hint(row, columns))


_DELETE = "fill it in or delete the record"
_SHORTEN = "shorten the number or the nesting that it names"


def _type_name(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null or missing",
    }
    return names.get(type(value), "a number")


def _names(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in list(names)[:12]) or "none"


def _column_hint(row: Mapping[str, Any], columns: ColumnNames) -> str:
    """What to do about a record of unknown shape: a column mapping if its keys suggest one."""
    if "chosen" in row and "rejected" in row:
        return "preference data (chosen, rejected) cannot be trained on: keep the chosen answers as messages"
    if "input_ids" in row:
        return f"data that is already tokenized cannot be read: give the text itself as {SHAPES}"

    def found(candidates: tuple[str, ...]) -> str | None:
        return next((name for name in candidates if name in row), None)

    completion = columns.completion_feature if columns.completion_feature in row else found(_COMPLETION_LIKE)
    prompt = columns.prompt_feature if columns.prompt_feature in row else found(_PROMPT_LIKE)
    if completion and prompt:
        unused = '; join "input" to it first, or it is ignored' if prompt == "instruction" and row.get("input") else ""
        return f"name the columns: prompt_feature: {prompt} and completion_feature: {completion}{unused}"
    if chat := found(_CHAT_LIKE):
        return f"name the column: chat_feature: {chat} (a list of messages, each with role and content)"
    if text := found(_TEXT_LIKE):
        return f"name the column: text_feature: {text}"
    return f"a record is {SHAPES}; other names: prompt_feature, completion_feature, chat_feature, text_feature"


def _string(value: Any, what: str, place: _Place) -> str:
    if not isinstance(value, str):
        repair = "fill it in or delete the record" if value is None else "write it as a string, in quotes"
        place.fail(f"{what} is {_type_name(value)}, it must be a string", repair)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            bad = f"\\u{ord(value[error.start]):04x}"
            place.fail(f"{what} has half a surrogate pair ({bad})", "write the whole character, or remove it")
    return value


def _content(value: Any, what: str, place: _Place) -> str:
    """A message's content as one string; a list of text parts is joined."""
    if not isinstance(value, list):
        return _string(value, what, place)
    parts: list[str] = []
    for part in cast(list[Any], value):
        fields = cast(dict[str, Any], part) if isinstance(part, dict) else {"text": part}
        kind = fields.get("type", "text")
        if kind not in ("text", "input_text", "output_text"):
            place.fail(f'{what} has a part of type "{kind}"', "only text can be trained on: remove the part")
        parts.append(_string(fields.get("text", fields.get("value")), f"a part of {what}", place))
    return "".join(parts)


def _text_or_messages(value: Any, name: str, place: _Place) -> str | list[Message]:
    return _messages(value, name, place) if isinstance(value, list) else _string(value, f'"{name}"', place)


def _messages(value: Any, name: str, place: _Place) -> list[Message]:
    if not isinstance(value, list):
        place.fail(
            f'"{name}" is {_type_name(value)}, it must be a list of messages',
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    items = cast(list[Any], value)
    if not items:
        place.fail(f'"{name}" has no message', _DELETE)
    return [_message(item, f"{name}[{index}]", place) for index, item in enumerate(items)]


def _message(value: Any, what: str, place: _Place) -> Message:
    """One message with a known role and string content; keys that are null are dropped."""
    if not isinstance(value, dict):
        place.fail(f"{what} is {_type_name(value)}, it must be an object", "give it a role and a content")
    message = {key: item for key, item in cast(Message, value).items() if item is not None}
    role = message.get("role")
    if role is None:
        renamed = ' (here "from" and "value")' if "from" in message else ""
        place.fail(
            f"{what} has no role; its keys are {_names(message)}",
            f'name the keys "role" and "content"{renamed}',
        )
    if role not in ROLES:
        meant = f'; here "{_ROLE_LIKE[role]}"' if str(role) in _ROLE_LIKE else ""
        place.fail(f"{what} has the unknown role {role!r}", f"a role is one of {', '.join(ROLES)}{meant}")
    calls = message.get("tool_calls")
    if calls is not None and not _is_list_of_objects(calls):
        place.fail(f"{what}: tool_calls must be a list of objects", "see the chat format with tools")
    # An answer that only calls tools has no words; every template takes "" but not every one takes null.
    content = "" if calls and message.get("content") is None else message.get("content")
    message["content"] = _content(content, f"the content of {what}", place)
    if role == "assistant" and not calls and not message["content"].strip():
        place.fail(f"{what} is an empty answer: there is nothing to learn", _DELETE)
    return message


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in cast(list[Any], value))


def _require_answer(messages: Sequence[Message], name: str, place: _Place) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        place.fail(f'"{name}" has no assistant message: there is nothing to learn', _DELETE)


def _tools(value: Any, place: _Place) -> list[Any] | None:
    """The tools of a record: a list of objects, or the same as a JSON string, as some data sets have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            place.fail(f'"tools" is a string that is not JSON: {error}', "write the tools as a JSON list")
    if value is not None and not _is_list_of_objects(value):
        place.fail(f'"tools" must be a list of objects, this is {_type_name(value)}', "write a JSON list")
    return value or None


def load_split(data_dir: Path, split: str, columns: ColumnNames, *, required: bool) -> list[Record]:
    """All records of ``data_dir/{split}.jsonl`` (or ``.json``); [] if it is absent and not required.

    Args:
        split: "train", "valid" or "test".

    Raises:
        DataError: the folder, or a required file, is missing or unreadable, or a record is malformed.
    """
    try:
        if data_dir.is_file():
            hint = f"give the folder that holds train.jsonl: --data {data_dir.parent}"
            raise DataError("this is a file, a folder is needed", where=str(data_dir), hint=hint)
        if not data_dir.exists():
            hint = "check --data; it takes a folder with train.jsonl and perhaps valid.jsonl, test.jsonl"
            raise DataError("the data folder does not exist", where=str(data_dir), hint=hint)
        names = sorted(entry.name for entry in data_dir.iterdir())
    except OSError as error:
        hint = "give yourself permission to read the folder: chmod u+rx FOLDER"
        raise DataError(f"cannot read the folder: {error.strerror}", where=str(data_dir), hint=hint) from error
    for name in (f"{split}.jsonl", f"{split}.json"):
        if name in names:
            return list(read_records(data_dir / name, columns))
    if not required:
        return []
    there = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") if names else "nothing"
    raise DataError(
        f"{split}.jsonl is missing; the folder holds {there}",
        where=str(data_dir),
        hint=f"name the file {split}.jsonl, or check --data",
    )


# mlx_lm's defaults for the keys of `hf_dataset`.
_DEFAULT_SPLITS = {"train": "train[:80%]", "valid": "train[-10%:]", "test": None}
_HF_KEYS = {
    "path",
    "config",
    *ColumnNames.__dataclass_fields__,
    *(f"{name}_split" for name in _DEFAULT_SPLITS),
}


def load_hf_dataset(spec: Mapping[str, Any] | Sequence[Mapping[str, Any]], split: str) -> list[Record]:
    """One split ("train", "valid" or "test") of the dataset or datasets that ``hf_dataset`` describes.

    Several datasets follow each other. A split set to None gives no records.

    Raises:
        ConfigError: a key is unknown, or ``path`` is missing.
        DataError: the library is not installed, the dataset cannot be loaded, or a record is malformed.
    """
    specs = [spec] if isinstance(spec, Mapping) else spec
    return [record for one in specs for record in _load_one_hf(one, split)]


def _load_one_hf(spec: Mapping[str, Any], split: str) -> list[Record]:
    if unknown := sorted(set(spec) - set(_HF_KEYS)):
        raise ConfigError(
            f"unknown keys {_names(unknown)}",
            where="hf_dataset",
            hint=f"known keys: {', '.join(_HF_KEYS)}",
        )
    path = spec.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError("path is missing", where="hf_dataset", hint="name the dataset: path: OWNER/NAME")
    part = spec.get(f"{split}_split", _DEFAULT_SPLITS[split])
    if part is None:
        return []
    columns = ColumnNames.from_options(spec)
    rows = _hf_rows(path, part, dict(spec.get("config") or {}))
    source = f"{path}[{part}]"
    return [parse_record(dict(row), columns, source=source, line=n) for n, row in enumerate(rows, start=1)]


def _hf_rows(path: str, part: str, options: dict[str, Any]) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # optional, and slow to import
    except ImportError as error:
        raise DataError(
            "the datasets library is not installed", where="hf_dataset", hint="pip install datasets"
        ) from error
    try:
        return datasets.load_dataset(path, split=part, **options)
    except Exception as error:  # the library raises many kinds: network, missing name, bad split, parsing
        raise DataError(
            f"cannot load the split {part!r}: {type(error).__name__}: {error}",
            where=path,
            hint="check the name, the split and the network; `huggingface-cli login` for a private dataset",
        ) from error
