"""Schedules of pipeline parallel training, as plain data: the ordered actions of each rank.

A model is a list of stages. Each rank has one stage, or several that are not neighbours
(interleaved, arXiv 2104.04473). First forward passes fill the pipeline; then forward and backward
passes take turns. If backward passes are divided (zero bubble, arXiv 2401.10241, H1), gradients of
inputs come first, and gradients of weights fill the waiting times. A schedule is found by a
simulation of the step. All ranks simulate it by the same rules, and so know each other's lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import Literal, get_args

ScheduleName = Literal["1f1b", "interleaved", "zb"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
# "backward" is "inputs" and "weights" at once: the gradients of what a stage was given, and of its
# weights.
Kind = Literal["forward", "backward", "inputs", "weights", "send", "receive"]


@dataclass(frozen=True)
class Action:
    """One action of a rank.

    Attributes:
        stage: number of the stage, from 0; for a message the stage that sends it.
        micro_batch: number of the micro-batch in the step, from 0.
        peer: for a message the rank at its other end.
        to: for a message the stage that receives it: the next stage gets activations, the stage
            before gets gradients.
    """

    kind: Kind
    stage: int
    micro_batch: int
    peer: int = -1
    to: int = -1


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank in a step.

    Attributes:
        ranks: the actions of each rank, in order.
        num_stages: stages of the model; stage ``s`` is on rank ``s % len(ranks)``.
        idle: mean waiting time of the ranks as a part of the step, if stages take equally long, a
            backward pass takes twice as long as a forward pass, and messages take no time.
        most_alive: for each rank the highest number of micro-batches with activations in memory.
    """

    ranks: tuple[tuple[Action, ...], ...]
    num_stages: int
    idle: float
    most_alive: tuple[int, ...]


@cache
def make_schedule(
    name: ScheduleName,
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int = 1,
    first_trained: int = 0,
) -> Schedule:
    """Return the schedule of a step.

    Args:
        stages_per_rank: more than 1 for ``interleaved`` only.
        first_trained: the first stage that trains anything. Those before it have no backward pass.

    Raises:
        ValueError: the schedule does not support this number of stages.
    """
    if (stages_per_rank > 1) != (name == "interleaved") or stages_per_rank < 1:
        raise ValueError(f"{stages_per_rank} stages a rank are not for the schedule {name}")
    return _Game(name, num_ranks, num_micro_batches, stages_per_rank, first_trained).played()


_SECONDS: dict[Kind, int] = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}


class _Game:
    """The simulation of a step."""

    def __init__(
        self,
        name: ScheduleName,
        num_ranks: int,
        num_micro_batches: int,
        stages_per_rank: int,
        first_trained: int,
    ) -> None:
        self._split = name == "zb"
        self._size, self._count, self._per_rank = num_ranks, num_micro_batches, stages_per_rank
        self._first_trained = first_trained
        self._last = num_ranks * stages_per_rank - 1
        self._to_do = [deque(self._order(rank, backward=False)) for rank in range(num_ranks)]
        self._to_return = [deque(self._order(rank, backward=True)) for rank in range(num_ranks)]
        self._left: list[deque[tuple[int, int]]] = [
            deque() for _ in range(num_ranks)
        ]  # weights' gradients
        self._alive, self._most = [0] * num_ranks, [0] * num_ranks
        self._begun = [0] * num_ranks  # forward passes without their backward pass so far
        self._ahead = [
            0
        ] * num_ranks  # for stages that train nothing: passes that the next stage has not begun
        # Received messages, by the receiving stage.
        self._activations = {(0, batch) for batch in range(num_micro_batches)}
        self._gradients = set[tuple[int, int]]()
        self._lists: list[list[Action]] = [[] for _ in range(num_ranks)]

    def _order(self, rank: int, *, backward: bool) -> Iterator[tuple[int, int]]:
        """Return the (stage, micro-batch) of a rank's passes, stage by stage for as many
        micro-batches as there are ranks.
        """
        for first in range(0, self._count, self._size):
            together = range(first, min(first + self._size, self._count))
            stages = range(rank, self._last + 1, self._size)
            for stage in reversed(stages) if backward else stages:
                if not backward or stage >= self._first_trained:
                    yield from ((stage, batch) for batch in together)

    def _room(self, rank: int) -> int:
        """Return the number of passes that a rank begins before one must end: enough to keep the
        last rank busy.
        """
        if self._per_rank == 1:
            return self._size - rank
        return 2 * (self._size - rank - 1) + (self._per_rank - 1) * self._size + 1

    def played(self) -> Schedule:
        """Simulate the whole step, and return all lists."""
        ends: list[tuple[int, int, int, Action]] = []
        order, free, now = count(), set(range(self._size)), 0
        while True:
            # If no rank can begin a pass by the rules, as with a rest of micro-batches, every rank
            # that can begin any pass does.
            begun = self._begun_by(free, eager=False) or (
                [] if ends else self._begun_by(free, eager=True)
            )
            for rank, action in begun:
                heappush(ends, (now + _SECONDS[action.kind], next(order), rank, action))
            if not ends:
                break
            now = ends[0][0]
            while ends and ends[0][0] == now:
                _, _, rank, action = heappop(ends)
                free.add(rank)
                self._end(rank, action)
        left = sum(map(len, (*self._to_do, *self._to_return, *self._left)))
        assert not left, f"{left} passes can never begin"
        work = (
            sum(_SECONDS.get(action.kind, 0) for actions in self._lists for action in actions)
            / self._size
        )
        return Schedule(
            tuple(map(tuple, self._lists)),
            self._last + 1,
            1 - work / now if now else 0.0,
            tuple(self._most),
        )

    def _begun_by(self, free: set[int], *, eager: bool) -> list[tuple[int, Action]]:
        """Begin passes on free ranks, the last ranks first, because their ends make room for
        others.
        """
        begun = [
            (rank, action)
            for rank in sorted(free, reverse=True)
            if (action := self._next(rank, eager=eager))
        ]
        for rank, action in begun:
            free.remove(rank)
            self._lists[rank].append(action)
        return begun

    def _next(self, rank: int, *, eager: bool) -> Action | None:
        """Return the action that the rank begins now, if there is one; ``eager``: also out of turn."""
        to_do, to_return = self._to_do[rank], self._to_return[rank]
        full = self._split or eager or self._begun[rank] >= self._room(rank) or not to_do
        if full and to_return and to_return[0] in self._gradients:
            return self._return(rank, *to_return.popleft())
        if (
            to_do
            and to_do[0] in self._activations
            and (eager or self._may_begin(rank, to_do[0][0]))
        ):
            return self._begin(rank, *to_do.popleft())
        return Action("weights", *self._left[rank].popleft()) if self._left[rank] else None

    def _may_begin(self, rank: int, stage: int) -> bool:
        """True if there is room for one more forward pass of a stage."""
        if stage < self._first_trained:
            return self._ahead[rank] < self._size
        # The first rank has as many micro-batches alive without divided backward passes; others
        # may, too.
        full = self._split and self._alive[rank] >= self._size
        return self._begun[rank] < self._room(rank) and not full

    def _return(self, rank: int, stage: int, batch: int) -> Action:
        """Return the backward pass of a stage; if it is divided, the part for the inputs."""
        self._begun[rank] -= 1
        if not self._split:
            return Action("backward", stage, batch)
        self._left[rank].append((stage, batch))
        return Action("inputs", stage, batch)

    def _begin(self, rank: int, stage: int, batch: int) -> Action:
        """Begin the forward pass of a stage with the output of the stage before it."""
        if 0 < stage <= self._first_trained:
            self._ahead[(stage - 1) % self._size] -= 1
        if stage >= self._first_trained:
            self._begun[rank] += 1
        else:
            self._ahead[rank] += 1
        self._alive[rank] += 1
        self._most[rank] = max(self._most[rank], self._alive[rank])
        return Action("forward", stage, batch)

    def _end(self, rank: int, action: Action) -> None:
        """Record the end of a pass: it frees room, and its result goes to the stage after or before
        it.
        """
        stage, batch = action.stage, action.micro_batch
        if action.kind in ("backward", "weights") or stage < self._first_trained:
            self._alive[rank] -= 1
        if action.kind == "forward" and stage == self._last:
            self._gradients.add((stage, batch))
        elif action.kind == "forward":
            self._activations.add((stage + 1, batch))
            self._tell(rank, stage, batch, stage + 1)
        elif action.kind in ("backward", "inputs") and stage > self._first_trained:
            self._gradients.add((stage - 1, batch))
            self._tell(rank, stage, batch, stage - 1)

    def _tell(self, rank: int, stage: int, batch: int, to: int) -> None:
        """Add a message to both lists at the same simulated time, so that no two ranks wait for
        each other.
        """
        if (peer := to % self._size) != rank:
            self._lists[rank].append(Action("send", stage, batch, peer, to))
            self._lists[peer].append(Action("receive", stage, batch, rank, to))
