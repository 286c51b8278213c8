"""Fused models that transformers loads: dense weights under Hugging Face's names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from allhands.errors import ModelError
from allhands.export.fusing import Fused, FuseOptions, described, fuse_model
from allhands.io.trees import flatten
from allhands.model.hf_names import Architecture, architecture_of, known_architectures, other_way
from allhands.model.load import Json, build, read_config
from allhands.model.sources import resolve


def export_hf(options: FuseOptions, out: Path) -> Fused:
    """Write the model with its adapter merged as transformers reads it; as :func:`fuse_model`.

    Raises:
        ModelError: also where the names of the weights in transformers are not known.
    """
    below = described(options.adapter_path, options.source)[1] if options.adapter_path else options.source
    assert below is not None
    path = resolve(below)
    known = require_known(path, trust_remote_code=options.trust_remote_code)

    def finish(staged: Path, config: Json) -> None:
        _describe(staged, known)

    settings = replace(options, source=below, dequantize=True, library="transformers")
    return fuse_model(settings, out, finish, known.checkpoint)


def require_known(path: Path, *, trust_remote_code: bool = False) -> Architecture:
    """How transformers keeps the model in ``path`` (ModelError where that is not known)."""
    config = read_config(path)
    known = architecture_of(config) or _as_in_its_files(path, config, trust_remote_code)
    if known is None:
        reason = f"how transformers names and keeps the weights of {config['model_type']} is not known here"
        hint = f"{other_way(known)}; for transformers models can be written of {known_architectures()}"
        raise ModelError(reason, where=str(path), hint=hint)
    if not known.whole:
        reason = f"mlx_lm leaves out what sees images of {config['model_type']}, and transformers wants the whole model"
        hint = f"--to peft writes an adapter alone, as far as PEFT can hold it; {other_way(known)}"
        raise ModelError(reason, where=str(path), hint=hint)
    return known


def _as_in_its_files(path: Path, config: Json, trust_remote_code: bool) -> Architecture | None:
    """The architecture of a model that PyTorch has written and mlx_lm reads without changing a name or a value."""
    classes: Any = config.get("architectures")
    parts: list[Any] = [mx.load(str(file), return_metadata=True) for file in sorted(path.glob("model*.safetensors"))]
    if not classes or not parts or any(metadata.get("format") != "pt" for _, metadata in parts):
        return None
    ours = dict(flatten(build(path, trust_remote_code)[0].parameters()))
    for tensors, _ in parts:
        for name, value in tensors.items():
            if name.endswith("inv_freq"):  # computed, and left out by mlx_lm
                continue
            same = ours.pop(name, None)
            if same is None or same.shape != value.shape or not mx.array_equal(same, value):
                return None
    return None if ours else Architecture(str(classes[0]))


def _describe(staged: Path, known: Architecture) -> None:
    """Tell transformers the class, where the model's own config does not, and that the weights are dense."""
    content = json.loads((staged / "config.json").read_text(encoding="utf-8"))
    content.setdefault("architectures", [known.name])
    for name in ("quantization", "quantization_config"):  # such as that of a checkpoint in 8-bit floats
        content.pop(name, None)
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (staged / "config.json").write_text(text, encoding="utf-8")
