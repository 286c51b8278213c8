"""Encode one text as tokens, and turn character ranges of the text into a mask over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, takewhile
from typing import Any, Protocol

import numpy as np

from allhands.data.arrays import Bools, Int32s, Ints
from allhands.data.heard import Unheard
from allhands.errors import AllhandsError, DataError, ModelError

Span = tuple[int, int]

# Letters, digits, blanks, line ends, characters of several bytes; it begins with a letter and is in
# NFC.
_PROBE = "Ahoy, 12 matie's.\n\n  \tcafé;\n漢字 🏴\u200d☠️ \n "


class Tokenizer(Protocol):
    """Part of the interface of mlx_lm's TokenizerWrapper and Hugging Face's fast tokenizers that
    is used here.

    ``backend_tokenizer`` (offsets, batches), ``added_tokens_decoder``, ``has_chat_template`` or
    ``chat_template`` are looked for as well.
    """

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


@dataclass(frozen=True)
class Draft:
    """An example as a text, before it is encoded.

    Attributes:
        text: what is encoded.
        framed: the tokenizer adds its special tokens, and an end-of-text token closes it. False for
            the output of a chat template, which has written all of them.
        spans: the character ranges that are targets, in order; None if all of it is.
        dates: the current date, in each spelling in which the chat template has written it.
        unheard: parts of the record that are not in the text.
    """

    text: str
    framed: bool
    spans: tuple[Span, ...] | None
    dates: tuple[str, ...] = ()
    unheard: tuple[Unheard, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """Tokens of a draft, framed, and (if asked for) where they lie.

    Attributes:
        tokens: (L,) int32.
        offsets: (L', 2) character range of each token with L' == L, or L - 1 if ``closed``; None if
            not asked for.
        closed: whether an end-of-text token was put after what the tokenizer made of the text.
    """

    tokens: Int32s
    offsets: Ints | None
    closed: bool


class Encoder:
    """Encodes drafts with one tokenizer: one at a time, or many on all cores with equal results."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    def encode(self, draft: Draft, *, offsets: bool) -> Encoded:
        """Return the tokens of one draft.

        Raises:
            DataError: the text is not valid Unicode, or the tokenizer rejects it.
            ModelError: offsets are wanted and the tokenizer has none.
        """
        try:
            encoder = self._with_offsets() if offsets else self._tokenizer
            return self._framed(draft, encoder.encode(draft.text, add_special_tokens=draft.framed))
        except (TypeError, UnicodeError) as error:
            bad = next(
                (f" (\\u{ord(c):04x})" for c in draft.text if 0xD800 <= ord(c) <= 0xDFFF), ""
            )
            why = f"the example cannot be encoded, it has half a surrogate pair{bad}"
            message = why if bad else f"it cannot be encoded: {error}"
            raise DataError(
                message, code="character-invalid", hint="write the whole character, or remove it"
            ) from error

    def encode_many(
        self, drafts: Sequence[Draft], *, offsets: bool
    ) -> list[Encoded | AllhandsError]:
        """Return the tokens of each draft, in order, or an error for a draft that cannot be
        encoded.
        """
        results: dict[int, Encoded | AllhandsError] = {}
        if drafts and self._backend is not None and (offsets or self._backend_is_all):
            for framed in (False, True):
                # If one draft is not valid text, encode the drafts one by one to find it.
                with suppress(TypeError, UnicodeError):
                    results |= self._batch(
                        {i: d for i, d in enumerate(drafts) if d.framed == framed}, framed, offsets
                    )
        for i in {*range(len(drafts))} - results.keys():
            try:
                results[i] = self.encode(drafts[i], offsets=offsets)
            except AllhandsError as error:
                results[i] = error
        return [results[i] for i in range(len(drafts))]

    def _batch(self, drafts: dict[int, Draft], framed: bool, offsets: bool) -> dict[int, Encoded]:
        backend = self._with_offsets()
        run = backend.encode_batch if offsets else backend.encode_batch_fast
        encodings = (
            run([draft.text for draft in drafts.values()], add_special_tokens=framed)
            if drafts
            else []
        )
        return {
            i: self._framed(draft, found if offsets else found.ids)
            for (i, draft), found in zip(drafts.items(), encodings, strict=True)
        }

    def _with_offsets(self) -> Any:
        """Return the Rust tokenizer, with the cutting and padding of its tokenizer.json off.

        Raises:
            ModelError: there is no Rust tokenizer.
        """
        if self._backend is None:
            raise ModelError(
                "this tokenizer does not give the places of its tokens in the text, so the prompt cannot be masked",
                code="tokenizer-without-offsets",
                hint="use a model with a tokenizer.json, or leave out --mask-prompt",
            )
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        return self._backend

    @cached_property
    def _backend_is_all(self) -> bool:
        """True if the Rust tokenizer gives the same tokens for a probe as the whole tokenizer."""
        text = _PROBE + "cafe\u0301" + (self._tokenizer.eos_token or "")
        backend = self._with_offsets()
        return all(
            backend.encode(text, add_special_tokens=added).ids
            == list(self._tokenizer.encode(text, add_special_tokens=added))
            for added in (False, True)
        )

    def _framed(self, draft: Draft, found: Any) -> Encoded:
        """Return the tokens; a framed draft gets an end-of-text token and loses a second
        begin-of-text token.
        """
        ids: list[int] = found if isinstance(found, list) else found.ids
        offsets = None
        if not isinstance(found, list):
            flat = chain.from_iterable(found.offsets)
            offsets = np.fromiter(flat, dtype=np.int64, count=2 * len(ids)).reshape(-1, 2)
        if not draft.framed:
            return Encoded(np.asarray(ids, dtype=np.int32), offsets, closed=False)
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        # Two begin-of-text tokens: one from the tokenizer, one written in the text.
        doubled = bos is not None and ids[:2] == [bos, bos]
        closed = eos is not None and ids[-1:] != [eos]
        tokens = np.asarray([*ids[doubled:], eos] if closed else ids[doubled:], dtype=np.int32)
        return Encoded(tokens, None if offsets is None else offsets[int(doubled) :], closed)


def mask_of(draft: Draft, encoded: Encoded, eos: int | None) -> Bools:
    """(L,) bool: the targets among the tokens; never the first, since nothing predicts it."""
    length = len(encoded.tokens)
    mask = np.ones(length, dtype=np.bool_)
    if draft.spans is not None:
        assert encoded.offsets is not None
        mask[: len(encoded.offsets)] = mask_of_spans(draft.text, encoded.offsets, draft.spans)
        if draft.framed and length and encoded.tokens[-1] == eos:
            # Some tokenizers add the end-of-text token themselves, without a place in the text.
            mask[-1] = True
    mask[:1] = False
    return mask


def mask_of_spans(text: str, offsets: Ints, spans: Sequence[Span]) -> Bools:
    """(L,) bool: the tokens that lie inside a span.

    A token across a border of the span counts if the part inside is more than blanks. For example,
    "▁Ahoy" has the first word of an answer. A "\\n\\n" of which one half belongs to the header has
    only a blank of the answer.

    Args:
        offsets: (L, 2) character range of each token.
        spans: (start, end) character ranges, in order.
    """
    starts, ends = _ranges(offsets)
    mask = np.zeros(len(offsets), dtype=np.bool_)
    for begin, end in spans:
        reached = int(ends.searchsorted(begin, "right"))
        first, last = int(starts.searchsorted(begin)), int(ends.searchsorted(end, "right"))
        past = int(starts.searchsorted(end))
        mask[first : min(last, past)] = True
        for i in (*range(reached, min(first, past)), *range(max(last, reached), past)):
            mask[i] |= bool(text[max(starts[i], begin) : min(ends[i], end)].strip())
    return mask


def _ranges(offsets: Ints) -> tuple[Ints, Ints]:
    """Return the beginning and the end of each token, both in ascending order.

    Some tokenizers report "Ġword" without its blank: it begins where the one before has ended. A
    token that the tokenizer added at the end has no place of its own: it lies where the text has
    ended.
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    before = np.zeros_like(ends)
    before[1:] = ends[:-1]
    return np.where(offsets[:, 1] < before, before, np.minimum(offsets[:, 0], before)), ends


def pieces_of_text(text: str, offsets: Ints) -> list[str]:
    """Return the part of ``text`` that each token stands for; joined, they are the text.

    If several tokens make up one character, the first token has it and the others have "".
    """
    if not len(offsets):
        return []
    until = np.maximum.accumulate(offsets[:, 1])
    until[-1] = len(text)
    edges = [0, *until.tolist()]
    return [text[a:b] for a, b in pairwise(edges)]


def common_prefix(one: str, other: str) -> str:
    """Return the longest beginning that both have."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in same)
