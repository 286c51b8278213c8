"""Search for the parts of a conversation that a chat template leaves out.

Templates silently leave parts out: the thinking of answers, tool calls, words beside calls, a
system message. So a conversation is rendered once more with a marker in place of each part
(:func:`mark`). If a marker is not in the text, the model never sees its part. Conversations of the
same form share this rendering, so it costs little. Reformatted calls, escapes and trimmed blanks
leave markers alone. Words that a template drops for what they say, not for where they stand, are
found in the real text (:func:`is_missing`).
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from allhands.data.calls import called_function, parsed_arguments
from allhands.data.messages import (
    INSTRUCTION_ROLES,
    MEDIA_KEYS,
    REASONING_KEYS,
    TOOL_ROLES,
    Message,
)
from allhands.data.values import quoted

Kind = Literal[
    "system",
    "question",
    "answer",
    "reasoning",
    "call",
    "argument",
    "result",
    "name",
    "tool",
    "field",
]

_WORD = re.compile(r"Zq(\d{1,9})qZ|(?<!\d)731(\d{4})(?!\d)")
# Numbers among arguments become markers, too: this base plus the marker's number.
_NUMBER = 7_310_000
_MANY = 9_999
# Most fields, items and levels of a call's arguments that get markers. More are not needed, because
# a template treats all in the same way.
_FIELDS, _ITEMS, _DEPTH = 32, 2, 6
# Tags around thinking in the words of an answer; groups: opening tag, its name, thinking, closing
# tag.
_NAMES = r"(?:\w+:)?(?:think|thinking|thoughts?|reasoning|reflection|analysis)"
_THINKING = re.compile(
    rf"(<({_NAMES})>|\[THINK\]|<\|begin_of_thought\|>)(.*?)(</\2>|\[/THINK\]|<\|end_of_thought\|>)",
    re.DOTALL,
)
_UNOPENED = re.compile(rf"\A()()(.*?)(</{_NAMES}>|\[/THINK\])", re.DOTALL)
# Tags at both ends of a message, by which a template may recognise it; they stay.
_OPENING = re.compile(r"\A<[\w|/:.-]{1,40}>")
_CLOSING = re.compile(r"<[\w|/:.-]{1,40}>\Z")
# Shorter lines are no sign of anything.
_SURE = 12
# A value with more words than this is not a name or a date. Values of the keys below are about a
# message, not a part of its words.
_FEW_WORDS = 3
_BESIDE_WORDS = {
    "source",
    "model",
    "url",
    "timestamp",
    "date",
    "author",
    "comment",
    "tool_call_id",
    "from",
}
_SHOWN = 40


@dataclass(frozen=True)
class AnswerPart:
    """A part of a conversation.

    Attributes:
        kind: kind of content.
        index: index of the part's message; -1 for a tool.
        text: the part's words.
    """

    kind: Kind
    index: int
    text: str


class Unheard(NamedTuple):
    """A kind of content that a record holds and the model never sees.

    Attributes:
        code: stable name; :data:`WORDS` has its words.
        sample: the beginning of what is left out.
    """

    code: str
    sample: str


@dataclass(frozen=True)
class Marked:
    """A conversation with markers in the place of its words.

    Attributes:
        messages, tools: the conversation with markers.
        parts: ``parts[n]`` is the part that marker n stands for.
        key: hash of the marked conversation. A template treats two conversations with the same key
            in the same way, unless it looks at their words.
    """

    messages: list[Message]
    tools: list[Any] | None
    parts: list[AnswerPart]
    key: bytes


def mark(messages: Sequence[Message], tools: Sequence[Any] | None) -> Marked:
    """Put a marker in the place of each part of a conversation."""
    marker = _Marker()
    marked = [marker.message(index, message) for index, message in enumerate(messages)]
    marked_tools = [marker.tool(tool) for tool in tools] if tools else None
    text = json.dumps([marked, marked_tools], default=str)
    return Marked(
        marked, marked_tools, marker.parts, hashlib.blake2b(text.encode(), digest_size=16).digest()
    )


class _Marker:
    """Writes markers and remembers what they stand for."""

    def __init__(self) -> None:
        self.parts: list[AnswerPart] = []
        self._ids: dict[str, str] = {}

    def _word(self, kind: Kind, index: int, text: str) -> str:
        if len(self.parts) >= _MANY:
            return text
        self.parts.append(AnswerPart(kind, index, text))
        return f"Zq{len(self.parts) - 1}qZ"

    def _spaced(self, kind: Kind, index: int, text: str) -> str:
        """Replace a text by a marker, but keep blanks and tags at both ends; blanks alone stay."""
        words = text.strip()
        if not words:
            return text
        start = text.index(words)
        opening, closing = _OPENING.search(words), _CLOSING.search(words)
        head, tail = opening[0] if opening else "", closing[0] if closing else ""
        if len(head) + len(tail) >= len(words):
            head = tail = ""
        word = self._word(kind, index, words[len(head) : len(words) - len(tail)])
        return text[:start] + head + word + tail + text[start + len(words) :]

    def message(self, index: int, message: Message) -> Message:
        """Return a message with markers; ids and other values without words become equal."""
        return {
            key: self._value(index, message["role"], key, value) for key, value in message.items()
        }

    def _value(self, index: int, role: str, key: str, value: Any) -> Any:
        if key == "content":
            return self._content(index, role, value)
        if key == "tool_calls":
            return [self._call(index, call) for call in value]
        if key == "role" or isinstance(value, bool | int | None):
            return value
        return self._string(index, role, key, value) if isinstance(value, str) else []

    def _string(self, index: int, role: str, key: str, value: str) -> str:
        """Return the replacement of a string beside the content."""
        if key in REASONING_KEYS and role == "assistant":
            return self._spaced("reasoning", index, value)
        if key == "name" and role not in TOOL_ROLES:
            return self._word("name", index, value)
        # An unknown key with a long value holds words, not an id, a date or a name.
        if key not in _BESIDE_WORDS and len(value) >= _SURE and len(value.split()) > _FEW_WORDS:
            return self._word("field", index, value)
        return self._id(value) if "id" in key else "x" * bool(value)

    def _id(self, value: str) -> str:
        """Return a replacement of the same length; equal ids get equal replacements."""
        return self._ids.setdefault(value, str(len(self._ids)).zfill(len(value)))

    def _content(self, index: int, role: str, text: str) -> str:
        if role != "assistant":
            kind: Kind = (
                "result"
                if role in TOOL_ROLES
                else "system"
                if role in INSTRUCTION_ROLES
                else "question"
            )
            return self._spaced(kind, index, text)
        pieces: list[str] = []
        done = 0
        blocks = [*_THINKING.finditer(text)]
        unopened = _UNOPENED.search(text)
        if unopened and (not blocks or unopened.end() < blocks[0].end()):
            blocks.insert(0, unopened)
        for block in blocks:
            pieces.append(self._spaced("answer", index, text[done : block.start()]))
            pieces += [block[1], self._spaced("reasoning", index, block[3]), block[4]]
            done = block.end()
        return "".join(pieces) + self._spaced("answer", index, text[done:])

    def _call(self, index: int, call: Message) -> Message:
        function = dict(called_function(call))
        function["name"] = self._word("call", index, str(function.get("name", "")))
        if "arguments" in function:
            arguments = function["arguments"]
            whole = isinstance(arguments, str) and bool(arguments.strip())
            value = parsed_arguments(arguments)
            function["arguments"] = (
                self._word("argument", index, arguments)
                if whole and isinstance(value, str)
                else self._argument(index, value, _DEPTH)
            )
        if called_function(call) is call:
            return function
        own = {"id": self._id(call["id"])} if isinstance(call.get("id"), str) else {}
        return {**call, **own, "function": function}

    def _argument(self, index: int, value: Any, depth: int) -> Any:
        if isinstance(value, bool | None):
            return value
        if isinstance(value, dict) and depth:
            fields = list(value.items())[:_FIELDS]
            return {
                self._word("argument", index, key): self._argument(index, item, depth - 1)
                for key, item in fields
            }
        if isinstance(value, list) and depth:
            return [self._argument(index, item, depth - 1) for item in value[:_ITEMS]]
        if isinstance(value, str):
            return self._spaced("argument", index, value)
        if isinstance(value, int | float) and len(self.parts) < _MANY:
            self.parts.append(AnswerPart("argument", index, str(value)))
            number = _NUMBER + len(self.parts) - 1
            return number if isinstance(value, int) else number + 0.5
        return []

    def tool(self, tool: Any) -> Any:
        """Return a tool with a marker for its name, without its description and parameters."""
        function = called_function(tool)
        bare = {"description": "", "parameters": {"type": "object", "properties": {}}}
        marked = {key: bare.get(key, value) for key, value in function.items()}
        marked["name"] = self._word("tool", -1, str(function.get("name", "")))
        return marked if function is tool else {**tool, "function": marked}


def lost_markers(text: str, marked: Marked) -> frozenset[int]:
    """Return the numbers of the markers that are not in the text."""
    found = {int(word or number) for word, number in _WORD.findall(text)}
    return frozenset(range(len(marked.parts))) - found


# --- the real text --------------------------------------------------------------------------------


def lost_parts(text: str, parts: Sequence[AnswerPart], lost: Collection[int]) -> list[AnswerPart]:
    """Return the parts that the rendered conversation ``text`` lacks.

    Args:
        lost: numbers of the markers that the marked rendering lacks.
    """
    return [
        part
        for number, part in enumerate(parts)
        if (not _is_there(text, part, parts) if number in lost else is_missing(text, part))
    ]


def _is_there(text: str, part: AnswerPart, parts: Sequence[AnswerPart]) -> bool:
    """Return True if a part's words are in a text as often as messages say them."""
    words = part.text.strip()
    if part.kind in ("call", "argument", "tool", "name") or len(words) < _SURE:
        return False
    return text.count(words) >= sum(words in other.text for other in parts)


def is_missing(text: str, part: AnswerPart) -> bool:
    """Return True if some of a part's words are not in the text, though its marker would be."""
    words = part.text.strip()
    if part.kind not in ("system", "question", "answer", "reasoning", "result") or _written(
        words, text
    ):
        return False
    text = html.unescape(text) if "&" in text else text
    if _written(words, text):
        return False
    lines = [
        line
        for line in map(str.strip, words.splitlines())
        if len(line) >= _SURE and not _written(line, text)
    ]
    if not lines:
        return False
    letters = _letters(text)
    return not all(
        any(_letters(form) in letters for form in (line, *_escaped(line))) for line in lines
    )


def _written(words: str, text: str) -> bool:
    return words in text or any(form in text for form in _escaped(words))


def _escaped(words: str) -> Iterator[str]:
    yield json.dumps(words, ensure_ascii=False)[1:-1]
    yield json.dumps(words)[1:-1]


def _letters(text: str) -> str:
    """Return only the letters and digits of a text."""
    return "".join(filter(str.isalnum, text.casefold()))


# --- messages about lost parts --------------------------------------------------------------------

# `data prepare` and `data check` report columns by themselves.
COLUMN_UNREAD = "column-unread"
_EXAMPLE = ", {sample} is never seen"
_KEEP = "(--chat-template FILE)"
# By code: message about the lost content, and remedy.
WORDS: dict[str, tuple[str, str]] = {
    "reasoning-dropped": (
        "the chat template leaves out the thinking of the answer, {sample} is never seen",
        f"give a chat template that keeps thinking {_KEEP}; or, to train without it, take it out of the data",
    ),
    "reasoning-key-unread": (
        "the chat template does not look for thinking under a key of its own, {sample} is never seen",
        "write it before the words of the answer: <think>...</think>; or, to train without it, take it out of the data",
    ),
    "earlier-reasoning-dropped": (
        "the chat template leaves out the thinking of earlier answers, as it does in generation",
        "this is usual; to train on it, make each such answer the last message of its own record",
    ),
    "calls-dropped": (
        "the chat template leaves out tool calls, {sample} is never seen",
        f"use a model whose template writes calls, or give a template that does {_KEEP}",
    ),
    "arguments-dropped": (
        "the chat template leaves out arguments of tool calls, {sample} is never seen",
        f"use a model whose template writes them, or give a template that does {_KEEP}",
    ),
    "results-dropped": (
        "the chat template leaves out the answers of tools, {sample} is never seen, so the model learns to invent it",
        f"use a model whose template writes them, or give a template that does {_KEEP}",
    ),
    "words-beside-calls": (
        "the chat template leaves out the words of an answer that calls a tool, {sample} is never seen",
        f"take the words out, or give a template that writes both {_KEEP}",
    ),
    "answers-dropped": (
        "the chat template leaves out words of the answers, {sample} is never seen",
        "look at one with allhands data check --row LINE; change the data, or use another chat template",
    ),
    "questions-dropped": (
        "the chat template leaves out words of the questions, {sample} is never seen",
        "look at one with allhands data check --row LINE; change the data, or use another chat template",
    ),
    "system-dropped": (
        "the chat template leaves the system message out, so the model never sees it",
        "--system merge puts it before the question that follows it; or use a template that takes it (--chat-template)",
    ),
    "tools-dropped": (
        "the chat template leaves the tools out, so the model never sees them",
        "describe them in the first question, or use a model whose template takes tools",
    ),
    "names-dropped": (
        "the chat template leaves out the names of speakers",
        "write the name into the words if it matters",
    ),
    "media-dropped": (
        "pictures or sound are not trained on, only the words about them",
        "leave these records out, or describe the pictures and sounds in words",
    ),
    "fields-dropped": (
        "the chat template does not look at other keys of messages, {sample} is never seen",
        "nothing to do if it should not be trained; else move it into the message's content",
    ),
    COLUMN_UNREAD: (
        "columns beside the conversation are not trained, {sample} is never seen",
        "write a system message as the first message, and thinking before the words of the answer: <think>...</think>",
    ),
}


def words_of(code: str, sample: str | None = None) -> tuple[str, str]:
    """Return the message about left-out content, with the sample if given, and its remedy."""
    message, remedy = WORDS[code]
    return (
        message.replace(_EXAMPLE, "") if sample is None else message.format(sample=sample)
    ), remedy


def unheard(
    lost: Sequence[AnswerPart],
    parts: Sequence[AnswerPart],
    messages: Sequence[Message],
    trained: Collection[int],
    *,
    keeps_words: bool,
) -> tuple[Unheard, ...]:
    """Classify the lost parts of a conversation, each kind once.

    Args:
        parts: all parts of the conversation.
        trained: indices of the messages that are targets of the loss.
        keeps_words: whether the template keeps thinking that stands in the words of an answer.
    """
    found: dict[str, str] = {}
    for part in lost:
        if (code := _code(part, lost, parts, messages, trained)) is not None:
            if (
                code == "reasoning-dropped"
                and keeps_words
                and any(isinstance(messages[part.index].get(key), str) for key in REASONING_KEYS)
            ):
                code = "reasoning-key-unread"
            found.setdefault(code, _sample(part.text))
    for message in messages:
        if any(message.get(key) for key in MEDIA_KEYS):
            found.setdefault("media-dropped", "")
    return tuple(Unheard(code, sample) for code, sample in found.items())


def unread(keys: Sequence[str]) -> Iterator[Unheard]:
    """Classify the keys beside a conversation that training does not see."""
    if any(key in MEDIA_KEYS for key in keys):
        yield Unheard("media-dropped", "")
    if columns := [quoted(key) for key in keys if key not in MEDIA_KEYS]:
        yield Unheard(COLUMN_UNREAD, ", ".join(columns))


def _sample(text: str) -> str:
    words = " ".join(text.split())
    return f'"{words if len(words) <= _SHOWN else words[: _SHOWN - 3] + "..."}"'


def _code(
    part: AnswerPart,
    lost: Sequence[AnswerPart],
    parts: Sequence[AnswerPart],
    messages: Sequence[Message],
    trained: Collection[int],
) -> str | None:
    """Return the code for a lost part; None for an argument whose whole call is lost."""
    if part.kind == "reasoning":
        return _code_of_reasoning(lost, parts, messages, trained)
    if part.kind == "answer":
        return "words-beside-calls" if messages[part.index].get("tool_calls") else "answers-dropped"
    if part.kind == "argument":
        gone = any(other.kind == "call" and other.index == part.index for other in lost)
        return None if gone else "arguments-dropped"
    return {"system": "system-dropped", "tool": "tools-dropped"}.get(
        part.kind, f"{part.kind}s-dropped"
    )


def _code_of_reasoning(
    lost: Sequence[AnswerPart],
    parts: Sequence[AnswerPart],
    messages: Sequence[Message],
    trained: Collection[int],
) -> str:
    """Return the code for lost thinking: only that of earlier answers, as is usual in generation,
    or more.
    """
    wanted = {part.index for part in parts if part.kind == "reasoning" and part.index in trained}
    gone = {part.index for part in lost if part.kind == "reasoning" and part.index in trained}
    asked = max(
        (index for index, message in enumerate(messages) if message["role"] == "user"), default=-1
    )
    is_more = bool(gone) and (gone == wanted or max(gone) > asked)
    return "reasoning-dropped" if is_more else "earlier-reasoning-dropped"
