"""Attention and feed-forward blocks of mlx_lm's models in their fast forms, for training on NVIDIA GPUs.

As elsewhere in this package only instances change, by a subclass of their own class; the names and values of parameters
stay, and what is not computed as a probe expects is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from allhands.accelerator import device_memory
from allhands.model.documents import Row
from allhands.model.embedding import RowsEmbedding
from allhands.model.fastmath import near
from allhands.model.fused import ops
from allhands.model.fused.linear import (
    DenseQuantizedLinear,
    Group,
    TrainedLinear,
    TypedLoRALinear,
    base_of,
    drops,
    products_of,
)

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "rope"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROBE_TOKENS = 256  # enough for the forms that are for many
_CLOSE = 0.03  # of the largest value: the rounding of half precision, several times over
# Of a GPU's memory, for dense copies of quantised weights that a step would make twice: 4.7 GB of an H200's 150 hold
# those of eight layers of 7 billion parameters, and 0.8 of a card's of 24 two layers.
_KEPT_SHARE = 32
# Some architectures clip, which small inputs do not reach. Large ones make attention a choice, which rounding turns.
_MLP_INPUTS, _ATTENTION_INPUTS = (1.0, 300.0), (1.0, 10.0)


def fuse(model: nn.Module, longest: int) -> int:
    """Let ``model``, of which it is settled what is trained, compute in fast forms.

    Args:
        longest: tokens of a row, at most.

    Returns:
        Blocks (attention or feed-forward) that now do.
    """
    for module in model.modules():
        if (kind := _layer_kind(module)) is not None:
            module.__class__ = kind
            if isinstance(module, TypedLoRALinear):
                module.prepare()
    changed = 0
    tables: list[mx.array] = []
    for module in model.modules():
        names = set(module.children())
        if names == _MLP:
            changed += _substitute(module, _FusedMlp, _join_mlp, _MLP_INPUTS)
        elif names == _ATTENTION and hasattr(module, "n_kv_heads"):
            join = partial(_join_attention, longest=longest, tables=tables)
            changed += _substitute(module, _FusedAttention, join, _ATTENTION_INPUTS)
    for module in model.modules():
        if set(module.children()) == _LAYER:
            _substitute(module, _FusedLayer, _has_plain_norms, _ATTENTION_INPUTS)
    return changed


def keep_dense(model: nn.Module) -> None:
    """Let a fused ``model`` keep dense copies of quantised weights that a step needs twice, as far as there is room.

    To be called once it is settled which operations are computed in which form.
    """
    room = device_memory() // _KEPT_SHARE
    for product in products_of(model.modules()):
        room -= product.keep_dense(room)


def kept_bytes(model: nn.Module) -> int:
    """What dense copies of quantised weights take that ``model`` keeps."""
    return sum(product.kept_bytes for product in products_of(model.modules()))


def count_fused(model: nn.Module) -> int:
    """Blocks of ``model`` that compute in fast forms."""
    return sum(isinstance(module, _FusedMlp | _FusedAttention) for module in model.modules())


def _layer_kind(module: Any) -> Any:
    if type(module) is nn.QuantizedLinear:
        return DenseQuantizedLinear
    if type(module) is LoRALinear:
        return TypedLoRALinear
    if type(module) is nn.Embedding and "weight" not in module.trainable_parameters():
        return RowsEmbedding
    trained = "weight" in module.trainable_parameters() if type(module) in (nn.Linear, nn.RMSNorm) else False
    if trained:
        return TrainedLinear if isinstance(module, nn.Linear) else _TrainedNorm
    return None


class _TrainedNorm(nn.RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        return ops.rms_norm(x, self["weight"], self.eps, trained="weight" in self.trainable_parameters())


class _FusedLayer:
    """Attention and feed-forward part, with the sums around them taken in one pass with the norms."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        x, inner = _with(ops.forked_rms_norm, self.input_layernorm)(x)
        x, inner = _with(ops.added_rms_norm, self.post_attention_layernorm)(x, self.self_attn(inner, mask, cache))
        return x + self.mlp(inner)


def _with(norm: Callable[..., tuple[mx.array, mx.array]], module: Any) -> Callable[..., tuple[mx.array, mx.array]]:
    trained = "weight" in module.trainable_parameters()
    return partial(norm, weight=module.weight, eps=module.eps, trained=trained)


class _FusedMlp:
    """Gate and up as one product, and their SwiGLU in one pass, forward and backward."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        group: Group = self._group
        if not group.usable:
            return super().__call__(x)  # type: ignore[misc]
        rows, down = x.reshape(-1, x.shape[-1]), self.down_proj
        if isinstance(down, TypedLoRALinear) and not drops(down):
            y = group.product.adapted_mlp(rows, down.product)
            if y is None:
                y = down.product.of_swiglu(group(rows))
        else:
            y = down.of_swiglu(group(rows)) if isinstance(down, TrainedLinear) else down(ops.swiglu(group(rows)))
        return y.reshape(*x.shape[:-1], -1)


class _FusedAttention:
    """Queries, keys and values as one product, turned in one pass."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        group: Group = self._group
        batch, length, _ = x.shape
        if not group.usable or not (cache is None or isinstance(cache, Row)) or length > self._turns.shape[0]:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        heads = self.n_heads + 2 * self.n_kv_heads
        rows = group(x.reshape(batch * length, -1)).reshape(batch, length, heads, -1)
        q, k, v = ops.rope_split(rows, self._turns, self.n_heads, self.n_kv_heads)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(batch, length, -1))


def _has_plain_norms(layer: Any) -> bool:
    return all(
        type(norm) in (nn.RMSNorm, _TrainedNorm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    )


def _join_mlp(module: Any) -> bool:
    layers = [module.gate_proj, module.up_proj]
    if not Group.fits(layers):
        return False
    module._group = Group(layers)
    return True


def _join_attention(module: Any, longest: int, tables: list[mx.array]) -> bool:
    layers = [module.q_proj, module.k_proj, module.v_proj]
    features = base_of(module.k_proj).weight.shape[0] // module.n_kv_heads
    if not Group.fits(layers) or features % 2:
        return False
    # The rotation itself, asked of the model in the layout that it uses: whatever its base and scaling are.
    ones = mx.concatenate([mx.ones((features // 2,)), mx.zeros((features // 2,))])
    rows = mx.tile(ones, (1, max(longest, _PROBE_TOKENS), module.n_heads, 1))
    turned = module.rope(mx.contiguous(rows).transpose(0, 2, 1, 3))
    table = mx.stack(list(mx.split(turned[0, 0].astype(mx.float32), 2, axis=-1)), axis=-1)
    mx.eval(table)
    # One for all layers that turn alike, so that it stays in the cache.
    same = next((known for known in tables if mx.array_equal(known, table)), None)
    if same is None:
        tables.append(table)
    module._turns = table if same is None else same
    module._group = Group(layers)
    return True


def _substitute(module: Any, form: type, join: Callable[[Any], bool], sizes: Sequence[float]) -> bool:
    """Give ``module`` the fast form, if it then computes the same of inputs of these ``sizes``."""
    kind = type(module)
    expected = _answers(module, sizes)
    if expected is None or not _joined(module, join):
        return False
    module.__class__ = type(kind.__name__, (form, kind), {})
    actual = _answers(module, sizes)
    if actual is not None and all(near(a, b, _CLOSE) for a, b in zip(expected, actual, strict=True)):
        return True
    module.__class__ = kind
    return False


def _joined(module: Any, join: Callable[[Any], bool]) -> bool:
    """Whether ``join`` has made of ``module`` what the fast form needs; not if it is built otherwise."""
    try:
        return join(module)
    except (TypeError, ValueError, AttributeError):
        return False


def _answers(module: Any, sizes: Sequence[float]) -> list[mx.array] | None:
    """What ``module`` makes of an input in each of ``sizes``; ``None`` if it is built otherwise than expected."""
    training = module.training
    module.eval()  # dropout would make two passes differ
    try:
        probe, dtype = _probe(module)
        with _uncompiled():
            answers = [module((factor * probe).astype(dtype)) for factor in sizes]
            mx.eval(answers)
        return answers
    except (TypeError, ValueError, AttributeError):
        return None
    finally:
        module.train(training)


@contextmanager
def _uncompiled() -> Generator[None]:
    """Compute what models compile by operations that are there already: each kernel made for it takes seconds."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def _probe(module: Any) -> tuple[mx.array, mx.Dtype]:
    """(1, T, D) float32 input for ``module``, and the type that its layers compute in."""
    block = module.get("self_attn", module)
    first = next(child for name, child in block.children().items() if name in ("q_proj", "gate_proj"))
    base = base_of(first)
    quantised = isinstance(base, nn.QuantizedLinear)
    features = base.weight.shape[1] * 32 // base.bits if quantised else base.weight.shape[1]
    waves = mx.sin(mx.arange(_PROBE_TOKENS * features, dtype=mx.float32))
    return waves.reshape(1, _PROBE_TOKENS, features), base.scales.dtype if quantised else base.weight.dtype
