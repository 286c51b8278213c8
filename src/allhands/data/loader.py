"""From a token set to the padded arrays that a rank computes in one step.

The loader has no state but the batch number: everything follows from (seed, epoch, step), so it can be
put at any step at once, and a run on another number of ranks sees the same global batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allhands.data.order import GlobalOrder, divide, micro_batches
from allhands.data.tokens import TokenSet


@dataclass(frozen=True)
class MicroBatch:
    """Arrays of one forward and backward pass.

    Attributes:
        inputs: (B, T) int32 token ids, padded on the right with 0. Causal attention never looks right,
            so padding changes no trained position.
        positions: (N,) int32 places in the flattened (B * T) inputs whose next token is trained.
        targets: (N,) int32 the token that should follow each of them; -1 where N was padded.
        num_tokens: tokens of the examples (without padding): the work done.
    """

    inputs: NDArray[np.int32]
    positions: NDArray[np.int32]
    targets: NDArray[np.int32]
    num_tokens: int

    @property
    def num_targets(self) -> int:
        """Trained tokens."""
        return int(np.count_nonzero(self.targets >= 0))

    @property
    def padding(self) -> int:
        """Places of ``inputs`` that hold no example."""
        return self.inputs.size - self.num_tokens


@dataclass(frozen=True)
class Sizing:
    """How a share is cut and padded on this device.

    Attributes:
        max_tokens: padded tokens a micro-batch at most.
        overhead_tokens: fixed cost of a further micro-batch, in tokens.
        ladder: allowed padded lengths, ascending; empty means every length (where nothing is compiled).
    """

    max_tokens: int
    overhead_tokens: int = 32
    ladder: tuple[int, ...] = ()

    @property
    def few_shapes(self) -> bool:
        """Whether the number of trained places is padded too, because every shape is compiled."""
        return bool(self.ladder)

    def padded(self, length: int) -> int:
        """The padded length for an example of ``length``."""
        return next((step for step in self.ladder if step >= length), length)


class Loader:
    """Micro-batches of one rank for any batch of the run."""

    def __init__(
        self, tokens: TokenSet, order: GlobalOrder, sizing: Sizing, rank: int, weights: Sequence[float]
    ) -> None:
        """``weights`` holds the relative speed of every rank, this one's at ``rank``."""
        self._tokens = tokens
        self._order = order
        self._sizing = sizing
        self._rank = rank
        self._weights = tuple(weights)
        self._work = work_lengths(tokens)

    def load(self, iteration: int) -> list[MicroBatch]:
        """This rank's part of batch ``iteration`` (from 0); empty when the batch has too few examples."""
        share = divide(self._order.batch(iteration), self._work, self._weights)[self._rank]
        return list(collate_share(self._tokens, share, self._work, self._sizing))


def collate_share(
    tokens: TokenSet, share: NDArray[np.int64], work: NDArray[np.int64], sizing: Sizing
) -> Iterator[MicroBatch]:
    """Cut a rank's ``share`` of examples into micro-batches as ``sizing`` says.

    Args:
        work: (num_examples,) of :func:`work_lengths`.
    """
    lengths = np.zeros(len(work), dtype=np.int64)
    lengths[share] = [sizing.padded(int(n)) for n in work[share]]
    for part in micro_batches(share, lengths, sizing.max_tokens, sizing.overhead_tokens):
        batch = collate(tokens, part, int(lengths[part].max()))
        yield pad_targets(batch) if sizing.few_shapes else batch


def work_lengths(tokens: TokenSet) -> NDArray[np.int64]:
    """(num_examples,) input tokens that must be computed: up to the one before the last trained token."""
    if tokens.num_examples == 0:
        return np.zeros(0, dtype=np.int64)
    trained = np.flatnonzero(tokens.mask)
    # The last trained place before each example's end; every example has at least one.
    last = trained[np.searchsorted(trained, tokens.offsets[1:]) - 1]
    return (last - tokens.offsets[:-1]).astype(np.int64)


def collate(tokens: TokenSet, examples: NDArray[np.int64], length: int) -> MicroBatch:
    """Pad ``examples`` to ``length`` inputs each."""
    inputs = np.zeros((len(examples), length), dtype=np.int32)
    positions: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int32]] = []
    work = 0
    for row, example in enumerate(examples):
        ids, mask = tokens.example(int(example))
        trained = np.flatnonzero(mask)
        end = int(trained[-1])
        inputs[row, :end] = ids[:end]
        # Token i is predicted from place i - 1.
        positions.append(row * length + trained - 1)
        targets.append(ids[trained])
        work += end
    return MicroBatch(
        inputs,
        np.concatenate(positions).astype(np.int32),
        np.concatenate(targets).astype(np.int32),
        work,
    )


def pad_targets(batch: MicroBatch) -> MicroBatch:
    """Round the number of trained places up, by at most a quarter above 128, to meet fewer distinct shapes."""
    count = len(batch.targets)
    grain = max(32, 1 << max(0, count.bit_length() - 3))
    missing = -count % grain
    return MicroBatch(
        batch.inputs,
        np.pad(batch.positions, (0, missing)),
        np.pad(batch.targets, (0, missing), constant_values=-1),
        batch.num_tokens,
    )
