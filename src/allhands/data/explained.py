"""Rendered examples and chat templates, shown to people before a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from allhands.data.arrays import Bools, Int32s
from allhands.data.encoding import Encoded, common_prefix, pieces_of_text
from allhands.data.records import Message, Record
from allhands.errors import DataError

Kind = Literal["trained", "masked", "cut"]
_WORDS = "Bluebell"


@dataclass(frozen=True)
class Explained:
    """One example, token by token.

    Attributes:
        tokens: (L,) int32, as rendered.
        mask: (L,) bool, the targets of the loss.
        truncated: tokens cut off the end.
        pieces: (L) pairs: the text that the token stands for, and whether it is a target. The first
            token of a character that takes several tokens has the character, the others have "". A
            token that the tokenizer added (begin or end of text) shows its own name.
        cut: the text of the tokens that were cut off.
    """

    tokens: Int32s
    mask: Bools
    truncated: int
    pieces: tuple[tuple[str, bool], ...]
    cut: str

    @property
    def text(self) -> str:
        """Everything as text, what was cut off included."""
        return "".join(text for text, _ in self.pieces) + self.cut

    def runs(self) -> list[tuple[Kind, str]]:
        """Return the text in stretches that are trained, masked or cut off, in order."""
        runs: list[tuple[Kind, str]] = [
            ("trained" if trained else "masked", "".join(text for text, _ in group))
            for trained, group in groupby(self.pieces, key=lambda piece: piece[1])
        ]
        runs.append(("cut", self.cut))
        return [run for run in runs if run[1]]


def token_texts(tokenizer: Any, text: str, encoded: Encoded) -> list[str]:
    """Return the text of each token, (L); for a token that the tokenizer added, its name."""
    assert encoded.offsets is not None
    pieces = pieces_of_text(text, encoded.offsets) + [""] * encoded.closed
    names = {
        getattr(tokenizer, f"{end}_token_id"): getattr(tokenizer, f"{end}_token") or ""
        for end in ("bos", "eos")
    }
    return [
        piece or names.get(token, "")
        for token, piece in zip(encoded.tokens.tolist(), pieces, strict=True)
    ]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the text of each special token, by its id."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        number: str(token) for number, token in added.items() if getattr(token, "special", True)
    }


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds these tokens in words, the longest first; None without tokens."""
    names = sorted((re.escape(text) for text in tokens if text), key=len, reverse=True)
    return re.compile("|".join(names)) if names else None


_QUESTION: list[Message] = [{"role": "user", "content": "a"}]
_ANSWER: Message = {"role": "assistant", "content": "b"}
PROBE = Record("chat", messages=(*_QUESTION, _ANSWER, *_QUESTION, {**_ANSWER, "content": _WORDS}))


def openings(template: Any) -> tuple[str, str]:
    """Return two texts: one that the chat template omits before generated answers, and one that it
    writes only there. Each is empty if there is no such text.
    """
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
    return "", prompt.removeprefix(common_prefix(prompt, opening)).strip()
