"""The passes that turn a model of mlx_lm into the one that is trained, tested or asked: one list, in one order.

A pass gives single modules another form, by :mod:`allhands.kernels.instances`. It changes known types only, instance by
instance; names and values of parameters stay. :data:`PASSES` states the order and its reasons; every caller applies the
whole list (:func:`apply_passes`), and each pass decides by the model and the :class:`PassContext` whether it applies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import mlx.nn as nn

from allhands.errors import ConfigError
from allhands.kernels import known, native
from allhands.kernels.fastmath import use_fast_mlp
from allhands.kernels.fused.blocks import fuse, keep_dense, kept_bytes
from allhands.kernels.fused.embedding import make_deterministic
from allhands.kernels.fused.linear import use_dense
from allhands.kernels.selection import KernelSelection, give_selection
from allhands.model.balance import balance_experts
from allhands.model.dropout import SampleDropout, install_dropout
from allhands.model.quantized import Form, hold_in_float32, multiply_at_once, replace_quantized
from allhands.model.remat import checkpoint_layers
from allhands.runtime.accelerator import Accelerator

Stage = Literal["made", "adapted", "agreed"]


@dataclass(frozen=True)
class PassContext:
    """What decides which passes apply to a model, beside the model itself, which knows what of it is trained.

    Attributes:
        purpose: "train" and "evaluate" compute many tokens at a time, with adapters beside the weights; "generate"
            computes one at a time.
        at_once: whether operations compute when they are called, on a CPU, instead of making a graph.
        longest: tokens of a row at most.
        seed: of dropout.
        grad_checkpoint: whether a block's activations are computed again in the backward pass.
        router_aux_loss: coefficient of the loss that keeps experts equally busy.
        selection: of the forms of operations, for this model alone.
        short: whether quantised weights have to stay packed on a CPU, for want of memory.
    """

    accelerator: Accelerator
    purpose: Literal["train", "evaluate", "generate"]
    at_once: bool = False
    longest: int = 0
    seed: int = 0
    grad_checkpoint: bool = False
    router_aux_loss: float = 0.0
    selection: KernelSelection = field(default_factory=KernelSelection)
    short: bool = False

    @property
    def form(self) -> Form:
        """Of quantised weights on a CPU."""
        if self.short:
            return "packed"
        return "codes" if self.in_passes else "dense"

    @property
    def kind(self) -> Literal["cpu", "metal", "cuda"]:
        """Of the device."""
        return self.accelerator.kind

    @property
    def in_passes(self) -> bool:
        """Whether whole rows go through the model, forward and perhaps backward, as in training."""
        return self.purpose != "generate"


class Pass(Protocol):
    """One substitution of modules.

    Attributes:
        name: for people, in ``-v``.
        stage: when it is applied: "made" before anything else, so that what it adds belongs to the model; "adapted"
            once it is settled what is trained; "agreed" once all ranks select kernels alike.
    """

    name: str
    stage: Stage

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        """True, or the reason why not."""
        ...

    def apply(self, model: nn.Module, context: PassContext) -> int:
        """Change the model; returns how many modules.

        Raises:
            ConfigError: a person has asked for what this model cannot do.
        """
        ...

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        """What it has done to so many modules of ``model``, and why."""
        ...


@dataclass(frozen=True)
class Applied:
    """What became of a pass.

    Attributes:
        changed: modules; 0 where the pass does not apply.
        words: what it did and why, or why not.
    """

    name: str
    changed: int
    words: str

    def __str__(self) -> str:
        return f"{self.name}: {self.words}"


class _BalancedRouters:
    name = "balanced routers"
    stage: Stage = "made"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        return True if context.router_aux_loss else "not asked for (--router-aux-loss)"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        return balance_experts(model, context.router_aux_loss)

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return f"{changed} routers learn to keep their experts equally busy (--router-aux-loss)"


class _OrderedEmbeddings:
    name = "ordered embeddings"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        if not context.in_passes:
            return "nothing is trained"
        return "a CPU adds rows in order" if context.accelerator.cpu_native else True

    def apply(self, model: nn.Module, context: PassContext) -> int:
        return make_deterministic(model)

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return f"{changed} trained embeddings add their rows' gradients in order, so that equal runs end alike"


class _SampleDropouts:
    name = "dropout by sample"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        return True if context.in_passes else "nothing is trained"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        install_dropout(model, context.seed)
        return sum(isinstance(module, SampleDropout) for module in model.modules())

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return f"{changed} layers drop by seed, step and sample, whatever the number of ranks"


class _QuantizedWeights:
    name = "quantised weights"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        return "Metal multiplies by codes" if context.kind == "metal" else True

    def apply(self, model: nn.Module, context: PassContext) -> int:
        changed = replace_quantized(model, context.accelerator, context.form)
        if not context.in_passes:
            multiply_at_once(model, context.selection)
        return changed

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        if context.kind == "cuda":
            return f"{changed} quantised layers held dense: this model is small beside the device's memory"
        if context.form == "packed":
            return f"{changed} quantised layers stay packed, decoded by blocks while they multiply: memory is short"
        how = "by a byte a code, dense while they multiply" if context.in_passes else "dense"
        return f"{changed} quantised layers held {how}: a CPU multiplies no packed codes fast"


class _Float32:
    name = "float32"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        return True if context.kind == "cpu" else "a GPU computes in the weights' own type"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        hold_in_float32(model)
        return 1

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return "the whole model: a CPU computes no shorter type faster"


class _PolynomialSwiglu:
    name = "vectorised SwiGLU"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        return True if context.kind == "cpu" and sys.platform == "linux" else "for Linux CPUs"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        return use_fast_mlp(model, context.selection)

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return f"{changed} feed-forward blocks: MLX's exponential is a library call for each number on a CPU"


class _NativeOperations:
    name = "native operations"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        if not context.in_passes:
            return "for many tokens at a time"
        if not context.at_once:
            return "for Linux CPUs" if context.kind != "cpu" else "a compiled step is a graph (--compile on)"
        return True if native.available() else "no native code here"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        return native.use_native(model, context.selection)

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return f"{changed} norms, attentions, feed-forward blocks and linear layers by compiled code, on all cores"


class _FusedBlocks:
    name = "fused blocks"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        if not context.in_passes:
            return "for many tokens at a time"
        return True if context.kind == "cuda" else "for CUDA"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        return fuse(model, context.longest, context.selection)

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return f"{changed} attention and feed-forward blocks as few products and kernels of our own"


class _DenseProducts:
    name = "dense products"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        if not context.in_passes:
            return "for many tokens at a time"
        return True if context.kind == "metal" else "for Metal"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        return use_dense(model, context.selection)

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return f"{changed} quantised layers multiply by codes or dense, as selected for each number of tokens"


class _Recomputation:
    name = "recomputation"
    stage: Stage = "adapted"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        return True if context.grad_checkpoint and context.in_passes else "not asked for (--grad-checkpoint)"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        if not known.calls_blocks(model):
            message = "it has no effect on this architecture, whose blocks are not called as such in mlx_lm"
            hint = "leave it out; a smaller --batch-size saves memory"
            raise ConfigError(message, where="--grad-checkpoint", hint=hint)
        layers: Sequence[nn.Module] = getattr(model, "layers")  # noqa: B009 - every model of mlx_lm has them
        checkpoint_layers(layers, at_once=native.is_native(model))
        return len(layers)

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        return f"{changed} blocks compute their activations again in the backward pass (--grad-checkpoint)"


class _KeptDenseWeights:
    name = "kept dense weights"
    stage: Stage = "agreed"

    def applies(self, model: nn.Module, context: PassContext) -> Literal[True] | str:
        return True if context.kind == "cuda" and context.purpose == "train" else "for training on CUDA"

    def apply(self, model: nn.Module, context: PassContext) -> int:
        return keep_dense(model)

    def explain(self, model: nn.Module, changed: int, context: PassContext) -> str:
        kept = kept_bytes(model)
        return f"{changed} products keep dense copies of quantised weights that a step needs twice, {kept / 1e9:.1f} GB"


# The order, and why each stands where it does.
PASSES: tuple[Pass, ...] = (
    # Part of what is learned, so it is there before mlx_lm's own gradient is taken for comparison.
    _BalancedRouters(),
    # Exact types of mlx and mlx_lm are looked for: before any other pass has made subclasses of them.
    _OrderedEmbeddings(),
    # Likewise; and a layer that drops something is left alone by the passes below, which look for that.
    _SampleDropouts(),
    # The weights before what computes with them: native and fused layers take over what they find.
    _QuantizedWeights(),
    _Float32(),
    # Before the native pass, whose feed-forward blocks are further forms of these.
    _PolynomialSwiglu(),
    # One of the three for the device. They find all modules in their last form but one.
    _NativeOperations(),
    _FusedBlocks(),
    _DenseProducts(),
    # Around whole blocks, whatever they are by now: computes again what is called then.
    _Recomputation(),
    # Which weights are made dense follows from the kernels that all ranks have agreed on.
    _KeptDenseWeights(),
)


def apply_passes(model: nn.Module, context: PassContext, stage: Stage = "adapted") -> tuple[Applied, ...]:
    """Apply all passes of a stage to ``model``, in order.

    Returns:
        What became of each.

    Raises:
        ConfigError: a person has asked for what this model cannot do.
    """
    give_selection(model, context.selection)
    return tuple(_applied(each, model, context) for each in PASSES if each.stage == stage)


def _applied(each: Pass, model: nn.Module, context: PassContext) -> Applied:
    found = each.applies(model, context)
    if found is not True:
        return Applied(each.name, 0, f"not applied ({found})")
    changed = each.apply(model, context)
    if not changed:
        return Applied(each.name, 0, "not applied (this model has nothing of the kind)")
    return Applied(each.name, changed, each.explain(model, changed, context))
