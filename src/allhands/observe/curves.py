"""Curves of losses over steps, with their slopes and scatter, and whether noise explains these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Standard errors from which on a slope is sure, by points less two: Student's t, 97.5 %; the last
# for more.
SURE = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.1)


@dataclass(frozen=True)
class Curve:
    """Losses at steps, in order of the steps; a loss may be NaN or infinite."""

    steps: Floats
    losses: Floats

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Curve:
        """From (step, loss) pairs."""
        table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
        return cls(table[:, 0], table[:, 1])

    def finite(self) -> Curve:
        """Without what is no number."""
        keep = np.isfinite(self.losses)
        return Curve(self.steps[keep], self.losses[keep])

    def since(self, step: float) -> Curve:
        """From ``step`` on."""
        keep = self.steps >= step
        return Curve(self.steps[keep], self.losses[keep])

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Trend:
    """A straight line through a piece of a curve: its heights at both ends, and how far its slope
    is beyond noise.

    ``steepness`` is the slope divided by the steepest slope that noise explains: from 1 on the
    slope is sure.
    """

    first: float
    last: float
    steepness: float

    @property
    def sure(self) -> bool:
        """Return whether the slope is more than noise."""
        return self.steepness > 1

    @property
    def change(self) -> float:
        """Relative to the height at the beginning: -0.1 has fallen by a tenth."""
        return (self.last - self.first) / max(abs(self.first), 1e-12)


def trend(curve: Curve) -> Trend | None:
    """Return the line of least squares; ``None`` for fewer than two points. For two points the
    noise counts as 0.
    """
    x, y = curve.steps, curve.losses
    spread = x - x.mean() if len(x) else x
    square = float(spread @ spread)
    if len(x) < 2 or square == 0:
        return None
    slope = float(spread @ (y - y.mean())) / square
    line = y.mean() + slope * spread
    explained = 0.0
    if len(x) > 2:
        error = float(np.sqrt(((y - line) ** 2).sum() / (len(x) - 2) / square))
        explained = SURE[min(len(x) - 3, len(SURE) - 1)] * error
    steepness = abs(slope) / explained if explained else float("inf") if slope else 0.0
    return Trend(float(line[0]), float(line[-1]), steepness)


def sure_change(curve: Curve) -> float:
    """Return the relative change along a curve; 0 where noise explains it, or there is no line."""
    line = trend(curve)
    return line.change if line is not None and line.sure else 0.0


def scatter(curve: Curve) -> float:
    """Return the standard deviation of a loss around its course, from the steps between neighbours.

    So neither a course that bends nor a single report far off counts as scatter.
    """
    return float(np.median(np.abs(np.diff(curve.losses)))) / (0.6745 * float(np.sqrt(2)))


def tenth(curve: Curve) -> int:
    """Reports at either end that stand for it: one alone may be anything."""
    return max(len(curve) // 10, min(3, len(curve) // 2))


def ends(curve: Curve) -> tuple[float, float]:
    """Return the middle of the first tenth, and of the last."""
    count = tenth(curve)
    return float(np.median(curve.losses[:count])), float(np.median(curve.losses[-count:]))


def from_to(curve: Curve) -> str:
    """Return the ends of a curve in words, by its own losses: the ends of a line through it may be
    impossible.
    """
    first, last = ends(curve)
    return f"{first:.3f} to {last:.3f} ({(last - first) / max(abs(first), 1e-12):+.0%})"
