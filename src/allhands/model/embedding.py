"""Embeddings whose gradient adds the rows of repeated tokens in an order of its own, the same in every run.

The gradient of ``weight[ids]`` adds one row for each token to the row of its id. On a GPU MLX does this with atomic
additions, which come in any order, and sums of floats depend on the order: two equal runs of full fine-tuning end with
other weights. Here only the backward pass is another; values, parameter names and the module tree stay.
"""

from __future__ import annotations

import math
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRAEmbedding
from mlx_lm.tuner.lora import LoRAEmbedding

from allhands.model.fused import kernels


def make_deterministic(model: nn.Module) -> int:
    """Let every trained embedding of ``model`` compute the same gradient, bit by bit, whenever it is asked.

    To be called when it is settled what is trained. Only these instances change (their class becomes a subclass), and
    doing it twice changes nothing. Classes of other libraries derived from :class:`mlx.nn.Embedding`, which may look
    their rows up in ways of their own, are left as they are.

    Returns:
        How many embeddings it changed.
    """
    changed = 0
    for module in model.modules():
        found = _IN_ORDER.get(type(module))
        if found is not None and module.trainable_parameters().keys() & found.tables:
            module.__class__ = found
            changed += 1
    return changed


def look_up(table: mx.array, ids: mx.array) -> mx.array:
    """``table[ids]``, with a gradient that is always the same.

    The rows of one token are added in float32, as a tree over their order in ``ids``, and rounded once to the table's
    type. So its gradient depends on these rows and their order alone, not on other tokens or their places. For N ids
    and rows of D values this takes log2(N) passes over (N, D) float32, of which it holds a few at a time, beside the
    gradient itself. On an NVIDIA GPU a kernel adds them one after the other instead, in one pass.

    Args:
        table: (V, ...) of any float type.
        ids: of any shape and integer type; negative ones count from the end, as elsewhere in MLX.

    Returns:
        ``ids.shape`` + (...) rows.
    """
    return _look_up(table, ids)


def _rows(table: mx.array, ids: mx.array) -> mx.array:
    return kernels.take_rows(table, ids) if _by_kernels(table) else table[ids]


def _by_kernels(table: mx.array) -> bool:
    return kernels.available() and table.ndim == 2 and kernels.suits(table)


def _gradient(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    """The gradient in the table; that in the ids, which MLX asks for too, is never computed."""
    table, ids = primals
    return _add_in_order(table, ids, cotangent), mx.zeros_like(ids)


_look_up: Any = mx.custom_function(_rows)
_look_up.vjp(_gradient)


def _add_in_order(table: mx.array, ids: mx.array, cotangent: mx.array) -> mx.array:
    """The sum of the rows of ``cotangent`` (``ids.shape`` + (...)) for each id, like ``table``."""
    result = mx.zeros_like(table)
    if cotangent.size == 0:
        return result
    flat = ids.flatten().astype(mx.int32)
    flat = mx.where(flat < 0, flat + table.shape[0], flat)
    if _by_kernels(table) and cotangent.dtype == table.dtype:
        return kernels.add_rows(flat, cotangent.reshape(flat.size, table.shape[1]), table.shape[0])
    # Stable, as MLX says: equal ids keep the order of their places.
    order = mx.argsort(flat)
    flat = flat[order]
    totals = _totals(flat, cotangent.reshape(flat.size, math.prod(table.shape[1:]))[order])
    # Still atomic, but of all that is added to a row only its total is not zero: exact in any order.
    return result.at[flat].add(totals.astype(table.dtype).reshape(flat.size, *table.shape[1:]))


def _totals(ids: mx.array, rows: mx.array) -> mx.array:
    """(N, D) float32: the sum of each id's rows at its last place and zeros elsewhere, for (N,) sorted ids."""
    last = mx.concatenate([ids[1:] != ids[:-1], mx.array([True])])
    return mx.where(last[:, None], _running_sums(ids, rows.astype(mx.float32)), 0)


def _running_sums(ids: mx.array, rows: mx.array) -> mx.array:
    """(N, D): for each place the sum of the rows of its id up to there, for (N,) sorted ids (Hillis and Steele)."""
    step = 1
    while step < len(ids):
        same = (ids[step:] == ids[:-step])[:, None]
        # Chosen, not multiplied by 0 or 1: another token's nan stays its own.
        rows = mx.concatenate([rows[:step], rows[step:] + mx.where(same, rows[:-step], 0)])
        step *= 2
    return rows


class OrderedEmbedding(nn.Embedding):
    """:class:`mlx.nn.Embedding` with :func:`look_up`."""

    tables = frozenset({"weight"})

    def __call__(self, x: mx.array) -> mx.array:
        return look_up(self.weight, x)


class RowsEmbedding(nn.Embedding):
    """:class:`mlx.nn.Embedding` of which nothing is trained, looked up by a kernel where there is one."""

    def __call__(self, x: mx.array) -> mx.array:
        return _rows(self.weight, x)


class OrderedLoRAEmbedding(LoRAEmbedding):
    """mlx_lm's LoRAEmbedding with :func:`look_up`."""

    tables = frozenset({"lora_a"})

    def __call__(self, x: mx.array) -> mx.array:
        rows: mx.array = self.embedding(x)
        update: mx.array = self.dropout(look_up(self.lora_a, x) @ self.lora_b)
        return rows + (self.scale * update).astype(rows.dtype)


class OrderedDoRAEmbedding(DoRAEmbedding):
    """mlx_lm's DoRAEmbedding with :func:`look_up`."""

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
    {nn.Embedding: OrderedEmbedding, LoRAEmbedding: OrderedLoRAEmbedding, DoRAEmbedding: OrderedDoRAEmbedding},
)
