"""Examples of all shapes that ``data prepare`` reads, converted to the shapes that it writes.

Records go through the same code as in training (:mod:`allhands.data.records`). This module adds
preferences and rated answers, which are not trained on directly, and warnings about suspicious
records and unused columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from allhands.data.calls import called_function, parsed_arguments
from allhands.data.messages import (
    CONTEXT_KEYS,
    INSTRUCTION_ROLES,
    REASONING_KEYS,
    TOOL_ROLES,
    Message,
    check_messages,
    check_tool_answers,
    merged_system,
    require_answer,
)
from allhands.data.parts import ColumnNames, Parts
from allhands.data.records import (
    NEEDS,
    Record,
    Shape,
    as_turns,
    parts_of,
    rating,
    recognise,
    to_record,
    unread_keys,
)
from allhands.data.values import ValuePlace, quoted


@dataclass(frozen=True)
class Example:
    """One row of somebody's data, checked.

    Attributes:
        shape: the recognised shape: "chat", "chat with tools", "completion", "text", "alpaca",
            "sharegpt", "preference" or "rated".
        record: the record for training; None for a preference or a rated answer.
        preference: {"prompt": [messages], "chosen": [messages], "rejected": [messages]}, or for a
            rated answer {"prompt": [messages], "completion": [messages], "label": bool}; with
            "tools" if it has some.
        warnings: fixed phrases for suspicious content that was kept, and for columns that were not
            used. They are about the reading of the row, so comparisons of examples ignore them.
    """

    shape: str
    record: Record | None
    preference: dict[str, Any] | None
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON object, from which :func:`parse_example` makes the same
        example.
        """
        if self.preference is not None:
            return dict(self.preference)
        record = self.record
        assert record is not None
        if record.kind == "text":
            return {"text": record.text}
        tools = {"tools": record.tools} if record.tools else {}
        if record.kind == "completion":
            return {"prompt": record.prompt, "completion": record.completion, **tools}
        return {"messages": list(record.messages or ()), **tools}

    def texts(self) -> str:
        """Return all words of the example in order, with tool calls, joined by line breaks.

        The descriptions of the tools that could be called are left out: data sets repeat them in
        every row.
        """
        if self.preference is not None:
            lists = [
                self.preference.get(key, [])
                for key in ("prompt", "chosen", "rejected", "completion")
            ]
            return "\n".join(spoken_words(message for messages in lists for message in messages))
        record = self.record
        assert record is not None
        return record.text or "" if record.kind == "text" else "\n".join(spoken_words(record.turns))


def with_merged_system(example: Example) -> Example:
    """Return the example with its system messages before the questions that follow them."""
    warnings = tuple(
        warning for warning in example.warnings if warning not in (TWO_SYSTEM, LATE_SYSTEM)
    )
    if example.preference is not None:
        prompt = {"prompt": merged_system(example.preference["prompt"])}
        return replace(example, preference={**example.preference, **prompt}, warnings=warnings)
    record = example.record
    if record is None or not any(message["role"] in INSTRUCTION_ROLES for message in record.turns):
        return example
    if record.messages is not None:
        changed = replace(record, messages=tuple(merged_system(record.messages)))
    else:
        changed = replace(record, prompt=merged_system(as_turns(record.prompt or "", "user")))
    return replace(example, record=changed, warnings=warnings)


def spoken_words(messages: Iterable[Message]) -> Iterator[str]:
    """Yield the words of each message, in order: thinking, content, tool calls."""
    for message in messages:
        yield from (
            thought for key in REASONING_KEYS if isinstance(thought := message.get(key), str)
        )
        if message["content"]:
            yield message["content"]
        for call in message.get("tool_calls") or ():
            function = called_function(call)
            arguments = function.get("arguments", "")
            written = (
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False)
            )
            yield f"{function['name']} {written}"


def parse_example(
    value: Any, columns: ColumnNames, *, source: str, line: int, empty_texts: bool = False
) -> Example:
    """Return one decoded JSON value as an example.

    :func:`allhands.data.records.recognise` has the rules for shapes. A row with a true or false
    ``label`` is a rated answer, unless it is a text or a preference.

    Errors are for faults that cannot be meant: parts that are missing or of a wrong type, empty
    answers, a tool call without a name, a tool's answer without a call, a preference between equal
    answers. Warnings are for content that may be meant: see the phrases in this module. A last
    question without an answer is kept, since the answers before it train.

    Args:
        empty_texts: an empty text is a warning, not an error.

    Raises:
        DataError: the row is faulty; ``where`` is ``source:line``.
    """
    parts = parts_of(value, columns, ValuePlace(source, line))
    shape = recognise(parts)
    if shape == "preference":
        return _preference(parts)
    record = to_record(parts, shape, empty_texts=empty_texts)
    label = rating(parts, shape)
    if label is not None:
        return _rated(parts, record, label, shape)
    with_tools = shape == "chat" and (
        record.tools or any(message.get("tool_calls") for message in record.turns)
    )
    name = "chat with tools" if with_tools else shape
    return Example(
        name, record, None, (*suspicions_of(record), *_unused(parts, shape, record.unread))
    )


def _preference(parts: Parts) -> Example:
    chosen, rejected = _answers(parts, "chosen"), _answers(parts, "rejected")
    if chosen == rejected:
        parts.fail(
            f"{parts.quoted('chosen', 'rejected')} are the same: there is nothing to prefer",
            "delete the record",
            code="preference-invalid",
        )
    tools, prompt, differs = parts.tools(), _question(parts), False
    if prompt is None or not chosen[0]["role"] == rejected[0]["role"] == "assistant":
        end = _shared(parts, chosen, rejected, prompt)
        words = {message["content"].strip() for message in chosen[:end]}
        differs = any(message["content"].strip() not in words for message in prompt or ())
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    prompt = parts.with_system(prompt)
    seen: list[str] = []
    for part, answer in (("chosen", chosen), ("rejected", rejected)):
        check_tool_answers([*prompt, *answer], parts.names[part], parts.place)
        seen += suspicions([*prompt, *answer])
    found = {"prompt": prompt, "chosen": chosen, "rejected": rejected} | (
        {"tools": tools} if tools else {}
    )
    warnings = (
        *dict.fromkeys(seen),
        *(PROMPT_DIFFERS,) * differs,
        *_unused(parts, "preference", unread_keys(parts, "preference")),
    )
    return Example("preference", None, found, warnings)


def _shared(
    parts: Parts, chosen: list[Message], rejected: list[Message], prompt: list[Message] | None
) -> int:
    """Return the number of messages that make the question of two whole conversations.

    Both conversations share these messages and continue with an answer.

    Raises:
        DataError: there is no such question.
    """
    same = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), len(chosen)
    )
    for end in range(min(same, len(chosen) - 1, len(rejected) - 1), 0, -1):
        if chosen[end]["role"] == rejected[end]["role"] == "assistant":
            return end
    lonely = prompt is None and len(chosen) == len(rejected) == 1
    what = "have no question before them" if lonely else "do not answer the same question"
    parts.fail(
        f"{parts.quoted('chosen', 'rejected')} {what}",
        "give the question as prompt (or prompt_feature), or let both begin with the same messages",
        code="preference-invalid",
    )


def _answers(parts: Parts, part: str) -> list[Message]:
    """Return a chosen or rejected answer, given as a string, a message or a list of messages."""
    value = parts.get(part)
    if isinstance(value, str):
        value = as_turns(value, "assistant")
    messages = check_messages(
        [value] if isinstance(value, dict) else value,
        parts.names[part],
        parts.place,
        sharegpt=parts.mapped(part),
    )
    require_answer(messages, parts.names[part], parts.place)
    return messages


def _question(parts: Parts) -> list[Message] | None:
    """Return the question of a preference if it has its own column; None if not."""
    if parts.has("prompt"):
        return as_turns(parts.text_or_messages("prompt"), "user")
    for part in ("chat", "conversation"):
        if parts.has(part):
            return parts.messages(part, sharegpt=True)
    if parts.has("instruction"):
        return [*parts.history(), *as_turns(parts.question(), "user")]
    return None


def _rated(parts: Parts, record: Record, label: bool, shape: Shape) -> Example:
    """Return the example of a rated answer: the last message of a chat, or the whole completion.

    Raises:
        DataError: the conversation does not end with an answer, or has no question before it.
    """
    turns = record.turns
    count = 1 if record.completion is None else len(as_turns(record.completion, "assistant"))
    prompt, completion = turns[:-count], turns[-count:]
    if completion[-1]["role"] != "assistant":
        parts.fail(
            "a rated conversation must end with the answer that was rated",
            "delete what follows it",
            code="preference-invalid",
        )
    if not prompt:
        parts.fail(
            "a rated answer has no question before it",
            "put the question before it",
            code="preference-invalid",
        )
    found = {"prompt": prompt, "completion": completion, "label": label}
    found |= {"tools": record.tools} if record.tools else {}
    return Example(
        "rated", None, found, (*suspicions(turns), *_unused(parts, shape, record.unread))
    )


# Warnings

TWO_SYSTEM = "more than one system message"
LATE_SYSTEM = "system message not at the beginning"
STARTS_WITH_ANSWER = "begins with an answer"
NO_LAST_ANSWER = "does not end with an answer"
EMPTY_QUESTION = "empty question"
SAME_ROLE = "two messages in a row from the same side"
UNANSWERED_CALL = "tool call without a tool's answer"
UNCALLED_TOOL = "tool's answer without a tool call"
ARGUMENTS_NOT_JSON = "tool call whose arguments are not a JSON object"
PROMPT_DIFFERS = "the prompt is not part of the conversations of a preference, and not used"
EMPTY_TEXT = "the text is empty: training leaves it out"

_NOT_TRAINED = "beside the answer is not trained"
_LEFT_OUT = "is not used: the model will not see it"

# Remedies by phrase; for a phrase that names a column see `remedy_of_warning`.
_REMEDIES = {
    TWO_SYSTEM: "most chat templates use one or none: join them into the first",
    LATE_SYSTEM: "put it first: most chat templates refuse or misplace it elsewhere",
    STARTS_WITH_ANSWER: "put the question before it, or delete that message: many templates refuse it",
    NO_LAST_ANSWER: "the last question is never answered, so it teaches nothing: delete it or add the answer",
    EMPTY_QUESTION: "fill it in or delete the record",
    SAME_ROLE: "join them into one message: many templates refuse it",
    UNANSWERED_CALL: "add the tool's answer, or end the conversation with the call",
    UNCALLED_TOOL: "write the call as tool_calls of the answer before it",
    ARGUMENTS_NOT_JSON: "write them as an object; the model learns them as they stand",
    PROMPT_DIFFERS: "make both conversations begin with the prompt",
    EMPTY_TEXT: "nothing is needed; delete the record to avoid this message",
}


def remedy_of_warning(warning: str) -> str:
    """Return the remedy for one of the warnings of an :class:`Example`."""
    if warning.endswith(_NOT_TRAINED):
        return "write it before the words of the answer (<think>...</think>), or into its message as reasoning_content"
    if warning.endswith(_LEFT_OUT):
        return "join it to the question where an answer needs it: write both into one column"
    if warning.startswith('"system" is not used'):
        return 'write it as the first message, of role "system"'
    return _REMEDIES.get(warning, "rename the column, or map it to the part that it is")


def suspicions_of(record: Record) -> tuple[str, ...]:
    """Return the warnings about a record; see :func:`suspicions`."""
    return (EMPTY_TEXT,) if record.is_blank else suspicions(record.turns)


def suspicions(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return warnings about checked messages: fixed phrases that can be counted, each once.

    A conversation that ends with a tool call has no warning: such data teach calling.
    """
    return tuple(dict.fromkeys([*_about_order(messages), *_about_tools(messages)]))


def _about_order(messages: Sequence[Message]) -> Iterator[str]:
    roles = [message["role"] for message in messages]
    instructions = [index for index, role in enumerate(roles) if role in INSTRUCTION_ROLES]
    spoken = [role for role in roles if role not in INSTRUCTION_ROLES]
    signs = {
        TWO_SYSTEM: len(instructions) > 1,
        LATE_SYSTEM: len(instructions) == 1 and instructions[0] > 0,
        STARTS_WITH_ANSWER: spoken[:1] == ["assistant"],
        NO_LAST_ANSWER: spoken[-1:] not in ([], ["assistant"]),
        SAME_ROLE: any(one == after and one not in TOOL_ROLES for one, after in pairwise(spoken)),
        EMPTY_QUESTION: any(
            message["role"] == "user" and not message["content"].strip() for message in messages
        ),
    }
    yield from (warning for warning, is_there in signs.items() if is_there)


def _about_tools(messages: Sequence[Message]) -> Iterator[str]:
    called = False
    for index, message in enumerate(messages):
        role, calls = message["role"], message.get("tool_calls") or []
        if role in TOOL_ROLES and not called:
            yield UNCALLED_TOOL
        if role != "assistant":
            continue
        called = bool(calls)
        if called and index + 1 < len(messages) and messages[index + 1]["role"] not in TOOL_ROLES:
            yield UNANSWERED_CALL
        if not all(_has_object(called_function(call).get("arguments")) for call in calls):
            yield ARGUMENTS_NOT_JSON


def _has_object(arguments: Any) -> bool:
    """Return True for arguments that are an object, the JSON of an object, or blank."""
    return (
        not isinstance(arguments, str)
        or not arguments.strip()
        or parsed_arguments(arguments) is not arguments
    )


# Warnings for words under keys that no shape reads.
_UNREAD = dict.fromkeys(REASONING_KEYS, _NOT_TRAINED) | dict.fromkeys(CONTEXT_KEYS, _LEFT_OUT)
# The parts that each shape takes besides those that make it.
_TAKES = dict.fromkeys(("completion", "chat"), ("tools",)) | {
    "text": (),
    "sharegpt": ("tools", "system"),
}


def _unused(parts: Parts, shape: Shape, unread: Sequence[str]) -> Iterator[str]:
    """Yield warnings about columns that have a meaning but are not used in this record's shape."""
    yield from _unused_parts(parts, shape)
    yield from (f"{quoted(key)} {_UNREAD[key]}" for key in unread if key in _UNREAD)
    if shape != "preference" and parts.has("label") and rating(parts, shape) is None:
        yield f"{parts.quoted('label')} is not used in the shape {shape}"
    used = {parts.names[part] for part in NEEDS[shape]}
    for other, needs in NEEDS.items():
        # The column of a conversation may be the question of a preference; ShareGPT may stand under
        # messages.
        question = shape in ("preference", "sharegpt") and other in ("chat", "sharegpt")
        if (
            not question
            and parts.filled >= set(needs)
            and not used.issuperset(parts.names[part] for part in needs)
        ):
            yield f"read as {shape}, so its columns of the shape {other} are not used"


def _unused_parts(parts: Parts, shape: Shape) -> Iterator[str]:
    beside = ("system", "tools", "input", "history")
    # "input" is a common name, and means something beside an instruction only.
    instructed = parts.names["prompt"] == "instruction"
    for part in beside:
        # Shapes of mlx_lm have no system column: a column of the default name is ignored, but a
        # mapped one is put before the messages.
        is_mapped = parts.mapped(part)
        taken = part in _TAKES.get(shape, beside) or (
            part == "system" and is_mapped and shape != "text"
        )
        if is_mapped and part not in parts.found:
            yield f"the mapped column {parts.quoted(part)} is not there"
        elif not taken and parts.get(part) and (part != "input" or is_mapped or instructed):
            yield f"{parts.quoted(part)} is not used in the shape {shape}"
