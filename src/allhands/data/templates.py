"""Chat templates that people choose: by name, from a file, or the model's own with system messages
moved into questions.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from allhands.errors import ConfigError, ModelError
from allhands.io.paths import meant

SystemPlace = Literal["template", "merge"]

# The file in a model's directory, and beside an adapter, that holds the template.
TEMPLATE_FILE = "chat_template.jinja"
# A file of chats mentions them, too, but not in an expression of Jinja.
_READS_MESSAGES = re.compile(r"\{[{%][^}]*\bmessages\b")
_GENERATION = re.compile(r"\b(end)?generation(\s*[-+]?%\})")
OPTION, MERGE = "--chat-template", "--system merge"


@dataclass(frozen=True)
class _Named:
    """A template of a family of models.

    Attributes:
        name: name of the template and of its file.
        tokens: texts of the template that must be single tokens.
        system: whether the template has a place for system messages.
    """

    name: str
    tokens: tuple[str, ...]
    system: bool = True

    @cached_property
    def text(self) -> str:
        """The template."""
        return _packaged(self.name)


def _packaged(name: str) -> str:
    return (
        files("allhands.data")
        .joinpath("chat_templates", f"{name}.jinja")
        .read_text(encoding="utf-8")
        .rstrip("\n")
    )


NAMED: dict[str, _Named] = {
    named.name: named
    for named in (
        _Named("chatml", ("<|im_start|>", "<|im_end|>")),
        _Named("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
        _Named("gemma", ("<start_of_turn>", "<end_of_turn>"), system=False),
        _Named("mistral", ("[INST]", "[/INST]"), system=False),
        _Named("zephyr", ()),
    )
}
_BOS = "{{- bos_token -}}"
# Templates that get a begin-of-text token only where the tokenizer puts one before any text.
_LIKE_TEXTS = ("chatml", "zephyr")
# First line of merge.jinja. That file is put before a template and moves each system message into
# the question that follows it. Its tags strip the blanks around them, but the last one does not
# strip the beginning of the template.
_MERGED = "{#- allhands: each system message is put before the question that follows it -#}"


@dataclass(frozen=True)
class ChatChoice:
    """Choice of a chat template other than that of the model's tokenizer.

    Attributes:
        template: a name of ``NAMED`` or a file; None: the model's own.
        system: "merge" puts system messages before questions; "template" leaves them to the
            template.
        kept: a directory that may hold the template of an earlier training; ``template`` takes
            precedence.
    """

    template: str | None = None
    system: SystemPlace = "template"
    kept: Path | None = None

    def chosen(self) -> str | None:
        """Return the name in ``NAMED`` or the text of the chosen template; None for the model's.

        Raises:
            ConfigError: there is no such name or file, or the file holds no template.
        """
        if self.template is not None:
            return self.template if self.template in NAMED else read_template(self.template)
        file = None if self.kept is None else self.kept / TEMPLATE_FILE
        return read_template(str(file), kept=True) if file is not None and file.is_file() else None


def read_template(name: str, *, kept: bool = False) -> str:
    """Return the text of a template file: Jinja, or the JSON of a tokenizer's configuration with a
    ``chat_template``.

    Raises:
        ConfigError: the file cannot be read, or holds no template.
    """
    path, hint = Path(name).expanduser(), f"give a Jinja file, or one of {', '.join(NAMED)}"
    where = name if kept else f"{OPTION} {name}"
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            text = json.loads(text)["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"there is no chat template in this file: {error}",
            code="chat-template-invalid",
            where=where,
            hint=hint,
        ) from None
    except OSError as error:
        problem = (
            "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        )
        raise ConfigError(
            f"{problem}, and no chat template of that name",
            code="chat-template-unknown",
            where=where,
            hint=meant(path, hint, lambda near: read_template(str(near))),
        ) from None
    if not isinstance(text, str) or not _READS_MESSAGES.search(text):
        raise ConfigError(
            "this is no chat template: no expression in it mentions messages",
            code="chat-template-invalid",
            where=where,
            hint=hint,
        )
    return text


def template_text(tokenizer: Any, choice: ChatChoice) -> str | None:
    """Return the template that ``choice`` asks for; None for the tokenizer's own.

    Raises:
        ConfigError: there is no such template, or it is not valid Jinja.
        ModelError: the tokenizer lacks tokens that the template needs, has no template to change,
            or has a program in place of a template.
    """
    chosen = choice.chosen()
    if chosen is None and choice.system == "template":
        return None
    flag = f"{OPTION} {choice.template}" if choice.template is not None else MERGE
    program = getattr(tokenizer, "_chat_template", None)
    if callable(program):
        raise ModelError(
            "the chat template of this model is a program, and cannot be replaced",
            code="chat-template-fixed",
            where=flag,
            hint="leave the option out, and change the data; or use another model",
        )
    text = _named_text(tokenizer, chosen) if chosen in NAMED else chosen
    if text is None:
        text = _own(tokenizer)
    _check_syntax(text, flag)
    if choice.system == "merge" and not text.startswith(_MERGED):
        return _packaged("merge") + text
    return text


def _named_text(tokenizer: Any, name: str | None) -> str:
    """Return the text of a template in ``NAMED``, adapted to this tokenizer.

    Raises:
        ModelError: the tokenizer lacks tokens that the template needs.
    """
    assert name is not None
    named, flag = NAMED[name], f"{OPTION} {name}"
    missing = [token for token in named.tokens if not is_one_token(tokenizer, token)]
    fitting = [
        other
        for other, one in NAMED.items()
        if all(is_one_token(tokenizer, token) for token in one.tokens)
    ]
    if missing:
        raise ModelError(
            f"the tokenizer has no token {', '.join(missing)}: written as plain text, it would not mark the end of an "
            "answer",
            code="chat-template-token-missing",
            where=flag,
            hint=f"these work with the tokenizer's own tokens: {', '.join(fitting)}",
        )
    if "eos_token" in named.text and not tokenizer.eos_token:
        raise ModelError(
            "the tokenizer has no end-of-text token, which this chat template writes",
            code="chat-template-token-missing",
            where=flag,
        )
    bos = tokenizer.bos_token_id
    opened = name in _LIKE_TEXTS and bos is not None and list(tokenizer.encode("a"))[:1] == [bos]
    return _BOS + named.text if opened else named.text


def _own(tokenizer: Any) -> str:
    """Return the tokenizer's own template; two are joined into one that chooses by tools.

    Raises:
        ModelError: there is none.
    """
    own: Any = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        default, tools = own.get("default"), own.get("tool_use")
        own = (
            default
            if tools is None
            else f"{{% if tools %}}{tools}{{% else %}}{default or tools}{{% endif %}}"
        )
    if not isinstance(own, str):
        raise ModelError(
            "this tokenizer has no chat template that could be changed",
            code="chat-template-missing",
            where=MERGE,
            hint=f"name one, too: {OPTION} FILE, or {', '.join(NAMED)}",
        )
    return own


def _check_syntax(text: str, where: str) -> None:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        # transformers adds the tag `generation`, which marks answers; plain Jinja does not know it.
        plain = _GENERATION.sub(lambda tag: f"{'endif' if tag[1] else 'if true'}{tag[2]}", text)
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja: {error.message} (line {error.lineno})",
            code="chat-template-invalid",
            where=where,
            hint="repair it at that line",
        ) from None


def is_one_token(tokenizer: Any, text: str) -> bool:
    """Return True if ``text`` is a single token, also between other letters."""
    ids = list(tokenizer.encode(f"a{text}b", add_special_tokens=False))
    known = tokenizer.get_vocab().get(text)
    return known is not None and known in ids
