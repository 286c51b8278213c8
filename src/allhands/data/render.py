"""From a record to tokens and a loss mask: the one owner of chat templates.

The record becomes one text (through the model's chat template, if it has one), the character ranges of its
answers are found in it (:mod:`allhands.data.answers`), and the text is encoded once.

Special tokens that a message spells out ("<|im_end|>" in an answer) are encoded as what they are. mlx_lm and
Hugging Face do so by default when the model is used, so training sees what inference sees. They cannot move the
mask, which follows the turns and not the text: a question that spells out a fake answer is not trained, and an
answer is trained up to its true end. :meth:`Renderer.special_text` names them, so that data can be looked at.

A message may say whether it is trained: ``"weight": 0`` (OpenAI's field), ``"loss_weight": 0`` or
``"train": false``. That is honoured where answers are told from the rest, which is with ``mask_prompt``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from allhands.data.answers import AnswerFinder
from allhands.data.encoding import Draft, Encoded, Encoder, Tokenizer, mask_of
from allhands.data.explained import PROBE, Explained, TemplateFacts, probe_template, special_tokens_in, token_texts
from allhands.data.messages import INSTRUCTION_ROLES, called_function, merged_system
from allhands.data.records import Message, Record, as_turns
from allhands.data.templates import MERGE, NAMED, OPTION
from allhands.errors import AllhandsError, ConfigError, DataError, ModelError

TrainOn = Literal["all", "last", "assistant"]

# Keys by which a message says whether it is trained: 0 or false, 1 or true.
_WEIGHTS = ("weight", "loss_weight", "train")
# Records encoded at once: enough for all cores, and small beside the tokens that come of them.
_BATCH = 512


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
    every assistant turn of a chat (``train_on="assistant"``) or the last one only (``"last"``), less those of
    weight 0. Tool calls and thinking belong to the answer; the header that opens a turn does not. A text has
    no prompt, so that all of it is a target in any case.
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
        self._encoder = Encoder(tokenizer)
        self._template = ChatTemplate(tokenizer) if has_chat_template(tokenizer) else None
        self._max_seq_length = max_seq_length
        self._masked = mask_prompt and train_on != "all"
        self._last_only = train_on == "last"

    def render(self, record: Record) -> Rendered:
        """Tokens and mask of a record, cut to ``max_seq_length``; the mask may be all False then.

        Raises:
            DataError: the template rejects the conversation, its answers cannot be located, or a message's
                weight is neither 0 nor 1.
            ModelError: the tokenizer lacks the chat template or the offsets that the record needs.
        """
        (result,) = self.render_many([record])
        if isinstance(result, AllhandsError):
            raise result
        return result

    def render_many(self, records: Sequence[Record]) -> list[Rendered | AllhandsError]:
        """What :meth:`render` returns or raises for each record, in order; encoded on all cores."""
        results: list[Rendered | AllhandsError] = []
        for start in range(0, len(records), _BATCH):
            results += self._render_batch(records[start : start + _BATCH])
        return results

    def _render_batch(self, records: Sequence[Record]) -> list[Rendered | AllhandsError]:
        results: list[Draft | Rendered | AllhandsError] = [self._draft_or_error(record) for record in records]
        for masked in (False, True):
            places = [i for i, d in enumerate(results) if isinstance(d, Draft) and (d.spans is not None) == masked]
            drafts = [draft for i in places if isinstance(draft := results[i], Draft)]
            for i, draft, encoded in zip(
                places, drafts, self._encoder.encode_many(drafts, offsets=masked), strict=True
            ):
                results[i] = encoded if isinstance(encoded, AllhandsError) else self._finish(draft, encoded)
        done: list[Rendered | AllhandsError] = []
        for record, result in zip(records, results, strict=True):
            assert not isinstance(result, Draft)
            if isinstance(result, AllhandsError):
                result.where = result.where or record.where
            done.append(result)
        return done

    def explain(self, record: Record) -> Explained:
        """A rendered record with the text that each of its tokens stands for, for people to read.

        Raises:
            AllhandsError: as :meth:`render`; a ModelError also if the tokenizer tells no offsets.
        """
        try:
            draft = self._draft(record)
            encoded = self._encoder.encode(draft, offsets=True)
        except AllhandsError as error:
            error.where = error.where or record.where
            raise
        texts = token_texts(self._tokenizer, draft.text, encoded)
        rendered = self._finish(draft, encoded)
        kept = len(rendered.tokens)
        return Explained(
            tokens=rendered.tokens,
            mask=rendered.mask,
            truncated=rendered.truncated,
            pieces=tuple(zip(texts, rendered.mask.tolist(), strict=False)),
            cut="".join(texts[kept:]),
            special_text=self.special_text(record),
        )

    def special_text(self, record: Record) -> tuple[str, ...]:
        """Special tokens of the model that the record's own words spell out, each once, in order."""
        return special_tokens_in(self._tokenizer, record)

    def template_facts(self) -> TemplateFacts:
        """What the model's chat template does, found by rendering small conversations."""
        if self._template is None:
            return TemplateFacts(present=False)
        probe = Renderer(self._tokenizer, mask_prompt=True, max_seq_length=1 << 20, train_on="last")
        try:
            trained = "".join(text for text, trained in probe.explain(PROBE).pieces if trained)
        except AllhandsError:
            trained = ""
        return probe_template(self._tokenizer, self._template, trained)

    def _draft_or_error(self, record: Record) -> Draft | AllhandsError:
        try:
            return self._draft(record)
        except AllhandsError as error:
            return error

    def _draft(self, record: Record) -> Draft:
        """The record as one text and the ranges of its answers."""
        if record.kind == "text":
            # There is no prompt to mask: in a mixture with chats all of it is trained.
            return Draft(record.text or "", framed=True, spans=None)
        return self._draft_plain(record) if self._template is None else self._draft_chat(self._template, record)

    def _draft_plain(self, record: Record) -> Draft:
        """A completion for a tokenizer without chat template: prompt, completion, end-of-text token."""
        if not (isinstance(record.prompt, str) and isinstance(record.completion, str)):
            raise ModelError(
                "this tokenizer has no chat template, and the record is a chat",
                hint=f"name a chat template ({OPTION} FILE, or one of {', '.join(NAMED)}), choose an instruction-tuned "
                "model, or give prompt and completion, or text",
            )
        text = record.prompt + record.completion
        return Draft(text, framed=True, spans=((len(record.prompt), len(text)),) if self._masked else None)

    def _draft_chat(self, template: ChatTemplate, record: Record) -> Draft:
        conversation, first_answer = _conversation(record)
        messages, text = template.accepted_form(conversation, record.tools)
        if not self._masked:
            return Draft(text, framed=False, spans=None)
        wanted = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_answer]
        weights = [_weight(message, i) for i, message in enumerate(messages)]
        wanted = [i for i in (wanted[-1:] if self._last_only else wanted) if weights[i] != 0]
        return Draft(text, framed=False, spans=template.answers.spans(text, messages, record.tools, wanted))

    def _finish(self, draft: Draft, encoded: Encoded) -> Rendered:
        mask = mask_of(draft, encoded, self._tokenizer.eos_token_id)
        limit = self._max_seq_length
        return Rendered(encoded.tokens[:limit], mask[:limit], max(0, len(mask) - limit))


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations can be rendered for this tokenizer."""
    has = getattr(tokenizer, "has_chat_template", None)
    return bool(has) if has is not None else getattr(tokenizer, "chat_template", None) is not None


def own_tokens(tokenizer: Any, *, chosen: bool = False) -> dict[int, str]:
    """Tokens that somebody may have added to the model's: no text of the model's own makers is known to hold them.

    Added tokens, less those that the chat template writes, those with a role (begin, end, padding and so on), and those
    that families of models have for code, pictures and calls.

    Args:
        chosen: the chat template is not the model's own, so that the model may not know the tokens that it writes.
    """
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    roles = {getattr(tokenizer, f"{role}_token", None) for role in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
    stops = getattr(tokenizer, "eos_token_ids", None)
    template = "" if chosen else _template_words(tokenizer)
    return {
        number: text
        for number, text in ((number, str(token)) for number, token in added.items())
        if text.strip()
        and text not in roles
        and not (isinstance(stops, set) and number in stops)
        and not _OF_FAMILIES.fullmatch(text)
        and text not in template
    }


_OF_FAMILIES = re.compile(
    r"</?(think|tool_call|tool_response|tools|image|s|pad|unk|mask)>|\[/?[A-Z_]+\]|<(0x[0-9A-Fa-f]{2}|unused\d+)>|\s+"
    r"|<\|?(fim|object_ref|box|quad|vision|image|video|audio|repo|file|endof|reponame|filename|gh_|issue_|jupyter)\w*\|?>"
)


def _template_words(tokenizer: Any) -> str:
    """What the chat template may write besides the words of a conversation: its source, and a conversation."""
    source: Any = getattr(tokenizer, "chat_template", None)
    texts: list[Any] = list(source.values()) if isinstance(source, dict) else [source]  # pyright: ignore[reportUnknownArgumentType]
    if has_chat_template(tokenizer):
        with suppress(DataError):  # it rejects the conversation
            texts.append(ChatTemplate(tokenizer).text(PROBE.turns, None))
    return "\n".join(str(text) for text in texts if text)


def unstopped(tokenizer: Any) -> tuple[str, int] | None:
    """The token, and its id, that ends answers in the chat template, where generation would not stop at it."""
    if not has_chat_template(tokenizer):
        return None
    try:
        token = ChatTemplate(tokenizer).answers.closing
    except DataError:
        return None
    number = None if token is None else tokenizer.get_vocab().get(token)
    stops = getattr(tokenizer, "eos_token_ids", None)
    known = {*(stops if isinstance(stops, set) else ()), tokenizer.eos_token_id}
    return None if token is None or number is None or number in known else (token, number)


def stop_at_answers(tokenizer: Any) -> str | None:
    """Let generation stop where the chat template ends an answer; the token, if it would not have."""
    found = unstopped(tokenizer)
    if found is None:
        return None
    tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, found[1]}
    return found[0]


def _conversation(record: Record) -> tuple[list[Message], int]:
    """The messages of a chat or completion, and the index from which assistant messages are answers."""
    return record.turns, 0 if record.prompt is None else len(as_turns(record.prompt, "user"))


def is_untrained(message: Message) -> bool:
    """Whether the message says of itself that it is not trained."""
    return any(message.get(key, 1) == 0 for key in _WEIGHTS)


def _weight(message: Message, index: int) -> int | None:
    """1 or 0 as the message says whether it is trained; None if it says nothing.

    Raises:
        DataError: it says something else, or that words are to be trained which are no answer.
    """
    given = {key: message[key] for key in _WEIGHTS if message.get(key) is not None}
    if not given:
        return None
    for key, value in given.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f'messages[{index}]: "{key}" is {value!r}, it must be 0 or 1',
                hint="0 leaves the answer out of the loss, 1 trains it; parts of a weight are not supported",
            )
    if len(set(given.values())) > 1:
        raise DataError(f"messages[{index}]: {given} contradict each other", hint="keep one of these keys")
    weight = int(next(iter(given.values())))
    if weight and message["role"] != "assistant":
        raise DataError(
            f'messages[{index}]: "{next(iter(given))}" asks for a message of role {message["role"]} to be trained',
            hint="--mask-prompt trains assistant messages only: give the others weight 0, or remove the key",
        )
    return weight


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def answers(self) -> AnswerFinder:
        """Where in the template's output the answers are."""
        added: dict[str, int] = getattr(self._tokenizer, "added_tokens_encoder", {})
        return AnswerFinder(self.text, eos_token=self._tokenizer.eos_token, added_tokens=tuple(added))

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
                hint=self._way_out(messages, tools),
            ) from error

    def _way_out(self, messages: Sequence[Message], tools: list[Any] | None) -> str:
        """What to do about a conversation that the template rejects."""
        if any(message["role"] in INSTRUCTION_ROLES for message in messages):
            try:
                self._tokenizer.apply_chat_template(merged_system(messages), tools=tools, tokenize=False)
            except Exception:  # it is something else, or more than that
                pass
            else:
                return (
                    f"{MERGE} puts the system message before the question that follows it, which this template takes; "
                    f"or give another template: {OPTION}"
                )
        return (
            "many templates want user and assistant in turn, some no system message or tools: change the record, or "
            f"give another template ({OPTION}) or model"
        )

    @cached_property
    def takes_system(self) -> bool:
        """Whether a system message reaches the model."""
        words = "Bluebell"
        try:
            asked = [{"role": "system", "content": words}, {"role": "user", "content": "a"}]
            return words in self.text([*asked, {"role": "assistant", "content": "b"}], None)
        except DataError:
            return False

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation and the header of the answer to come.

        Raises:
            DataError: the template rejects the conversation.
        """
        return self._tokenizer.encode(self.text(messages, None, prompt=True), add_special_tokens=False)

    def accepted_form(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[Message], str]:
        """The messages with tool-call arguments as objects, as most templates and mlx_lm's server have them;
        and the rendered conversation.

        OpenAI's format has them as JSON strings, which such a template would quote a second time. A template
        that takes only strings gets them as they are.

        Raises:
            DataError: the template rejects the conversation.
        """
        parsed = [_with_parsed_arguments(message) for message in messages]
        if parsed != messages:
            try:
                return parsed, self.text(parsed, tools)
            except DataError:
                pass
        return messages, self.text(messages, tools)


def _with_parsed_arguments(message: Message) -> Message:
    def parsed(call: Message) -> Message:
        arguments = called_function(call).get("arguments")
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else None
        except ValueError:
            return call
        if not isinstance(value, dict):
            return call
        changed = {**called_function(call), "arguments": value}
        return {**call, "function": changed} if called_function(call) is not call else changed

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [parsed(call) for call in calls]} if calls else message
