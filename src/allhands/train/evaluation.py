"""Loss of a model on a set of examples, exact over any number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from allhands.data.loader import collate, cut_share
from allhands.data.order import Shuffle, divide
from allhands.data.tokens import Windows
from allhands.distributed.backend import Communicator, SingleProcess
from allhands.distributed.groups import along
from allhands.distributed.mesh import Mesh
from allhands.distributed.reduce import sum_over_ranks
from allhands.errors import DataError, Interrupted, NumericsError
from allhands.io.trees import number, numbers
from allhands.objectives.base import Objective
from allhands.objectives.causal_lm import CAUSAL_LM
from allhands.parallel.batch_memory import arrays_of_batches
from allhands.runtime.faults import inject_fault
from allhands.runtime.sizing import Sizing
from allhands.train.result import own_numbers, totals_of

_PASSES_PER_STAGE = 8  # batches between two checks for a stop, times the ranks of a pipeline


class MeanLoss(NamedTuple):
    """Mean loss per trained token, number of these tokens, and the objective's further metrics by
    name.
    """

    loss: float
    num_targets: int
    metrics: dict[str, float]


class SumsTogether(Protocol):
    """Function for the objective's sums of a batch, if each rank has a part of the model.

    Attributes:
        heartbeat: called with "reduce" before waiting for other ranks, and with "compute"
            afterwards.
    """

    heartbeat: Callable[[str], None]

    @property
    def counts(self) -> bool:
        """True if this rank's sums are to be counted."""
        ...

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Return the sums of a batch."""
        ...

    def finish(self) -> None:
        """End an evaluation; called on all ranks together."""
        ...


@dataclass
class Evaluator:
    """Mean loss over the first ``num_batches * batch_size`` examples of a fixed shuffle; all if
    negative.

    Attributes:
        mesh: examples are divided among its data ranks; ranks that differ on other axes compute the
            same ones.
        weights: returns the present speeds of the ranks, if they are not always those of ``mesh``.
        stop_requested: returns whether this rank was asked to stop; all ranks then stop.
        beat: called with a phase and the number of completed steps: "validate" before each forward
            pass, and "reduce" before waiting for other ranks.
        together: computes the sums if each rank has a part of the model.
        same_rows: the ranks that compute the same rows together; a request to stop one of them
            stops all.
    """

    model: nn.Module
    windows: Windows
    communicator: Communicator
    mesh: Mesh
    sizing: Sizing
    _: KW_ONLY
    batch_size: int
    num_batches: int
    cpu_native: bool
    objective: Objective = CAUSAL_LM
    weights: Callable[[], tuple[float, ...]] | None = None
    stop_requested: Callable[[], int] = lambda: 0
    beat: Callable[[str, int], None] = lambda phase, step: None
    together: SumsTogether | None = None
    same_rows: Communicator = field(default_factory=SingleProcess)

    def __post_init__(self) -> None:
        # Each share is added up once: the ranks of a group compute different shares, and ranks that
        # compute the same share are in different groups.
        self._shares = along(
            self.communicator, self.mesh, "data", "shard", "pipe", "expert", "context", alike=True
        )
        # Not compiled: forward passes alone gain little, and each shape would cost seconds.
        self._sums = self.together or self.objective.sums(
            self.model, cpu_native=self.cpu_native, with_grad=False
        )
        self._arrays = arrays_of_batches()
        found, wanted = len(self.windows), self.num_batches * self.batch_size
        # Always the same examples, so that losses of one run, and of several, can be compared.
        self.num_windows = found if self.num_batches < 0 else min(found, wanted)
        self._chosen = Shuffle(found, 0).at(np.arange(self.num_windows))
        self._sizing = self.sizing if self.sizing.ladder else self.sizing.fitted(self.windows.work)
        # Cut again only if shares change, because that takes seconds for a large set.
        self._cut_by: tuple[float, ...] = ()
        self._parts: list[tuple[NDArray[np.int64], int]] = []

    def __call__(self, step: int = 0) -> MeanLoss:
        """Evaluate the model after ``step`` updates; the result is the same on every rank.

        Raises:
            DataError: there is nothing to evaluate.
            Interrupted: a rank was asked to stop.
            NumericsError: the loss is not finite.
        """
        self.model.eval()
        objective = self.objective
        sums, counts, stop = (
            [mx.zeros(())] * (1 + len(objective.further)),
            Counter[str](targets=0, tokens=0),
            False,
        )
        self.beat("validate", step)
        self._tell_waits(step)
        inject_fault("validate", step, self.communicator.rank)
        self._divide(self.mesh.weights if self.weights is None else self.weights())
        for place, (part, length) in enumerate(self._parts):
            self.beat("validate", step)
            batch = collate(self.windows, part, length)
            if stop := self._stops(place):
                break
            before = sums
            found = self._sums(*self._arrays(objective.values(batch)))
            sums = [total + each for total, each in zip(sums, found, strict=True)]
            # A device has the next pass in its queue when it finishes one.
            mx.async_eval(sums)
            mx.eval(before)
            if self.together is None or self.together.counts:
                counts.update(objective.counts(batch))
        if self.together is not None:
            self.together.finish()
        self.model.train()
        self.beat("reduce", step)
        _, summed = sum_over_ranks(self._shares, [], own_numbers(sums, counts, stop))
        totals = totals_of(numbers(summed), len(objective.further))
        loss_sum, num_targets, votes = totals.loss, totals.num_targets, totals.votes
        if self._shares is not self.communicator:
            # Only the group of a rank that was asked to stop has its vote, but all groups stop.
            votes = number(self.communicator.all_sum(mx.array([votes])))
        if votes:
            raise Interrupted("stopped during the evaluation: there is no result", code="stopped")
        if num_targets == 0:
            raise DataError(
                "there is no example to evaluate",
                code="split-empty",
                where="--val-batches",
                hint="raise it, or add examples",
            )
        if not math.isfinite(loss_sum):
            raise NumericsError(
                f"the evaluation's loss is {loss_sum}",
                code="loss-not-finite",
                hint="look for NaN in the model and the adapter",
            )
        return MeanLoss(loss_sum / num_targets, num_targets, totals.metrics(objective))

    def _tell_waits(self, step: int) -> None:
        """Let a waiting rank send heartbeats, because it does not hang."""
        if self.together is not None:
            self.together.heartbeat = lambda phase: self.beat(
                "reduce" if phase == "reduce" else "validate", step
            )

    def _stops(self, part: int) -> bool:
        """True if this rank, or another rank with the same rows, was asked to stop."""
        if self.same_rows.size == 1:
            return bool(self.stop_requested())
        # The stages of a pipeline wait for each other at each check, so checks are rare.
        if self.together is not None and part % (_PASSES_PER_STAGE * self.same_rows.size):
            return False
        return bool(number(self.same_rows.all_sum(mx.array(float(bool(self.stop_requested()))))))

    def _divide(self, weights: tuple[float, ...]) -> None:
        """Cut this rank's share by the ranks' speeds, if they have changed since the last cut."""
        if weights != self._cut_by:
            share = divide(self._chosen, self.windows.work, weights)[self.mesh.data_rank]
            self._parts = list(cut_share(self.windows, share, self._sizing))
            self._cut_by = weights
