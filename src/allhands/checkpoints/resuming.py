"""The checkpoint that a person means by ``--resume``, and what to do where there is none that is whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from allhands.checkpoints.layout import CHECKPOINTS, MANIFEST, listed
from allhands.checkpoints.reading import Checkpoint, open_checkpoint, sum_of
from allhands.checkpoints.runs import is_checkpoint, latest, quick_step, survey
from allhands.errors import CheckpointError
from allhands.paths import meant

_WEIGHTS = "adapters.safetensors"
_WEIGHTS_ONLY = "to begin anew from these weights, without optimizer state and place in the data"


def find(text: str, run_dir: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint that a person means by ``--resume TEXT``: it, or the latest of the run directory ``TEXT``.

    Args:
        run_dir: where this run keeps its own, for advice.
        verify: whether to compute sums; else sizes are compared, which takes milliseconds.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = Path(os.path.expanduser(text))
    if path.is_file():
        raise _not_a_directory(path)
    if not path.is_dir():
        raise _lost(path, "there is no such directory", meant(path, _advice(run_dir)))
    if is_checkpoint(path):
        return open_checkpoint(path, verify=verify)
    rejected: list[CheckpointError] = []
    if (found := latest(path, verify=verify, rejected=rejected)) is not None:
        return found
    if rejected:
        raise _lost(path, f"no checkpoint in it is whole: {_told(rejected)}", _from_weights(path) or _advice(run_dir))
    if weights := [file for file in listed(path) if file.suffix == ".safetensors"]:
        raise _lost(path, "it holds weights, but no checkpoint", f"{_WEIGHTS_ONLY}: --resume-adapter-file {weights[0]}")
    raise _lost(path, "it holds no checkpoint", _advice(run_dir))


def find_latest(
    run_dir: Path, *, verify: bool = True, rejected: list[CheckpointError] | None = None
) -> Checkpoint | None:
    """The checkpoint that a person means by ``--resume auto``, or ``None`` if the run directory holds none at all.

    Args:
        verify: as in :func:`find`.
        rejected: receives what is wrong with each one that was passed over.

    Raises:
        CheckpointError: it holds some, and none is whole: to begin anew then is a person's decision.
    """
    errors: list[CheckpointError] = []
    found = latest(run_dir, verify=verify, rejected=errors)
    if rejected is not None:
        rejected += errors
    if found is not None or not errors:
        return found
    kept = kept_aside(run_dir)
    advice = [f"go on from another one with --resume PATH{f' (there is {kept[0]})' if kept else ''}"]
    advice += ["leave --resume out to begin anew: the damaged ones are set aside then, not removed"]
    advice += [text] if (text := _from_weights(run_dir)) else []
    what = f"none of the checkpoints in {run_dir} is whole: {_told(errors)}"
    raise CheckpointError(what, where="--resume auto", hint="; or ".join(advice))


def kept_aside(run_dir: Path) -> tuple[Path, int] | None:
    """What was last set aside in ``run_dir`` and has a whole checkpoint, with the last step of it, by sizes alone.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    steps = ((path, quick_step(path)) for path in _aside(run_dir))
    return next(((path, step) for path, step in steps if step is not None), None)


def damage(error: CheckpointError) -> str:
    """Which file of a checkpoint it is, and what is wrong with it."""
    file = Path(error.where or "")
    what = error.message.removeprefix("the checkpoint is damaged: ").removeprefix("the checkpoint ")
    return f"{file.parent.name}/{file.name}: {what}"


def _told(errors: Iterable[CheckpointError]) -> str:
    return "; ".join(damage(error) for error in errors)


def _aside(run_dir: Path) -> list[Path]:
    """What earlier runs left here, the latest first."""
    found = [path for path in listed(run_dir) if path.name.startswith(f"{CHECKPOINTS}.") and path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _from_weights(place: Path) -> str | None:
    """What to do with weights that are whole in checkpoints that are not."""
    for it in (found.checkpoint for found in survey(place, verify=False)):
        facts = it.files.get(_WEIGHTS) if it else None
        with suppress(CheckpointError):
            if it is not None and facts is not None and sum_of(it.path / _WEIGHTS) == facts.sha256:
                whole = f"begin a new run from the weights of step {it.step}, which are whole"
                return f"{whole}: --resume-adapter-file {it.path / _WEIGHTS}"
    return None


def _lost(path: Path, what: str, hint: str) -> CheckpointError:
    return CheckpointError(what, where=f"--resume {path}", hint=hint)


def _not_a_directory(path: Path) -> CheckpointError:
    if (path.parent / MANIFEST).exists():
        hint = f"give the checkpoint's directory: --resume {path.parent}"
        if path.suffix == ".safetensors":
            hint += f"; {_WEIGHTS_ONLY}: --resume-adapter-file {path}"
    elif path.suffix == ".safetensors":
        hint = f"{_WEIGHTS_ONLY}: --resume-adapter-file {path}"
    else:
        hint = "give the directory of a checkpoint or of a run"
    return _lost(path, "this is a file, and a checkpoint is a directory", hint)


def _advice(run_dir: Path) -> str:
    """What there is to resume from instead."""
    there = [str(found.path) for found in survey(run_dir, verify=False) if found.error is None]
    if not there:
        return "give the directory of a checkpoint or of a run that has some"
    return f"there is {', '.join(there[:3])}; or --resume auto for the latest of --adapter-path {run_dir}"
