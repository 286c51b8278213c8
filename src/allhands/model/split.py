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
    head = getattr(model, "lm_head", None)
    head = getattr(body, "embed_tokens", None) if head is None else head
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
        weight = parts.head_weight()
        hidden = _made_up(probe, weight)
        calls: list[tuple[Any, ...]] = []
        with _giving(parts.body, hidden, calls):
            actual = model(probe)
        if not _hands_on(calls, probe):
            # Then it takes the blocks themselves to tell.
            hidden = parts.body(probe)
            actual = model(probe)
        logits = hidden @ weight.T
        if not _close(actual, logits):
            return False
        # Once more with large logits, as training makes them: a cap is hardly seen in small ones.
        factor = (_LARGE / mx.maximum(mx.abs(logits).max(), 1e-6)).astype(hidden.dtype)
        with _giving(parts.body, hidden * factor, []):
            return _close(model(probe), logits * factor)
    except (TypeError, ValueError, AttributeError):
        return False


def _made_up(probe: mx.array, weight: mx.array) -> mx.array:
    """(B, T, D) hidden states of no model."""
    shape = *probe.shape, weight.shape[1]
    return mx.sin(mx.arange(probe.size * shape[-1], dtype=mx.float32)).reshape(shape).astype(weight.dtype)


def _hands_on(calls: list[tuple[Any, ...]], probe: mx.array) -> bool:
    """Whether the body was asked once, of the very tokens and nothing beside: so it is what the model asks it."""
    if len(calls) != 1 or not calls[0]:
        return False
    first, *others = calls[0]
    return first is probe and all(each is None for each in others)


def _close(expected: mx.array, actual: mx.array) -> bool:
    """Looser than rounding of half-precision logits, far tighter than any scaling or capping."""
    return near(expected, actual, 0.02)


@contextmanager
def _giving(module: Any, output: mx.array, calls: list[tuple[Any, ...]]) -> Generator[None]:
    """Let this one module give ``output``, whatever it is asked, inside of the block; what it is asked is added."""
    kind = type(module)

    def call(_: Any, *arguments: Any, **named: Any) -> mx.array:
        calls.append((*arguments, *named.values()))
        return output

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    try:
        yield
    finally:
        module.__class__ = kind
