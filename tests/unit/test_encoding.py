"""Many records at once, and the ways that are quicker: the same result as the careful way, one by
one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from chat_tokenizers import CHATML, GEMMA, LLAMA2, THINKING, WORDS, ZEPHYR, from_npm, qwen25, tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_render import CONVERSATIONS, GENERATION, TEMPLATES, TEXT, answer, chat, render, user
from transformers import PreTrainedTokenizerFast

from allhands.data.encoding import Draft, Encoded, Encoder, mask_of
from allhands.data.records import Record
from allhands.data.render import ChatTemplate, Rendered, Renderer
from allhands.errors import AllhandsError, DataError

MADE = [CHATML, GEMMA, LLAMA2, THINKING, WORDS, ZEPHYR, *GENERATION.values()]


@settings(max_examples=150, deadline=None)
@given(
    template=st.sampled_from(MADE),
    kind=st.sampled_from(["bytes", "words"]),
    turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
)
@example(
    CHATML,
    "bytes",
    [("a", "<|im_end|>\n<|im_start|>assistant\n"), ("b", "<|im_end|>\n<|im_start|>assistant\n")],
)
@example(CHATML, "bytes", [("a<|im_end|>\n<|im_start|>assistant\nrb<|im_end|>", "b")])
@example(LLAMA2, "words", [("a", " b "), ("c [/INST]", " [/INST] d")])
@example(THINKING, "bytes", [("a", "<think>b</think>c"), ("d", "</think>")])
@example(
    ZEPHYR, "bytes", [("<|assistant|>\n", "<|assistant|>\na</s>\n<|assistant|>\nb"), ("a", "b")]
)
def test_shortcuts_give_what_the_careful_way_gives(
    template: str, kind: str, turns: list[tuple[str, str]]
) -> None:
    tokenizer = tiny(template, kind)
    messages = [m for question, reply in turns for m in (user(question), answer("r" + reply))]
    finder = ChatTemplate(tokenizer).answers
    text, wanted = (
        tokenizer.apply_chat_template(messages, tokenize=False),
        range(1, len(messages), 2),
    )
    assert finder.pattern is not None
    known = finder.pattern.spans(text, messages)
    try:
        spans = finder.careful_spans(text, messages, None, wanted, {})
    except DataError:
        assert known == {}
        spans = ()
    assert list(known.values()) in ([], list(spans))
    draft = Draft(text, framed=False, spans=spans)
    careful = Encoder(tokenizer).encode(draft, offsets=True)
    (quick,) = Encoder(tokenizer).encode_many([draft], offsets=True)
    assert isinstance(quick, Encoded)
    assert (
        quick.tokens.tolist()
        == careful.tokens.tolist()
        == tokenizer.encode(text, add_special_tokens=False)
    )
    assert mask_of(draft, quick, None).tolist() == mask_of(draft, careful, None).tolist()


def test_most_conversations_take_the_shortcut() -> None:
    for name, (make, *_) in TEMPLATES.items():
        finder = ChatTemplate(make()).answers
        conversation = CONVERSATIONS["three turns"]
        text = make().apply_chat_template(conversation, tokenize=False)
        assert finder.pattern is not None, name
        assert len(finder.pattern.spans(text, conversation)) == 3, name


@pytest.mark.parametrize(
    "make", [qwen25, lambda: from_npm("gemma2", GEMMA), lambda: tiny(CHATML), lambda: tiny(None)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_many_at_once_are_what_they_are_one_by_one(make: Any, masked: bool) -> None:
    tokenizer = make()
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token
    texts = ["Once upon", bos + "a time", "the end" + eos, "cafe\u0301 🦜\n\n ", " "]
    kinds = [
        *(Record("text", text=text, source="t", line=line) for line, text in enumerate(texts)),
        *(
            Record("completion", prompt="Q: ", completion=text, source="c", line=7)
            for text in texts[:3]
        ),
        chat(user("Hi"), answer("cafe\u0301"), user("Hi 🦜"), answer("Hello")),
        Record(
            "chat", messages=({"role": "system", "content": "s"}, answer("a")), source="bad", line=3
        ),
        Record("chat", messages=(user("u"), answer("half \ud83c")), source="half", line=4),
    ]
    records = kinds * 60  # more than one batch
    renderer = Renderer(tokenizer, mask_prompt=masked, max_seq_length=8)
    alone: list[Any] = []
    for record in kinds:
        try:
            alone.append(renderer.render(record))
        except AllhandsError as error:
            alone.append(error)
    results = renderer.render_many(records)
    assert len(results) == len(records) == 660
    for got, want, record in zip(results, alone * 60, records, strict=True):
        assert type(got) is type(want)
        if isinstance(got, Rendered):
            assert (got.tokens.tolist(), got.mask.tolist(), got.truncated) == (
                want.tokens.tolist(),
                want.mask.tolist(),
                want.truncated,
            )
        else:
            assert str(got) == str(want)
            assert got.where == record.where
    if not masked:
        for text, got in zip(texts, results[:5], strict=True):
            plain = tokenizer.encode(
                text.removeprefix(bos)
                if tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
                else text
            )
            whole = [
                *plain,
                *([] if plain[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]),
            ]
            assert isinstance(got, Rendered)
            assert got.tokens.tolist() == whole[:8]
    assert renderer.render_many([]) == []


def test_tokenizer_that_cuts_or_pads_does_neither_here() -> None:
    tokenizer = copy.deepcopy(tiny(CHATML))
    record = chat(user("How are you today?"), answer("Ahoy matey!"))
    whole = render(tokenizer, record)
    tokenizer.backend_tokenizer.enable_truncation(max_length=5)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    assert render(tokenizer, record).tokens.tolist() == whole.tokens.tolist()


def test_tokenizer_with_an_encode_of_its_own_is_asked() -> None:
    class Own(PreTrainedTokenizerFast):
        def encode(self, text: str, **options: Any) -> list[int]:
            return [*super().encode(text, **options), 7]

    tokenizer = Own(tokenizer_object=tiny(None).backend_tokenizer, eos_token="</s>")
    assert 7 in render(tokenizer, Record("text", text="Ahoy"), mask_prompt=False).tokens.tolist()


def test_an_answer_that_spells_out_the_header_does_not_draw_a_later_one_to_it() -> None:
    # The header that this template asks with is what the first answer looks like; the careful way
    # is taken.
    messages = [user("a"), answer("<think>\nmore"), user("b"), answer("c</think>d")]
    tokenizer = tiny(THINKING)
    for train_on in ("assistant", "last"):
        renderer = Renderer(tokenizer, mask_prompt=True, max_seq_length=512, train_on=train_on)
        explained = renderer.explain(chat(*messages))
        runs = [text for kind, text in explained.runs() if kind == "trained"]
        assert runs == ["<think>\nmore</s>", "d</s>"][-1 if train_on == "last" else 0 :]
