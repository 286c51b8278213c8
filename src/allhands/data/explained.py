"""What a rendered example consists of and what a chat template does, for people to look at before a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from allhands.data.answers import AnswerFinder
from allhands.data.encoding import Encoded, Tokenizer, pieces_of_text
from allhands.data.records import Message, Record
from allhands.errors import DataError

# "dropped": accepted, but nothing of it is in the text that the model gets.
Support = Literal["taken", "dropped", "rejected"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WORDS = "Bluebell"


class RendersChat(Protocol):
    """What is asked of a chat template here."""

    def text(self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False) -> str: ...


@dataclass(frozen=True)
class Explained:
    """One example, token by token.

    Attributes:
        tokens: (L,) int32, as rendered.
        mask: (L,) bool, the targets of the loss.
        truncated: tokens cut off the end.
        pieces: (L) pairs: the text that the token stands for, and whether it is a target. The first token of
            a character that takes several has the character, the others have "". A token that the tokenizer
            added (begin or end of text) shows its own name.
        cut: the text of the tokens that were cut off.
        special_text: special tokens that the record's own words spell out.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    truncated: int
    pieces: tuple[tuple[str, bool], ...]
    cut: str
    special_text: tuple[str, ...]

    @property
    def text(self) -> str:
        """Everything as text, what was cut off included."""
        return "".join(text for text, _ in self.pieces) + self.cut

    def runs(self) -> list[tuple[str, bool]]:
        """The pieces with neighbours of the same kind joined."""
        return [
            ("".join(text for text, _ in group), trained)
            for trained, group in groupby(self.pieces, key=lambda piece: piece[1])
        ]


@dataclass(frozen=True)
class TemplateFacts:
    """What a chat template does.

    Attributes:
        present: the tokenizer has one; without, all that follows is empty.
        system: whether a system message reaches the model.
        tools: the same for a list of tools.
        tool_calls: the same for a call in an answer.
        header: what opens an answer (of ``add_generation_prompt``); "" if nothing does.
        end_of_turn: what closes an answer; "" if nothing does.
        end_of_turn_trained: with ``mask_prompt``, the model learns to write it.
        end_of_turn_is_eos: it is the tokenizer's end-of-text token. If not, generation must be told to stop there.
        keeps_blanks: blanks around an answer are kept.
        writes_bos: its output begins with the begin-of-text token.
        adds_bos: the tokenizer puts one before any text. Encoding the template's output with both would give
            two; it is encoded without the tokenizer's.
        marks_answers: it has ``{% generation %}`` marks.
    """

    present: bool
    system: Support = "rejected"
    tools: Support = "rejected"
    tool_calls: Support = "rejected"
    header: str = ""
    end_of_turn: str = ""
    end_of_turn_trained: bool = False
    end_of_turn_is_eos: bool = False
    keeps_blanks: bool = False
    writes_bos: bool = False
    adds_bos: bool = False
    marks_answers: bool = False

    @property
    def two_bos(self) -> bool:
        """Whether template and tokenizer would each write a begin-of-text token."""
        return self.writes_bos and self.adds_bos


def token_texts(tokenizer: Any, text: str, encoded: Encoded) -> list[str]:
    """(L) the text of each token; of one that the tokenizer added, its name."""
    assert encoded.offsets is not None
    pieces = pieces_of_text(text, encoded.offsets) + [""] * encoded.closed
    names: dict[int, str] = {
        token: name
        for token, name in (
            (tokenizer.bos_token_id, tokenizer.bos_token),
            (tokenizer.eos_token_id, tokenizer.eos_token),
        )
        if token is not None and name is not None
    }
    return [piece or names.get(token, "") for token, piece in zip(encoded.tokens.tolist(), pieces, strict=True)]


def special_tokens_in(tokenizer: Any, record: Record) -> tuple[str, ...]:
    """Special tokens that the record's own words spell out, each once, in the order of their first place."""
    pattern = special_pattern(tokenizer)
    if pattern is None:
        return ()
    return tuple(dict.fromkeys(found for words in _words(record) for found in pattern.findall(words)))


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The text of each special token, by its id."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {number: str(token) for number, token in added.items() if getattr(token, "special", True)}


def special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds special tokens in words, the longest first; None if there are none."""
    return pattern_of(special_tokens(tokenizer).values())


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Finds these tokens in words, the longest first; None if there are none."""
    names = sorted((re.escape(text) for text in tokens if text), key=len, reverse=True)
    return re.compile("|".join(names)) if names else None


def _words(record: Record) -> Iterable[str]:
    """All strings of a record, tool calls and tools included."""

    def strings(value: Any) -> Iterable[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from strings(item)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from strings(item)

    for part in (record.tools, record.messages, record.prompt, record.completion, record.text):
        yield from strings(part)


_QUESTION: list[Message] = [{"role": "user", "content": "a"}]
_ANSWER: Message = {"role": "assistant", "content": "b"}
_TOOL: Message = {
    "type": "function",
    "function": {"name": _WORDS, "description": _WORDS, "parameters": {"type": "object", "properties": {}}},
}
# The id has nine letters or digits: Mistral's templates insist on that.
_CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": _WORDS, "arguments": {}}}],
}
PROBE = Record("chat", messages=(*_QUESTION, _ANSWER, *_QUESTION, {**_ANSWER, "content": _WORDS}))


def probe_template(
    tokenizer: Tokenizer, template: RendersChat, answers: Callable[[], AnswerFinder], trained: str
) -> TemplateFacts:
    """What the chat template does.

    Args:
        answers: finds those of the template.
        trained: the trained text of the last answer of ``PROBE``; "" if it cannot be had.
    """
    source = getattr(tokenizer, "chat_template", None)
    sources: Iterable[Any] = source.values() if isinstance(source, dict) else [source]
    end = _or_nothing(lambda: answers().ending)
    plain, blanks = (_text(template, [*_QUESTION, {**_ANSWER, "content": words}]) or "" for words in ("b", " b "))
    return TemplateFacts(
        present=True,
        system=_support(template, [{"role": "system", "content": _WORDS}, *_QUESTION, _ANSWER]),
        tools=_support(template, [*_QUESTION, _ANSWER], [_TOOL]),
        tool_calls=_support(template, [*_QUESTION, _CALLING]),
        header=_or_nothing(lambda: answers().header),
        end_of_turn=end,
        end_of_turn_trained=bool(end) and trained.endswith(end),
        end_of_turn_is_eos=bool(end) and end == tokenizer.eos_token,
        keeps_blanks=" b " in blanks and len(blanks) == len(plain) + 2,
        writes_bos=bool(tokenizer.bos_token) and plain.startswith(tokenizer.bos_token or ""),
        adds_bos=tokenizer.bos_token_id is not None and list(tokenizer.encode("a"))[:1] == [tokenizer.bos_token_id],
        marks_answers=any(isinstance(text, str) and bool(_GENERATION.search(text)) for text in sources),
    )


def openings(template: RendersChat) -> tuple[str, str]:
    """What a chat template does not write before an answer that is asked for, and what it writes only there."""
    try:
        plain, prompt = template.text(_QUESTION, None), template.text(_QUESTION, None, prompt=True)
        trained = template.text([*_QUESTION, {**_ANSWER, "content": _WORDS}], None)
    except DataError:
        return "", ""  # the records that are rejected say it better
    opening = trained.partition(_WORDS)[0]
    if prompt == plain:
        return opening.removeprefix(plain).strip(), ""
    if opening.startswith(prompt.rstrip()):
        return "", ""
    same = next((i for i, (a, b) in enumerate(zip(prompt, opening, strict=False)) if a != b), len(opening))
    return "", prompt[same:].strip()


def _text(template: RendersChat, messages: list[Message], tools: list[Any] | None = None) -> str | None:
    try:
        return template.text(messages, tools)
    except DataError:
        return None


def _support(template: RendersChat, messages: list[Message], tools: list[Any] | None = None) -> Support:
    text = _text(template, messages, tools)
    return "rejected" if text is None else "taken" if _WORDS in text else "dropped"


def _or_nothing(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except DataError:
        return ""
