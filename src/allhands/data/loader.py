"""Loader: cuts a rank's share of each global batch into padded micro-batches.

A loader needs no state except the batch number. Everything follows from (seed, epoch, batch), so a
run can start at any batch at once, and a run on another number of ranks sees the same global
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from allhands.data.arrays import Int32s, Ints
from allhands.data.order import GlobalOrder, divide, micro_batches
from allhands.data.tokens import Windows
from allhands.runtime.sizing import Sizing


@dataclass(frozen=True)
class MicroBatch:
    """Arrays of one forward and backward pass.

    Attributes:
        inputs: (B, T) int32 token ids, padded on the right with 0. Causal attention never looks
            right, so padding changes no trained position.
        positions: (N,) int32 places in the flattened (B * T) inputs whose next token is trained.
        targets: (N,) int32 the token that should follow each of them; -1 where N was padded.
        num_tokens: tokens of the examples (without padding): the work done.
        examples: (B,) int32 number of the window in each row.
        documents: (B, T) int32 number of the document of each place; a place attends only to places
            of its document. ``None`` where each row is one document or documents may see each
            other.
        iteration: number of the micro-batch's global batch.
        sole: True if every rank is known to have exactly one micro-batch of that batch.
        most: if ``sole``, the largest number of places of ``inputs`` on any rank; else 0.
    """

    inputs: Int32s
    positions: Int32s
    targets: Int32s
    num_tokens: int
    examples: Int32s
    documents: Int32s | None = None
    iteration: int = 0
    sole: bool = False
    most: int = 0

    @property
    def num_targets(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.targets >= 0))

    @property
    def padding(self) -> int:
        """Places of ``inputs`` that hold no example."""
        return self.inputs.size - self.num_tokens

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, N): a compiled step is traced once for each."""
        rows, width = self.inputs.shape
        return rows, width, len(self.targets)

    def alone(self, row: int) -> MicroBatch:
        """Return one row as a micro-batch of its own, with the same width; its padding counts as
        tokens.
        """
        width = self.inputs.shape[1]
        its = (self.positions // width == row) & (self.targets >= 0)
        return MicroBatch(
            self.inputs[row : row + 1],
            self.positions[its] - np.int32(row * width),
            self.targets[its],
            width,
            self.examples[row : row + 1],
            None if self.documents is None else self.documents[row : row + 1],
            self.iteration,
        )


@dataclass(frozen=True)
class Cut:
    """Division of a batch among ranks.

    Attributes:
        weights: relative speed of each rank.
        some: ranks that get an example even if they are too slow for one.
        begin: the first batch of the same update.
    """

    weights: tuple[float, ...]
    some: tuple[int, ...] = ()
    begin: int = 0


class Largest(NamedTuple):
    """The size of a rank's largest work.

    Attributes:
        tokens: padded tokens of the largest micro-batch.
        micro_batches: the most micro-batches in a batch.
        lengths: number of different lengths of rows.
        longest: padded length of the longest row.
    """

    tokens: int
    micro_batches: int
    lengths: int = 1
    longest: int = 1


def num_lengths(work: Ints | Int32s) -> int:
    """Return the number of different lengths in ``work``, the tokens of each row."""
    return len(np.unique(work))


class Loader:
    """Micro-batches of one rank for any batch of the run."""

    def __init__(
        self,
        windows: Windows,
        order: GlobalOrder,
        sizing: Sizing,
        rank: int,
        weights: Sequence[float],
        *,
        alike: bool = False,
        cut_of: Callable[[int], Cut] | None = None,
    ) -> None:
        """``weights`` holds the relative speed of every rank, this one's at ``rank``.

        ``alike``: all ranks cut their shares by the same ``sizing``, so that this rank knows the
        micro-batches of the others. ``cut_of`` gives the division of each batch, if weights change
        in the course of the run.
        """
        self._alike = alike
        self._cut_of = cut_of
        self._so_far: tuple[int, tuple[float, ...]] = (-1, ())
        self._windows = windows
        self._order = order
        self._sizing = sizing
        self._rank = rank
        self._weights = tuple(weights)

    def load(self, iteration: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of batch ``iteration`` (from 0).

        The list is empty if this rank has no example of the batch.
        """
        shares = self.shares(iteration)
        most = self._most_of_one(shares) if self._alike else 0
        parts = collate_share(
            self._windows, shares[self._rank], self._sizing, self._order.epoch(iteration)
        )
        return [replace(part, iteration=iteration, sole=most > 0, most=most) for part in parts]

    def shares(self, iteration: int) -> list[Ints]:
        """Return the examples of each rank in batch ``iteration``.

        Batches of one update follow each other without an exchange, so a rank with a smaller share
        of one batch gets a larger share of the next.
        """
        cut = self._cut(iteration)
        before = self._tokens_before(iteration, cut.begin)
        return divide(
            self._order.batch(iteration),
            self._windows.work,
            cut.weights,
            before=before,
            some=cut.some,
        )

    def _cut(self, iteration: int) -> Cut:
        return (
            Cut(self._weights, begin=iteration) if self._cut_of is None else self._cut_of(iteration)
        )

    def _tokens_before(self, iteration: int, begin: int) -> tuple[float, ...]:
        """Return the tokens of each rank in the batches from ``begin`` to before ``iteration``.

        All of them belong to one update. The tuple is empty if there are none.
        """
        if iteration <= begin:
            return ()
        at, tokens = self._so_far
        if at != iteration:
            work = self._windows.work
            before = self._tokens_before(iteration - 1, begin) or (0.0,) * len(self._weights)
            new = [float(work[share].sum()) for share in self.shares(iteration - 1)]
            tokens = tuple(old + more for old, more in zip(before, new, strict=True))
            self._so_far = iteration, tokens
        return tokens

    def largest(self, weights: Sequence[float] = ()) -> Largest:
        """Return the size of this rank's largest work.

        Args:
            weights: relative speeds to use instead of this loader's.
        """
        tokens, most, longest = 0, 0, 1
        for batch in self._order.longest():
            share = divide(batch, self._windows.work, tuple(weights) or self._weights)[self._rank]
            parts = list(cut_share(self._windows, share, self._sizing))
            most = max(most, len(parts))
            tokens = max(tokens, *(len(part) * length for part, length in parts), 0)
            longest = max(longest, *(length for _, length in parts), 1)
        return Largest(tokens, most, num_lengths(self._windows.work), longest)

    def _most_of_one(self, shares: Sequence[Ints]) -> int:
        """Return the most places of a share if each share is one micro-batch; else 0."""
        cuts = [list(cut_share(self._windows, share, self._sizing)) for share in shares]
        if all(len(cut) == 1 for cut in cuts):
            return max(len(part) * length for [(part, length)] in cuts)
        return 0


def collate_share(
    windows: Windows, share: Ints, sizing: Sizing, epoch: int = 0
) -> Iterator[MicroBatch]:
    """Cut a rank's ``share`` of an epoch's windows into micro-batches as ``sizing`` says."""
    for part, length in cut_share(windows, share, sizing):
        batch = collate(windows, part, length, epoch)
        yield pad_targets(batch) if sizing.few_shapes else batch


def cut_share(windows: Windows, share: Ints, sizing: Sizing) -> Iterator[tuple[Ints, int]]:
    """Cut a ``share`` into micro-batches; yield the windows of each, and their padded length."""
    work, groups = windows.work, [share]
    if sizing.alike:
        groups = [share[work[share] == length] for length in np.unique(work[share])]
    for rows in groups:
        for part in micro_batches(
            rows, sizing.padded(work[rows]), sizing.max_tokens, sizing.overhead_tokens
        ):
            yield part, int(sizing.padded(work[part]).max())


def collate(windows: Windows, chosen: Ints, length: int, epoch: int = 0) -> MicroBatch:
    """Pad the windows ``chosen`` of an epoch to ``length`` inputs each."""
    parts = [windows.window(int(i), epoch) for i in chosen]
    inputs = np.zeros((len(parts), length), dtype=np.int32)
    isolated = any(part.documents is not None for part in parts)
    # Padding is a document of its own: nothing looks at it, and it looks at nothing but itself.
    documents = np.full((len(parts), length), -1, dtype=np.int32) if isolated else None
    for row, part in enumerate(parts):
        inputs[row, : len(part.inputs)] = part.inputs
        if documents is not None:
            documents[row, : len(part.inputs)] = 0 if part.documents is None else part.documents
    return MicroBatch(
        inputs,
        np.concatenate([row * length + part.positions for row, part in enumerate(parts)]).astype(
            np.int32
        ),
        np.concatenate([part.targets for part in parts]).astype(np.int32),
        sum(len(part.inputs) for part in parts),
        chosen.astype(np.int32),
        documents,
    )


def pad_targets(batch: MicroBatch) -> MicroBatch:
    """Round the number of trained places up, to have fewer different shapes.

    The number grows to a multiple of 32, or above 128 by less than a quarter.
    """
    count = len(batch.targets)
    grain = max(32, 1 << max(0, count.bit_length() - 3))
    missing = -count % grain
    return replace(
        batch,
        positions=np.pad(batch.positions, (0, missing)),
        targets=np.pad(batch.targets, (0, missing), constant_values=-1),
    )
