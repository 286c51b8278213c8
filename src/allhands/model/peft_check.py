"""Whether an adapter for PEFT, as written, computes what it was made of: read back by PEFT's rules, and compared.

What PEFT does is done here again from its files alone: which modules ``target_modules``, ``layers_to_transform`` and
``layers_pattern`` name, what the factors are multiplied by, and what an update does with an input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from allhands.errors import ModelError
from allhands.model.peft import PREFIX, Adapter
from allhands.model.peft_base import HEAD, PeftBase

# Of the updates, as a part of their size: float32 added in another order; half precision rounds alike on both sides.
_LIMIT = 1e-3
_PROBES = 4
_FACTORS = re.compile(r"^(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>A|B)(\.weight)?$")
_MAGNITUDES = ".lora_magnitude_vector"


def check_peft(written: Adapter, ours: Adapter, base: PeftBase) -> None:
    """Compare ``written``, read from its files, with mlx_lm's adapter ``ours``.

    Raises:
        ModelError: PEFT would adapt other modules, or otherwise.
    """
    updates, magnitudes = _parts(written)
    _require(set(updates) == _targeted(written.config, base), "target_modules name other modules than the weights")
    _require(bool(written.config["use_dora"]) == bool(magnitudes), "use_dora and the magnitudes contradict each other")
    scale = float(ours.config["lora_parameters"]["scale"])
    modules = {name.rpartition(".")[0] for name in ours.weights}
    expected = {theirs for module in modules for theirs in base.names(module)}
    if base.tied and any(module in base.embeddings for module in modules):
        expected.add(HEAD)
        _require(bool(written.config.get("ensure_weight_tying")), "the output layer does not follow the embedding")
    _require(set(updates) == expected, "it adapts other modules")
    rate = float(written.config["lora_alpha"]) / int(written.config["r"])
    for module in sorted(modules):
        first, second = ours.weights[f"{module}.lora_a"], ours.weights[f"{module}.lora_b"]
        for number, theirs in enumerate(base.names(module)):
            a, b = (_matrix(value, number, stacked=module in base.experts) for value in (first, second))
            _compare(updates[theirs], (a, b), rate, scale, theirs)
        if module in base.embeddings and base.tied:
            _compare(updates[HEAD], (second.T, first.T), rate, scale, HEAD)
        if (m := ours.weights.get(f"{module}.m")) is not None:
            theirs = base.names(module)[0]
            _require(bool(mx.array_equal(magnitudes[theirs], m)), f"{theirs} has other magnitudes")


def _parts(written: Adapter) -> tuple[dict[str, dict[str, mx.array]], dict[str, mx.array]]:
    """Factors A (rank, in) and B (out, rank) and DoRA's magnitudes by module."""
    updates: dict[str, dict[str, mx.array]] = {}
    magnitudes: dict[str, mx.array] = {}
    for name, value in written.weights.items():
        _require(name.startswith(PREFIX), f"{name} has no place in a model")
        short = name.removeprefix(PREFIX)
        if short.endswith(_MAGNITUDES):
            magnitudes[short.removesuffix(_MAGNITUDES)] = value
            continue
        match = _FACTORS.match(short)
        if match is None:
            raise _differs(f"{name} is no part of an adapter")
        updates.setdefault(match["module"], {})[match["part"]] = value
    return updates, magnitudes


def _targeted(config: Mapping[str, Any], base: PeftBase) -> set[str]:
    """The modules that PEFT gives an adapter."""
    targets, layers, pattern = (config[key] for key in ("target_modules", "layers_to_transform", "layers_pattern"))

    def is_target(name: str) -> bool:
        if name in targets:
            return True
        if not any(name.endswith(f".{target}") for target in targets):
            return False
        place = re.match(rf"(?:^|.*?\.){pattern or '[^.]*'}\.(?P<number>\d+)\.", name)
        return layers is None or (place is not None and int(place["number"]) in layers)

    return {name for name in base.modules_of_transformers if is_target(name)}


def _matrix(value: mx.array, number: int, *, stacked: bool) -> mx.array:
    """A factor of mlx_lm's, (in, rank) or (rank, out)."""
    return value[number].T if stacked else value


def _compare(
    theirs: Mapping[str, mx.array], ours: tuple[mx.array, mx.array], rate: float, scale: float, name: str
) -> None:
    """Compare what two updates do with random inputs."""
    a, b = theirs["A"].astype(mx.float32), theirs["B"].astype(mx.float32)
    first, second = (value.astype(mx.float32) for value in ours)
    _require(a.shape[1] == first.shape[0] and b.shape[0] == second.shape[1], f"{name} has another shape")
    inputs = mx.random.normal((_PROBES, a.shape[1]), key=mx.random.key(0))
    found = (inputs @ a.T) @ b.T * rate
    wanted = (inputs @ first) @ second * scale
    error, size = (mx.max(mx.abs(value)) for value in (found - wanted, wanted))
    _require(bool(error <= _LIMIT * size), f"{name} computes something else")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise _differs(what)


def _differs(what: str) -> ModelError:
    hint = "free disk space and try again; if it happens again this is a defect: report it"
    return ModelError(f"what was written for PEFT is not the adapter, and was not kept: {what}", hint=hint)
