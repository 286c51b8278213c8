"""The blocks that a host has, in the order in which it got them, and the files that it makes of those it gets.

This module is sent to every host and runs there without allhands: standard library only, Python 3.9 or newer.

A file grows under a hidden name beside its place. Nothing but blocks whose hash is right is counted as there, whether
they have come over the network, are found in what an earlier run has left, or stand in another file of this host.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from allhands.cluster.sync.blocks import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    BlockEntry,
    HashCache,
    block_contents,
    open_regular,
    read_at,
    sha256,
)

Place = tuple[int, int]  # file, block
_READERS = 4
_MOST_FINISHING = 16  # each has its file open
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BUSY = "another sync is writing it; of hosts that share a file system, name only one"
_DIRECTORY_THERE = "it is a directory, and a file is to be brought"
_PARTIAL = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class WrongBlock(Exception):
    """A block whose hash is not the one in the manifest."""


class Shelf:
    """Blocks that can be had here, in the order of their arrival.

    Attributes:
        entries: the files of the manifest.
        withdrawn: numbers of files that are given up, because they have changed at their source.
    """

    def __init__(self, entries: Sequence[BlockEntry]) -> None:
        self.entries = entries
        self.withdrawn: set[int] = set()
        self._there: list[Place] = []
        self._changed = threading.Condition()

    def add(self, places: Iterable[Place]) -> None:
        """These blocks can be had from now on."""
        with self._changed:
            self._there.extend(places)
            self._changed.notify_all()

    def since(self, number: int, wait_s: float) -> list[Place]:
        """What has come after the first ``number`` blocks; waits for something to come, but not for ever."""
        with self._changed:
            if len(self._there) == number:
                self._changed.wait(wait_s)
            return self._there[number:]

    def withdraw(self, file: int) -> None:
        """Nothing more comes of this file."""
        with self._changed:
            self.withdrawn.add(file)
            self._changed.notify_all()

    def read(self, file: int, block: int) -> bytes:
        """The content of a block that can be had.

        Raises:
            OSError: it cannot be read.
            WrongBlock: it is not what it was.
        """
        raise NotImplementedError


class _Growing:
    """A file that is not whole: what it has, and the descriptor of its hidden form once that is open."""

    def __init__(self, entry: BlockEntry) -> None:
        self.have = bytearray(entry.num_blocks)
        self.missing = entry.num_blocks
        self.descriptor = -1
        self.allocated = 0  # bytes of disk that it has
        self.seen_ns: int | None = None  # when it had last changed as we looked at it


class Destination(Shelf):
    """The files of a manifest on this host.

    Args:
        roots: directories, by their numbers in the manifest.
        entries: the files.
        cache: known hashes.
    """

    def __init__(self, roots: Sequence[str], entries: Sequence[BlockEntry], cache: HashCache) -> None:
        super().__init__(entries)
        self._roots = roots
        self._cache = cache
        self._growing: dict[int, _Growing] = {}
        self._elsewhere: dict[bytes, tuple[str, int]] = {}  # hash -> a file of this host that has held it, and where
        self._lock = threading.Lock()
        # Waiting for the disk must not hold up the network.
        self._finisher = ThreadPoolExecutor(1, "sync-finish")
        self._finishing: list[Future[None]] = []
        self._unsynced: list[str] = []

    # --- what is there ------------------------------------------------------------------------------

    def look(self, told: Callable[[int], None]) -> None:
        """Find out what is there already; ``told`` hears of every number of bytes that has been read.

        Raises:
            OSError: a file that is there cannot be read, or a directory stands where a file must be.
        """
        with ThreadPoolExecutor(_READERS) as pool:
            for future in [pool.submit(self._look_at, file, told) for file in range(len(self.entries))]:
                future.result()

    def _look_at(self, file: int, told: Callable[[int], None]) -> None:
        entry, path = self.entries[file], self.path(file)
        try:
            status, digests = self._cache.digests(path, told)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBUSY, errno.EISDIR):
                raise
            if os.path.isdir(path) and not os.path.islink(path):
                raise IsADirectoryError(errno.EISDIR, _DIRECTORY_THERE, path) from None
        else:
            if status.st_size == entry.size and digests == entry.digests:
                self.add((file, block) for block in range(entry.num_blocks))
                return
            with self._lock:
                for place in range(0, len(digests), DIGEST_BYTES):
                    offset = place // DIGEST_BYTES * BLOCK_BYTES
                    self._elsewhere.setdefault(digests[place : place + DIGEST_BYTES], (path, offset))
        growing = _Growing(entry)
        with suppress(OSError):
            self._look_at_partial(file, growing, told)
        with self._lock:
            self._growing[file] = growing

    def _look_at_partial(self, file: int, growing: _Growing, told: Callable[[int], None]) -> None:
        entry = self.entries[file]
        descriptor, status = open_regular(self.path(file, partial=True))
        growing.seen_ns = status.st_mtime_ns
        try:
            for block, content in enumerate(block_contents(descriptor, entry.size)):
                told(len(content))
                if len(content) == entry.block_size(block) and sha256(content) == entry.digest(block):
                    growing.have[block] = 1
                    growing.missing -= 1
        finally:
            os.close(descriptor)
        growing.allocated = min(status.st_blocks * 512, entry.size)
        self.add((file, block) for block in range(entry.num_blocks) if growing.have[block])

    def path(self, file: int, partial: bool = False) -> str:
        """Where a file is, or grows."""
        entry = self.entries[file]
        parts = (*entry.parts[:-1], entry.partial_name) if partial else entry.parts
        return os.path.join(self._roots[entry.root], *parts)

    def missing(self) -> list[tuple[int, int, int]]:
        """The blocks to ask for: file, first and last one of each row of them."""
        rows: list[tuple[int, int, int]] = []
        for file, growing in sorted(self._growing.items()):
            if file in self.withdrawn:
                continue
            for block, have in enumerate(growing.have):
                if have:
                    continue
                if rows and rows[-1][0] == file and rows[-1][2] == block - 1:
                    rows[-1] = (file, rows[-1][1], block)
                else:
                    rows.append((file, block, block))
        return rows

    def unfinished(self) -> list[int]:
        """The files that are not in place yet."""
        return [file for file in sorted(self._growing) if file not in self.withdrawn]

    def bytes_to_get(self) -> int:
        """Bytes that have to come from elsewhere."""
        rows = ((file, block) for file, first, last in self.missing() for block in range(first, last + 1))
        return sum(
            self.entries[file].block_size(block)
            for file, block in rows
            if self.entries[file].digest(block) not in self._elsewhere
        )

    def bytes_to_store(self) -> dict[str, int]:
        """Bytes of disk that are needed beside what is in use, by root."""
        needed: dict[str, int] = {}
        for file in self.unfinished():
            root = self._roots[self.entries[file].root]
            needed[root] = needed.get(root, 0) + self.entries[file].size - self._growing[file].allocated
        return needed

    # --- making files -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make what needs nothing from elsewhere: empty files, and blocks that other files of this host have.

        Raises:
            OSError: something cannot be written.
        """
        for root in {self.entries[file].root for file in self.unfinished()}:
            os.makedirs(self._roots[root], exist_ok=True)
        for file in self.unfinished():
            entry, growing = self.entries[file], self._growing[file]
            if not growing.missing:  # it is empty, or an earlier run has got all of it
                self._open(file, growing)
                self._have_finished(file, growing)
                continue
            for block in range(entry.num_blocks):
                content = None if growing.have[block] else self._found_elsewhere(entry.digest(block))
                if content is not None and len(content) == entry.block_size(block):
                    self.write(file, block, content)
        self._drain()

    def _found_elsewhere(self, digest: bytes) -> bytes | None:
        path, offset = self._elsewhere.get(digest, ("", 0))
        if not path:
            return None
        with suppress(OSError):
            descriptor, _ = open_regular(path)
            try:
                content = read_at(descriptor, BLOCK_BYTES, offset)
            finally:
                os.close(descriptor)
            if sha256(content) == digest:
                return content
        return None

    def write(self, file: int, block: int, content: bytes | memoryview) -> bool:
        """Take a block; after the last one its file is put into place. Whether it was one that was missing.

        Raises:
            OSError: it cannot be written.
            WrongBlock: it is not what the manifest says.
        """
        if not 0 <= file < len(self.entries) or not 0 <= block < self.entries[file].num_blocks:
            raise WrongBlock("there is no such block")
        entry, growing = self.entries[file], self._growing.get(file)
        if growing is None or growing.have[block] or file in self.withdrawn:
            return False
        if len(content) != entry.block_size(block) or sha256(content) != entry.digest(block):
            raise WrongBlock(f"block {block} of {'/'.join(entry.parts)} has another hash than it must have")
        self._open(file, growing)
        view, offset = memoryview(content), block * BLOCK_BYTES
        while view:
            count = os.pwrite(growing.descriptor, view, offset)
            view, offset = view[count:], offset + count
        growing.have[block] = 1
        growing.missing -= 1
        self.add([(file, block)])
        if not growing.missing:
            self._have_finished(file, growing)
        return True

    def settle(self) -> None:
        """Wait until all files that have all of their blocks are in place and on the disk.

        Raises:
            OSError: one could not be put there.
        """
        self._drain()
        # Together: after the first one there is little left for the others to wait for.
        for path in dict.fromkeys([*self._unsynced, *map(os.path.dirname, self._unsynced)]):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._unsynced.clear()

    def _have_finished(self, file: int, growing: _Growing) -> None:
        if len(self._finishing) >= _MOST_FINISHING:
            self._drain()
        self._finishing.append(self._finisher.submit(self._finish, file, growing))

    def _drain(self) -> None:
        while self._finishing:
            self._finishing.pop().result()

    def _open(self, file: int, growing: _Growing) -> None:
        """Open the hidden form of the file, and keep others from writing it."""
        if growing.descriptor >= 0:
            return
        entry = self.entries[file]
        with _Directory(self._roots[entry.root], entry.parts[:-1]) as directory:
            try:
                descriptor = os.open(entry.partial_name, _PARTIAL | os.O_CREAT, 0o600, dir_fd=directory)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path(file)) from None
            try:
                self._claim(file, growing, descriptor, directory)
            except BaseException:
                os.close(descriptor)
                raise
        growing.descriptor = descriptor

    def _claim(self, file: int, growing: _Growing, descriptor: int, directory: int) -> None:
        path = self.path(file)
        _lock(descriptor, path)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "its hidden form belongs to somebody else", self.path(file, partial=True))
        # Whoever has had the lock before may have put it into its place, or written into it.
        current = os.stat(self.entries[file].partial_name, dir_fd=directory, follow_symlinks=False)
        if current.st_ino != status.st_ino or growing.seen_ns not in (None, status.st_mtime_ns):
            raise OSError(errno.EBUSY, _BUSY, path)
        os.ftruncate(descriptor, self.entries[file].size)

    def _finish(self, file: int, growing: _Growing) -> None:
        """Put a whole file into its place; what stood there before is replaced in one moment."""
        entry = self.entries[file]
        try:
            os.fchmod(growing.descriptor, entry.mode)
            os.utime(growing.descriptor, ns=(time.time_ns(), entry.mtime_ns))
            if entry.num_blocks > 1:
                os.fsync(growing.descriptor)
            with _Directory(self._roots[entry.root], entry.parts[:-1]) as directory:
                self._rename(file, directory)
            self._unsynced.append(self.path(file))
            status = os.fstat(growing.descriptor)
        finally:
            os.close(growing.descriptor)
            growing.descriptor = -1
        self._cache.received(self.path(file), status, entry.digests)
        with self._lock:
            del self._growing[file]

    def _rename(self, file: int, directory: int) -> None:
        entry = self.entries[file]
        try:
            os.rename(entry.partial_name, entry.parts[-1], src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:  # it names the hidden form
            raise OSError(error.errno, error.strerror, self.path(file)) from None

    def read(self, file: int, block: int) -> bytes:
        """As in :class:`Shelf`; the hash is left to who receives it."""
        entry = self.entries[file]
        # It may move into its place between the two.
        for partial in (file in self._growing, False, True):
            with suppress(FileNotFoundError):
                descriptor, _ = open_regular(self.path(file, partial=partial))
                try:
                    return read_at(descriptor, entry.block_size(block), block * BLOCK_BYTES)
                finally:
                    os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is gone", self.path(file))


class _Directory:
    """A descriptor of a directory below a root, made if absent; no link below the root is followed."""

    def __init__(self, root: str, parts: Sequence[str]) -> None:
        self._descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for depth, part in enumerate(parts, 1):
            try:
                self._enter(part)
            except OSError as error:
                os.close(self._descriptor)
                link = error.errno in (errno.ELOOP, errno.ENOTDIR)
                reason = "this is a link or a file, where a directory must be" if link else error.strerror
                raise OSError(error.errno, reason, os.path.join(root, *parts[:depth])) from None

    def _enter(self, part: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=self._descriptor)
        inner = os.open(part, _DIRECTORY, dir_fd=self._descriptor)
        os.close(self._descriptor)
        self._descriptor = inner

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, _BUSY, path) from None
    except OSError:
        pass  # some network file systems cannot: go on
