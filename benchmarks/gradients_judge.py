"""What ``gradients.py`` compares, and what to think of it. Nothing beyond Python's own library is
imported here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

BEYOND = "beyond mlx_lm"
REFUSED = "refused as ever"
# Shares of the gradient's norm: as a whole, and of one array; and of the loss.
LIMITS = {"float32": (1e-4, 9e-4, 1e-5), "bfloat16": (0.05, 0.25, 0.02)}


@dataclass(frozen=True)
class Run:
    """One training of ours: what is trained, whether activations are recomputed, and in which form."""

    way: str
    recompute: bool
    form: str

    @property
    def column(self) -> str:
        """Of the table."""
        return self.way + ("+" if self.recompute else "")


@dataclass(frozen=True)
class Verdict:
    """What came of a run.

    Attributes:
        kind: ``right``, ``wrong``, ``refused`` (with a message), ``refused as ever`` (as is known
            of it), ``traceback``, ``died``, ``unjudged`` (there is nothing to compare with) or
            ``beyond mlx_lm`` (which cannot compute it itself; ours says so or computes it), or
            ``unsteady`` (wrong at first, right when repeated).
        whole: largest difference of a batch's gradient, as a share of its norm.
        text: what is to be said of it.
        by_rounding: whether nothing is wrong but the size of a difference, where there is a judge
            of it.
    """

    name: str
    run: Run
    kind: str
    whole: float | None = None
    text: str = ""
    batches: dict[str, Any] = field(default_factory=dict)
    by_rounding: bool = False

    @property
    def from_judge(self) -> tuple[float, float] | None:
        """How far mlx_lm's gradient and ours are from a float32 one on the CPU, at most."""
        told = [
            one
            for one in self.batches.values()
            if isinstance(one, dict) and "ours from judge" in one
        ]
        if not told:
            return None
        theirs, ours = ([one[f"{who} from judge"] for one in told] for who in ("theirs", "ours"))
        return tuple(math.inf if None in each else max(each) for each in (theirs, ours))  # type: ignore[return-value]

    @property
    def is_good(self) -> bool:
        """Right, or refused in so many words where mlx_lm or recomputation cannot do it."""
        return self.kind in ("right", BEYOND, REFUSED)


def judge(
    name: str,
    run: Run,
    theirs: dict[str, Any],
    ours: dict[str, Any],
    dtype: str,
    refused: Mapping[str, str],
) -> Verdict:
    """What to think of a run; ``refused`` are the messages that are expected."""
    if "died" in ours:
        return Verdict(name, run, "died", text=ours["died"])
    if "error" in theirs:
        kind = "traceback" if "traceback" in ours else BEYOND
        said = ours.get("traceback") or ours.get("refused", "computes")
        return Verdict(
            name, run, kind, text=f"{said}; mlx_lm itself: {theirs['error']}", batches=ours
        )
    if "traceback" in ours:
        return Verdict(name, run, "traceback", text=ours["traceback"], batches=ours)
    if "refused" in ours:
        expected = (
            refused.get(run.way)
            or refused.get(run.form)
            or (refused.get("+") if run.recompute else None)
        )
        if expected is not None and ours["refused"].startswith(expected):
            return Verdict(name, run, REFUSED, text=ours["refused"], batches=ours)
        return Verdict(name, run, "refused", text=ours["refused"], batches=ours)
    if any("mlx_lm's" in one.get("not finite", []) for one in ours.values()):
        also = any("ours" in one.get("not finite", []) for one in ours.values())
        text = f"its own gradient is not finite, ours {'neither' if also else 'is'}"
        return Verdict(name, run, BEYOND, text=text, batches=ours)
    problems = [
        f"{batch}: {text}"
        for batch, one in ours.items()
        for text in complaints(one, theirs[batch.split()[0]], dtype)
    ]
    if missing := {"short", "long", "short again"} - ours.keys():
        problems.append(f"no {', '.join(sorted(missing))} rows")
    others = [
        text
        for batch, one in ours.items()
        for text in mistakes(one, theirs[batch.split()[0]], dtype)
    ]
    by_rounding = not (missing or others) and all("ours from judge" in one for one in ours.values())
    wholes = [one["whole"] for one in ours.values()]
    whole = None if None in wholes else max(wholes, default=0.0)
    return Verdict(
        name, run, "wrong" if problems else "right", whole, "; ".join(problems), ours, by_rounding
    )


def pooled(verdicts: Sequence[Verdict], dtype: str) -> Verdict:
    """One verdict on several draws of the weights, whose first one is wrong by the size of a
    difference alone.

    A router that chooses another expert changes a gradient much, whoever rounded. By the median
    over the draws ours must be no further from float32 than twice what mlx_lm's own is.
    """
    first = verdicts[0]
    if other := next(
        (verdict for verdict in verdicts if verdict.kind == "wrong" and not verdict.by_rounding),
        None,
    ):
        return other
    apart = [
        found for verdict in verdicts if (found := verdict.from_judge) and math.inf not in found
    ]
    if len(apart) < 3:
        return first
    theirs, ours = (statistics.median(each) for each in zip(*apart, strict=True))
    kind = "right" if ours <= max(LIMITS[dtype][0], 2.0 * theirs) else "wrong"
    text = f"{len(apart)} draws: by the median {theirs:.2g} (mlx_lm) and {ours:.2g} (allhands) from float32"
    wholes = [verdict.whole for verdict in verdicts if verdict.whole is not None]
    return Verdict(
        first.name,
        first.run,
        kind,
        statistics.median(wholes),
        text,
        first.batches,
        by_rounding=True,
    )


def unsteady(verdict: Verdict, repeated: Sequence[Verdict]) -> Verdict:
    """The verdict on a run that was ``repeated`` because it is wrong: told apart where that is not
    always so.
    """
    right = sum(again.kind == "right" for again in repeated)
    if not right:
        return verdict
    text = f"right in {right} of {len(repeated)} repetitions; at first {verdict.text}"
    return replace(verdict, kind="unsteady", text=text)


def compared_with_judge(verdicts: Iterable[Verdict]) -> str:
    """How far from float32 allhands is beside mlx_lm, over all comparisons; empty where none was
    judged.
    """
    apart = [
        found
        for verdict in verdicts
        if (found := verdict.from_judge) and math.inf not in found and all(found)
    ]
    if len(apart) < 2:
        return ""
    shares = [ours / theirs for theirs, ours in apart]
    low, middle, high = statistics.quantiles(shares, n=4)
    mean = statistics.geometric_mean(shares)
    return (
        f"In {len(shares)} comparisons allhands is {mean:.2f} times as far from float32 as mlx_lm (geometric mean; "
        f"quartiles {low:.2f}, {middle:.2f}, {high:.2f})"
    )


def complaints(one: dict[str, Any], theirs: dict[str, Any], dtype: str) -> Iterator[str]:
    """What is wrong with a batch."""
    yield from mistakes(one, theirs, dtype)
    if one["whole"] is None:
        return
    limit, of_array, _ = LIMITS[dtype]
    # Where mlx_lm's own rounding is as large, ours must be no worse than twice that.
    rounding = one.get("theirs from judge")
    forgiven = rounding is not None and one["ours from judge"] <= max(limit, 2.0 * rounding)
    if one["whole"] > limit and not forgiven:
        yield f"gradient differs by {one['whole']:.2g}, {one['array']} by {one['worst']:.2g}"
    elif one["worst"] > of_array and rounding is None:
        yield f"{one['array']} differs by {one['worst']:.2g}"


def mistakes(one: dict[str, Any], theirs: dict[str, Any], dtype: str) -> Iterator[str]:
    """What is wrong with a batch whoever rounded."""
    of_loss = LIMITS[dtype][2]
    if one["left"] or one["added"]:
        yield f"arrays without a gradient: {one['left'][:3]}, with one that mlx_lm has not: {one['added'][:3]}"
    if one["whole"] is None:
        yield "not finite"
        return
    apart = abs(one["loss"] - theirs["loss"])
    if "judge loss" in one:
        apart = min(apart, abs(one["loss"] - one["judge loss"]))
    if not apart <= of_loss * max(1.0, abs(theirs["loss"])):
        yield f"loss {one['loss']:.6g} for {theirs['loss']:.6g}"


def grouped(verdicts: Iterable[Verdict], *, named: bool = False) -> list[str]:
    """What is to be said, a line for each configuration and kind: which runs, and the text of the
    worst.
    """
    found: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        # Errors of one kind come from many lines.
        key = verdict.text.partition(":")[0] if verdict.kind != "wrong" else ""
        found.setdefault((verdict.name, verdict.kind, key), []).append(verdict)
    lines: list[str] = []
    for (name, kind, _), members in found.items():
        worst = max(members, key=lambda verdict: verdict.whole or 0.0)
        lines.append(f"{name + ': ' if named else ''}{kind} ({_runs_of(members)}): {worst.text}")
    return lines


def _runs_of(verdicts: Iterable[Verdict]) -> str:
    """Which runs they are of, in the table's words; the form where it is one only."""
    forms: dict[str, list[str]] = {}
    for verdict in verdicts:
        forms.setdefault(verdict.run.column, []).append(verdict.run.form)
    return ", ".join(
        column if len(seen) > 1 else f"{column} {seen[0]}" for column, seen in forms.items()
    )
