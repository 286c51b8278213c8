"""Files that are whole or absent: written under another name, synced, renamed.

``private`` files have mode 0600 and ``private`` directories 0700, whatever the umask says. Others
have the modes that the umask gives. Modes of existing directories are changed by
:func:`make_private` alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from allhands.errors import ConfigError, StorageError, TakenError

_DRAFT = ".draft-"
_LOOK_BYTES = 8192
# Environment variable: directories that a supervisor has claimed for its ranks, as results of
# claim_mark, separated by spaces.
CLAIMED = "ALLHANDS_CLAIMED"
_PRIVATE_FILE, _PRIVATE_DIRECTORY = 0o600, 0o700
# Another file or directory has the place of the output.
_TAKEN = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
_ERROR_CODES = {
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-quota-used-up",
    errno.EACCES: "permission-denied",
    errno.EPERM: "permission-denied",
    errno.EROFS: "file-system-read-only",
    errno.ENOENT: "output-directory-missing",
    errno.EFBIG: "file-too-large",
    None: "file-not-written",
}
_REMEDY = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EACCES: "no permission: choose another directory or change its rights",
    errno.EPERM: "no permission: choose another directory or change its rights",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOTDIR: "a part of the path is a file: choose another directory",
    errno.EEXIST: "there is a file of that name: choose another directory",
    errno.EISDIR: "there is a directory of that name: move it away, or choose another name",
    errno.ENOENT: "there is no directory to hold it: check the path",
    errno.EFBIG: "the file is larger than is allowed here (ulimit -f, or the file system's limit)",
}


class ClaimedError(StorageError):
    """Another run is writing into the directory."""


def storage_error(path: Path, error: OSError | RuntimeError) -> StorageError:
    """Return a :class:`StorageError` that names the file and the remedy."""
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error)
    hint = _REMEDY.get(number or 0, "check the free space and the rights of the directory")
    message, where = f"cannot be written: {reason}", str(path)
    if number in _TAKEN:
        return TakenError(message, code="place-taken", where=where, hint=hint)
    code = _ERROR_CODES.get(number, _ERROR_CODES[None])
    return StorageError(message, code=code, where=where, hint=hint)


def storage_error_of(error: OSError, otherwise: Path | str) -> StorageError:
    """Return :func:`storage_error` of the path that ``error`` names, or of ``otherwise``.

    If a copy or a renaming fails, this is the new path.
    """
    return storage_error(Path(error.filename2 or error.filename or otherwise), error)


def make_directory(path: Path, *, private: bool = False) -> Path:
    """Create ``path`` and its missing parents; all of them are private if ``private`` is true.

    Raises:
        StorageError: a directory cannot be made.
    """
    try:
        if private:
            _make_private(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(path, error) from None
    return path


def _make_private(path: Path) -> None:
    for level in (*reversed(path.parents), path):
        if not level.is_dir():
            try:
                level.mkdir(_PRIVATE_DIRECTORY)
            except FileExistsError:
                if not level.is_dir():  # made by another process in this moment, or not a directory
                    raise
            else:
                level.chmod(_PRIVATE_DIRECTORY)  # the umask may take rights even from the owner


def private_opener(path: str, flags: int) -> int:
    """Open a file; a new file has mode 0600, and an existing file keeps its mode.

    For ``open(path, mode, opener=private_opener)``.
    """
    try:
        return _create(path, flags, private=True) if flags & os.O_CREAT else os.open(path, flags)
    except FileExistsError:
        return os.open(path, flags, _PRIVATE_FILE)


def make_private(directory: Path) -> None:
    """Set the mode of a directory, and of all directories in it, to 0700, and of all files in it to
    0600; links are left alone.

    Raises:
        OSError: a mode cannot be set.
    """
    for path in (*directory.rglob("*"), directory):
        if not path.is_symlink():
            path.chmod(_PRIVATE_DIRECTORY if path.is_dir() else _PRIVATE_FILE)


def make_unused(parent: Path, prefix: str, *, private: bool = False) -> Path:
    """Return a new directory in ``parent`` with a name that nobody can guess.

    Raises:
        OSError: the directory cannot be made.
    """
    made = parent / f"{prefix}{secrets.token_hex(4)}"
    made.mkdir(_PRIVATE_DIRECTORY if private else 0o777)
    if private:
        made.chmod(_PRIVATE_DIRECTORY)
    return made


def _create(path: str | Path, flags: int, *, private: bool) -> int:
    """Open a file that must not exist yet, not even as a link."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE if private else 0o666)
    if private:
        os.fchmod(descriptor, _PRIVATE_FILE)
    return descriptor


@cache
def boot_id() -> str | None:
    """Return Linux's boot id, which differs for each computer and each start of it; ``None`` on
    macOS.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if sys.platform == "linux" and path.exists() else None


def claim_mark(directory: Path) -> str:
    """Return a text without spaces that identifies an existing directory and this computer.

    Raises:
        OSError: the directory does not exist.
    """
    computer = boot_id() or socket.gethostname()
    status = directory.stat()
    return f"{computer}:{status.st_dev}:{status.st_ino}"


@contextmanager
def claimed(directory: Path, *, private: bool = True) -> Generator[None, None, None]:
    """Make ``directory`` and claim it for this process until the block is left; drafts of killed
    writers are removed.

    A directory that this process's supervisor has claimed for the whole job (:data:`CLAIMED`) is
    not claimed again.

    Raises:
        ClaimedError: another process has claimed the directory.
        StorageError: the directory cannot be made.
    """
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    make_directory(directory, private=private)
    if claim_mark(directory) in os.environ.get(CLAIMED, "").split():
        yield
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise storage_error(directory, error) from None
    try:
        # The system releases the lock when the process ends, however it ends. Some network file
        # systems have no locks: go on without one.
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClaimedError(
                    "another run is writing into this directory",
                    code="directory-in-use",
                    where=str(directory),
                    hint="wait until it has ended, or choose another directory: --adapter-path, or --log-dir of launch",
                ) from None
            for draft in directory.glob(f"**/{_DRAFT}*"):
                draft.unlink(missing_ok=True)
        yield
    except BaseException:
        # A run that failed before it wrote anything leaves no empty directory behind.
        with suppress(OSError):
            for made in missing:
                made.rmdir()
        raise
    finally:
        os.close(descriptor)


def write_whole(path: Path, write: Callable[[Path], Any], *, private: bool = False) -> None:
    """Let ``write`` fill a temporary file beside ``path``, sync it and rename it to ``path``.

    The temporary name keeps the suffix, because writers choose the format by it. The mode is that
    of a new file, even if an older file at ``path`` had another mode.

    Raises:
        StorageError: the file could not be written; an older file at ``path`` is unchanged.
    """
    # Not tempfile: its files are always private, and a process cannot ask for its umask without
    # changing it.
    temporary = _draft_of(path)
    made = False
    try:
        os.close(_create(temporary, os.O_WRONLY, private=private))
        made = True
        write(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:
        raise write_error(path, error) from None
    finally:
        if made:
            temporary.unlink(missing_ok=True)


def of_peft(directory: Path) -> str | None:
    """Return advice on a directory with an adapter of PEFT; ``None`` if there is none."""
    if not (directory / "adapter_model.safetensors").is_file():
        return None
    return f"PEFT has written this: allhands import {directory} --from peft --out DIRECTORY makes an adapter of it"


def require_writable(path: Path) -> None:
    """Check before long work that a file can be written at ``path``: make and remove a file beside
    it.

    Raises:
        StorageError: no file can be written there.
    """
    draft = _draft_of(path)
    try:
        os.close(_create(draft, os.O_WRONLY, private=True))
        draft.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(path, error) from None


def require_ours(
    path: Path, marks: Sequence[bytes], kind: str, *, force: bool, option: str = "--out"
) -> None:
    """Refuse to replace a file that allhands has not written, unless ``force`` is true.

    Args:
        marks: byte strings; each file of ours has one of them near its beginning or its end.
        kind: what our files are, in words.
        option: the option that names the file, for messages.

    Raises:
        ConfigError: ``path`` is a directory, or a file without these marks.
    """
    if path.is_dir():
        raise ConfigError(
            "there is a directory of that name",
            code="place-taken",
            where=str(path),
            hint=f"choose another file: {option}",
        )
    if force or not path.exists():
        return
    try:
        with path.open("rb") as stream:
            content = stream.read(_LOOK_BYTES)
            stream.seek(max(0, path.stat().st_size - _LOOK_BYTES))
            content += stream.read()
    except OSError as error:
        raise ConfigError(
            f"a file is there that cannot be read: {error.strerror}",
            code="place-taken",
            where=str(path),
            hint=f"choose another: {option}",
        ) from None
    if not any(mark in content for mark in marks):
        raise ConfigError(
            f"a file is there already that is no {kind}",
            code="place-taken",
            where=str(path),
            hint=f"choose another file with {option}, or add --force to replace it",
        )


def _draft_of(path: Path) -> Path:
    """Return the path of a draft beside ``path``, with the same suffix.

    Raises:
        StorageError: no file can have this path: it is a directory, or empty, which means the
            present directory.
    """
    if not path.name or path.name == ".." or os.path.isdir(path):
        raise storage_error(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    return path.with_name(f"{_DRAFT}{path.stem}-{secrets.token_hex(4)}{path.suffix}")


def write_error(path: Path, error: OSError | RuntimeError) -> StorageError:
    """Return :func:`storage_error` of a failed write.

    MLX reports no cause in its ``RuntimeError``, so the error says that the disk is full if less
    than a MiB is free.
    """
    if isinstance(error, RuntimeError):
        try:
            full = os.statvfs(path.parent)
            if full.f_bavail * full.f_frsize < 1 << 20:
                return storage_error(path, OSError(errno.ENOSPC, "No space left on device"))
        except OSError:
            pass
    return storage_error(path, error)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the disk.

    Raises:
        OSError: they cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path | None:
    """Rename an earlier run's file or directory at ``path``, to make way for a new one.

    Returns:
        The new path of the earlier one; ``None`` if there was none.

    Raises:
        OSError: it cannot be renamed.
    """
    if not path.exists():
        return None
    kept = unused_name(path)
    path.rename(kept)
    return kept


def unused_name(path: Path) -> Path:
    """Return ``path`` with the first number in its name that is free: ``metrics.1.jsonl``."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
