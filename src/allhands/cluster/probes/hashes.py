"""SHA-256 of files, several at a time, and a cache of those that have not changed since."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

BEAT_S = 0.5
_READERS = 4
_PIECE = 4 << 20
_SETTLED_NS = 1_500_000_000  # a file that has changed later than this may change again within one tick of its clock

Digest = tuple[os.stat_result, str]
Beat = Callable[[int], None]


class HashCache:
    """SHA-256 of files whose size, times and inode are still those of the time when they were read.

    They are kept in the file ``path``; ``None``: for this process alone.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError), open(path, encoding="utf-8") as stream:
            self._known = dict(json.load(stream))

    def digest(self, path: str, told: Beat) -> Digest:
        """Status and hash of a regular file, which is read unless its hash is known. Raises OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name must not hold us up
        with open(descriptor, "rb", buffering=0) as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
            known = self._known.get(path)
            if isinstance(known, list) and known[:-1] == file_identity(status) and len(str(known[-1])) == 64:
                told(status.st_size)
                return status, str(known[-1])
            began, digest, piece = time.time_ns(), hashlib.sha256(), memoryview(bytearray(_PIECE))
            while count := stream.readinto(piece):
                digest.update(piece[:count])
                told(count)
            if file_identity(os.fstat(descriptor)) != file_identity(status):
                raise OSError(errno.EBUSY, "it changes while it is read", path)
        if max(status.st_ctime_ns, status.st_mtime_ns) < began - _SETTLED_NS:
            self.remember(path, status, digest.hexdigest())
        return status, digest.hexdigest()

    def remember(self, path: str, status: os.stat_result, digest: str) -> None:
        """Note the hash of a file as it is now."""
        self._known[path] = [*file_identity(status), digest]

    def save(self) -> None:
        """Write the hashes of files that still exist; a cache that cannot be written is done without."""
        if self._path is None:
            return
        draft = f"{self._path}.{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                json.dump({path: value for path, value in self._known.items() if os.path.lexists(path)}, stream)
            os.replace(draft, self._path)


def file_identity(status: os.stat_result) -> list[int]:
    """Numbers of which one changes when a file is written or replaced."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def all_digests(paths: Sequence[str], cache: HashCache, beat: Beat) -> list[Any]:
    """Status and hash of each file, or its OSError; ``beat`` hears twice a second how many bytes have been read."""
    found: list[Any] = [None] * len(paths)
    numbers, read = iter(range(len(paths))), [0] * _READERS

    def work(reader: int) -> None:
        def told(count: int) -> None:
            read[reader] += count

        for number in numbers:
            try:
                found[number] = cache.digest(paths[number], told)
            except OSError as error:
                found[number] = error

    threads = [threading.Thread(target=work, args=(reader,), daemon=True) for reader in range(_READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(BEAT_S)
            beat(sum(read))
    beat(sum(read))
    cache.save()
    return found
