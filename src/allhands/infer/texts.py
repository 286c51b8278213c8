"""The text of tokens as they come: what each stands for in bytes, and where a stop word begins in what they say.

Stop words are found in the text, not among the tokens: a word may begin and end in the middle of one.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from mlx_lm.generate import StopSequences
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

from allhands.data.tokens_shown import bytes_of_letters


class TokenBytes:
    """The bytes that each token of a tokenizer stands for.

    Byte-level vocabularies and those of SentencePiece say it; of others it is asked token by token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sample: Any = tokenizer.detokenizer
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {number: str(getattr(token, "content", token)).encode() for number, token in added.items()}
        self._known: dict[int, bytes] = {}

    @cached_property
    def joined(self) -> bool:
        """Whether the bytes of tokens, one after the other, are their text."""
        return isinstance(self._sample, BPEStreamingDetokenizer | SPMStreamingDetokenizer)

    def of(self, token: int) -> bytes:
        """The bytes of a token; an incomplete character's are no text by themselves."""
        if token not in self._known:
            self._known[token] = self._added[token] if token in self._added else self._found(token)
        return self._known[token]

    def _found(self, token: int) -> bytes:
        sample = self._sample
        if self.joined and token >= len(sample.tokenmap):
            return b"!" if isinstance(sample, BPEStreamingDetokenizer) else b""
        if isinstance(sample, SPMStreamingDetokenizer):
            return sample.tokenmap[token].replace("\u2581".encode(), b" ")
        if isinstance(sample, BPEStreamingDetokenizer):
            letters = bytes_of_letters()
            pieces = (bytes([letters[c]]) if c in letters else c.encode() for c in sample.tokenmap[token] or "")
            return b"".join(pieces)
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return str(self._tokenizer.decode([token])).encode()

    def shown(self, token: int) -> str:
        """A token as text; bytes that are no whole character as ``\\xe2``, as OpenAI writes them."""
        return self.of(token).decode("utf-8", "backslashreplace")

    def stream(self) -> TextStream:
        """The text of tokens to come."""
        if not self.joined:
            return _Naive(self._tokenizer.detokenizer)
        return _JoinedText(self, drops_space=getattr(self._sample, "trim_space", True))


class TextStream:
    """Text of tokens as it becomes known, without a space at its very beginning, as mlx_lm writes it.

    Attributes:
        length: characters so far.
        whole: no byte waits for the rest of its character.
    """

    length = 0
    whole = True

    def add(self, token: int) -> str:
        """The text that is known with this token and was not without."""
        raise NotImplementedError

    def finish(self) -> str:
        """The rest, when no token comes any more."""
        raise NotImplementedError


class _JoinedText(TextStream):
    def __init__(self, tokens: TokenBytes, *, drops_space: bool) -> None:
        self._tokens = tokens
        self._drops_space = drops_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        text = self._decoded(self._tokens.of(token))
        self.whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        return self._decoded(b"", final=True)

    def _decoded(self, raw: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(raw, final)
        if text and self._drops_space:
            text = text.removeprefix(" ")
            self._drops_space = False
        self.length += len(text)
        return text


class _Naive(TextStream):
    """For tokenizers whose tokens' text depends on those before."""

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer

    def add(self, token: int) -> str:
        self._detokenizer.add_token(token)
        text = str(self._detokenizer.last_segment)
        self.length += len(text)
        return text

    def finish(self) -> str:
        self._detokenizer.finalize()
        text = str(self._detokenizer.last_segment)
        self.length += len(text)
        return text


class StopWords:
    """Lets text through up to the first stop word, and holds back what may become the beginning of one.

    Attributes:
        found: a stop word is complete: nothing follows.
        passed: characters that were let through.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._longest = max(map(len, words), default=0)
        self._held = ""
        self.found = False
        self.passed = 0

    def add(self, text: str) -> str:
        """The part of the text so far that is surely no part of a stop word, and was not let through before."""
        if self.found:
            return ""
        self._held += text
        cut = self._first_stop()
        if cut is not None:
            self.found = True
            text = self._release(cut)
            self._held = ""
            return text
        return self._release(len(self._held) - self._begun())

    def finish(self) -> str:
        """What was held back and became no stop word."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.passed += count
        return text

    def _first_stop(self) -> int | None:
        """Where the stop word begins that ends first, the longest of those that end there."""
        found = [(place + len(word), place) for word in self._words if (place := self._held.find(word)) >= 0]
        return min(found)[1] if found else None

    def _begun(self) -> int:
        """How many characters at the end may be the beginning of a stop word."""
        for count in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(word.startswith(self._held[-count:]) for word in self._words):
                return count
        return 0


class _Matcher:
    """The text of one stream of tokens."""

    def __init__(self, ends: frozenset[int], text: TextStream, stop: StopWords) -> None:
        self._ends, self._text, self._stop = ends, text, stop

    def advance(self, token: int) -> bool:
        """Take one token; whether the answer ends with it."""
        if token in self._ends:
            return True
        self._stop.add(self._text.add(token))
        return self._stop.found


class TextStops(StopSequences):
    """In place of mlx_lm's automaton of tokens: generation ends with the token that completes a stop word's text."""

    def __init__(self, ends: frozenset[int], words: Sequence[str], stream: Callable[[], TextStream]) -> None:
        super().__init__([(token,) for token in ends])
        self._ends, self._words, self._stream = ends, tuple(words), stream

    def matcher(self) -> Any:
        """A fresh one."""
        return _Matcher(self._ends, self._stream(), StopWords(self._words))
