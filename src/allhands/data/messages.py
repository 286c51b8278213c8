"""Messages of one record, checked, with other spellings of roles, calls and reasoning translated to the usual ones.

What is certainly broken is a :class:`DataError`: no role, no content, an empty answer, a tool call without a
name, the answer of a tool that nobody can have called. What is only suspicious is no matter of this module
(see :mod:`allhands.data.shapes`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, cast

from allhands.data.calls import CALL_ROLES, calls_of_words, with_tool_calls
from allhands.data.values import (
    DELETE,
    ValuePlace,
    as_json,
    check_string,
    is_list_of_objects,
    is_list_text,
    key_list,
    list_if_text,
    list_of_text,
    parse_json,
    quoted,
    type_name,
    without_nulls,
)
from allhands.errors import DataError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

INSTRUCTION_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "function", "ipython")
# Where the thinking before an answer may stand, besides in its words.
REASONING_KEYS = (
    *("reasoning_content", "reasoning", "thinking", "reasoning_text", "thinking_content", "thought", "thoughts"),
    *("chain_of_thought", "analysis"),
)
# Words that a question may need beside it, which no shape takes.
CONTEXT_KEYS = ("context", "passage", "paragraph", "background", "evidence")
# Pictures and sound that belong to a message or a record.
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
_OTHER_ROLES = {
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
    # OpenAI's name for it before there were tools.
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("thinking", "reasoning")


def asks_only(value: Any) -> bool:
    """Whether a value is a list of messages that ends with another than an assistant's."""
    last = cast(list[Any], value)[-1] if isinstance(value, list) and value else None
    role = cast(Message, last).get("role", cast(Message, last).get("from")) if isinstance(last, dict) else None
    return isinstance(role, str) and _OTHER_ROLES.get(role.strip().lower(), "assistant") != "assistant"


def messages_of_text(value: Any) -> list[Any] | None:
    """The messages that a string holds as JSON or as Python's; None if it holds no list of objects with a role."""
    if not is_list_text(value):
        return None
    try:
        items = list_of_text(value, "", ValuePlace("", 0))
    except DataError:
        return None
    spoken = is_list_of_objects(items) and all("role" in item or "from" in item for item in items)
    return cast(list[Any], items) if spoken and items else None


def is_sharegpt(value: Any) -> bool:
    """Whether a value is a list of messages one of which is written with ``from`` and ``value``."""
    return isinstance(value, list) and any(
        isinstance(item, dict) and _is_foreign(cast(Message, item)) for item in cast(list[Any], value)
    )


def _is_foreign(message: Message) -> bool:
    written = message.get("role") is not None and message.get("content") is not None
    return not written and (message.get("from") is not None or message.get("value") is not None)


def check_messages(value: Any, name: str, place: ValuePlace, *, sharegpt: bool = False) -> list[Message]:
    """The messages of a list, or of a string that holds one: each with a known role and a string as content.

    A message that is written with ``from`` and ``value`` is translated wherever it stands, and with ``sharegpt``
    in every message of the list. Other names of roles (human, gpt, model, observation, function) become the usual
    ones, older forms of tool calls ``tool_calls``. Keys that are null are dropped, other keys are kept.

    Raises:
        DataError: with ``name[index]`` in the message.
    """
    if isinstance(value, str):
        value = list_if_text(value, quoted(name), place)
    if not isinstance(value, list):
        place.fail(
            f"{quoted(name)} is {type_name(value)}, it must be a list of messages",
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    items = cast(list[Any], value)
    if not items:
        place.fail(f"{quoted(name)} has no message", DELETE)
    padded = is_padded(items)
    return [
        check_message(item, f"{name}[{index}]", place, sharegpt=sharegpt, padded=padded)
        for index, item in enumerate(items)
    ]


def is_padded(items: Sequence[Any]) -> bool:
    """Whether messages come from a table (Arrow, Parquet), which gives each the fields of all others, as nulls."""
    if len(items) < 2 or not is_list_of_objects(items):
        return False
    keys = set(items[0])
    return all(set(item) == keys for item in items) and any(value is None for item in items for value in item.values())


def check_message(value: Any, what: str, place: ValuePlace, *, sharegpt: bool = False, padded: bool = False) -> Message:
    """One message as :func:`check_messages` gives it; ``what`` names it in errors.

    Raises:
        DataError: something in it is certainly broken.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        value = parse_json(value, what, place)
    if not isinstance(value, dict):
        place.fail(f"{what} is {type_name(value)}, it must be an object", "give it a role and a content")
    message = _translated(without_nulls(cast(Message, value)), what, place, sharegpt=sharegpt)
    role = message["role"] = _role(message, what, place)
    if role == "assistant":
        message = _with_parts_apart(message, what, place)
    message = with_tool_calls(message, what, place, padded=padded)
    calls, reasoning = message.get("tool_calls"), None
    if role == "assistant":
        message, reasoning = _with_one_reasoning(message, what, place)
    # An answer that only calls tools or thinks has no words; every template takes "" but not every one takes null.
    content = "" if (calls or reasoning) and message.get("content") is None else message.get("content")
    message["content"] = _content(content, f"the content of {what}", place)
    if role == "assistant" and not (calls or reasoning or message["content"].strip()):
        place.fail(f"{what} is an empty answer: there is nothing to learn", DELETE)
    return message if len(message) == 2 else as_json(message, what, place)


def _role(message: Message, what: str, place: ValuePlace) -> str:
    """The usual name of a message's role."""
    role = message.get("role")
    if role is None:
        place.fail(f"{what} has no role; its keys are {key_list(message)}", 'name the keys "role" and "content"')
    known = _OTHER_ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        place.fail(f"{what} has the unknown role {reprlib.repr(role)}", f"a role is one of {', '.join(ROLES)}")
    return known


def _content(value: Any, what: str, place: ValuePlace) -> str:
    """A message's content as one string; a list of text parts is joined."""
    if not isinstance(value, list):
        return check_string(value, what, place)
    return "".join(_text_of_part(part, what, place) for part in cast(list[Any], value))


def _text_of_part(part: Any, what: str, place: ValuePlace) -> str:
    fields = cast(dict[str, Any], part) if isinstance(part, dict) else {"text": part}
    kind = fields.get("type") or "text"
    if kind == "tool_result":
        place.fail(f"{what} has a part of type {quoted(kind)}", 'write it as a message of role "tool" of its own')
    if kind not in _TEXT_PARTS:
        place.fail(f"{what} has a part of type {quoted(kind)}", "only text can be trained on: remove the part")
    words = fields.get("text")
    return check_string(fields.get("value") if words is None else words, f"a part of {what}", place)


def _with_parts_apart(message: Message, what: str, place: ValuePlace) -> Message:
    """An answer whose parts that are calls or thinking stand where other people's answers have them."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    called, thought, rest = list[Any](), list[Any](), list[Any]()
    for part in cast(list[Any], parts):
        kind = cast(Message, part).get("type") if isinstance(part, dict) else None
        (called if kind == "tool_use" else thought if kind in _REASONING_PARTS else rest).append(part)
    if called:
        if message.get("tool_calls"):
            place.fail(f'{what} has "tool_calls" and parts of type "tool_use"', "keep one of the two")
        names = {"id": "id", "name": "name", "arguments": "input"}
        calls = [{ours: part.get(theirs) for ours, theirs in names.items()} for part in called]
        message = {**message, "tool_calls": calls}
    if thought:
        text = _reasoning_text(thought, f"the content of {what}", place)
        if message.get("reasoning_content") not in (None, "", text):
            place.fail(f'{what} has "reasoning_content" and parts that are thinking', "keep one of the two")
        message = {**message, "reasoning_content": text}
    return {**message, "content": rest or None} if called or thought else message


def _reasoning_text(value: Any, what: str, place: ValuePlace) -> Any:
    """Thinking as one string, of a list of parts; anything else as it is."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in cast(list[Any], value):
        fields = cast(Message, part) if isinstance(part, dict) else {"text": part}
        words = next((fields[key] for key in (*_REASONING_PARTS, "text") if fields.get(key) is not None), None)
        texts.append(check_string(_reasoning_text(words, what, place), f"a part of {what}", place))
    return "".join(texts)


def _with_one_reasoning(message: Message, what: str, place: ValuePlace) -> tuple[Message, str | None]:
    """An answer whose thinking stands under one key, and that thinking."""
    found: dict[str, str] = {}
    for key in REASONING_KEYS:
        if key in message:
            text = _reasoning_text(message[key], f"{key} of {what}", place)
            if isinstance(text, str) and text.strip():
                found[key] = text
            elif isinstance(text, str):
                message = {name: value for name, value in message.items() if name != key}
    if not found:
        return message, None
    first, *others = found
    if any(found[key].strip() != found[first].strip() for key in others):
        named = " and ".join(f'"{key}"' for key in found)
        place.fail(f"{what} has {named}, and they say different things", "keep one of them")
    message = {name: value for name, value in message.items() if name not in others}
    return message | {first: found[first]}, found[first]


# ShareGPT


def _translated(message: Message, what: str, place: ValuePlace, *, sharegpt: bool) -> Message:
    """``from`` and ``value`` as ``role`` and ``content``, a function call as an assistant's tool call.

    Where a message has role and content as well, those count and the others are kept like any other key.
    """
    if not (sharegpt or _is_foreign(message)):
        speaker, rest = message.get("role"), message
        words = message.get("content")
    else:
        rest = {key: item for key, item in message.items() if key not in ("role", "content")}
        speaker = message["role"] if "role" in message else rest.pop("from", None)
        words = message["content"] if "content" in message else rest.pop("value", None)
    role = speaker.strip().lower() if isinstance(speaker, str) else speaker
    if role in CALL_ROLES:
        rest = {key: item for key, item in rest.items() if key not in ("role", "content")}
        return {"role": "assistant", "content": "", **rest, "tool_calls": calls_of_words(words, what, place)}
    return without_nulls({"role": speaker, "content": words}) | rest


def require_answer(messages: Sequence[Message], name: str, place: ValuePlace) -> None:
    """Make sure that there is something to learn.

    Raises:
        DataError: no message is an assistant's.
    """
    if not any(message["role"] == "assistant" for message in messages):
        place.fail(f"{quoted(name)} has no assistant message: there is nothing to learn", DELETE)


def check_tool_answers(messages: Sequence[Message], name: str, place: ValuePlace) -> None:
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
