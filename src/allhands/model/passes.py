"""Model passes: an ordered list of substitutions that prepare a model of mlx_lm for training,
evaluation or generation.

A pass replaces the form of single modules, by :mod:`allhands.kernels.instances`. It changes known
types only, instance by instance; names and values of parameters stay. :data:`PASSES` has the order
and its reasons. Every caller applies the whole list (:func:`apply_passes`), and each pass decides
by the model and the :class:`PassContext` whether it applies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

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
    """Facts that decide which passes apply, beside the model and its trainable parameters.

    Attributes:
        accelerator: the device.
        purpose: "train" and "evaluate" compute many tokens at a time, with adapters beside the
            weights; "generate" computes one at a time.
        at_once: True if operations compute at once, on a CPU, instead of making a graph.
        longest: largest number of tokens of a row.
        seed: seed of dropout.
        grad_checkpoint: True if blocks recompute their activations in the backward pass.
        router_aux_loss: coefficient of the loss that keeps experts equally busy.
        selection: selection of the forms of operations, for this model only.
        short: True if quantised weights have to stay packed on a CPU, for lack of memory.
        fetched: True if ranks have divided all arrays, and fetch them when they are needed.
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
    fetched: bool = False

    @property
    def form(self) -> Form:
        """The form of quantised weights on a CPU."""
        if self.short:
            return "packed"
        return "codes" if self.in_passes else "dense"

    @property
    def kind(self) -> Literal["cpu", "metal", "cuda"]:
        """The kind of device."""
        return self.accelerator.kind

    @property
    def in_passes(self) -> bool:
        """True if whole rows go through the model, as in training."""
        return self.purpose != "generate"


Reason = str | None  # why a pass does not apply; None: it does


@dataclass(frozen=True)
class Pass:
    """One substitution of modules.

    Attributes:
        name: name for the user, in ``-v``.
        why_not: returns the reason why the pass does not apply here; ``None`` if it applies.
        apply: changes the model and returns the number of changed modules; ConfigError if this
            model does not support a requested option.
        explain: text of the effect and the reason, in which ``{}`` is the number of modules; or a
            function that returns this text.
        stage: time at which the pass is applied: "made" is first, so that additions belong to the
            model; "adapted" is after the choice of trained weights; "agreed" is after all ranks
            have selected the same kernels.
    """

    name: str
    why_not: Callable[[PassContext], Reason]
    apply: Callable[[Any, PassContext], int]
    explain: str | Callable[[Any, PassContext], str]
    stage: Stage = "adapted"


@dataclass(frozen=True)
class Applied:
    """The outcome of a pass.

    Attributes:
        name: the pass's name.
        changed: number of changed modules; 0 if the pass does not apply.
        words: the pass's effect and reason, or the reason why it does not apply.
    """

    name: str
    changed: int
    words: str

    def __str__(self) -> str:
        return f"{self.name}: {self.words}"


def _drop_by_sample(model: Any, context: PassContext) -> int:
    install_dropout(model, context.seed)
    return sum(isinstance(module, SampleDropout) for module in model.modules())


def _hold_quantized(model: Any, context: PassContext) -> int:
    changed = replace_quantized(model, context.accelerator, context.form)
    if not context.in_passes:
        multiply_at_once(model, context.selection)
    return changed


def _quantized_form(_model: Any, context: PassContext) -> str:
    if context.kind == "cuda":
        return "{} quantised layers held dense: this model is small beside the device's memory"
    if context.form == "packed":
        return "{} quantised layers stay packed, decoded by blocks while they multiply: memory is short"
    how = "by a byte a code, dense while they multiply" if context.in_passes else "dense"
    return f"{{}} quantised layers held {how}: a CPU multiplies packed codes slowly"


def _hold_in_float32(model: Any, _: PassContext) -> int:
    hold_in_float32(model)
    return 1


def _why_not_native(context: PassContext) -> Reason:
    if not context.in_passes:
        return "for many tokens at a time"
    if not context.at_once:
        return (
            "for Linux CPUs"
            if context.kind != "cpu"
            else "a compiled step is a graph (--compile on)"
        )
    return None if native.available() else "no native code here"


def _recompute(model: Any, _: PassContext) -> int:
    if not known.calls_blocks(model):
        message = (
            "it has no effect on this architecture, whose blocks are not called as such in mlx_lm"
        )
        hint = "leave it out; a smaller --batch-size saves memory"
        raise ConfigError(
            message, code="option-without-effect", where="--grad-checkpoint", hint=hint
        )
    checkpoint_layers(model.layers, at_once=native.is_native(model))
    return len(model.layers)


def _why_not_kept(context: PassContext) -> Reason:
    if context.fetched:
        return "ranks have divided all weights"
    return None if context.kind == "cuda" and context.purpose == "train" else "for training on CUDA"


def _kept(model: Any, _: PassContext) -> str:
    size = f"{kept_bytes(model) / 1e9:.1f} GB"
    return f"{{}} products keep dense copies of quantised weights that a step needs twice, {size}"


def _why_not_recomputed(context: PassContext) -> Reason:
    if not (context.grad_checkpoint and context.in_passes):
        return "not asked for (--grad-checkpoint)"
    return (
        "done with the weights that are fetched for the backward pass" if context.fetched else None
    )


def _in_passes(kind: str, reason: str) -> Callable[[PassContext], Reason]:
    """Return the condition of a pass for whole rows on one kind of device."""
    return lambda c: (
        "for many tokens at a time" if not c.in_passes else None if c.kind == kind else reason
    )


# The passes in their order, with the reason for each place.
PASSES = (
    # Changes the loss, so it comes before mlx_lm's own gradient is computed for comparison.
    Pass(
        "balanced routers",
        lambda c: None if c.router_aux_loss else "not asked for (--router-aux-loss)",
        lambda model, c: balance_experts(model, c.router_aux_loss),
        "{} routers learn to keep their experts equally busy (--router-aux-loss)",
        "made",
    ),
    # Looks for exact types of mlx and mlx_lm, so it comes before passes that make subclasses of
    # them.
    Pass(
        "ordered embeddings",
        lambda c: (
            "nothing is trained"
            if not c.in_passes
            else "a CPU adds rows in order"
            if c.accelerator.cpu_native
            else None
        ),
        lambda model, _: make_deterministic(model),
        "{} trained embeddings add their rows' gradients in order, so that equal runs have equal results",
    ),
    # Looks for exact types, too. The passes below recognise layers with dropout and leave them
    # alone, so they come later.
    Pass(
        "dropout by sample",
        lambda c: None if c.in_passes else "nothing is trained",
        _drop_by_sample,
        "{} layers drop values by seed, step and sample, for any number of ranks",
    ),
    # Weights come before computations: native and fused layers take over the weights that they
    # find.
    Pass(
        "quantised weights",
        lambda c: "Metal multiplies packed weights" if c.kind == "metal" else None,
        _hold_quantized,
        _quantized_form,
    ),
    Pass(
        "float32",
        lambda c: None if c.kind == "cpu" else "a GPU computes in the weights' own type",
        _hold_in_float32,
        "the whole model: shorter types are not faster on a CPU",
    ),
    # Before the native pass, which then replaces these feed-forward blocks.
    Pass(
        "vectorised SwiGLU",
        lambda c: None if c.kind == "cpu" and sys.platform == "linux" else "for Linux CPUs",
        lambda model, c: use_fast_mlp(model, c.selection),
        "{} feed-forward blocks: MLX's exponential is a library call for each number on a CPU",
    ),
    # One of these three for each device; they need the final form of the weights.
    Pass(
        "native operations",
        _why_not_native,
        lambda model, c: native.use_native(model, c.selection),
        "{} norms, attentions, feed-forward blocks and linear layers by compiled code, on all cores",
    ),
    Pass(
        "fused blocks",
        _in_passes("cuda", "for CUDA"),
        lambda model, c: fuse(model, c.longest, c.selection, joins=not c.fetched),
        "{} attention and feed-forward blocks use few matrix products, and kernels of allhands",
    ),
    Pass(
        "dense products",
        _in_passes("metal", "for Metal"),
        lambda model, c: use_dense(model, c.selection),
        "{} quantised layers multiply packed or dense weights, as selected for each number of tokens",
    ),
    # Wraps whole blocks in their final form, and computes these again.
    Pass(
        "recomputation",
        _why_not_recomputed,
        _recompute,
        "{} blocks compute their activations again in the backward pass (--grad-checkpoint)",
    ),
    # The agreed kernels decide which weights are made dense.
    Pass(
        "kept dense weights",
        _why_not_kept,
        lambda model, _: keep_dense(model),
        _kept,
        "agreed",
    ),
)


def apply_passes(
    model: nn.Module, context: PassContext, stage: Stage = "adapted"
) -> tuple[Applied, ...]:
    """Apply all passes of a stage to ``model``, in order.

    Returns:
        The outcome of each.

    Raises:
        ConfigError: this model does not support a requested option.
    """
    give_selection(model, context.selection)
    return tuple(_applied(each, model, context) for each in PASSES if each.stage == stage)


def _applied(each: Pass, model: nn.Module, context: PassContext) -> Applied:
    if reason := each.why_not(context):
        return Applied(each.name, 0, f"not applied ({reason})")
    if not (changed := each.apply(model, context)):
        return Applied(each.name, 0, "not applied (this model has no such modules)")
    words = each.explain if isinstance(each.explain, str) else each.explain(model, context)
    return Applied(each.name, changed, words.format(changed))
