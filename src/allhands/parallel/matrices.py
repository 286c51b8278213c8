"""Tensor parallelism: ranks divide the matrices of blocks among them (Megatron-LM, arXiv
1909.08053).

Attention is divided by heads, and a feed-forward block by its inner features. The experts of a
mixture are divided in the same way, or each rank has whole experts
(:mod:`allhands.parallel.mixtures`). The first projections are divided by outputs (by columns, in
the paper's words), and the last one by inputs (by rows). So a module needs two sums over the ranks:
of its output in the forward pass, and of the gradient of its input in the backward pass. These sums
are around whole modules, so that their order is the same on all ranks.

Inside such a module an array is either divided, or whole on all ranks. Whole arrays are norms of
heads, routers, and the halves of adapters that are not divided; each rank has a part of their
gradient. Outside of the modules all ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from allhands.distributed.backend import Communicator
from allhands.distributed.collectives import replicated, summed
from allhands.errors import ConfigError, ModelError
from allhands.io.formatting import counted
from allhands.io.regions import Flat, Region, everything
from allhands.io.trees import flatten
from allhands.kernels.instances import mix_in
from allhands.kernels.known import name_of
from allhands.model.balance import balance_together
from allhands.model.dropout import SampleDropout
from allhands.model.stages import kind_of
from allhands.parallel.mixtures import (
    MIXTURES,
    Mixture,
    OwnExperts,
    WithOwnExperts,
    check_layers,
    take_experts,
)
from allhands.parallel.parts import OwnedParts, take

_ADAPTED = (LoRALinear, LoRASwitchLinear)
_LAYERS = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True)
class _Cut:
    """The way in which a module is divided; names of layers that a module does not have are left
    out.

    Attributes:
        columns: linear layers whose outputs are divided; ``rows``: those whose inputs are.
        counts: attributes with numbers of heads, which are divided by the number of ranks.
        arrays: arrays of the module itself with a number for each head.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    counts: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()


_HEADS, _INTO = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_FEED_FORWARD = _Cut(_INTO, ("down_proj",))


def _mixture(*parts: str) -> _Cut:
    """Return the cut of a mixture whose experts are all divided, shared ones as well."""
    return _Cut(
        tuple(f"{part}.{layer}" for part in parts for layer in _INTO),
        tuple(f"{part}.down_proj" for part in parts),
    )


# Modules of mlx_lm.models whose source was read: only their last projection mixes heads, inner
# features or experts, and all operations after it are linear.
_CUTS: Mapping[str, _Cut] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama.Attention", "qwen2.Attention", "qwen3.Attention", "qwen3_moe.Attention"),
            _Cut(_HEADS, ("o_proj",), ("n_heads", "n_kv_heads")),
        ),
        "mixtral.MixtralAttention": _Cut(_HEADS, ("o_proj",), ("num_heads", "num_key_value_heads")),
        "gpt_oss.AttentionBlock": _Cut(
            _HEADS, ("o_proj",), ("num_attention_heads", "num_key_value_heads"), ("sinks",)
        ),
        "deepseek_v2.DeepseekV2Attention": _Cut(
            ("q_proj", "q_b_proj", "kv_b_proj"), ("o_proj",), ("num_heads",)
        ),
        **dict.fromkeys(
            ("llama.MLP", "qwen2.MLP", "qwen3.MLP", "qwen3_moe.MLP", "deepseek_v2.DeepseekV2MLP"),
            _FEED_FORWARD,
        ),
        "qwen3_moe.Qwen3MoeSparseMoeBlock": _mixture("switch_mlp"),
        "mixtral.MixtralSparseMoeBlock": _mixture("switch_mlp"),
        "gpt_oss.MLPBlock": _mixture("experts"),
        "deepseek_v2.DeepseekV2MoE": _mixture("switch_mlp", "shared_experts"),
    }
)
# Kinds of mlx_lm.models: every block is attention and feed-forward part, both listed above. mistral
# uses llama's modules.
CAN_BE_DIVIDED = frozenset(
    {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2"}
)


@dataclass(frozen=True)
class Matrices(OwnedParts):
    """This rank's part of a model whose blocks' matrices are divided.

    Attributes:
        tensor: the ranks that have divided them, and compute the same rows.
        data: the ranks that have the same parts, for other rows.
        partial: whole arrays with a part of the gradient on each rank.
        modules: the divided modules.
        by_rows: adapters of layers whose inputs are divided.
        experts: this rank's experts, where it has whole ones.
    """

    tensor: Communicator
    data: Communicator
    partial: frozenset[str]
    modules: tuple[nn.Module, ...]
    by_rows: tuple[nn.Module, ...]
    experts: tuple[OwnExperts, ...] = ()


def divide(
    model: nn.Module,
    tensor: Communicator,
    data: Communicator,
    *,
    lazy: bool = False,
    whole_experts: bool = False,
) -> Matrices:
    """Reduce the model to this rank's part of the blocks' matrices, which are read one by one.

    The model computes correctly only after :func:`compute_together`.

    Args:
        lazy: True if nothing should be read yet.
        whole_experts: give each rank some experts of a mixture, instead of a part of each.

    Raises:
        ModelError: the architecture cannot be divided.
        ConfigError: this number of ranks cannot divide it.
    """
    found = check_matrices(model, tensor.size, whole_experts=whole_experts)
    trained = {name: tuple(array.shape) for name, array in flatten(model.trainable_parameters())}
    slicer, experts = _Slicer(tensor.rank, tensor.size, lazy=lazy), list[OwnExperts]()
    for path, module, cut, mixture in found:
        slicer.divide(path, module, cut)
        if mixture is not None:
            own, places = take_experts(path, module, mixture, tensor.rank, tensor.size, lazy=lazy)
            experts.append(own)
            own.compute_as(WithOwnExperts)
            slicer.parts |= places
    within = tuple(f"{path}." for path, *_ in found)
    partial = frozenset(
        name for name in trained if name.startswith(within) and name not in slicer.parts
    )
    parts = {name: part for name, part in slicer.parts.items() if name in trained}
    modules = tuple(module for _, module, *_ in found)
    return Matrices(
        trained, parts, tensor, data, partial, modules, tuple(slicer.by_rows), tuple(experts)
    )


def compute_together(matrices: Matrices | None) -> None:
    """Let ranks add up the outputs of their parts of each module, if there are any; called after
    all other changes of modules.
    """
    if matrices is None:
        return
    tensor = matrices.tensor
    for own in matrices.experts:
        own.drop_as_installed()
    for module in matrices.modules:
        mix_in(module, _Together, _tensor=tensor)
        balance_together(module, tensor.size)
    for layer in matrices.by_rows:
        dropout: Any = layer["dropout"]
        if isinstance(dropout, SampleDropout):
            dropout.draw_part(tensor.rank, tensor.size)


class _Together:
    """A module of which each rank has a part; the outputs of the parts are added up."""

    _tensor: Communicator

    def __call__(self, x: mx.array, *args: Any, **more: Any) -> mx.array:
        # One sum in the backward pass, too: of the gradients of x from all layers that use it.
        whole: Any = super()
        return summed(self._tensor, whole.__call__(replicated(self._tensor, x), *args, **more))


def _modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, _Cut]]:
    """Yield name, module and cut of all attention and feed-forward parts of the blocks.

    Raises:
        ModelError: one is of an unknown kind.
    """
    kind = kind_of(model)
    if kind not in CAN_BE_DIVIDED:
        raise ModelError(
            f"the matrices of models of the kind {kind} cannot be divided",
            code="model-not-divisible",
            where="--tp",
            hint=f"leave it out, or take a model of one of these kinds: {', '.join(sorted(CAN_BE_DIVIDED))}",
        )
    blocks: Any = model
    known = {id(module): path for path, module in model.named_modules()}
    for block in blocks.layers:
        parts = [
            each
            for each in block.children().values()
            if isinstance(each, nn.Module) and name_of(each)
        ]
        for part in parts:
            if (cut := _CUTS.get(name_of(part))) is None:
                raise ModelError(
                    f"{known[id(part)]} cannot be divided: {name_of(part)}",
                    code="model-not-divisible",
                    where="--tp",
                    hint=_WITHOUT,
                )
            yield known[id(part)], part, cut


def check_matrices(
    model: nn.Module, ranks: int, *, whole_experts: bool
) -> list[tuple[str, nn.Module, _Cut, Mixture | None]]:
    """Return the modules with their cuts, and the kinds of mixtures of which a rank has whole
    experts.

    Raises:
        ModelError: the architecture cannot be divided.
        ConfigError: so many ranks cannot divide it.
    """
    found: list[tuple[str, nn.Module, _Cut, Mixture | None]] = []
    for path, module, cut in _modules_of(model):
        mixture = MIXTURES.get(name_of(module)) if whole_experts else None
        if mixture is not None:
            check_layers(path, module, mixture, ranks)
        found.append((path, module, _without_experts(cut, mixture), mixture))
        _check(path, module, found[-1][2], ranks)
    if whole_experts and all(mixture is None for *_, mixture in found):
        raise ModelError(
            "no block of this model has experts",
            code="model-without-experts",
            where=f"--ep {ranks}",
            hint=_WITHOUT,
        )
    return found


def _without_experts(cut: _Cut, mixture: Mixture | None) -> _Cut:
    """Return ``cut`` without experts that ranks have whole; ``mixture`` ``None``: all of it."""
    if mixture is None:
        return cut
    columns, rows = (
        tuple(name for name in names if not name.startswith(f"{mixture.experts}."))
        for names in (cut.columns, cut.rows)
    )
    return replace(cut, columns=columns, rows=rows)


def _layers_of(path: str, module: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the layers of ``names`` that a module has."""
    for name in names:
        found = module
        for key in name.split("."):
            found = None if found is None else found.get(key)
        if found is not None:
            yield f"{path}.{name}", found


def _check(path: str, module: Any, cut: _Cut, ranks: int) -> None:
    """Refuse a module that so many ranks cannot divide.

    Raises:
        ConfigError: they cannot.
    """
    where = f"--tp {ranks}"
    for count in cut.counts:
        if (heads := getattr(module, count)) % ranks:
            raise ConfigError(
                f"{path} has {counted(heads, 'head')} ({count})",
                code="heads-not-divisible",
                where=where,
                hint=_DIVISOR,
            )
    for name, layer in _layers_of(path, module, (*cut.columns, *cut.rows)):
        if not isinstance(_base(layer), _LAYERS):
            raise ConfigError(
                f"{name} is a {type(layer).__name__}, which is not divided",
                code="option-unsuited-to-model",
                where=where,
                hint=_WITHOUT,
            )
    for name, layer in _layers_of(path, module, cut.columns):
        outputs = _base(layer).weight.shape[-2]
        if outputs % ranks:
            raise ConfigError(
                f"{name} has {counted(outputs, 'output')}",
                code="matrix-not-divisible",
                where=where,
                hint=_DIVISOR,
            )
    for name, layer in _layers_of(path, module, cut.rows):
        base = _base(layer)
        group = int(base.group_size) if "scales" in base else 1
        inputs = base.scales.shape[-1] * group if "scales" in base else base.weight.shape[-1]
        if inputs % (ranks * group):
            what, hint = counted(inputs, "input"), _DIVISOR
            if group > 1:
                what += f" in {counted(inputs // group, 'quantisation group')} of {group}"
                hint = "take a number of ranks that divides the groups, or leave --tp out"
            raise ConfigError(
                f"{name} has {what}", code="matrix-not-divisible", where=where, hint=hint
            )


def _base(layer: Any) -> Any:
    return layer["linear"] if isinstance(layer, _ADAPTED) else layer


class _Slicer:
    """Reduces modules to one rank's part.

    Attributes:
        parts: the part's place in each divided array, by name.
        by_rows: adapters of layers whose inputs are divided.
    """

    def __init__(self, rank: int, size: int, *, lazy: bool) -> None:
        self._rank, self._size, self._lazy = rank, size, lazy
        self.parts: dict[str, Region] = {}
        self.by_rows: list[nn.Module] = []

    def divide(self, path: str, module: Any, cut: _Cut) -> None:
        for name, layer in _layers_of(path, module, cut.columns):
            self._by_outputs(name, layer)
        for name, layer in _layers_of(path, module, cut.rows):
            self._by_inputs(name, layer)
        for key in cut.arrays:
            self._take(path, module, key, 0)
        for count in cut.counts:
            setattr(module, count, getattr(module, count) // self._size)

    def _by_outputs(self, name: str, layer: Any) -> None:
        if isinstance(layer, _ADAPTED):
            self._take(name, layer, "lora_b", -1 if isinstance(layer, LoRALinear) else -2)
            name, layer = f"{name}.linear", layer["linear"]
        for key in ("weight", "scales", "biases"):
            self._take(name, layer, key, -2)
        self._take(name, layer, "bias", -1)

    def _by_inputs(self, name: str, layer: Any) -> None:
        if isinstance(layer, _ADAPTED):
            self._take(name, layer, "lora_a", 0 if isinstance(layer, LoRALinear) else -1)
            self.by_rows.append(layer)
            name, layer = f"{name}.linear", layer["linear"]
        for key in ("weight", "scales", "biases"):
            self._take(name, layer, key, -1)
        if isinstance(bias := layer.get("bias"), mx.array):
            # It is added once: by the first rank.
            self.parts[f"{name}.bias"] = Flat(0, 0) if self._rank else everything(bias.shape)
            if self._rank:
                del layer["bias"]

    def _take(self, name: str, module: Any, key: str, axis: int) -> None:
        if (place := take(module, key, axis, self._rank, self._size, lazy=self._lazy)) is not None:
            self.parts[f"{name}.{key}"] = place


_DIVISOR = "take a number of ranks that divides it, or leave --tp out"
_WITHOUT = "leave it out"
