"""Adapters as Hugging Face PEFT keeps them, made of mlx_lm's, and the reverse.

Both are LoRA (and DoRA): an update ``scale * B A`` beside a linear layer, where PEFT stores A as (rank, in) and B as
(out, rank), mlx_lm both transposed, and PEFT says ``lora_alpha / r`` for the scale. Formats: ``LoraConfig`` and
``get_peft_model_state_dict`` of https://github.com/huggingface/peft, ``mlx_lm.tuner.utils.load_adapters``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from allhands.errors import ModelError

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_LAYER = re.compile(r"^(?P<before>.*?)(?P<pattern>[^.]+)\.(?P<number>\d+)\.(?P<inside>.+)$")
# A, B or the magnitudes of DoRA; between them and "weight" some versions name the adapter.
_TENSOR = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight$)[^.]+)?(?:\.weight)?$"
)
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_OF_EMBEDDING = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
_HOW = "give the directory that peft's save_pretrained wrote"


@dataclass(frozen=True)
class Adapter:
    """Tensors by name, and what describes them."""

    weights: dict[str, mx.array]
    config: dict[str, Any]


def require_adapter(config: Mapping[str, Any], where: str | None = None) -> None:
    """Refuse what mlx_lm's ``adapter_config.json`` does not call LoRA or DoRA (ModelError)."""
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise ModelError(
            f"it was trained with fine_tune_type {kind}: these are whole weights, not an adapter",
            where=where,
            hint="PEFT holds LoRA and DoRA adapters: take --to hf for the whole model",
        )


def to_peft(adapter: Adapter, *, base: str, modules: Collection[str], embeddings: Collection[str] = ()) -> Adapter:
    """An adapter of mlx_lm's as PEFT reads it.

    Args:
        base: name or path of the model that transformers loads below it.
        modules: names of all linear layers and embeddings of the model, ``embeddings`` of those that are such.

    Raises:
        ModelError: it is no LoRA or DoRA adapter, or adapts what PEFT cannot.
    """
    kind = adapter.config.get("fine_tune_type", "lora")
    require_adapter(adapter.config)
    settings: Mapping[str, Any] = adapter.config["lora_parameters"]
    rank, scale = int(settings["rank"]), float(settings["scale"])
    weights: dict[str, mx.array] = {}
    adapted: set[str] = set()
    for name, value in adapter.weights.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in _PARTS or not module:
            raise ModelError(f"{name} is not a part of an adapter", hint="PEFT holds LoRA and DoRA adapters")
        if value.ndim != (1 if leaf == "m" else 2):
            raise ModelError(
                f"{name} adapts several experts at once, which PEFT's adapters cannot",
                hint="train an adapter with --lora-parameters keys that leave out the experts",
            )
        adapted.add(module)
        parts = _OF_EMBEDDING if module in embeddings else _PARTS
        weights[f"{_PREFIX}{module}.{parts[leaf]}"] = mx.contiguous(value.T)
    alpha = scale * rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": float(settings.get("dropout", 0.0)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": kind == "dora",
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        **_targets(adapted, modules),
    }
    return Adapter(weights, config)


def _targets(adapted: Collection[str], modules: Collection[str]) -> dict[str, Any]:
    """Which modules PEFT is to look for: by the short names that people know, if these mean the same."""
    short = sorted({name.rpartition(".")[2] for name in adapted})
    named = {name for name in modules if name.rpartition(".")[2] in short}
    if named == set(adapted):
        return {"target_modules": short, "layers_to_transform": None, "layers_pattern": None}
    places = {name: match for name in named if (match := _LAYER.match(name)) is not None}
    layers = {int(places[name]["number"]) for name in adapted if name in places}
    within = {name for name, match in places.items() if int(match["number"]) in layers}
    patterns = {match["pattern"] for match in places.values()}
    if within == set(adapted) and len(places) == len(named) and len(patterns) == 1:
        return {
            "target_modules": short,
            "layers_to_transform": sorted(layers),
            "layers_pattern": patterns.pop(),
        }
    return {"target_modules": sorted(adapted), "layers_to_transform": None, "layers_pattern": None}


@dataclass(frozen=True)
class _Module:
    """An adapted module: (in, rank), (rank, out), what the update is multiplied by, and DoRA's (out,) magnitudes."""

    first: mx.array
    second: mx.array
    scale: float
    magnitudes: mx.array | None

    @property
    def rank(self) -> int:
        return int(self.first.shape[1])


def from_peft(adapter: Adapter, *, num_layers: int) -> Adapter:
    """An adapter of PEFT's as mlx_lm and ``allhands`` read it.

    Modules of lower rank are filled up with zeros, and those of another scale have it in their second factor: mlx_lm
    knows one of each.

    Args:
        num_layers: blocks of the model.

    Raises:
        ModelError: it holds what mlx_lm's adapters cannot.
    """
    _require_plain(adapter.config)
    modules = _modules(adapter)
    scale = Counter(each.scale for each in modules.values()).most_common(1)[0][0]
    rank = max(each.rank for each in modules.values())
    weights: dict[str, mx.array] = {}
    keys: set[str] = set()
    lowest = num_layers
    for name, each in modules.items():
        place = _LAYER.match(name)
        keys.add(name if place is None else place["inside"])
        lowest = lowest if place is None else min(lowest, int(place["number"]))
        spare = rank - each.rank
        second = each.second if each.scale == scale else each.second * (each.scale / scale)
        weights[f"{name}.lora_a"] = mx.pad(each.first, [(0, 0), (0, spare)])
        weights[f"{name}.lora_b"] = mx.pad(second, [(0, spare), (0, 0)])
        if each.magnitudes is not None:
            weights[f"{name}.m"] = each.magnitudes
    settings = adapter.config
    config = {
        "fine_tune_type": "dora" if settings.get("use_dora") else "lora",
        # At least one, which mlx_lm takes from the end; what stands outside of the blocks is named in full.
        "num_layers": max(num_layers - lowest, 1),
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": float(settings.get("lora_dropout") or 0.0),
            "keys": sorted(keys),
        },
    }
    return Adapter(weights, config)


def _require_plain(config: Mapping[str, Any]) -> None:
    """Refuse what is more than LoRA or DoRA beside frozen weights."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"it is of PEFT's type {kind}", where=CONFIG_FILE, hint="LORA can be read, DoRA included")
    refused = {
        "modules_to_save": "whole modules are saved with it",
        "fan_in_fan_out": "its layers keep their weights transposed",
        "trainable_token_indices": "single tokens are trained",
        "target_parameters": "it adapts parameters that are no layers",
        "alora_invocation_tokens": "it is switched on by tokens",
        "megatron_config": "it is for Megatron's layers",
    }
    for name, reason in refused.items():
        if config.get(name):
            raise ModelError(f"{reason} ({name}), which mlx_lm's adapters cannot", where=CONFIG_FILE)
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise ModelError("it trains biases, which mlx_lm's adapters cannot", where=CONFIG_FILE)


def _modules(adapter: Adapter) -> dict[str, _Module]:
    """The adapted modules by name."""
    found: dict[str, dict[str, mx.array]] = {}
    for name, value in adapter.weights.items():
        match = _TENSOR.match(name)
        if match is None:
            raise ModelError(f"{name} is not a part of a LoRA adapter", where=WEIGHTS_FILE, hint=_HOW)
        found.setdefault(match["module"], {})[match["part"].removeprefix("embedding_")] = value
    if not found:
        raise ModelError("it holds no adapter", where=WEIGHTS_FILE, hint=_HOW)
    return {name: _module(name, parts, adapter.config) for name, parts in sorted(found.items(), key=_in_order)}


def _in_order(item: tuple[str, Any]) -> tuple[Any, ...]:
    """Layer 2 before layer 10."""
    return tuple(int(part) if part.isdigit() else -1 for part in item[0].split(".")), item[0]


def _module(name: str, parts: Mapping[str, mx.array], config: Mapping[str, Any]) -> _Module:
    if missing := {"A", "B"} - parts.keys():
        raise ModelError(f"{name} has no lora_{missing.pop()}", where=WEIGHTS_FILE, hint=_HOW)
    a, b, magnitudes = parts["A"], parts["B"], parts.get("magnitude_vector")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ModelError(f"{name}: factors of shape {shapes} are none of a linear layer", where=WEIGHTS_FILE)
    if bool(config.get("use_dora")) != (magnitudes is not None):
        raise ModelError(f"{name}: use_dora and lora_magnitude_vector contradict each other", where=CONFIG_FILE)
    rank = int(a.shape[0])
    alpha = _of_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if not isinstance(alpha, int | float):
        raise ModelError(f"lora_alpha is not a number: {alpha!r}", where=CONFIG_FILE, hint=_HOW)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    flat = None if magnitudes is None else magnitudes.reshape(-1)
    return _Module(mx.contiguous(a.T), mx.contiguous(b.T), scale, flat)


def _of_pattern(patterns: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    """The value whose pattern is that of the end of a module's name, as PEFT looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return otherwise
