"""Reading of one checkpoint: its manifest, its state, and the check of its files."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

from allhands.checkpoints.format import FORMAT, WEIGHTS_FILE, StoredArray, StoredFile, manifest_text
from allhands.checkpoints.layout import MANIFEST, STATE, is_plain, run_of
from allhands.errors import CheckpointError


class OtherFormatError(CheckpointError):
    """Raised for a checkpoint in the format of another version of allhands."""


_ALTERED = "its SHA-256 sum is wrong: it was changed after it was written"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: the checkpoint's directory.
        step: number of optimizer updates made.
        iteration: number of batches trained on; the step, if a user's own loop counts only steps.
        run_id: identifier of the run that wrote it.
        time: Unix time of writing, in seconds.
        state: content of ``state.json``; empty if only the manifest was read.
        files: every file but the manifest, by name.
        arrays: all arrays, sorted by name.
        digest: hexadecimal SHA-256 of the manifest, which has the sums of all files.
    """

    path: Path
    step: int
    iteration: int
    run_id: str
    time: float
    state: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    arrays: tuple[StoredArray, ...]
    digest: str

    @property
    def num_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file.bytes for file in self.files.values())


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Return the checkpoint in ``path``, if all its files are there and have the right sizes.

    Args:
        verify: True to compare SHA-256 sums, too.

    Raises:
        CheckpointError: the checkpoint is missing or damaged; the error names the file.
    """
    found = described(path)
    check_sizes(found)
    return with_state(found, verify=verify)


def described(path: Path) -> Checkpoint:
    """Return the checkpoint in ``path`` as its manifest describes it, without the state.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another version.
    """
    file = path / MANIFEST
    raw = _read(file)
    body = _parsed(raw, file)
    if (said := body.get("format")) != FORMAT:
        raise _of_another_version(file, said)
    try:
        # Every byte is compared, also blanks that JSON ignores.
        same = raw == manifest_text({key: value for key, value in body.items() if key != "sha256"})
        files = {
            str(name): StoredFile(int(f["bytes"]), str(f["sha256"]))
            for name, f in body["files"].items()
        }
        step, iteration = int(body["step"]), int(body["iteration"])
        run_id, time = str(body["run_id"]), float(body["time"])
        arrays = tuple(map(StoredArray.from_json, body["arrays"]))
        for array in arrays:
            array.check(files)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise damaged(file, "it is not a manifest of allhands") from None
    if not same or not all(map(is_plain, files)):
        raise damaged(file, _ALTERED)
    return Checkpoint(
        path, step, iteration, run_id, time, {}, files, arrays, hashlib.sha256(raw).hexdigest()
    )


def check_sizes(found: Checkpoint) -> None:
    """Compare the sizes of all files with the manifest.

    Raises:
        CheckpointError: a file is missing, or has another size.
    """
    for name, facts in found.files.items():
        file = found.path / name
        try:
            there = file.stat()
        except OSError as error:
            raise unreadable(file, error) from None
        if not stat.S_ISREG(there.st_mode):
            raise damaged(file, "it is not a file")
        if there.st_size != facts.bytes:
            raise damaged(file, f"it has {there.st_size} bytes instead of {facts.bytes}")


def with_state(found: Checkpoint, *, verify: bool) -> Checkpoint:
    """Return a described checkpoint with its state.

    Args:
        verify: True to compare the SHA-256 sums of all files; else only that of the state.

    Raises:
        CheckpointError: a file was altered, or cannot be read.
    """
    file = found.path / STATE
    if STATE not in found.files:
        raise damaged(file, "the manifest does not name it")
    content = _read(file)
    if hashlib.sha256(content).hexdigest() != found.files[STATE].sha256:
        raise damaged(file, _ALTERED)
    for name, facts in found.files.items() if verify else ():
        if name != STATE and sum_of(found.path / name) != facts.sha256:
            raise damaged(found.path / name, _ALTERED)
    return replace(found, state=_parsed(content, file))


def sum_of(file: Path) -> str:
    """Return the hexadecimal SHA-256 of a checkpoint's file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(file, error) from None


def _read(file: Path) -> bytes:
    try:
        if file.exists() and not file.is_file():
            raise damaged(file, "it is not a file")
        return file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from None


def _parsed(content: bytes, file: Path) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        value: Any = json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise damaged(file, "it is not JSON") from None
    if not isinstance(value, dict):
        raise damaged(file, "it does not hold a JSON object")
    return cast("dict[str, Any]", value)


def _of_another_version(file: Path, said: object) -> CheckpointError:
    if type(said) is not int or said < 1:
        return damaged(file, f"its format is {said!r}, not {FORMAT}")
    when = "an earlier" if said < FORMAT else "a later"
    hint = "go on from it with the version that wrote it"
    if (weights := file.parent / WEIGHTS_FILE).is_file():
        hint += f"; or begin a new run from its weights: --resume-adapter-file {weights}"
    what = f"it was written by {when} version of allhands: its format is {said}, this version reads {FORMAT}"
    return OtherFormatError(what, code="checkpoint-of-other-version", where=str(file), hint=hint)


def damaged(file: Path, what: str) -> CheckpointError:
    """Return the error for a file that is not as it was written."""
    run = run_of(file.parent)
    hint = f"resume from another checkpoint: allhands checkpoint verify {run} tells which of them are whole"
    return CheckpointError(
        f"the checkpoint is damaged: {what}", code="checkpoint-damaged", where=str(file), hint=hint
    )


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that is missing or cannot be read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return damaged(file, "it is missing")
    hint = "check the rights of the file, and the disk"
    return CheckpointError(
        f"the checkpoint cannot be read: {error.strerror}",
        code="checkpoint-unreadable",
        where=str(file),
        hint=hint,
    )
