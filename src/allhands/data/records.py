"""One training example: its shape recognised and everything about it checked. Nothing here knows files or tokens.

The shapes are those of mlx_lm: ``messages`` (with optional ``tools``), ``prompt`` + ``completion``, and
``text``. Everything wrong is a :class:`DataError` that names file and line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from allhands.errors import DataError

Message = dict[str, Any]
RecordKind = Literal["chat", "completion", "text"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAPES = '{"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'
SHORTEN = "shorten the number or the nesting that it names"

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
class Place:
    """Where a record begins, so that every check can raise with it."""

    source: str
    line: int

    def fail(self, message: str, hint: str | None = None) -> NoReturn:
        raise DataError(message, where=f"{self.source}:{self.line}", hint=hint)


def parse_record(value: Any, columns: ColumnNames, *, source: str, line: int) -> Record:
    """Check one decoded JSON value and recognise its shape (mlx_lm's order of precedence).

    Raises:
        DataError: with ``where="source:line"``.
    """
    place = Place(source, line)
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


def _string(value: Any, what: str, place: Place) -> str:
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


def _content(value: Any, what: str, place: Place) -> str:
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


def _text_or_messages(value: Any, name: str, place: Place) -> str | list[Message]:
    return _messages(value, name, place) if isinstance(value, list) else _string(value, f'"{name}"', place)


def _messages(value: Any, name: str, place: Place) -> list[Message]:
    if not isinstance(value, list):
        place.fail(
            f'"{name}" is {_type_name(value)}, it must be a list of messages',
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    items = cast(list[Any], value)
    if not items:
        place.fail(f'"{name}" has no message', _DELETE)
    return [_message(item, f"{name}[{index}]", place) for index, item in enumerate(items)]


def _message(value: Any, what: str, place: Place) -> Message:
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


def _require_answer(messages: Sequence[Message], name: str, place: Place) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        place.fail(f'"{name}" has no assistant message: there is nothing to learn', _DELETE)


def _tools(value: Any, place: Place) -> list[Any] | None:
    """The tools of a record: a list of objects, or the same as a JSON string, as some data sets have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            place.fail(f'"tools" is a string that is not JSON: {error}', "write the tools as a JSON list")
    if value is not None and not _is_list_of_objects(value):
        place.fail(f'"tools" must be a list of objects, this is {_type_name(value)}', "write a JSON list")
    return value or None
