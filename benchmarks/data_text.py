"""Text for ``data.py``: English-like documents of varying length, the same on every machine."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

# Everyday questions and answers, for the words and how often they come.
SOURCE = (
    Path(__file__).resolve().parent.parent / "src" / "allhands" / "data" / "demo" / "pirate.jsonl"
)
_SYLLABLES = [
    first + rest
    for first in "bcdfghklmnprstvwz"
    for rest in ("a", "e", "i", "o", "u", "an", "er", "in", "ol")
]
# Words that no list holds: names, and words of other trades.
_NUM_RARE = 20_000
_RARE_SHARE = 0.06
_MEDIAN_WORDS, _SPREAD = 180.0, 1.0
_LEAST_WORDS, _MOST_WORDS = 8, 8000


def write_documents(path: Path, num_bytes: int, seed: int = 0) -> int:
    """Write ``{"text": ...}`` lines until the file has ``num_bytes``; returns the number of
    documents.

    A smaller file is the beginning of a larger one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    count = size = 0
    with path.open("w", encoding="ascii") as stream:
        for text in documents(seed):
            line = json.dumps({"text": text}) + "\n"
            if count and size + len(line) > num_bytes:
                break
            stream.write(line)
            size += len(line)
            count += 1
    return count


def documents(seed: int) -> Iterator[str]:
    """Documents without end; half of them have more than 180 words, one in forty more than 1,300."""
    source = random.Random(seed)
    words, weights = vocabulary(source)
    cumulative = list(accumulate(weights))
    while True:
        length = int(
            min(_MOST_WORDS, max(_LEAST_WORDS, _MEDIAN_WORDS * source.lognormvariate(0.0, _SPREAD)))
        )
        yield _written(source, source.choices(words, cum_weights=cumulative, k=length))


def vocabulary(source: random.Random) -> tuple[list[str], list[float]]:
    """Words and how often each comes."""
    counts: Counter[str] = Counter()
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        counts.update(re.findall(r"[a-z']+", f"{pair['question']} {pair['answer']}".lower()))
    rare = ["".join(source.choices(_SYLLABLES, k=source.randint(2, 5))) for _ in range(_NUM_RARE)]
    rare += [str(source.randint(2, 2100)) for _ in range(_NUM_RARE // 10)]
    # By rank, as rare words come: Zipf.
    zipf = [1.0 / rank for rank in range(1, len(rare) + 1)]
    scale = _RARE_SHARE * sum(counts.values()) / sum(zipf)
    return [*counts, *rare], [*map(float, counts.values()), *(scale * weight for weight in zipf)]


def _written(source: random.Random, words: list[str]) -> str:
    """Words as sentences and paragraphs."""
    parts: list[str] = []
    start = 0
    while start < len(words):
        stop = start + source.randint(4, 22)
        sentence = " ".join(words[start:stop])
        end = source.choice((". ", ". ", ". ", "? ", "! ", ".\n\n"))
        parts.append(sentence[:1].upper() + sentence[1:] + end)
        start = stop
    return "".join(parts).strip()
