"""Chat templates that people choose, system messages in questions, and the token at which answers
end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, GEMMA, LLAMA2, THINKING, WORDS, ZEPHYR, from_npm, qwen25, tiny

from allhands.data.messages import merged_system
from allhands.data.records import Record
from allhands.data.render import ChatTemplate, Renderer
from allhands.data.shapes import parse_example, with_merged_system
from allhands.data.templates import NAMED, ChatChoice, SystemPlace, read_template, template_text
from allhands.data.token_roles import own_tokens, unstopped
from allhands.errors import ConfigError, DataError, ModelError

USER, SYSTEM = {"role": "user", "content": " Hi "}, {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Yo."}
CHAT = [USER, ANSWER, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."}]
MERGED = "Be brief.\n\n Hi "


def text(
    tokenizer: Any, messages: list[Any], template: str | None = None, *, prompt: bool = False
) -> str:
    """By transformers alone."""
    more = {} if template is None else {"chat_template": template}
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt, **more
    )


def chosen(tokenizer: Any, name: str | None = None, system: SystemPlace = "template") -> str:
    found = template_text(tokenizer, ChatChoice(name, system))
    assert found is not None
    return found


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(
    ("name", "load", "messages"),
    [
        ("chatml", qwen25, [SYSTEM, *CHAT]),
        ("llama3", lambda: from_npm("llama3"), [SYSTEM, *CHAT]),
        ("mistral", lambda: from_npm("mistral_nemo"), CHAT),
        ("gemma", lambda: tiny(GEMMA), CHAT),
        ("zephyr", lambda: tiny(ZEPHYR), [SYSTEM, *CHAT]),
    ],
)
def test_templates_by_name_render_as_the_models_do(
    name: str, load: Any, messages: list[Any], prompt: bool
) -> None:
    tokenizer = load()
    asked = messages[:-1] if prompt else messages
    template = (
        NAMED[name].text
        if name == "zephyr"
        else chosen(tokenizer, name)
        if name != "gemma"
        else NAMED[name].text
    )
    wanted = text(tokenizer, asked, prompt=prompt)
    if name == "llama3" and not prompt:  # the model's own asks for another answer in any case
        wanted = wanted.removesuffix("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert text(tokenizer, asked, template, prompt=prompt) == wanted


@pytest.mark.slow
def test_a_name_needs_its_tokens_and_the_way_out_fits() -> None:
    tokenizer = from_npm("gemma2")
    with pytest.raises(ModelError) as caught:
        chosen(tokenizer, "chatml")
    assert "<|im_start|>, <|im_end|>" in caught.value.message
    assert "gemma, zephyr" in (caught.value.hint or "")
    for name in ("gemma", "zephyr"):
        assert text(tokenizer, CHAT, chosen(tokenizer, name)).startswith("<bos>")


@pytest.mark.parametrize("name", NAMED)
def test_templates_by_name_leave_nothing_out_without_a_word(name: str) -> None:
    tokenizer = tiny(NAMED[name].text)
    template = ChatTemplate(tokenizer)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for messages, tools in (
        ([USER, {"role": "assistant", "content": "", "tool_calls": [call]}], None),
        ([USER, ANSWER, {"role": "tool", "content": "x"}], None),
        ([USER, ANSWER], [{"type": "function", "function": {"name": "f"}}]),
    ):
        with pytest.raises(DataError):
            template.text(messages, tools)
    assert template.takes_system == (name not in ("gemma", "mistral"))


# --- files ----------------------------------------------------------------------------------------


def test_a_template_is_read_from_jinja_and_from_a_tokenizers_configuration(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML}), encoding="utf-8"
    )
    for name in ("t.jinja", "tokenizer_config.json"):
        assert read_template(str(tmp_path / name)) == CHATML
    assert chosen(tiny(None), str(tmp_path / "t.jinja")) == CHATML
    (tmp_path / "chat_template.jinja").write_text(ZEPHYR, encoding="utf-8")
    assert template_text(tiny(CHATML), ChatChoice(kept=tmp_path)) == ZEPHYR
    # What is named comes before what is kept.
    assert (
        template_text(tiny(CHATML), ChatChoice(str(tmp_path / "t.jinja"), kept=tmp_path)) == CHATML
    )


@pytest.mark.parametrize(
    "content",
    [
        None,
        "hello",
        '{"messages": [{"role": "user", "content": "a file of chats"}]}',
        "{% for m in messages %}",
        "{{ messages[0 }}",
        "\udcff",
    ],
)
def test_what_is_no_template_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        chosen(tiny(CHATML), str(file))
    assert "t.jinja" in (caught.value.where or "")


def test_blocks_that_mark_answers_are_no_mistake(tmp_path: Path) -> None:
    marked = CHATML.replace(
        "+ message['content'] +",
        "}}{% generation %}{{ message['content'] }}{%- endgeneration -%}{{",
    )
    (tmp_path / "t.jinja").write_text(marked, encoding="utf-8")
    assert chosen(tiny(None), str(tmp_path / "t.jinja")) == marked


# --- system messages ------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [CHATML, GEMMA, LLAMA2, THINKING, ZEPHYR, WORDS])
@pytest.mark.parametrize(
    "messages",
    [
        CHAT,
        [SYSTEM, *CHAT],
        [SYSTEM, {"role": "developer", "content": "Be kind."}, *CHAT],
        [*CHAT[:2], SYSTEM, *CHAT[2:]],
        [SYSTEM],
        [SYSTEM, {"role": "system", "content": "Be kind."}, ANSWER, USER],
    ],
)
def test_a_merged_system_message_is_what_the_question_would_be(
    own: str, messages: list[Any]
) -> None:
    tokenizer = tiny(own)
    template = chosen(tokenizer, system="merge")
    for prompt in (False, True):
        try:
            wanted = text(tokenizer, merged_system(messages), prompt=prompt)
        except Exception as error:  # the template's own
            with pytest.raises(type(error)):
                text(tokenizer, messages, template, prompt=prompt)
        else:
            assert text(tokenizer, messages, template, prompt=prompt) == wanted
    assert chosen(tiny(template), system="merge") == template


def test_system_messages_are_joined_and_nothing_else_changes() -> None:
    assert merged_system([SYSTEM, *CHAT]) == [{"role": "user", "content": MERGED}, *CHAT[1:]]
    assert merged_system(CHAT) == CHAT
    assert merged_system([SYSTEM, SYSTEM, {**USER, "name": "x"}])[0] == {
        "role": "user",
        "content": "Be brief.\n\n" + MERGED,
        "name": "x",
    }


def test_the_first_of_several_templates_is_chosen_as_before() -> None:
    tokenizer = tiny(CHATML)
    tokenizer.chat_template = {"default": GEMMA, "tool_use": ZEPHYR}
    try:
        template = chosen(tokenizer, system="merge")
        tokenizer.chat_template = GEMMA
        assert text(tokenizer, CHAT, template) == text(tokenizer, CHAT)
    finally:
        tokenizer.chat_template = CHATML


@pytest.mark.parametrize(
    ("own", "named"), [(GEMMA, True), (WORDS.replace("message in messages", "m in []"), False)]
)
def test_a_rejected_system_message_names_the_option_where_it_helps(own: str, named: bool) -> None:
    template = ChatTemplate(tiny(own))
    assert not template.takes_system
    if named:
        with pytest.raises(DataError) as caught:
            template.text([SYSTEM, *CHAT], None)
        assert "--system merge" in (caught.value.hint or "")
    with pytest.raises(DataError) as caught:
        ChatTemplate(tiny(GEMMA)).text([SYSTEM, USER, USER], None)
    assert "--system merge" not in (caught.value.hint or "")


def test_rows_are_written_with_merged_system_messages() -> None:
    def lines(value: Any) -> Any:
        example = parse_example(value, columns(), source="f", line=1)
        return with_merged_system(example).to_json()

    assert lines({"messages": [SYSTEM, USER, ANSWER]})["messages"][0] == {
        "role": "user",
        "content": MERGED,
    }
    pair = {"chosen": "a", "rejected": "b"}
    assert lines({"prompt": [SYSTEM, USER], **pair})["prompt"] == [
        {"role": "user", "content": MERGED}
    ]
    for value in ({"prompt": "a", "completion": "b"}, {"text": "a"}, {"messages": [USER, ANSWER]}):
        assert lines(value) == value


def columns() -> Any:
    from allhands.data.records import ColumnNames

    return ColumnNames()


# --- the end of answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "closing"),
    [
        (CHATML, "<|im_end|>"),
        (GEMMA, "<end_of_turn>"),
        (LLAMA2, None),
        (THINKING, None),
        (ZEPHYR, None),
        (WORDS, None),
        # Every message ends with one token, the last answer with the model's end of text.
        (
            "{% for m in messages %}{{ m.content + (eos_token if loop.last else '<|im_end|>') }}{% endfor %}",
            None,
        ),
        (None, None),
    ],
)
def test_the_token_that_ends_answers_is_known_where_generation_would_not_stop(
    own: str | None, closing: str | None
) -> None:
    found = unstopped(tiny(own))
    assert (found and found[0]) == closing


def test_a_model_that_stops_is_left_alone() -> None:
    assert unstopped(qwen25()) is None
    found = unstopped(from_npm("llama3"))  # as it was published first: its end of text was another
    assert found is not None
    assert found[0] == "<|eot_id|>"


# --- tokens of one's own --------------------------------------------------------------------------


def test_tokens_that_the_template_writes_are_not_a_persons_own() -> None:
    tokenizer = tiny(CHATML)
    assert set(own_tokens(tokenizer).values()) == {
        "<start_of_turn>",
        "<end_of_turn>",
        "<|User|>",
        "<|Assistant|>",
    }
    assert "<|im_start|>" in own_tokens(tokenizer, chosen=True).values()
    assert not own_tokens(qwen25())


def test_a_chat_without_a_template_says_which_there_are() -> None:
    renderer = Renderer(tiny(None), mask_prompt=True, max_seq_length=100)
    with pytest.raises(ModelError) as caught:
        renderer.render(Record("chat", messages=(USER, ANSWER)))
    assert "--chat-template" in (caught.value.hint or "")
    assert "chatml" in (caught.value.hint or "")
