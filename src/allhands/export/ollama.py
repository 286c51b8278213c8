"""A GGUF and a Modelfile for Ollama, whose templates are Go's and not Jinja's.

No program translates one into the other. So the model's template is asked to render conversations,
and compared with the few formats that most models use; what is none of them is refused.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from allhands.data.render import ChatTemplate, has_chat_template
from allhands.data.templates import ChatChoice
from allhands.errors import DataError, ModelError
from allhands.export.fusing import Fused, FuseOptions, described, fuse_model
from allhands.export.gguf import check_convertible, write_gguf
from allhands.io.staging import publish, require_place, staging
from allhands.model.load import load_tokenizer
from allhands.model.sources import name_of, resolve

GGUF_FILE, MODELFILE = "model.gguf", "Modelfile"
_MARK = "\x00"
_TURNS = [
    {"role": "user", "content": "What is dew?"},
    {"role": "assistant", "content": "Water, from the air."},
    {"role": "user", "content": "And fog?"},
]
# Conversations by which a template is recognised; not every one takes a system message.
_CHATS = (_TURNS[:1], _TURNS, [{"role": "system", "content": "Be brief."}, *_TURNS])


@dataclass(frozen=True)
class ChatFormat:
    """The marks of turns in a family of models.

    Attributes:
        turns: by role what stands around the content (``%s``); a role that is absent cannot be
            expressed.
        answer: what stands before the model's answer.
        go: the same as a template of Ollama's.
        stop: what ends an answer.
    """

    name: str
    turns: dict[str, str]
    answer: str
    go: str
    stop: tuple[str, ...]

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return a conversation in this format, with the beginning of the answer to come."""
        return (
            "".join(self.turns[each["role"]] % each["content"] for each in messages) + self.answer
        )


def _uniform(
    name: str, turn: str, stop: tuple[str, ...], *, model: str = "assistant", system: bool = True
) -> ChatFormat:
    """A format that marks every turn alike: ``turn`` holds {role} and {content}, the answer begins
    before {content}.
    """
    roles = {"user": "user", "assistant": model} | ({"system": "system"} if system else {})
    turns = {role: turn.format(role=called, content="%s") for role, called in roles.items()}
    called = "{{ .Role }}"
    if model != "assistant":
        called = '{{ if eq .Role "assistant" }}' + model + "{{ else }}{{ .Role }}{{ end }}"
    answer = turn.partition("{content}")[0].format(role=model)
    go = (
        "{{ range .Messages }}"
        + turn.format(role=called, content="{{ .Content }}")
        + "{{ end }}"
        + answer
    )
    return ChatFormat(name, turns, answer, go, stop)


def _mistral(name: str, question: str, answer: str) -> ChatFormat:
    go = (
        '{{ range .Messages }}{{ if eq .Role "user" }}' + question % "{{ .Content }}"
        + '{{ else if eq .Role "assistant" }}' + answer % "{{ .Content }}" + "{{ end }}{{ end }}"
    )  # fmt: skip
    return ChatFormat(name, {"user": question, "assistant": answer}, "", go, ("[INST]", "</s>"))


FORMATS = (
    _uniform("ChatML", "<|im_start|>{role}\n{content}<|im_end|>\n", ("<|im_end|>", "<|im_start|>")),
    _uniform(
        "Llama 3",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    _uniform(
        "Gemma",
        "<start_of_turn>{role}\n{content}<end_of_turn>\n",
        ("<end_of_turn>", "<start_of_turn>"),
        model="model",
        system=False,
    ),
    _uniform("Zephyr", "<|{role}|>\n{content}</s>\n", ("</s>", "<|user|>")),
    _mistral("Mistral", "[INST] %s [/INST]", "%s</s>"),
    _mistral("Mistral, spaced", "[INST] %s [/INST]", " %s</s>"),
    _mistral("Mistral, close", "[INST]%s[/INST]", "%s</s>"),
    _mistral("Mistral, half close", "[INST] %s[/INST]", " %s</s>"),
)


@dataclass(frozen=True)
class Recognised:
    """The format of a model's chat template, and the system message that it gives where there is
    none.
    """

    format: ChatFormat
    default_system: str | None

    @property
    def takes_system(self) -> bool:
        """True if a system message can be given."""
        return "system" in self.format.turns


def recognise(path: Path, adapter_path: Path | None = None) -> Recognised:
    """Return the format of the chat template of the model in ``path``, or of the one that lies
    beside an adapter.

    Raises:
        ModelError: it has none, or none that is known here.
    """
    tokenizer: Any = load_tokenizer(str(path), chat=ChatChoice(kept=adapter_path)).tokenizer
    names = ", ".join(dict.fromkeys(each.name.partition(",")[0] for each in FORMATS))
    hint = f"allhands export --to gguf, and a Modelfile of your own beside it (known: {names})"
    if not has_chat_template(tokenizer):
        raise ModelError(
            "the model has no chat template",
            code="chat-template-missing",
            where=str(path),
            hint=hint,
        )
    template = ChatTemplate(tokenizer, datetime.now())
    said = [_said(template, chat) for chat in _CHATS]
    if None in said[:2]:
        raise ModelError(
            "the chat template rejects a plain conversation",
            code="chat-template-unsupported",
            where=str(path),
            hint=hint,
        )
    eos = tokenizer.eos_token
    formats = FORMATS
    if eos and eos != "</s>" and "{" not in eos:  # by which Zephyr's marks the end of a turn
        formats += (_uniform("Zephyr", "<|{role}|>\n{content}" + eos + "\n", (eos, "<|user|>")),)
    for each in formats:
        # Ollama puts the first token there itself, as the GGUF says; a format may begin with the
        # very same mark.
        for first in ("", tokenizer.bos_token or _MARK):
            if found := _matched(each, first, said):
                return found
    raise ModelError(
        "this chat template cannot be written for Ollama: its format is not known",
        code="chat-template-unsupported",
        where=str(path),
        hint=hint,
    )


def _matched(each: ChatFormat, first: str, said: list[str | None]) -> Recognised | None:
    """The format with its default system message, if what was ``said`` is that behind the ``first``
    token.
    """
    wanted = [first + each.render(chat) for chat in _CHATS[: 2 + ("system" in each.turns)]]
    extra = (said[0] or "").removesuffix(wanted[0].removeprefix(first)).removeprefix(first)
    default = _system_of(extra, each)
    found = [text and text.replace(extra, "", 1) for text in said[:2]] + said[2:]
    if found[: len(wanted)] == wanted and (default or not extra):
        return Recognised(each, default)
    return None


def _said(template: ChatTemplate, chat: list[dict[str, str]]) -> str | None:
    """A conversation in the model's own words; ``None`` where its template rejects it."""
    try:
        return template.text(chat, None, prompt=True)
    except DataError:
        return None


def _system_of(text: str, found: ChatFormat) -> str | None:
    """The content of a system turn, if ``text`` is one."""
    before, mark, after = found.turns.get("system", "").partition("%s")
    if not mark or not text.startswith(before) or not text.endswith(after):
        return None
    return text.removeprefix(before).removesuffix(after)


def modelfile(found: Recognised) -> str:
    """Return the Modelfile of a model in that format.

    Raises:
        ModelError: the system message cannot be written into one.
    """
    lines = [f"FROM ./{GGUF_FILE}", f'TEMPLATE """{found.format.go}"""']
    if found.default_system:
        if '"""' in found.default_system:
            raise ModelError(
                'the default system message holds """',
                code="system-message-unsupported",
                hint="allhands export --to gguf",
            )
        lines.append(f'SYSTEM """{found.default_system}"""')
    lines += [f'PARAMETER stop "{text}"' for text in found.format.stop]
    return "\n".join(lines) + "\n"


def export_gguf(
    options: FuseOptions, out: Path, *, modelled: bool
) -> tuple[Fused, Recognised | None]:
    """Write a directory with the model as one GGUF, whole or not at all.

    Args:
        modelled: True to write a Modelfile for Ollama, too.

    Returns:
        The merged model, and the format of its chat template; ``None`` without a Modelfile.

    Raises:
        ConfigError: ``out`` is taken.
        ModelError: the model cannot be written in this form, or as of :func:`fuse_model`.
        StorageError: ``out`` cannot be written.
    """
    # All checks of the model come before any work.
    path = resolve(described(options)[1])
    check_convertible(path)
    found = recognise(path, options.adapter_path) if modelled else None
    text = None if found is None else modelfile(found)
    seen = require_place(out, "an export", (GGUF_FILE, MODELFILE, "README.md"), force=options.force)
    with staging(out) as staged:
        fused = staged / "fused"
        done = fuse_model(options, fused)
        write_gguf(fused, staged / GGUF_FILE, name_of(done.source))
        shutil.move(fused / "README.md", staged / "README.md")
        shutil.rmtree(fused)
        if text is not None:
            (staged / MODELFILE).write_text(text, encoding="utf-8")
        publish(staged, out, seen)
    return done, found
