"""Texts that are there twice: exactly, or nearly.

Two texts are exact duplicates if they are equal once letter case, Unicode form and white space are out of the way
(:func:`normalise`), and near duplicates if their Jaccard similarity, the share of runs that both have among the runs
that either has, reaches a threshold. What a run is depends on the pair: three words in a row; or, if one of the two
has fewer than ten words or hardly any spaces (Chinese, Thai, a long key), eight characters in a row. Punctuation and
digits count: ``2 + 2`` and ``2 - 2`` differ. A text that repeats itself so much that fewer than half of its runs are
different (grids of digits, DNA, "ha ha ha") is compared exactly only: any two such texts have most of their runs in
common and yet may say different things.

How it is found: a MinHash signature of each text (Broder, 1997) is cut into bands, and texts that share a band are
candidates (locality-sensitive hashing). The number of bands is such that a pair exactly at the threshold becomes a
candidate in 99.8 of 100 cases. At most 32 candidates are then compared, those that share the rarest bands, by their
sketches: the 512 smallest hashes of their runs. Of texts with fewer than 512 different runs that is the exact Jaccard
similarity; of longer ones the unbiased estimate of Cohen (1997) with a standard error of at most 0.022, so that only
pairs that close to the threshold can be judged wrongly.

Why not the package datasketch: measured on one core, on chats of 60 words, both make 10,000 to 12,000 records/s (this
module 8,000 of 200 words). But datasketch takes 0.6 s for a text of 1 MB (here 0.05 s), has no second comparison, slows
down without end on texts that share a template, because its buckets have no limit (6,000 such texts: from 6,000 down to
1,800 records/s; here 4,800 throughout), takes three times the memory for its index, and brings scipy along.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from allhands.errors import ConfigError

_U32 = NDArray[np.uint32]
_U64 = NDArray[np.uint64]

_WORDS, _CHARACTERS = 3, 8  # in a run
_FEW_WORDS = 10
_LONG_WORD = 15  # characters a word on average, from which on it is no text in words
_SKETCH = 512
_RECALL = 0.998  # of pairs at the threshold, through the bands
_CROWD = 32  # texts in a bucket, and texts to compare one with: more have a template in common
_BLOCK = 1 << 14  # runs that are hashed at a time: the arrays stay in the cache, and small beside a huge text

_PRIME = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
_INVERSE = np.array([pow(0x9E3779B97F4A7C15, -1, 1 << 64)], dtype=np.uint64)


@dataclass(frozen=True)
class Duplicate:
    """A text that was there before.

    Attributes:
        index: which call of :meth:`DuplicateFinder.add` it was, from 0.
        of: the index of the text that it repeats; that one is itself no duplicate.
        similarity: 1.0 if both are equal after normalising, else their Jaccard similarity (which can be 1.0 too,
            for texts of the same runs in another order).
    """

    index: int
    of: int
    similarity: float


class DuplicateFinder:
    """Compares each text with all that came before and were no duplicates themselves.

    So whatever is left out because of an answer is represented by something that is kept, and a chain of small
    changes does not pull unlike texts together. Exact duplicates form the same groups in any order; with near ones
    the first of a group represents it, and what is similar to a later one only is a text of its own.

    The answers depend on the texts and their order only: not on the machine, the process or the version of Python's
    hash (the Unicode tables of Python decide about letter case). No text is kept. A text takes about 130 bytes for
    exact search and, with ``near`` at 0.8, another 1.2 kB and 4 bytes for each different run up to 512: at most 3.5 kB
    in all. Texts of 10 to 19 words (or of very long words) are kept in words and in characters, which doubles it.

    Args:
        threshold: Jaccard similarity from which on two texts are near duplicates, 0.5 to 1.
        near: look for near duplicates, too.
        linked: also collect in :attr:`links` pairs of near duplicates that join all that are alike, those between
            duplicates included, for who must keep together what is alike. No more pairs than texts; near duplicates
            then take as much memory as other texts.

    Raises:
        ConfigError: the threshold is out of range.
    """

    def __init__(self, threshold: float = 0.8, near: bool = True, *, linked: bool = False) -> None:
        if not 0.5 <= threshold <= 1:
            raise ConfigError(
                f"the similarity of near duplicates must lie between 0.5 and 1, not {threshold:g}",
                hint="0.8 finds texts with a few words changed; below 0.5 unlike texts would count as the same",
            )
        self._near = near
        self._linked = linked
        self.links: list[tuple[int, int]] = []
        self._families: dict[int, int] = {}
        # With `linked`: texts that are kept although they are duplicates.
        self._represented: set[int] = set()
        self._count = 0
        # From a digest to the text that represents it: 128 bits, so that a chance collision can be left out of account.
        self._exact: dict[bytes, tuple[int, float]] = {}
        self._words = _Index(threshold)
        self._characters = _Index(threshold)

    def add(self, text: str) -> Duplicate | None:
        """Compare ``text`` with the earlier ones and remember it.

        Returns:
            What it repeats, an exact duplicate before a near one, the most similar before the earliest; or None.
        """
        index, self._count = self._count, self._count + 1
        normal = normalise(text)
        digest = hashlib.blake2b(_encode(normal), digest_size=16).digest()
        if (known := self._exact.get(digest)) is not None:
            return Duplicate(index, *known)
        found = self._search(index, normal) if self._near else None
        self._exact[digest] = (found.of, found.similarity) if found else (index, 1.0)
        return found

    def _link(self, index: int, alike: list[tuple[float, int]]) -> None:
        """Note a pair for each family of texts that ``index`` joins."""
        for _, other in alike:
            one, two = self._family(index), self._family(other)
            if one != two:
                self._families[max(one, two)] = min(one, two)
                self.links.append((index, other))

    def _family(self, index: int) -> int:
        """The first text of all that are alike (union-find with path halving)."""
        families = self._families
        while (above := families.get(index, index)) != index:
            families[index] = index = families.get(above, above)
        return index

    def _search(self, index: int, normal: str) -> Duplicate | None:
        """Look up ``normal`` among the kept texts; keep it if nothing is like it."""
        words, length = normal.count(" ") + 1, len(normal)
        # A pair is compared in characters if either is short. So texts up to twice as long are kept in characters,
        # too, for the short ones to find; what is longer still is not similar to a short text anyway.
        short = words < _FEW_WORDS or length > _LONG_WORD * words
        both = not short and (words < 2 * _FEW_WORDS or 2 * length > _LONG_WORD * words)
        codes = np.frombuffer(_encode(normal, "utf-32-le"), dtype="<u4")
        entries: list[tuple[_Index, _Entry | None]] = []
        if not short:
            entries.append((self._words, self._words.entry(_word_runs(codes))))
        if short or both:
            entries.append((self._characters, self._characters.entry(_character_runs(codes), shadow=both)))
        searched = [(place, entry) for place, entry in entries if entry]
        alike = [match for place, entry in searched for match in place.matches(entry)]
        if self._linked:
            self._link(index, alike)
        found = [match for match in alike if match[1] not in self._represented]
        if self._linked or not found:
            for place, entry in searched:
                place.keep(index, entry)
        if not found:
            return None
        if self._linked:
            self._represented.add(index)
        similarity, of = max(found, key=lambda match: (match[0], -match[1]))
        return Duplicate(index, of, similarity)


def normalise(text: str) -> str:
    """Bring letter case, compatibility forms (full width, ligatures, composed accents) and white space to one form."""
    if text.isascii():
        return " ".join(text.lower().split())
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    return text.encode(encoding, "surrogatepass")  # JSON may hold half a surrogate pair


# --- runs and their hashes -----------------------------------------------------------------------------


def _word_runs(codes: _U32) -> Iterator[_U32]:
    """Hashes of every three words in a row, in blocks, of code points with single spaces between words."""
    spaces = np.flatnonzero(codes == 32)
    starts = np.concatenate(([0], spaces + 1))
    ends = np.append(spaces, codes.size)
    count = max(1, starts.size - _WORDS + 1)
    return _hashes(codes, starts[:count], ends[-count:])


def _character_runs(codes: _U32) -> Iterator[_U32]:
    """Hashes of every eight characters in a row, in blocks; of a shorter text as a whole."""
    starts = np.arange(max(1, codes.size - _CHARACTERS + 1))
    return _hashes(codes, starts, np.minimum(starts + _CHARACTERS, codes.size))


def _hashes(codes: _U32, starts: NDArray[np.intp], ends: NDArray[np.intp]) -> Iterator[_U32]:
    """Hash ``codes[start:end]`` for all pairs of ``starts`` and ``ends`` (both ascending), in blocks.

    A polynomial over the code points modulo 2^64, from the differences of its prefix sums; then mixed, 32 bits kept.
    """
    for first in range(0, starts.size, _BLOCK):
        start, end = starts[first : first + _BLOCK], ends[first : first + _BLOCK]
        low = int(start[0])
        part = codes[low : int(end[-1])].astype(np.uint64) + np.uint64(1)
        up, down = (np.cumprod(np.repeat(base, part.size + 1)) for base in (_PRIME, _INVERSE))
        prefix = np.zeros(part.size + 1, dtype=np.uint64)
        np.cumsum(part * up[:-1], out=prefix[1:])
        runs = (prefix[end - low] - prefix[start - low]) * down[start - low]
        yield (_mix(runs) >> np.uint64(32)).astype(np.uint32)


def _mix(values: _U64) -> _U64:
    """The finalizer of MurmurHash3: a change of any bit changes every other bit with probability one half."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


# --- signatures, bands and sketches --------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """A text as an index sees it.

    Attributes:
        bands: keys of buckets.
        sketch: the smallest hashes of its runs, ascending.
        shadow: not compared with other shadows: a text in words that is in the index of characters for short ones.
    """

    bands: list[int]
    sketch: _U32
    shadow: bool


class _Index:
    """Finds earlier texts with many of the same runs. Words and characters have one each."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._num_bands, self._rows = _bands(threshold)
        size = self._num_bands * self._rows
        # Fixed numbers that look like random ones, the same everywhere.
        stream = hashlib.shake_128(b"allhands: MinHash permutations").digest(8 * size)
        factors = np.frombuffer(stream, dtype="<u4").astype(np.uint32).reshape(2, size, 1)
        self._factors, self._summands = (
            factors[0] | np.uint32(1),
            factors[1],
        )  # odd: a permutation of all 32-bit numbers
        self._row_factors = np.cumprod(np.repeat(_PRIME, self._rows))
        self._band_numbers = np.arange(self._num_bands, dtype=np.uint64)
        self._buckets: dict[int, tuple[int, ...]] = {}
        self._kept: list[tuple[int, bytes, bool]] = []

    def entry(self, blocks: Iterator[_U32], shadow: bool = False) -> _Entry | None:
        """Signature and sketch of a text from blocks of the hashes of its runs; None if it repeats itself too much."""
        count = 0
        sketch = np.empty(0, dtype=np.uint32)
        lowest = np.full(self._factors.size, 0xFFFFFFFF, dtype=np.uint32)
        for block in blocks:
            count += block.size
            different = np.unique(block)
            sketch = np.unique(np.concatenate((sketch, different[:_SKETCH])))[:_SKETCH]
            # 512 at a time: with 48 permutations 100 kB, which stay in the cache.
            for first in range(0, different.size, 512):
                permuted = self._factors * different[first : first + 512] + self._summands
                lowest = np.minimum(lowest, permuted.min(axis=1))
        num_different = sketch.size if sketch.size < _SKETCH else (_SKETCH - 1) * 2.0**32 / float(sketch[-1])
        if 2 * num_different < count:
            return None
        bands = (lowest.reshape(self._num_bands, self._rows) * self._row_factors).sum(axis=1, dtype=np.uint64)
        keys = _mix(bands + self._band_numbers) >> np.uint64(4)  # 60 bits: the largest short integers of Python
        return _Entry(keys.tolist(), sketch, shadow)

    def matches(self, entry: _Entry) -> list[tuple[float, int]]:
        """Similarity and index of the kept texts that are near duplicates of ``entry``."""
        buckets = sorted((self._buckets.get(key, ()) for key in entry.bands), key=len)
        # Texts of a small bucket have more in common with this one than a template.
        candidates = dict.fromkeys(chain.from_iterable(buckets))
        found: list[tuple[float, int]] = []
        for place in islice(candidates, _CROWD):
            index, sketch, shadow = self._kept[place]
            if not (shadow and entry.shadow):
                similarity = jaccard(entry.sketch, np.frombuffer(sketch, dtype=np.uint32))
                if similarity >= self._threshold:
                    found.append((similarity, index))
        return found

    def keep(self, index: int, entry: _Entry) -> None:
        """Remember the text ``index`` for later ones to find."""
        place = len(self._kept)
        self._kept.append((index, entry.sketch.tobytes(), entry.shadow))
        alone = (place,)  # one for all bands: most buckets hold a single text
        for key in entry.bands:
            bucket = self._buckets.get(key, ())
            if len(bucket) < _CROWD:
                self._buckets[key] = (*bucket, place) if bucket else alone


def jaccard(one: _U32, other: _U32) -> float:
    """Jaccard similarity of two sets from their smallest members: exact if both are whole, else an estimate.

    Args:
        one, other: different hashes in ascending order; 512 of them stand for a larger set.
    """
    both = np.concatenate((one, other))
    both.sort()
    common = both[1:][both[1:] == both[:-1]]
    union = both.size - common.size
    if max(one.size, other.size) < _SKETCH:
        return common.size / union
    # The smallest members of the union are a fair sample of it, whatever the sizes of the two sets.
    last = np.unique(both)[_SKETCH - 1]
    return int(np.count_nonzero(common <= last)) / _SKETCH


def _bands(threshold: float) -> tuple[int, int]:
    """Number of bands, and of values in a band, for a threshold: 12 and 4 for 0.8.

    A band of r values is equal with probability s^r at similarity s. More values leave fewer candidates below the
    threshold but need more bands, hence memory: r is the largest up to 8 with which a band at the threshold is equal
    in at least 40 of 100 cases.
    """
    rows = next((rows for rows in range(8, 2, -1) if threshold**rows >= 0.4), 2)
    missed = 1 - threshold**rows
    num_bands = math.ceil(math.log(1 - _RECALL) / math.log(missed)) if missed > 0 else 1
    return num_bands, rows


class Overlap:
    """Which texts repeat one of their split or of the training set; near duplicates among the first texts only."""

    def __init__(self, near_limit: int) -> None:
        self._limit = near_limit
        self._exact, self._near = DuplicateFinder(near=False), DuplicateFinder()
        # Which split each text of a finder is from.
        self._exact_splits: list[str] = []
        self._near_splits: list[str] = []
        self._searched: Counter[str] = Counter()

    def add(self, split: str, text: str) -> str | None:
        """The code of what was found."""
        self._exact_splits.append(split)
        if same := self._exact.add(text):
            other = self._exact_splits[same.of]
            return "repeats" if other == split else "in-train" if other == "train" else None
        self._searched[split] += 1
        if self._searched[split] > self._limit:
            return None
        self._near_splits.append(split)
        alike = self._near.add(text)
        return "near-train" if alike and self._near_splits[alike.of] == "train" != split else None
