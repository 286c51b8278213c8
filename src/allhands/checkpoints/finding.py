"""Search for a run's checkpoints: the whole ones, the latest, and the one for ``--resume``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from allhands.checkpoints.format import WEIGHTS_FILE
from allhands.checkpoints.layout import (
    CHECKPOINTS,
    MANIFEST,
    STATE,
    best_in,
    checkpoints_in,
    holder,
    is_step_name,
    leftovers,
    listed,
)
from allhands.checkpoints.reading import (
    Checkpoint,
    OtherFormatError,
    check_sizes,
    described,
    open_checkpoint,
    sum_of,
    with_state,
)
from allhands.errors import CheckpointError
from allhands.io.paths import meant

_WHAT_TO_GIVE = "give the directory of a run, or of a checkpoint in its checkpoints/"
_WEIGHTS_ONLY = "to begin anew from these weights, without optimizer state and place in the data"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was found, whole or damaged.

    Attributes:
        path: the checkpoint's directory.
        checkpoint: content of its manifest; ``None`` if the manifest cannot be read.
        error: the damage; ``None`` if the checkpoint is whole.
    """

    path: Path
    checkpoint: Checkpoint | None
    error: CheckpointError | None


def survey(run_dir: Path, *, verify: bool = True) -> list[FoundCheckpoint]:
    """Return all checkpoints in a run directory, whole or damaged, the last step first.

    Args:
        verify: True to compare SHA-256 sums; else only sizes are compared, and ``state`` is left
            empty.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    places = [
        *checkpoints_in(run_dir),
        *([best] if (best := best_in(run_dir)) else ()),
        *_set_aside(run_dir),
    ]
    found = [one for path in places if (one := look(path, verify=verify)) is not None]
    return sorted(found, key=_rank, reverse=True)


def _set_aside(run_dir: Path) -> list[Path]:
    """Return checkpoints that were about to be replaced when the process was killed.

    The next writer puts them back.
    """
    left = [
        found
        for parent in sorted({holder(run_dir), run_dir})
        for found in leftovers(listed(parent))
    ]
    return [
        path
        for path, name, kind in left
        if kind == "replaced" and (path / MANIFEST).exists() and not path.with_name(name).exists()
    ]


def _rank(found: FoundCheckpoint) -> tuple[int, bool, float]:
    """Sorting key: later steps are higher; of equal steps, one of :data:`CHECKPOINTS` is higher."""
    if (it := found.checkpoint) is None:
        return (-1, False, 0.0)
    return (it.step, is_step_name(it.path.name), it.time)


def look(path: Path, *, verify: bool) -> FoundCheckpoint | None:
    """Return the checkpoint at ``path``; ``None`` if there is none.

    If the checkpoint is replaced meanwhile, its successor is returned.
    """
    while (before := _identity(path)) is not None:
        found = None
        try:
            found = described(path)
            check_sizes(found)
            return FoundCheckpoint(path, with_state(found, verify=True) if verify else found, None)
        except CheckpointError as error:
            if _identity(path) == before:
                return FoundCheckpoint(path, found, error)
    return None


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    # The inode number of a removed directory is soon used again, so the time is compared, too.
    return facts.st_dev, facts.st_ino, facts.st_ctime_ns


# --- choosing -------------------------------------------------------------------------------------


def latest(
    run_dir: Path,
    *,
    run_id: str | None = None,
    verify: bool = True,
    rejected: list[CheckpointError] | None = None,
) -> Checkpoint | None:
    """Return the whole checkpoint of the highest step; ``best`` counts like the others.

    Args:
        run_id: only checkpoints of this run count; ``None``: of any run.
        verify: True to compare SHA-256 sums; else only sizes are compared, and ``state`` is left
            empty.
        rejected: receives the error of each damaged checkpoint whose step is higher or unreadable.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    errors = [] if rejected is None else rejected
    seen = survey(run_dir, verify=False)
    errors += [
        found.error for found in seen if found.checkpoint is None and found.error is not None
    ]
    for found in seen:
        if found.checkpoint is None or run_id not in (None, found.checkpoint.run_id):
            continue
        verified = look(found.path, verify=True) if verify and not found.error else found
        if verified is None:
            continue
        if verified.error is None:
            return verified.checkpoint
        errors.append(verified.error)
    return None


def quick_step(place: Path, run_id: str | None = None) -> int | None:
    """Return the highest step of the whole checkpoints in ``place``; ``None`` without any.

    Only manifests and sizes are looked at, which takes milliseconds for any size.

    Args:
        place: a run directory, or a single checkpoint.
        run_id: only checkpoints of this run count; ``None``: of any run.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    whole = (found.checkpoint for found in look_at(place, verify=False) if found.error is None)
    return max(
        (it.step for it in whole if it is not None and run_id in (None, it.run_id)), default=None
    )


def look_at(place: Path, *, verify: bool = True) -> list[FoundCheckpoint]:
    """Return :func:`survey` of a run directory, or ``place`` alone if it is a checkpoint.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    if not is_checkpoint(place):
        return survey(place, verify=verify)
    found = look(place, verify=verify)
    return [] if found is None else [found]


def is_checkpoint(path: Path) -> bool:
    """Return True if ``path`` is a checkpoint, whole or damaged, and not a run directory."""
    return is_step_name(path.name) or (path / MANIFEST).exists() or (path / STATE).exists()


def place_of(path: Path) -> Path:
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
        what,
        code="checkpoint-missing",
        where=str(path),
        hint=meant(path, _WHAT_TO_GIVE, _has_checkpoint),
    )


def _has_checkpoint(path: Path) -> bool:
    return bool(look_at(place_of(path), verify=False))


def all_in(place: Path, *, verify: bool) -> list[FoundCheckpoint]:
    """Return :func:`look_at` of ``place``.

    Raises:
        CheckpointError: there is no checkpoint, or a directory cannot be read.
    """
    if found := look_at(place, verify=verify):
        return found
    raise CheckpointError(
        "it holds no checkpoint", code="checkpoint-missing", where=str(place), hint=_WHAT_TO_GIVE
    )


# --- the checkpoint for --resume ------------------------------------------------------------------


def find(text: str, run_dir: Path, *, verify: bool = True) -> Checkpoint:
    """Return the checkpoint for ``--resume TEXT``: a checkpoint, or the latest one of the run
    directory ``TEXT``.

    Args:
        run_dir: directory of this run, for advice.
        verify: True to compare SHA-256 sums; else only sizes are compared, which takes
            milliseconds.

    Raises:
        CheckpointError: there is no checkpoint, or no whole one.
    """
    path = Path(os.path.expanduser(text))
    if path.is_file():
        raise _not_a_directory(path)
    if not path.is_dir():
        raise _lost(
            path,
            "there is no such directory",
            meant(path, _advice(run_dir), lambda near: find(str(near), run_dir, verify=False)),
            code="checkpoint-missing",
        )
    if is_checkpoint(path):
        return open_checkpoint(path, verify=verify)
    rejected: list[CheckpointError] = []
    if (found := latest(path, verify=verify, rejected=rejected)) is not None:
        return found
    if rejected:
        hint = _of_other_version(rejected) or _from_weights(path) or _advice(run_dir)
        raise _lost(
            path,
            f"no checkpoint in it is whole: {_told(rejected)}",
            hint,
            code="checkpoints-all-damaged",
        )
    if weights := [file for file in listed(path) if file.suffix == ".safetensors"]:
        raise _lost(
            path,
            "it holds weights, but no checkpoint",
            f"{_WEIGHTS_ONLY}: --resume-adapter-file {weights[0]}",
            code="checkpoint-missing",
        )
    raise _lost(path, "it holds no checkpoint", _advice(run_dir), code="checkpoint-missing")


def find_latest(
    run_dir: Path, *, verify: bool = True, rejected: list[CheckpointError] | None = None
) -> Checkpoint | None:
    """Return the checkpoint for ``--resume auto``, or ``None`` if the run directory has none.

    Args:
        verify: as in :func:`find`.
        rejected: receives the error of each checkpoint that was left out.

    Raises:
        CheckpointError: there are checkpoints, but none is whole; the user must decide whether to
            begin anew.
    """
    errors: list[CheckpointError] = []
    found = latest(run_dir, verify=verify, rejected=errors)
    if rejected is not None:
        rejected += errors
    if found is not None or not errors:
        return found
    kept = kept_aside(run_dir)
    advice = [
        f"go on from another one with --resume PATH{f' (there is {kept[0]})' if kept else ''}"
    ]
    advice += ["leave --resume out to begin anew: the damaged ones are set aside then, not removed"]
    advice += [text] if (text := _of_other_version(errors) or _from_weights(run_dir)) else []
    what = f"none of the checkpoints in {run_dir} is whole: {_told(errors)}"
    raise CheckpointError(
        what, code="checkpoints-all-damaged", where="--resume auto", hint="; or ".join(advice)
    )


def kept_aside(run_dir: Path) -> tuple[Path, int] | None:
    """Return the directory of checkpoints that was last set aside in ``run_dir``, and its last
    step.

    Directories without a whole checkpoint (by sizes) are skipped; ``None`` if no other is there.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    steps = ((path, quick_step(path)) for path in _aside(run_dir))
    return next(((path, step) for path, step in steps if step is not None), None)


def damage(error: CheckpointError) -> str:
    """Return the damaged file of a checkpoint, and the damage, in words."""
    file = Path(error.where or "")
    what = error.message.removeprefix("the checkpoint is damaged: ").removeprefix("the checkpoint ")
    return f"{file.parent.name}/{file.name}: {what}"


def _told(errors: Iterable[CheckpointError]) -> str:
    return "; ".join(damage(error) for error in errors)


def _aside(run_dir: Path) -> list[Path]:
    """Return the directories of checkpoints that were set aside here, the latest first."""
    found = [
        path
        for path in listed(run_dir)
        if path.name.startswith(f"{CHECKPOINTS}.") and path.is_dir()
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _of_other_version(errors: Iterable[CheckpointError]) -> str | None:
    """Return the remedy for the first checkpoint of another version; ``None`` without one."""
    return next((error.hint for error in errors if isinstance(error, OtherFormatError)), None)


def _from_weights(place: Path) -> str | None:
    """Return a remedy if a damaged checkpoint has whole weights, else ``None``."""
    for it in (found.checkpoint for found in survey(place, verify=False)):
        facts = it.files.get(WEIGHTS_FILE) if it else None
        with suppress(CheckpointError):
            if (
                it is not None
                and facts is not None
                and sum_of(it.path / WEIGHTS_FILE) == facts.sha256
            ):
                whole = f"begin a new run from the weights of step {it.step}, which are whole"
                return f"{whole}: --resume-adapter-file {it.path / WEIGHTS_FILE}"
    return None


def _lost(path: Path, what: str, hint: str, *, code: str) -> CheckpointError:
    return CheckpointError(what, code=code, where=f"--resume {path}", hint=hint)


def _not_a_directory(path: Path) -> CheckpointError:
    if (path.parent / MANIFEST).exists():
        hint = f"give the checkpoint's directory: --resume {path.parent}"
        if path.suffix == ".safetensors":
            hint += f"; {_WEIGHTS_ONLY}: --resume-adapter-file {path}"
    elif path.suffix == ".safetensors":
        hint = f"{_WEIGHTS_ONLY}: --resume-adapter-file {path}"
    else:
        hint = "give the directory of a checkpoint or of a run"
    return _lost(
        path, "this is a file, and a checkpoint is a directory", hint, code="checkpoint-missing"
    )


def _advice(run_dir: Path) -> str:
    """Return the checkpoints to resume from instead, in words."""
    there = [str(found.path) for found in survey(run_dir, verify=False) if found.error is None]
    if not there:
        return "give the directory of a checkpoint or of a run that has some"
    return f"there is {', '.join(there[:3])}; or --resume auto for the latest of --adapter-path {run_dir}"
