"""Removal of old checkpoints."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from allhands.checkpoints.finding import FoundCheckpoint, look, survey
from allhands.checkpoints.layout import CHECKPOINTS, removal_path
from allhands.checkpoints.reading import Checkpoint
from allhands.checkpoints.writing import others_in, sweep
from allhands.io.files import storage_error_of


def prune(
    run_dir: Path,
    keep_last: int,
    keep_every: int | None,
    protected: Collection[int],
    written: Checkpoint | None = None,
) -> list[Path]:
    """Remove checkpoints of steps that need not be kept.

    Directories with foreign files and links are never touched. The newest whole checkpoint stays,
    and so do all that are newer than the oldest that ``keep_last`` keeps.

    Args:
        keep_last: number of whole checkpoints to keep, at least 1.
        keep_every: also keep checkpoints whose iteration is a multiple of this number.
        protected: steps whose checkpoints must stay.
        written: the checkpoint just written, which stays and is not read again.

    Returns:
        The removed directories.

    Raises:
        StorageError: a checkpoint cannot be removed.
        CheckpointError: a directory cannot be read.
    """
    assert keep_last >= 1
    directory = run_dir / CHECKPOINTS
    try:
        for parent in (directory, run_dir):
            sweep(parent)
        seen = [found for found in survey(run_dir, verify=False) if found.path.parent == directory]
        whole = [
            found.checkpoint
            for found in seen
            if found.checkpoint is not None and found.error is None
        ]
        old = _unneeded(
            seen, whole[:keep_last], keep_every, {*protected, *([written.step] if written else ())}
        )
        newest = _newest_whole(whole, written) if old else None
        removed = [it.path for it in old if newest is not None and it.path != newest.path]
        for path in removed:
            _remove(path)
    except OSError as error:
        raise storage_error_of(error, directory) from error
    return removed


def _unneeded(
    seen: Sequence[FoundCheckpoint],
    last: Sequence[Checkpoint],
    keep_every: int | None,
    kept: Collection[int],
) -> list[Checkpoint]:
    """Return the checkpoints older than the ``last`` ones that no other rule keeps.

    ``kept``: steps whose checkpoints must stay.
    """
    oldest = min((it.step for it in last), default=0)
    old = [
        it
        for found in seen
        if (it := found.checkpoint) and it.step < oldest and it.step not in kept
    ]
    ours = [it for it in old if not it.path.is_symlink() and not others_in(it.path, it.files)]
    return [it for it in ours if not (keep_every and it.iteration % keep_every == 0)]


def _newest_whole(candidates: list[Checkpoint], written: Checkpoint | None) -> Checkpoint | None:
    """Return the first candidate whose SHA-256 sums are right; ``None`` without one."""
    for it in candidates:
        if written is not None and it.digest == written.digest:
            return it
        verified = look(it.path, verify=True)
        if verified is not None and verified.error is None:
            return it
    return None


def _remove(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that under its own name it is whole or absent."""
    hidden = removal_path(path, secrets.token_hex(4))
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
