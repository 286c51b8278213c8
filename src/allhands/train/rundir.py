"""What an earlier run left in a run's directory: set aside, or gone on from. Nothing of it is removed."""

from __future__ import annotations

import shutil
from pathlib import Path

from allhands.checkpoints import BEST, CHECKPOINTS, survey
from allhands.files import make_directory, set_aside, storage_error, unused_name, write_whole
from allhands.metrics import METRICS_FILE
from allhands.staging import publish, staging
from allhands.train.restore import Restored


def make_room(directory: Path, restored: Restored | None, attempt: int) -> list[str]:
    """Prepare ``directory`` for this start's files; what a person should know.

    A new run sets an earlier one's aside, under a number. One that goes on from a checkpoint elsewhere brings that
    run's curve and best adapter along. A restart finds its own.

    Raises:
        StorageError: it cannot be done.
    """
    source = run_of(restored) if restored is not None else None
    if attempt > 1:
        return []
    try:
        if restored is not None and source == directory.resolve():
            return _leave_branch(directory, restored)
        moved = {name: set_aside(directory / name) for name in (METRICS_FILE, BEST, CHECKPOINTS)}
        if source is not None and restored is not None:
            _bring_along(source, directory, int(restored.state.get("metrics_bytes", 0)))
    except OSError as error:
        raise storage_error(Path(error.filename or directory), error) from None
    aside = moved[CHECKPOINTS]
    return [f"an earlier run's checkpoints are kept in {aside}; to go on from them: --resume {aside}"] if aside else []


def _leave_branch(directory: Path, restored: Restored) -> list[str]:
    """Set aside what lies beyond the checkpoint: a restart would take it for the latest of this run."""
    step = int(restored.state["iteration"])
    later = [found for found in survey(directory, verify=False) if found.checkpoint and found.checkpoint.step > step]
    if not later:
        return []
    aside = make_directory(unused_name(directory / CHECKPOINTS), private=True)
    for found in later:
        found.path.rename(aside / found.path.name)
    return [f"checkpoints beyond batch {step} are kept in {aside}"]


def run_of(restored: Restored) -> Path:
    """The directory of the run that a checkpoint belongs to."""
    place = Path(restored.place)
    return place.parent.parent if place.parent.name.split(".")[0] == CHECKPOINTS else place.parent


def _bring_along(source: Path, directory: Path, metrics_bytes: int) -> None:
    """The curve up to the checkpoint, and the best adapter so far, which may stay the best."""
    metrics, best = source / METRICS_FILE, source / BEST
    if metrics.is_file():
        with metrics.open("rb") as stream:
            content = stream.read(metrics_bytes)
        write_whole(directory / METRICS_FILE, lambda draft: draft.write_bytes(content), private=True)
    if best.is_dir():
        with staging(directory / BEST, private=True) as staged:
            shutil.copytree(best, staged, dirs_exist_ok=True)
            publish(staged, directory / BEST, private=True)
