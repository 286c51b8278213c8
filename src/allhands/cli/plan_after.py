"""``allhands plan --after``: a run beside its plan, and signs that it has outgrown its way of training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from allhands.io.formatting import format_moment
from allhands.io.terminal import console_for, echo, print_table
from allhands.observe.judging import harm
from allhands.plan.outgrown import signs_of
from allhands.report.facts import read_facts
from allhands.report.planned import comparison_of, plan_words, planned_grids


def show_after(run: Path, *, as_json: bool) -> None:
    """Print signs that a run has outgrown its way of training, and compare it with its plan.

    Raises:
        DataError: there is no run.
    """
    facts = read_facts(run)
    signs, compared = signs_of(facts.history, facts.samples), comparison_of(facts)
    # A faster way to a ruined model is no advice.
    done = harm(facts.history)
    # Of the notes those on the plan: the others are for a report.
    notes = [note for note in facts.notes if note.startswith("plan.")]
    if as_json:
        values = {"signs": [asdict(sign) for sign in signs], "plan": compared and compared.as_json(), "notes": notes}
        values["judgements"] = [asdict(one) for one in done]
        typer.echo(json.dumps(values, indent=1))
        return
    for one in done:
        echo(f"{one.level}: {one.text}")
    if not signs and not any(one.level == "bad" for one in done):
        echo(f"{facts.history.name}: no sign that it has outgrown this way of training")
    for text in (*(f"{sign.seen}\n  what to do: {sign.advice}" for sign in signs), *notes):
        echo(text)
    if compared is None:
        if not notes:
            echo(f"No plan is kept there to compare it with: allhands plan ... --adapter-path {run} keeps one.")
        return
    ranks = f"{compared.machines} rank{'s' * (compared.machines > 1)}"
    echo(f"\nPlanned on {format_moment(compared.made)} UTC, for {ranks}:")
    for text in (*compared.notes, *(word.text for word in plan_words(compared))):
        echo(f"- {text}")
    for grid in planned_grids(facts.history.name, compared):
        echo(f"\n{grid.caption}")
        print_table(console_for(), grid.head, grid.rows)
