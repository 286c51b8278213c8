"""What a chat template leaves out of a record is said, in every turn; a template that keeps it is
never blamed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_tokenizers import CHATML, GEMMA, LLAMA2, THINKING, ZEPHYR, from_npm, qwen25, tiny

from allhands.data.check import CheckOptions, Examiner, check, template_findings
from allhands.data.heard import WORDS, lost_markers, mark, words_of
from allhands.data.records import Record
from allhands.data.render import Renderer
from allhands.data.shapes import Example
from allhands.errors import DataError

CALL = {
    "type": "function",
    "function": {
        "name": "ferry_status",
        "arguments": {"route": 'Skye "north"\n', "day": {"nth": 3, "at": [1.5, 2]}},
    },
}
TOOL = {
    "type": "function",
    "function": {
        "name": "ferry_status",
        "description": "State of a ferry",
        "parameters": {
            "type": "object",
            "properties": {
                "route": {"type": "string", "description": "From where", "enum": ["Skye", "Mull"]}
            },
            "required": ["route"],
        },
    },
}
RESULT = {
    "role": "tool",
    "name": "ferry_status",
    "content": '{"state": "it \\"runs\\"",\n "café": 3}',
}
SYSTEM = {"role": "system", "content": "You are a terse pilot."}
THOUGHT = "<think>\nIt is winter.\n</think>\n\n"


def user(
    words: str = "Is the <ferry> to Skye \"running\", & is it on 'time'?", **more: Any
) -> dict[str, Any]:
    return {"role": "user", "content": words, **more}


def answer(words: str = "Yes, it runs.\n\n   It is  on time. ", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **more}


def codes(
    tokenizer: Any,
    *messages: dict[str, Any],
    tools: list[Any] | None = None,
    mask: bool = False,
    train_on: Any = None,
) -> list[str]:
    record = Record("chat", messages=messages, tools=tools, source="train.jsonl", line=3)
    renderer = Renderer(
        tokenizer, mask_prompt=mask, max_seq_length=1 << 20, train_on=train_on or "assistant"
    )
    return sorted(found.code for found in renderer.render(record).unheard)


def rendered(tokenizer: Any, *messages: dict[str, Any], tools: list[Any] | None = None) -> str:
    renderer = Renderer(tokenizer, mask_prompt=False, max_seq_length=1 << 20)
    return renderer.explain(Record("chat", messages=messages, tools=tools)).text


def looped(answering: str, *, tools: str = "", result: str = "{{ m.content }}") -> Any:
    """A tokenizer with a template that writes answers and the answers of tools as given."""
    template = (
        tools
        + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + answering
    )
    template += (
        "{% elif m.role == 'tool' %}"
        + result
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    return tiny.__wrapped__(
        template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


LIST_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
AS_JSON = (
    LIST_TOOLS,
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}",
)
# The ways in which templates write calls, tools and the answers of tools: none of them leaves
# anything out.
KEEPING = {
    "json": AS_JSON,
    "indented ascii": (
        LIST_TOOLS.replace("tojson", "tojson(indent=2)"),
        "{{ m.content | trim }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments | tojson(ensure_ascii=True, indent=1) + c.function.name }}{% endfor %}",
    ),
    "xml": (
        "{% for t in tools or [] %}<function><name>{{ t.function.name }}</name>{{ t.function.description }}"
        "{% for key, p in t.function.parameters.properties.items() %}{{ key + p.description }}{{ p.enum | join('|') }}"
        "{% endfor %}{% endfor %}",
        "{{ m.content }}{% for c in m.tool_calls %}<function={{ c.function.name }}>"
        "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>"
        "{% endfor %}{% endfor %}",
    ),
    "python": (
        LIST_TOOLS,
        "{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments | dictsort %}"
        "{{ k }}={{ v }}{% endfor %}){% endfor %}{{ m.content.rstrip() }}",
    ),
}


@pytest.mark.parametrize(
    "key", ["thought", "thoughts", "reasoning_text", "analysis", "chain_of_thought"]
)
def test_thinking_is_thinking_by_any_usual_name(key: str) -> None:
    tokenizer = looped("{{ m.content }}")
    thinking = {key: "It is winter, and the ferry is in the dock."}
    assert codes(tokenizer, user(), answer("No.", **thinking)) == ["reasoning-key-unread"]
    reads = looped("{{ m.reasoning_content or '' }}{{ m.content }}")
    assert codes(reads, user(), answer("No.", **thinking)) == []
    assert "ferry is in the dock" in rendered(reads, user(), answer("No.", **thinking))


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"my_notes": "It is winter, and the ferry is in the dock."}, ["fields-dropped"]),
        ({"my_notes": "No."}, []),
        ({"id": "msg 01 of 12 of the third day"}, ["fields-dropped"]),
        ({"date": "on the third of May, late in the evening"}, []),
        ({"model": "a-model-of-somebody-4b"}, []),
    ],
)
def test_words_under_other_keys_are_said_to_be_unread(
    more: dict[str, str], found: list[str]
) -> None:
    assert codes(looped("{{ m.content }}"), user(), answer("No.", **more)) == found
    writes_all = looped(
        "{{ m.content }}{% for k, v in m.items() if k not in ['role', 'content'] %}{{ v }}{% endfor %}"
    )
    assert codes(writes_all, user(), answer("No.", **more)) == []


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize(
    "result", ["{{ m.content }}", "{{ m.content | tojson }}", "{{ m.content | string | e }}"]
)
def test_a_template_that_writes_everything_is_not_blamed(name: str, result: str) -> None:
    tools, answering = KEEPING[name]
    tokenizer = looped(answering, tools=tools, result=result)
    in_string = {
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"route": "Mull"})},
    }
    for calls in ([CALL], [CALL, in_string]):
        turns = [
            SYSTEM,
            user(),
            answer("", tool_calls=calls),
            *[RESULT] * len(calls),
            answer(),
            user("No?"),
            answer("No"),
        ]
        for tool in (TOOL, TOOL["function"]) if name == "json" else (TOOL,):
            assert codes(tokenizer, *turns, tools=[tool]) == []
    assert (
        codes(tokenizer, user(), answer(THOUGHT + "Yes."), user("Why?"), answer(THOUGHT + "So."))
        == []
    )
    if name != "python":
        assert (
            codes(
                tokenizer,
                user(),
                answer("Let me look.", tool_calls=[CALL]),
                RESULT,
                answer(),
                tools=[TOOL],
            )
            == []
        )


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        GEMMA,
        LLAMA2,
        ZEPHYR,
        ZEPHYR.replace("message['role'] +", "message['role'] | upper +"),
    ],
)
@pytest.mark.parametrize("mask", [False, True])
def test_plain_chats_are_whole_in_every_template(template: str, mask: bool) -> None:
    tokenizer = tiny(template)
    for words in (
        "Yes.",
        "a",
        "  two\n\nlines  ",
        "<b>tag</b>",
        "12",
        '{"json": [1, "x"]}',
        "é漢字 \\n 'q'",
    ):
        assert (
            codes(tokenizer, user(words), answer(words), user("a"), answer(words + "!"), mask=mask)
            == []
        )


def test_real_tokenizers_leave_nothing_out_of_what_they_take() -> None:
    with_tools = [
        user(),
        answer("", tool_calls=[CALL]),
        RESULT,
        answer(),
        user("So?"),
        answer("So."),
    ]
    for tokenizer in (qwen25(), from_npm("qwen3"), from_npm("mistral_nemo")):
        for mask in (False, True):
            # Of these calls none has an id, which Mistral's template insists on.
            assert codes(tokenizer, *with_tools, tools=[TOOL], mask=mask) == []
            assert codes(tokenizer, *with_tools, tools=[TOOL["function"]], mask=mask) == []
    for tokenizer in (qwen25(), from_npm("qwen3"), from_npm("gemma2", GEMMA), from_npm("llama3")):
        assert codes(tokenizer, user(), answer(), user("So?"), answer("So.")) == []
    assert (
        codes(qwen25(), user(), answer(THOUGHT + "Yes."))
        == codes(from_npm("qwen3"), user(), answer(THOUGHT))
        == []
    )


# Thinking

# As DeepSeek-R1: of every answer; as Qwen 3: of those before the last question.
CUT_ALL = "{{ m.content.split('</think>')[-1] }}"
CUT_EARLIER = "{% if loop.last %}{{ m.content }}{% else %}" + CUT_ALL + "{% endif %}"


@pytest.mark.parametrize("mask", [False, True])
def test_thinking_that_is_cut(mask: bool) -> None:
    one, two = (
        [user(), answer(THOUGHT + "Yes.")],
        [user("Why?"), answer("<think>Hm, ice.</think>Ice.")],
    )
    assert codes(looped(CUT_ALL), *one, mask=mask) == ["reasoning-dropped"]
    assert codes(looped(CUT_ALL), *one, *two, mask=mask) == ["reasoning-dropped"]
    assert codes(looped(CUT_EARLIER), *one, mask=mask) == []
    assert codes(looped(CUT_EARLIER), *one, *two, mask=mask) == ["earlier-reasoning-dropped"]
    assert codes(from_npm("qwen3"), *one, *two, mask=mask) == ["earlier-reasoning-dropped"]
    # All the thinking that there is.
    assert codes(looped(CUT_EARLIER), *one, user("Why?"), answer("Ice."), mask=mask) == [
        "reasoning-dropped"
    ]
    # Not where it is no target.
    if mask:
        assert codes(
            looped(CUT_ALL), *one, user("Why?"), answer("Ice."), mask=mask, train_on="last"
        ) == ["earlier-reasoning-dropped"]


UNDER_A_KEY = [{key: "It is winter."} for key in ("reasoning_content", "reasoning", "thinking")]
IN_THE_WORDS = [
    {"content": "It is winter.\n</think>\n\nYes."},
    {"content": "<thinking>It is winter.</thinking>Yes."},
    {"content": "[THINK]It is winter.[/THINK]Yes."},
    {"content": "<|begin_of_thought|>It is winter.<|end_of_thought|>Yes."},
    # The same words again: still left out.
    {"content": "<think>\nYes, it runs.\n</think>\n\nYes, it runs."},
]


@pytest.mark.parametrize("message", UNDER_A_KEY + IN_THE_WORDS)
def test_spellings_of_thinking(message: dict[str, Any]) -> None:
    deaf = looped(
        "{{ m.content.split('</think>')[-1].split('</thinking>')[-1].split('[/THINK]')[-1].split('_thought|>')[-1] }}"
    )
    assert codes(deaf, user(), answer("Yes.") | message) == ["reasoning-dropped"]


def test_a_template_that_knows_no_key_for_thinking_may_keep_it_in_the_words() -> None:
    for tokenizer in (tiny(CHATML), qwen25()):
        assert codes(tokenizer, user(), answer("Yes.", reasoning_content="It is winter.")) == [
            "reasoning-key-unread"
        ]
    assert "<think>" in words_of("reasoning-key-unread")[1]
    assert "<think>" not in words_of("reasoning-dropped")[1]


@pytest.mark.parametrize(
    "message", [*UNDER_A_KEY, {"content": "<think>\nIt is winter.\n</think>\n\nYes."}]
)
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_gets_to_the_place_that_a_template_has_for_it(
    message: dict[str, Any], key: str
) -> None:
    written = (
        "{% if m."
        + key
        + " %}[{{ m."
        + key
        + " }}]{% endif %}{{ m.content.split('</think>')[-1] | trim }}"
    )
    record = [user(), answer("Yes.") | message]
    assert codes(looped(written), *record) == codes(looped(written), *record, mask=True) == []
    assert rendered(looped(written), *record).endswith("[It is winter.]Yes.<|im_end|>\n")


def test_what_is_dropped_for_its_words_is_found_as_well() -> None:
    # Neither a known tag nor a place: the template cuts a channel.
    tokenizer = looped("{{ m.content.split('<final>')[-1] }}")
    assert codes(tokenizer, user(), answer("Let me see what is there.<final>It runs.")) == [
        "answers-dropped"
    ]
    assert codes(tokenizer, user(), answer("Let me see what is there.")) == []


# Everything else that may be left out


def test_calls_arguments_results_tools_words_names_and_system() -> None:
    chat = [user(), answer("Let me look.", tool_calls=[CALL]), RESULT, answer()]
    full = dict(zip(("tools", "answering"), AS_JSON, strict=True))

    def lost(*messages: dict[str, Any], **template: str) -> list[str]:
        return codes(looped(**{**full, **template}), *(messages or chat), tools=[TOOL])

    assert lost() == []
    assert lost(answering="{{ m.content }}") == ["calls-dropped"]
    assert (
        lost(
            answering="{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
        )
        == []
    )
    first = "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
    other = {"type": "function", "function": {"name": "ferry_status", "arguments": {}}}
    assert lost(
        user(), answer(tool_calls=[CALL, other]), RESULT, RESULT, answer(), answering=first
    ) == ["calls-dropped"]
    named = "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    assert lost(answering=named) == ["arguments-dropped"]
    either = "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    assert lost(answering=either) == ["words-beside-calls"]
    assert lost(user(), answer("", tool_calls=[CALL]), RESULT, answer(), answering=either) == []
    assert lost(result="") == ["results-dropped"]
    assert lost(tools="") == ["tools-dropped"]
    assert lost(tools="{% for t in tools %}{{ t.function.name }}{% endfor %}") == []
    assert lost(user(name="Ann"), answer()) == ["names-dropped"]
    silent = "{{ m.content if loop.index0 > 1 else '' }}"
    assert lost(user(), answer(), user("So?"), answer("So."), answering=silent) == [
        "answers-dropped"
    ]
    deaf = looped(AS_JSON[1]).chat_template.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
    )
    assert codes(tiny.__wrapped__(deaf), SYSTEM, user(), answer()) == ["system-dropped"]
    # In an earlier turn too.
    later = (
        "{% if loop.index0 > 1 or not m.tool_calls %}"
        + AS_JSON[1]
        + "{% else %}{{ m.content }}{% endif %}"
    )
    assert lost(
        *chat, user("And now?"), answer("", tool_calls=[CALL]), RESULT, answer(), answering=later
    ) == ["calls-dropped"]


def test_a_call_that_is_left_out_is_named_where_its_answer_cannot_be_found() -> None:
    with pytest.raises(DataError) as caught:
        codes(tiny(CHATML), user(), answer("x", tool_calls=[CALL]), mask=True)
    assert WORDS["calls-dropped"][1] == caught.value.hint


def test_pictures_and_sound_are_said() -> None:
    record = Record("chat", messages=(user("<image> What is this?"), answer()), unread=("images",))
    for tokenizer in (tiny(CHATML), tiny(None)):
        plain = Record("completion", prompt="What?", completion="A cat.", unread=("image",))
        one = record if tokenizer.chat_template else plain
        found = Renderer(tokenizer, mask_prompt=False, max_seq_length=99).render(one).unheard
        assert [code for code, _ in found] == ["media-dropped"]
    assert codes(tiny(CHATML), user(images=["a.png"]), answer()) == ["media-dropped"]
    assert codes(tiny(CHATML), user(images=[]), answer()) == []


# Forms


def test_a_template_gets_the_form_that_it_takes() -> None:
    chat = [user(), answer("", tool_calls=[CALL]), RESULT, answer()]
    strings = looped(
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    )
    text = rendered(strings, *chat)
    assert json.dumps(CALL["function"]["arguments"], ensure_ascii=False) in text
    wrapped = looped(
        AS_JSON[1], tools="{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
    )
    assert '{"name": "ferry_status"' in rendered(wrapped, *chat, tools=[TOOL["function"]])
    # What the template takes as it stands is not touched.
    bare = looped(AS_JSON[1], tools=LIST_TOOLS)
    assert rendered(bare, *chat, tools=[TOOL["function"]]).startswith('{"name": "ferry_status"')


# What it means for a run


def severity(
    tokenizer: Any, records: list[tuple[dict[str, Any], ...]], **options: Any
) -> dict[str, str]:
    examples = [
        Example("chat", Record("chat", messages=messages, source="train.jsonl", line=n), None)
        for n, messages in enumerate(records, start=1)
    ]
    examiner = Examiner(tokenizer, CheckOptions(batch_size=1, **{"mask_prompt": True, **options}))
    reports, findings = check({"train": examples}, examiner)
    findings += template_findings(tokenizer, reports)
    return {finding.code: finding.severity for finding in findings}


def test_cut_thinking_ruins_where_it_is_much_and_is_usual_in_earlier_turns() -> None:
    plain = [(user(f"Number {n}?"), answer(f"It is the number {n}.")) for n in range(19)]
    thinking = [(user("Number 99?"), answer(THOUGHT + "Ninety-nine."))]
    assert severity(looped(CUT_ALL), thinking * 2)["reasoning-dropped"] == "ruins"
    assert severity(looped(CUT_ALL), plain + thinking)["reasoning-dropped"] == "harms"
    assert not {"reasoning-dropped", "earlier-reasoning-dropped"} & set(
        severity(looped(CUT_EARLIER), plain + thinking)
    )
    turns = [(*thinking[0], user("Why?"), answer(THOUGHT + "So."))]
    assert severity(looped(CUT_EARLIER), turns)["earlier-reasoning-dropped"] == "note"


def test_the_advice_about_the_opening_of_answers_is_for_data_that_lack_it() -> None:
    plain = [(user(), answer("Ninety-nine.")), (user("So?"), answer("That is how it is."))]
    thinking = [(user(), answer("<think>\nHm, it is winter.</think>Ninety-nine."))]
    keeps = tiny.__wrapped__(THINKING.replace(".split('</think>')[-1]", ""))
    assert severity(tiny(THINKING), plain)["other-generation-prompt"] == "harms"
    assert severity(keeps, plain)["other-generation-prompt"] == "harms"
    # The answers begin with it: cut off by the template, or not at all.
    assert set(severity(tiny(THINKING), thinking)) & {
        "other-generation-prompt",
        "reasoning-dropped",
    } == {"reasoning-dropped"}
    assert not set(severity(keeps, thinking)) & {"other-generation-prompt", "reasoning-dropped"}


def test_answers_that_think_or_call_otherwise_are_not_the_same() -> None:
    def call(place: str) -> list[Any]:
        return [{"type": "function", "function": {"name": "tide", "arguments": {"place": place}}}]

    places = [f"number {n}" for n in range(12)]
    calling = [(user(f"When at {place}?"), answer("", tool_calls=call(place))) for place in places]
    thinking = [
        (user("Is it?"), answer("Yes.", reasoning_content=f"At {place} it is.")) for place in places
    ]
    for records in (calling, thinking):
        assert not {"same-answer", "repeats"} & set(severity(looped(AS_JSON[1]), records))
    same = [(user(f"When at {place}?"), answer("", tool_calls=call("Skye"))) for place in places]
    assert severity(looped(AS_JSON[1]), same)["same-answer"] == "harms"


def test_every_code_has_words_and_a_remedy() -> None:
    for code in WORDS:
        for sample in (None, '"x"'):
            message, remedy = words_of(code, sample)
            assert message
            assert remedy
            assert "{" not in message


def test_words_that_look_like_a_marker_of_many_digits_are_none() -> None:
    marked = mark([{"role": "user", "content": "Hello, you"}], None)
    assert lost_markers("Zq" + "9" * 5000 + "qZ", marked) == frozenset({0})
