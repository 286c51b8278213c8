"""What an earlier run left in a run's directory: set aside, or gone on from. Nothing of it is removed."""

from __future__ import annotations

import shutil
from pathlib import Path

from allhands.checkpoints import BEST, CHECKPOINTS, survey
from allhands.files import make_directory, set_aside, storage_error, unused_name, write_whole
from allhands.metrics import METRICS_FILE
from allhands.staging import publish, staging
from allhands.train.restore import Restored

# Holds the name of the run whose files these are.
_NAME_FILE = ".run"


def make_room(directory: Path, restored: Restored | None, run_id: str) -> list[str]:
    """Prepare ``directory`` for this run's files; what a person should know.

    A new run sets an earlier one's aside, under a number. One that goes on from a checkpoint elsewhere brings that
    run's curve and best adapter along. A restart finds that this has been done: the directory has the run's name.

    Raises:
        StorageError: it cannot be done.
    """
    name = directory / _NAME_FILE
    try:
        if name.is_file() and name.read_text(encoding="utf-8") == run_id:
            return []
        notes = _make_room(directory, restored)
    except (OSError, UnicodeDecodeError) as error:
        raise storage_error(directory, error if isinstance(error, OSError) else OSError(str(error))) from None
    write_whole(name, lambda draft: draft.write_text(run_id, encoding="utf-8"), private=True)
    return notes


def _make_room(directory: Path, restored: Restored | None) -> list[str]:
    source, number = run_of(restored) if restored is not None else (None, "")
    if restored is not None and source == directory.resolve() and not number:
        return _leave_branch(directory, restored)
    moved = {name: set_aside(directory / name) for name in (METRICS_FILE, BEST, CHECKPOINTS)}
    if source is not None and restored is not None:
        _bring_along(source, number, directory, restored)
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


def run_of(restored: Restored) -> tuple[Path, str]:
    """The directory of the run that a checkpoint belongs to, and the number (".1") under which it was set aside."""
    place = Path(restored.place)
    kind, _, number = place.parent.name.partition(".")
    if kind == CHECKPOINTS:
        return place.parent.parent, f".{number}" if number else ""
    return place.parent, place.name.removeprefix(BEST)


def _bring_along(source: Path, number: str, directory: Path, restored: Restored) -> None:
    """The curve up to the checkpoint, and the best adapter so far, which may stay the best."""
    usual = Path(METRICS_FILE)
    metrics = source / f"{usual.stem}{number}{usual.suffix}"
    if metrics.is_file():
        with metrics.open("rb") as stream:
            content = stream.read(int(restored.state.get("metrics_bytes", 0)))
        write_whole(directory / METRICS_FILE, lambda draft: draft.write_bytes(content), private=True)
    # A branch that was left took its best along.
    for best in (source / f"{BEST}{number}", Path(restored.place).parent / BEST):
        if best.is_dir() and best != directory / BEST:
            with staging(directory / BEST, private=True) as staged:
                shutil.copytree(best, staged, dirs_exist_ok=True)
                publish(staged, directory / BEST, private=True)
            return
