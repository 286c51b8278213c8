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

from allhands.metrics.history import RunHistory

Floats = NDArray[np.float64]
Level = Literal["good", "note", "warning", "bad"]
Kind = Literal[
    "overfitting", "underfitting", "diverging", "numbers", "validation", "short", "scatter", "fitting", "time", "plan"
]

RISING = 3  # validations after the best one that make a rise more than a first sign
RISE = 0.01  # of the best validation loss, at least
FALL = 0.02  # of the loss: less over the last third, or since the best validation, is no fall
HARDLY = 0.05  # of the training loss at the start: less than this is hardly learning
SEEN = 0.1  # of the training loss: where a fall of this size would be lost in the scatter, nothing is said of falls
SHOT = 2.0  # times the highest loss of the first half: one report above this has shot up
FEW = 4  # training reports, with fewer there is nothing to judge
ENDS = 20  # training reports, from which on the first tenth is compared with the last
FAR = 4.0  # standard errors between two ends of a curve that scatter does not explain
GRAVE = 1.75  # times as steep as is sure must be what is called "diverging"
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
    """A straight line through a piece of a curve: its heights at both ends, and how far its slope is beyond noise.

    ``steepness`` is the slope by the steepest that noise explains: from 1 on the slope is sure.
    """

    first: float
    last: float
    steepness: float

    @property
    def sure(self) -> bool:
        """Whether noise does not explain the slope."""
        return self.steepness > 1

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
    explained = 0.0
    if len(x) > 2:
        error = float(np.sqrt(((y - line) ** 2).sum() / (len(x) - 2) / square))
        explained = _SURE[min(len(x) - 3, len(_SURE) - 1)] * error
    steepness = abs(slope) / explained if explained else float("inf") if slope else 0.0
    return Trend(float(line[0]), float(line[-1]), steepness)


def scatter(curve: Curve) -> float:
    """The standard deviation of a loss around its course, from the steps between neighbours.

    So neither a course that bends nor a single report far off counts as scatter.
    """
    return float(np.median(np.abs(np.diff(curve.losses)))) / (0.6745 * float(np.sqrt(2)))


def judge_run(history: RunHistory) -> list[Judgement]:
    """:func:`judge` of the losses of a run."""
    train, valid = (Curve.of([(one.step, one.loss) for one in each]) for each in (history.train, history.valid))
    return judge(train, valid)


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
        return [*found, *_worse(train, valid), Judgement("short", "note", _too_short(len(train))), *missing]
    over = list(_overfitting(train, valid))
    found += [*(over or list(_diverging(train, valid)) or list(_underfitting(train, valid))), *missing]
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


def _worse(train: Curve, valid: Curve) -> Iterator[Judgement]:
    """Of a run with few reports: its last losses are above that from before its first step."""
    before = float(valid.losses[0]) if len(valid) and valid.steps[0] == 0 else None
    last = [float(curve.losses[-1]) for curve in (train, valid) if len(curve) and curve.steps[-1] > 0]
    if before is not None and last and min(last) > before * (1 + HARDLY):
        text = f"Worse than before: validation loss was {before:.3f} before the first step, and the last losses are "
        shown = " and ".join(f"{loss:.3f}" for loss in last)
        yield Judgement("diverging", "bad", f"{text}{shown}. Lower the learning rate, or add warm-up steps.")


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


def _diverging(train: Curve, valid: Curve) -> Iterator[Judgement]:
    """Training loss has risen, by more than its scatter explains, and validation does not say otherwise."""
    risen = _risen(train, valid)
    if risen is None:
        return
    first, last = risen
    text = (
        f"Diverging: training loss rose from {first:.3f} to {last:.3f} ({(last - first) / max(abs(first), 1e-12):+.0%})"
    )
    advice = "Lower the learning rate, add warm-up steps, or clip gradients (--max-grad-norm)."
    yield Judgement("diverging", "bad", f"{text}, lowest {float(np.min(train.losses)):.3f}. {advice}")


def _risen(train: Curve, valid: Curve) -> tuple[float, float] | None:
    """From where to where the training loss has risen; ``None`` if it has not, or scatter explains it."""
    falls = _falls(valid)
    # What the loss has done since the last validation, that one knows nothing of.
    unheard = not falls or float(valid.steps[-1]) < float(train.steps[-1])
    first, last = _ends(train)
    enough = len(train) // 2
    if unheard and float(train.losses[-1]) > SHOT * float(np.max(train.losses[:enough])) > 0:
        return first, float(train.losses[-1])
    # A loss that shot up a moment ago is not yet in the middle of the last tenth.
    last = max(last, float(np.min(train.losses[-3:])))
    error = 1.25 * scatter(train) * float(np.sqrt(2 / _tenth(train)))  # of a median: 1.25 times that of a mean
    far = len(train) >= ENDS and last - first > max(FAR * error, HARDLY * abs(first))
    if unheard and far:
        return first, last
    line = trend(train)
    if falls or line is None or line.steepness < GRAVE or line.change < HARDLY:
        return None
    return line.first, line.last


def _tenth(curve: Curve) -> int:
    """Reports at either end that stand for it: one alone may be anything."""
    return max(len(curve) // 10, min(3, len(curve) // 2))


def _ends(curve: Curve) -> tuple[float, float]:
    """The middle of the first tenth, and of the last."""
    count = _tenth(curve)
    return float(np.median(curve.losses[:count])), float(np.median(curve.losses[-count:]))


def _falls(valid: Curve) -> bool:
    """Whether validation loss falls: each time, or surely as a whole. It is measured on the same examples each time."""
    line = trend(valid)
    if line is None:
        return False
    return bool(np.all(np.diff(valid.losses) < 0)) or (line.sure and line.change < 0)


def _learns(train: Curve, valid: Curve) -> bool:
    """Whether either curve has fallen, by more than scatter explains."""
    if len(valid) > 1:
        change = float(valid.losses[-1]) / float(valid.losses[0]) - 1
        # A first report over many steps may lie behind the fall, which validation saw from step 0 on.
        if change < -HARDLY or (_falls(valid) and change < -FALL):
            return True
    line = trend(train)
    return (line is not None and line.sure and line.change < -HARDLY) or _fell_at_once(train)


def _fell_at_once(train: Curve) -> bool:
    """Whether the loss fell in the first reports, and hardly since: a straight line through all does not show that."""
    for count in {1, min(3, len(train) // 2), len(train) // 10} - {0}:
        begin, rest = train.losses[:count], train.losses[count:]
        sure = max(FAR, 1.5 * _SURE[min(len(rest) - 2, len(_SURE) - 1)])
        error = float(np.std(rest, ddof=1)) * float(np.sqrt(1 / count + 1 / len(rest)))
        fall = float(begin.mean() - rest.mean())
        if fall > max(sure * error, HARDLY * abs(float(begin.mean()))):
            return True
    return False


def _would_be_seen(train: Curve, valid: Curve) -> bool:
    """Of curves that have not surely fallen: whether scatter is too small to hide a fall that matters."""
    for curve, bound, fewest in ((train, SEEN, FEW), (valid, HARDLY, RISING)):
        line = trend(curve)
        if len(curve) < fewest or line is None:
            continue
        # Of the difference between the ends of a line through evenly spaced points.
        error = scatter(curve) * float(np.sqrt(12 / len(curve))) / max(abs(line.first), 1e-12)
        if line.change - _SURE[min(len(curve) - 3, len(_SURE) - 1)] * error > -bound:
            return True
    return False


def _underfitting(train: Curve, valid: Curve) -> Iterator[Judgement]:
    """Hardly anything was learnt; or both curves still fall over the last third."""
    if not _learns(train, valid):
        line = trend(train)
        if line is None:
            return
        if _would_be_seen(train, valid):
            text = f"training loss is hardly below its start: {line.first:.3f} at first, {line.last:.3f} at the end"
            advice = "Raise the learning rate, train more layers or a larger rank, or check what is trained on."
            yield Judgement("underfitting", "warning", f"Underfitting: {text} ({line.change:+.1%}). {advice}")
            return
        share = scatter(train) / max(abs(float(np.mean(train.losses))), 1e-12)
        text = f"Training loss scatters by {share:.0%} from report to report: whether it falls cannot be said."
        advice = "Raise --steps-per-report, so that a report is the mean of more batches, or train for longer."
        yield Judgement("scatter", "note", f"{text} {advice}")
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
    first, end = _ends(train)
    text = (
        f"No sign of overfitting or underfitting: training loss went from {first:.3f} to {end:.3f} "
        f"(medians of {_tenth(train)} reports); validation loss was lowest at step {valid.steps[best]:.0f} ({low:.3f})"
    )
    return Judgement("fitting", "good", f"{text} and is {last:.3f} at the end.")
