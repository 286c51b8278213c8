"""A set of tokenized examples as three flat arrays, so that it can be stored, memory-mapped and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allhands.data.records import Record
from allhands.data.render import Renderer
from allhands.errors import DataError


@dataclass(frozen=True)
class TokenSet:
    """Examples one after the other.

    Attributes:
        tokens: (num_tokens,) int32.
        mask: (num_tokens,) bool, True where the token is a target of the loss; never on the first token of
            an example. Every example of :func:`build_token_set` has at least one target.
        offsets: (num_examples + 1,) int64; example ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert self.tokens.dtype == np.int32, self.tokens.dtype
        assert self.mask.dtype == np.bool_, self.mask.dtype
        assert self.offsets.dtype == np.int64, self.offsets.dtype
        assert self.tokens.shape == self.mask.shape == (self.offsets[-1],)

    def __len__(self) -> int:
        return self.num_examples

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(num_examples,) tokens of each example."""
        return np.diff(self.offsets)

    @property
    def num_targets(self) -> NDArray[np.int64]:
        """(num_examples,) tokens of each example that the loss is computed on."""
        until = np.concatenate([[0], np.cumsum(self.mask, dtype=np.int64)])
        return np.diff(until[self.offsets])

    def example(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens and mask of example ``i``, each (length,), as views."""
        place = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.tokens[place], self.mask[place]

    def fingerprint(self) -> str:
        """SHA-256 of the three arrays, in hexadecimal: equal if and only if the data are."""
        digest = hashlib.sha256()
        for array in (self.offsets, self.tokens, self.mask):
            # Little-endian, so that the fingerprint is the same on every computer.
            digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class TokenSetReport:
    """What became of the records.

    Attributes:
        num_examples: examples in the set.
        num_truncated: examples (kept ones) that lost tokens to the length limit.
        num_truncated_tokens: tokens that those lost.
        dropped: ``file:line`` of each record left out because no trained token remained.
        num_tokens: tokens in the set.
        num_trained_tokens: tokens in the set that the loss is computed on.
    """

    num_examples: int
    num_truncated: int
    num_truncated_tokens: int
    dropped: tuple[str, ...]
    num_tokens: int
    num_trained_tokens: int


def build_token_set(
    records: Iterable[Record], renderer: Renderer, *, report: Callable[[int], None] | None = None
) -> tuple[TokenSet, TokenSetReport]:
    """Render every record; records without a trained token are left out and reported.

    Args:
        report: called after each record with the number of records done, for a progress display.

    Raises:
        DataError: no record has a trained token, or one cannot be rendered.
    """
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    cut: list[int] = []
    dropped: list[str] = []
    for done, record in enumerate(records, start=1):
        rendered = renderer.render(record)
        if rendered.mask.any():
            tokens.append(rendered.tokens)
            masks.append(rendered.mask)
            cut.append(rendered.truncated)
        else:
            dropped.append(record.where)
        if report is not None:
            report(done)
    if not tokens:
        raise DataError(
            f"none of the {len(dropped)} examples has a token to train on",
            where=dropped[0] if dropped else None,
            hint="raise --max-seq-length (long prompts push answers out), and check that the answers exist",
        )
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in tokens])]).astype(np.int64)
    result = TokenSet(np.concatenate(tokens), np.concatenate(masks), offsets)
    return result, TokenSetReport(
        num_examples=len(tokens),
        num_truncated=sum(n > 0 for n in cut),
        num_truncated_tokens=sum(cut),
        dropped=tuple(dropped),
        num_tokens=len(result.tokens),
        num_trained_tokens=int(result.mask.sum()),
    )
