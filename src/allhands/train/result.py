"""What a step tells of itself, and the numbers of it that ranks add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.trees import number, numbers

# Where among the sums of a step's numbers those of the gradients' squares are, where ranks have parts of them.
SQUARES = 4


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
    loss_sum, num_targets, num_tokens, votes = numbers(totals)[:SQUARES]
    return replace(
        timed,
        loss_sum=loss_sum,
        num_targets=int(num_targets),
        num_tokens=int(num_tokens),
        grad_norm=number(norm),
        stop_votes=int(votes),
    )


def counts(micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Trained tokens and tokens of them all."""
    return sum(batch.num_targets for batch in micro_batches), sum(batch.num_tokens for batch in micro_batches)


def not_finite(result: StepResult) -> str:
    """What is not finite, in words; empty if all is well."""
    values = {"loss": result.loss_sum, "gradient": result.grad_norm}
    return next((f"the {name} is {value}" for name, value in values.items() if not math.isfinite(value)), "")
