"""Messages and tools of one record, checked, with ShareGPT's names translated to the usual ones.

What is certainly broken is a :class:`DataError`: no role, no content, an empty answer, a tool call without a
name, the answer of a tool that nobody can have called. What is only suspicious is no matter of this module
(see :mod:`allhands.data.shapes`).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any, NoReturn, cast

from allhands.errors import DataError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
DELETE = "fill it in or delete the record"

INSTRUCTION_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "function", "ipython")
_CALL_ROLES = ("function_call", "tool_call")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    **{role: role for role in ROLES},
}
_CALL_HINT = 'write {"type": "function", "function": {"name": "...", "arguments": {...}}}'


@dataclass(frozen=True)
class Place:
    """Where a record begins, so that every check can raise with it."""

    source: str
    line: int

    def fail(self, message: str, hint: str | None = None) -> NoReturn:
        raise DataError(message, where=f"{self.source}:{self.line}", hint=hint)


def type_name(value: Any) -> str:
    """What a JSON value is, in words, with its article."""
    if value is None:
        return "null or missing"
    names: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value)) or f"a value of type {type(value).__name__}"


def quoted(name: Any) -> str:
    """A key or other short text from the data, fit for a message: in quotes, printable, not too long."""
    text = name if isinstance(name, str) else reprlib.repr(name)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f'"{text.encode("utf-8", "backslashreplace").decode("utf-8")}"'


def key_list(names: Sequence[str] | Mapping[str, Any]) -> str:
    """The first keys, quoted, for a message."""
    more = ", ..." if len(names) > 12 else ""
    return (", ".join(quoted(name) for name in list(names)[:12]) or "none") + more


def is_list_of_objects(value: Any) -> bool:
    """Whether a JSON value is a list in which everything is an object."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in cast(list[Any], value))


def check_string(value: Any, what: str, place: Place) -> str:
    """The value if it is a string that UTF-8 can write.

    Raises:
        DataError: with ``what`` in the message.
    """
    if not isinstance(value, str):
        repair = DELETE if value is None else "write it as a string, in quotes"
        place.fail(f"{what} is {type_name(value)}, it must be a string", repair)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            _fail_on_surrogate(what, error, place)
    return value


def _fail_on_surrogate(what: str, error: UnicodeEncodeError, place: Place) -> NoReturn:
    bad = f"\\u{ord(error.object[error.start]):04x}"
    place.fail(f"{what} has half a surrogate pair ({bad})", "write the whole character, or remove it")


def asks_only(value: Any) -> bool:
    """Whether a value is a list of messages that ends with another than an assistant's."""
    last = cast(list[Any], value)[-1] if isinstance(value, list) and value else None
    role = cast(Message, last).get("role", cast(Message, last).get("from")) if isinstance(last, dict) else None
    return isinstance(role, str) and _SHAREGPT_ROLES.get(role.strip().lower(), "assistant") != "assistant"


def is_sharegpt(value: Any) -> bool:
    """Whether a value is a list of messages one of which is written with ``from`` and ``value``."""
    return isinstance(value, list) and any(
        isinstance(item, dict) and _is_foreign(cast(Message, item)) for item in cast(list[Any], value)
    )


def _is_foreign(message: Message) -> bool:
    written = message.get("role") is not None and message.get("content") is not None
    return not written and (message.get("from") is not None or message.get("value") is not None)


def check_messages(value: Any, name: str, place: Place, *, sharegpt: bool = False) -> list[Message]:
    """The messages of a list: each with a known role and a string as content.

    A message that is written with ``from`` and ``value`` is translated wherever it stands. ShareGPT's names
    of roles (human, gpt, function_call, observation) are known in such a message, and with ``sharegpt`` in
    every message of the list. Keys that are null are dropped, other keys are kept.

    Raises:
        DataError: with ``name[index]`` in the message.
    """
    if not isinstance(value, list):
        place.fail(
            f"{quoted(name)} is {type_name(value)}, it must be a list of messages",
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    items = cast(list[Any], value)
    if not items:
        place.fail(f"{quoted(name)} has no message", DELETE)
    return [check_message(item, f"{name}[{index}]", place, sharegpt=sharegpt) for index, item in enumerate(items)]


def check_message(value: Any, what: str, place: Place, *, sharegpt: bool = False) -> Message:
    """One message as :func:`check_messages` gives it; ``what`` names it in errors.

    Raises:
        DataError: something in it is certainly broken.
    """
    if not isinstance(value, dict):
        place.fail(f"{what} is {type_name(value)}, it must be an object", "give it a role and a content")
    message = {key: item for key, item in cast(Message, value).items() if item is not None}
    message = _translated(message, what, place, sharegpt=sharegpt)
    role = message.get("role")
    if role is None:
        place.fail(f"{what} has no role; its keys are {key_list(message)}", 'name the keys "role" and "content"')
    if role not in ROLES:
        known = _SHAREGPT_ROLES.get(role) if isinstance(role, str) else None
        meant = f"; here {quoted(known)}" if known else ""
        place.fail(f"{what} has the unknown role {reprlib.repr(role)}", f"a role is one of {', '.join(ROLES)}{meant}")
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(calls, what, place)
    # An answer that only calls tools has no words; every template takes "" but not every one takes null.
    content = "" if calls and message.get("content") is None else message.get("content")
    message["content"] = _content(content, f"the content of {what}", place)
    if role == "assistant" and not calls and not message["content"].strip():
        place.fail(f"{what} is an empty answer: there is nothing to learn", DELETE)
    return message if len(message) == 2 else _plain(message, what, place)


def _content(value: Any, what: str, place: Place) -> str:
    """A message's content as one string; a list of text parts is joined."""
    if not isinstance(value, list):
        return check_string(value, what, place)
    parts: list[str] = []
    for part in cast(list[Any], value):
        fields = cast(dict[str, Any], part) if isinstance(part, dict) else {"text": part}
        kind = fields.get("type") or "text"
        if kind not in ("text", "input_text", "output_text"):
            place.fail(f"{what} has a part of type {quoted(kind)}", "only text can be trained on: remove the part")
        words = fields.get("text")
        parts.append(check_string(fields.get("value") if words is None else words, f"a part of {what}", place))
    return "".join(parts)


def _plain(value: Any, what: str, place: Place) -> Any:
    """The value as UTF-8 JSON gives it back, so that it can be written, hashed and handed to a template."""
    if isinstance(value, str):
        return check_string(value, what, place)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_date_as_text)
        text.encode("utf-8")
        return json.loads(text)
    except UnicodeEncodeError as error:
        _fail_on_surrogate(what, error, place)
    except (TypeError, ValueError, RecursionError) as error:
        place.fail(f"{what} holds something that JSON cannot write: {error}", "write it as text, or remove it")


def _date_as_text(value: Any) -> str:
    # Tables date their messages; nothing is learnt from it, and it is no reason to refuse them.
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"{type_name(value)} is no JSON")


# ShareGPT


def _translated(message: Message, what: str, place: Place, *, sharegpt: bool) -> Message:
    """``from`` and ``value`` as ``role`` and ``content``, a function call as an assistant's tool call.

    Where a message has role and content as well, those count and the others are kept like any other key.
    """
    if not (sharegpt or _is_foreign(message)):
        return message
    rest = {key: item for key, item in message.items() if key not in ("role", "content")}
    speaker = message["role"] if "role" in message else rest.pop("from", None)
    words = message["content"] if "content" in message else rest.pop("value", None)
    role = speaker.strip().lower() if isinstance(speaker, str) else speaker
    if role in _CALL_ROLES:
        return {"role": "assistant", "content": "", **rest, "tool_calls": _calls(words, what, place)}
    head = {"role": _SHAREGPT_ROLES.get(role, speaker) if isinstance(role, str) else speaker, "content": words}
    return {key: item for key, item in head.items() if item is not None} | rest


def _calls(value: Any, what: str, place: Place) -> list[Any]:
    """A function call, or a list of them, as OpenAI's tool calls."""
    if isinstance(value, str):
        value = parse_json(value, f"{what}, a function call,", place)
    calls = cast(list[Any], value) if isinstance(value, list) else [value]
    if not calls or not is_list_of_objects(calls):
        place.fail(
            f"{what}, a function call, is {type_name(value)} without a call",
            'write {"name": "...", "arguments": {...}}, or a list of those',
        )
    return [_call(call, what, place) for call in calls]


def _call(call: dict[str, Any], what: str, place: Place) -> dict[str, Any]:
    inner = called_function(call)
    arguments = inner.get("arguments")
    arguments = inner.get("parameters") if arguments is None else arguments
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{what}: the arguments of the call", place) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        place.fail(f"{what}: the arguments of the call are {type_name(arguments)}", "write them as an object")
    return {"type": "function", "function": {"name": inner.get("name"), "arguments": cast(Message, arguments)}}


def parse_json(text: str, what: str, place: Place) -> Any:
    """A JSON value that stands in the data as a string.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        place.fail(f"{what} is a string that is not JSON: {error}", "write it as a JSON list or object")


# Tools


def called_function(call: dict[str, Any]) -> dict[str, Any]:
    """The part of a tool call that has name and arguments: the call itself, or what is under ``function``."""
    inner = call.get("function")
    return cast(dict[str, Any], inner) if isinstance(inner, dict) else call


def _check_calls(calls: Any, what: str, place: Place) -> None:
    if not is_list_of_objects(calls):
        place.fail(f"{what}: tool_calls must be a list of objects", "see the chat format with tools")
    for number, call in enumerate(cast(list[dict[str, Any]], calls), start=1):
        function = called_function(call)
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name.strip():
            place.fail(f"{what}: tool call {number} has no name", _CALL_HINT)
        if arguments is not None and not isinstance(arguments, dict | str):
            place.fail(f"{what}: the arguments of tool call {number} are {type_name(arguments)}", _CALL_HINT)


def check_tools(value: Any, name: str, place: Place) -> list[Any] | None:
    """The tools of a record: a list of objects, or the same as a JSON string, as some data sets have it.

    None for no tool.

    Raises:
        DataError: it is something else.
    """
    if isinstance(value, str):
        value = parse_json(value, quoted(name), place) if value.strip() else None
    if value is not None and not is_list_of_objects(value):
        place.fail(f"{quoted(name)} must be a list of objects, this is {type_name(value)}", "write a JSON list")
    return _plain(value, quoted(name), place) or None


def require_answer(messages: Sequence[Message], name: str, place: Place) -> None:
    """Make sure that there is something to learn.

    Raises:
        DataError: no message is an assistant's.
    """
    if not any(message["role"] == "assistant" for message in messages):
        place.fail(f"{quoted(name)} has no assistant message: there is nothing to learn", DELETE)


def check_tool_answers(messages: Sequence[Message], name: str, place: Place) -> None:
    """Make sure that tools speak only when called, as far as that can be told.

    Raises:
        DataError: a tool answers where no assistant message can have asked for it.
    """
    called, before = False, ""
    for message in messages:
        role = message["role"]
        # A call may be written in the words of the answer, so an answer right before it is enough here.
        if role in TOOL_ROLES and not called and before not in ("assistant", *TOOL_ROLES):
            place.fail(
                f"{quoted(name)} has a tool's answer that no assistant message asked for",
                "put the assistant message with its tool_calls before it, or delete the record",
            )
        called = bool(message.get("tool_calls")) if role == "assistant" else called
        before = role


def merged_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with each system message before the question that follows it, as ``--system merge`` renders them."""
    system, turns = "", list[Message]()
    for message in messages:
        if message["role"] in INSTRUCTION_ROLES:
            system += ("\n\n" if system else "") + message["content"]
            continue
        if system and message["role"] == "user":
            message = {**message, "content": f"{system}\n\n{message['content']}"}
        elif system:
            turns.append({"role": "user", "content": system})
        turns.append(message)
        system = ""
    return [*turns, {"role": "user", "content": system}] if system else turns
