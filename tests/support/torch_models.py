"""Small random models as transformers builds and saves them; run by a Python that has it, and asked
by ``asked.Asked``.

make KIND DIRECTORY       # a model of this model_type, with what mlx_lm wants to find in
config.json besides
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from asked import answer_all
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Given to every configuration that knows the setting.
COMMON: dict[str, Any] = {
    **{
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{"num_key_value_heads": 2, "vocab_size": 259, "head_dim": 16, "max_position_embeddings": 256},
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 64,
        "query_pre_attn_scalar": 16,
    },
    **{
        "n_positions": 256,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 256,
        "rotary_dim": 8,
    },
    **{
        "num_local_experts": 4,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
    },
    **{
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "n_shared_experts": 1,
    },
    **{
        "num_shared_experts": 1,
        "moe_num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
    **{
        "first_k_dense_replace": 1,
        "num_dense_layers": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "v_head_dim": 16,
    },
    **{
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "state_size": 8,
        "expand": 2,
        "conv_kernel": 4,
    },
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8},
}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "afmoe": MIXED,
    "cohere2": MIXED,
    "deepseek_v3": LATENT,
    "exaone4": MIXED,
    "falcon_mamba": {"intermediate_size": 128, "time_step_rank": 4},
    "gemma3_text": MIXED,
    "glm4_moe_lite": LATENT,
    "gpt_neox": {"intermediate_size": 256},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"intermediate_size": 128, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "moe"]},
    "olmo3": MIXED,
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
}
# What mlx_lm reads and transformers 5 has elsewhere, or does not write.
FOR_MLX: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 2},
    "exaone4": {"sliding_window_pattern": "LG", "head_dim": 16},
    "exaone_moe": {"head_dim": 16, "is_moe_layer": [False, True]},
    "gemma3_text": {"sliding_window_pattern": 2},
    "glm4_moe": {"head_dim": 16},
    "gpt2": {"n_ctx": 256, "num_key_value_heads": 4},
    "gpt_neox": {"rotary_emb_base": 10000},
    "lfm2": {
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
    },
    "mamba2": {"intermediate_size": 128},
    "mellum": {"num_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16},
}
NESTED_ROPE = ("laguna", "mellum")


def make(kind: str, directory: str) -> None:
    settings = CONFIG_MAPPING[kind]
    usual = settings()
    if kind in ("deepseek_v3", "glm4_moe_lite"):
        usual.head_dim = 8
    chosen = {key: value for key, value in COMMON.items() if hasattr(usual, key)} | OWN.get(
        kind, {}
    )
    if (
        "layer_types" not in chosen
        and getattr(usual, "layer_types", None)
        and kind not in ("mamba", "mamba2")
    ):
        chosen["layer_types"] = list(usual.layer_types)[:2]
    for name in ("falcon_mamba", "mamba", "mamba2"):
        if kind == name:
            chosen.pop("layer_types", None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings(**chosen), dtype=torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape) * 0.1
            value.copy_(noise if value.ndim > 1 else value + noise)
    model.save_pretrained(directory)
    file = Path(directory) / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **for_mlx(kind, config)}))


def for_mlx(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = next((each for each in rope.values() if isinstance(each, dict)), rope)
    found = {"rope_theta": rope.get("rope_theta", 10000.0)}
    if kind not in NESTED_ROPE:
        found["rope_scaling"] = None
    if "partial_rotary_factor" in rope:
        found |= {
            "partial_rotary_factor": rope["partial_rotary_factor"],
            "rotary_pct": rope["partial_rotary_factor"],
        }
    found |= FOR_MLX.get(kind, {})
    # Written over only where mlx_lm reads another thing under the same name.
    return {
        key: value
        for key, value in found.items()
        if config.get(key) is None or key in FOR_MLX.get(kind, {})
    }


def answer(verb: str, *words: str) -> Any:
    return {"make": make}[verb](*words)


answer_all(answer)
