"""Exact and near duplicates, against a plain search through all pairs with sets of strings."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data.duplicates import NearIndex, Overlap, jaccard, normalise

# --- the reference --------------------------------------------------------------------------------


def plain_words(text: str) -> list[str]:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split()


def runs(text: str, in_characters: bool) -> set[str]:
    words = plain_words(text)
    if not in_characters:
        return {" ".join(words[place : place + 3]) for place in range(max(1, len(words) - 2))}
    line = " ".join(words)
    return {line[place : place + 8] for place in range(max(1, len(line) - 7))}


def is_short(text: str) -> bool:
    words = plain_words(text)
    return len(words) < 10 or len(" ".join(words)) > 15 * len(words)


def similarity(one: str, other: str) -> float:
    """Texts in words and in characters are not compared."""
    if is_short(one) != is_short(other):
        return 0.0
    a, b = runs(one, is_short(one)), runs(other, is_short(other))
    return len(a & b) / len(a | b)


def search(texts: list[str], threshold: float) -> dict[int, dict[int, float]]:
    """For each text the earlier ones that are like it, and how similar."""
    sets = [(is_short(text), runs(text, is_short(text))) for text in texts]
    found: dict[int, dict[int, float]] = {}
    for index, (short, own) in enumerate(sets):
        alike = {
            of: len(own & other) / len(own | other)
            for of, (kind, other) in enumerate(sets[:index])
            if kind == short
        }
        found[index] = {of: one for of, one in alike.items() if one >= threshold}
    return {index: alike for index, alike in found.items() if alike}


def find(texts: list[str], threshold: float = 0.8) -> dict[int, dict[int, float]]:
    index = NearIndex(threshold)
    found = {number: index.add(text) for number, text in enumerate(texts)}
    for alike in found.values():
        assert alike == sorted(alike, key=lambda match: (-match[0], match[1]))
    return {number: {of: one for one, of in alike} for number, alike in found.items() if alike}


def load(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        row.get("text") or "\n".join(message["content"] for message in row["messages"])
        for row in rows
    ]


def made_up(rng: random.Random, num_words: int) -> list[str]:
    return [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8)))
        for _ in range(num_words)
    ]


def edited(rng: random.Random, text: str, num_changes: int) -> str:
    words = text.split()
    for place in rng.sample(range(len(words)), min(num_changes, len(words))):
        words[place] = f"new{rng.randrange(10**6)}"
    return " ".join(words)


# --- real data against the reference --------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_edited_copies_of_real_texts_are_found_as_by_comparing_all_pairs(
    shared_data: Path, threshold: float
) -> None:
    rng = random.Random(1)
    chats = load(shared_data / "pirate-dolly" / "valid.jsonl")
    stories = [
        text
        for text in load(shared_data / "tinystories" / "valid.jsonl")
        if len(text.split()) < 500
    ][:80]
    originals = rng.sample(chats, 160) + stories
    copies = [edited(rng, text, rng.randint(1, 1 + len(text.split()) // 30)) for text in originals]
    texts = originals + copies
    rng.shuffle(texts)
    expected, found = search(texts, threshold), find(texts, threshold)
    assert 150 < len(expected) < 240  # of 240 copies, on both sides of the threshold
    # Texts under 512 runs are whole in their sketches: no false duplicate is possible. The bands
    # may miss 2 in 1,000.
    pairs = {(index, of): one for index, alike in expected.items() for of, one in alike.items()}
    seen = {(index, of): one for index, alike in found.items() for of, one in alike.items()}
    assert seen.keys() <= pairs.keys()
    assert len(seen) >= 0.99 * len(pairs)
    assert seen == pytest.approx({pair: pairs[pair] for pair in seen})


@pytest.mark.parametrize(("threshold", "count"), [(0.5, 75), (0.7, 7)])
def test_records_of_one_template(shared_data: Path, threshold: float, count: int) -> None:
    texts = load(shared_data / "wikisql" / "train.jsonl")[-600:]
    expected, found = search(texts, threshold), find(texts, threshold)
    assert len(expected) == count
    assert found == expected


def test_real_texts_that_only_resemble_each_other_are_no_duplicates(shared_data: Path) -> None:
    for name in ("pirate-dolly", "tinystories"):
        assert find(load(shared_data / name / "train.jsonl")[:1500]) == {}


# --- planted edits --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(30))
def test_one_word_of_thirty_changed(place: int) -> None:
    words = made_up(random.Random(place), 30)
    changed = [*words[:place], "other", *words[place + 1 :]]
    gone = min(place, 29 - place, 2) + 1  # the runs with the changed word in them
    assert find([" ".join(words), " ".join(changed)]) == {
        1: {0: pytest.approx((28 - gone) / (28 + gone))}
    }


def test_thousands_of_edits_lose_no_more_than_the_bands_may() -> None:
    rng = random.Random(3)
    texts = [made_up(rng, 30) for _ in range(1000)]
    index = NearIndex()
    assert [index.add(" ".join(words)) for words in texts] == [[]] * 1000
    found = 0
    for number, words in enumerate(texts):
        words[15] = "other"
        found += [of for _, of in index.add(" ".join(words))] == [
            number
        ]  # at 25 / 31, just above the threshold
    assert found >= 995  # the bands may lose two; they lose none


def test_unlike_texts_and_other_answers_to_one_question_are_kept() -> None:
    rng = random.Random(0)
    question = " ".join(made_up(rng, 12))
    texts = [question + "\n" + " ".join(made_up(rng, 25)) for _ in range(200)]
    assert find(texts) == {}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is the capital of France?", "what is the capital of  France", True),
        ("What is the capital of France?", "What is the capital of Spain?", False),
        ("How do I boil an egg?", "How do I boil an egg??", True),
        ("Name three primary colours", "Name three primary needs", False),
        ("Translate: the cat sat on the mat", "Translate: the dog sat on the mat", False),
        ("yes", "no", False),
        ("2+2", "2-2", False),
        (
            "東京は日本の首都であり、世界最大の都市圏を形成している。",
            "東京は日本の首都であり、世界最大の都市圏を形成している",
            True,
        ),
        (
            "東京は日本の首都であり、世界最大の都市圏を形成している。",
            "京都は千年のあいだ日本の都であり、寺と庭で知られる。",
            False,
        ),
    ],
)
def test_short_texts_and_texts_without_spaces_are_compared_in_characters(
    one: str, other: str, same: bool
) -> None:
    found = find([one, other])
    assert bool(found) == same == (similarity(one, other) >= 0.8)
    if same:
        assert found[1][0] == pytest.approx(similarity(one, other))


@pytest.mark.parametrize("num_words", [600, 3000])
def test_long_texts_are_estimated_closely(num_words: int) -> None:
    rng = random.Random(num_words)
    errors: list[float] = []
    for num_changes in (num_words // 200, num_words // 100, num_words // 50):
        for _ in range(12):
            text = " ".join(made_up(rng, num_words))
            other = edited(rng, text, num_changes)
            errors.append(find([text, other], threshold=0.5)[1][0] - similarity(text, other))
    assert np.abs(errors).max() < 3.5 * 0.022
    assert abs(np.mean(errors)) < 3 * 0.022 / np.sqrt(len(errors))


def test_a_text_and_its_beginning_are_estimated_without_bias() -> None:
    """Samples of unequal sets must not be compared as they are: that would give 0.82 instead of
    0.9.
    """
    rng = random.Random(0)
    found = []
    for _ in range(20):
        words = made_up(rng, 5000)
        found.append(find([" ".join(words), " ".join(words[:4500])], threshold=0.5)[1][0])
    assert np.mean(found) == pytest.approx(0.9, abs=0.015)


@given(
    st.sets(st.integers(0, 2**32 - 1), max_size=60),
    st.sets(st.integers(0, 2**32 - 1), min_size=1, max_size=60),
)
@settings(max_examples=50, deadline=None)
def test_small_sets_are_compared_exactly(one: set[int], other: set[int]) -> None:
    a, b = (np.array(sorted(numbers), dtype=np.uint32) for numbers in (one, other))
    assert jaccard(a, b) == jaccard(b, a) == len(one & other) / len(one | other)


# --- exact duplicates -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Caf\u00e9 au lait", "cafe\u0301  AU\tlait\n"),
        ("\ufb01ne \uff21\uff22\uff23", "FINE abc"),
        ("STRASSE", "straße"),
        ("a\u00a0b\u3000c", "a b c"),
        ("ΣΊΣΥΦΟΣ", "σίσυφος"),
        ("", " \n\t"),
        ("\ud83d", "\ud83d "),  # half an emoji, as broken JSON has it
    ],
)
def test_case_form_and_white_space_do_not_count(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)
    assert find([one, other]) == {1: {0: 1.0}}
    overlap = Overlap(0)
    assert [
        overlap.add(*each) for each in (("train", one), ("train", other), ("valid", other))
    ] == [
        None,
        "repeats",
        "in-train",
    ]


# --- groups, thresholds, order --------------------------------------------------------------------


def test_near_duplicates_are_told_of_the_first_texts_of_each_split() -> None:
    words = made_up(random.Random(0), 60)
    texts = [" ".join([*words, end]) for end in ("one", "two", "three")]
    overlap = Overlap(1)
    found = [
        overlap.add(split, text)
        for split, text in zip(("train", "valid", "valid"), texts, strict=True)
    ]
    assert found == [None, "near-train", None]


def test_the_most_similar_comes_first_and_then_the_earliest() -> None:
    words = made_up(random.Random(4), 80)
    first, second = " ".join([*words[:68], *words[:12]]), " ".join([*words[12:], *words[68:]])
    asked = " ".join(words[4:])
    assert similarity(asked, second) > similarity(asked, first) > 0.5
    assert [*find([first, second, asked], 0.5)[2]] == [1, 0]
    twins = [" ".join([*words[:place], "other", *words[place + 1 :]]) for place in (20, 60)]
    assert [*find([*twins, " ".join(words)], 0.9)[2]] == [0, 1]


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0])
def test_the_threshold_is_respected_from_both_sides(threshold: float) -> None:
    rng = random.Random(11)
    found = expected = 0
    for num_changes in [1, 2, 3, 5, 8, 12] * 6:
        text = " ".join(made_up(rng, 120))
        other = edited(rng, text, num_changes)
        (alike,) = find([text, other], threshold).values() or (None,)
        assert alike is None or alike[0] >= threshold
        expected += similarity(text, other) >= threshold
        found += alike is not None
    assert found == expected


def test_texts_of_few_different_runs_are_like_no_other() -> None:
    """Two grids of noughts and ones have all their runs in common, and are different puzzles."""
    rng = random.Random(0)
    grids = ["\n".join(" ".join(rng.choices("01", k=15)) for _ in range(15)) for _ in range(20)]
    assert similarity(grids[0], grids[1]) == 1.0
    strands = ["".join(rng.choices("ACGT", k=200_000)) for _ in range(3)]
    assert similarity(strands[0], strands[1]) > 0.8
    assert find(grids + strands) == {}


def test_the_same_runs_in_another_order_are_alike_to_the_full() -> None:
    words = made_up(random.Random(0), 40)
    around = (
        " ".join(words + words[:2]),
        " ".join(words[20:] + words[:22]),
    )  # a circle, cut in two places
    assert find(list(around), threshold=1.0) == {1: {0: 1.0}}


# --- cost and determinism -------------------------------------------------------------------------


def test_other_processes_give_the_same_answers() -> None:
    code = (
        "import random; from allhands.data.duplicates import NearIndex; f = NearIndex();"
        "r = random.Random(0);"
        "print([f.add(' '.join(r.choices('abc', k=40))[:r.randint(5, 80)]) for _ in range(60)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert "0.8" in outputs.pop()


@pytest.mark.parametrize(
    ("alphabet", "length"),
    [
        ("abcdefghijklmnopqrstuvwxyz      ", 1_000_000),
        ("0123456789abcdef", 1_000_000),
        ("一二三四五六七八九十百千", 330_000),
    ],
)
def test_a_text_of_a_megabyte_is_cut_down_to_its_sketch(alphabet: str, length: int) -> None:
    text = "".join(random.Random(0).choices(alphabet, k=length))
    index = NearIndex()
    started = time.process_time()
    assert index.add(text) == []
    assert time.process_time() - started < 1  # about 0.05 s; with room for a busy machine
    [(alike, _)] = index.add(f"and {text[: length // 2]} or {text[length // 2 :]}")
    assert alike > 0.99
    assert index.add(text[: length // 2]) == []
    assert max(map(len, index._sketches.values())) == 2048


def test_a_common_template_does_not_make_it_slow_or_blind() -> None:
    rng = random.Random(0)
    template = " ".join(made_up(rng, 100))
    own = [made_up(rng, 26) for _ in range(1500)]
    index = NearIndex()
    assert [index.add(f"{template} {' '.join(words)}") for words in own] == [[]] * 1500
    found = 0
    for number, words in enumerate(own[-200:], start=1300):
        found += number in [of for _, of in index.add(f"{template} {' '.join(words[:-1])}")[:1]]
    assert found >= 198  # of 200


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, allhands.data.duplicates;"
        "print([name for name in ('mlx', 'datasketch', 'scipy', 'matplotlib') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_each_text_of_a_chain_of_small_changes_is_like_the_one_before() -> None:
    words = [f"word{i}" for i in range(200)]
    chain = [words]
    for step in range(6):
        # Ten words further on are others: about 0.85 alike to the one before, less to the ones
        # before that.
        changed = list(chain[-1])
        changed[30 * step : 30 * step + 14] = [f"new{step}x{i}" for i in range(14)]
        chain.append(changed)
    found = find([" ".join(one) for one in chain])
    assert {number: [*alike] for number, alike in found.items()} == {
        number: [number - 1] for number in range(1, 7)
    }
