"""``allhands checkpoint list``, ``inspect`` and ``verify``."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

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
    look_at,
)
from allhands.checkpoints.format import StoredArray
from allhands.checkpoints.reading import OtherFormatError
from allhands.cli.verbs_runs import CheckpointInspect, CheckpointList, CheckpointVerify
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig
from allhands.data.dates import DATE_KEY
from allhands.errors import CheckpointError
from allhands.io.formatting import format_count, format_duration, format_size
from allhands.io.paths import meant
from allhands.io.terminal import console_for, print_json, printable, table_of

_WIDTH = 80
_ID_DIGITS = 8
_WHAT_TO_GIVE = "give the directory of a run, or of a checkpoint in its checkpoints/"


def list_checkpoints(asked: CheckpointList) -> None:
    """Run the verb."""
    place = _place(asked.path)
    found = _survey(place, verify=not asked.quick)
    console = console_for(widest=_WIDTH)
    _print_path(console, place)
    console.print(
        _table(
            found, "sizes are right" if asked.quick else "whole", of_run=not _is_one(found, place)
        )
    )
    if _first_whole(found) is None:
        raise typer.Exit(CheckpointError.exit_code)


def verify_checkpoints(asked: CheckpointVerify) -> None:
    """Run the verb."""
    place = _place(asked.path)
    found = _survey(place, verify=True)
    console, one = console_for(widest=_WIDTH), _is_one(found, place)
    _print_path(console, place)
    console.print(_table(found, "whole", of_run=not one))
    damaged = [look for look in found if look.error is not None]
    if not one:
        first = _first_whole(found)
        taken = (
            f"step {first.checkpoint.step}:"
            if first is not None and first.checkpoint is not None
            else "nothing"
        )
        console.print(f"\n{len(damaged)} of {len(found)} damaged; --resume would take {taken}")
        if first is not None:
            _print_path(console, first.path)
    if damaged:
        raise typer.Exit(CheckpointError.exit_code)


def inspect_checkpoint(asked: CheckpointInspect) -> None:
    """Run the verb."""
    place = _place(asked.path)
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


def _place(path: Path) -> Path:
    """Return the directory of a run or checkpoint; for a file in a checkpoint, that checkpoint.

    Raises:
        CheckpointError: ``path`` does not exist, or is another file.
    """
    if path.is_dir():
        return path
    if path.exists() and is_checkpoint(path.parent):
        return path.parent
    what = (
        "this file does not belong to a checkpoint"
        if path.exists()
        else "there is no such file or directory"
    )
    raise CheckpointError(
        what, code="checkpoint-missing", where=str(path), hint=meant(path, _WHAT_TO_GIVE)
    )


def _survey(place: Path, *, verify: bool) -> list[FoundCheckpoint]:
    if not (found := look_at(place, verify=verify)):
        raise CheckpointError(
            "it holds no checkpoint",
            code="checkpoint-missing",
            where=str(place),
            hint=_WHAT_TO_GIVE,
        )
    return found


def _is_one(found: list[FoundCheckpoint], place: Path) -> bool:
    """True if ``place`` itself is a checkpoint, and not a run with checkpoints."""
    return [look.path for look in found] == [place]


def _print_path(console: Console, path: Path) -> None:
    """Print a path on its own line, unbroken, so that it can be copied."""
    console.print(printable(str(path)), soft_wrap=True)


# --- list and verify ------------------------------------------------------------------------------


def _first_whole(found: Iterable[FoundCheckpoint]) -> FoundCheckpoint | None:
    return next((look for look in found if look.error is None), None)


def _table(found: list[FoundCheckpoint], good: str, *, of_run: bool) -> Table:
    rows: list[Sequence[str]] = []
    first = _first_whole(found) if of_run else None
    for look in found:
        kind = "not readable here" if isinstance(look.error, OtherFormatError) else "damaged"
        words = [f"{kind}: {printable(damage(look.error))}" if look.error else good]
        words += ["latest"] if look is first else []
        words += _named(look)
        row = ["?"] * 4
        if (it := look.checkpoint) is not None:
            row = [
                str(it.step),
                _when(it.time),
                format_size(it.num_bytes),
                printable(it.run_id)[:_ID_DIGITS],
            ]
        rows.append((*row, ", ".join(words)))
    return table_of(("step", "when", "size", "run", "state"), rows, left=(1, 3, 4))


def _named(look: FoundCheckpoint) -> list[str]:
    """Return the name of the checkpoint's directory, if it says more than the step."""
    it = look.checkpoint
    if it is None or look.path.name == checkpoint_path(Path(), it.step).name:
        return []
    return ["best"] if look.path.name == "best" else [f"in {printable(look.path.name)}"]


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "?"


# --- inspect --------------------------------------------------------------------------------------


def _show(checkpoint: Checkpoint) -> None:
    console = console_for(widest=_WIDTH)
    _print_path(console, checkpoint.path)
    console.print(_listed((name, printable(str(value))) for name, value in _facts(checkpoint)))
    changed = _changed_settings(checkpoint.state.get("config"))
    if changed:
        console.print("\nsettings that differ from the defaults")
        console.print(
            _listed((f"  {printable(name)}", json.dumps(value)) for name, value in changed.items())
        )
    console.print("\nfiles")
    files = [
        (
            f"  {printable(name)}",
            format_size(file.bytes),
            f"sha256 {file.sha256[:_ID_DIGITS]}",
        )
        for name, file in checkpoint.files.items()
    ]
    console.print(_listed(files))
    groups: dict[str, list[StoredArray]] = {}
    for array in checkpoint.arrays:
        groups.setdefault(array.name.partition(".")[0], []).append(array)
    for group, arrays in groups.items():
        console.print(f"\narrays of {printable(group)} (* stands for any number)")
        console.print(_array_table(arrays))


def _facts(checkpoint: Checkpoint) -> list[tuple[str, object]]:
    """Return the known facts of the run, the most important ones first."""
    state = checkpoint.state

    def told(key: str, words: Callable[[float], str]) -> str | None:
        number = _number(state, key)
        return None if number is None else words(number)

    at = told("best_step", " at step {:.0f}".format)
    model = _mapping(state.get("model"))
    # A new model has only its tokenizer from another model.
    given = "tokenizer" if _is_of_pretraining(_mapping(state.get("config"))) else "model"
    content = _mapping(state.get("data"))
    date = content.pop(DATE_KEY, None)
    facts = {
        "step": checkpoint.step,
        "iteration": checkpoint.iteration,
        "epoch": told("epoch", "{:.4g}".format),
        "trained tokens": told("trained_tokens", format_count),
        "best loss": told("best_loss", lambda loss: f"{loss:.4g}{at or ''}"),
        "written": _when(checkpoint.time),
        "run": checkpoint.run_id,
        "size": format_size(checkpoint.num_bytes),
        "trained for": told("elapsed_s", format_duration),
        "ranks": told("world_size", "{:.0f}".format),
        given: model.get("path"),
        "its fingerprint": str(model["fingerprint"])[:_ID_DIGITS]
        if "fingerprint" in model
        else None,
        "data": ", ".join(
            f"{split} {str(sha)[:_ID_DIGITS]}" for split, sha in content.items() if sha
        )
        or None,
        "date in its chats": str(date)[:10] if date else None,
        "versions": ", ".join(
            f"{name} {version}" for name, version in _mapping(state.get("versions")).items()
        )
        or None,
    }
    return [(name, value) for name, value in facts.items() if value is not None]


def _number(state: Mapping[str, Any], key: str) -> float | None:
    value = state.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_of_pretraining(settings: Mapping[str, Any]) -> bool:
    return "tokenizer" in settings


def _changed_settings(config: Any) -> dict[str, Any]:
    settings = _mapping(config)
    kind = PretrainConfig if _is_of_pretraining(settings) else TrainConfig
    defaults = kind.model_construct().model_dump(mode="json")
    return {
        name: value
        for name, value in sorted(settings.items())
        if name not in defaults or value != defaults[name]
    }


def _array_table(arrays: Iterable[StoredArray]) -> Table:
    """Return a table of arrays; equal arrays of different layers are on one line."""
    kinds = Counter(
        (
            re.sub(r"\d+", "*", it.name.partition(".")[2]),
            it.dtype,
            "x".join(map(str, it.shape)) or "one number",
        )
        for it in arrays
    )
    return _listed(
        (f"  {printable(name)}", f"{count} of {dtype}", shape)
        for (name, dtype, shape), count in sorted(kinds.items())
    )


def _listed(rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without heads; there must be at least one row."""
    found = list(rows)
    return table_of([""] * len(found[0]), found, left=range(len(found[0])))
