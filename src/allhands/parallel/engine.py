"""Compute a rank's stages by a schedule: a list of passes and messages, one after the other.

In a graph, forward and backward pass of a micro-batch are built together and evaluated separately.
MLX keeps the results of the forward pass for the backward pass, and the gradient from the next stage
is an array that has not arrived yet. So nothing is computed twice, and gradients of inputs can be
evaluated before gradients of weights. If operations compute when they are called, the forward pass
keeps only its input, and is computed again.

Every message has its place in the lists of both its ranks (:mod:`allhands.parallel.schedules`). Ranks
queue messages in that order, over their own stream, so a rank computes while they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import mlx.core as mx
import mlx.nn as nn

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator, MlxGroup
from allhands.distributed.capabilities import can
from allhands.io.trees import flatten, unflatten
from allhands.model.stages import Stage
from allhands.objectives.base import Objective
from allhands.parallel.gradient import Computing, StageWeights
from allhands.parallel.schedules import Action, Schedule
from allhands.parallel.sums import added

T = TypeVar("T")


def unheard(phase: str) -> None:
    """Do nothing: the heartbeat of passes without a supervisor."""


class Messages:
    """The messages of the ranks of a pipeline, in the order in which they are queued.

    If the back-end has no send and receive (NCCL), a message is a sum over two ranks, one of which has
    zeros.
    """

    def __init__(
        self,
        communicator: Communicator,
        heartbeat: Callable[[str], None],
        inject_fault: Callable[[Literal["message"]], object] = lambda point: None,
    ) -> None:
        """Called on all ranks of the pipeline together."""
        self._inject_fault = inject_fault
        assert isinstance(communicator, MlxGroup)
        self._group = communicator
        self._heartbeat = heartbeat
        self.waited_s = 0.0  # for others, so far
        self._sent: list[mx.array] = []
        # Sent arrays stay in memory until they are known to be received: at most those that a
        # pipeline has under way.
        self._on_their_way = communicator.size
        able = any(can(communicator.backend, way) for way in ("send_recv", "send_recv_neighbours"))
        self._pairs: dict[int, MlxGroup] = {} if able else pairs_of(communicator)
        self._nothing: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}

    def send(self, array: mx.array, peer: int) -> None:
        """Queue an array to be sent; it may not be computed yet, and this rank goes on."""
        self._inject_fault("message")
        pair = self._pairs.get(peer)
        token = self._group.send(array, peer) if pair is None else pair.all_sum(array)
        mx.async_eval(token)
        self._sent.append(token)
        if len(self._sent) > self._on_their_way:
            self.here(self._sent.pop(0))

    def expected(self, shape: Sequence[int], dtype: mx.Dtype, peer: int) -> mx.array:
        """Return the array that a rank will send, before it is evaluated."""
        if (pair := self._pairs.get(peer)) is None:
            return self._group.receive(shape, dtype, peer)
        key = tuple(shape), dtype
        if (nothing := self._nothing.get(key)) is None:
            nothing = self._nothing[key] = mx.zeros(shape, dtype)
            # New zeros would be ready only after all work that was queued before them.
            mx.eval(nothing)
        return pair.all_sum(nothing)

    def here(self, array: mx.array) -> mx.array:
        """Return ``array`` after it has arrived. The host waits, because a GPU that waits for
        another computer may be taken for dead.
        """
        self.wait_for([array])
        return array

    def finish(self) -> None:
        """Wait until all messages have been received."""
        self.wait_for(self._sent)
        self._sent.clear()

    def wait_for(self, arrays: list[mx.array]) -> None:
        """Wait for arrays that other ranks send or receive."""
        self.waited_s += waited_for(partial(mx.eval, arrays), self._heartbeat)[1]


def waited_for(exchange: Callable[[], T], heartbeat: Callable[[str], None]) -> tuple[T, float]:
    """Return the result of an exchange with other ranks, and the seconds that it took."""
    heartbeat("reduce")
    began = time.perf_counter()
    found = exchange()
    seconds = time.perf_counter() - began
    heartbeat("compute")
    return found, seconds


def pairs_of(group: MlxGroup) -> dict[int, MlxGroup]:
    """Return a group of two for each neighbour of this rank; the last and the first rank are also
    neighbours.

    Called on all ranks of ``group`` together.
    """
    rank, size = group.rank, group.size
    if size == 2:
        return {1 - rank: group}
    found: dict[int, MlxGroup] = {}
    # Each rank is in one group at a time: pairs that begin at even ranks, then at odd ones, then
    # the ends.
    for begin in (0, 1):
        other = rank + 1 if rank % 2 == begin else rank - 1
        members = sorted((rank, other)) if 0 <= other < size else [rank]
        part = group.split(members)
        if len(members) == 2:
            found[other] = part
    ends = [0, size - 1]
    part = group.split(ends if rank in ends else [rank])
    if rank in ends:
        found[ends[1 - ends.index(rank)]] = part
    return found


@dataclass
class _Passing:
    """A micro-batch in a stage between its forward pass and the end of its backward pass."""

    arguments: tuple[mx.array, ...]
    received: mx.array | None = None
    cotangent: mx.array | None = None
    of_input: mx.array | None = None
    of_weights: list[mx.array] = field(default_factory=list[mx.array])


class StageCompute:
    """The passes of one stage.

    Args:
        stage: the stage; its model is trained on this rank.
        flat: flat buffers of its trained weights; ``None``: by name.
        goes_on: whether the gradient of the stage's input is needed, because an earlier stage trains
            something.
        modules: the modules whose arrays the stage uses; ``None``: the whole model.
    """

    def __init__(
        self,
        stage: Stage,
        objective: Objective,
        computing: Computing,
        flat: StageWeights | None,
        *,
        goes_on: bool = True,
        modules: Sequence[nn.Module] | None = None,
    ) -> None:
        self.stage = stage
        self._goes_on = goes_on
        self._objective = objective
        self._computing = computing
        self._flat = flat
        self._sums = objective.sums(stage.model, cpu_native=False) if stage.blocks.is_last else None
        self._gradient: Any = self._vjp
        self._found: Any = self._outputs
        if computing.compiled and not computing.cpu_native:
            own = [stage.model.state] if modules is None else [module.state for module in modules]
            how: Any = {"inputs": [*own, mx.random.state], "outputs": [mx.random.state]}
            self._gradient, self._found = (
                mx.compile(self._vjp, **how),
                mx.compile(self._outputs, **how),
            )

    def tokens(self, batch: MicroBatch) -> tuple[int, ...]:
        """Return the shape of a micro-batch's tokens, as this rank computes them."""
        return self._objective.places(batch.inputs).shape

    def trained(self) -> list[mx.array]:
        """Return the trained arrays, in the order of their gradients."""
        if self._flat is not None:
            return list(self._flat.weights())
        return [array for _, array in flatten(self.stage.model.trainable_parameters())]

    def forward(self, received: mx.array | None, arguments: tuple[mx.array, ...]) -> list[mx.array]:
        """Return the hidden states that a stage passes on, or the sums of the last stage, without
        gradients.
        """
        given = mx.zeros((0,)) if received is None else received
        with self._as_it_was():
            return self._found(given, *arguments)

    def begin(
        self, received: mx.array | None, cotangent: mx.array | None, arguments: tuple[mx.array, ...]
    ) -> tuple[list[mx.array], mx.array | None, list[mx.array]]:
        """Return the result of :meth:`forward`, and the gradients of its input and of the weights,
        all still lazy.

        ``cotangent``: the gradient of the stage's output; ``None`` for the last stage.
        """
        given = mx.zeros((0,)) if received is None else received
        towards = mx.ones(()) if cotangent is None else cotangent
        with self._as_it_was():
            outputs, gradients = self._gradient(self.trained(), given, towards, *arguments)
        if not self._goes_on:
            return outputs, None, gradients
        return outputs, gradients[0] if received is not None else None, gradients[1:]

    def keep(self, received: mx.array | None, arguments: tuple[mx.array, ...]) -> list[mx.array]:
        """Like :meth:`forward`, before :meth:`begin`, which may use its results."""
        return self.forward(received, arguments)

    def idle(self, *, backward: bool) -> list[mx.array]:
        """Take part in the exchanges for another rank's micro-batch; this rank's gradients are
        zeros.
        """
        return []

    def _outputs(self, received: mx.array, *arguments: mx.array) -> list[mx.array]:
        return self.computed(received if received.size else None, arguments)

    def _vjp(
        self, trained: list[mx.array], received: mx.array, cotangent: mx.array, *arguments: mx.array
    ) -> tuple[list[mx.array], list[mx.array]]:
        def run(received: mx.array, *trained: mx.array) -> list[mx.array]:
            with self._installed(trained):
                return self._outputs(received, *arguments)

        def run_alone(*trained: mx.array) -> list[mx.array]:
            return run(received, *trained)

        # Further sums have no gradient.
        count = 1 + (len(self._objective.further) if self.stage.blocks.is_last else 0)
        cotangents = [cotangent, *[mx.zeros(())] * (count - 1)]
        # With --grad-checkpoint the backward pass computes blocks again, after ``run``.
        with self._using_keys(arguments):
            outputs, gradients = (
                mx.vjp(run, [received, *trained], cotangents)
                if self._goes_on
                else mx.vjp(run_alone, trained, cotangents)
            )
        return outputs, list(gradients)

    def _using_keys(self, arguments: tuple[mx.array, ...]) -> AbstractContextManager[object]:
        """Let dropout draw by the keys of a micro-batch, the first of its ``arguments``."""
        dropout = self._computing.dropout
        return nullcontext() if dropout is None else dropout.using(arguments[0])

    def computed(
        self, received: mx.array | None, arguments: tuple[mx.array, ...]
    ) -> list[mx.array]:
        """Return the outputs of the stage with the model's present arrays."""
        arrays = arguments if self._computing.dropout is None else arguments[1:]
        with self.stage.computing(received), self._using_keys(arguments):
            if self._sums is not None:
                return [each.astype(mx.float32) for each in self._sums(*arrays)]
            inputs, more = self._objective.model_inputs(self.stage.blocks.count, *arrays)
            return [self.stage.hidden(inputs, **more)]

    @contextmanager
    def _installed(self, trained: Sequence[mx.array]) -> Generator[None]:
        model = self.stage.model
        with ExitStack() as stack:
            if self._flat is not None:
                stack.enter_context(self._flat.leaves.installed(list(trained)))
            else:
                names = [name for name, _ in flatten(model.trainable_parameters())]
                model.update(unflatten(list(zip(names, trained, strict=True))))
            yield

    @contextmanager
    def _as_it_was(self) -> Generator[None]:
        """Restore the model's own arrays after the block, because tracing leaves placeholders."""
        if self._flat is not None:
            with self._flat.leaves.kept():
                yield
            return
        before = self.stage.model.trainable_parameters()
        try:
            yield
        finally:
            self.stage.model.update(before)


class Engine:
    """Runs schedules on this rank.

    Args:
        compute: the passes of this rank's stages, by the number of the stage.
        arguments: returns the arrays of a micro-batch that a pass takes.
        first_trained: the first stage of all ranks that trains anything.

    Attributes:
        ahead: a micro-batch of the next step, with the first stage's output for it.
    """

    ahead: tuple[MicroBatch, list[mx.array]] | None = None

    def __init__(
        self,
        compute: dict[int, StageCompute],
        messages: Messages,
        arguments: Callable[[MicroBatch], tuple[mx.array, ...]],
        *,
        cpu_native: bool,
        first_trained: int = 0,
    ) -> None:
        self.compute = compute
        self.first_trained = first_trained
        self.messages = messages
        self.arguments = arguments
        self.cpu_native = cpu_native

    @property
    def runs_ahead(self) -> bool:
        """True if this rank has the first stage, and no update changes this stage."""
        return 0 in self.compute and self.first_trained > 0

    def begin(self, batch: MicroBatch) -> None:
        """Queue the first stage's pass of a micro-batch of the next step."""
        outputs = self.compute[0].forward(None, self.arguments(batch))
        self.hand_out(outputs)
        self.ahead = batch, outputs

    def first_outputs(self, batch: MicroBatch) -> list[mx.array] | None:
        """Return the outputs of :meth:`begin`, once, if it was given this micro-batch."""
        ahead, self.ahead = self.ahead, None
        return ahead[1] if ahead is not None and ahead[0] is batch else None

    def hand_out(self, *arrays: Any) -> None:
        """Queue arrays; a GPU computes them while the host builds the next graph."""
        (mx.eval if self.cpu_native else mx.async_eval)(*arrays)

    def run(
        self,
        schedule: Schedule,
        rank: int,
        micro_batches: Sequence[MicroBatch | None],
        note: Callable[[MicroBatch], None],
    ) -> tuple[list[mx.array], dict[int, list[mx.array]]]:
        """Return a step's sums, which are zeros except on the last stage's rank, and the gradients
        of each stage's weights.

        Args:
            micro_batches: ``None`` for a micro-batch of another pipeline, with whose ranks this rank
                exchanges during passes.
        """
        step = _Step(self, schedule, micro_batches)
        for action in schedule.ranks[rank]:
            batch = micro_batches[action.micro_batch]
            if batch is None:
                step.stand_by(action)
                continue
            if action.kind == "forward":
                note(batch)
            step.take(action)
        self.messages.finish()
        return step.sums, step.gradients


class _Step:
    """The state of a running step."""

    def __init__(
        self, engine: Engine, schedule: Schedule, micro_batches: Sequence[MicroBatch | None]
    ) -> None:
        self._engine, self._schedule, self._batches = engine, schedule, micro_batches
        self._messages: Messages = engine.messages
        self._passing: dict[tuple[int, int], _Passing] = {}
        self._came: dict[tuple[int, int], mx.array] = {}
        self._to_send: dict[tuple[int, int, int], mx.array] = {}
        # An array of the last backward pass that was handed out: it tells when that pass has been
        # computed.
        self._handed_out: mx.array | None = None
        self.sums: list[mx.array] = []
        self.gradients: dict[int, list[mx.array]] = {}

    def take(self, action: Action) -> None:
        """Do one action of the list."""
        getattr(self, f"_{action.kind}")(action)

    def stand_by(self, action: Action) -> None:
        """Do one action of the list without a micro-batch of this rank."""
        compute = self._engine.compute.get(action.stage)
        if compute is None:
            return
        if action.kind == "forward" and not (
            compute.stage.blocks.is_last and self._engine.cpu_native
        ):
            compute.idle(backward=False)
        elif action.kind in ("backward", "inputs"):
            self._add(action.stage, compute.idle(backward=True))

    def _batch(self, number: int) -> MicroBatch:
        batch = self._batches[number]
        assert batch is not None
        return batch

    def _peer(self, stage: int) -> int:
        return stage % len(self._schedule.ranks)

    def _hidden(self, stage: int, batch: int) -> tuple[tuple[int, ...], mx.Dtype]:
        """Shape and type of the hidden states between stages."""
        compute = self._engine.compute[stage]
        tokens, own = compute.tokens(self._batch(batch)), compute.stage
        return (*tokens, own.features), own.dtype

    def _send(self, action: Action) -> None:
        self._messages.send(
            self._to_send.pop((action.stage, action.micro_batch, action.to)), action.peer
        )

    def _receive(self, action: Action) -> None:
        place = action.to, action.micro_batch
        if action.to < action.stage:
            cotangent = self._passing[place].cotangent
            assert cotangent is not None
            mx.async_eval(cotangent)
            return
        array = self._messages.expected(*self._hidden(*place), action.peer)
        mx.async_eval(array)
        self._came[place] = array

    def _forward(self, action: Action) -> None:
        stage, batch = place = action.stage, action.micro_batch
        compute = self._engine.compute[stage]
        last = compute.stage.blocks.is_last
        passing = _Passing(self._engine.arguments(self._batch(batch)))
        if stage:
            passing.received = self._messages.here(self._came.pop(place))
        if stage < self._engine.first_trained:
            outputs = self._engine.first_outputs(self._batch(batch)) if stage == 0 else None
            if outputs is None:
                outputs = compute.forward(passing.received, passing.arguments)
                self._engine.hand_out(outputs)  # no further ahead than messages are being sent
            self._end_forward(place, outputs, last=last)
            return
        if not last:
            passing.cotangent = self._messages.expected(
                *self._hidden(*place), self._peer(stage + 1)
            )
        self._passing[place] = passing
        if self._engine.cpu_native:
            if last:  # whose backward pass is next, and computes it
                return
            outputs = compute.keep(passing.received, passing.arguments)
        else:
            outputs, passing.of_input, passing.of_weights = compute.begin(
                passing.received, passing.cotangent, passing.arguments
            )
        self._engine.hand_out(outputs)
        self._end_forward(place, outputs, last=last)

    def _end_forward(self, place: tuple[int, int], outputs: list[mx.array], *, last: bool) -> None:
        if last:
            self.sums = added(self.sums, outputs)
        else:
            self._to_send[(*place, place[0] + 1)] = outputs[0]

    def _inputs(self, action: Action) -> None:
        """Compute the gradient of the stage's input, and of the weights if it is the same pass."""
        stage, batch = place = action.stage, action.micro_batch
        passing = self._passing[place]
        if passing.cotangent is not None:
            self._messages.here(passing.cotangent)
        if self._engine.cpu_native:
            compute = self._engine.compute[stage]
            outputs, passing.of_input, passing.of_weights = compute.begin(
                passing.received, passing.cotangent, passing.arguments
            )
            mx.eval(
                outputs, passing.of_weights, [] if passing.of_input is None else passing.of_input
            )
            if compute.stage.blocks.is_last:
                self._end_forward(place, outputs, last=True)
        if passing.of_input is not None:
            self._engine.hand_out(passing.of_input)
            self._to_send[stage, batch, stage - 1] = passing.of_input

    def _weights(self, action: Action) -> None:
        """Add up the gradients of the weights."""
        self._add(action.stage, self._passing.pop((action.stage, action.micro_batch)).of_weights)

    def _add(self, stage: int, new: list[mx.array]) -> None:
        if not new:
            return
        before = self.gradients.get(stage)
        # Contiguous, because a transposed gradient makes the optimizer's pass several times slower.
        total = (
            [mx.contiguous(each) for each in new]
            if before is None
            else [a + b for a, b in zip(before, new, strict=True)]
        )
        del new, before
        self.gradients[stage] = total
        self._engine.hand_out(total, self.sums)
        if self._handed_out is not None:
            mx.eval(self._handed_out)
        self._handed_out = min(total, key=lambda array: array.nbytes)

    def _backward(self, action: Action) -> None:
        self._inputs(action)
        self._weights(action)
