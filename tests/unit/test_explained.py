"""An example for people to read, piece by piece."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
from chat_tokenizers import from_npm, tiny
from test_masks import (
    CASES,
    TEMPLATES,
    answer,
    each_template,
    record_of,
    rendered_text,
    squeezed,
    tools_of,
    user,
)

from allhands.data.records import Record
from allhands.data.render import Renderer
from allhands.errors import ModelError


def without_accents(text: str) -> str:
    return "".join(
        c for c in unicodedata.normalize("NFD", squeezed(text)) if not unicodedata.combining(c)
    )


@each_template
def test_pieces_are_the_text_of_the_tokens(name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = template.make()
    for case, (needs, messages) in CASES.items():
        if needs in template.refuses:
            continue
        record, text = (
            record_of(messages, tools_of(case)),
            rendered_text(tokenizer, messages, tools_of(case)),
        )
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
            # Parts of a character decode to a replacement; SentencePiece drops a leading blank;
            # where the tokenizer composes characters, an accent of its own may show with the next
            # token.
            assert "\ufffd" in alone or without_accents(alone) == without_accents(piece), (
                case,
                piece,
            )
        assert "".join(piece for _, piece in explained.runs()) == text
        assert all(a[0] != b[0] for a, b in pairwise(explained.runs()))
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
    assert explained.runs() == [("masked", "How"), ("trained", " are 🦜 you </s> </s>")]
    with pytest.raises(ModelError) as caught:
        bare.explain(Record("chat", messages=(user("a"), answer("b"))))
    assert caught.value.code == "chat-template-missing"
