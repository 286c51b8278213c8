"""Hierarchical sums for several ranks on each computer: first within each computer, then between
computers, then back.

A ring of N ranks on H computers carries 2 (N - 1) / N times an array over every cable; a
hierarchical sum carries 2 (H - 1) / H. Only neighbours of the ring send to each other. On each
computer the last rank gets the sum of its ranks. These sums are added up part by part around the
computers, and the finished parts go around once more. The ranks in between pass on what they
receive, and keep the finished parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx

from allhands.distributed.backend import Communicator, MlxGroup
from allhands.distributed.capabilities import can
from allhands.io.trees import numbers

# Smaller arrays gain nothing, because hierarchical sums take more messages in sequence.
_LEAST_BYTES = 1 << 16
_TRIAL_BYTES, _TRIALS = 1 << 20, 2
_WORTH = 0.9  # largest time, as a part of the ring's, with which hierarchical sums are chosen


class ByComputer(MlxGroup):
    """A ring with hierarchical sums.

    Large sums are computed when :meth:`all_sum` returns; all other collectives are the ring's own.

    Attributes:
        computers: number of computers.
        place: number of this rank's computer.
        first, last: the first and the last rank on it.
        told: measured times, in words.
    """

    def __init__(self, ring: MlxGroup, firsts: Sequence[int]) -> None:
        """``firsts``: the first rank on each computer, in order."""
        super().__init__(ring.group, ring.backend, ring.stream)
        ends = pairwise([*firsts, ring.size])
        self.computers = len(firsts)
        self.place, (self.first, end) = next(
            (place, each) for place, each in enumerate(ends) if each[0] <= ring.rank < each[1]
        )
        self.last = end - 1
        self.told = ""

    def all_sum(self, array: mx.array) -> mx.array:
        if array.nbytes < _LEAST_BYTES:
            return super().all_sum(array)
        flat = array.reshape(-1)
        mx.eval(flat)
        each = -(-flat.size // self.computers)
        if missing := each * self.computers - flat.size:
            flat = mx.concatenate([flat, mx.zeros((missing,), dtype=flat.dtype)])
        parts = self._between(list(self._of_this_computer(flat).reshape(self.computers, each)))
        return mx.concatenate(parts)[: array.size].reshape(array.shape)

    def _of_this_computer(self, own: mx.array) -> mx.array:
        """Return the sum over this computer's ranks, on its last rank; a partial sum on others."""
        if self.rank > self.first:
            own = own + self._get(own, self.rank - 1)
        if self.rank < self.last:
            self._give(own, self.rank + 1)
        return own

    def _between(self, mine: list[mx.array]) -> list[mx.array]:
        """Return the parts of the whole sum.

        ``mine``: parts of this computer's sum; they are read only on its last rank.
        """
        computers, found = self.computers, list(mine)
        for hop in range(2 * (computers - 1)):
            place = (self.place - hop - 1) % computers
            if self.rank == self.last:
                self._give(found[(place + 1) % computers], (self.rank + 1) % self.size)
            got = self._get(found[place], (self.rank - 1) % self.size)
            if self.rank < self.last:
                self._give(got, self.rank + 1)
            adds = hop < computers - 1 and self.rank == self.last
            found[place] = found[place] + got if adds else got
            mx.eval(found[place])
        # The part that this computer has finished itself has not passed the other ranks here.
        place = (self.place + 1) % computers
        if self.rank < self.last:
            found[place] = self._get(found[place], self.rank + 1)
        if self.rank > self.first:
            self._give(found[place], self.rank - 1)
        return found

    def _give(self, array: mx.array, to: int) -> None:
        mx.eval(self.send(array, to))

    def _get(self, like: mx.array, source: int) -> mx.array:
        got = self.receive(like.shape, like.dtype, source)
        mx.eval(got)
        return got


def by_computer(communicator: Communicator, local_rank: int, local_size: int) -> Communicator:
    """Return a ring with hierarchical sums if these are measured to be faster, else
    ``communicator``.

    All ranks call this together.

    Args:
        local_rank: number of this process on its computer.
        local_size: number of processes on this computer.
    """
    if not isinstance(communicator, MlxGroup) or not can(
        communicator.backend, "send_recv_neighbours"
    ):
        return communicator
    firsts = first_ranks(communicator, local_rank, local_size)
    if not 1 < len(firsts) < communicator.size:
        return communicator
    ours = ByComputer(communicator, firsts)
    theirs_s, ours_s = _seconds(communicator, communicator), _seconds(ours, communicator)
    if ours_s >= _WORTH * theirs_s:
        return communicator
    ours.told = f"within each computer first: {1e3 * ours_s:.0f} ms for a megabyte, {1e3 * theirs_s:.0f} around the ring"
    return ours


def first_ranks(communicator: Communicator, local_rank: int, local_size: int) -> list[int]:
    """Return the first rank on each computer; empty if a computer's ranks are not numbered in
    sequence, as with ``mpirun --map-by node``.

    All ranks call this together.
    """
    told = numbers(communicator.all_gather(mx.array([float(local_rank), float(local_size)])))
    places, sizes = told[::2], told[1::2]
    firsts = [rank for rank, place in enumerate(places) if place == 0]
    in_sequence = firsts[:1] == [0] and all(
        places[first:end] == [*range(end - first)] and set(sizes[first:end]) == {end - first}
        for first, end in pairwise([*firsts, communicator.size])
    )
    return firsts if in_sequence else []


def _seconds(tried: Communicator, world: Communicator) -> float:
    """Return the slowest rank's shortest time of some sums of a megabyte; equal on all ranks."""
    array, taken = mx.ones((_TRIAL_BYTES // 4,)), list[float]()
    for _ in range(_TRIALS):
        mx.eval(world.all_sum(mx.zeros((1,))))
        begun = time.perf_counter()
        mx.eval(tried.all_sum(array))
        taken.append(time.perf_counter() - begun)
    return max(numbers(world.all_gather(mx.array([min(taken)]))))
