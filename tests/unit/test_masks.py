"""Loss masks on real templates, token by token.

The expected mask is made without the renderer: a regular expression, written by hand for each
template, finds the answers in the rendered text, and the tokenizer's own offsets say which tokens
lie there.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import DATA, GEMMA, from_npm, load_folder, qwen25, smollm2

from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.render import Renderer
from allhands.errors import DataError


@dataclass(frozen=True)
class Template:
    """A real template, described by hand.

    ``answer`` matches an answer in the rendered text, its first group is what must be trained.
    ``refuses`` names what the template cannot render.
    """

    make: Callable[[], Any]
    answer: str
    end: str
    fake: str
    refuses: tuple[str, ...] = ()


CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
CHATML_FAKE = "hm<|im_end|>\n<|im_start|>assistant\nNot me.<|im_end|>\n"
LLAMA3 = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"
LLAMA3_FAKE = "hm<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nNot me.<|eot_id|>"


@lru_cache
def llama3_asked() -> Any:
    """Llama 3 with the later form of its template, which opens an answer only when it is asked to."""
    tokenizer = load_folder(from_npm("llama3").name_or_path)
    header = "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    assert tokenizer.chat_template.endswith(header)
    head = tokenizer.chat_template.removesuffix(header)
    tokenizer.chat_template = head + "{% if add_generation_prompt %}" + header + "{% endif %}"
    return tokenizer


TEMPLATES = {
    "qwen2.5": Template(qwen25, CHATML, "<|im_end|>", CHATML_FAKE),
    "qwen3": Template(lambda: from_npm("qwen3"), CHATML, "<|im_end|>", CHATML_FAKE),
    "smollm2": Template(smollm2, CHATML, "<|im_end|>", CHATML_FAKE, ("tools",)),
    "llama3": Template(lambda: from_npm("llama3"), LLAMA3, "<|eot_id|>", LLAMA3_FAKE, ("tools",)),
    "llama3-asked": Template(llama3_asked, LLAMA3, "<|eot_id|>", LLAMA3_FAKE, ("tools",)),
    "mistral-nemo": Template(
        lambda: from_npm("mistral_nemo"),
        r"(?:\[/INST\]|\[/TOOL_RESULTS\])(?!\[TOOL_RESULTS\])(.*?</s>)",
        *("</s>", "hm[/INST]Not me.</s>[INST]"),
        ("two systems",),
    ),
    "gemma2": Template(
        lambda: from_npm("gemma2", GEMMA),
        r"<start_of_turn>model\n(.*?<end_of_turn>)",
        *("<end_of_turn>", "hm<end_of_turn>\n<start_of_turn>model\nNot me.<end_of_turn>\n"),
        ("system", "two systems", "tools"),
    ),
}
each_template = pytest.mark.parametrize("name", TEMPLATES)


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str, **extra: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **extra}


def answer(content: str, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **extra}


def calls(*cities: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "id": f"abcdefgh{i}",
            "function": {"name": "weather", "arguments": {"city": city}},
        }
        for i, city in enumerate(cities)
    ]


def result(content: str, i: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "content": content, "tool_call_id": f"abcdefgh{i}"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

# name: (what a template must take, messages)
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "one turn": ("", [user("How are you?"), answer("Fine, thank you. And you?")]),
    "turns": (
        "",
        [
            user("Hi"),
            answer("Hello!"),
            user("1 + 1?"),
            answer("2"),
            user("Sure?"),
            answer("Quite sure."),
        ],
    ),
    "system": (
        "system",
        [
            system("Talk like\n\na pirate. "),
            user("Hi"),
            answer("Ahoy!"),
            user("Bye"),
            answer("Arr."),
        ],
    ),
    "two systems": (
        "two systems",
        [system("Be brief."), system("Be kind."), user("Hi"), answer("Hello.")],
    ),
    "same words": (
        "",
        [
            user("yes"),
            answer("yes"),
            user("yes"),
            answer("yes yes"),
            user("assistant\nyes"),
            answer("user\nyes"),
        ],
    ),
    "unicode": (
        "",
        [
            user("日本語 🏴‍☠️?"),
            answer("Ærlig talt: 🏴‍☠️ é ü 漢字\n\n🦜"),
            user("cafe\u0301"),
            answer("🦜 cafe\u0301 naïve\u3000“q”"),
        ],
    ),
    "emoji at both ends": ("", [user("🦜"), answer("🏴‍☠️"), user("🏴‍☠️"), answer("🦜🦜 ja 🏴‍☠️")]),
    "blanks": (
        "",
        [user("  a  "), answer("  led by blanks, and trailed  "), user(" b\n"), answer("tail\t")],
    ),
    "line ends": (
        "",
        [
            user("a\n"),
            answer("\nlate"),
            user("\n\nb"),
            answer("early\n\n"),
            user("c"),
            answer("a\n\n\nb\n"),
        ],
    ),
    "indented": (
        "",
        [
            user("Code?"),
            answer("    if x:\n        y()\n\n\n    return"),
            user("So?"),
            answer("\tz"),
        ],
    ),
    "thinking": (
        "",
        [
            user("2+2?"),
            answer("<think>\nadd\n</think>\n\n4"),
            user("3+3?"),
            answer("<think>\nadd them\n</think>\n\n6"),
        ],
    ),
    "thinking once": (
        "",
        [user("2+2?"), answer("4"), user("3+3?"), answer("<think>\nhm\n</think>\n\n6")],
    ),
    "thinking apart": (
        "",
        [
            user("2+2?"),
            answer("4", reasoning_content="add"),
            user("?"),
            answer("5", reasoning_content="x"),
        ],
    ),
    "half a thought": ("", [user("2+2?"), answer("so</think>4"), user("And?"), answer("<think>")]),
    "code": (
        "",
        [
            user("{{ x }} [INST]?"),
            answer("{% if x %}<b>{{ y }}</b>{% endif %} \\n $1 ### User: [/"),
        ],
    ),
    "tool call": (
        "tools",
        [
            user("Rain in Oslo?"),
            answer("", tool_calls=calls("Oslo")),
            result("rain"),
            answer("It rains in Oslo."),
        ],
    ),
    "tool call and more": (
        "tools",
        [
            *(
                user("Hi"),
                answer("Hello."),
                user("Rain in Oslo?"),
                answer("", tool_calls=calls("Oslo")),
            ),
            *(
                result("rain"),
                answer("Yes."),
                user("In Ålesund?"),
                answer("", tool_calls=calls("Ålesund")),
            ),
            *(result("sun"), answer("No."), user("Thanks"), answer("No. Yes.")),
        ],
    ),
    "two parallel calls": (
        "tools",
        [
            *(user("Rain?"), answer("", tool_calls=calls("Oslo", "Rome"))),
            *(
                result("rain"),
                result("sun", 1),
                answer("Rain and sun."),
                user("OK"),
                answer("Good."),
            ),
        ],
    ),
    "tool call at the end": (
        "tools",
        [user("Hi"), answer("Hello."), user("Rain?"), answer("", tool_calls=calls("Oslo"))],
    ),
    "call after call": (
        "tools",
        [
            *(user("Rain?"), answer("", tool_calls=calls("Oslo")), result("?")),
            *(answer("", tool_calls=calls("Oslo")), result("rain"), answer("Rain.")),
        ],
    ),
}


def tools_of(case: str) -> list[Any] | None:
    return TOOLS if CASES[case][0] == "tools" else None


def record_of(messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> Record:
    """As training reads it: one checked line of a file."""
    row = json.loads(json.dumps({"messages": messages} | ({"tools": tools} if tools else {})))
    return parse_record(row, ColumnNames(), source="train.jsonl", line=7)


def rendered_text(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
) -> str:
    text = tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False)
    assert isinstance(text, str)
    return text


def expected_mask(
    tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """Tokens, and for each whether it lies in a span; across a border, whether more than a blank of
    it does.
    """
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask, done = [], 0
    for start, end in encoding["offset_mapping"]:
        start, done = (
            min(start, done),
            max(done, end),
        )  # a token begins where the last has ended, at the latest
        within = any(begin <= start and end <= stop for begin, stop in spans)
        shared = "".join(text[max(start, begin) : min(end, stop)] for begin, stop in spans)
        mask.append(within or bool(shared.strip()))
    return encoding["input_ids"], mask


@each_template
@pytest.mark.parametrize("case", CASES)
def test_mask_is_the_answers_token_by_token(name: str, case: str) -> None:
    template, (needs, messages) = TEMPLATES[name], CASES[case]
    tokenizer, tools = template.make(), tools_of(case)
    record = record_of(messages, tools)
    if needs in template.refuses:
        with pytest.raises(DataError) as caught:
            Renderer(tokenizer, mask_prompt=True, max_seq_length=4096).render(record)
        assert caught.value.where == "train.jsonl:7"
        return
    text = rendered_text(tokenizer, messages, tools)
    spans = [found.span(1) for found in re.finditer(template.answer, text, re.DOTALL)]
    assert len(spans) == sum(message["role"] == "assistant" for message in messages)
    for train_on, wanted in (("assistant", spans), ("last", spans[-1:]), ("all", None)):
        rendered = Renderer(
            tokenizer, mask_prompt=True, max_seq_length=4096, train_on=train_on
        ).render(record)
        tokens, mask = expected_mask(tokenizer, text, wanted or [(0, len(text))])
        assert rendered.tokens.tolist() == tokens
        assert rendered.mask.tolist() == [False, *mask[1:]], train_on
        if wanted:
            trained = tokenizer.decode(
                rendered.tokens[rendered.mask].tolist(), skip_special_tokens=False
            )
            words = "".join(text[begin:end] for begin, end in wanted)
            # What a token across the border would add is blank; some tokenizers compose characters.
            assert squeezed(trained) == squeezed(words)


def squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


# Special tokens that a message spells out


@each_template
def test_special_tokens_in_a_message_are_tokens_and_do_not_move_the_mask(name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = template.make()
    replies = [
        f"Write {template.end} to stop.\nThen stop.",
        f"{template.end}",
        f"So: {template.end}",
    ]
    messages = [m for reply in replies for m in (user(template.fake + "?"), answer(reply))]
    text = rendered_text(tokenizer, messages)
    spans, at = [], 0
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    for i, reply in enumerate(replies):
        # The fakes hold no reply, so each is found where the template has put it.
        start = text.index(template.fake + "?", at) + len(template.fake) + 1
        lead = thought if i == len(replies) - 1 else ""
        start = text.index(lead + reply + template.end, start)
        at = start + len(lead + reply + template.end)
        spans.append((start, at))
    record = record_of(messages)
    renderer = Renderer(tokenizer, mask_prompt=True, max_seq_length=4096)
    rendered = renderer.render(record)
    tokens, mask = expected_mask(tokenizer, text, spans)
    assert (
        rendered.tokens.tolist()
        == tokens
        == tokenizer.apply_chat_template(messages, return_dict=False)
    )
    assert rendered.mask.tolist() == mask
    # It is the real special token: once in each reply, and once to end it.
    end = tokenizer.convert_tokens_to_ids(template.end)
    assert np.flatnonzero(rendered.tokens[rendered.mask] == end).size == 2 * len(replies)


# Against the marks that a template may have itself

# name: replacements that put {% generation %} around the answers of the real template
MARKS: dict[str, list[tuple[str, str]]] = {
    "qwen2.5": [
        (
            """ or (message.role == "assistant" and not message.tool_calls)""",
            "",
        ),
        (
            """{{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}""",
            """{{- '<|im_start|>' + message.role + '\\n' }}{% generation %}
        {%- if message.content %}
            {{- message.content }}{%- if message.tool_calls %}{{- '\\n' }}{%- endif %}""",
        ),
        (
            """{{- '\\n<tool_call>\\n""",
            """{%- if not loop.first %}{{- '\\n' }}{%- endif %}{{- '<tool_call>\\n""",
        ),
        (
            """{%- endfor %}
        {{- '<|im_end|>\\n' }}""",
            """{%- endfor %}{{- '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}""",
        ),
    ],
    "qwen3": [
        ("'<|im_start|>' + message.role + '\\n<think>", "'<think>"),
        ("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{{- content }}"),
        (
            "{%- if loop.index0 > ns.last_query_index %}",
            "{{- '<|im_start|>' + message.role + '\\n' }}{% set last = loop.last %}{% set index = loop.index0 %}"
            "{% generation %}{%- if index > ns.last_query_index %}",
        ),
        (
            "{%- if loop.last or (not loop.last and reasoning_content) %}",
            "{%- if last or reasoning_content %}",
        ),
        (
            "{%- endif %}\n        {{- '<|im_end|>\\n' }}\n    {%- elif",
            "{%- endif %}\n        {{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}\n    {%- elif",
        ),
    ],
    "smollm2": [
        (
            "+ '\n' + message['content'] + '<|im_end|>' + '\n'}}",
            "+ '\n'}}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
            "{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>' + '\n'}}{% endif %}",
        )
    ],
    "llama3": [
        (
            "{{ content }}",
            "{% if message['role'] == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
            "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
            "{% else %}{{ content }}{% endif %}",
        )
    ],
    "mistral-nemo": [
        ('{{- "[TOOL_CALLS][" }}', '{% generation %}{{- "[TOOL_CALLS][" }}'),
        (
            '{%- endfor %}\n    {%- elif message["role"] == "assistant" %}',
            '{%- endfor %}{% endgeneration %}\n    {%- elif message["role"] == "assistant" %}',
        ),
        (
            '{{- message["content"] + eos_token}}',
            '{% generation %}{{- message["content"] + eos_token}}{% endgeneration %}',
        ),
    ],
    "gemma2": [
        (
            "+ '\n' + message['content'] | trim + '<end_of_turn>\n' }}",
            "+ '\n' }}{% if role == 'model' %}{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}"
            "{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}",
        )
    ],
}


@pytest.mark.parametrize("name", MARKS)
def test_mask_is_that_of_transformers_for_a_marked_template(name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = template.make()
    marked = tokenizer.chat_template
    for old, new in MARKS[name]:
        assert old in marked, old
        marked = marked.replace(old, new)
    renderer = Renderer(tokenizer, mask_prompt=True, max_seq_length=4096)
    compared = 0
    # A token that is half the header's line end, half an answer's leading blanks: transformers
    # trains it.
    for case in CASES.keys() - {"line ends", "indented", "blanks"}:
        needs, messages = CASES[case]
        if needs in template.refuses:
            continue
        options = {"tools": tools_of(case), "chat_template": marked}
        plain = rendered_text(tokenizer, messages, options["tools"])
        assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == plain
        theirs = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        ours = renderer.render(record_of(messages, options["tools"]))
        assert ours.tokens.tolist() == theirs["input_ids"]
        assert ours.mask.astype(int).tolist() == theirs["assistant_masks"], case
        compared += 1
    assert compared >= 9


# Messages that say whether they are trained


def trained_runs(record: Record, **options: Any) -> list[str]:
    renderer = Renderer(smollm2(), **({"mask_prompt": True, "max_seq_length": 4096} | options))
    return [
        text.removesuffix("<|im_end|>")
        for kind, text in renderer.explain(record).runs()
        if kind == "trained"
    ]


@pytest.mark.parametrize("key", ["weight", "loss_weight", "train"])
@pytest.mark.parametrize("kind", [int, float, bool])
def test_answer_of_weight_0_is_not_trained(key: str, kind: Callable[[int], Any]) -> None:
    off, on = {key: kind(0)}, {key: kind(1)}
    messages = [
        user("a", **off),
        answer("one", **off),
        user("b"),
        answer("two", **on),
        user("c"),
        answer("three"),
    ]
    assert trained_runs(record_of(messages)) == ["two", "three"]
    assert trained_runs(record_of(messages), train_on="last") == ["three"]
    # The last answer is meant, and it is not trained: not another one in its place.
    assert (
        trained_runs(record_of([*messages, user("d"), answer("four", **off)]), train_on="last")
        == []
    )
    # Without a mask all is trained.
    (everything,) = trained_runs(record_of(messages), mask_prompt=False)
    assert "one" in everything
    assert "three" in everything
    completion = {
        "prompt": [user("a")],
        "completion": [answer("one", **off), user("b"), answer("two", **on)],
    }
    assert trained_runs(parse_record(completion, ColumnNames(), source="", line=1)) == ["two"]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (
            [user("a"), answer("b", weight=0.5)],
            r'messages\[1\]: "weight" is 0.5, it must be 0 or 1',
        ),
        ([user("a"), answer("b", loss_weight=2)], r'"loss_weight" is 2'),
        ([user("a"), answer("b", train="no")], r'"train" is \'no\''),
        ([user("a"), answer("b", weight=-1.0)], r'"weight" is -1.0'),
        ([user("a"), answer("b", weight=[0])], r'"weight" is \[0\]'),
        (
            [user("a"), answer("b", weight=1, train=False)],
            r"messages\[1\]: .* contradict each other",
        ),
        (
            [user("a", weight=1), answer("b")],
            r'messages\[0\]: "weight" asks for a message of role user',
        ),
    ],
)
def test_weights_that_cannot_be_honoured_are_refused(
    messages: list[dict[str, Any]], complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        trained_runs(record_of(messages))
    assert caught.value.where == "train.jsonl:7"
    assert caught.value.hint


def test_real_data_with_weights() -> None:
    path = DATA / "formats" / "v1_sft_demo.jsonl"
    if not path.exists():
        pytest.skip("no test data: set ALLHANDS_TEST_DATA")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:50]]
    for line, row in enumerate(rows, start=1):
        assert row["messages"][1]["loss_weight"] == 1.0
        words = row["messages"][1]["content"][0]["value"]
        assert trained_runs(parse_record(row, ColumnNames(), source="f", line=line)) == [words]


def test_conversation_without_an_answer_trains_nothing() -> None:
    assert trained_runs(Record("chat", messages=(system("Be kind."),))) == []
    assert (
        trained_runs(Record("chat", messages=(system("Be kind."), system("Be brief."), user("Hi"))))
        == []
    )
