"""Directories that are whole or absent: filled beside their place, synced, renamed into it."""

from __future__ import annotations

import fcntl
import filecmp
import glob
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from allhands.files import storage_error

_PARTIAL, _REPLACED = "partial", "replaced"


@contextmanager
def staging(target: Path) -> Generator[Path]:
    """A new empty directory beside ``target``; gone at the end unless :func:`publish` moved it.

    What earlier, killed runs left is removed first, or put back if it is what stood at ``target``: a staging
    directory is locked as long as its process lives. ``OSError`` in the body becomes a ``StorageError``.
    """
    target = target.resolve()
    made: Path | None = None
    descriptor = -1
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        made = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        with suppress(OSError):  # not every file system has locks
            descriptor = _lock_directory(made)
        made.chmod(0o755)
        yield made
    except OSError as error:
        raise storage_error(Path(error.filename or target), error) from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def publish(staged: Path, target: Path) -> None:
    """Sync ``staged`` and rename it to ``target``, in place of the directory that may be there.

    Raises:
        OSError: it cannot be done; what stood at ``target`` is there again.
    """
    target = target.resolve()
    for path in (*staged.rglob("*"), staged):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if not target.is_dir():
        staged.rename(target)
        return
    # Directories cannot be exchanged portably: for an instant there is none, never half of one. Who is killed in
    # that instant leaves the old one under this name, and the next run puts it back.
    replaced = Path(tempfile.mkdtemp(prefix=_prefix(target, _REPLACED), dir=target.parent))
    target.rename(replaced)
    try:
        staged.rename(target)
    except OSError:
        replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def publishing(target: Path) -> Generator[None]:
    """For who looks at ``target`` and then publishes: one process at a time does so in its directory."""
    descriptor = os.open(target.resolve().parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def same_files(one: Path, other: Path) -> bool:
    """Whether two directories hold the same files with the same contents, one level deep."""
    if not other.is_dir():
        return False
    names = {path.name for path in one.iterdir()}
    if names != {path.name for path in other.iterdir()}:
        return False
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])


@contextmanager
def locked(file: Path) -> Generator[None]:
    """Hold an exclusive lock on ``file`` (made if absent), after whoever holds it now."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("a")
    except OSError as error:
        raise storage_error(file, error) from error
    with stream:
        with suppress(OSError):  # a file system without locks: two may do the work, the result is the same
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_now(file: Path) -> Generator[bool]:
    """Whether an exclusive lock on ``file`` (made if absent) could be had at once; it is held for the block."""
    with file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _prefix(target: Path, kind: str = _PARTIAL) -> str:
    return f".{target.name}.{kind}-"


def _lock_directory(path: Path) -> int:
    """A descriptor that holds an exclusive lock on ``path`` until it is closed.

    Raises:
        BlockingIOError: another process holds it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(target: Path) -> None:
    for left in target.parent.glob(f"{glob.escape(_prefix(target, _REPLACED))}*"):
        with suppress(OSError):
            if not target.exists() and any(left.iterdir()):
                left.rename(target)
            shutil.rmtree(left, ignore_errors=True)
    for left in target.parent.iterdir():
        if not left.name.startswith(_prefix(target)):
            continue
        with suppress(OSError):  # locked: somebody is at work there
            descriptor = _lock_directory(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
