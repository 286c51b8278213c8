"""Loss of a model on a set of examples, exact over any number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from allhands.data.loader import collate, cut_share
from allhands.data.order import Shuffle, divide
from allhands.data.tokens import Windows
from allhands.distributed.backend import Communicator
from allhands.distributed.groups import along
from allhands.distributed.mesh import Mesh
from allhands.distributed.reduce import sum_over_ranks
from allhands.errors import DataError, Interrupted, NumericsError
from allhands.io.trees import number, numbers
from allhands.objectives.base import Objective
from allhands.objectives.causal_lm import CAUSAL_LM
from allhands.parallel.batch_memory import arrays_of_batches
from allhands.parallel.pipeline import PipedSums
from allhands.runtime.faults import inject_fault
from allhands.runtime.sizing import Sizing
from allhands.train.result import own_numbers, totals_of


class MeanLoss(NamedTuple):
    """The mean loss a trained token, the number of those tokens, and the objective's further metrics by name."""

    loss: float
    num_targets: int
    metrics: dict[str, float]


class Evaluator:
    """Mean loss over the first ``num_batches * batch_size`` examples of a fixed shuffle (all, if negative)."""

    def __init__(
        self,
        model: nn.Module,
        windows: Windows,
        communicator: Communicator,
        mesh: Mesh,
        sizing: Sizing,
        *,
        batch_size: int,
        num_batches: int,
        cpu_native: bool,
        objective: Objective = CAUSAL_LM,
        weights: Callable[[], tuple[float, ...]] | None = None,
        stop_requested: Callable[[], int] = lambda: 0,
        beat: Callable[[str, int], None] = lambda phase, step: None,
        piped: PipedSums | None = None,
    ) -> None:
        """``stop_requested`` tells whether this rank has been asked to stop: all of them do then.

        Examples are divided among the data ranks of ``mesh``; ranks that differ on other axes compute the same ones.
        ``weights`` gives the ranks' speeds of the moment, where they are not those of ``mesh`` all the time.
        ``beat`` is called with "validate" and the number of steps done before each forward pass. ``piped`` computes the
        sums where ranks have a part of the model each.
        """
        self._model = model
        self._windows = windows
        self._communicator = communicator
        # What is added up is of each share once: ranks that compute the same one are in groups of their own.
        self._shares = communicator if piped else along(communicator, mesh, "data", "shard", alike=True)
        # Not compiled: forward passes alone gain little by it, and each shape would cost seconds.
        self._objective = objective
        self._piped = piped
        self._sums = piped or objective.sums(model, cpu_native=cpu_native, with_grad=False)
        self._arrays = arrays_of_batches()
        self._stop_requested = stop_requested
        self._beat = beat
        wanted = len(windows) if num_batches < 0 else min(len(windows), num_batches * batch_size)
        # Always the same examples, so that losses of one run, and of several, can be compared.
        self.num_windows = wanted
        self._chosen = Shuffle(len(windows), 0).at(np.arange(wanted))
        self._sizing = sizing if sizing.ladder else sizing.fitted(windows.work)
        self._data_rank, self._fixed = mesh.data_rank, mesh.weights
        self._weights_now = weights
        # Cut only once they change: for a large set that takes seconds.
        self._cut_by: tuple[float, ...] = ()
        self._parts: list[tuple[NDArray[np.int64], int]] = []

    def __call__(self, step: int = 0) -> MeanLoss:
        """The evaluation after ``step`` updates, the same on every rank.

        Raises:
            DataError: there is nothing to evaluate.
            Interrupted: a rank was asked to stop.
            NumericsError: the loss is not finite.
        """
        self._model.eval()
        objective = self._objective
        sums, counts, stop = [mx.zeros(())] * (1 + len(objective.further)), Counter[str](targets=0, tokens=0), False
        self._beat("validate", step)
        inject_fault("validate", step, self._communicator.rank)
        self._divide(self._fixed if self._weights_now is None else self._weights_now())
        for part, length in self._parts:
            self._beat("validate", step)
            batch = collate(self._windows, part, length)
            if stop := bool(self._stop_requested()):
                break
            before = sums
            found = self._sums(*self._arrays(objective.values(batch)))
            sums = [total + each for total, each in zip(sums, found, strict=True)]
            # A device has the next pass in its queue when it has done with one.
            mx.async_eval(sums)
            mx.eval(before)
            if self._piped is None or self._piped.counts:
                counts.update(objective.counts(batch))
        if self._piped is not None:
            self._piped.finish()
        self._model.train()
        self._beat("reduce", step)
        _, summed = sum_over_ranks(self._shares, [], own_numbers(sums, counts, stop))
        totals = totals_of(numbers(summed), len(objective.further))
        loss_sum, num_targets, votes = totals.loss, totals.num_targets, totals.votes
        if self._shares is not self._communicator:
            # A rank that was asked to stop is of one group, and all groups stop.
            votes = number(self._communicator.all_sum(mx.array([votes])))
        if votes:
            raise Interrupted("stopped during the evaluation: there is no result")
        if num_targets == 0:
            raise DataError("there is no example to evaluate", where="--val-batches", hint="raise it, or add examples")
        if not math.isfinite(loss_sum):
            raise NumericsError(
                f"the evaluation's loss is {loss_sum}", hint="look for NaN in the model and the adapter"
            )
        return MeanLoss(loss_sum / num_targets, num_targets, totals.metrics(objective))

    def _divide(self, weights: tuple[float, ...]) -> None:
        """Cut this rank's share by the ranks' speeds, if it is not cut by these already."""
        if weights != self._cut_by:
            share = divide(self._chosen, self._windows.work, weights)[self._data_rank]
            self._parts = list(cut_share(self._windows, share, self._sizing))
            self._cut_by = weights
