"""The checkpoints of a run: which are whole, which is the latest, which may go."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

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
    removal_path,
)
from allhands.checkpoints.reading import Checkpoint, check_sizes, described, with_state
from allhands.checkpoints.writing import others_in, sweep
from allhands.errors import CheckpointError
from allhands.files import storage_error_of


@dataclass(frozen=True)
class Found:
    """What lies at a place where a checkpoint should.

    Attributes:
        path: its directory.
        checkpoint: what its manifest says; ``None`` if that cannot be read.
        error: what is wrong; ``None`` if it is whole.
    """

    path: Path
    checkpoint: Checkpoint | None
    error: CheckpointError | None


def survey(run_dir: Path, *, verify: bool = True) -> list[Found]:
    """Everything in a run directory that is, or should be, a checkpoint, the last step first.

    Args:
        verify: whether to compute sums; else sizes are compared, and ``state`` is left empty.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    places = [*checkpoints_in(run_dir), *([best] if (best := best_in(run_dir)) else ()), *_set_aside(run_dir)]
    found = [look for path in places if (look := _look(path, verify=verify)) is not None]
    return sorted(found, key=_rank, reverse=True)


def _set_aside(run_dir: Path) -> list[Path]:
    """Checkpoints that were about to be replaced when the process was killed; the next writer puts them back."""
    left = [found for parent in sorted({holder(run_dir), run_dir}) for found in leftovers(listed(parent))]
    return [
        path
        for path, name, kind in left
        if kind == "replaced" and (path / MANIFEST).exists() and not path.with_name(name).exists()
    ]


def _rank(found: Found) -> tuple[int, bool, float]:
    """The later step counts more; of copies, the one among the checkpoints."""
    if (it := found.checkpoint) is None:
        return (-1, False, 0.0)
    return (it.step, is_step_name(it.path.name), it.time)


def _look(path: Path, *, verify: bool) -> Found | None:
    """What is at ``path``: ``None`` if it is removed meanwhile, what replaces it if it is replaced meanwhile."""
    while (before := _identity(path)) is not None:
        found = None
        try:
            found = described(path)
            check_sizes(found)
            return Found(path, with_state(found, verify=True) if verify else found, None)
        except CheckpointError as error:
            if _identity(path) == before:
                return Found(path, found, error)
    return None


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    # The number of a directory that is gone is soon given to another.
    return facts.st_dev, facts.st_ino, facts.st_ctime_ns


# --- choosing ----------------------------------------------------------------------------------------


def latest(
    run_dir: Path,
    *,
    run_id: str | None = None,
    verify: bool = True,
    rejected: list[CheckpointError] | None = None,
) -> Checkpoint | None:
    """The whole checkpoint of the highest step, of ``run_id`` if that is given; ``best`` counts like the others.

    Args:
        verify: whether to compute sums; else sizes are compared, and ``state`` is left empty.
        rejected: receives what is wrong with each one that was passed over, of a higher step or of none to be read.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    errors = [] if rejected is None else rejected
    seen = [found for found in survey(run_dir, verify=False) if run_id is None or _may_be_of(run_id, found)]
    errors += [found.error for found in seen if found.checkpoint is None and found.error is not None]
    for found in seen:
        if found.checkpoint is None:
            break
        verified = _look(found.path, verify=True) if verify and not found.error else found
        if verified is not None and verified.error is None:
            return verified.checkpoint
        if verified is not None and verified.error is not None:
            errors.append(verified.error)
    return None


def _may_be_of(run_id: str, found: Found) -> bool:
    return found.checkpoint is None or found.checkpoint.run_id == run_id


def quick_step(place: Path, run_id: str | None = None) -> int | None:
    """The highest step of ``run_id``, or of any run, by manifests and sizes alone: milliseconds, whatever the size.

    Args:
        place: a run directory, or a single checkpoint.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    whole = (found.checkpoint for found in look_at(place, verify=False) if found.error is None)
    return max((it.step for it in whole if it is not None and run_id in (None, it.run_id)), default=None)


def look_at(place: Path, *, verify: bool = True) -> list[Found]:
    """What :func:`survey` finds in a run directory, or the one checkpoint that ``place`` is.

    Raises:
        CheckpointError: a directory cannot be read.
    """
    if not is_checkpoint(place):
        return survey(place, verify=verify)
    found = _look(place, verify=verify)
    return [] if found is None else [found]


def is_checkpoint(path: Path) -> bool:
    """Whether the directory ``path`` is, or should be, a checkpoint itself and not a directory with some."""
    return is_step_name(path.name) or (path / MANIFEST).exists() or (path / STATE).exists()


# --- removing ----------------------------------------------------------------------------------------


def prune(
    run_dir: Path,
    keep_last: int,
    keep_every: int | None,
    protected: Collection[int],
    written: Checkpoint | None = None,
) -> list[Path]:
    """Remove the checkpoints of steps that need not be kept; what is not a checkpoint of ours is never touched.

    The newest whole one always stays, and what is newer than the oldest that ``keep_last`` keeps.

    Args:
        keep_last: how many whole ones to keep, at least 1.
        keep_every: also keep those whose step is a multiple of it.
        protected: steps that must stay.
        written: the one just written, which stays and need not be read again.

    Returns:
        What was removed.

    Raises:
        StorageError: one cannot be removed.
        CheckpointError: a directory cannot be read.
    """
    assert keep_last >= 1
    directory = run_dir / CHECKPOINTS
    try:
        for parent in (directory, run_dir):
            sweep(parent)
        seen = [found for found in survey(run_dir, verify=False) if found.path.parent == directory]
        whole = [found.checkpoint for found in seen if found.checkpoint is not None and found.error is None]
        oldest = min((it.step for it in whole[:keep_last]), default=0)
        kept = {*protected, *([written.step] if written else ())}
        old = [
            it
            for found in seen
            if (it := found.checkpoint) is not None
            if it.step < oldest and it.step not in kept and not (keep_every and it.step % keep_every == 0)
            if not found.path.is_symlink() and not others_in(found.path, it.files)
        ]
        newest = _newest_whole(whole, written) if old else None
        removed = [it.path for it in old if newest is not None and it.path != newest.path]
        for path in removed:
            _remove(path)
    except OSError as error:
        raise storage_error_of(error, directory) from error
    return removed


def _newest_whole(candidates: list[Checkpoint], written: Checkpoint | None) -> Checkpoint | None:
    """The first one whose sums are right too."""
    for it in candidates:
        if written is not None and it.digest == written.digest:
            return it
        verified = _look(it.path, verify=True)
        if verified is not None and verified.error is None:
            return it
    return None


def _remove(path: Path) -> None:
    """Under its name it is whole or absent, also now."""
    hidden = removal_path(path, secrets.token_hex(4))
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
