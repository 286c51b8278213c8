"""Files that are whole or absent: written beside, synced, renamed."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from allhands.errors import StorageError

_DRAFT = ".draft-"
_REMEDY = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EACCES: "no permission: choose another directory or change its rights",
    errno.EPERM: "no permission: choose another directory or change its rights",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOTDIR: "a part of the path is a file: choose another directory",
    errno.EEXIST: "there is a file of that name: choose another directory",
    errno.ENOENT: "there is no directory to hold it: check the path",
    errno.EFBIG: "the file is larger than is allowed here (ulimit -f, or the file system's limit)",
}


def storage_error(path: Path, error: OSError | RuntimeError) -> StorageError:
    """A :class:`StorageError` that names the file and the remedy."""
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error)
    hint = _REMEDY.get(number or 0, "check the free space and the rights of the directory")
    return StorageError(f"cannot be written: {reason}", where=str(path), hint=hint)


def make_directory(path: Path) -> Path:
    """Create ``path`` with its parents.

    Raises:
        StorageError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(path, error) from None
    return path


@contextmanager
def claimed(directory: Path) -> Generator[None, None, None]:
    """Make ``directory`` and keep it to this process until the block is left; drafts of killed writers are removed.

    Raises:
        StorageError: it cannot be made, or another process has it.
    """
    make_directory(directory)
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise storage_error(directory, error) from None
    try:
        # The system gives it back when the process ends, however it ends. Some network file systems cannot: go on.
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(
                    "another run is writing into this directory",
                    where=str(directory),
                    hint="wait until it has ended, or choose another --adapter-path",
                ) from None
            for draft in directory.glob(f"**/{_DRAFT}*"):
                draft.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, sync it and rename it into place.

    The temporary name keeps the suffix, because writers choose the format by it.

    Raises:
        StorageError: it could not be written; what stood at ``path`` before is untouched.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f"{_DRAFT}{path.stem}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        _sync(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
        _sync(path.parent)
    except (OSError, RuntimeError) as error:
        raise _with_space(path, error) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _with_space(path: Path, error: OSError | RuntimeError) -> StorageError:
    """MLX reports a failed write without its cause: look whether the disk is full."""
    if isinstance(error, RuntimeError):
        try:
            full = os.statvfs(path.parent)
            if full.f_bavail * full.f_frsize < 1 << 20:
                return storage_error(path, OSError(errno.ENOSPC, "No space left on device"))
        except OSError:
            pass
    return storage_error(path, error)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
