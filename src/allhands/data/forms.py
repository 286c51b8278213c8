"""Forms of a conversation for chat templates: each template reads some forms and drops or rejects
others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allhands.data.calls import as_tool, called_function, parsed_arguments
from allhands.data.messages import REASONING_KEYS, TOOL_ROLES, Message

_THINKING = re.compile(r"\A\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Form:
    """Form in which a conversation is written for a template.

    Attributes:
        strings: arguments of calls as JSON strings, as OpenAI has them; else as objects, as most
            templates and mlx_lm's server do.
        no_words: the content of an answer that only calls is null, not empty.
        ids: calls and the answers of tools without ids get ids of nine digits.
        wrapped: a tool is ``{"type": "function", "function": ...}``, also where the data have only
            the inner part.
        reasoning: the key under which thinking stands; None leaves it where it is.
    """

    strings: bool = False
    no_words: bool = False
    ids: bool = False
    wrapped: bool = False
    reasoning: str | None = None

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in this form; messages that have it already are the same objects."""
        written = [self._message(message) for message in messages]
        return _with_ids(written) if self.ids else written

    def tools(self, tools: list[Any] | None) -> list[Any] | None:
        """Return the tools in this form."""
        return [*map(as_tool, tools)] if self.wrapped and tools else tools

    def _message(self, message: Message) -> Message:
        if message["role"] == "assistant" and self.reasoning is not None:
            message = _with_reasoning(message, self.reasoning)
        if not (calls := message.get("tool_calls")):
            return message
        written = [self._call(call) for call in calls]
        words = {"content": None} if self.no_words and not message["content"].strip() else {}
        same = not words and all(one is call for one, call in zip(written, calls, strict=True))
        return message if same else {**message, **words, "tool_calls": written}

    def _call(self, call: Message) -> Message:
        function = called_function(call)
        arguments = function.get("arguments")
        if self.strings:
            value = (
                json.dumps(arguments, ensure_ascii=False)
                if isinstance(arguments, dict)
                else arguments
            )
        else:
            value = parsed_arguments(arguments)
        if value is arguments:
            return call
        changed = {**function, "arguments": value}
        return {**call, "function": changed} if function is not call else changed


def other_forms(form: Form) -> Iterator[Form]:
    """Yield forms with which a template may write more of a conversation than with ``form``, the
    likeliest first.
    """
    yield replace(form, strings=True)
    yield replace(form, no_words=True)
    yield replace(form, no_words=True, strings=True)
    yield replace(form, ids=True)
    yield replace(form, wrapped=True)
    yield replace(form, ids=True, wrapped=True)
    for key in REASONING_KEYS:
        yield replace(form, reasoning=key)


def _with_reasoning(message: Message, key: str) -> Message:
    """An answer whose thinking stands under ``key``, and not elsewhere."""
    found = next((name for name in REASONING_KEYS if isinstance(message.get(name), str)), None)
    if found is not None:
        rest = {name: value for name, value in message.items() if name != found}
        return message if found == key else rest | {key: message[found]}
    if thinking := _THINKING.match(message["content"] or ""):
        words = message["content"][thinking.end() :].lstrip("\n")
        return {**message, "content": words, key: thinking[1].strip("\n")}
    return message


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages with ids for calls; the tools' answers refer to them, in order."""
    written: list[Message] = []
    waiting: list[str] = []
    number = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            named: list[Any] = []
            for call in calls:
                number += 1
                named.append({**call, "id": call.get("id") or f"{number:09d}"})
            waiting = [call["id"] for call in named]
            message = {**message, "tool_calls": named}
        elif message["role"] in TOOL_ROLES and waiting:
            message = {**message, "tool_call_id": message.get("tool_call_id") or waiting[0]}
            waiting = [one for one in waiting if one != message["tool_call_id"]]
        written.append(message)
    return written
