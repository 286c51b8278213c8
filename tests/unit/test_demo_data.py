"""The shipped pirate data: enough of it, no leak from split to split, consistent speech, and the
score.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import mean

import pytest
from rows import load_split

from allhands.data.demo import (
    QuestionPair,
    demo_records,
    is_pirate_word,
    lexicon,
    messages,
    pairs,
    pirate_share,
    splits,
    write_demo_data,
)
from allhands.data.records import ColumnNames

# A word in more pairs than this says nothing about what a question is about.
COMMON = 25


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower()))


@cache
def topics() -> dict[QuestionPair, frozenset[str]]:
    """For each pair the words that tell what it is about: neither common ones nor pirate speech."""
    everything = {pair: words(f"{pair.question} {pair.answer}") for pair in pairs()}
    counts = Counter(word for found in everything.values() for word in found)
    return {
        pair: frozenset(
            word for word in found if counts[word] <= COMMON and not is_pirate_word(word)
        )
        for pair, found in everything.items()
    }


def likeness(one: QuestionPair, other: QuestionPair) -> float:
    """Share of the words on the subject that two pairs have in common, 0 to 1."""
    a, b = topics()[one], topics()[other]
    return len(a & b) / max(1, min(len(a), len(b)))


def test_there_are_enough_pairs_on_many_subjects() -> None:
    assert len(pairs()) >= 500
    assert len({pair.topic for pair in pairs()}) >= 25
    assert len({pair.question.lower() for pair in pairs()}) == len(pairs())
    assert len({pair.answer.lower() for pair in pairs()}) == len(pairs())


def test_the_splits_hold_every_pair_once_and_every_subject() -> None:
    assert {name: len(members) for name, members in splits().items()} == {
        "train": 504,
        "valid": 64,
        "test": 64,
    }
    assert Counter(pair for members in splits().values() for pair in members) == Counter(pairs())
    subjects = {pair.topic for pair in pairs()}
    assert all({pair.topic for pair in members} == subjects for members in splits().values())


def test_no_question_is_asked_twice_in_other_words() -> None:
    alike = [
        (round(likeness(one, other), 2), one.question, other.question)
        for one, other in itertools.combinations(pairs(), 2)
        if likeness(one, other) > 0.5
    ]
    assert alike == []


def test_nothing_leaks_from_one_split_to_another() -> None:
    for first, second in itertools.combinations(splits(), 2):
        for one, other in itertools.product(splits()[first], splits()[second]):
            assert likeness(one, other) <= 0.34, (one.question, other.question)
            a, b = words(one.question), words(other.question)
            # "What is the difference between ..." alone is half of a question's words.
            assert len(a & b) <= 0.65 * len(a | b), (one.question, other.question)
            a, b = words(one.answer), words(other.answer)
            assert len(a & b) <= 0.4 * len(a | b), (one.answer, other.answer)


def test_the_search_for_twins_finds_twins() -> None:
    one = next(pair for pair in pairs() if "rainbow" in pair.question)
    twin = "Sunlight enters raindrops, bends, bounces off the back an' bends again as it leaves, splittin' into colours."
    about = frozenset(
        word
        for word in words(f"How do rainbows appear after rain? {twin}")
        if not is_pirate_word(word)
    )
    assert len(about & topics()[one]) / min(len(about), len(topics()[one])) > 0.34


def test_answers_are_of_a_length_and_questions_plain() -> None:
    for pair in pairs():
        assert 20 <= len(pair.answer.split()) <= 60, pair
        assert pair.question[0].isupper(), pair
        assert pair.question[-1] in "?.!", pair
        assert pair.answer.rstrip("\"'")[-1] in ".!?", pair
        assert "  " not in pair.answer + pair.question, pair
        # The question must not give the style away.
        assert pirate_share([pair.question]) == 0.0, pair
        assert "pirate" not in pair.question.lower(), pair


def test_every_answer_is_pirate_speech_and_about_as_much_of_it() -> None:
    shares = [pirate_share([pair.answer]) for pair in pairs()]
    assert 0.12 <= mean(shares) <= 0.20
    assert min(shares) >= 0.02
    assert max(shares) <= 0.40
    # Nine in ten are well above what the demo calls pirate at all.
    assert sorted(shares)[len(shares) // 10] >= 0.05
    for name, members in splits().items():
        assert 0.12 <= pirate_share(pair.answer for pair in members) <= 0.20, name


def count_answers(pattern: str) -> int:
    return sum(
        bool(re.search(rf"(?<![\w'])(?:{pattern})(?![\w'])", pair.answer, re.IGNORECASE))
        for pair in pairs()
    )


def test_the_speech_is_consistent() -> None:
    assert count_answers("you|your|yours|yourself|you're|you've|you'll") == 0
    assert count_answers("ye|yer|yerself|ye'll|ye've|ye'd") > 0.5 * len(pairs())
    # One way to say it, everywhere.
    for ours, theirs in (("an'", "and"), ("fer", "for"), ("o'", "of")):
        assert count_answers(theirs) <= 0.01 * count_answers(ours), theirs
    assert count_answers("an'") > 0.8 * len(pairs())


def test_the_speech_is_varied() -> None:
    openings = Counter(" ".join(pair.answer.split()[:2]).lower() for pair in pairs())
    assert len(openings) > 0.6 * len(pairs())
    assert openings.most_common(1)[0][1] <= 0.05 * len(pairs())
    used = {word for word in lexicon() if count_answers(re.escape(word))}
    assert len(used) >= 50


def test_the_lexicon_is_of_words_that_ordinary_english_does_not_use() -> None:
    assert len(lexicon()) >= 60
    assert all(word == word.lower() and word == word.strip() for word in lexicon())
    ordinary = "the and for of with you your ship captain sea treasure my is are be not all over sail water gold crew"
    assert not set(ordinary.split()) & lexicon()


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("... 123 !", 0.0),
        ("Ahoy matey", 1.0),
        ("Ahoy, MATEY! The sea is wide.", 2 / 6),
        ("I be sailin' an' singin'", 3 / 5),
        ("ye’re a landlubber", 2 / 3),
        ("The king is in.", 0.0),
        ("yo-ho-ho and a bottle", 1 / 4),
        ("plain words and nothing else", 0.0),
    ],
)
def test_the_score_is_the_share_of_pirate_words(text: str, share: float) -> None:
    assert pirate_share([text]) == pytest.approx(share)


def test_several_texts_are_scored_by_words_not_by_texts() -> None:
    assert pirate_share(["ahoy", "one two three"]) == 0.25
    assert pirate_share([]) == 0.0


def test_ordinary_english_scores_under_two_percent(shared_data: Path) -> None:
    rows = (shared_data / "tinystories" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    assert pirate_share(json.loads(row)["text"] for row in rows) < 0.02


def test_what_is_written_is_what_is_read_and_what_demo_gives(tmp_path: Path) -> None:
    assert write_demo_data(tmp_path / "pirate") == {"train": 504, "valid": 64, "test": 64}
    for name, members in splits().items():
        records = load_split(tmp_path / "pirate", name, ColumnNames(), required=True)
        expected = [messages(pair) for pair in members]
        assert [list(record.messages or ()) for record in records] == expected
        assert [list(record.messages or ()) for record in demo_records(name)] == expected
