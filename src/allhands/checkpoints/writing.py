"""Writing of a checkpoint: files are written and synced in a directory beside its place, the
manifest last, and then the directory is renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allhands.checkpoints.format import (
    FORMAT,
    LEFT_FILE,
    StoredArray,
    StoredFile,
    StoredSlice,
    array_name,
    dumped,
    manifest_text,
    merged,
)
from allhands.checkpoints.layout import MANIFEST, STATE, entries, is_plain, leftovers
from allhands.checkpoints.reading import Checkpoint, described
from allhands.errors import CheckpointError, StorageError
from allhands.io.files import make_directory, storage_error, sync
from allhands.io.regions import everything
from allhands.io.staging import publish, staging
from allhands.io.tensors import Tensor, safetensors_pieces

_Pieces = Iterable[bytes | memoryview]
_OF_RANK = re.compile(r"-\d+(\.[a-z]+)$")


@dataclass(frozen=True)
class WrittenPart:
    """Files that another writer has put into the directory of a :class:`CheckpointDraft`, and the
    slices of arrays in them.
    """

    files: dict[str, StoredFile]
    arrays: Sequence[StoredArray]


@dataclass(frozen=True)
class CheckpointDraft:
    """A checkpoint in the making: a directory beside ``target``; other writers may put files into
    it.
    """

    target: Path
    directory: Path

    def publish(
        self,
        step: int,
        run_id: str,
        state: Mapping[str, Any],
        tensors: Mapping[str, Sequence[Tensor]],
        texts: Mapping[str, str] | None = None,
        progress: Callable[[], None] = lambda: None,
        parts: Callable[[], Iterable[WrittenPart]] = tuple,
    ) -> Checkpoint:
        """Write the files, the manifest last, and put the checkpoint in its place.

        Args:
            parts: returns the parts of other writers, once they are written. The other arguments
                are those of :func:`write_checkpoint`.
        """
        contents = _contents(state, tensors, texts or {})
        _refuse_others(self.target, contents)
        arrays = [
            _whole_or_part(file, tensor) for file, listed in tensors.items() for tensor in listed
        ]
        files = {
            name: write_file(self.directory / name, pieces, progress)
            for name, pieces in contents.items()
        }
        for part in parts():
            files |= part.files
            arrays += part.arrays
        whole = merged(arrays)
        for array in whole:
            array.check(files)
        known = json.loads(dumped(state))
        # A user's own loop without iterations counts only steps.
        given = known.get("iteration")
        iteration: int = given if type(given) is int else step
        body: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "iteration": iteration,
            "run_id": run_id,
        }
        body["time"] = round(time.time(), 3)
        described = {
            "files": {name: vars(file) for name, file in files.items()},
            "arrays": [array.to_json() for array in whole],
        }
        written = write_file(self.directory / MANIFEST, [manifest_text(body | described)], progress)
        publish(self.directory, self.target, private=True)
        facts = (run_id, body["time"], known, files, tuple(whole), written.sha256)
        return Checkpoint(self.target, step, iteration, *facts)


@contextmanager
def drafting(target: Path) -> Generator[CheckpointDraft]:
    """Yield a draft, which is removed at the end unless it was published.

    Leftovers of killed writers are removed first.

    Raises:
        StorageError: the draft cannot be written. ``target`` is unchanged, and nothing is left.
    """
    try:
        if not target.parent.exists():
            make_directory(target.parent, private=True)
            sync(target.parent.parent)
        sweep(target.parent)
        with staging(target, private=True) as staged:
            yield CheckpointDraft(target, staged)
    except (OSError, StorageError) as error:
        with suppress(OSError):
            sweep(target.parent)
        # The temporary name has no meaning for the user.
        told = error if isinstance(error, StorageError) else storage_error(target, error)
        raise StorageError(
            told.message, code=told.code, where=str(target), hint=told.hint
        ) from error


def write_checkpoint(
    target: Path,
    step: int,
    run_id: str,
    state: Mapping[str, Any],
    tensors: Mapping[str, Sequence[Tensor]],
    texts: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Write a checkpoint, and replace the one at ``target`` if there is one.

    A kill at any time leaves the old checkpoint or the new one, whole. Only the owner of the files
    may read them.

    Args:
        target: directory of the checkpoint; no other process may write checkpoints beside it.
        step: number of optimizer updates made.
        run_id: identifier of the run.
        state: JSON values without NaN and infinity. An ``iteration`` in it is put into the
            manifest, too.
        tensors: arrays by file name; an array's name in the checkpoint is made of both names.
        texts: contents of further files, by name.

    Raises:
        StorageError: the checkpoint cannot be written, or ``target`` holds foreign files. The old
            content is untouched, and nothing else is left.
        ValueError: the arguments do not make a valid checkpoint.
        TypeError: ``state`` holds values that are not JSON's.
    """
    with drafting(target) as draft:
        return draft.publish(step, run_id, state, tensors, texts)


def _whole_or_part(file: str, tensor: Tensor) -> StoredArray:
    shape, region = tensor.part or (tensor.shape, everything(tensor.shape))
    slices = (StoredSlice(file, tensor.name, region),)
    return StoredArray(array_name(file, tensor.name), shape, tensor.dtype, slices)


def sweep(directory: Path) -> None:
    """Remove leftovers of killed writers and removals, and restore checkpoints that an exchange had
    moved.

    Raises:
        OSError: the directory cannot be read.
    """
    left = leftovers(entries(directory))
    for path in [path for path, _, kind in left if kind == "removed"]:
        shutil.rmtree(path, ignore_errors=True)
    for name in {name for _, name, kind in left if kind != "removed"}:
        # Entering staging removes or restores leftovers, but not those of a living writer.
        with suppress(StorageError), staging(directory / name, private=True):
            pass


def others_in(directory: Path, files: Collection[str]) -> list[str]:
    """Return foreign names in a checkpoint's directory, without hidden files of the system.

    Raises:
        OSError: the directory cannot be read.
    """
    names = [path.name for path in entries(directory)]
    return [
        name
        for name in names
        if name not in files and name != MANIFEST and not name.startswith(".")
    ]


def _contents(
    state: Mapping[str, Any], tensors: Mapping[str, Sequence[Tensor]], texts: Mapping[str, str]
) -> dict[str, _Pieces]:
    """Return the content of each file, in pieces, by its name (ValueError for invalid names)."""
    names = [*tensors, *texts, STATE]
    wrong = [
        name for name in names if not is_plain(name) or name == MANIFEST or names.count(name) > 1
    ]
    if wrong:
        raise ValueError(f"{wrong[0]!r} cannot be a file of a checkpoint, or not twice")
    contents: dict[str, _Pieces] = {
        name: safetensors_pieces(arrays) for name, arrays in tensors.items()
    }
    contents |= {name: [text.encode()] for name, text in texts.items()}
    return contents | {STATE: [dumped(state)]}


def write_file(path: Path, pieces: _Pieces, progress: Callable[[], None]) -> StoredFile:
    """Write and sync a new private file.

    Raises:
        OSError: the file exists or cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            progress()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return StoredFile(size, digest.hexdigest())


def _refuse_others(target: Path, names: Collection[str]) -> None:
    """Refuse a target with foreign files (StorageError): a directory is replaced as a whole."""
    known = {*names, LEFT_FILE}  # LEFT_FILE exists only as files of ranks
    with suppress(CheckpointError):
        known |= set(described(target).files)
    others = [name for name in others_in(target, known) if _OF_RANK.sub(r"\1", name) not in known]
    if others:
        raise StorageError(
            f"cannot be replaced by a checkpoint, which {others[0]} in it does not belong to",
            code="checkpoint-place-foreign",
            where=str(target),
            hint="move that to another place",
        )
