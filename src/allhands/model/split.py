"""Part a causal language model into body and head, so that the loss never holds all logits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from allhands.model.embedding import OrderedEmbedding, RowsEmbedding
from allhands.model.fastmath import near
from allhands.model.fused.linear import DenseQuantizedLinear, TrainedLinear, dequantized

_OURS = (OrderedEmbedding, RowsEmbedding, TrainedLinear, DenseQuantizedLinear)
# Far above every cap in use (30), far below the end of float16.
_LARGE = 1000.0


@dataclass(frozen=True)
class SplitModel:
    """A model whose logits are exactly ``body(tokens) @ head_weight().T``.

    Attributes:
        body: (B, T) token ids, and perhaps ``cache`` -> (B, T, D) hidden states after the final norm.
        head: the module whose dense (V, D) weight makes the logits.
        num_layers: blocks of the body.
    """

    body: Callable[..., mx.array]
    head: nn.Module
    num_layers: int

    def head_weight(self) -> mx.array:
        """Dense (V, D) weight of the head, dequantised if need be, differentiable if trainable."""
        return dense_weight(self.head)

    @property
    def head_is_trained(self) -> bool:
        """Whether the weight is among the trainable parameters."""
        return "weight" in self.head.trainable_parameters()

    def head_weight_name(self, model: nn.Module) -> str:
        """Name of the head's weight among the parameters of ``model``."""
        return next(f"{name}.weight" for name, module in model.named_modules() if module is self.head)


def dense_weight(module: Any) -> mx.array:
    """(out, in) weight of a linear or embedding module, dequantised if it is quantised."""
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return dequantized(module)
    return module.weight


def split(model: nn.Module) -> SplitModel | None:
    """Body and head of ``model``, or ``None`` where its logits are made in another way.

    Architectures scale, cap or shift logits in their own ways, so nothing is assumed: the two parts are
    taken by their usual names and accepted only if they reproduce the model's logits on a probe.
    """
    body: Any = getattr(model, "model", None)
    head = getattr(model, "lm_head", None) or getattr(body, "embed_tokens", None)
    # Exact types: a head with a bias of its own or an adapter around it is not a plain product.
    plain = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, *_OURS)
    if not callable(body) or type(head) not in plain or (head is not None and "bias" in head):
        return None
    assert head is not None
    parts = SplitModel(cast("Any", body), head, len(getattr(model, "layers", ())))
    training = model.training
    model.eval()  # dropout would make two passes differ
    try:
        return parts if _reproduces(parts, model) else None
    finally:
        model.train(training)


def _reproduces(parts: SplitModel, model: Any) -> bool:
    probe = mx.array([[1, 2, 3, 5, 8, 13]])
    try:
        hidden = parts.body(probe)
        logits = hidden @ parts.head_weight().T
        if not _close(model(probe), logits):
            return False
        # Once more with large logits, as training makes them: a cap is hardly seen in small ones.
        factor = (_LARGE / mx.maximum(mx.abs(logits).max(), 1e-6)).astype(hidden.dtype)
        with _giving(parts.body, hidden * factor):
            return _close(model(probe), logits * factor)
    except (TypeError, ValueError, AttributeError):
        return False


def _close(expected: mx.array, actual: mx.array) -> bool:
    """Looser than rounding of half-precision logits, far tighter than any scaling or capping."""
    return near(expected, actual, 0.02)


@contextmanager
def _giving(module: Any, output: mx.array) -> Generator[None]:
    """Let this one module give ``output``, whatever it is asked, inside of the block."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__call__": lambda *_, **__: output})
    try:
        yield
    finally:
        module.__class__ = kind
