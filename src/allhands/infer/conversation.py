"""Conversation with a model: every turn sees the earlier ones, and only new tokens are computed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import common_prefix_len

from allhands.data.render import ChatTemplate, has_chat_template
from allhands.data.templates import OPTION
from allhands.errors import ModelError
from allhands.infer.generate import PromptTooLong, Sampling, room_for_answer
from allhands.model.load import LoadedModel, require_in_vocabulary
from allhands.model.tokenizer import positions_of

# mlx_lm's annotation is wrong: it returns the number of removed tokens.
_trim = cast("Callable[[list[Any], int], int]", trim_prompt_cache)


class Conversation:
    """Turns of a user and a model, through the model's chat template.

    mlx_lm's prompt cache is kept between turns. Its tokens are compared with those of the whole
    conversation. Tokens from the first difference on are computed again, because a template may
    write earlier turns in another way.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        sampling: Sampling,
        *,
        max_tokens: int,
        system_prompt: str | None = None,
    ) -> None:
        """Start a conversation; sampling begins with ``sampling.seed``.

        Raises:
            ModelError: the model has no chat template.
        """
        if not has_chat_template(loaded.tokenizer):
            raise ModelError(
                "the model has no chat template: it continues texts, and does not talk",
                code="chat-template-missing",
                where=str(loaded.path),
                hint=f"use `allhands generate`, name a chat template ({OPTION}), or choose a chat model",
            )
        tokenizer: Any = loaded.tokenizer
        self._loaded = loaded
        self._template = ChatTemplate(tokenizer)
        self._max_tokens = max_tokens
        self._sampler = make_sampler(
            temp=sampling.temperature, top_p=sampling.top_p if sampling.top_p < 1 else 0.0
        )
        self._first = [{"role": "system", "content": system_prompt}] if system_prompt else []
        mx.random.seed(sampling.seed)
        self.reset()

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages: list[dict[str, Any]] = list(self._first)
        self._forget()

    def _forget(self) -> None:
        self._cache: list[Any] = make_prompt_cache(self._model)
        self._held: list[int] = []
        # Number of computed tokens of the last turn, for tests and information.
        self.computed_tokens = 0

    @property
    def _model(self) -> Any:
        return self._loaded.model

    def ask(self, text: str) -> Generator[str]:
        """Yield pieces of the answer as they are generated. The text so far is kept if the caller
        stops early.

        Raises:
            DataError: the template rejects the conversation, which stays unchanged.
            PromptTooLong: the conversation fills all positions of the model; it stays unchanged.
            ModelError: the tokenizer belongs to another model.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self._template.prompt_tokens(messages)
        require_in_vocabulary(self._loaded, max(tokens, default=0))
        max_tokens = self._room(len(tokens))
        self.messages = messages
        new = self._rest(tokens)
        self.computed_tokens = len(new)
        said, generated, whole = "", list[int](), False
        try:
            for part in stream_generate(
                self._model,
                self._loaded.tokenizer,
                new,
                max_tokens=max_tokens,
                sampler=self._sampler,
                prompt_cache=self._cache,
            ):
                said += part.text
                generated.append(part.token)
                yield part.text
            whole = True
        finally:
            self.messages.append({"role": "assistant", "content": said})
            if whole:
                # The last token may have been computed or not.
                self._held = [*tokens, *generated][: int(getattr(self._cache[0], "offset", 0))]
            else:
                # After a stop some layers may hold one token more than others.
                self._forget()

    def _room(self, count: int) -> int:
        """Tokens that an answer may have after ``count`` of the conversation."""
        try:
            return room_for_answer(
                count, positions_of(self._loaded.config), self._max_tokens, "the conversation"
            )
        except PromptTooLong as error:
            error.where = None
            error.hint = "say less" + "; /reset forgets what was said before" * (
                len(self.messages) > len(self._first)
            )
            raise

    def _rest(self, tokens: list[int]) -> list[int]:
        """Return the tokens that are not in the cache, and cut the cache to exactly the other
        tokens.
        """
        common = min(common_prefix_len(self._held, tokens), len(tokens) - 1)
        spare = len(self._held) - common
        if not self._held or (spare and not can_trim_prompt_cache(self._cache)):
            self._forget()
            return tokens
        if spare and _trim(self._cache, spare) != spare:
            self._forget()
            return tokens
        return tokens[common:]
