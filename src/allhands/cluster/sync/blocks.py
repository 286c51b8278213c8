"""Files as blocks with hashes, the manifest that lists them, and the hashes that are known already.

This module is sent to every host and runs there without allhands: standard library only, Python 3.9 or newer.

A file is known by its size and the SHA-256 of each of its blocks. A manifest may come from anywhere: its names are
refused unless they are plain and stay below their root.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 32
PARTIAL = (".allhands-", ".part")  # around the name of a file that is not whole yet
_MOST_BYTES = 1 << 50
_MOST_FILES = 4_000_000
_SETTLED_NS = 1_500_000_000  # a file that has changed later than this may change again within one tick of its clock
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe of that name must not hold us up


class BlockRefused(ValueError):
    """A manifest that asks for something outside of its roots, or makes no sense."""


class BlockEntry:
    """One file of a manifest.

    Attributes:
        root: the number of its root.
        parts: its path below the root.
        size: in bytes.
        mtime_ns: time of its last change, in nanoseconds.
        mode: its permissions.
        digests: of its blocks, one after the other.
    """

    def __init__(self, root: int, parts: Sequence[str], size: int, mtime_ns: int, mode: int, digests: bytes) -> None:
        self.root = root
        self.parts = tuple(parts)
        self.size = size
        self.mtime_ns = mtime_ns
        self.mode = mode
        self.digests = digests

    @property
    def num_blocks(self) -> int:
        """How many blocks it has; none if it is empty."""
        return count_blocks(self.size)

    def digest(self, block: int) -> bytes:
        """SHA-256 of a block."""
        return self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]

    def block_size(self, block: int) -> int:
        """Bytes of a block; only the last one is smaller than the others."""
        return min(BLOCK_BYTES, self.size - block * BLOCK_BYTES)

    @property
    def partial_name(self) -> str:
        """The hidden name beside it under which it grows."""
        whole = hashlib.sha256(os.fsencode("/".join(self.parts))).hexdigest()
        return f"{PARTIAL[0]}{whole[:24]}{PARTIAL[1]}"

    def as_json(self) -> list[Any]:
        """For :func:`read_manifest`."""
        path = "/".join(self.parts)
        return [self.root, path, self.size, self.mtime_ns, self.mode, self.digests.hex()]


def count_blocks(size: int) -> int:
    """Blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK_BYTES)


def is_partial(name: str) -> bool:
    """Whether this is the name of a file that is not whole yet."""
    return name.startswith(PARTIAL[0]) and name.endswith(PARTIAL[1])


def safe_parts(path: object) -> tuple[str, ...]:
    """The parts of a path below a root.

    Raises:
        Refused: it is absolute, climbs, holds a NUL, or is nothing that a file can be called.
    """
    if not isinstance(path, str) or not path or "\0" in path:
        raise BlockRefused(f"{ascii(path)[:80]} is not the path of a file")
    parts = tuple(path.split("/"))
    try:
        long = len(os.fsencode(path)) > 4096 or any(len(os.fsencode(part)) > 255 for part in parts)
    except UnicodeEncodeError:
        long = True
    if long or any(part in ("", ".", "..") for part in parts) or is_partial(parts[-1]):
        raise BlockRefused(f"{ascii(path)[:80]} is not a path below a directory")
    return parts


def read_manifest(listed: object, num_roots: int) -> list[BlockEntry]:
    """The files of a manifest, checked.

    Raises:
        Refused: something in it is not as it must be.
    """
    if not isinstance(listed, list) or len(listed) > _MOST_FILES:
        raise BlockRefused("the manifest is not a list of files")
    entries = [_entry(item, num_roots) for item in listed]
    places = {(entry.root, entry.parts) for entry in entries}
    if len(places) < len(entries):
        raise BlockRefused("a file stands twice in the manifest")
    return entries


def _entry(item: object, num_roots: int) -> BlockEntry:
    if not isinstance(item, list) or len(item) != 6:
        raise BlockRefused("a file of the manifest is not understood")
    root, path, size, mtime_ns, mode, digests = item
    numbers = (root, size, mtime_ns, mode)
    if not all(isinstance(number, int) for number in numbers) or not 0 <= root < num_roots:
        raise BlockRefused("a file of the manifest is not understood")
    if not 0 <= size < _MOST_BYTES or not 0 <= mode <= 0o777 or not abs(mtime_ns) < 1 << 63:
        raise BlockRefused("a file of the manifest has an impossible size, time or mode")
    try:
        content = bytes.fromhex(digests)
    except (TypeError, ValueError):
        raise BlockRefused("a hash of the manifest is none") from None
    if len(content) != count_blocks(size) * DIGEST_BYTES:
        raise BlockRefused("a file of the manifest has not as many hashes as blocks")
    return BlockEntry(root, safe_parts(path), size, mtime_ns, mode, content)


def sha256(content: Any) -> bytes:
    """The hash of a block."""
    return hashlib.sha256(content).digest()


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """Open a file for reading; links are followed.

    Raises:
        OSError: there is none, or it is no regular file.
    """
    descriptor = os.open(path, _READ)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise FileNotFoundError(2, "not a regular file", path)
    return descriptor, status


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """``length`` bytes from ``offset``, fewer at the end of the file."""
    content = os.pread(descriptor, length, offset)
    while len(content) < length:
        more = os.pread(descriptor, length - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content


def block_contents(descriptor: int, size: int) -> Iterator[bytes]:
    """The blocks of a file that is ``size`` bytes long; fewer or shorter ones if it is not any more."""
    for block in range(count_blocks(size)):
        yield read_at(descriptor, min(BLOCK_BYTES, size - block * BLOCK_BYTES), block * BLOCK_BYTES)


def hash_blocks(descriptor: int, size: int, told: Callable[[int], None]) -> bytes:
    """The hashes of a file's blocks; ``told`` hears of each block's size once it has been read."""
    digests: list[bytes] = []
    for content in block_contents(descriptor, size):
        digests.append(sha256(content))
        told(len(content))
    return b"".join(digests)


class HashCache:
    """Hashes of files whose size, times and inode are still those of the time when they were read.

    Args:
        path: a private file; ``None``: nothing is remembered.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._known: dict[str, list[Any]] = {}
        self._changed = False
        with suppress(OSError, ValueError):
            if path is not None:
                with open(path, encoding="utf-8") as stream:
                    content = json.load(stream)
                if isinstance(content, dict):
                    self._known = {key: value for key, value in content.items() if _is_record(value)}

    def digests(self, path: str, told: Callable[[int], None]) -> tuple[os.stat_result, bytes]:
        """Status and hashes of a file, which is read if they are not known.

        Raises:
            OSError: it cannot be read, or changes while it is.
        """
        descriptor, status = open_regular(path)
        try:
            known = self._known.get(path)
            if known is not None and known[:5] == _identity(status):
                told(status.st_size)
                return status, bytes.fromhex(known[5])
            began_ns = time.time_ns()
            found = hash_blocks(descriptor, status.st_size, told)
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if _identity(after) != _identity(status) or len(found) != count_blocks(status.st_size) * DIGEST_BYTES:
            raise OSError(16, "it changes while it is read", path)
        if max(status.st_ctime_ns, status.st_mtime_ns) < began_ns - _SETTLED_NS:
            self._remember(path, status, found)
        return status, found

    def received(self, path: str, status: os.stat_result, digests: bytes) -> None:
        """A file that has just been written, with the hashes that its blocks had."""
        self._remember(path, status, digests)

    def save(self) -> None:
        """Write what is known of files that still exist; a cache that cannot be written is done without."""
        if self._path is None or not self._changed:
            return
        kept = {path: value for path, value in list(self._known.items()) if os.path.lexists(path)}
        draft = f"{self._path}.{secrets.token_hex(4)}"
        with suppress(OSError):
            os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                json.dump(kept, stream)
            os.replace(draft, self._path)
        with suppress(OSError):
            os.unlink(draft)
        self._changed = False

    def _remember(self, path: str, status: os.stat_result, digests: bytes) -> None:
        self._known[path] = [*_identity(status), digests.hex()]
        self._changed = True


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _is_record(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 6 or not isinstance(value[5], str):
        return False
    sizes = isinstance(value[2], int) and len(value[5]) == 2 * DIGEST_BYTES * count_blocks(value[2])
    return sizes and not set(value[5]) - set("0123456789abcdef")
