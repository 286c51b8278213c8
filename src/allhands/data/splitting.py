"""Assignment of rows to splits: a function of the contents and the seed, never of the order of
rows.

Rows that must stay together (equal key, equal or nearly equal content) form a group. A group is put
into one split as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from allhands.data.arrays import Hashes, Int8s, Ints
from allhands.data.order import mix
from allhands.errors import ConfigError
from allhands.io.formatting import counted

SPLITS = ("train", "valid", "test")
# Numbers of the splits in the arrays; a row whose source gives no split has NONE.
NONE, TRAIN, VALID, TEST = -1, 0, 1, 2


@dataclass(frozen=True)
class SplitShare:
    """Size of a held-out split: a number of rows, or a fraction of all rows."""

    value: float
    is_count: bool

    @classmethod
    def parse(cls, text: str, flag: str) -> SplitShare:
        """Read a size: ``"0.05"`` is a fraction, ``"200"`` a number of rows, ``"0"`` no rows.

        Raises:
            ConfigError: the text is not such a size. ``flag`` is named in the error.
        """
        hint = "write a fraction such as 0.05, or a number of rows such as 200; 0 for none"
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(
                f"{text!r} is not a number", code="value-invalid", where=flag, hint=hint
            ) from None
        if value < 0 or not np.isfinite(value):
            raise ConfigError(
                f"{text} is not a size", code="value-out-of-range", where=flag, hint=hint
            )
        if text.strip().isdigit():
            return cls(value, True)
        if value >= 1:
            raise ConfigError(
                f"{text} is neither a fraction below 1 nor a whole number",
                code="value-out-of-range",
                where=flag,
                hint=hint,
            )
        return cls(value, False)

    def rows(self, total: int) -> int:
        """Return the size in rows, out of ``total``; a fraction above 0 gives at least one row."""
        if self.is_count or not self.value:
            return int(self.value)
        return max(1, round(self.value * total))

    def __str__(self) -> str:
        if self.is_count:
            return f"{self.value:.0f} row{'s' * (self.value != 1)}"
        return f"{self.value:g} of the rows"


def hash64(*parts: str | bytes) -> int:
    """Return a 64-bit hash that depends on every part and on the borders between parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(digest.digest(), "little")


def shuffled(hashes: Hashes, seed: int) -> Hashes:
    """Return another number for each hash, one to one, that depends on ``seed``."""
    return mix(hashes ^ np.uint64(hash64("seed", str(seed))))


class Groups:
    """Disjoint sets of the rows 0 to n - 1 (union-find)."""

    def __init__(self, num_rows: int) -> None:
        self._parent = np.arange(num_rows, dtype=np.int64)

    def join(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Put the two rows of each pair into one set."""
        for one, other in pairs:
            a, b = self._root(one), self._root(other)
            # The smaller row becomes the root, so that labels do not depend on the order of the
            # pairs.
            self._parent[max(a, b)] = min(a, b)

    def join_equal(self, keys: Hashes) -> None:
        """Put all rows of one key into one set."""
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        self.join(zip(order[same].tolist(), order[same + 1].tolist(), strict=True))

    def labels(self) -> Ints:
        """Return the smallest row of each row's set, (n,)."""
        labels = self._parent
        while not np.array_equal(labels, further := labels[labels]):
            labels = further
        return labels

    def _root(self, row: int) -> int:
        parent = self._parent
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = int(parent[row])
        return row


# If at least this part of the rows is held out, a note says so: the user may not have meant that.
LARGE_PART = 1 / 3
# With fewer validation examples, the validation loss says little about other examples.
ENOUGH_VALIDATION = 10
# From this number of epochs on, a note says that few examples are learned by heart.
MANY_EPOCHS = 20


@dataclass(frozen=True)
class WantedSplit:
    """Wanted rows of the held-out splits."""

    valid: int
    test: int


def check_fractions(valid: SplitShare | None, test: SplitShare | None) -> None:
    """Refuse impossible fractions, before the rows are counted.

    Raises:
        ConfigError: two fractions leave nothing to train on.
    """
    shares = [share.value for share in (valid, test) if share is not None and not share.is_count]
    # Rounded, because the binary sum of two fractions such as 0.7 and 0.3 may differ from 1.
    if len(shares) == 2 and round(sum(shares), 9) >= 1:
        raise _too_much(f"valid and test together are {sum(shares):.4g} of the rows", valid, test)


def wanted_rows(
    valid: SplitShare | None,
    test: SplitShare | None,
    default: SplitShare,
    num_rows: int,
    num_free: int,
) -> WantedSplit:
    """Return the sizes in rows; ``None`` means ``default``.

    If wanted and default sizes together are too large, the default is reduced.

    Args:
        num_rows: all rows; fractions are of these.
        num_free: rows that the sources do not hold out themselves.

    Raises:
        ConfigError: the wanted sizes leave nothing to train on.
    """
    asked = {
        name: share.rows(num_rows)
        for name, share in (("valid", valid), ("test", test))
        if share is not None
    }
    total, usual = sum(asked.values()), default.rows(num_rows)
    if total:
        if total >= num_free:
            what = "valid and test together are" if len(asked) > 1 else f"{next(iter(asked))} is"
            rest = " that the sources do not hold out themselves" if num_free < num_rows else ""
            raise _too_much(f"{what} {total} of {counted(num_free, 'row')}{rest}", valid, test)
        usual = min(usual, num_free - total - 1)
    return WantedSplit(asked.get("valid", usual), asked.get("test", usual))


def _too_much(what: str, valid: SplitShare | None, test: SplitShare | None) -> ConfigError:
    given = (("--valid", valid), ("--test", test))
    where = " ".join(f"{flag} {share.value:g}" for flag, share in given if share is not None)
    return ConfigError(
        f"{what}: nothing is left to train on",
        code="nothing-left-to-train",
        where=where,
        hint="ask for fewer rows, a fraction such as 0.05, or 0 for none",
    )


def assign(labels: Ints, keys: Hashes, given: Int8s, wanted: WantedSplit, seed: int) -> Int8s:
    """Return the split of every row.

    Rows that their source puts into valid or test stay there, and undecided rows of the same group
    follow them (to test before valid). All other groups are shuffled by ``seed``; test, then valid,
    are filled up with whole groups, and the rest is train. Rows that a source calls train can be
    held out too, but only in groups without a given valid or test row.

    Args:
        labels: (n,) group of each row.
        keys: (n,) hash that decides the order (of the column of ``--split-by``, or the content).
        given: (n,) split that the source gives, or ``NONE``.

    Returns:
        (n,) TRAIN, VALID or TEST. If all groups are single rows, a held-out split has exactly the
        wanted rows, else as many as whole groups allow. The last group always goes to train, and
        the last but one to valid if valid rows are wanted.
    """
    _, group = np.unique(labels, return_inverse=True)
    count = int(group.max()) + 1 if len(group) else 0
    fixed = np.full(count, NONE, dtype=np.int8)
    np.maximum.at(fixed, group, np.where(given == TRAIN, NONE, given))
    sizes = np.bincount(group, minlength=count)
    least = np.full(count, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(least, group, keys)
    free = np.flatnonzero(fixed == NONE)
    free = free[np.argsort(shuffled(least[free], seed), kind="stable")]
    chosen = fixed.copy()
    # Test is filled first, so that it does not depend on the size of valid; but one group each is
    # left for train and valid.
    for split, target, stay in (
        (TEST, wanted.test, 2 if wanted.valid else 1),
        (VALID, wanted.valid, 1),
    ):
        taken = _fill(sizes[free], target, stay)
        chosen[free[taken]] = split
        free = np.delete(free, taken)
    chosen[chosen == NONE] = TRAIN
    # Rows given as train go with their group, unless given rows hold the group to valid or test.
    trained = np.where(fixed == NONE, chosen, np.int8(TRAIN))
    return np.where(given == NONE, chosen[group], np.where(given == TRAIN, trained[group], given))


def _fill(sizes: Ints, target: int, stay: int) -> Ints:
    """Return the positions of the groups to take, so that their sizes add up to ``target``.

    Groups are taken in order, if they fit; the sum may stay below the target. At least ``stay``
    groups are left. If every group is larger than the target, the first of the smallest is taken.
    """
    taken: list[int] = []
    left = target
    for position, size in enumerate(sizes.tolist()):
        if left == 0 or len(taken) >= len(sizes) - stay:
            break
        if size <= left:
            taken.append(position)
            left -= size
    if target and not taken and len(sizes) > stay:
        taken.append(int(np.argmin(sizes)))
    return np.asarray(taken, dtype=np.int64)


def canonical_order(given: Int8s, contents: Hashes) -> Ints:
    """Return the rows, (n,), in an order that depends on their contents only.

    The order is test, valid, train, undecided; within each, by hash.
    """
    return np.lexsort((contents, -given.astype(np.int64)))


def keepers(labels: Ints, given: Int8s, contents: Hashes) -> Ints:
    """Return for each row the row of its group that is kept when duplicates are dropped, (n,).

    This is the first row of the group in canonical order.
    """
    order = canonical_order(given, contents)
    _, first, group = np.unique(labels[order], return_index=True, return_inverse=True)
    result = np.empty(len(labels), dtype=np.int64)
    result[order] = order[first[group]]
    return result
