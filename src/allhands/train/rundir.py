"""What an earlier run left in a run's directory: set aside, or gone on from. Nothing of it is removed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np

from allhands.arrays import hand_out, hand_out_json
from allhands.checkpoints import BEST, CHECKPOINTS, checkpoint_path, survey
from allhands.distributed.backend import Communicator
from allhands.files import make_directory, set_aside, storage_error, unused_name, write_whole
from allhands.metrics import METRICS_FILE
from allhands.staging import publish, staging
from allhands.train.restore import Restored
from allhands.trees import numbers

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
    aside = _set_all_aside(directory)[CHECKPOINTS]
    if source is not None and restored is not None:
        _bring_along(source, number, directory, restored)
    return [f"an earlier run's checkpoints are kept in {aside}; to go on from them: --resume {aside}"] if aside else []


def _set_all_aside(directory: Path) -> dict[str, Path | None]:
    """Curve, best adapter and checkpoints of an earlier run: where each is now, if there was one."""
    return {name: set_aside(directory / name) for name in (METRICS_FILE, BEST, CHECKPOINTS)}


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


def share_history(
    communicator: Communicator, directory: Path, restored: Restored | None, run_id: str, newcomer: bool
) -> None:
    """Give ranks that begin to keep the files of a run which has begun without them its curve and its best adapter.

    So whoever keeps files can lose all others. What lies there of another run is set aside. Called on all ranks
    together, before one of them adds to its curve.

    Args:
        newcomer: whether this rank keeps files, and is not rank 0.

    Raises:
        StorageError: they cannot be written.
    """
    if restored is None or communicator.size == 1:
        return
    lacks = newcomer and not _has_kept(directory, restored)
    if not numbers(communicator.all_sum(mx.array([float(lacks)])))[0]:
        return
    try:
        if lacks:
            _make_way(directory, {run_id, restored.run_id})
        curve = _handed_out(communicator, directory, [METRICS_FILE])
        best = _handed_out(communicator, directory / BEST, _names(directory / BEST))
        if lacks:
            _write(directory, curve, best)
    except OSError as error:
        raise storage_error(Path(error.filename or directory), error) from error


def _has_kept(directory: Path, restored: Restored) -> bool:
    """Whether this rank wrote the checkpoint itself: then it was given, or wrote, what was before it."""
    kept = checkpoint_path(directory, int(restored.state["iteration"]))
    found = [one.checkpoint for one in survey(directory, verify=False) if one.path == kept and one.error is None]
    return (directory / METRICS_FILE).exists() and any(one and one.run_id == restored.run_id for one in found)


def _make_way(directory: Path, runs: set[str]) -> None:
    there = {found.checkpoint.run_id for found in survey(directory, verify=False) if found.checkpoint}
    if there and there.isdisjoint(runs):
        _set_all_aside(directory)


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir() if file.is_file()) if directory.is_dir() else []


def _handed_out(communicator: Communicator, directory: Path, names: list[str]) -> dict[str, bytes]:
    """Rank 0's files of these names, as far as there are any; called on all ranks together."""
    names = hand_out_json(communicator, [name for name in names if (directory / name).is_file()])
    contents: dict[str, bytes] = {}
    for name in names:
        own = {name: mx.array(np.fromfile(directory / name, np.uint8))} if communicator.rank == 0 else None
        contents[name] = np.asarray(hand_out(communicator, own)[name]).tobytes()
    return contents


def _write(directory: Path, curve: Mapping[str, bytes], best: Mapping[str, bytes]) -> None:
    make_directory(directory, private=True)
    for name, content in curve.items():
        write_whole(directory / name, lambda draft, content=content: draft.write_bytes(content), private=True)
    if best:
        with staging(directory / BEST, private=True) as staged:
            for name, content in best.items():
                (staged / name).write_bytes(content)
            publish(staged, directory / BEST, private=True)
