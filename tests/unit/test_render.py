"""Loss masks and chat rendering, checked token by token on real and hand-made templates.

The reference is independent of the renderer: the trained runs of tokens are decoded and compared
with strings written out by hand, with the template's own ``{% generation %}`` mask, and with
mlx_lm's data sets.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import (
    CACHE,
    CHATML,
    DATA,
    GEMMA,
    LLAMA2,
    THINKING,
    WORDS,
    ZEPHYR,
    from_npm,
    load_folder,
    qwen25,
    tiny,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allhands.data.records import ColumnNames, Record, parse_record
from allhands.data.render import Rendered, Renderer
from allhands.errors import ConfigError, DataError, ModelError

# name: (tokenizer, end-of-turn, template trims, takes a system message)
TEMPLATES: dict[str, tuple[Any, str, bool, bool]] = {
    "qwen2.5": (qwen25, "<|im_end|>", False, True),
    "qwen3": (lambda: from_npm("qwen3"), "<|im_end|>", False, True),
    "llama3": (lambda: from_npm("llama3"), "<|eot_id|>", True, True),
    "mistral-nemo": (lambda: from_npm("mistral_nemo"), "</s>", False, True),
    "gemma2": (lambda: from_npm("gemma2", GEMMA), "<end_of_turn>", True, False),
    "chatml": (lambda: tiny(CHATML), "<|im_end|>", False, True),
    "chatml-words": (lambda: tiny(CHATML, "words"), "<|im_end|>", False, True),
    "gemma": (lambda: tiny(GEMMA), "<end_of_turn>", True, False),
    "thinking": (lambda: tiny(THINKING), "</s>", False, True),
    "zephyr": (lambda: tiny(ZEPHYR), "</s>", False, True),
    "plain-words": (lambda: tiny(WORDS), "\n### End", False, True),
}
each_template = pytest.mark.parametrize("name", TEMPLATES)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **extra}


def chat(*messages: dict[str, Any], tools: list[Any] | None = None) -> Record:
    return Record("chat", messages=messages, tools=tools, source="train.jsonl", line=7)


def render(tokenizer: Any, record: Record, **options: Any) -> Rendered:
    options = {"mask_prompt": True, "max_seq_length": 4096} | options
    return Renderer(tokenizer, **options).render(record)


def runs(tokenizer: Any, rendered: Rendered) -> list[str]:
    """The decoded runs of neighbouring trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rendered.mask.view(np.int8), [0]])))
    return [
        tokenizer.decode(rendered.tokens[a:b].tolist(), skip_special_tokens=False)
        for a, b in edges.reshape(-1, 2)
    ]


def expected(name: str, contents: list[str]) -> list[str]:
    """What must be trained, written down per template."""
    _, end, trims, _ = TEMPLATES[name]
    parts = [(content.strip() if trims else content) + end for content in contents]
    if (
        name == "qwen3"
    ):  # it writes an empty thinking block into the last answer, which the model has to learn
        parts[-1] = "<think>\n\n</think>\n\n" + parts[-1]
    return parts


CONVERSATIONS = {
    "one turn": [user("How are you?"), answer("Ahoy!")],
    "three turns": [
        *(
            user("Hi"),
            answer("Hi"),
            user("Hi"),
            answer("The answer is Hi"),
            user("assistant"),
            answer("user"),
        )
    ],
    "unicode": [
        *(user("日本語 🏴‍☠️?"), answer("Ærlig talt: 🏴‍☠️ é ü 漢字\n\n🦜")),
        *(user("naïve"), answer("🦜🦜 “quoted” — done")),
    ],
    "empty lines": [user("a\n\n\nb\n"), answer("one\n\n\ntwo\n \nthree"), user("\n"), answer("x")],
    "blanks": [
        user("  a  "),
        answer("  led by blanks, and trailed  "),
        user(" "),
        answer("tail\n\n"),
    ],
    "looks like a template": [
        *(
            user("say assistant\n"),
            answer("user\nassistant\n### assistant:\n[INST] hi [/INST] {{ x }} <b>"),
        ),
        *(user("<|im_start|>assistant\nfake<|im_end|>"), answer("real")),
    ],
}


@each_template
@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_trained_runs_are_the_answers_and_nothing_else(
    name: str, system: bool, conversation: str
) -> None:
    make, _, _, takes_system = TEMPLATES[name]
    messages = CONVERSATIONS[conversation]
    if system and not takes_system:
        pytest.skip("the template takes no system message")
    if name == "chatml-words" and conversation in ("unicode", "empty lines"):
        pytest.skip("this small vocabulary lacks the characters, or merges line breaks")
    if system:
        messages = [{"role": "system", "content": "Talk like\n a pirate."}, *messages]
    tokenizer = make()
    rendered = render(tokenizer, chat(*messages))
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    assert runs(tokenizer, rendered) == expected(name, contents)
    assert rendered.tokens.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert rendered.tokens.dtype == np.int32
    assert not rendered.mask[0]
    last = render(tokenizer, chat(*messages), train_on="last")
    assert runs(tokenizer, last) == expected(name, contents)[-1:]


@each_template
def test_completion_is_rendered_as_one_turn(name: str) -> None:
    tokenizer = TEMPLATES[name][0]()
    record = Record("completion", prompt="How are you?", completion="Ahoy matey!")
    rendered = render(tokenizer, record)
    assert runs(tokenizer, rendered) == expected(name, ["Ahoy matey!"])
    messages = [user("How are you?"), answer("Ahoy matey!")]
    assert rendered.tokens.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)


@each_template
def test_without_mask_every_token_but_the_first_is_trained(name: str) -> None:
    tokenizer = TEMPLATES[name][0]()
    for options in ({"mask_prompt": False}, {"mask_prompt": True, "train_on": "all"}):
        rendered = render(tokenizer, chat(user("Hi"), answer("Ahoy!")), **options)
        assert rendered.mask.tolist() == [False] + [True] * (len(rendered.tokens) - 1)


def test_llama2_answer_keeps_its_first_word_piece() -> None:
    tokenizer = tiny(LLAMA2, "words")
    rendered = render(
        tokenizer, chat(user("Hi"), answer("Ahoy matey"), user("How"), answer("The answer"))
    )
    # The blank before the first word belongs to its token, the one before </s> is a token the model
    # writes.
    trained = tokenizer.convert_ids_to_tokens(rendered.tokens[rendered.mask])
    assert "".join(trained) == "▁Ahoy▁matey▁</s>▁The▁answer▁</s>"


def test_token_across_the_header_that_is_only_blank_is_not_trained() -> None:
    tokenizer = qwen25()
    rendered = render(tokenizer, chat(user("Hi"), answer("\nAhoy")))
    # "\n\n" is one token, half header, half answer; at inference the header's "\n" is given on its
    # own.
    assert "\n\n" in [tokenizer.decode([token]) for token in rendered.tokens]
    assert runs(tokenizer, rendered) == ["Ahoy<|im_end|>"]


# The same three ways to write a chat (ChatML; trimmed, Gemma's; no header, Mistral's), with answers
# marked.
GENERATION = {
    "chatml": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "trimmed": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ '<start_of_turn>model\n' }}"
        "{% generation %}{{ m['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ '<start_of_turn>user\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "headerless": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
        "{% else %}{{ '<|User|>' + m['content'] + '<|Assistant|>' }}{% endif %}{% endfor %}"
    ),
}
TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Co", "Cn"]) | st.sampled_from("\n  <|>🏴é#"),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("template", GENERATION)
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
@example(
    turns=[("<|im_start|>assistant\n", "<|im_end|>"), ("a", "<|im_start|>assistant\nb<|im_end|>\n")]
)
@example(turns=[("Hi", "Hi"), ("Hi", "Hi")])
def test_agrees_with_the_templates_own_generation_mask(
    template: str, turns: list[tuple[str, str]]
) -> None:
    tokenizer = tiny(GENERATION[template])
    messages = [m for question, reply in turns for m in (user(question), answer("r" + reply))]
    reference = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    rendered = render(tokenizer, chat(*messages))
    assert rendered.tokens.tolist() == reference["input_ids"]
    assert rendered.mask.astype(int).tolist() == reference["assistant_masks"]


# Thinking


def test_qwen3_drops_earlier_thinking_and_trains_the_last() -> None:
    tokenizer = from_npm("qwen3")
    messages = [
        *(user("Hi"), answer("<think>\nolder thought\n</think>\n\nAhoy")),
        *(user("How?"), answer("<think>\nhmm\n</think>\n\nFine")),
    ]
    rendered = render(tokenizer, chat(*messages))
    assert runs(tokenizer, rendered) == [
        "Ahoy<|im_end|>",
        "<think>\nhmm\n</think>\n\nFine<|im_end|>",
    ]
    reasoning = answer("Fine", reasoning_content="hmm")
    rendered = render(tokenizer, chat(user("How?"), reasoning))
    assert runs(tokenizer, rendered) == ["<think>\nhmm\n</think>\n\nFine<|im_end|>"]


def test_thinking_that_the_template_drops_is_not_trained() -> None:
    tokenizer = tiny(THINKING)
    rendered = render(tokenizer, chat(user("Hi"), answer("<think>Let me see</think>Ahoy")))
    assert runs(tokenizer, rendered) == ["Ahoy</s>"]


# Tools

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather", "parameters": {"type": "object"}},
}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "id": "abcdefghi",
        "function": {"name": name, "arguments": arguments},
    }


def tool_chat(arguments: Any, **options: Any) -> Record:
    return chat(
        *([{"role": "system", "content": "Help."}] if options.get("system", True) else []),
        user("Weather in Oslo?"),
        answer(options.get("words", ""), tool_calls=[call("weather", arguments)]),
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "abcdefghi"},
        answer("It rains."),
        user("And Rome?"),
        answer("No idea."),
        tools=[TOOL],
    )


@pytest.mark.parametrize(
    "arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["object", "string"]
)
@pytest.mark.parametrize("words", ["", "Let me look."])
def test_qwen_tool_calls_are_trained(arguments: Any, words: str) -> None:
    called = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    )
    first = f"{words}\n{called}" if words else called
    record = tool_chat(arguments, words=words)
    assert runs(qwen25(), render(qwen25(), record)) == [
        first,
        "It rains.<|im_end|>",
        "No idea.<|im_end|>",
    ]
    qwen3 = from_npm("qwen3")
    assert runs(qwen3, render(qwen3, record)) == [
        first,
        "It rains.<|im_end|>",
        "<think>\n\n</think>\n\nNo idea.<|im_end|>",
    ]


def test_two_tool_calls_in_one_answer_at_the_end() -> None:
    record = chat(
        user("Both?"),
        answer("", tool_calls=[call("weather", {}), call("weather", {"city": "x"})]),
        tools=[TOOL],
    )
    assert runs(qwen25(), render(qwen25(), record)) == [
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call><|im_end|>'
    ]


@pytest.mark.parametrize("system", [False, True])
def test_mistral_tool_calls_are_trained(system: bool) -> None:
    tokenizer = from_npm("mistral_nemo")
    rendered = render(tokenizer, tool_chat('{"city": "Oslo"}', system=system))
    assert runs(tokenizer, rendered) == [
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]</s>',
        "It rains.</s>",
        "No idea.</s>",
    ]


def test_answer_without_header_after_a_tool_does_not_reach_back_to_the_last_header() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] + '<|Assistant|>' }}"
        "{% elif m['role'] == 'tool' %}{{ '<tool>' + m['content'] + '</tool>' }}"
        "{% else %}{% for c in m['tool_calls'] %}{{ c['function']['name'] + '()' }}{% endfor %}"
        "{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    )
    # The header is written after each question only, or (second form) before each answer to a
    # question.
    asked = (
        template.replace(" + '<|Assistant|>'", "").replace(
            "{% else %}",
            "{% else %}{% if messages[loop.index0 - 1]['role'] == 'user' %}{{ '<|Assistant|>' }}{% endif %}",
        )
        + "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
    )
    for form in (template, asked):
        trained = runs(tiny(form), render(tiny(form), tool_chat({}, system=False)))
        assert trained == ["weather()</s>", "It rains.</s>", "No idea.</s>"]


def test_template_that_drops_tool_calls_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        render(tiny(CHATML), chat(user("Hi"), answer("x", tool_calls=[call("weather", {})])))
    assert caught.value.code == "answer-not-located"
    assert caught.value.where == "train.jsonl:7"


# Against mlx_lm


def test_older_spellings_give_the_tokens_that_mlx_lm_has_for_the_newer() -> None:
    datasets = pytest.importorskip("mlx_lm.tuner.datasets")
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    ask, end = user("Is the ferry running?"), answer("It runs.")
    function = {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    called = {"name": "weather", "arguments": {"city": "Oslo"}}
    result = {"role": "tool", "name": "weather", "content": "rain"}
    calling = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": called}],
    }
    new = {
        "messages": [ask, calling, result, end],
        "tools": [{"type": "function", "function": function}],
    }
    old_call = {
        "role": "assistant",
        "content": None,
        "function_call": {**called, "arguments": '{"city": "Oslo"}'},
    }
    old = {
        "messages": [ask, old_call, {**result, "role": "function"}, end],
        "functions": [function],
    }
    padded = [
        dict.fromkeys(("role", "content", "name", "tool_calls")) | message
        for message in new["messages"]
    ]
    rows = [
        old,
        {"messages": padded, "tools": new["tools"]},
        {key: json.dumps(value) for key, value in new.items()},
    ]
    for tokenizer in (qwen25(), from_npm("qwen3")):
        theirs, _ = datasets.ChatDataset(
            [new], TokenizerWrapper(tokenizer), mask_prompt=False
        ).process(new)
        for row in rows:
            record = parse_record(row, ColumnNames(), source="f", line=1)
            assert render(tokenizer, record, mask_prompt=False).tokens.tolist() == list(theirs)


def test_tokens_and_targets_of_mlx_lm() -> None:
    datasets = pytest.importorskip("mlx_lm.tuner.datasets")
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    tokenizer = TokenizerWrapper(qwen25())
    path = DATA / "pirate-dolly" / "valid.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:40]]
    newline = tokenizer.encode("\n")
    theirs = datasets.ChatDataset(rows, tokenizer, mask_prompt=True)
    for row in rows:
        record = parse_record(row, ColumnNames(), source="valid.jsonl", line=1)
        tokens, offset = theirs.process(row)
        rendered = render(tokenizer, record)
        assert rendered.tokens.tolist() == tokens
        # The line break after the last end-of-turn token: mlx_lm trains it, nobody ever reads it.
        assert tokens[-1:] == newline
        assert np.flatnonzero(rendered.mask).tolist() == list(range(offset, len(tokens) - 1))
    row = {"prompt": "Hi", "completion": "Ahoy"}
    tokens, _ = datasets.CompletionsDataset(
        [row], tokenizer, "prompt", "completion", False
    ).process(row)
    record = parse_record(row, ColumnNames(), source="", line=1)
    assert render(tokenizer, record, mask_prompt=False).tokens.tolist() == tokens


@pytest.mark.parametrize("make", [qwen25, lambda: from_npm("gemma2"), lambda: tiny(None)])
def test_text_is_encoded_with_one_bos_and_one_eos(make: Any) -> None:
    datasets = pytest.importorskip("mlx_lm.tuner.datasets")
    tokenizer = make()
    row = {"text": "Once upon a time"}
    reference, _ = datasets.TextDataset([row], tokenizer).process(row)
    bos = tokenizer.bos_token or ""
    for text in (row["text"], bos + row["text"], row["text"] + tokenizer.eos_token):
        rendered = render(tokenizer, Record("text", text=text), mask_prompt=False)
        if not (text.startswith(bos) and reference[0] != tokenizer.bos_token_id):
            assert rendered.tokens.tolist() == reference
        assert rendered.mask.sum() == len(rendered.tokens) - 1


def test_completion_without_chat_template() -> None:
    tokenizer = from_npm("gemma2")
    tokenizer = (
        tokenizer if tokenizer.chat_template is None else load_folder(CACHE / "tokenizer-gemma2")
    )
    record = Record("completion", prompt="Question: 1+1?\nAnswer:", completion=" two 🦜")
    rendered = render(tokenizer, record)
    assert runs(tokenizer, rendered) == [" two 🦜<eos>"]
    whole = [*tokenizer.encode("Question: 1+1?\nAnswer: two 🦜"), tokenizer.eos_token_id]
    assert rendered.tokens.tolist() == whole
    assert render(tokenizer, record, mask_prompt=False).tokens.tolist() == whole


def test_blank_at_the_end_is_trained_where_offsets_leave_blanks_out() -> None:
    tokenizer = tiny(None)
    record = Record("completion", prompt="How ", completion=" are 🦜 \n you  ")
    text = record.prompt + record.completion
    assert tokenizer.backend_tokenizer.encode(text).offsets[-1] == (len(text), len(text))
    assert runs(tokenizer, render(tokenizer, record)) == [" are 🦜 \n you  </s>"]


def test_completion_as_messages_trains_the_completion_only() -> None:
    tokenizer = tiny(CHATML)
    row = {"prompt": [user("a"), answer("not this"), user("b")], "completion": [answer("but this")]}
    record = parse_record(row, ColumnNames(), source="f", line=1)
    assert runs(tokenizer, render(tokenizer, record)) == ["but this<|im_end|>"]


# Cutting and refusing


def test_truncation_keeps_the_head_and_counts_what_is_cut() -> None:
    tokenizer = tiny(CHATML)
    record = chat(user("How are you today?"), answer("Ahoy matey! The answer is 42."))
    whole = render(tokenizer, record)
    cut = render(tokenizer, record, max_seq_length=len(whole.tokens) - 5)
    assert cut.truncated == 5
    assert cut.tokens.tolist() == whole.tokens[:-5].tolist()
    assert cut.mask.tolist() == whole.mask[:-5].tolist()
    gone = render(tokenizer, record, max_seq_length=8)
    assert len(gone.tokens) == 8
    assert not gone.mask.any()


def test_refusals_name_the_record_and_the_remedy() -> None:
    gemma, bare = tiny(GEMMA), tiny(None)
    system = chat({"role": "system", "content": "s"}, user("u"), answer("a"))
    with pytest.raises(DataError, match="System role not supported") as caught:
        render(gemma, system)
    assert caught.value.where == "train.jsonl:7"
    with pytest.raises(ModelError) as lacking:
        render(bare, chat(user("u"), answer("a")))
    assert lacking.value.code == "chat-template-missing"
    assert lacking.value.where == "train.jsonl:7"
    assert "text" in (lacking.value.hint or "")
    # A text has no prompt: all of it is trained, whatever is masked elsewhere.
    for train_on in ("assistant", "last", "all"):
        assert render(bare, Record("text", text="t"), train_on=train_on).mask.tolist() == [
            False,
            True,
        ]
    with pytest.raises(ConfigError, match="below 2"):
        Renderer(bare, mask_prompt=False, max_seq_length=1)


def test_template_that_repeats_an_answer_is_refused() -> None:
    twice = "{% for m in messages %}{{ m['content'] + '|' + m['content'] + '</s>' }}{% endfor %}"
    with pytest.raises(DataError) as caught:
        render(tiny(twice), chat(user("u"), answer("a")))
    assert caught.value.code == "answer-not-located"


def test_slow_tokenizer_cannot_mask() -> None:
    class Slow:
        bos_token_id, eos_token_id, eos_token, chat_template = None, 2, "</s>", CHATML

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [ord(character) for character in text]

        def apply_chat_template(self, conversation: list[Any], **options: Any) -> str:
            return tiny(CHATML).apply_chat_template(conversation, **options)

    record = chat(user("u"), answer("a"))
    assert render(Slow(), record, mask_prompt=False).mask.any()
    with pytest.raises(ModelError) as caught:
        render(Slow(), record)
    assert caught.value.code == "tokenizer-without-offsets"
