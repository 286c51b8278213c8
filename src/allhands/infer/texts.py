"""Text of generated tokens: the bytes of each token, and the places of stop words in the text.

Stop words are found in the text, not among the tokens, because a word may begin and end in the
middle of a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

from allhands.data.tokens_shown import bytes_of_letters


class TokenBytes:
    """The bytes that each token of a tokenizer stands for.

    Byte-level vocabularies and those of SentencePiece contain the bytes; other tokens are decoded
    one by one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sample: Any = tokenizer.detokenizer
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {
            number: str(getattr(token, "content", token)).encode()
            for number, token in added.items()
        }
        self._known: dict[int, bytes] = {}

    @cached_property
    def joined(self) -> bool:
        """True if the bytes of tokens, one after the other, are their text."""
        return isinstance(self._sample, BPEStreamingDetokenizer | SPMStreamingDetokenizer)

    def of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be an incomplete character."""
        if token not in self._known:
            self._known[token] = self._added[token] if token in self._added else self._found(token)
        return self._known[token]

    def _found(self, token: int) -> bytes:
        sample = self._sample
        if not self.joined:
            return self._asked(token)
        spaced = isinstance(sample, SPMStreamingDetokenizer)
        if token >= len(sample.tokenmap):
            return b"" if spaced else b"!"
        if spaced:
            return sample.tokenmap[token].replace("\u2581".encode(), b" ")
        letters = bytes_of_letters()
        pieces = (
            bytes([letters[c]]) if c in letters else c.encode()
            for c in sample.tokenmap[token] or ""
        )
        return b"".join(pieces)

    def _asked(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return str(self._tokenizer.decode([token])).encode()

    def shown(self, token: int) -> str:
        """Return a token as text; bytes that are no whole character as ``\\xe2``, as OpenAI writes
        them.
        """
        return self.of(token).decode("utf-8", "backslashreplace")

    def stream(self) -> TextStream:
        """Return the text of tokens to come."""
        if not self.joined:
            return _Naive(self, self._tokenizer.detokenizer)
        return TextStream(self, drops_space=getattr(self._sample, "trim_space", True))


class TextStream:
    """Text of tokens as it becomes known, without a space at its very beginning, as mlx_lm writes
    it.

    Attributes:
        length: characters so far.
        whole: True if no incomplete character waits for its rest.
    """

    length, whole = 0, True

    def __init__(self, tokens: TokenBytes, *, drops_space: bool) -> None:
        self._tokens, self._drops_space = tokens, drops_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Add a token, and return the newly known text."""
        text = self._counted(self._decoder.decode(self._tokens.of(token)))
        self.whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        return self._counted(self._decoder.decode(b"", True))

    def _counted(self, text: str) -> str:
        if text and self._drops_space:
            text = text.removeprefix(" ")
            self._drops_space = False
        self.length += len(text)
        return text


class _Naive(TextStream):
    """The text of tokens whose text depends on earlier tokens."""

    def __init__(self, tokens: TokenBytes, detokenizer: Any) -> None:
        super().__init__(tokens, drops_space=False)
        self._detokenizer = detokenizer

    def add(self, token: int) -> str:
        self._detokenizer.add_token(token)
        return self._counted(str(self._detokenizer.last_segment))

    def finish(self) -> str:
        self._detokenizer.finalize()
        return self._counted(str(self._detokenizer.last_segment))


class StopWords:
    """Lets text through up to the first stop word, and holds back what may become the beginning of
    one.

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
        """Return the new part of the text that is certainly no part of a stop word."""
        if self.found:
            return ""
        self._held += text
        # The stop word that ends first, the longest of those that end there.
        found = [
            (place + len(word), place)
            for word in self._words
            if (place := self._held.find(word)) >= 0
        ]
        if found:
            self.found = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - self._begun())

    def finish(self) -> str:
        """Return the held-back text that became no stop word."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], "" if self.found else self._held[count:]
        self.passed += count
        return text

    def _begun(self) -> int:
        """Return the number of characters at the end that may begin a stop word."""
        counts = range(min(self._longest - 1, len(self._held)), 0, -1)
        return next(
            (n for n in counts if any(word.startswith(self._held[-n:]) for word in self._words)), 0
        )
