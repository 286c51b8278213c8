"""Attention and feed-forward blocks of mlx_lm's models in their fast forms, for training on NVIDIA
GPUs.

As elsewhere in this package only instances change: each gets a subclass of its own class. The names
and values of parameters stay, and modules that :mod:`allhands.kernels.known` does not list are not
changed.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from allhands.kernels import known
from allhands.kernels.context import ContextRow
from allhands.kernels.documents import DocumentRow
from allhands.kernels.fused import ops
from allhands.kernels.fused.embedding import RowsEmbedding
from allhands.kernels.fused.kernels import HeadNorms
from allhands.kernels.fused.linear import (
    DenseQuantizedLinear,
    Group,
    TrainedLinear,
    TypedLoRALinear,
    drops,
    products_of,
)
from allhands.kernels.instances import give_form, mix_in
from allhands.kernels.selection import BY_RULE, SELECTION, KernelSelection, selection_of
from allhands.runtime.accelerator import device_memory

# 1 / 32 of a GPU's memory may hold dense copies of quantised weights that a step would make twice.
# For a model of 7 billion parameters, 4.7 GB of an H200's 150 GB hold those of eight layers, and
# 0.8 GB of a card's 24 GB those of two.
_KEPT_SHARE = 32


def fuse(
    model: nn.Module, longest: int, selection: KernelSelection = BY_RULE, *, joins: bool = True
) -> int:
    """Let ``model`` compute in fast forms; its trained weights must be chosen already.

    Args:
        longest: largest number of tokens of a row.
        selection: selection of the forms of operations.
        joins: whether frozen weights of layers with one input may become one array.

    Returns:
        Number of changed blocks (attention or feed-forward).
    """
    for module in model.modules():
        if (kind := _layer_kind(module)) is not None:
            give_form(module, kind, **{SELECTION: selection})
            if isinstance(module, TypedLoRALinear):
                module.prepare()
    changed = 0
    tables: list[mx.array] = []
    for module in model.modules():
        if known.is_swiglu(module) and _join_mlp(module, selection, joins=joins):
            mix_in(module, _FusedMlp, **{SELECTION: selection})
            changed += 1
        elif _join_attention(module, longest, tables, selection, joins=joins):
            mix_in(module, _FusedAttention, **{SELECTION: selection})
            changed += 1
    for module in model.modules():
        if known.is_block(module) and _has_plain_norms(module):
            mix_in(module, _FusedLayer, **{SELECTION: selection})
    return changed


def keep_dense(model: nn.Module) -> int:
    """Let a fused ``model`` keep dense copies of quantised weights that a step needs twice, as far
    as there is room.

    Call it after the forms of operations are chosen.

    Returns:
        Number of products with a dense copy.
    """
    room, count = device_memory() // _KEPT_SHARE, 0
    for product in products_of(model.modules()):
        taken = product.keep_dense(room)
        room -= taken
        count += taken > 0
    return count


def kept_bytes(model: nn.Module) -> int:
    """Return the bytes of the dense copies of quantised weights that ``model`` keeps."""
    return sum(product.kept_bytes for product in products_of(model.modules()))


def _layer_kind(module: Any) -> Any:
    if type(module) is nn.QuantizedLinear:
        return DenseQuantizedLinear
    if type(module) is LoRALinear:
        return TypedLoRALinear
    if type(module) is nn.Embedding and "weight" not in module.trainable_parameters():
        return RowsEmbedding
    trained = (
        "weight" in module.trainable_parameters()
        if type(module) in (nn.Linear, nn.RMSNorm)
        else False
    )
    if trained:
        return TrainedLinear if isinstance(module, nn.Linear) else _TrainedNorm
    return None


class _TrainedNorm(nn.RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        trained = "weight" in self.trainable_parameters()
        return ops.rms_norm(
            x, self["weight"], self.eps, trained=trained, selection=selection_of(self)
        )


class _FusedLayer:
    """A block whose norms also compute a residual sum, or sums of gradients, in the same pass."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        selection = selection_of(self)
        x, inner = _added_norm(self.input_layernorm, x, None, selection)
        x, inner = _added_norm(
            self.post_attention_layernorm, x, self.self_attn(inner, mask, cache), selection
        )
        return x + self.mlp(inner)


def _added_norm(
    norm: Any, x: mx.array, residual: mx.array | None, selection: KernelSelection
) -> tuple[mx.array, mx.array]:
    trained = "weight" in norm.trainable_parameters()
    return ops.added_rms_norm(
        x, residual, norm.weight, norm.eps, trained=trained, selection=selection
    )


class _FusedMlp:
    """Gate and up as one product, and their SwiGLU in one pass, forward and backward."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        group: Group = self._group
        if not group.usable:
            group.require_own_arrays()
            return super().__call__(x)  # type: ignore[misc]
        rows, down = x.reshape(-1, x.shape[-1]), self.down_proj
        if isinstance(down, TypedLoRALinear) and not drops(down):
            y = group.product.adapted_mlp(rows, down.product)
            if y is None:
                y = down.product.of_swiglu(group(rows))
        else:
            wide = group(rows)
            trained = isinstance(down, TrainedLinear)
            y = down.of_swiglu(wide) if trained else down(ops.swiglu(wide, selection_of(self)))
        return y.reshape(*x.shape[:-1], -1)


class _FusedAttention:
    """Queries, keys and values as one product, turned in one pass."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        group: Group = self._group
        batch, length, _ = x.shape
        across = isinstance(cache, ContextRow)
        whole = cache.length if across else length
        if (
            not group.usable
            or not (cache is None or isinstance(cache, DocumentRow | ContextRow))
            or whole > self._turns.shape[0]
        ):
            group.require_own_arrays()
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        sizes: known.Attention = self._sizes
        heads = sizes.heads + 2 * sizes.kv_heads
        rows = group(x.reshape(batch * length, -1)).reshape(batch, length, heads, -1)
        norms = self._norms(rows) if sizes.normed else None
        if sizes.normed and norms is None:
            q, k, v = mx.split(rows, [sizes.heads, sizes.heads + sizes.kv_heads], axis=2)
            each = known.normed(self.q_norm, q), known.normed(self.k_norm, k)
            rows = mx.concatenate([*each, v], axis=2)
        if across:
            q, k, v = self._across(rows, cache, norms)
        else:
            longer = ops.attended_length(rows, mask, selection_of(self))
            q, k, v = self._turned(rows, self._turns, norms, longer)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        return self.o_proj(y[:, :, :length].transpose(0, 2, 1, 3).reshape(batch, length, -1))

    def _norms(self: Any, rows: mx.array) -> HeadNorms | None:
        """The norms of queries and keys, if a kernel computes them for these rows."""
        q_norm, k_norm = self.q_norm, self.k_norm
        frozen = not any(norm.trainable_parameters() for norm in (q_norm, k_norm))
        by_head = q_norm.weight.size == k_norm.weight.size == rows.shape[-1]
        if not (frozen and by_head and q_norm.eps == k_norm.eps):
            return None
        norms = HeadNorms(known.factors_of(q_norm), known.factors_of(k_norm), q_norm.eps)
        return norms if ops.fuses_norms(rows, norms, selection_of(self)) else None

    def _turned(
        self: Any,
        rows: mx.array,
        turns: mx.array,
        norms: HeadNorms | None,
        length: int | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        sizes: known.Attention = self._sizes
        how: Any = {"selection": selection_of(self), "length": length, "norms": norms}
        return ops.rope_split(rows, turns, (sizes.heads, sizes.kv_heads), **how)

    def _across(
        self: Any, rows: mx.array, row: ContextRow, norms: HeadNorms | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Queries of this rank's two pieces of each row, and the keys and values of all ranks."""
        pieces = [
            self._turned(piece, self._turns[places.start : places.stop], norms)
            for piece, places in zip(mx.split(rows, 2), row.places, strict=True)
        ]
        q, k, v = (mx.concatenate(list(each)) for each in zip(*pieces, strict=True))
        return q, *row.update_and_fetch(k, v)


def _has_plain_norms(layer: Any) -> bool:
    return all(
        type(norm) in (nn.RMSNorm, _TrainedNorm)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    )


def _join_mlp(module: Any, selection: KernelSelection, *, joins: bool) -> bool:
    layers = [module.gate_proj, module.up_proj]
    if not Group.fits(layers):
        return False
    module._group = Group(layers, selection, joins=joins)
    return True


def _join_attention(
    module: Any, longest: int, tables: list[mx.array], selection: KernelSelection, *, joins: bool
) -> bool:
    sizes = known.attention_of(module)
    if sizes is None:
        return False
    layers = [module.q_proj, module.k_proj, module.v_proj]
    if not Group.fits(layers):
        return False
    table = mx.stack(list(known.turns_of(module.rope, longest, sizes.width)), axis=-1)
    mx.eval(table)
    # One for all layers that turn alike, so that it stays in the cache.
    same = next((each for each in tables if mx.array_equal(each, table)), None)
    if same is None:
        tables.append(table)
    module._turns = table if same is None else same
    module._group = Group(layers, selection, joins=joins)
    object.__setattr__(module, "_sizes", sizes)
    return True
