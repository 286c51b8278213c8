"""What curves say about a run, in words with the numbers behind them: the rules for over- and underfitting.

A rule speaks only where a straight line through the points is steeper than their noise explains, and the change is
large enough to matter. The bounds are the constants below.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import numpy as np

from allhands.observe.course import Course, Judgement, Level
from allhands.observe.curves import SURE, Curve, ends, from_to, scatter, tenth, trend
from allhands.observe.metrics.history import RunHistory

RISING = 3  # validations after the best one that make a rise more than a first sign
RISE = 0.01  # of the best validation loss, at least
FALL = 0.02  # of the loss: less over the last third, or since the best validation, is no fall
HARDLY = 0.05  # of the training loss at the start: less than this is hardly learning
SEEN = 0.1  # of the training loss: where a fall of this size would be lost in the scatter, nothing is said of falls
SHOT = 2.0  # times the highest loss of the first half: one report above this has shot up
FEW = 4  # training reports, with fewer there is nothing to judge
ENDS = 20  # training reports, from which on the first tenth is compared with the last
FAR = 4.0  # standard errors between two ends of a curve that scatter does not explain
FAR_ABOVE = 1.25  # times the validation loss before training: losses above it belong to a run that was thrown off
GUESS = 0.97  # of ln(vocabulary): from here on a loss is that of guessing among all tokens
BURST = 10.0  # times the gradient norms of the first tenth: norms of the last tenth have exploded
FEW_SKIPPED, MANY_SKIPPED = 0.02, 0.2  # of all steps
GRAVE = 1.75  # times as steep as is sure must be what is called "diverging"


_UNKNOWN = Course()


def judge_run(history: RunHistory, *, is_over: bool | None = None) -> list[Judgement]:
    """:func:`judge` of the losses of a run, and of what else its metrics tell.

    Args:
        is_over: whether it has ended, where more is known of that than its metrics tell.
    """
    train, valid = (Curve.of([(one.step, one.loss) for one in each]) for each in (history.train, history.valid))
    last = max((one.step for one in (*history.train, *history.valid, *history.skipped)), default=0)
    course = Course(
        norms=Curve.of([(one.step, one.grad_norm) for one in history.train]).finite(),
        skipped=len(history.skipped),
        steps=last,
        vocabulary=history.started.vocabulary if history.started else None,
        is_over=history.ended is not None if is_over is None else is_over,
        rate=max((one.learning_rate for one in history.train if isfinite(one.learning_rate)), default=None),
    )
    return judge(train, valid, course)


# Warnings that are said wherever a run is spoken of, as whatever is bad.
_HARMFUL = ("worse", "gradients", "skipped")


# By so much one validation may be above the best without anybody being told, where there are few of them.
_PLAIN_RISE = 0.25


def harm(history: RunHistory) -> list[Judgement]:
    """That training did harm: what must be said wherever a run is spoken of."""
    found = judge_run(history)
    return [one for one in found if one.level == "bad" or (one.kind in _HARMFUL and one.level == "warning")]


def judge(train: Curve, valid: Curve, course: Course = _UNKNOWN) -> list[Judgement]:
    """What the curves of a run say, the gravest first.

    Args:
        train: the training loss at each report.
        valid: the validation loss at each validation, that before the first step included.
        course: what else is known.
    """
    if not (course.is_over or course.skipped or len(train) or len(valid)):
        return [Judgement("short", "note", "Nothing is reported yet.")]
    found = [*_numbers(train, valid, course), *_skipped(course)]
    train, valid = train.finite(), valid.finite()
    missing = list(_unvalidated(valid, course))
    ruined = list(_ruined(train, valid, course))
    found += ruined
    if len(train) < FEW:
        later = [] if ruined else _better_before(valid)
        return [*found, *later, Judgement("short", "note", _too_short(len(train), course)), *missing]
    over = list(_overfitting(train, valid, course))
    if any(one.level == "bad" for one in ruined):
        # A loss that has been thrown off neither fits nor lacks steps.
        found += [*(one for one in over if one.kind == "overfitting"), *missing]
    else:
        found += over or list(_diverging(train, valid, course)) or list(_underfitting(train, valid, course))
        if all(one.level != "bad" for one in found):
            found += _excursion(train, valid, course)
        found += [*_exploding(train, valid, course), *missing]
    if not found:
        found.append(_fitting(train, valid, course))
    order: list[Level] = ["bad", "warning", "note", "good"]
    return sorted(found, key=lambda one: order.index(one.level))


def _unvalidated(valid: Curve, course: Course) -> Iterator[Judgement]:
    if not len(valid) and not course.is_over:
        text = "There is no validation loss so far, so overfitting cannot be seen. It needs a valid.jsonl, and "
        yield Judgement("validation", "note", f"{text}--val-batches.")
    elif not len(valid):
        told = "There is no validation loss, so overfitting could not be seen. Give the data a valid.jsonl, and "
        yield Judgement("validation", "note", f"{told}--val-batches.")
    elif valid.steps[-1] == 0:
        told = f"Validated only before the first step ({valid.losses[0]:.3f}): whether training helps is not known yet."
        more = " --steps-per-eval sets how often." if course.is_over else ""
        yield Judgement("validation", "note", f"{told}{more}")


def _too_short(count: int, course: Course) -> str:
    reports = "no training report" if count == 0 else f"{count} training report{'s' * (count > 1)}"
    there = "There are" if count > 1 else "There is"
    if not course.is_over:
        return f"{there} {reports} with a loss so far: too little to judge by yet."
    return f"{there} {reports} with a loss: too little to judge by. Lower --steps-per-report to see more of short runs."


def _better_before(valid: Curve) -> Iterator[Judgement]:
    """Of a run with too few reports to judge by: that its last weights are not its best ones, if that is plain."""
    if not len(valid):
        return
    best, last = int(np.argmin(valid.losses)), float(valid.losses[-1])
    low = float(valid.losses[best])
    if last > low * (1 + _PLAIN_RISE):
        yield Judgement(
            "overfitting",
            "warning",
            f"Validation loss was lowest at step {valid.steps[best]:.0f} ({low:.3f}) and is {last:.3f} at step "
            f"{valid.steps[-1]:.0f} ({(last - low) / low:+.0%}): those weights are the better ones (best/, if they "
            "were kept). Of few validation rows that may be chance.",
        )


def _before(valid: Curve) -> float | None:
    """The validation loss before the first step; ``None``: not measured, as where a run goes on from another."""
    return float(valid.losses[0]) if len(valid) and valid.steps[0] == 0 else None


def _ruined(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Training has made the model worse than it was before the first step, or leaves it guessing."""
    before, trained = _before(valid), valid.since(1)
    if not len(trained) and not len(train):
        return
    guesses = _guessing(train, trained, before, course)
    if guesses is not None:
        yield guesses
    elif before is not None and len(trained):
        yield from _worse(train, trained, before, course)
    elif before is not None and float(np.min(train.losses[-3:])) > before * FAR_ABOVE:
        text = f"Worse than before training: validation loss was {before:.3f} before the first step, and training loss "
        text += f"is {train.losses[-1]:.3f} at step {train.steps[-1]:.0f}. {course.slower}"
        yield Judgement("worse", "bad", text)


_BY_HEART = (
    "The training data are learnt, and what is validated is not: fewer steps, a lower learning rate or more data."
)


def _worse(train: Curve, trained: Curve, before: float, course: Course) -> Iterator[Judgement]:
    """The last validation loss is above that before the first step; ``trained`` are those since."""
    last, low = float(trained.losses[-1]), float(np.min(trained.losses))
    if last <= before * (1 + RISE):
        return
    level: Level = "bad" if last > before * (1 + HARDLY) else "warning"
    text = (
        f"Worse than before training: validation loss was {before:.3f} before the first step and is {last:.3f} "
        f"({(last - before) / before:+.0%}) {course.at_the_end}"
    )
    if low < before:
        step = trained.steps[int(np.argmin(trained.losses))]
        text += f"; it was lowest at step {step:.0f} ({low:.3f}), whose weights are the better ones (best/, if kept)"
    else:
        text += "; no validation was below the first, so no step's weights are better (there is no best/)"
    # What is learnt by heart is no matter of a rate that is much too high.
    learns = len(train) >= FEW and _learns(train, Curve.of([])) and ends(train)[1] < before
    yield Judgement("worse", level, f"{text}. {_BY_HEART if learns else course.slower}")


def _guessing(train: Curve, trained: Curve, before: float | None, course: Course) -> Judgement | None:
    """The loss is that of guessing among all tokens, and does not come down from there."""
    if course.vocabulary is None or course.vocabulary < 2:
        return None
    chance = float(np.log(course.vocabulary))
    last = float(trained.losses[-1]) if len(trained) else float(np.median(train.losses[-3:]))
    if last < GUESS * chance:
        return None
    line = trend(train)
    if line is not None and line.sure and line.change < 0:
        return None
    text = f"No better than guessing: the loss is {last:.3f} {course.at_the_end}, that of choosing blindly among "
    text += f"{course.vocabulary} tokens is {chance:.3f}"
    if before is not None and before < GUESS * chance:
        return Judgement("guessing", "bad", f"{text}, and it was {before:.3f} before the first step. {course.slower}")
    if len(train) < FEW:
        return None  # a new model begins there
    rates = course.other("Try other learning rates")
    advice = f"Nothing is learnt. {rates}, and look at what is trained on (allhands data check)."
    return Judgement("guessing", "bad", f"{text}. {advice}")


def _excursion(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """In between losses were far above where they began, though the last ones are not."""
    before, trained = _before(valid), valid.since(1)
    if before is None:
        return
    bounds = ((trained, FAR_ABOVE), (train, SHOT))
    curve = next((curve for curve, bound in bounds if len(curve) and np.max(curve.losses) > bound * before), None)
    if curve is None:
        return
    place = int(np.argmax(curve.losses))
    name = "validation" if curve is trained else "training"
    text = f"In between {name} loss was {curve.losses[place]:.3f} (step {curve.steps[place]:.0f}), far above the "
    text += f"{before:.3f} before the first step: the learning rate is too high at its height. {course.slower}"
    yield Judgement("excursion", "warning", text)


def _exploding(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Gradient norms have grown many times over, and nothing is learnt by it."""
    norms = course.norms
    if len(norms) < FEW or _learns(train, valid):
        return
    first, last = ends(norms)
    if last > BURST * first > 0:
        text = f"Gradient norms grew from {first:.3g} to {last:.3g}, and the loss does not fall."
        yield Judgement("gradients", "warning", f"{text} {course.slower} --max-grad-norm bounds each step.")


def _skipped(course: Course) -> Iterator[Judgement]:
    """Steps that changed nothing."""
    if not course.skipped:
        return
    share = course.skipped / max(course.steps, course.skipped, 1)
    level: Level = "bad" if share >= MANY_SKIPPED else "warning" if share >= FEW_SKIPPED else "note"
    text = f"{course.skipped} of {max(course.steps, course.skipped)} steps changed nothing, because a gradient was not "
    advice = f"{course.lower}, and look at the examples that are named beside those steps."
    yield Judgement("skipped", level, f"{text}a finite number. {advice}")


def _numbers(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    for name, curve in (("training", train), ("validation", valid)):
        wrong = curve.steps[~np.isfinite(curve.losses)]
        if len(wrong):
            times = f"in {len(wrong)} of {len(curve)} reports, first at step {wrong[0]:.0f}"
            advice = f"{course.lower}, clip gradients (--max-grad-norm), or look at the data there."
            yield Judgement("numbers", "bad", f"The {name} loss is not a finite number {times}. {advice}")


def _overfitting(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
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
    meanwhile = train.since(float(after.steps[0]))
    falling = trend(meanwhile)
    numbers = (
        f"validation loss was lowest at step {after.steps[0]:.0f} ({low:.3f}) and has risen in the {count} "
        f"validation{'s' * (count > 1)} since, to {last:.3f} ({(last - low) / low:+.0%})"
    )
    if falling is not None and falling.sure and falling.change < -FALL:
        fell = f"while training loss fell from {from_to(meanwhile)}"
        if count >= RISING:
            advice = (
                f"The weights of step {after.steps[0]:.0f} are the better ones (best/, if they were kept); "
                "fewer steps, more data, dropout or a smaller rank help."
            )
            yield Judgement("overfitting", "warning", f"Overfitting: {numbers}, {fell}. {advice}")
        else:
            advice = "More steps would have shown it." if course.is_over else "Watch what follows."
            text = f"Perhaps the beginning of overfitting: {numbers}, {fell}. {advice}"
            yield Judgement("overfitting", "note", text)
    elif count >= RISING and falling is not None and falling.sure and falling.change > FALL:
        rose = f"and training loss has risen, too, from {from_to(meanwhile)}"
        advice = f"That is not overfitting: the run diverges. {course.lower}, or clip gradients."
        yield Judgement("diverging", "bad", f"Diverging: {numbers}, {rose}. {advice}")
    elif count >= RISING:
        seen = "" if falling is None else f": it went from {from_to(meanwhile)}"
        text = f"Perhaps overfitting: {numbers}, while training loss shows no clear fall{seen}. The weights of step "
        yield Judgement("overfitting", "note", f"{text}{after.steps[0]:.0f} are the better ones.")


def _diverging(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Training loss has risen, by more than its scatter explains, and validation does not say otherwise."""
    risen = _risen(train, valid)
    if risen is None:
        return
    first, last = risen
    text = (
        f"Diverging: training loss rose from {first:.3f} to {last:.3f} ({(last - first) / max(abs(first), 1e-12):+.0%})"
    )
    advice = f"{course.lower}, add warm-up steps, or clip gradients (--max-grad-norm)."
    yield Judgement("diverging", "bad", f"{text}, lowest {float(np.min(train.losses)):.3f}. {advice}")


def _risen(train: Curve, valid: Curve) -> tuple[float, float] | None:
    """From where to where the training loss has risen; ``None`` if it has not, or scatter explains it."""
    falls = _falls(valid)
    # What the loss has done since the last validation, that one knows nothing of.
    unheard = not falls or float(valid.steps[-1]) < float(train.steps[-1])
    first, last = ends(train)
    enough = len(train) // 2
    if unheard and float(train.losses[-1]) > SHOT * float(np.max(train.losses[:enough])) > 0:
        return first, float(train.losses[-1])
    # A loss that shot up a moment ago is not yet in the middle of the last tenth.
    last = max(last, float(np.min(train.losses[-3:])))
    error = 1.25 * scatter(train) * float(np.sqrt(2 / tenth(train)))  # of a median: 1.25 times that of a mean
    far = len(train) >= ENDS and last - first > max(FAR * error, HARDLY * abs(first))
    if unheard and far:
        return first, last
    line = trend(train)
    if falls or line is None or line.steepness < GRAVE or line.change < HARDLY:
        return None
    return line.first, line.last


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
        sure = max(FAR, 1.5 * SURE[min(len(rest) - 2, len(SURE) - 1)])
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
        if line.change - SURE[min(len(curve) - 3, len(SURE) - 1)] * error > -bound:
            return True
    return False


def _underfitting(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Hardly anything was learnt; or both curves still fall over the last third, which a run that goes on may do."""
    if not _learns(train, valid):
        yield from _unlearning(train, valid, course)
        return
    third = float(train.steps[-1] - (train.steps[-1] - train.steps[0]) / 3)
    falling = trend(train.since(third))
    if falling is None or not falling.sure or falling.change > -FALL or len(train.since(third)) < 3:
        return
    known = valid.since(third)
    too = trend(known) if len(known) > 1 else None
    both = too is not None and too.sure and too.change < -FALL
    heights = f"{known.losses[0]:.3f} to {known.losses[-1]:.3f}" if both else ""
    numbers = f"(from step {third:.0f}) training loss fell from {from_to(train.since(third))}"
    if not course.is_over:
        more = f", and validation loss from {heights}" if both else ""
        yield Judgement("fitting", "good" if both else "note", f"Learning: over the last third so far {numbers}{more}.")
        return
    numbers = f"over the last third {numbers}"
    if len(valid) < 2:
        text = f"Still learning at the end: {numbers}. More steps may help; without validation it cannot be said."
        yield Judgement("underfitting", "note", text)
    elif len(known) < 2:
        times = ("never", "once")[len(known)]
        text = f"Still learning at the end: {numbers}. It was validated {times} in that stretch, so whether more steps "
        text += "would help cannot be said: lower --steps-per-eval."
        yield Judgement("underfitting", "note", text)
    elif both:
        text = f"Underfitting: {numbers}, and validation loss from {heights}. Both still fall: more steps would help."
        yield Judgement("underfitting", "warning", text)


def _unlearning(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """The loss is where it was at first, or scatters too much to say."""
    line = trend(train)
    if line is None:
        return
    if _would_be_seen(train, valid):
        first, last = ends(train)
        where = "hardly below" if last < first else "not below"
        text = f"training loss is {where} its start: {first:.3f} at first, {last:.3f} {course.at_the_end}"
        if len(valid) > 1:
            text += f"; validation loss {valid.losses[0]:.3f} and {valid.losses[-1]:.3f}"
        rates = course.other("Raise the learning rate")
        advice = f"{rates}, train more layers or a larger rank, or check what is trained on."
        if course.is_over:
            yield Judgement("underfitting", "warning", f"Underfitting: {text}. {advice}")
        else:
            yield Judgement("underfitting", "note", f"Hardly learning so far: {text}. If that stays so: {advice}")
        return
    share = scatter(train) / max(abs(float(np.mean(train.losses))), 1e-12)
    longer = ", or train for longer" if course.is_over else ""
    text = f"Training loss scatters by {share:.0%} from report to report: whether it falls cannot be said"
    advice = f"Raise --steps-per-report, so that a report is the mean of more batches{longer}."
    yield Judgement("scatter", "note", f"{text}{'' if course.is_over else ' yet'}. {advice}")


def _fitting(train: Curve, valid: Curve, course: Course) -> Judgement:
    best = int(np.argmin(valid.losses))
    low, last = float(valid.losses[best]), float(valid.losses[-1])
    first, end = ends(train)
    text = (
        f"No sign of overfitting{' or underfitting' if course.is_over else ' so far'}: training loss went from "
        f"{first:.3f} to {end:.3f} "
        f"(medians of {tenth(train)} reports); validation loss was lowest at step {valid.steps[best]:.0f} ({low:.3f})"
    )
    return Judgement("fitting", "good", f"{text} and is {last:.3f} {course.at_the_end}.")
