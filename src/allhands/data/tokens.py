"""Tokenised examples as flat arrays, in memory or mapped from a file, and the two ways to train on
them.

:class:`TokenSet` holds the arrays. A run trains on its examples one by one (:class:`TokenSet`
itself) or, in pre-training, on the documents joined and cut into rows of equal length
(:class:`PackedRows`). Both are read through :class:`Windows`, so other code does not depend on the
difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from allhands.data.arrays import Array, Bools, Int32s, Ints

Bits = NDArray[np.uint8]
# The largest vocabulary whose ids fit into two bytes.
SMALL_VOCABULARY = 1 << 16
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Window:
    """The model's work for one example or row, without padding.

    Attributes:
        inputs: (W,) token ids.
        positions: (N,) places in ``inputs`` whose next token is trained.
        targets: (N,) the tokens that should follow.
        documents: (W,) number of the document that each place belongs to, from 0; ``None`` if each
            place may attend to all places before it.
    """

    inputs: Array
    positions: Ints
    targets: Array
    documents: Int32s | None = None


class Windows(Protocol):
    """A set of windows with random access."""

    def __len__(self) -> int: ...
    @property
    def work(self) -> Array:
        """Inputs of each window, (len(self),): the tokens that must be computed."""
        ...

    def window(self, i: int, epoch: int = 0) -> Window: ...


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Examples one after the other; the arrays may be mapped from files that several processes
    share.

    Attributes:
        tokens: (num_tokens,) uint16 or int32.
        mask_bits: (ceil(num_tokens / 8),) uint8, a bit a token, lowest first: 1 where the token is
            a target of the loss; never on the first token of an example.
        offsets: (num_examples + 1,) int64; example ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``.
        work: (num_examples,) int32 input tokens that must be computed: up to the one before the
            last target.
        num_targets: (num_examples,) int32 tokens of each example that the loss is computed on.
        largest_token: the largest token id; -1 in an empty set.
    """

    tokens: Array
    mask_bits: Bits
    offsets: Ints
    work: Int32s
    num_targets: Int32s
    largest_token: int

    def __post_init__(self) -> None:
        assert self.tokens.dtype in (np.uint16, np.int32), self.tokens.dtype
        assert self.offsets.dtype == np.int64, self.offsets.dtype
        assert self.tokens.shape == (self.offsets[-1],)
        assert self.mask_bits.shape == (-(-len(self.tokens) // 8),)
        assert self.work.shape == self.num_targets.shape == (len(self.offsets) - 1,)

    @classmethod
    def of(cls, tokens: Array, mask: Bools, offsets: Ints) -> TokenSet:
        """Return a set in memory from flat arrays: (num_tokens,) ids and mask, (num_examples + 1,)
        offsets.
        """
        assert mask.shape == tokens.shape
        until = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        counts = until[offsets[1:]] - until[offsets[:-1]]
        trained = np.flatnonzero(mask)
        # The last trained place before each example's end.
        last = trained[np.maximum(until[offsets[1:]] - 1, 0)] if len(trained) else offsets[:-1]
        work = np.where(counts > 0, last - offsets[:-1], 0)
        largest = int(tokens.max(initial=-1))
        return cls(
            tokens,
            pack_mask(mask),
            offsets,
            work.astype(np.int32),
            counts.astype(np.int32),
            largest,
        )

    @classmethod
    def of_examples(cls, examples: Sequence[tuple[Array, Bools]]) -> TokenSet:
        """Return a set in memory from (tokens, mask) of each example."""
        lengths = [len(tokens) for tokens, _ in examples]
        tokens = np.concatenate([np.zeros(0, dtype=np.int32), *(tokens for tokens, _ in examples)])
        mask = np.concatenate([np.zeros(0, dtype=np.bool_), *(mask for _, mask in examples)])
        return cls.of(tokens.astype(np.int32), mask, np.cumsum([0, *lengths], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return len(self)

    @property
    def lengths(self) -> Ints:
        """Tokens of each example, (num_examples,)."""
        return np.diff(self.offsets)

    @property
    def mask(self) -> Bools:
        """Mask of all tokens, (num_tokens,) bool; unpacked at each call, so for small sets only."""
        return self.mask_of(0, len(self.tokens))

    def mask_of(self, start: int, stop: int) -> Bools:
        """Return the mask of ``tokens[start:stop]``, (stop - start,) bool: True for targets."""
        first = start // 8
        bits = np.unpackbits(self.mask_bits[first : -(-stop // 8)], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)

    def example(self, i: int) -> tuple[Array, Bools]:
        """Return tokens (a view) and mask of example ``i``, each (length,)."""
        start, stop = int(self.offsets[i]), int(self.offsets[i + 1])
        return self.tokens[start:stop], self.mask_of(start, stop)

    def window(self, i: int, epoch: int = 0) -> Window:
        """Return example ``i``, cut before its last target; the same in every epoch."""
        ids, mask = self.example(i)
        trained = np.flatnonzero(mask)
        # Token i is predicted from place i - 1.
        return Window(ids[: self.work[i]], trained - 1, ids[trained])

    def fingerprint(self) -> str:
        """Return a SHA-256 in hexadecimal that is equal only for equal arrays of equal types."""
        return joined_fingerprint(
            [array_fingerprint(array) for array in (self.tokens, self.mask_bits, self.offsets)]
        )


def pack_mask(mask: Bools) -> Bits:
    """Pack eight flags into each byte, the first flag lowest."""
    return np.packbits(mask, bitorder="little")


def array_fingerprint(array: Array) -> str:
    """Return the SHA-256 of the array's bytes in little-endian order, equal on every computer."""
    return hashlib.sha256(
        np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data
    ).hexdigest()


def joined_fingerprint(parts: list[str]) -> str:
    """Return one fingerprint for several."""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The documents of a set joined and cut into rows of ``block`` inputs: no padding, nothing
    lost.

    ``stream`` is the tokens of all documents, each with its end-of-text token. Row ``r`` has the
    inputs ``stream[r * block : (r + 1) * block]``; its targets are the tokens one place later.
    Every token but the first of the stream is a target once (but see ``isolate``). The last row may
    be shorter.

    So it is in the first epoch. In each further epoch the stream, joined to a ring, begins at
    another place (:meth:`shift`), so that no row is repeated: a model memorises repeated rows
    sooner than other text.

    Attributes:
        source: the documents.
        block: inputs a row.
        isolate: True if documents are kept apart: a row's window has document numbers, and the
            first token of a document is no target, because nothing of the document predicts it.
    """

    source: TokenSet
    block: int
    isolate: bool

    def __len__(self) -> int:
        return -(-(len(self.source.tokens) - 1) // self.block)

    @property
    def work(self) -> Array:
        """Inputs of each row, (num_rows,): ``block``, or fewer in the last row."""
        return self._work

    @cached_property
    def _work(self) -> Int32s:
        work = np.full(len(self), self.block, dtype=np.int32)
        if len(work):
            work[-1] = len(self.source.tokens) - 1 - (len(work) - 1) * self.block
        return work

    def shift(self, epoch: int) -> int:
        """Return the place in the stream where an epoch's first row begins, below ``block``.

        Multiples of the golden section, modulo a row, spread the beginnings evenly.
        """
        return int(epoch * _GOLDEN % 1.0 * self.block)

    def window(self, i: int, epoch: int = 0) -> Window:
        """Return row ``i`` of an epoch."""
        length = int(self.work[i])
        ids, targets, begins = self._span(i * self.block + self.shift(epoch), length + 1)
        begins[0] = False
        if not self.isolate:
            # The first token of a document is predicted from the end-of-text token before it.
            targets |= begins
        positions = np.flatnonzero(targets[1:])
        if not self.isolate:
            return Window(ids[:-1], positions, ids[positions + 1])
        return Window(
            ids[:-1], positions, ids[positions + 1], np.cumsum(begins[:length], dtype=np.int32)
        )

    def _span(self, start: int, count: int) -> tuple[Array, Bools, Bools]:
        """Return ``count`` tokens of the ring from ``start`` on, with two masks, each (count,).

        The masks are True for targets, and for first tokens of documents.
        """
        source, size = self.source, len(self.source.tokens)
        start %= size
        stop = min(start + count, size)
        begins = np.zeros(stop - start, dtype=np.bool_)
        first, last = np.searchsorted(source.offsets[:-1], [start, stop])
        begins[np.asarray(source.offsets[first:last]) - start] = True
        found = source.tokens[start:stop], source.mask_of(start, stop), begins
        if (left := count - (stop - start)) == 0:
            return found
        ids, targets, begins = (
            np.concatenate(parts) for parts in zip(found, self._span(0, left), strict=True)
        )
        return ids, targets, begins
