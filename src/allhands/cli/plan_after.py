"""``allhands plan --after``: compare a run with its plan, and look for signs that it needs another
way of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from allhands.io.formatting import counted, format_moment
from allhands.io.terminal import console_for, echo, print_json, print_table
from allhands.observe.judging import harm
from allhands.plan.compared import Comparison
from allhands.plan.outgrown import Sign, signs_of
from allhands.report.facts import ReportFacts, read_facts
from allhands.report.planned import comparison_of, plan_words, planned_grids


def show_after(run: Path, *, as_json: bool) -> None:
    """Print signs that a run needs another way of training, and compare it with its plan.

    Raises:
        DataError: there is no run.
    """
    facts = read_facts(run)
    signs, compared = signs_of(facts.history, facts.samples, facts.config), comparison_of(facts)
    # If the training has harmed the model, "no sign" would be misleading.
    done = harm(facts.history)
    ruined = any(one.level == "bad" for one in done)
    # Only the notes on the plan are shown; a report has all others.
    notes = [note for note in facts.notes if note.startswith("plan.")]
    if as_json:
        values = {
            "signs": [*map(asdict, signs)],
            "plan": compared and compared.as_json(),
            "notes": notes,
            "status": facts.status,
        }
        values["judgements"] = [*map(asdict, done)]
        print_json(values)
        return
    told = [f"{one.level}: {one.text}" for one in done]
    told += _told_of(facts, signs, ruined=ruined)
    for text in (*told, *notes):
        echo(text)
    if compared is not None:
        _show_compared(facts.history.name, compared)
    elif not notes:
        echo(
            f"No plan is kept there to compare it with: allhands plan ... --adapter-path {run} keeps one."
        )


def _told_of(facts: ReportFacts, signs: Sequence[Sign], *, ruined: bool) -> Iterator[str]:
    """Yield the status of a run that failed, or that it has no signs; then its signs."""
    name, reason = facts.history.name, f": {facts.reason}" if facts.reason else ""
    if facts.status in ("failed", "crashed or killed"):
        yield f"{name}: {facts.status}{reason}"
    elif not signs and not ruined:
        yield f"{name}: no sign that more computers or another strategy would help"
    yield from (f"{sign.seen}\n  what to do: {sign.advice}" for sign in signs)


def _show_compared(name: str, compared: Comparison) -> None:
    ranks = counted(compared.machines, "rank")
    echo(f"\nPlanned on {format_moment(compared.made)} UTC, for {ranks}:")
    for text in (*compared.notes, *(word.text for word in plan_words(compared))):
        echo(f"- {text}")
    for grid in planned_grids(name, compared):
        echo(f"\n{grid.caption}")
        print_table(console_for(), grid.head, grid.rows)
