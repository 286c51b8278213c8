"""This computer's side of a sync: the hashes of its files, their blocks, and the certificate of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from allhands.cluster.sync.blocks import BLOCK_BYTES, BlockEntry, HashCache, open_regular, read_at, sha256
from allhands.cluster.sync.plan import FoundFiles, Plan
from allhands.cluster.sync.shelf import Shelf, WrongBlock
from allhands.errors import ConfigError, DataError

_READERS = 4
_KEPT = 4  # blocks in memory: hosts that are fed side by side ask for the same ones
_CONFIG = """[req]
distinguished_name = name
x509_extensions = own
[name]
[own]
basicConstraints = critical, CA:TRUE
"""
_OPENSSL = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3650", "-batch", "-subj", "/CN=allhands-sync")


class Stopped(Exception):
    """The sync has ended while files were being read."""


def hash_files(plan: Plan, cache: HashCache, told: Callable[[int], None]) -> list[BlockEntry]:
    """The manifest's entries, in the order of the plan; files that are not known already are read.

    Args:
        told: hears of every number of bytes that has been read; what it raises ends the reading.

    Raises:
        DataError: a file cannot be read.
    """
    numbers = {root: number for number, root in enumerate(plan.roots)}

    def entry(found: FoundFiles) -> BlockEntry:
        try:
            status, digests = cache.digests(str(found.path), told)
        except OSError as error:
            raise DataError(
                f"cannot be read: {error.strerror}", where=str(found.path), hint="check its rights, then sync again"
            ) from None
        mode = status.st_mode & 0o777
        return BlockEntry(numbers[found.root], found.parts, status.st_size, status.st_mtime_ns, mode, digests)

    with ThreadPoolExecutor(_READERS) as pool:
        futures = [pool.submit(entry, found) for found in plan.files]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            cache.save()


class SourceShelf(Shelf):
    """All blocks of the files here; a file that is not any more what was hashed is withdrawn.

    Args:
        paths: of the files.
        entries: of the files.
        changed: hears of the number of every file that is withdrawn.
    """

    def __init__(self, paths: Sequence[Path], entries: Sequence[BlockEntry], changed: Callable[[int], None]) -> None:
        super().__init__(entries)
        self._paths = paths
        self._tell = changed
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.add((file, block) for file, entry in enumerate(entries) for block in range(entry.num_blocks))

    def read(self, file: int, block: int) -> bytes:
        """As in :class:`Shelf`."""
        with self._lock:
            if (kept := self._kept.get((file, block))) is not None:
                return kept
        content = self._read(file, block)
        if sha256(content) != self.entries[file].digest(block):
            self._withdraw(file)
            raise WrongBlock(f"{self._paths[file]} has changed")
        with self._lock:
            self._kept[file, block] = content
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return content

    def _read(self, file: int, block: int) -> bytes:
        try:
            descriptor, _ = open_regular(str(self._paths[file]))
        except OSError:
            return b""
        try:
            return read_at(descriptor, self.entries[file].block_size(block), block * BLOCK_BYTES)
        except OSError:
            return b""
        finally:
            os.close(descriptor)

    def _withdraw(self, file: int) -> None:
        with self._lock:
            first = file not in self.withdrawn
            self.withdraw(file)
        if first:
            self._tell(file)


def has_openssl() -> bool:
    """Whether :func:`make_certificate` can do its work."""
    return shutil.which("openssl") is not None


def make_certificate() -> str:
    """A new certificate with its key, as PEM; made by the ``openssl`` program, which macOS and most Linuxes have.

    Raises:
        ConfigError: it cannot be made.
    """
    hint = "install openssl, or choose --transport ssh or tcp"
    with tempfile.TemporaryDirectory(prefix="allhands-sync-") as directory:
        config, key, certificate = (Path(directory) / name for name in ("config", "key", "certificate"))
        config.write_text(_CONFIG)
        argv = ["openssl", *_OPENSSL, "-config", str(config), "-keyout", str(key), "-out", str(certificate)]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            raise ConfigError("openssl cannot be run", where="--transport", hint=hint) from None
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().split("\n")[-1][:160]
            raise ConfigError(f"openssl cannot make a certificate: {reason}", where="--transport", hint=hint)
        return key.read_text() + certificate.read_text()
