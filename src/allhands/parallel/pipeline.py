"""Pipeline parallelism: each rank computes some blocks of the model, for all rows of its copy of
the model.

Ranks along the axis ``pipe`` of the mesh are one copy of the model, and send each other hidden
states and their gradients. Ranks along ``data`` compute other rows with the same blocks, and add up
gradients. Only the last stage has the loss. A sum over all ranks counts each copy once, because the
numbers of other stages are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np

from allhands.data.loader import MicroBatch
from allhands.distributed.handout import gather_json
from allhands.distributed.packed import Left
from allhands.distributed.reduce import sum_over_ranks
from allhands.io.trees import flatten
from allhands.io.trees import number as number_of
from allhands.kernels.fused.flat_params import FlatParams
from allhands.objectives.base import Objective
from allhands.parallel.base import Exchanging, Expected, OneByOne, Strategy
from allhands.parallel.engine import Engine, Messages, StageCompute, unheard
from allhands.parallel.fsdp import (
    FetchedStage,
    fetched_stage,
    following,
    logits_or_hidden,
    regions_within,
    units_of,
)
from allhands.parallel.gradient import Computing
from allhands.parallel.named import by_name, with_changed
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Passes
from allhands.parallel.piping import Piping
from allhands.parallel.schedules import make_schedule
from allhands.parallel.sharding import Sharding
from allhands.parallel.sums import Gradients, Named, Reduced, added, joined
from allhands.parallel.tensor import WholeArrays


def pipeline(exchanging: Exchanging, overlap: bool) -> Pipeline:
    """Make the strategy of ``--strategy pipeline``."""
    return Pipeline(exchanging)


class Pipeline(Strategy):
    """:class:`~allhands.parallel.base.Strategy` of a rank that has some blocks of the model."""

    name = "pipeline"
    passes_wait = True

    def __init__(self, exchanging: Exchanging) -> None:
        assert exchanging.piping is not None
        # Messages are sent while passes are computed.
        self._exchanging, _ = exchanging.apart()
        self.communicator = self._exchanging.communicator
        self._piping = exchanging.piping
        self._sharding = exchanging.sharding
        self._whole = WholeArrays(exchanging.matrices, self._exchanging)
        self.left: list[Left] = []
        self._leaves: FlatParams | None = None
        self._engine: Engine | None = None
        self._first_trained = 0
        self._table_shapes: list[list[int]] | None = None  # the trained arrays that two stages have
        if self._sharding is not None:
            self.regions = regions_within(self._sharding, exchanging.matrices)
        elif exchanging.matrices is not None:
            self.regions = exchanging.matrices.regions

    def prepare(self, passes: Passes, expected: Expected) -> None:
        piping, exchanging, flat = self._piping, self._exchanging, passes.flat
        self._leaves = None if flat is None else flat.leaves
        messages = Messages(piping.pipe, exchanging.heartbeat, exchanging.inject_fault)
        self._first_trained = _first_trained(piping)
        self._engine = self._engine_of(passes, passes.computing, messages)

    def _engine_of(self, passes: Passes, computing: Computing, messages: Messages) -> Engine:
        piping, sharding, native = self._piping, self._sharding, self._exchanging.cpu_native
        compute: dict[int, StageCompute] = {}
        for number, stage in enumerate(piping.stages):
            place = piping.pipe.rank + number * piping.pipe.size
            goes_on = place > self._first_trained
            if sharding is None:
                compute[place] = StageCompute(
                    stage, passes.objective, computing, passes.flat, goes_on=goes_on
                )
            else:
                how: Any = {"wait": self._wait, "goes_on": goes_on}
                compute[place] = fetched_stage(stage, sharding, passes.objective, computing, **how)
        # Each pass is computed at once, so that fetched arrays can go.
        more: Any = {
            "cpu_native": native or sharding is not None,
            "first_trained": self._first_trained,
        }
        return Engine(compute, messages, passes.arguments, **more)

    def _wait(self, arrays: list[mx.array]) -> None:
        """Wait for arrays from ranks with the same blocks."""
        self._exchanging.inject_fault("message")
        assert self._engine is not None
        self._engine.messages.wait_for(arrays)

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        assert self._engine is not None
        piping, objective = self._piping, passes.objective
        before = self._engine.messages.waited_s
        sums, found = self._run(self._engine, micro_batches, passes.note)
        counts = {"targets": 0, "tokens": 0}
        if piping.is_last:
            for batch in micro_batches:
                counts = {
                    key: counts[key] + value for key, value in objective.counts(batch).items()
                }
        total = joined(sums, len(objective.further))
        waited_s = self._engine.messages.waited_s - before
        return self._whole.counted(
            Gradients(total, self._named(passes, found), counts, waited_s=waited_s)
        )

    def _named(self, passes: Passes, found: dict[int, list[mx.array]]) -> list[Named]:
        """Return the gradients of all stages of this rank, in the order of the trained arrays."""
        assert self._engine is not None
        if self._sharding is not None:
            own: dict[str, mx.array] = {}
            for place, gradients in found.items():
                compute = self._engine.compute[place]
                assert isinstance(compute, FetchedStage)
                own |= compute.named(gradients)
            trained = flatten(self._sharding.parts.trainable_parameters())
            return [
                (name, own[name] if name in own else mx.zeros_like(array))
                for name, array in trained
            ]
        trained = passes.trained()
        grads = (
            [mx.zeros_like(each) for each in trained]
            if not found
            else reduce(added, found.values())
        )
        return list(zip(_names(passes), grads, strict=True))

    def _run(
        self,
        engine: Engine,
        micro_batches: Sequence[MicroBatch],
        note: Callable[[MicroBatch], None],
    ) -> tuple[list[mx.array], dict[int, list[mx.array]]]:
        piping, count = self._piping, len(micro_batches)
        if self._sharding is not None:
            # Ranks with the same blocks fetch them together, each for its own micro-batches.
            count = int(max(np.asarray(self._sharding.shard.all_gather(mx.array([count])))))
        schedule = make_schedule(
            piping.schedule, piping.pipe.size, count, len(piping.stages), engine.first_trained
        )
        each = [*micro_batches, *[None] * (count - len(micro_batches))]
        found = engine.run(schedule, piping.pipe.rank, each, note)
        if self._sharding is not None:
            self._sharding.forget()
        return found

    def begin_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """Begin the first stage's pass early, so that the next stage has work when the step begins."""
        assert self._engine is not None
        if not self._engine.runs_ahead or self._sharding is not None:
            return
        batch = next(iter(upcoming()), None)
        if (
            batch is not None and batch.shape in passes.shapes
        ):  # others may need more memory, or be compiled
            passes.note(batch)
            self._engine.begin(batch)

    def forget(self) -> None:
        assert self._engine is not None
        self._engine.ahead = None

    def one_by_one(self, passes: Passes) -> OneByOne:
        assert self._engine is not None
        engine = self._engine_of(
            passes, replace(passes.computing, compiled=False), self._engine.messages
        )

        def gradient(batch: MicroBatch | None) -> tuple[mx.array, Any]:
            sums, found = self._run(engine, [] if batch is None else [batch], lambda _: None)
            return sums[0] if sums else mx.zeros(()), list(found.values())

        sharding = self._sharding
        if sharding is None:
            return OneByOne(gradient, self._exchanging.same_rows)
        return OneByOne(
            gradient, sharding.world, sharding.data.rank * sharding.shard.size + sharding.shard.rank
        )

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        exchanging, piping = self._exchanging, self._piping
        exchanging.heartbeat("reduce")
        arrays = self._with_table(
            [grad for _, grad in mine.grads], [name for name, _ in mine.grads]
        )
        grads = [(name, array) for (name, _), array in zip(mine.grads, arrays, strict=True)]
        arrays = with_changed(self._leaves, grads, self._whole.summed(by_name(self._leaves, grads)))
        if piping.data.size > 1:
            arrays, _ = sum_over_ranks(piping.data, arrays, bucket_bytes=exchanging.bucket_bytes)
            mx.eval(arrays)  # before the sums over all ranks, on every rank
        grads = [(name, array) for (name, _), array in zip(mine.grads, arrays, strict=True)]
        # Every number of the model counts once: a shared table on the first stage, in one copy.
        own = [array for name, array in by_name(self._leaves, grads) if self._counts(name)]
        squares = mx.zeros(()) if piping.data.rank else sum_of_squares(own)
        return exchanging.reduced(grads, numbers, squares, extra)

    def _counts(self, name: str) -> bool:
        """True if this rank counts an array in the norm; a table on two stages counts on the first
        one.
        """
        piping = self._piping
        second = piping.shares_table and not piping.stages[0].blocks.is_first
        return self._whole.counts(name) and not (second and self._is_table(name))

    def _is_table(self, name: str) -> bool:
        return name.startswith(f"{self._piping.stages[0].shared}.")

    def _with_table(self, arrays: list[mx.array], names: Sequence[str]) -> list[mx.array]:
        """Return ``arrays`` with the sum of the first and last stages' gradients of a shared table;
        called on all ranks.
        """
        piping = self._piping
        if not piping.shares_table:
            return arrays
        grads = list(zip(names, arrays, strict=True))
        mine = [
            (name, array) for name, array in by_name(self._leaves, grads) if self._is_table(name)
        ]
        if self._table_shapes is None:
            every: list[list[list[int]]] = gather_json(
                piping.pipe, [list(array.shape) for _, array in mine]
            )
            self._table_shapes = max(every, key=len)
        if not (told := self._table_shapes):
            return arrays
        parts = [array.astype(mx.float32) for _, array in mine] or [
            mx.zeros(shape) for shape in told
        ]
        sums, _ = sum_over_ranks(piping.pipe, parts, bucket_bytes=self._exchanging.bucket_bytes)
        mx.eval(sums)  # also on the stages in the middle, where they have no effect
        changed = {
            name: total.astype(array.dtype)
            for (name, array), total in zip(mine, sums, strict=bool(mine))
        }
        return with_changed(self._leaves, grads, changed)


def _first_trained(piping: Piping) -> int:
    """Return the number of the first stage that trains anything; called on all ranks of the
    pipeline together.
    """
    mine = [stage.trains for stage in piping.stages]
    every: list[list[bool]] = gather_json(piping.pipe, mine)
    places = (
        (rank + number * len(every), trains)
        for rank, own in enumerate(every)
        for number, trains in enumerate(own)
    )
    return min((place for place, trains in places if trains), default=0)


def _names(passes: Passes) -> list[str]:
    if passes.flat is not None:
        return [str(place) for place in range(len(passes.flat.weights()))]
    return [name for name, _ in flatten(passes.model.trainable_parameters())]


def _forward(
    piping: Piping,
    messages: Messages,
    tokens: tuple[int, ...],
    computed: Callable[[int, mx.array | None], Sequence[mx.array]],
) -> Sequence[mx.array] | None:
    """Compute one forward pass through this rank's stages; return the output of the model's last
    stage, or ``None`` on other ranks.

    Args:
        tokens: shape of the tokens, (B, T).
        computed: returns the output of a stage of this rank, by its number, for its input.
    """
    pipe, found = piping.pipe, None
    for number, stage in enumerate(piping.stages):
        place, received = pipe.rank + number * pipe.size, None
        if place:
            shape = (*tokens, stage.features)
            received = messages.here(messages.expected(shape, stage.dtype, (place - 1) % pipe.size))
        outputs = computed(number, received)
        mx.eval(outputs)
        if stage.blocks.is_last:
            found = outputs
        else:
            messages.send(outputs[0], (place + 1) % pipe.size)
    return found


class PipedSums:
    """The sums of a batch by forward passes alone, on the last stage's rank; zeros on other ranks.

    A rank goes on to the next batch when it has sent its output. Ranks that fetch the same blocks do
    the same number of passes.
    """

    def __init__(
        self, piping: Piping, objective: Objective, sharding: Sharding | None = None
    ) -> None:
        self.heartbeat: Callable[[str], None] = unheard
        self._piping, self._further, self._sharding = piping, len(objective.further), sharding
        self._messages = Messages(piping.pipe, lambda phase: self.heartbeat(phase))
        computing = Computing(cpu_native=False, compiled=False)
        self._compute = [
            StageCompute(stage, objective, computing, None)
            if sharding is None
            else fetched_stage(stage, sharding, objective, computing, wait=self._messages.wait_for)
            for stage in piping.stages
        ]

    @property
    def counts(self) -> bool:
        """True if this rank's sums are to be counted."""
        return self._piping.is_last

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        def computed(number: int, received: mx.array | None) -> Sequence[mx.array]:
            return self._compute[number].forward(received, arrays)

        self._anyone(True)
        sums = _forward(self._piping, self._messages, arrays[0].shape, computed)
        return tuple(sums or [mx.zeros(())] * (1 + self._further))

    def finish(self) -> None:
        """Wait until the next stage has received everything."""
        while self._anyone(False):
            for compute in self._compute:
                compute.idle(backward=False)
        if self._sharding is not None:
            self._sharding.forget()
        self._messages.finish()

    def _anyone(self, wants: bool) -> bool:
        """True if a rank with the same blocks needs one more pass."""
        if self._sharding is None:
            return False
        return number_of(self._sharding.shard.all_sum(mx.array(float(wants)))) > 0


class PipedModel:
    """A model of which each rank has some blocks, called for the logits of the next token on all
    its ranks together.

    Attributes:
        model: the model with this rank's blocks; other attributes are looked up there.
        stops: returns whether this rank wants to stop, in each call; given on every rank or on none.
        stopped: whether a rank wanted to stop in the last call; the same on all ranks.
        heartbeat: called with "reduce" before waiting for other ranks, and with "compute"
            afterwards.
    """

    stops: Callable[[], bool] | None = None
    stopped = False

    def __init__(self, piping: Piping, sharding: Sharding | None = None) -> None:
        """Called on all ranks of the pipeline together, as the model is; with ``sharding`` on all
        ranks of the run.
        """
        self.model: Any = piping.stages[0].model
        self.heartbeat: Callable[[str], None] = unheard
        self._piping, self._sharding = piping, sharding
        self._messages = Messages(piping.pipe, lambda phase: self.heartbeat(phase))
        self._size: int | None = None  # of the vocabulary

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

        def computed(number: int, received: mx.array | None) -> Sequence[mx.array]:
            stage = self._piping.stages[number]
            if self._sharding is not None:
                units, wait = units_of(stage, self._sharding), self._messages.wait_for
                return [
                    logits_or_hidden(self._sharding, units, received, inputs, more, wait, length)
                ]
            with stage.computing(received):
                if stage.blocks.is_last:
                    return [following(self.model(inputs, **more), length)]
                return [stage.hidden(inputs, **more)]

        found = _forward(self._piping, self._messages, inputs.shape, computed)
        size = self._vocabulary(found)
        mine = found[0] if found else mx.zeros((len(inputs), 1, size))
        if self.stops is not None:  # sent with the logits, so that it costs no further exchange
            wish = mx.full((len(inputs), 1, 1), float(self.stops()))
            mine = mx.concatenate([mine, wish], axis=-1)
        total = self._piping.pipe.all_sum(mine)
        self._messages.here(total)
        self._messages.finish()
        if self.stops is not None:
            self.stopped = bool(total[0, 0, -1].item())
            total = total[..., :-1]
        return total

    def _vocabulary(self, found: Sequence[mx.array] | None) -> int:
        """Return the number of logits, which the last stage sends in the first call, on all ranks
        together.
        """
        if self._size is None:
            self.heartbeat("reduce")
            every: list[int | None] = gather_json(
                self._piping.pipe, found[0].shape[-1] if found else None
            )
            self.heartbeat("compute")
            self._size = next(size for size in every if size)
        return self._size
