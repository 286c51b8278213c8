"""Answers in OpenAI's format: text by state, tokens with their likelihoods, whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import ToolCallFormatter

from allhands.infer.texts import StopWords, TokenBytes

Json = dict[str, Any]

# For a token that cannot come: JSON has no minus infinity.
_NEVER = -9999.0


@dataclass(frozen=True)
class Token:
    """One token of an answer, and how far the text reaches that needs it."""

    id: int
    logprob: float
    top: tuple[Json, ...]
    end: int


@dataclass
class Piece:
    """The part of an answer that one token, or several, have brought; ``finish`` with the last."""

    text: str = ""
    reasoning: str = ""
    calls: list[Json] = field(default_factory=list[Json])
    tokens: list[Token] = field(default_factory=list[Token])
    finish: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.tokens or self.finish)

    def add(self, other: Piece) -> None:
        """Put what comes next behind it."""
        self.text += other.text
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.tokens += other.tokens
        self.finish = other.finish


class Answer:
    """Makes pieces of generated tokens; nothing of a stop word is in any of them.

    Args:
        context: mlx_lm's, of the request.
        tokens, ends: of the tokenizer; tokens that end an answer are no part of it.
        arguments: of mlx_lm's; tokens come with pieces only if their likelihoods were asked for.
    """

    def __init__(
        self, context: Any, tokens: TokenBytes, ends: frozenset[int], arguments: Any, tools: Any
    ) -> None:
        self._ends = ends
        self._stream = tokens.stream()
        self._stop = StopWords(arguments.stop_words)
        self._told = bool(arguments.logprobs)
        self._state: Any = context.text_sm.make_state(context.initial_state)
        self._before = context.initial_state
        self._format: Any = ToolCallFormatter(context.tool_parser, tools, streaming=True)
        self._call_text = ""
        self._called = False
        self._waiting: list[Token] = []
        self._context, self._num_tokens = context, 0

    def take(self, generated: Any) -> Piece:
        """Return the part of the answer that is known with one more token; pieces may be empty."""
        self._num_tokens += 1
        finish = generated.finish_reason
        if finish == "stop" and generated.token in self._ends:
            text = ""
        else:
            text = self._stream.add(generated.token)
            end = self._stream.length + (not self._stream.whole)
            self._waiting.append(
                Token(generated.token, generated.logprob, generated.top_tokens, end)
            )
        passed = self._stop.add(text)
        if finish is not None and not self._stop.found:
            passed += self._stop.add(self._stream.finish())
            passed += self._stop.finish()
        if self._stop.found:
            finish = "stop"
        piece = self._sorted(passed, finish)
        if self._told:
            piece.tokens = self._known(whole=finish is not None and not self._stop.found)
        return piece

    def counts(self) -> Json:
        """Return the numbers of tokens so far, as OpenAI tells them."""
        prompt, cached = len(self._context.prompt), self._context.prompt_cache_count
        told: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
        }
        return told | ({"prompt_tokens_details": {"cached_tokens": cached}} if cached >= 0 else {})

    def _known(self, *, whole: bool) -> list[Token]:
        """The tokens whose text was let through, all of it; of the last piece those that wait, too."""
        count = sum(token.end <= self._stop.passed for token in self._waiting)
        known, self._waiting = self._waiting[:count], self._waiting[count:]
        return known + (self._waiting if whole else [])

    def _sorted(self, text: str, finish: str | None) -> Piece:
        """Text by what it is: said, thought, or a call."""
        self._state, segments = TextStateMachine.split(self._state, text)
        if finish is not None:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments.append((state, rest))
        piece = Piece(finish=finish)
        for state, words in segments:
            if self._before == "tool" and state != "tool":
                self._end_call(piece)
            if state == "reasoning":
                piece.reasoning += words
            elif state == "tool":
                self._call_text += words
            else:
                piece.text += words
            self._before = state
        if finish is not None:
            self._end_call(piece)
            piece.finish = "tool_calls" if finish == "stop" and self._called else finish
        return piece

    def _end_call(self, piece: Piece) -> None:
        """The call is complete; what is none that can be read stays words of the answer."""
        if self._call_text:
            try:
                calls = self._format([self._call_text])
            except Exception:  # mlx_lm's parsers fail anywhere at text that only begins like a call
                calls = []
            self._called = self._called or bool(calls)
            piece.calls += calls
            piece.text += "" if calls else self._call_text
        self._call_text = ""


@dataclass(frozen=True)
class Reply:
    """The objects of an answer.

    Attributes:
        kind: which of both interfaces has been asked.
        logprobs: likelihoods of tokens were asked for.
        usage: in a stream, whether it ends with the numbers of tokens.
    """

    id: str
    kind: Literal["chat", "text"]
    model: str
    created: int
    fingerprint: str
    tokens: TokenBytes
    logprobs: bool
    usage: bool = False

    def whole(self, piece: Piece, counts: Json) -> Json:
        """Return the answer as one object."""
        choice: Json = {
            "index": 0,
            "logprobs": self._logprobs(piece.tokens, 0),
            "finish_reason": piece.finish,
        }
        if self.kind == "text":
            return {
                **self._head("text_completion"),
                "choices": [{**choice, "text": piece.text}],
                "usage": counts,
            }
        calls = [
            {name: value for name, value in call.items() if name != "index"} for call in piece.calls
        ]
        message: Json = {"role": "assistant", "content": piece.text or (None if calls else "")}
        message |= {"reasoning": piece.reasoning} if piece.reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return {
            **self._head("chat.completion"),
            "choices": [{**choice, "message": message}],
            "usage": counts,
        }

    def chunk(self, piece: Piece, *, first: bool, offset: int) -> Json:
        """Return the next part of a stream, whose text began so many characters ago."""
        choice: Json = {
            "index": 0,
            "logprobs": self._logprobs(piece.tokens, offset),
            "finish_reason": piece.finish,
        }
        if self.kind == "text":
            choice["text"] = piece.text
        else:
            delta: Json = {"role": "assistant", "content": ""} if first else {}
            delta |= {"content": piece.text} if piece.text else {}
            delta |= {"reasoning": piece.reasoning} if piece.reasoning else {}
            delta |= {"tool_calls": piece.calls} if piece.calls else {}
            choice["delta"] = delta
        return {
            **self._chunk_head(),
            "choices": [choice],
            **({"usage": None} if self.usage else {}),
        }

    def last(self, counts: Json) -> Json:
        """Return the end of a stream that tells how many tokens it was."""
        return {**self._chunk_head(), "choices": [], "usage": counts}

    def _chunk_head(self) -> Json:
        return self._head("text_completion" if self.kind == "text" else "chat.completion.chunk")

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> Json | None:
        if not self.logprobs:
            return None
        if self.kind == "chat":
            return {"content": [self._shown(one) for one in tokens], "refusal": None}
        texts = [self.tokens.shown(one.id) for one in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in tokens],
            "top_logprobs": [
                {self.tokens.shown(top["id"]): _finite(top["logprob"]) for top in _sorted(one.top)}
                for one in tokens
            ]
            if any(one.top for one in tokens)
            else None,
            "text_offset": offsets,
        }

    def _shown(self, one: Token) -> Json:
        top = [self._likelihood(other["id"], other["logprob"]) for other in _sorted(one.top)]
        return {**self._likelihood(one.id, one.logprob), "top_logprobs": top}

    def _likelihood(self, token: int, logprob: float) -> Json:
        raw = self.tokens.of(token)
        return {"token": self.tokens.shown(token), "logprob": _finite(logprob), "bytes": list(raw)}


def _sorted(top: Sequence[Json]) -> list[Json]:
    return sorted(top, key=lambda one: -one["logprob"])


def _finite(logprob: float) -> float:
    """A number of JSON's, also for minus infinity and for what is not a number."""
    return logprob if logprob > _NEVER else _NEVER
