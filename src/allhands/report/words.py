"""What curves say about a run, in words with the numbers behind them: the rules for over- and underfitting.

A rule speaks only where a straight line through the points is steeper than their noise explains, and the change is
large enough to matter. The bounds are the constants below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Level = Literal["good", "note", "warning", "bad"]
Kind = Literal["overfitting", "underfitting", "diverging", "numbers", "validation", "short", "fitting", "time", "plan"]

RISING = 3  # validations after the best one that make a rise more than a first sign
RISE = 0.01  # of the best validation loss, at least
FALL = 0.02  # of the loss: less over the last third, or since the best validation, is no fall
HARDLY = 0.05  # of the first training loss: less than this is hardly learning
FEW = 4  # training reports, with fewer there is nothing to judge
# Standard errors from which on a slope is sure, by points less two: Student's t, 97.5 %; the last for more.
_SURE = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.1)


@dataclass(frozen=True)
class Judgement:
    """One thing that a person should know of a run; ``kind`` is what it is about."""

    kind: Kind
    level: Level
    text: str


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
    """A straight line through a piece of a curve: its heights at both ends, and whether noise explains its slope."""

    first: float
    last: float
    sure: bool

    @property
    def change(self) -> float:
        """Relative to the height at the beginning: -0.1 has fallen by a tenth."""
        return (self.last - self.first) / max(abs(self.first), 1e-12)


def trend(curve: Curve) -> Trend | None:
    """The line of least squares; ``None`` for less than two points. Two points are taken at their word."""
    x, y = curve.steps, curve.losses
    spread = x - x.mean() if len(x) else x
    square = float(spread @ spread)
    if len(x) < 2 or square == 0:
        return None
    slope = float(spread @ (y - y.mean())) / square
    line = y.mean() + slope * spread
    sure = True
    if len(x) > 2:
        error = float(np.sqrt(((y - line) ** 2).sum() / (len(x) - 2) / square))
        sure = abs(slope) > _SURE[min(len(x) - 3, len(_SURE) - 1)] * error
    return Trend(float(line[0]), float(line[-1]), sure)


def judge(train: Curve, valid: Curve) -> list[Judgement]:
    """What the two curves of a run say, the gravest first.

    Args:
        train: the training loss at each report.
        valid: the validation loss at each validation, that before the first step included.
    """
    found = list(_numbers(train, valid))
    train, valid = train.finite(), valid.finite()
    missing = [] if len(valid) else [Judgement("validation", "note", _NO_VALIDATION)]
    if len(train) < FEW:
        return [*found, Judgement("short", "note", _too_short(len(train))), *missing]
    over = list(_overfitting(train, valid))
    learnt = [] if over else list(_underfitting(train, valid))
    found += [*over, *learnt, *missing]
    if not found:
        found.append(_fitting(train, valid))
    order: list[Level] = ["bad", "warning", "note", "good"]
    return sorted(found, key=lambda one: order.index(one.level))


_NO_VALIDATION = (
    "There is no validation loss, so overfitting could not be seen. Give the data a valid.jsonl, and --val-batches."
)


def _too_short(count: int) -> str:
    reports = "no training report" if count == 0 else f"{count} training report{'s' * (count > 1)}"
    there = "There are" if count > 1 else "There is"
    return f"{there} {reports} with a loss: too little to judge by. Lower --steps-per-report to see more of short runs."


def _numbers(train: Curve, valid: Curve) -> Iterator[Judgement]:
    for name, curve in (("training", train), ("validation", valid)):
        wrong = curve.steps[~np.isfinite(curve.losses)]
        if len(wrong):
            times = f"in {len(wrong)} of {len(curve)} reports, first at step {wrong[0]:.0f}"
            advice = "Lower the learning rate, clip gradients (--max-grad-norm), or look at the data there."
            yield Judgement("numbers", "bad", f"The {name} loss is not a finite number {times}. {advice}")


def _overfitting(train: Curve, valid: Curve) -> Iterator[Judgement]:
    """Validation has risen since its best, while training went on falling; or did not."""
    if len(valid) < 2:
        return
    best = int(np.argmin(valid.losses))
    after = Curve(valid.steps[best:], valid.losses[best:])
    count, low, last = len(after) - 1, float(after.losses[0]), float(after.losses[-1])
    if count < RISING:
        rises = count > 0 and bool(np.all(np.diff(after.losses) > 0))
    else:
        rising = trend(after)
        rises = rising is not None and rising.sure and rising.change > 0
    if not rises or last < low * (1 + RISE):
        return
    falling = trend(train.since(float(after.steps[0])))
    numbers = (
        f"validation loss was lowest at step {after.steps[0]:.0f} ({low:.3f}) and has risen in the {count} "
        f"validation{'s' * (count > 1)} since, to {last:.3f} ({(last - low) / low:+.0%})"
    )
    if falling is not None and falling.sure and falling.change < -FALL:
        fell = f"while training loss fell from {falling.first:.3f} to {falling.last:.3f} ({falling.change:+.0%})"
        if count >= RISING:
            advice = (
                f"The weights of step {after.steps[0]:.0f} are the better ones (best/, if they were kept); "
                "fewer steps, more data, dropout or a smaller rank help."
            )
            yield Judgement("overfitting", "warning", f"Overfitting: {numbers}, {fell}. {advice}")
        else:
            yield Judgement(
                "overfitting", "note", f"Perhaps the beginning of overfitting: {numbers}, {fell}. Watch what follows."
            )
    elif count >= RISING and falling is not None and falling.sure and falling.change > FALL:
        rose = f"and training loss has risen, too, from {falling.first:.3f} to {falling.last:.3f}"
        advice = "That is not overfitting: the run diverges. Lower the learning rate, or clip gradients."
        yield Judgement("diverging", "bad", f"Diverging: {numbers}, {rose}. {advice}")
    elif count >= RISING:
        seen = "" if falling is None else f": it went from {falling.first:.3f} to {falling.last:.3f}"
        text = f"Perhaps overfitting: {numbers}, while training loss shows no clear fall{seen}. The weights of step "
        yield Judgement("overfitting", "note", f"{text}{after.steps[0]:.0f} are the better ones.")


def _underfitting(train: Curve, valid: Curve) -> Iterator[Judgement]:
    """Hardly anything was learnt; or both curves still fall over the last third."""
    first, last = float(train.losses[0]), float(np.mean(train.losses[-max(1, len(train) // 10) :]))
    change = (last - first) / max(abs(first), 1e-12)
    lowest = float(np.min(train.losses))
    if change > HARDLY:
        advice = "Lower the learning rate, add warm-up steps, or clip gradients (--max-grad-norm)."
        text = f"Diverging: training loss rose from {first:.3f} to {last:.3f} ({change:+.0%}), lowest {lowest:.3f}."
        yield Judgement("diverging", "bad", f"{text} {advice}")
        return
    # A first report over many steps may lie behind the fall, which validation saw from step 0 on.
    seen = len(valid) > 1 and float(valid.losses[-1]) < (1 - HARDLY) * float(valid.losses[0])
    if change > -HARDLY and not seen:
        text = f"Underfitting: training loss is hardly below its start: {first:.3f} at first, {last:.3f} at the end"
        advice = "Raise the learning rate, train more layers or a larger rank, or check what is trained on."
        yield Judgement("underfitting", "warning", f"{text} ({change:+.1%}). {advice}")
        return
    third = float(train.steps[-1] - (train.steps[-1] - train.steps[0]) / 3)
    falling = trend(train.since(third))
    if falling is None or not falling.sure or falling.change > -FALL or len(train.since(third)) < 3:
        return
    numbers = f"over the last third (from step {third:.0f}) training loss fell from {falling.first:.3f} to "
    numbers += f"{falling.last:.3f} ({falling.change:+.0%})"
    if len(valid) < 2:
        text = f"Still learning at the end: {numbers}. More steps may help; without validation it cannot be said."
        yield Judgement("underfitting", "note", text)
        return
    known = valid.since(third)
    if len(known) < 2:  # the one before counts, too
        known = Curve(valid.steps[-2:], valid.losses[-2:])
    too = trend(known)
    if too is not None and too.sure and too.change < -FALL:
        heights = f"{known.losses[0]:.3f} to {known.losses[-1]:.3f}"
        text = f"Underfitting: {numbers}, and validation loss from {heights}. Both still fall: more steps would help."
        yield Judgement("underfitting", "warning", text)


def _fitting(train: Curve, valid: Curve) -> Judgement:
    best = int(np.argmin(valid.losses))
    low, last = float(valid.losses[best]), float(valid.losses[-1])
    text = (
        f"No sign of overfitting or underfitting: training loss went from {train.losses[0]:.3f} to "
        f"{train.losses[-1]:.3f}; validation loss was lowest at step {valid.steps[best]:.0f} ({low:.3f})"
    )
    return Judgement("fitting", "good", f"{text} and is {last:.3f} at the end.")
