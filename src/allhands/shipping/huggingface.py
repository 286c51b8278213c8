"""Fused models that transformers loads: dense weights under Hugging Face's names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from allhands.errors import ModelError
from allhands.model.load import Json, read_config
from allhands.model.sources import resolve
from allhands.shipping.fusing import Fused, FuseOptions, described, fuse_model

# Architectures whose weights have the same names and shapes in mlx_lm and in transformers, and the class there.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


def export_hf(options: FuseOptions, out: Path) -> Fused:
    """Write the model with its adapter merged as transformers reads it; as :func:`fuse_model`.

    Raises:
        ModelError: also where the names of the weights are others in transformers.
    """
    below = described(options.adapter_path, options.source)[1] if options.adapter_path else options.source
    assert below is not None
    path = resolve(below)
    kind = str(read_config(path)["model_type"])
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"mlx_lm and transformers have other names for the weights of {kind}",
            where=str(path),
            hint="export the adapter alone (--to peft) and merge it in Python: merge_and_unload() of PEFT; names are "
            f"the same for {', '.join(ARCHITECTURES)}",
        )
    return fuse_model(replace(options, source=below, dequantize=True, library="transformers"), out, _finish)


def _finish(staged: Path, config: Json) -> None:
    """Tell transformers the class, where the model's own config does not."""
    described = json.loads((staged / "config.json").read_text(encoding="utf-8"))
    described.setdefault("architectures", [ARCHITECTURES[config["model_type"]]])
    text = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
    (staged / "config.json").write_text(text, encoding="utf-8")
