"""Search for the answers in the output of a chat template.

Chat templates are programs: they trim text, drop the thinking of earlier turns, and move the system
message. So the conversation up to a turn, rendered alone, need not be a prefix of the whole text.
Instead the whole conversation is rendered once as it is, and once for every answer with a marker
instead of that answer. The text before the marker must be a prefix of the real text, and the text
after it a suffix. Then the text between them is the answer. If it is not so, this is an error; the
span is never guessed.

Most conversations do not need the renderings with markers. A probe shows once how the template
writes an answer (:class:`Pattern`). If the text has exactly that form once for every answer, and
nowhere else, the spans are taken from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from allhands.data.calls import called_function
from allhands.data.encoding import Span, common_prefix
from allhands.data.records import Message
from allhands.errors import DataError

# Private-use characters at both ends: no text that a template writes begins or ends with them.
_MARKER = "\ue0a1answer\ue0a2"
_QUESTION: list[Message] = [{"role": "user", "content": "a"}]
_ANSWER: Message = {"role": "assistant", "content": _MARKER}


@dataclass(frozen=True)
class Pattern:
    """Form in which a template writes a plain answer.

    Attributes:
        header: text before every answer, from the end of the question on.
        leads: texts that may stand between header and words; they belong to the answer (an empty
            thinking block).
        ending: blanks and end-of-turn token after the words; never empty.
        extra: headers after the last answer (a template that always asks for another).
    """

    header: str
    leads: tuple[str, ...]
    ending: str
    extra: int

    def spans(self, text: str, messages: Sequence[Message]) -> dict[int, Span]:
        """Find the answers of ``messages`` in ``text``, by index, without those that call tools.

        The result is empty if any answer is not written exactly in this form.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if text.count(self.header) != len(answers) + self.extra:
            return {}
        spans: dict[int, Span] = {}
        done = 0
        for i in answers:
            at = text.find(self.header, done)
            if at < 0:
                return {}
            start = done = at + len(self.header)
            if not messages[i].get("tool_calls"):
                done = self._end_of_words(text, start, messages[i])
                if done < 0:
                    return {}
                spans[i] = start, done + len(self.ending)
        return spans

    def _end_of_words(self, text: str, start: int, answer: Message) -> int:
        """Return the end of the answer's words after ``start``; -1 if other words stand there."""
        words: str = answer["content"]
        for lead in self.leads:
            for form in (words, words.strip()):
                if text.startswith(form + self.ending, start + len(lead)) and text.startswith(
                    lead, start
                ):
                    return start + len(lead) + len(form)
        return -1


@dataclass(frozen=True)
class _Trial:
    """A conversation rendered with the real answer (None if rejected), and around a marker in its
    place.
    """

    real: str | None
    before: str
    after: str


class AnswerFinder:
    """Finds answers in conversations that one chat template has rendered.

    Args:
        render: the template as a function of messages, tools and ``prompt``; raises DataError where
            it rejects them.
        eos_token: the tokenizer's end-of-text token, which may end an answer.
        added_tokens: strings that are tokens of their own.
    """

    def __init__(
        self, render: Callable[..., str], *, eos_token: str | None, added_tokens: Sequence[str]
    ) -> None:
        self._render = render
        self._eos_token = eos_token or ""
        self._added_tokens = added_tokens

    def spans(
        self, text: str, messages: list[Message], tools: list[Any] | None, wanted: Sequence[int]
    ) -> tuple[Span, ...]:
        """Find the character ranges of the answers ``messages[i] for i in wanted``.

        A range begins after the header of the turn and ends after its end-of-turn token. ``text``
        is the rendered conversation.

        Raises:
            DataError: an answer cannot be located beyond doubt.
        """
        known = self.pattern.spans(text, messages) if self.pattern else {}
        return self.careful_spans(text, messages, tools, wanted, known)

    def careful_spans(
        self,
        text: str,
        messages: list[Message],
        tools: list[Any] | None,
        wanted: Sequence[int],
        known: Mapping[int, Span],
    ) -> tuple[Span, ...]:
        """Find the same spans; render the conversation again for each answer not in ``known``.

        Raises:
            DataError: an answer cannot be located beyond doubt.
        """
        spans: list[Span] = []
        floor = 0
        # Answers before a wanted answer are located too: the wanted answer must begin after them,
        # even if their words are equal.
        for index in [
            i for i in range(max(wanted, default=-1) + 1) if messages[i]["role"] == "assistant"
        ]:
            span = known.get(index) or self._with_ending(
                text, self._locate(text, messages, tools, index, floor)
            )
            if span is None and index in wanted:
                raise DataError(
                    f"messages[{index}]: the answer cannot be located in the output of the chat template",
                    code="answer-not-located",
                    hint="leave out --mask-prompt, simplify that message (thinking tags, tool calls), or use "
                    "a model whose template renders it",
                )
            floor = span[1] if span else floor
            spans += [span] if span and index in wanted else []
        return tuple(spans)

    def _with_ending(self, text: str, span: Span | None) -> Span | None:
        """The span and the end-of-turn token after it."""
        ending = self.end_of_turn.match(text, span[1]) if span else None
        return (span[0], ending.end()) if span and ending else span

    def _locate(
        self, text: str, messages: list[Message], tools: list[Any] | None, index: int, floor: int
    ) -> Span | None:
        """Find answer ``index`` in ``text``, not before ``floor``, without its end-of-turn token;
        None if in doubt.
        """
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
                    if text.startswith(words + ending, start) and _names_tools(
                        words, messages[index]
                    ):
                        return start, end
        return None

    def _trials(
        self, text: str, messages: list[Message], tools: list[Any] | None, index: int
    ) -> Iterator[_Trial]:
        """Render the conversation with a marker as the answer, whole and then shortened.

        The whole conversation is enough unless the answer calls tools. A template may reject a
        tool's output that follows no call. So the next trials leave out the messages after the
        answer, first up to the next user's message and then all.
        """
        head, answer, rest = messages[:index], messages[index], messages[index + 1 :]
        with_extras = {key: value for key, value in answer.items() if key != "tool_calls"} | _ANSWER
        next_user = next(
            (i for i, message in enumerate(rest) if message["role"] == "user"), len(rest)
        )
        for cut in sorted({0, next_user, len(rest)}):
            tail = rest[cut:]
            real = text if cut == 0 else self._text_or_none([*head, answer, *tail], tools)
            for stand_in in [_ANSWER] if with_extras == _ANSWER else [_ANSWER, with_extras]:
                marked = self._text_or_none([*head, stand_in, *tail], tools) or ""
                before, found, after = marked.partition(_MARKER)
                if found and _MARKER not in after:
                    yield _Trial(real, before, after)

    def _text_or_none(self, messages: Sequence[Message], tools: list[Any] | None) -> str | None:
        try:
            return self._render(messages, tools)
        except DataError:
            return None

    def _openings(self, before: str) -> Iterator[str]:
        """Yield texts that may stand before the answer, the likeliest first.

        Text that a template puts between header and words (an empty thinking block) belongs to the
        answer, since the model has to write it. Without a header the answer begins at the marker,
        or at the blanks before the marker that a prompt does not have.

        Args:
            before: the rendered text before the marker.
        """
        if self.header and self.header in before:
            yield before[: before.rindex(self.header) + len(self.header)]
        yield before.removesuffix(self._lead)
        yield before
        yield before.rstrip()

    def _readings(self, trial: _Trial) -> Iterator[tuple[str, str]]:
        """Possible forms of the answer, each with the end-of-turn text that must follow it."""
        if trial.real is None or not trial.real.endswith(trial.after):
            return
        end = len(trial.real) - len(trial.after)
        ending = self.end_of_turn.match(trial.after)
        for opening in self._openings(trial.before):
            if len(opening) <= end and trial.real.startswith(opening):
                yield trial.real[len(opening) : end], ending[0] if ending else ""

    @cached_property
    def _asked(self) -> str:
        return self._render(_QUESTION, None, prompt=True)

    @cached_property
    def header(self) -> str:
        """Text that ``add_generation_prompt`` adds; empty if the template writes answers right
        after questions.
        """
        return self._asked.removeprefix(common_prefix(self._asked, self._render(_QUESTION, None)))

    @cached_property
    def _lead(self) -> str:
        """Blanks between the end of a prompt and the words of the answer (Llama 2 has one)."""
        before = self._render([*_QUESTION, _ANSWER], None).partition(_MARKER)[0]
        lead = before.removeprefix(self._asked)
        return "" if lead.strip() else lead

    @cached_property
    def _after_answers(self) -> list[str]:
        """Texts behind each of two answers; empty if they cannot be told apart."""
        parts = self._render([*_QUESTION, _ANSWER] * 2, None).split(_MARKER)
        return parts[1:] if len(parts) == 3 else ["", ""]

    def _token_at(self, text: str) -> str | None:
        """Return the added token at the beginning of a text, after blanks; None without one."""
        found = (
            re.match(r"\s*(" + _any_of(self._added_tokens) + ")", text)
            if self._added_tokens
            else None
        )
        return found[1] if found else None

    @cached_property
    def ending(self) -> str:
        """End-of-turn token, or else the text that the template writes after every answer, without
        blanks.
        """
        # Both turns have the same ending. After it, one of them continues with the user's header.
        middle, last = self._after_answers
        ending = common_prefix(middle, last)
        return self._token_at(ending) or ending.strip()

    @cached_property
    def closing(self) -> str | None:
        """Token that closes every answer, the last one included; None if the closing text is not
        one token, or not the same for all answers.
        """
        last = self._after_answers[1]
        found = self._token_at(last)
        return found if found is not None and found in (self.ending, last.strip()) else None

    @cached_property
    def end_of_turn(self) -> re.Pattern[str]:
        """Matches the blanks and the end-of-turn token right after an answer (or nothing)."""
        markers = {self.ending, self._eos_token} - {""}
        return re.compile(r"\s*(?:" + _any_of(markers) + ")" if markers else "")

    @cached_property
    def pattern(self) -> Pattern | None:
        """Form of an answer, read off a probe; None if the template writes two answers differently."""
        replies = ("first reply", "The other")
        words = zip(
            ("user", "assistant") * 2, ("Ask", replies[0], "Question", replies[1]), strict=True
        )
        probe: list[Message] = [{"role": role, "content": content} for role, content in words]
        try:
            text = self._render(probe, None)
            spans = self.careful_spans(text, probe, None, [1, 3], {})
        except DataError:
            return None
        answers = [text[start:end] for start, end in spans]
        if any(answer.count(reply) != 1 for answer, reply in zip(answers, replies, strict=True)):
            return None
        leads, endings = zip(*map(str.split, answers, replies), strict=True)
        first, second = (text[:start][::-1] for start, _ in spans)
        header = common_prefix(first, second)[::-1].lstrip()
        # Two copies of the header must not share characters.
        overlaps = any(header.startswith(header[i:]) for i in range(1, len(header)))
        if not header or overlaps or not endings[0] or endings[0] != endings[1]:
            return None
        return Pattern(header, tuple(dict.fromkeys(leads)), endings[0], text.count(header) - 2)


def _any_of(strings: Any) -> str:
    return "|".join(re.escape(string) for string in sorted(strings, key=len, reverse=True))


def _names_tools(words: str, message: Message) -> bool:
    """Return True if the text names each tool that the message calls; a template may drop them
    silently.
    """
    return all(
        str(called_function(call).get("name", "")) in words
        for call in message.get("tool_calls") or ()
    )
