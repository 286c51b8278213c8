"""The modules of mlx_lm that faster forms may replace, listed one by one and checked instance by
instance.

A form computes the same as one ``__call__`` in mlx_lm's source, so the list has only classes whose
source was read. A module counts as known if its class and all its attributes are listed. All other
modules compute as in mlx_lm. ``tests/unit/test_known.py`` fails when the source of a listed class
changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from allhands.config.schema import COMPILE_FROM_BATCHES
from allhands.kernels.selection import pads_heads

_PACKAGE = "mlx_lm.models."


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IDLE = {
    "_no_grad",
    "_training",
    "_native_forward_only",
    "_selection",
}  # they do not change what a module computes

# ``down_proj(silu(gate_proj(x)) * up_proj(x))``.
SWIGLU = _names(
    """
    Klear.KlearMLP afm7.MLP afmoe.MLP baichuan_m1.MLP bailing_hybrid.MLP bailing_moe.BailingMoeMLP
    bailing_moe_linear.MLP bailing_moe_v3.BailingMLP cohere.MLP cohere2.MLP deepseek.DeepseekMLP
    deepseek_v2.DeepseekV2MLP deepseek_v3.DeepseekV3MLP deepseek_v32.DeepseekV32MLP dots1.Dots1MLP ernie4_5.MLP
    ernie4_5_moe.Ernie4_5_MLP exaone4.MLP exaone_moe.MLP falcon_h1.FalconH1MLP glm4_moe.MLP
    glm4_moe_lite.Glm4MoeLiteMLP granite.MLP granitemoehybrid.GraniteMoeHybridMLP helium.HeliumMLP hunyuan.MLP
    hunyuan_v1_dense.MLP internlm3.MLP jamba.JambaMLP kimi_linear.KimiMLP laguna.MLP lfm2_moe.MLP llama.MLP llama4.MLP
    llama4_text.MLP longcat_flash.LongcatFlashMLP mimo.MLP mimo_v2_flash.MLP minicpm.MLP minicpm3.MLP ministral3.MLP
    muse_glimmer.MLP nanbeige.MLP olmo2.MLP olmo3.Olmo3MLP olmo_hybrid.MLP plamo.MLP qwen2.MLP qwen2_moe.MLP qwen3.MLP
    qwen3_moe.MLP qwen3_next.Qwen3NextMLP seed_oss.MLP stablelm.MLP telechat3.Telechat3MLP youtu_llm.YoutuLLMMLP
    """
)
_SWIGLU_ATTRIBUTES = {
    "gate_proj",
    "up_proj",
    "down_proj",
    "config",
    "hidden_size",
    "intermediate_size",
}

# Projections, norms of queries and keys in some classes, rotation, causal attention, projection.
# Classes differ in their names for the number of heads and the number of key-value heads.
_SHORT = ("n_heads", "n_kv_heads")
_NUM = ("num_heads", "num_key_value_heads")
_LONG = ("num_attention_heads", "num_key_value_heads")
ATTENTION: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        _names("""
        dots1.Dots1Attention ernie4_5.Attention ernie4_5_moe.Attention gemma.Attention gemma3_text.Attention
        glm4.Glm4Attention granite.Attention granitemoe.GraniteMoeAttention helium.HeliumAttention internlm3.Attention
        llama.Attention mellum.Attention mimo.Attention nanbeige.Attention nemotron-nas.Attention nemotron.Attention
        olmo2.Attention olmoe.Attention phimoe.Attention qwen2.Attention qwen2_moe.Attention qwen3.Attention
        qwen3_moe.Attention seed_oss.Attention starcoder2.Attention
        """),
        _SHORT,
    ),
    **dict.fromkeys(["minicpm.Attention", "mixtral.MixtralAttention"], _NUM),
    **dict.fromkeys(
        [
            "Klear.KlearAttention",
            "apertus.ApertusAttention",
            "glm.GLMAttention",
            "olmo3.Olmo3Attention",
        ],
        _LONG,
    ),
    "deepseek.DeepseekAttention": ("num_attention_heads", "num_kv_heads"),
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = {"q_norm", "k_norm"}
_ATTENTION_ATTRIBUTES = {
    *(*_PROJECTIONS, *_NORMS, "rope", "scale", *_SHORT, *_NUM, *_LONG, "num_kv_heads"),
    # Not used by ``__call__``, or only in the constructor.
    *(
        "args",
        "config",
        "head_dim",
        "hidden_size",
        "is_sliding",
        "layer_idx",
        "n_kv_groups",
        "num_key_value_groups",
    ),
    *("partial_rotary_factor", "repeats", "rope_theta"),
}
# Gemma's norm adds 1 to its weight; like MLX's it works on the last axis of its input.
_NORM_TYPES = {"gemma3_text.RMSNorm"}

# Rotations whose angles depend on the position alone. rope_utils.DynamicNTKScalingRoPE and
# internlm3's are not listed: their base depends on the length of the row.
ROTATIONS = _names(
    """
    hunyuan.DynamicNTKAlphaRoPE hunyuan_v1_dense.DynamicNTKAlphaRoPE rope_utils.Llama3RoPE rope_utils.ProportionalRoPE
    rope_utils.SuScaledRoPE rope_utils.YarnRoPE
    """
)
_ROTATION_ATTRIBUTES = {
    *(
        "dims",
        "dim",
        "traditional",
        "base",
        "scale",
        "_freqs",
        "_scale",
        "mscale",
        "max_position_embeddings",
    ),
    "original_max_position_embeddings",
}

# ``x + self_attn(input_layernorm(x), mask, cache)``, then the same with ``mlp`` and
# ``post_attention_layernorm``.
BLOCKS = _names(
    """
    Klear.KlearDecoderLayer afm7.TransformerBlock bitnet.TransformerBlock deepseek.DeepseekDecoderLayer
    deepseek_v2.DeepseekV2DecoderLayer deepseek_v3.DeepseekV3DecoderLayer deepseek_v32.DeepseekV32DecoderLayer
    dots1.Dots1DecoderLayer ernie4_5.DecoderLayer ernie4_5_moe.Ernie4_5_DecoderLayer exaone_moe.DecoderLayer
    gemma.TransformerBlock glm.GLMBlock glm4_moe.DecoderLayer glm4_moe_lite.Glm4MoeLiteDecoderLayer
    helium.HeliumDecoderLayer hunyuan_v1_dense.TransformerBlock internlm3.TransformerBlock laguna.TransformerBlock
    llama.TransformerBlock mellum.MellumDecoderLayer mimo.TransformerBlock mimo_v2_flash.DecoderLayer
    nanbeige.TransformerBlock nemotron.TransformerBlock phi3.TransformerBlock qwen2.TransformerBlock
    qwen2_moe.Qwen2MoeDecoderLayer qwen3.TransformerBlock qwen3_moe.Qwen3MoeDecoderLayer seed_oss.TransformerBlock
    starcoder2.TransformerBlock youtu_llm.YoutuLLMDecoderLayer
    """
)
_BLOCK_ATTRIBUTES = {
    *(
        "self_attn",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
        "args",
        "hidden_size",
        "n_heads",
    ),
    *("num_attention_heads", "use_sliding", "is_sliding_window"),
}

# ``lm_head(model(inputs, cache))``; the embedding is the head if ``args.tie_word_embeddings``.
_HEAD_BY_ARGS = _names(
    """
    afmoe apertus bitnet dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe glm helium hunyuan_v1_dense internlm3
    iquestloopcoder jamba laguna llama mellum mimo ministral3 mistral4 mixtral nanbeige nemotron nemotron-nas olmo2
    olmo3 olmo_hybrid olmoe phi3 qwen2 qwen3 qwen3_moe qwen3_next smollm3 starcoder2 telechat3
    """
)
_HEAD_IS_LAYER = _names(
    """
    Klear deepseek deepseek_v2 deepseek_v3 deepseek_v32 glm4 glm4_moe glm4_moe_lite gpt_oss longcat_flash
    longcat_flash_ngram mimo_v2_flash phimoe qwen2_moe step3p5
    """
)
_HEAD_IS_EMBEDDING = _names("gemma hunyuan lfm2 lfm2_moe")
# The same, with the choice in another attribute; or with scaled logits if the embedding is not the
# head.
_HEAD_BY_ATTRIBUTE = _names("gemma3_text seed_oss")
_HEAD_IF_TIED = _names("minicpm minicpm3")

SPLIT = _HEAD_BY_ARGS | _HEAD_IS_LAYER | _HEAD_IS_EMBEDDING | _HEAD_BY_ATTRIBUTE | _HEAD_IF_TIED

# Models whose blocks run once in a pass, in the order of ``layers``. Two run them several times.
IN_ORDER = SPLIT - {"iquestloopcoder", "nanbeige"} | _names(
    "cohere cohere2 gemma2 gemma4_text granite granitemoe granitemoehybrid phi stablelm"
)


def name_of(module: Any) -> str:
    """Return module and class within ``mlx_lm.models``, such as ``"llama.MLP"``; empty for other
    classes.
    """
    kind = type(module)
    return (
        f"{kind.__module__.removeprefix(_PACKAGE)}.{kind.__qualname__}"
        if kind.__module__.startswith(_PACKAGE)
        else ""
    )


def _only_has(module: Any, attributes: set[str]) -> bool:
    return (vars(module).keys() | module.keys()) - _IDLE <= attributes


def is_swiglu(module: Any) -> bool:
    """Return true if ``module`` is a feed-forward block with SwiGLU and nothing else."""
    return name_of(module) in SWIGLU and _only_has(module, _SWIGLU_ATTRIBUTES)


def is_block(module: Any) -> bool:
    """Return true if ``module`` is a block of attention and feed-forward part, with a norm before
    each.
    """
    return name_of(module) in BLOCKS and _only_has(module, _BLOCK_ATTRIBUTES)


@dataclass(frozen=True)
class Attention:
    """A known attention block.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key-value heads.
        width: features of a head.
        normed: true if queries and keys go through norms.
    """

    heads: int
    kv_heads: int
    width: int
    normed: bool


def attention_of(module: Any) -> Attention | None:
    """Return the sizes of ``module`` if it is a known attention block that rotates the pairs
    (i, i + width / 2) of whole heads.
    """
    names = ATTENTION.get(name_of(module))
    if names is None or not _only_has(module, _ATTENTION_ATTRIBUTES):
        return None
    norms = [module[name] for name in _NORMS if name in module]
    if len(norms) == 1 or not all(map(_is_norm, norms)):
        return None
    heads, kv_heads = (int(getattr(module, name)) for name in names)
    queries, keys, values = (_outputs(module[name]) for name in _PROJECTIONS[:3])
    width = keys // kv_heads
    if (
        keys == 0
        or heads % kv_heads
        or (queries, keys, values) != (heads * width, kv_heads * width, keys)
    ):
        return None
    return (
        Attention(heads, kv_heads, width, bool(norms))
        if _turns_halves(module.rope, width)
        else None
    )


def attends_padded(module: str, width: int) -> bool:
    """Return true if models of one of mlx_lm's modules, such as ``"llama"``, can have attention
    that pads its rows on an NVIDIA GPU.

    Args:
        width: features of a head.
    """
    listed = any(name.partition(".")[0] == module for name in ATTENTION)
    return listed and pads_heads(width)


def normed(norm: Any, x: mx.array) -> mx.array:
    """Norm each head of queries or keys, or all heads together, depending on the number of the
    norm's weights.

    Args:
        x: (B, T, heads * D) or (B, T, heads, D), returned in the same shape.
    """
    return norm(x.reshape(*x.shape[:2], -1, norm.weight.size)).reshape(x.shape)


def factors_of(norm: Any) -> mx.array:
    """Return the factors by which a norm of :func:`attention_of` multiplies."""
    return 1.0 + norm.weight if name_of(norm) in _NORM_TYPES else norm.weight


def _is_norm(norm: Any) -> bool:
    # The norm may have a form of our own already.
    return nn.RMSNorm in (type(norm), type(norm).__base__) or name_of(norm) in _NORM_TYPES


def _outputs(layer: Any) -> int:
    """Return the output features of a linear layer, adapted or not; 0 for another module."""
    base = layer.get("linear", layer)
    found = base.get("weight", base.get("codes"))
    return 0 if found is None else found.shape[0]


def _turns_halves(rope: Any, width: int) -> bool:
    """Return true if ``rope`` turns the pairs (i, i + width / 2) by the position alone."""
    if not (type(rope) is nn.RoPE or name_of(rope) in ROTATIONS) or not _only_has(
        rope, _ROTATION_ATTRIBUTES
    ):
        return False
    turned = getattr(rope, "dims", None) or getattr(rope, "dim", None)
    return turned == width and width % 2 == 0 and not getattr(rope, "traditional", False)


def key_of_rotation(rope: Any) -> Hashable:
    """Return a key that rotations of :func:`attention_of` share only if they turn alike."""
    facts = {name: value for name, value in {**vars(rope), **rope}.items() if name not in _IDLE}
    told = [
        (name, _bytes(value) if isinstance(value, mx.array) else value)
        for name, value in facts.items()
    ]
    return type(rope), *sorted(told, key=lambda item: item[0])


def _bytes(array: mx.array) -> bytes:
    return np.asarray(array.astype(mx.float32)).tobytes()


def turns_of(rope: Any, length: int, width: int) -> tuple[mx.array, mx.array]:
    """(length, width / 2) float32 cosines and sines by position, times the rotation's own scale.

    The model's own rotation computes them in float32, whatever its base and scaling are.
    """
    ones = mx.concatenate([mx.ones((width // 2,)), mx.zeros((width // 2,))])
    turned = rope(mx.contiguous(mx.broadcast_to(ones, (1, 1, length, width))))
    cosines, sines = mx.split(turned[0, 0].astype(mx.float32), 2, axis=-1)
    return cosines, sines


def head_of(model: Any) -> Any:
    """Return the module whose weight alone turns ``model.model``'s output into logits; ``None`` if
    unknown.

    The module may be an embedding, a linear layer or a wrapper of one of them.
    """
    family, _, kind = name_of(model).partition(".")
    if kind != "Model":
        return None
    if family in _HEAD_IS_LAYER:
        return model.lm_head
    if family in _HEAD_IS_EMBEDDING:
        return model.model.embed_tokens
    if family in _HEAD_BY_ARGS | _HEAD_IF_TIED:
        tied = model.args.tie_word_embeddings
    elif family in _HEAD_BY_ATTRIBUTE:
        tied = model.tie_word_embeddings
    else:
        return None
    if tied:
        return model.model.embed_tokens
    return None if family in _HEAD_IF_TIED else model.lm_head


def runs_in_order(model: Any) -> bool:
    """Return true if each of ``model.layers`` runs once in a pass, after those before it."""
    family, _, kind = name_of(model).partition(".")
    return kind == "Model" and family in IN_ORDER


# Modules that depend on the length of a row, or on the position in it, whatever they attend to.
_BY_LENGTH = _names(
    """
    internlm3.DynamicNTKScalingRoPE llama4.Attention ministral3.Attention mistral4.Mistral4Attention
    rope_utils.DynamicNTKScalingRoPE
    """
)


def follows_length(model: nn.Module) -> bool:
    """Return true if something in ``model`` depends on a row's length or a text's position."""
    return any(name_of(module) in _BY_LENGTH for module in model.modules())


def length_that_counts(model: nn.Module) -> int | None:
    """Return the row length, with padding, from which on angles depend on it; ``None`` if they
    never do.
    """
    found = [
        module for module in model.modules() if name_of(module).endswith(".DynamicNTKScalingRoPE")
    ]
    return min((int(module.max_position_embeddings) for module in found), default=None)


def sees_ahead(model: nn.Module) -> int | None:
    """Return the size of the blocks in which positions attend to later ones; ``None`` if they
    never do.

    phi3small's sparse layers add the causal mask, which is boolean, to the scores as a number.
    """
    found = [m for m in model.modules() if name_of(m) == "phi3small.Attention" and m.block_sparse]
    return max((int(module.blocksparse_block_size) for module in found), default=None)


def depends_on_padding(model: nn.Module) -> bool:
    """Return true if what follows a row can change its results."""
    return length_that_counts(model) is not None or sees_ahead(model) is not None


def can_be_compiled(model_type: str | None) -> bool:
    """Return true if a pass can be compiled; dbrx's loops over the chosen experts in Python."""
    return model_type != "dbrx"


def is_compiled(asked: str, batches: int, model_type: str | None) -> bool:
    """Return True if the steps of a training on a GPU are compiled.

    Args:
        asked: value of ``--compile``.
        batches: number of batches of the training.
    """
    if asked == "auto":
        return batches >= COMPILE_FROM_BATCHES and can_be_compiled(model_type)
    return asked == "on"


def calls_blocks(model: Any) -> bool:
    """Return true if a pass calls ``model.layers``; iquestloopcoder's calls parts of these."""
    return name_of(model) != "iquestloopcoder.Model"
