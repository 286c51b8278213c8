"""Planned and measured figures of a run, as words and tables of a report."""

from __future__ import annotations

from collections.abc import Iterator

from allhands.observe.charts import NONE, Grid
from allhands.observe.course import Judgement
from allhands.plan.compared import Comparison, Figure, compare
from allhands.report.facts import ReportFacts

_MOST = 6  # differences that are listed
PLANNED_TOLD = (
    "The prediction of allhands plan before the run, and the measurement. A step is the median of the reports without "
    "the first. All steps: from the first to the end, with validations, and with saving, which no plan includes. As "
    "planned means within 15 % of a time and 10 % of memory; the tokens and the exchange of a step may explain more."
)


def comparison_of(run: ReportFacts) -> Comparison | None:
    """Compare a run with its plan; ``None`` if it has none, or has not written its options yet."""
    if (
        run.plan is None
        or run.history.started is None
        or (run.status == "going on" and not run.config)
    ):
        return None
    return compare(run.plan, run.history, run.config, run.samples)


def plan_words(found: Comparison) -> list[Judgement]:
    """Return judgements of the figures that are not as planned, or one judgement that all are."""
    measured = [figure for figure in found.figures if figure.judged]
    if not measured:
        return []
    off = [figure for figure in measured if figure.off]
    # Memory is judged once: the run's own estimate only if the plan's figure was right or is
    # missing.
    words = [
        _word(one)
        for one in off
        if one.key != "expected" or all(other.key != "memory" for other in off)
    ]
    if found.differences:
        told = "; ".join(one.told for one in found.differences[:_MOST])
        left = len(found.differences) - _MOST
        more = f"; and {left} more" * (left > 0)
        words.insert(
            0,
            Judgement(
                "plan", "note", f"Not trained with the options that were planned: {told}{more}."
            ),
        )
    if not off:
        level = "note" if found.differences else "good"
        words.append(
            Judgement(
                "plan", level, f"As planned. {'; '.join(figure.told for figure in measured)}."
            )
        )
    return words


def _word(figure: Figure) -> Judgement:
    more = figure.ratio is not None and figure.ratio > 1.0
    grave = more and not figure.marked and figure.key != "start"
    other = ", with other options" if figure.marked else ""
    by = "the run expected" if figure.key == "expected" else "planned"
    return Judgement("plan", "warning" if grave else "note", f"Not as {by}{other}. {figure.told}.")


def planned_grids(label: str, found: Comparison | None) -> Iterator[Grid]:
    """Yield a table of the figures, and one of the options in which the run differs from its plan."""
    if found and found.figures:
        marked = any(figure.marked for figure in found.figures)
        caption = f"{label}: planned and measured" + "; * with other options than planned" * marked
        rows = tuple(_row(figure) for figure in found.figures)
        yield Grid(caption, ("", "planned", "measured", "ratio", "as planned"), rows)
    if found and found.differences:
        rows = tuple((one.planned, one.trained) for one in found.differences)
        yield Grid(f"{label}: other than planned", ("planned with", "trained with"), rows)


def _row(figure: Figure) -> tuple[str, ...]:
    shown = (figure.of, figure.shown(figure.planned) or NONE, figure.shown(figure.measured) or NONE)
    if figure.ratio is None:
        return (*shown, NONE, NONE)
    as_planned = ("no" if figure.off else "yes") if figure.judged else NONE
    return (*shown, f"{figure.times}{' *' * figure.marked}", as_planned)
