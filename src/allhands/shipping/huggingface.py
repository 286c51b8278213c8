"""Fused models that transformers loads: dense weights under Hugging Face's names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from allhands.errors import ModelError
from allhands.model.hf_names import Architecture, architecture_of, known_architectures
from allhands.model.load import Json, read_config
from allhands.model.sources import resolve
from allhands.shipping.fusing import Fused, FuseOptions, described, fuse_model


def export_hf(options: FuseOptions, out: Path) -> Fused:
    """Write the model with its adapter merged as transformers reads it; as :func:`fuse_model`.

    Raises:
        ModelError: also where the names of the weights in transformers are not known.
    """
    below = described(options.adapter_path, options.source)[1] if options.adapter_path else options.source
    assert below is not None
    path = resolve(below)
    known = require_known(read_config(path), path)

    def finish(staged: Path, config: Json) -> None:
        _name_class(staged, known)

    settings = replace(options, source=below, dequantize=True, library="transformers")
    return fuse_model(settings, out, finish, known.checkpoint)


def require_known(config: Json, path: Path) -> Architecture:
    """How transformers keeps the model in ``path`` (ModelError where that is not known)."""
    known = architecture_of(config)
    if known is None:
        raise ModelError(
            f"how transformers names and keeps the weights of {config['model_type']} is not known here",
            where=str(path),
            hint="allhands fuse writes the merged model for mlx_lm and allhands; exports for PyTorch are possible of "
            f"{known_architectures()}",
        )
    return known


def _name_class(staged: Path, known: Architecture) -> None:
    """Tell transformers the class, where the model's own config does not."""
    content = json.loads((staged / "config.json").read_text(encoding="utf-8"))
    content.setdefault("architectures", [known.name])
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (staged / "config.json").write_text(text, encoding="utf-8")
