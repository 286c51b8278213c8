"""Attention over rows whose token positions are divided over ranks (context parallel).

A rank computes two pieces of each row, as rows of their own: (2 B, P) tokens, the first pieces of
all rows before the second ones (:class:`~allhands.data.pieces.Pieces`). mlx_lm's models ask their
key-value cache for the position of their first token, for the mask, and for all keys and values
that a token sees. :class:`ContextRow` takes the cache's place: it gives each piece its own
position, and gathers keys and values over the ranks. In the backward pass their gradients are added
up over the ranks, and each rank keeps those of its own positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from allhands.data.pieces import Pieces
from allhands.distributed.backend import Communicator, sum_scatter
from allhands.kernels.documents import DocumentRow


class ContextRow:
    """The cache of a layer while this rank's pieces of rows are computed.

    Attributes:
        offset: (2 B,) position of the first token of each piece.
        rows: number B of rows.
        length: tokens of a whole row, with padding.
        places: positions of the first and of the second piece.
        windowed: true once a layer has asked for a mask that is narrower than the row.
    """

    # No dictionary of attributes: recomputation would take it apart for its arrays.
    __slots__ = ("_documents", "_group", "length", "offset", "places", "rows", "windowed")

    def __init__(
        self, group: Communicator, rows: int, piece: int, documents: mx.array | None
    ) -> None:
        """Take ``rows`` B, each of 2 N pieces of ``piece`` P tokens.

        ``documents``: (B, 2 N P), the document number at each position.
        """
        numbers = Pieces(group.rank, group.size).numbers
        self._group, self.rows = group, rows
        self._documents = None if documents is None else DocumentRow(documents)
        self.length = 2 * group.size * piece
        self.places = tuple(range(number * piece, (number + 1) * piece) for number in numbers)
        self.offset = mx.array(
            [places.start for places in self.places for _ in range(rows)], dtype=mx.int32
        )
        self.windowed = False

    @property
    def starts(self) -> NDArray[np.int32] | None:
        """(B, 2 N P): first position of the document at each position; ``None``: 0 everywhere."""
        return None if self._documents is None else self._documents.starts

    def make_mask(self, _length: int, *, window_size: int | None = None, **_: Any) -> mx.array:
        """(2 B, 1, P, 2 N P) bool: true where a query (third axis) sees a key (fourth axis)."""
        everyone = mx.arange(self.length)
        own = mx.stack([mx.arange(places.start, places.stop) for places in self.places])
        distance = own[:, :, None] - everyone
        visible = distance >= 0
        if window_size is not None and window_size < self.length:
            self.windowed = True
            visible = visible & (distance < window_size)
        piece = own.shape[1]
        visible = mx.broadcast_to(visible[:, None], (2, self.rows, piece, self.length))
        if self._documents is not None:
            numbers = self._documents.numbers
            visible = visible & (numbers[:, own].swapaxes(0, 1)[..., None] == numbers[:, None, :])
        return visible.reshape(2 * self.rows, 1, piece, self.length)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """(2 B, heads, P, D) -> (2 B, heads, 2 N P, D): gather the keys and values of whole rows,
        for each of their pieces.
        """
        whole = self.joined(keys.swapaxes(1, 2), values.swapaxes(1, 2))
        first, second = (mx.concatenate([each, each]).swapaxes(1, 2) for each in whole)
        return first, second

    def joined(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """(2 B, P, ..., D) -> (B, 2 N P, ..., D): gather keys and values over ranks, in the order
        of positions.

        One exchange carries both. The gradient is this rank's part of the sum over ranks.
        """

        def forward(*own: mx.array) -> list[mx.array]:
            return self.joined_of(own)

        def backward(
            _primals: Any, cotangents: Sequence[mx.array], _outputs: Any
        ) -> list[mx.array]:
            return self.own_of(cotangents)

        function: Any = mx.custom_function(forward)
        function.vjp(backward)
        first, second = function(keys, values)
        return first, second

    def joined_of(self, own: Sequence[mx.array]) -> list[mx.array]:
        """Return the arrays of :meth:`joined`, without a gradient."""
        everyone = self._group.all_gather(mx.concatenate(list(own), axis=-1))
        return _apart(self._in_order(everyone), own[0].shape[-1])

    def own_of(self, whole: Sequence[mx.array]) -> list[mx.array]:
        """Sum arrays like those of :meth:`joined_of` over ranks; return this rank's part."""
        mine = sum_scatter(self._group, self._by_rank(mx.concatenate(list(whole), axis=-1)))
        return _apart(mine, whole[0].shape[-1])

    def _in_order(self, everyone: mx.array) -> mx.array:
        """(N 2 B, P, ...) -> (B, 2 N P, ...)."""
        pieces = everyone.reshape(-1, 2, self.rows, *everyone.shape[1:])
        ordered = mx.concatenate([pieces[:, 0], pieces[::-1, 1]])
        return ordered.swapaxes(0, 1).reshape(self.rows, self.length, *everyone.shape[2:])

    def _by_rank(self, whole: mx.array) -> mx.array:
        """(B, 2 N P, ...) -> (N 2 B, P, ...)."""
        size, piece = self._group.size, len(self.places[0])
        ordered = whole.reshape(self.rows, 2 * size, piece, *whole.shape[2:]).swapaxes(0, 1)
        pieces = mx.stack([ordered[:size], ordered[size:][::-1]], axis=1)
        return mx.contiguous(pieces.reshape(-1, *pieces.shape[3:]))


def _apart(joined: mx.array, width: int) -> list[mx.array]:
    return [mx.contiguous(joined[..., :width]), mx.contiguous(joined[..., width:])]


def caches_across(
    num_layers: int, tokens: mx.array, documents: mx.array | None, group: Communicator
) -> list[Any]:
    """Return the ``cache`` argument of a model of ``num_layers`` for this rank's pieces of rows.

    Args:
        tokens: (2 B, P).
        documents: (B, 2 N P) int32, the document number at each position of whole rows.
    """
    # One object: the mask is built once and shared by the layers that ask for it.
    return [ContextRow(group, tokens.shape[0] // 2, tokens.shape[1], documents)] * num_layers
