"""Search for duplicate texts: exact and near ones.

Two texts are exact duplicates if they are equal without regard to letter case, Unicode form and
white space (:func:`normalise`). They are near duplicates if their Jaccard similarity reaches a
threshold. The Jaccard similarity is the number of runs that both have, divided by the number of
runs that at least one has. A run is three words in a row; in a text with fewer than ten words or
hardly any spaces (Chinese, Thai, a long key) it is eight characters. Texts of the two kinds are
never compared. Punctuation and digits count: ``2 + 2`` and ``2 - 2`` differ.

A text has no near duplicates if it repeats itself so much that fewer than half of its runs are
different (grids of digits, DNA, "ha ha ha"). Any two such texts have most of their runs in common,
and yet may say different things.

Each text is kept as its sketch, the 512 smallest hashes of its runs. MinHash values of the sketch
(Broder, 1997) are cut into bands, and texts that share a band are candidates (locality-sensitive
hashing). A pair exactly at the threshold becomes a candidate in 99.8 of 100 cases. At most 32
candidates are compared, those that share the rarest bands. For texts with fewer than 512 different
runs the similarity is exact. For longer ones it is the unbiased estimate of Cohen (1997), with a
standard error of at most 0.022.

The package datasketch is slower if many texts share a template, needs three times the memory, and
installs scipy.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
import zlib
from collections import Counter
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from allhands.data.order import mix

_U32 = NDArray[np.uint32]

_WORDS, _CHARACTERS = 3, 8  # in a run
_FEW_WORDS = 10
_LONG_WORD = 15  # characters a word on average, from which on it is no text in words
_SKETCH = 512
_RECALL = 0.998  # of pairs at the threshold, through the bands
_CROWD = 32  # most texts in a bucket, and most candidates: more texts only share a template
_BASE = np.uint64(0x9E3779B97F4A7C15)


def normalise(text: str) -> str:
    """Bring letter case, compatibility forms (full width, ligatures, composed accents) and white
    space to one form.
    """
    if text.isascii():
        return " ".join(text.lower().split())
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


class NearIndex:
    """Finds for each text the earlier ones that are nearly the same.

    The answers depend on the texts and their order only: not on the machine or the process (the
    Unicode tables of Python decide about letter case). No text is kept: a text takes about 1.2 kB,
    and 4 bytes for each different run up to 512.

    Args:
        threshold: Jaccard similarity from which on two texts are near duplicates, 0.5 to 1.
    """

    def __init__(self, threshold: float = 0.8) -> None:
        self._threshold = threshold
        self._num_bands, self._rows = _bands(threshold)
        size = self._num_bands * self._rows
        # Fixed numbers that look like random ones, the same everywhere.
        stream = hashlib.shake_128(b"allhands: MinHash permutations").digest(8 * size)
        factors = np.frombuffer(stream, dtype="<u4").astype(np.uint32).reshape(2, size, 1)
        # Odd factors: permutations of all 32-bit numbers.
        self._factors, self._summands = factors[0] | np.uint32(1), factors[1]
        self._row_factors = np.cumprod(np.repeat(_BASE, self._rows))
        self._band_numbers = np.arange(self._num_bands, dtype=np.uint64)
        self._buckets: dict[int, tuple[int, ...]] = {}
        self._count = 0
        self._sketches: dict[int, bytes] = {}

    def add(self, text: str) -> list[tuple[float, int]]:
        """Compare ``text`` with the earlier ones and remember it.

        Returns:
            Similarity and number (from 0, in the order of the calls) of each near duplicate, the
            most similar first.
        """
        number, self._count = self._count, self._count + 1
        sketch, kind = _sketch(normalise(text))
        if sketch is None:
            return []
        lowest = (
            (self._factors * sketch + self._summands)
            .min(axis=1)
            .reshape(self._num_bands, self._rows)
        )
        bands = (lowest * self._row_factors).sum(axis=1, dtype=np.uint64)
        # 60 bits: the largest short integers of Python. Texts in words and in characters never
        # meet.
        keys: list[int] = (
            mix(bands + self._band_numbers + np.uint64(kind << 32)) >> np.uint64(4)
        ).tolist()
        # Texts of a small bucket have more in common with this one than a template.
        buckets = sorted((self._buckets.get(key, ()) for key in keys), key=len)
        candidates = islice(dict.fromkeys(chain.from_iterable(buckets)), _CROWD)
        compared = [
            (jaccard(sketch, np.frombuffer(self._sketches[one], dtype=np.uint32)), one)
            for one in candidates
        ]
        self._sketches[number] = sketch.tobytes()
        alone = (number,)  # one for all bands: most buckets hold a single text
        for key in keys:
            bucket = self._buckets.get(key, ())
            if len(bucket) < _CROWD:
                self._buckets[key] = (*bucket, number) if bucket else alone
        alike = [match for match in compared if match[0] >= self._threshold]
        return sorted(alike, key=lambda match: (-match[0], match[1]))


def _sketch(normal: str) -> tuple[_U32 | None, int]:
    """Return the smallest hashes of the runs, ascending, and the words or characters in a run.

    The hashes are None if the text repeats itself too much.
    """
    words = normal.split(" ")
    if len(words) < _FEW_WORDS or len(normal) > _LONG_WORD * len(words):
        # JSON may hold half a surrogate pair.
        units = np.frombuffer(normal.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        length = _CHARACTERS
    else:
        units = np.array([zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words])
        length = _WORDS
    padded = np.zeros(max(length, units.size), dtype=np.uint64)
    padded[: units.size] = units
    count = padded.size - length + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(length):
        hashes = hashes * _BASE + padded[place : place + count]
    found = (mix(hashes) >> np.uint64(32)).astype(np.uint32)
    found.sort()  # np.unique may take a hundred times as long for many short numbers since NumPy 2.3
    different = _without_repeats(found)
    return (None if 2 * different.size < count else different[:_SKETCH]), length


def _without_repeats(ascending: _U32) -> _U32:
    return ascending[np.append(True, ascending[1:] != ascending[:-1])]


def jaccard(one: _U32, other: _U32) -> float:
    """Return the Jaccard similarity of two sets, given by their smallest members.

    The value is exact if both sets have fewer than 512 members, else an estimate.

    Args:
        one, other: different hashes in ascending order; 512 hashes stand for a larger set.
    """
    both = np.concatenate((one, other))
    both.sort()
    common = both[1:][both[1:] == both[:-1]]
    union = both.size - common.size
    if max(one.size, other.size) < _SKETCH:
        return common.size / union
    # The smallest members of the union are a fair sample of it, whatever the sizes of the two sets.
    last = _without_repeats(both)[_SKETCH - 1]
    return int(np.count_nonzero(common <= last)) / _SKETCH


def _bands(threshold: float) -> tuple[int, int]:
    """Number of bands, and of values in a band, for a threshold: 12 and 4 for 0.8.

    A band of r values is equal with probability s^r at similarity s. More values leave fewer
    candidates below the threshold but need more bands, hence memory: r is the largest number from 3
    to 8 with which a band at the threshold is equal in at least 40 of 100 cases, or else 2.
    """
    rows = next((rows for rows in range(8, 2, -1) if threshold**rows >= 0.4), 2)
    missed = 1 - threshold**rows
    num_bands = math.ceil(math.log(1 - _RECALL) / math.log(missed)) if missed > 0 else 1
    return num_bands, rows


class Overlap:
    """Search for texts that repeat a text of their split or of the training set.

    Near duplicates are searched among the first ``near_limit`` different texts of each split.
    """

    def __init__(self, near_limit: int) -> None:
        self._limit = near_limit
        # The split of the first text of each content, by 128 bits.
        self._exact: dict[bytes, str] = {}
        self._near = NearIndex()
        self._near_splits: list[str] = []
        self._searched: Counter[str] = Counter()

    def add(self, split: str, text: str) -> str | None:
        """Remember ``text``; return the finding's code, or None without a finding.

        The codes are "repeats" (same split), "in-train" and "near-train".
        """
        digest = hashlib.blake2b(
            normalise(text).encode("utf-8", "surrogatepass"), digest_size=16
        ).digest()
        if (other := self._exact.get(digest)) is not None:
            return "repeats" if other == split else "in-train" if other == "train" else None
        self._exact[digest] = split
        self._searched[split] += 1
        if self._searched[split] > self._limit:
            return None
        alike = self._near.add(text)
        self._near_splits.append(split)
        if split != "train" and any(self._near_splits[one] == "train" for _, one in alike):
            return "near-train"
        return None
