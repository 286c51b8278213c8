"""Names and layouts of weights in transformers, for models whose weights mlx_lm renames or reshapes
when it loads them.

``sanitize`` of each architecture in ``mlx_lm.models`` changes weights on loading; the table here
has the reverse changes. An architecture that is not in the table has not been compared with
transformers, and nothing is written for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

Json = dict[str, Any]
Weights = dict[str, mx.array]
Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Architecture:
    """Names and layouts in transformers of a model that mlx_lm loads.

    Attributes:
        renames: patterns and replacements, one after the other, from mlx_lm's names to those of
            checkpoints; a replacement with ``{}`` makes one weight for each expert of a stack.
        transposed: matrices that transformers keeps as (in, out).
        kernels: kernels of convolutions, (out, width, in) in MLX and (out, in, width) in
            transformers.
        others: changes that no pattern can express: weights that are joined or have another shape.
        former_names: pairs of a module's name in another version of transformers, and in mlx_lm.
        modules: renames from a checkpoint's names to those of modules in memory, where they differ.
        adapted_experts: True if PEFT reads adapters of the experts.
        unadapted: pattern of modules in mlx_lm that PEFT does not adapt correctly, and the reason.
        whole: True if all weights are known, not only the names of modules.
    """

    renames: Renames = ()
    transposed: str | None = None
    kernels: str | None = None
    others: Callable[[Weights, Json], Weights] | None = None
    former_names: Renames = ()
    modules: Renames = ()
    adapted_experts: bool = False
    unadapted: tuple[str, str] | None = None
    whole: bool = True

    def checkpoint_name(self, name: str) -> str:
        """Return a weight's name in a checkpoint, with ``{}`` for the number of an expert."""
        return _renamed(name, self.renames)

    def checkpoint(self, weights: Weights, config: Json) -> Weights:
        """Return the weights with names and layouts of transformers; ``weights`` is emptied."""
        if self.others is not None:
            weights = self.others(weights, config)
        found: Weights = {}
        for name in list(weights):
            value = weights.pop(name)
            theirs = self.checkpoint_name(name)
            if "{}" in theirs:
                found |= {theirs.format(number): value[number] for number in range(value.shape[0])}
            else:
                found[theirs] = self._laid_out(name, value)
        return found

    def _laid_out(self, name: str, value: mx.array) -> mx.array:
        if value.ndim == 2 and self.transposed and re.search(self.transposed, name):
            return mx.contiguous(value.T)
        if value.ndim == 3 and self.kernels and re.search(self.kernels, name):
            return mx.contiguous(mx.moveaxis(value, 1, 2))
        return value

    def module_name(self, module: str) -> str | None:
        """Return the name in transformers of a module in mlx_lm, with ``{}`` for an expert's
        number; ``None`` without one.
        """
        if self.others is not None and re.search(_JOINED, module):
            return None
        theirs = _renamed(self.checkpoint_name(f"{module}.weight"), self.modules)
        return theirs.removesuffix(".weight")

    def is_transposed(self, module: str) -> bool:
        """Return True if transformers keeps the module's matrix as (in, out)."""
        return (
            self.transposed is not None
            and re.search(self.transposed, f"{module}.weight") is not None
        )


def _renamed(name: str, renames: Renames) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


# Modules of mlx_lm that are a part of a module in transformers, or several of them.
_JOINED = r"\.(embed_q|unembed_out)$|\.block_sparse_moe\.switch_mlp\."


def _join_keys_and_values(weights: Weights, config: Json) -> Weights:
    """Make ``kv_b_proj`` of latent attention from mlx_lm's two matrices for each head."""
    for name in [name for name in weights if name.endswith(".embed_q.weight")]:
        before = name.removesuffix("embed_q.weight")
        keys, values = (
            weights.pop(name).swapaxes(-1, -2),
            weights.pop(f"{before}unembed_out.weight"),
        )
        joined = mx.concatenate([keys, values], axis=1)
        weights[f"{before}kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    return weights


def _join_granite_experts(weights: Weights, config: Json) -> Weights:
    for name in [name for name in weights if name.endswith(".switch_mlp.gate_proj.weight")]:
        before = name.removesuffix("switch_mlp.gate_proj.weight")
        gate, up = weights.pop(name), weights.pop(f"{before}switch_mlp.up_proj.weight")
        weights[f"{before}input_linear.weight"] = mx.concatenate([gate, up], axis=1)
        weights[f"{before}output_linear.weight"] = weights.pop(
            f"{before}switch_mlp.down_proj.weight"
        )
    return weights


_STACKED: Renames = ((r"\.mlp\.switch_mlp\.(\w+)\.weight$", r".mlp.experts.{}.\1.weight"),)
_STACKED_IN_PLACE: Renames = (
    (r"\.mlp\.experts\.(\w+_proj)\.weight$", r".mlp.experts.{}.\1.weight"),
)
_MIXTRAL: Renames = tuple(
    (
        rf"\.block_sparse_moe\.switch_mlp\.{ours}_proj\.weight$",
        rf".block_sparse_moe.experts.{{}}.{theirs}.weight",
    )
    for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
)
# With transformers 5 PEFT takes each layer of these names for experts, and joins them.
_TAKEN_FOR_EXPERTS = (r"\.(gate|up|down)_proj$", "PEFT takes layers of this name for experts")
_MIXTURE = Architecture(_STACKED, adapted_experts=True, unadapted=_TAKEN_FOR_EXPERTS)
_ROUTER = "transformers 5 has no linear layer there that PEFT could adapt"

# Architectures with the same names and layouts in mlx_lm and in transformers.
_SAME = """
    cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm4 granite helium hunyuan_v1_dense llama
    ministral3 mistral nemotron olmo2 olmo3 phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
    gpt_bigcode
"""

ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(_SAME.split(), Architecture()),
    "gpt2": Architecture(
        ((r"^model\.", ""),),
        transposed=r"\.(c_attn|c_proj|c_fc)\.weight$",
        modules=((r"^", "transformer."),),
    ),
    "gptj": Architecture(((r"^model\.", "transformer."),)),
    "gpt_neox": Architecture(
        (
            (r"^model\.h\.", "gpt_neox.layers."),
            (r"^model\.embed_out\.", "embed_out."),
            (r"^model\.", "gpt_neox."),
        ),
        former_names=(("lm_head", "model.embed_out"),),
        unadapted=(
            r"^model\.embed_out$",
            "it has another name in transformers 4 than in transformers 5",
        ),
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba"),
        Architecture(
            kernels=r"\.conv1d\.weight$",
            unadapted=(
                r"\.(out_proj|dt_proj)$",
                "transformers reads its weight past PEFT's adapter",
            ),
        ),
    ),
    "lfm2": Architecture(kernels=r"\.conv\.conv\.weight$"),
    # --- experts, stacked in mlx_lm ---
    "mixtral": Architecture(_MIXTRAL, adapted_experts=True),
    "phimoe": Architecture(_MIXTRAL, unadapted=(r"\.block_sparse_moe\.gate$", _ROUTER)),
    "qwen2_moe": Architecture(_STACKED, unadapted=(r"\.mlp\.gate$", _ROUTER)),
    **dict.fromkeys(("qwen3_moe", "olmoe", "mellum", "glm4_moe"), _MIXTURE),
    **dict.fromkeys(("dots1", "afmoe"), replace(_MIXTURE, renames=_STACKED_IN_PLACE)),
    "exaone_moe": replace(
        _MIXTURE,
        renames=(
            *_STACKED,
            (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),
        ),
    ),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite"), replace(_MIXTURE, others=_join_keys_and_values)
    ),
    "lfm2_moe": Architecture(
        tuple(
            (rf"\.feed_forward\.{ours}{old}_proj\.weight$", f".feed_forward.{theirs}{new}.weight")
            for ours, theirs in ((r"switch_mlp\.", "experts.{}."), ("", ""))
            for old, new in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        ),
        kernels=r"\.conv\.conv\.weight$",
    ),
    "laguna": Architecture(
        (
            *_STACKED,
            (r"\.mlp\.gate\.proj\.weight$", ".mlp.gate.weight"),
            (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.experts.e_score_correction_bias"),
        ),
        unadapted=(
            r"\.mlp\.",
            "its layers have other names in the memory of transformers 5 than in files",
        ),
    ),
    "nemotron_h": Architecture(
        (
            (r"\.mixer\.switch_mlp\.fc1\.weight$", ".mixer.experts.{}.up_proj.weight"),
            (r"\.mixer\.switch_mlp\.fc2\.weight$", ".mixer.experts.{}.down_proj.weight"),
        ),
        kernels=r"\.conv1d\.weight$",
        unadapted=(".", "its layers have other names in transformers 4 than in transformers 5"),
    ),
    "gemma3": Architecture(  # mlx_lm leaves out what sees images, so that no whole model can be written
        modules=(
            (r"^language_model\.model\.", "model.language_model."),
            (r"^language_model\.lm_head", "lm_head"),
        ),
        whole=False,
    ),
    "granitemoe": Architecture(
        others=_join_granite_experts, unadapted=(r"\.router\.layer$", _ROUTER)
    ),
}


def architecture_of(config: Json) -> Architecture | None:
    """Return the architecture of this ``config.json``; ``None`` if it is unknown."""
    return ARCHITECTURES.get(str(config.get("model_type")))


def known_architectures() -> str:
    """Return the model types that can be written whole, for messages."""
    return ", ".join(sorted(kind for kind, known in ARCHITECTURES.items() if known.whole))


def other_way(architecture: Architecture | None) -> str:
    """Return advice on another form of export that is possible for this architecture."""
    if architecture is not None and architecture.whole:
        return "allhands export --to hf writes a model with its adapter merged, as transformers loads it"
    return "allhands fuse writes a model with its adapter merged, for mlx_lm and allhands"
