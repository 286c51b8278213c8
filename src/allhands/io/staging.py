"""Directories that are whole or absent: filled beside their place, synced, renamed; temporary
directories; locks on files.

A ``private`` directory has mode 0700, and its files 0600. Others have the modes that the umask
gives. A directory that replaces another one gets the mode of the old one.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from allhands.errors import ConfigError, StorageError
from allhands.io.files import (
    make_directory,
    make_private,
    make_unused,
    private_opener,
    storage_error,
    storage_error_of,
    sync,
)
from allhands.io.paths import require_directory_name

_PARTIAL, _REPLACED = "partial", "replaced"
_SCRATCH, _OWNED = "allhands-", ".owner"


@contextmanager
def staging(target: Path, *, private: bool = False) -> Generator[Path]:
    """Make a new empty directory beside ``target``, and remove it at the end of the block unless
    :func:`publish` moved it.

    Directories that killed processes have left are removed first. If one of them is the old
    directory of ``target``, and ``target`` is missing, it is put back. A staging directory is
    locked as long as its process lives.

    Args:
        private: True: only the owner can look into it. Give it to :func:`publish`, too.

    Raises:
        StorageError: the directory cannot be made, or the block raised an ``OSError``.
    """
    target = target.resolve()
    made: Path | None = None
    descriptor = -1
    try:
        make_directory(target.parent, private=private)
        with publishing(target):
            _put_back(target)
            left = _abandoned(target)
            made = make_unused(target.parent, _prefix(target), private=private)
            with suppress(OSError):  # not every file system has locks
                descriptor = _lock_directory(made)
        _remove(left)
        yield made
    except OSError as error:
        raise _as_asked_for(storage_error_of(error, target), target) from error
    except StorageError as error:
        raise _as_asked_for(error, target) from error.__cause__
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True)
class Seen:
    """The directory that was at a place when it was looked at, for :func:`publish`; ``None`` for
    nothing.

    A file that appears in it does not count: macOS's Finder writes one where a person looks.
    """

    found: int | None

    @classmethod
    def at(cls, place: Path) -> Seen:
        """Look at ``place``."""
        try:
            return cls(place.stat().st_ino)
        except OSError:
            return cls(None)


def publish(staged: Path, target: Path, seen: Seen | None = None, *, private: bool = False) -> None:
    """Sync ``staged`` and rename it to ``target``; it replaces a directory that may be there.

    Args:
        seen: what was at ``target`` when it was found to be free, or meant to be replaced. If
            another process has written there since then, its directory stays, and ``staged`` gets
            a free name beside it. ``None``: replace whatever is there.
        private: True: set the modes to 0700 and 0600, whatever modes the files were made with.

    Raises:
        ConfigError: another process has written ``target``.
        OSError: a sync or a renaming failed; an old directory is still at ``target``.
    """
    target = target.resolve()
    if private:
        make_private(staged)
    for path in (*staged.rglob("*"), staged):
        sync(path)
    with publishing(target):
        if seen is not None and Seen.at(target) != seen:
            raise _written_meanwhile(staged, target)
        try:
            replaced = _put(staged, target)
        except OSError as error:
            # Without locks another process can come between the look and the renaming.
            if seen is None or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            raise _written_meanwhile(staged, target) from error
    sync(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _written_meanwhile(staged: Path, target: Path) -> ConfigError:
    """Rename ``staged`` to a free name beside ``target``; return the error that tells it."""
    number = 2
    while (kept := target.with_name(f"{target.name}-{number}")).exists():
        number += 1
    staged.rename(kept)
    return ConfigError(
        f"another process has written it meanwhile; this result is kept as {kept.name}",
        code="output-exists",
        where=str(target),
        hint="look at both, and rename or remove one of them",
    )


def _put(staged: Path, target: Path) -> Path | None:
    """Rename ``staged`` to ``target``; return where the directory is now that was there."""
    if not target.is_dir():
        staged.rename(target)
        return None
    # Directories cannot be exchanged portably: for an instant there is no directory, but never half
    # of one. If the process is killed in that instant, the old directory has the new name
    # ``replaced``, and the next run puts it back.
    replaced = make_unused(target.parent, _prefix(target, _REPLACED), private=True)
    try:
        staged.chmod(stat.S_IMODE(target.stat().st_mode))
        target.rename(replaced)
    except OSError:
        replaced.rmdir()
        raise
    try:
        staged.rename(target)
    except OSError:
        replaced.rename(target)
        raise
    return replaced


def require_place(out: Path, kind: str, files: tuple[str, ...], *, force: bool) -> Seen:
    """Refuse to replace anything but a directory of this ``kind``, and that one without ``force``;
    return what is there, for :func:`publish`.

    Args:
        kind: with its article: "an adapter".
        files: names of all files that such a directory can hold; it always holds the first.

    Raises:
        ConfigError: ``out`` is a file, another kind of directory or the name of a file, or
            ``force`` is missing.
    """
    require_directory_name(out)
    seen = Seen.at(out)
    if not out.exists():
        return seen
    if not out.is_dir():
        what = f"this is a file, not the directory of {kind}"
        raise ConfigError(
            what, code="place-taken", where=str(out), hint="choose another place: --out"
        )
    there = sorted(entry.name for entry in out.iterdir())
    if others := [name for name in there if name not in files] or (
        there if files[0] not in there else []
    ):
        what = f"{others[0]} is there already: the directory does not hold {kind} alone"
        raise ConfigError(
            what, code="place-taken", where=str(out), hint="choose another directory: --out"
        )
    if there and not force:
        raise ConfigError(
            f"{kind} is there already",
            code="output-exists",
            where=str(out),
            hint="add --force to replace it",
        )
    return seen


@contextmanager
def publishing(target: Path) -> Generator[None]:
    """Lock the directory of ``target`` while a process looks at ``target`` and then publishes it.

    Other processes in this block wait. Without locks in the file system nobody waits. The lock is
    on a file of its own, because a running job has the lock on its directory. All names of a
    directory share one file: what a killed process leaves, the next one removes.
    """
    file = target.resolve().with_name(".allhands-publishing")
    descriptor = _lock_for_now(file)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                file.unlink()
            os.close(descriptor)


def _lock_for_now(file: Path) -> int | None:
    """Return a file descriptor that holds the lock on ``file``, which its holder removes; ``None``
    if there are no locks.
    """
    while True:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
            os.close(descriptor)  # its holder has removed it meanwhile
        except FileNotFoundError:
            os.close(descriptor)
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                file.unlink()
            return None


def same_files(one: Path, other: Path) -> bool:
    """Return True if two directories hold the same files with the same contents, one level deep."""
    if not other.is_dir():
        return False
    names = {path.name for path in one.iterdir()}
    if names != {path.name for path in other.iterdir()}:
        return False
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])


@contextmanager
def locked(file: Path, *, private: bool = False) -> Generator[None]:
    """Wait for an exclusive lock on ``file`` (made if absent), and hold it for the block.

    Raises:
        StorageError: the file cannot be made or opened.
    """
    try:
        make_directory(file.parent, private=private)
        stream = _lock_file(file, private)
    except OSError as error:
        raise storage_error(file, error) from error
    with stream:
        with suppress(
            OSError
        ):  # a file system without locks: two processes may do the work, with the same result
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_now(file: Path, *, private: bool = False) -> Generator[bool]:
    """Try to lock ``file`` (made if absent) for the block, without waiting; yield True if this
    process has the lock.

    Raises:
        OSError: the file cannot be made or opened.
    """
    with _lock_file(file, private) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _lock_file(file: Path, private: bool) -> TextIO:
    return open(file, "a", encoding="utf-8", opener=private_opener if private else None)


class Scratch:
    """A private directory for temporary files, as a context manager.

    This process has a lock on a file in it. A process that is killed leaves its directory. The next
    :class:`Scratch` in the same ``root`` removes such directories of this user, if no process has
    locked them.

    Args:
        root: directory in which it is made; default: the system's place for temporary files.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, root: str | None = None) -> None:
        root = root or tempfile.gettempdir()
        _remove_scratch(Path(root))
        self.path = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=root))  # mode 0700
        self._descriptor = -1
        with suppress(OSError):  # a full disk, or no locks: then nobody else will remove it
            self._descriptor = os.open(
                self.path / _OWNED, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, b"locked\n")  # others may remove it only after this

    def close(self) -> None:
        """Remove the directory and all that is in it, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_scratch(root: Path) -> None:
    """Remove directories of :class:`Scratch` in ``root``, of processes of this user that ended."""
    with suppress(OSError):
        for left in root.glob(f"{_SCRATCH}*"):
            with suppress(OSError):
                status = left.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                    continue
                descriptor = os.open(left / _OWNED, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.read(descriptor, 1):
                        shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(descriptor)


def _prefix(target: Path, kind: str = _PARTIAL) -> str:
    return f".{target.name}.{kind}-"


def _as_asked_for(error: StorageError, target: Path) -> StorageError:
    """Return ``error``, with ``target`` in place of a path in a staging directory, which will be
    gone when a person reads the error.
    """
    if not (error.where or "").startswith(str(target.parent / _prefix(target))):
        return error
    return StorageError(error.message, code=error.code, where=str(target), hint=error.hint)


def _lock_directory(path: Path) -> int:
    """Return a file descriptor that holds an exclusive lock on ``path`` until it is closed.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file system has no locks, or ``path`` cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _put_back(target: Path) -> None:
    """Put the old directory of ``target`` back if a process was killed while it replaced it."""
    for left in target.parent.glob(f"{glob.escape(_prefix(target, _REPLACED))}*"):
        with suppress(OSError):
            if not target.exists() and any(left.iterdir()):
                left.rename(target)
            shutil.rmtree(left, ignore_errors=True)


def _abandoned(target: Path) -> list[tuple[Path, int]]:
    """Return the staging directories of killed processes, each with a descriptor that locks it."""
    found: list[tuple[Path, int]] = []
    for left in target.parent.iterdir():
        if left.name.startswith(_prefix(target)):
            with suppress(OSError):  # locked: a process works there
                found.append((left, _lock_directory(left)))
    return found


def _remove(abandoned: list[tuple[Path, int]]) -> None:
    for left, descriptor in abandoned:
        shutil.rmtree(left, ignore_errors=True)
        os.close(descriptor)
