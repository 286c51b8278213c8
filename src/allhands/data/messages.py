"""Check of one record's messages; other spellings of roles, calls and reasoning are translated to
the usual ones.

A message that is certainly broken raises a :class:`DataError`: no role, no content, an empty
answer, a tool call without a name, the answer of a tool that no message can have called. Suspicious
messages are reported elsewhere (:mod:`allhands.data.shapes`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from allhands.data.calls import CALL_ROLES, calls_of_words, with_tool_calls
from allhands.data.values import (
    DELETE,
    ValuePlace,
    as_json,
    check_string,
    is_list_of_objects,
    key_list,
    list_if_text,
    parse_json,
    quoted,
    type_name,
    without_nulls,
)
from allhands.errors import DataError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
INSTRUCTION_ROLES = ("system", "developer")
# Keys by which a message says whether it is trained: 0 or false, 1 or true.
_WEIGHTS = ("weight", "loss_weight", "train")
TOOL_ROLES = ("tool", "function", "ipython")
# Keys of a message that may hold the thinking before its answer.
REASONING_KEYS = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "reasoning_text",
    "thinking_content",
    "thought",
    "thoughts",
    "chain_of_thought",
    "analysis",
)
# Columns with words that a question may need; no shape reads them.
CONTEXT_KEYS = ("context", "passage", "paragraph", "background", "evidence")
# Pictures and sound that belong to a message or a record.
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
_OTHER_ROLES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("gpt", "model", "chatgpt", "bot", "ai"), "assistant"),
    # "function" is OpenAI's older name for the role of tools.
    **dict.fromkeys(("observation", "function_response", "tool_response", "function"), "tool"),
    "human": "user",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("thinking", "reasoning")


def asks_only(value: Any) -> bool:
    """Return True for a list of messages whose last one is not an assistant's."""
    last = value[-1] if isinstance(value, list) and value else None
    role = last.get("role", last.get("from")) if isinstance(last, dict) else None
    return (
        isinstance(role, str) and _OTHER_ROLES.get(role.strip().lower(), "assistant") != "assistant"
    )


def messages_of_text(value: Any) -> list[Any] | None:
    """Return the messages in a string of JSON or Python; None if it is not a list of objects, each
    with a role.
    """
    try:
        items = list_if_text(value, "", ValuePlace("", 0)) if isinstance(value, str) else None
    except DataError:
        return None
    if not items or not is_list_of_objects(items):
        return None
    return items if all("role" in item or "from" in item for item in items) else None


def is_sharegpt(value: Any) -> bool:
    """Return True for a list of messages if one of them has ``from`` and ``value`` (ShareGPT)."""
    return isinstance(value, list) and any(
        isinstance(item, dict) and _is_foreign(item) for item in value
    )


def _is_foreign(message: Message) -> bool:
    written = message.get("role") is not None and message.get("content") is not None
    return not written and (message.get("from") is not None or message.get("value") is not None)


def check_messages(
    value: Any, name: str, place: ValuePlace, *, sharegpt: bool = False
) -> list[Message]:
    """Return the messages of a list, or of a string that holds one: each with a known role and a
    string as content.

    ``from`` and ``value`` become ``role`` and ``content`` where a message lacks these; with
    ``sharegpt``, in every message. Other names of roles (human, gpt, model, observation, function)
    become the usual ones, and older forms of tool calls become ``tool_calls``. Keys that are null
    are dropped, other keys are kept.

    Raises:
        DataError: with ``name[index]`` in the message.
    """
    items = list_if_text(value, quoted(name), place)
    if not isinstance(items, list):
        place.fail(
            f"{quoted(name)} is {type_name(items)}, it must be a list of messages",
            'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
            code="field-of-wrong-type",
        )
    if not items:
        place.fail(f"{quoted(name)} has no message", DELETE, code="field-empty")
    # A table (Arrow, Parquet) gives each message the fields of all others, as nulls.
    padded = (
        len(items) > 1
        and is_list_of_objects(items)
        and all(item.keys() == items[0].keys() for item in items)
    )
    padded = padded and any(value is None for item in items for value in item.values())
    return [
        check_message(item, f"{name}[{index}]", place, sharegpt=sharegpt, padded=padded)
        for index, item in enumerate(items)
    ]


def check_message(
    value: Any, what: str, place: ValuePlace, *, sharegpt: bool = False, padded: bool = False
) -> Message:
    """Return one message as :func:`check_messages` does; ``what`` names the message in errors.

    Raises:
        DataError: something in it is certainly broken.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        value = parse_json(value, what, place)
    if not isinstance(value, dict):
        place.fail(
            f"{what} is {type_name(value)}, it must be an object",
            "give it a role and a content",
            code="field-of-wrong-type",
        )
    message = _translated(without_nulls(value), what, place, sharegpt=sharegpt)
    role, reasoning = _role(message, what, place), None
    message["role"] = role
    if role == "assistant":
        message = _with_parts_apart(message, what, place)
    message = with_tool_calls(message, what, place, padded=padded)
    if role == "assistant":
        message, reasoning = _with_one_reasoning(message, what, place)
    # An answer that only calls tools or thinks has no words.
    wordless = bool(message.get("tool_calls") or reasoning)
    message["content"] = _content(
        message.get("content"), f"the content of {what}", place, wordless=wordless
    )
    if role == "assistant" and not (wordless or message["content"].strip()):
        place.fail(
            f"{what} is an empty answer: there is nothing to learn", DELETE, code="field-empty"
        )
    return message if len(message) == 2 else as_json(message, what, place)


def _role(message: Message, what: str, place: ValuePlace) -> str:
    """Return the usual name of a message's role."""
    role = message.get("role")
    if role is None:
        place.fail(
            f"{what} has no role; its keys are {key_list(message)}",
            'name the keys "role" and "content"',
            code="role-unknown",
        )
    known = _OTHER_ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        place.fail(
            f"{what} has the unknown role {reprlib.repr(role)}",
            f"a role is one of {', '.join(ROLES)}",
            code="role-unknown",
        )
    return known


def _content(value: Any, what: str, place: ValuePlace, *, wordless: bool) -> str:
    """A message's content as one string; a list of text parts is joined.

    Args:
        wordless: a null content is allowed and becomes "", since not every template takes null.
    """
    if value is None and wordless:
        return ""
    if not isinstance(value, list):
        return check_string(value, what, place)
    texts: list[str] = []
    for part in value:
        fields = part if isinstance(part, dict) else {"text": part}
        if (kind := fields.get("type") or "text") not in _TEXT_PARTS:
            place.fail(
                f"{what} has a part of type {quoted(kind)}",
                'only text can be trained on; write a tool\'s answer as a message of role "tool" of its own',
                code="field-of-wrong-type",
            )
        words = fields.get("text")
        texts.append(
            check_string(
                fields.get("value") if words is None else words, f"a part of {what}", place
            )
        )
    return "".join(texts)


def _with_parts_apart(message: Message, what: str, place: ValuePlace) -> Message:
    """Return an answer with its calls and thinking moved from content parts to keys of their own:
    ``tool_calls`` and ``reasoning_content``.
    """
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    apart: dict[str, list[Any]] = {"tool_calls": [], "reasoning_content": [], "content": []}
    for part in parts:
        apart[_key_of_part(part)].append(part)
    found: Message = {}
    if called := apart["tool_calls"]:
        found["tool_calls"] = [
            {"id": p.get("id"), "name": p.get("name"), "arguments": p.get("input")} for p in called
        ]
    if thought := apart["reasoning_content"]:
        found["reasoning_content"] = _reasoning_text(thought, f"the content of {what}", place)
    for key, value in found.items():
        if message.get(key) not in (None, "", [], value):
            kind = "tool_use" if key == "tool_calls" else "thinking"
            place.fail(
                f'{what} has "{key}" and parts of type "{kind}"',
                "keep one of the two",
                code="fields-contradict",
            )
    return {**message, **found, "content": apart["content"] or None} if found else message


def _key_of_part(part: Any) -> str:
    """Return the message key to which a part of a content belongs."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "tool_use":
        return "tool_calls"
    return "reasoning_content" if kind in _REASONING_PARTS else "content"


def _reasoning_text(value: Any, what: str, place: ValuePlace) -> Any:
    """Return thinking, given as a list of parts, as one string; any other value unchanged."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        fields = part if isinstance(part, dict) else {"text": part}
        words = next(
            (fields[key] for key in (*_REASONING_PARTS, "text") if fields.get(key) is not None),
            None,
        )
        texts.append(check_string(_reasoning_text(words, what, place), f"a part of {what}", place))
    return "".join(texts)


def _with_one_reasoning(
    message: Message, what: str, place: ValuePlace
) -> tuple[Message, str | None]:
    """Return an answer with its thinking under one key, and the thinking (None without any)."""
    texts = {
        key: _reasoning_text(message[key], f"{key} of {what}", place)
        for key in REASONING_KEYS
        if key in message
    }
    texts = {key: text for key, text in texts.items() if isinstance(text, str)}
    first = next((key for key, text in texts.items() if text.strip()), None)
    if len({text.strip() for text in texts.values()} - {""}) > 1:
        named = " and ".join(f'"{key}"' for key in texts)
        place.fail(
            f"{what} has {named}, and they say different things",
            "keep one of them",
            code="fields-contradict",
        )
    kept = {
        key: texts.get(key, value)
        for key, value in message.items()
        if key == first or key not in texts
    }
    return kept, None if first is None else texts[first]


def _translated(message: Message, what: str, place: ValuePlace, *, sharegpt: bool) -> Message:
    """Rename ShareGPT's ``from`` and ``value`` to ``role`` and ``content``; turn a function call
    into an assistant's tool call.

    If a message has ``role`` and ``content`` too, these count, and ``from`` and ``value`` are kept
    like any other key.
    """
    rest = {key: item for key, item in message.items() if key not in ("role", "content")}
    speaker, words = message.get("role"), message.get("content")
    if sharegpt or _is_foreign(message):
        speaker = speaker if "role" in message else rest.pop("from", None)
        words = words if "content" in message else rest.pop("value", None)
    if isinstance(speaker, str) and speaker.strip().lower() in CALL_ROLES:
        return {
            "role": "assistant",
            "content": "",
            **rest,
            "tool_calls": calls_of_words(words, what, place),
        }
    return without_nulls({"role": speaker, "content": words}) | rest


def require_answer(messages: Sequence[Message], name: str, place: ValuePlace) -> None:
    """Require an assistant message: there must be something to learn.

    Raises:
        DataError: no message is an assistant's.
    """
    if not any(message["role"] == "assistant" for message in messages):
        place.fail(
            f"{quoted(name)} has no assistant message: there is nothing to learn",
            DELETE,
            code="answer-missing",
        )


def check_tool_answers(messages: Sequence[Message], name: str, place: ValuePlace) -> None:
    """Require a call before each answer of a tool, as far as calls can be recognised.

    Raises:
        DataError: a tool answers where no assistant message can have asked for it.
    """
    called, before = False, ""
    for message in messages:
        role = message["role"]
        # A call may be written in the words of the answer, so an answer right before it is enough
        # here.
        if role in TOOL_ROLES and not called and before not in ("assistant", *TOOL_ROLES):
            place.fail(
                f"{quoted(name)} has a tool's answer that no assistant message asked for",
                "put the assistant message with its tool_calls before it, or delete the record",
                code="tool-answer-uncalled",
            )
        called = bool(message.get("tool_calls")) if role == "assistant" else called
        before = role


def merged_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each system message before the question that follows it, as
    ``--system merge`` renders them.
    """
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


def is_untrained(message: Message) -> bool:
    """Return True if a key of the message says that it is not trained."""
    return any(message.get(key, 1) == 0 for key in _WEIGHTS)


def weight_of(message: Message, index: int) -> int | None:
    """Return 1 or 0 if the message says whether it is trained; else ``None``.

    Raises:
        DataError: the weight is invalid, or weight 1 is given to a message that is not an answer.
    """
    given = {key: message[key] for key in _WEIGHTS if message.get(key) is not None}
    if not given:
        return None
    for key, value in given.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f'messages[{index}]: "{key}" is {value!r}, it must be 0 or 1',
                code="message-weight-invalid",
                hint="0 leaves the answer out of the loss, 1 trains it; parts of a weight are not supported",
            )
    if len(set(given.values())) > 1:
        raise DataError(
            f"messages[{index}]: {given} contradict each other",
            code="message-weight-invalid",
            hint="keep one of these keys",
        )
    weight = int(next(iter(given.values())))
    if weight and message["role"] != "assistant":
        raise DataError(
            f'messages[{index}]: "{next(iter(given))}" asks for a message of role {message["role"]} to be trained',
            code="message-weight-invalid",
            hint="--mask-prompt trains assistant messages only: give the others weight 0, or remove the key",
        )
    return weight
