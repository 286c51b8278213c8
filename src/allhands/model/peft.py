"""Conversion of mlx_lm's adapters to the format of Hugging Face PEFT.

Both are LoRA (or DoRA): an update ``scale * B A`` beside a linear layer. PEFT stores A as (rank,
in) and B as (out, rank); mlx_lm stores both transposed. The scale is ``lora_alpha / r`` in PEFT.
Formats: ``LoraConfig`` and ``get_peft_model_state_dict`` of https://github.com/huggingface/peft,
and ``mlx_lm.tuner.utils.load_adapters``.

Three more things differ. In PEFT modules have the names that they have in transformers. Experts are
stacked in mlx_lm, but single modules in PEFT, which joins them again if transformers has them
joined. If the output layer is tied to the embedding, an adapter of the embedding changes both in
MLX, but in PEFT only with ``ensure_weight_tying``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from allhands.errors import ModelError
from allhands.model.peft_base import HEAD, PeftBase

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
LAYER = re.compile(r"^(?P<before>.*?)(?P<pattern>[^.]+)\.(?P<number>\d+)\.(?P<inside>.+)$")
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_OF_EMBEDDING = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}


@dataclass(frozen=True)
class Adapter:
    """Tensors of an adapter by name, and the content of its configuration file."""

    weights: dict[str, mx.array]
    config: dict[str, Any]


def _require_adapter(kind: str, base: PeftBase) -> None:
    if kind not in ("lora", "dora"):
        raise ModelError(
            f"it was trained with fine_tune_type {kind}: these are whole weights, not an adapter",
            code="adapter-is-full-weights",
            hint=f"PEFT holds LoRA and DoRA adapters; {base.other_way}",
        )


def to_peft(adapter: Adapter, base: PeftBase) -> Adapter:
    """Convert an adapter of mlx_lm to PEFT's format.

    Raises:
        ModelError: it is not a LoRA or DoRA adapter, does not belong to ``base``, or adapts modules
            that PEFT cannot adapt.
    """
    kind = adapter.config.get("fine_tune_type", "lora")
    _require_adapter(kind, base)
    settings: Mapping[str, Any] = adapter.config["lora_parameters"]
    rank, scale = int(settings["rank"]), float(settings["scale"])
    weights: dict[str, mx.array] = {}
    adapted: set[str] = set()
    by_module: dict[str, dict[str, mx.array]] = {}
    for name, value in adapter.weights.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in _PARTS or not module:
            raise ModelError(
                f"{name} is not a part of an adapter",
                code="adapter-invalid",
                hint="PEFT holds LoRA and DoRA adapters",
            )
        by_module.setdefault(module, {})[leaf] = value
    base.require_adaptable(by_module)
    for module, parts in by_module.items():
        made = _of_module(module, parts, base)
        adapted |= {name.rpartition(".lora_")[0] for name in made}
        weights |= {f"{PREFIX}{name}": value for name, value in made.items()}
    alpha = scale * rank
    tied = base.tied and any(module in base.embeddings for module in by_module)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": float(settings.get("dropout", 0.0)),
        "bias": "none",
        "fan_in_fan_out": any(base.is_transposed(module) for module in by_module),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": kind == "dora",
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        # Written only if needed: PEFT versions before 0.18 do not know this key.
        **({"ensure_weight_tying": True} if tied else {}),
        **_targets(adapted, base),
    }
    return Adapter(weights, config)


def _of_module(module: str, parts: Mapping[str, mx.array], base: PeftBase) -> dict[str, mx.array]:
    """Return PEFT's tensors for one module of mlx_lm."""
    names = base.names(module)
    if module in base.experts:
        return {
            f"{name}.{_PARTS[leaf]}": mx.contiguous(value[number])
            for number, name in enumerate(names)
            for leaf, value in parts.items()
        }
    embedding = module in base.embeddings
    kinds = {**_PARTS, **_OF_EMBEDDING} if embedding else _PARTS
    made = {f"{names[0]}.{kinds[leaf]}": mx.contiguous(value.T) for leaf, value in parts.items()}
    if embedding and base.tied:
        # The output layer is the embedding's transpose: its first factor is the embedding's second.
        made[f"{HEAD}.lora_A.weight"] = mx.contiguous(parts["lora_b"])
        made[f"{HEAD}.lora_B.weight"] = mx.contiguous(parts["lora_a"])
    return made


def _targets(adapted: Collection[str], base: PeftBase) -> dict[str, Any]:
    """Return the settings by which PEFT finds the modules: short names, if these name the same
    modules.
    """
    in_full = {
        "target_modules": sorted(adapted),
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    if (
        base.architecture is not None and not base.architecture.whole
    ):  # short names may also match modules in parts that are not known here
        return in_full
    short = sorted({name.rpartition(".")[2] for name in adapted})
    named = {name for name in base.modules_of_transformers if name.rpartition(".")[2] in short}
    if named == set(adapted):
        return {"target_modules": short, "layers_to_transform": None, "layers_pattern": None}
    if (found := _layers_of(adapted, named)) is None:
        return in_full
    layers, pattern = found
    return {"target_modules": short, "layers_to_transform": layers, "layers_pattern": pattern}


def _layers_of(adapted: Collection[str], named: Collection[str]) -> tuple[list[int], str] | None:
    """Return the layers in which exactly the ``adapted`` modules are ``named``, and the name of
    their list; ``None`` if there are no such layers.
    """
    places = {name: match for name in named if (match := LAYER.match(name)) is not None}
    layers = {int(places[name]["number"]) for name in adapted if name in places}
    within = {name for name, match in places.items() if int(match["number"]) in layers}
    patterns = {match["pattern"] for match in places.values()}
    if within != set(adapted) or len(places) != len(named) or len(patterns) != 1:
        return None
    return sorted(layers), patterns.pop()
