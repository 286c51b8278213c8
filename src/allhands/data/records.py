"""One training example: its shape recognised and everything about it checked. Nothing here knows files or tokens.

The shapes are those of mlx_lm: ``messages`` (with optional ``tools``), ``prompt`` + ``completion``, and
``text``; and Alpaca and ShareGPT, which become one of them. Everything wrong is a :class:`DataError` that
names file and line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NoReturn

from allhands.data.calls import read_tools, without_foreign_nulls
from allhands.data.columns import column_hint, nearest, pair_of
from allhands.data.messages import (
    CONTEXT_KEYS,
    MEDIA_KEYS,
    REASONING_KEYS,
    Message,
    asks_only,
    check_message,
    check_messages,
    check_tool_answers,
    is_sharegpt,
    messages_of_text,
    require_answer,
)
from allhands.data.values import (
    DELETE,
    SHAPES,
    ValuePlace,
    check_string,
    key_list,
    list_if_text,
    quoted,
    type_name,
)

RecordKind = Literal["chat", "completion", "text"]
Shape = Literal["completion", "chat", "text", "preference", "alpaca", "sharegpt"]


@dataclass(frozen=True)
class ColumnNames:
    """The keys that hold each part of a record; the first four are named after mlx_lm's options.

    A name with dots reaches into nested objects: ``meta.body`` is ``{"meta": {"body": ...}}``, unless the
    record has the key ``"meta.body"`` itself. A column that is called other than by default is *mapped*; see
    :func:`recognise` for what that means. Without a mapping, ``conversations`` and ``conversation`` hold a
    ShareGPT conversation, and ``kto_tag`` is another name for ``label``.
    """

    prompt_feature: str = "prompt"
    completion_feature: str = "completion"
    chat_feature: str = "messages"
    text_feature: str = "text"
    instruction_feature: str = "instruction"
    input_feature: str = "input"
    output_feature: str = "output"
    history_feature: str = "history"
    system_feature: str = "system"
    tools_feature: str = "tools"
    chosen_feature: str = "chosen"
    rejected_feature: str = "rejected"
    label_feature: str = "label"

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ColumnNames:
        """Column names from a mapping that may carry any of the keys; None means the default."""
        given = {name: options.get(name) for name in cls.__dataclass_fields__}
        return cls(**{name: str(value) for name, value in given.items() if value is not None})

    @cached_property
    def mapped(self) -> frozenset[str]:
        """The parts ("prompt") whose columns are called other than by default."""
        fields = self.__dataclass_fields__.items()
        return frozenset(
            name.removesuffix("_feature") for name, field in fields if getattr(self, name) != field.default
        )


@dataclass(frozen=True)
class Record:
    """One checked training example.

    ``messages`` (content always a string) and ``tools`` are set for a chat; ``prompt`` and ``completion``
    for a completion, each a string or a list of messages; ``text`` for plain text. ``source`` is the file
    name and ``line`` the line (1-based) where the record begins; for a Hub dataset, its name and row. ``unread``
    are the keys of what stood beside it and is not trained on: pictures, sound, a system message or thinking in a
    column that its shape does not have.
    """

    kind: RecordKind
    messages: tuple[Message, ...] | None = None
    tools: list[Any] | None = None
    prompt: str | list[Message] | None = None
    completion: str | list[Message] | None = None
    text: str | None = None
    source: str = ""
    line: int = 0
    unread: tuple[str, ...] = field(default=(), compare=False)

    @property
    def where(self) -> str:
        """``file:line``, as in error messages."""
        return f"{self.source}:{self.line}"

    @property
    def is_blank(self) -> bool:
        """Whether it is a text without words, of which only its end could be learned."""
        return self.kind == "text" and not (self.text or "").strip()

    @property
    def turns(self) -> list[Message]:
        """The whole conversation of a chat or a completion; empty for a text."""
        if self.kind == "text":
            return []
        head = as_turns(self.prompt, "user") if self.prompt is not None else list(self.messages or ())
        return head + (as_turns(self.completion, "assistant") if self.completion is not None else [])


def as_turns(words: str | list[Message], role: str) -> list[Message]:
    """A string as one message of ``role``; messages as they are."""
    return [{"role": role, "content": words}] if isinstance(words, str) else list(words)


def parse_record(value: Any, columns: ColumnNames, *, source: str, line: int) -> Record:
    """Check one decoded JSON value and recognise its shape; Alpaca and ShareGPT are converted.

    A text may be empty, as some in every large corpus are: training leaves it out, and counts it. Preferences and rated
    answers are refused: to train on them as they stand would teach what was rejected.

    Raises:
        DataError: with ``where="source:line"``.
    """
    parts = Parts.of(value, columns, ValuePlace(source, line))
    shape = recognise(parts)
    is_rated = rating(parts, shape) is not None
    if shape == "preference" or is_rated:
        pair = f"{quoted(parts.name('chosen'))}, {quoted(parts.name('rejected'))}"
        what = f"rated answers ({quoted(parts.name('label'))} is true or false)"
        hint = "keep the good answers as messages; `allhands data prepare` writes the rest out for other programs"
        parts.place.fail(f"{what if is_rated else f'preference data ({pair})'} cannot be trained on", hint)
    return to_record(parts, shape, empty_texts=True)


MISSING = object()
_TABLE = re.compile(r"\.[ct]sv(\.\w+)?$")
# By default also known as; the first that is there counts.
_OTHER_NAMES = {"label": ("kto_tag", "label"), "conversation": ("conversations", "conversation")}
# Columns that may belong to an answer or a conversation.
_BESIDE = (*REASONING_KEYS, *CONTEXT_KEYS)
# Lists, which tables hold as strings of JSON.
_LISTS = ("chat", "conversation", "history")
# Texts; or lists of messages, if all of those that are there are lists or such strings.
_TEXTS_OR_MESSAGES = ("prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class Parts:
    """One JSON object that is asked for a part ("prompt") where the user may have named the column."""

    values: Mapping[str, Any]
    columns: ColumnNames
    place: ValuePlace

    @classmethod
    def of(cls, value: Any, columns: ColumnNames, place: ValuePlace) -> Parts:
        """The parts of a decoded JSON value; where it is no record but holds one under a key, those of the inner one.

        ``{"row_idx": 7, "row": {"messages": [...]}}`` holds one, as APIs and annotation programs write it.

        Raises:
            DataError: it is not an object, or holds a record that was cut off.
        """
        if not isinstance(value, dict):
            place.fail(f"a record must be a JSON object, this is {type_name(value)}", f"write {SHAPES}")
        parts = cls(value, columns, place)
        if parts._has_shape():
            return parts
        inner = [key for key, one in value.items() if isinstance(one, dict) and cls(one, columns, place)._has_shape()]
        if len(inner) == 1:
            if cut := value.get("truncated_cells"):
                hint = "fetch the data set itself: name it as OWNER/NAME, or its Parquet files"
                place.fail(f"the record was cut off where it was fetched from (truncated_cells: {cut})", hint)
            return cls({key: one for key, one in value.items() if key != inner[0]} | value[inner[0]], columns, place)
        # Who makes a table names its columns for people; who writes JSON has a format in mind.
        is_table = _TABLE.search(place.source.lower()) is not None
        if not is_table or columns.mapped or (pair := pair_of(value)) is None:
            return parts
        return replace(parts, columns=replace(columns, prompt_feature=pair[0], completion_feature=pair[1]))

    def name(self, part: str) -> str:
        """The key, or dotted path, of a part in this record."""
        if part in _OTHER_NAMES and not self.mapped(part):
            names = _OTHER_NAMES[part]
            return next((name for name in names if self.values.get(name) is not None), names[0])
        return getattr(self.columns, f"{part}_feature")

    def get(self, part: str) -> Any:
        """The value of a part; None if it is null or not there. A list that is written as a string is that list."""
        found = self._raw(part)
        if not isinstance(found, str):
            return found
        if part in _LISTS:
            return list_if_text(found, quoted(self.name(part)), self.place)
        if part in _TEXTS_OR_MESSAGES and found.lstrip()[:1] == "[":
            values = [value for other in _TEXTS_OR_MESSAGES if (value := self._raw(other)) is not None]
            if all(isinstance(value, list) or messages_of_text(value) is not None for value in values):
                return messages_of_text(found)
        return found

    def _raw(self, part: str) -> Any:
        found = reach(self.values, self.name(part))
        return None if found is MISSING else found

    def has(self, part: str) -> bool:
        """Whether the part is there and not null. Tables give every row every column, null where it has none."""
        return self.get(part) is not None

    def names_it(self, part: str) -> bool:
        """Whether the part is there, be it null."""
        return reach(self.values, self.name(part)) is not MISSING

    def mapped(self, part: str) -> bool:
        """Whether the user has named this column, other than by default."""
        return part in self.columns.mapped

    def _has_shape(self) -> bool:
        """Whether the columns make a shape, be they null; no conversation is an object, what holds one is."""
        there = {part for part in _SHAPING if self.names_it(part)}
        there -= {part for part in there & {"chat", "conversation"} if isinstance(self.get(part), dict)}
        return bool(there & self.columns.mapped) or any(there.issuperset(needs) for needs in NEEDS.values())


def reach(values: Any, name: str) -> Any:
    """The value at a key, or at a dotted path through nested objects; ``MISSING`` if there is none."""
    if not isinstance(values, dict) or name in values:
        return values[name] if isinstance(values, dict) else MISSING
    for end in (index for index, letter in enumerate(name) if letter == "."):
        found = reach(values.get(name[:end]), name[end + 1 :])
        if found is not MISSING:
            return found
    return MISSING


# The parts that make a shape, in order of precedence; and those that may hold the question of a preference.
NEEDS: dict[Shape, tuple[str, ...]] = {
    "completion": ("prompt", "completion"),
    "chat": ("chat",),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversation",),
}
_SHAPING = frozenset(part for needs in NEEDS.values() for part in needs)
_QUESTIONS = ("prompt", "chat", "instruction")


def recognise(parts: Parts) -> Shape:
    """The shape of a record, by the columns that it has.

    mlx_lm's own come first, in its order: prompt and completion, messages, text. Then a preference (chosen and
    rejected), Alpaca (instruction and output), ShareGPT (conversations). Messages that do not end with an
    answer, beside chosen and rejected ones, are the question of a preference; those with from and value are
    ShareGPT. A column that is null counts only if no other shape is there.

    If the user has mapped a column that makes a shape, a mapped one must be part of the shape that is chosen:
    mapped columns win over everything that the default names would give, and a record that has none of them
    is an error, not something else.

    Raises:
        DataError: no shape, or none with a mapped column.
    """
    mapped = parts.columns.mapped & _SHAPING
    for there in (parts.has, parts.names_it):
        for shape, needs in NEEDS.items():
            used = (*needs, *_QUESTIONS) if shape == "preference" else needs
            if all(map(there, needs)) and (not mapped or any(p in mapped and there(p) for p in used)):
                return _by_messages(parts) if shape == "chat" else shape
    _fail_on_columns(parts, sorted(mapped))


def _by_messages(parts: Parts) -> Shape:
    """The shape of a record with messages, by those messages."""
    if parts.has("chosen") and parts.has("rejected") and asks_only(parts.get("chat")):
        return "preference"
    return "sharegpt" if is_sharegpt(parts.get("chat")) else "chat"


def _fail_on_columns(parts: Parts, mapped: list[str]) -> NoReturn:
    """Refuse a record without a shape: name its keys, and the key that was probably meant."""
    known = {part: parts.name(part) for part in _SHAPING if parts.names_it(part)}
    keys, hint = key_list(parts.values), column_hint(parts.values, known, parts.place.source)
    names = {part: f"{quoted(parts.name(part))} ({part}_feature)" for part in mapped}
    absent = {part: parts.name(part) for part in mapped if part not in known}
    if not mapped:
        parts.place.fail(f"no known shape; the keys are {keys}", hint)
    if not absent:
        parts.place.fail(f"{', '.join(names.values())} alone makes no shape; the keys are {keys}", hint)
    near = nearest(parts.values, absent)
    are = "are" if len(absent) > 1 else "is"
    message = f"{', '.join(names[part] for part in absent)} {are} not there; the keys are {keys}"
    parts.place.fail(message, f"the nearest: {near}" if near else hint)


def rating(parts: Parts, shape: Shape) -> bool | None:
    """Whether an answer was rated good or bad; None if it was not rated.

    A rating is a boolean, or as tables write it "true" or "false". What else stands under ``label`` is no
    rating (a class, say), unless the user has mapped the column, which then may be 0 or 1 but not missing.

    Raises:
        DataError: a mapped label is no rating; a text is labelled false, which cannot be kept as a rated answer.
    """
    value, mapped = parts.get("label"), parts.mapped("label")
    if shape == "preference" or (value is None and not mapped):
        return None
    name = quoted(parts.name("label"))
    truths = {"true": True, "false": False} | ({"1": True, "0": False} if mapped else {})
    label = truths.get(str(value).strip().lower()) if isinstance(value, str | int) else None
    if label is None and mapped:
        hint = "write true or false in every record, or do not name a label_feature"
        parts.place.fail(f"{name} is {type_name(value)}, it must be true or false", hint)
    if shape != "text":
        return label
    if label is False:
        hint = f"delete the record; or, if {name} does not rate the text, remove {name}"
        parts.place.fail(f"{name} is false for a text: a text that is rated bad cannot be trained on", hint)
    return None


def to_record(parts: Parts, shape: Shape, *, empty_texts: bool = False) -> Record:
    """The record of a recognised shape, checked. A mapped system column is put before any shape's messages.

    Args:
        empty_texts: whether a text may have no words.

    Raises:
        DataError: a part is missing or broken.
    """
    place, unread = parts.place, unread_keys(parts, shape)
    if shape == "text":
        text = string_part(parts, "text", filled=not empty_texts)
        return Record("text", text=text, source=place.source, line=place.line, unread=unread)
    tools = tools_part(parts)
    record = {"completion": _completion, "alpaca": _alpaca}.get(shape, _conversation)(parts, shape)
    if tools and record.messages:
        record = replace(record, messages=tuple(without_foreign_nulls(list(record.messages), tools)))
    elif tools and isinstance(record.completion, list):
        record = replace(record, completion=without_foreign_nulls(record.completion, tools))
    check_tool_answers(record.turns, parts.name(NEEDS[shape][-1]), place)
    return replace(record, tools=tools, source=place.source, line=place.line, unread=unread)


def tools_part(parts: Parts) -> list[Any] | None:
    """The tools of a record, also under OpenAI's older name ``functions``.

    Raises:
        DataError: they are broken, or both are there and differ.
    """
    functions = None if parts.mapped("tools") else parts.values.get("functions")
    return read_tools(parts.get("tools"), parts.name("tools"), functions, parts.place)


def unread_keys(parts: Parts, shape: Shape) -> tuple[str, ...]:
    """Keys of a record under which something stands that training does not see."""
    keys = [key for key in MEDIA_KEYS if parts.values.get(key)]
    if shape != "text":
        taken = shape in ("alpaca", "sharegpt") or parts.mapped("system")
        beside = _BESIDE if taken else (*_BESIDE, "system")
        keys += [key for key in beside if isinstance(value := parts.values.get(key), str) and value.strip()]
    return tuple(key for key in keys if key not in map(parts.name, _SHAPING)) if keys else ()


def _completion(parts: Parts, shape: Shape) -> Record:
    prompt = text_or_messages(parts, "prompt")
    completion = text_or_messages(parts, "completion", filled=True)
    if parts.mapped("system"):
        prompt = system_message(parts) + as_turns(prompt, "user") if parts.has("system") else prompt
    if isinstance(completion, list):
        require_answer(completion, parts.name("completion"), parts.place)
        prompt = as_turns(prompt, "user")
    return Record("completion", prompt=prompt, completion=completion)


def _conversation(parts: Parts, shape: Shape) -> Record:
    part = "chat" if shape == "chat" or is_sharegpt(parts.get("chat")) else "conversation"
    messages = conversation_part(parts, part, sharegpt=shape == "sharegpt")
    require_answer(messages, parts.name(part), parts.place)
    if shape != "chat" or parts.mapped("system"):
        messages = with_system(parts, messages)
    return Record("chat", messages=tuple(messages))


def _alpaca(parts: Parts, shape: Shape) -> Record:
    """One question is a completion; a system message or earlier questions make it a chat."""
    question, output = alpaca_question(parts), string_part(parts, "output", filled=True)
    before = [*system_message(parts), *history(parts)]
    if not before:
        return Record("completion", prompt=question, completion=output)
    return Record("chat", messages=(*before, *as_turns(question, "user"), *as_turns(output, "assistant")))


def alpaca_question(parts: Parts) -> str:
    """The instruction, and after a blank line the input if there is one.

    Raises:
        DataError: one of them is not a string.
    """
    instruction = string_part(parts, "instruction")
    more = string_part(parts, "input") if parts.has("input") else ""
    return "\n\n".join(text for text in (instruction, more) if text.strip())


def history(parts: Parts) -> list[Message]:
    """Alpaca's earlier turns, a list of [question, answer] pairs, as messages.

    Raises:
        DataError: it is something else, or an answer is empty.
    """
    pairs, name = parts.get("history") or [], parts.name("history")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        parts.place.fail(f"{quoted(name)} must be a list of pairs", 'write [["question", "answer"], ...]')
    return [
        check_message({"role": role, "content": pair[side]}, f"{name}[{index}][{side}]", parts.place)
        for index, pair in enumerate(pairs)
        for side, role in enumerate(("user", "assistant"))
    ]


def system_message(parts: Parts) -> list[Message]:
    """The system column as a list of one message; empty if the column is absent, null or blank.

    Raises:
        DataError: it is not a string.
    """
    text = string_part(parts, "system") if parts.has("system") else ""
    return [{"role": "system", "content": text}] if text.strip() else []


def with_system(parts: Parts, messages: list[Message]) -> list[Message]:
    """Messages after the system column, unless they begin with the same system message."""
    system = system_message(parts)
    return messages if messages[:1] == system else system + messages


def conversation_part(parts: Parts, part: str, *, sharegpt: bool) -> list[Message]:
    """The checked messages of a chat column; under another name than mlx_lm's, or with ``sharegpt``, the
    names of roles may be ShareGPT's.

    Raises:
        DataError: they are broken.
    """
    sharegpt = sharegpt or parts.mapped(part)
    return check_messages(parts.get(part), parts.name(part), parts.place, sharegpt=sharegpt)


def string_part(parts: Parts, part: str, *, filled: bool = False) -> str:
    """A part that must be a string, with ``filled`` of more than blanks.

    Raises:
        DataError: it is not.
    """
    name = quoted(parts.name(part))
    text = check_string(parts.get(part), name, parts.place)
    if filled and not text.strip():
        parts.place.fail(f"{name} is empty: there is nothing to learn", DELETE)
    return text


def text_or_messages(parts: Parts, part: str, *, filled: bool = False) -> str | list[Message]:
    """A part that is a string or a list of messages.

    Raises:
        DataError: it is neither, or with ``filled`` an empty string.
    """
    value = parts.get(part)
    if isinstance(value, list):
        return check_messages(value, parts.name(part), parts.place)
    return string_part(parts, part, filled=filled)
