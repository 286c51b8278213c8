"""Values that the parts of a step pass to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from allhands.distributed.backend import Communicator
from allhands.distributed.reduce import Lookups, PendingReduce

Named = tuple[str, mx.array]


@dataclass(frozen=True)
class Gradients:
    """This rank's sums over its micro-batches.

    Attributes:
        sums: sums of the objective: () for the loss alone, else (1 + further,).
        grads: gradients by name, or in the order of the flat weights.
        counts: counts of the objective over the micro-batches.
        lookups: gradients of a table's looked-up rows, if they are exchanged separately.
        pending: the exchange of ``grads``, if it was started with the pass.
        ahead: True if the first pass was queued before the step began.
        waited_s: seconds that this rank has waited for others within its passes.
    """

    sums: mx.array
    grads: list[Named]
    counts: Mapping[str, int]
    lookups: Lookups | None = None
    pending: PendingReduce | None = None
    ahead: bool = False
    waited_s: float = 0.0

    @property
    def each_sum(self) -> list[mx.array]:
        """The sums one by one, the loss first."""
        return [self.sums] if self.sums.ndim == 0 else [self.sums[i] for i in range(len(self.sums))]

    @property
    def num_targets(self) -> int:
        """Number of tokens by which this rank's loss would be divided if it were alone."""
        return self.counts["targets"]


@dataclass(frozen=True)
class Reduced:
    """Sums over all ranks.

    Attributes:
        grads: as in :class:`Gradients`; this rank's part of sharded arrays. The updater empties the
            list, because MLX computes in place if an array is not referenced.
        totals: (n,) float32, the sums of the numbers that were given to the strategy, and of further
            ones.
        squares: () sum of squares of all gradients over all ranks; ``None``: each rank has all
            ``grads``.
        computed: arrays that are computed when this rank's own passes are done, if the exchange
            overlaps them.
        divisor: () divisor of the gradients; ``None``: the trained tokens among ``totals``.
        num_gathered: number of the ranks' extra numbers, which are the last ones of ``totals``.
        norm: () the reported gradient norm if each rank updates by its own gradients; not finite if
            any rank's gradient is not, and then no rank updates.
        idle: True if this step has no update.
    """

    grads: list[Named]
    totals: mx.array
    squares: mx.array | None = None
    computed: tuple[mx.array, ...] = ()
    divisor: mx.array | None = None
    num_gathered: int = 0
    norm: mx.array | None = None
    idle: bool = False

    @property
    def loss(self) -> mx.array:
        """() the summed loss; not finite if :attr:`norm` is not finite."""
        return self.totals[0] if self.norm is None else self.totals[0] + 0.0 * self.norm


@dataclass(frozen=True)
class Times:
    """Seconds of a step on this rank; ``comm_s`` is its wait for other ranks and for the exchange."""

    compute_s: float
    comm_s: float

    @property
    def whole_s(self) -> float:
        return self.compute_s + self.comm_s


def added(total: Sequence[mx.array], new: Sequence[mx.array]) -> list[mx.array]:
    """Return the sums of two lists of arrays, one by one; an empty one counts as zeros."""
    if not total or not new:
        return list(total or new)
    return [a + b for a, b in zip(total, new, strict=True)]


def joined(sums: Sequence[mx.array], further: int) -> mx.array:
    """Return an objective's sums as :attr:`Gradients.sums` has them; zeros for none.

    Args:
        further: number of the sums besides the loss.
    """
    if not sums:
        return mx.zeros((1 + further,) if further else ())
    return mx.stack(list(sums)) if further else sums[0]


def places_of_all(mine: Sequence[float], communicator: Communicator) -> list[float]:
    """Return places for every rank's numbers, with only this rank's filled; their sum over ranks
    has all.
    """
    rank, size = communicator.rank, communicator.size
    return [*[0.0] * (rank * len(mine)), *mine, *[0.0] * ((size - rank - 1) * len(mine))]
