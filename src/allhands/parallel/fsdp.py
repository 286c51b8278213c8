"""Fully sharded data parallelism: each rank keeps a part of every array, of its gradient and of its
optimizer state.

Every rank computes its own rows with whole weights. It fetches these for one block at a time: in
the forward pass, and again in the backward pass. Gradients are added up over ranks as soon as they
are computed, and each rank keeps its part of the sums (ZeRO-3, arXiv 1910.02054). If operations
compute when they are called, the backward pass computes a block again from its input
(:class:`FetchedStage`); in a graph it need not (:mod:`allhands.parallel.fetched`).

All ranks fetch and add up the same arrays at the same time. A rank without a micro-batch takes part
in these exchanges, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Collective, on_stream
from allhands.distributed.packed import Left
from allhands.distributed.reduce import sum_over_ranks
from allhands.io.regions import Box, Region, Shape
from allhands.io.trees import flatten, numbers
from allhands.kernels.fused import kernels
from allhands.kernels.fused.flat_params import FlatParams
from allhands.model.stages import Blocks, Stage
from allhands.objectives.base import Objective
from allhands.parallel.base import Exchanging, Expected, OneByOne, Strategy
from allhands.parallel.engine import StageCompute, unheard, waited_for
from allhands.parallel.expert import NOTHING, in_step
from allhands.parallel.experts import ALIKE, Experts
from allhands.parallel.fetched import FetchedGraph, FetchedPasses
from allhands.parallel.gradient import Computing, FlatWeights
from allhands.parallel.named import by_name, with_changed
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.parts import OwnedParts
from allhands.parallel.passes import Passes
from allhands.parallel.rows import DividedRow
from allhands.parallel.sharding import Sharding, Unit, first_trained
from allhands.parallel.sums import Gradients, Named, Reduced, added, joined
from allhands.parallel.tensor import WholeArrays
from allhands.runtime.accelerator import device_memory

# Share of a device's memory that a run may take.
_ROOM = 0.9
# Most whole rows of a block in memory at once: of weights and gradients, some being exchanged.
_ON_THE_WAY = 6


def fully_sharded(exchanging: Exchanging, overlap: bool) -> FullySharded:
    """Make the strategy of ``--strategy fsdp``."""
    return FullySharded(exchanging)


class FetchedStage(StageCompute):
    """The passes of some blocks whose arrays are fetched for one block at a time.

    The inputs of blocks are kept from the forward pass to the backward pass, which computes each
    block once more.

    Args:
        stage: ``units`` are its blocks.
        wait: called with arrays that other ranks send.
        goes_on: whether the gradient of the stage's input is needed.
        pushes: called before gradients are added up over ranks.

    Attributes:
        rows: the trained rows, in the order of their gradients.
    """

    def __init__(
        self,
        stage: Stage,
        units: Sequence[Unit],
        sharding: Sharding,
        objective: Objective,
        computing: Computing,
        *,
        wait: Callable[[list[mx.array]], None] = mx.eval,
        goes_on: bool = False,
        pushes: Callable[[], object] = lambda: None,
    ) -> None:
        self.stage, self._objective = stage, objective
        self._units = units
        self._sharding, self._wait, self._pushes = sharding, wait, pushes
        self._goes_on = goes_on
        self._first = 0 if goes_on else first_trained(units)
        self._compute = [
            StageCompute(
                unit.stage,
                objective,
                computing,
                unit,
                goes_on=place > self._first or goes_on,
                modules=unit.modules,
            )
            for place, unit in enumerate(self._units)
        ]
        self._kept: dict[int, dict[int, mx.array]] = {}
        self.rows = list({id(row): row for unit in units for row in unit.trained_rows}.values())

    def trained(self) -> list[mx.array]:
        """Return this rank's parts of the trained rows."""
        return [row.part(self._sharding.parts) for row in self.rows]

    def forward(
        self, received: mx.array | None, arguments: tuple[mx.array, ...] | None
    ) -> list[mx.array]:
        """See :meth:`StageCompute.forward`; without ``arguments`` this rank only takes part in
        exchanges.
        """
        return self._through(self._units, received, arguments)[0]

    def keep(self, received: mx.array | None, arguments: tuple[mx.array, ...]) -> list[mx.array]:
        """Like :meth:`forward`; :meth:`begin` with the same arguments uses its results."""
        outputs, self._kept[id(arguments)] = self._through(self._units, received, arguments)
        return outputs

    def begin(
        self,
        received: mx.array | None,
        cotangent: mx.array | None,
        arguments: tuple[mx.array, ...] | None,
        *,
        counts: bool = True,
    ) -> tuple[list[mx.array], mx.array | None, list[mx.array]]:
        """See :meth:`StageCompute.begin`; everything is computed, and gradients are this rank's
        parts.

        Args:
            counts: whether this rank's gradients of arrays that ranks divide count.
        """
        last = len(self._units) - 1
        outputs: list[mx.array] = []
        if self.stage.blocks.is_last:
            hidden, inputs = self._through(self._units[:-1], received, arguments)
            inputs |= dict.fromkeys((last,), hidden[0]) if hidden else {}
            del hidden
        else:
            inputs = {} if arguments is None else self._kept.pop(id(arguments))
        parts: dict[int, mx.array] = {}
        backwards = self._sharding.fetched(self._units[self._first :][::-1], self._wait)
        for place, unit in zip(range(last, self._first - 1, -1), backwards, strict=True):
            gradients: list[mx.array] | None = None
            if arguments is not None:
                found, cotangent, gradients = self._compute[place].begin(
                    inputs.pop(place, None), cotangent, arguments
                )
                mx.eval(found, gradients, [] if cotangent is None else cotangent)
                outputs = found if place == last else outputs
            self._push(unit, gradients, parts, counts=counts)
        return outputs, cotangent, [parts[id(row)] for row in self.rows]

    def idle(self, *, backward: bool) -> list[mx.array]:
        if backward:
            return self.begin(None, None, None)[2]
        self.forward(None, None)
        return []

    def named(self, gradients: Sequence[mx.array]) -> dict[str, mx.array]:
        """Return this rank's parts of the gradients by the names of the arrays."""
        return named_parts(self.rows, gradients)

    def _through(
        self,
        units: Sequence[Unit],
        received: mx.array | None,
        arguments: tuple[mx.array, ...] | None,
    ) -> tuple[list[mx.array], dict[int, mx.array]]:
        """Return the outputs of ``units``, and the inputs of the units that have a backward pass."""
        outputs, inputs = [] if received is None else [received], dict[int, mx.array]()
        for place, _ in enumerate(self._sharding.fetched(units, self._wait)):
            if arguments is None:
                continue
            if outputs and place >= self._first:
                inputs[place] = outputs[0]
            outputs = self._compute[place].forward(outputs[0] if outputs else None, arguments)
            mx.eval(outputs)
        return outputs, inputs

    def _push(
        self,
        unit: Unit,
        gradients: list[mx.array] | None,
        parts: dict[int, mx.array],
        *,
        counts: bool,
    ) -> None:
        rest = gradients
        for row in unit.trained_rows:
            own = None
            if rest is not None:
                own, rest = rest[: len(row.places)], rest[len(row.places) :]
            self._pushes()
            given = own if counts or row.alone else None
            new, before = self._sharding.push(row, given), parts.get(id(row))
            parts[id(row)] = new if before is None else before + new


class FullySharded(Strategy):
    """:class:`~allhands.parallel.base.Strategy` of ranks that have divided all arrays of the model."""

    name = "fsdp"
    passes_wait = True

    def __init__(self, exchanging: Exchanging) -> None:
        assert exchanging.sharding is not None
        # Weights are fetched while blocks are computed.
        self._exchanging, stream = exchanging.apart()
        self.communicator = self._exchanging.communicator
        self._sharding = exchanging.sharding.moved(lambda group: on_stream(group, stream))
        # Recomputation is for those who have too little.
        self.spares_memory = self._sharding.fetching.twice
        self._whole = WholeArrays(exchanging.matrices, self._exchanging)
        self.left: list[Left] = []
        self._compute: FetchedStage | FetchedGraph | None = None
        self._flat: FlatWeights | None = None
        self._ahead: tuple[MicroBatch, FetchedPasses] | None = None
        self._first_rows: list[list[Collective]] = []
        self._squares = mx.compile(sum_of_squares) if kernels.available() else sum_of_squares
        self._waited_s = 0.0
        self._experts = exchanging.experts
        self.regions = regions_within(self._sharding, exchanging.matrices or self._experts)
        # Arrays have the layout of the exchanged parts, so that an exchange need not join arrays.
        self._laid = [row for row in self._sharding.rows if row.trained and any(row.regions())]
        if not exchanging.cpu_native and self._laid:
            self.laid = FlatParams.laid(self._sharding.parts, [row.laid() for row in self._laid])

    def prepare(self, passes: Passes, expected: Expected) -> None:
        self._flat = passes.flat
        # Routers choose a rank's tokens block by block, which a graph of all blocks cannot know.
        if passes.computing.cpu_native or self._experts is not None:
            self._compute = self._passes_of(passes, passes.computing)
        else:
            room = None if passes.run_ahead is None else self._room
            how: Any = {
                "wait": self._wait,
                "computed": self._computed,
                "pushes": self._pushes,
                "room": room,
            }
            self._compute = FetchedGraph(self._sharding, passes.objective, passes.computing, **how)

    def _passes_of(self, passes: Passes, computing: Computing) -> FetchedStage:
        more: Any = {"wait": self._wait, "pushes": self._pushes}
        return whole_model(self._sharding, passes.objective, computing, **more)

    def _pushes(self) -> None:
        self._exchanging.inject_fault("message")

    def _room(self) -> float:
        """Return the device's bytes for activations that blocks keep, besides present and future
        arrays.
        """
        parts = sum(
            array.nbytes for _, array in flatten(self._sharding.parts.trainable_parameters())
        )
        return (
            _ROOM * device_memory()
            - mx.get_active_memory()
            - parts
            - _ON_THE_WAY * _largest(self._sharding)
        )

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        before, objective = self._waited_s, passes.objective
        sums: list[mx.array] = []
        found: list[mx.array] = []
        counts = {"targets": 0, "tokens": 0}
        # All ranks make the same number of passes, at least one. The number is exchanged with the
        # first pass and read after it, so that the host does not wait for the device.
        passes_of_all, left = self._sharding.everyones(len(micro_batches)), list(micro_batches)
        made = 0
        with self._held():
            while not made or made < max(numbers(passes_of_all)):
                batch, made = left.pop(0) if left else None, made + 1
                if batch is not None:
                    passes.note(batch)
                    counts = {
                        key: counts[key] + value for key, value in objective.counts(batch).items()
                    }
                outputs, new = self._begin(passes, batch)
                if found:
                    mx.async_eval(
                        found := added(found, new)
                    )  # so that gradients of no micro-batch stay in memory
                found, sums = found or new, added(sums, outputs)
        self._sharding.forget()
        total = joined(sums, len(objective.further))
        if not self._sharding.scatters:
            self._wait([total, *found])
        return self._whole.counted(
            Gradients(total, self._named(found), counts, waited_s=self._waited_s - before)
        )

    def _begin(
        self, passes: Passes, batch: MicroBatch | None
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Return the sums of a micro-batch, and this rank's parts of its gradients."""
        ahead, self._ahead = self._ahead, None
        if isinstance(self._compute, FetchedGraph):
            if ahead is not None and ahead[0] is batch:
                return self._compute.begin(ahead[1])
            if ahead is not None:
                self._first_rows = ahead[1].wholes[: ahead[1].begun]
            return self._compute.begin(self._prepared(passes, batch))
        assert self._compute is not None
        return self._computed_at_once(self._compute, passes, batch)

    def _computed_at_once(
        self, compute: FetchedStage, passes: Passes, batch: MicroBatch | None
    ) -> tuple[list[mx.array], list[mx.array]]:
        """:meth:`_begin` of passes that are computed block by block."""
        if self._experts is None:
            arguments = None if batch is None else passes.arguments(batch)
            outputs, _, parts = compute.begin(None, None, arguments)
            return outputs, parts
        tokens = 0 if batch is None else passes.objective.places(batch.inputs).size
        agree = partial(in_step, self._experts.dispatch, passes.objective, tokens)
        passing, seconds = waited_for(agree, self._exchanging.heartbeat)
        self._waited_s += seconds
        with passing:
            arguments = passes.arguments(NOTHING if batch is None else batch)
            outputs, _, parts = compute.begin(None, None, arguments, counts=batch is not None)
        return [] if batch is None else outputs, parts

    def _prepared(self, passes: Passes, batch: MicroBatch | None) -> FetchedPasses:
        assert isinstance(self._compute, FetchedGraph)
        rows, self._first_rows = self._first_rows, []
        if batch is None:
            return self._compute.prepare(None, 0, rows)
        arguments = passes.arguments(batch)
        return self._compute.prepare(arguments, batch.inputs.size, rows, passes.meanwhile)

    def start_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """Fetch the next step's first rows, and queue its first passes, while a GPU updates
        weights; not for a new shape, because that would take long.
        """
        if not isinstance(self._compute, FetchedGraph) or not self._sharding.scatters:
            return
        batches = upcoming()
        passes.meanwhile()
        with self._held():
            rows = self._first_rows = self._compute.first_rows()
            if batches and batches[0].shape in passes.shapes:
                self._ahead = batches[0], self._prepared(passes, batches[0])
            # On all ranks in every case, because this is the first exchange.
            self._compute.begin_first(rows, self._ahead[1] if self._ahead else None)

    def forget(self) -> None:
        self._ahead, self._first_rows = None, []

    @contextmanager
    def _held(self) -> Generator[None]:
        """Fetch rows directly from memory within the block; an update could not write there
        meanwhile.
        """
        if self._flat is not None:
            self._sharding.held.update(zip(map(id, self._laid), self._flat.weights(), strict=True))
        try:
            yield
        finally:
            self._sharding.held.clear()

    def _named(self, parts: Sequence[mx.array]) -> list[Named]:
        """This rank's parts of the gradients as the updater takes them."""
        assert self._compute is not None
        rows = self._compute.rows
        if self._flat is not None:
            own = {id(row): part for row, part in zip(rows, parts, strict=True)}
            return [(str(place), own[id(row)]) for place, row in enumerate(self._laid)]
        named = named_parts(rows, parts)
        return [
            (name, named[name]) for name, _ in flatten(self._sharding.parts.trainable_parameters())
        ]

    def _wait(self, arrays: list[mx.array]) -> None:
        """Wait for arrays from other ranks."""
        self._waited_s += _wait_for(arrays, self._exchanging.heartbeat)

    def _computed(self, arrays: list[mx.array]) -> None:
        """Wait for the device's computation, after arrays from other ranks have arrived."""
        _wait_for(arrays, self._exchanging.heartbeat)

    def one_by_one(self, passes: Passes) -> OneByOne:
        # Not compiled: each example has a shape of its own.
        compute, sharding = (
            self._passes_of(passes, replace(passes.computing, compiled=False)),
            self._sharding,
        )

        def gradient(batch: MicroBatch | None) -> tuple[mx.array, Any]:
            sums, parts = self._computed_at_once(compute, passes, batch)
            return sums[0] if sums else mx.zeros(()), parts

        # Ranks that divide token positions have the same rows.
        share = sharding.data.rank * sharding.shard.size + sharding.shard.rank
        return OneByOne(gradient, sharding.world, share // self._exchanging.pieces)

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        exchanging, data = self._exchanging, self._sharding.data
        exchanging.heartbeat("reduce")
        leaves = None if self._flat is None else self._flat.leaves
        arrays = with_changed(leaves, mine.grads, self._whole.summed(by_name(leaves, mine.grads)))
        if data.size > 1:
            arrays, _ = sum_over_ranks(data, arrays, bucket_bytes=exchanging.bucket_bytes)
            mx.eval(arrays)
        named = [(name, array) for (name, _), array in zip(mine.grads, arrays, strict=True)]
        counted = by_name(leaves, named) if exchanging.matrices is not None else named
        own = [array for name, array in counted if self._whole.counts(name)]
        squares = mx.zeros(()) if data.rank else self._squares(own)
        return exchanging.reduced(named, numbers, squares, extra, lazy=self._sharding.scatters)


def named_parts(rows: Sequence[DividedRow], parts: Sequence[mx.array]) -> dict[str, mx.array]:
    """Return the numbers in this rank's parts of rows by the names of the arrays."""
    return {
        name: array
        for row, part in zip(rows, parts, strict=True)
        for name, array in row.named(part)
    }


def whole_model(
    sharding: Sharding, objective: Objective, computing: Computing, **more: Any
) -> FetchedStage:
    """Return the passes of all units as one stage; ``more``: see :class:`FetchedStage`."""
    first, last = sharding.units[0].stage, sharding.units[-1].stage.blocks
    stage = replace(first, blocks=Blocks(0, last.stop, last.count))
    return FetchedStage(stage, sharding.units, sharding, objective, computing, **more)


def _largest(sharding: Sharding) -> int:
    """Bytes of the largest unit's rows."""
    return max(sum(row.size * row.dtype.size for row in unit.rows) for unit in sharding.units)


def units_of(stage: Stage, sharding: Sharding) -> list[Unit]:
    """Return the units of a stage's blocks, whose hidden states have its type."""
    return [
        Unit(replace(unit.stage, dtype=stage.dtype), unit.rows)
        for unit in sharding.units
        if unit.stage.blocks.first in stage.blocks.places
    ]


def fetched_stage(
    stage: Stage, sharding: Sharding, objective: Objective, computing: Computing, **more: Any
) -> FetchedStage:
    """Return the passes of a stage of a pipeline; ``more``: see :class:`FetchedStage`."""
    return FetchedStage(stage, units_of(stage, sharding), sharding, objective, computing, **more)


def regions_within(sharding: Sharding, owned: OwnedParts | None) -> dict[str, tuple[Shape, Region]]:
    """Return by name the shape of each trained array of the whole model, and this rank's place in
    it, if it keeps a part.

    Args:
        owned: the division of matrices or experts, which ``sharding`` divides again or leaves.
    """
    if owned is None:
        return sharding.regions
    found: dict[str, tuple[Shape, Region]] = {}
    for name, (_, inner) in sharding.regions.items():
        if owned.is_whole(name):
            found[name] = owned.shapes[name], inner
            continue
        outer = owned.places[name]
        assert isinstance(inner, Box)
        assert isinstance(outer, Box)
        start = tuple(a + b for a, b in zip(outer.start, inner.start, strict=True))
        found[name] = owned.shapes[name], Box(start, inner.shape)
    return found


class FetchedSums:
    """The sums of a batch by forward passes alone; all ranks do the same number of passes together."""

    counts = True

    def __init__(
        self, sharding: Sharding, objective: Objective, experts: Experts | None = None
    ) -> None:
        self.heartbeat: Callable[[str], None] = unheard
        self._sharding, self._objective, self._experts = sharding, objective, experts
        self._compute = whole_model(
            sharding, objective, Computing(False, compiled=False), wait=self._wait
        )

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        self._sharding.anyone(True)
        return tuple(self._forward(arrays, arrays[0].size))

    def finish(self) -> None:
        """Take part in the passes that others still have to do."""
        nothing = None
        if self._experts is not None:
            nothing = tuple(map(mx.array, self._objective.values(NOTHING)))
        while self._sharding.anyone(False):
            self._forward(nothing, 0)
        self._sharding.forget()

    def _forward(self, arrays: tuple[mx.array, ...] | None, tokens: int) -> list[mx.array]:
        if self._experts is None:
            return self._compute.forward(None, arrays)
        with in_step(self._experts.dispatch, self._objective, tokens):
            return self._compute.forward(None, arrays)

    def _wait(self, arrays: list[mx.array]) -> None:
        _wait_for(arrays, self.heartbeat)


class FetchedModel:
    """A model of which each rank keeps a part, called for the logits of the next token on all ranks
    together.

    Attributes:
        model: the model without its arrays; other attributes are looked up there.
        heartbeat: called with "reduce" before waiting for other ranks, and with "compute"
            afterwards.
    """

    def __init__(self, sharding: Sharding, experts: Experts | None = None) -> None:
        self.heartbeat: Callable[[str], None] = unheard
        self.model: Any = sharding.model
        self._sharding, self._experts = sharding, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(
        self, inputs: mx.array, cache: Any = None, *, length: int | None = None, **more: Any
    ) -> mx.array:
        """(B, 1, V) float32 logits of what follows the first ``length`` of (B, T) tokens, or all of
        them.
        """
        if cache is not None:
            more["cache"] = cache
        with nullcontext() if self._experts is None else self._experts.dispatch.passing(ALIKE):
            return logits_or_hidden(
                self._sharding, self._sharding.units, None, inputs, more, self._wait, length
            )

    def _wait(self, arrays: list[mx.array]) -> None:
        _wait_for(arrays, self.heartbeat)


def _wait_for(arrays: list[mx.array], heartbeat: Callable[[str], None]) -> float:
    """Wait for arrays; return the seconds."""
    return waited_for(partial(mx.eval, arrays), heartbeat)[1]


def following(logits: mx.array, length: int | None) -> mx.array:
    """Return the (B, 1, V) float32 logits after the first ``length`` of T tokens, or after all, of
    (B, T, V).
    """
    last = logits.shape[1] if length is None else length
    return logits[:, last - 1 : last].astype(mx.float32)


def logits_or_hidden(
    sharding: Sharding,
    units: Sequence[Unit],
    received: mx.array | None,
    inputs: mx.array,
    more: dict[str, Any],
    wait: Callable[[list[mx.array]], None],
    length: int | None = None,
) -> mx.array:
    """Return (B, 1, V) float32 logits after ``length`` of (B, T) tokens, or the hidden states that
    ``units`` pass on.

    Args:
        received: hidden states of the block before these units; ``None``: they begin with the
            embedding.
        more: further arguments of the model; ``wait`` is called with arrays that other ranks send.
    """
    hidden, model = received, cast("Any", sharding.model)
    for unit in sharding.fetched(units, wait):
        with unit.stage.computing(hidden):
            if unit.stage.blocks.is_last:
                hidden = following(model(inputs, **more), length)
            else:
                hidden = unit.stage.hidden(inputs, **more)
        mx.eval(hidden)
    assert hidden is not None
    return hidden
