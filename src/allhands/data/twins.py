"""Rows that repeat each other: found over all sources, whatever their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allhands.data.duplicates import DuplicateFinder
from allhands.data.outcome import Duplicates, Twin
from allhands.data.splitting import NONE, SPLITS, Groups, Hashes, Ints, canonical_order
from allhands.data.spool import Spool

NUM_TWINS = 3


@dataclass(frozen=True)
class Twins:
    """Rows that repeat each other.

    Attributes:
        words: (n,) hash, equal for rows that repeat each other exactly.
        pairs: (near, 2) a row and the one that it nearly repeats; of rows with equal words only one is in it.
        similarities: (near,) of the pairs.
        links: (links, 2) near duplicates, those of which neither represents a group too: as many pairs as join all
            that are alike.
    """

    words: Hashes
    pairs: Ints
    similarities: NDArray[np.float64]
    links: Ints

    def groups(self, *, near: bool = True) -> Groups:
        """Rows with those that can represent them: what may be dropped."""
        return self._joined(self.pairs if near else self.pairs[:0])

    def families(self) -> Groups:
        """Rows with all that are alike, however far a chain of small changes leads: what must stay together."""
        return self._joined(self.links)

    def _joined(self, pairs: Ints) -> Groups:
        groups = Groups(len(self.words))
        groups.join_equal(self.words)
        groups.join((one, other) for one, other in pairs.tolist())
        return groups


def find_twins(spool: Spool, threshold: float, progress: Callable[[int, int], None]) -> Twins:
    """Search in an order that does not depend on the order of files: test, valid, rest, each by content.

    So a row of train is a near duplicate of one in test, never the other way round. Preferences are compared
    among themselves: their words contain those of the chat that they were made from.
    """
    words, preferences = spool.words, spool.preferences
    order = canonical_order(spool.given, spool.contents)
    _, first = np.unique(words[order], return_index=True)
    order = order[np.sort(first)]
    pairs: list[tuple[int, int]] = []
    links: list[tuple[int, int]] = []
    similarities: list[float] = []
    done = 0
    for family in (False, True) if threshold < 1 else ():
        rows = order[preferences[order] == family].tolist()
        finder = DuplicateFinder(threshold=threshold, linked=True)
        for row in rows:
            twin = finder.add(spool.text(row))
            if twin is not None:
                pairs.append((row, rows[twin.of]))
                similarities.append(twin.similarity)
            done += 1
            progress(done, len(order))
        links += [(rows[one], rows[other]) for one, other in finder.links]
    return Twins(words, _two_columns(pairs), np.array(similarities, dtype=np.float64), _two_columns(links))


def _two_columns(pairs: list[tuple[int, int]]) -> Ints:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def report_duplicates(spool: Spool, twins: Twins, split: NDArray[np.int8]) -> Duplicates:
    """What to report: all that was found, and what of it is now in two splits."""
    labels = twins.groups().labels()
    kept = np.flatnonzero(split != NONE)
    highest = np.full(len(spool), NONE, dtype=np.int8)
    np.maximum.at(highest, labels[kept], split[kept])
    above = highest[labels[kept]]
    torn = above > split[kept]
    across = Counter(
        f"{SPLITS[own]}, {SPLITS[other]}" for own, other in zip(split[kept][torn], above[torn], strict=True)
    )
    return Duplicates(
        exact=len(spool) - len(np.unique(twins.words)),
        near=len(twins.pairs),
        removed=int(np.count_nonzero(split == NONE)),
        across=dict(sorted(across.items())),
        examples=_examples(spool, twins),
    )


def _examples(spool: Spool, twins: Twins) -> list[Twin]:
    """The first exact and near duplicates, each with the row that it repeats."""
    _, first, inverse = np.unique(twins.words, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(spool)))[:NUM_TWINS]
    exact = [Twin(spool.where(row), spool.where(int(first[inverse[row]])), 1.0) for row in again.tolist()]
    shown = zip(twins.pairs[:NUM_TWINS].tolist(), twins.similarities[:NUM_TWINS].tolist(), strict=True)
    # The later row first, as everybody thinks of a duplicate.
    return exact + [Twin(spool.where(max(pair)), spool.where(min(pair)), similarity) for pair, similarity in shown]
