"""Facts of a run besides its losses, and the words of :mod:`allhands.observe.judging`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from allhands.observe.curves import Curve

Level = Literal["good", "note", "warning", "bad"]
LEAST_USUAL, MOST_USUAL = 1e-5, 1e-3  # learning rates of AdamW
_USUAL = "usual with AdamW are 1e-5 to 1e-3"


@dataclass(frozen=True)
class Judgement:
    """A finding about a run for a person; ``kind`` is its subject."""

    kind: str
    level: Level
    text: str


@dataclass(frozen=True)
class Course:
    """Facts of a run besides its losses.

    Attributes:
        norms: the gradient norm at each training report, before it is clipped.
        skipped: steps that changed nothing, because a gradient was not a finite number.
        steps: number of steps, including those that changed nothing.
        vocabulary: number of tokens of the vocabulary; ``None``: unknown.
        is_over: True if the run has ended in any way; else its end is not judged.
        rate: the highest learning rate; ``None``: unknown.
        seen: share of the validation examples that the model is trained on, too.
        began: steps done before the first report, by another run from which this one went on.
    """

    norms: Curve = field(default_factory=lambda: Curve.of([]))
    skipped: int = 0
    steps: int = 0
    vocabulary: int | None = None
    is_over: bool = True
    rate: float | None = None
    seen: float = 0.0
    began: int = 0

    @property
    def at_the_end(self) -> str:
        """The time of the last losses, in words."""
        return "at the end" if self.is_over else "so far"

    @property
    def lower(self) -> str:
        """Advice to lower the learning rate, with a number."""
        if self._is_far_above:
            return f"Lower the learning rate ({self.rate:g}; {_USUAL})"
        return "Lower the learning rate, for example to a tenth"

    def other(self, usual: str) -> str:
        """Advice on the learning rate if nothing is learnt; ``usual``: the advice for a usual rate."""
        if self._is_far_above:
            return self.lower
        if self.rate is not None and self.rate < LEAST_USUAL / 10:
            return f"Raise the learning rate ({self.rate:g}; {_USUAL})"
        return usual

    @property
    def slower(self) -> str:
        """Advice against steps that are too long."""
        return f"{self.lower}, or add warm-up steps."

    @property
    def _is_far_above(self) -> bool:
        return self.rate is not None and self.rate > 10 * MOST_USUAL
