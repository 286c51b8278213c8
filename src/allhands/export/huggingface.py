"""Fused models that transformers loads: dense weights under Hugging Face's names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from allhands.errors import ModelError
from allhands.export.fusing import Fused, FuseOptions, described, fuse_model
from allhands.io.trees import flatten
from allhands.model.hf_names import Architecture, architecture_of, known_architectures, other_way
from allhands.model.load import Json, build, read_config
from allhands.model.reading import opened
from allhands.model.sources import resolve


def export_hf(options: FuseOptions, out: Path) -> Fused:
    """Write the model with its adapter merged as transformers reads it; as :func:`fuse_model`.

    Raises:
        ModelError: also where the names of the weights in transformers are not known.
    """
    below = described(options)[1]
    path = resolve(below)
    known = require_known(path, trust_remote_code=options.trust_remote_code)

    settings = replace(options, source=below, dequantize=True, library="transformers")
    return fuse_model(settings, out, _describe, known.checkpoint)


def require_known(path: Path, *, trust_remote_code: bool = False) -> Architecture:
    """Return the architecture of the model in ``path`` (ModelError where that is not known)."""
    config = read_config(path)
    known = architecture_of(config) or _as_in_its_files(path, config, trust_remote_code)
    if known is None:
        raise ModelError(
            f"how transformers names and keeps the weights of {config['model_type']} is not known here",
            code="architecture-unsupported",
            where=str(path),
            hint=f"{other_way(known)}; for transformers models can be written of {known_architectures()}",
        )
    if not known.whole:
        raise ModelError(
            f"mlx_lm leaves out the vision part of {config['model_type']}, and transformers needs the whole model",
            code="architecture-unsupported",
            where=str(path),
            hint=f"--to peft writes an adapter alone, as far as PEFT can hold it; {other_way(known)}",
        )
    return known


def _as_in_its_files(path: Path, config: Json, trust_remote_code: bool) -> Architecture | None:
    """The architecture of a model that PyTorch has written and mlx_lm reads without changing a name
    or a value.
    """
    parts = list(opened(path))
    if (
        not config.get("architectures")
        or not parts
        or any(metadata.get("format") != "pt" for _, metadata in parts)
    ):
        return None
    ours = dict(flatten(build(path, trust_remote_code)[0].parameters()))
    for tensors, _ in parts:
        for name, value in tensors.items():
            if name.endswith("inv_freq"):  # computed, and left out by mlx_lm
                continue
            same = ours.pop(name, None)
            if same is None or same.shape != value.shape or not mx.array_equal(same, value):
                return None
    return None if ours else Architecture()


def _describe(staged: Path, _: Json) -> None:
    """Tell transformers the class, where the model's own config does not, and that the weights are
    dense.
    """
    content = read_config(staged)
    for name in (
        "quantization",
        "quantization_config",
    ):  # such as that of a checkpoint in 8-bit floats
        content.pop(name, None)
    if "architectures" not in content:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        content["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[content["model_type"]]]
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (staged / "config.json").write_text(text, encoding="utf-8")
