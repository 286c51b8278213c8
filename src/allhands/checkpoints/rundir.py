"""Handling of an earlier run's files in a run's directory: they are set aside or continued, never
removed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from allhands.checkpoints.finding import quick_step, survey
from allhands.checkpoints.format import WEIGHTS_FILE
from allhands.checkpoints.layout import (
    BEST,
    CHECKPOINTS,
    RUN_NAME,
    checkpoint_path,
    entries,
    run_name,
)
from allhands.checkpoints.resuming import Restored
from allhands.data.templates import TEMPLATE_FILE
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import hand_out_bytes, hand_out_json, votes
from allhands.errors import AllhandsError, CheckpointError
from allhands.io.files import make_directory, storage_error, storage_error_of, write_whole
from allhands.io.names import MEMORY_FILE, PLOT_FILE
from allhands.io.staging import publish, staging
from allhands.model.adapters import CONFIG_FILE
from allhands.model.fresh import MARK
from allhands.model.load import BEST_MODEL, MODEL
from allhands.observe.metrics import ANSWERS_FILE, METRICS_FILE

# Files and directories of a run that are set aside, under their own names with a number. Numbered
# adapters are moved into one directory.
_KEPT = (CHECKPOINTS, BEST, METRICS_FILE, ANSWERS_FILE, PLOT_FILE, MEMORY_FILE, MODEL, BEST_MODEL)
_NUMBERED_ADAPTERS = "adapters"
_PIECE_BYTES = 4 << 20
_NUMBERED_ADAPTER = re.compile(rf"(\d{{7,}})_{re.escape(WEIGHTS_FILE)}")


def make_room(directory: Path, restored: Restored | None, run_id: str) -> list[str]:
    """Prepare ``directory`` for this run's files; return notes for the user.

    A new run sets the files of an earlier run aside, under a number. A run that goes on from a
    checkpoint in another directory copies that run's curve and best adapter. If the directory
    already has this run's name, as in a restart, nothing is done.

    Raises:
        StorageError: the files cannot be moved or copied.
    """
    try:
        if run_name(directory) == run_id:
            return []
        notes = _make_room(directory, restored)
    except OSError as error:
        raise storage_error(directory, error) from None
    write_whole(
        directory / RUN_NAME, lambda draft: draft.write_text(run_id, encoding="utf-8"), private=True
    )
    return notes


def _make_room(directory: Path, restored: Restored | None) -> list[str]:
    if restored is not None and restored.own:
        return _leave_branch(directory, restored)
    aside = _set_all_aside(directory)
    if restored is not None:
        _bring_along(*run_of(restored), directory, restored)
    if not aside:
        return []
    note = f"what an earlier run left in {directory} is kept as {', '.join(path.name for path in aside)}"
    checkpoints = next((path for path in aside if path.name.startswith(CHECKPOINTS)), None)
    if checkpoints is None:
        return [note]
    if quick_step(checkpoints) is None:
        return [f"{note}; none of its checkpoints is whole"]
    return [f"{note}; to go on from it: --resume {checkpoints}"]


def _set_all_aside(directory: Path) -> list[Path]:
    """Set the files of an earlier run aside under one number; return their new places.

    The adapter to use stays where it is until the new run writes its own. If no checkpoint holds
    it, it also gets a second name among the files set aside.
    """
    number = _free_number(directory)
    adapter = [] if (directory / CHECKPOINTS).exists() else _only_adapter(directory)
    there = [name for name in _KEPT if _is_of_a_run(directory / name)]
    moves = {directory / name: directory / _with_number(name, number) for name in there}
    numbered = _numbered_adapters(directory)
    for path, kept in moves.items():
        path.rename(kept)
    if not numbered and not adapter:
        return [*moves.values()]
    place = _move_adapters(numbered, directory, number)
    for file in adapter:
        try:
            os.link(file, place / file.name)
        except OSError:  # not every file system can
            shutil.copy2(file, place / file.name)
    return [*moves.values(), place]


def _is_of_a_run(path: Path) -> bool:
    # A directory called model is a run's only with the mark.
    return path.exists() and (path.name not in (MODEL, BEST_MODEL) or (path / MARK).is_file())


def _only_adapter(directory: Path) -> list[Path]:
    """Return the files of the adapter to use, if its weights have no second name yet."""
    weights = directory / WEIGHTS_FILE
    if not weights.is_file() or weights.stat().st_nlink > 1:
        return []
    return [
        file
        for file in (weights, directory / CONFIG_FILE, directory / TEMPLATE_FILE)
        if file.is_file()
    ]


def _move_adapters(files: list[Path], directory: Path, number: int) -> Path:
    """Move adapters into the numbered directory; return that directory."""
    place = make_directory(directory / _with_number(_NUMBERED_ADAPTERS, number), private=True)
    for file in files:
        file.rename(place / file.name)
    return place


def _numbered_adapters(directory: Path, beyond: int = -1) -> list[Path]:
    """Return the adapters named after iterations above ``beyond``."""
    found = [(path, _NUMBERED_ADAPTER.fullmatch(path.name)) for path in entries(directory)]
    return [path for path, match in found if match and int(match[1]) > beyond and path.is_file()]


def _with_number(name: str, number: int) -> str:
    path = Path(name)
    return f"{path.stem}.{number}{path.suffix}"


def _free_number(directory: Path) -> int:
    """Return the highest number of files set aside, plus 1."""
    taken = [
        number for name in (*_KEPT, _NUMBERED_ADAPTERS) for number in _numbers_of(directory, name)
    ]
    return max(taken, default=0) + 1


def _numbers_of(directory: Path, name: str) -> list[int]:
    """Return the numbers under which ``name`` was set aside."""
    wanted = Path(name)
    pattern = re.compile(rf"{re.escape(wanted.stem)}\.(\d+){re.escape(wanted.suffix)}")
    return [int(match[1]) for path in entries(directory) if (match := pattern.fullmatch(path.name))]


def kept_as(directory: Path, file: Path) -> Path | None:
    """Return the place to which a file of the run directory was last set aside; ``None`` if it
    never was.
    """
    try:
        first, *rest = Path(os.path.abspath(file)).relative_to(os.path.abspath(directory)).parts
        if _NUMBERED_ADAPTER.fullmatch(first):
            first, rest = _NUMBERED_ADAPTERS, [first]
        numbers = sorted(_numbers_of(directory, first), reverse=True)
    except (ValueError, OSError):  # it is not in the directory, or nothing can be read
        return None
    places = (directory / _with_number(first, number) for number in numbers)
    return next((kept for place in places if (kept := place.joinpath(*rest)).is_file()), None)


def _leave_branch(directory: Path, restored: Restored) -> list[str]:
    """Set aside the checkpoints after the restored one; return a note.

    A restart would take them for this run's latest.
    """
    step = restored.step
    later = [
        found
        for found in survey(directory, verify=False)
        if found.checkpoint and found.checkpoint.step > step
    ]
    if not later:
        return []
    number = _free_number(directory)
    aside = make_directory(directory / _with_number(CHECKPOINTS, number), private=True)
    for found in later:
        found.path.rename(aside / found.path.name)
        if found.path == directory / BEST and _is_of_a_run(model := directory / BEST_MODEL):
            model.rename(aside / model.name)
    if numbered := _numbered_adapters(directory, beyond=int(restored.state["iteration"])):
        _move_adapters(numbered, directory, number)
    return [f"checkpoints beyond step {step} are kept in {aside}"]


def run_of(restored: Restored) -> tuple[Path, str]:
    """Return the run directory of a checkpoint, and the suffix (".1") with which it was set aside,
    or "".
    """
    place = Path(restored.place)
    kind, _, number = place.parent.name.partition(".")
    if kind == CHECKPOINTS:
        return place.parent.parent, f".{number}" if number else ""
    return place.parent, place.name.removeprefix(BEST)


def _bring_along(source: Path, number: str, directory: Path, restored: Restored) -> None:
    """Copy the curve up to the checkpoint, and the best adapter so far, which may stay the best."""
    usual = Path(METRICS_FILE)
    metrics = source / f"{usual.stem}{number}{usual.suffix}"
    if metrics.is_file():
        with metrics.open("rb") as stream:
            content = stream.read(int(restored.state.get("metrics_bytes", 0)))
        write_whole(
            directory / METRICS_FILE, lambda draft: draft.write_bytes(content), private=True
        )
    for name in (BEST, BEST_MODEL):
        # A best that was set aside with later checkpoints lies beside the restored one.
        for best in (source / f"{name}{number}", Path(restored.place).parent / name):
            if best.is_dir() and best != directory / name:
                with staging(directory / name, private=True) as staged:
                    shutil.copytree(best, staged, dirs_exist_ok=True)
                    publish(staged, directory / name, private=True)
                break


def share_history(
    communicator: Communicator,
    directory: Path,
    restored: Restored | None,
    run_id: str,
    newcomer: bool,
) -> None:
    """Give the run's curve and best adapter to ranks that begin to keep files in a resumed run.

    So each rank that keeps files has all of them. Files of another run in its directory are set
    aside. All ranks call this together, before rank 0 adds to its curve.

    Args:
        newcomer: whether this rank keeps files, and is not rank 0.

    Raises:
        CheckpointError: this rank's directory cannot be read.
        StorageError: the files cannot be written. In both cases the other ranks have received
            theirs.
    """
    if restored is None or communicator.size == 1:
        return
    lacks = newcomer and not _has_kept(directory, restored)
    if votes(communicator, lacks):
        _hand_out_history(communicator, directory, {run_id, restored.run_id}, lacks=lacks)


def _hand_out_history(
    communicator: Communicator, directory: Path, runs: set[str], *, lacks: bool
) -> None:
    leads, staged = communicator.rank == 0, directory / BEST
    files = [directory / METRICS_FILE, *entries(staged)] if leads else []
    sizes = [
        (file.parent == staged, file.name, file.stat().st_size) for file in files if file.is_file()
    ]
    with ExitStack() as stack:

        def prepare() -> None:
            nonlocal staged
            _make_way(directory, runs)
            staged = stack.enter_context(staging(staged, private=True))

        # An error is raised only after the others have their files: all ranks take part in the
        # exchange.
        problem = _error_of(prepare, directory) if lacks else None
        for of_best, name, size in hand_out_json(communicator, sizes):
            place = staged if of_best else directory
            pieces = hand_out_bytes(communicator, _read(place / name) if leads else (), size)
            if lacks and problem is None:
                problem = _error_of(partial(_write, place, name, pieces), directory)
            deque(pieces, maxlen=0)  # receives the pieces that were not written
        if problem is not None:
            raise problem
        if lacks and any(staged.iterdir()):
            publish(staged, directory / BEST, private=True)


def _error_of(action: Callable[[], None], directory: Path) -> AllhandsError | None:
    try:
        action()
    except AllhandsError as error:
        return error
    except OSError as error:
        return storage_error_of(error, directory)
    return None


def _has_kept(directory: Path, restored: Restored) -> bool:
    """Return True if this rank has the restored checkpoint itself, and so the files before it."""
    kept = checkpoint_path(directory, restored.step)
    try:
        found = [
            one.checkpoint
            for one in survey(directory, verify=False)
            if one.path == kept and one.error is None
        ]
    except CheckpointError:  # the directory cannot be read
        return False
    return (directory / METRICS_FILE).exists() and any(
        one and one.run_id == restored.run_id for one in found
    )


def _make_way(directory: Path, runs: set[str]) -> None:
    there = {
        found.checkpoint.run_id for found in survey(directory, verify=False) if found.checkpoint
    }
    if there and there.isdisjoint(runs):
        _set_all_aside(directory)


def _read(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece


def _write(directory: Path, name: str, pieces: Iterable[memoryview]) -> None:
    def fill(draft: Path) -> None:
        with draft.open("wb") as stream:
            stream.writelines(pieces)

    make_directory(directory, private=True)
    write_whole(directory / name, fill, private=True)
