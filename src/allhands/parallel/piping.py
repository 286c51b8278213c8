"""The connections of the ranks of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from allhands.distributed.backend import Communicator
from allhands.model.stages import Stage
from allhands.parallel.schedules import ScheduleName


@dataclass(frozen=True)
class Piping:
    """A rank's part of a pipeline.

    Attributes:
        stages: of this rank, in the model's order.
        pipe: the ranks that make up a copy of the model; ``data`` those that compute the same
            blocks.
    """

    stages: tuple[Stage, ...]
    pipe: Communicator
    data: Communicator
    schedule: ScheduleName = "1f1b"

    @property
    def is_last(self) -> bool:
        """True if the loss is computed here."""
        return self.stages[-1].blocks.is_last

    @property
    def shares_table(self) -> bool:
        """True if the model's table of tokens is on two ranks."""
        return bool(self.stages[0].shared) and self.pipe.size > 1
