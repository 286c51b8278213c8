"""Tokens of a text in a form that people can read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.errors import ConfigError, ModelError
from allhands.io.paths import meant

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TokenisedText:
    """A text in tokens.

    Attributes:
        ids: ids of the tokens.
        pieces: text of each token: line ends as ``\\n``, bytes of an incomplete character as
            ``\\xf0``.
        num_bytes: UTF-8 bytes of the text.
    """

    ids: list[int]
    pieces: list[str]
    num_bytes: int


def load_tokenizer_file(directory: Path) -> Tokenizer:
    """Return the tokenizer in ``directory``, also that of a model.

    Raises:
        ModelError: the directory has no tokenizer.json, or the file cannot be read.
    """
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        hint = "name a directory that holds tokenizer.json: `allhands tokenizer train` makes one"
        raise ModelError(
            "there is no tokenizer.json",
            code="tokenizer-missing",
            where=str(directory),
            hint=meant(directory, hint, lambda near: (near / file.name).is_file()),
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no error class for unreadable files
        raise ModelError(
            f"the tokenizer cannot be read: {error}",
            code="tokenizer-unreadable",
            where=str(file),
            hint="it is damaged, or newer than the tokenizers library here: make it or fetch it again",
        ) from error


def cut(tokenizer: Tokenizer, text: str) -> TokenisedText:
    """Cut a text into tokens, without the special tokens that a model gets around a text.

    Raises:
        ConfigError: the text is not Unicode.
    """
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(
            "the text is not Unicode",
            code="text-not-unicode",
            where="TEXT",
            hint="give it in UTF-8",
        ) from None
    encoded: Any = tokenizer.encode(text, add_special_tokens=False)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    in_bytes = "ByteLevel" in json.dumps(json.loads(tokenizer.to_str())["decoder"])
    pieces = [
        token
        if token in special or not in_bytes
        else _readable(bytes(bytes_of_letters()[letter] for letter in token))
        for token in encoded.tokens
    ]
    return TokenisedText(list(encoded.ids), pieces, num_bytes)


def _readable(raw: bytes) -> str:
    text = raw.decode("utf-8", "backslashreplace")
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


@cache
def bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for (GPT-2's table).

    Printable characters of Latin-1 stand for their own bytes. The characters from 256 on stand for
    the other bytes, in order.
    """
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
