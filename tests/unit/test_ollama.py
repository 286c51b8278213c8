"""Chat templates as Ollama's: each known format is rendered by Jinja and by a reader of Go
templates, alike.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import call_allhands
from tiny import CHAT_TEMPLATE, write_model
from transformers import AutoTokenizer

from allhands.errors import ModelError
from allhands.export.ollama import modelfile, recognise

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + '</s>' }}{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a tiny model.<|im_end|>\n{% endif %}"
    + CHAT_TEMPLATE
)
OTHERS = {
    "its own": CHAT_TEMPLATE.replace("<|im_end|>", "</end>"),
    "a date": "{{ 'Today: ' }}" + CHAT_TEMPLATE,
    "without earlier answers": CHAT_TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'assistant' %}",
    ),
    "other words": CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"),
    "no system": CHAT_TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'system' %}",
    ),
}


def chat(*, system: bool) -> list[dict[str, str]]:
    turns = [("user", "Hi!"), ("assistant", "Hello."), ("user", "How's tea made?")]
    return [
        {"role": r, "content": c} for r, c in ([("system", "Be kind.")] if system else []) + turns
    ]


def model_with(directory: Path, template: str) -> Path:
    base = write_model(directory / "model")
    (base / "chat_template.jinja").write_text(template)
    return base


def go(template: str, messages: list[dict[str, str]]) -> str:
    """Render the few words of Go's templates that are used: range .Messages, if eq .Role, else,
    end.
    """
    words = [w for w in re.split(r"(\{\{.*?\}\})", template) if w]

    def block(place: int, message: dict[str, str], out: list[str], active: bool) -> int:
        while place < len(words):
            word = words[place].strip("{} ") if words[place].startswith("{{") else None
            if word is None:
                out += [words[place]] * active
            elif word in (".Role", ".Content"):
                out += [message[word[1:].lower()]] * active
            elif word == "range .Messages":
                for each in messages:
                    end = block(place + 1, each, out, active)
                place = end
            elif word.startswith("if "):
                done = False
                while word.startswith(("if ", "else")):
                    match = re.search(r'eq \.Role "(\w+)"', word)
                    holds = not done and (match is None or message["role"] == match[1])
                    done = done or holds
                    place = block(place + 1, message, out, active and holds)
                    word = words[place].strip("{} ")
            elif word == "end" or word.startswith("else"):
                return place
            else:
                raise AssertionError(word)
            place += 1
        return place

    out: list[str] = []
    assert block(0, {}, out, True) == len(words)
    return "".join(out)


@pytest.mark.parametrize(
    ("template", "name", "system"),
    [
        (CHAT_TEMPLATE, "ChatML", True),
        (DEFAULT, "ChatML", True),
        (LLAMA3, "Llama 3", True),
        (GEMMA, "Gemma", False),
        (MISTRAL, "Mistral", False),
    ],
    ids=["chatml", "chatml-default", "llama3", "gemma", "mistral"],
)
def test_a_known_format_is_the_same_in_ollama(
    tmp_path: Path, template: str, name: str, system: bool
) -> None:
    base = model_with(tmp_path, template)
    found = recognise(base)
    assert found.format.name == name
    assert found.takes_system == system
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    text = modelfile(found)
    written = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)
    assert written is not None
    for with_system in {system, False}:
        messages = chat(system=with_system)
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if template in (LLAMA3, GEMMA, MISTRAL):
            wanted = wanted.removeprefix(tokenizer.bos_token)  # from the GGUF there
        elif template == DEFAULT and not with_system:
            messages = [{"role": "system", "content": found.default_system or ""}, *messages]
        assert go(written[1], messages) == wanted
    assert ('SYSTEM """You are a tiny model."""' in text) == (template == DEFAULT)
    assert f'PARAMETER stop "{found.format.stop[0]}"' in text


@pytest.mark.parametrize("template", OTHERS.values(), ids=OTHERS)
def test_an_unknown_format_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(ModelError) as caught:
        recognise(model_with(tmp_path, template))
    assert caught.value.code == "chat-template-unsupported"
    assert "--to gguf" in str(caught.value.hint)


def test_the_command_writes_both_files_or_nothing(tmp_path: Path) -> None:
    done = call_allhands(
        "export",
        "--model",
        model_with(tmp_path, CHAT_TEMPLATE),
        "--to",
        "ollama",
        "--out",
        tmp_path / "o",
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "o").iterdir()} == {
        "Modelfile",
        "model.gguf",
        "README.md",
    }
    assert (tmp_path / "o" / "Modelfile").read_text().startswith("FROM ./model.gguf\n")
    (tmp_path / "model" / "chat_template.jinja").write_text(OTHERS["a date"])
    done = call_allhands(
        "export", "--model", tmp_path / "model", "--to", "ollama", "--out", tmp_path / "p"
    )
    assert done.returncode == 4
    assert not (tmp_path / "p").exists()
