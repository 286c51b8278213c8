"""Judgements of a run by its curves, in words with numbers: the rules for over- and underfitting.

A rule applies only if a straight line through the points is steeper than their noise explains, and
if the change is large enough to matter. The bounds are the constants below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite, log, sqrt

import numpy as np

from allhands.io.formatting import counted
from allhands.observe.course import Course, Judgement, Level
from allhands.observe.curves import SURE, Curve, ends, from_to, scatter, sure_change, tenth, trend
from allhands.observe.metrics.history import RunHistory

RISING = 3  # validations after the best one from which on a rise is more than a first sign
RISE = 0.01  # of the best validation loss, at least
FALL = 0.02  # of the loss: less over the last third, or since the best validation, is no fall
HARDLY = 0.05  # of the training loss at the start: less than this is hardly learning
SEEN = 0.1  # of the training loss: if scatter could hide a fall of this size, falls are not judged
SHOT = 2.0  # times the highest loss of the first half: a report above this counts as a jump
FEW = 4  # training reports: fewer are not judged
ENDS = 20  # training reports from which on the first tenth is compared with the last
FAR = 4.0  # standard errors between two ends of a curve that scatter does not explain
FAR_ABOVE = (
    1.25  # times a validation loss (before training, or the best of few): more is not chance
)
GUESS = 0.97  # of ln(vocabulary): a loss above this is no better than guessing among all tokens
BURST = 10.0  # times the gradient norms of the first tenth: above this norms have exploded
FEW_SKIPPED, MANY_SKIPPED = 0.02, 0.2  # of all steps
MOST_SEEN = (
    0.5  # of the validation examples: if more are trained on, too, their loss is no evidence
)
BY_HEART = 0.5  # of the lowest validation loss: a training loss below this is learnt by heart
SHARE = 0.003  # of all that a loss has changed: less is no change that matters
GRAVE = 1.75  # times the slope that is sure: only a steeper one is called "diverging"

_UNKNOWN = Course()
_ORDER: list[Level] = ["bad", "warning", "note", "good"]
# Warnings that every command shows, like all bad judgements.
_HARMFUL = ("worse", "gradients", "skipped")


def judge_run(history: RunHistory, *, is_over: bool | None = None) -> list[Judgement]:
    """Judge a run by its losses and its other metrics; see :func:`judge`.

    Args:
        is_over: True if it has ended; ``None``: by its metrics.
    """
    train, valid = (
        Curve.of([(one.step, one.loss) for one in each])
        for each in (history.train, history.comparable)
    )
    course = Course(
        norms=Curve.of([(one.step, one.grad_norm) for one in history.train]).finite(),
        skipped=len(history.skipped),
        steps=max(
            (one.step for one in (*history.train, *history.valid, *history.skipped)), default=0
        ),
        vocabulary=history.started.vocabulary if history.started else None,
        is_over=history.ended is not None if is_over is None else is_over,
        rate=max(
            (one.learning_rate for one in history.train if isfinite(one.learning_rate)),
            default=None,
        ),
        seen=history.started.seen if history.started else 0.0,
        began=history.starts[0].step if history.starts else 0,
    )
    return judge(train, valid, course)


def harm(history: RunHistory) -> list[Judgement]:
    """Return the judgements of harm, which every report of a run has to name."""
    return [
        it
        for it in judge_run(history)
        if it.level == "bad" or (it.kind in _HARMFUL and it.level == "warning")
    ]


def judge(train: Curve, valid: Curve, course: Course = _UNKNOWN) -> list[Judgement]:
    """Judge the curves of a run; the gravest judgement comes first.

    Args:
        train: the training loss at each report.
        valid: the validation loss at each validation, including the one before the first step.
        course: further facts.
    """
    if not (course.is_over or course.skipped or len(train) + len(valid)):
        return [Judgement("short", "note", "Nothing is reported yet.")]
    found = [*_numbers(train, valid, course), *_skipped(course)]
    train, valid = train.finite(), valid.finite()
    ruined, missing = list(_ruined(train, valid, course)), list(_unvalidated(valid, course))
    found += ruined
    if len(train) < FEW:
        return [
            *found,
            *([] if ruined else _better_before(valid)),
            _too_short(len(train), course, told=bool(found)),
            *missing,
        ]
    valid = _unseen(valid, course)
    over = list(_overfitting(train, valid, course))
    if _is_bad(ruined):
        # A loss that has jumped is judged neither as fitting nor as underfitting.
        found += [one for one in over if one.level == "warning"]
    else:
        found += (
            over
            or list(_diverging(train, valid, course))
            or list(_underfitting(train, valid, course))
        )
        found += [] if _is_bad(found) else _excursion(train, valid, course)
        found += _exploding(train, valid, course)
    found += missing
    if all(map(_says_nothing_of_curves, found)):
        found.append(_fitting(train, valid, course))
    return sorted(found, key=lambda one: _ORDER.index(one.level))


def _says_nothing_of_curves(found: Judgement) -> bool:
    """Return whether it tells of a few steps that changed nothing."""
    return found.kind == "skipped" and found.level == "note"


def _unseen(valid: Curve, course: Course) -> Curve:
    """Return the validation losses; none if most of their examples are trained on, too: these show no
    overfitting, and fall with the training losses.
    """
    return Curve.of([]) if course.seen >= MOST_SEEN else valid


def _is_bad(found: Iterable[Judgement]) -> bool:
    return any(one.level == "bad" for one in found)


def _unvalidated(valid: Curve, course: Course) -> Iterator[Judgement]:
    if not len(valid):
        yield Judgement(
            "validation",
            "note",
            "There is no validation loss, so overfitting cannot be seen: add a valid.jsonl; --val-batches must not be 0.",
        )
    elif course.seen >= MOST_SEEN:
        text = f"The training set has {course.seen:.0%} of the validation examples, too, so the validation loss "
        text += (
            "cannot show overfitting: take examples for valid.jsonl that are not in train.jsonl."
        )
        yield Judgement("validation", "note", text)
    elif valid.steps[-1] == 0:
        text = f"Validated only before the first step ({valid.losses[0]:.3f}): whether training helps is not known yet."
        yield Judgement(
            "validation", "note", text + " --steps-per-eval sets how often." * course.is_over
        )


def _too_short(count: int, course: Course, *, told: bool) -> Judgement:
    """Say that nothing is judged; ``told``: other findings say already what to do."""
    text = f"{count or 'no'} training report{'s' * (count > 1)} with a loss: too few to judge"
    advice = "" if told else " Lower --steps-per-report to see more of short runs."
    text += f".{advice}" if course.is_over else " yet."
    return Judgement("short", "note", f"There {'are' if count > 1 else 'is'} {text}")


def _lowest(valid: Curve) -> tuple[float, float]:
    """Step and height of the lowest loss."""
    best = int(np.argmin(valid.losses))
    return float(valid.steps[best]), float(valid.losses[best])


def _raised(loss: float, factor: float) -> float:
    """Return a loss that is ``factor`` times as high; of a negative one, as of a person's own loop,
    as far above it as that of its size.
    """
    return loss + (factor - 1) * abs(loss)


def _by(first: float, last: float) -> str:
    return f"{(last - first) / max(abs(first), 1e-12):+.0%}"


def _better_before(valid: Curve) -> Iterator[Judgement]:
    """Warn if the last weights are clearly not the best, in a run with too few reports for other
    rules.
    """
    if not len(valid):
        return
    (step, low), last = _lowest(valid), float(valid.losses[-1])
    if last > _raised(low, FAR_ABOVE):
        text = (
            f"Validation loss was lowest at step {step:.0f} ({low:.3f}) and is {last:.3f} at step "
        )
        text += f"{valid.steps[-1]:.0f} ({_by(low, last)}): the weights of step {step:.0f} are better (best/, if "
        yield Judgement(
            "overfitting", "warning", f"{text}kept). With few validation rows that may be chance."
        )


def _before(valid: Curve) -> float | None:
    """The validation loss before the first step; ``None`` if it was not measured, as in a resumed
    run.
    """
    return float(valid.losses[0]) if len(valid) and valid.steps[0] == 0 else None


def _ruined(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Warn if training has made the model worse than before the first step, or no better than
    guessing.
    """
    before, trained = _before(valid), valid.since(1)
    if not len(trained) and not len(train):
        return
    if guesses := _guessing(train, trained, before, course):
        yield guesses
    elif before is not None and len(trained):
        yield from _worse(train, trained, before, course)
    elif before is not None and float(np.min(train.losses[-3:])) > _raised(before, FAR_ABOVE):
        text = f"Worse than before training: validation loss was {before:.3f} before the first step, and training loss "
        text += f"is {train.losses[-1]:.3f} at step {train.steps[-1]:.0f}. {course.slower}"
        yield Judgement("worse", "bad", text)


def _worse(train: Curve, trained: Curve, before: float, course: Course) -> Iterator[Judgement]:
    """Warn if the last validation loss is above the one before the first step; ``trained``: the
    later ones.
    """
    last, (step, low) = float(trained.losses[-1]), _lowest(trained)
    if last <= _raised(before, 1 + RISE):
        return
    text = f"Worse than before training: validation loss was {before:.3f} before the first step and is {last:.3f} "
    text += f"({_by(before, last)}) {course.at_the_end}; "
    if low < before:
        text += f"it was lowest at step {step:.0f} ({low:.3f}), whose weights are better (best/, if kept). "
    else:
        text += (
            "no later validation was lower, so no step's weights are better (there is no best/). "
        )
    # Memorising is not caused by a much too high learning rate.
    if len(train) >= FEW and _learns(train, Curve.of([])) and ends(train)[1] < before:
        text += "The model learns the training data, but not the validation data: use fewer steps, a lower "
        text += "learning rate or more data."
    else:
        text += course.slower
    yield Judgement("worse", "bad" if last > _raised(before, 1 + HARDLY) else "warning", text)


def _guessing(
    train: Curve, trained: Curve, before: float | None, course: Course
) -> Judgement | None:
    """Return a judgement if the loss is no better than guessing among all tokens, and does not
    fall.
    """
    chance = log(max(course.vocabulary or 0, 1))
    last = float(trained.losses[-1]) if len(trained) else float(np.median(train.losses[-3:]))
    if not chance or last < GUESS * chance or sure_change(train) < 0:
        return None
    text = f"No better than guessing: the loss is {last:.3f} {course.at_the_end}; guessing among "
    text += f"{course.vocabulary} tokens has {chance:.3f}"
    if before is not None and before < GUESS * chance:
        return Judgement(
            "guessing",
            "bad",
            f"{text}, and it was {before:.3f} before the first step. {course.slower}",
        )
    if len(train) < FEW:
        return None  # a new model begins at this loss
    advice = f"{course.other('Try other learning rates')}, and check the training data (allhands data check)."
    return Judgement("guessing", "bad", f"{text}. The model learns nothing. {advice}")


def _excursion(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Note losses in the middle of the run that were far above the first ones, if the last ones are
    not.
    """
    before = _before(valid)
    if before is None:
        return
    chance = FAR * scatter(train)  # validations are of more examples, and always of the same
    for name, curve, bound in (
        ("validation", valid.since(1), _raised(before, FAR_ABOVE)),
        ("training", train, _raised(before, SHOT) + chance),
    ):
        if not len(curve) or np.max(curve.losses) <= bound:
            continue
        place = int(np.argmax(curve.losses))
        text = f"In the middle of the run {name} loss was {curve.losses[place]:.3f} (step {curve.steps[place]:.0f}), far "
        text += f"above {before:.3f} before the first step: the peak learning rate is too high. {course.slower}"
        yield Judgement("excursion", "warning", text)
        return


def _exploding(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Warn if gradient norms have grown many times, and the loss does not fall."""
    if len(course.norms) < FEW or _learns(train, valid):
        return
    first, last = ends(course.norms)
    if last > BURST * first > 0:
        text = f"Gradient norms grew from {first:.3g} to {last:.3g}, and the loss does not fall."
        yield Judgement(
            "gradients", "warning", f"{text} {course.slower} --max-grad-norm bounds each step."
        )


def _skipped(course: Course) -> Iterator[Judgement]:
    """Warn of steps that changed nothing."""
    if not course.skipped:
        return
    steps = max(course.steps, course.skipped)
    share = course.skipped / steps
    text = f"{course.skipped} of {counted(steps, 'step')} changed nothing, because a gradient was not a finite number. "
    text += f"{course.lower}, and look at the examples that are named beside those steps."
    yield Judgement(
        "skipped",
        "bad" if share >= MANY_SKIPPED else "warning" if share >= FEW_SKIPPED else "note",
        text,
    )


def _numbers(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    for name, curve in (("training", train), ("validation", valid)):
        wrong = curve.steps[~np.isfinite(curve.losses)]
        if len(wrong):
            text = f"The {name} loss is not a finite number in {len(wrong)} of {counted(len(curve), 'report')}, "
            text += f"first at step {wrong[0]:.0f}. {course.lower}, clip gradients (--max-grad-norm), or look at the "
            text += "data there."
            yield Judgement("numbers", "bad", text)


def _overfitting(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Judge a rise of the validation loss since its best, by the training loss in that time.

    A rise since before the first step makes a run worse than before training, which is told apart.
    """
    after = _risen_since(valid)
    if after is None or not after.steps[0]:
        return
    step, low, last = float(after.steps[0]), float(after.losses[0]), float(after.losses[-1])
    count = len(after) - 1
    text = (
        f"validation loss was lowest at step {step:.0f} ({low:.3f}) and has risen in the {count} "
    )
    text += f"validation{'s' * (count > 1)} since, to {last:.3f} ({_by(low, last)}), "
    sure = count >= RISING or last > _raised(low, FAR_ABOVE)
    learnt = _learnt(train, step, low)
    if learnt and sure:
        text += f"while training loss {learnt}. The weights of step {step:.0f} are better (best/, if kept); "
        text += "fewer steps, more data, dropout or a smaller rank help."
        yield Judgement("overfitting", "warning", f"Overfitting: {text}")
    elif learnt:
        text += f"while training loss {learnt}. "
        text += "More steps would have shown it." if course.is_over else "Watch what follows."
        yield Judgement("overfitting", "note", f"Perhaps the beginning of overfitting: {text}")
    elif last > _raised(low, 1 + HARDLY):  # validation losses may wander by less
        yield _rising(train.since(step), text, last - low if sure else None, course)


def _rising(train: Curve, text: str, rise: float | None, course: Course) -> Judgement:
    """Judge a rise of the validation loss while training loss does not fall.

    Args:
        train: the training loss in that time.
        text: the rise in words.
        rise: how far the validation loss has risen, if surely.
    """
    seen = f": it went from {from_to(train)}" if len(train) > 1 else ""
    if rise is not None and _rises_too(train, rise):
        text = f"Diverging: {text}and training loss has risen, too{seen}. That is not overfitting: the run diverges. "
        return Judgement("diverging", "bad", f"{text}{course.lower}, or clip gradients.")
    text = f"Perhaps overfitting: {text}while training loss shows no clear fall{seen}. "
    return Judgement("overfitting", "note", f"{text}The weights of the lowest loss are better.")


def _learnt(train: Curve, step: float, low: float) -> str:
    """Return in words that the training loss has fallen since a step, or is far below the lowest
    validation loss; empty if neither.
    """
    if _fell(since := train.since(step)):
        return f"fell from {from_to(since)}"
    return f"went from {from_to(train)}" if 0 < ends(train)[1] < BY_HEART * low else ""


def _fell(train: Curve) -> bool:
    """Return whether the training loss has surely fallen, as the losses at its ends show, too."""
    if len(train) < 3 or sure_change(train) >= -FALL:
        return False
    first, last = ends(train)
    return last < _raised(first, 1 - RISE)


def _rises_too(train: Curve, rise: float) -> bool:
    """Return whether the training loss rises with a validation loss that has risen by ``rise``."""
    if len(train) < 2:
        return False
    first, last = ends(train)
    each_time = len(train) > 2 and bool(np.all(np.diff(train.losses) > 0))
    sure = sure_change(train) > FALL or each_time or last - first > 2 * _error_of_ends(train)
    return sure and last - first > rise / 4


def _error_of_ends(curve: Curve) -> float:
    """Return the standard error of the difference between the two ends of a curve."""
    # Of a median: 1.25 times that of a mean.
    return 1.25 * scatter(curve) * sqrt(2 / tenth(curve))


def _risen_since(valid: Curve) -> Curve | None:
    """The validations from the best one on; ``None`` if they have not risen since."""
    if len(valid) < 2:
        return None
    step, low = _lowest(valid)
    after = valid.since(step)
    if len(after) < 2 or after.losses[-1] < _raised(low, 1 + RISE) or not _matters(after, valid):
        return None
    later = after.losses[1:]
    # Each time; or surely as a whole; or to a height around which the later ones scatter.
    rises = (
        bool(np.all(np.diff(after.losses) > 0))
        or (len(after) > RISING and sure_change(after) > 0)
        or (len(later) > 1 and float(np.min(later)) - low > max(np.ptp(later), HARDLY * abs(low)))
    )
    return after if rises else None


def _diverging(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Warn if the training loss has risen by more than its scatter explains, unless the validation
    loss falls.
    """
    if risen := _risen(train, valid):
        first, last = risen
        text = f"Diverging: training loss rose from {first:.3f} to {last:.3f} ({_by(first, last)}), lowest "
        text += f"{np.min(train.losses):.3f}. {course.lower}, add warm-up steps, or clip gradients (--max-grad-norm)."
        yield Judgement("diverging", "bad", text)


def _risen(train: Curve, valid: Curve) -> tuple[float, float] | None:
    """Return the ends of a rise of the training loss; ``None`` without a rise, or if scatter
    explains it.
    """
    falls = _falls(valid)
    # The last validation cannot show changes after it.
    unheard = not falls or float(valid.steps[-1]) < float(train.steps[-1])
    first, last = ends(train)
    newest = float(train.losses[-1])
    if unheard and newest > SHOT * float(np.max(train.losses[: len(train) // 2])) > 0:
        return first, newest
    # A loss that jumped just now does not change the median of the last tenth yet.
    last = max(last, float(np.min(train.losses[-3:])))
    error = FAR * _error_of_ends(train)
    if unheard and len(train) >= ENDS and last - first > max(error, HARDLY * abs(first)):
        return first, last
    line = trend(train)
    if falls or line is None or line.steepness < GRAVE or line.change < HARDLY:
        return None
    return line.first, line.last


def _falls(valid: Curve) -> bool:
    """Return whether validation loss falls: each time, or surely as a whole. Its examples are
    always the same.
    """
    return len(valid) > 1 and (bool(np.all(np.diff(valid.losses) < 0)) or sure_change(valid) < 0)


def _learns(train: Curve, valid: Curve) -> bool:
    """Return whether either curve has fallen by more than scatter explains."""
    if len(valid) > 1:
        begin = float(valid.losses[0])
        change = (float(valid.losses[-1]) - begin) / max(abs(begin), 1e-12)
        # The first report may cover many steps and come after the fall, which validation saw from
        # step 0 on.
        if change < -HARDLY or (_falls(valid) and change < -FALL):
            return True
    return sure_change(train) < -HARDLY or _fell_at_once(train)


def _fell_at_once(train: Curve) -> bool:
    """Return whether the loss fell in the first reports and hardly since, which no straight line
    shows.
    """
    for count in {1, min(3, len(train) // 2), len(train) // 10} - {0}:
        begin, rest = train.losses[:count], train.losses[count:]
        sure = max(FAR, 1.5 * SURE[min(len(rest) - 2, len(SURE) - 1)])
        error = float(np.std(rest, ddof=1)) * sqrt(1 / count + 1 / len(rest))
        if float(begin.mean() - rest.mean()) > max(sure * error, HARDLY * abs(float(begin.mean()))):
            return True
    return False


def _would_be_seen(train: Curve, valid: Curve) -> bool:
    """Return whether the scatter of curves that have not surely fallen is too small to hide a fall."""
    for curve, bound, fewest in ((train, SEEN, FEW), (valid, HARDLY, RISING)):
        line = trend(curve)
        if len(curve) < fewest or line is None:
            continue
        # Standard error of the difference between the ends of a line through evenly spaced points.
        error = scatter(curve) * sqrt(12 / len(curve)) / max(abs(line.first), 1e-12)
        if line.change - SURE[min(len(curve) - 3, len(SURE) - 1)] * error > -bound:
            return True
    return False


def _underfitting(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Judge whether the model learned hardly anything, or could learn more in further steps."""
    if _learns(train, valid):
        yield from _still_learning(train, valid, course)
    else:
        yield _unlearning(train, valid, course)


def _still_learning(train: Curve, valid: Curve, course: Course) -> Iterator[Judgement]:
    """Judge whether losses still fall over the last third, which is fine in a run that goes on."""
    third = float(train.steps[-1] - (train.steps[-1] - train.steps[0]) / 3)
    stretch, known = train.since(third), _of_the_end(valid, third)
    falls = _fell(stretch) and _matters(stretch, train)
    helps = _falls_on(known, valid, third, FALL if falls else HARDLY)
    if not (falls or helps):
        return
    text = _falling(third, stretch if falls else None, known if helps else None)
    if not course.is_over:
        yield Judgement("fitting", "good" if helps else "note", f"Learning: {text}")
    elif helps:
        still = "Both still fall" if falls else "It still falls"
        text = f"Underfitting: {text} {still}: more steps would help."
        yield Judgement("underfitting", "warning", text)
    elif len(known) < 2:
        yield _unknown_yet(text, course)


def _unknown_yet(text: str, course: Course) -> Judgement:
    text = f"Still learning at the end: {text} It is not clear whether more steps would help"
    if course.seen < MOST_SEEN:
        text += " without two validations there: lower --steps-per-eval"
    return Judgement("underfitting", "note", f"{text}.")


def _of_the_end(valid: Curve, third: float) -> Curve:
    """The validations of the last third of the steps; if it is a single one, also the last one before
    it, from the middle of the run on.
    """
    known = valid.since(third)
    if len(known) != 1:
        return known
    middle = third - 0.6 * (known.steps[-1] - third)  # or hardly before it
    before = valid.steps[(valid.steps < third) & (valid.steps >= middle)]
    return valid.since(float(before[-1])) if len(before) else known


def _falling(third: float, stretch: Curve | None, known: Curve | None) -> str:
    seen: list[str] = []
    if stretch is not None:
        text = f"over the last third (from step {third:.0f}) training loss fell from"
        seen.append(f"{text} {from_to(stretch)}")
    if known is not None:
        text = f"validation loss fell from {known.losses[0]:.3f} (step {known.steps[0]:.0f}) to"
        seen.append(f"{text} {known.losses[-1]:.3f}")
    return f"{', and '.join(seen)}."


def _falls_on(known: Curve, valid: Curve, third: float, bound: float) -> bool:
    """Return whether the last validations fall by more than ``bound`` over the last third."""
    if not _falls(known) or not _matters(known, valid):
        return False
    first, last = float(known.losses[0]), float(known.losses[-1])
    share = min(1.0, (known.steps[-1] - third) / (known.steps[-1] - known.steps[0]))
    return (first - last) * share > bound * abs(first)


def _matters(part: Curve, whole: Curve) -> bool:
    """Return whether a change is not tiny beside all that the loss has changed."""
    return len(part) > 1 and abs(float(np.subtract(*ends(part)))) > SHARE * float(
        np.ptp(whole.losses)
    )


def _unlearning(train: Curve, valid: Curve, course: Course) -> Judgement:
    """Return a judgement of a loss that has not fallen, or scatters too much to judge."""
    if not _would_be_seen(train, valid):
        share = scatter(train) / max(abs(float(np.mean(train.losses))), 1e-12)
        text = f"Training loss scatters by {share:.0%} from report to report: it is not clear "
        text += "whether it falls" if course.is_over else "yet whether it falls"
        text += ". Raise --steps-per-report, so that a report is the mean of more batches"
        return Judgement(
            "scatter", "note", f"{text}{', or train for longer' if course.is_over else ''}."
        )
    first, last = ends(train)
    if course.began:
        text = f"No clear fall since step {course.began}, from which this run went on: training loss was {first:.3f} "
        text += f"at first and is {last:.3f} {course.at_the_end}. What it learned before is not judged here."
        return Judgement("settled", "note", text)
    text = f"training loss is {'hardly' if last < first else 'not'} below its start: {first:.3f} at first, {last:.3f} "
    text += course.at_the_end
    if len(valid) > 1:
        text += f"; validation loss {valid.losses[0]:.3f} and {valid.losses[-1]:.3f}"
    advice = f"{course.other('Raise the learning rate')}, train more layers or a larger rank, or check the data."
    if course.is_over:
        return Judgement("underfitting", "warning", f"Underfitting: {text}. {advice}")
    return Judgement(
        "underfitting", "note", f"Hardly learning so far: {text}. If that stays so: {advice}"
    )


def _fitting(train: Curve, valid: Curve, course: Course) -> Judgement:
    (step, low), (first, end) = _lowest(valid), ends(train)
    text = f"No sign of overfitting{' or underfitting' if course.is_over else ' so far'}: training loss went from "
    text += f"{first:.3f} to {end:.3f} (medians of {counted(tenth(train), 'report')}); validation loss was lowest at step "
    return Judgement(
        "fitting",
        "good",
        f"{text}{step:.0f} ({low:.3f}) and is {valid.losses[-1]:.3f} {course.at_the_end}.",
    )
