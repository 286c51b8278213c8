"""Rows that repeat each other: found over all sources, whatever their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from allhands.data.arrays import Int8s
from allhands.data.duplicates import NearIndex
from allhands.data.outcome import Duplicates, Twin
from allhands.data.splitting import NONE, SPLITS, Groups, canonical_order
from allhands.data.spool import Spool

NUM_TWINS = 3


@dataclass(frozen=True)
class Twins:
    """Rows that repeat each other.

    Attributes:
        exact: rows with equal words.
        near: these, and rows with the one that can represent them: what may be dropped. A chain of
            small changes does not pull unlike rows together.
        families: all that are alike, however far a chain of small changes leads: what must stay
            together.
        pairs: a row, the one that it nearly repeats, and their similarity; of rows with equal words
            only one.
    """

    exact: Groups
    near: Groups
    families: Groups
    pairs: list[tuple[int, int, float]]


def find_twins(spool: Spool, threshold: float, progress: Callable[[int, int], None]) -> Twins:
    """Search in an order that does not depend on the order of files: test, valid, rest, each by
    content.

    So a row of train is a near duplicate of one in test, never the other way round. Preferences are
    compared among themselves: their words contain those of the chat that they were made from.
    """
    words, preferences = spool.column("words"), spool.column("preference")
    exact, near, families = (Groups(len(spool)) for _ in range(3))
    for each in (exact, near, families):
        each.join_equal(words)
    order = canonical_order(spool.column("given"), spool.column("content"))
    order = order[np.sort(np.unique(words[order], return_index=True)[1])]
    pairs: list[tuple[int, int, float]] = []
    done = 0
    for is_preference in (False, True) if threshold < 1 else ():
        rows = order[preferences[order] == is_preference].tolist()
        index, represented = NearIndex(threshold), set[int]()
        for place, row in enumerate(rows):
            alike = index.add(spool.text(row))
            families.join((row, rows[other]) for _, other in alike)
            match = next(
                ((similarity, other) for similarity, other in alike if other not in represented),
                None,
            )
            if match is not None:
                represented.add(place)
                near.join([(row, rows[match[1]])])
                pairs.append((row, rows[match[1]], match[0]))
            done += 1
            progress(done, len(order))
    return Twins(exact, near, families, pairs)


def report_duplicates(spool: Spool, twins: Twins, split: Int8s) -> Duplicates:
    """Report all duplicates that were found, and those that are now in two splits."""
    labels = twins.near.labels()
    kept = np.flatnonzero(split != NONE)
    highest = np.full(len(spool), NONE, dtype=np.int8)
    np.maximum.at(highest, labels[kept], split[kept])
    above = highest[labels[kept]]
    torn = above > split[kept]
    across = Counter(
        f"{SPLITS[own]}, {SPLITS[other]}"
        for own, other in zip(split[kept][torn], above[torn], strict=True)
    )
    # The later row first, as everybody thinks of a duplicate.
    first = twins.exact.labels()
    again = np.flatnonzero(first != np.arange(len(spool)))
    examples = [(row, int(first[row]), 1.0) for row in again[:NUM_TWINS].tolist()]
    examples += [
        (max(one, other), min(one, other), alike) for one, other, alike in twins.pairs[:NUM_TWINS]
    ]
    return Duplicates(
        exact=len(again),
        near=len(twins.pairs),
        removed=int(np.count_nonzero(split == NONE)),
        across=dict(sorted(across.items())),
        examples=[
            Twin(spool.where(row), spool.where(of), similarity) for row, of, similarity in examples
        ],
    )
