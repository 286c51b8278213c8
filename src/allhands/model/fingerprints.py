"""Fingerprints of weights: a hash over a model's files, by many cores and, if wanted, in the
background.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from allhands.errors import ModelError
from allhands.model.weight_files import absent, present
from allhands.runtime.blas import available_cores
from allhands.runtime.threads import side_by_side

BLOCK_BYTES = 64 << 20  # hashed in one piece, by one core
_PIECE_BYTES = 4 << 20
_MOST_THREADS = 8

Block = tuple[Path, int]


def fingerprint(path: Path) -> str:
    """Return a SHA-256 over names, sizes and contents of the weight files in the directory
    ``path``.

    Contents are hashed in blocks of :data:`BLOCK_BYTES`, in parallel: one hash over a file of 15 GB
    takes 8 seconds and more. If files are missing because this computer has only some stages, the
    list beside the files has their hashes.

    Raises:
        ModelError: a file cannot be read.
    """
    whole = hashlib.sha256()
    for name, (size, blocks) in sorted(_contents(path).items()):
        whole.update(f"{name} {size}\n".encode())
        whole.update("".join(f"{block}\n" for block in blocks).encode())
    return whole.hexdigest()


def fingerprints(path: Path) -> dict[str, str]:
    """Return a hash for each weight file: the SHA-256 of its content; with several blocks, that of
    its size and the blocks' hashes.

    Raises:
        ModelError: a file cannot be read.
    """
    return {
        name: blocks[0]
        if len(blocks) == 1
        else hashlib.sha256("\n".join((str(size), *blocks)).encode()).hexdigest()
        for name, (size, blocks) in _contents(path).items()
    }


def _contents(path: Path) -> dict[str, tuple[int, list[str]]]:
    """Return the size and the hashes of the blocks of each file of the model."""
    files = present(path)
    try:
        sizes = {file: file.stat().st_size for file in files}
        found = {file.name: (sizes[file], blocks) for file, blocks in blocks_of(files).items()}
    except OSError as error:
        raise ModelError(
            f"the weights cannot be read: {error.strerror or error}",
            code="weights-unreadable",
            where=str(error.filename or path),
            hint="check that the model is still there",
        ) from error
    return found | {name: (each.bytes, each.blocks) for name, each in absent(path).items()}


def blocks_of(files: Sequence[Path]) -> dict[Path, list[str]]:
    """Return the SHA-256 of each block of these files.

    Raises:
        OSError: a file cannot be read.
    """
    blocks = [
        (file, start)
        for file in files
        for start in range(0, max(file.stat().st_size, 1), BLOCK_BYTES)
    ]
    digests = side_by_side(_digest, blocks, min(_MOST_THREADS, available_cores()))
    found: dict[Path, list[str]] = {file: [] for file in files}
    for (file, _), digest in zip(blocks, digests, strict=True):
        found[file].append(digest)
    return found


def earlier_fingerprint(path: Path) -> str:
    """Return the fingerprint that earlier versions computed; their checkpoints record it."""
    digest = hashlib.sha256()
    for file in present(path):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.name} {file.stat().st_size} {content}\n".encode())
    return digest.hexdigest()


def begin_fingerprint(path: Path) -> Future[str]:
    """Compute :func:`fingerprint` of ``path`` in a thread that does not keep the process alive."""
    future: Future[str] = Future()

    def work() -> None:
        try:
            future.set_result(fingerprint(path))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="allhands-fingerprint", daemon=True).start()
    return future


def _digest(block: Block) -> str:
    """Return the SHA-256 of a block of a file."""
    file, start = block
    digest, piece, left = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES)), BLOCK_BYTES
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left and (count := stream.readinto(piece[: min(left, _PIECE_BYTES)])):
            digest.update(piece[:count])
            left -= count
    return digest.hexdigest()
