"""Copies of checkpoints on other computers: rank 0 reports on them, and their failures end no run.

Rank 0's files are the files of the run. A copy protects against the loss of its computer. If a rank
cannot write a copy (a full disk, a directory without permission), there is a warning when the
trouble begins, when it ends, and at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from allhands.distributed.backend import Communicator, SingleProcess
from allhands.distributed.handout import gather_json
from allhands.errors import AllhandsError
from allhands.io.trees import numbers
from allhands.observe.metrics import SavedReport, Warned

NUMBERS = 2  # count of the numbers that a rank sends to the others


@dataclass
class Copies:
    """This rank's knowledge of the copies of checkpoints.

    Attributes:
        keeps: True if this rank keeps a copy.
        computer: the name of this rank's computer in messages.
        newest: returns the step of the newest whole checkpoint of the run here; 0: there is none.
        trouble: reason why the latest copy here could not be written; empty if it was written.
    """

    communicator: Communicator = field(default_factory=SingleProcess)
    keeps: bool = False
    computer: str = ""
    newest: Callable[[], int] = lambda: 0
    trouble: str = ""
    _changes: int = 0  # number of changes between good and bad; odd while copies fail
    _step: int = 0
    _heard: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._look()

    def fail(self, error: AllhandsError) -> bool:
        """Record that the copy here cannot be written; return True if the trouble is new."""
        new, self.trouble = (
            not self.trouble,
            f"{error.where}: {error.message}" if error.where else error.message,
        )
        self._changes += new
        return new

    def note(
        self, outcomes: Sequence[SavedReport | Warned | AllhandsError], step: int
    ) -> list[Warned]:
        """Record the copies that were written here or failed; return warnings for this rank."""
        told: list[Warned] = []
        for outcome in outcomes:
            if isinstance(outcome, AllhandsError) and self.fail(outcome):
                told.append(
                    Warned(
                        step,
                        f"no copy of the checkpoint is kept here ({self.trouble}); training goes on",
                    )
                )
            elif isinstance(outcome, SavedReport) and self.trouble:
                self.trouble, self._changes = "", self._changes + 1
        if outcomes:
            self._look()
        return told

    @property
    def told(self) -> list[float]:
        """This rank's :data:`NUMBERS` numbers for all others: count of changes, and step of the
        newest copy.
        """
        return [float(self._changes), float(self._step)]

    def hear(self, told: Sequence[float], step: int, *, ends: bool = False) -> list[Warned]:
        """Return rank 0's warnings about the copies; [] on other ranks.

        All ranks call this together.

        Args:
            told: :attr:`told` of every rank, one after the other.
            step: the present step.
            ends: True if nothing more will be written: present troubles are then reported again.
        """
        changes, steps = tuple(told[::NUMBERS]), told[1::NUMBERS]
        before, self._heard = self._heard or (0.0,) * len(changes), changes
        news = [
            rank
            for rank, (old, now) in enumerate(zip(before, changes, strict=True))
            # Trouble that began and ended between two reports is not reported.
            if (now % 2 and ends) or old % 2 != now % 2
        ]
        if not news:
            return []
        texts = gather_json(self.communicator, [self.computer, self.trouble])
        if self.communicator.rank != 0:
            return []
        return [_warning(texts[rank], int(steps[rank]), step, ends=ends) for rank in news]

    def settle(self, step: int) -> list[Warned]:
        """Return the last warnings, after all writes; all ranks call this together."""
        if self.communicator.size == 1:
            return []
        return self.hear(
            numbers(self.communicator.all_gather(mx.array(self.told))), step, ends=True
        )

    def _look(self) -> None:
        if self.keeps:
            try:
                self._step = self.newest()
            except (AllhandsError, OSError):
                self._step = 0


def _warning(said: tuple[str, str], copied: int, step: int, *, ends: bool) -> Warned:
    computer, trouble = said
    about = f"copy on {computer}"
    if not trouble:
        text = f"the copy of the checkpoint on {computer} is kept again: it is of step {copied}"
        return Warned(step, text, about, over=True)
    copy = f"the copy of the checkpoint on {computer} is of step {copied}"
    copy = copy if copied else f"there is no copy of the checkpoint on {computer}"
    return Warned(step, f"{copy}: {trouble}" + ("" if ends else "; training goes on"), about)
