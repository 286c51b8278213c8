"""One training example: recognises its shape and checks it, without reading files or encoding
tokens.

The shapes are those of mlx_lm: ``messages`` (with optional ``tools``), ``prompt`` + ``completion``,
and ``text``; Alpaca and ShareGPT are converted to one of these. Each fault raises a
:class:`DataError` that names file and line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from allhands.data.calls import without_foreign_nulls
from allhands.data.columns import column_hint, nearest, pair_of
from allhands.data.messages import (
    CONTEXT_KEYS,
    MEDIA_KEYS,
    REASONING_KEYS,
    Message,
    asks_only,
    check_tool_answers,
    is_sharegpt,
    require_answer,
)
from allhands.data.parts import ColumnNames, Parts
from allhands.data.values import SHAPES, ValuePlace, key_list, type_name

RecordKind = Literal["chat", "completion", "text"]
Shape = Literal["completion", "chat", "text", "preference", "alpaca", "sharegpt"]

# The parts that make a shape, in order of precedence. Below, the parts that may hold the question
# of a preference.
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
_TABLE = re.compile(r"\.[ct]sv(\.\w+)?$")
# Columns that may belong to an answer or a conversation.
_BESIDE = (*REASONING_KEYS, *CONTEXT_KEYS, "system")


@dataclass(frozen=True)
class Record:
    """One checked training example.

    ``messages`` (content always a string) and ``tools`` are set for a chat; ``prompt`` and
    ``completion`` for a completion, each a string or a list of messages; ``text`` for plain text.
    ``source`` is the file name and ``line`` the line (1-based) where the record begins; for a Hub
    dataset, its name and row. ``unread`` has the keys that stood beside the record and are not
    trained on: pictures, sound, a system message or thinking in a column that its shape does not
    have.
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
        """True for a text without words: only its end could be learned."""
        return self.kind == "text" and not (self.text or "").strip()

    @property
    def turns(self) -> list[Message]:
        """The whole conversation of a chat or a completion; empty for a text."""
        if self.prompt is None or self.completion is None:
            return list(self.messages or ())
        return as_turns(self.prompt, "user") + as_turns(self.completion, "assistant")


def as_turns(words: str | list[Message], role: str) -> list[Message]:
    """Return a string as one message of ``role``; messages as they are."""
    return [{"role": role, "content": words}] if isinstance(words, str) else list(words)


def parse_record(value: Any, columns: ColumnNames, *, source: str, line: int) -> Record:
    """Check one decoded JSON value and recognise its shape; Alpaca and ShareGPT are converted.

    A text may be empty, as some in every large corpus are: training leaves it out, and counts it.
    Preferences and rated answers are refused: training on them as they are would teach the rejected
    answers.

    Raises:
        DataError: the record is malformed or of a refused kind; ``where`` is ``source:line``.
    """
    parts = parts_of(value, columns, ValuePlace(source, line))
    shape = recognise(parts)
    is_rated = rating(parts, shape) is not None
    if shape == "preference" or is_rated:
        what = f"preference data ({parts.quoted('chosen')}, {parts.quoted('rejected')})"
        if is_rated:
            what = f"rated answers ({parts.quoted('label')} is true or false)"
        parts.fail(
            f"{what} cannot be trained on",
            "keep the good answers as messages; `allhands data prepare` writes the rest out for other programs",
            code="preference-not-trainable",
        )
    return to_record(parts, shape, empty_texts=True)


def parts_of(value: Any, columns: ColumnNames, place: ValuePlace) -> Parts:
    """Return the parts of a decoded JSON value, or of the record that it holds under a key.

    APIs and annotation programs write such values: ``{"row_idx": 7, "row": {"messages": [...]}}``.

    Raises:
        DataError: the value is not an object, or holds a record that was cut off.
    """
    if not isinstance(value, dict):
        place.fail(
            f"a record must be a JSON object, this is {type_name(value)}",
            f"write {SHAPES}",
            code="record-not-object",
        )
    parts = Parts(value, columns, place)
    if _has_shape(parts):
        return parts
    inner = [
        key
        for key, one in value.items()
        if isinstance(one, dict) and _has_shape(Parts(one, columns, place))
    ]
    if len(inner) == 1:
        if cut := value.get("truncated_cells"):
            place.fail(
                f"the record was cut off at its source (truncated_cells: {cut})",
                "fetch the data set itself: name it as OWNER/NAME, or its Parquet files",
                code="record-cut-off",
            )
        return Parts(
            {key: one for key, one in value.items() if key != inner[0]} | value[inner[0]],
            columns,
            place,
        )
    # The columns of a CSV table are named for people, so usual names are understood; JSON is
    # written in a known format.
    is_table = _TABLE.search(place.source.lower()) is not None
    if not is_table or columns.mapped or (pair := pair_of(value)) is None:
        return parts
    return Parts(value, replace(columns, prompt_feature=pair[0], completion_feature=pair[1]), place)


def _has_shape(parts: Parts) -> bool:
    """Return True if the columns make a shape, null or not. An object in a chat column is not a
    conversation.
    """
    there = _SHAPING & parts.found.keys()
    there -= {part for part in ("chat", "conversation") if isinstance(parts.get(part), dict)}
    return bool(there & parts.columns.mapped) or any(
        there.issuperset(needs) for needs in NEEDS.values()
    )


def recognise(parts: Parts) -> Shape:
    """Return the shape of a record, by the columns that it has.

    mlx_lm's shapes come first, in its order: prompt and completion, messages, text. Then follow a
    preference (chosen and rejected), Alpaca (instruction and output), and ShareGPT (conversations).
    Messages beside chosen and rejected answers are the question of a preference if they do not end
    with an answer. Messages with ``from`` and ``value`` are ShareGPT. A column that is null counts
    only if no other shape is there.

    If the user has mapped columns that make shapes, the chosen shape must have one of them, even if
    default names would make another shape. A record without any mapped column is an error.

    Raises:
        DataError: no shape, or none with a mapped column.
    """
    mapped = parts.columns.mapped & _SHAPING
    for there in (parts.filled, parts.found.keys()):
        for shape, needs in NEEDS.items():
            used = (*needs, *_QUESTIONS) if shape == "preference" else needs
            if there >= set(needs) and (not mapped or mapped.intersection(used) & there):
                return _by_messages(parts) if shape == "chat" else shape
    _fail_on_columns(parts, sorted(mapped))


def _by_messages(parts: Parts) -> Shape:
    """Return the shape of a record with messages: preference, ShareGPT or chat."""
    if parts.has("chosen") and parts.has("rejected") and asks_only(parts.get("chat")):
        return "preference"
    return "sharegpt" if is_sharegpt(parts.get("chat")) else "chat"


def _fail_on_columns(parts: Parts, mapped: list[str]) -> NoReturn:
    """Refuse a record without a shape; the error names its keys and the key probably meant."""
    known = {part: parts.names[part] for part in _SHAPING & parts.found.keys()}
    keys, hint = key_list(parts.values), column_hint(parts.values, known, parts.place.source)
    names = {part: f"{parts.quoted(part)} ({part}_feature)" for part in mapped}
    absent = {part: parts.names[part] for part in mapped if part not in known}
    if not mapped:
        parts.fail(f"no known shape; the keys are {keys}", hint, code="record-without-shape")
    if not absent:
        parts.fail(
            f"{', '.join(names.values())} alone makes no shape; the keys are {keys}",
            hint,
            code="record-without-shape",
        )
    near = nearest(parts.values, absent)
    are = "are" if len(absent) > 1 else "is"
    parts.fail(
        f"{', '.join(names[part] for part in absent)} {are} not there; the keys are {keys}",
        f"the nearest: {near}" if near else hint,
        code="record-without-shape",
    )


def rating(parts: Parts, shape: Shape) -> bool | None:
    """Return the rating of an answer, True for good; None if it was not rated.

    A rating is a boolean, or "true" or "false" as tables write it. Other values under ``label`` are
    not ratings (a class, for example). A column that the user has mapped may also hold 0 or 1, and
    must hold a rating in every record.

    Raises:
        DataError: a mapped label is not a rating; a text, which has no question, is labelled false.
    """
    value, mapped = parts.get("label"), parts.mapped("label")
    if shape == "preference" or (value is None and not mapped):
        return None
    name = parts.quoted("label")
    truths = {"true": True, "false": False} | ({"1": True, "0": False} if mapped else {})
    label = truths.get(str(value).strip().lower()) if isinstance(value, str | int) else None
    if label is None and mapped:
        parts.fail(
            f"{name} is {type_name(value)}, it must be true or false",
            "write true or false in every record, or do not name a label_feature",
            code="field-of-wrong-type",
        )
    if shape != "text":
        return label
    if label is False:
        parts.fail(
            f"{name} is false for a text: a text that is rated bad cannot be trained on",
            f"delete the record; or, if {name} does not rate the text, remove {name}",
            code="preference-not-trainable",
        )
    return None


def to_record(parts: Parts, shape: Shape, *, empty_texts: bool = False) -> Record:
    """Return the checked record of a recognised shape.

    A mapped system column is put before the messages of any shape but text.

    Args:
        empty_texts: whether a text may have no words.

    Raises:
        DataError: a part is missing or broken.
    """
    about: dict[str, Any] = {"source": parts.place.source, "line": parts.place.line}
    about["unread"] = unread_keys(parts, shape)
    if shape == "text":
        return Record("text", text=parts.string("text", filled=not empty_texts), **about)
    tools = parts.tools()
    prompt, answers = {"completion": _completion, "alpaca": _alpaca}.get(shape, _conversation)(
        parts, shape
    )
    if tools and isinstance(answers, list):
        answers = without_foreign_nulls(answers, tools)
    if prompt is None:
        record = Record(
            "chat", messages=tuple(as_turns(answers, "assistant")), tools=tools, **about
        )
    else:
        record = Record("completion", prompt=prompt, completion=answers, tools=tools, **about)
    check_tool_answers(record.turns, parts.names[NEEDS[shape][-1]], parts.place)
    return record


def unread_keys(parts: Parts, shape: Shape) -> tuple[str, ...]:
    """Return the keys of a record whose content training does not see."""
    keys = [key for key in MEDIA_KEYS if parts.values.get(key)]
    if shape != "text":
        taken = shape in ("alpaca", "sharegpt") or parts.mapped("system")
        there = [key for key in _BESIDE if key in parts.values and not (taken and key == "system")]
        keys += [
            key for key in there if isinstance(value := parts.values[key], str) and value.strip()
        ]
    return tuple(key for key in keys if key not in [parts.names[part] for part in _SHAPING])


# The prompt and the completion of a record; or None and the messages of a chat.
_Said = tuple[str | list[Message] | None, str | list[Message]]


def _completion(parts: Parts, _shape: Shape) -> _Said:
    prompt = parts.text_or_messages("prompt")
    completion = parts.text_or_messages("completion", filled=True)
    if parts.mapped("system") and parts.has("system"):
        prompt = parts.system() + as_turns(prompt, "user")
    if isinstance(completion, list):
        require_answer(completion, parts.names["completion"], parts.place)
        prompt = as_turns(prompt, "user")
    return prompt, completion


def _conversation(parts: Parts, shape: Shape) -> _Said:
    part = "chat" if shape == "chat" or is_sharegpt(parts.get("chat")) else "conversation"
    messages = parts.messages(part, sharegpt=shape == "sharegpt")
    require_answer(messages, parts.names[part], parts.place)
    return None, messages if shape == "chat" and not parts.mapped("system") else parts.with_system(
        messages
    )


def _alpaca(parts: Parts, _shape: Shape) -> _Said:
    """Return a completion; with a system message or earlier turns, a chat."""
    question, output = parts.question(), parts.string("output", filled=True)
    before = [*parts.system(), *parts.history()]
    if not before:
        return question, output
    return None, [*before, *as_turns(question, "user"), *as_turns(output, "assistant")]
