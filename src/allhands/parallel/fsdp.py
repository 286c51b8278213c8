"""Fully sharded data parallelism: each rank keeps a part of every array, of its gradient and of its optimizer state.

Every rank computes rows of its own with whole weights, which it fetches for one block at a time: in the forward pass,
and again in the backward pass, which computes the block once more from its input. A rank adds its gradients to those of
the others as they come, and keeps its part of the sums (ZeRO-3, arXiv 1910.02054).

What is fetched and added up is the same on all ranks at the same time. A rank without a micro-batch takes part in that,
and computes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator, on_stream
from allhands.distributed.packed import Left
from allhands.distributed.reduce import sum_over_ranks
from allhands.io.trees import flatten
from allhands.objectives.base import Objective
from allhands.parallel.base import Exchanging, Expected, Strategy
from allhands.parallel.engine import StageCompute
from allhands.parallel.gradient import Computing
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Passes
from allhands.parallel.sharding import DividedRow, Sharding, Unit
from allhands.parallel.sums import Gradients, Reduced


def fully_sharded(exchanging: Exchanging, overlap: bool) -> FullySharded:
    """Make the strategy of ``--strategy fsdp``."""
    return FullySharded(exchanging)


@dataclass
class _Sums:
    """The sums of a step: ``sums`` of the objective, and this rank's part of the gradients by row."""

    sums: list[mx.array] = field(default_factory=list[mx.array])
    parts: dict[int, mx.array] = field(default_factory=dict[int, mx.array])

    def add_sums(self, new: Sequence[mx.array]) -> None:
        self.sums = [a + b for a, b in zip(self.sums, new, strict=True)] if self.sums else list(new)

    def add_part(self, row: DividedRow, new: mx.array) -> None:
        before = self.parts.get(id(row))
        self.parts[id(row)] = new if before is None else before + new


class FullySharded(Strategy):
    """:class:`~allhands.parallel.base.Strategy` of ranks that have divided all arrays of the model."""

    name = "fsdp"
    passes_wait = True
    in_step = True

    def __init__(self, exchanging: Exchanging) -> None:
        assert exchanging.sharding is not None
        # Fetched weights travel while blocks are computed.
        self._exchanging, stream = exchanging.apart()
        self.communicator = self._exchanging.communicator
        self._sharding = exchanging.sharding.moved(lambda group: on_stream(group, stream))
        self.left: list[Left] = []
        self._compute: list[StageCompute] = []
        self._waited_s = 0.0
        self.regions = self._sharding.regions

    def prepare(self, passes: Passes, expected: Expected) -> None:
        self._compute = computes(self._sharding, passes.objective, passes.computing)

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        before, objective, found = self._waited_s, passes.objective, _Sums()
        counts = {"targets": 0, "tokens": 0}
        left = list(micro_batches)
        while self._sharding.anyone(bool(left)):
            batch = left.pop(0) if left else None
            if batch is not None:
                passes.note(batch)
                counts = {key: counts[key] + value for key, value in objective.counts(batch).items()}
            self._pass(passes, batch, found)
        self._sharding.forget()
        further = len(objective.further)
        total = mx.zeros((1 + further,) if further else ())
        if found.sums:
            total = mx.stack(found.sums) if further else found.sums[0]
        self._wait([total, *found.parts.values()])
        return Gradients(total, self._named(found), counts, waited_s=self._waited_s - before)

    def _named(self, found: _Sums) -> list[tuple[str, mx.array]]:
        """This rank's gradients by name, in the order of its trained arrays."""
        own = dict(pair for row in self._sharding.rows if row.trained for pair in row.named(found.parts[id(row)]))
        return [(name, own[name]) for name, _ in flatten(self._sharding.parts.trainable_parameters())]

    def _pass(self, passes: Passes, batch: MicroBatch | None, found: _Sums) -> None:
        """Compute a micro-batch, or with ``None`` take part in what others exchange for theirs."""
        sharding, first = self._sharding, self._sharding.first_trained
        arguments = () if batch is None else passes.arguments(batch)
        received: dict[int, mx.array] = {}
        hidden: mx.array | None = None
        for place, _ in enumerate(sharding.fetched(sharding.units[:-1], self._wait)):
            if batch is not None:
                if hidden is not None and place >= first:
                    received[place] = hidden
                hidden = self._compute[place].forward(hidden, arguments)[0]
                mx.eval(hidden)
        last = len(sharding.units) - 1
        if hidden is not None:
            received[last] = hidden
        del hidden
        cotangent: mx.array | None = None
        for place, unit in zip(
            range(last, first - 1, -1), sharding.fetched(sharding.units[first:][::-1], self._wait), strict=True
        ):
            gradients: list[mx.array] | None = None
            if batch is not None:
                compute = self._compute[place]
                outputs, cotangent, gradients = compute.begin(received.pop(place, None), cotangent, arguments)
                mx.eval(outputs, gradients, [] if cotangent is None else cotangent)
                if place == last:
                    found.add_sums(outputs)
            self._push(unit, gradients, found)

    def _push(self, unit: Unit, gradients: list[mx.array] | None, found: _Sums) -> None:
        rest = gradients
        for row in unit.trained_rows:
            own = None
            if rest is not None:
                own, rest = rest[: len(row.places)], rest[len(row.places) :]
            self._exchanging.inject_fault("message")
            found.add_part(row, self._sharding.push(row, own))

    def _wait(self, arrays: list[mx.array]) -> None:
        """Wait for what other ranks send."""
        self._exchanging.heartbeat("reduce")
        began = time.perf_counter()
        mx.eval(arrays)
        self._waited_s += time.perf_counter() - began
        self._exchanging.heartbeat("compute")

    def one_by_one(self, passes: Passes) -> tuple[Callable[[MicroBatch | None], tuple[mx.array, Any]], Communicator]:
        def gradient(batch: MicroBatch | None) -> tuple[mx.array, Any]:
            found = _Sums()
            self._pass(passes, batch, found)
            return found.sums[0] if found.sums else mx.zeros(()), list(found.parts.values())

        return gradient, self._sharding.world

    def reduce(self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()) -> Reduced:
        exchanging, data = self._exchanging, self._sharding.data
        exchanging.heartbeat("reduce")
        arrays = [gradient for _, gradient in mine.grads]
        if data.size > 1:
            arrays, _ = sum_over_ranks(data, arrays, bucket_bytes=exchanging.bucket_bytes)
            mx.eval(arrays)
        squares = sum_of_squares(arrays) if data.rank == 0 else mx.zeros(())
        named = [(name, array) for (name, _), array in zip(mine.grads, arrays, strict=True)]
        return exchanging.reduced(named, numbers, squares, extra)


def computes(sharding: Sharding, objective: Objective, computing: Computing) -> list[StageCompute]:
    """Return the passes of each unit."""
    # Not compiled: a function for each block would take as long to trace as many steps.
    how, first = replace(computing, compiled=False), sharding.first_trained
    return [
        StageCompute(unit.stage, objective, how, unit, goes_on=place > first)
        for place, unit in enumerate(sharding.units)
    ]


class FetchedSums:
    """The sums of a batch by forward passes alone, of which all ranks do the same number together."""

    counts = True

    def __init__(self, sharding: Sharding, objective: Objective) -> None:
        self._sharding, self._further = sharding, len(objective.further)
        self._compute = computes(sharding, objective, Computing(cpu_native=False))

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        self._sharding.anyone(True)
        return self._pass(arrays)

    def finish(self) -> None:
        """Take part in the passes that others still have to do."""
        while self._sharding.anyone(False):
            self._pass(None)
        self._sharding.forget()

    def _pass(self, arrays: tuple[mx.array, ...] | None) -> tuple[mx.array, ...]:
        found: list[mx.array] = []
        for place, _ in enumerate(self._sharding.fetched(self._sharding.units, mx.eval)):
            if arrays is not None:
                found = self._compute[place].forward(found[0] if found else None, arrays)
                mx.eval(found)
        return tuple(found or [mx.zeros(())] * (1 + self._further))


class FetchedModel:
    """A model of which each rank keeps a part, called for the logits of the next token on all ranks together.

    Attributes:
        model: without its arrays; what is not called is looked up there.
    """

    def __init__(self, sharding: Sharding) -> None:
        self.model: Any = sharding.model
        self._sharding = sharding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
        """(B, 1, V) float32 logits of what follows (B, T) tokens."""
        if cache is not None:
            more["cache"] = cache
        hidden: mx.array | None = None
        for unit in self._sharding.fetched(self._sharding.units, mx.eval):
            with unit.stage.computing(hidden):
                if unit.stage.blocks.is_last:
                    hidden = self.model(inputs, **more)[:, -1:].astype(mx.float32)
                else:
                    hidden = unit.stage.hidden(inputs, **more)
            mx.eval(hidden)
        assert hidden is not None
        return hidden
