"""The rows that a trained table of embeddings is looked up for, exchanged in place of the table's
gradient.

A backward pass comes to them last, so that whatever a table of a hundred thousand rows takes to
travel is waited for. They are as many as a batch has tokens. Where the table makes the logits as
well, that part of its gradient is there first, and travels beside the whole pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from allhands.data.loader import MicroBatch
from allhands.distributed.codecs import Codec
from allhands.distributed.reduce import Lookups, PendingReduce
from allhands.distributed.shards import Shards
from allhands.kernels.fused.embedding import Apart, OrderedEmbedding, add_in_order
from allhands.objectives.base import Objective
from allhands.parallel.gradient import Computing, FlatWeights, make_joined_gradient


class TravellingLookups:
    """A pass whose gradient has rows apart."""

    def __init__(
        self,
        table: OrderedEmbedding,
        index: int,
        gradient: Any,
        num_ranks: int,
        *,
        first: int = 0,
        codec: Codec | None = None,
    ) -> None:
        """Take the only ``table``, whose array has the number ``index``, and the gradient with its
        rows apart.

        ``first``: which of the gradient's arguments is the tokens; ``codec``: how the table's
        gradient would travel.
        """
        assert table.apart is not None
        self._apart = table.apart
        self._index = index
        self._gradient = gradient
        self._num_ranks = num_ranks
        self._first = first
        (self._num_rows, self._width), self._dtype = table.weight.shape, table.weight.dtype
        size = self._dtype.size
        packed = codec is not None and codec.packs((self._num_rows, self._width), size)
        # Rows travel as they are, and should be fewer bytes than the table takes on the way.
        self._most = self._num_rows * (
            min(1.0, 2 * codec.bits / (8 * size)) if packed and codec else 1.0
        )

    @staticmethod
    def of(
        model: nn.Module,
        flat: FlatWeights | None,
        num_ranks: int,
        objective: Objective,
        computing: Computing,
        codec: Codec | None = None,
    ) -> TravellingLookups | None:
        """``None`` where not one table is trained as an array of its own."""
        tables = [module for module in model.modules() if isinstance(module, OrderedEmbedding)]
        if flat is None or len(tables) != 1:
            return None
        [table] = tables
        index = flat.leaves.index_of(table)
        if index is None:
            return None
        table.apart = Apart()
        how: Any = {
            "compiled": computing.compiled,
            "dropout": computing.dropout,
            "objective": objective,
        }
        gradient = make_joined_gradient(model, flat, apart=table.apart, **how)
        # Keys of dropout come before.
        first = 0 if computing.dropout is None else 1
        return TravellingLookups(table, index, gradient, num_ranks, first=first, codec=codec)

    def fits(self, batch: MicroBatch) -> bool:
        """True if all ranks' rows are fewer than the table's, as it travels; decided by what every
        rank knows.
        """
        return batch.sole and self._num_ranks * batch.most < self._most

    def __call__(
        self, batch: MicroBatch, arguments: Sequence[mx.array]
    ) -> tuple[mx.array, list[mx.array], Lookups]:
        """Loss, gradients without what the rows contribute, and the rows, as many on each rank."""
        shape = (*batch.inputs.shape, self._width)
        loss, [*grads, rows] = self._gradient(
            *arguments, rows=mx.broadcast_to(mx.zeros((), dtype=self._dtype), shape)
        )
        missing = batch.most - batch.inputs.size
        # Not one more array from the host: see batch_memory.
        rows, ids = rows.reshape(-1, self._width), arguments[self._first].reshape(-1)
        if missing:
            rows, ids = mx.pad(rows, [(0, missing), (0, 0)]), mx.pad(ids, (0, missing))
        return loss, grads, Lookups(self._index, rows, ids, besides=self._apart.besides)


def with_lookups(pending: PendingReduce, shards: Shards | None) -> PendingReduce:
    """Sums in which the look-ups of all ranks are added where they belong, in this rank's parts of
    ``shards``.
    """
    if (lookups := pending.lookups) is None:
        return pending
    arrays, ids, rows = list(pending.arrays), lookups.ids, lookups.rows
    if shards is not None and shards.divided[lookups.index]:
        ids, rows = shards.own_rows(lookups.index, ids, rows)
    total = arrays[lookups.index]
    table = total.reshape(-1, rows.shape[1])
    added = add_in_order(table, ids, rows, onto=lookups.besides)
    arrays[lookups.index] = added.reshape(total.shape)
    return replace(pending, arrays=arrays, lookups=None)
