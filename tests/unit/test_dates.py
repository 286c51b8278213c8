"""Chat templates that write the current date: which date it is, who is told, and all else as
transformers has it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from chat_tokenizers import CHATML, tiny

from allhands.data.check import CheckOptions, DataFinding, Examiner, check
from allhands.data.findings import words_of
from allhands.data.records import Record
from allhands.data.render import ChatTemplate, Renderer
from allhands.data.shapes import Example
from allhands.errors import DataError

NEW_YEAR = datetime(2027, 1, 1, 9, 5, 7)
# As in Llama 3.2 (asked whether it is there), gpt-oss (in a macro), Mistral (computed with), and in
# every awkward way.
DATES = {
    "plain": "Today: {{ strftime_now('%d %b %Y') }}\n",
    "asked for": """{% if not date_string is defined %}{% if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}{% else %}{% set date_string = "26 Jul 2024" %}{% endif %}
        {% endif %}Today Date: {{ date_string }}

""",
    "in a macro": "{%- macro head() -%}Current date: {{ strftime_now('%Y-%m-%d') }}{%- endmacro -%}{{ head() }}",
    "computed with": "{% set year = strftime_now('%Y')|int %}{{ year - 1 }} {{ strftime_now('%B')[:3] | upper }}",
    "with a format of its own": "{% for one in ['%H', '%M'] %}{{ strftime_now('at ' ~ one) }} {% endfor %}",
    "by name": "{{ strftime_now(format='%A, %-d. %B, 100%%') }}",
    "in blanks": "\n\n  {% if true %}\n  {{ strftime_now('%j') }}\n  {% endif %}\n",
    "not at all": "{# strftime_now('%d') #}",
}


class StoppedDatetime(datetime):
    """The clock of transformers, standing still."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NEW_YEAR


def chat(*turns: str, tools: list[Any] | None = None) -> Record:
    """Questions and answers in turn."""
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": turn}
        for place, turn in enumerate(turns)
    ]
    return Record("chat", messages=tuple(messages), tools=tools, source="train.jsonl", line=7)


@pytest.mark.parametrize("name", DATES)
@pytest.mark.parametrize("masked", [True, False])
def test_the_date_is_that_of_the_moment_and_all_else_as_transformers_has_it(
    name: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny(DATES[name] + CHATML)
    record = chat("When?", "Now.", "And then?", "Later.")
    ours = Renderer(tokenizer, mask_prompt=masked, max_seq_length=4096, moment=NEW_YEAR).render(
        record
    )
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", StoppedDatetime)
    text = tokenizer.apply_chat_template(list(record.messages or ()), tokenize=False)
    assert ours.tokens.tolist() == tokenizer.encode(text, add_special_tokens=False)
    if masked:
        trained = tokenizer.decode(ours.tokens[ours.mask].tolist(), skip_special_tokens=False)
        assert trained == "Now.<|im_end|>Later.<|im_end|>"
    assert bool(ours.dates) == (name not in ("not at all", "computed with"))
    assert all(date in text for date in ours.dates)
    later = Renderer(
        tokenizer, mask_prompt=masked, max_seq_length=4096, moment=NEW_YEAR + timedelta(days=40)
    )
    assert (later.render(record).tokens.tolist() == ours.tokens.tolist()) == (
        name in ("not at all", "with a format of its own")
    )


def test_without_a_moment_one_renderer_keeps_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are found by rendering a conversation several times, between which a second may pass."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(
        StoppedDatetime,
        "now",
        classmethod(lambda _, tz=None: NEW_YEAR + timedelta(seconds=next(ticks))),
    )
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", StoppedDatetime)
    renderer = Renderer(
        tiny("{{ strftime_now('%S') }}" + CHATML), mask_prompt=True, max_seq_length=4096
    )
    first, second = (renderer.render(chat("a", "b", "c", "d")) for _ in range(2))
    assert first.tokens.tolist() == second.tokens.tolist()


def test_of_several_templates_the_right_one_is_asked() -> None:
    tokenizer = tiny("" + CHATML + " ")  # of its own, since the other tests share theirs
    tokenizer.chat_template = {
        "default": "{{ strftime_now('%Y') }}" + CHATML,
        "tool_use": "tools " + CHATML,
    }
    texts = []
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        record = chat("a", "b", tools=tools)
        renderer = Renderer(tokenizer, mask_prompt=False, max_seq_length=4096, moment=NEW_YEAR)
        texts.append(tokenizer.decode(renderer.render(record).tokens.tolist()))
    assert texts[0].startswith("2027")
    assert texts[1].startswith("tools")


def test_what_a_dated_template_rejects_is_rejected() -> None:
    words = "{{ strftime_now('%Y') }}{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    renderer = Renderer(
        tiny(words + CHATML), mask_prompt=True, max_seq_length=4096, moment=NEW_YEAR
    )
    with pytest.raises(DataError) as caught:
        renderer.render(chat("no", "b"))
    assert caught.value.code == "chat-template-rejects-messages"
    assert renderer.render(chat("yes", "b")).mask.any()


def test_a_question_is_answered_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", StoppedDatetime)
    template = ChatTemplate(tiny("{{ strftime_now('%d %b %Y') }}" + CHATML))
    assert template.text([{"role": "user", "content": "a"}], None).startswith("01 Jan 2027")


# --- data check -----------------------------------------------------------------------------------


def found_in(records: list[Record], tokenizer: Any) -> dict[str, DataFinding]:
    """Findings by code."""
    examiner = Examiner(tokenizer, CheckOptions(mask_prompt=True))
    items = [Example(record.kind, record, None) for record in records]
    return {finding.code: finding for finding in check({"train": items}, examiner)[1]}


def test_a_date_is_a_note_that_counts_the_chats_that_have_it() -> None:
    words = "{% if messages[0].content != 'x' %}Today: {{ strftime_now('%d %b %Y') }}\n{% endif %}"
    plain, dated = tiny(CHATML), tiny(words + CHATML)
    records = [chat(f"q{i}", f"a{i}") for i in range(6)]
    without = [
        Record("text", text="Today is the day.", source="train.jsonl", line=8),
        chat("x", "y"),
    ]
    assert "dated" not in found_in(records + without, plain)
    found = found_in(records + without, dated)["dated"]
    assert (found.severity, found.count, found.total) == ("note", 6, 8)
    assert datetime.now().strftime("%b %Y") in words_of(found)[0]
    assert "dated" not in found_in(without, dated)
