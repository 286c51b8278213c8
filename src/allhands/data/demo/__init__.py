"""The demo data that allhands ships: everyday questions with answers in pirate English, and a
lexicon of pirate words.

Written for this project (MIT). ``pirate.jsonl`` holds topic, question and answer; no two questions
ask the same thing, so a split by question leaks nothing. ``lexicon.txt`` holds the words that count
as pirate speech.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from allhands.data.records import Record
from allhands.data.splits import RecordSource
from allhands.errors import ConfigError
from allhands.io.files import make_directory, write_whole
from allhands.io.paths import require_directory_name

# Questions held out of each topic's twenty, so that every split covers every topic.
VALID_PER_TOPIC = TEST_PER_TOPIC = 2


@dataclass(frozen=True)
class QuestionPair:
    """One question with its answer in pirate English."""

    topic: str
    question: str
    answer: str


@cache
def pairs() -> tuple[QuestionPair, ...]:
    """Return all shipped pairs, in file order."""
    lines = (files(__name__) / "pirate.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(QuestionPair(**json.loads(line)) for line in lines)


@cache
def splits() -> dict[str, tuple[QuestionPair, ...]]:
    """Return the pairs of ``train``, ``valid`` and ``test``, the same on every machine."""
    chosen: dict[str, list[QuestionPair]] = {"train": [], "valid": [], "test": []}
    topics = dict.fromkeys(pair.topic for pair in pairs())
    for topic in topics:
        members = sorted(
            (pair for pair in pairs() if pair.topic == topic),
            key=lambda pair: hashlib.sha256(pair.question.encode()).hexdigest(),
        )
        chosen["test"] += members[:TEST_PER_TOPIC]
        chosen["valid"] += members[TEST_PER_TOPIC : TEST_PER_TOPIC + VALID_PER_TOPIC]
        chosen["train"] += members[TEST_PER_TOPIC + VALID_PER_TOPIC :]
    return {name: tuple(members) for name, members in chosen.items()}


def write_demo_data(directory: Path) -> dict[str, int]:
    """Write train.jsonl, valid.jsonl and test.jsonl in chat format.

    Returns:
        The number of rows of each split.

    Raises:
        ConfigError: there are files of these names with other data, or ``directory`` is named like
            a file.
        StorageError: the files cannot be written.
    """
    require_directory_name(directory)
    make_directory(directory)
    texts = {
        f"{name}.jsonl": "".join(
            json.dumps({"messages": messages(pair)}) + "\n" for pair in members
        )
        for name, members in splits().items()
    }
    for name, text in texts.items():
        path = directory / name
        if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
            raise ConfigError(
                f"there is another {name}",
                code="place-taken",
                where=f"--out {directory}",
                hint="choose another directory",
            )
    for name, text in texts.items():
        write_whole(directory / name, lambda temporary, text=text: temporary.write_text(text))
    return {name: len(members) for name, members in splits().items()}


def messages(pair: QuestionPair) -> list[dict[str, str]]:
    """Return the pair as a conversation of two turns."""
    return [
        {"role": "user", "content": pair.question},
        {"role": "assistant", "content": pair.answer},
    ]


@cache
def lexicon() -> frozenset[str]:
    """Return the published words of pirate speech, lower case."""
    lines = (files(__name__) / "lexicon.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def is_pirate_word(word: str) -> bool:
    """Return True if ``word`` is in the lexicon or has a dropped g (``sailin'``)."""
    return word in lexicon() or (word.endswith("in'") and len(word) > 4)


def pirate_share(texts: Iterable[str]) -> float:
    """Share of the words of ``texts`` that are pirate speech, 0 to 1; 0 where there are no words."""
    words = [
        word
        for text in texts
        for word in re.findall(r"[a-z'][a-z'-]*", text.lower().replace("’", "'"))
    ]
    return sum(map(is_pirate_word, words)) / len(words) if words else 0.0


def demo_source(split: str) -> RecordSource:
    """Return the shipped pairs of one split as :func:`demo_records`, with the identity that a token
    store needs.
    """
    return RecordSource(
        lambda: [asdict(pair) for pair in splits()[split]], lambda: iter(demo_records(split))
    )


def demo_records(split: str) -> list[Record]:
    """Return the shipped pairs of one split as training records."""
    return [
        Record("chat", messages=tuple(messages(pair)), source="demo", line=number)
        for number, pair in enumerate(splits()[split], start=1)
    ]
