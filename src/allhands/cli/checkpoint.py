"""``allhands checkpoint list``, ``inspect`` and ``verify``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from allhands.checkpoints import (
    Checkpoint,
    FoundCheckpoint,
    checkpoint_path,
    damage,
    find,
    is_checkpoint,
)
from allhands.checkpoints.facts import ID_DIGITS, changed_settings, facts_of, kinds_of_arrays
from allhands.checkpoints.finding import all_in, place_of
from allhands.checkpoints.reading import OtherFormatError
from allhands.cli.verbs_runs import CheckpointInspect, CheckpointList, CheckpointVerify
from allhands.errors import CheckpointError
from allhands.io.formatting import format_minute, format_size
from allhands.io.terminal import console_for, print_json, printable, table_of

_WIDTH = 80


def list_checkpoints(asked: CheckpointList) -> None:
    """Run the verb."""
    place = place_of(asked.path)
    found = all_in(place, verify=not asked.quick)
    _print_all(place, found, "sizes are right" if asked.quick else "whole")
    if _first_whole(found) is None:
        raise typer.Exit(CheckpointError.exit_code)


def verify_checkpoints(asked: CheckpointVerify) -> None:
    """Run the verb."""
    place = place_of(asked.path)
    found = all_in(place, verify=True)
    console = _print_all(place, found, "whole")
    damaged = sum(look.error is not None for look in found)
    if not is_checkpoint(place):
        first = _first_whole(found)
        taken = "nothing" if first is None else f"step {first.step}:"
        console.print(f"\n{damaged} of {len(found)} damaged; --resume would take {taken}")
        if first is not None:
            _print_path(console, first.path)
    if damaged:
        raise typer.Exit(CheckpointError.exit_code)


def inspect_checkpoint(asked: CheckpointInspect) -> None:
    """Run the verb."""
    place = place_of(asked.path)
    try:
        checkpoint = find(str(place), place)
    except CheckpointError as error:
        error.where = (error.where or "").removeprefix("--resume ")
        raise
    if asked.as_json:
        facts = {
            "path": str(checkpoint.path),
            "arrays": [array.to_json() for array in checkpoint.arrays],
        }
        print_json(asdict(checkpoint) | facts)
        return
    _show(checkpoint)


def _print_path(console: Console, path: Path) -> None:
    """Print a path on its own line, unbroken, so that it can be copied."""
    console.print(printable(str(path)), soft_wrap=True)


def _first_whole(found: Iterable[FoundCheckpoint]) -> Checkpoint | None:
    return next((look.checkpoint for look in found if look.error is None), None)


def _print_all(place: Path, found: Sequence[FoundCheckpoint], good: str) -> Console:
    """Print a table of checkpoints; ``good``: state of one without an error. Return its console."""
    console = console_for(widest=_WIDTH)
    _print_path(console, place)
    rows: list[Sequence[str]] = []
    first = None if is_checkpoint(place) else _first_whole(found)
    for look in found:
        kind = "not readable here" if isinstance(look.error, OtherFormatError) else "damaged"
        words = [f"{kind}: {printable(damage(look.error))}" if look.error else good]
        row = ["?"] * 4
        if (it := look.checkpoint) is not None:
            words += ["latest"] if it is first else []
            # The name of the directory, if it says more than the step.
            if (name := look.path.name) != checkpoint_path(Path(), it.step).name:
                words.append("best" if name == "best" else f"in {printable(name)}")
            row = [
                str(it.step),
                format_minute(it.time),
                format_size(it.num_bytes),
                printable(it.run_id)[:ID_DIGITS],
            ]
        rows.append((*row, ", ".join(words)))
    console.print(table_of(("step", "when", "size", "run", "state"), rows, left=(1, 3, 4)))
    return console


def _show(checkpoint: Checkpoint) -> None:
    console = console_for(widest=_WIDTH)
    _print_path(console, checkpoint.path)
    console.print(_listed((name, str(value)) for name, value in facts_of(checkpoint).items()))
    if changed := changed_settings(checkpoint):
        console.print("\nsettings that differ from the defaults")
        console.print(_listed((f"  {name}", json.dumps(value)) for name, value in changed.items()))
    console.print("\nfiles")
    console.print(
        _listed(
            (f"  {name}", format_size(file.bytes), f"sha256 {file.sha256[:ID_DIGITS]}")
            for name, file in checkpoint.files.items()
        )
    )
    for group, kinds in kinds_of_arrays(checkpoint).items():
        console.print(f"\narrays of {printable(group)} (* stands for any number)")
        console.print(_listed((f"  {name}", *more) for name, *more in kinds))


def _listed(rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without heads; there must be at least one row."""
    found = [list(map(printable, row)) for row in rows]
    return table_of([""] * len(found[0]), found, left=range(len(found[0])))
