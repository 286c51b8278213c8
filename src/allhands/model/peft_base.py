"""The base model of an adapter in PEFT: its modules' names in transformers, and the modules that
PEFT can adapt.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from allhands.errors import ModelError
from allhands.kernels.fused.linear import dequantized_by_mlx
from allhands.model.adapters import weight_shape
from allhands.model.hf_names import Architecture, architecture_of, other_way
from allhands.model.load import LoadedModel
from allhands.model.reading import opened

HEAD = "lm_head"  # the output layer's name in every architecture that shares it with the embedding
_LINEAR = (nn.Linear, nn.QuantizedLinear)
_EMBEDDING = (nn.Embedding, nn.QuantizedEmbedding)
# Largest difference between a weight and its quantised form, as a part of its size; 4 bits stay
# well below it.
_ROUNDING = 0.25
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True)
class PeftBase:
    """The model below an adapter. Modules have mlx_lm's names.

    Attributes:
        name: name under which transformers loads the model.
        kind: the model's ``model_type``.
        architecture: names and layouts in transformers; ``None`` if they are not known.
        shapes: (out, in) of every module that could be adapted; (rows, dims) of embeddings.
        embeddings: modules that are embeddings.
        experts: number of experts, by module that is a stack of experts.
        tied: whether the output layer is the embedding.
        proved: modules whose weights a checkpoint of transformers holds under the same names.
        tables: weights of embeddings and output layer.
        can_untie: whether mlx_lm can also read this model with a separate output layer.
    """

    name: str
    kind: str
    architecture: Architecture | None
    shapes: Mapping[str, tuple[int, int]]
    embeddings: Collection[str] = ()
    experts: Mapping[str, int] = field(default_factory=dict[str, int])
    tied: bool = False
    proved: Collection[str] = ()
    tables: Mapping[str, mx.array] = field(default_factory=dict[str, mx.array])
    can_untie: bool = False

    @classmethod
    def of(cls, loaded: LoadedModel, name: str) -> PeftBase:
        """Describe a model in memory that transformers loads as ``name``."""
        model = loaded.model
        found = {
            n: m
            for n, m in model.named_modules()
            if isinstance(m, (*_LINEAR, *_EMBEDDING, *_EXPERTS))
        }
        embeddings = {n for n, m in found.items() if isinstance(m, _EMBEDDING)}
        shapes = {n: weight_shape(m) for n, m in found.items()}
        architecture = architecture_of(loaded.config)
        rows = {shapes[n][0] for n in embeddings}
        outside = _linear_outside_blocks(model, found)
        return cls(
            name=name,
            kind=str(loaded.config.get("model_type")),
            architecture=architecture,
            shapes=shapes,
            embeddings=frozenset(embeddings),
            experts={n: int(m.num_experts) for n, m in found.items() if isinstance(m, _EXPERTS)},
            tied=not any(shapes[n][0] in rows for n in outside),
            proved=frozenset() if architecture else _same_in_checkpoint(found, loaded.path),
            tables={
                n: dequantized_by_mlx(m) if hasattr(m, "bits") else m.weight
                for n, m in found.items()
                if n in embeddings or n in outside
            },
            can_untie=hasattr(getattr(model, "args", None), "tie_word_embeddings"),
        )

    @cached_property
    def other_way(self) -> str:
        """Advice for an adapter that PEFT cannot hold."""
        return other_way(self.architecture)

    def names(self, module: str) -> list[str]:
        """Return the names in transformers of a module of mlx_lm: one, or one for each expert.

        Raises:
            ModelError: there is no such module, or transformers has no equal module.
        """
        if module not in self.shapes:
            raise ModelError(
                f"the model has no layer {module} that could be adapted",
                code="layer-missing",
                hint="use the model that the adapter was trained on: --model",
            )
        names = self._names(module)
        if not names:
            raise ModelError(
                f"the names of the weights of {self.kind} in transformers are not known here"
                if self.architecture is None
                else f"{module} is no layer of its own in transformers, which keeps these weights in another form",
                code="architecture-unsupported"
                if self.architecture is None
                else "layer-not-adaptable",
                hint=self.other_way,
            )
        return names

    def _names(self, module: str) -> list[str]:
        if self.architecture is None:
            return [module] if module in self.proved else []
        theirs = self.architecture.module_name(module)
        if theirs is None:
            return []
        return (
            [theirs.format(i) for i in range(self.experts[module])] if "{}" in theirs else [theirs]
        )

    @cached_property
    def modules_of_transformers(self) -> dict[str, str]:
        """The module of mlx_lm by each known name in transformers; "" for a tied output layer."""
        found = {theirs: ours for ours in self.shapes for theirs in self._names(ours)}
        if self.architecture is not None:
            for former, ours in self.architecture.former_names:
                if ours in self.shapes:
                    found.setdefault(former, ours)
        if self.tied:
            found.setdefault(HEAD, "")
        return found

    def holds(self, module: str, value: mx.array) -> bool:
        """Return True if ``value`` is, up to rounding, the weight of an embedding or output layer.

        ``module``: the layer's name in transformers.
        """
        ours = self.modules_of_transformers.get(module)
        table = self.tables.get(ours or next(iter(self.embeddings), ""))
        if ours is None or table is None or table.shape != value.shape:
            return False
        spread = mx.sqrt(mx.mean(mx.square(value.astype(mx.float32))))
        error = mx.sqrt(mx.mean(mx.square(table.astype(mx.float32) - value.astype(mx.float32))))
        return bool((error <= _ROUNDING * spread).item())

    def is_transposed(self, module: str) -> bool:
        """Return True if transformers keeps the module's matrix as (in, out)."""
        return self.architecture is not None and self.architecture.is_transposed(module)

    def require_adaptable(self, adapted: Mapping[str, Any]) -> None:
        """Refuse modules that PEFT does not adapt in the same way as mlx_lm (ModelError).

        Args:
            adapted: the parts of the adapter (``lora_a``, ``lora_b``, ``m``) by module.
        """
        for module, parts in adapted.items():
            self.names(module)
            if reason := self._reason(module, parts, adapted):
                raise ModelError(
                    f"{module}: {reason}", code="layer-not-adaptable", hint=self.other_way
                )

    def _reason(self, module: str, parts: Collection[str], adapted: Collection[str]) -> str | None:
        if module in self.embeddings and "m" in parts:
            return (
                "PEFT's DoRA has a magnitude for each column of an embedding, mlx_lm's for each row"
            )
        if module not in self.experts:
            pattern, why = (self.architecture and self.architecture.unadapted) or ("$^", "")
            return why if re.search(pattern, module) else None
        if self.architecture is None or not self.architecture.adapted_experts:
            return f"transformers 5 joins the experts of {self.kind}, and PEFT cannot join adapters of them"
        stack = module.rpartition(".")[0]
        if missing := sorted(
            n for n in self.experts if n.startswith(f"{stack}.") and n not in adapted
        ):
            return f"PEFT reads adapters of experts only if all their matrices have one, and {missing[0]} has none"
        return None


def _linear_outside_blocks(model: Any, modules: Mapping[str, Any]) -> list[str]:
    blocks = {id(m) for layer in getattr(model, "layers", []) for m in layer.modules()}
    return [name for name, m in modules.items() if isinstance(m, _LINEAR) and id(m) not in blocks]


def _same_in_checkpoint(modules: Mapping[str, Any], path: Path) -> frozenset[str]:
    """Return the modules whose weight is in the files of ``path`` under the same name, bit by bit.

    Only files that PyTorch wrote are looked at.
    """
    proved: set[str] = set()
    for tensors, metadata in opened(path):
        if metadata.get("format") != "pt":
            continue
        for name, module in modules.items():
            theirs = tensors.get(f"{name}.weight")
            if (
                theirs is not None
                and theirs.shape == module.weight.shape
                and mx.array_equal(theirs, module.weight)
            ):
                proved.add(name)
    return frozenset(proved)
