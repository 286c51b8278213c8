"""Tokens that end answers, and tokens that were added later and that the model does not know."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from allhands.data.explained import PROBE
from allhands.data.render import ChatTemplate, has_chat_template
from allhands.errors import DataError


def stop_tokens(tokenizer: Any) -> set[int]:
    """Return the ids of the tokens at which generation stops: mlx_lm's set and the end-of-text
    token.
    """
    stops = getattr(tokenizer, "eos_token_ids", None)
    return {*(stops if isinstance(stops, set) else ()), tokenizer.eos_token_id} - {None}


def own_tokens(tokenizer: Any, *, chosen: bool = False) -> dict[int, str]:
    """Return the tokens, by id, that a person may have added to the model's vocabulary.

    These are the added tokens, except those that the chat template writes, those with a role
    (begin, end, padding and so on), and those that known model families have for code, pictures and
    calls.

    Args:
        chosen: the chat template is not the model's own, so the model may not know the tokens that
            the template writes; they are not excepted.
    """
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    roles = {
        getattr(tokenizer, f"{role}_token", None)
        for role in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
    }
    template = "" if chosen else _template_words(tokenizer)
    return {
        number: text
        for number, text in ((number, str(token)) for number, token in added.items())
        if text.strip()
        and text not in roles
        and number not in stop_tokens(tokenizer)
        and not _OF_FAMILIES.fullmatch(text)
        and text not in template
    }


_OF_FAMILIES = re.compile(
    r"</?(think|tool_call|tool_response|tools|image|s|pad|unk|mask)>|\[/?[A-Z_]+\]|<(0x[0-9A-Fa-f]{2}|unused\d+)>|\s+"
    r"|<\|?(fim|object_ref|box|quad|vision|image|video|audio|repo|file|endof|reponame|filename|gh_|issue_|jupyter)\w*\|?>"
)


def _template_words(tokenizer: Any) -> str:
    """Return the source of the chat template and a conversation that it has rendered."""
    source: Any = getattr(tokenizer, "chat_template", None)
    texts: list[Any] = list(source.values()) if isinstance(source, dict) else [source]  # pyright: ignore[reportUnknownArgumentType]
    if has_chat_template(tokenizer):
        with suppress(DataError):  # the template may reject the conversation
            texts.append(ChatTemplate(tokenizer).text(PROBE.turns, None))
    return "\n".join(str(text) for text in texts if text)


def unstopped(tokenizer: Any) -> tuple[str, int] | None:
    """Return the token that ends answers in the chat template, and its id.

    None if generation stops at this token anyway, or no token ends answers.
    """
    if not has_chat_template(tokenizer):
        return None
    try:
        token = ChatTemplate(tokenizer).answers.closing
    except DataError:
        return None
    number = None if token is None else tokenizer.get_vocab().get(token)
    if token is None or number is None or number in stop_tokens(tokenizer):
        return None
    return (token, number)


def stop_at_answers(tokenizer: Any) -> str | None:
    """Let generation stop where the chat template ends an answer; return the token if it is new."""
    found = unstopped(tokenizer)
    if found is None:
        return None
    tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, found[1]}
    return found[0]
