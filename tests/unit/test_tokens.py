"""Token sets and packed rows, against a plain reading of the same lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data.loader import MicroBatch, collate, collate_share
from allhands.data.tokens import PackedRows, TokenSet, Window, joined_fingerprint, pack_mask
from allhands.runtime.sizing import Sizing

quick = settings(max_examples=60, deadline=None, database=None)
Example = tuple[list[int], list[bool]]


@st.composite
def examples(draw: st.DrawFn) -> list[Example]:
    """As the renderer makes them: two tokens or more, the first one no target, at least one target."""
    found: list[Example] = []
    for _ in range(draw(st.integers(1, 9))):
        ids = draw(st.lists(st.integers(1, 70_000), min_size=2, max_size=21))
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        mask[draw(st.integers(1, len(ids) - 1))] = True
        found.append((ids, mask))
    return found


def token_set(content: list[Example]) -> TokenSet:
    return TokenSet.of_examples(
        [(np.array(ids), np.array(mask, dtype=np.bool_)) for ids, mask in content]
    )


@quick
@given(examples())
def test_a_set_gives_back_what_it_was_made_of(content: list[Example]) -> None:
    tokens = token_set(content)
    assert len(tokens) == tokens.num_examples == len(content)
    assert [
        (ids.tolist(), mask.tolist()) for ids, mask in map(tokens.example, range(len(content)))
    ] == content
    assert tokens.lengths.tolist() == [len(ids) for ids, _ in content]
    assert tokens.num_targets.tolist() == [sum(mask) for _, mask in content]
    assert tokens.largest_token == max(max(ids) for ids, _ in content)
    assert tokens.mask.tolist() == [flag for _, mask in content for flag in mask]
    for i, (ids, mask) in enumerate(content):
        window = tokens.window(i)
        end = max(j for j, flag in enumerate(mask) if flag)
        assert window.inputs.tolist() == ids[:end]
        assert tokens.work[i] == end
        assert window.documents is None
        wanted = [(j - 1, ids[j]) for j, flag in enumerate(mask) if flag]
        assert list(zip(window.positions.tolist(), window.targets.tolist(), strict=True)) == wanted


@quick
@given(examples(), st.data())
def test_masks_of_any_stretch(content: list[Example], data: st.DataObject) -> None:
    tokens = token_set(content)
    start = data.draw(st.integers(0, len(tokens.tokens)))
    stop = data.draw(st.integers(start, len(tokens.tokens)))
    assert tokens.mask_of(start, stop).tolist() == tokens.mask.tolist()[start:stop]


def test_fingerprint_is_of_tokens_masks_and_borders() -> None:
    def make(tokens: list[int], mask: list[int], offsets: list[int]) -> str:
        arrays = (np.array(tokens, np.int32), np.array(mask, np.bool_), np.array(offsets, np.int64))
        return TokenSet.of(*arrays).fingerprint()

    base = make([1, 2, 3, 4], [0, 1, 0, 1], [0, 2, 4])
    assert base == make([1, 2, 3, 4], [0, 1, 0, 1], [0, 2, 4])
    assert len(base) == 64
    others = [
        make([1, 2, 3, 5], [0, 1, 0, 1], [0, 2, 4]),
        make([1, 2, 3, 4], [0, 1, 1, 1], [0, 2, 4]),
        make([1, 2, 3, 4], [0, 1, 0, 1], [0, 1, 4]),
    ]
    assert len({base, *others}) == 4
    assert joined_fingerprint(["a", "b"]) != joined_fingerprint(["ab"])
    assert pack_mask(
        np.array([True, False, False, False, False, False, False, False, True])
    ).tolist() == [1, 1]


def test_an_empty_set_is_a_set() -> None:
    empty = token_set([])
    assert (len(empty), empty.largest_token, empty.lengths.tolist(), empty.mask.tolist()) == (
        0,
        -1,
        [],
        [],
    )


# --- packed rows ----------------------------------------------------------------------------------


@quick
@given(examples(), st.integers(1, 30), st.integers(0, 50))
def test_joined_rows_predict_every_token_but_the_first_once(
    content: list[Example], block: int, epoch: int
) -> None:
    documents = [(ids, [False] + [True] * (len(ids) - 1)) for ids, _ in content]
    stream = [token for ids, _ in documents for token in ids]
    rows = PackedRows(token_set(documents), block, isolate=False)
    begin = rows.shift(epoch) % len(stream)
    stream = stream[begin:] + stream[:begin]
    windows = [rows.window(i, epoch) for i in range(len(rows))]
    assert [token for window in windows for token in window.inputs.tolist()] == stream[:-1]
    assert [token for window in windows for token in window.targets.tolist()] == stream[1:]
    for window, work in zip(windows, rows.work, strict=True):
        assert window.positions.tolist() == list(range(work))
        assert window.documents is None
    assert set(rows.work[:-1].tolist()) <= {block}
    assert 1 <= rows.work[-1] <= block


def test_no_row_of_an_epoch_begins_where_those_of_another_do() -> None:
    rows = PackedRows(token_set([([5] * 9000, [False] + [True] * 8999)]), 512, isolate=False)
    begins = [rows.shift(epoch) for epoch in range(40)]
    assert begins[0] == 0
    assert all(0 <= begin < 512 for begin in begins)
    ordered = sorted(begins)
    gaps = [after - before for before, after in zip(ordered, [*ordered[1:], 512], strict=True)]
    # Evenly spread: three different gaps at the most, of which the largest is less than three of
    # 512 / 40.
    assert min(gaps) >= 4
    assert max(gaps) <= 36


@quick
@given(examples(), st.integers(1, 30), st.integers(0, 5))
def test_isolated_rows_learn_what_each_document_teaches_within_the_row(
    content: list[Example], block: int, epoch: int
) -> None:
    rows = PackedRows(token_set(content), block, isolate=True)
    found = Counter(task for i in range(len(rows)) for task in tasks(rows.window(i, epoch)))
    expected: Counter[tuple[tuple[int, ...], int]] = Counter()
    content = turned(content, rows.shift(epoch))
    start = 0
    for ids, mask in content:
        for j in range(1, len(ids)):
            if mask[j]:
                # What is seen begins with the document, or with the row if that begins within the
                # document.
                row_begins = (start + j - 1) // block * block
                expected[(tuple(ids[max(0, row_begins - start) : j]), ids[j])] += 1
        start += len(ids)
    assert found == expected


def turned(content: list[Example], begin: int) -> list[Example]:
    """The documents from that token of all on; what of the first is before it comes last, as a
    document of its own.
    """
    begin %= sum(len(ids) for ids, _ in content)
    after, before = [], []
    for ids, mask in content:
        cut = min(begin, len(ids))
        begin -= cut
        before += [(ids[:cut], mask[:cut])] * (cut > 0)
        after += [(ids[cut:], mask[cut:])] * (cut < len(ids))
    return after + before


def tasks(window: Window) -> list[tuple[tuple[int, ...], int]]:
    """What each target's place sees of its own document, and the target."""
    assert window.documents is not None
    found = []
    for place, target in zip(window.positions.tolist(), window.targets.tolist(), strict=True):
        own = window.documents == window.documents[place]
        found.append((tuple(window.inputs[: place + 1][own[: place + 1]].tolist()), target))
    return found


def test_a_row_longer_than_the_stream_holds_all_of_it() -> None:
    rows = PackedRows(token_set([([5, 6, 7], [False, True, True])]), 100, isolate=False)
    assert len(rows) == 1
    assert rows.window(0).inputs.tolist() == [5, 6]
    assert rows.window(0).targets.tolist() == [6, 7]


def test_collated_rows_carry_their_documents() -> None:
    content = [
        ([1, 2, 3], [False, True, True]),
        ([4, 5], [False, True]),
        ([6, 7, 8, 9], [False, True, True, True]),
    ]
    rows = PackedRows(token_set(content), 6, isolate=True)
    batch = collate(rows, np.array([0, 1]), 6)
    assert batch.inputs.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, -1, -1, -1, -1]]
    assert batch.targets.tolist() == [2, 3, 5, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 3, 5, 6, 7]
    assert batch.num_tokens == 8
    assert batch.shape == (2, 6, 6)
    parts: list[MicroBatch] = list(
        collate_share(rows, np.array([1, 0]), Sizing(100, few_shapes=True, ladder=(6,)))
    )
    assert [part.shape for part in parts] == [(2, 6, 32)]
    assert parts[0].num_targets == 6


@pytest.mark.parametrize("wrong", [np.float32, np.int64])
def test_other_kinds_of_tokens_are_a_mistake_of_ours(wrong: type) -> None:
    with pytest.raises(AssertionError):
        TokenSet.of(np.zeros(2, wrong), np.array([False, True]), np.array([0, 2], np.int64))
