"""Embeddings whose gradient adds the rows of repeated tokens in a fixed order, the same in every
run.

The gradient of ``weight[ids]`` adds one row for each token to the row of its id. On a GPU MLX does
this with atomic additions in no fixed order, and sums of floats depend on the order: two equal runs
of full fine-tuning end with different weights. Here only the backward pass differs; values,
parameter names and the module tree stay.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRAEmbedding
from mlx_lm.tuner.lora import LoRAEmbedding

from allhands.kernels.fastmath import with_vjp
from allhands.kernels.fused import kernels
from allhands.kernels.instances import give_form


def make_deterministic(model: nn.Module) -> int:
    """Let every trained embedding of ``model`` compute the same gradient each time, bit by bit.

    Call it after the choice of trained weights. Only these instances change (their class becomes a
    subclass), and a second call changes nothing. Classes of other libraries derived from
    :class:`mlx.nn.Embedding` may look up their rows in another way, so they are not changed.

    Returns:
        Number of changed embeddings.
    """
    changed = 0
    for module in model.modules():
        found = _IN_ORDER.get(type(module))
        if found is not None and module.trainable_parameters().keys() & found.tables:
            give_form(module, found)
            changed += 1
    return changed


def _rows(table: mx.array, ids: mx.array) -> mx.array:
    return kernels.take_rows(table, ids) if goes_by_kernels(table) else table[ids]


def goes_by_kernels(table: mx.array) -> bool:
    """Return whether a kernel looks up the rows of a table and adds up their gradients."""
    return kernels.available() and table.ndim == 2 and kernels.suits(table)


def _gradient(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    """Return the gradient in the table; MLX never computes the one in the ids, but asks for it."""
    table, ids = primals
    return add_in_order(table, ids, cotangent), mx.zeros_like(ids)


# ``table[ids]`` with a gradient that is always the same: (V, ...) of any float type, and integers
# of any shape, whose negative ones count from the end -> ``ids.shape`` + (...).
#
# The rows of one token are added in float32, as a tree over their order in ``ids``, and rounded
# once to the table's type. So its gradient depends on these rows and their order alone, not on
# other tokens or their places. For N ids and rows of D values this takes log2(N) passes over (N, D)
# float32 arrays; a few of these are in memory at a time, besides the gradient itself. On an NVIDIA
# GPU a kernel adds the rows one after the other instead, in one pass.
look_up = with_vjp(_rows, _gradient)


def _rows_apart(table: mx.array, ids: mx.array, _rows_of: mx.array) -> mx.array:
    return _rows(table, ids)


def _gradient_apart(
    primals: Any, cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Return the gradient in the rows themselves; the others are not used."""
    table, ids, _rows_of = primals
    return mx.zeros_like(table), mx.zeros_like(ids), cotangent


_look_up_apart = with_vjp(_rows_apart, _gradient_apart)


def add_in_order(
    table: mx.array, ids: mx.array, cotangent: mx.array, *, onto: bool = False
) -> mx.array:
    """Return the sum of the rows of ``cotangent`` (``ids.shape`` + (...)) for each id, like
    ``table``.

    ``onto``: add them to ``table`` itself, which must then have no other user.
    """
    result = table if onto else mx.zeros_like(table)
    if cotangent.size == 0:
        return result
    flat = ids.flatten().astype(mx.int32)
    flat = mx.where(flat < 0, flat + table.shape[0], flat)
    if goes_by_kernels(table) and cotangent.dtype == table.dtype:
        rows = cotangent.reshape(flat.size, table.shape[1])
        return kernels.add_rows(flat, rows, table.shape[0], onto=table if onto else None)
    # The sort is stable, as MLX says: equal ids keep their order.
    order = mx.argsort(flat)
    flat = flat[order]
    totals = _totals(flat, cotangent.reshape(flat.size, math.prod(table.shape[1:]))[order])
    # Still atomic, but only one summand of each row is not zero, its total: exact in any order.
    return result.at[flat].add(totals.astype(table.dtype).reshape(flat.size, *table.shape[1:]))


def _totals(ids: mx.array, rows: mx.array) -> mx.array:
    """(N, D) float32: the sum of each id's rows at its last place and zeros elsewhere, for (N,)
    sorted ids.
    """
    last = mx.concatenate([ids[1:] != ids[:-1], mx.array([True])])
    return mx.where(last[:, None], _running_sums(ids, rows.astype(mx.float32)), 0)


def _running_sums(ids: mx.array, rows: mx.array) -> mx.array:
    """(N, D): at each place the sum of its id's rows up to there, for (N,) sorted ids (Hillis and
    Steele).
    """
    step = 1
    while step < len(ids):
        same = (ids[step:] == ids[:-step])[:, None]
        # Chosen, not multiplied by 0 or 1: another token's nan stays its own.
        rows = mx.concatenate([rows[:step], rows[step:] + mx.where(same, rows[:-step], 0)])
        step *= 2
    return rows


class Apart:
    """Stand-in for the rows that an embedding looks up, for a gradient in these instead of in its
    table.

    Attributes:
        counts: true while rows are installed: uses of the table are counted.
        uses: how often the table was read so far.
        replaced: how many of these uses were look-ups of installed rows.
    """

    def __init__(self) -> None:
        self.uses = 0
        self.replaced = 0
        self.counts = False
        self._rows: mx.array | None = None

    @property
    def besides(self) -> bool:
        """True if the table has a further gradient, as where it makes the logits as well."""
        return self.uses > self.replaced

    @contextmanager
    def installed(self, rows: mx.array) -> Generator[None]:
        """Let the next look-up be of ``rows``, ``ids.shape`` + (D,), whose values do not matter."""
        self._rows, self.counts = rows, True
        try:
            yield
        finally:
            self._rows, self.counts = None, False

    def take(self, shape: tuple[int, ...]) -> mx.array | None:
        """Return the installed rows for one look-up of this shape; ``None`` for any other."""
        if self._rows is None or self._rows.shape != shape:
            return None
        self.replaced += 1
        rows, self._rows = self._rows, None
        return rows


class OrderedEmbedding(nn.Embedding):
    """:class:`mlx.nn.Embedding` with :data:`look_up`.

    Attributes:
        apart: for a gradient in the rows that are looked up, if that is wanted.
    """

    tables = frozenset({"weight"})
    apart: Apart | None = None

    def __call__(self, x: mx.array) -> mx.array:
        table = self.weight
        rows = None if self.apart is None else self.apart.take((*x.shape, table.shape[-1]))
        return (
            look_up(table, x) if rows is None else _look_up_apart(mx.stop_gradient(table), x, rows)
        )

    def __getattr__(self, key: str) -> Any:
        apart = self.apart
        if key == "weight" and apart is not None and apart.counts:
            apart.uses += 1
        return super().__getattr__(key)


class RowsEmbedding(nn.Embedding):
    """A frozen :class:`mlx.nn.Embedding`, looked up by a kernel where there is one."""

    def __call__(self, x: mx.array) -> mx.array:
        return _rows(self.weight, x)


class OrderedLoRAEmbedding(LoRAEmbedding):
    """mlx_lm's LoRAEmbedding with :data:`look_up`."""

    tables = frozenset({"lora_a"})

    def __call__(self, x: mx.array) -> mx.array:
        rows: mx.array = self.embedding(x)
        update: mx.array = self.dropout(look_up(self.lora_a, x) @ self.lora_b)
        return rows + (self.scale * update).astype(rows.dtype)


class OrderedDoRAEmbedding(DoRAEmbedding):
    """mlx_lm's DoRAEmbedding with :data:`look_up`."""

    tables = frozenset({"lora_a", "m"})

    def __call__(self, x: mx.array) -> mx.array:
        rows: mx.array = self.embedding(x)
        update: mx.array = self.scale * look_up(self.lora_a, x) @ self.lora_b
        result = rows + self.dropout(update).astype(rows.dtype)
        norm = mx.stop_gradient(mx.linalg.norm(rows + update, axis=-1))
        return (look_up(self.m, x) / norm)[..., None] * result


# Exact types, because a subclass may have a look-up of its own.
_IN_ORDER: dict[type, Any] = cast(
    "dict[type, Any]",
    {
        nn.Embedding: OrderedEmbedding,
        LoRAEmbedding: OrderedLoRAEmbedding,
        DoRAEmbedding: OrderedDoRAEmbedding,
    },
)
