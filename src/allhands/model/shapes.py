"""Shapes of models that are trained from scratch: checked numbers, parameter counts, and
config.json.

A shape is named (:func:`find_shape`) or given by numbers. Nothing here needs MLX;
:mod:`allhands.model.pretraining` builds the model.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from allhands.errors import ConfigError
from allhands.io.formatting import counted

Family = Literal["llama", "qwen3", "mixtral"]
FAMILIES: tuple[str, ...] = get_args(Family)
DTYPES = ("float32", "bfloat16", "float16")

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_INTEGERS = (
    "layers",
    "dims",
    "mlp_dims",
    "heads",
    "kv_heads",
    "head_dim",
    "vocabulary",
    "block_size",
)
_MOST = 2**31 - 1  # of an array's side in MLX
_OTHER_NUMBERS = ("rope_theta", "norm_eps", "init_std")


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder-only transformer; checked when made.

    Attributes:
        family: Llama; Qwen 3 (queries and keys are normalised); or Mixtral (a router and experts
            for the MLP).
        layers: number of blocks of attention and MLP.
        dims: width of the residual stream.
        mlp_dims: width inside the MLP, or inside each expert.
        heads: number of query heads.
        kv_heads: number of heads of keys and values; each serves ``heads / kv_heads`` query heads.
        head_dim: width of a head. ``dims / heads`` in Llama and Mixtral.
        vocabulary: rows of the embedding.
        block_size: most tokens of a row.
        rope_theta: base of the rotary position code.
        tied: whether the output layer is the embedding.
        experts: number of experts of each layer; 0 except for Mixtral.
        experts_per_token: number of experts that compute a token; 0 except for Mixtral.
        norm_eps: number added to the mean square in RMS norms.
        init_std: standard deviation of the first weights.

    Raises:
        ConfigError: a number is impossible, or two numbers do not match.
    """

    family: Family
    layers: int
    dims: int
    mlp_dims: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    block_size: int
    rope_theta: float = 10000.0
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"no family {self.family!r}",
                code="value-unknown",
                where="family",
                hint=f"one of {', '.join(FAMILIES)}",
            )
        for name in (*_INTEGERS, "experts", "experts_per_token"):
            _check_integer(name, getattr(self, name), 1 if name in _INTEGERS else 0)
        for name in _OTHER_NUMBERS:
            _check_positive(name, getattr(self, name))
        self._check_heads()
        self._check_experts()

    def _check_heads(self) -> None:
        if self.heads % self.kv_heads:
            below = [number for number in range(1, self.heads + 1) if self.heads % number == 0]
            hint = f"give --kv-heads one of {', '.join(map(str, below))}"
            shared = counted(self.kv_heads, "head")
            queries = counted(self.heads, "query head")
            message = f"{shared} of keys and values cannot be shared equally by {queries}"
            raise ConfigError(message, code="heads-not-divisible", where="--kv-heads", hint=hint)
        if self.head_dim % 2:
            hint = "rotary positions need pairs: choose --dims and --heads so that dims / heads is even, or give --head-dim"
            raise ConfigError(
                f"{self.head_dim} is odd", code="value-invalid", where="--head-dim", hint=hint
            )
        if self.family == "mixtral" and self.heads * self.head_dim != self.dims:
            message = (
                f"{self.heads} heads of {self.head_dim} are not the {self.dims} dims of a Mixtral"
            )
            raise ConfigError(
                message,
                code="value-invalid",
                where="--head-dim",
                hint="leave --head-dim out: it is dims / heads",
            )

    def _check_experts(self) -> None:
        if self.family != "mixtral":
            if self.experts or self.experts_per_token:
                hint = "take the family mixtral, or leave --experts and --experts-per-token out"
                raise ConfigError(
                    f"a {self.family} has no experts",
                    code="option-without-effect",
                    where="--experts",
                    hint=hint,
                )
        elif self.experts < 2:
            raise ConfigError(
                f"{self.experts} is too few",
                code="value-out-of-range",
                where="--experts",
                hint="give at least 2, usually 8",
            )
        elif not 1 <= self.experts_per_token <= self.experts:
            message = f"{self.experts_per_token} of {self.experts} experts cannot compute a token"
            raise ConfigError(
                message,
                code="value-out-of-range",
                where="--experts-per-token",
                hint=f"give 1 to {self.experts}, usually 2",
            )


def _flag(name: str) -> str:
    """Return the option that gives a number of a shape."""
    return f"--{name.replace('_', '-')}"


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ConfigError(
            f"{value!r} is not a number of {name}",
            code="value-out-of-range",
            where=_flag(name),
            hint=f"give a whole number from {least} to {_MOST:,}",
        )


def _check_positive(name: str, value: object) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value < float("inf")
    ):
        raise ConfigError(
            f"{value!r} is not a positive number",
            code="value-out-of-range",
            where=_flag(name),
            hint=f"leave {_flag(name)} out for the usual one",
        )


# --- by name or by numbers ------------------------------------------------------------------------

# llama2.c (github.com/karpathy/llama2.c): the table of its README, and mlp_dims = 2/3 of 4 dims,
# rounded up to a multiple of 32, as its model.py has it. The output layer is the embedding.
_STORIES: dict[str, Any] = {
    "family": "llama",
    "vocabulary": 32000,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
}
# huggingface.co/HuggingFaceTB/SmolLM2-135M and -360M: config.json.
_SMOLLM2: dict[str, Any] = {
    "vocabulary": 49152,
    "block_size": 8192,
    "rope_theta": 100000.0,
    "norm_eps": 1e-5,
}
_SMOLLM2_135M = _SMOLLM2 | {
    "layers": 30,
    "dims": 576,
    "mlp_dims": 1536,
    "heads": 9,
    "kv_heads": 3,
    "init_std": 1 / 24,
}
# huggingface.co/Qwen/Qwen3-0.6B and -1.7B: config.json.
_QWEN3: dict[str, Any] = {
    **{
        "family": "qwen3",
        "layers": 28,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 151936,
    },
    **{"block_size": 40960, "rope_theta": 1e6, "norm_eps": 1e-6, "init_std": 0.02},
}
NAMED: Mapping[str, Mapping[str, Any]] = {
    "llama-15m": _STORIES
    | {"layers": 6, "dims": 288, "mlp_dims": 768, "heads": 6, "block_size": 256},
    "llama-42m": _STORIES
    | {"layers": 8, "dims": 512, "mlp_dims": 1376, "heads": 8, "block_size": 1024},
    "llama-110m": _STORIES
    | {"layers": 12, "dims": 768, "mlp_dims": 2048, "heads": 12, "block_size": 1024},
    "smollm2-135m": _SMOLLM2_135M | {"family": "llama"},
    "smollm2-360m": _SMOLLM2
    | {
        "family": "llama",
        "layers": 32,
        "dims": 960,
        "mlp_dims": 2560,
        "heads": 15,
        "kv_heads": 5,
        "init_std": 0.02,
    },
    # huggingface.co/meta-llama/Llama-3.2-1B: config.json without the scaling of positions beyond
    # 8192, which is added to a model after its pre-training.
    "llama-1b": {
        **{
            "family": "llama",
            "layers": 16,
            "dims": 2048,
            "mlp_dims": 8192,
            "heads": 32,
            "kv_heads": 8,
        },
        **{
            "vocabulary": 128256,
            "block_size": 8192,
            "rope_theta": 500000.0,
            "norm_eps": 1e-5,
            "init_std": 0.02,
        },
    },
    "qwen3-0.6b": _QWEN3 | {"dims": 1024, "mlp_dims": 3072},
    "qwen3-1.7b": _QWEN3 | {"dims": 2048, "mlp_dims": 6144},
    # Shapes of this project. In the larger one attention and each expert are as in SmolLM2-135M;
    # two of eight experts compute a token, as in Mixtral-8x7B.
    "mixtral-tiny": {
        **{
            "family": "mixtral",
            "layers": 4,
            "dims": 128,
            "mlp_dims": 256,
            "heads": 4,
            "kv_heads": 2,
        },
        **{"vocabulary": 4096, "block_size": 256, "experts": 4, "experts_per_token": 2},
    },
    "mixtral-8x135m": _SMOLLM2_135M | {"family": "mixtral", "experts": 8, "experts_per_token": 2},
}
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {"rope_theta": 1e6, "norm_eps": 1e-6},
    "mixtral": {"rope_theta": 1e6, "experts": 8, "experts_per_token": 2},
}
_REQUIRED = ("layers", "dims", "mlp_dims", "heads", "vocabulary", "block_size")


def rows_for(tokens: int) -> int:
    """Return the number of rows of the embedding for a tokenizer with ``tokens`` tokens.

    It is a multiple of 64, which makes matrix products faster.
    """
    return -(-tokens // 64) * 64


def find_shape(name: str, numbers: Mapping[str, Any] | None = None) -> Shape:
    """Return the shape with a name of :data:`NAMED`, or of a family, with ``numbers`` changed.

    The defaults are: ``kv_heads`` is ``heads``, ``head_dim`` is ``dims / heads``, ``init_std`` is
    sqrt(2 / (5 dims)) (Nguyen and Salazar, arXiv 1910.05895); other defaults are the family's.

    Args:
        name: "llama-15m", "qwen3-0.6b" and so on; or a family ("llama"), for which all numbers of
            :data:`_REQUIRED` must be given.
        numbers: numbers by the names of the fields of :class:`Shape`; None counts as not given.

    Raises:
        ConfigError: a name or number is unknown, a number is missing, or numbers do not match.
    """
    given = {key: value for key, value in (numbers or {}).items() if value is not None}
    known = [field.name for field in fields(Shape) if field.name != "family"]
    if unknown := sorted(set(given) - set(known)):
        hint = f"the numbers of a shape are {', '.join(known)}"
        raise ConfigError(
            f"a shape has no {', '.join(unknown)}",
            code="option-unknown",
            where=unknown[0],
            hint=hint,
        )
    if name not in NAMED and name not in FAMILIES:
        raise _unknown_name(name)
    family: str = NAMED[name]["family"] if name in NAMED else name
    values = {"family": family, **_FAMILY_DEFAULTS[family], **NAMED.get(name, {}), **given}
    if missing := [key for key in _REQUIRED if key not in values]:
        hint = f"give all of {', '.join(map(_flag, _REQUIRED))}, or take one of {', '.join(NAMED)}"
        if "block_size" in missing:
            hint += "; --block-size is the longest row that the model will read, and --max-seq-length follows it"
        raise ConfigError(
            f"there is no number of {', '.join(missing)}",
            code="option-missing",
            where=_flag(missing[0]),
            hint=hint,
        )
    return Shape(**_completed(values))


def _unknown_name(name: str) -> ConfigError:
    near = difflib.get_close_matches(name.lower(), [*NAMED, *FAMILIES], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    hint = f"{meant}there are {', '.join(NAMED)}; or a family with numbers of your own: {', '.join(FAMILIES)}"
    return ConfigError(
        f"no shape is called {name!r}", code="value-unknown", where="--shape", hint=hint
    )


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """Add the numbers that follow from other numbers (ConfigError if they cannot)."""
    dims, heads = values["dims"], values["heads"]
    _check_integer("dims", dims, 1)
    _check_integer("heads", heads, 1)
    if "head_dim" not in values and dims % heads:
        near = max(dims // heads, 1) * heads
        message = f"{dims} dims cannot be divided among {counted(heads, 'head')}"
        raise ConfigError(
            message,
            code="heads-not-divisible",
            where="--heads",
            hint=f"take {near} or {near + heads} dims, or give --head-dim, too",
        )
    return {
        "kv_heads": heads,
        "head_dim": dims // heads,
        "init_std": math.sqrt(2 / (5 * dims)),
        **values,
    }


def num_parameters(shape: Shape) -> int:
    """Return the number of parameters of a shape; a tied embedding counts once."""
    attention = 2 * shape.dims * shape.head_dim * (shape.heads + shape.kv_heads)
    norms = 2 * shape.dims + (2 * shape.head_dim if shape.family == "qwen3" else 0)
    mlp = 3 * shape.dims * shape.mlp_dims * (shape.experts or 1) + shape.dims * shape.experts
    tables = (1 if shape.tied else 2) * shape.vocabulary * shape.dims
    return tables + shape.layers * (attention + norms + mlp) + shape.dims


# --- config.json ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenIds:
    """Ids of the special tokens for config.json; None for a token that does not exist."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


def model_config(
    shape: Shape,
    vocabulary: int | None = None,
    ids: TokenIds | None = None,
    *,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return the config.json of a shape; mlx_lm and transformers build the same model from it.

    Args:
        vocabulary: number of tokens, in place of the shape's.
        ids: ids of the special tokens; ``None``: none.
        dtype: type in which the weights will be stored; one of :data:`DTYPES`.

    Raises:
        ConfigError: a special token is outside the vocabulary, or the dtype or vocabulary is
            invalid.
    """
    shape = shape if vocabulary is None else replace(shape, vocabulary=vocabulary)
    if dtype not in DTYPES:
        raise ConfigError(
            f"no dtype {dtype!r}",
            code="value-unknown",
            where="dtype",
            hint=f"choose one of {', '.join(DTYPES)}",
        )
    tokens = asdict(ids or TokenIds())
    for name, number in tokens.items():
        if number is not None and not 0 <= number < shape.vocabulary:
            message = f"token {number} ({name}) is not in a vocabulary of {shape.vocabulary}"
            raise ConfigError(
                message,
                code="value-out-of-range",
                where="vocabulary",
                hint="give the number of tokens that the tokenizer has",
            )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "hidden_size": shape.dims,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.mlp_dims,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.block_size,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "initializer_range": shape.init_std,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
        **{f"{name}_token_id": number for name, number in tokens.items()},
    }
    return config | _family_keys(shape)


def _family_keys(shape: Shape) -> dict[str, Any]:
    if shape.family == "mixtral":
        experts = {
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
        }
        return experts | {"sliding_window": None, "output_router_logits": False}
    bias: dict[str, Any] = {"attention_bias": False}
    return bias | (
        {"mlp_bias": False} if shape.family == "llama" else {"use_sliding_window": False}
    )
