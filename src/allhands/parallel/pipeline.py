"""Pipeline parallelism: each rank computes some blocks of the model, for all rows of its copy of the model.

Ranks along the axis ``pipe`` of the mesh are one copy of the model, and hand on hidden states and their gradients.
Those along ``data`` compute other rows with the same blocks, and add up gradients. The loss is on the last stage alone.
What is added up over all ranks is each copy's once: other stages' numbers are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import gather_json
from allhands.distributed.packed import Left
from allhands.distributed.reduce import sum_over_ranks
from allhands.io.trees import flatten
from allhands.kernels.fused.flat_params import FlatParams
from allhands.objectives.base import Objective
from allhands.parallel.base import Exchanging, Expected, Strategy
from allhands.parallel.engine import Engine, Messages, StageCompute
from allhands.parallel.gradient import Computing
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Passes
from allhands.parallel.piping import Piping
from allhands.parallel.schedules import make_schedule
from allhands.parallel.sums import Gradients, Named, Reduced


def pipeline(exchanging: Exchanging, overlap: bool) -> Pipeline:
    """``--strategy pipeline``."""
    return Pipeline(exchanging)


class Pipeline(Strategy):
    """:class:`~allhands.parallel.base.Strategy` of a rank that has some blocks of the model."""

    name = "pipeline"
    passes_wait = True

    def __init__(self, exchanging: Exchanging) -> None:
        assert exchanging.piping is not None
        # Messages travel while passes are computed.
        self._exchanging, _ = exchanging.apart()
        self.communicator = self._exchanging.communicator
        self._piping = exchanging.piping
        self.left: list[Left] = []
        self._leaves: FlatParams | None = None
        self._engine: Engine | None = None
        self._first_trained = 0

    def prepare(self, passes: Passes, expected: Expected) -> None:
        piping, exchanging, flat = self._piping, self._exchanging, passes.flat
        self._leaves = None if flat is None else flat.leaves
        messages = Messages(piping.pipe, exchanging.heartbeat, exchanging.inject_fault)
        self._first_trained = _first_trained(piping)
        self._engine = self._engine_of(passes, passes.computing, messages)

    def _engine_of(self, passes: Passes, computing: Computing, messages: Messages) -> Engine:
        piping = self._piping
        how = passes.objective, computing, passes.flat
        compute: dict[int, StageCompute] = {}
        for number, stage in enumerate(piping.stages):
            place = piping.pipe.rank + number * piping.pipe.size
            compute[place] = StageCompute(stage, *how, goes_on=place > self._first_trained)
        more: Any = {"cpu_native": self._exchanging.cpu_native, "first_trained": self._first_trained}
        return Engine(compute, messages, passes.arguments, **more)

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        assert self._engine is not None
        piping, objective = self._piping, passes.objective
        before = self._engine.messages.waited_s
        sums, found = self._run(self._engine, micro_batches, passes.note)
        trained = passes.trained()
        grads = [mx.zeros_like(each) for each in trained] if not found else _added(list(found.values()))
        names = _names(passes)
        further = len(objective.further)
        total = mx.zeros((1 + further,) if further else ())
        counts = {"targets": 0, "tokens": 0}
        if piping.is_last:
            for batch in micro_batches:
                counts = {key: counts[key] + value for key, value in objective.counts(batch).items()}
            if sums:
                total = mx.stack(sums) if further else sums[0]
        waited_s = self._engine.messages.waited_s - before
        return Gradients(total, list(zip(names, grads, strict=True)), counts, waited_s=waited_s)

    def _run(
        self, engine: Engine, micro_batches: Sequence[MicroBatch], note: Callable[[MicroBatch], None]
    ) -> tuple[list[mx.array], dict[int, list[mx.array]]]:
        piping = self._piping
        shape = piping.pipe.size, len(micro_batches), len(piping.stages)
        schedule = make_schedule(piping.schedule, *shape, engine.first_trained)
        return engine.run(schedule, piping.pipe.rank, micro_batches, note)

    def begin_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        """The next stage then has something to do as soon as the step begins: a bubble less."""
        assert self._engine is not None
        if not self._engine.runs_ahead:
            return
        batch = next(iter(upcoming()), None)
        if batch is not None and batch.shape in passes.shapes:  # others may need more memory, or be compiled
            passes.note(batch)
            self._engine.begin(batch)

    def forget(self) -> None:
        assert self._engine is not None
        self._engine.ahead = None

    def one_by_one(self, passes: Passes) -> tuple[Callable[[MicroBatch], tuple[mx.array, Any]], Communicator]:
        assert self._engine is not None
        engine = self._engine_of(passes, replace(passes.computing, compiled=False), self._engine.messages)

        def gradient(batch: MicroBatch) -> tuple[mx.array, Any]:
            sums, found = self._run(engine, [batch], lambda _: None)
            return sums[0] if sums else mx.zeros(()), list(found.values())

        return gradient, self._piping.pipe

    def reduce(self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()) -> Reduced:
        exchanging, piping = self._exchanging, self._piping
        exchanging.heartbeat("reduce")
        arrays = [grad for _, grad in mine.grads]
        arrays = self._with_table(arrays, [name for name, _ in mine.grads])
        if piping.data.size > 1:
            arrays, _ = sum_over_ranks(piping.data, arrays, bucket_bytes=exchanging.bucket_bytes)
        # Every number of the model once: the table of the first stage, one copy's.
        counted = piping.data.rank == 0
        squares = sum_of_squares(self._without_table(arrays, mine.grads)) if counted else mx.zeros(())
        named = [(name, array) for (name, _), array in zip(mine.grads, arrays, strict=True)]
        return exchanging.reduced(named, numbers, squares, extra)

    def _is_table(self, name: str) -> bool:
        return name.startswith(f"{self._piping.stages[0].shared}.")

    def _tables(self, arrays: Sequence[mx.array], names: Sequence[str]) -> list[tuple[int, int, mx.array]]:
        """The gradients of the shared table: which array, which part of it, and that."""
        if not self._piping.shares_table:
            return []
        if self._leaves is None:
            return [
                (i, 0, array) for i, (name, array) in enumerate(zip(names, arrays, strict=True)) if self._is_table(name)
            ]
        return [
            (i, part, array)
            for i, chunk in enumerate(self._leaves.chunks)
            for part, (place, array) in enumerate(zip(chunk.places, chunk.parts(arrays[i]), strict=True))
            if self._is_table(place.name)
        ]

    def _with_table(self, arrays: list[mx.array], names: Sequence[str]) -> list[mx.array]:
        """``arrays`` with what the first and the last stage have found of the table both have; called on all ranks."""
        piping = self._piping
        if not piping.shares_table:
            return arrays
        mine = self._tables(arrays, names)
        shapes = [list(array.shape) for _, _, array in mine]
        told = _agreed_shapes(piping.pipe, shapes)
        if not told:
            return arrays
        parts = [array.astype(mx.float32) for _, _, array in mine] or [mx.zeros(shape) for shape in told]
        sums, _ = sum_over_ranks(piping.pipe, parts, bucket_bytes=self._exchanging.bucket_bytes)
        mx.eval(sums)  # also where nothing comes of them: on the stages in the middle
        found = list(arrays)
        for (i, part, array), total in zip(mine, sums, strict=bool(mine)):
            total = total.astype(array.dtype)
            if self._leaves is None:
                found[i] = total
            else:
                chunk = self._leaves.chunks[i]
                pieces = chunk.parts(found[i])
                found[i] = chunk.joined([total if each == part else piece for each, piece in enumerate(pieces)])
        return found

    def _without_table(self, arrays: Sequence[mx.array], named: Sequence[Named]) -> list[mx.array]:
        """The arrays that count for the norm on this rank: the table is the first stage's."""
        if not self._piping.shares_table or self._piping.stages[0].blocks.is_first:
            return list(arrays)
        tables = {(i, part) for i, part, _ in self._tables(arrays, [name for name, _ in named])}
        if self._leaves is None:
            return [array for i, array in enumerate(arrays) if (i, 0) not in tables]
        return [
            piece
            for i, chunk in enumerate(self._leaves.chunks)
            for part, piece in enumerate(chunk.parts(arrays[i]))
            if (i, part) not in tables
        ]


def _first_trained(piping: Piping) -> int:
    """The number of the first stage that trains anything; called on all ranks of the pipeline together."""
    mine = [stage.trains for stage in piping.stages]
    every: list[list[bool]] = gather_json(piping.pipe, mine)
    places = (
        (rank + number * len(every), trains) for rank, own in enumerate(every) for number, trains in enumerate(own)
    )
    return min((place for place, trains in places if trains), default=0)


def _agreed_shapes(pipe: Communicator, shapes: list[list[int]]) -> list[list[int]]:
    """The shapes of the trained tables, as those ranks have them that have tables; empty where nobody has."""
    mine = [len(shapes), *(shapes[0] if shapes else (0, 0))]
    told = np.asarray(pipe.all_gather(mx.array([mine]))).reshape(pipe.size, -1)
    have = next((row for row in told if row[0]), None)
    return [] if have is None else [[int(have[1]), int(have[2])]] * int(have[0])


def _names(passes: Passes) -> list[str]:
    if passes.flat is not None:
        return [str(place) for place in range(len(passes.flat.weights()))]
    return [name for name, _ in flatten(passes.model.trainable_parameters())]


def _added(each: list[list[mx.array]]) -> list[mx.array]:
    """Sums of the gradients of several stages of one rank, each of all that is trained there."""
    first, *others = each
    for other in others:
        first = [a + b for a, b in zip(first, other, strict=True)]
    return first


def _forward(
    piping: Piping,
    messages: Messages,
    tokens: tuple[int, ...],
    computed: Callable[[int, mx.array | None], Sequence[mx.array]],
) -> Sequence[mx.array] | None:
    """One forward pass through this rank's stages; what the model's last stage has found, ``None`` on other ranks.

    Args:
        tokens: shape of the tokens, (B, T).
        computed: what a stage of this rank, by its number, finds of what it has received: hidden states first.
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
    """The sums of a batch by forward passes alone: on the last stage's rank, zeros elsewhere.

    A rank goes on to the next batch when it has sent what it has computed.
    """

    def __init__(self, piping: Piping, objective: Objective) -> None:
        self._piping, self._further = piping, len(objective.further)
        self._messages = Messages(piping.pipe, lambda phase: None)
        computing = Computing(cpu_native=False, compiled=False)
        self._compute = [StageCompute(stage, objective, computing, None) for stage in piping.stages]

    @property
    def counts(self) -> bool:
        """True if this rank's sums are to be counted."""
        return self._piping.is_last

    def __call__(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        def computed(number: int, received: mx.array | None) -> Sequence[mx.array]:
            return self._compute[number].forward(received, arrays)

        sums = _forward(self._piping, self._messages, arrays[0].shape, computed)
        return tuple(sums or [mx.zeros(())] * (1 + self._further))

    def finish(self) -> None:
        """Wait until the next stage has taken everything."""
        self._messages.finish()


class PipedModel:
    """A model of which each rank has some blocks, called for the logits of the next token on all its ranks together.

    Attributes:
        model: with this rank's blocks; what is not called is looked up there.
        stops: on every rank or on none, whether this rank wants no more calls; asked in each call.
        stopped: whether a rank wanted that in the last call: the same on all ranks.
    """

    stops: Callable[[], bool] | None = None
    stopped = False

    def __init__(self, piping: Piping) -> None:
        """Called on all ranks of the pipeline together, as the model is."""
        self.model: Any = piping.stages[0].model
        self._piping = piping
        self._messages = Messages(piping.pipe, lambda phase: None)
        stage = piping.stages[-1]
        mine = None
        if piping.is_last:
            with stage.computing(mx.zeros((1, 1, stage.features), dtype=stage.dtype)):
                logits = self.model(mx.zeros((1, 1), dtype=mx.int32))  # lazily: for its shape alone
            mine = logits.shape[-1]
        self._size = next(size for size in gather_json(piping.pipe, mine) if size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
        """(B, 1, V) float32 logits of what follows (B, T) tokens."""
        if cache is not None:
            more["cache"] = cache

        def computed(number: int, received: mx.array | None) -> Sequence[mx.array]:
            stage = self._piping.stages[number]
            with stage.computing(received):
                if stage.blocks.is_last:
                    return [self.model(inputs, **more)[:, -1:].astype(mx.float32)]
                return [stage.hidden(inputs, **more)]

        found = _forward(self._piping, self._messages, inputs.shape, computed)
        mine = found[0] if found else mx.zeros((len(inputs), 1, self._size))
        if self.stops is not None:  # beside the logits, so that it costs no exchange of its own
            wish = mx.full((len(inputs), 1, 1), float(self.stops()))
            mine = mx.concatenate([mine, wish], axis=-1)
        total = self._piping.pipe.all_sum(mine)
        mx.eval(total)
        self._messages.finish()
        if self.stops is not None:
            self.stopped = bool(total[0, 0, -1].item())
            total = total[..., :-1]
        return total
