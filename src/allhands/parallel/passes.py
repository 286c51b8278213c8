"""This rank's forward and backward passes of an objective, summed over its micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from allhands.data.loader import MicroBatch
from allhands.distributed.reduce import Lookups
from allhands.io.trees import flatten
from allhands.kernels.fused import kernels
from allhands.objectives.base import Objective
from allhands.parallel.batch_memory import arrays_of_batches
from allhands.parallel.gradient import Computing, FlatWeights, make_gradient, make_joined_gradient
from allhands.parallel.lookups import TravellingLookups
from allhands.parallel.runahead import RunAhead
from allhands.parallel.sums import Gradients
from allhands.runtime.accelerator import device_memory


@dataclass(frozen=True)
class Computed:
    """One micro-batch's sums and gradients, lazy or computed; ``lookups`` are separate if they are
    exchanged alone.
    """

    sums: mx.array
    grads: Any
    lookups: Lookups | None = None


class Passes:
    """The gradient of an objective on this rank.

    Attributes:
        model: the trained model.
        objective: the training objective.
        computing: the way of computation.
        flat: flat buffers of all trained weights; ``None``: by name.
        shapes: (B, T, N) of every micro-batch so far; a compiled pass is traced once for each.
        meanwhile: called now and then while the host queues passes ahead, to queue work that waits
            for memory.
        run_ahead: limits a GPU's memory; ``None`` on other devices.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        computing: Computing,
        flat: FlatWeights | None,
        *,
        waits: bool,
        spares: bool = False,
    ) -> None:
        """``waits``, ``spares``: see :func:`~allhands.parallel.runahead.limit_for`, which has the
        first as ``exchanging``.
        """
        self.model = model
        self.objective = objective
        self.computing = computing
        self.flat = flat
        self.shapes: set[tuple[int, int, int]] = set()
        self.meanwhile: Callable[[], None] = lambda: None
        self.run_ahead = (
            RunAhead(device_memory(), exchanging=waits, spares=spares)
            if kernels.available()
            else None
        )
        self._to_arrays = arrays_of_batches()
        how: Any = {
            "compiled": computing.compiled,
            "dropout": computing.dropout,
            "objective": objective,
        }
        if self.flat is None:
            self._gradient = make_gradient(model, cpu_native=computing.cpu_native, **how)
        else:
            self._gradient = make_joined_gradient(model, self.flat, **how)

    def arguments(self, batch: MicroBatch) -> tuple[mx.array, ...]:
        """Return the arguments of the gradient's function."""
        values = self.objective.values(batch)
        dropout = self.computing.dropout
        if dropout is not None:
            keys = dropout.values(batch.examples, batch.inputs.shape[1], batch.iteration)
            values = (self.objective.places(keys), *values)
        return self._to_arrays(values)

    def note(self, batch: MicroBatch) -> None:
        """Send a heartbeat at the beginning of a pass."""
        traced = self.computing.compiled and not self.computing.cpu_native
        self.computing.heartbeat(
            "first" if traced and batch.shape not in self.shapes else "compute"
        )
        self.shapes.add(batch.shape)

    def run(self, batch: MicroBatch, apart: TravellingLookups | None = None) -> Computed:
        """Compute one pass; with ``apart`` the contribution of look-ups is not in the gradients, if
        the batch allows it.
        """
        arguments = self.arguments(batch)
        if apart is None or not apart.fits(batch):
            return Computed(*self._gradient(*arguments))
        return Computed(*apart(batch, arguments))

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        run: Callable[[MicroBatch], Computed],
        *,
        lazy_end: bool,
    ) -> Gradients:
        """Sums over this rank's micro-batches; zeros when it has none.

        Args:
            run: returns the pass of a micro-batch.
            lazy_end: whether the last pass is queued together with the work after it.
        """
        further = len(self.objective.further)
        total, grads, lookups = mx.zeros((1 + further,) if further else ()), None, None
        counts = Counter[str](targets=0, tokens=0)
        for number, batch in enumerate(micro_batches, 1):
            counts.update(self.objective.counts(batch))
            self.note(batch)
            done = run(batch)
            new, sums, lookups = done.grads, done.sums, done.lookups
            del done  # a reference here would keep memory beside the sums
            # Contiguous, because a transposed gradient makes the optimizer's pass several times
            # slower.
            new = tree_map(mx.contiguous, new) if grads is None else tree_map(mx.add, grads, new)
            before, total, grads = total, total + sums, new
            if lazy_end and number == len(micro_batches):
                continue
            if self.run_ahead is None:
                mx.eval(total, grads)
            else:
                # The device works on this one while the host hands out the next; no further, see
                # BatchMemory.
                mx.async_eval(total, grads)
                mx.eval(before)
        if grads is None:
            grads = tree_map(mx.zeros_like, self._trained())
        return Gradients(total, flatten(grads), counts, lookups)

    def _trained(self) -> Any:
        return self.model.trainable_parameters() if self.flat is None else self.flat.weights()

    def trained(self) -> list[mx.array]:
        """Return the trained arrays, in the order of their gradients."""
        return [array for _, array in flatten(self._trained())]

    def one_by_one(self) -> Callable[[MicroBatch], tuple[mx.array, Any]]:
        """Return the gradient of single examples, not compiled, because each shape is computed only
        once.
        """
        cpu_native, dropout = self.computing.cpu_native, self.computing.dropout
        gradient = make_gradient(
            self.model,
            cpu_native=cpu_native,
            compiled=False,
            dropout=dropout,
            objective=self.objective,
        )
        return lambda batch: gradient(*self.arguments(batch))
