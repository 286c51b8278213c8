"""An in-memory group of ranks: threads of one process that meet at barriers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import mlx.core as mx
import numpy as np

T = TypeVar("T")


@dataclass
class Table:
    """Where the ranks of one group lay down what they bring; numpy, because MLX's arrays keep to
    their thread.
    """

    size: int
    places: list[np.ndarray | None] = field(default_factory=list)
    barrier: Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.places = [None] * self.size
        self.barrier = Barrier(self.size, timeout=30)

    def exchange(self, rank: int, mine: np.ndarray) -> list[np.ndarray]:
        """Everybody's arrays, once all have come."""
        self.places[rank] = mine
        self.barrier.wait()
        found = [place for place in self.places if place is not None]
        self.barrier.wait()
        return found


@dataclass
class ThreadCommunicator:
    """A rank's end of the group. As with MLX's ring, arrays of unequal shapes are not noticed but
    spoilt.

    Attributes:
        calls: names of the collectives called, with the shape of what was brought.
    """

    rank: int
    size: int
    table: Table
    backend: str = "none"
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def all_sum(self, array: mx.array) -> mx.array:
        self.calls.append(("all_sum", array.shape))
        short = array.dtype == mx.bfloat16  # which NumPy does not have
        everyone = self.table.exchange(
            self.rank, np.array(array.astype(mx.float32) if short else array)
        )
        assert len({(one.shape, one.dtype) for one in everyone}) == 1, "unequal shapes in a sum"
        return mx.array(np.sum(everyone, axis=0, dtype=everyone[0].dtype)).astype(array.dtype)

    def all_gather(self, array: mx.array) -> mx.array:
        self.calls.append(("all_gather", array.shape))
        everyone = self.table.exchange(self.rank, np.array(array))
        assert len({(one.shape, one.dtype) for one in everyone}) == 1, "unequal shapes in a gather"
        return mx.array(np.concatenate(everyone))


def run_ranks(size: int, work: Callable[[ThreadCommunicator], T]) -> list[T | BaseException]:
    """What ``work`` returned, or raised, on each rank."""
    table = Table(size)

    def one(rank: int) -> T | BaseException:
        try:
            return work(ThreadCommunicator(rank, size, table))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def errors_of(results: Sequence[object]) -> list[str]:
    """The messages of a run in which every rank failed."""
    assert all(isinstance(result, Exception) for result in results), results
    return [str(result) for result in results]
