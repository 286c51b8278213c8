"""What the renderer tells about an example, piece by piece, and about a chat template."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
from chat_tokenizers import LLAMA2, from_npm, tiny
from test_masks import CASES, TEMPLATES, answer, each_template, record_of, rendered_text, squeezed, tools_of, user

from allhands.data.explained import TemplateFacts
from allhands.data.records import Record
from allhands.data.render import Renderer
from allhands.errors import ModelError


def without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", squeezed(text)) if not unicodedata.combining(c))


@each_template
def test_pieces_are_the_text_of_the_tokens(name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = template.make()
    for case, (needs, messages) in CASES.items():
        if needs in template.refuses:
            continue
        record, text = record_of(messages, tools_of(case)), rendered_text(tokenizer, messages, tools_of(case))
        whole = Renderer(tokenizer, mask_prompt=True, max_seq_length=4096)
        explained, rendered = whole.explain(record), whole.render(record)
        assert explained.text == text
        assert (explained.tokens.tolist(), explained.mask.tolist()) == (
            rendered.tokens.tolist(),
            rendered.mask.tolist(),
        )
        assert [trained for _, trained in explained.pieces] == rendered.mask.tolist()
        assert (explained.truncated, explained.cut) == (0, "")
        for token, (piece, _) in zip(rendered.tokens.tolist(), explained.pieces, strict=True):
            alone = tokenizer.decode([token], skip_special_tokens=False)
            # Parts of a character decode to a replacement; SentencePiece drops a leading blank; where the tokenizer
            # composes characters, an accent of its own may show with the next token.
            assert "\ufffd" in alone or without_accents(alone) == without_accents(piece), (case, piece)
        assert "".join(piece for piece, _ in explained.runs()) == text
        assert all(a[1] != b[1] for a, b in pairwise(explained.runs()))
        limit = len(rendered.tokens) - 3
        cut = Renderer(tokenizer, mask_prompt=True, max_seq_length=limit).explain(record)
        assert cut.pieces == explained.pieces[:limit]
        assert cut.truncated == 3
        assert cut.cut == "".join(piece for piece, _ in explained.pieces[limit:])
        assert cut.text == text


def test_pieces_of_text_without_a_template() -> None:
    gemma = from_npm("gemma2")
    renderer = Renderer(gemma, mask_prompt=False, max_seq_length=64)
    explained = renderer.explain(Record("text", text="Once upon 🦜"))
    assert explained.pieces[0] == ("<bos>", False)
    assert explained.pieces[-1] == ("<eos>", True)
    assert explained.text == "<bos>Once upon 🦜<eos>"
    bare = Renderer(tiny(None), mask_prompt=True, max_seq_length=64)
    explained = bare.explain(Record("completion", prompt="How ", completion="are 🦜 you </s> "))
    assert explained.runs() == [("How", False), (" are 🦜 you </s> </s>", True)]
    assert explained.special_text == ("</s>",)
    with pytest.raises(ModelError, match="no chat template"):
        bare.explain(Record("chat", messages=(user("a"), answer("b"))))


FACTS = {
    # system, tools, tool_calls, header, end_of_turn, is_eos, keeps_blanks, two_bos
    "qwen2.5": ("taken", "taken", "taken", "<|im_start|>assistant\n", "<|im_end|>", True, True, False),
    "qwen3": ("taken", "taken", "taken", "<|im_start|>assistant\n", "<|im_end|>", True, True, False),
    "smollm2": ("taken", "dropped", "dropped", "<|im_start|>assistant\n", "<|im_end|>", True, True, False),
    # Its template asks for an answer even where it is not told to.
    "llama3": ("taken", "dropped", "dropped", "", "<|eot_id|>", False, False, False),
    "llama3-asked": (
        *("taken", "dropped", "dropped", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        *(False, False, False),
    ),
    # It writes the system message into the last question only, and a conversation to train on ends in an answer.
    "mistral-nemo": ("dropped", "taken", "taken", "", "</s>", True, True, True),
    "gemma2": ("rejected", "dropped", "dropped", "<start_of_turn>model\n", "<end_of_turn>", False, False, True),
}


@each_template
def test_facts_of_real_templates(name: str) -> None:
    tokenizer = TEMPLATES[name].make()
    facts = Renderer(tokenizer, mask_prompt=False, max_seq_length=64).template_facts()
    assert facts.present
    assert facts.end_of_turn_trained
    shown = (facts.system, facts.tools, facts.tool_calls, facts.header, facts.end_of_turn)
    assert (*shown, facts.end_of_turn_is_eos, facts.keeps_blanks, facts.two_bos) == FACTS[name]
    assert facts.end_of_turn == TEMPLATES[name].end


def test_facts_of_made_up_templates() -> None:
    def facts(template: str | None) -> TemplateFacts:
        return Renderer(tiny(template), mask_prompt=True, max_seq_length=64).template_facts()

    assert facts(None) == TemplateFacts(present=False)
    endless = facts("{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}")
    assert (endless.end_of_turn, endless.end_of_turn_trained) == ("", False)
    marked = "{% for m in messages %}{%- generation -%}{{ m['content'] + '</s>' }}{% endgeneration %}{% endfor %}"
    assert facts(marked).marks_answers
    assert facts("{{ raise_exception('no') }}").system == "rejected"
    assert facts(LLAMA2).end_of_turn_trained
