"""Balanced experts of a mixture: without balancing a router soon sends all tokens to a few experts.

The loss is that of Shazeer et al. and the Switch Transformer (arXiv 2101.03961, equation 4). It is
computed separately for each text, as in DeepSeek-V3 (arXiv 2412.19437, equation 17): over a whole
batch it would depend on the ranks' shares. It is added in the backward pass only, so that the
reported loss stays that of the text.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from allhands.kernels.fastmath import with_vjp
from allhands.kernels.instances import give_form


def balance_experts(model: nn.Module, coefficient: float) -> int:
    """Let the routers of ``model`` learn to send the same number of tokens to each expert.

    Only instances change: they get a subclass of their own class. Names and values of parameters
    stay.

    Args:
        coefficient: factor of the balance loss, beside a mean loss over tokens; 0 changes nothing.

    Returns:
        The number of changed routers.
    """
    changed = 0
    for module in model.modules():
        gate, chosen = getattr(module, "gate", None), getattr(module, "num_experts_per_tok", None)
        if (
            coefficient
            and type(gate) is nn.Linear
            and isinstance(chosen, int)
            and "switch_mlp" in module
        ):
            give_form(gate, _Router, _balance=(chosen, coefficient))
            changed += 1
    return changed


def balance_together(module: nn.Module, num_ranks: int) -> None:
    """Divide the coefficient of ``module``'s router, if it learns this loss, by ``num_ranks``.

    Needed if that many ranks compute the same loss and add up the router's gradients.
    """
    if isinstance(gate := module.get("gate"), _Router):
        chosen, coefficient = getattr(gate, "_balance")  # noqa: B009 - not a parameter of the module
        object.__setattr__(gate, "_balance", (chosen, coefficient / num_ranks))


def has_balance(model: nn.Module) -> bool:
    """Return whether a router of ``model`` learns to keep its experts equally busy."""
    return any(isinstance(module, _Router) for module in model.modules())


class _Router(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        logits = super().__call__(x)
        chosen, coefficient = getattr(self, "_balance")  # noqa: B009 - not a parameter of the module
        if not self.training:
            return logits
        rows = logits.reshape(-1, *logits.shape[-2:])
        # A sum over tokens, as the loss of the text: both are divided once, by the global count.
        return _with_loss(logits, coefficient * rows.shape[1] * imbalance(rows, chosen).sum())


def imbalance(logits: mx.array, chosen: int) -> mx.array:
    """Return (B,) imbalances of (B, T, E) router logits with ``chosen`` experts a token; 1 is
    perfect balance.

    The gradient goes through the mean probabilities, not through the choice.
    """
    logits = logits.astype(mx.float32)
    experts = logits.shape[-1]
    places = mx.argpartition(-logits, kth=chosen - 1, axis=-1)[..., :chosen]
    taken = (places[..., None] == mx.arange(experts)).sum(axis=-2)
    share = mx.stop_gradient(taken.astype(mx.float32).mean(axis=1) / chosen)
    return experts * (share * mx.softmax(logits, axis=-1).mean(axis=1)).sum(axis=-1)


def _identity(logits: mx.array, loss: mx.array) -> mx.array:
    return logits


def _add_gradient(
    _primals: Any, cotangent: mx.array, _output: mx.array
) -> tuple[mx.array, mx.array]:
    # The gradients are as if the balance loss had been added to the differentiated loss.
    return cotangent, mx.ones(())


_with_loss = with_vjp(_identity, _add_gradient)
