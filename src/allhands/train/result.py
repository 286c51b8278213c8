"""What a step tells of itself, and the numbers of it that ranks add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.reduce import count_parts, lazy_count, whole_count
from allhands.trees import number, numbers

# A step's numbers: loss, trained tokens and tokens in two parts each, votes; then the gradients' squares, where ranks
# have parts of them.
_TARGETS, _TOKENS, _VOTES, SQUARES = 1, 3, 5, 6


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer update, the same on every rank but for the times.

    Attributes:
        loss_sum: over all trained tokens of the global batch.
        num_targets: trained tokens of the global batch.
        num_tokens: tokens computed, prompts included, padding not.
        grad_norm: global norm of the mean gradient, before clipping.
        stop_votes: ranks that have been asked to stop.
        compute_s: time of this rank's forward and backward passes.
        comm_s: time of this rank in the all-reduce, waiting for slower ranks included.
        skipped: why the update was not applied ("the gradient is nan"), model and optimizer being as before and
            ``loss_sum`` and ``num_targets`` 0; empty if it was.
        culprits: numbers (from 0) of the windows whose loss or gradient is not finite; the first eight of each rank.
        told: what the ranks were given to tell all others, one after the other; empty where a rank that is asked for
            it after a step waits for nothing.
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
    told: tuple[float, ...] = ()


def filled(timed: StepResult, totals: mx.array, norm: mx.array) -> StepResult:
    """``timed`` with the numbers of the step: sums of loss, trained tokens, tokens and votes."""
    values = numbers(totals)
    return replace(
        timed,
        loss_sum=values[0],
        num_targets=whole_count(*values[_TARGETS:_TOKENS]),
        num_tokens=whole_count(*values[_TOKENS:_VOTES]),
        grad_norm=number(norm),
        stop_votes=int(values[_VOTES]),
    )


def own_numbers(loss: mx.array, micro_batches: Sequence[MicroBatch], stop: bool) -> list[float | mx.array]:
    """What this rank adds to the numbers of the step."""
    num_targets = sum(batch.num_targets for batch in micro_batches)
    num_tokens = sum(batch.num_tokens for batch in micro_batches)
    return [loss, *count_parts(num_targets), *count_parts(num_tokens), float(stop)]


def num_targets_of(totals: mx.array) -> mx.array:
    """() float32, lazy: trained tokens of the global batch."""
    return lazy_count(totals[_TARGETS:_TOKENS])


def not_finite(result: StepResult) -> str:
    """What is not finite, in words; empty if all is well."""
    values = {"loss": result.loss_sum, "gradient": result.grad_norm}
    return next((f"the {name} is {value}" for name, value in values.items() if not math.isfinite(value)), "")
