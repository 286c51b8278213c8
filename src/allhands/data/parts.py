"""Parts of a record ("prompt", "tools"): read from the columns that hold them, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from allhands.data.calls import read_tools
from allhands.data.messages import Message, check_message, check_messages, messages_of_text
from allhands.data.values import DELETE, ValuePlace, check_string, list_if_text, quoted

MISSING = object()
# Columns of a part whose name the user has not given; the first one that is there counts.
_OTHER_NAMES = {"label": ("kto_tag", "label"), "conversation": ("conversations", "conversation")}
# Parts that are lists; tables hold them as strings of JSON.
_LISTS = ("chat", "conversation", "history")
# Parts that are texts, or lists of messages if all present ones are lists or strings of lists.
_TEXTS_OR_MESSAGES = ("prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class ColumnNames:
    """The keys that hold each part of a record; the first four are named after mlx_lm's options.

    A name with dots reaches into nested objects: ``meta.body`` is ``{"meta": {"body": ...}}``,
    unless the record has the key ``"meta.body"`` itself. A column with another name than the
    default is *mapped*; see :func:`allhands.data.records.recognise` for what that means. Without a
    mapping, ``conversations`` and ``conversation`` hold a ShareGPT conversation, and ``kto_tag`` is
    another name for ``label``.
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
        """Make column names from options; a key that is missing or None means the default."""
        given = {name: options.get(name) for name in cls.__dataclass_fields__}
        return cls(**{name: str(value) for name, value in given.items() if value is not None})

    @cached_property
    def names(self) -> dict[str, str]:
        """The column of each part ("prompt")."""
        return {
            field.removesuffix("_feature"): getattr(self, field)
            for field in self.__dataclass_fields__
        }

    @cached_property
    def mapped(self) -> frozenset[str]:
        """The parts whose columns have another name than the default."""
        return frozenset(
            part
            for part, name in self.names.items()
            if name != getattr(ColumnNames, f"{part}_feature")
        )


@dataclass(frozen=True)
class Parts:
    """One JSON object, read by its parts.

    Methods that read a part raise a :class:`DataError` if the part is broken.
    """

    values: Mapping[str, Any]
    columns: ColumnNames
    place: ValuePlace

    @cached_property
    def names(self) -> dict[str, str]:
        """The key, or dotted path, of each part in this record."""
        names = dict(self.columns.names)
        for part, known in _OTHER_NAMES.items():
            if part not in self.columns.mapped:
                names[part] = next(
                    (name for name in known if self.values.get(name) is not None), known[0]
                )
        return names

    @cached_property
    def found(self) -> dict[str, Any]:
        """Parts whose column is there, null or not: a table gives each row all columns."""
        reached = {part: reach(self.values, name) for part, name in self.names.items()}
        return {part: value for part, value in reached.items() if value is not MISSING}

    @cached_property
    def filled(self) -> frozenset[str]:
        """The parts that are there and not null."""
        return frozenset(part for part in self.found if self.get(part) is not None)

    def get(self, part: str) -> Any:
        """Return the value of a part; None if it is null or missing.

        A string that holds a list, where lists are possible, is returned as the list.
        """
        found = self.found.get(part)
        if not isinstance(found, str):
            return found
        if part in _LISTS:
            return list_if_text(found, self.quoted(part), self.place)
        if part in _TEXTS_OR_MESSAGES and found.lstrip()[:1] == "[":
            values = [
                value
                for other in _TEXTS_OR_MESSAGES
                if (value := self.found.get(other)) is not None
            ]
            if all(
                isinstance(value, list) or messages_of_text(value) is not None for value in values
            ):
                return messages_of_text(found)
        return found

    def has(self, part: str) -> bool:
        """Return True if the part is there and not null."""
        return part in self.filled

    def mapped(self, part: str) -> bool:
        """Return True if the user has given this part's column another name than the default."""
        return part in self.columns.mapped

    def quoted(self, *parts: str) -> str:
        """Return the columns of parts, for a message."""
        return " and ".join(quoted(self.names[part]) for part in parts)

    def fail(self, message: str, hint: str, *, code: str) -> NoReturn:
        """Refuse the record: raise a :class:`DataError` at its place."""
        self.place.fail(message, hint, code=code)

    def string(self, part: str, *, filled: bool = False) -> str:
        """Return a part that must be a string; with ``filled``, not of blanks only."""
        text = check_string(self.get(part), self.quoted(part), self.place)
        if filled and not text.strip():
            self.fail(
                f"{self.quoted(part)} is empty: there is nothing to learn",
                DELETE,
                code="field-empty",
            )
        return text

    def text_or_messages(self, part: str, *, filled: bool = False) -> str | list[Message]:
        """Return a part that is a list of messages or a string; with ``filled``, the string must
        not be blank.
        """
        value = self.get(part)
        if isinstance(value, list):
            return check_messages(value, self.names[part], self.place)
        return self.string(part, filled=filled)

    def messages(self, part: str, *, sharegpt: bool) -> list[Message]:
        """Return the messages of a chat column.

        With ``sharegpt``, or if the column is mapped, ``from`` and ``value`` are read in every
        message.
        """
        sharegpt = sharegpt or self.mapped(part)
        return check_messages(self.get(part), self.names[part], self.place, sharegpt=sharegpt)

    def tools(self) -> list[Any] | None:
        """Return the tools, also under OpenAI's older name ``functions``."""
        functions = None if self.mapped("tools") else self.values.get("functions")
        return read_tools(self.get("tools"), self.names["tools"], functions, self.place)

    def question(self) -> str:
        """Return Alpaca's instruction; its input, if there is one, follows after a blank line."""
        texts = [self.string("instruction"), self.string("input") if self.has("input") else ""]
        return "\n\n".join(text for text in texts if text.strip())

    def history(self) -> list[Message]:
        """Return Alpaca's earlier turns, a list of [question, answer] pairs, as messages."""
        pairs, name = self.get("history") or [], self.names["history"]
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            self.fail(
                f"{quoted(name)} must be a list of pairs",
                'write [["question", "answer"], ...]',
                code="field-of-wrong-type",
            )
        return [
            check_message(
                {"role": role, "content": pair[side]}, f"{name}[{index}][{side}]", self.place
            )
            for index, pair in enumerate(pairs)
            for side, role in enumerate(("user", "assistant"))
        ]

    def system(self) -> list[Message]:
        """Return the system column as a list of one message; empty if the column is absent, null or
        blank.
        """
        text = self.string("system") if self.has("system") else ""
        return [{"role": "system", "content": text}] if text.strip() else []

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Put the system column before the messages, unless they begin with the same message."""
        system = self.system()
        return messages if messages[:1] == system else system + messages


def reach(values: Any, name: str) -> Any:
    """Return the value at a key, or at a dotted path through nested objects; ``MISSING`` if there
    is none.
    """
    if not isinstance(values, dict):
        return MISSING
    if name in values or "." not in name:
        return values.get(name, MISSING)
    for end in (index for index, letter in enumerate(name) if letter == "."):
        found = reach(values.get(name[:end]), name[end + 1 :])
        if found is not MISSING:
            return found
    return MISSING
