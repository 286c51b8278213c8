"""Search for rows that repeat each other, over all sources and independent of their order."""

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
        exact: groups of rows with equal words.
        near: groups of near duplicates, of which all rows but one may be dropped: each row of a
            group is equal to that row or similar to it. A chain of small changes makes no group.
        families: groups of rows that must stay in one split: rows that a chain of small changes
            connects.
        pairs: a row, the row that it nearly repeats, and their similarity; only one of several rows
            with equal words is listed.
    """

    exact: Groups
    near: Groups
    families: Groups
    pairs: list[tuple[int, int, float]]


def find_twins(spool: Spool, threshold: float, progress: Callable[[int, int], None]) -> Twins:
    """Search the accepted rows for exact and near duplicates.

    The order of the search does not depend on the order of files: test, valid, train, undecided,
    each by content. So a row of train can be the near duplicate of a row of test, never the other
    way round. Preferences are compared among themselves: their words contain those of the chat that
    they were made from.

    Args:
        threshold: similarity of near duplicates; 1: search exact duplicates only.
        progress: called with the rows done and the rows in all.
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
    """Return the report on all duplicates that were found, and on those that are in two splits.

    ``split``: (n,) split of each row; NONE for a row that was dropped.
    """
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
    # In the examples the later row is named as the duplicate, as people expect.
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
