"""Token sets: what is kept, what is dropped and reported, and what the arrays say."""

from __future__ import annotations

import numpy as np
import pytest

from allhands.data.records import Record
from allhands.data.render import Rendered
from allhands.data.tokens import TokenSet, build_token_set
from allhands.errors import DataError


class LettersRenderer:
    """One token a letter; the capital letters are trained; 5 letters at most."""

    def render(self, record: Record) -> Rendered:
        text = record.text or ""
        tokens = np.array([ord(letter) for letter in text], np.int32)
        mask = np.array([i > 0 and letter.isupper() for i, letter in enumerate(text)], np.bool_)
        return Rendered(tokens[:5], mask[:5], max(0, len(text) - 5))


def records(*texts: str) -> list[Record]:
    return [Record("text", text=text, source="train.jsonl", line=n) for n, text in enumerate(texts, start=1)]


def build(*texts: str):
    return build_token_set(records(*texts), LettersRenderer())  # type: ignore[arg-type]


def test_examples_and_numbers() -> None:
    tokens, report = build("abC", "aaaaaaaaB", "A", "aBCDEFG", "aB")
    assert tokens.tokens.tobytes().decode("utf-32-le") == "abCaBCDEaB"
    assert tokens.offsets.tolist() == [0, 3, 8, 10]
    assert tokens.lengths.tolist() == [3, 5, 2]
    assert tokens.num_targets.tolist() == [1, 4, 1]
    assert len(tokens) == tokens.num_examples == 3
    ids, mask = tokens.example(1)
    assert "".join(map(chr, ids)) == "aBCDE"
    assert mask.tolist() == [False, True, True, True, True]
    # Both all-masked ones are left out: the cut one and the one with nothing but its first token.
    assert report.dropped == ("train.jsonl:2", "train.jsonl:3")
    assert (report.num_examples, report.num_tokens, report.num_trained_tokens) == (3, 10, 6)
    assert (report.num_truncated, report.num_truncated_tokens) == (1, 2)


def test_progress_is_reported_after_each_record() -> None:
    seen: list[int] = []
    build_token_set(records("aB", "a", "aB"), LettersRenderer(), report=seen.append)  # type: ignore[arg-type]
    assert seen == [1, 2, 3]


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(DataError, match="none of the 2 examples") as caught:
        build("aaa", "bbbbbbbbB")
    assert caught.value.where == "train.jsonl:1"
    assert "--max-seq-length" in (caught.value.hint or "")
    with pytest.raises(DataError, match="none of the 0 examples"):
        build()


def make(tokens: list[int], mask: list[int], offsets: list[int]) -> TokenSet:
    return TokenSet(np.array(tokens, np.int32), np.array(mask, np.bool_), np.array(offsets, np.int64))


def test_fingerprint_is_of_all_three_arrays() -> None:
    base = make([1, 2, 3, 4], [0, 1, 0, 1], [0, 2, 4])
    assert base.fingerprint() == make([1, 2, 3, 4], [0, 1, 0, 1], [0, 2, 4]).fingerprint()
    assert len(base.fingerprint()) == 64
    others = [
        make([1, 2, 3, 5], [0, 1, 0, 1], [0, 2, 4]),
        make([1, 2, 3, 4], [0, 1, 1, 1], [0, 2, 4]),
        make([1, 2, 3, 4], [0, 1, 0, 1], [0, 1, 4]),
    ]
    assert len({base.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_targets_of_an_empty_example_are_counted_as_none() -> None:
    assert make([1, 2], [0, 1], [0, 0, 2]).num_targets.tolist() == [0, 1]
