"""Exchange of JSON values and bytes, from rank 0 to all or from all to all, with collectives that
every back-end has.

Bytes are sent bit for bit as sums of 32-bit integers, to which the other ranks add zeros, in
pieces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from allhands.distributed.backend import Communicator
from allhands.errors import peer_lost

# Bytes a collective: large enough for speed, small beside any model.
_PIECE_BYTES = 4 << 20

Bytes = bytes | bytearray | memoryview


def gather_rows(communicator: Communicator, row: Any) -> NDArray[Any]:
    """Return the numbers of every rank's ``row``, a list or array of n numbers: (size, n)."""
    return np.array(communicator.all_gather(mx.array(row)[None])).reshape(communicator.size, -1)


def all_equal(communicator: Communicator, text: str) -> bool:
    """Return True if every rank has the same ``text``; all ranks call this together."""
    digests = gather_rows(
        communicator, np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype=np.int32)
    )
    return bool((digests == digests[0]).all())


def votes(communicator: Communicator, vote: bool) -> int:
    """Return the number of ranks whose ``vote`` is true."""
    return int(np.asarray(communicator.all_sum(mx.array([float(vote)])))[0])


def hand_out_json(communicator: Communicator, value: Any) -> Any:
    """Return rank 0's JSON ``value`` on every rank; the other ranks' values are ignored."""
    if communicator.size == 1:
        return value
    text = json.dumps(value).encode() if communicator.rank == 0 else b""
    length = np.asarray(communicator.all_sum(mx.array([len(text)], dtype=mx.uint32)))
    return _value_of(b"".join(hand_out_bytes(communicator, [text], int(length[0]))))


def gather_json(communicator: Communicator, value: Any) -> list[Any]:
    """Return every rank's JSON ``value``, on every rank."""
    text = json.dumps(value, default=str).encode()
    sizes: list[int] = gather_rows(communicator, np.array([len(text)], dtype=np.int32))[
        :, 0
    ].tolist()
    texts = [bytearray() for _ in sizes]
    for pieces in gather_bytes(communicator, [text], sizes):
        for whole, piece in zip(texts, pieces, strict=True):
            whole += piece
    return [_value_of(whole) for whole in texts]


def _value_of(text: bytes | bytearray) -> Any:
    """Return the received JSON value.

    Raises:
        PeerLostError: it is not JSON. MLX's ring may return arbitrary numbers in place of those of
            a lost rank.
    """
    try:
        return json.loads(text)
    except ValueError:
        raise peer_lost() from None


def hand_out_bytes(
    communicator: Communicator, pieces: Iterable[Bytes], size: int
) -> Iterator[memoryview]:
    """Yield rank 0's bytes on every rank, in pieces of another size.

    All ranks must read to the end together. A piece is valid until the next one is requested.

    Args:
        pieces: the bytes, on rank 0; ignored on other ranks.
        size: number of bytes.
    """
    own = _blocks(pieces, _PIECE_BYTES) if communicator.rank == 0 else None
    for start in range(0, size, _PIECE_BYTES):
        length = min(_PIECE_BYTES, size - start)
        words = np.zeros(-(-length // 4), dtype=np.uint32)
        if own is not None:
            words.view(np.uint8)[:length] = next(own)
        yield np.asarray(communicator.all_sum(mx.array(words))).view(np.uint8)[:length].data


def gather_bytes(
    communicator: Communicator, pieces: Iterable[Bytes], sizes: Sequence[int]
) -> Iterator[list[memoryview]]:
    """Yield every rank's bytes on every rank, one piece of each rank at a time.

    The piece of a rank without further bytes is empty. All ranks must read to the end together. A
    piece is valid until the next one is requested.

    Args:
        pieces: this rank's bytes.
        sizes: number of bytes of each rank.
    """
    most = max(sizes)
    block = 4 * -(-min(most, max(_PIECE_BYTES // communicator.size, 4)) // 4)
    own = _blocks(pieces, block)
    for start in range(0, most, max(block, 1)):
        words = np.zeros(block // 4, dtype=np.uint32)
        mine = next(own, np.empty(0, np.uint8))
        words.view(np.uint8)[: len(mine)] = mine
        rows = gather_rows(communicator, words.view(np.int32)).view(np.uint8)
        yield [
            row[: min(max(size - start, 0), block)].data
            for row, size in zip(rows, sizes, strict=True)
        ]


def _blocks(pieces: Iterable[Bytes], length: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the joined bytes of ``pieces`` in blocks of ``length``."""
    block, filled = np.empty(length, dtype=np.uint8), 0
    for piece in pieces:
        data = np.frombuffer(piece, dtype=np.uint8) if len(piece) else np.empty(0, np.uint8)
        while len(data):
            part = data[: length - filled]
            block[filled : filled + len(part)] = part
            filled, data = filled + len(part), data[len(part) :]
            if filled == length:
                yield block
                filled = 0
    if filled:
        yield block[:filled]
