"""Rendering of records into tokens and a loss mask; the only module that applies chat templates.

The record becomes one text (through the model's chat template, if it has one), the character ranges
of its answers are found in it (:mod:`allhands.data.answers`), and the text is encoded once.

Special tokens that a message spells out ("<|im_end|>" in an answer) are encoded as special tokens.
mlx_lm and Hugging Face do so by default when the model is used, so training and inference see the
same tokens. Spelled-out tokens cannot move the mask, which follows the turns and not the text: a
question that spells out a fake answer is not trained, and an answer is trained up to its true end.
`allhands data check` names such tokens.

A message may say whether it is trained: ``"weight": 0`` (OpenAI's field), ``"loss_weight": 0`` or
``"train": false``. These keys have an effect with ``mask_prompt`` only.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Literal

from allhands.data.answers import AnswerFinder
from allhands.data.arrays import Bools, Int32s
from allhands.data.dates import StoppedClock, asks_date
from allhands.data.encoding import Draft, Encoded, Encoder, Tokenizer, mask_of
from allhands.data.explained import Explained, token_texts
from allhands.data.forms import Form, other_forms
from allhands.data.heard import (
    AnswerPart,
    Marked,
    Unheard,
    lost_markers,
    lost_parts,
    mark,
    unheard,
    unread,
    words_of,
)
from allhands.data.messages import INSTRUCTION_ROLES, merged_system, weight_of
from allhands.data.records import Message, Record, as_turns
from allhands.data.templates import MERGE, NAMED, OPTION
from allhands.errors import AllhandsError, ConfigError, DataError, ModelError

TrainOn = Literal["all", "last", "assistant"]

# Records encoded at once: enough to keep all cores busy, and few enough to need little memory.
_BATCH = 512
# Most forms of conversations that are remembered.
_MANY_FORMS = 4096
_THOUGHT = "Bluebell"


@dataclass(frozen=True)
class Rendered:
    """One example as the model sees it.

    Attributes:
        tokens: (L,) int32.
        mask: (L,) bool; True where the token is a target of the loss. ``mask[0]`` is never True,
            since nothing predicts the first token.
        truncated: tokens cut off the end to keep ``max_seq_length``.
        dates: the current date, in each spelling in which the chat template has written it.
        unheard: parts of the record that the tokens do not have, because the chat template leaves
            them out or no shape reads them.
    """

    tokens: Int32s
    mask: Bools
    truncated: int
    dates: tuple[str, ...] = ()
    unheard: tuple[Unheard, ...] = ()


class Renderer:
    """Turns records into tokens and masks for one tokenizer.

    Without ``mask_prompt`` (or with ``train_on="all"``) every token but the first is a target. With
    it, targets are the answers and the end-of-turn token after each: the completion of a completion
    record, every assistant turn of a chat (``train_on="assistant"``) or the last one only
    (``"last"``), less those of weight 0. Tool calls and thinking belong to the answer; the header
    that opens a turn does not. A text has no prompt: all of its tokens but the first are targets.

    If a chat template writes the current date, the date is that of ``moment``; default: the moment
    when the renderer was made. Examples are cut to ``max_seq_length`` tokens; None cuts nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        mask_prompt: bool,
        max_seq_length: int | None,
        train_on: TrainOn = "assistant",
        moment: datetime | None = None,
    ) -> None:
        if max_seq_length is not None and max_seq_length < 2:
            raise ConfigError(
                f"{max_seq_length} is below 2",
                code="value-out-of-range",
                where="--max-seq-length",
                hint="try 2048",
            )
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._moment = moment or datetime.now()
        self._template = (
            ChatTemplate(tokenizer, self._moment) if has_chat_template(tokenizer) else None
        )
        self._max_seq_length = max_seq_length
        self._masked = mask_prompt and train_on != "all"
        self._last_only = train_on == "last"

    def render(self, record: Record) -> Rendered:
        """Return tokens and mask of a record, cut to ``max_seq_length``; the cut mask may be all
        False.

        Raises:
            DataError: the template rejects the conversation, its answers cannot be located, or a
                message's weight is neither 0 nor 1.
            ModelError: the tokenizer lacks the chat template or the offsets that the record needs.
        """
        (result,) = self.render_many([record])
        if isinstance(result, AllhandsError):
            raise result
        return result

    def render_many(self, records: Sequence[Record]) -> list[Rendered | AllhandsError]:
        """Return the result or error of :meth:`render` for each record, in order.

        The tokenizer uses all cores.
        """
        results: list[Rendered | AllhandsError] = []
        for start in range(0, len(records), _BATCH):
            results += self._render_batch(records[start : start + _BATCH])
        return results

    def _render_batch(self, records: Sequence[Record]) -> list[Rendered | AllhandsError]:
        results: list[Any] = [self._draft_or_error(record) for record in records]
        for masked in (False, True):
            places = [
                i
                for i, d in enumerate(results)
                if isinstance(d, Draft) and (d.spans is not None) == masked
            ]
            encoded = self._encoder.encode_many([results[i] for i in places], offsets=masked)
            for i, found in zip(places, encoded, strict=True):
                results[i] = (
                    found if isinstance(found, AllhandsError) else self._finish(results[i], found)
                )
        for record, result in zip(records, results, strict=True):
            if isinstance(result, AllhandsError):
                result.where = result.where or record.where
        return results

    def explain(self, record: Record) -> Explained:
        """Return a rendered record with the text of each token, for people to read.

        Raises:
            AllhandsError: as :meth:`render`; a ModelError also if the tokenizer gives no offsets.
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
        )

    def _draft_or_error(self, record: Record) -> Draft | AllhandsError:
        try:
            return self._draft(record)
        except AllhandsError as error:
            return error

    def _draft(self, record: Record) -> Draft:
        """Return the record as one text, with the ranges of its answers."""
        if record.kind == "text":
            # There is no prompt to mask: texts among chats are trained whole.
            draft = Draft(record.text or "", framed=True, spans=None)
        elif self._template is None:
            draft = self._draft_plain(record)
        else:
            draft = self._draft_chat(self._template, record)
        if record.unread:
            return replace(draft, unheard=(*draft.unheard, *unread(record.unread)))
        return draft

    def _draft_plain(self, record: Record) -> Draft:
        """Draft a completion for a tokenizer without chat template: prompt, completion, end of
        text.

        Raises:
            ModelError: the record is a chat.
        """
        if not (isinstance(record.prompt, str) and isinstance(record.completion, str)):
            raise ModelError(
                "this tokenizer has no chat template, and the record is a chat",
                code="chat-template-missing",
                hint=f"name a chat template ({OPTION} FILE, or one of {', '.join(NAMED)}), choose an instruction-tuned "
                "model, or give prompt and completion, or text",
            )
        text = record.prompt + record.completion
        spans = ((len(record.prompt), len(text)),) if self._masked else None
        return Draft(
            text,
            framed=True,
            spans=spans,
            unheard=(Unheard("tools-dropped", ""),) if record.tools else (),
        )

    def _draft_chat(self, template: ChatTemplate, record: Record) -> Draft:
        written = template.written(record.turns, record.tools)
        messages, dates = written.messages, template.dates_in(written.text)
        wanted = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._masked:
            # Answers in the prompt of a completion are not trained.
            asked = 0 if record.prompt is None else len(as_turns(record.prompt, "user"))
            wanted = [i for i in wanted if i >= asked]
            weights = [weight_of(message, i) for i, message in enumerate(messages)]
            wanted = [i for i in (wanted[-1:] if self._last_only else wanted) if weights[i] != 0]
        missing = unheard(
            written.lost, written.parts, record.turns, wanted, keeps_words=written.keeps_words
        )
        spans = None
        try:
            if self._masked:
                spans = template.answers.spans(written.text, messages, written.tools, wanted)
        except DataError as error:
            # If the template leaves the answer out, its remedy is better than that of the error.
            gone = next(
                (
                    found.code
                    for found in missing
                    if found.code in ("calls-dropped", "answers-dropped")
                ),
                None,
            )
            if gone:
                words, error.hint = words_of(gone)
                error.message = f"{error.message}: {words}"
            raise
        return Draft(written.text, framed=False, spans=spans, dates=dates, unheard=missing)

    def _finish(self, draft: Draft, encoded: Encoded) -> Rendered:
        mask = mask_of(draft, encoded, self._tokenizer.eos_token_id)
        tokens = encoded.tokens[: self._max_seq_length]
        cut = len(mask) - len(tokens)
        return Rendered(tokens, mask[: len(tokens)], cut, dates=draft.dates, unheard=draft.unheard)


def has_chat_template(tokenizer: Any) -> bool:
    """Return True if conversations can be rendered for this tokenizer."""
    has = getattr(tokenizer, "has_chat_template", None)
    return bool(has) if has is not None else getattr(tokenizer, "chat_template", None) is not None


@dataclass(frozen=True)
class Written:
    """A conversation, rendered in the form that suits the chat template.

    Attributes:
        messages, tools: in that form, see :class:`Form`.
        text: the rendered text.
        parts: all parts of the conversation.
        lost: the parts that are not in the text.
        keeps_words: True if thinking is lost, but the template keeps thinking that is written into
            the words of an answer.
    """

    messages: list[Message]
    tools: list[Any] | None
    text: str
    parts: list[AnswerPart]
    lost: list[AnswerPart]
    keeps_words: bool


def rendering_options() -> frozenset[str]:
    """Return the names of transformers' own rendering arguments, not those of templates."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


class ChatTemplate:
    """A tokenizer's chat template.

    If the template writes the current date, the date is that of ``moment``; without a moment, the
    clock's.
    """

    def __init__(self, tokenizer: Tokenizer, moment: datetime | None = None) -> None:
        self._tokenizer = tokenizer
        self._clock = StoppedClock(moment) if moment is not None and asks_date(tokenizer) else None
        # By the key of a marked conversation: the best form, and the markers that it still loses.
        self._known: dict[bytes, tuple[Form, frozenset[int]]] = {}

    @cached_property
    def answers(self) -> AnswerFinder:
        """Search for answers in the template's output."""
        added: dict[str, int] = getattr(self._tokenizer, "added_tokens_encoder", {})
        return AnswerFinder(
            self.text, eos_token=self._tokenizer.eos_token, added_tokens=tuple(added)
        )

    def text(
        self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False
    ) -> str:
        """Return the rendered conversation; with ``prompt``, the next answer's header follows.

        Raises:
            DataError: the template rejects the conversation.
        """
        try:
            options: Any = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
            render = partial(self._tokenizer.apply_chat_template, list(messages), **options)
            if self._clock is None:
                return render()
            return self._clock.rendered(self._source(tools), render)
        except Exception as error:  # a template is a foreign program, which can raise any error
            raise DataError(
                f"the model's chat template rejects this conversation: {error}",
                code="chat-template-rejects-messages",
                hint=self._way_out(messages, tools),
            ) from error

    def _way_out(self, messages: Sequence[Message], tools: list[Any] | None) -> str:
        """Advise on a conversation that the template rejects."""
        if any(message["role"] in INSTRUCTION_ROLES for message in messages):
            # If the template rejects the merged conversation too, another thing is wrong.
            with suppress(Exception):
                self._tokenizer.apply_chat_template(
                    merged_system(messages), tools=tools, tokenize=False
                )
                takes = f"{MERGE} puts the system message before the question that follows it, which this template takes"
                return f"{takes}; or give another template: {OPTION}"
        want = "many templates want user and assistant in turn, some no system message or tools: change the record, or"
        return f"{want} give another template ({OPTION}) or model"

    def _writes(self, messages: Sequence[Message]) -> bool:
        """Return True if the rendered conversation holds a word that only the probe has."""
        try:
            return _THOUGHT in self.text(messages, None)
        except DataError:
            return False

    @cached_property
    def takes_system(self) -> bool:
        """True if a system message reaches the model."""
        words = zip(("system", "user", "assistant"), (_THOUGHT, "a", "b"), strict=True)
        return self._writes([{"role": role, "content": content} for role, content in words])

    def _source(self, tools: list[Any] | None) -> str:
        """Return the template, of several of the tokenizer, that is used with or without tools."""
        tokenizer: Any = self._tokenizer
        return tokenizer.get_chat_template(None, tools)

    def dates_in(self, text: str) -> tuple[str, ...]:
        """Return the dates in a rendered conversation, in each spelling; () without ``moment``."""
        return self._clock.dates_in(text) if self._clock else ()

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation and of the next answer's header.

        Raises:
            DataError: the template rejects the conversation.
        """
        return self._tokenizer.encode(
            self.text(messages, None, prompt=True), add_special_tokens=False
        )

    def written(self, messages: list[Message], tools: list[Any] | None) -> Written:
        """Return the conversation, rendered in the form in which the template leaves out least.

        This is the usual form, with arguments of calls as objects, unless the template writes more
        of the conversation in another form.

        Raises:
            DataError: the template rejects the conversation.
        """
        marked = mark(messages, tools)
        if marked.key not in self._known:
            if len(self._known) >= _MANY_FORMS:
                self._known.clear()
            self._known[marked.key] = self._best_form(marked)
        form, lost = self._known[marked.key]
        rejected: DataError | None = None
        # The best form was found with markers; with the real words the template may reject it.
        for one in dict.fromkeys((form, Form(), Form(strings=True))):
            shaped, shaped_tools = one.messages(messages), one.tools(tools)
            try:
                text = self.text(shaped, shaped_tools)
            except DataError as error:
                rejected = error
                continue
            gone = lost_parts(text, marked.parts, lost)
            thought = any(part.kind == "reasoning" for part in gone)
            return Written(
                shaped, shaped_tools, text, marked.parts, gone, thought and self._keeps_thinking
            )
        assert rejected is not None
        raise rejected

    @cached_property
    def _keeps_thinking(self) -> bool:
        """True if the template keeps thinking that is written in the words of the last answer."""
        answer = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nb"}
        return self._writes([{"role": "user", "content": "a"}, answer])

    def _best_form(self, marked: Marked) -> tuple[Form, frozenset[int]]:
        """Return the form that loses least, and its lost markers.

        If the template rejects all forms, this is the usual form without lost markers.
        """
        best, lost = Form(), self._lost(Form(), marked)
        if lost is not None and not lost:
            return best, lost
        tried = {self._shape(best, marked)}
        for _ in range(2):  # one form may only help together with another
            for form in other_forms(best):
                if (shape := self._shape(form, marked)) in tried:
                    continue
                tried.add(shape)
                now = self._lost(form, marked)
                if now is not None and (lost is None or len(now) < len(lost)):
                    best, lost = form, now
        return best, frozenset() if lost is None else lost

    def _shape(self, form: Form, marked: Marked) -> str:
        return json.dumps([form.messages(marked.messages), form.tools(marked.tools)], default=str)

    def _lost(self, form: Form, marked: Marked) -> frozenset[int] | None:
        """Return the markers that are not in the rendered form; ``None`` if the template rejects
        it.
        """
        try:
            return lost_markers(
                self.text(form.messages(marked.messages), form.tools(marked.tools)), marked
            )
        except DataError:
            return None
