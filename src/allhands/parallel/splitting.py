"""Divide a model's blocks among the ranks of a pipeline: by speed, as far as each rank's memory
allows.

Pure functions of numbers, for training and for ``allhands plan``. With one stage a rank the split
is the best there is, by dynamic programming over (stage, first block): no rank needs more than its
room where that is possible; of those splits the slowest stage is as fast as it can be; of those the
others are as even as they can be. Where ranks have several stages each, which are not neighbours,
single blocks are moved for as long as that makes it better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_ALIKE = 0.9  # speeds of at least so much of a faster one count as equal to it
_STEP = 0.05  # to which the others are rounded
_SAME = 1e-9  # relative: rounding errors of sums
_EVENLY = 1e-6  # how much it counts, beside the bytes that are missing in all, that no rank misses most of them


@dataclass(frozen=True)
class Part:
    """A block, or what a stage has besides blocks.

    Attributes:
        cost: of its passes, in any unit of work.
        num_bytes: held all the time.
        kept_bytes: held for each micro-batch that is alive.
        again: more cost in all stages but the last, which computes both ways at once.
    """

    cost: float
    num_bytes: int = 0
    kept_bytes: float = 0.0
    again: float = 0.0


@dataclass(frozen=True)
class Layers:
    """The parts that are divided.

    Attributes:
        blocks: in the model's order.
        embedding: which the first stage has besides; ``head`` the last one.
        first_trained: the first block that is trained, beyond which no gradient goes back.
    """

    blocks: tuple[Part, ...]
    embedding: Part = Part(0.0)
    head: Part = Part(0.0)
    first_trained: int = 0


@dataclass(frozen=True)
class Seat:
    """A rank of the pipeline.

    Attributes:
        speed: work a second, in any unit.
        room: bytes that it may have; ``None`` if that is not known.
        taken: of them what is no part of a stage.
        alive: micro-batches whose activations it holds at once, of all blocks that it has.
    """

    speed: float = 1.0
    room: int | None = None
    taken: int = 0
    alive: float = 1.0


@dataclass(frozen=True)
class Split:
    """Blocks of each stage, in the model's order, and what follows for each rank.

    Attributes:
        seconds: of each rank's passes, in units of cost by speed; ``num_bytes`` of each rank.
        missing: bytes of each rank beyond its room; all 0 where the split fits.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """True if every rank has room for its stages."""
        return not any(self.missing)


def even_speeds(measured: Sequence[float]) -> list[float]:
    """Speeds without the noise of measuring, the fastest being 1: what is less than 10 % apart is
    equal.

    So equal computers have equal stages in every run.
    """
    found = [0.0] * len(measured)
    leader = level = 0.0
    for place in sorted(range(len(measured)), key=lambda each: -measured[each]):
        if measured[place] < _ALIKE * leader or not leader:
            leader = measured[place]
            share = leader / max(measured)
            level = max(_STEP, round(round(share / _STEP) * _STEP, 2))
        found[place] = level
    return found


def divide(layers: Layers, seats: Sequence[Seat], stages_per_rank: int = 1) -> Split:
    """Return the best split; one that does not fit says so, and misses as little in all as any
    does.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    count = len(seats) * stages_per_rank
    if len(layers.blocks) < count:
        raise ValueError(f"{len(layers.blocks)} blocks are too few for {count} stages")
    problem = _Problem(layers, seats, count)
    return problem.of(problem.moved() if stages_per_rank > 1 else problem.best())


def split_as(layers: Layers, seats: Sequence[Seat], sizes: Sequence[int]) -> Split:
    """Return the split into stages of these sizes."""
    return _Problem(layers, seats, len(sizes)).of(sizes)


# Of a stage that begins with one block and ends before another.
_Cost = Callable[[int, int, int], float]


class _Problem:
    """Costs and bytes of all stages that there could be."""

    def __init__(self, layers: Layers, seats: Sequence[Seat], count: int) -> None:
        self._layers, self._seats, self._count = layers, seats, count
        self._blocks = len(layers.blocks)
        self._sums = _sums(layers.blocks)

    def _own(self, stage: int, first: int, stop: int) -> tuple[float, float, float]:
        """Cost, bytes, and bytes for each micro-batch of a stage."""
        cost, held, kept, again = (each[stop] - each[first] for each in self._sums)
        # A stage without a backward pass computes nothing again.
        cost += again if stage < self._count - 1 and stop > self._layers.first_trained else 0.0
        for part, has in (
            (self._layers.embedding, stage == 0),
            (self._layers.head, stage == self._count - 1),
        ):
            if has:
                cost, held, kept = cost + part.cost, held + part.num_bytes, kept + part.kept_bytes
        return cost, held, kept

    def _seconds(self, stage: int, first: int, stop: int) -> float:
        return self._own(stage, first, stop)[0] / self._seats[stage % len(self._seats)].speed

    def of(self, sizes: Sequence[int]) -> Split:
        """Return all that follows of stages of these sizes."""
        seats = self._seats
        seconds, held = [0.0] * len(seats), [float(seat.taken) for seat in seats]
        stops = list(accumulate(sizes))
        for stage, (size, stop) in enumerate(zip(sizes, stops, strict=True)):
            rank = stage % len(seats)
            cost, weights, kept = self._own(stage, stop - size, stop)
            seconds[rank] += cost / seats[rank].speed
            held[rank] += weights + kept * seats[rank].alive
        num_bytes = tuple(math.ceil(each - _SAME * each) for each in held)
        missing = tuple(_missing(seat, each) for seat, each in zip(seats, num_bytes, strict=True))
        return Split(tuple(sizes), tuple(seconds), num_bytes, missing)

    def best(self) -> tuple[int, ...]:
        """Find the best split with one stage a rank by three searches, each among the splits that
        the last one left.
        """

        def missing(stage: int, first: int, stop: int) -> float:
            _, held, kept = self._own(stage, first, stop)
            seat = self._seats[stage]
            found = _missing(
                seat, math.ceil((each := seat.taken + held + kept * seat.alive) - _SAME * each)
            )
            return found * (1 + _EVENLY * found / each) if found else 0.0

        least, _ = self._search(missing)

        def slow(stage: int, first: int, stop: int) -> float:
            return (
                self._seconds(stage, first, stop)
                if least or not missing(stage, first, stop)
                else math.inf
            )

        if least:  # nothing fits: what misses the least
            return self._search(missing)[1]
        slowest, _ = self._search(slow, worst=True)

        def uneven(stage: int, first: int, stop: int) -> float:
            seconds = slow(stage, first, stop)
            return seconds * seconds if seconds <= slowest * (1 + _SAME) else math.inf

        return self._search(uneven)[1]

    def _search(self, cost: _Cost, *, worst: bool = False) -> tuple[float, tuple[int, ...]]:
        """The least sum of all stages' costs, or the least ``worst`` one, and the sizes; of equal
        ones larger first.
        """
        blocks, count = self._blocks, self._count
        # Of the stages from one on, if they begin with a block: the value, and where the next one
        # begins.
        after = [math.inf] * blocks + [0.0]
        choices: list[list[int]] = []
        for stage in reversed(range(count)):
            now, next_ones = [math.inf] * (blocks + 1), [blocks] * (blocks + 1)
            for first in range(stage, blocks - (count - stage) + 1):
                stops = (
                    range(first + 1, blocks - (count - stage - 1) + 1)
                    if stage < count - 1
                    else [blocks]
                )
                for stop in reversed(stops):  # the largest stage first, and of equal ones it stays
                    own = cost(stage, first, stop)
                    value = max(own, after[stop]) if worst else own + after[stop]
                    if now[first] == math.inf or value < now[first] * (1 - _SAME):
                        now[first], next_ones[first] = value, stop
            after = now
            choices.append(next_ones)
        sizes: list[int] = []
        first = 0
        for next_ones in reversed(choices):
            sizes.append(next_ones[first] - first)
            first = next_ones[first]
        return after[0], tuple(sizes)

    def moved(self) -> tuple[int, ...]:
        """Find a split with several stages a rank: from equal ones, blocks go where they make it
        better.
        """
        whole, more = divmod(self._blocks, self._count)
        sizes = tuple(whole + (place < more) for place in range(self._count))
        now = self._rated(sizes)
        while True:
            others = [
                self._rated(
                    (*(n + (place == to) - (place == away) for place, n in enumerate(sizes)),)
                )
                for away in range(self._count)
                for to in range(self._count)
                if away != to and sizes[away] > 1
            ]
            if not others or not (found := min(others)) < now:
                return sizes
            now, sizes = found, tuple(-each for each in found[-1])

    def _rated(
        self, sizes: tuple[int, ...]
    ) -> tuple[int, tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
        """By which splits are compared: the lower the better."""
        split = self.of(sizes)
        stops = list(accumulate(sizes))
        stages = [
            self._seconds(place, stop - sizes[place], stop) for place, stop in enumerate(stops)
        ]
        ranks, each = (
            tuple(float(f"{s:.9g}") for s in sorted(some, reverse=True))
            for some in (split.seconds, stages)
        )
        return sum(split.missing), ranks, each, tuple(-size for size in sizes)


def _missing(seat: Seat, num_bytes: int) -> int:
    return 0 if seat.room is None else max(0, num_bytes - seat.room)


def _sums(parts: Sequence[Part]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Running sums over the blocks: costs, bytes, bytes for each micro-batch, and costs of
    computing again.
    """
    return (
        [0.0, *accumulate(part.cost for part in parts)],
        [0.0, *accumulate(float(part.num_bytes) for part in parts)],
        [0.0, *accumulate(part.kept_bytes for part in parts)],
        [0.0, *accumulate(part.again for part in parts)],
    )
