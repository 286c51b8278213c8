"""Who this process is among the others: plain numbers, no device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """The processes of a run and this one's place.

    Attributes:
        rank: number of this process, 0 to ``size - 1``.
        size: number of processes.
        local_rank: number of this process on its host.
        local_size: processes on this host.
        weights: relative speed of every rank; its share of each batch is in proportion.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    weights: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)
        assert len(self.weights) == self.size, (self.weights, self.size)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the person."""
        return self.rank == 0
