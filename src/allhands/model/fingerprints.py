"""Which weights a model has: a hash over its files, made by all cores, while other work goes on if wanted."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from pathlib import Path

from allhands.errors import ModelError
from allhands.runtime.blas import available_cores
from allhands.runtime.threads import side_by_side

BLOCK_BYTES = 64 << 20  # hashed in one piece, by one core
_PIECE_BYTES = 4 << 20
_MOST_THREADS = 8

Block = tuple[Path, int]


def fingerprint(path: Path) -> str:
    """SHA-256 over names, sizes and contents of the weight files in the directory ``path``.

    Contents are hashed in blocks of :data:`BLOCK_BYTES`, side by side: one hash over a file of 15 GB takes 8 seconds
    and more.

    Raises:
        ModelError: a file cannot be read.
    """
    files = _files(path)
    try:
        blocks = [(file, start) for file in files for start in range(0, max(file.stat().st_size, 1), BLOCK_BYTES)]
        threads = min(_MOST_THREADS, available_cores())
        digests = dict(zip(blocks, side_by_side(_digest, blocks, threads), strict=True))
        whole = hashlib.sha256()
        for file in files:
            whole.update(f"{file.name} {file.stat().st_size}\n".encode())
            whole.update("".join(f"{digests[block]}\n" for block in blocks if block[0] == file).encode())
    except OSError as error:
        raise ModelError(
            f"the weights cannot be read: {error.strerror or error}",
            where=str(error.filename or path),
            hint="check that the model is still there",
        ) from error
    return whole.hexdigest()


def earlier_fingerprint(path: Path) -> str:
    """What :func:`fingerprint` was before contents were hashed in blocks: checkpoints of that time name it."""
    digest = hashlib.sha256()
    for file in _files(path):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.name} {file.stat().st_size} {content}\n".encode())
    return digest.hexdigest()


def begin_fingerprint(path: Path) -> Future[str]:
    """:func:`fingerprint` of ``path`` in a thread that does not keep the process alive."""
    future: Future[str] = Future()

    def work() -> None:
        try:
            future.set_result(fingerprint(path))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="allhands-fingerprint", daemon=True).start()
    return future


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("model*.safetensors"))


def _digest(block: Block) -> str:
    """SHA-256 over a block of a file."""
    file, start = block
    digest, piece, left = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES)), BLOCK_BYTES
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left and (count := stream.readinto(piece[: min(left, _PIECE_BYTES)])):
            digest.update(piece[:count])
            left -= count
    return digest.hexdigest()
