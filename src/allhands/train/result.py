"""The result of a step, and the numbers of it that ranks add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from allhands.distributed.reduce import count_parts, lazy_count, whole_count
from allhands.io.trees import number, numbers
from allhands.objectives.base import Objective
from allhands.parallel.sums import Reduced, Times

# A step's numbers: loss, trained tokens and tokens in two parts each, votes; then the objective's
# further sums.
_TARGETS, _TOKENS, _VOTES, _FURTHER = 1, 3, 5, 6


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer update; only the times differ between ranks.

    Attributes:
        loss_sum: sum of the loss over all trained tokens of the global batch.
        num_targets: number of trained tokens of the global batch.
        num_tokens: number of computed tokens, with prompts, without padding; counted also if the
            update was skipped.
        grad_norm: global norm of the mean gradient, before clipping.
        stop_votes: ranks that have been asked to stop.
        compute_s: time of this rank's forward and backward passes.
        comm_s: time of this rank in the all-reduce, waiting for slower ranks included.
        skipped: reason why the update was not applied ("the gradient is nan"); model and optimizer
            are then unchanged, ``loss_sum`` and ``num_targets`` are 0, and ``further`` is empty.
            ``""`` if it was applied.
        culprits: numbers (from 0) of the windows whose loss or gradient is not finite; the first
            eight of each rank.
        gathered: the extra numbers of all ranks, one rank after the other; empty if the strategy
            does not exchange them in this step.
        further: the objective's further sums over the global batch, in its order.
        pace: tokens of this rank's passes, seconds of these passes, and seconds of its update;
            zeros if it had no passes, or if they were not timed.
        sent_bytes: bytes that this rank has sent, by
            :func:`allhands.distributed.backend.sent_bytes`.
    """

    loss_sum: float
    num_targets: int
    num_tokens: int
    grad_norm: float
    stop_votes: int
    compute_s: float
    comm_s: float
    skipped: str = ""
    culprits: tuple[int, ...] = ()
    gathered: tuple[float, ...] = ()
    further: tuple[float, ...] = ()
    pace: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sent_bytes: int = 0

    def of_each(self, num_ranks: int, some: slice) -> tuple[float, ...]:
        """Return ``some`` of the extra numbers of each rank, one rank after the other."""
        each = len(self.gathered) // num_ranks
        rows = (self.gathered[rank * each : (rank + 1) * each] for rank in range(num_ranks))
        return tuple(value for row in rows for value in row[some])


def result_of(
    totals: mx.array, norm: mx.array, times: Times, num_further: int, *, num_gathered: int = 0
) -> StepResult:
    """Return the result of a step from the sums over ranks of :func:`own_numbers`.

    Other numbers may follow these sums; the last ``num_gathered`` are the extra numbers of ranks.
    """
    values = numbers(totals)
    found = totals_of(values, num_further)
    return StepResult(
        loss_sum=found.loss,
        num_targets=found.num_targets,
        num_tokens=found.num_tokens,
        grad_norm=number(norm),
        stop_votes=int(found.votes),
        compute_s=times.compute_s,
        comm_s=times.comm_s,
        gathered=tuple(values[len(values) - num_gathered :]),
        further=found.further,
    )


class Totals(NamedTuple):
    """The numbers of a step or an evaluation, over all ranks."""

    loss: float
    num_targets: int
    num_tokens: int
    votes: float
    further: tuple[float, ...]

    def metrics(self, objective: Objective) -> dict[str, float]:
        """Return the further metrics of ``objective``, besides the mean loss."""
        counted = {"loss": self.loss, "targets": self.num_targets, "tokens": self.num_tokens}
        return objective.metrics(
            {**counted, **dict(zip(objective.further, self.further, strict=True))}
        )


def own_numbers(
    sums: Sequence[mx.array], counts: Mapping[str, int], stop: bool
) -> list[float | mx.array]:
    """Return the numbers that this rank adds: its sums, the loss first, its counts, and its vote to
    stop.
    """
    loss, *further = sums
    return [
        loss,
        *count_parts(counts["targets"]),
        *count_parts(counts["tokens"]),
        float(stop),
        *further,
    ]


def totals_of(values: Sequence[float], num_further: int) -> Totals:
    """Return the totals from the sums over ranks of :func:`own_numbers`; other numbers may follow
    them.
    """
    return Totals(
        values[0],
        whole_count(*values[_TARGETS:_TOKENS]),
        whole_count(*values[_TOKENS:_VOTES]),
        values[_VOTES],
        tuple(values[_FURTHER : _FURTHER + num_further]),
    )


def all_finite(loss: mx.array, norm: mx.array) -> bool:
    """True if the loss and the gradient are finite."""
    return math.isfinite(number(loss)) and math.isfinite(number(norm))


def divisor_of(reduced: Reduced) -> mx.array:
    """() float32, lazy: the divisor of gradients, which is the number of trained tokens of the
    global batch.
    """
    return (
        lazy_count(reduced.totals[_TARGETS:_TOKENS]) if reduced.divisor is None else reduced.divisor
    )


def not_finite(result: StepResult) -> str:
    """Return a text about the number that is not finite; empty if all are finite."""
    values = {"loss": result.loss_sum, "gradient": result.grad_norm}
    return next(
        (f"the {name} is {value}" for name, value in values.items() if not math.isfinite(value)), ""
    )
