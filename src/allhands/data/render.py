"""From a record to tokens and a loss mask: the one owner of chat templates and answer masks.

How the answers are found. Chat templates are programs: they trim, drop the thinking of earlier turns, move
the system message, so rendering the conversation up to a turn need not give a prefix of the whole. Instead
the whole conversation is rendered once as it is, and once for every answer with a marker in that answer's
place. The text before the marker must be a prefix of the real text and the text after it a suffix; what lies
between is the answer. A span that fails this is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from allhands.data.records import Message, Record
from allhands.errors import AllhandsError, ConfigError, DataError, ModelError

TrainOn = Literal["all", "last", "assistant"]
Span = tuple[int, int]

# Private-use characters at both ends: they cannot begin or end what a template writes around them.
_MARKER = "\ue0a1answer\ue0a2"


class Tokenizer(Protocol):
    """What is used of an mlx_lm TokenizerWrapper or a Hugging Face fast tokenizer.

    ``backend_tokenizer`` (offsets), ``has_chat_template`` or ``chat_template`` are looked for as well.
    """

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def eos_token(self) -> str | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...


@dataclass(frozen=True)
class Rendered:
    """One example as the model sees it.

    Attributes:
        tokens: (L,) int32.
        mask: (L,) bool; True where the token is a target of the loss. ``mask[0]`` is never True, since
            nothing predicts the first token.
        truncated: tokens cut off the end to keep ``max_seq_length``.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    truncated: int


class Renderer:
    """Turns records into tokens and masks for one tokenizer.

    Without ``mask_prompt`` (or with ``train_on="all"``) every token but the first is a target. With it,
    targets are the answers and the end-of-turn token after each: the completion of a completion record,
    every assistant turn of a chat (``train_on="assistant"``) or the last one only (``"last"``). Tool calls
    and thinking belong to the answer; the header that opens a turn does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        mask_prompt: bool,
        max_seq_length: int,
        train_on: TrainOn = "assistant",
    ) -> None:
        if max_seq_length < 2:
            raise ConfigError(f"{max_seq_length} is below 2", where="--max-seq-length", hint="try 2048")
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer) if has_chat_template(tokenizer) else None
        self._max_seq_length = max_seq_length
        self._masked = mask_prompt and train_on != "all"
        self._last_only = train_on == "last"

    def render(self, record: Record) -> Rendered:
        """Tokens and mask of a record, cut to ``max_seq_length``; the mask may be all False then.

        Raises:
            DataError: the template rejects the conversation, or its answers cannot be located.
            ModelError: the tokenizer lacks the chat template or the offsets that the record needs.
            ConfigError: a text record with ``mask_prompt``, which has no prompt to mask.
        """
        try:
            if record.kind == "text":
                tokens, mask = self._render_text(record.text or "")
            elif self._template is None:
                tokens, mask = self._render_plain(record)
            else:
                tokens, mask = self._render_chat(self._template, record)
        except AllhandsError as error:
            error.where = error.where or record.where
            raise
        mask[:1] = False
        limit = self._max_seq_length
        return Rendered(tokens[:limit], mask[:limit], max(0, len(tokens) - limit))

    def _render_text(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        if self._masked:
            raise ConfigError(
                "a text record has no prompt, so --mask-prompt cannot mask it",
                hint="leave out --mask-prompt, or give the data as prompt and completion, or as messages",
            )
        tokens = self._with_eos(_single_bos(self._tokenizer.encode(text), self._tokenizer.bos_token_id))
        return _int32(tokens), np.ones(len(tokens), dtype=np.bool_)

    def _render_plain(self, record: Record) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A completion for a tokenizer without chat template: prompt, completion, end-of-text token."""
        if not (isinstance(record.prompt, str) and isinstance(record.completion, str)):
            raise ModelError(
                "this tokenizer has no chat template, and the record is a chat",
                hint="choose an instruction-tuned model, or give prompt and completion, or text",
            )
        text = record.prompt + record.completion
        if not self._masked:
            tokens = self._with_eos(_single_bos(self._tokenizer.encode(text), self._tokenizer.bos_token_id))
            return _int32(tokens), np.ones(len(tokens), dtype=np.bool_)
        tokens, offsets = _encode_with_offsets(self._tokenizer, text, add_special_tokens=True)
        with_eos = self._with_eos(tokens)
        mask = np.ones(len(with_eos), dtype=np.bool_)
        mask[: len(tokens)] = mask_of_spans(text, offsets, [(len(record.prompt), len(text))])
        # Some tokenizers add the end-of-text token themselves, without a place in the text.
        mask[-1] |= with_eos[-1] == self._tokenizer.eos_token_id
        return _int32(with_eos), mask

    def _with_eos(self, tokens: list[int]) -> list[int]:
        eos = self._tokenizer.eos_token_id
        return tokens if eos is None or tokens[-1:] == [eos] else [*tokens, eos]

    def _render_chat(self, template: ChatTemplate, record: Record) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        messages, first_answer = _conversation(record)
        messages = template.accepted_form(messages, record.tools)
        text = template.text(messages, record.tools)
        if not self._masked:
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            return _int32(tokens), np.ones(len(tokens), dtype=np.bool_)
        wanted = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_answer]
        spans = template.answer_spans(messages, record.tools, wanted[-1:] if self._last_only else wanted)
        tokens, offsets = _encode_with_offsets(self._tokenizer, text, add_special_tokens=False)
        return _int32(tokens), mask_of_spans(text, offsets, spans)


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations can be rendered for this tokenizer."""
    has = getattr(tokenizer, "has_chat_template", None)
    return bool(has) if has is not None else getattr(tokenizer, "chat_template", None) is not None


def _int32(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(tokens, dtype=np.int32)


def _single_bos(tokens: list[int], bos: int | None) -> list[int]:
    """Drop the second of two begin-of-text tokens: one from the tokenizer, one written in the text."""
    return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens


def _conversation(record: Record) -> tuple[list[Message], int]:
    """The messages of a chat or completion, and the index from which assistant messages are answers."""
    if record.kind == "chat":
        return list(record.messages or ()), 0
    prompt, completion = record.prompt, record.completion
    head = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
    tail = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return head + list(tail or ()), len(head)


def _encode_with_offsets(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool
) -> tuple[list[int], NDArray[np.int64]]:
    """Token ids and their (L, 2) character ranges."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            "this tokenizer does not tell where in the text its tokens lie, so the prompt cannot be masked",
            hint="use a model with a tokenizer.json, or leave out --mask-prompt",
        )
    encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    tokens: list[int] = encoding.ids
    offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    bos = tokenizer.bos_token_id
    return _single_bos(tokens, bos), offsets[len(tokens) - len(_single_bos(tokens, bos)) :]


def mask_of_spans(text: str, offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """(L,) bool: the tokens that lie inside a span.

    A token across a border of the span counts if the part inside is more than blanks: "▁Ahoy" carries the
    first word of an answer, but a "\\n\\n" half of which is the header's carries none.

    Args:
        offsets: (L, 2) character range of each token.
        spans: (start, end) character ranges, in order.
    """
    ends = offsets[:, 1]
    # Some tokenizers report "Ġword" without its blank. A token begins where the one before has ended.
    before = np.maximum.accumulate(np.concatenate([[0], ends[:-1]])) if len(ends) else ends
    starts = np.minimum(offsets[:, 0], before)
    mask = np.zeros(len(offsets), dtype=np.bool_)
    for begin, end in spans:
        inside = (starts >= begin) & (ends <= end) & (starts < end)
        across = (starts < end) & (ends > begin) & ~inside
        for i in np.flatnonzero(across):
            inside[i] = bool(text[max(starts[i], begin) : min(ends[i], end)].strip())
        mask |= inside
    return mask


@dataclass(frozen=True)
class _Trial:
    """A conversation rendered with the real answer (None if rejected), and around a marker in its place."""

    real: str | None
    before: str
    after: str


class ChatTemplate:
    """A tokenizer's chat template, and where in its output the answers are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """The rendered conversation; with ``prompt``, and the header of the answer to come.

        Raises:
            DataError: the template rejects the conversation.
        """
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template is somebody else's program: anything can come out of it
            raise DataError(
                f"the model's chat template rejects this conversation: {error}",
                hint="many templates want user and assistant in turn, some no system message or tools: "
                "change the record, or choose another model",
            ) from error

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation and the header of the answer to come.

        Raises:
            DataError: the template rejects the conversation.
        """
        return self._tokenizer.encode(self.text(messages, None, prompt=True), add_special_tokens=False)

    def accepted_form(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """The messages with tool-call arguments as objects, as most templates and mlx_lm's server have them.

        OpenAI's format has them as JSON strings, which such a template would quote a second time. A template
        that takes only strings gets them as they are.
        """
        parsed = [_with_parsed_arguments(message) for message in messages]
        if parsed == messages:
            return messages
        try:
            self.text(parsed, tools)
        except DataError:
            return messages
        return parsed

    def answer_spans(self, messages: list[Message], tools: list[Any] | None, wanted: Sequence[int]) -> list[Span]:
        """Character ranges, in ``text(messages, tools)``, of the answers ``messages[i] for i in wanted``.

        A range begins after the header of the turn and ends after its end-of-turn token.

        Raises:
            DataError: an answer cannot be located beyond doubt.
        """
        text = self.text(messages, tools)
        spans: list[Span] = []
        floor = 0
        for index in wanted:
            span = self._locate(text, messages, tools, index, floor)
            if span is None:
                raise DataError(
                    f"messages[{index}]: the answer cannot be located in what the chat template makes of it",
                    hint="leave out --mask-prompt, simplify that message (thinking tags, tool calls), or use "
                    "a model whose template renders it",
                )
            end_marker = self._end_of_turn.match(text, span[1])
            floor = end_marker.end() if end_marker else span[1]
            spans.append((span[0], floor))
        return spans

    def _locate(
        self, text: str, messages: list[Message], tools: list[Any] | None, index: int, floor: int
    ) -> Span | None:
        """Where in ``text``, not before ``floor``, answer ``index`` is, without its end; None if in doubt."""
        trials: list[_Trial] = []
        for trial in self._trials(text, messages, tools, index):
            trials.append(trial)
            openings = [
                opening
                for known in trials
                for opening in self._openings(known.before)
                if len(opening) >= floor and text.startswith(opening)
            ]
            for words, ending in (reading for known in trials for reading in self._readings(known)):
                for opening in openings:
                    start, end = len(opening), len(opening) + len(words)
                    if text.startswith(words + ending, start) and _names_tools(words, messages[index]):
                        return start, end
        return None

    def _trials(self, text: str, messages: list[Message], tools: list[Any] | None, index: int) -> Iterator[_Trial]:
        """The conversation with a marker as the answer, whole and then shortened.

        The first is enough but for tool calls: a template may reject a tool's output after anything but a
        call, so the messages up to the next user's, or all that follow, are left out then.
        """
        head, answer, rest = messages[:index], messages[index], messages[index + 1 :]
        bare = {"role": "assistant", "content": _MARKER}
        with_extras = {key: value for key, value in answer.items() if key != "tool_calls"} | bare
        next_user = next((i for i, message in enumerate(rest) if message["role"] == "user"), len(rest))
        for cut in sorted({0, next_user, len(rest)}):
            tail = rest[cut:]
            real = text if cut == 0 else self._text_or_none([*head, answer, *tail], tools)
            for stand_in in [bare] if with_extras == bare else [bare, with_extras]:
                marked = self._text_or_none([*head, stand_in, *tail], tools) or ""
                before, found, after = marked.partition(_MARKER)
                if found and _MARKER not in after:
                    yield _Trial(real, before, after)

    def _text_or_none(self, messages: Sequence[Message], tools: list[Any] | None) -> str | None:
        try:
            return self.text(messages, tools)
        except DataError:
            return None

    def _openings(self, before: str) -> Iterator[str]:
        """What may stand before the answer, given what stands before the marker, the likeliest first.

        What a template puts between header and words (an empty thinking block) belongs to the answer, since
        the model has to write it. Without a header the answer begins at the marker, or at the blanks before
        it that a prompt does not have.
        """
        if self._header and self._header in before:
            yield before[: before.rindex(self._header) + len(self._header)]
        yield before.removesuffix(self._lead)
        yield before
        yield before.rstrip()

    def _readings(self, trial: _Trial) -> Iterator[tuple[str, str]]:
        """What the answer may have become, and the end-of-turn text that must follow it."""
        if trial.real is None or not trial.real.endswith(trial.after):
            return
        end = len(trial.real) - len(trial.after)
        ending = self._end_of_turn.match(trial.after)
        for opening in self._openings(trial.before):
            if len(opening) <= end and trial.real.startswith(opening):
                yield trial.real[len(opening) : end], ending[0] if ending else ""

    @cached_property
    def _header(self) -> str:
        """What ``add_generation_prompt`` adds; empty if the template writes answers right after questions."""
        question: list[Message] = [{"role": "user", "content": "a"}]
        prompted = self.text(question, None, prompt=True)
        return prompted[_common_length(prompted, self.text(question, None)) :]

    @cached_property
    def _lead(self) -> str:
        """Blanks between the end of a prompt and the words of the answer (Llama 2 has one)."""
        question: list[Message] = [{"role": "user", "content": "a"}]
        prompted = self.text(question, None, prompt=True)
        before = self.text([*question, {"role": "assistant", "content": _MARKER}], None).partition(_MARKER)[0]
        lead = before.removeprefix(prompted)
        return "" if lead.strip() else lead

    @cached_property
    def _end_of_turn(self) -> re.Pattern[str]:
        """Matches the blanks and the end-of-turn token right after an answer (or nothing)."""
        probe = [("user", "a"), ("assistant", _MARKER), ("user", "a"), ("assistant", _MARKER)]
        text = self.text([{"role": role, "content": content} for role, content in probe], None)
        parts = text.split(_MARKER)
        # Both turns end alike; then one goes on with the next user's header.
        middle, last = parts[1:] if len(parts) == 3 else ("", "")
        ending = last[: _common_length(middle, last)]
        added: dict[str, int] = getattr(self._tokenizer, "added_tokens_encoder", {})
        token = re.match(r"\s*(" + _any_of(added) + ")", ending) if added else None
        markers = {token[1] if token else ending.strip(), self._tokenizer.eos_token or ""} - {""}
        return re.compile(r"\s*(?:" + _any_of(markers) + ")" if markers else "")


def _common_length(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _any_of(strings: Any) -> str:
    return "|".join(re.escape(string) for string in sorted(strings, key=len, reverse=True))


def _function(call: Message) -> Message:
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def _names_tools(words: str, message: Message) -> bool:
    """Whether the tools that the message calls are named in the text; a template may drop them silently."""
    return all(str(_function(call).get("name", "")) in words for call in message.get("tool_calls") or ())


def _with_parsed_arguments(message: Message) -> Message:
    def parsed(call: Message) -> Message:
        arguments = _function(call).get("arguments")
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else None
        except ValueError:
            return call
        if not isinstance(value, dict):
            return call
        changed = {**_function(call), "arguments": value}
        return {**call, "function": changed} if _function(call) is not call else changed

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [parsed(call) for call in calls]} if calls else message
