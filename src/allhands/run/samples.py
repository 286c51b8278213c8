"""Texts that the model writes during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from allhands.io.trees import number
from allhands.observe.metrics import Sampled
from allhands.parallel.expert import AlikeModel
from allhands.parallel.experts import Experts
from allhands.parallel.fsdp import FetchedModel, following
from allhands.parallel.pipeline import PipedModel
from allhands.parallel.piping import Piping
from allhands.parallel.sharding import Sharding


def answering(
    model: nn.Module,
    piping: Piping | None,
    sharding: Sharding | None,
    experts: Experts | None = None,
) -> nn.Module | PipedModel | FetchedModel | AlikeModel:
    """Return a callable model for the logits of the next token.

    If ranks have parts of the model, all of them must call it together.
    """
    if piping is not None:
        return PipedModel(piping, sharding)
    if sharding is not None:
        return FetchedModel(sharding, experts)
    return model if experts is None else AlikeModel(experts)


@dataclass(frozen=True)
class Sampler:
    """Lets ``model`` continue prompts.

    For every token the whole text is computed again, by the forward pass of training. Samples are
    short, so this is fast enough and cannot differ from training. The random numbers are functions
    of seed, iteration and the prompt's place, and do not change other random numbers.

    Attributes:
        num_tokens: most tokens to generate for a prompt.
        most: most tokens of a text, prompt included.
        multiple: rows are padded to a multiple of so many tokens, because a GPU needs time for each
            new length.
        beat: called with "validate" and the number of steps done before each token, and with
            "reduce" before a wait.
    """

    model: nn.Module | PipedModel | FetchedModel | AlikeModel
    tokenizer: Any
    prompts: Sequence[str]
    num_tokens: int
    temperature: float
    seed: int
    most: int
    beat: Callable[[str, int], None]
    multiple: int = 1

    def __call__(self, step: int, iteration: int) -> list[Sampled]:
        """Return a generated text for each prompt."""
        self.model.eval()
        if isinstance(self.model, PipedModel | FetchedModel | AlikeModel):
            self.model.heartbeat = lambda phase: self.beat(
                "reduce" if phase == "reduce" else "validate", step
            )
        try:
            return [
                self._sampled(place, prompt, step, iteration)
                for place, prompt in enumerate(self.prompts)
            ]
        finally:
            self.model.train()

    def _sampled(self, place: int, prompt: str, step: int, iteration: int) -> Sampled:
        began = time.perf_counter()
        text = self._text(place, prompt, step, iteration)
        return Sampled(step, prompt, text, time.perf_counter() - began)

    def _text(self, place: int, prompt: str, step: int, iteration: int) -> str:
        tokens = self._start(prompt)
        begun, ends = len(tokens), set(self.tokenizer.eos_token_ids)
        key = mx.random.key(self.seed + iteration * 1_000_003 + place)
        while len(tokens) < min(begun + self.num_tokens, self.most):
            self.beat("validate", step)
            logits = self._logits(tokens)
            key, now = mx.random.split(key)
            cold = self.temperature == 0
            token = (
                mx.argmax(logits)
                if cold
                else mx.random.categorical(logits / self.temperature, key=now)
            )
            tokens.append(int(number(token)))
            if tokens[-1] in ends:
                break
        return self.tokenizer.decode(tokens[begun:], skip_special_tokens=True)

    def _logits(self, tokens: list[int]) -> mx.array:
        """Return the (V,) float32 logits of what follows ``tokens``."""
        padding = min(-len(tokens) % self.multiple, self.most - len(tokens))
        row, length = mx.array([tokens + [0] * padding]), len(tokens)
        if isinstance(self.model, PipedModel | FetchedModel):
            return self.model(row, length=length)[0, 0]
        return following(cast("Any", self.model)(row), length)[0, 0]

    def _start(self, prompt: str) -> list[int]:
        """Return the prompt's tokens: at least one, without an end-of-text token that the tokenizer
        has added.
        """
        tokens = list(self.tokenizer.encode(prompt))
        while len(tokens) > 1 and tokens[-1] in self.tokenizer.eos_token_ids:
            tokens.pop()
        return (tokens or [self._first()])[: self.most - 1]

    def _first(self) -> int:
        given = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if given is None else given
