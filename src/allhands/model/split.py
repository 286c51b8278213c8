"""Split of a causal language model into body and head, so that the loss never holds all logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from allhands.kernels import known
from allhands.kernels.fused.embedding import OrderedEmbedding, RowsEmbedding
from allhands.kernels.fused.linear import DenseQuantizedLinear, TrainedLinear, dequantized
from allhands.kernels.packed import PACKED, PackedProduct, rows_of
from allhands.kernels.selection import BY_RULE, KernelSelection, selection_of

_OURS = (OrderedEmbedding, RowsEmbedding, TrainedLinear, DenseQuantizedLinear, *PACKED)


@dataclass(frozen=True)
class SplitModel:
    """A model whose logits are exactly ``body(tokens) @ head_weight().T``.

    Attributes:
        body: (B, T) token ids, and perhaps ``cache`` -> (B, T, D) hidden states after the final
            norm.
        head: the module whose dense (V, D) weight makes the logits.
        num_layers: number of blocks of the body.
        selection: selection of the forms of operations, for computations with the head.
    """

    body: Callable[..., mx.array]
    head: nn.Module
    num_layers: int
    selection: KernelSelection = BY_RULE

    def head_weight(self) -> mx.array:
        """Return the head's dense (V, D) weight, dequantised if need be; differentiable if
        trainable.
        """
        return dense_weight(self.head, self.selection)

    def head_product(self) -> mx.array | PackedProduct:
        """Return the head's weight in float32; or its native product, if the weight stays packed
        and operations compute at once.
        """
        packed = self.head.coded if isinstance(self.head, PACKED) else None
        return self.head_weight().astype(mx.float32) if packed is None else packed

    @property
    def head_is_trained(self) -> bool:
        """True if the weight is trainable."""
        return "weight" in self.head.trainable_parameters()

    def head_weight_name(self, model: nn.Module) -> str:
        """Return the name of the head's weight among the parameters of ``model``."""
        return next(
            f"{name}.weight" for name, module in model.named_modules() if module is self.head
        )


def dense_weight(module: Any, selection: KernelSelection = BY_RULE) -> mx.array:
    """Return the (out, in) weight of a linear or embedding module, dequantised if need be."""
    if isinstance(module, PACKED):
        return rows_of(module, slice(None)).dense()
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return dequantized(module, selection)
    return module.weight


def split(model: nn.Module) -> SplitModel | None:
    """Split ``model`` into body and head; ``None`` if its logits may be computed in another way."""
    head = known.head_of(model)
    # Exact types: a head with a bias of its own or an adapter around it is not a plain product.
    plain = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, *_OURS)
    if type(head) not in plain or "bias" in head:
        return None
    body, layers = cast("Any", model).model, cast("Any", model).layers
    return SplitModel(body, head, len(layers), selection_of(model))
